//! What the metadata volume says, kept as the volumes are. It follows them: what cannot be said now is said when the SR
//! is attached next, and keeps nothing from being done.

use std::fs::File;

use tapio_format::{FileMedium, FormatError, Medium};
use tapio_types::ApiError;
use uuid::Uuid;

use super::create::vdi_type;
use super::{Found, VolumeSr};
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::Group;
use crate::lvm::metadata::{Allocation, Metadata, SrEntry, VdiEntry, illegal, unsayable};
use crate::lvm::names;
use crate::traits::{Ctx, VdiInfo};

/// The metadata of a group that is here.
fn open(group: &Group, is_writable: bool) -> Result<FileMedium, String> {
    let path = group.path(names::METADATA);
    // Not locked: the lock of the SR is on it.
    let file =
        File::options().read(true).write(is_writable).open(&path).map_err(|error| error.to_string())?;
    FileMedium::from_file(file, &path).map_err(|error| error.to_string())
}

/// Makes the metadata volume of a new group.
///
/// # Errors
/// 50, 181.
pub(in crate::lvm) fn create(group: &Group, sr: SrEntry) -> Result<(), ApiError> {
    group.create(names::METADATA, crate::lvm::metadata::VOLUME_LEN, None)?;
    begin(group, sr)
}

fn begin(group: &Group, sr: SrEntry) -> Result<(), ApiError> {
    let failed = |why: String| errors::fail(181, format_args!("{}: {why}", group.name));
    let mut medium = open(group, true).map_err(failed)?;
    Metadata::create(&mut medium, sr).map(drop).map_err(|error| errors::image(181, &error))
}

/// Whether the volume holds nothing: its SR was being made when that was broken off, or has none.
fn is_blank(medium: &FileMedium) -> bool {
    let mut first = [0; 512];
    medium.read_at(0, &mut first).is_ok() && !first.starts_with(b"XSSM")
}

impl VolumeSr {
    /// Makes the metadata volume reachable, and makes it where there is none; says how volumes are allocated.
    pub(super) fn prepare(
        group: &Group,
        sr: Uuid,
        wanted: Option<Allocation>,
    ) -> Result<Allocation, ApiError> {
        let listed = group.list()?;
        let fresh = SrEntry { uuid: sr, allocation: wanted.unwrap_or_default(), ..SrEntry::default() };
        match listed.volumes.get(names::METADATA) {
            None => {
                tracing::info!("{}: it has no volume {}, and gets one", group.name, names::METADATA);
                create(group, fresh)?;
                return Ok(wanted.unwrap_or_default());
            }
            Some(volume) if !volume.is_active => group.activate([names::METADATA].into_iter())?,
            Some(_) => {}
        }
        let failed = |why: String| errors::fail(181, format_args!("{}: {why}", group.name));
        let medium = open(group, true).map_err(failed)?;
        if is_blank(&medium) {
            begin(group, fresh)?;
            return Ok(wanted.unwrap_or_default());
        }
        match Metadata::read(&medium) {
            Ok(said) if said.sr.uuid != sr => Err(failed(format!(
                "its metadata are those of SR {}: the group was renamed without them",
                said.sr.uuid
            ))),
            Ok(said) => Ok(wanted.unwrap_or(said.sr.allocation)),
            Err(why) => {
                tracing::warn!("{}: its metadata are left as they are: {why}", group.name);
                Ok(wanted.unwrap_or_default())
            }
        }
    }

    /// What the volume says; none where it cannot be read.
    pub(super) fn metadata(&self) -> Option<Metadata> {
        let medium = open(&self.group, false).ok()?;
        Metadata::read(&medium).ok()
    }

    pub(super) fn try_change(
        &self,
        change: impl FnOnce(&mut Metadata, &mut FileMedium) -> Result<(), FormatError>,
    ) -> Result<(), String> {
        let mut medium = open(&self.group, true)?;
        let mut said = Metadata::read(&medium)?;
        change(&mut said, &mut medium).map_err(|error| error.to_string())
    }

    fn change(&self, change: impl FnOnce(&mut Metadata, &mut FileMedium) -> Result<(), FormatError>) {
        if let Err(why) = self.try_change(change) {
            tracing::warn!("{}: its metadata do not follow: {why}", self.group.name);
        }
    }

    /// A VDI is called otherwise: see [`crate::Sr::rename`].
    pub(super) fn rename_vdi(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        name: &str,
        description: &str,
    ) -> Result<(), ApiError> {
        if let Some(character) = illegal(name).or_else(|| illegal(description)) {
            return Err(errors::fail(447, unsayable(character)));
        }
        let _held = self.lock(ctx, Share::Exclusive)?;
        let renamed = self.try_change(|said, medium| {
            // One that the metadata do not know yet is named when the SR is attached.
            let Some(known) = said.vdi(vdi).cloned() else { return Ok(()) };
            said.put(medium, VdiEntry { name: name.into(), description: description.into(), ..known })
        });
        renamed.map_err(|why| errors::fail(181, format_args!("{}: {why}", self.group.name)))
    }

    /// Makes the metadata say the names that the records have: they may have changed while the SR was away.
    pub(super) fn name_as_recorded(&self, ctx: &dyn Ctx) {
        let Some(said) = self.metadata() else { return };
        let Ok(records) = ctx.records(self.sr, None) else { return };
        let differs = |info: &VdiInfo| {
            let known = said.vdi(info.uuid)?;
            let name = info.name_label.clone().filter(|name| illegal(name).is_none())?;
            let description =
                info.told.as_ref().map_or_else(String::new, |told| told.name_description.clone());
            let entry = VdiEntry { name, description, ..known.clone() };
            let is_sayable = info.managed && illegal(&entry.description).is_none();
            (is_sayable && !entry.is_said_as(known)).then_some(entry)
        };
        let changed: Vec<VdiEntry> = records.iter().filter_map(differs).collect();
        if !changed.is_empty() {
            self.change(|said, medium| changed.into_iter().try_for_each(|entry| said.put(medium, entry)));
        }
    }

    /// Says this of a VDI.
    pub(super) fn say(&self, entry: VdiEntry) {
        self.change(|said, medium| said.put(medium, entry));
    }

    /// Says that VDIs are gone.
    pub(super) fn unsay(&self, gone: &[Uuid]) {
        self.change(|said, medium| gone.iter().try_for_each(|vdi| said.remove(medium, *vdi)));
    }

    /// Makes the metadata say which images there are.
    pub(super) fn reconcile(&self, found: &Found) {
        let Some(said) = self.metadata() else { return };
        let gone: Vec<Uuid> = said
            .vdis()
            .map(|entry| entry.uuid)
            .filter(|vdi| !found.listing.images.contains_key(vdi) && !found.listing.logs.contains(vdi))
            .collect();
        let children = found.listing.children();
        let missing: Vec<VdiEntry> = found
            .listing
            .images
            .iter()
            .filter(|(vdi, facts)| said.vdi(**vdi).is_none_or(|entry| entry.vdi_type != vdi_type(facts.kind)))
            .map(|(vdi, facts)| {
                let count = children.get(vdi).copied().unwrap_or(0);
                let is_base = crate::dir::index::Listing::is_base(facts, count);
                let known = said.vdi(*vdi).cloned();
                let entry =
                    known.unwrap_or_else(|| VdiEntry { managed: !is_base, ..VdiEntry::new(*vdi, "vhd") });
                VdiEntry { vdi_type: vdi_type(facts.kind).into(), ..entry }
            })
            .collect();
        if gone.is_empty() && missing.is_empty() {
            return;
        }
        self.change(|said, medium| {
            gone.iter().try_for_each(|vdi| said.remove(medium, *vdi))?;
            missing.into_iter().try_for_each(|entry| said.put(medium, entry))
        });
    }
}
