//! One measurement: a server is started on its image, loaded, and ended.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tapio_front::nbd::client::{Address, Client, ClientOptions};
use tapio_front::nbd::load::{self, Sending};
use tapio_front::nbd::wire::Style;
use tapio_load::bare_file;
use tapio_load::{Load, LoadReport};

use super::exported::Exported;
use super::process::Process;
use super::server::{EXPORT, Program, Protocol, Server, Stand};
use super::virtqueues::Virtqueues;
use super::workload::Workload;

/// How long a server may take until it answers for the first time.
const START_MAX: Duration = Duration::from_secs(10);
/// Between two attempts to reach a server that is starting; short, because the start itself is measured.
const RETRY: Duration = Duration::from_micros(100);
/// The shortest run whose system calls are worth counting.
const COUNT_MIN: Duration = Duration::from_millis(20);
/// A load generator whose threads work for this share of the time is what limits the rate.
const BUSY_SHARE: f64 = 0.9;

/// Set by an interrupt: the run ends after the current measurement, and cleans up.
pub static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub workload: Workload,
    /// Bytes of the disk that are used.
    pub len: u64,
    pub time: Duration,
    /// Requests on each connection, at most.
    pub requests_max: u64,
    pub seed: u64,
}

impl Job {
    /// The load on each connection.
    pub fn load(&self) -> Load {
        Load {
            mix: self.workload.mix,
            block_len: self.workload.block_len,
            depth: self.workload.depth,
            span_len: self.len,
            time: self.time,
            requests_max: self.requests_max,
            // As a guest does, which has better things to do with its processor.
            spin: false,
            seed: self.seed,
        }
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    pub iops: f64,
    pub bytes_per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    /// The longest request: the longest stall.
    pub longest_us: f64,
    /// Requests answered.
    pub requests: u64,
    /// CPU microseconds of the load generator for each request; none where it is not apart from the server.
    pub load_cpu_us: Option<f64>,
    /// The share of the time for which the generator's threads worked, on average.
    pub load_busy: f64,
    /// CPU microseconds of the server for each request; of this process where there is no server.
    pub cpu_us: Option<f64>,
    /// System calls of the server for each request, counted in a short run of its own before the timed one.
    pub calls: Option<f64>,
    /// Requests answered with an error.
    pub errors: u64,
}

impl Sample {
    /// What requests of `block_len` bytes on so many lanes came to; nothing of what they cost the server.
    pub fn of(report: &LoadReport, block_len: u32, lanes: u16) -> Self {
        let quantile_us = |share| report.latencies.quantile_ns(share) as f64 / 1e3;
        let generated = report.cpu.as_secs_f64();
        Self {
            iops: report.rate(),
            bytes_per_second: report.rate() * f64::from(block_len),
            p50_us: quantile_us(0.5),
            p99_us: quantile_us(0.99),
            p999_us: quantile_us(0.999),
            longest_us: report.latencies.longest_ns() as f64 / 1e3,
            requests: report.count,
            load_cpu_us: Some(generated * 1e6 / report.count.max(1) as f64),
            load_busy: generated / (report.time.as_secs_f64() * f64::from(lanes)).max(1e-9),
            errors: report.errors,
            ..Self::default()
        }
    }

    /// Whether the load generator was the limit.
    pub fn is_limited_by_load(&self) -> bool {
        self.load_cpu_us.is_some() && self.load_busy >= BUSY_SHARE
    }
}

/// Runs a job.
type Runner<'a> = dyn FnMut(&Job) -> Result<LoadReport, String> + 'a;

/// A server that runs and can be reached.
#[derive(Debug)]
pub struct Running {
    pub process: Process,
    server: Server,
    socket: PathBuf,
    errors: PathBuf,
    exported: Option<Exported>,
}

impl Running {
    /// Starts it and waits until `reach` succeeds; what that gave, and how long it took from the start.
    pub fn start<T>(
        server: &Server,
        program: &Path,
        stand: &Stand,
        reach: impl Fn(&Path) -> Result<T, String>,
    ) -> Result<(Self, T, Duration), String> {
        let _ = fs::remove_file(&stand.socket);
        let errors = stand.run_dir.join("errors");
        let log = File::create(&errors).map_err(|error| format!("{}: {error}", errors.display()))?;
        if server.protocol == Protocol::Fuse {
            Exported::prepare(stand)?;
        }
        let mut command = server.command(program, stand);
        let begin = Instant::now();
        let process =
            Process::start(&mut command, log).map_err(|error| format!("{}: {error}", program.display()))?;
        let exported = (server.protocol == Protocol::Fuse).then(|| Exported::of(server, stand));
        let mut running = Self { process, server: *server, socket: stand.socket.clone(), errors, exported };
        loop {
            let why = match reach(&running.socket) {
                Ok(value) => return Ok((running, value, begin.elapsed())),
                Err(why) => why,
            };
            if running.process.has_ended() {
                return Err(format!("{} ended at once: {}", server.name, running.said()));
            }
            if begin.elapsed() > START_MAX {
                return Err(format!("{} does not answer: {why}; {}", server.name, running.said()));
            }
            std::thread::sleep(RETRY);
        }
    }

    /// What it wrote to its standard error: the last line.
    fn said(&self) -> String {
        let text = fs::read(&self.errors).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.lines().last().unwrap_or("it said nothing").to_owned()
    }

    /// Puts a load on it: first a short one to warm up, whose system calls are counted.
    pub fn load(&self, job: &Job, warm_up: Duration) -> Result<Sample, String> {
        match self.server.protocol {
            Protocol::File => Err("a bare file is no server".into()),
            Protocol::Fuse => {
                let exported = self.exported.as_ref().ok_or("nothing is exported")?;
                let file = exported.file()?;
                self.measured(job, warm_up, &mut |job| {
                    let report = bare_file::run(&file, &job.load(), true);
                    report.map(|report| report.load).map_err(|error| error.to_string())
                })
            }
            Protocol::Nbd => self.measured(job, warm_up, &mut |job| self.nbd(job)),
            Protocol::VhostUser => {
                let mut queues = Virtqueues::start(&self.socket, &job.workload)?;
                let sample = self.measured(job, warm_up, &mut |job| queues.run(&job.load()))?;
                queues.stop()?;
                Ok(sample)
            }
        }
    }

    fn measured(&self, job: &Job, warm_up: Duration, run: &mut Runner<'_>) -> Result<Sample, String> {
        let mut calls = None;
        if !job.workload.fresh {
            // To open the trace point takes the kernel some time, which a run too short to say anything saves.
            let counter = if warm_up >= COUNT_MIN { self.process.count_calls() } else { None };
            let report = run(&Job { time: warm_up, seed: job.seed ^ 0x5555, ..*job })?;
            let total = counter.and_then(|counter| counter.total());
            calls = total.map(|total| total as f64 / report.count.max(1) as f64);
        }
        let before = self.process.cpu_us();
        let report = run(job)?;
        let spent = self.process.cpu_us().zip(before).map(|(after, before)| after - before);
        let cpu_us = spent.map(|spent| spent.max(0.0) / report.count.max(1) as f64);
        Ok(Sample { cpu_us, calls, ..Sample::of(&report, job.workload.block_len, job.workload.lanes) })
    }

    fn nbd(&self, job: &Job) -> Result<LoadReport, String> {
        let address = Address::Unix(self.socket.clone());
        let sending = if job.workload.singly { Sending::Singly } else { Sending::Together };
        load::run_sending(&address, &client_options(), &job.load(), job.workload.lanes.into(), sending)
            .map_err(|error| format!("{}: {error}; {}", self.server.name, self.said()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(exported) = &self.exported {
            self.process.end();
            exported.end();
        }
    }
}

fn client_options() -> ClientOptions {
    ClientOptions { export: EXPORT.into(), style: Style::Structured, allocation: false }
}

/// An NBD client that has read a block: the first answer.
pub fn first_answer(socket: &Path) -> Result<Client, String> {
    let mut client = connect(socket)?;
    client.read(0, 4096).map_err(|error| error.to_string())?;
    Ok(client)
}

/// An NBD client. The path is looked for first, because a client's own deadline is far longer than a server's start.
pub fn connect(socket: &Path) -> Result<Client, String> {
    if !socket.exists() {
        return Err("there is no socket yet".into());
    }
    Client::connect(&Address::Unix(socket.to_path_buf()), &client_options(), START_MAX)
        .map_err(|error| error.to_string())
}

/// Measures one server under one load.
pub fn measure(
    server: &Server,
    program: &Path,
    stand: &Stand,
    job: &Job,
    warm_up: Duration,
) -> Result<Sample, String> {
    if server.program == Program::BareFile {
        let report =
            bare_file::run(&stand.image, &job.load(), !stand.in_memory).map_err(|error| error.to_string())?;
        let sample = Sample::of(&report.load, job.workload.block_len, 1);
        return Ok(Sample { cpu_us: Some(report.cpu_us), load_cpu_us: None, ..sample });
    }
    let reach = |socket: &Path| match server.protocol {
        Protocol::VhostUser => {
            let found = socket.exists();
            found.then_some(()).ok_or_else(|| "there is no socket yet".to_owned())?;
            Virtqueues::start(socket, &job.workload)?.stop()
        }
        Protocol::Fuse => Exported::of(server, stand).file().map(drop),
        _ => connect(socket).map(drop),
    };
    let (running, (), _) = Running::start(server, program, stand, reach)?;
    running.load(job, warm_up)
}

/// Whether the run shall end.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
