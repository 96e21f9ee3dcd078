//! Cleaning up after disk processes that died without doing it.

use std::fs;
use std::io;

use tapio_sys::lock::try_lock;
use tapio_sys::process::exists;
use tapio_sys::shm::PrivateDir;

use crate::Snapshot;
use crate::page::{PAGE_LEN, parse_page};
use crate::reader::{head, names, open_plain, two_numbers};
use crate::shm::{ShmRoot, Turn};

/// What was removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Disks whose process is gone, as `pid.minor`.
    pub disks: Vec<String>,
}

/// Removes what dead processes of ours left below the root. Files of a live process are locked and stay, files of
/// a foreign tapdisk are never touched: only what a page of ours names is looked at.
///
/// # Errors
/// The directory of our pages cannot be made or listed. Files that cannot be removed are left for the next time.
pub fn clean_stale(root: &ShmRoot) -> io::Result<Cleaned> {
    let _turn = Turn::take(root)?;
    let mut cleaned = Cleaned::default();
    for name in names(&root.pages())? {
        let path = root.pages().join(&name);
        let Ok(file) = open_plain(&path) else { continue };
        if !try_lock(&file).unwrap_or(false) {
            continue;
        }
        let snapshot = head::<PAGE_LEN>(&file).ok().and_then(|(bytes, len)| parse_page(&bytes[..len]).ok());
        if let Some(snapshot) = snapshot {
            if exists(snapshot.pid) {
                // The number was given out again, perhaps to a foreign tapdisk, whose files have no locks. Later then.
                continue;
            }
            remove_published(root, &snapshot);
            cleaned.disks.push(format!("{}.{}", snapshot.pid, snapshot.minor));
        }
        // Last, so that a cleaner that dies half-way leaves the page that says what there is to clean.
        let _ = fs::remove_file(&path);
    }
    cleaned.disks.sort();
    Ok(cleaned)
}

/// The page names what was published, but for what was just being published at the moment of the death: so the
/// directory of the process is looked at as well.
fn remove_published(root: &ShmRoot, dead: &Snapshot) {
    let process = root.process(dead.pid);
    let mut ids = dead.vbds.clone();
    // Names that a dead process has left may be made again by any user: only in directories of ours is removed.
    if let Ok(dir) = PrivateDir::open(&process) {
        for name in names(&process).unwrap_or_default() {
            if ["vdi-", "nbd-", "vbd-"].iter().any(|prefix| name.starts_with(prefix)) {
                remove_unlocked(&dir, &name);
                ids.extend(two_numbers(&name, "vbd-"));
            }
        }
    }
    for id in &ids {
        let vbd = root.vbd(id.domid, id.devid);
        if let Ok(dir) = PrivateDir::open(&vbd) {
            remove_unlocked(&dir, "statistics");
            remove_unlocked(&dir, "io_ring");
        }
        // Not empty, or gone: nothing to do then.
        let _ = fs::remove_dir(vbd);
    }
    let _ = fs::remove_dir(process);
}

/// Removes a file unless a live process holds its lock: numbers are given out again.
fn remove_unlocked(dir: &PrivateDir, name: &str) {
    if dir.file(name, false).is_ok_and(|file| try_lock(&file).unwrap_or(false)) {
        let _ = dir.remove(name);
    }
}
