//! The process as a service: what it reports to the manager, how much memory it takes, how it ends.

use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;
use std::time::Duration;

use tapio_e2e::client::tool;
use tapio_e2e::disk::{DiskOptions, Host, STOP_LIMIT, Tap, create_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{our, repository};

use super::MIB;

fn receive(manager: &UnixDatagram) -> String {
    let mut bytes = [0; 4096];
    let len = manager.recv(&mut bytes).expect("a message in time");
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

#[test]
fn the_manager_hears_when_it_is_ready_alive_and_ending() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = scratch.raw_image("a.raw", 8 * MIB);
    let socket = scratch.join("notify");
    let manager = UnixDatagram::bind(&socket).expect("bound");
    manager.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout can be set");
    let mut command = Command::new(our("tapio-disk"));
    host.on_host(&mut command).env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", "200000");
    command.args(["--foreground", "--image", &format!("aio:{}", text(&image))]);
    let nbd = scratch.join("n.sock");
    command.args(["--nbd-unix", text(&nbd)]);
    let mut disk = Running::start(&mut command, &scratch.join("disk.log"));
    let ready = receive(&manager);
    assert!(ready.lines().any(|line| line == "READY=1"), "{ready}");
    assert!(ready.lines().any(|line| line == format!("MAINPID={}", disk.pid())), "{ready}");
    assert!(ready.lines().any(|line| line.starts_with("STATUS=serving aio:")), "{ready}");
    // Ready means ready.
    UnixStream::connect(&nbd).expect("the socket answers");
    for _ in 0..3 {
        assert_eq!(receive(&manager), "WATCHDOG=1");
    }
    disk.signal(libc::SIGTERM);
    let last =
        std::iter::repeat_with(|| receive(&manager)).find(|text| text != "WATCHDOG=1").expect("endless");
    assert!(last.starts_with("STOPPING=1\nSTATUS="), "{last}");
    assert!(disk.wait(STOP_LIMIT).success());
}

#[test]
fn without_a_manager_nothing_is_said_and_a_wrong_one_is_no_reason_to_fail() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = scratch.raw_image("a.raw", 8 * MIB);
    let mut command = Command::new(our("tapio-disk"));
    host.on_host(&mut command).env("NOTIFY_SOCKET", "/no/such/socket");
    command.args(["--foreground", "--image", &format!("aio:{}", text(&image))]);
    let nbd = scratch.join("n.sock");
    command.args(["--nbd-unix", text(&nbd)]);
    let mut disk = Running::start(&mut command, &scratch.join("disk.log"));
    disk.wait_for("the socket", Duration::from_secs(60), || UnixStream::connect(&nbd).ok());
    assert!(disk.log().contains("/no/such/socket"), "{}", disk.log());
    disk.stop(STOP_LIMIT);
}

#[test]
fn units_let_no_other_user_at_what_their_programs_make() {
    let units = std::fs::read_dir(repository().join("packaging")).expect("packaging");
    let units: Vec<_> = units.map(|entry| entry.expect("an entry").path()).collect();
    let units: Vec<_> =
        units.iter().filter(|path| path.extension().is_some_and(|ext| ext == "service")).collect();
    assert!(units.len() >= 4, "{units:?}");
    for unit in units {
        let text = std::fs::read_to_string(unit).expect("a unit");
        assert!(text.lines().any(|line| line == "UMask=0077"), "{}", unit.display());
        let has = |word: &str| text.lines().find_map(|line| line.strip_prefix(word).map(str::to_owned));
        if has("RuntimeDirectory=").is_some() {
            let mode = has("RuntimeDirectoryMode=").unwrap_or_else(|| "0755".into());
            assert!(["0700", "0711"].contains(&mode.as_str()), "{}: {mode}", unit.display());
        }
    }
}

#[test]
fn what_a_command_writes_is_its_users_whatever_the_shell_allows() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let tap = host.create(&format!("vhd:{}", text(&create_vhd(scratch.join("a.vhd"), 8))));
    let mode = |name: &str| {
        let data = std::fs::metadata(scratch.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        std::os::unix::fs::MetadataExt::mode(&data) & 0o7777
    };
    let open = |words: &str| {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("umask 0; exec '{}' {words}", text(&our("tapio"))));
        run(host.on_host(&mut shell).current_dir(scratch.path())).ok()
    };
    open("xsiostat -s -i 100 -c 1 -o record");
    assert_eq!(mode("record"), 0o600);
    open("vhd-util snapshot -n b.vhd -p a.vhd");
    assert_eq!(mode("b.vhd"), 0o600);
    // Every user may read the pages of the manual.
    open("man man");
    assert_eq!((mode("man"), mode("man/tapio.1"), mode("man/tapio-disk.8")), (0o755, 0o644, 0o644));
    tap.destroy();
}

#[test]
fn the_unit_is_one_that_systemd_takes() {
    needs!("systemd-analyze");
    let scratch = Scratch::on_disk();
    // Where the unit expects the program there may be none: the file is what is verified.
    let unit = std::fs::read_to_string(repository().join("packaging/tapio-disk@.service")).expect("the unit");
    let unit = unit.replace("/usr/bin/tapio-disk", text(&our("tapio-disk")));
    let path = scratch.join("tapio-disk@test.service");
    std::fs::write(&path, unit).expect("written");
    let finished = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path));
    let complaints: Vec<&str> = finished.stderr.lines().filter(|line| line.contains("tapio-disk@")).collect();
    assert!(finished.status.success() && complaints.is_empty(), "{finished}");
}

/// `tap-ctl destroy` of a disk that took its number itself.
#[test]
fn a_disk_of_the_command_line_is_destroyed_like_any_other() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = scratch.raw_image("a.raw", 8 * MIB);
    let mut command = Command::new(our("tapio-disk"));
    host.on_host(&mut command);
    let name = format!("aio:{}", text(&image));
    command.args(["--foreground", "--image", &name, "--nbd-unix", text(&scratch.join("n.sock"))]);
    let mut disk = Running::start(&mut command, &scratch.join("disk.log"));
    disk.wait_for("its place in the list", Duration::from_secs(60), || {
        host.list().iter().any(|row| row.args.as_deref() == Some(&name)).then_some(())
    });
    let tap = Tap::found(&host, &name);
    tap.ctl("destroy", &[]).ok();
    assert!(disk.wait(STOP_LIMIT).success(), "{}", disk.log());
    assert_eq!(host.list(), []);
    tap.forget();
}

fn peak_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    peak.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

/// Many clients that ask for much, read little and hold what they have: the bound of the documentation holds.
#[test]
fn hostile_clients_cannot_make_it_grow_past_its_bound() {
    needs!("nbdsh");
    const BOUND_MIB: u64 = 64;
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 256);
    let options = DiskOptions::vhd(&image).nbd().arg("--memory-max").arg(&BOUND_MIB.to_string());
    let mut disk = options.start(scratch.path());
    let request = |command: u16, cookie: u64, len: u32| {
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(((cookie % 100) << 20).to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes
    };
    let mut clients = Vec::new();
    for number in 0..70 {
        let Ok(mut stream) = UnixStream::connect(&disk.nbd) else { continue };
        stream.set_write_timeout(Some(Duration::from_millis(200))).expect("a timeout can be set");
        // EXPORT_NAME of the default export, then requests at once; the client reads no reply.
        let mut bytes = 3_u32.to_be_bytes().to_vec();
        bytes.extend(b"IHAVEOPT");
        bytes.extend(1_u32.to_be_bytes());
        bytes.extend(0_u32.to_be_bytes());
        for cookie in 0..64 {
            bytes.extend(request(0, cookie, 4 << 20));
        }
        // The beginning of a large write that never ends.
        bytes.extend(request(1, 99, 32 << 20));
        bytes.resize(bytes.len() + 100_000 + number, b'w');
        let _ = stream.write_all(&bytes);
        clients.push(stream);
    }
    assert!(clients.len() >= 60, "{}", clients.len());
    std::thread::sleep(Duration::from_millis(500));
    assert!(disk.process.is_running(), "{}", disk.process.log());
    let peak = peak_kib(disk.process.pid());
    assert!(peak < BOUND_MIB << 10, "the process grew to {peak} KiB");
    drop(clients);
    // Until the process has noticed that they are gone, there is no place.
    let script = "h.pwrite(b'k' * 4096, 0)\nassert h.pread(4096, 0) == b'k' * 4096";
    let served = || tool("nbdsh", &["-u", &disk.uri(), "-c", script]).status.success().then_some(());
    poll_until(STOP_LIMIT, served).expect("another client is served");
    disk.stop();
}

#[test]
fn a_disk_that_does_not_fit_is_refused_and_says_what_would() {
    let scratch = Scratch::on_disk();
    let image = scratch.join("large.vhd");
    vhd_util(&["create", "-n", text(&image), "-s", "2088960"]).ok();
    let said = DiskOptions::vhd(&image).nbd().arg("--memory-max").arg("60").refused(scratch.path());
    assert!(said.contains("MiB") && said.contains("--memory-max"), "{said}");
    let said = DiskOptions::vhd(&image).nbd().arg("--memory-max").arg("5").refused(scratch.path());
    assert!(said.contains("--memory-max 5"), "{said}");
    let disk = DiskOptions::vhd(&image).nbd().arg("--memory-max").arg("96").start(scratch.path());
    disk.stop();
}
