//! Two real Linux guests: User-mode Linux, and Debian's kernel under QEMU's emulator.
//!
//! Their first programs are in `tests/guest/`; they answer on the console with `RESULT key=value` and `FAIL text`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::Running;
use crate::scratch::Scratch;
use crate::slots::Slot;
use crate::tools::{our, repository};

mod device_vm;
mod initramfs;
mod qemu;
mod qmp;

pub use qemu::Qemu;
pub use qmp::Qmp;

pub use device_vm::DeviceVm;

/// What a guest said.
#[derive(Debug, Clone, Default)]
pub struct Report {
    results: BTreeMap<String, String>,
    failures: Vec<String>,
}

impl Report {
    /// Reads the lines of a console; anything that is not a report is the kernel's own talk.
    pub fn parse(console: &str) -> Self {
        let mut report = Self::default();
        for line in console.lines() {
            let line = line.trim_end_matches('\r');
            if let Some(text) = line.strip_prefix("FAIL ") {
                report.failures.push(text.to_string());
            } else if let Some((key, value)) =
                line.strip_prefix("RESULT ").and_then(|rest| rest.split_once('='))
            {
                report.results.insert(key.to_string(), value.to_string());
            }
        }
        report
    }

    /// A value that must be there.
    #[track_caller]
    pub fn text(&self, key: &str) -> &str {
        self.results.get(key).unwrap_or_else(|| panic!("the guest reported no {key:?}: {self:?}"))
    }

    /// A number that must be there.
    #[track_caller]
    pub fn number(&self, key: &str) -> u64 {
        let text = self.text(key);
        text.parse().unwrap_or_else(|error| panic!("the guest's {key} is {text:?}: {error}"))
    }

    /// What went wrong, in the guest's words.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Whether a value is there.
    pub fn has(&self, key: &str) -> bool {
        self.results.contains_key(key)
    }
}

/// Has QEMU emulate a VM, with threads of its own (`single` or `multi`), so many processors of a kind, and memory
/// in MiB. Its serial line is what the program says.
pub(crate) fn emulate(
    command: &mut Command,
    threads: &str,
    (processors, kind): (u32, &str),
    memory_mib: u32,
) {
    command.args(["-accel", &format!("tcg,thread={threads}"), "-machine", "q35", "-cpu", kind]);
    command.args(["-smp", &processors.to_string(), "-m", &memory_mib.to_string()]);
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]);
}

/// A guest that runs.
#[derive(Debug)]
pub struct Guest {
    process: Running,
    limit: Duration,
    /// The right of an emulated VM to run. A kernel that is an ordinary process needs none.
    _slot: Option<Slot>,
}

impl Guest {
    /// What it has said so far.
    pub fn report(&self) -> Report {
        Report::parse(&self.process.log())
    }

    /// Waits until the guest has reported `key` with a number of at least `least`.
    #[track_caller]
    pub fn wait_for(&mut self, key: &str, least: u64) {
        let limit = self.limit;
        let log = self.process.log_path().to_path_buf();
        self.process.wait_for(&format!("{key} >= {least} from the guest"), limit, || {
            let console = std::fs::read(&log).ok()?;
            let report = Report::parse(&String::from_utf8_lossy(&console));
            let reached = report.results.get(key).and_then(|text| text.parse::<u64>().ok());
            (reached.is_some_and(|number| number >= least) || !report.failures.is_empty()).then_some(())
        });
    }

    /// Waits until QEMU listens at `path`, where it waits for a guest that migrates.
    #[track_caller]
    pub fn wait_until_listening(&mut self, path: &Path) {
        self.process.wait_for("socket to migrate to", self.limit, || path.exists().then_some(()));
    }

    /// Waits for the guest to shut down, and for its word that all went well.
    #[track_caller]
    pub fn finish(mut self) -> Report {
        let status = self.process.wait(self.limit);
        let report = self.report();
        let console = || self.process.log();
        assert!(
            report.failures.is_empty(),
            "the guest failed: {:?}\n--- console\n{}",
            report.failures,
            console()
        );
        let finished = report.results.get("status").is_some_and(|status| status == "ok");
        assert!(finished, "the guest stopped early ({status})\n--- console\n{}", console());
        report
    }

    /// Pulls the plug.
    pub fn kill(mut self) {
        self.process.kill();
    }
}

/// A User-mode Linux guest: a 6.1 kernel as an ordinary process, one processor, the host's files as its root (read
/// only), up in about two seconds.
#[derive(Debug)]
pub struct Uml {
    case: String,
    parameters: Vec<(String, String)>,
    disks: Vec<PathBuf>,
    shared: Option<PathBuf>,
    limit: Duration,
    memory_mib: u64,
}

impl Uml {
    /// The programs that have to be installed.
    pub const TOOLS: [&'static str; 4] = ["linux.uml", "busybox", "mkfs.ext4", "mkfs.xfs"];

    /// Runs `case_NAME` of `tests/guest/uml-init.sh` on one vhost-user disk.
    pub fn new(case: &str, vhost_user: &Path) -> Self {
        let disks = vec![vhost_user.to_path_buf()];
        let parameters = Vec::new();
        Self {
            case: case.to_string(),
            parameters,
            disks,
            shared: None,
            limit: Duration::from_secs(60),
            memory_mib: 384,
        }
    }

    /// With a file as its `/dev/ubda`, which other guests have at the same time: a LUN of several hosts.
    #[must_use]
    pub fn shared(mut self, file: &Path) -> Self {
        self.shared = Some(file.to_path_buf());
        self
    }

    /// On one more disk.
    #[must_use]
    pub fn disk(mut self, vhost_user: &Path) -> Self {
        self.disks.push(vhost_user.to_path_buf());
        self
    }

    /// With so much time; a minute otherwise.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// With so much memory; 384 MiB otherwise.
    #[must_use]
    pub fn memory_mib(mut self, mib: u64) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets `tapio_NAME` for the guest.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.parameters.push((name.to_string(), value.to_string()));
        self
    }

    /// Starts it. `scratch` receives the console.
    #[track_caller]
    pub fn start(&self, scratch: &Scratch) -> Guest {
        let console = scratch.join(&format!("console-{}.log", self.case));
        let mut command = Command::new("linux.uml");
        // The guest's memory is a file; on a tmpfs it is memory.
        command.env("TMPDIR", "/dev/shm");
        // Needed on processors with AMX; see crates/stack/uml-preload.
        command.env("LD_PRELOAD", our("libtapio_uml_preload.so"));
        command.arg(format!("mem={}M", self.memory_mib));
        command.args(["rootfstype=hostfs", "root=/dev/root", "ro", "con=null", "con0=null,fd:1"]);
        command.args(["quiet", "loglevel=4", "panic=-1"]);
        command.arg(format!("init={}", repository().join("tests/guest/uml-init.sh").display()));
        command.arg(format!("tapio_case={}", self.case));
        command.args(self.parameters.iter().map(|(name, value)| format!("tapio_{name}={value}")));
        // Synchronous, and not locked for this guest alone.
        command.args(self.shared.iter().map(|file| format!("ubd0sc={}", file.display())));
        // Device type 2 is a block device.
        command.args(self.disks.iter().map(|disk| format!("virtio_uml.device={}:2", disk.display())));
        Guest { process: Running::start(&mut command, &console), limit: self.limit, _slot: None }
    }

    /// Starts it and waits for its good end.
    #[track_caller]
    pub fn run(&self, scratch: &Scratch) -> Report {
        self.start(scratch).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// All are sourced into one shell: the later of two functions would take the place of the other for every story.
    #[test]
    fn no_two_scripts_of_the_uml_guest_have_a_function_of_one_name() {
        let mut known: BTreeMap<String, String> = BTreeMap::new();
        for entry in std::fs::read_dir(repository().join("tests/guest")).unwrap() {
            let path = entry.unwrap().path();
            let script = path.file_name().unwrap().to_string_lossy().into_owned();
            if script != "lib.sh" && !(script.starts_with("uml-") && script.ends_with(".sh")) {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for name in text.lines().filter_map(|line| Some(line.split_once("() {")?.0)) {
                if !name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_') {
                    continue;
                }
                let other = known.insert(name.to_owned(), script.clone());
                assert_eq!(other, None, "{name} is in {script} as well");
            }
        }
        assert!(known.len() > 100, "{}", known.len());
    }

    #[test]
    fn only_report_lines_are_believed() {
        let report = Report::parse(
            "Linux version 6.1\r\nRESULT tree=ab=c\r\nnoise RESULT x=1\nRESULT status=ok\nFAIL no disk\n",
        );
        assert_eq!(report.text("tree"), "ab=c");
        assert!(!report.has("x"));
        assert_eq!(report.failures, ["no disk"]);
    }
}
