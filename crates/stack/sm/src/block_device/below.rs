//! The disks that a device is made of.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::host::{BlockDevice, Host, Kind};

/// Devices on one another are followed so far.
const DEPTH_MAX: usize = 16;

/// A device on the way from another one down to its disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its name; that of the disk where it is a partition.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Whether nothing is below it: requests meet their scheduler here.
    pub is_disk: bool,
    /// Whether it is below the file system of this host that a loop device's file lies in.
    pub is_below_file: bool,
}

/// A device and everything below it, each once.
pub fn layers(host: &Host, device: &BlockDevice) -> Vec<Layer> {
    let mut found = Vec::new();
    go_down(host, device, false, 0, &mut found);
    found
}

fn go_down(host: &Host, device: &BlockDevice, is_below_file: bool, depth: usize, found: &mut Vec<Layer>) {
    let name = device.disk();
    if depth > DEPTH_MAX || found.iter().any(|known| known.name == name) {
        return;
    }
    let members = fs::read_dir(device.disk_place.join("slaves"));
    let members: Vec<_> = members
        .map(|members| {
            members.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    let file_system = (device.kind == Kind::Loop).then(|| below_file(host, device)).flatten();
    let is_disk = members.is_empty() && device.kind != Kind::Loop;
    found.push(Layer { name, kind: device.kind, is_disk, is_below_file });
    for member in members.iter().filter_map(|member| host.named(member)) {
        go_down(host, &member, is_below_file, depth + 1, found);
    }
    if let Some(below) = file_system {
        go_down(host, &below, true, depth + 1, found);
    }
}

/// The device of the file system that a loop device's file lies in.
fn below_file(host: &Host, device: &BlockDevice) -> Option<BlockDevice> {
    let file = Host::text(&device.disk_place.join("loop/backing_file"))?;
    let dev = fs::metadata(Path::new(&file)).ok()?.dev();
    host.numbered((libc::major(dev), libc::minor(dev)))
}

#[cfg(test)]
mod tests {
    use super::super::host::tests::Made;
    use super::*;

    #[test]
    fn a_volume_leads_to_the_disks_of_its_array() {
        let made = Made::new();
        made.add("pci/block/sda", "8:0", &[("queue/rotational", "1")]);
        made.add("pci/block/sda/sda2", "8:2", &[("partition", "2")]);
        made.add("pci/block/sdb", "8:16", &[]);
        made.add("virtual/block/md0", "9:0", &[("md/x", ""), ("slaves/sda2/x", ""), ("slaves/sdb/x", "")]);
        made.add("virtual/block/dm-0", "253:0", &[("dm/name", "v"), ("slaves/md0/x", "")]);
        let found = layers(&made.host, &made.device("dm-0"));
        let names: Vec<_> = found.iter().map(|layer| (layer.name.as_str(), layer.is_disk)).collect();
        assert_eq!(names[..2], [("dm-0", false), ("md0", false)]);
        assert!(names.contains(&("sda", true)) && names.contains(&("sdb", true)) && names.len() == 4);
    }

    #[test]
    fn a_loop_device_leads_to_the_disk_that_its_file_lies_on() {
        let made = Made::new();
        let file = made.root().join("image");
        fs::write(&file, "x").unwrap();
        let dev = fs::metadata(&file).unwrap().dev();
        let numbers = format!("{}:{}", libc::major(dev), libc::minor(dev));
        made.add("pci/block/sda", &numbers, &[]);
        made.add("virtual/block/loop0", "7:0", &[("loop/backing_file", &file.display().to_string())]);
        let found = layers(&made.host, &made.device("loop0"));
        let names: Vec<_> = found.iter().map(|layer| (layer.name.as_str(), layer.is_below_file)).collect();
        assert_eq!(names, [("loop0", false), ("sda", true)]);
        assert!(!found[0].is_disk && found[1].is_disk);
    }
}
