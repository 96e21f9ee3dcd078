//! What the commands share: failures with their exit status, and small pieces of output.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use tapio_format::FormatError;
use tapio_format::Medium;
use tapio_format::vhd::offline::Image;

/// Why a command ends: a sentence, and the number that it exits with.
#[derive(Debug)]
pub(super) struct Failure {
    errno: i32,
    message: Message,
}

#[derive(Debug)]
enum Message {
    /// A sentence.
    Said(String),
    /// Text by the parser of arguments, whole lines.
    Usage(String),
    /// Everything was said already.
    Silent,
}

impl Failure {
    /// A failure of this number with a sentence.
    pub fn new(errno: i32, message: impl Into<String>) -> Self {
        Self { errno, message: Message::Said(message.into()) }
    }

    /// Arguments that make no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, message)
    }

    /// Arguments that the parser refused, in its words.
    pub fn usage(text: String) -> Self {
        Self { errno: libc::EINVAL, message: Message::Usage(text) }
    }

    /// A failure that was reported where it was found.
    pub fn silent(errno: i32) -> Self {
        Self { errno, message: Message::Silent }
    }

    /// Prints the failure and gives the exit status. It goes where XenServer's tool has its own: to standard output, as
    /// programs that show its output rely on, or to standard error.
    pub fn report(&self, tool: &str, on_stdout: bool) -> ExitCode {
        match (&self.message, on_stdout) {
            (Message::Said(message), false) => eprintln!("{tool}: {message}"),
            (Message::Usage(text), false) => eprint!("{}", for_reader(text.clone(), &io::stderr())),
            (Message::Silent, _) => {}
            (Message::Said(message), true) => say(&format!("{tool}: {message}\n")),
            (Message::Usage(text), true) => say(&for_reader(text.clone(), &io::stdout())),
        }
        ExitCode::from(u8::try_from(self.errno.rem_euclid(256)).unwrap_or(1).max(1))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Message::Said(text) | Message::Usage(text) => f.write_str(text),
            Message::Silent => Ok(()),
        }
    }
}

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Self {
        Self::new(error.errno(), error.to_string())
    }
}

impl From<io::Error> for Failure {
    /// Of writing to standard output; a reader that has gone away needs no message.
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EPIPE) => Self::silent(libc::EPIPE),
            errno => Self::new(errno.unwrap_or(libc::EIO), format!("cannot write the output: {error}")),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::from(io::Error::from(error))
    }
}

/// Prints on standard output; a reader that has gone away is no error.
fn say(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints to standard error what was tolerated while an image was opened.
pub(super) fn tell_tolerances<M: Medium>(image: &Image<M>) {
    for tolerance in image.tolerances() {
        eprintln!("vhd-util: {}: {tolerance}", image.path().display());
    }
}

/// Ends the process here if the variable `point` is in the environment: how tests stop a command between two of its
/// steps, by the names that XenServer's tool has for them.
pub(super) fn stop_if_told(point: &str) {
    if std::env::var_os(point).is_some() {
        eprintln!("vhd-util: stopped at {point}");
        std::process::exit(libc::EINVAL);
    }
}

/// Mebibytes as bytes.
pub(super) fn mebibytes(count: u64) -> Result<u64, Failure> {
    count.checked_mul(1 << 20).ok_or_else(|| Failure::invalid(format!("{count} MiB is no size")))
}

/// Bytes in hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The text as it is on a terminal, without its colours elsewhere.
pub(super) fn for_reader(text: String, reader: &impl IsTerminal) -> String {
    if reader.is_terminal() { text } else { without_colours(&text) }
}

/// The text without the escape sequences that colour it.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split('\u{1b}');
    plain.extend(parts.next());
    for part in parts {
        plain.push_str(part.split_once('m').map_or(part, |(_, rest)| rest));
    }
    plain
}

/// Numbers as the user wants them.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    pub hexadecimal: bool,
}

impl Numbers {
    pub fn show(self, number: u64) -> String {
        // As printf's %#x: 0 has no prefix.
        if self.hexadecimal && number != 0 { format!("{number:#x}") } else { number.to_string() }
    }
}
