//! Commands of clients that have XenServer's own `xe`: each runs in a process of our `xe`.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tapio_api::backend::CommandLines;

/// Where the program may be, beside the directory of the daemon.
const INSTALLED: [&str; 2] = ["/usr/bin/tapio", "/usr/local/bin/tapio"];

/// For the program to take its command.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);

/// Runs them on this daemon's own socket.
#[derive(Debug)]
pub struct Programs {
    /// The socket that the program calls.
    pub socket: PathBuf,
}

/// A program that ends when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program: beside the daemon, or where packages put it.
fn program() -> io::Result<PathBuf> {
    let beside = std::env::current_exe().ok().map(|daemon| daemon.with_file_name("tapio"));
    let all = beside.into_iter().chain(INSTALLED.iter().map(PathBuf::from));
    let found = all.into_iter().find(|path| Path::exists(path));
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the program tapio is not installed"))
}

impl CommandLines for Programs {
    fn begin(&self, session: &str, words: &[String]) -> io::Result<(UnixStream, Box<dyn Send>)> {
        let (mut ours, theirs) = UnixStream::pair()?;
        let child = Command::new(program()?)
            .args(["xe", "__serve"])
            .env_clear()
            .env("TAPIO_SOCKET", &self.socket)
            .current_dir("/")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let running = Running(child);
        // Session and words are secrets, so they are no arguments.
        let begin = serde_json::json!({ "session": session, "words": words }).to_string();
        let len = u32::try_from(begin.len()).map_err(io::Error::other)?;
        ours.set_write_timeout(Some(BEGIN_LIMIT))?;
        ours.write_all(&len.to_le_bytes())?;
        ours.write_all(begin.as_bytes())?;
        Ok((ours, Box::new(running)))
    }
}
