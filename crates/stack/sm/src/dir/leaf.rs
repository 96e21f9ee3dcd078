//! A disk that holds little goes into its parent, a base copy that nothing else is based on.
//!
//! ```text
//! 1  journal leaf_<vdi> = <parent>
//! 2  a running disk closes its images; guests wait
//! 3  what the disk holds is copied into the parent          the disk hides it there
//! 4  the parent is no base copy any more
//! 5  the parent takes the disk's name, in its place         from here on it is finished, before it is undone
//! 6  the running disk opens its new chain; guests go on
//! 7  the journal goes
//! ```
//!
//! The parent's file tells whether step 5 was done. XenServer's storage manager decides by the same.
//!
//! A disk that holds much is forked first (`ForkKind::Single`): what it held becomes a base copy, which is merged while
//! the disk is used. What it holds then is what was written since.

use tapio_format::vhd::offline::{self, Image, OpenOptions, coalesce_paced, journal_beside, set_hidden};
use tapio_types::ApiError;

use super::ImageDir;
use super::facts::FileKind;
use super::merge::{Pace, Pair, exists, refused};
use super::merge_journal::{MergeJournal, MergeKind};
use crate::collect::{LEAF_LEN_LAST, LEAF_LEN_MAX};
use crate::errors;
use crate::lock::Share;
use crate::traits::{Ctx, Merge, Merged};

/// What a disk may hold when it is closed: it was written to since the plan was made.
const HELD_MAX: u64 = LEAF_LEN_LAST + LEAF_LEN_MAX;

impl ImageDir {
    pub(super) fn merge_disk(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listing = self.settled_list(ctx)?;
        let pair = self.pair(&listing, merge)?;
        if pair.facts.hidden || listing.children().contains_key(&pair.image) {
            return Err(refused(format_args!("{} carries others, or is no disk", pair.image)));
        }
        if pair.below.kind == FileKind::Raw {
            return Err(refused(format_args!("{} is raw, and {} would become so", pair.parent, pair.image)));
        }
        let vdi = pair.image;
        self.check_held(ctx, &[vdi], &merge.held)?;
        let journal = MergeJournal { kind: MergeKind::Leaf, image: vdi, parent: pair.parent };
        let own = self.index.begin();
        self.write_merge(&journal)?;
        ctx.step("leaf:journal");
        let work = || {
            ctx.step("leaf:paused");
            let moved = self.move_down(ctx, &pair);
            // Afterwards it is done, or as it was.
            self.settle_leaf(&journal).and(moved)
        };
        let (done, resumed) = self.with_closed_disks(ctx, &[vdi], work);
        ctx.step("leaf:resumed");
        if resumed.is_ok() {
            self.remove_merge(&journal)?;
        }
        self.index.end(&own, &[vdi, pair.parent]);
        done.and(resumed)?;
        ctx.step("leaf:done");
        self.merged(&[vdi], vec![pair.parent])
    }

    /// Steps 3 to 5.
    fn move_down(&self, ctx: &dyn Ctx, pair: &Pair) -> Result<(), ApiError> {
        let failed = |error: tapio_format::FormatError| errors::image(46, &error);
        let (top, below) = (self.file(FileKind::Vhd, pair.image), self.file(FileKind::Vhd, pair.parent));
        let image = Image::open(&top, OpenOptions::WRITE).map_err(failed)?;
        // Only now does it take no space for blocks to come.
        let holds = u64::from(image.allocated_blocks()) * u64::from(image.block_len());
        if holds > HELD_MAX {
            return Err(refused(format_args!("{} holds {holds} bytes by now, too much", pair.image)));
        }
        if let Some(free) = self.free().filter(|free| *free < holds) {
            let text = format!("{} holds {holds} bytes, and {free} are free", pair.image);
            return Err(errors::fail(44, text));
        }
        if pair.below.virtual_size < pair.facts.virtual_size {
            offline::resize_journalled(&below, pair.facts.virtual_size, &journal_beside(&below), |_| ())
                .map_err(failed)?;
        }
        let target = self.open_target(pair, &image)?;
        // A guest waits: neither a rate nor a cancel. Reports are signs of life.
        let pace = Pace::new(ctx, 0, image.bat().len());
        coalesce_paced(&image, target, true, |block, done| pace.report(block, done)).map_err(failed)?;
        drop(image);
        ctx.step("leaf:copied");
        let mut parent = Image::open(&below, OpenOptions::WRITE).map_err(failed)?;
        set_hidden(&mut parent, 0).map_err(failed)?;
        drop(parent);
        ctx.step("leaf:shown");
        std::fs::rename(&below, &top)
            .map_err(|error| errors::io(46, "cannot give the parent the name of", &top, &error))?;
        self.sync()?;
        ctx.step("leaf:named");
        Ok(())
    }

    /// Makes it as it was before, unless the parent has the disk's name. The disk is closed.
    pub(super) fn settle_leaf(&self, journal: &MergeJournal) -> Result<(), ApiError> {
        let below = self.file(FileKind::Vhd, journal.parent);
        if !exists(&below) {
            return Ok(());
        }
        self.finish_resize(journal.parent)?;
        let failed = |error: tapio_format::FormatError| errors::image(46, &error);
        let mut parent = Image::open(&below, OpenOptions::WRITE).map_err(failed)?;
        if parent.footer().hidden == 0 { set_hidden(&mut parent, 1).map_err(failed) } else { Ok(()) }
    }
}
