//! The disk processes of this host that have images of an SR open. They are stopped while it is not known whether the
//! lease is this host's, so that none writes to what another host may have taken over.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

/// The program of disk processes.
const PROGRAM: &str = "tapio-disk";

/// How an SR's images are known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Images {
    /// By a directory, as the kernel names it.
    Below(PathBuf),
    /// By the device mapper's name of their group, with the dash behind it.
    Group(String),
}

impl Images {
    /// Processes that have some open.
    pub(crate) fn users(&self) -> Vec<Pid> {
        let devices = match self {
            Self::Below(_) => Vec::new(),
            Self::Group(prefix) => devices_of(prefix),
        };
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<i32>().ok());
        pids.filter(|pid| is_disk_process(*pid) && self.is_open_in(*pid, &devices))
            .filter_map(Pid::from_raw)
            .collect()
    }

    fn is_open_in(&self, pid: i32, devices: &[u64]) -> bool {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors.into_iter().any(|entry| match self {
            // The link alone is read: what it leads to may hang.
            Self::Below(directory) => {
                fs::read_link(entry.path()).is_ok_and(|path| path.starts_with(directory))
            }
            Self::Group(_) => fs::metadata(entry.path())
                .is_ok_and(|data| data.file_type().is_block_device() && devices.contains(&data.rdev())),
        })
    }

    /// Sends them a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        for pid in self.users() {
            if let Err(error) = kill_process(pid, signal) {
                tracing::debug!("disk process {pid:?}: {error}");
            }
        }
    }
}

fn is_disk_process(pid: i32) -> bool {
    let program = fs::read_link(format!("/proc/{pid}/exe"));
    let is_it = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // An upgrade has put another file in its place.
        name.trim_end_matches(" (deleted)") == PROGRAM
    };
    program.is_ok_and(is_it)
}

/// The numbers of device mapper's devices whose names begin so.
fn devices_of(prefix: &str) -> Vec<u64> {
    let number = |path: &Path| {
        let name = fs::read_to_string(path.join("dm/name")).ok()?;
        let text = fs::read_to_string(path.join("dev")).ok().filter(|_| name.starts_with(prefix))?;
        let (major, minor) = text.trim().split_once(':')?;
        Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
    };
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    entries.filter_map(|entry| number(&entry.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_program_is_a_disk_process() {
        let dir = tempfile::tempdir().expect("a directory");
        let _open = fs::File::create(dir.path().join("image")).expect("a file");
        let images = Images::Below(dir.path().to_path_buf());
        let own = std::process::id().cast_signed();
        assert!(images.is_open_in(own, &[]), "this process has it open");
        assert_eq!(images.users(), [], "and is no disk process");
        assert!(Images::Group("VG_XenStorage--none-".into()).users().is_empty());
    }
}
