//! The files that are served, and where they lie.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_control::ControlError;
use tapio_format::vhd::offline::{self, Shape};
use tapio_load::Mix;

use super::measure::{Job, Running, connect};
use super::server::{Backing, Program, Protocol, SERVERS, Server, Stand};
use super::workload::{WORKLOADS, Workload};

/// Data is written in pieces of this size.
const PIECE_LEN: usize = 1 << 20;
/// The largest disk that VHD knows, which has the largest table: 2040 GiB.
const LARGEST_LEN: u64 = 2040 << 30;

/// How large everything is.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of the images with data.
    pub full_len: u64,
    /// Bytes of the images without; one in four of their blocks of 2 MiB is written to, at most.
    pub fresh_len: u64,
    /// Requests into one of those.
    pub fresh_requests: u64,
}

/// Two directories that are removed with this value: images lie where the user wants, sockets and counters in memory.
#[derive(Debug)]
pub struct Ground {
    dir: PathBuf,
    run_dir: PathBuf,
    pub in_memory: bool,
    pub sizes: Sizes,
}

impl Ground {
    /// Makes both directories and the raw image.
    pub fn new(dir: &Path, sizes: impl FnOnce(bool) -> Sizes) -> Result<Self, ControlError> {
        let own = format!("tapio-bench-{}", std::process::id());
        let shm = Path::new("/dev/shm");
        let run_root = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
        let run_dir = run_root.join(format!("{own}.run"));
        let found = std::path::absolute(dir).and_then(|dir| Ok((is_in_memory(&dir)?, dir)));
        let (in_memory, dir) = found.map_err(|error| {
            ControlError::io(format_args!("cannot use {}", dir.display()), &error)
                .next("give a directory with --dir")
        })?;
        let ground = Self { dir: dir.join(own), run_dir, in_memory, sizes: sizes(in_memory) };
        for dir in [&ground.dir, &ground.run_dir, &ground.run_dir.join("run"), &ground.run_dir.join("shm")] {
            fs::create_dir(dir)
                .map_err(|error| ControlError::io(format_args!("cannot make {}", dir.display()), &error))?;
        }
        Ok(ground)
    }

    /// What the server is started on for the workload; images that do not exist yet are made, fresh ones each time.
    pub fn stand(&self, server: &Server, workload: Option<&Workload>) -> Result<Stand, String> {
        let fresh = workload.is_some_and(|workload| workload.fresh);
        let len = if fresh { self.sizes.fresh_len } else { self.sizes.full_len };
        let image = match (server.backing, fresh) {
            (Backing::Raw, true) => self.sparse(len)?,
            (Backing::Vhd | Backing::Nothing, true) => self.empty("fresh.vhd", len)?,
            (Backing::Raw, false) => self.raw()?,
            (Backing::Vhd, false) => self.vhd()?,
            (Backing::Nothing, false) => self.empty("empty.vhd", len)?,
        };
        Ok(self.on(image, len))
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
            socket: self.run_dir.join("socket"),
            in_memory: self.in_memory,
            run_dir: self.run_dir.clone(),
        }
    }

    fn sparse(&self, len: u64) -> Result<PathBuf, String> {
        let path = self.dir.join("sparse");
        let made = File::create(&path).and_then(|file| file.set_len(len));
        made.map_err(|error| cannot_make(&path, &error))?;
        Ok(path)
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

fn cannot_make(path: &Path, error: &io::Error) -> String {
    format!("cannot make {}: {error}", path.display())
}

/// Whether a directory's file system is one in memory.
fn is_in_memory(dir: &Path) -> io::Result<bool> {
    let file = File::open(dir)?;
    Ok(rustix::fs::fstatfs(&file)?.f_type == libc::TMPFS_MAGIC)
}
