//! The lock of an SR: an operation that changes which images there are holds it.
//!
//! Two locks in one: a file `RUN_DIR/lock/sm/SR/sr`, in the manner of XenServer's storage manager, and the SR's
//! directory itself, so that daemons with different run directories, or two SRs on one directory, exclude each other
//! too. Both are `flock`s: they end with their holder, however that ends. An SR with a lease area has the lock among
//! hosts in place of the second ([`crate::lease`]).
//!
//! A program that changes the SR's storage may have the first of them too, so that what it does has ended when another
//! process has the lock ([`of_this_thread`]).

mod holder;

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tapio_types::ApiError;
use uuid::Uuid;

use crate::errors;
use crate::lease::{Locked, Member};
use crate::traits::Ctx;

/// How long an operation waits for others.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often it looks.
const TURN: Duration = Duration::from_millis(2);

/// With which others a holder shares the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// With none.
    Exclusive,
    /// Others that only look.
    Shared,
}

/// Where an SR's locks are.
#[derive(Clone)]
pub(crate) struct Locks {
    sr: Uuid,
    file: PathBuf,
    directory: PathBuf,
    /// This host among those of the SR, if it has a lease area.
    member: Option<Arc<Member>>,
}

thread_local! {
    /// The file of the lock that this thread has.
    static OWN: RefCell<Option<File>> = const { RefCell::new(None) };
}

/// The file of the lock that this thread has, for a program that it runs: the lock is held as long as one of both is
/// there, or until this process gives it back.
pub(crate) fn of_this_thread() -> Option<File> {
    OWN.with_borrow(|own| own.as_ref().and_then(|own| own.try_clone().ok()))
}

/// [`of_this_thread`] gives the file until this is dropped.
struct Known;

impl Known {
    fn new(own: &Flock) -> Self {
        OWN.set(own.0.try_clone().ok());
        Self
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        OWN.set(None);
    }
}

/// A held lock. What is taken last is given back first.
pub(crate) struct Held<'a> {
    _known: Known,
    _hosts: Option<Locked<'a>>,
    _directory: Option<Flock>,
    _own: Flock,
}

#[derive(Debug)]
struct Flock(File);

impl Drop for Flock {
    /// Not left to the closing of the file: a child that was forked meanwhile, and has not got to its own program
    /// yet, holds a copy of the descriptor and with it the lock.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl Locks {
    pub(crate) fn new(run_dir: &Path, sr: Uuid, directory: &Path) -> Self {
        let file = run_dir.join("lock/sm").join(sr.to_string()).join("sr");
        Self { sr, file, directory: directory.to_path_buf(), member: None }
    }

    /// The same of an SR that several hosts use.
    pub(crate) fn among(self, member: Option<Arc<Member>>) -> Self {
        Self { member, ..self }
    }

    /// This host among those of the SR.
    pub(crate) const fn member(&self) -> Option<&Arc<Member>> {
        self.member.as_ref()
    }

    /// The SR ends, and with it its lease area.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn end_lease(&self) -> Result<(), ApiError> {
        self.member.as_ref().map_or(Ok(()), |member| member.end())
    }

    /// The file of this host alone.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub(crate) fn take_here(&self, ctx: &dyn Ctx) -> Result<impl Sized, ApiError> {
        self.wait(ctx, self.own()?, Share::Exclusive, Instant::now() + TIMEOUT)
    }

    fn own(&self) -> Result<File, ApiError> {
        let place = self.file.parent().unwrap_or(Path::new("/"));
        let made = std::fs::create_dir_all(place).and_then(|()| {
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&self.file)
        });
        made.map_err(|error| errors::io(37, "cannot make the SR's lock", &self.file, &error))
    }

    /// Takes the lock; waits for its holders until a deadline, or until the operation is cancelled.
    ///
    /// # Errors
    /// 37 when the holders keep it, 47 when the directory is gone, `TASK_CANCELLED`.
    pub(crate) fn take(&self, ctx: &dyn Ctx, share: Share) -> Result<Held<'_>, ApiError> {
        let own = self.own()?;
        let until = Instant::now() + TIMEOUT;
        if let Some(member) = &self.member {
            // One at a time: this host has one ticket.
            let own = self.wait(ctx, own, Share::Exclusive, until)?;
            let hosts = member.lock(ctx)?;
            self.ask_anew();
            return Ok(Held { _known: Known::new(&own), _hosts: Some(hosts), _directory: None, _own: own });
        }
        let directory = File::open(&self.directory)
            .map_err(|error| errors::io(47, "cannot open the SR's directory", &self.directory, &error))?;
        let own = self.wait(ctx, own, share, until)?;
        let directory = self.wait(ctx, directory, share, until)?;
        Ok(Held { _known: Known::new(&own), _hosts: None, _directory: Some(directory), _own: own })
    }

    /// Other hosts may have changed the directory. A client of NFS asks its server anew when it takes a lock.
    fn ask_anew(&self) {
        if !self.directory.is_dir() {
            return;
        }
        if let Ok(directory) = File::open(&self.directory)
            && flock(&directory, FlockOperation::NonBlockingLockShared).is_ok()
        {
            let _ = flock(&directory, FlockOperation::Unlock);
        }
    }

    fn wait(&self, ctx: &dyn Ctx, file: File, share: Share, until: Instant) -> Result<Flock, ApiError> {
        let how = match share {
            Share::Exclusive => FlockOperation::NonBlockingLockExclusive,
            Share::Shared => FlockOperation::NonBlockingLockShared,
        };
        loop {
            match flock(&file, how) {
                Ok(()) => return Ok(Flock(file)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                // A file system without locks (some network ones): the lock file of this host must do.
                Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::NOSYS | Errno::INVAL | Errno::BADF) => {
                    return Ok(Flock(file));
                }
                Err(error) => {
                    return Err(errors::io(37, "cannot lock the SR", &self.directory, &error.into()));
                }
            }
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            if Instant::now() >= until {
                let text = format!(
                    "SR {} has been locked by another process for {} s: look for other daemons on {}",
                    self.sr,
                    TIMEOUT.as_secs(),
                    self.directory.display()
                );
                return Err(errors::fail(37, text));
            }
            std::thread::sleep(TURN);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    struct Nobody;

    impl Ctx for Nobody {
        fn is_cancelled(&self) -> bool {
            false
        }
        fn progress(&self, _: f64) {}
        fn live(&self, _: Uuid) -> Option<Box<dyn crate::traits::LiveDisk>> {
            None
        }
        fn step(&self, _: &'static str) {}
    }

    #[test]
    fn a_program_keeps_the_lock_of_a_process_that_died() {
        let dir = tempfile::tempdir().unwrap();
        let locks = Locks::new(dir.path(), Uuid::from_u128(1), dir.path());
        let is_free = || flock(locks.own().unwrap(), FlockOperation::NonBlockingLockExclusive).is_ok();
        assert!(of_this_thread().is_none());
        let held = locks.take(&Nobody, Share::Exclusive).unwrap();
        let file = of_this_thread().expect("it is locked");
        let mut program =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::from(file)).spawn().unwrap();
        assert!(!is_free());
        // Given back: the program has it no more.
        drop(held);
        assert!(is_free() && of_this_thread().is_none());
        program.kill().and_then(|()| program.wait()).unwrap();
        // As if this process was killed: nothing is given back.
        let own = locks.own().unwrap();
        flock(&own, FlockOperation::NonBlockingLockExclusive).unwrap();
        let copy = own.try_clone().unwrap();
        let mut program =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::from(copy)).spawn().unwrap();
        drop(own);
        assert!(!is_free());
        program.kill().and_then(|()| program.wait()).unwrap();
        // Another test may be starting a program, which has a copy for a moment.
        let until = Instant::now() + TIMEOUT;
        while !is_free() {
            assert!(Instant::now() < until, "the lock is not free");
            std::thread::sleep(TURN);
        }
    }
}
