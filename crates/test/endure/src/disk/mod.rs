//! Legs with a disk: a real disk process under verified load, and a schedule of what happens to it.

mod actions;
mod changes;
mod faults;
mod leftovers;
mod storage;
mod subject;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use tapio_e2e::disk::{text, vhd_util};
use tapio_e2e::scratch::Scratch;

use self::actions::Action;
use self::storage::Storage;
use self::subject::{Image, Outcome, Setup, Subject};
use crate::load::{Worker, verify};
use crate::model::SECTOR_LEN;
use crate::report::{Finding, Report, words_of};

/// Connections to a disk.
const CLIENTS: u32 = 2;

const MIB: u64 = 1 << 20;

/// What stands behind the last sector of a raw image: it is no part of the disk.
const ODD_END: &[u8] = &[0x5a; 333];

/// A kind of disk and what is done to it.
#[derive(Debug)]
pub struct DiskKind {
    /// Its name on the command line.
    pub name: &'static str,
    /// For people.
    pub about: &'static str,
    /// Whether it runs when no leg is named.
    pub by_default: bool,
    /// Number of the disk in what it holds.
    disk: u16,
    base: Base,
    actions: &'static [(&'static str, u64)],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    Raw,
    /// A raw image of a length that is not whole sectors.
    Odd,
    Vhd,
    Fixed,
    Encrypted,
    /// A VHD on a file system that is filled up.
    Small,
    /// A raw image on a storage that fails and hangs.
    FaultyRaw,
    /// A VHD on a device that fails and whose storage hangs.
    FaultyVhd,
}

/// What images go through that are files on a healthy storage: the action and its weight.
const ALL: &[(&str, u64)] = &[
    ("kill", 6),
    ("pause", 4),
    ("snapshot", 8),
    ("commit inner", 6),
    ("commit leaf", 4),
    ("mirror", 2),
    ("grow", 2),
    ("stop", 3),
    ("quiet", 2),
    ("kill in snapshot", 2),
    ("kill in commit", 3),
    ("kill in mirror", 1),
    ("kill in pivot", 1),
    ("kill in grow", 1),
];

const FAULTS: &[(&str, u64)] = &[
    ("errors", 6),
    ("flush errors", 3),
    ("hang", 2),
    ("kill in hang", 3),
    ("kill", 4),
    ("pause", 2),
    ("quiet", 2),
];

/// All legs with a disk.
pub const KINDS: &[DiskKind] = &[
    DiskKind {
        name: "chain",
        about: "dynamic VHDs, a chain that grows and shrinks",
        by_default: true,
        disk: 1,
        base: Base::Vhd,
        actions: ALL,
    },
    DiskKind {
        name: "raw",
        about: "a raw image, and VHDs on top of it",
        by_default: true,
        disk: 2,
        base: Base::Raw,
        actions: ALL,
    },
    DiskKind {
        name: "fixed",
        about: "a fixed VHD, and VHDs on top of it",
        by_default: true,
        disk: 3,
        base: Base::Fixed,
        actions: ALL,
    },
    DiskKind {
        name: "encrypted",
        about: "an encrypted VHD",
        by_default: true,
        disk: 4,
        base: Base::Encrypted,
        actions: &[("kill", 6), ("pause", 4), ("stop", 3), ("quiet", 2)],
    },
    DiskKind {
        name: "full",
        about: "VHDs on a file system that becomes full (needs root to mount a tmpfs)",
        by_default: true,
        disk: 5,
        base: Base::Small,
        actions: &[
            ("full", 8),
            ("kill", 4),
            ("snapshot", 4),
            ("commit inner", 4),
            ("commit leaf", 3),
            ("quiet", 2),
            ("stop", 2),
        ],
    },
    DiskKind {
        name: "faulty",
        about: "a raw image on a storage that fails and hangs (needs nbdkit and FUSE)",
        by_default: true,
        disk: 6,
        base: Base::FaultyRaw,
        actions: FAULTS,
    },
    DiskKind {
        name: "faulty-vhd",
        about: "a VHD on a device that fails and whose storage hangs (needs nbdkit, FUSE and loop devices)",
        by_default: true,
        disk: 7,
        base: Base::FaultyVhd,
        actions: FAULTS,
    },
    DiskKind {
        name: "odd",
        about: "a raw image that does not end with a sector, and VHDs on top of it",
        by_default: true,
        disk: 8,
        base: Base::Odd,
        actions: ALL,
    },
];

/// Runs a leg until the run ends. `Err` is why it cannot run here.
pub fn run(kind: &DiskKind, dir: &Path, report: &Report) -> Result<(), String> {
    let mut scratch = Scratch::below(dir);
    let ran = catch_unwind(AssertUnwindSafe(|| run_in(kind, &scratch, report)));
    let ran = ran.unwrap_or_else(|panic| {
        report.found(Finding { leg: kind.name.into(), step: 0, what: words_of(panic.as_ref()) });
        Ok(())
    });
    if report.has_found(kind.name) {
        scratch.keep();
        eprintln!("{}: images and logs stay in {}", kind.name, scratch.path().display());
    }
    ran
}

fn run_in(kind: &DiskKind, scratch: &Scratch, report: &Report) -> Result<(), String> {
    let storage = Storage::new(kind.base, scratch)?;
    let mut setup = Setup {
        name: kind.name.into(),
        disk: kind.disk,
        images: storage.dir(scratch),
        dir: scratch.path().to_path_buf(),
        len: 48 * MIB,
        arguments: Vec::new(),
        rest: Duration::from_micros(300),
        discards: true,
        is_encrypted: kind.base == Base::Encrypted,
    };
    std::fs::create_dir_all(&setup.images).map_err(|error| format!("{}: {error}", setup.images.display()))?;
    let base = make_base(kind.base, &storage, scratch, &mut setup);
    let target = setup.target();
    let mut subject = Subject::new(&setup, &target, report, vec![base]);
    let lived = live(kind, &mut subject, &storage);
    if let Err(finding) = lived {
        report.found(finding);
    }
    Ok(())
}

fn make_base(kind: Base, storage: &Storage, scratch: &Scratch, setup: &mut Setup) -> Image {
    let path = setup.images.join("base");
    let mib = (setup.len / MIB).to_string();
    let create = |path: &Path, more: &[&str]| {
        vhd_util(&[&["create", "-n", text(path), "-s", &mib], more].concat()).ok();
        Image::vhd(path.to_path_buf())
    };
    match kind {
        Base::Raw => {
            let raw = std::fs::File::create(&path).and_then(|file| file.set_len(setup.len));
            raw.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            Image::raw(path)
        }
        Base::Odd => {
            // Nor is the disk whole blocks of any size.
            setup.len -= 7 * SECTOR_LEN;
            let made = std::fs::File::create(&path).and_then(|file| {
                use std::os::unix::fs::FileExt;
                file.set_len(setup.len)?;
                file.write_all_at(ODD_END, setup.len)
            });
            made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            Image::raw(path)
        }
        Base::Vhd | Base::Small => create(&path, &[]),
        Base::Fixed => create(&path, &["-r"]),
        Base::Encrypted => {
            let key = scratch.join("base,aes-xts-plain,512.key");
            tapio_e2e::client::random_file(&key, 64);
            let image = create(&path, &[]);
            vhd_util(&["key", "-s", "-n", text(&path), "-k", text(&key)]).ok();
            setup.arguments.extend(["--key-file".into(), text(&key).into()]);
            image
        }
        Base::FaultyRaw | Base::FaultyVhd => {
            // Each request of this storage is a few processes.
            (setup.rest, setup.len) = (Duration::from_millis(20), storage::FAULTY_LEN);
            setup.arguments.extend(["--request-timeout".into(), "3".into()]);
            let file: PathBuf = storage.file().expect("it has one").to_path_buf();
            if kind == Base::FaultyRaw {
                return Image::raw(file);
            }
            let mib = (storage::FAULTY_VHD_LEN / MIB).to_string();
            setup.len = storage::FAULTY_VHD_LEN;
            vhd_util(&["create", "-n", text(&file), "-s", &mib]).ok();
            Image::vhd(file)
        }
    }
}

/// The life of a disk: load and schedule until the run ends, then all of it is read once more.
fn live(kind: &DiskKind, subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    subject.start()?;
    let actions: Vec<(Action, u64)> =
        kind.actions.iter().map(|(name, weight)| (Action::named(name), *weight)).collect();
    thread::scope(|scope| {
        for number in 0..CLIENTS {
            let worker = Worker::new(subject.target, subject.report, number);
            scope.spawn(move || worker.run());
        }
        // Clients end when the run does: a panic here must not leave them waiting for ever.
        let outcome = catch_unwind(AssertUnwindSafe(|| schedule(&actions, subject, storage)));
        match outcome {
            Ok(outcome) => outcome.inspect_err(|_| subject.report.end()),
            Err(panic) => {
                Err(subject.finding(words_of(panic.as_ref()))).inspect_err(|_| subject.report.end())
            }
        }
    })?;
    if !subject.report.is_clean() {
        return Ok(());
    }
    verify(subject.target, subject.report)?;
    subject.stop();
    subject.check_images()?;
    leftovers::age(subject)?;
    subject.start()?;
    verify(subject.target, subject.report)?;
    subject.stop();
    subject.report.done("final verification");
    if kind.base == Base::Odd {
        assert_end(subject)?;
    }
    leftovers::assert_none(subject)
}

/// What is behind the disk in its first image has not been touched, unless the image has grown.
fn assert_end(subject: &Subject<'_>) -> Outcome {
    let Some(image) = subject.chain.last().filter(|image| image.kind == "aio") else { return Ok(()) };
    let bytes = std::fs::read(&image.path).map_err(|error| subject.finding(error.to_string()))?;
    let whole = bytes.len() / SECTOR_LEN as usize * SECTOR_LEN as usize;
    if bytes.len() > whole && bytes[whole..] != *ODD_END {
        return Err(subject.finding(format!("the bytes behind the last sector of {} changed", image.name())));
    }
    Ok(())
}

fn schedule(actions: &[(Action, u64)], subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    let sum = actions.iter().map(|(_, weight)| weight).sum();
    while !subject.report.is_ending() {
        thread::sleep(Duration::from_millis(20 + subject.random.below(480)));
        let mut ticket = subject.random.below(sum);
        let chosen = actions.iter().find(|(_, weight)| {
            let is_it = ticket < *weight;
            ticket = ticket.saturating_sub(*weight);
            is_it
        });
        let (action, _) = chosen.expect("the ticket is below the sum of weights");
        let step = subject.target.step.fetch_add(1, Ordering::Relaxed) + 1;
        subject.target.model.lock().expect("no holder panics").step(step);
        subject.note(action.name);
        if subject.report.is_ending() {
            break;
        }
        action.run(subject, storage)?;
        subject.assert_running()?;
    }
    Ok(())
}
