//! The volume group below a local SR, as XenServer's storage manager makes it: group `XSLocalEXT-<sr>`, one logical
//! volume named as the SR. sm-layout.md section 1.

use std::path::{Path, PathBuf};

use tapio_types::ApiError;
use uuid::Uuid;

use super::device::Device;
use crate::command::Failure;
use crate::dir::facts::plain_uuid;
use crate::errors;
pub(super) use crate::lvm::commands::is_there;
use crate::lvm::commands::run;
use crate::traits::Ctx;

const PREFIX: &str = "XSLocalEXT-";
/// Data of a volume over several devices change the device after so many KiB.
const STRIPE_KIB: &str = "2048";

/// The owner of a device that carries LVM's mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// No group: one was about to be made of the device, or is gone.
    Unclaimed,
    /// To the group of this SR.
    Sr(Uuid),
    /// To another group.
    Group(String),
    /// To a group that is described on other devices, which are not here.
    Unknown,
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
    run("vgs", &["--noheadings", "-o", "vg_name", &group(sr)]).is_ok()
}

pub(super) fn activate(sr: Uuid) -> Result<(), ApiError> {
    run("vgchange", &["-ay", &group(sr)])
        .map(|_| ())
        .map_err(|error| errors::fail(100, format_args!("{}: {error}", group(sr))))
}

pub(super) fn deactivate(sr: Uuid) {
    if let Err(error) = run("vgchange", &["-an", &group(sr)]) {
        tracing::warn!("{} stays active: {error}", group(sr));
    }
}

/// Whose a device is that carries LVM's mark.
pub(super) fn owner(device: &Path) -> Result<Owner, ApiError> {
    let path = device.to_string_lossy();
    let said = run("pvs", &["--noheadings", "--separator", "|", "-o", "vg_name,pv_in_use", &path])
        .map_err(|error| errors::fail(93, format_args!("{path}: {error}")))?;
    Ok(owner_of(&said))
}

fn owner_of(said: &str) -> Owner {
    let Some((group, used)) = said.lines().find_map(|line| line.trim().split_once('|')) else {
        return Owner::Unknown;
    };
    match (group.strip_prefix(PREFIX).and_then(plain_uuid), group, used.trim()) {
        (Some(sr), ..) => Owner::Sr(sr),
        (None, "", "") => Owner::Unclaimed,
        (None, "", _) => Owner::Unknown,
        (None, group, _) => Owner::Group(group.to_string()),
    }
}

/// Whether an SR's group is one that was never finished, and holds nothing. Of a group with a file system, or with
/// anything that cannot be looked into, that is not said.
///
/// # Errors
/// `SR_DEVICE_IN_USE`: its volume is mounted.
pub(super) fn is_unfinished(sr: Uuid) -> Result<bool, ApiError> {
    let Ok(names) = run("lvs", &["--noheadings", "-a", "-o", "lv_name", &group(sr)]) else {
        return Ok(false);
    };
    let names: Vec<&str> = names.lines().map(str::trim).filter(|name| !name.is_empty()).collect();
    let name = sr.to_string();
    match names[..] {
        [] => return Ok(true),
        [found] if found == name => {}
        _ => return Ok(false),
    }
    let was_active = volume(sr).exists();
    if !was_active && activate(sr).is_err() {
        return Ok(false);
    }
    let looked = Device::open(&volume(sr)).and_then(|device| {
        device.check_free()?;
        device.signature()
    });
    if !was_active {
        deactivate(sr);
    }
    match looked {
        Ok(signature) => Ok(signature.kind().is_none()),
        Err(error) if error.code == "SR_DEVICE_IN_USE" => Err(error),
        Err(_) => Ok(false),
    }
}

/// Makes group and volume on these devices, and says where the volume is. What was made is removed on a failure.
pub(super) fn create(ctx: &dyn Ctx, sr: Uuid, devices: &[PathBuf]) -> Result<PathBuf, ApiError> {
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
    let steps: [(&str, &[&str], u16, &'static str); 3] = [
        ("pvcreate", &physical, 77, "sr-create:marked"),
        ("vgcreate", &grouped, 77, "sr-create:grouped"),
        ("lvcreate", &logical, 50, "sr-create:volume-made"),
    ];
    for (program, arguments, number, step) in steps {
        if let Err(error) = run(program, arguments) {
            if has_group(sr)
                && let Err(error) = remove(sr, || ())
            {
                tracing::warn!("{group} stays half made: {error}");
            }
            for path in &paths {
                let _ = run("pvremove", &["-y", path]);
            }
            return Err(errors::fail(number, error));
        }
        ctx.step(step);
    }
    Ok(volume(sr))
}

/// Removes volume, group and marks. `between` is called when the group is gone and the marks are not.
///
/// # Errors
/// The group stays.
pub(super) fn remove(sr: Uuid, between: impl Fn()) -> Result<(), ApiError> {
    let group = group(sr);
    let fail = |error: Failure| errors::fail(51, format_args!("{group}: {error}"));
    let selection = format!("vg_name={group}");
    let devices = run("pvs", &["--noheadings", "-o", "pv_name", "-S", &selection]).map_err(fail)?;
    let removal = ["-f", "-y", group.as_str()];
    if run("vgremove", &removal).is_err() {
        // A device of it may be gone for good.
        let _ = run("vgreduce", &["--removemissing", "--force", "-y", &group]);
        run("vgremove", &removal).map_err(fail)?;
    }
    between();
    for device in devices.lines().map(str::trim).filter(|line| line.starts_with('/')) {
        // Such a mark is no harm: the device belongs to no group.
        if let Err(error) = run("pvremove", &["-y", device]) {
            tracing::warn!("{device} still carries LVM's mark: {error}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_belongs_to_the_owner_that_lvm_reports() {
        let sr = Uuid::from_u128(0x1234);
        assert_eq!(owner_of(&format!("  {}|used\n", group(sr))), Owner::Sr(sr));
        assert_eq!(owner_of("  XSLocalEXT-mine|used\n"), Owner::Group("XSLocalEXT-mine".into()));
        assert_eq!(owner_of("  vg0|used\n"), Owner::Group("vg0".into()));
        assert_eq!(owner_of("  |\n"), Owner::Unclaimed);
        // Its group's description lies elsewhere: not free.
        assert_eq!(owner_of("  |used\n"), Owner::Unknown);
        assert_eq!(owner_of(""), Owner::Unknown);
    }
}
