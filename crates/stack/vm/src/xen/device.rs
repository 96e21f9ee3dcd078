//! A disk of a domain as xenstore has it: two directories, one of each side.

use std::path::Path;

use crate::traits::{DiskSpec, PluggedDisk};

/// The back end's name, as XenServer's toolstack and tapback know it.
pub(super) const BACKEND: &str = "vbd3";

/// The domain of the back end and the toolstack.
pub(super) const DOM0: u32 = 0;

/// Partitions of an `xvd` device, by which its first sixteen are numbered.
const DISKS_OF_MAJOR: u32 = 16;

/// Major number of `xvd` devices.
const MAJOR: u32 = 202;

/// States of both sides of a device (`xen/include/public/io/xenbus.h`).
pub(super) mod state {
    pub const INITIALISING: u32 = 1;
    pub const CONNECTED: u32 = 4;
    pub const CLOSING: u32 = 5;
    pub const CLOSED: u32 = 6;
}

/// The number of a disk's device (xen-vbd-interface(7)): `xvda` to `xvdp` by major and minor number, others in the
/// extended form.
pub(super) const fn number(position: u8) -> u32 {
    let disk = position as u32;
    if disk < DISKS_OF_MAJOR { (MAJOR << 8) | (disk << 4) } else { (1 << 28) | (disk << 8) }
}

/// What the guest calls it, where it goes by the number: `xvda`, `xvdaa`.
pub(super) fn name(position: u8) -> String {
    let mut letters = Vec::new();
    let mut rest = u32::from(position) + 1;
    while rest > 0 {
        rest -= 1;
        letters.push(char::from(b'a' + (rest % 26) as u8));
        rest /= 26;
    }
    letters.push('d');
    letters.push('v');
    letters.push('x');
    letters.iter().rev().collect()
}

/// Where the two directories of a domain's disk are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// The domain.
    pub domid: u32,
    /// The device.
    pub number: u32,
}

impl Device {
    pub(super) fn of(domid: u32, position: u8) -> Self {
        Self { domid, number: number(position) }
    }

    /// Where the back ends of a domain are.
    pub(super) fn backends(domid: u32) -> String {
        format!("/local/domain/{DOM0}/backend/{BACKEND}/{domid}")
    }

    pub(super) fn backend(&self) -> String {
        format!("{}/{}", Self::backends(self.domid), self.number)
    }

    pub(super) fn frontend(&self) -> String {
        format!("/local/domain/{}/device/vbd/{}", self.domid, self.number)
    }

    /// Where a guest says why it does not do something with the device.
    pub(super) fn complaint(&self) -> String {
        format!("/local/domain/{}/error/device/vbd/{}/error", self.domid, self.number)
    }

    /// The keys of the back end's directory, apart from its state. `VBD` and `VDI` are those of the toolstack.
    pub(super) fn backend_keys(&self, disk: &PluggedDisk, path: &Path) -> Vec<(&'static str, String)> {
        let flag = |is: bool| if is { "1" } else { "0" }.to_owned();
        let spec = &disk.spec;
        let path = path.display().to_string();
        let mut keys = vec![
            ("frontend", self.frontend()),
            ("frontend-id", self.domid.to_string()),
            ("online", flag(true)),
            ("params", path.clone()),
            ("physical-device-path", path),
            ("type", "phy".to_owned()),
            ("mode", if spec.read_only { "r" } else { "w" }.to_owned()),
            ("device-type", device_type(spec).to_owned()),
            ("dev", name(spec.position)),
            ("removable", flag(spec.is_cd)),
            ("bootable", flag(spec.is_bootable)),
            ("hotplug-status", "connected".to_owned()),
            ("polling-duration", disk.facts.polling_us.to_string()),
            ("polling-idle-threshold", disk.facts.polling_idle.to_string()),
            (VBD_KEY, spec.vbd.to_string()),
            ("sm-data/frontend-domid", self.domid.to_string()),
        ];
        // Empty rather than missing: one that was set before would stay.
        keys.push((RINGS_KEY, disk.facts.rings.text()));
        keys.extend(disk.facts.vdi.map(|vdi| ("sm-data/vdi-uuid", vdi.to_string())));
        keys
    }

    /// The keys of the front end's directory, apart from its state.
    pub(super) fn frontend_keys(&self, disk: &PluggedDisk) -> Vec<(&'static str, String)> {
        vec![
            ("backend", self.backend()),
            ("backend-id", DOM0.to_string()),
            ("virtual-device", self.number.to_string()),
            ("device-type", device_type(&disk.spec).to_owned()),
        ]
    }
}

/// Settings of rings as tapback reads them.
pub(super) const RINGS_KEY: &str = "tapio-rings";

/// Where a back end's directory says whose disk it is: another one in its place is told from it.
pub(super) const VBD_KEY: &str = "tapio-vbd";

const fn device_type(spec: &DiskSpec) -> &'static str {
    if spec.is_cd { "cdrom" } else { "disk" }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use tapio_types::{Movement, RingTuning};
    use uuid::Uuid;

    use super::*;
    use crate::traits::{DiskFacts, FrontSpec};

    #[test]
    fn all_255_places_have_numbers_and_names_of_their_own() {
        // Position, number, name: from xen-vbd-interface(7) by hand.
        for (position, wanted, called) in [
            (0, 51712, "xvda"),
            (1, 51728, "xvdb"),
            (2, 51744, "xvdc"),
            (3, 51760, "xvdd"),
            (15, 51952, "xvdp"),
            (16, 268_439_552, "xvdq"),
            (25, 268_441_856, "xvdz"),
            (26, 268_442_112, "xvdaa"),
            (51, 268_448_512, "xvdaz"),
            (52, 268_448_768, "xvdba"),
            (254, 268_500_480, "xvdiu"),
        ] {
            assert_eq!((number(position), name(position).as_str()), (wanted, called));
        }
        let all: BTreeSet<(u32, String)> = (0..=254).map(|at| (number(at), name(at))).collect();
        assert_eq!(all.len(), 255);
        for position in 0..=254_u8 {
            // As a guest takes it apart (Linux, drivers/block/xen-blkfront.c: `BLKIF_MINOR_EXT` and its like).
            let number = number(position);
            let disk = if number >> 28 == 1 { (number & 0x0fff_ffff) >> 8 } else { (number & 0xff) >> 4 };
            assert_eq!(disk, u32::from(position));
        }
    }

    #[test]
    fn a_disk_is_described_to_both_sides() {
        let vdi = Uuid::new_v4();
        let spec =
            DiskSpec { vbd: Uuid::new_v4(), position: 1, read_only: true, is_cd: true, is_bootable: true };
        let rings =
            RingTuning { order: Some(2), movement: Some(Movement::Persistent), ..RingTuning::default() };
        let facts = DiskFacts { vdi: Some(vdi), polling_us: 8_000, polling_idle: 50, rings };
        let disk = PluggedDisk { spec, front: FrontSpec::Xen, node: None, size: 1, facts };
        let device = Device::of(5, 1);
        assert_eq!(device.backend(), "/local/domain/0/backend/vbd3/5/51728");
        assert_eq!(device.frontend(), "/local/domain/5/device/vbd/51728");
        let back: BTreeMap<_, _> = device.backend_keys(&disk, Path::new("/run/nbd7.3")).into_iter().collect();
        let of = |key: &str| back[key].as_str();
        assert_eq!((of("frontend"), of("frontend-id")), ("/local/domain/5/device/vbd/51728", "5"));
        assert_eq!((of("physical-device-path"), of("params")), ("/run/nbd7.3", "/run/nbd7.3"));
        assert_eq!((of("mode"), of("device-type"), of("removable")), ("r", "cdrom", "1"));
        assert_eq!((of("polling-duration"), of("polling-idle-threshold")), ("8000", "50"));
        assert_eq!(of("tapio-rings"), "max-ring-page-order=2,data-movement=persistent");
        assert_eq!((of("dev"), of("online"), of("bootable")), ("xvdb", "1", "1"));
        assert_eq!(of("sm-data/vdi-uuid"), vdi.to_string());
        let front: BTreeMap<_, _> = device.frontend_keys(&disk).into_iter().collect();
        assert_eq!(front["backend"], device.backend());
        assert_eq!((front["backend-id"].as_str(), front["virtual-device"].as_str()), ("0", "51728"));
    }
}
