//! Block devices: whether one is free, and what it holds.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use quick_xml::escape::escape;
use tapio_types::ApiError;
use uuid::Uuid;

use super::SIZE_MIN;
use crate::command;
use crate::errors;
use crate::mount;
use crate::probe::parse_blkid;
use crate::traits::Config;

const TIMEOUT: Duration = Duration::from_secs(60);
/// So many devices make one SR at most.
const DEVICES_MAX: usize = 32;

/// A block device.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) path: PathBuf,
    /// Major and minor number.
    pub(crate) numbers: (u32, u32),
    /// Bytes.
    pub(crate) size: u64,
}

/// What a device holds, as the system's prober says it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signature(BTreeMap<String, String>);

impl Signature {
    /// As `ext4`, `LVM2_member`, `gpt`; none for a device without a mark.
    pub(crate) fn kind(&self) -> Option<&str> {
        self.0.get("TYPE").or_else(|| self.0.get("PTTYPE")).map(String::as_str)
    }

    pub(crate) fn uuid(&self) -> Option<Uuid> {
        self.0.get("UUID").and_then(|text| Uuid::try_parse(text).ok())
    }

    pub(crate) fn label(&self) -> Option<&str> {
        self.0.get("LABEL").map(String::as_str)
    }
}

/// The devices that the configuration names.
pub(crate) fn named(config: &Config) -> Result<Vec<PathBuf>, ApiError> {
    let text = config.get("device").map_or("", String::as_str);
    let paths: Vec<PathBuf> =
        text.split(',').map(str::trim).filter(|path| !path.is_empty()).map(PathBuf::from).collect();
    if paths.is_empty() {
        return Err(errors::fail(90, "device_config:device is the block device of the SR"));
    }
    if let Some(path) = paths.iter().find(|path| !path.is_absolute()) {
        return Err(errors::fail(91, format_args!("'{}' is no absolute path", path.display())));
    }
    if paths.len() > DEVICES_MAX {
        return Err(errors::fail(91, format_args!("{} devices: at most {DEVICES_MAX}", paths.len())));
    }
    Ok(paths)
}

/// Where a file system of this UUID is linked from, where the system keeps such links.
pub(crate) fn by_uuid(uuid: Uuid) -> PathBuf {
    Path::new("/dev/disk/by-uuid").join(uuid.to_string())
}

impl Device {
    pub(crate) fn open(path: &Path) -> Result<Self, ApiError> {
        let data =
            fs::metadata(path).map_err(|error| errors::io(91, "cannot find the device", path, &error))?;
        if !data.file_type().is_block_device() {
            return Err(errors::fail(91, format_args!("{} is no block device", path.display())));
        }
        let mut file =
            File::open(path).map_err(|error| errors::io(91, "cannot open the device", path, &error))?;
        let size = file
            .seek(SeekFrom::End(0))
            .map_err(|error| errors::io(91, "cannot find the size of", path, &error))?;
        let number = data.rdev();
        Ok(Self { path: path.to_path_buf(), numbers: (libc::major(number), libc::minor(number)), size })
    }

    /// Refuses a device that is mounted, or that another driver of the kernel holds: swap, LVM, RAID, a loop.
    pub(crate) fn check_free(&self) -> Result<(), ApiError> {
        let path = self.path.display();
        if let Ok(mounted) = mount::mounted()
            && let Some(there) = mounted.iter().find(|there| there.device == self.numbers)
        {
            let text = format!("{path} is mounted at {}: unmount it first", there.point.display());
            return Err(errors::sr_in_use(text));
        }
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_EXCL | libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(&self.path);
        match opened {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                let text = format!("{path}, or a part of it, is mounted, swap, or below another device");
                Err(errors::sr_in_use(text))
            }
            Err(error) => Err(errors::io(91, "cannot open the device", &self.path, &error)),
        }
    }

    /// What it holds.
    pub(crate) fn signature(&self) -> Result<Signature, ApiError> {
        let path = self.path.to_string_lossy();
        let output = command::run("blkid", &["-p", "-o", "export", &path], TIMEOUT).map_err(|error| {
            let next = if error.is_missing { ": install util-linux" } else { "" };
            errors::fail(91, format_args!("cannot see what {path} holds: {error}{next}"))
        })?;
        match output.status {
            Some(0) => Ok(Signature(parse_blkid(&output.stdout))),
            // Nothing that it knows.
            Some(2) => Ok(Signature::default()),
            // Marks of several kinds: whatever it is, it is not empty.
            Some(8) => Ok(Signature(BTreeMap::from([("TYPE".into(), "marks of several kinds".into())]))),
            _ => {
                let said = output.stderr.trim();
                Err(errors::fail(91, format_args!("cannot see what {path} holds: {said}")))
            }
        }
    }
}

/// Devices of this host that could become an SR, as a document.
pub(crate) fn candidates() -> String {
    let mut xml = String::from("<?xml version=\"1.0\" ?>\n<Devlist>\n");
    let mut names: Vec<_> = fs::read_dir("/sys/class/block")
        .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect())
        .unwrap_or_default();
    names.sort();
    for name in names {
        let path = Path::new("/dev").join(&name);
        let Ok(device) = Device::open(&path) else { continue };
        if device.size >= SIZE_MIN && device.check_free().is_ok() {
            let path = path.to_string_lossy();
            let _ = write!(
                xml,
                "\t<BlockDevice>\n\t\t<path>\n\t\t\t{}\n\t\t</path>\n\t\t<size>\n\t\t\t{}\n\t\t</size>\n\
                 \t</BlockDevice>\n",
                escape(path),
                device.size
            );
        }
    }
    xml.push_str("</Devlist>\n");
    xml
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_absolute_paths_are_devices() {
        let named = |text: &str| named(&Config::from([("device".to_string(), text.to_string())]));
        assert_eq!(named("/dev/a, /dev/b,").unwrap().len(), 2);
        assert_eq!(named("").unwrap_err().code, "SR_BACKEND_FAILURE_90");
        assert_eq!(named("sda").unwrap_err().code, "SR_BACKEND_FAILURE_91");
        assert_eq!(named(&"/dev/a,".repeat(33)).unwrap_err().code, "SR_BACKEND_FAILURE_91");
    }

    #[test]
    fn a_file_is_no_device() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Device::open(file.path()).unwrap_err();
        assert!(error.params[1].contains("no block device"), "{error}");
        assert!(candidates().ends_with("</Devlist>\n"));
    }
}
