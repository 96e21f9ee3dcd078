//! Volumes that become longer or shorter, and larger disks.
//!
//! ```text
//! inflate   journal inflate_<vdi>_<len>; the volume becomes longer; its last sector is made zero;
//!           the footer goes there;
//!           the journal goes                 a kill: the footer is written once more, from its copy
//! deflate   the footer goes to the new end; the volume becomes shorter         a kill: its end has a footer either way
//! ```
//!
//! What was at the end of a longer volume before may be another image's footer, so the journal stays
//! until ours is there.
//!
//! A running disk closes its images while its VHD's volume becomes longer, because it keeps the footer at
//! the end that it
//! knows. A raw one goes on.

use std::fs::File;
use std::os::unix::fs::FileExt;

use tapio_format::FileMedium;
use tapio_format::vhd::FOOTER_LEN;
use tapio_format::vhd::offline::{Image, OpenOptions, resize_fast, set_physical_len};
use tapio_types::{Access, ApiError, Span};
use uuid::Uuid;

use super::create::{clear, open};
use super::{Link, VolumeSr};
use crate::dir::create::rounded;
use crate::dir::facts::FileKind;
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::{Listed, Volume};
use crate::lvm::journal::{Journal, Kind};
use crate::lvm::{names, read, size};
use crate::traits::{Ctx, LiveDisk, VdiInfo};

impl VolumeSr {
    /// Makes the volume of a VHD so long, which nothing has open for writing.
    pub(super) fn inflate(&self, ctx: &dyn Ctx, vdi: Uuid, to: u64) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let name = names::volume(FileKind::Vhd, vdi);
        let Some(volume) = listed.volumes.get(&name).filter(|volume| volume.size < to) else { return Ok(()) };
        self.check_room(&listed, to - volume.size + size::EXTENT)?;
        self.group.set_writable(volume, true)?;
        self.reach(&listed, [name.as_str()])?;
        let image = Image::open(&self.path(FileKind::Vhd, vdi), OpenOptions::READ);
        // A fixed disk has its footer behind its data, and no copy of it.
        if !image.map_err(|error| errors::image(46, &error))?.footer().disk_type.is_dynamic() {
            return Ok(());
        }
        let journal = Journal::new(Kind::Inflate, vdi, volume.size);
        journal.write(&self.group)?;
        ctx.step("lv:inflate-journal");
        if let Err(error) = self.group.resize(&name, volume.size, to) {
            journal.remove(&self.group)?;
            return Err(error);
        }
        ctx.step("lv:inflate-longer");
        self.put_footer(vdi)?;
        ctx.step("lv:inflate-footer");
        journal.remove(&self.group)
    }

    /// The footer of a VHD whose volume has become longer: from its copy, which stays where it is.
    pub(super) fn put_footer(&self, vdi: Uuid) -> Result<(), ApiError> {
        let path = self.path(FileKind::Vhd, vdi);
        let failed = |error: std::io::Error| errors::io(54, "cannot write the footer of", &path, &error);
        let file = File::options().read(true).write(true).open(&path).map_err(failed)?;
        let wrap = |error: tapio_format::FormatError| errors::image(46, &error);
        let medium = FileMedium::from_file(file, &path).map_err(wrap)?;
        let len = tapio_format::Medium::len(&medium).map_err(failed)?;
        let file = medium.file();
        file.write_all_at(&[0; FOOTER_LEN], len - FOOTER_LEN as u64)
            .and_then(|()| file.sync_all())
            .map_err(failed)?;
        let options = OpenOptions { use_backup: true, ..OpenOptions::WRITE };
        let mut image = Image::open_on(medium, &path, options).map_err(wrap)?;
        image.write_footer().map_err(wrap)
    }

    /// Makes the volume of a VHD that nothing writes as short as it can be.
    pub(super) fn deflate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.deflate_to(ctx, vdi, 0)
    }

    /// The same, and not shorter than `least`.
    fn deflate_to(&self, ctx: &dyn Ctx, vdi: Uuid, least: u64) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let name = names::volume(FileKind::Vhd, vdi);
        let Some(volume) = listed.volumes.get(&name) else { return Ok(()) };
        self.reach(&listed, [name.as_str()])?;
        let mut image = open(&self.path(FileKind::Vhd, vdi), Access::ReadWrite)?;
        let to = size::rounded(image.physical_len().max(least));
        if to >= volume.size {
            return Ok(());
        }
        set_physical_len(&mut image, to).map_err(|error| errors::image(54, &error))?;
        drop(image);
        ctx.step("lv:deflate-footer");
        self.group.resize(&name, volume.size, to)
    }

    /// A leaf that is going to be written has room for its whole disk, or if it is thin for what comes next.
    /// What is written by a copy, which asks for nothing, has room for the `whole` disk.
    pub(super) fn prepare_write(&self, listed: &Listed, leaf: &Link, whole: bool) -> Result<(), ApiError> {
        let Some(volume) = listed.volumes.get(&leaf.volume()) else { return Ok(()) };
        self.group.set_writable(volume, true)?;
        if leaf.facts.kind == FileKind::Vhd && !volume.is_open {
            let len = match whole {
                true => size::full(leaf.facts.virtual_size),
                false => self.len_in_use(listed, leaf.uuid, &leaf.facts)?,
            };
            self.inflate(&Quiet, leaf.uuid, len)?;
        }
        Ok(())
    }

    /// A thin leaf that nothing has open takes what it holds.
    pub(super) fn after_write(&self, vdi: Uuid) {
        let deflated = self.group.list().and_then(|listed| {
            let is_closed = |volume: &Volume| volume.is_active && volume.is_writable && !volume.is_open;
            match listed.image(vdi).filter(|(volume, _)| is_closed(volume)) {
                Some((volume, FileKind::Vhd)) if self.provision_of(volume).is_thin => {
                    let disk = read::facts(volume, FileKind::Vhd).virtual_size;
                    self.deflate_to(&Quiet, vdi, self.provision_of(volume).least(disk))
                }
                _ => Ok(()),
            }
        });
        if let Err(error) = deflated {
            tracing::info!("VDI {vdi} keeps the space of its whole disk: {error}");
        }
    }

    pub(super) fn resize_image(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.group.list()?;
        let live = ctx.live(vdi);
        if live.is_none() {
            self.check_unused(ctx, &listed, vdi, "resize")?;
        }
        let facts = self.whole(&listed, vdi)?;
        let wanted = rounded(facts.kind, bytes)?;
        let wanted = if facts.kind == FileKind::Raw { size::rounded(wanted) } else { wanted };
        if bytes < facts.virtual_size {
            let text = format!(
                "{bytes} bytes are fewer than the {} it has: a VDI is not made smaller",
                facts.virtual_size
            );
            return Err(errors::fail(79, text));
        }
        if facts.hidden {
            return Err(errors::fail(110, format_args!("{vdi} is a base copy: its size is for good")));
        }
        if wanted == facts.virtual_size {
            return self.info_now(vdi);
        }
        ctx.step("lv:resize-begin");
        let volume = names::volume(facts.kind, vdi);
        let _pin = self.pin([volume.clone()]);
        self.reach(&listed, [volume.as_str()])?;
        match facts.kind {
            FileKind::Raw => {
                self.check_room(&listed, wanted - facts.virtual_size)?;
                self.lengthen_raw(ctx, vdi, facts.virtual_size, wanted)?;
                if let Some(disk) = &live {
                    disk.grow(wanted)?;
                }
            }
            FileKind::Vhd => self.resize_vhd(ctx, vdi, facts.virtual_size, wanted, live.as_deref())?,
        }
        // A running disk makes its log longer itself. A log that is left shorter grows when the disk is opened.
        if live.is_none() && super::cbt::has_log(&listed, vdi) {
            self.grow_log(ctx, vdi, wanted)?;
            ctx.step("lv:resize-log-grown");
        }
        ctx.step("lv:resize-done");
        self.unreach();
        self.info_now(vdi)
    }

    /// Makes a raw image longer; what comes reads as zeros.
    pub(super) fn lengthen_raw(&self, ctx: &dyn Ctx, vdi: Uuid, from: u64, to: u64) -> Result<(), ApiError> {
        let name = names::volume(FileKind::Raw, vdi);
        let journal = Journal::new(Kind::Clear, vdi, from);
        journal.write(&self.group)?;
        ctx.step("lv:clear-journal");
        if let Err(error) = self.group.resize(&name, from, to) {
            journal.remove(&self.group)?;
            return Err(error);
        }
        ctx.step("lv:clear-longer");
        // Not broken off: what is there would be a guest's.
        clear(&Quiet, &self.path(FileKind::Raw, vdi), Span::new(from, to - from))?;
        journal.remove(&self.group)
    }

    fn resize_vhd(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        from: u64,
        to: u64,
        live: Option<&dyn LiveDisk>,
    ) -> Result<(), ApiError> {
        let path = self.path(FileKind::Vhd, vdi);
        let wrap = |error: tapio_format::FormatError| errors::image(110, &error);
        let image = Image::open(&path, OpenOptions::READ).map_err(wrap)?;
        if image.header().is_none_or(|header| header.entries_for(to).is_err()) {
            let text = "has a block table without room for that: copy the disk into a new one of that size";
            return Err(errors::fail(110, format_args!("{vdi} {text}")));
        }
        drop(image);
        let is_thin = self.provision_in(&self.group.list()?, vdi).is_thin;
        let len = if is_thin { 0 } else { size::full(to) };
        if let Some(disk) = live.filter(|_| is_thin) {
            // Its volume follows what is written.
            return disk.grow(to);
        }
        if let Some(disk) = live {
            let longer = || self.inflate(ctx, vdi, len);
            let (done, resumed) =
                crate::dir::merge::with_closed(ctx, &[vdi], |vdi, disk| self.go_on(vdi, disk), longer);
            done.and(resumed)?;
            return disk.grow(to);
        }
        self.inflate(ctx, vdi, len)?;
        ctx.step("lv:resize-inflated");
        debug_assert!(to > from);
        let mut image = open(&path, Access::ReadWrite)?;
        resize_fast(&mut image, to).map_err(wrap)
    }
}

/// Work that is not watched: it is short, or must come to its end.
pub(super) struct Quiet;

impl Ctx for Quiet {
    fn is_cancelled(&self) -> bool {
        false
    }
    fn progress(&self, _: f64) {}
    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        None
    }
    fn step(&self, _: &'static str) {}
}
