//! Disk processes by their control sockets.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_control::command::{self, Command, DiskCommand, SecretName};
use tapio_control::{
    ControlError, DiskInfo, Errno, Front, ImageSource, MirrorCopy, MirrorReport, NbdGuard, OwnClient,
    PoolSpec, ProcessState, ROOM_SOCKET_VARIABLE, RoomReport, RunDir, SWAP_LEAF, SWAP_LOG, ShareSpec,
    SpawnOptions, TRANSFERS, TlsMode, TlsSettings, VbdState, processes, remove_stale_sockets, spawn,
};
use tapio_model::ApiError;
use tapio_sm::{LeafSwap, OpenSpec, Shortened};
use tapio_stat::pool::{PoolInfo, clean_pools};
use tapio_stat::{DiskFile, ShmRoot, Snapshot, VbdId, clean_stale};
use tapio_sys::poll;
use tapio_sys::process::{self, Signal, Stat};
use tapio_types::{Access, ChainSpec, DeviceHow, IoLimits};
use tapio_vm::FrontSpec;
use uuid::Uuid;

use super::backend::{Backend, Offer, Process, Rights, Tuning, polling};
use super::place::ExportNote;

/// In the environment of our processes: the VBD, and whose it is.
const VBD_VARIABLE: &str = "TAPIO_VBD";
const OWNER_VARIABLE: &str = "TAPIO_OWNER";
/// How long a process that was killed may take to be gone.
const KILLED: Duration = Duration::from_secs(5);
/// How long a conversation is kept for the next step.
const KEPT: Duration = Duration::from_secs(1);
/// Milliseconds that the images of a mirror may take for one answer before the disk goes on without them: storage that
/// is busy with the copy itself is slow, and a move that is given up begins anew.
const MIRROR_TIMEOUT_MS: u32 = 30_000;
/// How long an answer without work behind it may take.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// The real ones.
#[derive(Debug)]
pub struct Processes {
    program: PathBuf,
    run: RunDir,
    /// Where they publish statistics and share pages.
    shm: ShmRoot,
    /// The mark of our processes, which distinguishes them from those of other owners on this host.
    owner: String,
    /// Where they send their lines; none: to the system's log.
    log_socket: Option<PathBuf>,
    /// Where they ask for room; none: nowhere.
    room_socket: Option<PathBuf>,
    /// Conversations that go on soon: a disk that was opened is offered next, and each conversation costs a thread.
    kept: Mutex<BTreeMap<Process, (Instant, OwnClient)>>,
}

impl Processes {
    /// Those of `owner`, running `program`.
    pub fn new(program: PathBuf, run: RunDir, shm: ShmRoot, owner: String) -> Self {
        Self { program, run, shm, owner, log_socket: None, room_socket: None, kept: Mutex::default() }
    }

    /// They send their lines to this socket from now on.
    pub fn log_to(self, log_socket: Option<PathBuf>) -> Self {
        Self { log_socket, ..self }
    }

    /// They ask for room at this socket from now on.
    pub fn room_at(self, room_socket: PathBuf) -> Self {
        Self { room_socket: Some(room_socket), ..self }
    }

    fn client(&self, process: Process) -> Result<OwnClient, ApiError> {
        OwnClient::connect(&self.run, process.pid).map_err(|error| failed(&error))
    }

    fn keep(&self, process: Process, client: OwnClient) {
        let mut kept = self.kept.lock();
        kept.insert(process, (Instant::now(), client));
    }

    /// The conversation that was kept, unless it has become old: an idle one may be closed by its other end.
    fn take_kept(&self, process: Process) -> Option<OwnClient> {
        let kept = self.kept.lock().remove(&process);
        kept.and_then(|(since, client)| (since.elapsed() < KEPT).then_some(client))
    }

    /// As [`Self::ask`], in the conversation that was kept, if there is one.
    fn go_on<C: DiskCommand>(
        &self,
        process: Process,
        command: &C,
        until: Instant,
    ) -> Result<C::Reply, ApiError> {
        let Some(mut client) = self.take_kept(process) else { return self.ask(process, command, until) };
        match client.call(command, &[], Some(left(until))) {
            // It was closed before it was read from: nothing has been done.
            Err(error) if matches!(error.errno, Errno::ECONNRESET | Errno::EPIPE) => {
                self.ask(process, command, until)
            }
            answer => answer.map_err(|error| failed(&error)),
        }
    }

    fn ask<C: DiskCommand>(
        &self,
        process: Process,
        command: &C,
        until: Instant,
    ) -> Result<C::Reply, ApiError> {
        let client = &mut self.client(process)?;
        call(client, command, until)
    }
}

fn left(until: Instant) -> Duration {
    // A deadline that has passed still lets a question be asked that is answered at once.
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(50))
}

fn call<C: DiskCommand>(client: &mut OwnClient, command: &C, until: Instant) -> Result<C::Reply, ApiError> {
    client.call(command, &[], Some(left(until))).map_err(|error| failed(&error))
}

/// Whether a process of ours that has this error went before it answered. One that hangs up at the greeting is taken
/// for a foreign program (`EPROTO`), which ours are not.
const fn has_hung_up(error: &ControlError) -> bool {
    matches!(error.errno, Errno::ECONNRESET | Errno::EPIPE | Errno::ECONNREFUSED | Errno::EPROTO)
}

/// A disk process's error as a storage driver's: 453 is what tapdisk's failures are called.
fn failed(error: &ControlError) -> ApiError {
    let next = error.next.as_ref().map_or_else(String::new, |next| format!("; {next}"));
    let number = match error.errno {
        Errno::EBUSY | Errno::EAGAIN | Errno::EALREADY => 46,
        _ => 453,
    };
    ApiError::backend(number, format!("disk process: {}{next} [{}]", error.message, error.errno.name()), "")
}

/// The clock tick in which a process was started; none when it is gone, or a zombie.
pub(super) fn started(pid: i32) -> Option<u64> {
    let stat = Stat::of(u32::try_from(pid).ok()?).ok()?;
    (!stat.has_ended()).then_some(stat.start)
}

/// A descriptor of the process, if it is still the one that is meant.
pub(super) fn pidfd(process: Process) -> Option<OwnedFd> {
    let pid = u32::try_from(process.pid).ok()?;
    let fd = process::open(pid).ok()?;
    // Looked at after the descriptor was made: it names this very process from now on.
    let stat = Stat::of(pid).ok().filter(|stat| stat.start == process.started)?;
    if stat.has_ended() {
        process::reap(&fd);
        return None;
    }
    Some(fd)
}

/// Waits until the process has ended; answers whether it has.
fn wait_for_end(fd: &OwnedFd, until: Instant) -> bool {
    loop {
        match poll::is_readable(fd, left(until)) {
            Ok(true) => {
                process::reap(fd);
                return true;
            }
            Ok(false) if Instant::now() < until => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(false) | Err(_) => return false,
        }
    }
}

/// A variable of a process's environment.
fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    environment
        .split(|byte| *byte == 0)
        .filter_map(|pair| std::str::from_utf8(pair).ok()?.split_once('='))
        .find_map(|(key, value)| (key == name).then(|| value.to_owned()))
}

fn set_io_priority(process: Process, priority: u16) {
    const WHO_PROCESS: i32 = 1;
    let threads = fs::read_dir(format!("/proc/{}/task", process.pid)).into_iter().flatten().flatten();
    for thread in threads.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
        // SAFETY: no memory is passed. A thread that is gone needs no priority.
        unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, thread, i32::from(priority)) };
    }
}

impl Backend for Processes {
    fn start(&self, vbd: Uuid, rights: Rights, until: Instant) -> Result<Process, ApiError> {
        let mut options = SpawnOptions::new(&self.program);
        options.timeout = left(until);
        options.is_child = true;
        // The daemon removes once what dead processes left; processes with devices remove devices that others left.
        options.arguments.push(if rights.devices { "--devices" } else { "--no-clean-up" }.to_owned());
        if rights.rbd {
            options.arguments.push("--rbd".to_owned());
        }
        options.environment = vec![
            (VBD_VARIABLE.into(), vbd.to_string()),
            (OWNER_VARIABLE.into(), self.owner.clone()),
            ("TAPIO_RUN_DIR".into(), self.run.path().display().to_string()),
            ("TAPIO_SHM_DIR".into(), self.shm.path().display().to_string()),
        ];
        options.environment.extend(
            self.log_socket.as_ref().map(|path| ("TAPIO_LOG_SOCKET".into(), path.display().to_string())),
        );
        options.environment.extend(
            self.room_socket.as_ref().map(|path| (ROOM_SOCKET_VARIABLE.into(), path.display().to_string())),
        );
        let pid = spawn(&options).map_err(|error| failed(&error))?;
        let started = started(pid).ok_or_else(|| {
            ApiError::backend(
                453,
                format!("disk process {pid} of VBD {vbd} ended as soon as it had begun"),
                "",
            )
        })?;
        Ok(Process { pid, started })
    }

    fn free_minor(&self, used: &dyn Fn(u16) -> bool) -> Result<u16, ApiError> {
        let taken = self.run.minors().allocated().map_err(|error| failed(&error))?;
        (0..tapio_control::MINOR_MAX)
            .find(|minor| !used(*minor) && taken.binary_search(minor).is_err())
            .ok_or_else(|| ApiError::backend(453, "all minor numbers of disks are taken; unplug some", ""))
    }

    fn take_minor(&self, process: Process, minor: u16, until: Instant) -> Result<bool, ApiError> {
        let taken = self.run.minors().claim(minor).and_then(|minor| {
            let attach = command::Attach { minor };
            OwnClient::connect_and_call(&self.run, process.pid, &attach, Some(left(until)))
        });
        match taken {
            Ok((client, _)) => {
                self.keep(process, client);
                Ok(true)
            }
            // Between the look for a free number and the claim another toolstack or tap-ctl came.
            Err(error) if error.errno == Errno::EAGAIN => Ok(false),
            Err(error) => Err(failed(&error)),
        }
    }

    fn open(
        &self,
        process: Process,
        minor: u16,
        with: &OpenSpec,
        pool: &PoolSpec,
        tuning: &Tuning,
        until: Instant,
    ) -> Result<DiskInfo, ApiError> {
        let mut client = self.take_kept(process).map_or_else(|| self.client(process), Ok)?;
        let open = command::Open {
            read_only: with.chain.access == Access::ReadOnly,
            log: with.log.clone(),
            pool: Some(pool.clone()),
            sector_size: tuning.sector_size,
            share: (tuning.share != ShareSpec::default()).then_some(tuning.share),
            ..command::Open::of(minor, ImageSource::Chain(with.chain.layers.clone()))
        };
        let limits = (tuning.limits != IoLimits::default())
            .then_some(command::SetLimits { minor, limits: tuning.limits });
        let polls = (tuning.polling.0 > 0).then(|| command::SetPolling::of(minor, polling(tuning.polling)));
        let transfers =
            (!tuning.transfers.is_off()).then_some(command::SetTransfers { minor, sizes: tuning.transfers });
        let more = [limits.map(Command::from), polls.map(Command::from), transfers.map(Command::from)];
        let commands: Vec<Command> = std::iter::once(open.into()).chain(more.into_iter().flatten()).collect();
        let answers = client.call_all(&commands, Some(left(until))).map_err(|error| failed(&error))?;
        if let Some(priority) = tuning.io_priority {
            set_io_priority(process, priority);
        }
        let info = answers.into_iter().next().and_then(|answer| serde_json::from_value(answer).ok());
        let misunderstood =
            || ApiError::internal(format!("the answer of disk process {} was not understood", process.pid));
        let info = info.ok_or_else(misunderstood)?;
        self.keep(process, client);
        Ok(info)
    }

    fn offer(
        &self,
        process: Process,
        minor: u16,
        front: &FrontSpec,
        access: Access,
        id: Option<VbdId>,
        until: Instant,
    ) -> Result<Offer, ApiError> {
        let read_only = access == Access::ReadOnly;
        let front = match front {
            FrontSpec::Nothing => {
                drop(self.take_kept(process));
                return Ok(Offer::default());
            }
            // The back end of Xen (tapio-tapback) adds the front end at each connection; this names the disk to it.
            FrontSpec::Xen => {
                drop(self.take_kept(process));
                let pid = u32::try_from(process.pid).unwrap_or(0);
                return Ok(Offer { id: None, node: Some(self.run.nbd_socket(pid, minor)) });
            }
            FrontSpec::VhostUser { socket, queues } => Front::VhostUser {
                socket: socket.clone(),
                listener: None,
                connection: None,
                queues: *queues,
                queue_size: 1024,
                read_only,
            },
            FrontSpec::Nbd { socket } => {
                Front::NbdUnix { path: socket.clone(), listener: None, export: String::new(), read_only }
            }
            FrontSpec::Device => Front::Block { how: DeviceHow::Auto, device: None, read_only, owner: None },
            FrontSpec::File { owner } => {
                Front::Block { how: DeviceHow::FuseFile, device: None, read_only, owner: *owner }
            }
        };
        let entry = self.go_on(process, &command::FrontAdd { minor, front, vbd: id }, until)?;
        let node = match entry.front {
            Front::Block { device, .. } => device,
            _ => None,
        };
        Ok(Offer { id: Some(entry.id), node })
    }

    fn export(
        &self,
        process: Process,
        minor: u16,
        name: &str,
        export: &ExportNote,
        until: Instant,
    ) -> Result<Option<Vec<u32>>, ApiError> {
        let mut client = self.take_kept(process).map_or_else(|| self.client(process), Ok)?;
        let mut fronts = Vec::new();
        for place in &export.places {
            let mode = if place.secure { TlsMode::Required } else { TlsMode::Offered };
            let front = Front::NbdTcp {
                addr: (place.address, export.port).into(),
                tls: Some(TlsSettings { mode, dir: Some(export.tls.clone()), ..TlsSettings::default() }),
                export: name.to_owned(),
                read_only: !export.is_written,
                guard: (!export.is_written).then_some(NbdGuard { client_time_s: export.client_time_s }),
            };
            let add = command::FrontAdd { minor, front, vbd: None };
            match client.call(&add, &[], Some(left(until))) {
                Ok(entry) => fronts.push(entry.id),
                Err(error) => {
                    for front in fronts {
                        let remove = command::FrontRemove { minor, front, force: true };
                        call(&mut client, &remove, until)?;
                    }
                    return if error.errno == Errno::EADDRINUSE { Ok(None) } else { Err(failed(&error)) };
                }
            }
        }
        Ok(Some(fronts))
    }

    fn admit(
        &self,
        process: Process,
        minor: u16,
        fronts: &[u32],
        (names, cut): (&[SecretName], &[SecretName]),
        until: Instant,
    ) -> Result<(), ApiError> {
        let client = &mut self.client(process)?;
        for front in fronts {
            let admit =
                command::FrontAdmit { minor, front: *front, names: names.to_vec(), cut: cut.to_vec() };
            call(client, &admit, until)?;
        }
        Ok(())
    }

    fn clients(&self, process: Process, minor: u16, until: Instant) -> Result<u32, ApiError> {
        let fronts = self.ask(process, &command::FrontList { minor }, until)?;
        Ok(fronts.iter().map(|front| front.connections).sum())
    }

    fn withdraw(
        &self,
        process: Process,
        minor: u16,
        offer: &Offer,
        force: bool,
        until: Instant,
    ) -> Result<(), ApiError> {
        let Some(front) = offer.id else { return Ok(()) };
        let client = &mut OwnClient::connect(&self.run, process.pid).map_err(|error| failed(&error))?;
        let asked = client.call(&command::FrontRemove { minor, front, force }, &[], Some(left(until)));
        match asked {
            Ok(_) => Ok(()),
            Err(error) if error.errno == Errno::ENOENT => Ok(()),
            Err(error) if error.errno == Errno::EBUSY => {
                let node = offer.node.as_deref().unwrap_or(Path::new("the device"));
                let why = format!("{} is in use: unmount it first, or force", node.display());
                Err(ApiError::new("DEVICE_DETACH_REJECTED", ["VBD", "", &why]))
            }
            Err(error) => Err(failed(&error)),
        }
    }

    fn end(&self, process: Process, minor: Option<u16>, force: bool, until: Instant) -> Result<(), ApiError> {
        let free = |minor: Option<u16>| {
            // A marker that is left takes one of 16384 numbers until it is freed, and does no other harm.
            minor.into_iter().for_each(|minor| drop(self.run.minors().free(minor)));
        };
        drop(self.take_kept(process));
        let Some(fd) = pidfd(process) else {
            free(minor);
            self.clean_up();
            return Ok(());
        };
        // A forced end leaves time to kill what does not end.
        let mut deadline = if force { Instant::now() + left(until) / 2 } else { until };
        let asked = (|| {
            let mut client = OwnClient::connect(&self.run, process.pid)?;
            if let (Some(minor), false) = (minor, force) {
                match client.call(&command::Close { minor, force: false }, &[], Some(left(deadline))) {
                    Ok(_) => {}
                    // Nothing was open, or the disk was not there.
                    Err(error) if error.errno == Errno::EINVAL || error.errno == Errno::ENODEV => {}
                    Err(error) => return Err(error),
                }
            }
            client.call(&command::Quit { force }, &[], Some(left(deadline)))
        })();
        match asked {
            Ok(_) => {}
            Err(error) if has_hung_up(&error) => {}
            // It was not told, or did not answer in its time: it is not waited for.
            Err(_) if force => deadline = Instant::now(),
            Err(error) => return Err(failed(&error)),
        }
        if !wait_for_end(&fd, deadline) {
            if !force {
                let why = format!("disk process {} still waits for its storage", process.pid);
                return Err(ApiError::backend(453, why, ""));
            }
            tracing::warn!(pid = process.pid, "a disk process did not end and is killed");
            let _ = process::signal_to(&fd, Signal::KILL);
            if !wait_for_end(&fd, Instant::now() + KILLED.min(left(until))) {
                let why = format!(
                    "disk process {} does not end even when killed: its storage holds it",
                    process.pid
                );
                return Err(ApiError::backend(453, why, ""));
            }
            self.clean_up();
        }
        free(minor);
        Ok(())
    }

    fn pause(&self, process: Process, minor: u16, until: Instant) -> Result<(), ApiError> {
        self.ask(process, &command::Pause { minor }, until).map(drop)
    }

    fn resume(&self, process: Process, minor: u16, with: &OpenSpec, until: Instant) -> Result<(), ApiError> {
        let image = Some(ImageSource::Chain(with.chain.layers.clone()));
        let log = with.log.clone();
        self.ask(process, &command::Resume { image, log, ..command::Resume::of(minor) }, until).map(drop)
    }

    fn swaps_leaf(&self, process: Process, with_log: bool, until: Instant) -> bool {
        if Instant::now() >= until {
            return false;
        }
        let Ok(client) = OwnClient::connect(&self.run, process.pid) else { return false };
        let wanted = if with_log { SWAP_LOG } else { SWAP_LEAF };
        let swaps = client.hello().features.iter().any(|feature| feature == wanted);
        self.keep(process, client);
        swaps
    }

    fn swap_leaf(
        &self,
        process: Process,
        minor: u16,
        with: &OpenSpec,
        new_log: bool,
        until: Instant,
    ) -> Result<LeafSwap, ApiError> {
        let log = with.log.clone().filter(|_| new_log);
        let swap = command::SwapLeaf { log, ..command::SwapLeaf::of(minor, with.chain.layers.clone()) };
        let mut client = self.take_kept(process).map_or_else(|| self.client(process), Ok)?;
        match client.ask(&swap, &[], Some(left(until))).map_err(|error| failed(&error))? {
            Ok(report) => {
                tracing::info!(
                    pid = process.pid,
                    stalled_us = report.stalled_us,
                    leaf = report.leaf,
                    "leaf swapped"
                );
                Ok(LeafSwap::Done)
            }
            Err(error) if error.errno == command::SwapLeaf::UNKNOWN => Err(failed(&error)),
            Err(error) => Ok(LeafSwap::Refused(failed(&error))),
        }
    }

    fn mirror_start(
        &self,
        process: Process,
        minor: u16,
        target: &ChainSpec,
        (copy, rate): (MirrorCopy, u64),
        until: Instant,
    ) -> Result<(), ApiError> {
        let target = ImageSource::Chain(target.layers.clone());
        let timeout_ms = MIRROR_TIMEOUT_MS;
        self.ask(process, &command::MirrorStart { minor, target, copy, rate, timeout_ms }, until).map(drop)
    }

    fn mirror_status(
        &self,
        process: Process,
        minor: u16,
        until: Instant,
    ) -> Result<Option<MirrorReport>, ApiError> {
        self.ask(process, &command::MirrorStatus { minor }, until)
    }

    fn mirror_pivot(&self, process: Process, minor: u16, until: Instant) -> Result<(), ApiError> {
        self.ask(process, &command::MirrorPivot { minor }, until).map(drop)
    }

    fn mirror_cancel(&self, process: Process, minor: u16, until: Instant) -> Result<(), ApiError> {
        if self.mirror_status(process, minor, until)?.is_none() {
            return Ok(());
        }
        self.ask(process, &command::MirrorCancel { minor }, until).map(drop)
    }

    fn leaf(&self, process: Process, minor: u16, until: Instant) -> Result<Option<PathBuf>, ApiError> {
        let disks = self.ask(process, &command::List {}, until)?;
        let image = disks.into_iter().find(|disk| disk.minor == minor).and_then(|disk| disk.image);
        Ok(image.and_then(|image| Some(PathBuf::from(image.split_once(':')?.1))))
    }

    fn grow(&self, process: Process, minor: u16, bytes: u64, until: Instant) -> Result<(), ApiError> {
        self.ask(process, &command::Grow { minor, len: bytes }, until).map(drop)
    }

    fn look_for_room(
        &self,
        process: Process,
        minor: u16,
        until: Instant,
    ) -> Result<Option<RoomReport>, ApiError> {
        self.ask(process, &command::LookForRoom { minor }, until)
    }

    fn shorten(
        &self,
        process: Process,
        minor: u16,
        from: u64,
        to: u64,
        until: Instant,
    ) -> Result<Shortened, ApiError> {
        let command = command::Shorten { minor, from, to };
        let answer = self.client(process)?.ask(&command, &[], Some(left(until)));
        match answer.map_err(|error| failed(&error))? {
            Ok(()) => Ok(Shortened::Done),
            Err(error) if command::Shorten::REFUSED.contains(&error.errno) => {
                Ok(Shortened::Refused(failed(&error)))
            }
            Err(error) => Err(failed(&error)),
        }
    }

    fn tune(&self, process: Process, minor: u16, tuning: &Tuning, until: Instant) -> Result<(), ApiError> {
        let client = &mut self.client(process)?;
        call(client, &command::SetLimits { minor, limits: tuning.limits }, until)?;
        call(client, &command::SetPolling::of(minor, polling(tuning.polling)), until)?;
        // A process of an earlier version shares nothing, and takes requests as they are.
        let can =
            |client: &OwnClient, name: &str| client.hello().features.iter().any(|feature| feature == name);
        if can(client, "share") {
            call(client, &command::SetShare::of(minor, tuning.share), until)?;
        }
        if can(client, TRANSFERS) {
            call(client, &command::SetTransfers { minor, sizes: tuning.transfers }, until)?;
        }
        set_io_priority(process, tuning.io_priority.unwrap_or(0));
        Ok(())
    }

    fn is_alive(&self, process: Process) -> bool {
        started(process.pid) == Some(process.started)
    }

    fn counters(&self, process: Process, minor: u16) -> Option<Snapshot> {
        let page = DiskFile::open(&self.shm, &format!("{}.{minor}", process.pid)).ok()?;
        let counters = page.read().ok()?;
        // The page of a process that died stays until it is cleared away.
        self.is_alive(process).then_some(counters)
    }

    fn serves(&self, process: Process, minor: u16, until: Instant) -> bool {
        let disks = (|| {
            let mut client = OwnClient::connect(&self.run, process.pid)?;
            client.call(&command::List {}, &[], Some(left(until).min(REPLY_TIMEOUT)))
        })();
        disks.is_ok_and(|disks| {
            disks
                .iter()
                .any(|disk| disk.minor == minor && disk.image.is_some() && disk.state != VbdState::Closing)
        })
    }

    fn ours(&self) -> Vec<(Process, Uuid)> {
        let found = processes(&self.run).unwrap_or_else(|error| {
            tracing::warn!(%error, "disk processes cannot be listed");
            Vec::new()
        });
        let ours = found.into_iter().filter_map(|found| {
            // One that is silent is one of ours all the same.
            let pid = match found.state {
                ProcessState::Live { pid } => pid,
                ProcessState::Silent(_) => found.id,
                ProcessState::Stale => return None,
            };
            let is_ours = variable(pid, OWNER_VARIABLE)? == self.owner;
            let vbd = Uuid::parse_str(&variable(pid, VBD_VARIABLE)?).ok()?;
            is_ours.then_some((Process { pid, started: started(pid)? }, vbd))
        });
        ours.collect()
    }

    fn clean_up(&self) {
        if let Err(error) = remove_stale_sockets(&self.run) {
            tracing::warn!(%error, "left-over control sockets");
        }
        if let Err(error) = clean_stale(&self.shm) {
            tracing::warn!(%error, "left-over statistics");
        }
        self.pool_ended();
    }

    fn pools(&self) -> Vec<PoolInfo> {
        tapio_stat::pool::pools(&self.shm).unwrap_or_else(|error| {
            tracing::warn!(%error, "page pools cannot be listed");
            Vec::new()
        })
    }

    fn domid_max(&self) -> u32 {
        // Where the directory cannot be read, publishing a number that is taken says so.
        tapio_stat::domid_max(&self.shm).unwrap_or(0)
    }

    fn pool_ended(&self) {
        if let Err(error) = clean_pools(&self.shm) {
            tracing::warn!(%error, "left-over page pools");
        }
    }
}
