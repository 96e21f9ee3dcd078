//! Whether a device may become an SR, and what of an earlier one is cleared away before.

use std::path::Path;
use std::time::Duration;

use tapio_types::ApiError;
use uuid::Uuid;

use super::group::Group;
use super::{commands, names};
use crate::command;
use crate::errors;
use crate::ext::device::Device;

/// Nothing smaller becomes an SR.
const SIZE_MIN: u64 = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);
const NEXT: &str = "introduce it if it is an SR, or take device_config:force=true to overwrite it";

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

/// Whose a device is that carries LVM's mark.
pub(super) fn owner(device: &Path) -> Result<Owner, ApiError> {
    let path = device.to_string_lossy();
    let rows = commands::table(&[], "pvs", "vg_name,pv_in_use", &[&path])
        .map_err(|error| errors::fail(93, format_args!("{path}: {error}")))?;
    let Some(row) = rows.first() else { return Ok(Owner::Unknown) };
    let text = |field: &str| row.get(field).map_or("", |text| text.trim());
    Ok(match (names::sr_of_group(text("vg_name")), text("vg_name"), text("pv_in_use")) {
        (Some(sr), ..) => Owner::Sr(sr),
        (None, "", "") => Owner::Unclaimed,
        (None, "", _) => Owner::Unknown,
        (None, group, _) => Owner::Group(group.to_owned()),
    })
}

/// Whether a group is one that was never finished: its metadata say nothing yet.
fn is_unfinished(group: &Group) -> bool {
    let Ok(listed) = group.list() else { return false };
    match listed.volumes.len() {
        0 => true,
        1 => match listed.volumes.get(names::METADATA) {
            Some(volume) => super::read::first_sector(volume).is_ok_and(|first| !first.starts_with(b"XSSM")),
            None => false,
        },
        _ => false,
    }
}

/// A device that may become an SR.
#[derive(Debug)]
pub(super) struct Claim {
    device: Device,
    /// The group of an SR on it, which goes first: one that was never finished, or that the caller gives up.
    group: Option<Group>,
    /// It holds something that the caller gives up.
    is_marked: bool,
}

impl Claim {
    /// Looks at a device; nothing is changed. With `force` what it holds may be destroyed, unless it is in use.
    ///
    /// # Errors
    /// 91 no such device, or it holds something; 60 too small; 42 an SR; `SR_DEVICE_IN_USE`.
    pub(super) fn check(path: &Path, force: bool) -> Result<Self, ApiError> {
        let device = Device::open(path)?;
        if device.size < SIZE_MIN {
            let text = format!("{} has {} bytes, an SR needs {SIZE_MIN}", path.display(), device.size);
            return Err(errors::fail(60, text));
        }
        let signature = device.signature()?;
        let (mut group, mut is_marked) = (None, false);
        let refused = |number: u16, what: &str| {
            Err(errors::fail(number, format_args!("{} {what}: {NEXT}", path.display())))
        };
        match signature.kind() {
            None => {}
            Some("LVM2_member") => match owner(path)? {
                Owner::Unclaimed => {}
                Owner::Sr(sr) => {
                    let found = Group::of(sr).known(&[])?;
                    let is_open =
                        || found.list().is_ok_and(|listed| listed.volumes.values().any(|one| one.is_open));
                    if !is_unfinished(&found) {
                        if is_open() {
                            return Err(errors::sr_in_use(format!(
                                "{} holds SR {sr}, which is in use",
                                path.display()
                            )));
                        }
                        if !force {
                            return refused(42, &format!("holds SR {sr}"));
                        }
                    }
                    group = Some(found);
                }
                Owner::Group(name) => {
                    device.check_free()?;
                    if !force {
                        return refused(91, &format!("belongs to volume group {name}"));
                    }
                    is_marked = true;
                }
                Owner::Unknown => {
                    device.check_free()?;
                    if !force {
                        return refused(91, "belongs to a volume group whose other devices are not here");
                    }
                    is_marked = true;
                }
            },
            Some(kind) => {
                device.check_free()?;
                if !force {
                    let name = signature.label().map(|label| format!(" '{label}'")).unwrap_or_default();
                    return refused(91, &format!("holds {kind}{name}"));
                }
                is_marked = true;
            }
        }
        // The volumes of a group that goes hold it until then.
        if group.is_none() {
            device.check_free()?;
        }
        Ok(Self { device, group, is_marked })
    }

    /// Makes it as good as empty.
    pub(super) fn clear(&self) -> Result<(), ApiError> {
        let path = self.device.path.to_string_lossy();
        // Another device of the same group may have taken it away already.
        if let Some(group) = self.group.as_ref().filter(|group| group.exists()) {
            tracing::info!("what was left of {} on {path} is removed", group.name);
            group.erase(|| ())?;
        }
        if self.is_marked {
            command::run_well("wipefs", &["-a", "-f", "-q", &path], TIMEOUT)
                .map_err(|error| errors::fail(54, format_args!("cannot wipe {path}: {error}")))?;
        }
        self.device.check_free()
    }
}
