//! The volume group of an SR: what is in it, and what changes it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;
use tapio_types::ApiError;
use uuid::Uuid;

use super::commands::{self, Row};
use super::single::Single;
use super::{names, size};
use crate::command::Failure;
use crate::errors;

/// A volume that holds a merged raw base has this tag, as VHDs have a flag.
pub(crate) const HIDDEN: &str = "hidden";

/// A part of a volume that lies in one piece on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Bytes from the beginning of the volume.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// The device and the byte on it; none where it is no plain piece.
    pub(crate) place: Option<(PathBuf, u64)>,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Volume {
    pub(crate) name: String,
    /// LVM's own UUID.
    pub(crate) uuid: String,
    pub(crate) size: u64,
    pub(crate) tags: Vec<String>,
    pub(crate) is_active: bool,
    pub(crate) is_open: bool,
    pub(crate) is_writable: bool,
    pub(crate) segments: Vec<Segment>,
}

/// The group as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) size: u64,
    pub(crate) free: u64,
    /// By name.
    pub(crate) volumes: BTreeMap<String, Volume>,
}

impl Listed {
    /// The volume of an image, and its kind.
    pub(crate) fn image(&self, vdi: Uuid) -> Option<(&Volume, crate::dir::facts::FileKind)> {
        let kinds = crate::dir::facts::FileKind::ALL;
        kinds.into_iter().find_map(|kind| Some((self.volumes.get(&names::volume(kind, vdi))?, kind)))
    }
}

/// The group of an SR.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// What its tags say, once it is known.
    pub(crate) single: Single,
    /// The first byte of the extents of each of its devices, by their names; none where they are not known yet. An
    /// administrator may give the group another device at any time.
    starts: Arc<RwLock<BTreeMap<String, u64>>>,
}

fn number(row: &Row, field: &str) -> u64 {
    row.get(field).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn text<'a>(row: &'a Row, field: &str) -> &'a str {
    row.get(field).map_or("", |text| text.trim())
}

/// Where a piece lies: `/dev/a(12)` with the size of the group's extents and the first byte of the device's.
fn place_of(devices: &str, extent: u64, starts: &BTreeMap<String, u64>) -> Option<(PathBuf, u64)> {
    let (device, first) = devices.trim().strip_suffix(')')?.rsplit_once('(')?;
    let first: u64 = first.parse().ok()?;
    let start = starts.get(device)?.checked_add(first.checked_mul(extent)?)?;
    Some((PathBuf::from(device), start))
}

/// The volumes in rows of `lvs --segments`; `starts` has the first byte of each device's extents.
pub(crate) fn volumes(rows: &[Row], starts: &BTreeMap<String, u64>) -> BTreeMap<String, Volume> {
    let mut found: BTreeMap<String, Volume> = BTreeMap::new();
    for row in rows {
        let name = text(row, "lv_name");
        if name.is_empty() {
            continue;
        }
        let volume = found.entry(name.to_owned()).or_insert_with(|| Volume {
            name: name.to_owned(),
            uuid: text(row, "lv_uuid").to_owned(),
            size: number(row, "lv_size"),
            tags: text(row, "lv_tags").split(',').filter(|tag| !tag.is_empty()).map(str::to_owned).collect(),
            is_active: text(row, "lv_active").starts_with("active"),
            is_open: text(row, "lv_device_open") == "open",
            // As LVM has it noted; `lv_permissions` is of the kernel, which knows active volumes only.
            is_writable: text(row, "lv_attr").chars().nth(1) != Some('r'),
            segments: Vec::new(),
        });
        let is_plain = text(row, "segtype") == "linear";
        let extent = number(row, "vg_extent_size");
        volume.segments.push(Segment {
            start: number(row, "seg_start"),
            len: number(row, "seg_size"),
            place: is_plain.then(|| place_of(text(row, "devices"), extent, starts)).flatten(),
        });
    }
    for volume in found.values_mut() {
        volume.segments.sort_by_key(|segment| segment.start);
    }
    found
}

fn starts_of(members: Vec<Member>) -> BTreeMap<String, u64> {
    members.into_iter().map(|member| (member.name, member.first)).collect()
}

impl Group {
    pub(crate) fn of(sr: Uuid) -> Self {
        Self { name: names::group(sr), single: Single::default(), starts: Arc::default() }
    }

    /// The path of a volume that is active.
    pub(crate) fn path(&self, volume: &str) -> PathBuf {
        commands::directory_of(&self.name).join(volume)
    }

    fn qualified(&self, volume: &str) -> String {
        format!("{}/{volume}", self.name)
    }

    pub(crate) fn exists(&self) -> bool {
        commands::run("vgs", &["--noheadings", "-o", "vg_name", &self.name]).is_ok()
    }

    /// The same, which knows its devices and looks at no others. It is looked for on `named` first:
    /// another device of the
    /// host may be a disk that waits for this SR.
    ///
    /// # Errors
    /// As [`Self::devices`]; it is a copy that is being resigned.
    pub(crate) fn known(self, named: &[PathBuf]) -> Result<Self, ApiError> {
        let real = named.iter().filter_map(|path| std::fs::canonicalize(path).ok());
        let names = named.iter().cloned().chain(real).map(|path| (path.to_string_lossy().into_owned(), 0));
        let first = Self {
            name: self.name.clone(),
            single: Single::default(),
            starts: Arc::new(RwLock::new(names.collect())),
        };
        let members = match first.devices() {
            Ok(members) if !named.is_empty() && members.iter().all(|member| member.name.starts_with('/')) => {
                members
            }
            _ => self.devices()?,
        };
        if members.iter().any(|member| super::tag::is_unfinished(&member.group_tags)) {
            let text = "it is a copy that was being resigned when that was broken off: repeat 'xe sr-create' of type \
                        relvm, relvmoiscsi or relvmohba, which goes on with it";
            return Err(errors::fail(47, format_args!("{}: {text}", self.name)));
        }
        let single = members.first().map(|member| Single::of(&member.group_tags)).unwrap_or_default();
        let starts = Arc::new(RwLock::new(starts_of(members)));
        Ok(Self { starts, single, ..self })
    }

    /// The devices that it looks at.
    pub(super) fn names(&self) -> Vec<String> {
        self.starts.read().keys().cloned().collect()
    }

    /// What is in it.
    ///
    /// # Errors
    /// 47: the group is not there, or LVM does not answer.
    pub(crate) fn list(&self) -> Result<Listed, ApiError> {
        let failed = |why: String| errors::fail(47, format_args!("{}: {why}", self.name));
        let fields = "lv_name,lv_uuid,lv_size,lv_tags,lv_active,lv_device_open,lv_attr,segtype,seg_start,\
                      seg_size,devices,vg_extent_size,vg_size,vg_free,vg_missing_pv_count";
        let list =
            || commands::table(&self.names(), "lvs", fields, &["--segments", &self.name]).map_err(failed);
        let mut rows = list()?;
        let lacks = |rows: &[Row]| rows.first().is_some_and(|row| number(row, "vg_missing_pv_count") > 0);
        if lacks(&rows) && !self.names().is_empty() {
            // One that was added is none of those that were known.
            *self.starts.write() = starts_of(self.devices_among(&[])?);
            rows = list()?;
        }
        let (size, free) =
            rows.first().map_or((0, 0), |row| (number(row, "vg_size"), number(row, "vg_free")));
        Ok(Listed { size, free, volumes: volumes(&rows, &self.starts.read()) })
    }

    /// The devices of the group.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub(crate) fn devices(&self) -> Result<Vec<Member>, ApiError> {
        self.devices_among(&self.names())
    }

    /// Those among `names`; among all where there are none.
    fn devices_among(&self, names: &[String]) -> Result<Vec<Member>, ApiError> {
        let failed = |why: String| errors::fail(47, format_args!("{}: {why}", self.name));
        let selection = format!("vg_name={}", self.name);
        let fields = "pv_name,pe_start,pv_size,dev_size,vg_extent_size,vg_tags";
        let rows = commands::table(names, "pvs", fields, &["-S", &selection]).map_err(failed)?;
        if rows.is_empty() {
            return Err(failed("there is no such volume group here: is its device there?".into()));
        }
        let of = |row: &Row| Member {
            name: text(row, "pv_name").to_owned(),
            first: number(row, "pe_start"),
            size: number(row, "pv_size"),
            device_size: number(row, "dev_size"),
            extent: number(row, "vg_extent_size"),
            group_tags: text(row, "vg_tags").to_owned(),
        };
        Ok(rows.iter().map(of).collect())
    }

    /// Takes in what devices have become longer by.
    pub(crate) fn grow(&self) {
        for device in self.devices().unwrap_or_default() {
            if device.has_grown()
                && let Err(error) = commands::run_on(&self.names(), "pvresize", &[&device.name])
            {
                tracing::warn!("{} is longer than its group knows, and stays so: {error}", device.name);
            }
        }
    }

    fn run(&self, number: u16, program: &str, arguments: &[&str]) -> Result<(), ApiError> {
        let failed = |error: Failure| errors::fail(number, format_args!("{}: {error}", self.name));
        commands::run_on(&self.names(), program, arguments).map(drop).map_err(failed)
    }

    /// Makes a volume, which is active afterwards. What was on its place is there still.
    ///
    /// # Errors
    /// 50.
    pub(crate) fn create(&self, volume: &str, len: u64, tag: Option<&str>) -> Result<PathBuf, ApiError> {
        let len = format!("{len}b");
        let mut arguments = vec!["-y", "-Wn", "-Zn", "-n", volume, "-L", &len];
        if let Some(tag) = tag {
            arguments.extend(["--addtag", tag]);
        }
        arguments.push(&self.name);
        self.run(50, "lvcreate", &arguments)?;
        Ok(self.path(volume))
    }

    /// Makes a volume that is not active afterwards. What was on its place is there still.
    ///
    /// # Errors
    /// 50.
    pub(crate) fn create_away(&self, volume: &str, len: u64, tag: &str) -> Result<(), ApiError> {
        self.run_all(50, &[self.line_create_away(volume, len, tag)])
    }

    /// The command of that.
    pub(crate) fn line_create_away(&self, volume: &str, len: u64, tag: &str) -> Vec<String> {
        let len = format!("{len}b");
        let line =
            ["lvcreate", "-y", "-an", "-Wn", "-Zn", "-n", volume, "-L", &len, "--addtag", tag, &self.name];
        line.map(str::to_owned).into()
    }

    /// Runs commands of this type's `line_...` functions one after the other, until one fails.
    ///
    /// # Errors
    /// `number`: what came before the command that failed is done.
    pub(crate) fn run_all(&self, number: u16, lines: &[Vec<String>]) -> Result<(), ApiError> {
        let failed = |error: Failure| errors::fail(number, format_args!("{}: {error}", self.name));
        commands::run_all(&self.names(), lines).map_err(failed)
    }

    /// Gives a volume tags.
    ///
    /// # Errors
    /// 54.
    pub(crate) fn add_tags(&self, volume: &str, tags: &[String]) -> Result<(), ApiError> {
        if tags.is_empty() {
            return Ok(());
        }
        let qualified = self.qualified(volume);
        let each = tags.iter().flat_map(|tag| ["--addtag", tag.as_str()]);
        let arguments: Vec<&str> = each.chain([qualified.as_str()]).collect();
        self.run(54, "lvchange", &arguments)
    }

    /// Gives volumes a tag, all by one process.
    ///
    /// # Errors
    /// 54.
    pub(crate) fn add_tag(&self, volumes: &[&str], tag: &str) -> Result<(), ApiError> {
        let names: Vec<String> = volumes.iter().map(|volume| self.qualified(volume)).collect();
        let arguments: Vec<&str> =
            ["--addtag", tag].into_iter().chain(names.iter().map(String::as_str)).collect();
        self.run(54, "lvchange", &arguments)
    }

    /// Removes volumes, with what is in them.
    ///
    /// # Errors
    /// 51; one is open.
    pub(crate) fn remove(&self, volumes: &[&str]) -> Result<(), ApiError> {
        if volumes.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = volumes.iter().map(|volume| self.qualified(volume)).collect();
        let arguments: Vec<&str> = ["-f", "-y"].into_iter().chain(names.iter().map(String::as_str)).collect();
        self.run(51, "lvremove", &arguments)
    }

    /// Gives a volume another name, also while it is open.
    ///
    /// # Errors
    /// 54.
    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), ApiError> {
        self.run(54, "lvrename", &["-y", &self.name, from, to])
    }

    /// Makes a volume so long.
    ///
    /// # Errors
    /// 59.
    pub(crate) fn resize(&self, volume: &str, from: u64, to: u64) -> Result<(), ApiError> {
        let (name, len) = (self.qualified(volume), format!("{}b", size::rounded(to)));
        match size::rounded(to).cmp(&from) {
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Greater => self.run_all(59, &[self.line_extend(volume, to)]),
            std::cmp::Ordering::Less => self.run(59, "lvreduce", &["-f", "-y", "-L", &len, &name]),
        }
    }

    /// The command that makes a volume longer.
    pub(crate) fn line_extend(&self, volume: &str, to: u64) -> Vec<String> {
        let len = format!("{}b", size::rounded(to));
        ["lvextend", "-y", "-L", &len, &self.qualified(volume)].map(str::to_owned).into()
    }

    /// Makes volumes reachable on this host.
    ///
    /// # Errors
    /// 46.
    pub(crate) fn activate<'a>(&self, volumes: impl Iterator<Item = &'a str>) -> Result<(), ApiError> {
        let names: Vec<String> = volumes.map(|volume| self.qualified(volume)).collect();
        if names.is_empty() {
            return Ok(());
        }
        let arguments: Vec<&str> = ["-ay"].into_iter().chain(names.iter().map(String::as_str)).collect();
        self.run(46, "lvchange", &arguments)
    }

    /// Makes volumes that are reachable here what they are on the storage.
    ///
    /// # Errors
    /// 46.
    pub(crate) fn refresh<'a>(&self, volumes: impl Iterator<Item = &'a str>) -> Result<(), ApiError> {
        let names: Vec<String> = volumes.map(|volume| self.qualified(volume)).collect();
        if names.is_empty() {
            return Ok(());
        }
        let arguments: Vec<&str> =
            ["--refresh"].into_iter().chain(names.iter().map(String::as_str)).collect();
        self.run(46, "lvchange", &arguments)
    }

    /// The opposite.
    ///
    /// # Errors
    /// 46: one is open.
    pub(crate) fn deactivate<'a>(&self, volumes: impl Iterator<Item = &'a str>) -> Result<(), ApiError> {
        let names: Vec<String> = volumes.map(|volume| self.qualified(volume)).collect();
        if names.is_empty() {
            return Ok(());
        }
        let arguments: Vec<&str> = ["-an"].into_iter().chain(names.iter().map(String::as_str)).collect();
        self.run(46, "lvchange", &arguments)
    }

    /// Refuses writes to a volume, or takes them again.
    ///
    /// # Errors
    /// 54.
    pub(crate) fn set_writable(&self, volume: &Volume, is_writable: bool) -> Result<(), ApiError> {
        if volume.is_writable == is_writable {
            return Ok(());
        }
        let permission = if is_writable { "-prw" } else { "-pr" };
        self.run(54, "lvchange", &[permission, &self.qualified(&volume.name)])
    }

    /// Hides a raw image, or shows it again.
    ///
    /// # Errors
    /// 54.
    pub(crate) fn set_hidden(&self, volume: &Volume, is_hidden: bool) -> Result<(), ApiError> {
        if volume.tags.iter().any(|tag| tag == HIDDEN) == is_hidden {
            return Ok(());
        }
        let change = if is_hidden { "--addtag" } else { "--deltag" };
        self.run(54, "lvchange", &[change, HIDDEN, &self.qualified(&volume.name)])
    }
}

/// Making and ending of the whole group.
impl Group {
    /// Makes the group on these devices. What was made is removed on a failure.
    ///
    /// # Errors
    /// 77.
    pub(crate) fn make(&self, devices: &[PathBuf], step: impl Fn(&'static str)) -> Result<(), ApiError> {
        let paths: Vec<_> = devices.iter().map(|path| path.to_string_lossy().into_owned()).collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        // Room for the description of thousands of volumes.
        let physical = [&["-ff", "-y", "--metadatasize", "10M"][..], &paths].concat();
        let grouped = [&[self.name.as_str()][..], &paths].concat();
        let made = self.run(77, "pvcreate", &physical).and_then(|()| {
            step("sr-create:marked");
            self.run(77, "vgcreate", &grouped)
        });
        if made.is_err() {
            for path in &paths {
                let _ = commands::run("pvremove", &["-y", path]);
            }
        }
        made?;
        step("sr-create:grouped");
        Ok(())
    }

    /// Gives the group tags.
    ///
    /// # Errors
    /// 54.
    pub(crate) fn add_group_tags(&self, tags: &[String]) -> Result<(), ApiError> {
        let options = tags.iter().flat_map(|tag| ["--addtag", tag.as_str()]);
        self.run(54, "vgchange", &options.chain([self.name.as_str()]).collect::<Vec<_>>())
    }

    /// Takes one from it.
    ///
    /// # Errors
    /// 54.
    pub(crate) fn remove_tag(&self, tag: &str) -> Result<(), ApiError> {
        self.run(54, "vgchange", &["--deltag", tag, &self.name])
    }

    /// Takes the group away from this host.
    ///
    /// # Errors
    /// 46: a volume of it is open.
    pub(crate) fn close(&self) -> Result<(), ApiError> {
        self.run(46, "vgchange", &["-an", &self.name])
    }

    /// Removes the group with all that is in it, and the marks of its devices. `between` is called when the group is
    /// gone and the marks are not.
    ///
    /// # Errors
    /// 51: the group stays.
    pub(crate) fn erase(&self, between: impl Fn()) -> Result<(), ApiError> {
        let devices = self.devices()?;
        self.run(51, "vgremove", &["-f", "-y", &self.name])?;
        between();
        for device in devices {
            // Such a mark is no harm: the device belongs to no group.
            if let Err(error) = commands::run_on(&self.names(), "pvremove", &["-y", &device.name]) {
                tracing::warn!("{} still carries LVM's mark: {error}", device.name);
            }
        }
        Ok(())
    }
}

/// A device of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its path.
    pub(crate) name: String,
    /// The first byte of its extents.
    pub(crate) first: u64,
    /// Bytes of its extents.
    pub(crate) size: u64,
    pub(crate) device_size: u64,
    extent: u64,
    /// With commas between them.
    group_tags: String,
}

impl Member {
    /// Whether the device has room for more extents than the group knows of.
    fn has_grown(&self) -> bool {
        self.extent > 0
            && self.device_size.saturating_sub(self.first).saturating_sub(self.size) >= self.extent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(fields: &[(&str, &str)]) -> Row {
        fields.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn volumes_are_read_with_their_places() {
        let starts = BTreeMap::from([("/dev/a".to_owned(), 1 << 20)]);
        let common = [
            ("lv_name", "VHD-1"),
            ("lv_size", "12582912"),
            ("lv_tags", "x,hidden"),
            ("vg_extent_size", "4194304"),
        ];
        let first = [
            ("segtype", "linear"),
            ("seg_start", "4194304"),
            ("seg_size", "8388608"),
            ("devices", "/dev/a(7)"),
        ];
        let second =
            [("segtype", "linear"), ("seg_start", "0"), ("seg_size", "4194304"), ("devices", "/dev/a(2)")];
        let more = [("lv_active", "active"), ("lv_device_open", "open"), ("lv_attr", "-wi-ao----")];
        let rows = [row(&[&common[..], &more, &first].concat()), row(&[&common[..], &second].concat())];
        let found = volumes(&rows, &starts);
        let volume = &found["VHD-1"];
        assert_eq!((volume.size, volume.tags.len()), (12 << 20, 2));
        assert!(volume.is_active && volume.is_open && volume.is_writable);
        assert_eq!(volume.segments[0].place, Some(("/dev/a".into(), (1 << 20) + (8 << 20))));
        assert_eq!(volume.segments[1].start, 4 << 20);
        let striped = row(&[("lv_name", "s"), ("segtype", "striped"), ("devices", "/dev/a(0),/dev/b(0)")]);
        assert_eq!(volumes(&[striped, row(&[])], &starts)["s"].segments[0].place, None);
        for odd in ["", "/dev/a", "/dev/b(1)", "/dev/a(x)", "/dev/a(18446744073709551615)"] {
            assert_eq!(place_of(odd, 4 << 20, &starts), None, "{odd}");
        }
    }
}
