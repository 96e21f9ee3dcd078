//! Hearing of changes of files, for what waits and does not ask.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Room for some events; each names a file.
const BUFFER_LEN: usize = 16 << 10;

/// The events of a directory that are watched: a file that gets a name or loses one, and one that was written.
const MASK: u32 = libc::IN_MOVED_TO | libc::IN_MOVED_FROM | libc::IN_CLOSE_WRITE | libc::IN_DELETE;

/// The directories of some files, watched by inotify: a file that is replaced is another inode each time.
#[derive(Debug)]
pub struct Watch {
    events: File,
}

impl Watch {
    /// Watches the directories of these files.
    ///
    /// # Errors
    /// A sentence: there can be no more watches, or a directory is not there.
    pub fn new(files: &[PathBuf]) -> Result<Self, String> {
        // SAFETY: inotify_init1(2) takes a number.
        let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC) };
        if fd < 0 {
            return Err(format!("inotify: {}", io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is new, and nothing else holds it.
        let events = unsafe { File::from_raw_fd(fd) };
        let dirs: BTreeSet<&Path> = files.iter().filter_map(|file| file.parent()).collect();
        for dir in dirs {
            let told = |why: &dyn std::fmt::Display| format!("{} cannot be watched: {why}", dir.display());
            let path = CString::new(dir.as_os_str().as_bytes()).map_err(|error| told(&error))?;
            // SAFETY: an open descriptor and a terminated path.
            if unsafe { libc::inotify_add_watch(fd, path.as_ptr(), MASK) } < 0 {
                return Err(told(&io::Error::last_os_error()));
            }
        }
        Ok(Self { events })
    }

    /// Waits until something happened to any file of the directories.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self) -> io::Result<()> {
        let mut buffer = [0; BUFFER_LEN];
        // What happened is found out by looking; the events only say when.
        self.events.read(&mut buffer).map(drop)
    }
}
