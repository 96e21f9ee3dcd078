//! `xe __serve`: this process runs one command for a client of XenServer's own `xe`, for `tapiod`.
//!
//! Standard input is the connection. `tapiod` has sent session and words on it; the client's own bytes follow. The
//! session is the client's: what its account may not do is refused here as it is elsewhere. Files of this host are
//! nothing to the client, so commands that read or write files do it at the client, or are refused.
//!
//! Before it reads the first byte the process becomes the user that `TAPIO_COMMAND_USER` names, which no other process
//! runs as, and gives up its capabilities, all files but a few that are read, programs to
//! start, TCP, and signals to others (Landlock, where the kernel has it). It keeps the socket of the toolstack: that is
//! found by its path, which Landlock does not judge.

use std::ffi::CStr;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, setrlimit};
use serde::Deserialize;
use tapio_model::thin;
use tapio_sandbox::landlock::{Ruleset, right};
use tapio_sandbox::{capability, landlock};

use super::arguments::{Connection, XeArguments};
use super::client::Client;
use super::commands::Found;
use super::error::Failure;
use super::out::{self, Thin};
use super::{attempt, commands};

/// Bytes of memory and files that one command may take.
const MEMORY_MAX: u64 = 2 << 30;
const FILES_MAX: u64 = 64;

/// Longest message of the daemon's.
const BEGIN_LEN_MAX: usize = 4 * thin::WORDS_LEN_MAX;

/// What the daemon sends first.
#[derive(Deserialize)]
struct Begin {
    session: String,
    words: Vec<String>,
}

/// Parameters that name a file which the command opens itself.
const FILES: [&str; 4] = ["filename", "user-data", "meta-data", "network-config"];

/// Commands that read or write their file at the client.
const AT_THE_CLIENT: [&str; 2] = ["vdi-export", "vdi-import"];

/// Files that are read after the first byte of the client: the time zone of dates.
const READ: [&CStr; 2] = [c"/etc/localtime", c"/usr/share/zoneinfo"];

/// Every right that Landlock knows, so that all but [`READ`] is denied.
const HANDLED: u64 = right::EXECUTE
    | right::WRITE_FILE
    | right::READ_FILE
    | right::READ_DIR
    | right::REMOVE_DIR
    | right::REMOVE_FILE
    | right::MAKE_CHAR
    | right::MAKE_DIR
    | right::MAKE_REG
    | right::MAKE_SOCK
    | right::MAKE_FIFO
    | right::MAKE_BLOCK
    | right::MAKE_SYM
    | right::TRUNCATE;

/// Gives up what a command needs nothing of. Threads that it starts later have no more. `user` is a user and a group.
fn confine(user: Option<(u32, u32)>) -> io::Result<()> {
    capability::bound(0)?;
    if let Some((uid, gid)) = user {
        capability::set_groups(&[])?;
        // This also keeps processes of the same user from looking into it.
        capability::become_user(uid, gid)?;
    }
    capability::set(0)?;
    capability::no_new_privileges()?;
    let Some(version) = landlock::version() else { return Ok(()) };
    let rules = Ruleset::new(version, HANDLED, true)?;
    for path in READ {
        rules.allow(path, right::READ_FILE | right::READ_DIR)?;
    }
    rules.enforce()
}

/// A user and a group, neither of them root's.
fn user(text: &str) -> Option<(u32, u32)> {
    let (uid, gid) = text.split_once(':')?;
    let number = |text: &str| text.parse().ok().filter(|number| *number != 0);
    Some((number(uid)?, number(gid)?))
}

fn bound() {
    for (what, max) in [(Resource::As, MEMORY_MAX), (Resource::Nofile, FILES_MAX), (Resource::Core, 0)] {
        // A limit that is lower already stays.
        let _ = setrlimit(what, Rlimit { current: Some(max), maximum: Some(max) });
    }
}

fn begin(stream: &mut UnixStream) -> Result<Begin, String> {
    let mut read = |len: usize| {
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes).map(|()| bytes).map_err(|error| error.to_string())
    };
    let len = read(4)?.try_into().map(u32::from_le_bytes).unwrap_or_default();
    let len = usize::try_from(len).ok().filter(|len| *len <= BEGIN_LEN_MAX).ok_or("too long")?;
    let begin = serde_json::from_slice(&read(len)?).map_err(|error| error.to_string())?;
    thin::check_hello(&read(thin::HELLO_LEN)?)?;
    Ok(begin)
}

/// Runs until the client has its status.
pub fn run() -> ExitCode {
    bound();
    let user = match std::env::var("TAPIO_COMMAND_USER").ok().map(|text| user(&text)) {
        Some(None) => {
            eprintln!("xe __serve is for tapiod: TAPIO_COMMAND_USER is UID:GID");
            return ExitCode::FAILURE;
        }
        known => known.flatten(),
    };
    if let Err(error) = confine(user) {
        eprintln!("xe __serve cannot give up its rights: {error}");
        return ExitCode::FAILURE;
    }
    let stream = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let Ok(mut stream) = stream else { return ExitCode::FAILURE };
    let begin = match begin(&mut stream) {
        Ok(begin) => begin,
        Err(why) => {
            eprintln!("xe __serve is for tapiod: {why}");
            return ExitCode::FAILURE;
        }
    };
    out::serve(Thin::new(stream));
    let done = execute(begin);
    out::exit(u32::from(!done));
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether it went well; what went wrong was said.
fn execute(begin: Begin) -> bool {
    let arguments = match XeArguments::of(&begin.words) {
        Ok(arguments) => arguments,
        Err(error) => return error.told(),
    };
    // Where the client is connected is not its to choose.
    let socket = std::env::var_os("TAPIO_SOCKET").map(Into::into);
    let connection = Connection { socket, quiet: true, ..Connection::default() };
    let arguments = XeArguments { connection, ..arguments };
    let name = arguments.words.first().map(String::as_str).unwrap_or_default();
    if let Some(Found::Own(command)) = commands::find(name).filter(|_| !arguments.wants_help) {
        let names_file = command.required.iter().chain(command.optional).any(|word| FILES.contains(word));
        if (names_file && !AT_THE_CLIENT.contains(&name)) || name.starts_with("console") {
            return Failure::other(format!("{name} works by the xe that comes with Tapio alone; use it"))
                .told();
        }
    }
    attempt(arguments, |connection| Client::with_session(connection, begin.session))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_command_has_no_files_no_programs_and_no_network_of_the_host() {
        let Some(version) = landlock::version() else { return };
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("an address");
        let dir = std::env::temp_dir();
        // Rights are a thread's: the test's other threads keep theirs.
        let tried = std::thread::spawn(move || {
            confine(None).expect("it gives up its rights");
            let denied = |done: io::Result<()>| done.expect_err("it is denied").kind();
            assert_eq!(capability::permitted().expect("known"), 0);
            assert_eq!(denied(std::fs::read("/etc/passwd").map(drop)), ErrorKind::PermissionDenied);
            assert_eq!(denied(std::fs::read_dir(&dir).map(drop)), ErrorKind::PermissionDenied);
            assert_eq!(
                denied(std::fs::write(dir.join("tapio-serve-test"), "x")),
                ErrorKind::PermissionDenied
            );
            let started = std::process::Command::new("/bin/true").status();
            assert_eq!(denied(started.map(drop)), ErrorKind::PermissionDenied);
            if version >= 4 {
                assert_eq!(denied(TcpStream::connect(address).map(drop)), ErrorKind::PermissionDenied);
            }
        });
        tried.join().expect("no panic");
        assert_eq!(user("70000:7"), Some((70_000, 7)));
        for bad in ["", "1", "0:1", "1:0", "a:b", "-1:1", "1:1:1"] {
            assert_eq!(user(bad), None, "{bad}");
        }
        assert!(std::fs::read("/etc/passwd").is_ok(), "this thread gave nothing up");
    }
}
