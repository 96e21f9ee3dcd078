//! Where the emulated CD drives of a VM are.

use std::collections::BTreeMap;

use super::uefi;
use crate::traits::{DiskSpec, VmSpec};

/// Drives of the two channels of an IDE controller.
const IDE_MAX: u8 = 4;

/// The rank of drives from which a VM does not boot, behind all others. OVMF switches an IDE controller on only if it
/// may have to boot from it, and a guest's kernel leaves one alone that is off.
const LAST: u32 = 1 << 20;

/// What the drives of a VM are connected to: `VM.platform:cd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bus {
    /// The IDE controller that every `pc` has: four drives, which are there at the start of the VM or never.
    Ide,
    /// A SCSI controller of virtio: a drive in every position, also while the VM runs.
    Scsi,
}

impl Bus {
    /// What a platform says.
    ///
    /// # Errors
    /// A sentence.
    pub(super) fn of(spec: &VmSpec) -> Result<Self, String> {
        match spec.platform.get("cd").map(String::as_str) {
            // OVMF hands over to a kernel of the host before it looks at any IDE controller: see `LAST`.
            None | Some("") if uefi::is_wanted(spec) && spec.kernel.is_some() => Ok(Self::Scsi),
            None | Some("" | "ide") => Ok(Self::Ide),
            Some("scsi") => Ok(Self::Scsi),
            Some(other) => Err(format!("platform:cd is {other:?}: ide and scsi are possible")),
        }
    }
}

/// The places of drives on the IDE controller, by position: each its own if it has one, others what is free.
///
/// # Errors
/// A sentence: there are too many.
pub(super) fn ide_units(drives: &[DiskSpec]) -> Result<BTreeMap<u8, u8>, String> {
    let mut units: BTreeMap<u8, u8> = drives
        .iter()
        .map(|drive| drive.position)
        .filter(|position| *position < IDE_MAX)
        .map(|position| (position, position))
        .collect();
    for drive in drives.iter().filter(|drive| drive.position >= IDE_MAX) {
        let free = (0..IDE_MAX).rev().find(|unit| !units.values().any(|taken| taken == unit));
        let free = free.ok_or_else(|| {
            format!(
                "it has {} CD drives and an IDE controller has {IDE_MAX}: remove some, or set platform:cd to scsi",
                drives.len()
            )
        })?;
        units.insert(drive.position, free);
    }
    Ok(units)
}

/// The options of a drive, as `-device` and `device_add` take them; `rank` is its place among what boots.
///
/// # Errors
/// A sentence: there is no such drive.
pub(super) fn options(
    spec: &VmSpec,
    drive: &DiskSpec,
    rank: Option<u32>,
) -> Result<Vec<(&'static str, String)>, String> {
    let id = ("id", format!("d{}", drive.position));
    let bus = Bus::of(spec)?;
    let needs_rank = bus == Bus::Ide && uefi::is_wanted(spec);
    let rank = rank.or(needs_rank.then(|| LAST + u32::from(drive.position)));
    let mut options = match bus {
        Bus::Ide => {
            let units = ide_units(&spec.drives)?;
            let unit = units.get(&drive.position).copied().ok_or("the VM was started without this drive")?;
            vec![
                ("driver", "ide-cd".into()),
                id,
                ("bus", format!("ide.{}", unit / 2)),
                ("unit", (unit % 2).to_string()),
            ]
        }
        Bus::Scsi => vec![
            ("driver", "scsi-cd".into()),
            id,
            ("bus", "scsi.0".into()),
            ("channel", "0".into()),
            ("scsi-id", drive.position.to_string()),
            ("lun", "0".into()),
        ],
    };
    if let Some(rank) = rank {
        options.push(("bootindex", rank.to_string()));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::traits::FIRMWARE;

    fn drive(position: u8) -> DiskSpec {
        DiskSpec { vbd: Uuid::new_v4(), position, read_only: true, is_cd: true, is_bootable: false }
    }

    #[test]
    fn uefi_looks_at_every_ide_drive_in_the_end() {
        let of = |platform: &[(&str, &str)]| VmSpec {
            uuid: Uuid::new_v4(),
            name: String::new(),
            memory: 1 << 30,
            vcpus: 1,
            kernel: None,
            ramdisk: None,
            kernel_args: String::new(),
            platform: platform.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            drives: vec![drive(3)],
        };
        let rank = |platform: &[(&str, &str)], rank| {
            let spec = of(platform);
            let options = options(&spec, &spec.drives[0], rank).unwrap();
            options.into_iter().find(|(key, _)| *key == "bootindex").map(|(_, value)| value)
        };
        let uefi = (FIRMWARE, "uefi");
        assert_eq!((rank(&[], None), rank(&[], Some(4)).as_deref()), (None, Some("4")));
        assert_eq!(rank(&[uefi], None).as_deref(), Some("1048579"));
        assert_eq!(rank(&[uefi], Some(4)).as_deref(), Some("4"));
        assert_eq!(rank(&[uefi, ("cd", "scsi")], None), None);
        let spec = |firmware: &str, kernel: Option<&str>| VmSpec {
            platform: [(FIRMWARE.to_owned(), firmware.to_owned())].into(),
            kernel: kernel.map(Into::into),
            ..of(&[])
        };
        let bus = |firmware, kernel| Bus::of(&spec(firmware, kernel)).unwrap();
        assert_eq!((bus("uefi", Some("/boot/k")), bus("uefi", None)), (Bus::Scsi, Bus::Ide));
        assert_eq!(bus("bios", Some("/boot/k")), Bus::Ide);
    }

    #[test]
    fn drives_have_their_own_place_or_one_that_is_free() {
        let of = |positions: &[u8]| ide_units(&positions.iter().map(|at| drive(*at)).collect::<Vec<_>>());
        assert_eq!(of(&[3]), Ok(BTreeMap::from([(3, 3)])));
        assert_eq!(of(&[9, 3, 0]), Ok(BTreeMap::from([(0, 0), (3, 3), (9, 2)])));
        assert_eq!(of(&[200, 201, 202, 203]).unwrap().len(), 4);
        assert!(of(&[0, 1, 2, 3, 4]).unwrap_err().contains("platform:cd"));
    }
}
