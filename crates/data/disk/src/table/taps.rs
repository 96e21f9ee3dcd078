//! The taps of a disk: a second image, a log of changed blocks.

use std::path::PathBuf;

use tapio_control::{ControlError, Errno, ImageSource, Result};

/// A second image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secondary {
    /// The image.
    pub image: ImageSource,
    /// For a leaf that waits until the first is full: the file that says so then. A mirror without.
    pub marker: Option<PathBuf>,
}

/// The taps that a disk has from the first request on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapRequest {
    /// A second image.
    pub secondary: Option<Secondary>,
    /// The log of changed blocks.
    pub log: Option<PathBuf>,
}

impl TapRequest {
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
    pub fn of(secondary: Option<&str>, marker: Option<PathBuf>, log: Option<PathBuf>) -> Result<Self> {
        let Some(text) = secondary.filter(|text| *text != NO_SECONDARY) else {
            return match marker {
                None => Ok(Self { secondary: None, log }),
                Some(_) => Err(ControlError::new(Errno::EINVAL, "no second image was named to take over")
                    .next("name it with -2, or leave out -s")),
            };
        };
        let image = ImageSource::Leaf(text.to_owned());
        image.check()?;
        Ok(Self { secondary: Some(Secondary { image, marker }), log })
    }
}

/// What `-2` says that ends a second image.
const NO_SECONDARY: &str = "null";
