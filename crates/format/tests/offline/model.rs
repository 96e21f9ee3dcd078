//! Random work on real files against a plain list of bytes.

use std::path::PathBuf;

use proptest::prelude::*;
use tapio_format::vhd::offline::{
    Chain, CheckOptions, Image, OpenOptions, Shape, SnapshotOptions, check_path, coalesce_path, create,
    resize_fast, resolve_parent, set_hidden, set_parent, snapshot,
};

use crate::build::Model;

const SECTOR: u64 = 512;
const MIB: u64 = 1 << 20;

#[derive(Clone, Debug)]
enum Step {
    Write {
        sector: u64,
        count: u64,
        value: u8,
    },
    Snapshot {
        keep_empty: bool,
    },
    /// Merge the leaf into its parent and take it out.
    CoalesceLeaf,
    /// Merge the image below the leaf into its parent and take it out.
    CoalesceInner,
    Grow,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u64..20_000, prop_oneof![1u64..64, 1u64..6000], 1u8..)
            .prop_map(|(sector, count, value)| Step::Write { sector, count, value }),
        3 => any::<bool>().prop_map(|keep_empty| Step::Snapshot { keep_empty }),
        1 => Just(Step::CoalesceLeaf),
        2 => Just(Step::CoalesceInner),
        1 => Just(Step::Grow),
    ]
}

/// A chain of files, and what the disk should hold.
struct Disk {
    dir: tempfile::TempDir,
    /// Base first.
    files: Vec<PathBuf>,
    made: usize,
    model: Model,
}

impl Disk {
    fn new(fixed: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("0.vhd");
        let shape = if fixed { Shape::Fixed } else { Shape::Dynamic };
        create(&base, &shape, 6 * MIB, if fixed { 0 } else { 64 * MIB }).unwrap();
        Self { dir, files: vec![base], made: 1, model: Model::new(6 * MIB) }
    }

    fn leaf(&self) -> &PathBuf {
        self.files.last().unwrap()
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Write { sector, count, value } => {
                let sectors = self.model.bytes.len() as u64 / SECTOR;
                let first = sector % sectors;
                let data = vec![value; (count.min(sectors - first) * SECTOR) as usize];
                let mut image = Image::open(self.leaf(), OpenOptions::WRITE).unwrap();
                image.write_at(first * SECTOR, &data).unwrap();
                image.commit().unwrap();
                self.model.write(first * SECTOR, &data);
            }
            Step::Snapshot { keep_empty } if self.files.len() < 8 => {
                let child = self.dir.path().join(format!("{}.vhd", self.made));
                self.made += 1;
                let options = SnapshotOptions { keep_empty, len_max: 64 * MIB, ..Default::default() };
                let parent = snapshot(&child, self.leaf(), &options).unwrap();
                // An empty leaf is passed over and is then in nobody's chain.
                while self.leaf().file_name() != parent.file_name() {
                    self.files.pop();
                }
                set_hidden(&mut Image::open(self.leaf(), OpenOptions::WRITE).unwrap(), 1).unwrap();
                self.files.push(child);
            }
            Step::CoalesceLeaf if self.files.len() > 1 => {
                coalesce_path(self.leaf(), false, |_, _| ()).unwrap();
                std::fs::remove_file(self.files.pop().unwrap()).unwrap();
                set_hidden(&mut Image::open(self.leaf(), OpenOptions::WRITE).unwrap(), 0).unwrap();
            }
            Step::CoalesceInner if self.files.len() > 2 => {
                let inner = self.files.remove(self.files.len() - 2);
                coalesce_path(&inner, true, |_, _| ()).unwrap();
                let mut leaf = Image::open(self.leaf(), OpenOptions::WRITE).unwrap();
                set_parent(&mut leaf, &self.files[self.files.len() - 2], false).unwrap();
                std::fs::remove_file(inner).unwrap();
                let link = resolve_parent(&leaf).unwrap();
                assert_eq!(link.path().unwrap().file_name(), self.files[self.files.len() - 2].file_name());
            }
            Step::Grow if self.files.len() > 1 && self.model.bytes.len() < 60 << 20 => {
                let len = self.model.bytes.len() as u64 + 4 * MIB;
                resize_fast(&mut Image::open(self.leaf(), OpenOptions::WRITE).unwrap(), len).unwrap();
                self.model.bytes.resize(len as usize, 0);
            }
            _ => {}
        }
    }

    fn verify(&self) {
        let options = CheckOptions { parents: true, bitmaps: true, ..Default::default() };
        let reports = check_path(self.leaf(), &options).unwrap();
        assert_eq!(reports.len(), self.files.len());
        for report in &reports {
            assert!(report.is_valid(), "{report:?}");
        }
        let chain = Chain::open(self.leaf()).unwrap();
        assert_eq!(chain.virtual_len(), self.model.bytes.len() as u64);
        let mut piece = vec![0; MIB as usize];
        for (index, expected) in self.model.bytes.chunks(piece.len()).enumerate() {
            chain.read_at(index as u64 * MIB, &mut piece[..expected.len()]).unwrap();
            assert!(piece[..expected.len()] == *expected, "mebibyte {index} differs");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn chains_hold_what_was_written(fixed in any::<bool>(), steps in prop::collection::vec(step(), 1..25)) {
        let mut disk = Disk::new(fixed);
        for step in &steps {
            disk.take(step);
        }
        disk.verify();
    }
}
