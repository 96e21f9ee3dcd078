//! One command that answers to several names.
//!
//! `tapio` itself, and `xe`, `tap-ctl`, `xsiostat`, `vhd-util` and `cbt-util`, whether called by these names through a
//! link or as the first word after `tapio`. Help, shell completions and manual pages come from the same definitions.

mod bench;
mod bugreport;
pub use bugreport::Redactor;
mod cbt_util;
mod cpu;
mod disk;
mod doctor;
mod domains;
mod generate;
mod number;
mod profile;
mod queue;
mod tap_ctl;
mod tapio;
mod timeline;
mod top;
mod trace;
mod vhd_util;
mod xe;
mod xsiostat;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// The tools inside, by name.
const TOOLS: [&str; 5] = ["xe", "tap-ctl", "xsiostat", "vhd-util", "cbt-util"];

/// What a foreign file can make `xsiostat` do, for fuzzers and no one else.
#[doc(hidden)]
pub mod foreign {
    pub use crate::xsiostat::{rates_text, replay_body_text, replay_seed, replay_text};
}

/// Runs the tool that the program was called as.
pub fn run() -> ExitCode {
    tapio_sys::private::new_files();
    // A reader that goes away, as `xsiostat | head`, ends the program quietly, as it ends every tool of its kind.
    // SAFETY: restoring the default action installs no code of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if tool(arguments.first()).is_none() && tool(arguments.get(1)).is_some() {
        arguments.remove(0);
    }
    match tool(arguments.first()) {
        Some("xe") => xe::run(arguments),
        Some("tap-ctl") => tap_ctl::run(arguments),
        Some("xsiostat") => xsiostat::run(arguments),
        Some("vhd-util") => vhd_util::run(arguments),
        Some("cbt-util") => cbt_util::run(arguments),
        _ => tapio::run(arguments),
    }
}

/// Which tool a word names, with any directory before it.
fn tool(word: Option<&OsString>) -> Option<&'static str> {
    let name = Path::new(word?).file_name()?;
    TOOLS.into_iter().find(|tool| name == *tool)
}
