//! The program: `tapio-xenstored`.

mod args;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use tapio_xenstored::domains::{Life, NoHypervisor, Platform};
use tapio_xenstored::journal::{self, Dir, Journal};
use tapio_xenstored::quota::Limits;
use tapio_xenstored::serve::rings::{RingPlatform, SharedRings, Source};
use tapio_xenstored::serve::xen::{Census, DomainEvents, XenSource, local_port};
use tapio_xenstored::serve::{self, Daemon, DomainWatch, End, Restored, socket};
use tapio_xenstored::store::Store;
use tapio_xenstored::{Kept, Server};

use args::{Args, Domains};
use tapio_log::{Log, Rotated};

/// What the last lines of the log may take.
const SAID_WITHIN: std::time::Duration = std::time::Duration::from_secs(1);

fn main() -> ExitCode {
    // First: the process is known by its number, and by its sockets, before it can take the signal.
    if let Err(error) = serve::hold_updates() {
        tapio_xenstored::say!("cannot hold signals back: {error}");
        return ExitCode::FAILURE;
    }
    tapio_sys::private::new_files();
    let args = Args::parse();
    let result = match args.check_state {
        Some(fd) => check_state(fd),
        None => run(&args),
    };
    let status = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            tapio_xenstored::say!("{why}");
            ExitCode::FAILURE
        }
    };
    tapio_log::flush(SAID_WITHIN);
    status
}

/// Lets the log be the file that was named.
fn begin_log(args: &Args) -> Result<(), String> {
    let Some(path) = &args.log_file else { return Ok(()) };
    let log = Rotated::open(path, args.rotation()).and_then(Log::in_file);
    tapio_log::to(log.map_err(|error| format!("cannot write {}: {error}", path.display()))?);
    Ok(())
}

/// Whether this program could go on with a state. It takes nothing over.
fn check_state(fd: i32) -> Result<(), String> {
    let bytes = tapio_xenstored::serve::read_state(fd)?;
    let mut reader = tapio_xenstored::state::codec::Reader(&bytes);
    tapio_xenstored::state::load(&mut reader, Box::new(NoHypervisor))
        .map(drop)
        .map_err(|damaged| damaged.0.to_owned())
}

fn on_xen(args: &Args) -> bool {
    match args.domains {
        Domains::Auto => Path::new("/proc/xen/xsd_port").exists(),
        Domains::Xen => true,
        Domains::None => false,
    }
}

fn run(args: &Args) -> Result<(), String> {
    begin_log(args)?;
    let own =
        std::env::current_exe().map_err(|error| format!("cannot find this program's own file: {error}"))?;
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--restore")).collect();
    let rings = SharedRings::default();
    let xen = on_xen(args);
    let source = || -> Box<dyn Source> { Box::new(XenSource) };
    let platform: Box<dyn Platform> =
        if xen { Box::new(RingPlatform::new(rings.clone(), source())) } else { Box::new(NoHypervisor) };
    let mut daemon = match args.restore {
        Some(fd) => restore(args, fd, platform, rings, xen.then(source))?,
        None => begin(args, platform, rings, xen)?,
    };
    let failed = |error: std::io::Error| format!("cannot begin: {error}");
    daemon.take_signals().map_err(failed)?;
    if let Some(file) = &args.pid_file {
        write_pid(file)?;
    }
    notify_ready();
    loop {
        match daemon.run().map_err(|error| format!("cannot go on: {error}"))? {
            End::Asked => break,
            End::Update(update) => {
                let why = daemon.hand_over(&update, &own, &arguments);
                tapio_xenstored::say!("no live update: {why}");
                if let Some((conn, request)) = update.asked {
                    daemon.server.answer_control(conn, request, &why);
                }
            }
        }
    }
    daemon.remove_sockets();
    daemon.server.flush_trace();
    Ok(())
}

fn begin(args: &Args, platform: Box<dyn Platform>, rings: SharedRings, xen: bool) -> Result<Daemon, String> {
    let paths = if args.sockets.is_empty() { vec![socket::default_path()] } else { args.sockets.clone() };
    // The sockets first: they say whether another daemon has the tree.
    let listeners: Vec<_> = paths
        .iter()
        .map(|path| socket::listen(path).map(|listener| (path, listener)))
        .collect::<Result<_, _>>()?;
    let opened = args.state_dir.as_deref().map(Dir::open).transpose();
    let mut dir = opened.map_err(|error| error.to_string())?;
    let kept = match &mut dir {
        None => Kept::default(),
        Some(dir) => journal::read(dir).map_err(|error| error.to_string())?,
    };
    let limits = limits(args)?;
    let server = Server::new(Store::default(), platform);
    let failed = |error: std::io::Error| format!("cannot begin: {error}");
    let mut daemon = Daemon::new(server, rings).map_err(failed)?;
    for (path, listener) in listeners {
        daemon.listen(path, listener).map_err(failed)?;
    }
    if xen {
        let census =
            Census::open().map_err(|error| format!("cannot ask the hypervisor about domains: {error}"))?;
        let events = DomainEvents::open().map_err(|error| {
            format!(
                "cannot hear of domains that end: {error}; is another xenstored running, or is this not dom0?"
            )
        })?;
        let life = Box::new(move |domid| census.life(domid));
        daemon.watch_domains(DomainWatch { channel: events.into_channel(), life }).map_err(failed)?;
        let local = local_port().and_then(|port| daemon.serve_local(port));
        local.map_err(|error| {
            format!("cannot serve this kernel's own ring: {error}; is xenfs mounted on /proc/xen?")
        })?;
    }
    daemon.take_up(kept);
    daemon.server.domains.begin_with(limits);
    daemon.server.set_rotation(args.rotation());
    if let Some(path) = &args.trace_file {
        daemon.server.set_trace_path(&path.to_string_lossy());
        let traced = daemon.server.set_trace(true);
        traced.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    if let Some(dir) = dir {
        keep(args, dir, &mut daemon)?;
    }
    Ok(daemon)
}

fn restore(
    args: &Args,
    fd: i32,
    platform: Box<dyn Platform>,
    rings: SharedRings,
    source: Option<Box<dyn Source>>,
) -> Result<Daemon, String> {
    let bytes = tapio_xenstored::serve::read_state(fd)?;
    let xen = source.is_some();
    let mut restored = Restored::new(&bytes, platform, rings, source)?;
    if xen {
        let census =
            Census::open().map_err(|error| format!("cannot ask the hypervisor about domains: {error}"))?;
        let life = Box::new(move |domid| -> Life { census.life(domid) });
        restored.watch_domains(life).map_err(|error| format!("cannot hear of domains: {error}"))?;
    }
    let mut daemon = restored.daemon;
    daemon.server.set_rotation(args.rotation());
    if daemon.server.tracing().0 {
        // It goes on at the new limit. One that cannot be opened any more is none of the clients' business.
        let _ = daemon.server.set_trace(true);
    }
    daemon.server.domains.general_mut().given = limits(args)?;
    if let Some(dir) = &args.state_dir {
        keep(args, Dir::open(dir).map_err(|error| error.to_string())?, &mut daemon)?;
    }
    if let Some((conn, request)) = restored.asked {
        daemon.server.answer_control(conn, request, "OK");
    }
    Ok(daemon)
}

/// Writes down what changes from now on.
fn keep(args: &Args, dir: Dir, daemon: &mut Daemon) -> Result<(), String> {
    let journal = Journal::begin(dir, args.sync.into(), &mut daemon.server);
    daemon.set_journal(journal.map_err(|error| error.to_string())?);
    Ok(())
}

fn limits(args: &Args) -> Result<Limits, String> {
    let mut limits = Limits::default();
    for quota in &args.quotas {
        let (name, value) = quota.split_once('=').unwrap_or((quota, ""));
        let value = value.parse().map_err(|_| format!("--quota {quota}: give it as NAME=NUMBER"))?;
        if !limits.set(name, value) {
            let names = tapio_xenstored::quota::QUOTAS.map(|quota| quota.0).join(", ");
            return Err(format!("--quota {quota}: there is no quota {name}; there are {names}"));
        }
    }
    Ok(limits)
}

fn write_pid(file: &Path) -> Result<(), String> {
    fs::File::create(file)
        .and_then(|mut file| writeln!(file, "{}", std::process::id()))
        .map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// Notifies systemd, if it asked for that (`sd_notify`).
fn notify_ready() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = UnixDatagram::unbound().and_then(|socket| {
        let path = path.to_string_lossy();
        match path.strip_prefix('@') {
            Some(name) => {
                use std::os::linux::net::SocketAddrExt;
                let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
                socket.send_to_addr(b"READY=1", &address)
            }
            None => socket.send_to(b"READY=1", Path::new(&*path)),
        }
    });
    if let Err(error) = sent {
        tapio_xenstored::say!("cannot tell the service manager that all is ready: {error}");
    }
}
