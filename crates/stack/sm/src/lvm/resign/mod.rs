//! A copy of an SR that an array made of its devices gets names of its own, so that it can be used beside the original.
//!
//! Every UUID changes: of LVM's devices, group and volumes, of the SR, of its VDIs and of the images. Those of VDIs and
//! images follow from the new one of the SR and the old one of the VDI, so that doing a part of it again does the same.
//!
//! ```text
//! 1  tag tapio.resign.<sr> on the group            it has all its old names
//! 2  LVM's UUIDs and the group's name              vgimportclone; the label of a device before the group's description
//! 3  names and UUIDs of the volumes, logs of       vgcfgrestore: one write; the tag becomes tapio.resign.named.<sr>
//!    changed blocks go
//! 4  each image, parents first; the metadata       through the devices: no volume becomes reachable
//! 5  the tag goes                                  from here on it is an SR
//! ```
//!
//! A group with such a tag is attached by no host, and resigning it goes on where it was broken off. A device whose
//! label has its new UUID while the group knows the old one (a kill within step 2) gets the old one back first. LVM's
//! programs see the devices of the copy alone, so the original is not touched, attached or not.

mod driver;
mod images;
pub(in crate::lvm) mod label;
mod text;
mod volume;

use std::collections::BTreeMap;
use std::path::PathBuf;

use sha2::{Digest as _, Sha256};
use tapio_types::ApiError;
use uuid::{Builder, Uuid};

pub(crate) use driver::{Resign, done, never_attached};

use super::commands::{self, Row};
use super::group::{Volume, volumes};
use super::journal;
use super::names::{self, Role};
use super::tag::{BEGUN, NAMED, State};
use crate::errors;
use crate::ext::device::Device;
use crate::traits::Ctx;
use volume::Pieces;

/// The first bytes of a device, where its label is.
const LABEL_LEN: u64 = 4 * 512;

/// The UUID that takes the place of `old` in the SR that becomes `sr`.
fn derived(sr: Uuid, what: &str, old: Uuid) -> Uuid {
    let mut hash = Sha256::new();
    hash.update(sr.as_bytes());
    hash.update(what.as_bytes());
    hash.update(old.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.finalize()[..16]);
    Builder::from_random_bytes(bytes).into_uuid()
}

/// The new UUID of a VDI.
fn vdi_of(sr: Uuid, old: Uuid) -> Uuid {
    derived(sr, "vdi", old)
}

/// The new UUID in an image's footer; `vdi` is its new one.
fn footer_of(sr: Uuid, vdi: Uuid) -> Uuid {
    derived(sr, "image", vdi)
}

/// The devices of the copy, which LVM's programs see alone.
struct Copy {
    /// Their paths, with links followed.
    devices: Vec<PathBuf>,
    /// As they were given.
    names: Vec<String>,
}

/// What a group is.
struct Known {
    name: String,
    state: State,
    volumes: BTreeMap<String, Volume>,
}

fn field<'a>(row: &'a Row, name: &str) -> &'a str {
    row.get(name).map_or("", |text| text.trim())
}

impl Copy {
    fn of(devices: &[PathBuf]) -> Self {
        let real = |path: &PathBuf| std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        let names = devices.iter().map(|path| path.to_string_lossy().into_owned()).collect();
        Self { devices: devices.iter().map(real).collect(), names }
    }

    fn failed(&self, why: impl std::fmt::Display) -> ApiError {
        errors::fail(93, format_args!("{}: {why}", self.names.join(", ")))
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<(), ApiError> {
        commands::run_on(&self.names, program, arguments).map(drop).map_err(|error| self.failed(error))
    }

    fn table(&self, program: &str, fields: &str, more: &[&str]) -> Result<Vec<Row>, ApiError> {
        commands::table(&self.names, program, fields, more).map_err(|error| self.failed(error))
    }

    /// Labels get back the UUIDs that the group knows: a kill came between the two.
    fn mend_labels(&self) -> Result<(), ApiError> {
        let known = self.table("vgs", "vg_name,vg_tags,pv_name,pv_uuid", &[])?;
        let mut labels = Vec::new();
        for device in &self.devices {
            let medium = Pieces::beginning(device, LABEL_LEN)
                .map_err(|error| errors::io(93, "cannot open", device, &error))?;
            let id = label::read(&medium)
                .map_err(|error| errors::io(93, "no part of a group:", device, &error))?;
            labels.push((medium, id));
        }
        let ids: Vec<label::Id> =
            known.iter().filter_map(|row| label::id_of(field(row, "pv_uuid"))).collect();
        let missing: Vec<&label::Id> =
            ids.iter().filter(|id| labels.iter().all(|(_, is)| is != *id)).collect();
        let strange: Vec<&mut (Pieces, label::Id)> =
            labels.iter_mut().filter(|(_, is)| !ids.contains(is)).collect();
        match (missing.as_slice(), strange.len()) {
            ([], _) => Ok(()),
            // LVM writes one label after the other: with one of each it is clear which they are.
            ([id], 1)
                if known.iter().all(|row| matches!(State::of(field(row, "vg_tags")), State::Begun(_))) =>
            {
                tracing::info!("{:?}: its label gets back the UUID that its group knows", self.names);
                strange
                    .into_iter()
                    .try_for_each(|(medium, _)| label::write(medium, id))
                    .map_err(|error| self.failed(error))
            }
            _ => Err(self.failed("devices of the group are missing: name all of them")),
        }
    }

    /// The group that is on the devices, and nothing else.
    fn known(&self) -> Result<Known, ApiError> {
        let devices =
            self.table("pvs", "pv_name,vg_name,vg_tags,pe_start,pv_missing,vg_missing_pv_count", &[])?;
        let mut groups: Vec<&str> = devices.iter().map(|row| field(row, "vg_name")).collect();
        groups.dedup();
        let (name, first) = match (groups.as_slice(), devices.first()) {
            ([name], Some(first)) if names::sr_of_group(name).is_some() => ((*name).to_owned(), first),
            ([""], _) => return Err(self.failed("it is no part of an SR")),
            _ => return Err(self.failed(format_args!("it holds {}, which is not one SR", groups.join(", ")))),
        };
        if devices
            .iter()
            .any(|row| !field(row, "pv_missing").is_empty() || field(row, "vg_missing_pv_count") != "0")
        {
            return Err(self.failed(format_args!("{name} has other devices too: name all of them")));
        }
        let start = |row: &Row| field(row, "pe_start").parse().unwrap_or(0);
        let starts = devices.iter().map(|row| (field(row, "pv_name").to_owned(), start(row))).collect();
        let fields = "lv_name,lv_uuid,lv_size,lv_tags,lv_active,lv_device_open,lv_attr,segtype,seg_start,\
                      seg_size,devices,vg_extent_size";
        let rows = self.table("lvs", fields, &["--segments", &name])?;
        Ok(Known { state: State::of(field(first, "vg_tags")), volumes: volumes(&rows, &starts), name })
    }
}

/// Gives the SR on these devices, a copy, names of its own; answers its new UUID: `sr`, or that of an earlier try.
///
/// # Errors
/// 93: the devices hold no SR, not all of one, or one that cannot be resigned, and why; what was begun is gone on with
/// by the next try.
pub(crate) fn resign(ctx: &dyn Ctx, sr: Uuid, devices: &[PathBuf]) -> Result<Uuid, ApiError> {
    super::check_host()?;
    // The group's own state says nothing: it has the UUIDs of the original, which may be attached.
    devices.iter().try_for_each(|path| Device::open(path)?.check_free())?;
    let copy = Copy::of(devices);
    copy.mend_labels()?;
    let known = copy.known()?;
    let sr = match known.state {
        State::Fresh => {
            check(&copy, &known)?;
            ctx.step("lv:resign-begin");
            copy.run("vgchange", &["--addtag", &format!("{BEGUN}{sr}"), &known.name])?;
            ctx.step("lv:resign-tagged");
            sr
        }
        State::Begun(sr) | State::Named(sr) => {
            tracing::info!("{:?}: it was being resigned as SR {sr}, which goes on", copy.names);
            sr
        }
    };
    let group = names::group(sr);
    if known.name != group {
        let paths: Vec<&str> = copy.names.iter().map(String::as_str).collect();
        copy.run("vgimportclone", &[&["-n", group.as_str()][..], &paths].concat())?;
        ctx.step("lv:resign-group");
    }
    if !matches!(known.state, State::Named(_)) {
        rename(&copy, sr, &group, &known)?;
        ctx.step("lv:resign-named");
    }
    let known = copy.known()?;
    images::resign(ctx, sr, &known, &copy.devices).map_err(|why| copy.failed(why))?;
    ctx.step("lv:resign-images");
    copy.run("vgchange", &["--deltag", &format!("{NAMED}{sr}"), &group])?;
    tracing::info!("{:?}: SR {sr} is a copy with names of its own", copy.names);
    Ok(sr)
}

/// Refuses what cannot be resigned, before anything is changed.
fn check(copy: &Copy, known: &Known) -> Result<(), ApiError> {
    for volume in known.volumes.values() {
        let failed = |why: String| copy.failed(format_args!("volume {}: {why}", volume.name));
        Pieces::of(volume, &copy.devices).map_err(|error| failed(error.to_string()))?;
        renamed(Uuid::nil(), volume).map_err(failed)?;
    }
    images::check(known, &copy.devices).map_err(|why| copy.failed(why))
}

/// The new name of a volume; none for one that goes.
///
/// # Errors
/// It is a part of a change that was going on when the copy was made, and says so in a way that is not known here.
fn renamed(sr: Uuid, volume: &Volume) -> Result<Option<String>, String> {
    let name = match names::role(&volume.name) {
        Role::Image(vdi, kind) => names::volume(kind, vdi_of(sr, vdi)),
        Role::New(vdi) => names::new_volume(vdi_of(sr, vdi)),
        Role::Old(vdi) => names::old_volume(vdi_of(sr, vdi)),
        // Nobody knows the new VDIs yet.
        Role::Log(_) | Role::NewLog(_) => return Ok(None),
        Role::Metadata => volume.name.clone(),
        Role::Other if journal::is(volume) => {
            match journal::of_another(&volume.name, |vdi| vdi_of(sr, vdi)) {
                Some(name) => name,
                None => {
                    return Err(
                        "a change was going on when the copy was made: copy the SR again at another moment"
                            .into(),
                    );
                }
            }
        }
        Role::Other => volume.name.clone(),
    };
    Ok(Some(name))
}

/// Step 3.
fn rename(copy: &Copy, sr: Uuid, group: &str, known: &Known) -> Result<(), ApiError> {
    let wrap = |error: std::io::Error| copy.failed(format_args!("no description of the group: {error}"));
    let dir = tempdir().map_err(wrap)?;
    let (before, after) = (dir.0.join("before"), dir.0.join("after"));
    copy.run("vgcfgbackup", &["-f", &before.to_string_lossy(), group])?;
    let said = std::fs::read_to_string(&before).map_err(wrap)?;
    let volume = |name: &str| {
        let known = known.volumes.get(name);
        known.map_or_else(|| Some(name.to_owned()), |volume| renamed(sr, volume).ok().flatten())
    };
    let changes = text::Changes {
        volume: &volume,
        id: &label::fresh_id,
        tag: (&format!("{BEGUN}{sr}"), &format!("{NAMED}{sr}")),
    };
    let changed = text::changed(&said, &changes).map_err(|why| copy.failed(why))?;
    std::fs::write(&after, changed).map_err(wrap)?;
    copy.run("vgcfgrestore", &["-f", &after.to_string_lossy(), group])
}

/// A directory of this process alone, which goes with it.
struct Own(PathBuf);

impl Drop for Own {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn tempdir() -> std::io::Result<Own> {
    use std::os::unix::fs::DirBuilderExt as _;
    let path = std::env::temp_dir().join(format!("tapio-resign-{}", Uuid::new_v4()));
    std::fs::DirBuilder::new().mode(0o700).create(&path)?;
    Ok(Own(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dir::facts::FileKind;

    #[test]
    fn names_follow_from_the_sr_and_the_old_names() {
        let (sr, other, vdi) = (Uuid::from_u128(1), Uuid::from_u128(2), Uuid::from_u128(3));
        let volume = |name: &str, tag: &str| Volume {
            name: name.to_owned(),
            tags: if tag.is_empty() { Vec::new() } else { vec![tag.to_owned()] },
            ..Volume::default()
        };
        let new = |name: &str, tag: &str| renamed(sr, &volume(name, tag));
        let image = names::volume(FileKind::Vhd, vdi);
        assert_eq!(new(&image, ""), Ok(Some(names::volume(FileKind::Vhd, vdi_of(sr, vdi)))));
        assert_eq!(renamed(sr, &volume(&image, "")), renamed(sr, &volume(&image, "")));
        assert_ne!(renamed(sr, &volume(&image, "")), renamed(other, &volume(&image, "")));
        assert_eq!(new(names::METADATA, ""), Ok(Some(names::METADATA.to_owned())));
        assert_eq!(new(&names::log_volume(vdi), ""), Ok(None));
        assert_eq!(new("theirs", ""), Ok(Some("theirs".to_owned())));
        let inflate = format!("inflate_{vdi}_8388608");
        assert_eq!(new(&inflate, "journaler"), Ok(Some(format!("inflate_{}_8388608", vdi_of(sr, vdi)))));
        assert!(new(&format!("clone_{vdi}_1"), "journaler").unwrap_err().contains("copy the SR again"));
        assert_ne!(footer_of(sr, vdi), vdi_of(sr, vdi));
        assert_eq!(label::id_of(&label::fresh_id()).map(|id| id.len()), Some(32));
    }
}
