//! What a base copy holds goes into its parent, while disks above both are used; then it leaves its chains.
//!
//! Why nothing that a disk above reads changes, and why a kill leaves both images whole, is said in `dir::merge`. Here
//! the parent's volume becomes longer before, and takes writes until the image is gone.
//!
//! ```text
//! copy     the parent takes writes, and has room for what comes; what the image holds is copied; both are durable
//! relink   journal relink_<image> = <parent>; for each child: disks above close their images, its header names the
//!          parent, they go on; the image goes; the parent refuses writes; the journal goes
//! ```

use std::sync::Arc;

use tapio_format::vhd::offline::{CoalesceTarget, ParentFacts, coalesce_paced, set_parent_facts};
use tapio_format::vhd::{SECTOR_LEN, layout, time};
use tapio_format::{FileMedium, FormatError};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::create::{Open, open};
use super::{Found, Pin, VolumeSr};
use crate::dir::facts::{FileKind, plain_uuid};
use crate::dir::merge::{Pace, Pair, above, check_keys, disks_from, key_of, refused, with_closed};
use crate::errors;
use crate::lock::Share;
use crate::lvm::journal::{Journal, Kind};
use crate::lvm::{names, size};
use crate::traits::{Ctx, LiveDisk, Merge, MergeCost, Merged};

/// An image whose contents are in its parent. Base copies refuse writes, so they stay there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::lvm) struct Copied {
    image: Uuid,
    parent: Uuid,
    image_footer: Uuid,
    parent_footer: Uuid,
}

impl Copied {
    fn of(pair: &Pair) -> Self {
        Self {
            image: pair.image,
            parent: pair.parent,
            image_footer: pair.facts.footer_uuid,
            parent_footer: pair.below.footer_uuid,
        }
    }
}

/// Bytes that a parent's volume has when it has all that the image has, and what is copied.
struct Takes {
    len: u64,
    copies: u64,
}

impl VolumeSr {
    pub(super) fn pair(&self, found: &Found, merge: &Merge) -> Result<Pair, ApiError> {
        Pair::of(self.sr, &found.listing, merge, |_| None)
    }

    /// The volumes of both, reachable.
    fn reach_pair(&self, found: &Found, pair: &Pair) -> Result<Pin<'_>, ApiError> {
        let image = names::volume(pair.facts.kind, pair.image);
        let parent = names::volume(pair.below.kind, pair.parent);
        let pin = self.pin([image.clone(), parent.clone()]);
        self.reach(&found.listed, [image.as_str(), parent.as_str()])?;
        Ok(pin)
    }

    fn takes(&self, pair: &Pair, image: &Open) -> Result<Takes, ApiError> {
        let copies = u64::from(image.allocated_blocks()) * u64::from(image.block_len());
        if pair.below.kind == FileKind::Raw {
            return Ok(Takes { len: size::rounded(image.virtual_len()), copies });
        }
        let parent = open(&self.path(FileKind::Vhd, pair.parent), Access::ReadOnly)?;
        let Some(header) = parent.header() else {
            return Err(refused(format_args!("{} is a fixed disk, which keeps its length", pair.parent)));
        };
        if header.entries_for(image.virtual_len()).is_err() {
            let text = "has a block table without room for the size of what goes into it";
            return Err(refused(format_args!("{} {text}", pair.parent)));
        }
        let missing =
            image.bat().allocated().filter(|(block, _)| parent.bat().entry(*block).is_none()).count();
        let block = layout::block_span_len(image.block_len()) + layout::DATA_ALIGN;
        let len = parent.physical_len() + missing as u64 * block + layout::DATA_ALIGN;
        Ok(Takes { len: size::rounded(len), copies })
    }

    pub(super) fn cost_of_merge(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<MergeCost, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let found = self.found()?;
        let pair = self.pair(&found, merge)?;
        let pin = self.reach_pair(&found, &pair)?;
        let image = open(&self.path(FileKind::Vhd, pair.image), Access::ReadOnly)?;
        let takes = self.takes(&pair, &image)?;
        drop((image, pin));
        self.unreach();
        let journal = size::EXTENT;
        let needs = takes.len.saturating_sub(pair.below.physical) + journal;
        Ok(MergeCost { needs, copies: takes.copies, must_grow: false })
    }

    /// The parent, to be written, with room for what the image holds. What is encrypted stays so.
    pub(super) fn open_target(
        &self,
        ctx: &dyn Ctx,
        pair: &Pair,
        image: &Open,
    ) -> Result<CoalesceTarget<FileMedium>, ApiError> {
        let takes = self.takes(pair, image)?;
        let listed = self.group.list()?;
        if let Some(volume) = listed.volumes.get(&names::volume(pair.below.kind, pair.parent)) {
            self.group.set_writable(volume, true)?;
        }
        let wrap = |error: FormatError| errors::image(46, &error);
        let path = self.path(pair.below.kind, pair.parent);
        if pair.below.kind == FileKind::Raw {
            check_keys(pair, key_of(image), Default::default())?;
            if takes.len > pair.below.physical {
                self.lengthen_raw(ctx, pair.parent, pair.below.physical, takes.len)?;
            }
            return FileMedium::open(&path, Access::ReadWrite).map(CoalesceTarget::Raw).map_err(wrap);
        }
        self.inflate(ctx, pair.parent, takes.len)?;
        let mut parent = open(&path, Access::ReadWrite)?;
        check_keys(pair, key_of(image), key_of(&parent))?;
        parent.write_footer().map_err(wrap)?;
        Ok(CoalesceTarget::Vhd(Box::new(parent)))
    }

    pub(super) fn copy_into_parent(&self, ctx: &dyn Ctx, merge: &Merge, rate: u64) -> Result<(), ApiError> {
        let (pin, image, target, copied) = {
            let _held = self.lock(ctx, Share::Exclusive)?;
            let found = self.settled(ctx)?;
            let pair = self.pair(&found, merge)?;
            pair.check_base(&found.listing)?;
            let copied = Copied::of(&pair);
            if *self.copied.lock() == Some(copied) {
                return Ok(());
            }
            let pin = self.reach_pair(&found, &pair)?;
            let image = open(&self.path(FileKind::Vhd, pair.image), Access::ReadOnly)?;
            image.check_settled().map_err(|error| errors::image(46, &error))?;
            let target = self.open_target(ctx, &pair, &image)?;
            (pin, image, target, copied)
        };
        ctx.step("lv:merge-begin");
        let pace = Pace::new(ctx, rate, image.bat().len());
        let merged = coalesce_paced(&image, target, true, |block, done| pace.before(block, done));
        let merged = merged.map_err(|error| errors::image(200, &error))?;
        ctx.progress(1.0);
        tracing::info!(
            "SR {}: {} KiB of base copy {} are in its parent {}",
            self.sr,
            merged.sectors * SECTOR_LEN / 1024,
            merge.image,
            merge.parent
        );
        *self.copied.lock() = Some(copied);
        drop((image, pin));
        ctx.step("lv:merge-copied");
        Ok(())
    }

    /// Nothing opens or closes these disks, and what has them open are running disks.
    pub(super) fn check_held(&self, ctx: &dyn Ctx, disks: &[Uuid], held: &[Uuid]) -> Result<(), ApiError> {
        let is_other = |vdi: &Uuid| self.active.has(*vdi) && ctx.live(*vdi).is_none();
        if let Some(why) = disks.iter().find_map(|vdi| ctx.elsewhere(*vdi)) {
            return Err(refused(why));
        }
        match disks.iter().find(|vdi| !held.contains(vdi) || is_other(vdi)) {
            Some(vdi) => Err(errors::vdi_in_use(*vdi, "coalesce")),
            None => Ok(()),
        }
    }

    pub(super) fn with_closed_disks(
        &self,
        ctx: &dyn Ctx,
        disks: &[Uuid],
        work: impl FnOnce() -> Result<(), ApiError>,
    ) -> (Result<(), ApiError>, Result<(), ApiError>) {
        with_closed(ctx, disks, |vdi, disk| self.go_on(vdi, disk), work)
    }

    /// VDIs as they are after a merge.
    pub(super) fn merged(&self, changed: &[Uuid], gone: Vec<Uuid>) -> Result<Merged, ApiError> {
        self.unsay(&gone);
        self.unreach();
        let listed = self.group.list()?;
        let changed = changed.iter().map(|vdi| self.info_in(&listed, *vdi)).collect::<Result<_, _>>()?;
        Ok(Merged { changed, gone })
    }

    pub(super) fn relink_children(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let found = self.settled(ctx)?;
        let pair = self.pair(&found, merge)?;
        pair.check_base(&found.listing)?;
        if *self.copied.lock() != Some(Copied::of(&pair)) {
            return Err(refused(format_args!(
                "what {} holds is not in its parent: merge it again",
                pair.image
            )));
        }
        self.check_held(ctx, &disks_from(&found.listing, pair.image), &merge.held)?;
        let journal = Journal::new(Kind::Relink, pair.image, pair.parent);
        journal.write(&self.group)?;
        ctx.step("lv:relink-journal");
        let children = above(&found.listing, pair.image, &pair.facts);
        for child in &children {
            let relink = || {
                ctx.step("lv:relink-paused");
                self.relink_one(*child, pair.parent)?;
                ctx.step("lv:relink-child");
                Ok(())
            };
            let disks = disks_from(&found.listing, *child);
            let (done, resumed) = self.with_closed_disks(ctx, &disks, relink);
            // The journal stays: the next look at the SR goes on with it.
            done.and(resumed)?;
            ctx.step("lv:relink-resumed");
        }
        self.drop_merged(ctx, &journal, pair.parent)?;
        ctx.step("lv:relink-done");
        let changed: Vec<Uuid> = children.into_iter().chain([pair.parent]).collect();
        self.merged(&changed, vec![pair.image])
    }

    /// The header of `child`, on which no disk is open, names `parent`.
    fn relink_one(&self, child: Uuid, parent: Uuid) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let missing = |uuid| errors::vdi_missing(self.sr, uuid);
        let (volume, _) = listed.image(child).ok_or_else(|| missing(child))?;
        let (below, kind) = listed.image(parent).ok_or_else(|| missing(parent))?;
        self.reach(&listed, [volume.name.as_str(), below.name.as_str()])?;
        self.group.set_writable(volume, true)?;
        let mut image = open(&self.path(FileKind::Vhd, child), Access::ReadWrite)?;
        let name = names::mapper(&self.group.name, &names::volume(kind, parent));
        let facts = ParentFacts {
            uuid: self.whole(&listed, parent)?.footer_uuid,
            timestamp: time::now(),
            relative_path: format!("./{name}"),
            name,
            key_hash: Default::default(),
        };
        let done = set_parent_facts(&mut image, &facts);
        drop(image);
        done.map_err(|error| errors::image(46, &error))?;
        let is_base = self.whole(&listed, child)?.hidden;
        if is_base {
            self.group
                .set_writable(&crate::lvm::group::Volume { is_writable: true, ..volume.clone() }, false)?;
        }
        Ok(())
    }

    /// The image goes, then the journal.
    fn drop_merged(&self, ctx: &dyn Ctx, journal: &Journal, parent: Uuid) -> Result<(), ApiError> {
        let name = names::volume(FileKind::Vhd, journal.image);
        let listed = self.group.list()?;
        if listed.volumes.contains_key(&name) {
            self.group.remove(&[&name])?;
        }
        *self.copied.lock() = None;
        ctx.step("lv:relink-image-gone");
        if let Some((volume, _)) = listed.image(parent) {
            self.group.set_writable(volume, false)?;
        }
        journal.remove(&self.group)
    }

    /// Finishes a relink that was broken off.
    pub(super) fn recover_relink(&self, ctx: &dyn Ctx, journal: &Journal) -> Result<(), ApiError> {
        let Some(parent) = plain_uuid(&journal.value) else {
            // XenServer's says nothing of the parent: its image does, as long as it is there.
            return self.recover_foreign_relink(ctx, journal);
        };
        self.finish_relink(ctx, journal, parent)
    }

    fn recover_foreign_relink(&self, ctx: &dyn Ctx, journal: &Journal) -> Result<(), ApiError> {
        let found = self.found()?;
        let image = found.listing.images.get(&journal.image);
        match image.and_then(|facts| found.listing.parent_of(facts)) {
            Some(parent) => self.finish_relink(ctx, journal, parent),
            None => journal.remove(&self.group),
        }
    }

    fn finish_relink(&self, ctx: &dyn Ctx, journal: &Journal, parent: Uuid) -> Result<(), ApiError> {
        let found = self.found()?;
        let disks = disks_from(&found.listing, parent);
        if self.check_held(ctx, &disks, &disks).is_err() {
            tracing::info!("SR {}: the relink of {} waits for the end of a copy", self.sr, journal.image);
            return Ok(());
        }
        if found.listing.images.values().any(|facts| facts.damage.is_some()) {
            let text = format!("an image that cannot be read may be based on {}", journal.image);
            return Err(refused(text));
        }
        let live: Vec<(Uuid, Box<dyn LiveDisk>)> =
            disks.iter().filter_map(|vdi| Some((*vdi, ctx.live(*vdi)?))).collect();
        for (_, disk) in &live {
            // It was paused, or was going to be, or goes on already.
            let _ = disk.pause();
        }
        tracing::info!("SR {}: the merge of {} was broken off and is put in order", self.sr, journal.image);
        let relinked = match found.listing.images.get(&journal.image) {
            None => Ok(()),
            Some(facts) => {
                let children = above(&found.listing, journal.image, &Arc::clone(facts));
                children.into_iter().try_for_each(|child| self.relink_one(child, parent))
            }
        };
        let mut goes_on = true;
        for (vdi, disk) in &live {
            if let Err(error) = self.go_on(*vdi, disk.as_ref()) {
                tracing::warn!("the disk of VDI {vdi} does not go on after a broken merge: {error}");
                goes_on = false;
            }
        }
        relinked?;
        // With a disk that stays closed it stays: the next recovery tries again.
        if goes_on { self.drop_merged(ctx, journal, parent) } else { Ok(()) }
    }
}
