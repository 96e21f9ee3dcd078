//! `xe __serve`: this process runs one command for a client of XenServer's own `xe`, for `tapiod`.
//!
//! Standard input is the connection. `tapiod` has sent session and words on it; the client's own bytes follow. The
//! session is the client's: what its account may not do is refused here as it is elsewhere. Files of this host are
//! nothing to the client, so commands that read or write files do it at the client, or are refused.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, setrlimit};
use serde::Deserialize;
use tapio_model::thin;

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
const FILES: [&str; 1] = ["filename"];

/// Commands that read or write their file at the client.
const AT_THE_CLIENT: [&str; 2] = ["vdi-export", "vdi-import"];

fn bound() {
    for (what, max) in [(Resource::As, MEMORY_MAX), (Resource::Nofile, FILES_MAX), (Resource::Core, 0)] {
        // A limit that is lower already stays.
        let _ = setrlimit(what, Rlimit { current: Some(max), maximum: Some(max) });
    }
    // SAFETY: the call takes numbers. Nothing that this process starts gets more rights than it has.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
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
