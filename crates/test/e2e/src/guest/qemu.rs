//! The guest under QEMU's emulator.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Guest, emulate, initramfs};
use crate::process::Running;
use crate::scratch::Scratch;
use crate::slots;
use crate::tools::repository;

/// A guest under QEMU's emulator: Debian's cloud kernel, busybox, two processors, virtio over PCI. Behaviour only:
/// times mean nothing there.
#[derive(Debug)]
pub struct Qemu {
    case: String,
    vhost_user: PathBuf,
    queues: u32,
    parameters: Vec<(String, String)>,
    /// Added to the disk's device.
    device: String,
    /// Added to the socket that leads to the disk process.
    socket: String,
    qmp: Option<PathBuf>,
    incoming: Option<PathBuf>,
}

impl Qemu {
    /// The programs that have to be installed.
    pub const TOOLS: [&'static str; 2] = ["qemu-system-x86_64", "busybox"];

    /// Runs `case_NAME` of `tests/guest/qemu-init.sh` on one vhost-user disk with two queues.
    pub fn new(case: &str, vhost_user: &Path) -> Self {
        Self {
            case: case.to_string(),
            vhost_user: vhost_user.to_path_buf(),
            queues: 2,
            parameters: vec![("mib".to_string(), "32".to_string())],
            device: String::new(),
            socket: String::new(),
            qmp: None,
            incoming: None,
        }
    }

    /// Sets `tapio_NAME` for the guest.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.parameters.push((name.to_string(), value.to_string()));
        self
    }

    /// With packed rings.
    #[must_use]
    pub fn packed(mut self) -> Self {
        self.device.push_str(",packed=on");
        self
    }

    /// Connects again, a second later, when the disk process goes.
    #[must_use]
    pub fn reconnecting(mut self) -> Self {
        self.socket.push_str(",reconnect=1");
        self
    }

    /// Listens for commands at `path`.
    #[must_use]
    pub fn qmp(mut self, path: &Path) -> Self {
        self.qmp = Some(path.to_path_buf());
        self
    }

    /// Does not boot but waits at `path` for a guest that migrates.
    #[must_use]
    pub fn incoming(mut self, path: &Path) -> Self {
        self.incoming = Some(path.to_path_buf());
        self
    }

    /// Where `scripts/lane-kernel` unpacks the kernel, or why there is none.
    pub fn kernel() -> Result<PathBuf, String> {
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
        let dir = target.join("lanes/kernel");
        if dir.join("vmlinuz").exists() {
            Ok(dir)
        } else {
            Err("needs a guest kernel (scripts/setup guest fetches one)".to_string())
        }
    }

    /// Writes the initramfs of a guest with qemu-guest-agent, whose program is `agent`.
    #[track_caller]
    pub fn write_agent(to: &Path, kernel: &Path, agent: &Path) {
        initramfs::write_agent(to, kernel, agent);
    }

    /// Starts it. `scratch` receives the initramfs and the console.
    #[track_caller]
    pub fn start(&self, kernel: &Path, scratch: &Scratch) -> Guest {
        let image = scratch.join("initramfs.cpio");
        initramfs::write(&image, kernel);
        let role = if self.incoming.is_some() { "-arrived" } else { "" };
        let console = scratch.join(&format!("console-{}{role}.log", self.case));
        let mut command = Command::new("qemu-system-x86_64");
        // One thread for both processors: with one each, this emulator now and then runs a half-patched instruction of
        // the guest's kernel, which oopses before it has seen our disk.
        emulate(&mut command, "single", (2, "qemu64"), 256);
        // The back end maps the guest's memory: it must be a shared mapping of a file it can be handed.
        command.args(["-object", "memory-backend-memfd,id=memory,size=256M,share=on"]);
        command.args(["-numa", "node,memdev=memory"]);
        command
            .args(["-chardev", &format!("socket,id=disk,path={}{}", self.vhost_user.display(), self.socket)]);
        let device = format!("vhost-user-blk-pci,chardev=disk,num-queues={}{}", self.queues, self.device);
        command.args(["-device", &device]);
        if let Some(path) = &self.qmp {
            command.args(["-qmp", &format!("unix:{},server=on,wait=off", path.display())]);
        }
        if let Some(path) = &self.incoming {
            command.args(["-incoming", &format!("unix:{}", path.display())]);
        }
        command.arg("-kernel").arg(kernel.join("vmlinuz"));
        command.arg("-initrd").arg(&image);
        let mut line = format!("console=ttyS0 quiet panic=-1 no_timer_check tapio_case={}", self.case);
        for (name, value) in &self.parameters {
            line.push_str(&format!(" tapio_{name}={value}"));
        }
        command.args(["-append", &line]);
        // A guest that arrives runs when the one that leaves does not any more: both have one slot.
        let slot = self.incoming.is_none().then(slots::vm);
        Guest {
            process: Running::start(&mut command, &console),
            limit: Duration::from_secs(180),
            _slot: slot,
        }
    }
}
