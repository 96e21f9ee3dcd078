//! A disk goes on with another image, its process is killed, and the command that it was started with is given again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tapio_e2e::client::{nbdsh, sha256};
use tapio_e2e::disk::{Disk, DiskOptions, Host, assert_vhd_valid, create_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, Running, poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{our, repository};

use super::crash::{CHECKER, WRITER};

/// A disk as a service manager runs it: one command, again and again.
struct Service {
    host: Host,
    scratch: Scratch,
    options: DiskOptions,
    log: PathBuf,
    generation: u32,
}

impl Service {
    fn new(image: impl FnOnce(&Scratch) -> String) -> Self {
        let scratch = Scratch::on_disk();
        let (host, log) = (Host::new(&scratch), scratch.join("flushed.log"));
        std::fs::write(&log, "").expect("the log can be made");
        let options = DiskOptions::image(image(&scratch)).nbd();
        Self { host, options, log, generation: 0, scratch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    fn start(&self) -> Disk {
        self.options.start_on(&self.host, self.scratch.path())
    }

    /// `tapio disk WORDS -p PID -m 0 ARGUMENTS`.
    fn disk(&self, words: &[&str], arguments: &[&str]) -> Finished {
        let row = self.host.list().into_iter().find(|row| row.args.is_some()).expect("it is listed");
        let (pid, minor) =
            (row.pid.expect("a process").to_string(), row.minor.expect("a number").to_string());
        let which = ["-p", &pid, "-m", &minor];
        run(&mut self.host.tapio(&[&["disk"], words, &which, arguments].concat()))
    }

    /// Under load: the images change by `change`, then the process is killed. Everything that was flushed is there when
    /// it was started again.
    fn changed_and_killed(&mut self, disk: Disk, change: impl FnOnce(&Self)) -> Disk {
        let script =
            format!("SEED = {0}\nSTART = {0}\nLOG = {1:?}\n{WRITER}", self.generation, text(&self.log));
        let mut command = Command::new("nbdsh");
        command.env("PATH", "/usr/bin:/bin").args(["-u", &disk.uri(), "-c", &script]);
        let writer = Running::start(&mut command, &self.path("writer.log"));
        self.flushed_more(&writer);
        change(self);
        self.flushed_more(&writer);
        disk.crash();
        drop(writer);
        let disk = self.start();
        let newest = nbdsh(&disk.uri(), &format!("LOG = {:?}\n{CHECKER}", text(&self.log)));
        self.generation = newest.trim().parse::<u32>().expect("a number") + 1;
        disk
    }

    fn flushed_more(&self, writer: &Running) {
        let len = || std::fs::metadata(&self.log).expect("the log").len();
        let before = len();
        let more = poll_until(Duration::from_secs(60), || (len() > before + 600).then_some(()));
        assert!(more.is_some(), "the writer does not get on: {}", writer.log());
    }

    fn image(&self) -> String {
        self.host.list().into_iter().find_map(|row| row.args).expect("it is listed")
    }
}

/// The old leaf is only read, and a command that would write it is told why not.
fn assert_refused(service: &Service, image: &str, newest: &Path) {
    let refused = service.host.tap_ctl(&["create", "-a", image]);
    assert_eq!(refused.status.code(), Some(libc::EINVAL), "{refused}");
    let said = refused.stderr.clone();
    assert!(said.contains(text(newest)) && said.contains(".continued"), "{refused}");
}

#[test]
fn after_snapshots_the_same_command_serves_the_newest_leaf() {
    needs!("nbdsh");
    for kind in ["vhd", "aio"] {
        let mut service = Service::new(|scratch| match kind {
            "vhd" => format!("vhd:{}", text(&create_vhd(scratch.join("base"), 32))),
            _ => format!("aio:{}", text(&scratch.raw_image("base", 32 << 20))),
        });
        let base = service.path("base");
        let mut disk = service.start();
        for round in 0..2 {
            let leaf = service.path(&format!("leaf{round}.vhd"));
            let below = if round == 0 { base.clone() } else { service.path("leaf0.vhd") };
            let name = text(&leaf).to_owned();
            let sum = std::cell::RefCell::new(String::new());
            disk = service.changed_and_killed(disk, |service| {
                service.disk(&["snapshot"], &[&name]).ok();
                *sum.borrow_mut() = sha256(&below);
            });
            assert_eq!(service.image(), format!("vhd:{name}"));
            assert!(disk.process.log().contains("went on with"), "{}", disk.process.log());
            assert_eq!(sha256(&below), *sum.borrow(), "the parent was written");
            assert_refused(&service, &format!("{kind}:{}", text(&base)), &leaf);
        }
        // The snapshot itself can be read, as for a backup.
        let backup = Scratch::on_disk();
        let reader = DiskOptions::image(format!("{kind}:{}", text(&base))).nbd().arg("--read-only");
        reader.start_on(&service.host, backup.path()).stop();
        // Merged again, the disk is where the command says, and with its file gone the leaf's name leads there, too.
        let leaf = service.path("leaf1.vhd");
        service.disk(&["commit"], &[text(&service.path("leaf0.vhd"))]).ok();
        std::fs::remove_file(service.path("leaf0.vhd")).expect("yours to remove");
        disk = service.changed_and_killed(disk, |_| ());
        assert_eq!(service.image(), format!("vhd:{}", text(&leaf)));
        disk = service.changed_and_killed(disk, |service| {
            service.disk(&["commit"], &[text(&leaf)]).ok();
            std::fs::remove_file(&leaf).expect("yours to remove");
        });
        assert!(service.image().ends_with(text(&base)), "{}", service.image());
        disk.stop();
        let by_leaf = DiskOptions::vhd(&leaf).nbd().start_on(&service.host, service.scratch.path());
        nbdsh(&by_leaf.uri(), &format!("LOG = {:?}\n{CHECKER}", text(&service.log)));
        by_leaf.stop();
        if kind == "vhd" {
            assert_vhd_valid(&base);
        }
        // Four of these processes were killed, and the numbers they had for themselves are used again.
        let numbers = std::fs::read_dir(service.path("run/tapdisk")).expect("markers").count();
        assert!(numbers <= 2, "{numbers} numbers are taken");
    }
}

#[test]
fn after_a_switch_over_the_same_command_serves_the_second_side() {
    needs!("nbdsh");
    let mut service =
        Service::new(|scratch| format!("vhd:{}", text(&create_vhd(scratch.join("near.vhd"), 32))));
    let (near, far) = (service.path("near.vhd"), create_vhd(service.path("far.vhd"), 32));
    let goal = format!("vhd:{}", text(&far));
    let moves = |service: &Service, goal: &str, copy: &[&str]| {
        service.disk(&["mirror", "start"], &[&["--target", goal, "--wait"], copy].concat()).ok();
        let moved = poll_until(Duration::from_secs(60), || {
            service.disk(&["mirror", "pivot"], &[]).status.success().then_some(())
        });
        moved.expect("it moves");
    };
    let disk = service.start();
    let sum = std::cell::RefCell::new(String::new());
    let disk = service.changed_and_killed(disk, |service| {
        moves(service, &goal, &[]);
        // The first side is closed when the pivot has answered.
        *sum.borrow_mut() = sha256(&near);
    });
    assert_eq!(service.image(), goal);
    assert_eq!(sha256(&near), *sum.borrow(), "the first side was written");
    assert_refused(&service, &format!("vhd:{}", text(&near)), &far);
    // And back.
    let back = format!("vhd:{}", text(&near));
    let disk = service.changed_and_killed(disk, |service| moves(service, &back, &["--full"]));
    assert_eq!(service.image(), back);
    disk.stop();
    for image in [&near, &far] {
        assert_vhd_valid(image);
    }
}

#[test]
fn the_unit_goes_on_with_the_newest_leaf_or_says_why_it_cannot() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let (base, socket) = (create_vhd(scratch.join("base.vhd"), 8), scratch.join("n.sock"));
    let unit = std::fs::read_to_string(repository().join("packaging/tapio-disk@.service")).expect("the unit");
    let line =
        unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/tapio-disk ")).expect("a command");
    let given = format!("--image vhd:{} --nbd-unix {}", text(&base), text(&socket));
    let line = line.replace("$TAPIO_OPTIONS", &given);
    let start = || {
        let mut command = Command::new(our("tapio-disk"));
        host.on_host(&mut command).args(line.split_whitespace());
        Running::start(&mut command, &scratch.join("disk.log"))
    };
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    let mut disk = start();
    let up = |disk: &mut Running| {
        disk.wait_for("the socket", Duration::from_secs(60), || {
            std::os::unix::net::UnixStream::connect(&socket).ok()
        });
    };
    up(&mut disk);
    let leaf = scratch.join("leaf.vhd");
    let row = host.list().into_iter().find(|row| row.args.is_some()).expect("it is listed");
    let (pid, minor) = (row.pid.expect("a process").to_string(), row.minor.expect("a number").to_string());
    run(&mut host.tapio(&["disk", "snapshot", "-p", &pid, "-m", &minor, text(&leaf)])).ok();
    nbdsh(&uri, "h.pwrite(b'n' * 4096, 0)\nh.flush()");
    disk.kill();
    let mut disk = start();
    up(&mut disk);
    assert!(nbdsh(&uri, "assert h.pread(4096, 0) == b'n' * 4096\nprint('same')").contains("same"));
    disk.kill();
    // Without the newest leaf nothing is served, least of all the old one.
    std::fs::rename(&leaf, scratch.join("away.vhd")).expect("renamed");
    let mut disk = start();
    assert!(!disk.wait(Duration::from_secs(60)).success());
    let said = disk.log();
    assert!(said.contains(text(&leaf)) && said.contains("is not there"), "{said}");
}
