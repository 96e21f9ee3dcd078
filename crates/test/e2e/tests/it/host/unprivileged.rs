//! A local user tries every name that a running host has.
//!
//! The paths are those that root finds: below the host's directories, and whatever its processes have open or mapped
//! elsewhere. A thread that has become another user tries each. What succeeds is in `tests/unprivileged.allowed`.

mod attempt;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::{DiskOptions, Host, create_vhd, text};
use tapio_e2e::guest::Uml;
use tapio_e2e::local::{device_of, lacks_fuse};
use tapio_e2e::process::{Running, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{missing, our, repository, skip};
use tapio_e2e::toolstack::DaemonOptions;

use self::attempt::{Attempts, as_nobody, nobody_dares};
use crate::machines::Guest;

const LIMIT: Duration = Duration::from_secs(60);

/// Devices of the system that every process may have open, and file systems of the kernel's.
const SYSTEMS: [&str; 7] =
    ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/fuse", "/proc/", "/sys/"];

/// Everything there is, found by root.
struct Found {
    paths: BTreeSet<PathBuf>,
    pids: Vec<u32>,
    /// What stands for a part of a path that differs each time.
    names: Vec<(String, &'static str)>,
}

fn walk(path: &Path, into: &mut BTreeSet<PathBuf>) {
    let Ok(data) = fs::symlink_metadata(path) else { return };
    into.insert(path.to_path_buf());
    if data.is_dir() {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            walk(&entry.path(), into);
        }
    }
}

/// Processes whose command line, environment or working directory leads below one of `places`.
fn processes(places: &[&Path]) -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_of = |bytes: &[u8]| {
        let said = String::from_utf8_lossy(bytes);
        places.iter().any(|place| said.contains(text(place)))
    };
    let found = all.filter(|pid| {
        let at = |name: &str| format!("/proc/{pid}/{name}");
        let cwd = fs::read_link(at("cwd")).unwrap_or_default();
        *pid != std::process::id()
            && (is_of(&fs::read(at("cmdline")).unwrap_or_default())
                || is_of(&fs::read(at("environ")).unwrap_or_default())
                || is_of(cwd.as_os_str().as_encoded_bytes()))
    });
    found.collect()
}

/// What a process has open or shares, as far as it has a name.
fn held(pid: u32, into: &mut BTreeSet<PathBuf>) {
    let mut add = |path: &str| {
        let is_systems = SYSTEMS.iter().any(|system| path.starts_with(system));
        if path.starts_with('/')
            && !is_systems
            && !path.ends_with(" (deleted)")
            && !path.starts_with("/memfd:")
        {
            into.insert(path.into());
        }
    };
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        add(&fs::read_link(entry.path()).unwrap_or_default().to_string_lossy());
    }
    for line in fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default().lines() {
        // address rights offset device inode path; programs and libraries are mapped privately
        let mut words = line.split_whitespace();
        if words.nth(1).is_some_and(|rights| rights.ends_with('s')) {
            add(&words.skip(3).collect::<Vec<_>>().join(" "));
        }
    }
}

/// Abstract sockets of these processes.
fn abstract_sockets(pids: &[u32]) -> Vec<String> {
    let links = pids.iter().flat_map(|pid| fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten());
    let links = links.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let inodes: BTreeSet<String> = links
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let all = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let named = all.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let name = words.get(7)?.strip_prefix('@')?;
        inodes.contains(*words.get(6)?).then(|| name.to_owned())
    });
    named.collect()
}

impl Found {
    fn find(places: &[(&Path, &'static str)]) -> Self {
        let roots: Vec<&Path> = places.iter().map(|(place, _)| *place).collect();
        let pids = processes(&roots);
        let mut paths = BTreeSet::new();
        for place in &roots {
            walk(place, &mut paths);
        }
        for pid in &pids {
            held(*pid, &mut paths);
        }
        // The pipes and logs by which this test talks to the programs are not the host's.
        let is_logs = |path: &Path| {
            path.extension().is_some_and(|end| end == "log")
                && path.parent().is_some_and(|dir| roots.iter().any(|root| root.parent() == Some(dir)))
        };
        paths.retain(|path| !is_logs(path));
        let names = places.iter().map(|(place, name)| (text(place).to_owned(), *name)).collect();
        Self { paths, pids, names }
    }

    /// The name of a thing as the list of what is allowed has it.
    fn plain(&self, what: &str) -> String {
        let mut said = what.to_owned();
        for (place, name) in &self.names {
            said = said.replace(place, name);
        }
        let mut plain = String::new();
        let mut rest = said.as_str();
        while !rest.is_empty() {
            let uuid = rest.get(..36).filter(|text| uuid::Uuid::try_parse(text).is_ok());
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (word, len) = match (uuid, digits) {
                (Some(_), _) => ("UUID", 36),
                (None, 1..) => ("N", digits),
                _ => {
                    let len = rest.chars().next().map_or(1, char::len_utf8);
                    (&rest[..len], len)
                }
            };
            plain.push_str(word);
            rest = &rest[len..];
        }
        plain
    }

    /// What another user can do here, as `ACTION NAME`.
    fn tried(&self) -> BTreeMap<String, PathBuf> {
        let sockets = abstract_sockets(&self.pids);
        let (paths, pids) = (self.paths.clone(), self.pids.clone());
        let attempts = as_nobody(move || {
            let mut attempts = Attempts::default();
            for pid in pids {
                attempts.process(pid);
            }
            for name in sockets {
                attempts.abstract_socket(&name);
            }
            for path in &paths {
                attempts.look(path);
            }
            // These change what they can change: last.
            for path in &paths {
                attempts.change(path);
            }
            attempts
        });
        let done = attempts.done.into_iter();
        done.map(|(action, what)| (format!("{action} {}", self.plain(&what)), what.into())).collect()
    }
}

/// What may succeed: `ACTION NAME`, two spaces or more, and why.
fn allowed() -> BTreeSet<String> {
    let file = repository().join("tests/unprivileged.allowed");
    let list = fs::read_to_string(file).expect("the list");
    let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parts = lines.map(|line| {
        let (what, why) = line.split_once("  ").unwrap_or_else(|| panic!("no reason: {line}"));
        assert!(!why.trim().is_empty(), "no reason: {line}");
        what.to_owned()
    });
    parts.collect()
}

fn umask(pid: u32) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Umask:")).map(|mode| mode.trim().to_owned())
}

fn xenstored(dir: &Path) -> Running {
    let mut command = Command::new(our("tapio-xenstored"));
    let at = |name: &str| dir.join(name);
    command.args(["--domains", "none", "--socket"]).arg(at("socket"));
    command.arg("--state-dir").arg(at("state")).arg("--pid-file").arg(at("pid"));
    command.arg("--trace-file").arg(at("trace"));
    let mut running = Running::start(&mut command, &dir.with_extension("log"));
    running.wait_for("its socket", LIMIT, || std::os::unix::net::UnixStream::connect(at("socket")).ok());
    running
}

#[test]
fn a_local_user_reaches_nothing_but_what_is_listed() {
    if !rustix::process::geteuid().is_root() {
        return skip("needs root to become another user");
    }
    // A daemon with an SR, disks over NBD and vhost-user, page pools, intent logs, and a guest where one can run.
    let guest = Guest::install("Tapio UML guest", LIMIT, &[]);
    let has_guest = missing(&[Uml::TOOLS[0], Uml::TOOLS[1]]).is_none();
    if has_guest {
        guest.start();
    }
    let scratch = guest.world.scratch.path();
    let shm = scratch.join("shm");
    // As /dev/shm is.
    fs::set_permissions(&shm, fs::Permissions::from_mode(0o1777)).expect("ours");
    // A disk of the command line's, with a trace, and as a device of the host where there can be one.
    let own = Scratch::on_disk();
    let host = Host::new(&own);
    let image = create_vhd(own.join("a.vhd"), 32);
    let mut options = DiskOptions::vhd(&image).nbd().vhost_user().arg("--pool=walked");
    let has_device = lacks_fuse(&host).is_none();
    if has_device {
        options = options.arg("--device").arg("fuse");
    }
    let disk = options.start_on(&host, own.path());
    let pid = disk.process.pid().to_string();
    run(&mut host.tapio(&["trace", "start", "-p", &pid, "-m", "0"])).ok();
    let xs = Scratch::on_disk();
    fs::create_dir(xs.join("xs")).expect("a directory");
    let _xenstored = xenstored(&xs.join("xs"));
    for dir in [scratch, own.path(), xs.path(), &own.join("shm"), &xs.join("xs")] {
        let mode = match dir.file_name().and_then(|name| name.to_str()) {
            Some("shm") => 0o1777,
            // As the unit's RuntimeDirectoryMode.
            Some("xs") => 0o711,
            _ => 0o755,
        };
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("ours");
    }
    let at = |name: &str| scratch.join(name);
    let (state, runs, mounts, sr) = (at("state"), at("run"), at("mnt"), at("sr"));
    let (own_run, own_shm, stores) = (own.join("run"), own.join("shm"), xs.join("xs"));
    let mut places = vec![
        (state.as_path(), "STATE"),
        (&runs, "RUN"),
        (&mounts, "MOUNTS"),
        (&sr, "SR"),
        (&shm, "SHM"),
        (&own_run, "DISK-RUN"),
        (&own_shm, "SHM"),
        (&image, "IMAGE"),
        (&disk.nbd, "NBD"),
        (&disk.vhost, "VHOST-USER"),
        (&stores, "XENSTORED"),
    ];
    let device = has_device.then(|| device_of(&host));
    if let Some(device) = &device {
        places.push((device, "DEVICE"));
    }
    let found = Found::find(&places);

    // There is something to find: every kind of thing that a host has.
    let is_there = |what: &str, test: &dyn Fn(&Path) -> bool| {
        assert!(found.paths.iter().any(|path| test(path)), "no {what} in {:#?}", found.paths);
    };
    let is_socket = |path: &Path| fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket());
    let in_shm = |name: &str| {
        let name = name.to_owned();
        move |path: &Path| {
            path.parent().is_some_and(|dir| dir.ends_with(&name)) && path.to_string_lossy().contains("/shm/")
        }
    };
    is_there("image", &|path| path.starts_with(&sr) && path.extension().is_some_and(|end| end == "vhd"));
    is_there("database", &|path| path.ends_with("state/tapio.db"));
    is_there("socket of the daemon", &|path| path == runs.join("xapi") && is_socket(path));
    is_there("socket of commands", &|path| path == runs.join("commands") && is_socket(path));
    is_there("page of counters", &in_shm("tapio"));
    is_there("page pool", &in_shm("tapio-pool"));
    is_there("intent log", &in_shm("tapio-intent"));
    is_there("trace", &|path| in_shm("tapio")(path) && path.to_string_lossy().contains("trace"));
    is_there("socket of xenstored", &|path| path == stores.join("socket"));
    is_there("vhost-user socket", &|path| path == disk.vhost);
    let expected = if has_guest { 6 } else { 3 };
    assert!(found.pids.len() >= expected, "{:?}", found.pids);
    for pid in &found.pids {
        let mask = umask(*pid);
        let said = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let said = String::from_utf8_lossy(&said).replace('\0', " ");
        assert!(mask.is_none_or(|mask| mask == "0077"), "the umask of {pid} ({said}) is open");
    }

    // What is always there in /dev/shm is made at boot, before another user can; the others have numbers.
    let at_boot = fs::read_to_string(repository().join("packaging/tmpfiles.d/tapio.conf")).expect("the list");
    for shm in [&shm, &own_shm] {
        let made = fs::read_dir(shm).expect("a list").map(|entry| entry.expect("an entry").file_name());
        let is_fixed = |name: &str| found.plain(name) == name;
        let made: Vec<_> = made.filter(|name| is_fixed(&name.to_string_lossy())).collect();
        assert!(made.len() >= 3, "{made:?}");
        for name in made {
            let line = format!("d /dev/shm/{} ", name.to_string_lossy());
            assert!(at_boot.lines().any(|known| known.starts_with(&line)), "{line}is not made at boot");
        }
    }

    // Something that is open is found.
    let open = runs.join("open");
    fs::write(&open, "secret").expect("written");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).expect("ours");
    let listed = runs.join("listed");
    fs::create_dir(&listed).expect("made");
    fs::set_permissions(&listed, fs::Permissions::from_mode(0o755)).expect("ours");
    let control = Found::find(&places).tried();
    for line in ["read RUN/open", "lock RUN/open", "list RUN/listed"] {
        assert!(control.contains_key(line), "{line} is not in {control:#?}");
    }
    fs::remove_file(&open).expect("removed");
    fs::remove_dir(&listed).expect("removed");

    let tried = Found::find(&places).tried();
    let allowed = allowed();
    let open: Vec<_> = tried.iter().filter(|(line, _)| !allowed.contains(*line)).collect();
    assert!(open.is_empty(), "a local user can: {open:#?}\nnot listed in tests/unprivileged.allowed");
    let unused: Vec<_> = allowed.iter().filter(|line| !tried.contains_key(*line)).collect();
    assert!(unused.is_empty(), "lines of tests/unprivileged.allowed that nothing needs: {unused:#?}");

    disk.stop();
    if has_guest {
        guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    }
    guest.world.finish();
}

#[test]
fn a_thread_of_user_nobody_has_no_rights() {
    if rustix::process::geteuid().is_root() {
        nobody_dares();
    }
}

#[test]
fn what_is_open_already_is_closed_at_the_start_and_said_once() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch).default_sr();
    options.start().stop();
    let image = create_vhd(scratch.join(&format!("sr/{}.vhd", uuid::Uuid::new_v4())), 8);
    let lock = scratch.join("run/lock/sm/old");
    fs::write(&lock, "").expect("written");
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
    let dirs = ["state", "run", "mnt", "sr"].map(|name| scratch.join(name));
    for (path, mode) in dirs.iter().map(|dir| (dir, 0o755)).chain([(&image, 0o644), (&lock, 0o644)]) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
    }
    let check = || run(options.command().arg("--check")).ok();
    let open = |said: &str| said.lines().filter(|line| line.starts_with("open to other users: ")).count();
    let said = check();
    assert_eq!(open(&said), 6, "{said}");
    for path in dirs.iter().chain([&image, &lock]) {
        assert!(
            said.contains(&format!(": {} (mode 0", path.display())),
            "{} is not in {said}",
            path.display()
        );
    }
    assert_eq!(mode(&image), 0o644, "a check changes nothing");
    let daemon = options.start();
    let log = daemon.process.log();
    assert_eq!(dirs.each_ref().map(|dir| mode(dir)), [0o700, 0o711, 0o700, 0o700], "{log}");
    assert_eq!([mode(&image), mode(&lock)], [0o600; 2], "{log}");
    for path in [&dirs[0], &dirs[1], &dirs[2], &dirs[3], &lock] {
        assert!(log.contains(&format!("{} (mode 0", path.display())), "{} is not in {log}", path.display());
    }
    daemon.stop();
    assert_eq!(open(&check()), 0, "{}", check());
    let again = options.start();
    assert!(!again.process.log().contains("other users"), "{}", again.process.log());
    again.stop();
}
