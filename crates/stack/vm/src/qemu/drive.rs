//! Emulated CD drives: devices that are there whether they have a medium or not. The guest sees its medium change as
//! it would see a person change it.
//!
//! A medium is an NBD export of a disk process, which the emulator reads: a drive has no vhost-user back end.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tapio_types::ApiError;

use super::cd::{Bus, options};
use super::{DriverVm, PLUG_LIMIT, command, device, soon};
use crate::errors::{attach_timeout, failed, illegal_device, tray_locked};
use crate::qemu::qmp::QmpError;
use crate::traits::{DiskSpec, PluggedDisk};

/// How long a guest may take to open a drive that it has locked.
const UNLOCK_LIMIT: Duration = Duration::from_secs(10);

/// How often the drive is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(50);

/// How long a guest's read waits for a disk process that is replaced, in seconds.
const RECONNECT_S: u32 = 120;

/// What is known of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Drive {
    is_there: bool,
    is_open: bool,
    is_locked: bool,
    /// The node that its medium is.
    medium: Option<String>,
}

fn medium(position: u8) -> String {
    format!("m{position}")
}

/// Finds a drive in the answer to `query-block`.
fn drive_in(blocks: &Value, id: &str) -> Drive {
    let is_it = |block: &&Value| {
        let name = block["qdev"].as_str().unwrap_or_default();
        name == id || name.strip_suffix(id).is_some_and(|before| before.ends_with('/'))
    };
    blocks.as_array().into_iter().flatten().find(is_it).map_or_else(Drive::default, |block| Drive {
        is_there: true,
        is_open: block["tray_open"].as_bool().unwrap_or(false),
        is_locked: block["locked"].as_bool().unwrap_or(false),
        medium: block["inserted"]["node-name"].as_str().map(str::to_owned),
    })
}

impl DriverVm {
    fn drive(&self, position: u8) -> Result<Drive, ApiError> {
        Ok(drive_in(&self.run("query-block", json!({}))?, &device(position)))
    }

    /// Whether a medium of ours is in the drive.
    pub(super) fn has_medium(&self, position: u8) -> Result<bool, ApiError> {
        Ok(self.drive(position)?.medium == Some(medium(position)))
    }

    /// Makes the drive if it is not there.
    pub(super) fn make_drive(&self, disk: &DiskSpec) -> Result<(), ApiError> {
        if self.drive(disk.position)?.is_there {
            return Ok(());
        }
        let spec = self.saved().spec;
        let bad = |why: String| illegal_device(disk.vbd, disk.position, why);
        if Bus::of(&spec).map_err(bad)? == Bus::Ide {
            let why = "an IDE drive cannot come while the VM runs: shut the VM down and start it again, or set \
                       platform:cd to scsi before the start";
            return Err(bad(why.into()));
        }
        let rank = command::boot_index(&spec, disk);
        let options = options(&spec, disk, rank).map_err(bad)?;
        let mut asked = serde_json::Map::new();
        for (key, value) in options {
            let number = value.parse::<u64>().ok().filter(|_| key != "driver");
            asked.insert(key.into(), number.map_or(Value::String(value), Value::from));
        }
        self.run("device_add", Value::Object(asked)).map(drop)
    }

    /// Puts the export at `socket` into the drive. It is there already when a daemon died on the way.
    pub(super) fn insert(&self, disk: &PluggedDisk, socket: &Path) -> Result<(), ApiError> {
        let position = disk.spec.position;
        self.make_drive(&disk.spec)?;
        let (id, node) = (device(position), medium(position));
        if self.has_medium(position)? {
            return Ok(());
        }
        let (qmp, until) = (self.qmp()?, Instant::now() + PLUG_LIMIT);
        let told = |error: QmpError| match error {
            QmpError::Late => {
                attach_timeout(disk.spec.vbd, "the emulator has not answered: the disk's process may hang")
            }
            other => {
                failed(self.vm, format!("the medium of drive {position} is refused by the emulator"), other)
            }
        };
        // Left by a daemon that died before it was put in, or by an insert that failed.
        let _ = qmp.run("blockdev-del", json!({ "node-name": node }), until);
        let export = json!({
            "driver": "nbd", "node-name": node, "read-only": true, "reconnect-delay": RECONNECT_S,
            "server": { "type": "unix", "path": socket },
        });
        qmp.run("blockdev-add", export, until).map_err(told)?;
        let put = [
            ("blockdev-open-tray", json!({ "id": id, "force": true })),
            ("blockdev-remove-medium", json!({ "id": id })),
            ("blockdev-insert-medium", json!({ "id": id, "node-name": node })),
            ("blockdev-close-tray", json!({ "id": id })),
        ];
        let put =
            put.into_iter().try_for_each(|(command, arguments)| qmp.run(command, arguments, until).map(drop));
        put.map_err(|error| {
            let _ = self.take_medium(&disk.spec, true, soon());
            told(error)
        })
    }

    /// Takes the medium out, and leaves the drive empty and closed. With `force` a lock of the guest's is broken.
    pub(super) fn take_medium(&self, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let position = disk.position;
        let (id, node) = (device(position), medium(position));
        let Ok(qmp) = self.qmp() else { return Ok(()) };
        let run = |command: &str, arguments: Value| match qmp.run(command, arguments, until.max(soon())) {
            Err(QmpError::Closed) => Ok(()),
            Err(error) => Err(failed(
                self.vm,
                format!("drive {position} does not give its medium up ({command})"),
                error,
            )),
            Ok(_) => Ok(()),
        };
        let before = self.drive(position)?;
        if before.is_there && before.medium.is_some() {
            if before.is_locked && !before.is_open && !force {
                // The guest is asked, as by the button of the drive.
                let _ = qmp.run("blockdev-open-tray", json!({ "id": id, "force": false }), until);
                let limit = until.min(Instant::now() + UNLOCK_LIMIT);
                while !self.drive(position)?.is_open {
                    if Instant::now() >= limit {
                        let why = "the guest has locked the drive and does not open it: unmount its medium in the guest";
                        return Err(tray_locked(disk.vbd, why));
                    }
                    std::thread::sleep(LOOK);
                }
            } else {
                run("blockdev-open-tray", json!({ "id": id, "force": true }))?;
            }
            run("blockdev-remove-medium", json!({ "id": id }))?;
            run("blockdev-close-tray", json!({ "id": id }))?;
        }
        // Not there if it was never put in.
        let _ = qmp.run("blockdev-del", json!({ "node-name": node }), until.max(soon()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_are_found_by_their_name() {
        let blocks = json!([
            {"device": "", "qdev": "d31", "tray_open": false, "locked": false},
            {"device": "", "qdev": "/machine/peripheral/d3", "tray_open": true, "locked": true,
                "inserted": {"node-name": "m3"}}]);
        let wanted = Drive { is_there: true, is_open: true, is_locked: true, medium: Some("m3".into()) };
        assert_eq!(drive_in(&blocks, "d3"), wanted);
        assert_eq!(drive_in(&blocks, "d31"), Drive { is_there: true, ..Drive::default() });
        assert_eq!(drive_in(&blocks, "d1"), Drive::default());
    }
}
