//! Hearing of changes of files, for what waits and does not ask.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

/// Room for some events; each names a file.
const BUFFER_LEN: usize = 16 << 10;

/// The events of a directory that are watched: a file that gets a name or loses one, and one that was written.
const MASK: WatchFlags = WatchFlags::MOVED_TO
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::DELETE);

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
        let events = inotify::init(CreateFlags::CLOEXEC)
            .map_err(|error| format!("inotify: {}", io::Error::from(error)))?;
        let dirs: BTreeSet<&Path> = files.iter().filter_map(|file| file.parent()).collect();
        for dir in dirs {
            inotify::add_watch(&events, dir, MASK).map_err(|error| {
                format!("{} cannot be watched: {}", dir.display(), io::Error::from(error))
            })?;
        }
        Ok(Self { events: events.into() })
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
