//! Commands of clients that have XenServer's own `xe`: each runs in a process of our `xe`, as a user of its own.
//!
//! The first number of the setting `command-users` is the group of the socket that these processes call, the others are
//! their users: root on a socket of the daemon needs no password, so a command that was taken over must not be root.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tapio_api::backend::CommandLines;
use tapio_vm::UserRange;

/// The socket of commands, in the run directory.
pub const SOCKET: &str = "commands";
/// Its permissions: for root and the group of commands.
pub const SOCKET_MODE: u32 = 0o660;

/// Where the program may be, beside the directory of the daemon.
const INSTALLED: [&str; 2] = ["/usr/bin/tapio", "/usr/local/bin/tapio"];

/// For the program to take its command.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);

/// Runs them on this daemon's own socket.
#[derive(Debug)]
pub struct Programs {
    /// The directory of the socket that the program calls, and the socket's name there. A user may be kept from the
    /// directories above it.
    pub dir: PathBuf,
    pub socket: PathBuf,
    /// None: programs run as the daemon does.
    pub users: Option<Users>,
}

/// Users of programs that run.
#[derive(Clone, Debug)]
pub struct Users {
    range: UserRange,
    taken: Arc<Mutex<BTreeSet<u32>>>,
}

/// A user until this is dropped.
#[derive(Debug)]
struct User {
    of: Users,
    number: u32,
}

impl Users {
    /// Of these numbers, two at least.
    pub fn new(range: UserRange) -> Option<Self> {
        (range.count > 1).then(|| Self { range, taken: Arc::default() })
    }

    /// The group of all of them.
    pub fn group(&self) -> u32 {
        self.range.first
    }

    /// One that no other program runs as.
    fn take(&self) -> io::Result<User> {
        let Self { range, .. } = self;
        let mut taken = self.taken.lock();
        let free = (1..range.count).map(|step| range.first + step).find(|number| !taken.contains(number));
        let number = free.ok_or_else(|| {
            io::Error::other(format!("all users of command-users ({range}) run commands; make it more"))
        })?;
        taken.insert(number);
        Ok(User { of: self.clone(), number })
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.of.taken.lock().remove(&self.number);
    }
}

/// A program that ends when this is dropped, and then its user is free.
struct Running {
    child: Child,
    _user: Option<User>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
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
        let user = self.users.as_ref().map(Users::take).transpose()?;
        let mut command = Command::new(program()?);
        command.args(["xe", "__serve"]).env_clear().env("TAPIO_SOCKET", &self.socket);
        if let Some(user) = &user {
            // It becomes that user itself, before it reads anything: the user may not reach the program's file.
            command.env("TAPIO_COMMAND_USER", format!("{}:{}", user.number, user.of.group()));
        }
        let child = command
            .current_dir(&self.dir)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let running = Running { child, _user: user };
        // Session and words are secrets, so they are no arguments.
        let begin = serde_json::json!({ "session": session, "words": words }).to_string();
        let len = u32::try_from(begin.len()).map_err(io::Error::other)?;
        ours.set_write_timeout(Some(BEGIN_LIMIT))?;
        ours.write_all(&len.to_le_bytes())?;
        ours.write_all(begin.as_bytes())?;
        Ok((ours, Box::new(running)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_has_another_user_and_gives_it_back() {
        let users = Users::new(UserRange { first: 100, count: 3 }).expect("enough");
        assert_eq!(users.group(), 100);
        let (first, second) = (users.take().expect("free"), users.take().expect("free"));
        assert_eq!((first.number, second.number), (101, 102));
        let full = users.take().expect_err("no more");
        assert!(full.to_string().contains("100-102"), "{full}");
        drop(first);
        assert_eq!(users.take().expect("free again").number, 101);
        assert!(Users::new(UserRange { first: 1, count: 1 }).is_none());
    }
}
