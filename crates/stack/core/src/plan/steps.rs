//! Named places in changes of several steps, at which a test can end the process.
//!
//! `TAPIO_DIE_AT=vbd-plug:started` ends it the first time it comes there, `TAPIO_DIE_AT=vbd-plug:started:3` the third
//! time. What is half done at each place, and what the next start makes of it, stands beside its name.
//! `TAPIO_STOP_AT` stops the process there in the same way, as a host that hangs, until it gets SIGCONT.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// A named place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// As `vbd-plug:started`.
    pub name: &'static str,
    /// What is half done there.
    pub half_done: &'static str,
}

const fn at(name: &'static str, half_done: &'static str) -> Step {
    Step { name, half_done }
}

/// Every place of the toolstack itself; storage drivers have their own (`Ctx::step`).
pub const STEPS: &[Step] = &[
    at("vbd-plug:noted", "a note of the disk to come; nothing runs. The note is removed"),
    at("vbd-plug:started", "a process runs that no record names, and the VDI may be active. Both end"),
    at("vbd-plug:numbered", "a process with a number and no disk, and the VDI may be active. Both end"),
    at("vbd-plug:activated", "the VDI is active, and a process may be on its way. Both end"),
    at("vbd-plug:ready", "the VDI is active, and a process waits for its images. Both end"),
    at("vbd-plug:opened", "the process has the images open. It is ended"),
    at("vbd-plug:offered", "the front end is there and no guest uses it. It is removed"),
    at("vbd-plug:plugged", "the guest has the disk and the record does not say so. The disk is unplugged"),
    at("vbd-unplug:noted", "a note that the disk goes. It goes"),
    at("vbd-unplug:unplugged", "the guest released the disk; the process serves no client. It is ended"),
    at("vbd-unplug:ended", "the process is gone, the VDI still active. It is deactivated"),
    at("vbd-unplug:deactivated", "only the record says that the disk is plugged. It no longer does"),
    at("vbd-insert:noted", "the record names a medium that is not in the drive. The drive is empty"),
    at("vbd-insert:plugged", "the medium is in the drive, and a note says that it is on its way. It stays"),
    at("vbd-eject:noted", "a note that the medium goes. It stays"),
    at("vbd-eject:ejected", "the medium is out and the record says that it is not. The drive is empty"),
    at("vif-move:noted", "a guest's interface is about to get another network. It gets it"),
    at("vif-move:moved", "the interface has another network, the record says the one before. It follows"),
    at("vif-plug:plugged", "the guest has the interface and the record does not say so. It does"),
    at(
        "vif-unplug:unplugged",
        "the guest released the interface, the record says that it has it. It no longer does",
    ),
    at("vm-quiesce:noted", "a note that the guest may be frozen; it is not. It is thawed all the same"),
    at("vm-quiesce:frozen", "the guest's file systems are frozen. They are thawed"),
    at(
        "vm-quiesce:disks-made",
        "the guest is frozen, its snapshot has disks. It is thawed, they are removed",
    ),
    at("vm-quiesce:thawed", "the guest has thawed, its snapshot is not finished. It is removed"),
    at(
        "vmss:noted",
        "a plan of snapshots runs, as a note says. Its next snapshots are those of its next time",
    ),
    at("vmss:made", "a snapshot that does not count as the plan's yet. It stays, as one by hand would"),
    at("vmss:marked", "a snapshot more than the plan keeps. The next turn of the plan removes the oldest"),
    at("vmss:disk-gone", "a snapshot that goes has lost a disk. The next turn of the plan removes the rest"),
    at("vdi-deactivate:closed", "the storage has closed a VDI, and it counts as in use. It no longer does"),
    at("nbd-export:activated", "a VDI is active for an export, and its process has not opened it. Both end"),
    at("nbd-export:offered", "an export without names, which no client can use. It ends"),
    at("nbd-export:ended", "the process of an export is gone, its VDI still active. It is deactivated"),
    at("disk:mirrored", "a disk has a mirror that nothing looks after. It ends, the disk stays where it is"),
    at("disk:in-sync", "both sides of a mirror are the same. It ends, the disk stays where it is"),
    at("disk:pivoted", "a disk is on the images of its mirror, no record says so. The records are made"),
    at("disk:moved", "the disk is noted as another VDI's, no record says so. The records are made"),
    at("vm-start:noted", "the record says that the VM is about to start. It does not start"),
    at("vm-start:created", "a VM without disks waits, paused. It is ended"),
    at("vm-start:vifs-plugged", "a VM with network interfaces waits, paused; no record says so. It is ended"),
    at("vm-start:plugged", "a VM with disks waits, paused. It is ended, the disks are unplugged"),
    at(
        "vm-start:running",
        "the guest runs and the record does not say so. It is ended, the disks are unplugged",
    ),
    at("vm-vcpus:changed", "the guest has more processors than the record says. The record follows"),
    at("vm-memory:recorded", "the guest is not told yet what its record says. It is told"),
    at("vm-shutdown:noted", "the record says that the VM is about to end. The guest goes on"),
    at("vm-shutdown:ended", "the guest has ended, its disks are there. They are unplugged"),
    at("vm-shutdown:unplugged", "only the record says that the guest runs. It no longer does"),
    at("vm-shutdown:halted", "the VM is halted; memory that it was suspended with is left. It is removed"),
    at("vm-suspend:image-made", "a VDI for the guest's memory. It is removed, the guest goes on"),
    at("vm-suspend:paused", "the guest is stopped. It goes on, the VDI for its memory is removed"),
    at(
        "vm-suspend:saved",
        "its memory is written and nothing leads to it. The guest goes on, the VDI is removed",
    ),
    at(
        "vm-suspend:recorded",
        "the VM is suspended and its process is there. It is ended, the disks are unplugged",
    ),
    at("vm-suspend:ended", "the VM is suspended, its disks are there. They are unplugged"),
    at("vm-renew:noted", "a guest that runs is about to get a new emulator. It goes on with its own"),
    at("vm-renew:suspended", "a VM is suspended, and a note says that it goes on at once. It goes on"),
    at("vm-resume:noted", "the record says that the VM is about to go on. It stays suspended"),
    at("vm-resume:loaded", "a VM with disks and memory waits, paused. It is ended and stays suspended"),
    at(
        "vm-resume:recorded",
        "the record says that the VM is paused, its memory image is left. The guest goes on",
    ),
    at("vm-resume:running", "the guest runs, the record says that it is paused. The guest goes on"),
    at("vm-clone:recorded", "a record of a VM without its disks. It is removed"),
    at("vm-clone:disk-alone", "a disk is made and nothing leads to it. It is removed, the record too"),
    at("vm-clone:disk-made", "some of the disks are made. They are removed, the record too"),
    at("vm-clone:memory-made", "the disks and the memory of a clone. They are removed, the record too"),
    at("vm-revert:disk-made", "some clones of a snapshot's disks. They are removed, the VM is as it was"),
    at("vm-revert:switched", "the VM is as its snapshot, disks that it had are left. They are removed"),
    at("vm-checkpoint:saved", "a snapshot and its memory. Both are removed, the guest goes on"),
    at("vm-checkpoint:made", "the checkpoint is there, the guest is stopped. It goes on"),
    at("vm-import:image-noted", "a note of an image to come; nothing is made. The note is removed"),
    at("vm-import:image-made", "an empty image without a record. It is removed"),
    at("vm-import:image-filled", "a whole image without a record. It is removed"),
    at("vm-import:disk-made", "a disk of a VM that is not there. It is removed"),
    at("vm-import:disks-made", "all disks of a VM that is not there. They are removed"),
    at("vm-destroy:noted", "nothing is removed yet. The VM stays"),
    at(
        "disk:paused",
        "a disk is closed, and its SR's worker does not know it. It goes on with the images of then",
    ),
    at("disk:held", "no process takes the place of a disk's; nothing is changed yet. The disk goes on"),
    at(
        "disk:leaf-noted",
        "the note of a disk names a new leaf, its process does not know it. It goes on with that, after a pause",
    ),
    at("disk:leaf-swapped", "a guest uses a new leaf, and its SR's worker does not know it. It keeps that"),
    at("disk:resumed", "a guest uses new images, and its SR's worker does not know it. It keeps them"),
];

struct Fatal {
    name: String,
    left: AtomicU32,
}

fn fatal() -> Option<&'static Fatal> {
    static FATAL: OnceLock<Option<Fatal>> = OnceLock::new();
    FATAL.get_or_init(|| parse(&std::env::var("TAPIO_DIE_AT").ok()?)).as_ref()
}

fn pause() -> Option<&'static Fatal> {
    static PAUSE: OnceLock<Option<Fatal>> = OnceLock::new();
    PAUSE.get_or_init(|| parse(&std::env::var("TAPIO_STOP_AT").ok()?)).as_ref()
}

fn parse(text: &str) -> Option<Fatal> {
    let (name, count) = match text.rsplit_once(':').map(|(name, count)| (name, count.parse::<u32>())) {
        Some((name, Ok(count))) if count > 0 => (name, count),
        _ => (text, 1),
    };
    (!name.is_empty()).then(|| Fatal { name: name.to_owned(), left: AtomicU32::new(count) })
}

/// Comes to a named place. A test may want the process to end here, as if the power had gone, or to stop until it is
/// told to go on (`TAPIO_STOP_AT`), as if the host hung.
pub fn step(name: &'static str) {
    if let Some(pause) = pause().filter(|pause| pause.name == name)
        && pause.left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        // SAFETY: the call sends this process a signal, and touches no memory of ours.
        unsafe { libc::raise(libc::SIGSTOP) };
    }
    let Some(fatal) = fatal().filter(|fatal| fatal.name == name) else { return };
    if fatal.left.fetch_sub(1, Ordering::Relaxed) == 1 {
        // SAFETY: it never returns, and nothing of this process shall run after it: that is the point.
        unsafe { libc::_exit(137) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_name_with_or_without_a_count() {
        let read = |text: &str| parse(text).map(|fatal| (fatal.name, fatal.left.into_inner()));
        assert_eq!(read("vbd-plug:opened"), Some(("vbd-plug:opened".into(), 1)));
        assert_eq!(read("vbd-plug:opened:7"), Some(("vbd-plug:opened".into(), 7)));
        assert_eq!(read(""), None);
    }

    #[test]
    fn names_are_there_once() {
        for (at, step) in STEPS.iter().enumerate() {
            assert!(!STEPS[..at].iter().any(|other| other.name == step.name), "{}", step.name);
            assert!(step.name.contains(':') && step.half_done.ends_with(char::is_alphanumeric), "{step:?}");
        }
    }
}
