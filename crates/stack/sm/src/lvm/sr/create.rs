//! New images, and volumes that a user put into the group.
//!
//! An image is made in a volume that no storage manager takes for one; it appears, whole, when that gets its name.
//! A raw
//! one is made zero before: its space held other disks.

use std::fs::File;
use std::path::Path;

use tapio_format::vhd::offline::{self, Shape};
use tapio_format::{FileMedium, Medium};
use tapio_types::{Access, ApiError, Span};
use uuid::Uuid;

use super::VolumeSr;
use super::cbt::has_log;
use crate::dir::create::{rounded, wanted_kind};
use crate::dir::facts::FileKind;
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::Listed;
use crate::lvm::metadata::{VdiEntry, illegal, unsayable};
use crate::lvm::thin::Wanted;
use crate::lvm::{names, read, single, size};
use crate::traits::{Ctx, NewVdi, VdiInfo};

/// So much is made zero between two signs of life.
const PIECE: u64 = 32 << 20;

impl VolumeSr {
    pub(super) fn create_image(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        let kind = wanted_kind(new, FileKind::Vhd)?;
        let virtual_size = rounded(kind, new.virtual_size)?;
        let bad = illegal(&new.name_label).or_else(|| illegal(&new.name_description));
        if let Some(character) = bad {
            return Err(errors::fail(447, unsayable(character)));
        }
        let wanted = Wanted::read(&new.sm_config, "sm_config", 66)?;
        let len = match kind {
            FileKind::Raw => size::rounded(virtual_size),
            FileKind::Vhd => wanted.over(self.provision()).least(virtual_size),
        };
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.group.list()?;
        self.check_free(&listed, new.uuid)?;
        self.check_single(&listed, "make an SR on another LUN for another one")?;
        self.check_room(&listed, len)?;
        ctx.step("lv:create-begin");
        let fresh = names::new_volume(new.uuid);
        if listed.volumes.contains_key(&fresh) {
            self.group.remove(&[&fresh])?;
        }
        let path = self.group.create(&fresh, len, None)?;
        ctx.step("lv:create-volume");
        let made = match kind {
            FileKind::Vhd => offline::create(&path, &Shape::Dynamic, virtual_size, size::TABLE_FOR)
                .map_err(|error| errors::image(78, &error)),
            FileKind::Raw => clear(ctx, &path, Span::new(0, len)),
        };
        let made = made.and_then(|()| self.group.add_tags(&fresh, &wanted.tags()));
        let named = made.and_then(|()| {
            ctx.step("lv:create-filled");
            self.group.rename(&fresh, &names::volume(kind, new.uuid))
        });
        if let Err(error) = named {
            if let Err(removing) = self.group.remove(&[&fresh]) {
                tracing::warn!("{fresh} is left until the SR is attached again: {removing}");
            }
            return Err(error);
        }
        ctx.step("lv:create-named");
        let said = VdiEntry {
            name: new.name_label.clone(),
            description: new.name_description.clone(),
            ..VdiEntry::new(new.uuid, vdi_type(kind))
        };
        self.say(said);
        self.unreach();
        let mut info = self.info_now(new.uuid)?;
        for (key, value) in &new.sm_config {
            info.sm_config.entry(key.clone()).or_insert_with(|| value.clone());
        }
        ctx.step("lv:create-done");
        Ok(info)
    }

    /// Refuses one more VDI where the SR holds one.
    fn check_single(&self, listed: &Listed, next: &str) -> Result<(), ApiError> {
        let is_image = |name: &String| matches!(names::role(name), names::Role::Image(..));
        if self.group.single.is_single && listed.volumes.keys().any(is_image) {
            return Err(single::refused(78, next));
        }
        Ok(())
    }

    /// Makes the VDI of a new SR that holds one.
    pub(super) fn make_single(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let Some(kind) = self.group.single.fresh else { return Ok(()) };
        let listed = self.group.list()?;
        if self.check_single(&listed, "").is_ok() {
            let format = match kind {
                FileKind::Vhd => "vhd",
                FileKind::Raw => "raw",
            };
            let new = NewVdi {
                uuid: Uuid::new_v4(),
                virtual_size: single::fitting(kind, listed.free),
                sm_config: [("type", format), ("allocation", "thick")]
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
                name_label: "disk".into(),
                name_description: String::new(),
            };
            self.create_image(ctx, &new)?;
        }
        self.group.remove_tag(&single::fresh_tag(kind))
    }

    pub(super) fn introduce_volume(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        location: &str,
    ) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.group.list()?;
        let own = FileKind::ALL.map(|kind| names::volume(kind, vdi));
        if location == vdi.to_string() || own.iter().any(|name| name == location) {
            self.whole(&listed, vdi)?;
            return self.info_now(vdi);
        }
        let named = crate::dir::facts::plain_uuid(location).and_then(|uuid| Some(listed.image(uuid)?.0));
        let Some(volume) = listed.volumes.get(location).or(named) else {
            let text = format!("there is no volume '{location}' in {}: name one, or a UUID", self.group.name);
            return Err(errors::fail(46, text));
        };
        self.check_free(&listed, vdi)?;
        if !matches!(names::role(&volume.name), names::Role::Image(..)) {
            self.check_single(&listed, "destroy that one first")?;
        }
        let kind = match names::role(&volume.name) {
            names::Role::Image(old, kind) => {
                self.check_unused(ctx, &listed, old, "introduce")?;
                if self.found()?.listing.children().contains_key(&old) {
                    let text = format!("{location} carries other images: introduce it as {old}");
                    return Err(errors::fail(46, text));
                }
                kind
            }
            // Another name says nothing of what is inside.
            names::Role::Other if read::facts(volume, FileKind::Vhd).damage.is_none() => FileKind::Vhd,
            names::Role::Other => FileKind::Raw,
            _ => return Err(errors::fail(46, format_args!("'{location}' is a volume of the SR itself"))),
        };
        if volume.is_open {
            return Err(errors::fail(46, format_args!("the volume '{location}' is open: close it first")));
        }
        let facts = read::facts(volume, kind);
        if let Some(why) = facts.damage {
            return Err(errors::fail(65, format_args!("{location}: {why}: see 'vhd-util check'")));
        }
        ctx.step("lv:introduce-begin");
        // Its log is that of another VDI.
        if let names::Role::Image(old, _) = names::role(&volume.name)
            && has_log(&listed, old)
        {
            self.drop_logs(ctx, &[old])?;
        }
        self.group.rename(&volume.name, &names::volume(kind, vdi))?;
        ctx.step("lv:introduce-named");
        self.say(VdiEntry::new(vdi, vdi_type(kind)));
        self.info_now(vdi)
    }
}

/// `vdi_type` of a kind.
pub(super) const fn vdi_type(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Vhd => "vhd",
        FileKind::Raw => "aio",
    }
}

/// Makes a part of a volume read as zeros.
///
/// # Errors
/// 54, `TASK_CANCELLED`.
pub(super) fn clear(ctx: &dyn Ctx, path: &Path, span: Span) -> Result<(), ApiError> {
    let failed = |error: std::io::Error| errors::io(54, "cannot clear", path, &error);
    // Not locked against writers: where a disk process has it open, it writes before this part.
    let file = File::options().read(true).write(true).open(path).map_err(failed)?;
    let mut medium = FileMedium::from_file(file, path).map_err(|error| errors::image(54, &error))?;
    let mut left = span;
    while !left.is_empty() {
        if ctx.is_cancelled() {
            return Err(errors::cancelled());
        }
        let piece = left.prefix(PIECE);
        medium.zero(piece).map_err(failed)?;
        left = left.skip(piece.len);
        ctx.progress(1.0 - left.len as f64 / span.len.max(1) as f64);
    }
    medium.flush().map_err(failed)
}

/// An image that is open for a change by this side.
pub(super) type Open = offline::Image<FileMedium>;

/// Opens one.
///
/// # Errors
/// 46, 65.
pub(super) fn open(path: &Path, access: Access) -> Result<Open, ApiError> {
    let options = match access {
        Access::ReadOnly => offline::OpenOptions::READ,
        Access::ReadWrite => offline::OpenOptions::WRITE,
    };
    offline::Image::open(path, options).map_err(|error| errors::image(46, &error))
}
