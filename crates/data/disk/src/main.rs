//! The disk process: one per plugged disk.
//!
//! ```text
//!   main thread ── accepts on the control socket, lends a thread to each conversation (tapio-control)
//!        │  Table: which disks there are, where each stands, its marker, its files of counters, its front ends
//!        └─ Host: the one place that knows the data plane ──▶ one data thread per disk (tapio-block)
//! ```
//!
//! Started without arguments it goes to the background, prints its control socket and waits, as tapdisk does. It is
//! kept small on purpose: no command-line library, no async runtime, nothing that wakes up while no disk works.

mod args;
mod beneath;
mod blkif;
mod chain;
mod commands;
mod counter;
mod device;
mod device_share;
mod failure;
mod fronts;
mod host;
mod host_disk;
mod limits;
mod log;
mod memory;
mod moved;
mod movement;
mod nbd_servers;
mod process;
mod rest;
mod room;
mod sandbox;
mod start;
mod table;
mod tap_options;
mod trace;
mod watchdog;

use std::process::ExitCode;

use args::Invocation;

fn main() -> ExitCode {
    tapio_sys::private::new_files();
    match args::parse(std::env::args().skip(1)) {
        Ok(Invocation::Help) => {
            print!("{}", args::help());
            ExitCode::SUCCESS
        }
        Ok(Invocation::Version) => {
            println!("tapio-disk {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Ok(Invocation::Capabilities) => {
            println!("{}", args::CAPABILITIES);
            ExitCode::SUCCESS
        }
        Ok(Invocation::Sandbox) => {
            print!("{}", sandbox::describe());
            ExitCode::SUCCESS
        }
        Ok(Invocation::Devices) => ended(device::print_kinds()),
        Ok(Invocation::CleanDevices { waiting }) => ended(device::clean(waiting)),
        Ok(Invocation::Serve(options)) => ended(start::run(&options)),
        Err(message) => {
            eprintln!("tapio-disk: {message}; 'tapio-disk --help' lists the options");
            process::exit_code(tapio_control::Errno::EINVAL)
        }
    }
}

fn ended(result: tapio_control::Result<()>) -> ExitCode {
    let status = match result {
        Ok(()) => 0,
        Err(error) => {
            log::line(&error.to_string());
            process::exit_status(error.errno)
        }
    };
    log::flush();
    if tapio_rbd::is_closing() {
        // SAFETY: it never returns. Threads of librbd go on, and what it would take down at an ordinary end is theirs.
        unsafe { libc::_exit(status.into()) }
    }
    ExitCode::from(status)
}
