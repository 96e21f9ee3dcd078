//! Messages to an operator: standard error in the foreground, the system's log in the background, or the socket of the
//! daemon that keeps a log where no journal is.
//!
//! A thread of its own writes them: a log that hangs stops no disk.

use std::ffi::CString;
use std::io::{self, Write};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use tapio_log::{Log, Sender, Sink};

/// Names the socket of the daemon's log.
const SOCKET_VARIABLE: &str = "TAPIO_LOG_SOCKET";

/// How long the last lines are waited for at the end.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

static LOG: OnceLock<Log> = OnceLock::new();

fn start(sink: Sink) {
    // Without a thread lines are written by the threads that have them.
    if let Ok(log) = Log::start(sink) {
        let _ = LOG.set(log);
    }
}

/// From now on no thread waits for standard error.
pub fn use_thread() {
    start(Box::new(|line| {
        // A reader that has gone must not end the process.
        let _ = write!(io::stderr(), "tapio-disk: {line}");
        Ok(())
    }));
}

/// From now on messages go to the system's log, or to the daemon's.
pub fn use_syslog() {
    let daemon = std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty());
    let daemon = daemon.and_then(|path| Sender::new(Path::new(&path)).ok());
    start(Box::new(move |line| {
        let text = format!("tapio-disk[{}]: {}", std::process::id(), line.trim_end().replace('\0', " "));
        // While no daemon runs, the system's log is asked.
        if daemon.as_ref().is_none_or(|daemon| daemon.send(&text).is_err()) {
            syslog(&text);
        }
        Ok(())
    }));
}

fn syslog(text: &str) {
    if let Ok(text) = CString::new(text) {
        // SAFETY: the format takes one string, which ends with NUL and lives across the call.
        unsafe { libc::syslog(libc::LOG_DAEMON | libc::LOG_NOTICE, c"%s".as_ptr(), text.as_ptr()) };
    }
}

/// Says one line. Only for changes of state and failures, never for requests.
pub fn line(text: &str) {
    match LOG.get() {
        Some(log) => log.line(text),
        None => eprintln!("tapio-disk: {text}"),
    }
}

/// Waits until what was said is written, or the log hangs.
pub fn flush() {
    if let Some(log) = LOG.get() {
        log.flush(FLUSH_LIMIT);
    }
}
