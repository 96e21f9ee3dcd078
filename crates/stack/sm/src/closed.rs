//! An SR's directory is the daemon's alone: other users could read guests' disks, or hold the locks of images.
//!
//! What this daemon makes is closed from its first byte. What an earlier one made, or a person, is closed when the SR
//! is attached: its images, logs and marks, and the directory where nothing else is in it. A directory that holds other
//! things too is left as it is, and named.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tapio_sys::private::close;
use tapio_sys::shm::is_ours;

use crate::dir::facts::{MARKER, plain_uuid};

/// Modes of what an SR has.
const DIRECTORY: u32 = 0o700;
const FILE: u32 = 0o600;

/// Length of a UUID's text.
const UUID_LEN: usize = 36;

/// Something that other users can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// Where.
    pub path: PathBuf,
    /// Its mode.
    pub mode: u32,
    /// Whether attaching the SR closes it.
    pub is_ours: bool,
    may: u32,
}

/// Whether a file of this name in an SR's directory is the SR's.
fn is_of_sr(name: &str) -> bool {
    let name = name.strip_prefix('.').unwrap_or(name);
    name == &MARKER[1..] || name.get(..UUID_LEN).is_some_and(|start| plain_uuid(start).is_some())
}

/// What other users can reach in an SR's directory, the directory itself first.
///
/// # Errors
/// It cannot be listed.
pub fn open_in(directory: &Path) -> io::Result<Vec<Open>> {
    let mut found = Vec::new();
    let mut has_others = false;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_str().is_some_and(is_of_sr) {
            has_others |= name != "lost+found";
            continue;
        }
        // One that goes meanwhile is not open.
        let Ok(data) = entry.metadata() else { continue };
        let mode = data.mode() & 0o7777;
        if data.is_file() && mode & !FILE & 0o077 != 0 {
            found.push(Open { path: entry.path(), mode, is_ours: is_ours(&data), may: FILE });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    let data = fs::metadata(directory)?;
    let mode = data.mode() & 0o7777;
    if mode & 0o077 != 0 {
        let is_ours = is_ours(&data) && !has_others;
        found.insert(0, Open { path: directory.to_path_buf(), mode, is_ours, may: DIRECTORY });
    }
    Ok(found)
}

/// Closes what [`open_in`] finds, and says what it was.
pub(crate) fn close_all(directory: &Path) {
    let found = fs::canonicalize(directory).and_then(|real| open_in(&real));
    let (mut closed, mut left) = (Vec::new(), Vec::new());
    // A directory that cannot be listed is the attaching's affair.
    for open in found.unwrap_or_default() {
        let what = format!("{} (mode {:04o})", open.path.display(), open.mode);
        match if open.is_ours { close(&open.path, open.may) } else { Ok(None) } {
            Ok(Some(_)) => closed.push(what),
            _ => left.push(what),
        }
    }
    if let Some(first) = closed.first() {
        let more = closed.len() - 1;
        tracing::warn!("closed to other users, who could reach the disks: {first} and {more} more");
    }
    if let Some(first) = left.first() {
        let more = left.len() - 1;
        tracing::warn!(
            "other users can reach the disks in {first} and {more} more: make it root's, 'chmod go='"
        );
    }
}
