//! The log of this process.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::days::stamp;
use crate::lines::Log;
use crate::quiet;

static LOG: OnceLock<Log> = OnceLock::new();

/// Begins a line that is no line of the log: it tells that what was printed before it is read.
const MARK: &str = "\u{1}flush ";

/// The last mark that was read.
static PASSED: (Mutex<Option<String>>, Condvar) = (Mutex::new(None), Condvar::new());

/// Longest line that is read from a pipe in one piece.
const PIECE_LEN_MAX: u64 = 8 << 10;

/// From now on [`say`] says into this log. The first one stays.
pub fn to(log: Log) {
    let _ = LOG.set(log);
}

/// Says a line, with the time and the program's name; on standard error without a log. Never fails.
pub fn say(program: &str, text: impl Display) {
    match LOG.get() {
        Some(log) => {
            log.line(format!("{} {program}[{}]: {text}", stamp(SystemTime::now()), std::process::id()));
        }
        // A reader that has gone must not end the program.
        None => drop(writeln!(io::stderr(), "{program}: {text}")),
    }
}

/// Waits until what was said is written, at most for `limit`.
pub fn flush(limit: Duration) {
    if let Some(log) = LOG.get() {
        log.flush(limit);
    }
}

/// Whether the journal runs on this host.
pub fn has_journal() -> bool {
    Path::new("/run/systemd/journal/socket").exists()
}

/// Whether standard error goes to the journal (`JOURNAL_STREAM`, systemd.exec(5)).
pub fn is_journal() -> bool {
    let Some(named) = std::env::var("JOURNAL_STREAM").ok() else { return false };
    let own = std::fs::metadata("/proc/self/fd/2");
    own.is_ok_and(|own| format!("{}:{}", own.dev(), own.ino()) == named)
}

/// Lets a log take what this process and its children print on standard output and standard error, through a pipe. The
/// thread that reads it never waits for the log's file, so nobody who prints does.
///
/// # Errors
/// There is no pipe or no thread.
pub fn capture(log: Log) -> io::Result<()> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let into = log.clone();
    quiet::spawn("log-pipe", move || read(BufReader::new(File::from(reader)), &into))?;
    rustix::stdio::dup2_stdout(&writer)?;
    rustix::stdio::dup2_stderr(&writer)?;
    to(log);
    // The message of a panic is in the pipe when the process ends.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |what| {
        hook(what);
        flush_output(Duration::from_secs(1));
    }));
    Ok(())
}

/// Waits until what was printed into the pipe of [`capture`] is in the log's file, at most for `limit`.
pub fn flush_output(limit: Duration) {
    if LOG.get().is_none() {
        return;
    }
    let until = Instant::now() + limit;
    // Read by the thread, then in the queue: a mark that goes the same way tells that all before it is there.
    let mark = format!("{MARK}{:?}", std::thread::current().id());
    if writeln!(io::stderr(), "{mark}").is_err() {
        return;
    }
    let mut passed = PASSED.0.lock();
    while passed.as_ref() != Some(&mark) {
        if PASSED.1.wait_until(&mut passed, until).timed_out() {
            return;
        }
    }
    drop(passed);
    flush(until.saturating_duration_since(Instant::now()));
}

/// Lets a log take what other programs send to a socket, a datagram for each line. Takes the place of a socket that a
/// killed process left.
///
/// # Errors
/// The socket cannot be made, or there is no thread.
pub fn receive(socket: &Path, log: Log) -> io::Result<()> {
    let fresh = socket.with_extension("new");
    let _ = std::fs::remove_file(&fresh);
    let from = UnixDatagram::bind(&fresh)?;
    std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&fresh, socket)?;
    let body = move || {
        let mut bytes = [0; PIECE_LEN_MAX as usize];
        while let Ok(len) = from.recv(&mut bytes) {
            log.line(format!("{} {}", stamp(SystemTime::now()), String::from_utf8_lossy(&bytes[..len])));
        }
    };
    quiet::spawn("log-socket", body)
}

/// Sends lines to such a socket. A receiver that is busy or gone loses them: nothing waits.
#[derive(Debug)]
pub struct Sender {
    socket: UnixDatagram,
    to: PathBuf,
}

impl Sender {
    /// One that sends there.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn new(to: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, to: to.to_owned() })
    }

    /// Sends a line.
    ///
    /// # Errors
    /// Nobody receives, or has room.
    pub fn send(&self, line: &str) -> io::Result<()> {
        self.socket.send_to(line.as_bytes(), &self.to).map(drop)
    }
}

fn read(mut from: impl BufRead, log: &Log) {
    loop {
        let mut line = Vec::new();
        match from.by_ref().take(PIECE_LEN_MAX).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end_matches('\n');
                if line.starts_with(MARK) {
                    *PASSED.0.lock() = Some(line.to_owned());
                    PASSED.1.notify_all();
                } else {
                    log.line(line);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
