//! What a base copy holds goes into its parent, while disks above both are used.
//!
//! What an image holds hides its parent. So writing that into the parent changes nothing that a disk above reads, at no
//! moment, as long as nothing else is based on the parent. Disk processes above go on with the tables of the parent
//! that they have in memory: a table of before or of now leads to the same bytes wherever the image does not hide them.
//! So one worker copies, however many disks are above, without the SR's lock and without a journal: a kill leaves both
//! images whole, and the next merge writes the same bytes again.
//!
//! ```text
//! 1  the SR is locked; the two are judged, and locked against other writers; the SR is free again
//! 2  the parent becomes as large as the image, within its block table
//! 3  what the image holds is copied, block by block       at a rate; cancellable; durable after each 64 MiB
//! 4  the parent is durable                                 what comes next is in `relink`
//! ```
//!
//! A parent whose table has no room is made larger before 1, with all disks above closed, because its blocks move:
//!
//! ```text
//! 1  journal coalesce_<image> = <parent>
//! 2  running disks above close their images
//! 3  the parent grows, by the steps of a resize
//! 4  the disks go on; the journal goes
//! ```

use std::cell::Cell;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_format::vhd::offline::{
    self, CoalesceTarget, Coalesced, Image, OpenOptions, coalesce_paced, journal_beside,
};
use tapio_format::vhd::{KeyHash, SECTOR_LEN, layout};
use tapio_format::{FileMedium, FormatError, FormatErrorKind};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::ImageDir;
use super::facts::{Facts, FileKind};
use super::index::Listing;
use super::journal::{foreign_journal, unfinished};
use super::merge_journal::{MergeJournal, MergeKind};
use super::recover;
use super::remove::remove;
use crate::errors;
use crate::lock::Share;
use crate::mount;
use crate::traits::{Ctx, LiveDisk, Merge, MergeCost};

/// The lowest rate: below it a block would take minutes, and the storage would count as one that hangs.
const RATE_MIN: u64 = 256 << 10;
/// How long a copy that is ahead of its rate sleeps before it looks whether it was cancelled.
const NAP: Duration = Duration::from_millis(50);
/// How often a copy says how far it is, at least.
const NEWS: Duration = Duration::from_secs(1);
/// How often at most: the caller may write each report to the database.
const UPDATES: u32 = 200;
/// After so many copied bytes the parent is made durable. A worker that waits for a disk says nothing meanwhile, and
/// what a slow disk has to write at once must take less time than a worker may be silent for.
const SYNC_EVERY: u64 = 64 << 20;

/// By these a file is known to be as it was.
type Stamp = (u64, u64, u64, i64, i64);

/// An image whose contents are in its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copied {
    image: Uuid,
    parent: Uuid,
    /// The parent's footer.
    parent_footer: Uuid,
    stamp: Stamp,
}

/// An image, and its parent that nothing else is based on.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) image: Uuid,
    pub(crate) parent: Uuid,
    pub(crate) facts: Arc<Facts>,
    pub(crate) below: Arc<Facts>,
}

impl Pair {
    /// The two, where the first may go into the second.
    ///
    /// # Errors
    /// 46, with the reason; `unfinished` says why an image is not to be touched.
    pub(crate) fn of(
        sr: Uuid,
        listing: &Listing,
        merge: &Merge,
        unfinished: impl Fn(Uuid) -> Option<String>,
    ) -> Result<Self, ApiError> {
        if let Some((other, _)) = listing.images.iter().find(|(_, facts)| facts.damage.is_some()) {
            return Err(refused(format_args!(
                "image {other} cannot be read, and may be based on {}: see 'vhd-util check'",
                merge.parent
            )));
        }
        let find =
            |uuid: Uuid| listing.images.get(&uuid).cloned().ok_or_else(|| errors::vdi_missing(sr, uuid));
        let (facts, below) = (find(merge.image)?, find(merge.parent)?);
        let (image, parent) = (merge.image, merge.parent);
        if listing.parent_of(&facts) != Some(parent) || facts.kind != FileKind::Vhd {
            return Err(refused(format_args!("{image} is not based on {parent}")));
        }
        if facts.parent.as_ref().is_none_or(|recorded| recorded.uuid != below.footer_uuid) {
            return Err(refused(format_args!(
                "{parent} is not the parent that {image} recorded: their UUIDs differ"
            )));
        }
        if !Listing::is_base(&below, 1) {
            return Err(refused(format_args!("{parent}, below {image}, is a disk of its own")));
        }
        let children = above(listing, parent, &below);
        if let Some(other) = children.into_iter().find(|child| *child != image) {
            return Err(refused(format_args!("{other} is based on {parent}, too: it would change")));
        }
        for uuid in [image, parent] {
            if let Some(why) = unfinished(uuid) {
                return Err(refused(why));
            }
        }
        let lower = listing.parent_of(&below).and_then(|lower| listing.images.get(&lower));
        let is_rising = below.virtual_size <= facts.virtual_size
            && lower.is_none_or(|lower| lower.virtual_size <= below.virtual_size);
        if !is_rising {
            return Err(refused(format_args!("an image below {image} is larger than what is above it")));
        }
        if facts.disabled || below.disabled {
            return Err(refused(format_args!("a resize of {image} or {parent} was broken off: scan the SR")));
        }
        Ok(Self { image, parent, facts, below })
    }

    /// Refuses what is no base copy that carries something.
    ///
    /// # Errors
    /// 46.
    pub(crate) fn check_base(&self, listing: &Listing) -> Result<(), ApiError> {
        if !self.facts.hidden {
            return Err(refused(format_args!("{} is a disk, and no base copy", self.image)));
        }
        if above(listing, self.image, &self.facts).is_empty() {
            return Err(refused(format_args!("{} carries nothing: it can be removed", self.image)));
        }
        Ok(())
    }
}

/// 46, with the reason.
pub(crate) fn refused(what: impl std::fmt::Display) -> ApiError {
    errors::fail(46, what)
}

impl ImageDir {
    pub(super) fn cost_of_merge(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<MergeCost, ApiError> {
        let _held = self.lock(ctx, Share::Shared)?;
        let pair = self.pair(&self.list()?, merge)?;
        let failed = |error: FormatError| errors::image(46, &error);
        let image = Image::open(&self.file(FileKind::Vhd, pair.image), OpenOptions::READ).map_err(failed)?;
        let block = layout::block_span_len(image.block_len());
        let copies = u64::from(image.allocated_blocks()) * u64::from(image.block_len());
        let most = MergeCost { needs: copies, copies, must_grow: false };
        if pair.below.kind == FileKind::Raw {
            return Ok(most);
        }
        let parent =
            Image::open(&self.file(FileKind::Vhd, pair.parent), OpenOptions::READ).map_err(failed)?;
        let Some(header) = parent.header() else {
            let needs = image.virtual_len().saturating_sub(parent.virtual_len());
            return Ok(MergeCost { needs, ..most });
        };
        let missing =
            image.bat().allocated().filter(|(block, _)| parent.bat().entry(*block).is_none()).count();
        let needs = if parent.block_len() == image.block_len() { missing as u64 * block } else { copies };
        let must_grow = header.entries_for(image.virtual_len()).is_err();
        Ok(MergeCost { needs, copies, must_grow })
    }

    /// Steps 1 to 4.
    pub(super) fn copy_into_parent(&self, ctx: &dyn Ctx, merge: &Merge, rate: u64) -> Result<(), ApiError> {
        let (image, target, copied) = {
            let _held = self.lock(ctx, Share::Exclusive)?;
            let pair = self.base_pair(&self.settled_list(ctx)?, merge)?;
            if self.is_copied(&pair)? {
                return Ok(());
            }
            // Locked against other writers for as long as it is read: all rests on it that this does not change.
            let mut image = self.open_for_merge(FileKind::Vhd, pair.image, OpenOptions::WRITE)?;
            // The mark of a writer that died would have the next disk process open it for writing, too.
            image.write_footer().map_err(|error| errors::image(46, &error))?;
            let target = self.open_target(&pair, &image)?;
            (image, target, self.stamped(&pair)?)
        };
        ctx.step("merge:begin");
        let pace = Pace::new(ctx, rate, image.bat().len());
        let merged = coalesce_paced(&image, target, true, |block, done| pace.before(block, done));
        let merged = merged.map_err(|error| errors::image(200, &error))?;
        ctx.progress(1.0);
        tracing::info!(
            "SR {}: {} KiB of base copy {} are in its parent {}",
            self.sr,
            merged.sectors / 2,
            merge.image,
            merge.parent
        );
        *self.copied.lock() = Some(copied);
        ctx.step("merge:copied");
        Ok(())
    }

    /// What lies there, once nothing is half done.
    pub(super) fn settled_list(&self, ctx: &dyn Ctx) -> Result<Listing, ApiError> {
        let listing = self.list()?;
        if !recover::is_needed(&self.path, &listing) {
            return Ok(listing);
        }
        self.recover_locked(ctx, &listing)?;
        self.list()
    }

    /// The two, where the first may go into the second.
    pub(super) fn pair(&self, listing: &Listing, merge: &Merge) -> Result<Pair, ApiError> {
        let unfinished = |image| foreign_journal(&self.path, image).map(|journal| unfinished(&journal));
        Pair::of(self.sr, listing, merge, unfinished)
    }

    /// The same of a base copy that carries something.
    pub(super) fn base_pair(&self, listing: &Listing, merge: &Merge) -> Result<Pair, ApiError> {
        let pair = self.pair(listing, merge)?;
        pair.check_base(listing)?;
        Ok(pair)
    }

    fn open_for_merge(
        &self,
        kind: FileKind,
        uuid: Uuid,
        options: OpenOptions,
    ) -> Result<Image<FileMedium>, ApiError> {
        Image::open(&self.file(kind, uuid), options).map_err(|error| errors::image(46, &error))
    }

    /// The parent, to be written. It has room for the image's size, and what is encrypted stays so.
    pub(super) fn open_target(
        &self,
        pair: &Pair,
        image: &Image<FileMedium>,
    ) -> Result<CoalesceTarget<FileMedium>, ApiError> {
        let key = key_of(image);
        if pair.below.kind == FileKind::Raw {
            check_keys(pair, key, KeyHash::default())?;
            let medium = FileMedium::open(&self.file(FileKind::Raw, pair.parent), Access::ReadWrite);
            return medium.map(CoalesceTarget::Raw).map_err(|error| errors::image(46, &error));
        }
        let mut parent = self.open_for_merge(FileKind::Vhd, pair.parent, OpenOptions::WRITE)?;
        check_keys(pair, key, key_of(&parent))?;
        if parent.header().is_some_and(|header| header.entries_for(image.virtual_len()).is_err()) {
            return Err(refused(format_args!("{} has to grow first", pair.parent)));
        }
        parent.write_footer().map_err(|error| errors::image(46, &error))?;
        Ok(CoalesceTarget::Vhd(Box::new(parent)))
    }

    /// What shows that a copy of the image as it is now is whole.
    fn stamped(&self, pair: &Pair) -> Result<Copied, ApiError> {
        let path = self.file(FileKind::Vhd, pair.image);
        let data =
            std::fs::metadata(&path).map_err(|error| errors::io(46, "cannot look at", &path, &error))?;
        let stamp = (data.dev(), data.ino(), data.len(), data.mtime(), data.mtime_nsec());
        Ok(Copied { image: pair.image, parent: pair.parent, parent_footer: pair.below.footer_uuid, stamp })
    }

    /// Whether the image is in its parent as it is now.
    pub(super) fn is_copied(&self, pair: &Pair) -> Result<bool, ApiError> {
        Ok(*self.copied.lock() == Some(self.stamped(pair)?))
    }

    /// A parent whose table has no room for the image's size grows.
    pub(super) fn grow_parent(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<(), ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listing = self.settled_list(ctx)?;
        let pair = self.pair(&listing, merge)?;
        let path = self.file(pair.below.kind, pair.parent);
        if pair.below.kind != FileKind::Vhd || pair.below.virtual_size >= pair.facts.virtual_size {
            return Ok(());
        }
        let disks = disks_from(&listing, pair.image);
        self.check_held(ctx, &disks, &merge.held)?;
        let journal = MergeJournal { kind: MergeKind::Grow, image: pair.image, parent: pair.parent };
        let own = self.index.begin();
        self.write_merge(&journal)?;
        ctx.step("merge:grow-journal");
        let grow = || {
            ctx.step("merge:grow-paused");
            offline::resize_journalled(&path, pair.facts.virtual_size, &journal_beside(&path), |_| ())
                .map_err(|error| errors::image(110, &error))?;
            ctx.step("merge:grown");
            Ok(())
        };
        let (done, resumed) = self.with_closed_disks(ctx, &disks, grow);
        ctx.step("merge:grow-resumed");
        self.index.end(&own, &[pair.parent]);
        // A disk that stays closed goes on by the next recovery.
        if resumed.is_ok() {
            self.remove_merge(&journal)?;
        }
        done.and(resumed)
    }

    pub(super) fn write_merge(&self, journal: &MergeJournal) -> Result<(), ApiError> {
        journal.write(&self.path).map_err(|error| {
            errors::io(202, "cannot write the journal", &self.path.join(journal.file_name()), &error)
        })
    }

    pub(super) fn remove_merge(&self, journal: &MergeJournal) -> Result<(), ApiError> {
        remove(&self.path.join(journal.file_name())).and_then(|()| self.sync())
    }

    /// Nothing opens or closes these disks, and what has them open are running disks.
    pub(super) fn check_held(&self, ctx: &dyn Ctx, disks: &[Uuid], held: &[Uuid]) -> Result<(), ApiError> {
        let is_active = |vdi: &Uuid| self.active.lock().contains_key(vdi) && ctx.live(*vdi).is_none();
        if let Some(why) = disks.iter().find_map(|vdi| ctx.elsewhere(*vdi)) {
            return Err(refused(why));
        }
        match disks.iter().find(|vdi| !held.contains(vdi) || is_active(vdi)) {
            Some(vdi) => Err(errors::vdi_in_use(*vdi, "coalesce")),
            None => Ok(()),
        }
    }

    /// See [`with_closed`].
    pub(super) fn with_closed_disks(
        &self,
        ctx: &dyn Ctx,
        disks: &[Uuid],
        work: impl FnOnce() -> Result<(), ApiError>,
    ) -> (Result<(), ApiError>, Result<(), ApiError>) {
        with_closed(ctx, disks, |vdi, disk| self.go_on(vdi, disk), work)
    }

    /// Removes base copies that carry nothing.
    pub(super) fn collect_bases(&self, ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut listing = self.settled_list(ctx)?;
        let before: Vec<Uuid> = listing.images.keys().copied().collect();
        let own = self.index.begin();
        self.remove_all_garbage(ctx, &mut listing)?;
        let gone: Vec<Uuid> = before.into_iter().filter(|uuid| !listing.images.contains_key(uuid)).collect();
        self.index.end(&own, &gone);
        Ok(gone)
    }

    /// Bytes that are free.
    pub(super) fn free(&self) -> Option<u64> {
        mount::sizes(&self.path).ok().map(|(size, used)| size.saturating_sub(used))
    }
}

/// Does `work` while running disks among `disks` have their images closed; `go_on` has one go on. Answers what came of
/// the work, and whether all surely go on.
pub(crate) fn with_closed(
    ctx: &dyn Ctx,
    disks: &[Uuid],
    go_on: impl Fn(Uuid, &dyn LiveDisk) -> Result<(), ApiError>,
    work: impl FnOnce() -> Result<(), ApiError>,
) -> (Result<(), ApiError>, Result<(), ApiError>) {
    let mut closed: Vec<(Uuid, Box<dyn LiveDisk>)> = Vec::new();
    let mut paused = Ok(());
    for vdi in disks {
        let Some(disk) = ctx.live(*vdi) else { continue };
        paused = disk.pause();
        if paused.is_err() {
            break;
        }
        closed.push((*vdi, disk));
    }
    let done = paused.clone().and_then(|()| work());
    // A disk without an answer may be closed, or close later: what the caller leaves behind has it go on.
    let mut resumed = paused;
    for (vdi, disk) in &closed {
        // Tried twice: what stays closed is a guest that waits.
        let on = go_on(*vdi, disk.as_ref()).or_else(|_| go_on(*vdi, disk.as_ref()));
        if let Err(error) = on {
            tracing::error!("the disk of VDI {vdi} stays paused: {error}");
            resumed = Err(error);
        }
    }
    (done, resumed)
}

pub(crate) fn key_of(image: &Image<FileMedium>) -> KeyHash {
    image.batmap().map(|batmap| batmap.header.key_hash).unwrap_or_default()
}

/// Refuses two images of which one cannot be read with the other's key.
///
/// # Errors
/// 46.
pub(crate) fn check_keys(pair: &Pair, image: KeyHash, parent: KeyHash) -> Result<(), ApiError> {
    if image == parent {
        return Ok(());
    }
    let text = "are not encrypted with the same key: what is in one cannot be read in the other";
    Err(refused(format_args!("{} and {} {text}", pair.image, pair.parent)))
}

/// Images that are based on this one: by its name, or by the UUID in its footer.
pub(crate) fn above(listing: &Listing, image: Uuid, facts: &Facts) -> Vec<Uuid> {
    let is_above = |other: &Facts| {
        let by_uuid = |parent: &super::facts::ParentName| {
            !facts.footer_uuid.is_nil() && parent.uuid == facts.footer_uuid
        };
        listing.parent_of(other) == Some(image) || other.parent.as_ref().is_some_and(by_uuid)
    };
    listing.images.iter().filter(|(_, other)| is_above(other)).map(|(uuid, _)| *uuid).collect()
}

/// Disks whose chain has the image, itself too if it is one.
pub(crate) fn disks_from(listing: &Listing, image: Uuid) -> Vec<Uuid> {
    let mut children: std::collections::HashMap<Uuid, Vec<Uuid>> = std::collections::HashMap::new();
    for (uuid, facts) in &listing.images {
        if let Some(parent) = listing.parent_of(facts) {
            children.entry(parent).or_default().push(*uuid);
        }
    }
    let (mut found, mut left) = (Vec::new(), vec![image]);
    while let Some(next) = left.pop() {
        // Taken out: a loop of damaged images ends.
        left.extend(children.remove(&next).unwrap_or_default());
        if listing.images.get(&next).is_some_and(|facts| !facts.hidden) {
            found.push(next);
        }
    }
    found.sort_unstable();
    found
}

/// The speed of a copy, its reports and its cancel.
pub(crate) struct Pace<'a> {
    ctx: &'a dyn Ctx,
    rate: u64,
    blocks: u32,
    began: Instant,
    told: Cell<(u32, Instant)>,
    is_half: Cell<bool>,
    /// Sectors.
    synced: Cell<u64>,
}

impl<'a> Pace<'a> {
    /// At most `rate` bytes a second, unless that is 0.
    pub(crate) fn new(ctx: &'a dyn Ctx, rate: u64, blocks: u32) -> Self {
        let rate = if rate == 0 { 0 } else { rate.max(RATE_MIN) };
        let began = Instant::now();
        Self {
            ctx,
            rate,
            blocks,
            began,
            told: Cell::new((0, began)),
            is_half: Cell::new(false),
            synced: Cell::new(0),
        }
    }

    /// Before a block is copied: waits until its time has come. Answers whether the parent is to be made durable first.
    ///
    /// # Errors
    /// `Cancelled`.
    pub(crate) fn before(&self, block: u32, done: Coalesced) -> tapio_format::Result<bool> {
        if block >= self.blocks / 2 && !self.is_half.replace(true) {
            self.ctx.step("merge:half");
        }
        loop {
            if self.ctx.is_cancelled() {
                return Err(FormatError::new(FormatErrorKind::Cancelled, "the merge was cancelled"));
            }
            self.tell(block);
            let bytes = done.sectors.saturating_mul(SECTOR_LEN);
            let due = match self.rate {
                0 => Duration::ZERO,
                rate => Duration::from_secs_f64(bytes as f64 / rate as f64),
            };
            let early = due.saturating_sub(self.began.elapsed());
            if early.is_zero() {
                return Ok(self.is_much(done));
            }
            std::thread::sleep(early.min(NAP));
        }
    }

    /// Says how far it is; the same answer.
    ///
    /// # Errors
    /// None.
    pub(crate) fn report(&self, block: u32, done: Coalesced) -> tapio_format::Result<bool> {
        self.tell(block);
        Ok(self.is_much(done))
    }

    fn is_much(&self, done: Coalesced) -> bool {
        let is_much = (done.sectors - self.synced.get()) * SECTOR_LEN >= SYNC_EVERY;
        if is_much {
            self.synced.set(done.sectors);
        }
        is_much
    }

    fn tell(&self, block: u32) {
        let (told, at) = self.told.get();
        if block > told + self.blocks / UPDATES || at.elapsed() >= NEWS {
            self.ctx.progress(f64::from(block) / f64::from(self.blocks.max(1)));
            self.told.set((block, Instant::now()));
        }
    }
}

/// Whether there is a file of this name.
pub(super) fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}
