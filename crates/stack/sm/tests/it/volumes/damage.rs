//! Damage among the volumes of an SR, each kind made and found; nothing else is found, and nothing is changed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use tapio_format::vhd::offline::{Image, OpenOptions, ParentFacts, set_hidden, set_parent_facts};
use tapio_format::vhd::{KeyHash, time};
use tapio_sm::{ForkKind, OddityKind, Sr};
use tapio_types::Access;
use uuid::Uuid;

use super::kills::dies_at_step;
use super::stories::before;
use super::{MIB, Volumes};
use crate::support::{Watch, fork, make, write};

/// An SR with a VDI on two base copies, a snapshot of it, and a VDI beside it.
struct Sound {
    place: Volumes,
    sr: Box<dyn Sr>,
    vdi: Uuid,
    snapshot: Uuid,
    beside: Uuid,
}

impl Sound {
    fn new() -> Option<Self> {
        let place = Volumes::new()?;
        let sr = place.create();
        let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
        write(sr.as_ref(), vdi, 0, 1);
        fork(sr.as_ref(), vdi, ForkKind::Snapshot);
        write(sr.as_ref(), vdi, 0, 2);
        let snapshot = fork(sr.as_ref(), vdi, ForkKind::Snapshot).made.uuid;
        let beside = make(sr.as_ref(), 8 * MIB, "vhd");
        Some(Self { place, sr, vdi, snapshot, beside })
    }

    /// The base copy below an image.
    fn parent(&self, image: Uuid) -> Uuid {
        self.sr.vdi(&Watch::default(), image).unwrap().parent.expect("it has one")
    }

    fn volume(&self, image: Uuid) -> String {
        format!("VHD-{image}")
    }

    /// Does something to the image of a VDI.
    fn with(&self, image: Uuid, damage: impl FnOnce(&mut Image<tapio_format::FileMedium>)) {
        let ctx = Watch::default();
        let leaf = self.vdi;
        let with = self.sr.activate(&ctx, leaf, Access::ReadWrite).unwrap();
        let beside = self.sr.activate(&ctx, self.beside, Access::ReadWrite).unwrap();
        let path = self.place.host.path(&self.volume(image));
        let mut open = Image::open(&path, OpenOptions::WRITE).unwrap();
        damage(&mut open);
        drop((open, with, beside));
        for vdi in [leaf, self.beside] {
            self.sr.deactivate(&ctx, vdi).unwrap();
        }
    }

    /// Looks at the image of a VDI that only readers have.
    fn with_reader(&self, vdi: Uuid, look: impl FnOnce(&Image<tapio_format::FileMedium>)) {
        let ctx = Watch::default();
        self.sr.activate(&ctx, vdi, Access::ReadOnly).unwrap();
        look(&Image::open(&self.place.host.path(&self.volume(vdi)), OpenOptions::READ).unwrap());
        self.sr.deactivate(&ctx, vdi).unwrap();
    }

    /// Writes into the volume of the VDI that lies beside.
    fn overwrite(&self, bytes: &[u8], at: u64) {
        let ctx = Watch::default();
        self.sr.activate(&ctx, self.beside, Access::ReadWrite).unwrap();
        let path = self.place.host.path(&self.volume(self.beside));
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(bytes, at).unwrap();
        file.sync_all().unwrap();
        drop(file);
        // It may be refused by now.
        let _ = self.sr.deactivate(&ctx, self.beside);
    }

    /// Kinds that are found, with the VDIs.
    fn found(&self) -> Vec<(OddityKind, Option<Uuid>)> {
        let odd = self.sr.inspect(&Watch::default()).unwrap();
        odd.into_iter().map(|odd| (odd.kind, odd.image)).collect()
    }
}

#[test]
fn a_sound_sr_has_nothing_odd() {
    let Some(it) = Sound::new() else { return };
    assert_eq!(it.found(), []);
    it.place.check(it.sr.as_ref(), "looked at");
}

#[test]
fn each_kind_of_damage_is_found() {
    type Damage = (&'static str, fn(&Sound) -> (OddityKind, Uuid));
    let damages: [Damage; 8] = [
        ("a parent that is gone", |it| {
            let base = it.parent(it.vdi);
            let lower = it.parent(base);
            it.place.host.rename(&it.volume(lower), "away");
            (OddityKind::ParentMissing, base)
        }),
        ("a parent that is another image", |it| {
            let base = it.parent(it.vdi);
            it.with(it.vdi, |image| {
                let facts = ParentFacts {
                    uuid: Uuid::new_v4(),
                    timestamp: time::now(),
                    relative_path: format!("./VHD-{base}"),
                    name: format!("VHD-{base}"),
                    key_hash: KeyHash::default(),
                };
                set_parent_facts(image, &facts).unwrap();
            });
            (OddityKind::ParentReplaced, it.vdi)
        }),
        ("a table that leads behind the end", |it| {
            it.overwrite(&[0, 0, 0, 8, 0, 0, 0, 8], 1536);
            (OddityKind::ImageDamaged, it.beside)
        }),
        ("a header of nothing", |it| {
            it.overwrite(&[0x55; 512], 512);
            (OddityKind::ImageDamaged, it.beside)
        }),
        ("a base copy of nothing", |it| {
            it.with(it.beside, |image| set_hidden(image, 1).unwrap());
            (OddityKind::BaseUnused, it.beside)
        }),
        ("an image that is not whole", |it| {
            it.place.host.rename(&it.volume(it.beside), &format!("NEW-{}", it.beside));
            (OddityKind::FileUnfinished, it.beside)
        }),
        ("an image that a merge replaced", |it| {
            it.place.host.rename(&it.volume(it.beside), &format!("VHD-OLD_{}", it.beside));
            (OddityKind::FileUnfinished, it.beside)
        }),
        ("parents in a circle", |it| {
            let uuid_of = |image: Uuid| {
                let mut uuid = Uuid::nil();
                it.with(image, |image| uuid = image.footer().uuid);
                uuid
            };
            let of_leaf = uuid_of(it.vdi);
            let lead = |image: Uuid, to: Uuid, footer: Uuid| {
                let name = format!("VHD-{to}");
                let facts = ParentFacts {
                    uuid: footer,
                    timestamp: time::now(),
                    relative_path: format!("./{name}"),
                    name,
                    key_hash: KeyHash::default(),
                };
                it.with(image, |image| set_parent_facts(image, &facts).unwrap());
            };
            let mut of_snapshot = Uuid::nil();
            it.with_reader(it.snapshot, |image| of_snapshot = image.footer().uuid);
            lead(it.vdi, it.snapshot, of_snapshot);
            lead(it.snapshot, it.vdi, of_leaf);
            (OddityKind::ParentLoop, it.vdi)
        }),
    ];
    for (what, damage) in damages {
        let Some(it) = Sound::new() else { return };
        let (kind, image) = damage(&it);
        let before = it.place.names();
        let found = it.found();
        assert!(found.contains(&(kind, Some(image))), "{what}: {found:?}");
        assert_eq!(it.place.names(), before, "{what}");
    }
}

#[test]
fn what_a_kill_left_is_found() {
    let Some(before) = before("fork-clone") else { return };
    let sr = before.place.attach(&Watch::default());
    assert!(dies_at_step(&before, "fork-clone", "lv:fork-journal"));
    before.place.host.reload().unwrap();
    let odd = sr.inspect(&Watch::default()).unwrap();
    let kinds: Vec<_> = odd.iter().map(|odd| odd.kind).collect();
    let journal = odd.iter().find(|odd| odd.kind == OddityKind::JournalLeft).expect("a journal");
    assert_eq!(journal.image, Some(before.vdi));
    assert!(kinds.contains(&OddityKind::FileUnfinished), "{odd:?}");
    // A scan puts it in order.
    before.place.check(sr.as_ref(), "scanned");
    assert!(sr.inspect(&Watch::default()).unwrap().is_empty());
}

#[test]
fn a_lock_that_another_process_keeps_is_found_at_once() {
    let Some(it) = Sound::new() else { return };
    let ctx = Watch::default();
    let file = File::open(it.place.host.path("MGT")).unwrap();
    file.try_lock().expect("no operation holds it");
    let mut child = Command::new("sleep").arg("600").stdin(Stdio::from(file)).spawn().unwrap();
    let odd = it.sr.inspect(&ctx).unwrap();
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(odd.len(), 1, "{odd:?}");
    assert!(
        odd[0].kind == OddityKind::LockKept && odd[0].detail.contains(&child.id().to_string()),
        "{odd:?}"
    );
    assert_eq!(it.found(), []);
}
