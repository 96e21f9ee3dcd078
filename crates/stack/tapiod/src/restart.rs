//! The daemon becomes this program anew, with the same options.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Returns only an error.
pub fn again() -> io::Error {
    match std::env::current_exe() {
        Ok(program) => Command::new(program).args(std::env::args_os().skip(1)).exec(),
        Err(error) => error,
    }
}
