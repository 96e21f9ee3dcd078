//! Base copies and disks that go into their parents: undisturbed, under running disks, and with whatever can refuse.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tapio_format::vhd::KeyHash;
use tapio_format::vhd::offline::{CheckOptions, Image, OpenOptions, check_path, set_hidden, set_key_hash};
use tapio_sm::{ForkKind, Found, Merge, MergeJournal, MergeKind, Sr};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use crate::support::{Disk, Place, Watch, blocks_of, byte_of, fork, make, read, write};

const MIB: u64 = 1 << 20;

/// Base copy with 1 at 0, base copy with 2 at 512 and 3 at 4 MiB, on it a VDI with 4 at 1024 and a snapshot.
struct Chain {
    place: Place,
    sr: Box<dyn Sr>,
    vdi: Uuid,
    snapshot: Uuid,
    merge: Merge,
}

fn chain(format: &str) -> Chain {
    let place = Place::new();
    let sr = place.create();
    let vdi = make(sr.as_ref(), 8 * MIB, format);
    write(sr.as_ref(), vdi, 0, 1);
    let parent = fork(sr.as_ref(), vdi, ForkKind::Single).base.unwrap().uuid;
    write(sr.as_ref(), vdi, 512, 2);
    write(sr.as_ref(), vdi, 4 * MIB, 3);
    let made = fork(sr.as_ref(), vdi, ForkKind::Snapshot);
    write(sr.as_ref(), vdi, 1024, 4);
    let (image, snapshot) = (made.base.unwrap().uuid, made.made.uuid);
    Chain { place, sr, vdi, snapshot, merge: Merge { image, parent, held: vec![vdi, snapshot] } }
}

impl Chain {
    fn refused(&self, what: &str) -> String {
        let ctx = Watch::default();
        let merged = self.sr.merge(&ctx, &self.merge, 0).and_then(|()| self.sr.relink(&ctx, &self.merge));
        let error = merged.expect_err(what);
        assert!(self.place.files().iter().all(|name| name.contains('.')), "{what}: no journal is left");
        format!("{}: {}", error.code, error.params.join(" "))
    }

    fn check(&self) {
        check_all(&self.place);
        let data = |vdi| [0, 512, 1024, 4 * MIB].map(|at| read(self.sr.as_ref(), vdi, at));
        assert_eq!((data(self.vdi), data(self.snapshot)), ([1, 2, 4, 3], [1, 2, 0, 3]));
    }
}

fn check_all(place: &Place) {
    for name in place.files().iter().filter(|name| name.ends_with(".vhd")) {
        for report in check_path(&place.images().join(name), &CheckOptions::default()).unwrap() {
            assert!(report.is_valid(), "{name}: {report:?}");
        }
    }
}

fn change(chain: &Chain, image: Uuid, change: impl FnOnce(&mut Image<tapio_format::FileMedium>)) {
    let path = chain.place.images().join(format!("{image}.vhd"));
    change(&mut Image::open(&path, OpenOptions::WRITE).unwrap());
}

#[test]
fn a_base_copy_goes_and_its_disks_keep_their_data() {
    for format in ["vhd", "raw"] {
        let chain = chain(format);
        let ctx = Watch::default();
        let cost = chain.sr.merge_cost(&ctx, &chain.merge).unwrap();
        let missing = if format == "vhd" { 1 } else { 2 };
        assert!((missing * 2 * MIB..(missing * 2 + 1) * MIB).contains(&cost.needs), "{cost:?}");
        assert_eq!((cost.copies, cost.must_grow), (4 * MIB, false));
        chain.sr.merge(&ctx, &chain.merge, 0).unwrap();
        chain.check();
        assert_eq!(chain.sr.scan(&ctx).unwrap().len(), 4, "nothing is different yet");
        let steps = ctx.steps.lock().unwrap().len();
        chain.sr.merge(&ctx, &chain.merge, 0).unwrap();
        assert_eq!(ctx.steps.lock().unwrap().len(), steps, "it is not copied twice");
        let merged = chain.sr.relink(&ctx, &chain.merge).unwrap();
        assert_eq!(merged.gone, [chain.merge.image]);
        for info in &merged.changed {
            let parent = (info.uuid != chain.merge.parent).then_some(chain.merge.parent);
            assert_eq!((info.parent, info.managed), (parent, parent.is_some()), "{format}");
        }
        assert_eq!(merged.changed.len(), 3);
        chain.check();
        let mut found: Vec<_> = chain.sr.scan(&ctx).unwrap().into_iter().map(|info| info.uuid).collect();
        let mut left = [chain.vdi, chain.snapshot, chain.merge.parent];
        found.sort();
        left.sort();
        assert_eq!(found, left);
        assert_eq!(chain.place.files().len(), 3, "{:?}", chain.place.files());
        // And the SR goes on.
        fork(chain.sr.as_ref(), chain.vdi, ForkKind::Snapshot);
        chain.sr.destroy(&ctx, chain.snapshot).unwrap();
        assert_eq!(chain.place.attach().scan(&ctx).unwrap().len(), 4);
    }
}

#[test]
fn running_disks_go_on_above_the_parent() {
    let chain = chain("vhd");
    let ctx = Watch::default();
    let open = |vdi, access| {
        let disk = Arc::new(Disk::start(&chain.sr.activate(&ctx, vdi, access).unwrap()));
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        disk
    };
    let (writer, other) = (open(chain.vdi, Access::ReadWrite), open(chain.snapshot, Access::ReadWrite));
    chain.sr.merge(&ctx, &chain.merge, 0).unwrap();
    writer.write(6 * MIB, 7);
    assert_eq!(writer.pauses.load(Ordering::Relaxed), 0, "a copy closes nothing");
    chain.sr.relink(&ctx, &chain.merge).unwrap();
    writer.write(7 * MIB, 8);
    for disk in [&writer, &other] {
        assert_eq!(disk.pauses.load(Ordering::Relaxed), 1);
        let (chain_now, leaf) = disk.open.lock().unwrap().take().unwrap();
        drop(leaf);
        assert_eq!(chain_now.layers.len(), 2);
        assert_eq!([0, 512, 4 * MIB].map(|at| byte_of(&chain_now, at)), [1, 2, 3]);
    }
    ctx.live.lock().unwrap().clear();
    for vdi in [chain.vdi, chain.snapshot] {
        chain.sr.deactivate(&ctx, vdi).unwrap();
    }
    chain.check();
    assert_eq!([6, 7].map(|at| read(chain.sr.as_ref(), chain.vdi, at * MIB)), [7, 8]);
}

#[test]
fn a_disk_that_does_not_go_on_is_tried_again_by_the_next_scan() {
    let chain = chain("vhd");
    let ctx = Watch::default();
    let disk = Disk::start(&chain.sr.activate(&ctx, chain.vdi, Access::ReadWrite).unwrap());
    let disk = Arc::new(disk);
    ctx.live.lock().unwrap().insert(chain.vdi, Arc::clone(&disk));
    chain.sr.merge(&ctx, &chain.merge, 0).unwrap();
    disk.refuses_resume.store(2, Ordering::Relaxed);
    let error = chain.sr.relink(&ctx, &chain.merge).unwrap_err();
    assert!(error.to_string().contains("no resume"), "{error}");
    assert!(disk.open.lock().unwrap().is_none());
    let found = chain.sr.scan(&ctx).unwrap();
    assert_eq!((found.len(), chain.place.files().len()), (3, 3), "the journal led to the end");
    disk.write(2 * MIB, 9);
    disk.close();
    ctx.live.lock().unwrap().clear();
    chain.check();
}

#[test]
fn what_is_not_held_or_is_read_refuses() {
    let mut chain = chain("vhd");
    let held = std::mem::replace(&mut chain.merge.held, vec![chain.vdi]);
    assert!(chain.refused("one is not held").starts_with("VDI_IN_USE"));
    chain.merge.held = held;
    let ctx = Watch::default();
    chain.sr.activate(&ctx, chain.snapshot, Access::ReadOnly).unwrap();
    assert!(chain.refused("a copy reads one").contains(&chain.snapshot.to_string()));
    chain.sr.deactivate(&ctx, chain.snapshot).unwrap();
    chain.check();
    chain.sr.merge(&ctx, &chain.merge, 0).unwrap();
    chain.sr.relink(&ctx, &chain.merge).unwrap();
    chain.check();
}

#[test]
fn what_would_change_a_disk_is_refused() {
    let ctx = Watch::default();
    // Something else needs the parent.
    let chain1 = chain("vhd");
    let child = chain1.place.images().join(format!("{}.vhd", Uuid::new_v4()));
    let parent = chain1.place.images().join(format!("{}.vhd", chain1.merge.parent));
    tapio_format::vhd::offline::snapshot(&child, &parent, &Default::default()).unwrap();
    assert!(chain1.refused("two children").contains("is based on"));
    std::fs::remove_file(child).unwrap();
    // An image whose parent is not known.
    let odd = chain1.place.images().join(format!("{}.vhd", Uuid::new_v4()));
    std::fs::write(&odd, [7; 4096]).unwrap();
    assert!(chain1.refused("damage").contains("cannot be read"));
    assert!(chain1.sr.collect_garbage(&ctx).unwrap().is_empty());
    std::fs::remove_file(odd).unwrap();
    // Encrypted with another key.
    let mut set = None;
    change(&chain1, chain1.merge.image, |image| {
        set = Some(set_key_hash(image, KeyHash::of([1; 32], &[2; 32])));
    });
    set.unwrap().unwrap();
    assert!(chain1.refused("keys").contains("same key"));
    change(&chain1, chain1.merge.image, |image| set_key_hash(image, KeyHash::default()).unwrap());
    // A disk of its own below.
    change(&chain1, chain1.merge.parent, |image| set_hidden(image, 0).unwrap());
    assert!(chain1.refused("not hidden").contains("disk of its own"));
    change(&chain1, chain1.merge.parent, |image| set_hidden(image, 1).unwrap());
    // Another storage manager is at work on it.
    let journal = chain1.place.images().join(format!("relink_{}", chain1.merge.image));
    std::fs::write(&journal, "1").unwrap();
    let error = chain1.sr.merge(&ctx, &chain1.merge, 0).unwrap_err();
    assert!(error.to_string().contains("another storage manager"), "{error}");
    std::fs::remove_file(journal).unwrap();
    // Not copied, or changed since.
    let not_copied = |what: &str| {
        let error = chain1.sr.relink(&ctx, &chain1.merge).unwrap_err();
        assert!(error.to_string().contains("merge it again"), "{what}: {error}");
    };
    not_copied("never");
    chain1.sr.merge(&ctx, &chain1.merge, 0).unwrap();
    change(&chain1, chain1.merge.image, |image| {
        image.write_at(2 * MIB, &[9; 512]).unwrap();
        image.finish().unwrap();
    });
    not_copied("changed");
    chain1.sr.merge(&ctx, &chain1.merge, 0).unwrap();
    chain1.sr.relink(&ctx, &chain1.merge).unwrap();
    chain1.check();
    assert_eq!(read(chain1.sr.as_ref(), chain1.snapshot, 2 * MIB), 9);
}

#[test]
fn a_parent_whose_table_is_full_grows_first() {
    let mut chain = chain("vhd");
    let ctx = Watch::default();
    let larger = chain.sr.resize(&ctx, chain.vdi, 4096 * MIB).unwrap().virtual_size;
    write(chain.sr.as_ref(), chain.vdi, 4095 * MIB, 6);
    let made = fork(chain.sr.as_ref(), chain.vdi, ForkKind::Snapshot);
    chain.sr.destroy(&ctx, chain.snapshot).unwrap();
    // What is below the larger base copy becomes one image first.
    chain.merge.held = vec![chain.vdi, made.made.uuid];
    chain.sr.merge(&ctx, &chain.merge, 0).unwrap();
    chain.sr.relink(&ctx, &chain.merge).unwrap();
    chain.merge.image = made.base.unwrap().uuid;
    assert!(chain.sr.merge_cost(&ctx, &chain.merge).unwrap().must_grow);
    assert!(chain.refused("too small").contains("grow first"));
    let mut merge = chain.merge.clone();
    merge.held.pop();
    assert_eq!(chain.sr.grow_base(&ctx, &merge).unwrap_err().code, "VDI_IN_USE");
    chain.sr.grow_base(&ctx, &chain.merge).unwrap();
    assert_eq!(chain.sr.vdi(&ctx, chain.merge.parent).unwrap().virtual_size, larger);
    assert!(!chain.sr.merge_cost(&ctx, &chain.merge).unwrap().must_grow);
    chain.sr.merge(&ctx, &chain.merge, 0).unwrap();
    chain.sr.relink(&ctx, &chain.merge).unwrap();
    chain.snapshot = made.made.uuid;
    check_all(&chain.place);
    for vdi in [chain.vdi, chain.snapshot] {
        let data = [0, 512, 1024, 4 * MIB, 4095 * MIB].map(|at| read(chain.sr.as_ref(), vdi, at));
        assert_eq!(data, [1, 2, 4, 3, 6]);
    }
}

#[test]
fn a_copy_keeps_its_rate_and_ends_when_it_is_cancelled() {
    let chain = chain("vhd");
    change(&chain, chain.merge.image, |image| {
        image.write_at(2 * MIB, &vec![8; 2 * MIB as usize]).unwrap();
        image.finish().unwrap();
    });
    // The second megabytes wait until the first are due.
    let began = Instant::now();
    chain.sr.merge(&Watch::default(), &chain.merge, 8 * MIB).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(250), "{:?}", began.elapsed());
    change(&chain, chain.merge.image, |image| {
        image.write_at(2 * MIB, &vec![9; 2 * MIB as usize]).unwrap();
        image.finish().unwrap();
    });
    let ctx = Watch { cancel_at: Some("merge:half"), ..Watch::default() };
    let error: ApiError = chain.sr.merge(&ctx, &chain.merge, 1).unwrap_err();
    assert_eq!(error.code, "TASK_CANCELLED");
    assert_eq!(read(chain.sr.as_ref(), chain.vdi, 3 * MIB), 9);
    chain.check();
    assert!(chain.sr.relink(&Watch::default(), &chain.merge).is_err(), "half a copy is none");
    chain.sr.merge(&Watch::default(), &chain.merge, 0).unwrap();
    chain.sr.relink(&Watch::default(), &chain.merge).unwrap();
    chain.check();
    assert_eq!(read(chain.sr.as_ref(), chain.vdi, 3 * MIB), 9);
}

#[test]
fn base_copies_that_carry_nothing_go() {
    let chain = chain("vhd");
    let ctx = Watch::default();
    for vdi in [chain.vdi, chain.snapshot] {
        std::fs::remove_file(chain.place.images().join(format!("{vdi}.vhd"))).unwrap();
    }
    let mut gone = chain.sr.collect_garbage(&ctx).unwrap();
    gone.sort();
    let mut all = [chain.merge.image, chain.merge.parent];
    all.sort();
    assert_eq!(gone, all);
    assert_eq!(chain.place.files(), [""; 0]);
}

#[test]
fn a_disk_goes_into_its_base_copy_and_keeps_its_name_and_log() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    sr.track_changes(&ctx, vdi, true).unwrap();
    let made = fork(sr.as_ref(), vdi, ForkKind::Snapshot);
    let (first, base) = (made.made.uuid, made.base.unwrap().uuid);
    let merge = Merge { image: vdi, parent: base, held: vec![vdi] };
    assert!(sr.merge_leaf(&ctx, &merge).unwrap_err().to_string().contains("is based on"));
    sr.destroy_data(&ctx, first).unwrap();
    let disk = Arc::new(Disk::start(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap()));
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    disk.write(4 * MIB, 2);
    let not_held = Merge { held: Vec::new(), ..merge.clone() };
    assert_eq!(sr.merge_leaf(&ctx, &not_held).unwrap_err().code, "VDI_IN_USE");
    let merged = sr.merge_leaf(&ctx, &merge).unwrap();
    assert_eq!((merged.gone, merged.changed.len()), (vec![base], 1));
    assert_eq!((merged.changed[0].parent, merged.changed[0].managed), (None, true));
    disk.write(6 * MIB, 3);
    assert_eq!(disk.open.lock().unwrap().as_ref().unwrap().0.layers.len(), 1);
    disk.close();
    ctx.live.lock().unwrap().clear();
    sr.deactivate(&ctx, vdi).unwrap();
    assert_eq!([0, 4, 6].map(|at| read(sr.as_ref(), vdi, at * MIB)), [1, 2, 3]);
    check_all(&place);
    let last = fork(sr.as_ref(), vdi, ForkKind::Snapshot).made.uuid;
    let listed = blocks_of(&sr.changed_blocks(&ctx, first, last).unwrap());
    assert_eq!(listed.into_iter().collect::<Vec<_>>(), [64, 96], "what was written since, and no more");
}

#[test]
fn a_disk_that_holds_much_or_would_become_raw_stays() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let raw = make(sr.as_ref(), 8 * MIB, "raw");
    let parent = fork(sr.as_ref(), raw, ForkKind::Single).base.unwrap().uuid;
    let error = sr.merge_leaf(&ctx, &Merge { image: raw, parent, held: vec![raw] }).unwrap_err();
    assert!(error.to_string().contains("is raw"), "{error}");
    let vdi = make(sr.as_ref(), 256 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    let parent = fork(sr.as_ref(), vdi, ForkKind::Single).base.unwrap().uuid;
    let path = place.images().join(format!("{vdi}.vhd"));
    let mut image = Image::open(&path, OpenOptions::WRITE).unwrap();
    for at in 0..50 {
        image.write_at(at * 2 * MIB, &vec![1; 2 * MIB as usize]).unwrap();
    }
    image.finish().unwrap();
    drop(image);
    let error = sr.merge_leaf(&ctx, &Merge { image: vdi, parent, held: vec![vdi] }).unwrap_err();
    assert!(error.to_string().contains("too much"), "{error}");
}

#[test]
fn our_journals_are_whole_before_anything_changes() {
    // Of another image than the one that is there: nothing is done, and it goes.
    let chain = chain("vhd");
    let (image, parent) = (Uuid::new_v4(), chain.merge.parent);
    let journal = MergeJournal { kind: MergeKind::Relink, image, parent };
    assert_eq!(MergeJournal::decode(&journal.file_name(), b""), Some(Found::NotWhole));
    for content in [journal.encode(), String::new()] {
        std::fs::write(chain.place.images().join(journal.file_name()), content).unwrap();
        assert_eq!(chain.place.attach().scan(&Watch::default()).unwrap().len(), 4);
        assert_eq!(chain.place.files().len(), 4);
        chain.check();
    }
}
