//! From the command line to a process that serves, and to its end.

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use tapio_control::command::{Call, FrontAdd, Handle, Open, Quit, SetLimits, SetPolling, SetTransfers};
use tapio_control::{
    ControlError, Ended, Errno, Front, ImageSource, Key, Limits, Result, RunDir, notify,
    remove_stale_sockets, serve,
};
use tapio_format::continuation::{self, Followed, Reason};
use tapio_format::live::vhd::intent;
use tapio_format::vhd::offline::remove_orphans;
use tapio_stat::pool::clean_pools;
use tapio_stat::share::clean_shares;
use tapio_stat::{ShmRoot, clean_stale};
use tapio_types::{ImageKind, LayerSpec, parse_type_and_path};

use crate::args::Options;
use crate::chain;
use crate::device;
use crate::failure::bad_image;
use crate::host::Host;
use crate::log;
use crate::memory::Budget;
use crate::process::{self, Fork};
use crate::sandbox;
use crate::table::Table;
use crate::watchdog::watched;

/// Runs the process until a command or a signal ends it.
///
/// # Errors
/// It could not begin, or its disks could not be closed cleanly.
pub fn run(options: &Options) -> Result<()> {
    let parent = if options.foreground {
        None
    } else if options.detach {
        process::leave_session()?;
        None
    } else {
        match process::go_to_background()? {
            // This process only says how the start of the other went.
            Fork::Foreground(status) => std::process::exit(status),
            Fork::Background(parent) => Some(parent),
        }
    };
    let begun = begin(options);
    let (table, listener, termination) = match (begun, parent) {
        (Ok(begun), None) => {
            if options.detach {
                process::leave_terminal()?;
                log::use_syslog();
                sandbox::use_syslog();
            } else {
                log::use_thread();
            }
            begun
        }
        (Ok(begun), Some(parent)) => {
            parent.tell(0)?;
            log::use_syslog();
            sandbox::use_syslog();
            begun
        }
        (Err(error), None) => return Err(error),
        (Err(error), Some(parent)) => {
            log::line(&error.to_string());
            parent.tell(error.errno.raw() as u8)?;
            log::use_syslog();
            return Err(error);
        }
    };
    notify::ready(&status(&table));
    let ended = watched(&table, || serve(&listener, &table, Limits::default(), Some(termination.as_fd())));
    let closed = finish(&table);
    match ended {
        Ok(Ended::Stopped) => log::line("ended by a signal"),
        Ok(Ended::Quit | Ended::Empty) => {}
        Err(error) => return Err(ControlError::io("the control socket failed", &error)),
    }
    closed
}

/// Closes all disks, at the end of the process.
pub(crate) fn finish(table: &Table<Host>) -> Result<()> {
    notify::stopping("closing its disks");
    // New clients shall not find a process that is going.
    let _ = fs::remove_file(table.run.socket(std::process::id() as i32));
    let closed = table.handle(Quit { force: false }, &mut Call::of_itself()).map(drop);
    if !tapio_rbd::closed(RBD_CLOSED_MAX) {
        log::line(
            "an image of Ceph is not closed: its cluster does not answer, and finds out that this process ended",
        );
    }
    closed
}

/// How long images of Ceph may take to be closed at the end.
const RBD_CLOSED_MAX: Duration = Duration::from_secs(10);

/// What the service manager shows.
fn status(table: &Table<Host>) -> String {
    let images: Vec<String> = table.list().into_iter().filter_map(|disk| disk.image).collect();
    match images.is_empty() {
        true => "waiting for commands".into(),
        false => format!("serving {}", images.join(", ")),
    }
}

type Begun = (Table<Host>, UnixListener, OwnedFd);

/// Threads of a disk where their number is not given, at most.
const THREADS_AUTO_MAX: usize = 4;

/// Threads that a disk may have where their number is not given: one for each processor that this process may use, up
/// to [`THREADS_AUTO_MAX`].
fn threads_of_host() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(THREADS_AUTO_MAX)
}

fn begin(options: &Options) -> Result<Begun> {
    let refused = process::settle_in();
    let termination = process::termination()?;
    let (run, shm) = (RunDir::from_env(), ShmRoot::from_env());
    if !refused.is_empty() && options.foreground {
        log::line(&format!("goes on without {}", refused.join(", ")));
    }
    if options.clean_up {
        clean_up(&run, &shm);
    }
    if let Err(why) = notify::find_manager() {
        log::line(&why);
    }
    run.create()?;
    let memory = Budget::new(options.memory_max)?;
    // Asked for here, because the sandbox does not let anything look at processors.
    let threads = options.threads.unwrap_or_else(threads_of_host);
    let own = sandbox::Own {
        files: vec![run.path().to_path_buf(), shm.path().to_path_buf(), intent::directory()],
        sockets: options.fronts.iter().filter_map(Front::directory).collect(),
        read: options.image.as_ref().map_or_else(Vec::new, chain::files_of_ceph),
    };
    sandbox::enter(&options.sandbox, &own)?;
    let socket = run.socket(std::process::id() as i32);
    // The number is ours now, so what is there belonged to a process that is gone.
    let _ = fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket)
        .map_err(|error| ControlError::io(format_args!("cannot listen on {}", socket.display()), &error))?;
    let host = Host { no_space: options.no_space, memory, threads };
    let table = Table::new(host, run.clone(), shm);
    if let Err(error) = serve_image(&table, &run, options) {
        let _ = fs::remove_file(&socket);
        // Whatever was opened before the failure is closed as at the end.
        let _ = table.handle(Quit { force: true }, &mut Call::of_itself());
        return Err(error);
    }
    let printed = writeln!(std::io::stdout(), "{}", socket.display());
    printed.map_err(|error| ControlError::io("printing the control socket", &error))?;
    Ok((table, listener, termination))
}

/// What earlier processes left when they died. A failure is no reason not to serve.
fn clean_up(run: &RunDir, shm: &ShmRoot) {
    if let Err(error) = remove_stale_sockets(run) {
        log::line(&format!("left-over control sockets: {error}"));
    }
    match tapio_front::device::clean(&device::dir(run), false) {
        Ok(cleaned) => cleaned
            .iter()
            .for_each(|path| log::line(&format!("{} of a dead process taken away", path.display()))),
        Err(error) => log::line(&error.to_string()),
    }
    match clean_stale(shm) {
        Ok(_) => {}
        Err(error) => log::line(&format!("left-over statistics in {}: {error}", shm.path().display())),
    }
    if let Err(error) = clean_shares(shm) {
        log::line(&format!("left-over shares of devices in {}: {error}", shm.path().display()));
    }
    if let Err(error) = clean_pools(shm) {
        log::line(&format!("left-over page pools in {}: {error}", shm.path().display()));
    }
}

/// Opens the image of the command line, if there is one, and all its front ends.
fn serve_image(table: &Table<Host>, run: &RunDir, options: &Options) -> Result<()> {
    let Some(image) = &options.image else { return Ok(()) };
    let command = image;
    let (image, reason) = &newest(image, options.read_only)?;
    remove_unfinished(image, options.read_only);
    let minor = match options.minor {
        Some(minor) => run.minors().claim(minor)?,
        None => run.minors().allocate_own()?,
    };
    table.attach_own(minor)?;
    let key = options.key_file.as_deref().map(Key::in_file).transpose()?;
    let (read_only, pool) = (options.read_only, options.pool.clone());
    let sector_size = options.sector_size.or_else(|| sector_size_of_command(command, image, (*reason)?));
    let share = options.share;
    let open = Open { read_only, pool, sector_size, share, ..Open::of(minor, image.clone()) };
    table.open(&open, key.as_ref(), options.request_timeout)?;
    let mut call = Call::of_itself();
    if !options.limits.is_off() {
        table.handle(SetLimits { minor, limits: options.limits }, &mut call)?;
    }
    if options.polling.max_us > 0 {
        table.handle(SetPolling::of(minor, options.polling), &mut call)?;
    }
    if !options.transfers.is_off() {
        table.handle(SetTransfers { minor, sizes: options.transfers }, &mut call)?;
    }
    for front in &options.fronts {
        call.fds = match (front.connection_index(), options.vhost_user_fd) {
            (Some(_), Some(fd)) => vec![inherited(fd)?],
            _ => Vec::new(),
        };
        table.handle(FrontAdd { minor, front: front.clone(), vbd: None }, &mut call)?;
    }
    Ok(())
}

/// The image that the disk of the command line is on now: it may have gone on with another while an earlier process
/// served it.
fn newest(image: &ImageSource, read_only: bool) -> Result<(ImageSource, Option<Reason>)> {
    let ImageSource::Leaf(text) = image else { return Ok((image.clone(), None)) };
    if read_only {
        return Ok((image.clone(), None));
    }
    let named =
        parse_type_and_path(text).map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))?;
    let followed = continuation::follow(&named).map_err(|error| bad_image(&error))?;
    continuation::check_single(&followed).map_err(|error| bad_image(&error))?;
    let Followed { leaf, reason, .. } = followed;
    let Some(reason) = reason else { return Ok((image.clone(), None)) };
    log::line(&format!("{named} went on with {leaf} after {reason}: that one is served"));
    Ok((ImageSource::Leaf(leaf.to_string()), Some(reason)))
}

/// What guests were told of sectors by the process that was started with this command first, where the disk went on
/// with another image since, which alone would tell them something else.
fn sector_size_of_command(command: &ImageSource, newest: &ImageSource, reason: Reason) -> Option<u32> {
    let (ImageSource::Leaf(command), ImageSource::Leaf(newest)) = (command, newest) else { return None };
    let (command, newest) = (parse_type_and_path(command).ok()?, parse_type_and_path(newest).ok()?);
    let is_raw = |image: &LayerSpec| image.kind == ImageKind::Raw;
    match is_raw(&command) {
        true => Some(tapio_ring::uring::sector_len_of(&command.path).unwrap_or(512)),
        // A commit may end on a raw base, which was in the chain before.
        false => (is_raw(&newest) && reason != Reason::Commit).then_some(512),
    }
}

/// Removes what a process that was killed in a snapshot left beside the image.
fn remove_unfinished(image: &ImageSource, read_only: bool) {
    let ImageSource::Leaf(text) = image else { return };
    if let (false, Ok(leaf)) = (read_only, parse_type_and_path(text))
        && leaf.kind.is_local()
        && let Some(directory) = leaf.path.parent()
    {
        for path in remove_orphans(directory) {
            log::line(&format!("{}, which a killed process left unfinished, is removed", path.display()));
        }
    }
}

/// A descriptor that the starter left open for us.
fn inherited(fd: i32) -> Result<OwnedFd> {
    // SAFETY: fcntl only looks at the number.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if fd <= 2 || flags < 0 {
        return Err(ControlError::new(
            tapio_control::Errno::EBADF,
            format!("descriptor {fd} of --fd is not an open socket"),
        )
        .next("start the program with a connected socket at that number"));
    }
    // SAFETY: it is open and, by the option's meaning, given to this process; it is taken once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
