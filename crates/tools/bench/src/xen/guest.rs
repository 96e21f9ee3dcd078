//! A guest of the double and the disk process that serves it.

use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tapio_control::command as ask;
use tapio_control::{
    BLKIF_INDIRECT_DEFAULT, BlkifFront, BlkifQueue, Front, ImageSource, OwnClient, Polling, RunDir,
    ShareReport, ShareSpec,
};
use tapio_stat::trace::{TraceData, read_trace};
use tapio_stat::{ShmRoot, Snapshot, disks};
use tapio_types::{Movement, TransferSizes};
use tapio_xen::blkfront::{Blkfront, FrontOptions, FrontQueue};

use crate::ground::Ground;
use crate::process::Process;

/// How long a disk process may take until it answers.
const START_MAX: Duration = Duration::from_secs(10);
/// Microseconds for which the disk process may spin, where polling is on.
const POLL_US: u32 = 32;

/// What is to be started.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The disk's image, as `type:/path`.
    pub image: String,
    /// How the guest uses the disk.
    pub front: FrontOptions,
    /// How its data is moved.
    pub movement: Movement,
    /// The disk process may spin for requests.
    pub polls: bool,
    /// The page pool that the disk shares.
    pub pool: Option<String>,
    /// How the disk shares its device.
    pub share: Option<ShareSpec>,
}

/// A disk process with one disk.
#[derive(Debug)]
pub struct Disk {
    /// The disk process.
    pub process: Process,
    client: OwnClient,
    minor: u16,
    shm: PathBuf,
}

/// A disk process and the guest that uses its disk.
#[derive(Debug)]
pub struct Guest {
    /// Its disk.
    pub disk: Disk,
    /// Its rings.
    pub queues: Vec<FrontQueue>,
    /// Its memory lives as long as its rings are used.
    pub front: Blkfront,
}

fn text(error: &dyn std::fmt::Display) -> String {
    error.to_string()
}

impl Disk {
    /// Starts a process and opens a disk of this image, `type:/path`; `number` tells processes apart.
    ///
    /// # Errors
    /// A sentence that says what failed.
    pub fn start(
        program: &Path,
        ground: &Ground,
        number: u32,
        (image, pool, share): (&str, Option<&str>, Option<ShareSpec>),
    ) -> Result<Self, String> {
        let (run_dir, shm) = (ground.run_dir().join("run"), ground.run_dir().join("shm"));
        let errors = ground.run_dir().join(format!("errors-{number}"));
        let mut command = Command::new(program);
        command.arg("--foreground").env("TAPIO_RUN_DIR", &run_dir).env("TAPIO_SHM_DIR", &shm);
        let log = File::create(&errors).map_err(|error| format!("{}: {error}", errors.display()))?;
        let process =
            Process::start(&mut command, log).map_err(|error| format!("{}: {error}", program.display()))?;
        let run_dir = RunDir::new(run_dir);
        let (process, mut client) = reach(process, &run_dir, &errors)?;
        let minor = open(&mut client, &run_dir, (image, pool, share))?;
        Ok(Self { process, client, minor, shm })
    }

    /// Serves the disk as a vhost-user device too.
    ///
    /// # Errors
    /// What the process answers.
    pub fn serve(&mut self, socket: &Path) -> Result<(), String> {
        let front = Front::VhostUser {
            socket: socket.to_path_buf(),
            listener: None,
            connection: None,
            queues: 1,
            queue_size: 256,
            read_only: false,
        };
        let ask = ask::FrontAdd { minor: self.minor, front, vbd: None };
        self.client.call(&ask, &[], Some(START_MAX)).map(drop).map_err(|error| text(&error))
    }

    /// How the disk shares its device.
    ///
    /// # Errors
    /// What the process answers.
    pub fn share(&mut self) -> Result<ShareReport, String> {
        let asked = self.client.call(&ask::Limits { minor: self.minor }, &[], Some(START_MAX));
        asked.map(|limits| limits.share.unwrap_or_default()).map_err(|error| text(&error))
    }

    /// How the disk's requests go to its storage from now on.
    ///
    /// # Errors
    /// What the process answers.
    pub fn set_transfers(&mut self, sizes: TransferSizes) -> Result<(), String> {
        let ask = ask::SetTransfers { minor: self.minor, sizes };
        self.client.call(&ask, &[], Some(START_MAX)).map(drop).map_err(|error| text(&error))
    }

    /// What the disk has counted so far.
    ///
    /// # Errors
    /// Its counters cannot be read.
    pub fn counters(&self) -> Result<Snapshot, String> {
        let files = disks(&ShmRoot::new(&self.shm)).map_err(|error| text(&error))?;
        let own = |page: &Snapshot| page.pid == self.process.pid() && page.minor == u32::from(self.minor);
        let found = files.iter().filter_map(|file| file.read().ok()).find(own);
        found.ok_or_else(|| "the disk publishes no counters".to_owned())
    }

    /// Begins a trace of the disk.
    ///
    /// # Errors
    /// What the process answers.
    pub fn trace(&mut self, events: u32) -> Result<(), String> {
        let ask = ask::TraceStart { minor: self.minor, events };
        self.client.call(&ask, &[], Some(START_MAX)).map(drop).map_err(|error| text(&error))
    }

    /// Ends the trace, and gives it.
    ///
    /// # Errors
    /// What the process answers, or why the trace cannot be read.
    pub fn traced(&mut self) -> Result<TraceData, String> {
        let minor = self.minor;
        let stop = |forget| ask::TraceStop { minor, forget };
        self.client.call(&stop(false), &[], Some(START_MAX)).map_err(|error| text(&error))?;
        let data = read_trace(&ShmRoot::new(&self.shm), self.process.pid(), self.minor.into());
        self.client.call(&stop(true), &[], Some(START_MAX)).map_err(|error| text(&error))?;
        data.map_err(|error| text(&error))
    }
}

impl Guest {
    /// Starts the process and connects the guest; `number` tells guests apart.
    ///
    /// # Errors
    /// A sentence that says what failed.
    pub fn start(program: &Path, ground: &Ground, number: u32, setup: &Setup) -> Result<Self, String> {
        let mut disk =
            Disk::start(program, ground, number, (&setup.image, setup.pool.as_deref(), setup.share))?;
        let mut front = Blkfront::new(setup.front.clone()).map_err(|error| text(&error))?;
        connect(&mut disk.client, &front, disk.minor, number, setup)?;
        Ok(Self { disk, queues: front.take_queues(), front })
    }
}

/// Waits until the process answers; what it said when it ends before.
fn reach(mut process: Process, run: &RunDir, errors: &Path) -> Result<(Process, OwnClient), String> {
    let begin = Instant::now();
    let pid = i32::try_from(process.pid()).map_err(|error| text(&error))?;
    loop {
        let why = match OwnClient::connect(run, pid) {
            Ok(client) => return Ok((process, client)),
            Err(error) => text(&error),
        };
        if process.has_ended() {
            let said = fs::read_to_string(errors).unwrap_or_default();
            return Err(format!("the disk process ended at once: {}", said.lines().last().unwrap_or("")));
        }
        if begin.elapsed() > START_MAX {
            return Err(format!("the disk process does not answer: {why}"));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Opens the disk; its minor number.
fn open(
    client: &mut OwnClient,
    run: &RunDir,
    (image, pool, share): (&str, Option<&str>, Option<ShareSpec>),
) -> Result<u16, String> {
    let (minor, _) = run.minors().allocate().map_err(|error| text(&error))?;
    let pool = pool.map(str::parse).transpose().map_err(|error| format!("{error}"))?;
    let open = ask::Open { pool, share, ..ask::Open::of(minor, ImageSource::Leaf(image.to_owned())) };
    client
        .call(&ask::Attach { minor }, &[], Some(START_MAX))
        .and_then(|_| client.call(&open, &[], Some(START_MAX)))
        .map_err(|error| text(&error))?;
    Ok(minor)
}

/// Connects the disk process to the guest's ring, and hands over what a hypervisor would.
fn connect(
    client: &mut OwnClient,
    front: &Blkfront,
    minor: u16,
    number: u32,
    setup: &Setup,
) -> Result<(), String> {
    let invitation = front.invitation().map_err(|error| text(&error))?;
    let mut fds: Vec<OwnedFd> = vec![invitation.memory];
    let mut queues = Vec::new();
    for ring in invitation.rings {
        let (wait, notify) = ring.wire.into_fds();
        let first = fds.len() as u32;
        fds.extend([wait, notify]);
        let grants = |grants: &[tapio_xen::GrantRef]| grants.iter().map(|grant| grant.0).collect();
        queues.push(BlkifQueue {
            ring: grants(&ring.ring),
            responses: grants(&ring.responses),
            double: Some([first, first + 1]),
            ..BlkifQueue::default()
        });
    }
    let polling = Polling { max_us: if setup.polls { POLL_US } else { 0 }, idle_percent: 0 };
    let front = BlkifFront {
        movement: setup.movement,
        max_indirect: setup.front.indirect.max(BLKIF_INDIRECT_DEFAULT),
        polling: Some(polling),
        double: Some(0),
        ..BlkifFront::new(number, 51712, queues)
    };
    let ask = ask::FrontAdd { minor, front: Front::Blkif(Box::new(front)), vbd: None };
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    client.call(&ask, &borrowed, Some(START_MAX)).map(drop).map_err(|error| text(&error))
}
