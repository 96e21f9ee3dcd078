//! What lies between a device and the VHD on it: a volume group, or a file system. Made for a turn of the benchmark,
//! and taken off the device afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where udev listens, on hosts that have it. Without it LVM makes its nodes itself.
const UDEV: &str = "/run/udev/control";
const WITHOUT_UDEV: &str =
    "activation { udev_sync=0 udev_rules=0 } devices { obtain_device_list_from_udev=0 }";
/// The volume of the group.
const VOLUME: &str = "disk";

/// A kind of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One logical volume over all of the device, as SRs of type `lvm` have one for each disk.
    Lvm,
    /// ext4 with its defaults, as on SRs of type `ext`.
    Ext,
}

/// It is there as long as this is.
#[derive(Debug)]
pub(super) struct Below {
    kind: Kind,
    device: PathBuf,
    /// The group, or where the file system is mounted.
    place: PathBuf,
    /// Where the VHD goes: a volume, or a file that is not there yet.
    pub(super) path: PathBuf,
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let is_lvm = ["pvcreate", "vgcreate", "lvcreate", "vgremove", "pvremove"].contains(&program);
    let settings: &[&str] =
        if is_lvm && !Path::new(UDEV).exists() { &["--config", WITHOUT_UDEV] } else { &[] };
    let done = Command::new(program)
        .args(settings)
        .args(arguments)
        .env("LVM_SUPPRESS_FD_WARNINGS", "1")
        .output()
        .map_err(|error| format!("{program} does not run: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(format!("{program} failed: {}", said.trim().lines().last().unwrap_or("it printed nothing")))
}

impl Below {
    /// Makes it on a device, all of which is overwritten; `dir` is for a mount.
    pub(super) fn new(kind: Kind, device: &Path, dir: &Path) -> Result<Self, String> {
        let name = device.display().to_string();
        let made = match kind {
            Kind::Lvm => {
                let group = format!("tapio-bench-{}", std::process::id());
                let path = Path::new("/dev").join(&group).join(VOLUME);
                Self { kind, device: device.to_path_buf(), place: group.into(), path }
            }
            Kind::Ext => {
                let place = dir.join("ext");
                fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
                Self { kind, device: device.to_path_buf(), path: place.join("device.vhd"), place }
            }
        };
        let place = made.place.display().to_string();
        // What is half made goes with `made`.
        match kind {
            Kind::Lvm => {
                run("pvcreate", &["-ff", "-y", &name])?;
                run("vgcreate", &[&place, &name])?;
                run("lvcreate", &["-y", "-Wn", "-Zn", "-l", "100%FREE", "-n", VOLUME, &place])?;
            }
            Kind::Ext => {
                run("mkfs.ext4", &["-q", "-F", &name])?;
                run("mount", &["-t", "ext4", &name, &place])?;
            }
        }
        Ok(made)
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        let (device, place) = (self.device.display().to_string(), self.place.display().to_string());
        let gone = match self.kind {
            Kind::Lvm => run("vgremove", &["-f", "-y", &place]).and(run("pvremove", &["-y", &device])),
            Kind::Ext => run("umount", &[&place]),
        };
        if let Err(why) = gone {
            eprintln!("tapio bench: {device} keeps what was made on it: {why}");
        }
    }
}
