//! Minor numbers: a marker file each, given out under the lock of their directory.
//!
//! There is no block device behind a minor number any more; its marker is what keeps two processes from using one
//! number. The process that has attached it holds the marker's own lock, so a number in use cannot be freed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use tapio_sys::process::exists;

use crate::paths::{RunDir, create_dir};
use crate::{ControlError, Errno, Result};

/// Minor numbers end below this.
pub const MINOR_MAX: u16 = 16_384;

/// What the marker of a number begins with that a process took for itself; its own number follows.
const OWNED: &str = "owned by ";

/// The directory of markers.
#[derive(Clone, Debug)]
pub struct MinorDir(PathBuf);

/// The lock of a marker; given up when dropped.
#[derive(Debug)]
pub struct MarkerLock {
    _marker: File,
}

fn lock(file: &File, how: FlockOperation) -> io::Result<()> {
    Ok(retry_on_intr(|| flock(file, how))?)
}

impl RunDir {
    /// Minor numbers and their markers.
    pub fn minors(&self) -> MinorDir {
        MinorDir(self.path().join("tapdisk"))
    }
}

impl MinorDir {
    /// The marker of a number.
    pub fn marker(&self, minor: u16) -> PathBuf {
        self.0.join(format!("tapdisk-{minor}"))
    }

    /// Takes the lowest free number.
    ///
    /// # Errors
    /// The directory cannot be made or written, or all numbers are taken.
    pub fn allocate(&self) -> Result<(u16, PathBuf)> {
        create_dir(&self.0)?;
        let _turn = self.turn()?;
        for minor in 0..MINOR_MAX {
            let marker = self.marker(minor);
            let made = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
                .open(&marker);
            match made {
                Ok(_) => return Ok((minor, marker)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(ControlError::io(format_args!("cannot make {}", marker.display()), &error));
                }
            }
        }
        Err(all_taken())
    }

    /// Takes the lowest number that is free, or that a process had taken for itself and left when it was killed: such a
    /// marker names the process, and no other process relies on it.
    ///
    /// # Errors
    /// As [`MinorDir::allocate`].
    pub fn allocate_own(&self) -> Result<u16> {
        create_dir(&self.0)?;
        let _turn = self.turn()?;
        for minor in 0..MINOR_MAX {
            let marker = self.marker(minor);
            let failed =
                |error: &io::Error| ControlError::io(format_args!("cannot make {}", marker.display()), error);
            let options = || {
                let mut options = OpenOptions::new();
                options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
                options
            };
            let mut file = match options().create_new(true).open(&marker) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match options().open(&marker) {
                    Ok(file) if is_left(&file) => file,
                    _ => continue,
                },
                Err(error) => return Err(failed(&error)),
            };
            let named = file.set_len(0).and_then(|()| {
                file.seek(SeekFrom::Start(0))?;
                writeln!(file, "{OWNED}{}", std::process::id())
            });
            named.map_err(|error| failed(&error))?;
            return Ok(minor);
        }
        Err(all_taken())
    }

    /// Takes a certain number, which may have a marker already as long as it is not attached.
    ///
    /// # Errors
    /// The directory cannot be made or written, or a process has the number attached.
    pub fn claim(&self, minor: u16) -> Result<u16> {
        create_dir(&self.0)?;
        let _turn = self.turn()?;
        let marker = self.marker(minor);
        let opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&marker);
        let file = opened
            .map_err(|error| ControlError::io(format_args!("cannot make {}", marker.display()), &error))?;
        lock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| in_use(minor, &error))?;
        Ok(minor)
    }

    /// Gives a number back.
    ///
    /// # Errors
    /// It was not given out, or a process has it attached (`EAGAIN`).
    pub fn free(&self, minor: u16) -> Result<()> {
        let marker = self.marker(minor);
        let _turn = self.turn()?;
        let file = open(&marker, minor)?;
        lock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| in_use(minor, &error))?;
        fs::remove_file(&marker)
            .map_err(|error| ControlError::io(format_args!("cannot remove {}", marker.display()), &error))
    }

    /// Takes the marker's lock for the process that attaches the number.
    ///
    /// # Errors
    /// The number was not given out, or another process has it attached.
    pub fn lock(&self, minor: u16) -> Result<MarkerLock> {
        let file = open(&self.marker(minor), minor)?;
        lock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| in_use(minor, &error))?;
        Ok(MarkerLock { _marker: file })
    }

    /// The numbers given out, in order.
    ///
    /// # Errors
    /// The directory exists and cannot be listed.
    pub fn allocated(&self) -> Result<Vec<u16>> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(self.unlisted(&error)),
        };
        let mut minors = Vec::new();
        for entry in entries {
            let name = entry.map_err(|error| self.unlisted(&error))?.file_name();
            let minor: Option<u16> =
                name.to_str().and_then(|name| name.strip_prefix("tapdisk-")?.parse().ok());
            minors.extend(minor.filter(|minor| *minor < MINOR_MAX));
        }
        minors.sort_unstable();
        Ok(minors)
    }

    fn unlisted(&self, error: &io::Error) -> ControlError {
        ControlError::io(format_args!("cannot list {}", self.0.display()), error)
    }

    /// The right to change the directory.
    fn turn(&self) -> Result<File> {
        let taken = File::open(&self.0).and_then(|dir| {
            lock(&dir, FlockOperation::LockExclusive)?;
            Ok(dir)
        });
        taken.map_err(|error| ControlError::io(format_args!("cannot lock {}", self.0.display()), &error))
    }
}

fn all_taken() -> ControlError {
    ControlError::new(Errno::ENOSPC, format!("all {MINOR_MAX} minor numbers are taken"))
        .next("free those that 'tap-ctl list' shows without a pid")
}

/// Whether a process took the number of this marker for itself, and has died. Its lock is gone with it; between taking
/// the number and the lock it is alive.
fn is_left(marker: &File) -> bool {
    let mut text = String::new();
    let read = marker.take(OWNED.len() as u64 + 12).read_to_string(&mut text);
    let owner = text.strip_prefix(OWNED).and_then(|pid| pid.trim_end().parse::<u32>().ok());
    let Some(pid) = owner.filter(|pid| read.is_ok() && *pid > 0) else { return false };
    if exists(pid) {
        // Perhaps another process that has got its number: the minor number is free when that ends.
        return false;
    }
    let free = lock(marker, FlockOperation::NonBlockingLockExclusive).is_ok();
    let _ = lock(marker, FlockOperation::Unlock);
    free
}

fn open(marker: &Path, minor: u16) -> Result<File> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(marker);
    opened.map_err(|error| {
        ControlError::io(format_args!("minor {minor} has no marker {}", marker.display()), &error)
            .next("take one with 'tap-ctl allocate'")
    })
}

fn in_use(minor: u16, error: &io::Error) -> ControlError {
    ControlError::io(format_args!("minor {minor} is attached by a disk process"), error)
        .next("'tap-ctl list' says by which; detach it there")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_given_out_from_the_lowest_and_can_be_freed() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let minors = crate::RunDir::new(dir.path()).minors();
        assert_eq!(minors.allocated(), Ok(vec![]));
        for expected in 0..3 {
            let (minor, marker) = minors.allocate().expect("free");
            assert_eq!(minor, expected);
            assert!(marker.ends_with(format!("tapdisk/tapdisk-{expected}")));
        }
        minors.free(1).expect("was taken");
        assert_eq!(minors.free(1).expect_err("is free").errno, Errno::ENOENT);
        assert_eq!(minors.allocated(), Ok(vec![0, 2]));
        assert_eq!(minors.allocate().expect("free").0, 1);
    }

    #[test]
    fn an_attached_number_cannot_be_freed() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let minors = crate::RunDir::new(dir.path()).minors();
        assert_eq!(minors.lock(0).expect_err("no marker").errno, Errno::ENOENT);
        let (minor, _) = minors.allocate().expect("free");
        assert_eq!(minors.claim(minor), Ok(minor));
        assert_eq!(minors.claim(7), Ok(7));
        let held = minors.lock(minor).expect("not attached");
        assert_eq!(minors.claim(minor).expect_err("attached").errno, Errno::EAGAIN);
        assert_eq!(minors.free(minor).expect_err("attached").errno, Errno::EAGAIN);
        assert_eq!(minors.lock(minor).expect_err("attached").errno, Errno::EAGAIN);
        drop(held);
        minors.free(minor).expect("detached");
    }

    #[test]
    fn a_number_that_a_killed_process_had_for_itself_is_given_out_again() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let minors = crate::RunDir::new(dir.path()).minors();
        assert_eq!(minors.allocate().expect("free").0, 0);
        let (alive, killed) = (minors.allocate_own().expect("free"), minors.allocate_own().expect("free"));
        assert_eq!((alive, killed), (1, 2));
        // Numbers of processes end below this.
        fs::write(minors.marker(killed), format!("{OWNED}{}\n", (1 << 22) + 7)).expect("written");
        let held = minors.lock(killed).expect("its operations have not ended yet");
        assert_eq!(minors.allocate_own(), Ok(3));
        drop(held);
        assert_eq!(minors.allocate_own(), Ok(killed));
        assert_eq!(minors.allocate_own(), Ok(4));
        // What was allocated for others stays theirs, alive or not.
        fs::write(minors.marker(0), "").expect("written");
        assert_eq!(minors.allocate_own(), Ok(5));
        assert_eq!(minors.allocate().expect("free").0, 6);
    }

    #[test]
    fn many_allocate_at_once_and_none_twice() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let minors = crate::RunDir::new(dir.path()).minors();
        let mut all: Vec<u16> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| (0..10).map(|_| minors.allocate().expect("free").0).collect::<Vec<_>>())
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        });
        all.sort_unstable();
        assert_eq!(all, (0..80).collect::<Vec<_>>());
    }
}
