//! This program as a storage worker: what `tapio_sm::worker` starts for each SR.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tapio_sm::SrDriver;
use tapio_sm::external::discovery::Places;
use tapio_sm::worker::{Options, Program, Workers};

use crate::settings::Settings;
use crate::{logs, memory};

/// The first argument of a worker. It is no command for people, so no help has it.
const COMMAND: &str = "storage-worker";

/// The first argument of the keeper of a lease.
const KEEPER: &str = "lease-keeper";

/// What makes drivers work in processes of this program.
pub fn workers(settings: &Settings) -> Workers {
    let arguments: [OsString; 5] = [
        COMMAND.into(),
        settings.mount_dir.clone().into(),
        settings.run_dir.clone().into(),
        settings.state_dir.clone().into(),
        settings.log_level.clone().into(),
    ];
    // The very file that runs, also where an upgrade has put another one in its place: both sides speak one language.
    let program = Program { path: PathBuf::from("/proc/self/exe"), arguments: arguments.to_vec() };
    Workers::new(&Options { launch: Arc::new(program), limit: settings.storage_timeout })
}

/// The drivers of this host, each working in processes of this program.
pub fn drivers(settings: &Settings, workers: &Workers) -> Vec<Arc<dyn SrDriver>> {
    let local = tapio_sm::registry_with_state(&settings.mount_dir, &settings.run_dir, &settings.state_dir);
    workers.drivers(local)
}

/// Where plugins of others are looked for.
pub fn plugins(settings: &Settings) -> Places {
    Places {
        scripts: settings.storage_scripts.clone(),
        programs: settings.storage_programs.clone(),
        run_dir: settings.run_dir.clone(),
        socket: settings.sockets().into_iter().next(),
        limit: settings.storage_timeout,
    }
}

/// Runs as a worker until the daemon is gone; returns where the arguments are not those of one.
pub fn run_if_asked() {
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next();
    let mut next = || arguments.next().unwrap_or_default();
    if first.as_ref().is_some_and(|first| first == KEEPER) {
        keep(&next(), &next());
    }
    if first.is_none_or(|first| first != COMMAND) {
        return;
    }
    let (mount_dir, run_dir, state_dir, level) = (next(), next(), next(), next());
    // SAFETY: the call takes numbers. Nothing of this process uses a descriptor yet but the first three: whatever else
    // the daemon had open, a database above all, shall not stay open because a storage holds this process.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    memory::bound_heaps();
    if let Err(why) = logs::start(&level.to_string_lossy()) {
        eprintln!("tapiod {COMMAND}: {why}");
    }
    match std::io::stdin().as_fd().try_clone_to_owned() {
        Ok(control) => {
            let (mount_dir, run_dir) = (Path::new(&mount_dir), Path::new(&run_dir));
            let drivers = tapio_sm::registry_with_state(mount_dir, run_dir, Path::new(&state_dir));
            tapio_sm::lease::run_keepers_as(Path::new("/proc/self/exe"), &[KEEPER.into(), level.clone()]);
            tapio_sm::worker::serve(&UnixStream::from(control), drivers, tapio_core::plan::steps::step);
        }
        Err(error) => eprintln!("tapiod {COMMAND}: {error}"),
    }
    // SAFETY: it never returns. Operations that run are broken off here, as the daemon's own end would: the SR belongs
    // to the next daemon's worker, and nothing that waits for the storage may keep this process.
    unsafe { libc::_exit(0) }
}

/// Runs as the keeper of a lease, which goes on without its daemon, until that is not needed any more.
fn keep(level: &OsStr, what: &OsStr) -> ! {
    // SAFETY: the call takes numbers, and nothing of this process uses a descriptor yet but the first three.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    memory::bound_heaps();
    if let Err(why) = logs::start(&level.to_string_lossy()) {
        eprintln!("tapiod {KEEPER}: {why}");
    }
    tapio_sm::lease::end_guests_by(|run_dir, vm| tapio_vm::end_now(&tapio_vm::Settings::new(run_dir), vm));
    tapio_sm::lease::keep(&what.to_string_lossy());
    std::process::exit(0);
}
