//! What the images of a disk lie on.

use std::path::{Path, PathBuf};

use tapio_e2e::faulty::Faulty;
use tapio_e2e::scratch::{Scratch, SmallFileSystem};

use super::{Base, MIB};

/// Bytes of the storage that fails and hangs.
pub const FAULTY_LEN: u64 = 24 * MIB;

/// Bytes of a VHD on it.
pub const FAULTY_VHD_LEN: u64 = 16 * MIB;

/// Bytes of the file system that is filled up.
const SMALL_LEN: u64 = 320 * MIB;

/// What images lie on.
#[derive(Debug)]
pub enum Storage {
    /// The directory of the run.
    Plain,
    /// A file system of its own.
    Small(SmallFileSystem),
    /// One that does as it is told, and the file or device that it is.
    Faulty(Box<Faulty>, PathBuf),
}

impl Storage {
    /// The storage for a kind of disk, or why there is none here.
    pub fn new(base: Base, scratch: &Scratch) -> Result<Self, String> {
        match base {
            Base::Small => {
                let small = SmallFileSystem::mount(SMALL_LEN);
                small.map(Self::Small).map_err(|reason| format!("needs root to mount: {reason}"))
            }
            Base::FaultyRaw => {
                let faulty = Faulty::start(scratch, FAULTY_LEN, &[])?;
                let file = faulty.file().to_path_buf();
                Ok(Self::Faulty(Box::new(faulty), file))
            }
            Base::FaultyVhd => {
                if tapio_e2e::tools::find("losetup").is_none() {
                    return Err("needs losetup".into());
                }
                let mut faulty = Faulty::start(scratch, FAULTY_LEN, &[])?;
                let device = faulty.device()?;
                Ok(Self::Faulty(Box::new(faulty), device))
            }
            _ => Ok(Self::Plain),
        }
    }

    /// Where images are made.
    pub fn dir(&self, scratch: &Scratch) -> PathBuf {
        match self {
            Self::Small(small) => small.path().to_path_buf(),
            _ => scratch.join("images"),
        }
    }

    /// The one image that it is.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Faulty(_, file) => Some(file),
            _ => None,
        }
    }

    /// Whether it may be full.
    pub const fn is_small(&self) -> bool {
        matches!(self, Self::Small(_))
    }

    /// Errors that commands may answer here, in addition to those that they may answer anywhere.
    pub const fn allowed<'a>(&self, anywhere: &'a [i32]) -> &'a [i32] {
        match self {
            Self::Small(_) => &[libc::ENOSPC, libc::ETIMEDOUT],
            _ => anywhere,
        }
    }
}
