//! The files that are served, and where they lie.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_control::ControlError;
use tapio_format::vhd::offline::{self, Shape};
use tapio_load::Mix;

use super::fresh::{self, cannot_make};
use super::measure::{Job, Running, connect};
use super::server::{Backing, Program, Protocol, SERVERS, Server, Stand};
use super::site::Site;
use super::workload::{WORKLOADS, Workload};

/// Data is written in pieces of this size.
const PIECE_LEN: usize = 1 << 20;
/// Bytes of the blocks of a VHD.
const VHD_BLOCK_LEN: u64 = 2 << 20;
/// The largest disk that VHD knows, which has the largest table: 2040 GiB.
const LARGEST_LEN: u64 = 2040 << 30;

/// How large everything is.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of the images with data.
    pub full_len: u64,
    /// Bytes of the images without.
    pub fresh_len: u64,
    /// Requests into one of those, at most.
    pub fresh_requests_max: u64,
    /// Bytes that one of those may take of the storage, at most.
    pub fresh_space_max: u64,
}

impl Sizes {
    /// How many requests of a workload go into a fresh image.
    pub fn fresh_requests(&self, workload: &Workload, in_memory: bool) -> u64 {
        let written = u64::from(workload.block_len);
        // On a disk a VHD takes the whole space of each block that is written to; at random these are all different.
        let taken = if in_memory { written } else { written.max(VHD_BLOCK_LEN) };
        self.fresh_requests_max.min(self.fresh_space_max / taken).max(1)
    }
}

/// Two directories that are removed with this value: images lie where the user wants, sockets and counters in memory.
#[derive(Debug)]
pub struct Ground {
    dir: PathBuf,
    run_dir: PathBuf,
    pub site: Site,
    pub in_memory: bool,
    pub sizes: Sizes,
}

impl Ground {
    /// Makes both directories.
    pub fn new(dir: &Path, sizes: impl FnOnce(&Site, u64) -> Sizes) -> Result<Self, ControlError> {
        let own = format!("tapio-bench-{}", std::process::id());
        let shm = Path::new("/dev/shm");
        let run_root = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
        let run_dir = run_root.join(format!("{own}.run"));
        let found = std::path::absolute(dir).and_then(|dir| Ok((Site::of(&dir)?, free(&dir)?, dir)));
        let (site, free, dir) = found.map_err(|error| {
            ControlError::io(format_args!("cannot use {}", dir.display()), &error)
                .next("give a directory with --dir")
        })?;
        let (in_memory, sizes) = (site.in_memory, sizes(&site, free));
        let ground = Self { dir: dir.join(own), run_dir, site, in_memory, sizes };
        for dir in [&ground.dir, &ground.run_dir, &ground.run_dir.join("run"), &ground.run_dir.join("shm")] {
            fs::create_dir(dir)
                .map_err(|error| ControlError::io(format_args!("cannot make {}", dir.display()), &error))?;
        }
        Ok(ground)
    }

    /// What the server is started on for the workload; images that do not exist yet are made, fresh ones each time.
    pub fn stand(&self, server: &Server, workload: Option<&Workload>) -> Result<Stand, String> {
        let lanes = workload.map_or(1, |workload| workload.lanes);
        let (image, key, len) = if workload.is_some_and(|workload| workload.fresh) {
            let len = self.sizes.fresh_len;
            let (image, key) = fresh::image(&self.dir, server.backing, len)?;
            (image, key, len)
        } else {
            let image = match server.backing {
                Backing::Raw => self.raw()?,
                Backing::Vhd => self.vhd()?,
                Backing::Nothing => self.empty("empty.vhd", self.sizes.full_len)?,
                Backing::Differencing | Backing::Encrypted | Backing::Qcow2 => {
                    return Err(format!("{} has no image with data", server.name));
                }
            };
            (image, None, self.sizes.full_len)
        };
        Ok(Stand { key, lanes, ..self.on(image, len) })
    }

    /// Before a measurement: fresh images of the last are removed, and the disk has nothing left to write.
    pub fn settle(&self) -> Result<(), String> {
        fresh::remove(&self.dir)?;
        if self.in_memory {
            return Ok(());
        }
        let settled = File::open(&self.dir).and_then(|dir| Ok(rustix::fs::syncfs(&dir)?));
        settled.map_err(|error| format!("cannot sync {}: {error}", self.dir.display()))
    }

    /// The same for a VHD with the largest table there is.
    pub fn largest(&self) -> Result<Stand, String> {
        Ok(self.on(self.empty("largest.vhd", LARGEST_LEN)?, LARGEST_LEN))
    }

    /// Where images lie.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where processes keep their sockets and counters.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    fn on(&self, image: PathBuf, len: u64) -> Stand {
        Stand {
            image,
            len,
            key: None,
            lanes: 1,
            socket: self.run_dir.join("socket"),
            in_memory: self.in_memory,
            run_dir: self.run_dir.clone(),
        }
    }

    /// An image that reads as zeroes and keeps nothing.
    pub fn empty(&self, name: &str, len: u64) -> Result<PathBuf, String> {
        let path = self.dir.join(name);
        offline::create(&path, &Shape::Dynamic, len, 0).map_err(|error| error.to_string())?;
        Ok(path)
    }

    /// The image with data.
    pub fn raw(&self) -> Result<PathBuf, String> {
        let path = self.dir.join("disk.raw");
        if !path.exists() {
            self.fill(&path).map_err(|error| cannot_make(&path, &error))?;
        }
        Ok(path)
    }

    fn fill(&self, path: &Path) -> io::Result<()> {
        let piece = vec![0x5a; PIECE_LEN];
        let mut file = File::create(path)?;
        for _ in 0..self.sizes.full_len / PIECE_LEN as u64 {
            file.write_all(&piece)?;
        }
        file.sync_all()
    }

    /// A VHD whose blocks are all there, written through a server of ours as a guest would.
    fn vhd(&self) -> Result<PathBuf, String> {
        let path = self.dir.join("disk.vhd");
        if path.exists() {
            return Ok(path);
        }
        let len = self.sizes.full_len;
        let made = self.empty("disk.vhd.new", len)?;
        let is_ours = |server: &&Server| {
            (server.program, server.protocol, server.backing) == (Program::Tapio, Protocol::Nbd, Backing::Vhd)
        };
        let Some(server) = SERVERS.iter().find(is_ours) else { return Err("no server of ours".into()) };
        let stand = self.on(made.clone(), len);
        let (mut running, _, _) = Running::start(server, &server.program()?, &stand, connect)?;
        let workload = Workload {
            mix: Mix::SequentialWrite,
            block_len: PIECE_LEN as u32,
            depth: 4,
            fresh: true,
            ..WORKLOADS[0]
        };
        // One after the other from anywhere, so this many requests write everything once.
        let requests_max = len / PIECE_LEN as u64;
        let job = Job { workload, len, time: Duration::from_secs(300), requests_max, seed: 1 };
        let sample = running.load(&job, Duration::ZERO)?;
        if sample.errors > 0 {
            return Err(format!("{} of the writes into {} failed", sample.errors, made.display()));
        }
        running.process.end();
        fs::rename(&made, &path).map_err(|error| cannot_make(&path, &error))?;
        Ok(path)
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        for dir in [&self.dir, &self.run_dir] {
            if let Err(error) = fs::remove_dir_all(dir)
                && error.kind() != io::ErrorKind::NotFound
            {
                eprintln!("tapio bench: {} is left over: {error}", dir.display());
            }
        }
    }
}

/// What a user may still write, in bytes.
fn free(dir: &Path) -> io::Result<u64> {
    let space = rustix::fs::statvfs(dir)?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_images_are_written_to_as_far_as_there_is_space() {
        let sizes = Sizes {
            full_len: 1 << 30,
            fresh_len: 64 << 30,
            fresh_requests_max: 1000,
            fresh_space_max: 1 << 30,
        };
        let small = WORKLOADS.iter().find(|workload| workload.block_len == 4096).expect("there is one");
        let large = WORKLOADS.iter().find(|workload| workload.block_len == 1 << 20).expect("there is one");
        assert_eq!(sizes.fresh_requests(small, true), 1000);
        assert_eq!(sizes.fresh_requests(small, false), 512, "each may take a block of the disk");
        assert_eq!(sizes.fresh_requests(large, true), 1000);
        assert_eq!(Sizes { fresh_space_max: 0, ..sizes }.fresh_requests(large, true), 1);
    }
}
