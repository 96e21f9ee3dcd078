//! What a disk knows of changes of its chain while none is at work, and of the one that is.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Storage;

use super::moves::Moves;
use super::standby::StandbySlot;
use crate::job::Jobs;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Changes<S: Storage> {
    /// Which change is at work.
    at_work: Cell<Option<&'static str>>,
    /// An image whose commit failed when the image above it was being put under another parent: the disk may say
    /// either. Until it is committed again no other image may be.
    unfinished: RefCell<Option<PathBuf>>,
    moves: Moves,
    standby: StandbySlot<S>,
    jobs: Jobs,
}

impl<S: Storage> Default for Changes<S> {
    fn default() -> Self {
        Self {
            at_work: Cell::new(None),
            unfinished: RefCell::new(None),
            moves: Moves::default(),
            standby: StandbySlot::default(),
            jobs: Jobs::default(),
        }
    }
}

impl<S: Storage> Changes<S> {
    /// A change begins, for `what`.
    ///
    /// # Errors
    /// Another one is at work.
    pub fn begin(&self, what: &'static str) -> Result<()> {
        if let Some(other) = self.at_work.get() {
            let busy = std::io::Error::from_raw_os_error(libc::EBUSY);
            return Err(FormatError::io(format!("{what} must wait until {other} has ended"), busy));
        }
        self.at_work.set(Some(what));
        Ok(())
    }

    /// It has ended.
    pub fn end(&self) {
        self.at_work.set(None);
    }

    /// Which change is at work.
    pub const fn at_work(&self) -> Option<&'static str> {
        self.at_work.get()
    }

    /// The image above `image` is about to be put under another parent.
    pub fn begin_relink(&self, image: &Path) {
        *self.unfinished.borrow_mut() = Some(image.to_path_buf());
    }

    /// No change of a parent is half done: it has ended well, or the chain is another one.
    pub fn finished(&self) {
        self.unfinished.take();
    }

    /// Whether a change of a parent is half done.
    pub fn is_unfinished(&self) -> bool {
        self.unfinished.borrow().is_some()
    }

    /// Refuses to commit `image` while the commit of another one is half done.
    ///
    /// # Errors
    /// It is.
    pub fn check_finished_beside(&self, image: &Path) -> Result<()> {
        match self.unfinished.borrow().as_deref().filter(|other| *other != image) {
            Some(other) => {
                let detail =
                    format!("the commit of {} failed half way and must be finished first", other.display());
                Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(image))
            }
            None => Ok(()),
        }
    }

    /// Notes of the image that the disk goes on with.
    pub const fn moves(&self) -> &Moves {
        &self.moves
    }

    /// The second leaf, if there is one.
    pub const fn standby(&self) -> &StandbySlot<S> {
        &self.standby
    }

    /// Jobs: long work in the background of the guest's requests.
    pub const fn jobs(&self) -> &Jobs {
        &self.jobs
    }
}

#[cfg(test)]
mod tests {
    use tapio_ring::sim::SimStore;

    use super::*;

    #[test]
    fn one_change_is_at_work_and_a_half_done_commit_comes_first() {
        let changes = Changes::<SimStore>::default();
        changes.begin("a snapshot").expect("there is none");
        let refused = changes.begin("a commit").expect_err("there is one");
        assert_eq!((refused.errno(), changes.at_work()), (libc::EBUSY, Some("a snapshot")));
        changes.end();
        changes.begin("a commit").expect("the other has ended");
        let (half, other) = (Path::new("/half.vhd"), Path::new("/other.vhd"));
        assert!(changes.check_finished_beside(other).is_ok());
        changes.begin_relink(half);
        changes.end();
        assert!(changes.is_unfinished() && changes.check_finished_beside(half).is_ok());
        let refused = changes.check_finished_beside(other).expect_err("the other is half done");
        assert!(refused.to_string().contains("/half.vhd"), "{refused}");
        changes.finished();
        assert!(!changes.is_unfinished() && changes.check_finished_beside(other).is_ok());
    }
}
