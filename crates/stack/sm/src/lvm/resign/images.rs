//! What images and the metadata volume say of each other, and of themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tapio_format::vhd::DiskType;
use tapio_format::vhd::offline::{Image, OpenOptions, ParentFacts, set_parent_facts, set_uuid};
use uuid::Uuid;

use super::super::group::Volume;
use super::super::metadata::Metadata;
use super::super::names;
use super::volume::Pieces;
use super::{Known, footer_of, vdi_of};
use crate::dir::facts::FileKind;
use crate::traits::Ctx;

/// The image of a volume.
struct Of<'a> {
    vdi: Uuid,
    kind: FileKind,
    volume: &'a Volume,
}

fn images(known: &Known) -> impl Iterator<Item = Of<'_>> {
    known.volumes.values().filter_map(|volume| {
        let (vdi, kind) = names::image_of(&volume.name)?;
        Some(Of { vdi, kind, volume })
    })
}

fn open(of: &Of<'_>, devices: &[PathBuf], options: OpenOptions) -> Result<Image<Pieces>, String> {
    let pieces = Pieces::of(of.volume, devices).map_err(|error| format!("{}: {error}", of.volume.name))?;
    Image::open_on(pieces, Path::new(&of.volume.name), options).map_err(|error| error.to_string())
}

/// The image that one is based on, as it has recorded it; none for one that stands alone.
fn recorded(image: &Image<Pieces>, of: &Of<'_>) -> Result<Option<(Uuid, FileKind)>, String> {
    let header = image.header().filter(|_| image.footer().disk_type == DiskType::Differencing);
    let Some(header) = header else { return Ok(None) };
    let name = header.parent_name().unwrap_or_default();
    let found = names::image_of_recorded(&name);
    found
        .map(Some)
        .ok_or_else(|| format!("{}: its parent is called '{name}', as no image is", of.volume.name))
}

/// Refuses images that cannot be read or lead nowhere: they would be resigned by halves.
pub(super) fn check(known: &Known, devices: &[PathBuf]) -> Result<(), String> {
    let there: BTreeSet<Uuid> = images(known).map(|of| of.vdi).collect();
    for of in images(known).filter(|of| of.kind == FileKind::Vhd) {
        let image = open(&of, devices, OpenOptions::READ)?;
        if let Some((parent, _)) = recorded(&image, &of)?.filter(|(parent, _)| !there.contains(parent)) {
            return Err(format!("{}: its parent {parent} is not there", of.volume.name));
        }
    }
    match known.volumes.get(names::METADATA) {
        Some(volume) => Metadata::read(&Pieces::of(volume, devices).map_err(|error| error.to_string())?)
            .map(drop)
            .map_err(|why| format!("{}: {why}", names::METADATA)),
        None => Err(format!("there is no volume {}: it is no SR", names::METADATA)),
    }
}

/// Gives all their new UUIDs; volumes have their new names. Doing it again changes nothing.
pub(super) fn resign(ctx: &dyn Ctx, sr: Uuid, known: &Known, devices: &[PathBuf]) -> Result<(), String> {
    let there: BTreeSet<Uuid> = images(known).map(|of| of.vdi).collect();
    // What was recorded is the old one, or the new one where this was done before.
    let new = |vdi: Uuid| if there.contains(&vdi) { vdi } else { vdi_of(sr, vdi) };
    for of in images(known).filter(|of| of.kind == FileKind::Vhd) {
        let mut image = open(&of, devices, OpenOptions::WRITE)?;
        let parent = recorded(&image, &of)?;
        set_uuid(&mut image, footer_of(sr, of.vdi)).map_err(|error| error.to_string())?;
        if let Some((parent, kind)) = parent {
            let parent = new(parent);
            let name = names::mapper(&known.name, &names::volume(kind, parent));
            let facts = ParentFacts {
                uuid: if kind == FileKind::Raw { Uuid::nil() } else { footer_of(sr, parent) },
                timestamp: image.header().map_or(0, |header| header.parent_timestamp),
                relative_path: format!("./{name}"),
                name,
                key_hash: Default::default(),
            };
            set_parent_facts(&mut image, &facts).map_err(|error| error.to_string())?;
        }
        ctx.step("lv:resign-image");
    }
    let volume = known.volumes.get(names::METADATA).ok_or("the volume of the metadata is gone")?;
    let mut medium = Pieces::of(volume, devices).map_err(|error| error.to_string())?;
    let mut said = Metadata::read(&medium).map_err(|why| format!("{}: {why}", names::METADATA))?;
    said.resign(&mut medium, sr, new).map_err(|error| error.to_string())
}
