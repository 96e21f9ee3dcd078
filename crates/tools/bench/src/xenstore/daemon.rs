//! The daemons that are compared, and a client that adds as little as possible.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tapio_xenstore::wire::{Decoder, MessageKind, Request};

use crate::process::Process;

/// How long a daemon may take to serve.
const START_MAX: Duration = Duration::from_secs(10);
/// How long an answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Whose daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Whose {
    /// `tapio-xenstored`.
    Tapio,
    /// The one in C of the Xen project, as Debian builds it.
    Stock,
}

impl Whose {
    /// As tables have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tapio => "tapio-xenstored",
            Self::Stock => "xenstored (C)",
        }
    }

    /// Its program: where a variable says, beside this program, or where packages and `scripts/setup` put it.
    pub fn program(self) -> Result<PathBuf, String> {
        let (variable, places) = match self {
            Self::Tapio => {
                let beside =
                    std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("tapio-xenstored")));
                let path = std::env::var_os("PATH").unwrap_or_default();
                let others = std::env::split_paths(&path).map(|dir| dir.join("tapio-xenstored"));
                ("TAPIO_XENSTORED", beside.into_iter().chain(others).collect::<Vec<_>>())
            }
            Self::Stock => {
                let target =
                    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
                let places = ["/", "lanes/xen/root"].map(|root| match root {
                    "/" => PathBuf::from("/usr/lib/xen-4.17/bin/xenstored"),
                    _ => target.join(root).join("usr/lib/xen-4.17/bin/xenstored"),
                });
                ("XENSTORED", places.to_vec())
            }
        };
        if let Some(named) = std::env::var_os(variable) {
            return Ok(named.into());
        }
        places.into_iter().find(|place| place.is_file()).ok_or_else(|| match self {
            Self::Tapio => format!("needs tapio-xenstored: build it, or set {variable} to where it is"),
            Self::Stock => {
                format!("no C xenstored: run 'scripts/setup clients', which unpacks Debian's, or set {variable} to it")
            }
        })
    }
}

/// What stands in for a hypervisor: without one the C daemon ends at the first write.
const WITHOUT_HYPERVISOR: &str = include_str!("without_hypervisor.c");

/// Compiles it.
fn without_hypervisor(dir: &Path) -> Result<PathBuf, String> {
    let (source, library) = (dir.join("without_hypervisor.c"), dir.join("without_hypervisor.so"));
    fs::write(&source, WITHOUT_HYPERVISOR)
        .map_err(|error| format!("cannot write {}: {error}", source.display()))?;
    let compiled =
        Command::new("cc").args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source).output();
    match compiled {
        Ok(output) if output.status.success() => Ok(library),
        Ok(output) => Err(format!("cc refuses its own C: {}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("needs cc, for what stands in for a hypervisor: {error}")),
    }
}

/// A daemon that serves at a socket, until this is dropped.
#[derive(Debug)]
pub struct Daemon {
    /// The socket.
    pub socket: PathBuf,
    process: Process,
}

impl Daemon {
    /// Starts it in a directory of its own.
    pub fn start(whose: Whose, program: &Path, dir: &Path) -> Result<Self, String> {
        let failed = |error: io::Error| format!("cannot start {}: {error}", program.display());
        fs::create_dir_all(dir).map_err(failed)?;
        let socket = dir.join("socket");
        let mut command = Command::new(program);
        match whose {
            Whose::Tapio => {
                command.args(["--domains", "none", "--socket"]).arg(&socket);
            }
            Whose::Stock => {
                command.args(["--internal-db", "--no-fork", "--pid-file"]).arg(dir.join("pid"));
                command.env("LD_PRELOAD", without_hypervisor(dir)?);
                command
                    .env("XENSTORED_RUNDIR", dir)
                    .env("XENSTORED_ROOTDIR", dir)
                    .env("XENSTORED_PATH", &socket);
                // Libraries lie beside the programs when the package was unpacked and not installed.
                if let Some(lib) = program.ancestors().nth(3) {
                    command.env("LD_LIBRARY_PATH", lib.join("x86_64-linux-gnu"));
                }
            }
        }
        let errors = fs::File::create(dir.join("errors")).map_err(failed)?;
        let mut process = Process::start(&mut command, errors).map_err(failed)?;
        let deadline = Instant::now() + START_MAX;
        while UnixStream::connect(&socket).is_err() {
            if process.has_ended() || Instant::now() > deadline {
                let said = fs::read_to_string(dir.join("errors")).unwrap_or_default();
                return Err(format!("{} does not serve: {}", whose.name(), said.trim()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Self { socket, process })
    }

    /// Kilobytes of its own memory.
    pub fn anonymous_kib(&self) -> Option<u64> {
        let path = format!("/proc/{}/smaps_rollup", self.process.pid());
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:"))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    }
}

/// A connection that sends one request and waits for its answer.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    decoder: Decoder,
    out: Vec<u8>,
    buffer: Vec<u8>,
    /// Requests that were answered.
    pub round_trips: u64,
}

impl Link {
    /// Connects.
    pub fn connect(socket: &Path) -> Result<Self, String> {
        let stream = UnixStream::connect(socket).map_err(|error| format!("{}: {error}", socket.display()))?;
        stream.set_read_timeout(Some(ANSWER_MAX)).map_err(|error| error.to_string())?;
        let buffer = vec![0; 8192];
        Ok(Self { stream, decoder: Decoder::new(), out: Vec::new(), buffer, round_trips: 0 })
    }

    /// Asks and returns what was answered; a refusal is an error, `EAGAIN` none.
    pub fn ask(&mut self, transaction: u32, request: &Request<'_>) -> Result<Option<Vec<u8>>, String> {
        self.out.clear();
        request.frame(1, transaction, &mut self.out).map_err(|error| error.to_string())?;
        self.stream.write_all(&self.out).map_err(|error| error.to_string())?;
        loop {
            if let Some(message) = self.decoder.next().map_err(|error| error.to_string())? {
                self.round_trips += 1;
                return match message.kind() {
                    Some(MessageKind::Error) if message.payload == b"EAGAIN\0" => Ok(None),
                    Some(MessageKind::Error) => {
                        let name = String::from_utf8_lossy(message.payload);
                        Err(format!("{} was refused: {}", request.kind().name(), name.trim_end_matches('\0')))
                    }
                    _ => Ok(Some(message.payload.to_vec())),
                };
            }
            let count = self.stream.read(&mut self.buffer).map_err(|error| error.to_string())?;
            if count == 0 {
                return Err("the daemon closed the connection".into());
            }
            self.decoder.push(&self.buffer[..count]);
        }
    }

    /// Sends several writes together, and waits for all answers.
    pub fn write_all(&mut self, nodes: &[(String, &[u8])]) -> Result<(), String> {
        for some in nodes.chunks(64) {
            self.out.clear();
            for (path, value) in some {
                Request::Write { path, value }
                    .frame(1, 0, &mut self.out)
                    .map_err(|error| error.to_string())?;
            }
            self.stream.write_all(&self.out).map_err(|error| error.to_string())?;
            let mut open = some.len();
            while open > 0 {
                let count = self.stream.read(&mut self.buffer).map_err(|error| error.to_string())?;
                if count == 0 {
                    return Err("the daemon closed the connection".into());
                }
                self.decoder.push(&self.buffer[..count]);
                while let Some(message) = self.decoder.next().map_err(|error| error.to_string())? {
                    if message.kind() != Some(MessageKind::Write) {
                        return Err(format!(
                            "a write was refused: {}",
                            String::from_utf8_lossy(message.payload)
                        ));
                    }
                    open -= 1;
                }
            }
        }
        Ok(())
    }

    /// Begins a transaction.
    pub fn begin(&mut self) -> Result<u32, String> {
        let answer = self.ask(0, &Request::TransactionStart)?.unwrap_or_default();
        let text = String::from_utf8_lossy(&answer);
        text.trim_end_matches('\0').parse().map_err(|_| format!("'{text}' is no transaction"))
    }

    /// Ends it; false when it conflicted.
    pub fn end(&mut self, transaction: u32) -> Result<bool, String> {
        Ok(self.ask(transaction, &Request::TransactionEnd { commit: true })?.is_some())
    }
}
