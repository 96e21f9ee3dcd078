//! How every tool here fails: a sentence, the system's words for the error, and its number as exit status.

use std::io::{self, Write};
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
    let mut err = io::stderr().lock();
    // Nowhere else to complain.
    let _ = writeln!(err, "{tool}: {error}\n{}", error.errno.text());
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

/// Writes to standard output.
///
/// # Errors
/// The output is closed or full.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
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
