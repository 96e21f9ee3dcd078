//! What keeps the lock of an SR: a process that is no part of this daemon, or a descriptor that such a one has
//! inherited from a holder that has ended.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::Locks;

/// A lock that is given back within this time was held by an operation.
const OPERATION: Duration = Duration::from_secs(1);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// A lock that something else keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    /// The file or directory that is locked.
    pub(crate) place: PathBuf,
    /// By what, for people.
    pub(crate) detail: String,
}

impl Locks {
    /// Whether something that is no part of this daemon has kept the lock for a second.
    pub(crate) fn kept(&self) -> Option<Kept> {
        [&self.file, &self.directory].into_iter().find_map(|place| {
            let place = fs::canonicalize(place).ok()?;
            let file = File::open(&place).ok()?;
            let until = Instant::now() + OPERATION;
            while is_taken(&file) {
                if Instant::now() >= until {
                    let detail = holders(&file, &place)?;
                    return Some(Kept { place, detail });
                }
                std::thread::sleep(LOOK);
            }
            None
        })
    }
}

/// Whether the lock cannot be had now. A file system without locks has none that is taken.
fn is_taken(file: &File) -> bool {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            // It ends with the descriptor at the latest.
            let _ = flock(file, FlockOperation::Unlock);
            false
        }
        Err(error) => error == Errno::WOULDBLOCK,
    }
}

/// The processes that keep a lock; none where this daemon does. Who took it says little: a descriptor that a child has
/// inherited keeps it when that process has closed its own, or has ended.
fn holders(file: &File, place: &Path) -> Option<String> {
    let openers = openers(place);
    if openers.iter().any(is_ours) {
        return None;
    }
    let takers = fs::read_to_string("/proc/locks").map(|locks| takers(&locks, file)).unwrap_or_default();
    if let Some(pid) = takers.iter().find(|pid| openers.contains(pid)) {
        return Some(format!("process {} holds it", named(*pid)));
    }
    let took = match takers.first() {
        Some(pid) => format!("process {pid} took it and has ended or closed it"),
        None => "the process that took it has ended, or is not seen from here".to_owned(),
    };
    let keeps: Vec<String> = openers.iter().map(|pid| named(*pid)).collect();
    Some(match &keeps[..] {
        [] => format!("{took}; no process of this host has it open"),
        keeps => format!("{took}; it is kept open by {}", keeps.join(", ")),
    })
}

/// The processes that locked a file, as `/proc/locks` has them: that of an owner that has ended stays there, if an
/// inherited descriptor keeps the lock.
fn takers(locks: &str, file: &File) -> BTreeSet<u32> {
    let Ok(data) = file.metadata() else { return BTreeSet::new() };
    let device = data.dev();
    let of = format!("{:02x}:{:02x}:{}", libc::major(device), libc::minor(device), data.ino());
    let pid = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (kind, pid, place) = (words.next()?, words.nth(2)?, words.next()?);
        if kind == "FLOCK" && place == of { pid.parse::<u32>().ok().filter(|pid| *pid > 0) } else { None }
    };
    locks.lines().filter_map(pid).collect()
}

/// The processes that have a path open. Names of descriptors alone are read: what they lead to may hang.
fn openers(place: &Path) -> BTreeSet<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    let own = std::process::id();
    let has_open = |pid: &u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let is_it = |entry: &fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|path| path == place);
        // This process has it open to look.
        descriptors.filter(is_it).count() > usize::from(*pid == own)
    };
    pids.filter(has_open).collect()
}

/// Whether a process is this one, its daemon, or another worker of that.
fn is_ours(pid: &u32) -> bool {
    let own = std::process::id();
    let program = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).ok();
    if *pid == own {
        return true;
    }
    if program(*pid).is_none() || program(*pid) != program(own) {
        return false;
    }
    let daemon = parent(own).filter(|parent| program(*parent) == program(own)).unwrap_or(own);
    *pid == daemon || parent(*pid) == Some(daemon)
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

fn named(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match name.trim() {
        "" => pid.to_string(),
        name => format!("{pid} ({})", name.escape_default()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::{Command, Stdio};

    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_process_in_the_kernels_list_is_found() {
        let file = File::open("/").expect("the root");
        let data = file.metadata().expect("it is there");
        let at = format!("{:02x}:{:02x}", libc::major(data.dev()), libc::minor(data.dev()));
        let ino = data.ino();
        let locks = format!(
            "1: FLOCK  ADVISORY  WRITE 71 {at}:{ino} 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 72 {at}:{ino} 0 EOF\n\
             2: POSIX  ADVISORY  WRITE 73 {at}:{ino} 0 EOF\n3: FLOCK  ADVISORY  WRITE 74 {at}:{ino}1 0 EOF\n\
             4: FLOCK  ADVISORY  READ 0 {at}:{ino} 0 EOF\nnonsense\n"
        );
        assert_eq!(takers(&locks, &file), BTreeSet::from([71]));
    }

    #[test]
    fn a_lock_of_our_own_is_no_finding_and_one_that_was_inherited_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let locks = Locks::new(dir.path(), Uuid::nil(), dir.path());
        assert_eq!(locks.kept(), None);
        let held = File::open(dir.path()).expect("it is there");
        flock(&held, FlockOperation::NonBlockingLockExclusive).expect("it is free");
        assert_eq!(locks.kept(), None, "an operation of this process holds it");
        let inherited = held.try_clone().expect("a descriptor");
        let mut child =
            Command::new("sleep").arg("600").stdin(Stdio::from(inherited)).spawn().expect("sleep");
        assert!(held.as_raw_fd() >= 0);
        // Closed, not unlocked: the child has the same lock.
        drop(held);
        let kept = locks.kept();
        child.kill().and_then(|()| child.wait()).expect("it ends");
        let kept = kept.expect("the child keeps it");
        assert_eq!(kept.place, fs::canonicalize(dir.path()).expect("it is there"));
        assert!(kept.detail.contains(&child.id().to_string()), "{}", kept.detail);
        assert_eq!(locks.kept(), None);
    }
}
