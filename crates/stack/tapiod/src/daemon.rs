//! The daemon's life: state, toolstack, servers, signals, end.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};
use tapio_api::accounts::Accounts;
use tapio_api::backend::{ApiBackend, Peer};
use tapio_api::server::{Server, ServerOptions, Tls};
use tapio_api::tls::Certificates;
use tapio_control::notify;
use tapio_core::Toolstack;
use tapio_core::backup;
use tapio_core::config::Config;
use tapio_core::db::Db;
use tapio_core::exports::Identity;
use tapio_store::{DeferringStore, Sqlite, Store};
use tapio_sys::successor::{Holder, is_served, take_over};
use tokio::net::{TcpListener, TcpSocket, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::Options;
use crate::backend::{StackAccounts, StackBackend, watch_accounts};
use crate::dirs::{OURS, PASSED, make_dir};
use crate::lines::{self, Programs, Users};
use crate::member::{self, Hosts};
use crate::memory::{self, Trimmer};
use crate::settings::{Settings, Tapback};
use crate::{closed, dashboard, decoder, default_sr, host_files, lock, log_files, logs, worker};

/// File of the database, in the state directory.
const DATABASE: &str = "tapio.db";

/// Directory with the certificate for disks that are read by NBD, below the run directory.
const NBD_CERTIFICATE: &str = "nbd-certificate";

/// File with the addresses that are served, in the run directory: a line each, `https://ADDRESS:PORT` and the like.
const LISTENING: &str = "listening";

/// Deadline for calls in flight when the daemon is told to end.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// What SRs have to be attached in before the daemon says that it is ready; those that are not then go on by
/// themselves. Shorter than a service manager's timeout, longer than a storage that works takes.
const STORAGE: Duration = Duration::from_secs(10);

/// Connections that wait to be accepted, at most.
const BACKLOG: u32 = 1024;

/// Threads that serve connections; everything that takes long has others.
const SERVING_THREADS: usize = 2;

/// Threads in addition to those of calls: answers that are put into words, steps of operations.
const OTHER_THREADS: usize = 128;

/// Everything that a start would complain about, without starting.
///
/// # Errors
/// The first complaint.
pub fn check(settings: &Settings) -> Result<String, String> {
    let mut found = String::new();
    let dir = &settings.state_dir;
    if dir.join(tapio_api::tls::FILE).exists() {
        let (certificates, _) = Certificates::open_or_make(dir)?;
        found.push_str(&format!("certificate: SHA-256 {}\n", certificates.fingerprint()));
    } else {
        found.push_str("certificate: one is made at the first start\n");
    }
    let accounts = Accounts::open(dir, settings.pam().as_ref())?;
    let pam = if accounts.has_pam() { "can" } else { "cannot" };
    found.push_str(&format!("accounts: those of the system {pam} log in\n"));
    found.push_str(&closed::report(settings));
    match lock::holder(dir)? {
        Some(pid) => found.push_str(&format!("state: process {pid} runs on {}\n", dir.display())),
        None => found.push_str(&format!("state: {} is free\n", dir.display())),
    }
    Ok(found)
}

/// Sockets and files that this process opens are many: one a disk, one a client.
fn raise_limits() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // That it cannot be raised is noticed when it is hit.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Runs until it is told to end.
///
/// # Errors
/// A sentence: why it could not begin.
pub fn run(settings: &Settings, options: &Options) -> Result<(), String> {
    log_files::begin_file(settings)?;
    logs::start(&settings.log_level)?;
    if let Err(why) = notify::find_manager() {
        tracing::warn!("{why}");
    }
    memory::bound_heaps();
    raise_limits();
    // Guests' processes pass through the run directory to their own, and users to the sockets that are theirs.
    for (dir, mode) in [(&settings.run_dir, PASSED), (&settings.state_dir, OURS), (&settings.mount_dir, OURS)]
    {
        make_dir(dir, mode)?;
    }
    log_files::receive(settings);
    closed::close(settings);
    let _lock = lock::take(&settings.state_dir)?;
    let (certificates, made) = match settings.listen.is_empty() {
        true => (None, false),
        false => Certificates::open_or_make(&settings.state_dir).map(|(certs, made)| (Some(certs), made))?,
    };
    let accounts = Accounts::open(&settings.state_dir, settings.pam().as_ref())?;
    let accounts = Arc::new(accounts);
    let hosts = certificates.as_ref().map(Hosts::new);
    let (stack, store) = toolstack(settings, options, &accounts, hosts.as_ref())?;
    watch_accounts(&accounts, &stack);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SERVING_THREADS)
        .max_blocking_threads(settings.limits.threads_max() + OTHER_THREADS)
        .thread_name("tapiod-call")
        .enable_all()
        .build()
        .map_err(|error| format!("no threads: {error}"))?;
    let ended = runtime.block_on(serve(settings, options, (stack, store), (hosts, made)));
    // What still runs is in the journal; the next start finishes or undoes it. Nothing is to wait for it here.
    runtime.shutdown_background();
    let _ = fs::remove_file(settings.run_dir.join(LISTENING));
    match ended? {
        Ended::Told => Ok(()),
        Ended::Restarts => {
            drop(_lock);
            Err(format!("starting again: {}", crate::restart::again()))
        }
    }
}

/// Why the daemon ended.
#[derive(Clone, Copy)]
enum Ended {
    Told,
    /// It joined a pool, or left one, and goes on as another host; or a dump takes the place of its database.
    Restarts,
}

/// The certificate of the API for disks that are read by NBD; it is read anew for each, as it may be replaced.
fn exports_identity(state_dir: &Path, place: &Path) -> Result<Identity, String> {
    let (certificates, _) = Certificates::open_or_make(state_dir)?;
    let shared = certificates.share(place)?;
    Ok(Identity { dir: place.to_path_buf(), cert: shared.cert, subject: shared.subject })
}

/// The toolstack, and its store, which takes what the start changes until recovery is over.
fn toolstack(
    settings: &Settings,
    options: &Options,
    accounts: &Arc<Accounts>,
    hosts: Option<&Hosts>,
) -> Result<(Arc<Toolstack>, Option<Arc<DeferringStore>>), String> {
    let path = settings.state_dir.join(DATABASE);
    let shared = member::open(settings, &path)?;
    take_over_what_waits(settings, options, &path, shared.as_ref())?;
    let store = match &shared {
        Some(_) => None,
        None => Some(Arc::new(DeferringStore::open(&path).map_err(|error| error.to_string())?)),
    };
    let db = match (&shared, &store) {
        (Some(shared), _) => Db::open_shared(Arc::clone(&shared.etcd) as Arc<dyn Store>, shared.access.host)
            .map_err(|error| format!("the pool's database: {error}"))?,
        (None, Some(store)) => Db::open(Arc::clone(store) as Arc<dyn Store>)
            .map_err(|error| format!("{}: {error}", path.display()))?,
        (None, None) => return Err("there is no database".into()),
    };
    let config = Config {
        run_dir: settings.run_dir.clone(),
        state_dir: settings.state_dir.clone(),
        mount_dir: settings.mount_dir.clone(),
        host_power: settings.host_power.clone(),
        worker_pool_size: settings.pool_size(),
        per_vm_parallel: settings.per_vm_parallel,
        polling: (settings.polling_us, settings.polling_idle),
        log_socket: log_files::disk_socket(settings),
    };
    let stack = Toolstack::with_accounts(config, db, Box::new(StackAccounts(Arc::clone(accounts))));
    stack.sessions.set_idle_limit(settings.session_idle);
    stack.backups.have_files(host_files::of(settings, options));
    let (state_dir, place) = (settings.state_dir.clone(), settings.run_dir.join(NBD_CERTIFICATE));
    stack.exports.configure(settings.exports, move || exports_identity(&state_dir, &place));
    stack.vms.decode_by(decoder::program());
    let workers = worker::workers(settings);
    for driver in worker::drivers(settings, &workers) {
        stack.storage.add_driver(driver);
    }
    let wrap = Box::new(move |found| workers.drivers(found));
    let looking = stack.storage.look_for_plugins(worker::plugins(settings), wrap);
    looking.map_err(|error| format!("no thread that looks for storage plugins: {error}"))?;
    let mut vm_settings = tapio_vm::Settings::new(&settings.run_dir);
    match &settings.tapback {
        Tapback::Auto => {}
        Tapback::None => vm_settings.xen.tapback = None,
        Tapback::Program(program) => vm_settings.xen.tapback = Some(program.clone()),
    }
    vm_settings.nvram_dir = settings.state_dir.join("nvram");
    vm_settings.log_dir = settings.logs().to_path_buf();
    vm_settings.rotation = settings.rotation;
    vm_settings.console_log_size = settings.console_log_size;
    vm_settings.kernel_dirs.clone_from(&settings.kernel_dirs);
    vm_settings.guest_sandbox = settings.guest_sandbox;
    // None without root.
    vm_settings.guest_users = vm_settings.guest_users.and(settings.guest_users);
    for driver in tapio_vm::registry(&vm_settings) {
        stack.vms.add_driver(driver);
    }
    if let Some(hosts) = hosts {
        stack.pool.link_by(Arc::new(hosts.link()?));
    }
    if let Some(shared) = &shared {
        let hosts = hosts.ok_or("a host of a pool serves HTTPS to the others: --listen says where")?;
        stack.db.follow(shared.seen).map_err(|error| format!("no thread: {error}"))?;
        let address = tapio_core::host_address();
        stack
            .pool
            .enter(member::member(settings, shared, hosts, address))
            .map_err(|error| error.to_string())?;
    }
    stack.open().map_err(|error| format!("what an earlier daemon left: {error}"))?;
    if let Some(why) = store.as_ref().and_then(|store| store.full()) {
        say_full(&stack, &why);
    }
    if let Some(why) = store.as_ref().and_then(|store| store.backup_error()) {
        tracing::warn!("{why}");
    }
    Ok((stack, store))
}

/// Puts a dump in the place of the database, or a backup in the place of the host, if one waits for this start.
fn take_over_what_waits(
    settings: &Settings,
    options: &Options,
    database: &Path,
    shared: Option<&member::Shared>,
) -> Result<(), String> {
    let dir = &settings.state_dir;
    if !backup::is_staged(dir) && !backup::is_host_staged(dir) {
        return Ok(());
    }
    let local = match shared {
        Some(_) => None,
        None => Some(Sqlite::open(database).map_err(|error| error.to_string())?),
    };
    let (store, pool): (&dyn Store, _) = match (shared, &local) {
        (Some(shared), _) => (&*shared.etcd, Some((&*shared.etcd, shared.access.host))),
        (None, Some(local)) => (local, None),
        (None, None) => return Err("there is no database".into()),
    };
    backup::take_over(dir, store, pool)?;
    if backup::take_host_over(dir, store, pool, &host_files::of(settings, options))? {
        // What was read so far was read from the files of before.
        drop(local);
        log_files::flush();
        return Err(format!("starting again: {}", crate::restart::again()));
    }
    Ok(())
}

/// Reports that the database's file system is full: reads are served, and every change is refused until there is
/// room. The message is one of the start's changes, which are kept.
fn say_full(stack: &Toolstack, why: &str) {
    let body = format!("{why}; what is stored is served, changes are refused until there is room");
    tracing::error!("{body}");
    let host = stack.db.all("host");
    let uuid = host.first().map_or("", |host| host.text("uuid"));
    if let Err(error) = tapio_core::tell(&stack.db, "DATABASE_FULL", 1, "Host", uuid, &body) {
        tracing::warn!(%error, "the message DATABASE_FULL could not be kept");
    }
}

/// Puts in order what an earlier daemon left. Calls that only look are answered meanwhile.
fn recover(
    stack: &Arc<Toolstack>,
    store: Option<&DeferringStore>,
    default_sr: Option<&Path>,
) -> Result<(), String> {
    let recovered = stack.recover(Instant::now() + STORAGE);
    recovered.map_err(|error| format!("recovery of what an earlier daemon left: {error}"))?;
    match default_sr.map_or(Ok(()), |path| default_sr::ensure(stack, path)) {
        // It is made by the next start that finds room.
        Err(why) if store.is_some_and(|store| store.full().is_some()) => {
            tracing::error!("the default SR: {why}");
            Ok(())
        }
        ensured => ensured,
    }
}

async fn serve(
    settings: &Settings,
    options: &Options,
    (stack, store): (Arc<Toolstack>, Option<Arc<DeferringStore>>),
    (hosts, made): (Option<Hosts>, bool),
) -> Result<Ended, String> {
    let certificates = hosts.as_ref().map(|hosts| Arc::clone(&hosts.certificates));
    let restart = hosts.as_ref().map(|hosts| Arc::clone(&hosts.restart)).unwrap_or_default();
    let told = Arc::clone(&restart);
    stack.backups.restart_by(move || told.notify_one());
    let tls = hosts.as_ref().map(|hosts| hosts.tls(stack.pool.is_member())).transpose()?;
    let told = |error: io::Error| format!("signals: {error}");
    let mut terminate = signal(SignalKind::terminate()).map_err(told)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(told)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(told)?;
    let trimmer = Trimmer::start().map_err(|error| format!("no thread: {error}"))?;
    let backend: Arc<dyn ApiBackend> = Arc::new(StackBackend { stack: Arc::clone(&stack), trimmer });
    let command_users = settings.command_users()?.and_then(Users::new);
    let server_options = ServerOptions {
        limits: settings.limits.clone(),
        routes: vec![dashboard::route()],
        origins: settings.cors_origins.clone(),
        command_lines: Some(Arc::new(Programs {
            dir: settings.run_dir.clone(),
            socket: lines::SOCKET.into(),
            users: command_users.clone(),
        })),
    };
    let server = Server::new(Arc::clone(&backend), server_options);
    let listening = open_doors(settings, &server, tls.as_ref()).await?;
    let served = listening.iter().find_map(|place| place.strip_prefix("https://"));
    if let Some(address) = settings.pool.address.as_deref().or(served) {
        stack.motions.serve_at(address.to_owned());
    }
    let of_commands = settings.run_dir.join(lines::SOCKET);
    server.listen_unix(unix_listener(&of_commands, 0o600)?);
    if let Some(users) = &command_users {
        let told = |error: io::Error| format!("{}: {error}", of_commands.display());
        std::os::unix::fs::chown(&of_commands, None, Some(users.group())).map_err(told)?;
        fs::set_permissions(&of_commands, fs::Permissions::from_mode(lines::SOCKET_MODE)).map_err(told)?;
    }
    let default_sr = settings.default_sr.clone();
    let histories = Arc::clone(&stack.histories);
    let mut recovering =
        tokio::task::spawn_blocking(move || recover(&stack, store.as_deref(), default_sr.as_deref()));
    loop {
        tokio::select! {
            recovered = &mut recovering => {
                recovered.map_err(|error| format!("recovery of what an earlier daemon left: {error}"))??;
                break;
            }
            _ = terminate.recv() => return Ok(Ended::Told),
            _ = interrupt.recv() => return Ok(Ended::Told),
            _ = hangup.recv() => reload(options, certificates.as_deref()),
        }
    }
    let list = settings.run_dir.join(LISTENING);
    fs::write(&list, listening.join("\n") + "\n").map_err(|error| format!("{}: {error}", list.display()))?;
    if let Some(certificates) = &certificates {
        let what = if made { "made a certificate" } else { "certificate" };
        tracing::info!("{what}: SHA-256 {}", certificates.fingerprint());
    }
    tracing::info!("serving {}", listening.join(" "));
    notify::ready(&format!("serving {}", listening.join(" ")));
    let watchdog = notify::watchdog_interval().map(|every| tokio::spawn(beat(backend, every)));
    let ended = loop {
        tokio::select! {
            _ = terminate.recv() => break Ended::Told,
            _ = interrupt.recv() => break Ended::Told,
            () = restart.notified() => break Ended::Restarts,
            _ = hangup.recv() => reload(options, certificates.as_deref()),
        }
    };
    notify::stopping("ending; disks and guests go on");
    tracing::info!("ending; disks and guests go on");
    if !server.close(END_TIMEOUT).await {
        tracing::warn!(
            "calls are in progress that did not end in {END_TIMEOUT:?}; the next start finishes or undoes them"
        );
    }
    if let Some(watchdog) = watchdog {
        watchdog.abort();
    }
    // On a state directory that hangs the daemon ends without it.
    let saving = tokio::task::spawn_blocking(move || histories.save());
    if tokio::time::timeout(END_TIMEOUT, saving).await.is_err() {
        tracing::warn!(
            "histories are not written in {END_TIMEOUT:?}; what was measured since the last time is lost"
        );
    }
    for path in settings.sockets().iter().chain([&of_commands]) {
        let _ = fs::remove_file(path);
    }
    Ok(ended)
}

/// Opens all listeners; answers what is served.
async fn open_doors(settings: &Settings, server: &Server, tls: Option<&Tls>) -> Result<Vec<String>, String> {
    let mut listening = Vec::new();
    for path in settings.sockets() {
        server.listen_unix(unix_listener(&path, settings.unix_socket_mode)?);
        listening.push(format!("unix:{}", path.display()));
    }
    for (addresses, tls) in [(&settings.http, None), (&settings.listen, tls)] {
        for address in addresses {
            let told =
                |error: io::Error| format!("{address}: {error}; --listen and --http name other addresses");
            let listener = tcp_listener(*address).map_err(told)?;
            let bound = listener.local_addr().map_err(told)?;
            match tls {
                None => {
                    server.listen_http(listener);
                    listening.push(format!("http://{bound}"));
                }
                Some(tls) => {
                    server.listen_tls(listener, tls.clone());
                    listening.push(format!("https://{bound}"));
                }
            }
        }
    }
    Ok(listening)
}

/// A listener; a program that a killed daemon was starting may have the address for a moment.
fn tcp_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let is_held = |error: &io::Error| (error.kind() == io::ErrorKind::AddrInUse).then_some(Holder::Unknown);
    let bind = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    take_over(bind, is_held)
}

fn unix_listener(path: &Path, mode: u32) -> Result<UnixListener, String> {
    let told = |error: io::Error| format!("{}: {error}", path.display());
    if let Some(dir) = path.parent() {
        make_dir(dir, PASSED)?;
    }
    // A socket of a daemon that is gone. The lock says that it is, for this state; anything else is not ours to remove.
    match fs::symlink_metadata(path) {
        Ok(data) if data.file_type().is_socket() => {
            if is_served(path) {
                return Err(format!("{}: another daemon serves there", path.display()));
            }
            fs::remove_file(path).map_err(told)?;
        }
        Ok(_) => return Err(format!("{}: it is there and no socket", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(told(error)),
    }
    let listener = UnixListener::bind(path).map_err(told)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(told)?;
    Ok(listener)
}

/// SIGHUP: another certificate, another log level.
fn reload(options: &Options, certificates: Option<&Certificates>) {
    if let Some(certificates) = certificates {
        match certificates.reload() {
            Ok(()) => tracing::info!("certificate: SHA-256 {}", certificates.fingerprint()),
            Err(why) => tracing::error!("the certificate of before stays: {why}"),
        }
    }
    match Settings::gather(options).and_then(|settings| logs::set_level(&settings.log_level)) {
        Ok(()) => {
            tracing::info!(
                "settings were read again: the log level is theirs, the others wait for a restart"
            );
        }
        Err(why) => tracing::error!("the settings of before stay: {why}"),
    }
}

/// Notifies the service manager regularly, as long as calls are answered.
async fn beat(backend: Arc<dyn ApiBackend>, every: Duration) {
    let peer = Peer { superuser: true, address: "watchdog".to_owned(), certificate: None };
    loop {
        let (backend, peer) = (Arc::clone(&backend), peer.clone());
        let asked =
            tokio::task::spawn_blocking(move || backend.call(&peer, "system.listMethods", Vec::new()));
        if asked.await.is_ok_and(|answer| answer.is_ok()) {
            notify::alive();
        }
        tokio::time::sleep(every).await;
    }
}
