//! Files that servers export by FUSE.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::server::{Program, Server, Stand};

/// Where a server's exported file appears.
#[derive(Debug)]
pub struct Exported {
    /// The file itself, where the server mounts on one of ours.
    own: Option<PathBuf>,
    /// The directory in which a disk process of ours makes a directory of its own.
    dir: PathBuf,
}

impl Exported {
    /// Makes the file that a server may mount on.
    pub fn prepare(stand: &Stand) -> Result<(), String> {
        unmount(&stand.socket);
        File::create(&stand.socket)
            .map(drop)
            .map_err(|error| format!("cannot make {}: {error}", stand.socket.display()))
    }

    /// Where `server` exports.
    pub fn of(server: &Server, stand: &Stand) -> Self {
        let own = (server.program != Program::Tapio).then(|| stand.socket.clone());
        Self { own, dir: stand.run_dir.join("run/device") }
    }

    /// The file, once it is there.
    pub fn file(&self) -> Result<PathBuf, String> {
        let found = match &self.own {
            Some(file) => Some(file.clone()),
            None => mounts(&self.dir).into_iter().map(|dir| dir.join("disk")).find(|file| file.exists()),
        };
        let exported = |file: &PathBuf| fs::metadata(file).is_ok_and(|data| data.len() > 0);
        found.filter(exported).ok_or_else(|| "it exports no file yet".to_owned())
    }

    /// Takes the mount of a server that has ended away: a killed one leaves it.
    pub fn end(&self) {
        if let Some(file) = &self.own {
            unmount(file);
        }
    }
}

fn mounts(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).collect()
}

fn unmount(place: &Path) {
    // What is no mount stays as it is.
    let _ = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
}
