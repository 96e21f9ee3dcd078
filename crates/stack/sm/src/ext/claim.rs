//! Whether a device may become an SR, and what of an earlier one is cleared away before.

use std::path::Path;
use std::time::Duration;

use tapio_types::ApiError;
use uuid::Uuid;

use super::device::{Device, Signature};
use super::lvm::{self, Owner};
use super::{LABEL, SIZE_MIN};
use crate::command;
use crate::errors;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A device that may become an SR.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) device: Device,
    /// The group of an SR on it, which goes first: one that was never finished, or that the caller gives up.
    group: Option<Uuid>,
    /// It holds something that the caller gives up.
    is_marked: bool,
}

impl Claim {
    /// Looks at a device; nothing is changed. With `force` what it holds may be destroyed, unless it is in use.
    ///
    /// # Errors
    /// 91 no such device, or it holds something; 60 too small; 42 an SR; `SR_DEVICE_IN_USE`.
    pub(super) fn check(path: &Path, force: bool, has_lvm: bool) -> Result<Self, ApiError> {
        let device = Device::open(path)?;
        if device.size < SIZE_MIN {
            let text = format!("{} has {} bytes, an SR needs {SIZE_MIN}", path.display(), device.size);
            return Err(errors::fail(60, text));
        }
        let signature = device.signature()?;
        let (mut group, mut is_marked) = (None, false);
        match signature.kind() {
            None => {}
            Some("LVM2_member") if has_lvm => match lvm::owner(path)? {
                Owner::Unclaimed => {}
                Owner::Sr(sr) => {
                    if !lvm::is_unfinished(sr)? && !force {
                        let text = format!("{} holds SR {sr}: {NEXT}", path.display());
                        return Err(errors::fail(42, text));
                    }
                    group = Some(sr);
                }
                owner => {
                    device.check_free()?;
                    if !force {
                        let text = match owner {
                            Owner::Group(name) => format!("belongs to volume group {name}"),
                            _ => "belongs to a volume group whose other devices are not here".into(),
                        };
                        return Err(errors::fail(91, format_args!("{} {text}: {NEXT}", path.display())));
                    }
                    is_marked = true;
                }
            },
            Some(kind) => {
                device.check_free()?;
                if !force {
                    return Err(foreign(path, kind, &signature));
                }
                is_marked = true;
            }
        }
        // The volume of a group that goes holds it until then.
        if group.is_none() {
            device.check_free()?;
        }
        Ok(Self { device, group, is_marked })
    }

    /// Makes it as good as empty.
    pub(super) fn clear(&self) -> Result<(), ApiError> {
        let path = self.device.path.to_string_lossy();
        // Another device of the same group may have taken it away already.
        if let Some(sr) = self.group.filter(|sr| lvm::has_group(*sr)) {
            tracing::info!("what was left of SR {sr} on {path} is removed");
            lvm::remove(sr, || ())?;
        }
        if self.is_marked {
            command::run_well("wipefs", &["-a", "-f", "-q", &path], TIMEOUT)
                .map_err(|error| errors::fail(54, format_args!("cannot wipe {path}: {error}")))?;
        }
        self.device.check_free()
    }
}

const NEXT: &str = "introduce it if it is an SR, or take device_config:force=true to overwrite it";

fn foreign(path: &Path, kind: &str, signature: &Signature) -> ApiError {
    let name = signature.label().map(|label| format!(" '{label}'")).unwrap_or_default();
    let text = format!("{} holds {kind}{name}: {NEXT}", path.display());
    if signature.label() == Some(LABEL) { errors::fail(42, text) } else { errors::fail(91, text) }
}
