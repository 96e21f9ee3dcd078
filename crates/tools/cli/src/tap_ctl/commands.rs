//! The commands that are more than one question.

use std::io::{self, IsTerminal};
use std::time::Duration;

use tapio_control::{
    Client, Errno, Key, OpenArguments, ResumeArguments, RunDir, SpawnOptions, disk_program, flags,
};

use super::{Image, Which};
use tapio_report::failure::{Result, print};

pub fn seconds(timeout: Option<u64>) -> Option<Duration> {
    timeout.map(Duration::from_secs)
}

pub fn allocate(run: &RunDir) -> Result<()> {
    let (_, marker) = run.minors().allocate()?;
    print(&format!("{}\n", marker.display()))
}

pub fn spawn() -> Result<()> {
    let pid = start()?;
    if io::stdout().is_terminal() {
        print(&format!("tapdisk spawned with pid {pid}\n"))
    } else {
        print(&format!("{pid}\n"))
    }
}

fn start() -> Result<i32> {
    tapio_control::spawn(&SpawnOptions::new(disk_program()))
}

impl Image {
    fn arguments(&self, key: Option<Key>) -> OpenArguments {
        let set = |on: bool, flag: u32| if on { flag } else { 0 };
        OpenArguments {
            image: self.image.clone(),
            flags: set(self.read_only, flags::RDONLY)
                | set(self.page_cache, flags::NO_O_DIRECT)
                | set(self.leaf_cache, flags::ADD_LCACHE)
                | set(self.standby, flags::STANDBY),
            parent_minor: self.parents_of,
            secondary: self.secondary.clone(),
            request_timeout_s: self.timeout.unwrap_or(0),
            log_path: self.log.clone(),
            key,
        }
    }
}

/// Everything, and nothing of it when a step fails.
pub fn create(run: &RunDir, image: &Image) -> Result<()> {
    let minors = run.minors();
    let (minor, marker) = minors.allocate()?;
    let made = start().and_then(|pid| {
        let client = Client::new(run, pid);
        client.attach(minor)?;
        client.open(minor, &image.arguments(None)).inspect_err(|_| {
            // The process ends with its last disk. What failed first is what the caller must know.
            let _ = client.detach(minor);
        })
    });
    match made {
        Ok(_) => print(&format!("{}\n", marker.display())),
        Err(error) => {
            let _ = minors.free(minor);
            Err(error)
        }
    }
}

pub fn destroy(run: &RunDir, which: Which, timeout: Option<u64>) -> Result<()> {
    let client = which.client(run);
    client.close(which.minor, false, seconds(timeout))?;
    client.detach(which.minor)?;
    match run.minors().free(which.minor) {
        // A process that took the number for itself ('tapio-disk --image') has given it back with the disk.
        Err(error) if error.errno == Errno::ENOENT => Ok(()),
        freed => freed,
    }
}

pub fn open(run: &RunDir, which: Which, image: &Image, encrypted: bool) -> Result<()> {
    let key = if encrypted { Some(Key::read(io::stdin().lock())?) } else { None };
    which.client(run).open(which.minor, &image.arguments(key)).map(|_| ())
}

pub fn unpause(
    run: &RunDir,
    which: Which,
    image: Option<String>,
    secondary: Option<String>,
    log_path: Option<String>,
) -> Result<()> {
    which.client(run).resume(which.minor, &ResumeArguments { image, secondary, log_path })
}
