//! Telling the service manager how a process stands, by systemd's notify protocol (sd_notify(3)): datagrams of
//! `NAME=value` lines to the socket that `NOTIFY_SOCKET` names. Nothing happens where that is not set.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;
use std::time::Duration;

/// The manager's socket, connected while the process may still reach it.
static MANAGER: OnceLock<UnixDatagram> = OnceLock::new();

/// Finds the service manager. To be called before the process restricts itself.
///
/// # Errors
/// A sentence: there is one, and it cannot be reached.
pub fn find_manager() -> Result<(), String> {
    let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return Ok(()) };
    let socket = name.to_str().ok_or_else(|| io::ErrorKind::InvalidInput.into()).and_then(connect);
    let socket =
        socket.map_err(|error| format!("cannot reach the service manager at {}: {error}", name.display()))?;
    // It is set once, by the only thread there is.
    drop(MANAGER.set(socket));
    Ok(())
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

/// The process lives.
pub fn alive() {
    send("WATCHDOG=1");
}

/// How often the manager wants to hear [`alive`], if it asked this process for that.
pub fn watchdog_interval() -> Option<Duration> {
    MANAGER.get()?;
    let for_us = env::var("WATCHDOG_PID").map_or(true, |pid| pid.parse() == Ok(std::process::id()));
    let micros: u64 = env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
    (for_us && micros > 0).then(|| Duration::from_micros(micros) / 2)
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
