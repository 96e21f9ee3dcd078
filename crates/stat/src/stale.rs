//! Cleaning up after disk processes that died without doing it.

use std::fs;
use std::io;
use std::path::Path;

use crate::Snapshot;
use crate::page::{PAGE_LEN, parse_page};
use crate::reader::{head, names, open_plain};
use crate::shm::{ShmRoot, Turn, try_lock};

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
            remove_published(root, &snapshot);
            cleaned.disks.push(format!("{}.{}", snapshot.pid, snapshot.minor));
        }
        // Last, so that a cleaner that dies half-way leaves the page that says what there is to clean.
        let _ = fs::remove_file(&path);
    }
    cleaned.disks.sort();
    Ok(cleaned)
}

fn remove_published(root: &ShmRoot, dead: &Snapshot) {
    let process = root.process(dead.pid);
    for name in [format!("vdi-{}", dead.minor), format!("nbd-{}", dead.minor)] {
        remove_unlocked(&process.join(name));
    }
    for id in &dead.vbds {
        remove_unlocked(&process.join(format!("vbd-{}-{}", id.domid, id.devid)));
        let vbd = root.vbd(id.domid, id.devid);
        remove_unlocked(&vbd.join("statistics"));
        remove_unlocked(&vbd.join("io_ring"));
        // Not empty, or gone: nothing to do then.
        let _ = fs::remove_dir(vbd);
    }
    let _ = fs::remove_dir(process);
}

/// Removes a file unless a live process holds its lock: numbers are given out again.
fn remove_unlocked(path: &Path) {
    if open_plain(path).is_ok_and(|file| try_lock(&file).unwrap_or(false)) {
        let _ = fs::remove_file(path);
    }
}
