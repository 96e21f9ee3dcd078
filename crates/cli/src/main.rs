//! One command that answers to several names.

mod vhd_util;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let called = |argument: Option<&OsString>| {
        argument.is_some_and(|name| Path::new(name).file_name().is_some_and(|name| name == "vhd-util"))
    };
    if called(arguments.first()) {
        return vhd_util::run(arguments);
    }
    if called(arguments.get(1)) {
        arguments.remove(0);
        return vhd_util::run(arguments);
    }
    eprintln!("usage: tapio vhd-util COMMAND [OPTIONS]");
    ExitCode::from(22)
}
