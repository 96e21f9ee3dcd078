//! Logical volumes of a group and where each begins, asked of LVM's own tools: the volumes need not be active.

use std::path::PathBuf;
use std::process::Command;

use super::output::Failure;

/// A logical volume and its first segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Volume {
    /// Its name without the group's.
    pub name: String,
    /// Bytes.
    pub len: u64,
    /// The physical volume of its first segment.
    pub device: PathBuf,
    /// Where on that its first segment begins, in bytes.
    pub start: u64,
    /// Bytes of its first segment.
    pub segment_len: u64,
}

impl Volume {
    /// Whether it is named as a VHD and not as a raw image.
    pub fn is_vhd(&self) -> bool {
        !self.name.starts_with("LV-")
    }
}

/// The volumes of a group.
pub(super) fn list(group: &str) -> Result<Vec<Volume>, Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "+_.-".contains(c);
    if group.is_empty() || group.starts_with('-') || !group.chars().all(plain) {
        return Err(Failure::invalid(format!("'{group}' is no name of a volume group")));
    }
    let physical = tool("pvs", &["-o", "pv_name,pe_start"], None)?;
    let segments = tool(
        "lvs",
        &["-o", "lv_name,lv_size,segtype,seg_start,seg_size,devices,vg_extent_size"],
        Some(group),
    )?;
    parse(&segments, &physical)
        .map_err(|line| Failure::new(libc::EPROTO, format!("lvs printed an unknown line: {line}")))
}

fn tool(name: &str, columns: &[&str], group: Option<&str>) -> Result<String, Failure> {
    let mut command = Command::new(name);
    command
        .args(["--noheadings", "--units", "b", "--nosuffix", "--separator", "|"])
        .args(columns)
        .args(group);
    let done = command.output().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::new(libc::ENOENT, format!("'{name}' is needed for -l and is not here: install lvm2"))
        }
        _ => Failure::new(error.raw_os_error().unwrap_or(libc::EIO), format!("cannot run '{name}': {error}")),
    })?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(Failure::new(libc::ENOENT, format!("'{name}' failed: {}", said.trim())));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Volumes from the lines of `lvs` and `pvs`; the line that cannot be read is the error.
fn parse(segments: &str, physical: &str) -> Result<Vec<Volume>, String> {
    let extents_start = |device: &str| {
        physical.lines().find_map(|line| {
            let (name, start) = line.trim().split_once('|')?;
            (name == device).then(|| start.parse::<u64>().ok())?
        })
    };
    let mut volumes = Vec::new();
    for line in segments.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let fields: Vec<&str> = line.split('|').collect();
        let [name, len, kind, seg_start, seg_len, devices, extent] = fields.as_slice() else {
            return Err(line.to_string());
        };
        if *kind != "linear" || *seg_start != "0" {
            continue;
        }
        let volume = || {
            let (device, index) = devices.split(',').next()?.strip_suffix(')')?.rsplit_once('(')?;
            let offset = index.parse::<u64>().ok()?.checked_mul(extent.parse().ok()?)?;
            Some(Volume {
                name: (*name).to_string(),
                len: len.parse().ok()?,
                device: PathBuf::from(device),
                start: extents_start(device)?.checked_add(offset)?,
                segment_len: seg_len.parse().ok()?,
            })
        };
        volumes.push(volume().ok_or_else(|| line.to_string())?);
    }
    Ok(volumes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_lvm_are_understood() {
        let segments = "  MGT|4194304|linear|0|4194304|/dev/sda3(0)|4194304\n  \
                        VHD-1|16777216|linear|0|8388608|/dev/sda3(5)|4194304\n  \
                        VHD-1|16777216|linear|8388608|8388608|/dev/sdb(0)|4194304\n  \
                        thin|1|thin|0|1||4194304\n";
        let volumes = parse(segments, "  /dev/sda3|10485760\n  /dev/sdb|1048576\n").unwrap();
        assert_eq!(volumes.len(), 2);
        assert_eq!(volumes[1].start, 10_485_760 + 5 * 4_194_304);
        assert_eq!((volumes[1].len, volumes[1].segment_len), (16_777_216, 8_388_608));
        assert!(parse("x|y", "").is_err());
        assert!(parse("a|1|linear|0|1|/dev/sdz(0)|4", "").is_err());
    }

    #[test]
    fn odd_names_of_groups_are_refused() {
        for name in ["", "-x", "a b", "a/b", "$(x)"] {
            assert!(list(name).is_err(), "{name}");
        }
    }
}
