//! A guest's console: a file to which its emulator appends, and for User-mode Linux also a UNIX socket that shows the
//! file's end and takes what is typed.
//!
//! The file is the buffer: a client that is slow costs nothing but its own place in it, and a guest never waits.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, inotify, mkfifoat};
use rustix::io::Errno;

use crate::place::Place;
use crate::poll::polled;

/// Clients of one console at a time.
const CLIENTS_MAX: usize = 8;

/// What a new client is shown of the past.
const PAST_LEN: u64 = 4 << 10;

/// The last lines of a file, for a message: at most `lines`, and 2 KiB.
pub(crate) fn last_lines(file: &Path, lines: usize) -> String {
    let Ok(file) = File::open(file) else { return String::new() };
    let len = file.metadata().map_or(0, |data| data.len());
    let mut bytes = vec![0; 2048];
    let read = file.read_at(&mut bytes, len.saturating_sub(2048)).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..read]);
    let clean = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
    let all: Vec<String> = text.lines().map(clean).filter(|line| !line.trim().is_empty()).collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// A cause with the last lines of what the emulator and the guest said.
pub(crate) fn cause(place: &Place, what: &str) -> String {
    let mut text = what.to_owned();
    for (name, log) in [("emulator", "emulator.log"), ("console", "console.log")] {
        let lines = last_lines(&place.join(log), 6);
        if !lines.is_empty() {
            text.push_str(&format!("; {name}: {}", lines.replace('\n', " | ")));
        }
    }
    text
}

#[derive(Debug)]
struct Client {
    stream: UnixStream,
    /// How far it has been shown the file.
    shown: u64,
    /// It takes no more at the moment.
    is_full: bool,
}

/// Serves one console.
#[derive(Debug)]
pub(crate) struct Server {
    listener: UnixListener,
    log: PathBuf,
    input: File,
    watch: OwnedFd,
    clients: Vec<Client>,
}

/// A descriptor that is readable when a file has changed.
fn watch(path: &Path) -> io::Result<OwnedFd> {
    let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&fd, path, inotify::WatchFlags::MODIFY)?;
    Ok(fd)
}

impl Server {
    /// Listens at `console`; shows `console.log` and types into the pipe `console.in`. Takes the place of a server
    /// that has died.
    pub(crate) fn new(place: &Place) -> io::Result<Self> {
        let fresh = place.join("con.new");
        let _ = fs::remove_file(&fresh);
        let listener = UnixListener::bind(&fresh)?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))?;
        fs::rename(&fresh, place.join("console"))?;
        listener.set_nonblocking(true)?;
        let input = open_pipe(&place.join("console.in"))?;
        let log = place.join("console.log");
        let watch = watch(&log)?;
        Ok(Self { listener, log, input, watch, clients: Vec::new() })
    }

    /// What to wait for.
    pub(crate) fn fds(&self, into: &mut Vec<libc::pollfd>) {
        into.push(polled(self.listener.as_raw_fd(), libc::POLLIN));
        // Without a client there is no reader of the log: not worth waking up for.
        let watched: RawFd = if self.clients.is_empty() { -1 } else { self.watch.as_raw_fd() };
        into.push(polled(watched, libc::POLLIN));
        for client in &self.clients {
            let events = if client.is_full { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
            into.push(polled(client.stream.as_raw_fd(), events));
        }
    }

    /// Does what there is to do; never waits.
    pub(crate) fn serve(&mut self) {
        let mut events = [0_u8; 1024];
        // What it says does not matter, only that it is taken.
        while rustix::io::read(&self.watch, &mut events[..]).is_ok_and(|len| len > 0) {}
        while let Ok((stream, _)) = self.listener.accept() {
            if self.clients.len() >= CLIENTS_MAX || stream.set_nonblocking(true).is_err() {
                continue;
            }
            let len = fs::metadata(&self.log).map_or(0, |data| data.len());
            self.clients.push(Client { stream, shown: len.saturating_sub(PAST_LEN), is_full: false });
        }
        if self.clients.is_empty() {
            return;
        }
        let Ok(log) = File::open(&self.log) else { return };
        let input = &mut self.input;
        self.clients.retain_mut(|client| client.typed(input) && client.show(&log));
    }
}

impl Client {
    /// Hands on what was typed; whether the client is still there.
    fn typed(&mut self, input: &mut File) -> bool {
        let mut bytes = [0; 512];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(len) => {
                    // A guest that does not read loses what is typed, as on a serial line.
                    let _ = input.write(&bytes[..len]);
                }
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
    }

    /// Shows what has been added; whether the client is still there.
    fn show(&mut self, log: &File) -> bool {
        self.is_full = false;
        let len = log.metadata().map_or(0, |data| data.len());
        if len < self.shown {
            // The log was shortened.
            self.shown = 0;
        }
        let mut bytes = [0; 4096];
        // Bounded: what comes meanwhile wakes us again.
        while self.shown < len {
            let read = match log.read_at(&mut bytes, self.shown) {
                Ok(0) | Err(_) => return true,
                Ok(read) => read,
            };
            match self.stream.write(&bytes[..read]) {
                Ok(written) => self.shown += written as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_full = true;
                    return true;
                }
                Err(_) => return false,
            }
        }
        true
    }
}

/// Opens a named pipe, made if it is not there, so that neither end of it ever closes; never waits.
pub(crate) fn open_pipe(path: &Path) -> io::Result<File> {
    match mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use uuid::Uuid;

    use super::*;
    use crate::poll::poll;
    use crate::settings::Settings;

    #[test]
    fn the_console_shows_the_log_and_takes_what_is_typed() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path());
        let place = Place::of(&settings, Uuid::new_v4()).unwrap();
        place.make(&settings).unwrap();
        let mut log = OpenOptions::new().append(true).create(true).open(place.join("console.log")).unwrap();
        log.write_all(b"before\n").unwrap();
        let mut server = Server::new(&place).unwrap();
        let mut client = UnixStream::connect(place.join("console")).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.write_all(b"ls\n").unwrap();
        server.serve();
        let mut said = [0; 64];
        assert_eq!(client.read(&mut said).unwrap(), 7);
        let mut typed = [0; 64];
        let len = server.input.read(&mut typed).unwrap();
        assert_eq!(&typed[..len], b"ls\n");
        log.write_all(b"after\n").unwrap();
        let mut fds = Vec::new();
        server.fds(&mut fds);
        assert!(poll(&mut fds, Instant::now() + Duration::from_secs(60)), "a change wakes the server");
        server.serve();
        let len = client.read(&mut said).unwrap();
        assert_eq!(&said[..len], b"after\n");
        drop(client);
        server.serve();
        assert!(server.clients.is_empty());
    }

    #[test]
    fn the_last_lines_are_clean() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        fs::write(&path, b"one\n\x1b[0mtwo\r\n\nthree\n").unwrap();
        assert_eq!(last_lines(&path, 2), "[0mtwo\nthree");
    }
}
