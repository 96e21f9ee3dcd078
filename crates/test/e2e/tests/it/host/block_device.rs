//! Images on real block devices: loop devices over files.

use std::path::PathBuf;
use std::process::Command;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

use super::MIB;

/// A loop device over a file; detached when dropped.
struct Loop {
    device: PathBuf,
}

impl Loop {
    fn over(scratch: &Scratch, len: u64, filling: u8) -> Result<Self, String> {
        let file = scratch.join("device");
        std::fs::write(&file, vec![filling; len as usize]).map_err(|error| error.to_string())?;
        let out = Command::new("losetup").args(["--find", "--show", text(&file)]).output();
        let out = out.map_err(|error| format!("losetup: {error}"))?;
        if !out.status.success() {
            return Err(String::from_utf8_lossy(&out.stderr).trim().to_owned());
        }
        Ok(Self { device: String::from_utf8_lossy(&out.stdout).trim().into() })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run(Command::new("losetup").arg("--detach").arg(&self.device));
    }
}

#[test]
fn a_raw_device_is_a_disk() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let device = match Loop::over(&scratch, 16 * MIB, 7) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    let disk = DiskOptions::raw(&device.device).nbd().start(scratch.path());
    let script = "
assert h.get_size() == 16 << 20
assert h.pread(4096, 8 << 20) == b'\\7' * 4096
h.pwrite(b'x' * 8192, 4096)
h.zero(4096, 8192)
h.flush()
assert h.pread(12288, 4096) == b'x' * 4096 + bytes(4096) + b'\\7' * 4096
h.trim(1 << 20, 1 << 20)
assert h.pread(4096, 0) == b'\\7' * 4096
";
    nbdsh(&disk.uri(), script);
    disk.stop();
}

#[test]
fn a_vhd_on_a_device_does_not_show_what_its_last_owner_left() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let device = match Loop::over(&scratch, 24 * MIB, 0xee) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    vhd_util(&["create", "-n", text(&device.device), "-s", "16"]).ok();
    let disk = DiskOptions::vhd(&device.device).nbd().start(scratch.path());
    let script = "
assert h.get_size() == 16 << 20
h.pwrite(b'x' * 4096, 5 << 20)
assert h.pread(1 << 20, 5 << 20) == b'x' * 4096 + bytes((1 << 20) - 4096)
h.flush()
";
    nbdsh(&disk.uri(), script);
    disk.stop();
    vhd_util(&["check", "-n", text(&device.device)]).ok();
    // The footer is at the end of the device, where it was.
    let query = vhd_util(&["query", "-n", text(&device.device), "-vf"]).ok();
    assert_eq!(query.lines().collect::<Vec<_>>(), ["16", "hidden: 0"]);
    let disk = DiskOptions::vhd(&device.device).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "assert h.pread(1 << 20, 5 << 20) == b'x' * 4096 + bytes((1 << 20) - 4096)");
    disk.stop();
}
