//! The volume group below a local SR, as XenServer's storage manager makes it: group `XSLocalEXT-<sr>`, one logical
//! volume named as the SR. sm-layout.md section 1.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_types::ApiError;
use uuid::Uuid;

use crate::command;
use crate::dir::facts::plain_uuid;
use crate::errors;

const PATIENCE: Duration = Duration::from_secs(120);
const PREFIX: &str = "XSLocalEXT-";
/// Data of a volume over several devices change the device after so many KiB.
const STRIPE_KIB: &str = "2048";

/// Whether this machine can do it: the kernel's device-mapper and the tools.
pub(super) fn is_there() -> bool {
    Path::new("/dev/mapper/control").exists() && command::run_well("lvm", &["version"], PATIENCE).is_ok()
}

/// The group's name.
pub(super) fn group(sr: Uuid) -> String {
    format!("{PREFIX}{sr}")
}

/// The volume's path.
pub(super) fn volume(sr: Uuid) -> PathBuf {
    Path::new("/dev").join(group(sr)).join(sr.to_string())
}

pub(super) fn has_group(sr: Uuid) -> bool {
    command::run_well("vgs", &["--noheadings", "-o", "vg_name", &group(sr)], PATIENCE).is_ok()
}

pub(super) fn activate(sr: Uuid) -> Result<(), ApiError> {
    command::run_well("vgchange", &["-ay", &group(sr)], PATIENCE)
        .map(|_| ())
        .map_err(|error| errors::fail(100, format_args!("{}: {error}", group(sr))))
}

pub(super) fn deactivate(sr: Uuid) {
    if let Err(error) = command::run_well("vgchange", &["-an", &group(sr)], PATIENCE) {
        tracing::warn!("{} stays active: {error}", group(sr));
    }
}

/// The SR whose group a device belongs to.
pub(super) fn sr_on(device: &Path) -> Option<Uuid> {
    let device = device.to_string_lossy();
    let names = command::run_well("pvs", &["--noheadings", "-o", "vg_name", &device], PATIENCE).ok()?;
    names.lines().find_map(|line| plain_uuid(line.trim().strip_prefix(PREFIX)?))
}

/// Makes group and volume on these devices, and says where the volume is. What was made is removed on a failure.
pub(super) fn create(sr: Uuid, devices: &[PathBuf]) -> Result<PathBuf, ApiError> {
    let paths: Vec<_> = devices.iter().map(|path| path.to_string_lossy().into_owned()).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let (group, name, count) = (group(sr), sr.to_string(), paths.len().to_string());
    let physical = [&["-ff", "-y"][..], &paths].concat();
    let grouped = [&[group.as_str()][..], &paths].concat();
    let mut logical = vec!["-y", "-W", "y", "-n", &name, "-l", "100%FREE"];
    if paths.len() > 1 {
        logical.extend(["-i", &count, "-I", STRIPE_KIB]);
    }
    logical.push(&group);
    let steps: [(&str, &[&str], u16); 3] =
        [("pvcreate", &physical, 77), ("vgcreate", &grouped, 77), ("lvcreate", &logical, 50)];
    for (program, arguments, number) in steps {
        if let Err(error) = command::run_well(program, arguments, PATIENCE) {
            remove(sr);
            for path in &paths {
                let _ = command::run_well("pvremove", &["-y", path], PATIENCE);
            }
            return Err(errors::fail(number, error));
        }
    }
    Ok(volume(sr))
}

/// Removes volume, group and marks.
pub(super) fn remove(sr: Uuid) {
    let group = group(sr);
    let selection = format!("vg_name={group}");
    let devices = command::run_well("pvs", &["--noheadings", "-o", "pv_name", "-S", &selection], PATIENCE);
    if let Err(error) = command::run_well("vgremove", &["-f", "-y", &group], PATIENCE) {
        tracing::warn!("{group} is not removed: {error}");
    }
    for device in devices.unwrap_or_default().lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Err(error) = command::run_well("pvremove", &["-y", device], PATIENCE) {
            tracing::warn!("{device} still belongs to LVM: {error}");
        }
    }
}
