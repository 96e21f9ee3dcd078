//! What every driver of real guests must do, told once: `uml` and `qemu` run these stories with real disk processes.

// Tests all of it, but not in functions that the lint knows as tests.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_e2e::client::sha256;
use tapio_e2e::disk::{Disk, DiskOptions};
use tapio_e2e::process::{poll_until, signal};
use tapio_e2e::quiet_time::QuietTime;
use tapio_e2e::scratch::Scratch;
use tapio_vm::{
    DiskFacts, DiskSpec, FrontSpec, PluggedDisk, Settings, ShutdownKind, VmDriver, VmEvent, VmSpec, VmState,
    registry,
};
use uuid::Uuid;

pub const MIB: u64 = 1 << 20;

/// A VM under a driver, with real disk processes.
pub struct Lab {
    pub scratch: Scratch,
    pub spec: VmSpec,
    name: &'static str,
    driver: Option<Arc<dyn VmDriver>>,
    /// How long a guest may take for what takes it longest.
    pub limit: Duration,
    images: u32,
    /// What the next disk shall hold.
    pub content: Option<PathBuf>,
}

/// A disk with its process.
pub struct Plugged {
    pub disk: PluggedDisk,
    pub image: PathBuf,
    pub process: Disk,
    options: DiskOptions,
}

impl Lab {
    /// A VM of a driver; `change` completes its specification.
    pub fn new(name: &'static str, limit: Duration, change: impl FnOnce(&mut VmSpec)) -> Self {
        let mut spec = VmSpec {
            uuid: Uuid::new_v4(),
            name: format!("test, of {name}"),
            memory: 128 << 20,
            vcpus: 1,
            kernel: None,
            ramdisk: None,
            kernel_args: String::new(),
            platform: std::collections::BTreeMap::new(),
            drives: Vec::new(),
        };
        change(&mut spec);
        let mut lab =
            Self { scratch: Scratch::on_disk(), spec, name, driver: None, limit, images: 0, content: None };
        lab.start_daemon();
        lab
    }

    /// What a new daemon does.
    pub fn start_daemon(&mut self) {
        let mut settings = Settings::new(&self.scratch.join("run"));
        let preload = tapio_e2e::tools::our("libtapio_uml_preload.so");
        settings.uml_preload = Some(preload);
        settings.kernel_dirs.push(self.scratch.path().into());
        settings.kernel_dirs.extend(tapio_e2e::guest::Qemu::kernel());
        let all = registry(&settings);
        self.driver = all.into_iter().find(|driver| driver.name() == self.name);
        assert!(self.driver.is_some(), "there is no driver {}", self.name);
    }

    /// What the end of a daemon is.
    pub fn end_daemon(&mut self) {
        self.driver = None;
    }

    pub fn driver(&self) -> &dyn VmDriver {
        self.driver.as_deref().expect("the daemon runs")
    }

    pub fn vm(&self) -> Uuid {
        self.spec.uuid
    }

    pub fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    /// Starts the process of a disk at this place, as the driver wants it.
    #[track_caller]
    pub fn disk(&mut self, position: u8, change: impl FnOnce(&mut DiskSpec)) -> Plugged {
        let mut spec =
            DiskSpec { vbd: Uuid::new_v4(), position, read_only: false, is_cd: false, is_bootable: false };
        change(&mut spec);
        let front = self.driver().front(self.vm(), &spec).expect("a place for the disk");
        let FrontSpec::VhostUser { socket, queues } = &front else { panic!("{front:?}") };
        self.images += 1;
        let image = self.scratch.raw_image(&format!("{}.raw", self.images), 16 * MIB);
        if let Some(content) = self.content.take() {
            std::fs::rename(content, &image).expect("the content of the disk");
        }
        let mut options = DiskOptions::raw(&image).arg("--vhost-user").arg(socket.to_str().expect("plain"));
        options = options.arg("--queues").arg(&queues.to_string());
        if spec.read_only {
            options = options.arg("--read-only");
        }
        let mut process = options.start(self.scratch.path());
        process.process.wait_for("socket", self.limit, || socket.exists().then_some(()));
        let disk = PluggedDisk { spec, front, node: None, size: 16 * MIB, facts: DiskFacts::default() };
        Plugged { disk, image, process, options }
    }

    /// [`Self::disk`], plugged.
    #[track_caller]
    pub fn plug(&mut self, position: u8) -> Plugged {
        let plugged = self.disk(position, |_| ());
        self.driver().plug(self.vm(), &plugged.disk).expect("the disk is plugged");
        plugged
    }

    /// The digest of the first 2 MiB of an image, which the guest has written.
    #[track_caller]
    pub fn written(&self, image: &std::path::Path) -> String {
        let mut bytes = vec![0; 2 << 20];
        std::fs::File::open(image).and_then(|mut file| file.read_exact(&mut bytes)).expect("the image");
        let part = self.scratch.join("part");
        std::fs::write(&part, &bytes).expect("a copy");
        sha256(&part)
    }

    #[track_caller]
    pub fn console(&self) -> Console {
        let path = self.driver().console(self.vm()).expect("it has a console");
        Console::connect(&path, self.limit)
    }

    #[track_caller]
    pub fn event(&self) -> VmEvent {
        self.driver().wait_event(self.deadline()).expect("an event in time")
    }

    #[track_caller]
    pub fn assert_quiet(&self) {
        let event = self.driver().wait_event(Instant::now() + Duration::from_millis(100));
        assert_eq!(event, None, "an end that was requested is no event");
    }

    /// The number of the guest's process.
    #[track_caller]
    pub fn pid(&self) -> i32 {
        let file = self.scratch.join("run/vm").join(self.vm().simple().to_string()).join("pid");
        std::fs::read_to_string(file).expect("the pid file").trim().parse().expect("a number")
    }

    /// Nothing of the VM is left but sockets of disk processes. The one that follows its end may still be at it.
    #[track_caller]
    pub fn assert_gone(&self) {
        let dir = self.scratch.join("run/vm").join(self.vm().simple().to_string());
        let left = || {
            let names = std::fs::read_dir(&dir).into_iter().flatten().flatten();
            let mut names = names.map(|entry| entry.file_name().into_string().expect("plain"));
            names.find(|name| name.parse::<u8>().is_err())
        };
        let gone = poll_until(self.limit, || left().is_none().then_some(()));
        assert!(gone.is_some(), "{:?} is left", left());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.driver.is_none() {
            self.start_daemon();
        }
        let _ = self.driver().shutdown(self.vm(), ShutdownKind::Hard, self.deadline());
    }
}

/// What the shell of our initramfs asks with.
const PROMPT: &str = "tapio# ";

/// A shell in a guest.
pub struct Console {
    stream: UnixStream,
    limit: Duration,
    said: String,
    number: u32,
}

impl Console {
    #[track_caller]
    pub fn connect(path: &std::path::Path, limit: Duration) -> Self {
        let stream = UnixStream::connect(path).expect("the console listens");
        stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        let number = std::process::id() * 100;
        let mut console = Self { stream, limit, said: String::new(), number };
        // Until the shell is there, what is typed may be lost. A guest that is busy with its start echoes it letter by
        // letter, which keeps it from its start: no line soon after another, unless the shell asks for one.
        let until = Instant::now() + limit;
        let mut pause = Duration::from_millis(500);
        while !console.said.contains("up and 42") {
            assert!(Instant::now() < until, "no shell: {}", console.said);
            let prompts = console.said.matches(PROMPT).count();
            console.type_in("echo up and $((6*7))\n");
            let now = Instant::now() + pause;
            while Instant::now() < now
                && !console.said.contains("up and 42")
                && console.said.matches(PROMPT).count() == prompts
            {
                console.read(Instant::now() + Duration::from_millis(100), "up and 42");
            }
            pause = (pause * 2).min(Duration::from_secs(4));
        }
        console
    }

    pub fn type_in(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).expect("the console takes what is typed");
    }

    fn read(&mut self, until: Instant, what: &str) {
        let mut bytes = [0; 4096];
        while Instant::now() < until && !self.said.contains(what) {
            match self.stream.read(&mut bytes) {
                Ok(0) => return,
                Ok(len) => self.said.push_str(&String::from_utf8_lossy(&bytes[..len])),
                Err(_) => {}
            }
        }
    }

    /// Runs a command that must succeed; what it printed.
    #[track_caller]
    pub fn run(&mut self, command: &str) -> String {
        match self.try_run(command) {
            Ok(said) => said,
            Err(said) => panic!("{command}: {said}"),
        }
    }

    /// Runs a command; what it printed.
    #[track_caller]
    pub fn try_run(&mut self, command: &str) -> Result<String, String> {
        self.number += 1;
        let number = self.number;
        self.said.clear();
        // The echo of the command must not look like its result.
        self.type_in(&format!("echo be''gin{number}; {command}; echo en''d{number} $?.\n"));
        let end = format!("end{number} ");
        let until = Instant::now() + self.limit;
        loop {
            self.read(until, &end);
            let Some(at) = self.said.find(&end) else { panic!("{command}: no end of {:?}", self.said) };
            let Some(dot) = self.said[at..].find('.') else {
                // The line is still on its way; nothing contains a NUL.
                self.read(until.min(Instant::now() + Duration::from_millis(20)), "\0");
                continue;
            };
            let status = self.said[at + end.len()..at + dot].to_string();
            let begin = format!("begin{number}");
            let from = self.said.find(&begin).map_or(0, |from| from + begin.len());
            let said = self.said[from..at].trim().replace('\r', "");
            return if status == "0" { Ok(said) } else { Err(said) };
        }
    }
}

/// The digest of what the guest writes.
fn digest(console: &mut Console) -> String {
    console.run("sha256sum </mnt/p").trim_end_matches('-').trim().to_string()
}

/// Create, three disks, start, data, one more and away again, pause, a new daemon, a clean end.
pub fn whole_life(lab: &mut Lab) {
    let begun = Instant::now();
    let step = |what: &str| println!("{:6.2} s  {what}", begun.elapsed().as_secs_f64());
    let vm = lab.vm();
    lab.driver().check().expect("the driver works here");
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Halted);
    lab.driver().create(&lab.spec).unwrap();
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Paused);
    let first: Vec<Plugged> = (0..3).map(|position| lab.plug(position)).collect();
    lab.driver().plug(vm, &first[0].disk).expect("the same disk again");
    let mut other = first[0].disk.clone();
    other.spec.vbd = Uuid::new_v4();
    let error = lab.driver().plug(vm, &other).unwrap_err();
    assert_eq!(error.code, "DEVICE_ALREADY_EXISTS");
    step("created with three disks");
    lab.driver().unpause(vm).unwrap();
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Running);
    let mut console = lab.console();
    step("started, a shell answers");
    for (disk, name) in first.iter().zip(["vda", "vdb", "vdc"]) {
        assert_eq!(console.run(&format!("cat /sys/block/{name}/size")), (16 * MIB / 512).to_string());
        console.run("dd if=/dev/urandom of=/mnt/p bs=65536 count=32 2>/dev/null");
        console.run(&format!("dd if=/mnt/p of=/dev/{name} bs=65536 conv=fsync 2>/dev/null"));
        assert_eq!(lab.written(&disk.image), digest(&mut console), "what the guest wrote to {name}");
    }
    step("three disks hold what the guest wrote");

    // While it runs.
    let at = Instant::now();
    let mut hot = lab.disk(7, |_| ());
    let plugging = Instant::now();
    lab.driver().plug(vm, &hot.disk).unwrap();
    println!("hot plug: {:?}, with its process {:?}", plugging.elapsed(), at.elapsed());
    console.run("dd if=/mnt/p of=/dev/vdd bs=65536 conv=fsync 2>/dev/null");
    assert_eq!(lab.written(&hot.image), digest(&mut console));
    console.run("mke2fs /dev/vdd >/dev/null && mkdir -p /mnt/d && mount -t ext4 /dev/vdd /mnt/d");
    let error = lab.driver().unplug(vm, &hot.disk.spec, false, lab.deadline()).unwrap_err();
    assert_eq!(error.code, "DEVICE_DETACH_REJECTED", "{error}");
    assert!(error.params[2].contains("/mnt/d"), "{error}");
    console.run("umount /mnt/d");
    lab.driver().unplug(vm, &hot.disk.spec, false, lab.deadline()).unwrap();
    hot.process.process.kill();
    assert!(console.try_run("[ -e /sys/block/vdd ]").is_err(), "the guest still has the disk");
    lab.driver().unplug(vm, &hot.disk.spec, false, lab.deadline()).expect("it is gone already");
    step("a disk came and went");

    lab.driver().pause(vm).unwrap();
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Paused);
    console.type_in("echo still $((40+1))\n");
    std::thread::sleep(Duration::from_millis(300));
    lab.driver().unpause(vm).unwrap();
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Running);
    console.run("true");

    // Another daemon finds it, and can do all that the first could.
    let pid = lab.pid();
    drop(console);
    lab.end_daemon();
    lab.start_daemon();
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Running);
    assert_eq!(lab.pid(), pid);
    let mut console = lab.console();
    let hot = lab.plug(8);
    assert_eq!(console.run("cat /sys/block/vdd/size"), (16 * MIB / 512).to_string());
    // By force it goes whatever the guest does with it.
    console.run("mke2fs /dev/vdd >/dev/null && mount -t ext4 /dev/vdd /mnt/d");
    lab.driver().unplug(vm, &hot.disk.spec, true, lab.deadline()).unwrap();
    drop(hot);
    step("found by another daemon, a disk taken by force");

    lab.driver().shutdown(vm, ShutdownKind::Clean, lab.deadline()).unwrap();
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Halted);
    lab.assert_quiet();
    for disk in &first {
        lab.driver().unplug(vm, &disk.disk.spec, false, lab.deadline()).unwrap();
    }
    drop(first);
    lab.assert_gone();
    step("ended cleanly");
}

/// Ends of all kinds, with and without a daemon that sees them.
pub fn ends(lab: &mut Lab) {
    let vm = lab.vm();
    let begun = Instant::now();
    let step = |what: &str| println!("{:6.2} s  {what}", begun.elapsed().as_secs_f64());
    let start = |lab: &Lab| {
        lab.driver().create(&lab.spec).unwrap();
        lab.driver().unpause(vm).unwrap();
        lab.console()
    };
    let mut console = start(lab);
    console.type_in("poweroff -f\n");
    assert_eq!(lab.event(), VmEvent::Halted(vm));
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Halted);
    step("halted by itself");

    let mut console = start(lab);
    console.type_in("reboot -f\n");
    assert_eq!(lab.event(), VmEvent::Rebooted(vm));
    step("rebooted by itself");

    let mut console = start(lab);
    console.run("echo famous last words");
    // The guest's own emulator.
    signal(lab.pid(), libc::SIGKILL).expect("it runs");
    let VmEvent::Crashed(crashed, why) = lab.event() else { panic!("no crash") };
    assert!(crashed == vm && why.contains("famous last words"), "{why}");
    step("killed");

    let mut console = start(lab);
    lab.end_daemon();
    // The console of some drivers is the daemon's.
    let _ = console.stream.write_all(b"true\n");
    let pid = lab.pid();
    signal(pid, libc::SIGKILL).expect("it runs");
    let ended = poll_until(lab.limit, || (!runs(pid)).then_some(()));
    assert!(ended.is_some(), "it does not end");
    lab.start_daemon();
    assert!(matches!(lab.event(), VmEvent::Crashed(crashed, _) if crashed == vm));
    step("killed while there was no daemon");

    start(lab);
    let mut hard = QuietTime::start();
    lab.driver().shutdown(vm, ShutdownKind::Hard, lab.deadline()).unwrap();
    let took = hard.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Halted);
    lab.assert_quiet();
    lab.assert_gone();
}

/// Disks in far places, at the start and later, several at a time.
pub fn places(lab: &mut Lab) {
    let vm = lab.vm();
    lab.driver().create(&lab.spec).unwrap();
    let together = |lab: &mut Lab, positions: &[u8]| {
        let all: Vec<Plugged> = positions.iter().map(|position| lab.disk(*position, |_| ())).collect();
        std::thread::scope(|scope| {
            for one in &all {
                let driver = lab.driver();
                scope.spawn(move || driver.plug(vm, &one.disk).expect("a disk in its place"));
            }
        });
        all
    };
    let mut first = together(lab, &[0, 30, 31, 200, 254]);
    // One of them changes its mind before the guest runs.
    let gone = first.remove(3);
    lab.driver().unplug(vm, &gone.disk.spec, false, lab.deadline()).unwrap();
    gone.process.stop();
    let read_only = lab.disk(201, |spec| spec.read_only = true);
    lab.driver().plug(vm, &read_only.disk).unwrap();
    lab.driver().unpause(vm).unwrap();
    let mut console = lab.console();
    assert_eq!(console.run("cd /sys/block; echo vd?; cd /"), "vda vdb vdc vdd vde");
    assert_eq!(console.run("cat /sys/block/vd*/ro | sort | tr -d '\\n'"), "00001");
    let later = together(lab, &[5, 199, 247, 253]);
    assert_eq!(console.run("cd /sys/block; echo vd? | wc -w; cd /"), "9");
    std::thread::scope(|scope| {
        for one in &later {
            let (driver, until) = (lab.driver(), lab.deadline());
            scope.spawn(move || driver.unplug(vm, &one.disk.spec, false, until).expect("a disk goes"));
        }
    });
    assert_eq!(console.run("cd /sys/block; echo vd? | wc -w; cd /"), "5");
    lab.driver().shutdown(vm, ShutdownKind::Hard, lab.deadline()).unwrap();
    lab.assert_quiet();
}

/// A file system with busybox as everything, `init` included.
fn bootable(lab: &Lab) -> PathBuf {
    let (tree, image) = (lab.scratch.join("tree"), lab.scratch.join("boot.raw"));
    for dir in ["bin", "sbin", "etc", "proc", "sys", "dev", "mnt"] {
        std::fs::create_dir_all(tree.join(dir)).unwrap();
    }
    let busybox = tapio_e2e::tools::find("busybox").expect("the caller has asked for busybox");
    std::fs::copy(busybox, tree.join("bin/busybox")).unwrap();
    for (name, target) in [("bin/sh", "busybox"), ("bin/cat", "busybox"), ("sbin/init", "../bin/busybox")] {
        std::os::unix::fs::symlink(target, tree.join(name)).unwrap();
    }
    std::fs::write(tree.join("etc/inittab"), "::respawn:-/bin/sh\n").unwrap();
    std::fs::write(tree.join("etc/from"), "the disk\n").unwrap();
    std::fs::File::create(&image).and_then(|file| file.set_len(16 * MIB)).unwrap();
    let mut make = std::process::Command::new(tapio_e2e::tools::find("mkfs.ext4").expect("asked for"));
    make.args(["-q", "-F", "-d"]).arg(&tree).arg(&image);
    tapio_e2e::process::run(&mut make).ok();
    image
}

/// A guest whose root is on its first disk; the agent stays with it.
pub fn root_on_disk(lab: &mut Lab) {
    let vm = lab.vm();
    lab.spec.kernel_args = "root=/dev/vda rw".into();
    lab.driver().create(&lab.spec).unwrap();
    lab.content = Some(bootable(lab));
    let _root = lab.plug(0);
    lab.driver().unpause(vm).unwrap();
    let mut console = lab.console();
    assert_eq!(console.run("cat /etc/from"), "the disk");
    let hot = lab.plug(1);
    assert_eq!(console.run("cat /sys/block/vdb/size"), (16 * MIB / 512).to_string());
    let error = lab.driver().unplug(vm, &_root.disk.spec, false, lab.deadline()).unwrap_err();
    assert_eq!(error.code, "DEVICE_DETACH_REJECTED", "{error}");
    lab.driver().unplug(vm, &hot.disk.spec, false, lab.deadline()).unwrap();
    lab.driver().shutdown(vm, ShutdownKind::Clean, lab.deadline()).unwrap();
    lab.assert_quiet();
}

/// `TAPIO_DISKS`, or as many as the driver can give.
pub fn disks(most: u8) -> u8 {
    std::env::var("TAPIO_DISKS").ok().and_then(|text| text.parse().ok()).unwrap_or(most)
}

/// As many disks as the driver can give, all at the start, and the end of the guest.
pub fn many(lab: &mut Lab, count: u8) {
    let _all = started_with_many(lab, count);
    lab.driver().shutdown(lab.vm(), ShutdownKind::Hard, lab.deadline()).unwrap();
}

/// Starts a guest with so many disks; how long it took. The guest reads on each which one it is and writes there what
/// it is called in the guest.
pub fn started_with_many(lab: &mut Lab, count: u8) -> Vec<Plugged> {
    let vm = lab.vm();
    let begun = Instant::now();
    lab.driver().create(&lab.spec).unwrap();
    let made = begun.elapsed();
    let all: Vec<Plugged> = (0..count).map(|position| lab.disk(position, |_| ())).collect();
    for (position, one) in all.iter().enumerate() {
        let image = std::fs::File::options().write(true).open(&one.image).unwrap();
        image.write_all_at(format!("disk {position}\n").as_bytes(), 0).unwrap();
    }
    let offered = begun.elapsed();
    std::thread::scope(|scope| {
        for part in all.chunks(usize::from(count).div_ceil(10)) {
            let driver = lab.driver();
            scope.spawn(move || {
                part.iter().for_each(|one| driver.plug(vm, &one.disk).expect("a disk in its place"));
            });
        }
    });
    let plugged = begun.elapsed();
    lab.driver().unpause(vm).unwrap();
    let mut console = lab.console();
    let up = begun.elapsed();
    let seen = console.run("grep -c ' vd' /proc/partitions");
    assert_eq!(seen, count.to_string(), "{}", console.run("dmesg | grep -i -e virtio -e memory | tail -n 8"));
    // Nothing but what the shell does itself: in an emulated guest a process takes long.
    console.run("for d in /dev/vd*; do read -r was <$d; echo $was is $d. >$d; done; sync");
    let mut names = BTreeSet::new();
    for (position, one) in all.iter().enumerate() {
        let mut bytes = [0; 64];
        std::fs::File::open(&one.image).and_then(|mut file| file.read_exact(&mut bytes)).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let name = text
            .split_once('.')
            .and_then(|(said, _)| said.strip_prefix(&format!("disk {position} is /dev/")));
        let name = name.unwrap_or_else(|| panic!("disk {position} holds {text:?}"));
        assert!(names.insert(name.to_owned()), "two disks are {name}");
    }
    println!(
        "{count} disks: made {made:?}, disk processes {:?}, plugged {:?}, up {:?}, read and written {:?}",
        offered - made,
        plugged - offered,
        up - plugged,
        begun.elapsed() - up
    );
    all
}

/// Whether a process is there and has not ended.
fn runs(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// A field of /proc/PID/status.
fn status(pid: i32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.unwrap_or_else(|| panic!("no {field}: {text}")).trim().to_owned()
}

/// Whether something can be done by a program that runs as this user, and is not confined in any other way.
fn can(uid: u32, words: &[&str]) -> bool {
    let mut command = std::process::Command::new(words[0]);
    command.args(&words[1..]).uid(uid).gid(uid);
    tapio_e2e::process::run(&mut command).status.success()
}

/// A disk process that dies under a guest is replaced by the same command: the guest, which is confined, finds the new
/// one's socket, and what it was doing goes on.
pub fn replaced(lab: &mut Lab) {
    lab.driver().create(&lab.spec).expect("made");
    let mut disk = lab.plug(0);
    lab.driver().unpause(lab.vm()).expect("started");
    let mut console = lab.console();
    console.run("echo before | dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null");
    disk.process.process.kill();
    disk.options.restart(lab.scratch.path(), &mut disk.process);
    console.run("echo after | dd of=/dev/vda seek=1 bs=512 conv=sync,notrunc,fsync 2>/dev/null");
    console.run("echo 3 >/proc/sys/vm/drop_caches");
    let seen = console.run("dd if=/dev/vda bs=512 count=2 2>/dev/null | tr -d '\\0 ' | tr '\\n' '.'");
    assert_eq!(seen, "before.after.");
    let mut bytes = [0; 518];
    std::fs::File::open(&disk.image).and_then(|mut file| file.read_exact(&mut bytes)).expect("the image");
    assert_eq!((&bytes[..7], &bytes[512..]), (&b"before\n"[..], &b"after\n"[..]));
    lab.driver().shutdown(lab.vm(), ShutdownKind::Clean, lab.deadline()).expect("ended");
}

/// A guest's processes have no rights on this host, see nothing of it, and nothing of another guest.
pub fn confined(first: &mut Lab, second: &mut Lab) {
    if !rustix::process::geteuid().is_root() {
        return tapio_e2e::tools::skip("needs root");
    }
    let mut users = BTreeSet::new();
    let mut disks = Vec::new();
    for lab in [&mut *first, &mut *second] {
        lab.driver().create(&lab.spec).expect("made");
        disks.push(lab.plug(0));
        lab.driver().unpause(lab.vm()).expect("started");
        let (leader, limit) = (lab.pid(), lab.limit);
        let mut console = lab.console();
        assert_eq!(console.run("cat /sys/block/vda/size"), "32768");
        let hot = lab.plug(1);
        lab.driver().pause(lab.vm()).expect("paused");
        lab.driver().unpause(lab.vm()).expect("goes on");
        lab.driver().unplug(lab.vm(), &hot.disk.spec, false, lab.deadline()).expect("gone");
        // All of its session: User-mode Linux has a process for each of the guest's. While the guest is paused, none of
        // them comes or goes.
        lab.driver().pause(lab.vm()).expect("paused again");
        let mut count = 0;
        for entry in std::fs::read_dir("/proc").expect("processes").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            // SAFETY: getsid(2) takes a number. Sessions of kernel threads are 0, which rustix takes for impossible.
            if unsafe { libc::getsid(pid) } != leader {
                continue;
            }
            // One that ended before the pause is there until the emulator asks how.
            if !runs(pid) {
                continue;
            }
            count += 1;
            let uid = status(pid, "Uid");
            let ids: BTreeSet<u32> = uid.split_whitespace().map(|id| id.parse().expect("a number")).collect();
            assert!(ids.len() == 1 && ids.iter().all(|id| (0x7000_0000..0x7001_0000).contains(id)), "{uid}");
            assert_eq!(status(pid, "Gid"), uid);
            assert_eq!(status(pid, "Groups"), "");
            for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                assert_eq!(status(pid, set), "0000000000000000", "{set}");
            }
            assert_eq!((status(pid, "NoNewPrivs").as_str(), status(pid, "Seccomp").as_str()), ("1", "2"));
            for space in ["mnt", "net", "ipc", "uts"] {
                let of =
                    |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{space}")).expect("a namespace");
                assert_ne!(of(&pid.to_string()), of("self"), "{space}");
            }
            // What it has open leads to files of its own alone, and its root has nothing of the host's users.
            for absent in ["etc/shadow", "etc/passwd", "root", "home", "var", "boot", "run/systemd", "sys"] {
                assert!(!PathBuf::from(format!("/proc/{pid}/root/{absent}")).exists(), "{absent}");
            }
            users.extend(ids);
        }
        assert!(count > 0, "no process after {limit:?}");
        lab.driver().unpause(lab.vm()).expect("goes on again");
    }
    assert_eq!(users.len(), 2, "each has a user of its own: {users:?}");
    // As the other's user, with nothing else in its way, nothing of a guest can be touched.
    for (lab, other) in [(&*first, &*second), (&*second, &*first)] {
        let uid: u32 =
            status(other.pid(), "Uid").split_whitespace().next().expect("one").parse().expect("a number");
        let pid = lab.pid().to_string();
        assert!(can(uid, &["true"]) && can(uid, &["kill", "-0", &other.pid().to_string()]));
        assert!(!can(uid, &["kill", "-0", &pid]), "a signal");
        assert!(!can(uid, &["cat", &format!("/proc/{pid}/maps")]), "its memory");
        let dir = lab.scratch.join("run/vm").join(lab.vm().simple().to_string());
        for open in [lab.scratch.path().to_path_buf(), lab.scratch.join("run"), lab.scratch.join("run/vm")] {
            std::fs::set_permissions(open, std::os::unix::fs::PermissionsExt::from_mode(0o711))
                .expect("opened");
        }
        for name in ["console.log", "emulator.log", "machine.json", "0", "g", "g/m/mconsole", "initramfs"] {
            let path = dir.join(name);
            assert!(!can(uid, &["test", "-r", tapio_e2e::disk::text(&path)]), "{name}");
            assert!(!can(uid, &["test", "-w", tapio_e2e::disk::text(&path)]), "{name}");
        }
    }
    for lab in [first, second] {
        lab.driver().shutdown(lab.vm(), ShutdownKind::Clean, lab.deadline()).expect("ended");
    }
}
