//! Random work on real files against a plain list of bytes.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tapio_format::vhd::offline::{
    Chain, CheckOptions, Image, OpenOptions, Shape, SnapshotOptions, check_path, coalesce_path, create,
    resize_fast, resolve_parent, set_hidden, set_parent, snapshot,
};

use crate::build::Model;

const SECTOR: u64 = 512;
const MIB: u64 = 1 << 20;
const BLOCK_SECTORS: u64 = 4096;

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
    Grow {
        sectors: u64,
    },
}

/// What the chain stands on.
#[derive(Clone, Copy, Debug)]
enum Base {
    Fixed,
    Dynamic,
    /// A raw file, with this many bytes behind the last whole sector.
    Raw {
        rest: u64,
    },
}

fn base() -> impl Strategy<Value = Base> {
    prop_oneof![
        1 => Just(Base::Fixed),
        2 => Just(Base::Dynamic),
        2 => prop_oneof![Just(0u64), 1u64..SECTOR].prop_map(|rest| Base::Raw { rest }),
    ]
}

/// Sizes in sectors: whole blocks are the exception.
fn sectors() -> impl Strategy<Value = u64> {
    prop_oneof![Just(3 * BLOCK_SECTORS), 2 * BLOCK_SECTORS + 1..3 * BLOCK_SECTORS, Just(20_472u64)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u64..20_000, prop_oneof![1u64..64, 1u64..6000], 1u8..)
            .prop_map(|(sector, count, value)| Step::Write { sector, count, value }),
        3 => any::<bool>().prop_map(|keep_empty| Step::Snapshot { keep_empty }),
        1 => Just(Step::CoalesceLeaf),
        2 => Just(Step::CoalesceInner),
        1 => (1u64..3 * BLOCK_SECTORS).prop_map(|sectors| Step::Grow { sectors }),
    ]
}

/// A chain of files, and what the disk should hold.
struct Disk {
    dir: tempfile::TempDir,
    /// Base first.
    files: Vec<PathBuf>,
    made: usize,
    model: Model,
    /// The bytes of the base, if it is raw.
    raw_len: Option<u64>,
}

impl Disk {
    fn new(base: Base, sectors: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.vhd");
        let len = sectors * SECTOR;
        let mut disk =
            Self { dir, files: vec![path.clone()], made: 1, model: Model::new(len), raw_len: None };
        match base {
            Base::Fixed => create(&path, &Shape::Fixed, len, 0).unwrap(),
            Base::Dynamic => create(&path, &Shape::Dynamic, len, 64 * MIB).unwrap(),
            Base::Raw { rest } => {
                let file = std::fs::File::create(&path).unwrap();
                file.set_len(len + rest).unwrap();
                // No part of the disk, whatever it holds.
                file.write_all_at(&vec![0x5a; rest as usize], len).unwrap();
                let child = disk.dir.path().join("1.vhd");
                let options = SnapshotOptions { raw_parent: true, len_max: 64 * MIB, ..Default::default() };
                snapshot(&child, &path, &options).unwrap();
                assert_eq!(recorded_len(&child), len + rest, "a child has the size of its raw parent");
                (disk.raw_len, disk.made) = (Some(len + rest), 2);
                disk.files.push(child);
            }
        }
        disk
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
                let len = recorded_len(self.leaf());
                let parent = snapshot(&child, self.leaf(), &options).unwrap();
                assert_eq!(recorded_len(&child), len, "a child has the size of what it is a snapshot of");
                // An empty leaf is passed over, and is then in no chain.
                while self.leaf().file_name() != parent.file_name() {
                    self.files.pop();
                }
                if !self.is_raw(self.files.len() - 1) {
                    set_hidden(&mut Image::open(self.leaf(), OpenOptions::WRITE).unwrap(), 1).unwrap();
                }
                self.files.push(child);
            }
            Step::CoalesceLeaf if self.files.len() > 1 + usize::from(self.raw_len.is_some()) => {
                self.coalesce(self.files.len() - 1, false);
                std::fs::remove_file(self.files.pop().unwrap()).unwrap();
                set_hidden(&mut Image::open(self.leaf(), OpenOptions::WRITE).unwrap(), 0).unwrap();
            }
            Step::CoalesceInner if self.files.len() > 2 => {
                self.coalesce(self.files.len() - 2, true);
                let inner = self.files.remove(self.files.len() - 2);
                let mut leaf = Image::open(self.leaf(), OpenOptions::WRITE).unwrap();
                let parent = self.files.len() - 2;
                set_parent(&mut leaf, &self.files[parent], self.is_raw(parent)).unwrap();
                std::fs::remove_file(inner).unwrap();
                let link = resolve_parent(&leaf).unwrap();
                assert_eq!(link.path().unwrap().file_name(), self.files[self.files.len() - 2].file_name());
            }
            Step::Grow { sectors } if self.files.len() > 1 && self.model.bytes.len() < 50 << 20 => {
                let len = self.model.bytes.len() as u64 + sectors * SECTOR;
                resize_fast(&mut Image::open(self.leaf(), OpenOptions::WRITE).unwrap(), len).unwrap();
                assert_eq!(recorded_len(self.leaf()), len);
                self.model.bytes.resize(len as usize, 0);
            }
            _ => {}
        }
    }

    /// Whether the image at this place, counted from the base, is a raw file.
    fn is_raw(&self, index: usize) -> bool {
        index == 0 && self.raw_len.is_some()
    }

    /// Merges the image at this place into the one below it, which becomes larger only where it was smaller.
    fn coalesce(&mut self, index: usize, sparse: bool) {
        let len_of = |disk: &Self| match disk.is_raw(index - 1) {
            true => std::fs::metadata(&disk.files[0]).unwrap().len(),
            false => recorded_len(&disk.files[index - 1]),
        };
        let wanted = recorded_len(&self.files[index]) / SECTOR * SECTOR;
        let before = len_of(self);
        coalesce_path(&self.files[index], sparse, |_, _| ()).unwrap();
        let after = len_of(self);
        assert_eq!(after, before.max(wanted), "a parent of {before} bytes after a child of {wanted}");
    }

    fn verify(&self) {
        let options = CheckOptions { parents: true, bitmaps: true, ..Default::default() };
        let reports = check_path(self.leaf(), &options).unwrap();
        assert_eq!(reports.len() + usize::from(self.raw_len.is_some()), self.files.len());
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

/// The size in an image's footer, to the byte.
fn recorded_len(path: &Path) -> u64 {
    Image::open(path, OpenOptions::READ).unwrap().footer().current_len
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn chains_hold_what_was_written(
        base in base(),
        sectors in sectors(),
        steps in prop::collection::vec(step(), 1..25),
    ) {
        let mut disk = Disk::new(base, sectors);
        for step in &steps {
            disk.take(step);
        }
        disk.verify();
    }
}
