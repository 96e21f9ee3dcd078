//! A VM in which our disks are devices of its own kernel, for the drivers that the hosts of the tests
//! lack: ublk and nbd.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Guest, Qemu, emulate, initramfs};
use crate::process::{Running, run};
use crate::scratch::Scratch;
use crate::slots;
use crate::tools::{find, our};

/// QEMU's emulator with Debian's kernel, one processor, and our programs inside.
#[derive(Debug)]
pub struct DeviceVm {
    case: String,
}

impl DeviceVm {
    /// The programs that have to be installed.
    pub const TOOLS: [&'static str; 6] =
        ["qemu-system-x86_64", "busybox", "mkfs.ext4", "e2fsck", "mkfs.xfs", "xfs_repair"];

    /// Runs `case_NAME` of `tests/guest/vm-init.sh`.
    pub fn new(case: &str) -> Self {
        Self { case: case.to_string() }
    }

    /// Where the kernel and its drivers are, or why they are not.
    pub fn kernel() -> Result<PathBuf, String> {
        let dir = Qemu::kernel()?;
        match dir.join("ublk_drv.ko").exists() && dir.join("nbd.ko").exists() {
            true => Ok(dir),
            false => Err("needs a guest kernel with ublk_drv and nbd (scripts/setup clients)".to_string()),
        }
    }

    /// Starts it. `scratch` receives the initramfs and the console.
    #[track_caller]
    pub fn start(&self, kernel: &Path, scratch: &Scratch) -> Guest {
        let mut programs = vec![stripped("tapio", scratch), stripped("tapio-disk", scratch)];
        programs.extend(Self::TOOLS[2..].iter().filter_map(|tool| find(tool)));
        let image = scratch.join("host.cpio");
        initramfs::write_host(&image, kernel, &programs);
        let console = scratch.join(&format!("console-{}.log", self.case));
        let mut command = Command::new("qemu-system-x86_64");
        emulate(&mut command, "single", (1, "qemu64"), 1280);
        command.arg("-kernel").arg(kernel.join("vmlinuz")).arg("-initrd").arg(&image);
        let parameters = format!("console=ttyS0 quiet panic=-1 no_timer_check tapio_case={}", self.case);
        command.args(["-append", &parameters]);
        let slot = Some(slots::vm());
        Guest {
            process: Running::start(&mut command, &console),
            limit: Duration::from_secs(240),
            _slot: slot,
        }
    }
}

/// A program of ours without what only debuggers need, where there is a tool for that: the archive is memory.
#[track_caller]
fn stripped(program: &str, scratch: &Scratch) -> PathBuf {
    let (from, to) = (our(program), scratch.join(program));
    if find("strip").is_some() && run(Command::new("strip").arg("-o").arg(&to).arg(&from)).status.success() {
        return to;
    }
    from
}
