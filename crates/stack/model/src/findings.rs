//! What a diagnosis can find: one row for each kind.
//!
//! `SR.diagnose` and `host.diagnose` answer findings as JSON; each names its kind by `id`. A test fails for a kind that
//! nothing finds.

/// How much it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing; nothing is wrong.
    Note,
    /// It costs space or time, or will become an error.
    Warning,
    /// A disk cannot be used, or data are at risk.
    Error,
}

impl Severity {
    /// As findings name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// The operation of the daemon that repairs a finding without risk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// `SR.scan`: recovers what was broken off, and makes records agree with images.
    Scan,
    /// `SR.collect_garbage`.
    Collect,
    /// `host.end_stray_disk`: a disk process that no VBD has.
    EndProcess,
    /// `VDI.release`: a VDI that counts as in use by VBDs without a disk process.
    Release,
}

impl Repair {
    /// The message that does it.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Scan => "SR.scan",
            Self::Collect => "SR.collect_garbage",
            Self::EndProcess => "host.end_stray_disk",
            Self::Release => "VDI.release",
        }
    }
}

/// A kind of finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FindingKind {
    /// As `image-damaged`.
    pub id: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What is looked at.
    pub looks_at: &'static str,
    /// What it means.
    pub means: &'static str,
    /// The next step.
    pub suggests: &'static str,
    /// What repairs it; none where a person has to decide.
    pub repair: Option<Repair>,
}

macro_rules! kinds {
    ($($id:literal $severity:ident $repair:expr, $looks_at:literal, $means:literal, $suggests:literal;)*) => {
        /// Every kind of finding.
        pub static FINDINGS: &[FindingKind] = &[$(FindingKind {
            id: $id, severity: Severity::$severity, looks_at: $looks_at, means: $means, suggests: $suggests,
            repair: $repair,
        }),*];
    };
}

kinds! {
    "vdi-without-image" Error None, "records of VDIs, and the SR's directory",
        "A VDI has a record and no image: the file was removed or moved by something else.",
        "Bring the file back and scan the SR, or 'xe vdi-forget' the record.";
    "image-without-vdi" Warning Some(Repair::Scan), "the SR's directory, and records of VDIs",
        "An image has no record: it takes space and no client sees it.",
        "Scan the SR: the image gets a record, and can be used or destroyed.";
    "vdi-differs" Warning Some(Repair::Scan), "size and parent in the record and in the image",
        "The record of a VDI says something else than its image.",
        "Scan the SR: the image is right.";
    "parent-missing" Error None, "the parent that an image names",
        "An image is based on one that is not there: the disks above it cannot be read.",
        "Bring the file back, or restore the disk from a backup.";
    "parent-replaced" Error None, "the UUID of the parent that an image records",
        "The file of the parent is another image than the one that the image was made on: blocks may be wrong.",
        "Find the file with the recorded UUID ('vhd-util read -p'); do not start VMs with disks above it.";
    "parent-loop" Error None, "chains of parents",
        "Parents of an image lead back to itself: the chain cannot be opened.",
        "Name the right parent with 'vhd-util modify -p', after a look at the chain with 'vhd-util scan'.";
    "image-damaged" Error None, "'vhd-util check' of every image that no disk writes",
        "An image breaks a rule of its format and is refused, or may lose data.",
        "See 'vhd-util check', try 'vhd-util repair' on a copy, or restore it from a backup.";
    "journal-left" Warning Some(Repair::Scan), "journals in the SR's directory",
        "A change of images was broken off: the next operation finishes or undoes it.",
        "Scan the SR. If it stays, its disk does not answer: see the daemon's log.";
    "journal-foreign" Error None, "journals in the SR's directory",
        "Another storage manager has begun a merge that only it can finish. Its image is not changed until then.",
        "Attach the SR to the host that began it.";
    "file-unfinished" Warning Some(Repair::Scan), "unfinished files in the SR's directory",
        "A file takes space whose process ended before it was whole.",
        "Scan the SR: it is removed.";
    "base-unused" Warning Some(Repair::Collect), "base copies without children",
        "A base copy takes space and no image is based on it.",
        "Collect the SR's garbage.";
    "chain-stuck" Warning None, "the plan of the SR's garbage collection",
        "A chain of images stays as long as it is until something in the way is gone.",
        "The detail says what is in the way.";
    "lock-kept" Error None, "the lock of the SR, for a second",
        "Something that is no part of this daemon keeps the SR's lock: operations wait two minutes for it, and fail. Nothing else of the SR was looked at.",
        "If the process that the detail names is another daemon on the same SR, detach the SR there; otherwise end it.";
    "host-silent" Warning Some(Repair::Scan), "beats of the hosts that share the SR, and what they have open",
        "A host that has the VDI open has been silent for too long and counts as dead: its locks and leases count no more.",
        "Make sure that it is down, or has noticed. Scan the SR: what it has open is open no more.";
    "vdi-held" Error Some(Repair::Release), "VDIs that count as in use, and disk processes of this host",
        "A VDI counts as in use by a VBD or an export that has no disk process: it can be neither destroyed nor moved, and no other VM can write to it.",
        "Release it; a VDI that a disk process has is refused.";
    "sr-nearly-full" Warning None, "free space of the SR",
        "Less than a tenth of the SR is free: thin disks may find no room, and guests get errors.",
        "Remove snapshots and disks, or make the storage larger.";
    "sr-not-attached" Warning None, "PBDs of this host",
        "An SR is not attached: its disks cannot be used or diagnosed.",
        "'xe pbd-plug', and see the message of the failed start, if there is one.";
    "process-leaked" Warning Some(Repair::EndProcess), "disk processes of this host, and plugged VBDs",
        "A disk process runs that no VBD has: it may hold an image open.",
        "End it.";
    "process-dead" Error None, "plugged VBDs, and disk processes of this host",
        "A VBD is plugged and its disk process does not run: the guest waits or has lost the disk.",
        "Look at the disk process's last lines in the log; unplug the VBD and plug it again.";
    "pool-exhausted" Warning None, "page pools of SRs",
        "All pages of an SR's pool are in use and disks wait for some: the pool bounds the disks' speed.",
        "Make it larger, as the detail says, unless the host has no memory for that; it has its new size when all disks of the SR are unplugged and plugged again.";
    "cpu-governor" Note None, "scaling governors of processors",
        "The processors' governor saves power: requests wait for a clock that rises slowly.",
        "'cpupower frequency-set -g performance'.";
    "cpu-idle-deep" Note None, "idle states of processors",
        "Processors may sleep in states that take more than 100 us to leave: latencies of single requests rise.",
        "Disable them: 'cpupower idle-set -D 100'.";
    "disk-scheduler" Note None, "the I/O scheduler of the device below an SR",
        "A device without moving parts has a scheduler that sorts requests: each costs time and gains nothing.",
        "echo none > /sys/block/DEVICE/queue/scheduler";
    "queue-changed" Warning None, "queues of the devices below an SR, and what the SR's other-config asks for",
        "A device's scheduler, queue depth or read-ahead is not as the SR set it: another program changed it (udev rules, tuned).",
        "Set the SR's other-config (scheduler, nr_requests, read_ahead_kb) again or stop the other program.";
    "disk-read-ahead" Note None, "read-ahead of the device below an SR",
        "The device reads more than 4 MiB ahead: small requests of guests read data that no guest asked for.",
        "echo 128 > /sys/block/DEVICE/queue/read_ahead_kb";
    "write-cache-off" Note None, "the write cache of the device below an SR",
        "A rotating device writes through: each write waits for the platter.",
        "Switch it on ('hdparm -W1') if the storage keeps its cache through a power cut or flushes are honoured.";
    "network-soft" Error None, "mount options of NFS below an SR",
        "The mount is soft without a time limit that is set: a server that is away for a moment gives guests errors, and their file systems become read-only.",
        "Mount it with 'hard', or 'soft' with a 'timeo' of some minutes.";
    "network-no-limit" Warning None, "time limits of the daemon and of disk processes on NFS and SMB",
        "The mount waits for its server for ever, and so does what uses it: a server that stays away blocks operations without an error.",
        "Set 'storage-timeout' to some minutes (180 s) and restart tapiod; start a disk process without '--request-timeout 0'.";
    "log-full" Warning None, "free space of the directory of logs",
        "Less than 5 % of the file system of the logs is free: what happens next may not be logged.",
        "Remove old logs, or make it larger.";
}

/// The row of an id.
pub fn finding(id: &str) -> Option<&'static FindingKind> {
    FINDINGS.iter().find(|kind| kind.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_there_once_and_says_the_next_step() {
        for (at, kind) in FINDINGS.iter().enumerate() {
            assert!(!FINDINGS[..at].iter().any(|other| other.id == kind.id), "{}", kind.id);
            assert!(kind.means.ends_with('.') && kind.suggests.len() > 5, "{}", kind.id);
            assert_eq!(finding(kind.id), Some(kind));
        }
    }
}
