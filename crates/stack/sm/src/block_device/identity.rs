//! What a device is known by when its name changes.
//!
//! | device | identity | source |
//! |---|---|---|
//! | partition | `partuuid-...` | the partition table of its disk, read here |
//! | software RAID | `md-...` | the array's UUID, from sysfs or a member |
//! | device-mapper | `dm-...` | the UUID that LVM or multipath gave it, else its name |
//! | loop | `file-PATH` with `@OFFSET` | its file |
//! | disk | `wwid-...`, `serial-...` | sysfs; a link of udev by another name (`id-...`) |
//! | disk without any of these | `place-...` | where it is plugged: another disk there is taken for it |
//!
//! What lies on a whole disk is never asked: that is the guest's, which may write any UUID there.

use std::fmt;
use std::fs;
use std::path::Path;

use super::host::{BlockDevice, Host, Kind};
use super::marks;

/// What a device is known by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(String);

/// Bytes of one, at most about that many.
const LEN_MAX: usize = 400;

impl Identity {
    fn new(kind: &str, value: &str) -> Self {
        let mut text = format!("{kind}-");
        let mut is_gap = false;
        // Serial numbers are filled up with blanks.
        for c in value.trim().chars() {
            let is_blank = c.is_whitespace() || c.is_control() || c == ',';
            if !(is_blank && is_gap) && text.len() < LEN_MAX {
                text.push(if is_blank { '_' } else { c });
            }
            is_gap = is_blank;
        }
        Self(text)
    }

    /// As it is written in `device_config:devices`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether another device at the same place would be taken for this one.
    pub fn is_of_place(&self) -> bool {
        self.0.starts_with("place-")
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a device is known by.
pub fn identity(host: &Host, device: &BlockDevice) -> Identity {
    if let Some(number) = device.partition {
        return of_partition(host, device, number);
    }
    let text = |file: &str| Host::text(&device.place.join(file));
    let found = match device.kind {
        Kind::Mapped => text("dm/uuid").or_else(|| text("dm/name")).map(|value| Identity::new("dm", &value)),
        Kind::Raid => raid(host, device).map(|value| Identity::new("md", &value)),
        Kind::Loop => text("loop/backing_file").map(|file| {
            let offset = text("loop/offset").filter(|offset| offset != "0");
            let offset = offset.map(|offset| format!("@{offset}")).unwrap_or_default();
            Identity::new("file", &format!("{file}{offset}"))
        }),
        _ => of_disk(host, device),
    };
    found.or_else(|| link(host, device)).unwrap_or_else(|| place(host, device))
}

fn of_partition(host: &Host, device: &BlockDevice, number: u32) -> Identity {
    let disk = host.named(&device.disk());
    let table = disk.as_ref().and_then(|disk| {
        // Entries of GPT begin behind the header, whatever a sector has.
        let bytes = host.read(disk, 0, marks::TABLE_LEN).ok()?;
        marks::partition_uuid(&bytes, disk.sector_len as usize, number)
    });
    match (table, disk) {
        (Some(uuid), _) => Identity::new("partuuid", &uuid),
        (None, Some(disk)) => Identity(format!("{}-part{number}", identity(host, &disk))),
        (None, None) => place(host, device),
    }
}

fn raid(host: &Host, device: &BlockDevice) -> Option<String> {
    if let Some(uuid) = Host::text(&device.place.join("md/uuid")) {
        return Some(uuid);
    }
    let members = fs::read_dir(device.place.join("slaves")).ok()?;
    members.flatten().find_map(|member| {
        let member = host.named(&member.file_name().to_string_lossy())?;
        let (head, tail) = ends(host, &member)?;
        marks::raid_member(&head, &tail).map(|uuid| uuid.to_string())
    })
}

/// The first and the last bytes of a device, where marks lie.
pub(super) fn ends(host: &Host, device: &BlockDevice) -> Option<(Vec<u8>, Vec<u8>)> {
    let head = host.read(device, 0, marks::HEAD_LEN).ok()?;
    // A multiple of the sectors in which superblocks lie.
    let end = device.size / 4096 * 4096;
    let tail = host.read(device, end.saturating_sub(marks::TAIL_LEN as u64), marks::TAIL_LEN).ok()?;
    Some((head, tail))
}

fn of_disk(host: &Host, device: &BlockDevice) -> Option<Identity> {
    let text = |file: &str| Host::text(&device.place.join(file));
    if let Some(wwid) = text("wwid").or_else(|| text("device/wwid")) {
        return Some(Identity::new("wwid", &wwid));
    }
    if let Some(id) = text("device/cid") {
        return Some(Identity::new("serial", &id));
    }
    let model = text("device/model").map(|model| format!("{model}_")).unwrap_or_default();
    let serial =
        text("serial").or_else(|| text("device/serial")).or_else(|| usb_serial(host, &device.place))?;
    Some(Identity::new("serial", &format!("{model}{serial}")))
}

/// The serial number of the USB device that a disk is in.
fn usb_serial(host: &Host, place: &Path) -> Option<String> {
    let top = host.path("sys");
    let mut above = place.ancestors().take_while(|above| *above != top);
    let device = above.find(|above| above.join("idVendor").is_file())?;
    Host::text(&device.join("serial"))
}

/// Links to a device that udev keeps in `/dev/disk`, the more telling ones first.
pub fn links(host: &Host, device: &BlockDevice) -> Vec<std::path::PathBuf> {
    let node = fs::canonicalize(&device.node).unwrap_or_else(|_| device.node.clone());
    let mut found = Vec::new();
    for directory in ["by-id", "by-partuuid", "by-path"] {
        let entries = fs::read_dir(host.path("dev/disk").join(directory));
        let mut here: Vec<_> =
            entries.map(|entries| entries.flatten().map(|entry| entry.path()).collect()).unwrap_or_default();
        here.retain(|link: &std::path::PathBuf| fs::canonicalize(link).is_ok_and(|to| to == node));
        here.sort();
        found.append(&mut here);
    }
    found
}

/// The name that a link of udev has for a disk whose sysfs says nothing.
fn link(host: &Host, device: &BlockDevice) -> Option<Identity> {
    let found = links(host, device).into_iter().next()?;
    let directory = found.parent()?.file_name()?.to_string_lossy().into_owned();
    let kind = if directory == "by-path" { "place" } else { "id" };
    Some(Identity::new(kind, &found.file_name()?.to_string_lossy()))
}

/// Where it is plugged, and its size, so that not any disk there is taken for it.
fn place(host: &Host, device: &BlockDevice) -> Identity {
    let top = fs::canonicalize(host.path("sys")).unwrap_or_default();
    let place = device.place.strip_prefix(&top).unwrap_or(&device.place);
    let place = if device.partition.is_some() { Some(place) } else { place.parent() };
    let place = place.unwrap_or(Path::new("")).to_string_lossy().replace('/', ":");
    Identity::new("place", &format!("{place}:{}", device.size))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use uuid::Uuid;

    use super::super::host::tests::Made;
    use super::super::marks::tests::gpt_table;
    use super::*;

    fn of(made: &Made, name: &str) -> String {
        identity(&made.host, &made.device(name)).to_string()
    }

    #[test]
    fn disks_are_known_by_what_they_say_of_themselves() {
        let made = Made::new();
        made.add("pci/host0/block/sda", "8:0", &[("device/wwid", "t10.ATA     Disk   S3Z  ")]);
        made.add("pci/nvme0/nvme0n1", "259:0", &[("wwid", "eui.0025")]);
        made.add("pci/virtio1/block/vda", "254:0", &[("serial", "a")]);
        made.add("pci/host9/usb1/block/sdb", "8:16", &[("device/model", "Stick")]);
        fs::write(made.root().join("sys/devices/pci/host9/usb1/idVendor"), "1").unwrap();
        fs::write(made.root().join("sys/devices/pci/host9/usb1/serial"), "77\n").unwrap();
        assert_eq!(of(&made, "sda"), "wwid-t10.ATA_Disk_S3Z");
        assert_eq!((of(&made, "nvme0n1"), of(&made, "vda")), ("wwid-eui.0025".into(), "serial-a".into()));
        assert_eq!(of(&made, "sdb"), "serial-Stick_77");
    }

    #[test]
    fn built_devices_are_known_by_what_they_are_built_of() {
        let made = Made::new();
        let file = [("loop/backing_file", "/srv/disk one"), ("loop/offset", "0")];
        made.add("virtual/block/loop0", "7:0", &file);
        made.add("virtual/block/loop1", "7:1", &[("loop/backing_file", "/srv/x"), ("loop/offset", "512")]);
        made.add("virtual/block/dm-0", "253:0", &[("dm/uuid", "LVM-abc"), ("dm/name", "g-v")]);
        made.add("virtual/block/dm-1", "253:1", &[("dm/uuid", ""), ("dm/name", "mine")]);
        assert_eq!(
            (of(&made, "loop0"), of(&made, "loop1")),
            ("file-/srv/disk_one".into(), "file-/srv/x@512".into())
        );
        assert_eq!((of(&made, "dm-0"), of(&made, "dm-1")), ("dm-LVM-abc".into(), "dm-mine".into()));
        // The array's UUID comes from a member.
        made.add("pci/block/sda", "8:0", &[("size", "64")]);
        made.add("virtual/block/md0", "9:0", &[("md/level", "raid1"), ("slaves/sda/x", "")]);
        let mut bytes = vec![0; 32 << 10];
        bytes[4096..4100].copy_from_slice(&0xa92b_4efc_u32.to_le_bytes());
        bytes[4100] = 1;
        bytes[4112..4128].fill(3);
        fs::write(made.root().join("dev/sda"), bytes).unwrap();
        assert_eq!(of(&made, "md0"), format!("md-{}", Uuid::from_bytes([3; 16])));
    }

    #[test]
    fn a_partition_is_known_by_the_table_of_its_disk() {
        let made = Made::new();
        let uuid = Uuid::from_u128(77);
        made.add("virtual/block/loop0", "7:0", &[("loop/backing_file", "/srv/x")]);
        made.add("virtual/block/loop0/loop0p1", "259:1", &[("partition", "1")]);
        made.add("virtual/block/loop0/loop0p2", "259:2", &[("partition", "2")]);
        fs::write(made.root().join("dev/loop0"), gpt_table(512, &[uuid])).unwrap();
        assert_eq!(of(&made, "loop0p1"), format!("partuuid-{uuid}"));
        assert_eq!(of(&made, "loop0p2"), "file-/srv/x-part2", "one that the table does not have");
    }

    #[test]
    fn links_of_udev_come_in_where_sysfs_says_nothing() {
        let made = Made::new();
        made.add("pci/0000:1/block/sda", "8:0", &[]);
        assert_eq!(of(&made, "sda"), "place-devices:pci:0000:1:block:1048576");
        assert!(identity(&made.host, &made.device("sda")).is_of_place());
        let link = |directory: &str, name: &str| {
            let directory = made.root().join("dev/disk").join(directory);
            fs::create_dir_all(&directory).unwrap();
            symlink("../../sda", directory.join(name)).unwrap();
        };
        link("by-path", "pci-1");
        assert_eq!(of(&made, "sda"), "place-pci-1");
        link("by-id", "ata-Disk_1");
        assert_eq!(of(&made, "sda"), "id-ata-Disk_1");
        assert_eq!(links(&made.host, &made.device("sda")).len(), 2);
    }
}
