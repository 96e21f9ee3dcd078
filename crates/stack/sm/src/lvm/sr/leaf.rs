//! A disk that holds little goes into its parent, a base copy that nothing else is based on.
//!
//! ```text
//! 1  journal leaf_<vdi> = <parent>
//! 2  a running disk closes its images; guests wait
//! 3  the parent has room; what the disk holds is copied into it       the disk hides it there
//! 4  the parent is no base copy any more
//! 5  the disk's volume gets the name VHD-OLD_<vdi>
//! 6  the parent's volume gets the disk's name             from here on it is finished, before it is undone
//! 7  it has room for the whole disk, where it is written or the SR is thick
//! 8  the running disk opens its new chain; guests go on; the old volume goes; the journal goes
//! ```
//!
//! Whether the parent has its name still tells whether step 6 was done. XenServer's storage manager
//! decides by the same.

use tapio_format::vhd::offline::{coalesce_paced, set_hidden};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::VolumeSr;
use super::create::open;
use crate::collect::LEAF_LEN_MAX;
use crate::dir::facts::{FileKind, plain_uuid};
use crate::dir::merge::{Pace, Pair, refused};
use crate::errors;
use crate::lock::Share;
use crate::lvm::journal::{Journal, Kind};
use crate::lvm::names;
use crate::lvm::thin::Wanted;
use crate::traits::{Ctx, Merge, Merged};

/// What a disk may hold when it is closed: it was written to since the plan was made.
const HELD_MAX: u64 = 4 * LEAF_LEN_MAX;

impl VolumeSr {
    pub(super) fn merge_disk(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let found = self.settled(ctx)?;
        let pair = self.pair(&found, merge)?;
        if pair.facts.hidden || found.listing.children().contains_key(&pair.image) {
            return Err(refused(format_args!("{} carries others, or is no disk", pair.image)));
        }
        if pair.below.kind == FileKind::Raw {
            return Err(refused(format_args!("{} is raw, and {} would become so", pair.parent, pair.image)));
        }
        let vdi = pair.image;
        self.check_held(ctx, &[vdi], &merge.held)?;
        let (own, below) = (names::volume(FileKind::Vhd, vdi), names::volume(FileKind::Vhd, pair.parent));
        let _pin = self.pin([own.clone(), below.clone()]);
        self.reach(&found.listed, [own.as_str(), below.as_str()])?;
        let journal = Journal::new(Kind::Leaf, vdi, pair.parent);
        journal.write(&self.group)?;
        ctx.step("lv:leaf-journal");
        let work = || {
            ctx.step("lv:leaf-paused");
            let moved = self.move_down(ctx, &pair);
            // Afterwards it is done, or as it was.
            self.settle_leaf(ctx, vdi, pair.parent).and(moved)
        };
        let (done, resumed) = self.with_closed_disks(ctx, &[vdi], work);
        ctx.step("lv:leaf-resumed");
        if resumed.is_ok() {
            self.remove_old(vdi)?;
            journal.remove(&self.group)?;
        }
        done.and(resumed)?;
        ctx.step("lv:leaf-done");
        self.merged(&[vdi], vec![pair.parent])
    }

    /// Steps 3 to 6.
    fn move_down(&self, ctx: &dyn Ctx, pair: &Pair) -> Result<(), ApiError> {
        let failed = |error: tapio_format::FormatError| errors::image(46, &error);
        let image = open(&self.path(FileKind::Vhd, pair.image), Access::ReadWrite)?;
        let holds = u64::from(image.allocated_blocks()) * u64::from(image.block_len());
        if holds > HELD_MAX {
            return Err(refused(format_args!("{} holds {holds} bytes by now, too much", pair.image)));
        }
        let target = self.open_target(ctx, pair, &image)?;
        // A guest waits: neither a rate nor a cancel. Reports are signs of life.
        let pace = Pace::new(ctx, 0, image.bat().len());
        coalesce_paced(&image, target, true, |block, done| pace.report(block, done)).map_err(failed)?;
        drop(image);
        ctx.step("lv:leaf-copied");
        let mut parent = open(&self.path(FileKind::Vhd, pair.parent), Access::ReadWrite)?;
        set_hidden(&mut parent, 0).map_err(failed)?;
        drop(parent);
        ctx.step("lv:leaf-shown");
        self.group.rename(&names::volume(FileKind::Vhd, pair.image), &names::old_volume(pair.image))?;
        ctx.step("lv:leaf-old-named");
        let (below, own) =
            (names::volume(FileKind::Vhd, pair.parent), names::volume(FileKind::Vhd, pair.image));
        self.group.rename(&below, &own)?;
        ctx.step("lv:leaf-named");
        Ok(())
    }

    /// Makes it as it was before, unless the parent has the disk's name. The disk is closed.
    fn settle_leaf(&self, ctx: &dyn Ctx, vdi: Uuid, parent: Uuid) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let (own, below) = (names::volume(FileKind::Vhd, vdi), names::volume(FileKind::Vhd, parent));
        let Some(volume) = listed.volumes.get(&below) else {
            let Some(volume) = listed.volumes.get(&own) else { return Ok(()) };
            self.group.set_writable(volume, true)?;
            // How its space is given goes with the disk.
            if let Some(old) = listed.volumes.get(&names::old_volume(vdi)) {
                self.group.add_tags(&own, &Wanted::of(old).tags())?;
            }
            let listed = self.group.list()?;
            // Its contents are in the other, which may need its room.
            self.remove_old(vdi)?;
            let provision = self.provision_in(&listed, vdi);
            if ctx.live(vdi).is_some() || !provision.is_thin {
                self.reach(&listed, [own.as_str()])?;
                let len = self.len_in_use(&listed, vdi, &self.whole(&listed, vdi)?)?;
                // Where there is no room now, it gets it when it is written.
                if let Err(error) = self.inflate(ctx, vdi, len) {
                    tracing::warn!("VDI {vdi} has no room for its whole disk: {error}");
                }
            }
            return Ok(());
        };
        if !listed.volumes.contains_key(&own) {
            self.group.rename(&names::old_volume(vdi), &own)?;
        }
        self.group.set_writable(volume, true)?;
        self.reach(&listed, [below.as_str()])?;
        let mut image = open(&self.path(FileKind::Vhd, parent), Access::ReadWrite)?;
        if image.footer().hidden == 0 {
            set_hidden(&mut image, 1).map_err(|error| errors::image(46, &error))?;
        }
        drop(image);
        self.deflate(ctx, parent)?;
        let volume = crate::lvm::group::Volume { is_writable: true, ..volume.clone() };
        self.group.set_writable(&volume, false)
    }

    fn remove_old(&self, vdi: Uuid) -> Result<(), ApiError> {
        let old = names::old_volume(vdi);
        if self.group.list()?.volumes.contains_key(&old) { self.group.remove(&[&old]) } else { Ok(()) }
    }

    /// Finishes or undoes a merge of a disk that was broken off.
    pub(super) fn recover_leaf(&self, ctx: &dyn Ctx, journal: &Journal) -> Result<(), ApiError> {
        let vdi = journal.image;
        let Some(parent) = plain_uuid(&journal.value) else {
            let text = format!("the journal of a merge of {vdi} says '{}'", journal.value);
            return Err(errors::fail(181, text));
        };
        let live = ctx.live(vdi);
        if let Some(disk) = &live {
            // It was paused, or was going to be, or goes on already.
            let _ = disk.pause();
        }
        tracing::info!("SR {}: the merge of {vdi} was broken off and is put in order", self.sr);
        let done = self.settle_leaf(ctx, vdi, parent);
        if let Some(disk) = live
            && let Err(error) = self.go_on(vdi, disk.as_ref())
        {
            tracing::warn!("the disk of VDI {vdi} does not go on after a broken merge: {error}");
            return done;
        }
        done?;
        self.remove_old(vdi)?;
        journal.remove(&self.group)
    }
}
