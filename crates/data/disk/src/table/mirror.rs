//! What a disk has beside its images: a second image, a log of changed blocks, a mirror.

use std::path::PathBuf;
use std::sync::Arc;

use tapio_control::{
    ControlError, Errno, ImageSource, MirrorPivoted, MirrorReport, MirrorRequest, Result, VbdState,
};

use super::{Plane, Table, lock, word};

/// A second image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secondary {
    /// The image.
    pub image: ImageSource,
    /// For a leaf that waits until the first is full: the file that says so then. A mirror without.
    pub marker: Option<PathBuf>,
}

/// What a disk is to have beside its images from the first request on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// A second image.
    pub secondary: Option<Secondary>,
    /// The log of changed blocks.
    pub log: Option<PathBuf>,
}

impl Wishes {
    /// What they are, for people.
    pub fn names(&self) -> Vec<String> {
        let second = self.secondary.as_ref().map(|second| format!("second image {}", second.image.text()));
        let log = self.log.as_ref().map(|log| format!("changed-block log {}", log.display()));
        second.into_iter().chain(log).collect()
    }

    /// Those of a request, in which `null` ends a second image; `marker` is where a full storage would be announced if
    /// the second image is to take over.
    ///
    /// # Errors
    /// `EINVAL` for a second image that cannot be one, or one that stands by and is not named.
    pub fn of(secondary: Option<&String>, marker: Option<PathBuf>, log: Option<&String>) -> Result<Self> {
        let log = log.map(PathBuf::from);
        let Some(text) = secondary.filter(|text| *text != NO_SECONDARY) else {
            return match marker {
                None => Ok(Self { secondary: None, log }),
                Some(_) => Err(ControlError::new(Errno::EINVAL, "no second image was named to take over")
                    .next("name it with -2, or leave out -s")),
            };
        };
        let image = ImageSource::Leaf(text.clone());
        image.check()?;
        Ok(Self { secondary: Some(Secondary { image, marker }), log })
    }
}

/// What `-2` says that ends a second image.
const NO_SECONDARY: &str = "null";

fn no_mirrors() -> ControlError {
    ControlError::new(Errno::EOPNOTSUPP, "this process has no mirrors")
}

/// The part of an open disk that mirrors it. Called as [`super::PlaneDisk`]; `mirror_status` must not wait.
pub trait PlaneMirror {
    /// Begins a mirror.
    fn mirror_start(&self, _request: &MirrorRequest) -> Result<MirrorReport> {
        Err(no_mirrors())
    }
    /// Where it stands.
    fn mirror_status(&self) -> Result<Option<MirrorReport>> {
        Ok(None)
    }
    /// Goes on with one that was lost.
    fn mirror_resume(&self) -> Result<()> {
        Err(no_mirrors())
    }
    /// Limits its copy.
    fn mirror_rate(&self, _rate: u64) -> Result<()> {
        Err(no_mirrors())
    }
    /// Switches over; says onto which image, and how long the guest waited.
    fn mirror_pivot(&self) -> Result<(ImageSource, MirrorPivoted)> {
        Err(no_mirrors())
    }
    /// Ends it.
    fn mirror_cancel(&self) -> Result<()> {
        Err(no_mirrors())
    }
}

impl<P: Plane> Table<P> {
    /// The open disk of this number, which must be running.
    pub(super) fn running(&self, minor: u16) -> Result<Arc<P::Disk>> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        match disk.state() {
            VbdState::Running => Ok(plane),
            state => Err(ControlError::new(Errno::EINVAL, format!("disk {minor} is {}", word(state)))
                .next("resume it first")),
        }
    }

    pub(super) fn pivot(&self, minor: u16) -> Result<MirrorPivoted> {
        let (image, pivoted) = self.running(minor)?.mirror_pivot()?;
        if let Some(open) = &mut lock(&self.disk(minor)?.now).open {
            open.image = image;
        }
        Ok(pivoted)
    }

    /// Where a full storage of the disk is announced, if its second image stands by.
    pub(super) fn marker(&self, minor: u16, standby: bool) -> Option<PathBuf> {
        standby.then(|| self.run.enospc_marker(minor))
    }
}
