//! A VDI in two: snapshot, clone, and "single". sm-layout.md section 5.
//!
//! ```text
//! 1  journal clone_<vdi> = <base>_<new>
//! 2  the image gets the base copy's name as a second one (where links are impossible: as its only one)
//! 3  an empty leaf on the base copy, as <vdi>.vhd.new
//! 4  an empty sibling on the base copy, as <new>.vhd; for a snapshot of a VDI whose changed blocks are tracked, the
//!    log that it goes on with, as <vdi>.cbtlog.new
//! 5  the leaf takes the VDI's name                     from here on it is finished, before it is undone
//! 6  a running disk goes on with the leaf, between two requests of its guest (see `swap`, also for its log)
//! 7  the logs are switched (see `cbt`), the base copy is hidden
//! 8  a raw image loses its old name; the journal goes
//! ```
//!
//! A disk that cannot swap its leaf closes its images before step 5, and opens the new ones after step 7; guests wait
//! meanwhile.
//!
//! Whether step 5 was done can be seen: before it the VDI's name and the base copy's are one file (or the VDI has no
//! file), after it they are two.
//!
//! Once the disk was told to go on with the leaf it is not undone, unless the disk says that it did not, or that it is
//! closed and its new leaf holds nothing: a guest that goes on writes there, whether or not the answer has arrived.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use tapio_format::FormatError;
use tapio_format::vhd::offline::{self, Image, OpenOptions, ParentFacts, Shape, SnapshotOptions, set_hidden};
use tapio_format::vhd::{CHAIN_DEPTH_MAX, DiskType, time};
use tapio_types::ApiError;
use uuid::Uuid;

use super::ImageDir;
use super::facts::{Facts, FileKind};
use super::journal::{CloneJournal, foreign_journal, new_leaf_name, new_log_name, unfinished};
use super::remove::remove;
use crate::errors;
use crate::lock::Share;
use crate::traits::{Ctx, Fork, ForkKind, LiveDisk, Notice};

/// A fork that failed.
pub(super) struct Broken {
    pub(super) error: ApiError,
    pub(super) next: Next,
}

/// What becomes of a fork that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It is undone, and forgotten.
    Undo,
    /// It is undone. The running disk was paused, or may have been: the journal stays until it surely goes on.
    UndoAndWait,
    /// Nothing of it is touched: the running disk may use the new images. The next recovery finishes it.
    Keep,
}

impl From<ApiError> for Broken {
    fn from(error: ApiError) -> Self {
        Self { error, next: Next::Undo }
    }
}

/// How far a fork came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached {
    /// The base copy has no name yet, or not any more.
    Nothing,
    /// There is a base copy, of this kind; the VDI is still what it was.
    Linked(FileKind),
    /// The leaf has the VDI's name; the base copy is of this kind.
    Swapped(FileKind),
}

impl ImageDir {
    pub(super) fn fork_image(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        new: Uuid,
        kind: ForkKind,
    ) -> Result<Fork, ApiError> {
        let number = if kind == ForkKind::Clone { 81 } else { 82 };
        let _held = self.lock(ctx, Share::Exclusive)?;
        let live = ctx.live(vdi);
        if live.is_none() {
            self.check_unused(ctx, vdi, "snapshot")?;
            self.finish_resize(vdi)?;
        }
        if let Some(journal) = foreign_journal(&self.path, vdi) {
            return Err(errors::fail(46, unfinished(&journal)));
        }
        if std::fs::symlink_metadata(self.path.join(format!("clone_{vdi}"))).is_ok() {
            self.recover_locked(ctx, &self.list()?)?;
        }
        let facts = self.whole_image(vdi)?;
        if facts.hidden {
            return Err(errors::fail(number, format_args!("{vdi} is a base copy: take the VDI above it")));
        }
        let new = (kind != ForkKind::Single).then_some(new);
        if let Some(new) = new {
            self.check_free(new)?;
        }
        let own = self.index.begin();
        // Logs change by the steps of a whole fork.
        let tracks = kind == ForkKind::Snapshot && self.has_log(vdi);
        if live.is_none()
            && !tracks
            && let Some(fork) = self.fork_empty(ctx, vdi, &facts, new, number)?
        {
            self.index.end(&own, new.as_slice());
            return Ok(fork);
        }
        let depth = self.chain(vdi, &facts)?.len();
        if depth >= CHAIN_DEPTH_MAX {
            return Err(errors::fail(109, too_long(vdi, depth)));
        }
        let journal = CloneJournal { vdi, base: Uuid::new_v4(), new };
        let done = self.fork_with(ctx, &journal, &facts, live.as_deref(), (number, tracks));
        if let Err(Broken { error, next }) = done {
            // Whatever is left is undone, or with an unwilling storage by the next attach. That also makes a disk go on
            // that stays paused.
            let ended = match next {
                Next::Undo => self.undo_fork(ctx, &journal).and_then(|()| self.remove_journal(&journal)),
                Next::UndoAndWait => self.undo_fork(ctx, &journal),
                Next::Keep => Ok(()),
            };
            if let Err(undoing) = ended {
                tracing::warn!("fork of {vdi} is not undone yet: {undoing}");
            }
            return Err(error);
        }
        ctx.step("fork:done");
        let changed: Vec<Uuid> = [vdi, journal.base].into_iter().chain(new).collect();
        self.index.end(&own, &changed);
        let origin = self.info_of(vdi, 0)?;
        let made = new.map_or_else(|| Ok(origin.clone()), |new| self.info_of(new, 0))?;
        let base = self.info_of(journal.base, 1)?;
        Ok(Fork { made, origin, base: Some(base) })
    }

    /// A VDI that holds nothing of its own needs no base copy: a sibling on the same parent is all there is to do.
    fn fork_empty(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        facts: &Facts,
        new: Option<Uuid>,
        number: u16,
    ) -> Result<Option<Fork>, ApiError> {
        if facts.kind != FileKind::Vhd || facts.parent.is_none() {
            return Ok(None);
        }
        let path = self.file(FileKind::Vhd, vdi);
        let failed = |error: FormatError| errors::image(number, &error);
        let image = Image::open(&path, OpenOptions::READ).map_err(failed)?;
        image.check_settled().map_err(failed)?;
        if image.allocated_blocks() > 0 || image.footer().disk_type != DiskType::Differencing {
            return Ok(None);
        }
        drop(image);
        if let Some(new) = new {
            let child = self.file(FileKind::Vhd, new);
            offline::snapshot(&child, &path, &SnapshotOptions::default()).map_err(failed)?;
            ctx.step("fork:empty");
        }
        let origin = super::info(vdi, facts, 0, self.has_log(vdi));
        let made = new.map_or_else(|| Ok(origin.clone()), |new| self.info_of(new, 0))?;
        Ok(Some(Fork { made, origin, base: None }))
    }

    fn fork_with(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        facts: &Facts,
        live: Option<&dyn LiveDisk>,
        (number, tracks): (u16, bool),
    ) -> Result<(), Broken> {
        let failed = |what: &str, path: &Path, error: &io::Error| errors::io(number, what, path, error);
        let (vdi, kind) = (journal.vdi, facts.kind);
        let (own, base) = (self.file(kind, vdi), self.file(kind, journal.base));
        // Checked before anything changes.
        self.chain(vdi, facts)?;
        journal.write(&self.path).map_err(|error| failed("cannot write the journal of", &own, &error))?;
        ctx.step("fork:journal");
        link_or_rename(&own, &base).map_err(|error| failed("cannot name the base copy", &base, &error))?;
        self.sync()?;
        ctx.step("fork:linked");

        let leaf = self.path.join(new_leaf_name(vdi));
        // One that is left of a fork whose journal is gone.
        remove(&leaf)?;
        let made = self.make_children(ctx, journal, kind, &leaf, live.is_some());
        made.map_err(|error| errors::image(number, &error))?;
        let mut new_log = false;
        if tracks {
            match self.prepare_log(ctx, journal, facts.virtual_size) {
                Ok(made) => new_log = made,
                Err(error) => {
                    // The VDI goes on with the log that it has: the next snapshot that is tracked has all since the
                    // last one.
                    remove(&self.path.join(new_log_name(vdi)))?;
                    ctx.notice(vdi, Notice::SnapshotUntracked, &errors::image(457, &error).to_string());
                }
            }
        }
        // Without a second name for its log the disk's successor would find none for a moment.
        let swaps = match live {
            Some(disk) if self.backing.renames_onto_open() && (!new_log || self.name_log_twice(journal)) => {
                let swaps = disk.hold(new_log).map_err(|error| self.with_old_log(journal, error))?;
                if !swaps {
                    self.switch_open_logs_back(journal)?;
                }
                swaps
            }
            _ => false,
        };
        match live.filter(|_| swaps) {
            Some(disk) => self.swap_running(ctx, journal, (kind, &leaf), (disk, new_log), number)?,
            None => self.swap_closed(ctx, journal, (kind, &leaf), live, number)?,
        }
        ctx.step("fork:resumed");
        // Too late to be undone. What is left is done by the next fork or attach.
        let old_name = if kind == FileKind::Raw { remove(&own).and_then(|()| self.sync()) } else { Ok(()) };
        if let Err(error) = old_name.and_then(|()| self.remove_journal(journal)) {
            tracing::warn!("the fork of {vdi} is done, but its journal is left: {error}");
        }
        Ok(())
    }

    /// Steps 5 to 7, while no disk has the images open.
    fn swap_closed(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        (kind, leaf): (FileKind, &Path),
        live: Option<&dyn LiveDisk>,
        number: u16,
    ) -> Result<(), Broken> {
        if let Some(disk) = live {
            // Without an answer it may be closed, or close later.
            disk.pause().map_err(|error| Broken { error, next: Next::UndoAndWait })?;
        }
        ctx.step("fork:paused");
        if let Err(error) = self.swap(ctx, journal, kind, leaf, number) {
            return Err(self.go_back(ctx, journal, live, error));
        }
        if let Some(disk) = live
            && let Err(error) = self.go_on(journal.vdi, disk)
        {
            self.after_lost_answer(ctx, journal, disk, error)?;
        }
        Ok(())
    }

    /// The disk was told to go on, and whether it has the new images is not known: an answer that got lost, or a daemon
    /// that died, is an error too. What a guest has written to the new leaf since was answered, and stays.
    pub(super) fn after_lost_answer(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        disk: &dyn LiveDisk,
        error: ApiError,
    ) -> Result<(), Broken> {
        let keep = |error| Broken { error, next: Next::Keep };
        if disk.pause().is_err() {
            return Err(keep(error));
        }
        match self.is_unwritten(journal.vdi) {
            Ok(true) => Err(self.go_back(ctx, journal, Some(disk), error)),
            Ok(false) => self.go_on(journal.vdi, disk).map_err(keep),
            Err(_) => Err(keep(error)),
        }
    }

    /// Whether the new leaf of a disk that is closed holds nothing.
    fn is_unwritten(&self, vdi: Uuid) -> Result<bool, FormatError> {
        let leaf = Image::open(&self.file(FileKind::Vhd, vdi), OpenOptions::READ)?;
        leaf.check_settled()?;
        Ok(leaf.allocated_blocks() == 0)
    }

    /// The fork is undone, and a running disk, which is closed, goes on with the images of before.
    fn go_back(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        live: Option<&dyn LiveDisk>,
        error: ApiError,
    ) -> Broken {
        let undone = self.undo_fork(ctx, journal);
        let Some(disk) = live else { return error.into() };
        match undone.and_then(|()| self.go_on(journal.vdi, disk)) {
            Ok(()) => error.into(),
            Err(second) => Broken {
                error: ApiError::internal(format!(
                    "{error}; and the disk of VDI {} stays paused: {second}",
                    journal.vdi
                )),
                next: Next::UndoAndWait,
            },
        }
    }

    /// Steps 3 and 4. Nothing of a running disk's image is relied on that changes under it.
    fn make_children(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        kind: FileKind,
        leaf: &Path,
        is_live: bool,
    ) -> Result<(), FormatError> {
        let base = self.file(kind, journal.base);
        let (shape, len, len_max) = match kind {
            FileKind::Raw => {
                let (facts, len) = ParentFacts::gather(leaf, &base, true)?;
                (Shape::Differencing(facts), len, 0)
            }
            FileKind::Vhd => {
                let image = Image::open(&base, OpenOptions::READ)?;
                if !is_live {
                    image.check_settled()?;
                }
                let key_hash = image.batmap().map(|batmap| batmap.header.key_hash).unwrap_or_default();
                let uuid = image.footer().uuid;
                let facts = ParentFacts { uuid, key_hash, ..ParentFacts::names(leaf, &base)? };
                let len = image.virtual_len();
                // Room that was reserved for growth is there in the new leaf too.
                let room = |header: &tapio_format::vhd::Header| {
                    u64::from(header.entries_max) * u64::from(header.block_len)
                };
                let room = image.header().map_or(0, room);
                (Shape::Differencing(facts), len, if room > len { room } else { 0 })
            }
        };
        offline::create(leaf, &shape, len, len_max)?;
        ctx.step("fork:leaf-made");
        if let Some(new) = journal.new {
            offline::create(&self.file(FileKind::Vhd, new), &shape, len, len_max)?;
        }
        ctx.step("fork:sibling-made");
        Ok(())
    }

    /// Steps 5 and 7.
    fn swap(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        kind: FileKind,
        leaf: &Path,
        number: u16,
    ) -> Result<(), ApiError> {
        self.name_leaf(ctx, journal, leaf, number)?;
        self.switch_logs(ctx, journal)?;
        self.hide_base(journal.base, kind).map_err(|error| errors::image(number, &error))?;
        self.keep_time(journal, kind);
        ctx.step("fork:hidden");
        Ok(())
    }

    /// Step 5.
    pub(super) fn name_leaf(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        leaf: &Path,
        number: u16,
    ) -> Result<(), ApiError> {
        let top = self.file(FileKind::Vhd, journal.vdi);
        std::fs::rename(leaf, &top)
            .map_err(|error| errors::io(number, "cannot give the new leaf its name", &top, &error))?;
        self.sync()?;
        ctx.step("fork:swapped");
        Ok(())
    }

    pub(super) fn hide_base(&self, base: Uuid, kind: FileKind) -> Result<(), FormatError> {
        if kind == FileKind::Raw {
            return Ok(());
        }
        let mut image = Image::open(&self.file(kind, base), OpenOptions::WRITE)?;
        if image.footer().hidden == 0 { set_hidden(&mut image, 1) } else { Ok(()) }
    }

    /// Children record when their parent was written last, and `vhd-util check` warns of a parent that was written
    /// later. A disk that goes on has written to the base copy until it had its leaf, and hiding it is a write as well;
    /// from now on it does not change. Without its time it is a base copy all the same.
    pub(super) fn keep_time(&self, journal: &CloneJournal, kind: FileKind) {
        let kept = || {
            let leaf = Image::open(&self.file(FileKind::Vhd, journal.vdi), OpenOptions::READ).ok()?;
            let recorded = u64::try_from(time::to_unix(leaf.header()?.parent_timestamp)).ok()?;
            let base = File::open(self.file(kind, journal.base)).ok()?;
            base.set_modified(UNIX_EPOCH + Duration::from_secs(recorded)).ok()
        };
        if kept().is_none() {
            tracing::debug!("base copy {} keeps the time at which it was hidden", journal.base);
        }
    }

    /// How far the fork came.
    pub(super) fn reached(&self, journal: &CloneJournal) -> io::Result<Reached> {
        for kind in FileKind::ALL {
            let Some(base) = file_id(&self.file(kind, journal.base))? else { continue };
            let top = file_id(&self.file(FileKind::Vhd, journal.vdi))?;
            return Ok(match top {
                Some(top) if top != base => Reached::Swapped(kind),
                _ => Reached::Linked(kind),
            });
        }
        Ok(Reached::Nothing)
    }

    /// Finishes a fork whose leaf has the VDI's name. The journal stays until a running disk goes on. Answers whether
    /// it is finished: the base copy may lack what its disk process knew of it when it died, until the disk is opened
    /// again.
    pub(super) fn finish_fork(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        kind: FileKind,
    ) -> Result<bool, ApiError> {
        self.switch_logs(ctx, journal)?;
        self.link_logs(ctx, journal)?;
        match self.hide_base(journal.base, kind) {
            Ok(()) => {}
            Err(error) if error.errno() == libc::EBUSY => return Ok(false),
            Err(error) => return Err(errors::image(82, &error)),
        }
        self.keep_time(journal, kind);
        if kind == FileKind::Raw {
            remove(&self.file(FileKind::Raw, journal.vdi))?;
            self.sync()?;
        }
        Ok(true)
    }

    /// Makes everything as it was before the fork. The running disk must not have gone on with the new images. The
    /// journal stays until it goes on with the old ones.
    pub(super) fn undo_fork(&self, ctx: &dyn Ctx, journal: &CloneJournal) -> Result<(), ApiError> {
        let system = |path: &Path, error: &io::Error| errors::io(82, "cannot undo a fork of", path, error);
        let reached = self.reached(journal).map_err(|error| system(&self.path, &error))?;
        self.undo_logs(ctx, journal)?;
        if let Some(new) = journal.new.filter(|_| reached != Reached::Nothing) {
            remove(&self.file(FileKind::Vhd, new))?;
        }
        remove(&self.path.join(new_leaf_name(journal.vdi)))?;
        match reached {
            Reached::Nothing => {}
            Reached::Linked(kind) => {
                let (own, base) = (self.file(kind, journal.vdi), self.file(kind, journal.base));
                if file_id(&own).map_err(|error| system(&own, &error))?.is_some() {
                    remove(&base)?;
                } else {
                    std::fs::rename(&base, &own).map_err(|error| system(&own, &error))?;
                }
            }
            Reached::Swapped(FileKind::Vhd) => {
                let (own, base) =
                    (self.file(FileKind::Vhd, journal.vdi), self.file(FileKind::Vhd, journal.base));
                self.show_base(&base).map_err(|error| errors::image(82, &error))?;
                std::fs::rename(&base, &own).map_err(|error| system(&own, &error))?;
            }
            Reached::Swapped(FileKind::Raw) => {
                let (own, base) =
                    (self.file(FileKind::Raw, journal.vdi), self.file(FileKind::Raw, journal.base));
                // The old name is there until the fork is done, except where links are impossible.
                if file_id(&own).map_err(|error| system(&own, &error))?.is_some() {
                    remove(&self.file(FileKind::Vhd, journal.vdi))?;
                    self.sync()?;
                    remove(&base)?;
                } else {
                    remove(&self.file(FileKind::Vhd, journal.vdi))?;
                    self.sync()?;
                    std::fs::rename(&base, &own).map_err(|error| system(&own, &error))?;
                }
            }
        }
        self.sync()
    }

    /// A base copy that is not hidden may be what a running disk writes.
    fn show_base(&self, base: &Path) -> Result<(), FormatError> {
        if Image::open(base, OpenOptions::READ)?.footer().hidden == 0 {
            return Ok(());
        }
        set_hidden(&mut Image::open(base, OpenOptions::WRITE)?, 0)
    }

    pub(super) fn remove_journal(&self, journal: &CloneJournal) -> Result<(), ApiError> {
        match journal.remove(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let path: PathBuf = self.path.join(journal.file_name());
                Err(errors::io(82, "cannot remove the journal", &path, &error))
            }
            _ => Ok(()),
        }
    }
}

/// Why no image is put on top, and what helps.
pub(crate) fn too_long(vdi: Uuid, depth: usize) -> String {
    format!(
        "{vdi} has {depth} images of {CHAIN_DEPTH_MAX}: destroy snapshots that are not needed, and wait for the garbage \
         collection of the SR (the task 'Garbage Collection'; 'xe sr-gc' begins one and says what is in its way)"
    )
}

/// Device and inode; none where there is no such file.
pub(super) fn file_id(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match std::fs::symlink_metadata(path) {
        Ok(data) => Ok(Some((data.dev(), data.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A second name for a file; where the file system has no links, its only name.
pub(super) fn link_or_rename(from: &Path, to: &Path) -> io::Result<()> {
    match std::fs::hard_link(from, to) {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS | libc::EMLINK | libc::EINVAL)
            ) =>
        {
            std::fs::rename(from, to)
        }
        done => done,
    }
}
