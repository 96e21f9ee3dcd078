//! How every tool here fails: a sentence, the system's words for the error, and its number as exit status.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use tapio_control::{ControlError, Errno};

/// What a command answers.
pub type Result<T> = std::result::Result<T, ControlError>;

/// The exit status of an error number.
pub fn status(errno: Errno) -> ExitCode {
    ExitCode::from(u8::try_from(errno.raw()).unwrap_or(1))
}

/// Prints what went wrong and, last, what the system calls it.
pub fn report(tool: &str, error: &ControlError) -> ExitCode {
    complain(&format!("{tool}: {error}\n{}\n", error.errno.text()));
    status(error.errno)
}

/// Prints what the parser says: help on standard output, complaints on standard error with `EINVAL`.
pub fn usage(error: &clap::Error) -> ExitCode {
    // As above.
    let _ = error.print();
    if error.use_stderr() {
        eprintln!("{}", Errno::EINVAL.text());
        return status(Errno::EINVAL);
    }
    ExitCode::SUCCESS
}

/// Text as a terminal may get it: control characters but the end of a line and the tab are written as `\u{1b}`.
/// Names of VMs, disks and files come from others, and a terminal obeys what it is sent.
pub fn harmless(text: &str) -> Cow<'_, str> {
    let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if obeyed(c) {
            safe.extend(c.escape_unicode());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// Writes to standard error; on a terminal, what is [`harmless`].
pub fn complain(text: &str) {
    let mut err = io::stderr().lock();
    let text = if err.is_terminal() { harmless(text) } else { Cow::Borrowed(text) };
    // Nowhere else to complain.
    let _ = err.write_all(text.as_bytes());
}

/// Writes to standard output; on a terminal, what is [`harmless`]. A program that reads a pipe or a file gets every
/// name to the letter.
///
/// # Errors
/// The output is closed or full.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let text = if out.is_terminal() { harmless(text) } else { Cow::Borrowed(text) };
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| ControlError::io("writing the output", &error))
}

/// Writes a value as indented JSON.
///
/// # Errors
/// As for [`print()`].
pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|error| {
        ControlError::new(Errno::EIO, format!("the output cannot be written as JSON: {error}"))
    })?;
    print(&(text + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_that_a_terminal_obeys() {
        assert!(matches!(harmless("a name\n\tand äöü\n"), Cow::Borrowed(_)));
        assert_eq!(harmless("\u{1b}]0;x\u{7}\u{1b}[2J\r"), "\\u{1b}]0;x\\u{7}\\u{1b}[2J\\u{d}");
        assert_eq!(harmless("\u{9b}2J\u{7f}\u{8}"), "\\u{9b}2J\\u{7f}\\u{8}");
    }
}
