//! Xen with a Debian dom0 under QEMU's emulator, and PV and PVH guests on it.
//!
//! ```text
//!   test --- serial console: RESULT, FAIL ---.
//!   QEMU (TCG) > Xen 4.17 > dom0: xen-init.sh, our programs, xl > guests: xen-guest.sh on /dev/xvda
//! ```
//!
//! A test names stories of `tests/guest/xen-stories.sh`; several share a boot, which costs most of the time. Behaviour
//! only: times mean nothing there.

mod image;
mod pace;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use self::pace::{Late, Pace};
use crate::guest::{Report, emulate};
use crate::process::Running;
use crate::scratch::Scratch;
use crate::slots;
use crate::tools::repository;

/// Between two looks at a console. The emulator behind it needs the processor more.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What the emulated processor can do. Each word is from experience: with SMAP dom0 crashes, with AVX and XSAVE
/// processes of dom0 are silently corrupted once a guest runs, with RDTSCP a PVH guest does not start. Its SVM is what
/// PVH guests run by.
const PROCESSOR: &str = "max,-smap,-avx,-avx2,-xsave,-xsaveopt,-xsavec,-xsaves,-rdtscp";

/// An emulated host with Xen.
#[derive(Debug)]
pub struct XenHost {
    stories: String,
    programs: Vec<String>,
    in_guests: Vec<String>,
    parameters: Vec<(String, String)>,
    is_tried_again: bool,
}

/// Where `scripts/setup` unpacked Xen, and what this host adds.
#[derive(Clone, Debug)]
pub struct Lane {
    dir: PathBuf,
}

impl Lane {
    /// Finds it, or says what is missing.
    pub fn find() -> Result<Self, String> {
        if let Some(tool) = crate::tools::missing(&["qemu-system-x86_64", "busybox", "strip"]) {
            return Err(format!("needs {tool}"));
        }
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
        let dir = target.join("lanes/xen");
        match dir.join("version").exists() {
            true => Ok(Self { dir }),
            false => Err("needs Xen 4.17 (scripts/setup clients)".to_string()),
        }
    }

    /// A file of it.
    fn join(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

impl XenHost {
    /// Runs stories of `tests/guest/xen-stories.sh`, one after the other: `case_NAME` for each word.
    pub fn new(stories: &str) -> Self {
        Self {
            stories: stories.split_whitespace().collect::<Vec<_>>().join("+"),
            programs: Vec::new(),
            in_guests: Vec::new(),
            parameters: Vec::new(),
            is_tried_again: true,
        }
    }

    /// With programs of ours in dom0, as they lie in the directory of what was built (`tapio-disk`,
    /// `examples/NAME`). `tapio` comes with its other names.
    #[must_use]
    pub fn programs(mut self, names: &[&str]) -> Self {
        self.programs.extend(names.iter().map(|name| (*name).to_string()));
        self
    }

    /// With programs of ours in every guest that the stories make.
    #[must_use]
    pub fn in_guests(mut self, names: &[&str]) -> Self {
        self.in_guests.extend(names.iter().map(|name| (*name).to_string()));
        self
    }

    /// A host that stands still is not tried once more: for a developer who looks for the reason.
    #[must_use]
    pub fn once(mut self) -> Self {
        self.is_tried_again = false;
        self
    }

    /// Sets `tapio_NAME` for dom0's script.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.parameters.push((name.to_string(), value.to_string()));
        self
    }

    /// Runs it to its good end and gives what was reported.
    ///
    /// The emulator hangs now and then, so a host that is late is tried once more.
    #[track_caller]
    pub fn run(&self, lane: &Lane) -> Report {
        let scratch = Scratch::in_memory();
        let image = scratch.join("dom0.cpio");
        image::write_dom0(&image, lane, &self.programs, &self.in_guests, &scratch);
        let _slot = slots::vm();
        let first = self.boot(lane, &image, &scratch.join("console.log"));
        let (log, ended) = match first {
            (log, Err(late)) if self.is_tried_again => {
                self.tell(&format!("{late}: once more"));
                eprintln!("--- console\n{log}");
                self.boot(lane, &image, &scratch.join("console-again.log"))
            }
            ended => ended,
        };
        keep(&self.stories, &log);
        let report = Report::parse(&log);
        assert!(report.failures().is_empty(), "dom0 failed: {:?}\n--- console\n{log}", report.failures());
        if let Err(late) = ended {
            panic!("{late}\n--- console\n{log}");
        }
        assert!(
            report.has("status") && report.text("status") == "ok",
            "the VM stopped early\n--- console\n{log}"
        );
        report
    }

    /// One run: what the console said, and what was late if the emulated host did not end by itself.
    #[track_caller]
    fn boot(&self, lane: &Lane, image: &Path, console: &Path) -> (String, Result<(), Late>) {
        let mut command = self.command(lane, image);
        let mut vm = Running::start(&mut command, console);
        let mut pace = Pace::new();
        let ended = loop {
            if vm.ended().is_some() {
                break Ok(());
            }
            match pace.look(&vm.log()) {
                Ok(None) => thread::sleep(LOOK_INTERVAL),
                Ok(Some(line)) => self.tell(&line),
                Err(late) => break Err(late),
            }
        };
        vm.kill();
        (vm.log(), ended)
    }

    /// A line of the lane's log, past the capture of the test harness: it is the last that is seen of a run when
    /// the lane is ended.
    fn tell(&self, line: &str) {
        let _ = std::io::stderr().write_all(format!("\nxen {}: {line}\n", self.stories).as_bytes());
    }

    fn command(&self, lane: &Lane, image: &Path) -> Command {
        let mut command = Command::new("qemu-system-x86_64");
        emulate(&mut command, "multi", (1, PROCESSOR), 1792);
        command.arg("-kernel").arg(lane.join("xen"));
        let mut dom0 = format!("console=hvc0 quiet panic=-1 xtest={}", self.stories);
        for (name, value) in &self.parameters {
            dom0.push_str(&format!(" tapio_{name}={value}"));
        }
        // A comma ends a file; a space begins its command line.
        command.arg("-initrd").arg(format!("{} {dom0},{}", lane.join("vmlinux").display(), image.display()));
        command.args([
            "-append",
            "com1=115200,8n1 console=com1 dom0_mem=1024M,max:1024M dom0_max_vcpus=1 loglvl=warning \
             guest_loglvl=warning noreboot=0",
        ]);
        command
    }
}

/// Leaves the console where the logs of the lanes are, if they are kept.
fn keep(stories: &str, log: &str) {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    let dir = target.join("lanes/logs");
    if dir.is_dir() {
        // The test's own message has the console too.
        let _ = std::fs::write(dir.join(format!("xen-console-{stories}.txt")), log);
    }
}
