//! `tapio bench`: the program `tapio-bench`, with the arguments as they are.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use tapio_control::ControlError;
use tapio_report::failure::Result;

const PROGRAM: &str = "tapio-bench";

/// Becomes that program: from the directory of this one, or else from the search path.
///
/// # Errors
/// It is not there.
pub fn run(arguments: &[OsString]) -> Result<()> {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    let program = beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(&program).args(arguments).exec();
    Err(ControlError::io(format_args!("cannot run {}", program.display()), &error)
        .next("benchmarks are a program of their own: cargo build --release -p tapio-bench"))
}
