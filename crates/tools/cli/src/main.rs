//! The program; everything is in the library beside it, so that fuzzers reach it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    tapio_cli::run()
}
