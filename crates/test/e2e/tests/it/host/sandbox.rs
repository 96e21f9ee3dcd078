//! What the process gives up, and that everything documented works without it.

use std::fs;
use std::process::Command;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{Disk, DiskOptions, Host, STOP_LIMIT, create_vhd, snapshot_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;

use super::MIB;

/// A line of /proc/PID/task/TID/status of every thread.
fn field_of_threads(pid: u32, name: &str) -> Vec<String> {
    field_of_named_threads(pid, name).into_iter().map(|(_, value)| value).collect()
}

/// The same, with the name of the thread.
fn field_of_named_threads(pid: u32, name: &str) -> Vec<(String, String)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives");
    let read = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let line =
            |name: &str| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
        Some((line("Name:")?, line(name)?))
    };
    tasks.flatten().filter_map(read).collect()
}

fn raw_disk(scratch: &Scratch, arguments: &[&str]) -> Disk {
    let image = scratch.raw_image("a.raw", 8 * MIB);
    arguments
        .iter()
        .fold(DiskOptions::raw(&image).nbd(), |options, argument| options.arg(argument))
        .start(scratch.path())
}

#[test]
fn every_thread_is_filtered_and_has_few_privileges() {
    let scratch = Scratch::on_disk();
    let disk = raw_disk(&scratch, &[]);
    let pid = disk.process.pid();
    for (name, wanted) in [("Seccomp:", "2"), ("NoNewPrivs:", "1")] {
        let found = field_of_threads(pid, name);
        assert!(found.len() >= 3 && found.iter().all(|value| value == wanted), "{name} {found:?}");
    }
    let filters = field_of_named_threads(pid, "Seccomp_filters:");
    let (helpers, threads): (Vec<_>, Vec<_>) = filters.iter().partition(|(name, _)| name == "tapio-aside");
    assert_eq!(
        threads.iter().filter(|(_, count)| count == "2").count(),
        1,
        "the data thread has one more: {filters:?}"
    );
    assert!(helpers.iter().all(|(_, count)| count == "2"), "its helpers are as it is: {filters:?}");
    // DAC_OVERRIDE, NET_BIND_SERVICE and IPC_LOCK at most.
    for name in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
        for set in field_of_threads(pid, name) {
            let set = u64::from_str_radix(&set, 16).expect("a set");
            assert_eq!(set & !(1 << 1 | 1 << 10 | 1 << 14), 0, "{name} {set:#x}");
        }
    }
    disk.stop();
}

#[test]
fn the_sandbox_can_be_left_out() {
    let scratch = Scratch::on_disk();
    let disk = raw_disk(&scratch, &["--sandbox=off"]);
    assert!(field_of_threads(disk.process.pid(), "Seccomp:").iter().all(|mode| mode == "0"));
    disk.stop();
}

/// With directories named, an image beside them is out of reach.
#[test]
fn only_allowed_directories_can_be_touched() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    for dir in ["images", "elsewhere"] {
        fs::create_dir(scratch.join(dir)).expect("made");
    }
    let inside = create_vhd(scratch.join("images/a.vhd"), 8);
    let outside = create_vhd(scratch.join("elsewhere/b.vhd"), 8);
    let allowed = text(&scratch.join("images")).to_owned();
    let options = DiskOptions::vhd(&outside).nbd().arg("--allow").arg(&allowed);
    let said = options.refused(scratch.path());
    assert!(said.contains("b.vhd") && said.to_lowercase().contains("permission denied"), "{said}");
    let mut disk = DiskOptions::vhd(&inside).nbd().arg("--allow").arg(&allowed).start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'x' * 4096, 0)\nh.flush()\nassert h.pread(4096, 0) == b'x' * 4096");
    assert!(disk.process.is_running());
    disk.stop();
    // Neither is a directory that is not there.
    let said =
        DiskOptions::vhd(&inside).nbd().arg("--allow").arg("/no/such/directory").refused(scratch.path());
    assert!(said.contains("/no/such/directory"), "{said}");
    drop(host);
}

/// What local block devices need is kept on request alone, and the rest is as narrow.
#[test]
fn devices_are_a_wish_of_their_own() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let disk = raw_disk(&scratch, &["--devices"]);
    assert!(field_of_threads(disk.process.pid(), "Seccomp:").iter().all(|mode| mode == "2"));
    nbdsh(&disk.uri(), "h.pwrite(b'x' * 4096, 0)\nh.flush()\nassert h.pread(4096, 0) == b'x' * 4096");
    disk.stop();
    let image = scratch.join("a.raw");
    let said = DiskOptions::raw(&image).nbd().arg("--devices").arg("--allow=/tmp").refused(scratch.path());
    assert!(said.contains("--devices"), "{said}");
}

/// Another image in another directory, opened by a process that restricted itself long ago.
#[test]
fn a_process_goes_on_opening_images_wherever_they_are() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 8);
    let tap = host.create(&format!("vhd:{}", text(&base)));
    nbdsh(&tap.uri(), "h.pwrite(b'x' * 4096, 0)\nh.flush()");
    tap.ctl("pause", &[]).ok();
    // Made after the process restricted itself.
    let other = Scratch::in_memory();
    let leaf = snapshot_vhd(other.join("leaf.vhd"), &base);
    tap.ctl("unpause", &["-a", &format!("vhd:{}", text(&leaf))]).ok();
    nbdsh(&tap.uri(), "assert h.pread(4096, 0) == b'x' * 4096\nh.pwrite(b'y' * 4096, 4096)\nh.flush()");
    tap.destroy();
}

#[test]
fn another_user_serves_what_is_that_users() {
    needs!("nbdsh", "chown");
    if !rustix::process::geteuid().is_root() {
        return tapio_e2e::tools::skip("needs root to become another user");
    }
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = scratch.raw_image("mine.raw", 8 * MIB);
    let secret = scratch.raw_image("secret.raw", 8 * MIB);
    run(Command::new("chmod").args(["600", text(&secret)])).ok();
    for dir in ["run", "served"] {
        fs::create_dir(scratch.join(dir)).expect("made");
    }
    let own = ["run", "served", "shm", "mine.raw"].map(|name| scratch.join(name));
    run(Command::new("chown").arg("nobody").args(own)).ok();
    run(Command::new("chmod").arg("755").arg(scratch.path())).ok();
    let start = |image: &std::path::Path| {
        let mut command = Command::new(tapio_e2e::tools::our("tapio-disk"));
        host.on_host(&mut command).env_remove("TAPIO_DEVICES");
        command.args(["--foreground", "--user", "nobody", "--image", &format!("aio:{}", text(image))]);
        command.args(["--nbd-unix", text(&scratch.join("served/n.sock"))]);
        command
    };
    let said = run(&mut start(&secret)).fails();
    assert!(said.contains("secret.raw") && said.to_lowercase().contains("permission denied"), "{said}");
    let mut disk = tapio_e2e::process::Running::start(&mut start(&image), &scratch.join("user.log"));
    let socket = scratch.join("served/n.sock");
    disk.wait_for("the socket", STOP_LIMIT, || std::os::unix::net::UnixStream::connect(&socket).ok());
    let uids = field_of_threads(disk.pid(), "Uid:");
    assert!(uids.iter().all(|line| !line.split_whitespace().any(|uid| uid == "0")), "{uids:?}");
    for set in field_of_threads(disk.pid(), "CapPrm:") {
        assert_eq!(set.trim_start_matches('0'), "");
    }
    nbdsh(
        &format!("nbd+unix:///?socket={}", text(&socket)),
        "h.pwrite(b'u' * 4096, 0)\nh.flush()\nassert h.pread(4096, 0) == b'u' * 4096",
    );
    disk.stop(STOP_LIMIT);
    assert!(!socket.exists(), "its socket was left behind");
}

#[test]
fn a_device_is_refused_by_a_process_that_gave_up_what_it_takes() {
    let scratch = Scratch::on_disk();
    let image = scratch.raw_image("a.raw", MIB);
    let mut command = Command::new(tapio_e2e::tools::our("tapio-disk"));
    let host = Host::new(&scratch);
    host.on_host(&mut command).env_remove("TAPIO_DEVICES");
    command.args(["--foreground", "--minor", "3", "--image", &format!("aio:{}", text(&image))]);
    command.args(["--nbd-unix", text(&scratch.join("n.sock"))]);
    let mut disk = tapio_e2e::process::Running::start(&mut command, &scratch.join("disk.log"));
    let attach = || run(&mut host.tapio(&["disk", "device", "attach", "3", "--how", "fuse-file"]));
    let begun = std::time::Instant::now();
    let mut said = attach();
    while said.stderr.contains("no disk process of ours") && begun.elapsed() < STOP_LIMIT {
        std::thread::sleep(std::time::Duration::from_millis(20));
        said = attach();
    }
    let said = said.fails();
    assert!(said.contains("--devices"), "{said}");
    assert!(disk.is_running(), "{}", disk.log());
}
