//! Where the control sockets and their companions are.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::{ControlError, Result};

/// Where tapdisk has it.
const DEFAULT: &str = "/run/blktap-control";

/// The directory of control sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// `TAPIO_RUN_DIR`, or `/run/blktap-control` without it.
    pub fn from_env() -> Self {
        match std::env::var_os("TAPIO_RUN_DIR") {
            Some(dir) if !dir.is_empty() => Self(dir.into()),
            _ => Self(DEFAULT.into()),
        }
    }

    /// A directory of one's own, for tests.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The control socket of a process.
    pub fn socket(&self, pid: i32) -> PathBuf {
        self.0.join(format!("ctl{pid}"))
    }

    /// The NBD socket of a disk, made when the image is opened.
    pub fn nbd_socket(&self, pid: u32, minor: u16) -> PathBuf {
        self.0.join(format!("nbd{pid}.{minor}"))
    }

    /// The file that says that a disk went over to its second image because the first is full. tapdisk makes it in
    /// `/run`, beside its directory.
    pub fn enospc_marker(&self, minor: u16) -> PathBuf {
        let dir = if self.0 == Path::new(DEFAULT) { Path::new("/run") } else { &self.0 };
        dir.join(format!("tapdisk-enospc{minor}"))
    }

    /// Makes the directory, for its owner alone.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn create(&self) -> Result<()> {
        create_dir(&self.0)
    }

    /// The process number in a socket's path as a disk process prints it.
    pub fn pid_in(path: &str) -> Option<i32> {
        let digits = path.trim().rsplit('/').next()?.strip_prefix("ctl")?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    }
}

pub(crate) fn create_dir(dir: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| {
        ControlError::io(format_args!("cannot make the directory {}", dir.display()), &error)
            .next("run as root, or set TAPIO_RUN_DIR to a directory you may write")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_of_a_full_disk_is_where_tapdisk_has_it() {
        assert_eq!(RunDir::new(DEFAULT).enospc_marker(4), Path::new("/run/tapdisk-enospc4"));
        assert_eq!(RunDir::new("/tmp/x").enospc_marker(4), Path::new("/tmp/x/tapdisk-enospc4"));
    }

    #[test]
    fn a_printed_path_names_a_process() {
        assert_eq!(RunDir::pid_in("/run/blktap-control/ctl9262\n"), Some(9262));
        for bad in ["", "/run/ctl", "/run/ctl-5", "/run/ctl5x", "/run/xctl5", "ctl99999999999"] {
            assert_eq!(RunDir::pid_in(bad), None, "{bad}");
        }
    }
}
