//! A base copy that was merged into its parent leaves its chains.
//!
//! ```text
//! 1  journal relink_<image> = <parent>
//! 2  for each child of the image:
//!      running disks above it close their images; guests wait
//!      the child's header names the parent             see tapio_format::vhd::offline::set_parent
//!      the disks open their new chains; guests go on
//! 3  the image goes; the journal goes
//! ```
//!
//! A child reads the same above the image and above its parent, so every state between two steps is one that can be
//! used. The journal is what makes the work be finished: with some children on the parent, the image is no longer the
//! parent's only child. The SR is locked from 1 to 3, so no other operation meets the journal of one that runs.

use tapio_format::vhd::offline::{Image, OpenOptions, set_parent};
use tapio_types::ApiError;
use uuid::Uuid;

use super::ImageDir;
use super::facts::FileKind;
use super::index::Listing;
use super::merge::{above, disks_from, refused};
use super::merge_journal::{Found, MergeJournal, MergeKind, read};
use super::remove::remove;
use crate::errors;
use crate::lock::Share;
use crate::traits::{Ctx, LiveDisk, Merge, Merged};

impl ImageDir {
    pub(super) fn relink_children(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listing = self.settled_list(ctx)?;
        let pair = self.base_pair(&listing, merge)?;
        if !self.is_copied(&pair)? {
            return Err(refused(format_args!(
                "what {} holds is not in its parent: merge it again",
                pair.image
            )));
        }
        self.check_held(ctx, &disks_from(&listing, pair.image), &merge.held)?;
        let journal = MergeJournal { kind: MergeKind::Relink, image: pair.image, parent: pair.parent };
        let own = self.index.begin();
        self.write_merge(&journal)?;
        ctx.step("relink:journal");
        let children = above(&listing, pair.image, &pair.facts);
        for child in &children {
            let relink = || {
                ctx.step("relink:paused");
                self.relink_one(&listing, *child, pair.parent)?;
                ctx.step("relink:child");
                Ok(())
            };
            let (done, resumed) = self.with_closed_disks(ctx, &disks_from(&listing, *child), relink);
            // The journal stays: the next look at the SR goes on with it.
            done.and(resumed)?;
            ctx.step("relink:resumed");
        }
        self.drop_merged(ctx, &journal)?;
        let changed: Vec<Uuid> = children.iter().copied().chain([pair.parent]).collect();
        let touched: Vec<Uuid> = changed.iter().copied().chain([pair.image]).collect();
        self.index.end(&own, &touched);
        ctx.step("relink:done");
        self.merged(&changed, vec![pair.image])
    }

    /// VDIs as they are after a merge.
    pub(super) fn merged(&self, changed: &[Uuid], gone: Vec<Uuid>) -> Result<Merged, ApiError> {
        // An image that is named here carries others, or is a disk: a raw one is the former.
        let changed = changed.iter().map(|vdi| self.info_of(*vdi, 1)).collect::<Result<_, _>>()?;
        Ok(Merged { changed, gone })
    }

    /// The header of `child`, on which no disk is open, names `parent`.
    fn relink_one(&self, listing: &Listing, child: Uuid, parent: Uuid) -> Result<(), ApiError> {
        let below = listing.images.get(&parent).ok_or_else(|| errors::vdi_missing(self.sr, parent))?;
        let failed = |error: tapio_format::FormatError| errors::image(46, &error);
        let mut image = Image::open(&self.file(FileKind::Vhd, child), OpenOptions::WRITE).map_err(failed)?;
        let path = self.file(below.kind, parent);
        set_parent(&mut image, &path, below.kind == FileKind::Raw).map_err(failed)
    }

    /// Step 3.
    fn drop_merged(&self, ctx: &dyn Ctx, journal: &MergeJournal) -> Result<(), ApiError> {
        remove(&self.file(FileKind::Vhd, journal.image))?;
        self.sync()?;
        *self.copied.lock() = None;
        ctx.step("relink:image-gone");
        self.remove_merge(journal)
    }

    /// Finishes or undoes a merge whose journal has this name.
    pub(super) fn recover_merge(&self, ctx: &dyn Ctx, name: &str) -> Result<(), ApiError> {
        let path = self.path.join(name);
        let found = read(&self.path, name);
        match found.map_err(|error| errors::io(181, "cannot read the journal", &path, &error))? {
            None | Some(Found::Foreign) => Ok(()),
            Some(Found::NotWhole) => {
                tracing::info!("SR {}: {name} was never whole and is removed", self.sr);
                remove(&path)
            }
            Some(Found::Ours(journal)) => self.recover_own(ctx, &journal),
        }
    }

    fn recover_own(&self, ctx: &dyn Ctx, journal: &MergeJournal) -> Result<(), ApiError> {
        let listing = self.list()?;
        // A disk's parent may have the disk's name already.
        let root = if journal.kind == MergeKind::Leaf { journal.image } else { journal.parent };
        let disks = disks_from(&listing, root);
        if self.check_held(ctx, &disks, &disks).is_err() {
            tracing::info!("SR {}: {} waits for the end of a copy", self.sr, journal.file_name());
            return Ok(());
        }
        let live: Vec<(Uuid, Box<dyn LiveDisk>)> =
            disks.iter().filter_map(|vdi| Some((*vdi, ctx.live(*vdi)?))).collect();
        for (_, disk) in &live {
            // It was paused, or was going to be, or goes on already.
            let _ = disk.pause();
        }
        tracing::info!("SR {}: the merge of {} was broken off and is put in order", self.sr, journal.image);
        let done = match journal.kind {
            MergeKind::Grow => self.finish_resize(journal.parent),
            MergeKind::Relink => self.finish_relink(ctx, &listing, journal),
            MergeKind::Leaf => self.settle_leaf(journal),
        };
        let mut goes_on = true;
        for (vdi, disk) in &live {
            if let Err(error) = self.go_on(*vdi, disk.as_ref()) {
                tracing::warn!("the disk of VDI {vdi} does not go on after a broken merge: {error}");
                goes_on = false;
            }
        }
        done?;
        // With a disk that stays closed it stays: the next recovery tries again.
        if goes_on { self.remove_merge(journal) } else { Ok(()) }
    }

    fn finish_relink(
        &self,
        ctx: &dyn Ctx,
        listing: &Listing,
        journal: &MergeJournal,
    ) -> Result<(), ApiError> {
        let Some(facts) = listing.images.get(&journal.image) else { return Ok(()) };
        if listing.images.values().any(|facts| facts.damage.is_some()) {
            return Err(refused(format_args!(
                "an image that cannot be read may be based on {}",
                journal.image
            )));
        }
        for child in above(listing, journal.image, facts) {
            self.relink_one(listing, child, journal.parent)?;
            ctx.step("relink:child");
        }
        remove(&self.file(FileKind::Vhd, journal.image))?;
        self.sync()?;
        ctx.step("relink:image-gone");
        Ok(())
    }
}
