//! Disks as devices of this host.

use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_fixtures::unmounting::unmount;

use crate::disk::{Disk, Host, text};
use crate::process::{Finished, poll_until, run};

/// Why there can be no device by FUSE here; `None` where there can.
#[track_caller]
pub fn lacks_fuse(host: &Host) -> Option<String> {
    let said = run(&mut host.tapio(&["disk", "device", "probe", "--json"])).ok();
    let kinds: serde_json::Value = serde_json::from_str(&said).expect("the probe prints JSON");
    let kinds = kinds.as_array().expect("a list of kinds");
    let fuse = kinds.iter().find(|kind| kind["how"] == "fuse").expect("fuse is among them");
    let missing = fuse["usable"] != true;
    missing.then(|| format!("needs a local device by FUSE: {}", fuse["why"].as_str().unwrap_or_default()))
}

/// What `tapio disk list` shows as the local device of the only disk of `host`, once it is there.
#[track_caller]
pub fn device_of(host: &Host) -> PathBuf {
    let found = poll_until(crate::disk::STOP_LIMIT, || listed(host));
    found.unwrap_or_else(|| panic!("no device in {}", run(&mut host.tapio(&["disk", "list"])).stdout))
}

fn listed(host: &Host) -> Option<PathBuf> {
    let said = run(&mut host.tapio(&["disk", "list", "--json"])).ok();
    let disks: serde_json::Value = serde_json::from_str(&said).expect("the list is JSON");
    let fronts = disks.as_array()?.iter().find_map(|disk| disk["fronts"].as_array())?;
    let device = fronts.iter().find_map(|front| {
        let front = front.get("front").unwrap_or(front);
        front.get("device").and_then(|device| device.as_str())
    });
    device.map(PathBuf::from)
}

/// `tapio disk device ARGS`.
#[track_caller]
pub fn device(host: &Host, args: &[&str]) -> Finished {
    run(&mut host.tapio(&[&["disk", "device"], args].concat()))
}

/// A mounted file system; unmounted when dropped, whatever state its device is in.
#[derive(Debug)]
pub struct Mounted {
    dir: PathBuf,
    mounted: bool,
}

impl Mounted {
    /// Mounts `device` on a fresh directory `dir`.
    #[track_caller]
    pub fn new(device: &Path, dir: PathBuf) -> Self {
        std::fs::create_dir_all(&dir).expect("a directory to mount on");
        run(Command::new("mount").arg(device).arg(&dir)).ok();
        Self { dir, mounted: true }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Takes it away, which must work.
    #[track_caller]
    pub fn unmount(mut self) {
        self.mounted = false;
        unmount(&self.dir);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.mounted {
            let _ = run(Command::new("umount").arg("-l").arg(&self.dir));
        }
    }
}

/// The loop devices whose file lies below `dir`, by the kernel's list.
pub fn loops_below(dir: &Path) -> Vec<String> {
    let listed = run(Command::new("losetup").args(["--noheadings", "--output", "NAME,BACK-FILE"])).ok();
    listed.lines().filter(|line| line.contains(text(dir))).map(str::to_string).collect()
}

/// The mounts of exported files below `dir`, by the kernel's list.
pub fn exports_below(dir: &Path) -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("the list of mounts");
    mounts
        .lines()
        .filter(|line| line.contains("fuse.tapio") && line.contains(text(dir)))
        .map(String::from)
        .collect()
}

/// The process's number as an argument.
pub fn pid(disk: &Disk) -> String {
    disk.process.pid().to_string()
}
