//! Telling the service manager how the process stands, by systemd's notify protocol (sd_notify(3)): datagrams of
//! `NAME=value` lines to the socket that `NOTIFY_SOCKET` names. Nothing happens where that is not set.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;
use std::time::Duration;

use tapio_control::DiskHost;

use crate::log;

/// The manager's socket, connected while the process may still reach it.
static MANAGER: OnceLock<UnixDatagram> = OnceLock::new();

/// Finds the service manager. To be called before the process restricts itself.
pub fn find_manager() {
    let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return };
    match name.to_str().ok_or_else(|| io::ErrorKind::InvalidInput.into()).and_then(connect) {
        // It is set once, by the only thread there is.
        Ok(socket) => drop(MANAGER.set(socket)),
        Err(error) => log::line(&format!("cannot reach the service manager at {}: {error}", name.display())),
    }
}

/// A path from the root, or a name in the abstract namespace after an `@`.
fn connect(name: &str) -> io::Result<UnixDatagram> {
    let address = match name.strip_prefix('@') {
        Some(abstract_name) => SocketAddr::from_abstract_name(abstract_name)?,
        None if name.starts_with('/') => SocketAddr::from_pathname(name)?,
        None => {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a path nor an abstract name"));
        }
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    // A manager that does not listen is no reason to stand still.
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn send(text: &str) {
    if let Some(socket) = MANAGER.get() {
        // Lost words are the manager's loss; the next ones say how things stand then.
        let _ = socket.send(text.as_bytes());
    }
}

/// One line on how things stand: newlines end a message's field.
fn line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// The process serves. In the background it is not the one that was started.
pub fn ready(status: &str) {
    send(&format!("READY=1\nMAINPID={}\nSTATUS={}", std::process::id(), line(status)));
}

/// The process ends.
pub fn stopping(status: &str) {
    send(&format!("STOPPING=1\nSTATUS={}", line(status)));
}

/// How often the manager wants to hear that the process lives, if it asked this process for that.
fn watchdog_interval() -> Option<Duration> {
    MANAGER.get()?;
    let for_us = env::var("WATCHDOG_PID").map_or(true, |pid| pid.parse() == Ok(std::process::id()));
    let micros: u64 = env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
    (for_us && micros > 0).then(|| Duration::from_micros(micros) / 2)
}

/// Runs `serve`, with a thread beside it that tells the manager that the disks' threads answer, if it asked for that.
/// A storage that hangs does not keep a thread from answering; a fault of this program does.
pub fn watched<T>(host: &dyn DiskHost, serve: impl FnOnce() -> T) -> T {
    let Some(interval) = watchdog_interval() else { return serve() };
    std::thread::scope(|scope| {
        let (ended, over) = std::sync::mpsc::sync_channel::<()>(0);
        let beat = move || {
            while over.recv_timeout(interval) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                if host.list().iter().all(|disk| host.stats(disk.minor).is_ok()) {
                    send("WATCHDOG=1");
                }
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).stack_size(128 << 10);
        if let Err(error) = thread.spawn_scoped(scope, beat) {
            log::line(&format!("no thread for the service manager's watchdog: {error}"));
        }
        send("WATCHDOG=1");
        let result = serve();
        drop(ended);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_socket_are_reached_and_nonsense_is_not() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).expect("bound");
        let name = format!("tapio-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let other = UnixDatagram::bind_addr(&address).expect("bound");
        let mut bytes = [0; 16];
        for (socket, name) in
            [(&manager, path.to_str().expect("UTF-8").to_owned()), (&other, format!("@{name}"))]
        {
            connect(&name).expect("connected").send(b"READY=1").expect("sent");
            let len = socket.recv(&mut bytes).expect("received");
            assert_eq!(&bytes[..len], b"READY=1");
        }
        assert!(connect("relative").is_err());
        assert!(connect("/no/such/socket").is_err());
        assert_eq!(line("two\nlines"), "two lines");
    }
}
