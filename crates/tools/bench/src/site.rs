//! What lies below a directory of images: the file system and its device.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A directory's storage, as far as the kernel says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Site {
    pub dir: String,
    /// The file system lies in memory.
    pub in_memory: bool,
    pub file_system: String,
    /// The block device below it, and its driver where it has one; none for what has no device of its own.
    pub device: Option<String>,
    /// It has a head that must be moved.
    pub rotating: Option<bool>,
    /// There is no hardware of this host behind it: a disk of a hypervisor, or one made of others.
    pub is_virtual: Option<bool>,
}

impl Site {
    /// That of a directory.
    ///
    /// # Errors
    /// It is not there.
    pub fn of(dir: &Path) -> io::Result<Self> {
        let file = fs::File::open(dir)?;
        let in_memory = rustix::fs::fstatfs(&file)?.f_type == libc::TMPFS_MAGIC;
        let number = file.metadata()?.dev();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let (file_system, source) =
            mount(&mounts, number).unwrap_or_else(|| ("unknown".into(), String::new()));
        let block = block(number).or_else(|| {
            // File systems of several devices have a number of their own and name the first device.
            let source = Path::new(&source).is_absolute().then(|| fs::metadata(&source).ok())??;
            block(source.rdev())
        });
        let disk = block.as_deref().map(whole_disk);
        let driver = disk.and_then(driver);
        Ok(Self {
            dir: dir.display().to_string(),
            in_memory,
            file_system,
            device: block.as_deref().map(|block| named(block, driver.as_deref())),
            rotating: disk.and_then(|disk| {
                let text = fs::read_to_string(disk.join("queue/rotational")).ok()?;
                Some(text.trim() != "0")
            }),
            is_virtual: disk.map(|disk| is_virtual(disk, driver.as_deref())),
        })
    }

    /// As reports name it.
    pub fn line(&self) -> String {
        if self.in_memory {
            return format!("{}: {} in memory", self.dir, self.file_system);
        }
        let said = |value: Option<bool>, yes, no| match value {
            Some(true) => yes,
            Some(false) => no,
            None => "unknown",
        };
        format!(
            "{}: {} on {}, {}, {}",
            self.dir,
            self.file_system,
            self.device.as_deref().unwrap_or("an unknown device"),
            said(self.rotating, "rotating", "not rotating"),
            said(self.is_virtual, "virtual", "hardware of this host")
        )
    }
}

/// Type and source of the file system with this device number.
fn mount(mounts: &str, number: u64) -> Option<(String, String)> {
    let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    mounts.lines().find_map(|line| {
        if line.split(' ').nth(2)? != number {
            return None;
        }
        let (_, after) = line.split_once(" - ")?;
        let mut fields = after.split(' ');
        Some((fields.next()?.to_owned(), fields.next().unwrap_or_default().to_owned()))
    })
}

fn block(number: u64) -> Option<PathBuf> {
    fs::canonicalize(format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
        .ok()
}

/// The disk that a partition is one of, or the device itself.
fn whole_disk(block: &Path) -> &Path {
    match block.parent() {
        Some(disk) if block.join("partition").exists() => disk,
        _ => block,
    }
}

fn driver(disk: &Path) -> Option<String> {
    let driver = fs::canonicalize(disk.join("device/driver")).ok()?;
    Some(driver.file_name()?.to_string_lossy().into_owned())
}

fn named(block: &Path, driver: Option<&str>) -> String {
    let name = block.file_name().unwrap_or_default().to_string_lossy();
    driver.map_or_else(|| name.to_string(), |driver| format!("{name} ({driver})"))
}

fn is_virtual(disk: &Path, driver: Option<&str>) -> bool {
    disk.starts_with("/sys/devices/virtual") || matches!(driver, Some("virtio_blk" | "vbd" | "hv_storvsc"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_with_the_number_is_found() {
        let mounts = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
                      30 22 0:26 / /dev/shm rw - tmpfs tmpfs rw,size=1k\n";
        let found = |major, minor| mount(mounts, rustix::fs::makedev(major, minor));
        assert_eq!(found(254, 0), Some(("ext4".into(), "/dev/vda".into())));
        assert_eq!(found(0, 26), Some(("tmpfs".into(), "tmpfs".into())));
        assert_eq!(found(9, 9), None);
    }

    #[test]
    fn a_directory_is_described_as_far_as_is_known() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let site = Site::of(dir.path()).expect("it is there");
        assert!(!site.file_system.is_empty() && site.line().starts_with(&site.dir), "{site:?}");
        assert!(Site::of(&dir.path().join("none")).is_err());
        let disk = Site {
            dir: "/d".into(),
            in_memory: false,
            file_system: "ext4".into(),
            device: Some("vda (virtio_blk)".into()),
            rotating: Some(false),
            is_virtual: Some(true),
        };
        assert_eq!(disk.line(), "/d: ext4 on vda (virtio_blk), not rotating, virtual");
        let memory = Site { in_memory: true, file_system: "tmpfs".into(), ..disk.clone() };
        assert_eq!(memory.line(), "/d: tmpfs in memory");
        let unknown = Site { device: None, rotating: None, is_virtual: None, ..disk };
        assert_eq!(unknown.line(), "/d: ext4 on an unknown device, unknown, unknown");
    }
}
