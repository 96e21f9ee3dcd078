//! The toolstack's daemon.
//!
//! ```text
//!   args, settings ── lock ── state (certificate, accounts, database) ── Toolstack (recovery) ── servers ── signals
//! ```
//!
//! What it holds is on disk or in other processes: a daemon that is killed and started again finds its disks and
//! guests, and finishes or undoes what was half done.

mod args;
mod backend;
mod closed;
mod daemon;
mod dashboard;
mod decoder;
mod default_sr;
mod dirs;
mod host_files;
mod lines;
mod link;
mod lock;
mod log_files;
mod logs;
mod member;
mod memory;
mod restart;
mod settings;
mod users;
mod worker;

use std::process::ExitCode;

use clap::Parser;
use tapio_sys::process::{self, Signal};

use crate::args::{Args, Command};
use crate::settings::Settings;

fn main() -> ExitCode {
    tapio_sys::private::new_files();
    worker::run_if_asked();
    decoder::run_if_asked();
    let args = Args::parse();
    let status = match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("tapiod: {why}");
            ExitCode::FAILURE
        }
    };
    log_files::flush();
    status
}

fn run(args: Args) -> Result<(), String> {
    let settings = Settings::gather(&args.options)?;
    if let Some(Command::User(command)) = args.command {
        return users::run(&settings.state_dir, command);
    }
    let options = &args.options;
    if options.print_config {
        print!("{}", settings.as_file());
        return Ok(());
    }
    if options.check {
        print!("{}", daemon::check(&settings)?);
        return Ok(());
    }
    if let Some([cert, key]) = options.install_certificate.as_deref() {
        return install(&settings, cert, key);
    }
    daemon::run(&settings, options)
}

fn install(settings: &Settings, cert: &std::path::Path, key: &std::path::Path) -> Result<(), String> {
    dirs::make_dir(&settings.state_dir, dirs::OURS)?;
    let fingerprint = tapio_api::tls::install(&settings.state_dir, cert, key)?;
    println!("SHA-256 {fingerprint}");
    if let Some(pid) = lock::holder(&settings.state_dir)? {
        // The process holds the lock of this state, so it is the daemon.
        if let Err(error) = process::signal(pid, Signal::HUP) {
            return Err(format!(
                "process {pid} was not told ({error}): 'kill -HUP {pid}' makes it use the certificate"
            ));
        }
    }
    Ok(())
}
