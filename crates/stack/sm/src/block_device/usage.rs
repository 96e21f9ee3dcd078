//! What uses a device on this host already.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::host::{BlockDevice, Host, Kind};
use super::identity::ends;
use super::marks;
use crate::mount;

/// What uses a device, or a partition of it, as a sentence's end; none where nothing does. With `marks` what LVM or
/// software RAID wrote on it counts as well, also while no volume and no array is active: not for a device that a guest
/// has had, which may have made a group of its own there.
pub fn usage(host: &Host, device: &BlockDevice, marks: bool) -> Option<String> {
    let of_one = |one: &BlockDevice| active(host, one).or_else(|| marks.then(|| marked(host, one)).flatten());
    if let Some(what) = of_one(device) {
        return Some(what);
    }
    if device.partition.is_none() {
        let parts =
            host.all().into_iter().filter(|part| part.partition.is_some() && part.disk() == device.name);
        for part in parts {
            if let Some(what) = of_one(&part) {
                return Some(format!("has partition {}, which {what}", part.name));
            }
        }
        return None;
    }
    // A disk that is used as a whole has no partitions that are anybody else's.
    let disk = host.named(&device.disk())?;
    active(host, &disk).map(|what| format!("is a partition of {}, which {what}", disk.name))
}

/// The kernel's own use.
fn active(host: &Host, device: &BlockDevice) -> Option<String> {
    let mounts = fs::read(host.path("proc/self/mountinfo")).unwrap_or_default();
    let mounted = mounts.split(|&byte| byte == b'\n').filter_map(mount::parse);
    for there in mounted {
        let is_named = there.source.starts_with('/')
            // Btrfs has numbers of its own, which are no device's.
            && there.device.0 == 0
            && host.at(Path::new(&there.source)).is_ok_and(|of| of.numbers == device.numbers);
        if there.device == device.numbers || is_named {
            return Some(format!("is mounted at {}: unmount it", there.point.display()));
        }
    }
    let swaps = fs::read_to_string(host.path("proc/swaps")).unwrap_or_default();
    let is_swap = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .any(|path| host.at(Path::new(path)).is_ok_and(|of| of.numbers == device.numbers));
    if is_swap {
        return Some("is swap of this host: see swapoff".into());
    }
    let holders = fs::read_dir(device.place.join("holders")).ok()?;
    let holder = holders.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).min()?;
    Some(match host.named(&holder) {
        Some(above) if above.kind == Kind::Mapped => {
            let name = Host::text(&above.place.join("dm/name")).unwrap_or_default();
            format!("is in use by '{name}' of device-mapper ({holder}): deactivate its volume group")
        }
        Some(above) if above.kind == Kind::Raid => {
            format!("is part of the software RAID {holder}: give that to the guest, or stop it")
        }
        _ => format!("is held by {holder}: remove that first"),
    })
}

impl Host {
    /// The device whose file system a directory lies in, by the table of mounts alone; none for a network's.
    pub fn below_directory(&self, directory: &Path) -> Option<BlockDevice> {
        if !directory.is_absolute() {
            return None;
        }
        let mounts = fs::read(self.path("proc/self/mountinfo")).ok()?;
        let mounted = mounts.split(|&byte| byte == b'\n').filter_map(mount::parse);
        // Of several at one point the last one is on top.
        let there = mounted.filter(|there| directory.starts_with(&there.point));
        let there = there.max_by_key(|there| there.point.components().count())?;
        self.numbered(there.device).or_else(|| {
            let source = Path::new(&there.source);
            (there.device.0 == 0 && source.is_absolute()).then(|| self.at(source).ok()).flatten()
        })
    }
}

fn marked(host: &Host, device: &BlockDevice) -> Option<String> {
    let (head, tail) = ends(host, device)?;
    if marks::is_physical_volume(&head) {
        return Some("belongs to a volume group of LVM: remove it from there (vgreduce, pvremove)".into());
    }
    marks::raid_member(&head, &tail).map(|array| {
        format!(
            "is part of the software RAID {array}, which does not run: start that, or clear its mark (wipefs)"
        )
    })
}

/// Whether something has the device open for itself alone, which includes every use of the kernel.
pub fn is_claimed(device: &BlockDevice) -> bool {
    let flags = libc::O_EXCL | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(&device.node);
    opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::super::host::tests::Made;
    use super::*;

    #[test]
    fn every_use_is_named_with_the_next_step() {
        let made = Made::new();
        made.add("pci/block/sda", "8:0", &[]);
        made.add("pci/block/sda/sda1", "8:1", &[("partition", "1")]);
        made.add("pci/block/sdb", "8:16", &[]);
        made.add("pci/block/sdc", "8:32", &[("holders/dm-0/x", "")]);
        made.add("pci/block/sdd", "8:48", &[("holders/md0/x", "")]);
        made.add("pci/block/sde", "8:64", &[]);
        made.add("virtual/block/dm-0", "253:0", &[("dm/name", "g-v")]);
        made.add("virtual/block/md0", "9:0", &[("md/level", "raid1")]);
        let mounts = "1 2 8:1 / /srv\\040x rw - ext4 /dev/sda1 rw\n1 2 0:33 / /b rw - btrfs DEV rw\n";
        let mounts = mounts.replace("DEV", &made.root().join("dev/sde").display().to_string());
        fs::write(made.root().join("proc/self/mountinfo"), mounts).unwrap();
        let swap = format!("Filename Type\n{}\tpartition\n", made.root().join("dev/sdb").display());
        fs::write(made.root().join("proc/swaps"), swap).unwrap();
        let of = |name: &str| usage(&made.host, &made.device(name), true).unwrap_or_default();
        assert_eq!(of("sda1"), "is mounted at /srv x: unmount it");
        assert_eq!(of("sda"), "has partition sda1, which is mounted at /srv x: unmount it");
        assert!(of("sdb").contains("swap") && of("sdc").contains("'g-v'") && of("sdd").contains("md0"));
        assert!(of("sde").contains("mounted at /b"), "{}", of("sde"));
        assert_eq!((of("dm-0"), of("md0")), (String::new(), String::new()));
    }

    #[test]
    fn marks_count_until_a_guest_has_had_the_device() {
        let made = Made::new();
        made.add("pci/block/sda", "8:0", &[]);
        let mut bytes = vec![0; 32 << 10];
        bytes[512..520].copy_from_slice(b"LABELONE");
        bytes[536..544].copy_from_slice(b"LVM2 001");
        fs::write(made.root().join("dev/sda"), bytes).unwrap();
        let device = made.device("sda");
        assert!(usage(&made.host, &device, true).unwrap().contains("volume group"));
        assert_eq!(usage(&made.host, &device, false), None);
    }
}
