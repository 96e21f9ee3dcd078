//! Logs of changed blocks: `<vdi>.cbtlog` beside the image of a VDI, and alone where the image is gone.
//!
//! The log of a snapshot has what changed between the snapshot before it and itself; the log of a VDI what changed
//! since its last snapshot. Each names the one before (`parent`) and the one after (`child`). A log that no disk is
//! open on and that says that it is not complete was open in a process that died: everything counts as changed in it,
//! and it is written so ([`ImageDir::settled`]) before it is used for anything else.
//!
//! ```text
//! enable, disable    journal cbt_<vdi>; the disk closes; the log comes or goes; the disk goes on; the journal goes
//! snapshot           beside the steps of a fork: <vdi>.cbtlog.new before the disk closes; once the leaf has its name
//!                    the old log becomes that of the snapshot, and the new one takes its place; before that where
//!                    the disk goes on meanwhile (`swap`)
//! destroy            the image; its log into the log after it; the pointers; the log
//! data_destroy       the image alone
//! ```
//!
//! A running disk keeps its log in memory, so a change of a log or its pointers has it closed first: by a pause, or
//! because the disk goes on with another log. The journal makes the disk go on if the change is broken off.

use std::io;
use std::path::{Path, PathBuf};

use tapio_format::cbt::{Log, LogHeader, SIZE_MAX};
use tapio_format::{FileMedium, FormatError, FormatErrorKind};
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use super::ImageDir;
use super::facts::FileKind;
use super::fork::{file_id, link_or_rename};
use super::journal::{CloneJournal, cbt_journal_name, log_name, new_log_name};
use super::remove::remove;
use crate::changed_blocks::{self, failed, is_busy};
use crate::errors;
use crate::lock::Share;
use crate::traits::{Ctx, LiveDisk, Notice, OpenSpec, VdiInfo};

impl ImageDir {
    pub(super) fn log_file(&self, vdi: Uuid) -> PathBuf {
        self.path.join(log_name(vdi))
    }

    /// Whether changed blocks of the VDI are tracked.
    pub(super) fn has_log(&self, vdi: Uuid) -> bool {
        // A link may lead out of the SR.
        std::fs::symlink_metadata(self.log_file(vdi)).is_ok_and(|data| data.is_file())
    }

    /// Opens a log that no disk is open on, for a disk of at least `size` bytes. If it is not complete, or damaged,
    /// everything counts as changed in it from now on.
    pub(super) fn settled(&self, ctx: &dyn Ctx, vdi: Uuid, size: u64) -> Result<Log<FileMedium>, ApiError> {
        self.settled_of(ctx, (vdi, vdi), size)
    }

    /// The same of a log that has just got the name of another VDI; the second is the one that clients know.
    fn settled_of(
        &self,
        ctx: &dyn Ctx,
        (vdi, known_as): (Uuid, Uuid),
        size: u64,
    ) -> Result<Log<FileMedium>, ApiError> {
        let path = self.log_file(vdi);
        let failed = failed(&path);
        let opened = match Log::open_header(&path, Access::ReadWrite) {
            Ok(log) => Some(log).filter(|log| log.header().size <= SIZE_MAX),
            Err(error) if error.kind() == FormatErrorKind::NotThisFormat => None,
            Err(error) => return Err(failed(error)),
        };
        let mut log = opened.map_or_else(|| self.replaced(vdi, size), Ok)?;
        let is_complete = log.check_whole().is_ok() && log.header().consistent != 0;
        if !is_complete && log.header().consistent != 0 {
            let header = *log.header();
            log.set_header(LogHeader { consistent: 0, ..header }).map_err(&failed)?;
        }
        let size = size.max(log.header().size).max(1);
        if !is_complete || size > log.header().size {
            log.grow(size).map_err(&failed)?;
        }
        if !is_complete {
            log.set_all().map_err(&failed)?;
            let header = *log.header();
            // What comes before the first snapshot is in no list.
            if !header.parent.is_nil() {
                let why =
                    format!("the log of changed blocks of {known_as} in SR {} is not complete", self.sr);
                ctx.notice(known_as, Notice::LogIncomplete, &why);
            }
            log.set_header(LogHeader { consistent: 1, ..header }).map_err(&failed)?;
        }
        Ok(log)
    }

    /// Makes a log in the place of one whose header is lost; not complete. Other logs know which are beside it.
    fn replaced(&self, vdi: Uuid, size: u64) -> Result<Log<FileMedium>, ApiError> {
        let path = self.log_file(vdi);
        let mut log = Log::create(&path, size.max(1)).map_err(failed(&path))?;
        let mut header = *log.header();
        for other in self.list()?.logs.into_iter().filter(|other| *other != vdi && self.has_log(*other)) {
            let Ok(known) = Log::open_header(&self.log_file(other), Access::ReadOnly) else { continue };
            if known.header().child == vdi {
                header.parent = other;
            }
            if known.header().parent == vdi {
                header.child = other;
            }
        }
        log.set_header(header).map_err(failed(&path))?;
        Ok(log)
    }

    /// The log for a disk process that will write to the VDI, if changed blocks are tracked.
    pub(super) fn log_for_disk(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        size: u64,
    ) -> Result<Option<PathBuf>, ApiError> {
        if !self.has_log(vdi) {
            return Ok(None);
        }
        // A disk that is open has the log open.
        if ctx.live(vdi).is_some() {
            return Ok(Some(self.log_file(vdi)));
        }
        match self.settled(ctx, vdi, size) {
            Ok(_) => Ok(Some(self.log_file(vdi))),
            Err(error) if is_busy(&error) => Err(error),
            Err(error) => {
                self.drop_logs(ctx, &[vdi])?;
                ctx.notice(vdi, Notice::LogGone, &error.to_string());
                Ok(None)
            }
        }
    }

    /// Gives logs up that cannot be used: no log leads to them any more, so that they are in no list, and they go, the
    /// first first. No disk is open on them.
    pub(super) fn drop_logs(&self, ctx: &dyn Ctx, vdis: &[Uuid]) -> Result<(), ApiError> {
        for other in self.list()?.logs.into_iter().filter(|other| !vdis.contains(other)) {
            if !self.has_log(other) {
                continue;
            }
            let path = self.log_file(other);
            let known = match Log::open_header(&path, Access::ReadOnly) {
                Ok(log) => *log.header(),
                // It leads nowhere.
                Err(error) if error.kind() == FormatErrorKind::NotThisFormat => continue,
                Err(error) => return Err(failed(&path)(error)),
            };
            if vdis.contains(&known.child) {
                self.lead(other, known.child, Uuid::nil())?;
            }
        }
        ctx.step("cbt:given-up");
        for vdi in vdis {
            remove(&self.log_file(*vdi))?;
        }
        self.sync()
    }

    /// What a running disk goes on with.
    pub(super) fn open_spec(&self, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let layers = self.chain(vdi, &self.whole_image(vdi)?)?;
        let log = (access == Access::ReadWrite && self.has_log(vdi)).then(|| self.log_file(vdi));
        Ok(OpenSpec { chain: ChainSpec { layers, access }, log })
    }

    /// Does `work` with the log of a VDI while no disk is open on it. If the disk does not go on, `undo` is done
    /// before it is tried again.
    pub(super) fn with_closed_log(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        work: impl FnOnce() -> Result<(), ApiError>,
        undo: impl FnOnce() -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let Some(disk) = ctx.live(vdi).filter(|disk| disk.access() == Access::ReadWrite) else {
            return work();
        };
        let journal = self.path.join(cbt_journal_name(vdi));
        std::fs::write(&journal, "\n")
            .map_err(|error| errors::io(457, "cannot write the journal", &journal, &error))?;
        self.sync()?;
        ctx.step("cbt:journal");
        // Without an answer it may be closed, or close later: the next recovery has it go on.
        disk.pause()?;
        ctx.step("cbt:paused");
        let done = work();
        let resumed = self.go_on(vdi, disk.as_ref());
        let is_running = resumed.is_ok() || undo().and_then(|()| self.go_on(vdi, disk.as_ref())).is_ok();
        ctx.step("cbt:resumed");
        // The next recovery tries again with a disk that stays paused.
        if is_running {
            remove(&journal).and_then(|()| self.sync())?;
        }
        done.and(resumed)
    }

    /// A disk that was closed goes on with its images as they are now.
    pub(super) fn go_on(&self, vdi: Uuid, disk: &dyn LiveDisk) -> Result<(), ApiError> {
        disk.resume(&self.open_spec(vdi, disk.access())?)
    }

    /// Starts or ends the tracking of changed blocks, also while a disk runs.
    pub(super) fn track(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let facts = self.whole_image(vdi)?;
        if facts.kind == FileKind::Raw {
            return Err(errors::fail(66, format_args!("{vdi} is raw: changed blocks of VHDs are tracked")));
        }
        if facts.hidden {
            return Err(errors::fail(66, format_args!("{vdi} is a base copy: take the VDI above it")));
        }
        if self.has_log(vdi) == wanted {
            return self.info_of(vdi, 0);
        }
        let live = ctx.live(vdi);
        if live.is_none() {
            self.check_unused(ctx, vdi, if wanted { "enable_cbt" } else { "disable_cbt" })?;
        }
        let log = self.log_file(vdi);
        let remove_log = || remove(&log).and_then(|()| self.sync());
        if wanted {
            let is_open = live.is_some_and(|disk| disk.access() == Access::ReadWrite);
            let make = || {
                self.make_log(vdi, facts.virtual_size, is_open)?;
                ctx.step("cbt:enabled");
                Ok(())
            };
            self.with_closed_log(ctx, vdi, make, remove_log)?;
        } else {
            let end = || {
                match self.settled(ctx, vdi, 0) {
                    Ok(log) => self.lead(log.header().parent, vdi, Uuid::nil())?,
                    Err(error) if is_busy(&error) => return Err(error),
                    Err(_) => self.drop_logs(ctx, &[vdi])?,
                }
                ctx.step("cbt:unlinked");
                remove_log()?;
                ctx.step("cbt:disabled");
                Ok(())
            };
            self.with_closed_log(ctx, vdi, end, || Ok(()))?;
        }
        self.info_of(vdi, 0)
    }

    /// Makes the first log of a VDI, whole under its name. That of a disk that runs is not complete until it was
    /// settled: if the disk's process dies before it has the log open, the next one may not know of it.
    fn make_log(&self, vdi: Uuid, size: u64, is_open: bool) -> Result<(), ApiError> {
        let (fresh, path) = (self.path.join(new_log_name(vdi)), self.log_file(vdi));
        let made = Log::create(&fresh, size).and_then(|mut log| {
            let header = *log.header();
            if is_open { Ok(()) } else { log.set_header(LogHeader { consistent: 1, ..header }) }
        });
        let named = made.map_err(|error| errors::image(457, &error)).and_then(|()| {
            std::fs::rename(&fresh, &path)
                .map_err(|error| errors::io(457, "cannot give the log its name", &path, &error))?;
            self.sync()
        });
        named.inspect_err(|_| drop(std::fs::remove_file(&fresh)))
    }

    /// Makes the log of `from` lead to `new` where it led to `old`.
    fn lead(&self, from: Uuid, old: Uuid, new: Uuid) -> Result<(), ApiError> {
        if from.is_nil() || !self.has_log(from) {
            return Ok(());
        }
        let path = self.log_file(from);
        let mut log = Log::open_header(&path, Access::ReadWrite).map_err(failed(&path))?;
        let header = *log.header();
        if header.child != old {
            return Ok(());
        }
        log.set_header(LogHeader { child: new, ..header }).map_err(failed(&path))
    }

    /// Before a snapshot closes a disk: the log that the VDI goes on with lies beside. Other forks leave logs alone,
    /// which is the answer.
    pub(super) fn prepare_log(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        size: u64,
    ) -> Result<bool, FormatError> {
        let Some(snapshot) = journal.new.filter(|_| self.has_log(journal.vdi)) else { return Ok(false) };
        let old = Log::open_header(&self.log_file(journal.vdi), Access::ReadOnly);
        // A log does not become shorter along the chain of them.
        let old_size = old.map_or(0, |log| log.header().size);
        let size = if old_size <= SIZE_MAX { size.max(old_size) } else { size };
        let mut log = Log::create(&self.path.join(new_log_name(journal.vdi)), size)?;
        let header = LogHeader { parent: snapshot, consistent: 1, ..*log.header() };
        log.set_header(header)?;
        ctx.step("fork:log-made");
        Ok(true)
    }

    /// Gives the log of a disk that goes on the snapshot's name too; whether it has it.
    pub(super) fn name_log_twice(&self, journal: &CloneJournal) -> bool {
        let Some(snapshot) = journal.new else { return false };
        std::fs::hard_link(self.log_file(journal.vdi), self.log_file(snapshot)).is_ok()
    }

    /// The new log takes the VDI's name while a disk notes in the old one, which has the snapshot's name already.
    pub(super) fn switch_open_logs(&self, ctx: &dyn Ctx, journal: &CloneJournal) -> Result<(), ApiError> {
        self.sync()?;
        ctx.step("fork:log-named");
        let (fresh, own) = (self.path.join(new_log_name(journal.vdi)), self.log_file(journal.vdi));
        std::fs::rename(&fresh, &own)
            .map_err(|error| errors::io(82, "cannot give the new log its name", &own, &error))?;
        self.sync()?;
        ctx.step("fork:log-switched");
        Ok(())
    }

    /// The other way round, while the disk still notes in the old log and nothing is in the new one.
    pub(super) fn switch_open_logs_back(&self, journal: &CloneJournal) -> Result<(), ApiError> {
        let Some(snapshot) = journal.new else { return Ok(()) };
        let (own, kept) = (self.log_file(journal.vdi), self.log_file(snapshot));
        let failed = |error: io::Error| errors::io(82, "cannot give the log its name back", &own, &error);
        let Some(kept_file) = file_id(&kept).map_err(failed)? else { return Ok(()) };
        // Two names of one file would stay two.
        if file_id(&own).map_err(failed)? == Some(kept_file) {
            remove(&kept)?;
        } else {
            std::fs::rename(&kept, &own).map_err(failed)?;
        }
        self.sync()
    }

    /// Once the new log has the VDI's name and the old one is closed: the logs lead to each other. Repeating it
    /// finishes it, and without such logs there is nothing to do. A log that cannot be used is given up; the VDI goes
    /// on with its new one, to which no list comes then.
    pub(super) fn link_logs(&self, ctx: &dyn Ctx, journal: &CloneJournal) -> Result<(), ApiError> {
        let Some(snapshot) = journal.new.filter(|snapshot| self.has_log(*snapshot)) else { return Ok(()) };
        match self.try_link_logs(ctx, journal.vdi, snapshot) {
            Err(error) if !is_busy(&error) => {
                self.drop_logs(ctx, &[snapshot])?;
                ctx.notice(journal.vdi, Notice::SnapshotUntracked, &error.to_string());
                Ok(())
            }
            done => done,
        }
    }

    fn try_link_logs(&self, ctx: &dyn Ctx, vdi: Uuid, snapshot: Uuid) -> Result<(), ApiError> {
        let own = self.log_file(vdi);
        let after = Log::open_header(&own, Access::ReadOnly).map_err(failed(&own))?;
        // It was begun anew since.
        if after.header().parent != snapshot {
            return Ok(());
        }
        let mut log = self.settled_of(ctx, (snapshot, vdi), 0)?;
        let header = LogHeader { child: vdi, ..*log.header() };
        if header.child != log.header().child {
            log.set_header(header).map_err(failed(&self.log_file(snapshot)))?;
        }
        drop(log);
        self.lead(header.parent, vdi, snapshot)?;
        ctx.step("fork:log-linked");
        Ok(())
    }

    /// Once a snapshot's leaf has its name: the old log becomes that of the snapshot, the new one takes its place. No
    /// disk is open on them. Repeating it finishes it.
    ///
    /// What keeps the logs from that does not keep the snapshot from being made: both are given up then.
    pub(super) fn switch_logs(&self, ctx: &dyn Ctx, journal: &CloneJournal) -> Result<(), ApiError> {
        let Some(snapshot) = journal.new else { return Ok(()) };
        match self.try_switch_logs(ctx, journal, snapshot) {
            Err(error) if !is_busy(&error) => {
                self.drop_logs(ctx, &[snapshot, journal.vdi])?;
                // The last, because there is nothing to switch without it.
                remove(&self.path.join(new_log_name(journal.vdi))).and_then(|()| self.sync())?;
                ctx.notice(journal.vdi, Notice::SnapshotUntracked, &error.to_string());
                ctx.notice(journal.vdi, Notice::LogGone, "the log of changed blocks is gone");
                Ok(())
            }
            done => done,
        }
    }

    fn try_switch_logs(&self, ctx: &dyn Ctx, journal: &CloneJournal, snapshot: Uuid) -> Result<(), ApiError> {
        let fresh = self.path.join(new_log_name(journal.vdi));
        let (own, kept) = (self.log_file(journal.vdi), self.log_file(snapshot));
        let number =
            |path: &Path| file_id(path).map_err(|error| errors::io(82, "cannot look at", path, &error));
        if number(&fresh)?.is_none() {
            return Ok(());
        }
        if number(&kept)?.is_none() {
            link_or_rename(&own, &kept)
                .map_err(|error| errors::io(82, "cannot name the snapshot's log", &kept, &error))?;
            self.sync()?;
        }
        ctx.step("fork:log-named");
        let mut log = self.settled_of(ctx, (snapshot, journal.vdi), 0)?;
        let header = LogHeader { child: journal.vdi, ..*log.header() };
        log.set_header(header).map_err(failed(&kept))?;
        drop(log);
        self.lead(header.parent, journal.vdi, snapshot)?;
        ctx.step("fork:log-linked");
        std::fs::rename(&fresh, &own)
            .map_err(|error| errors::io(82, "cannot give the new log its name", &own, &error))?;
        self.sync()?;
        ctx.step("fork:log-switched");
        Ok(())
    }

    /// Makes the logs as they were before a snapshot. No disk is open on them. Repeating it finishes it.
    pub(super) fn undo_logs(&self, ctx: &dyn Ctx, journal: &CloneJournal) -> Result<(), ApiError> {
        let fresh = self.path.join(new_log_name(journal.vdi));
        let Some(snapshot) = journal.new else { return remove(&fresh) };
        let (own, kept) = (self.log_file(journal.vdi), self.log_file(snapshot));
        let number =
            |path: &Path| file_id(path).map_err(|error| errors::io(82, "cannot look at", path, &error));
        if let Some(kept_file) = number(&kept)? {
            let own_file = number(&own)?;
            let mut log = self.settled_of(ctx, (snapshot, journal.vdi), 0)?;
            // The new log was there already: what a disk noted in it counts.
            if number(&fresh)?.is_none() && own_file.is_some_and(|own| own != kept_file) {
                let since = self.settled(ctx, journal.vdi, 0)?;
                if since.header().size > log.header().size {
                    log.grow(since.header().size).map_err(failed(&kept))?;
                }
                log.absorb(&since).map_err(failed(&kept))?;
            }
            let header = LogHeader { child: Uuid::nil(), ..*log.header() };
            log.set_header(header).map_err(failed(&kept))?;
            drop(log);
            self.lead(header.parent, snapshot, journal.vdi)?;
            // Two names of one file would stay two.
            if own_file == Some(kept_file) {
                remove(&kept)?;
            } else {
                std::fs::rename(&kept, &own)
                    .map_err(|error| errors::io(82, "cannot give the log its name back", &own, &error))?;
            }
            self.sync()?;
        }
        remove(&fresh)
    }

    /// Finishes a snapshot of the VDI whose log comes after this one's, if it was broken off: until then the logs do
    /// not lead to each other.
    pub(super) fn finish_fork_after(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        if !self.has_log(vdi) {
            return Ok(());
        }
        let Ok(log) = Log::open_header(&self.log_file(vdi), Access::ReadOnly) else { return Ok(()) };
        let journal = self.path.join(format!("clone_{}", log.header().child));
        if std::fs::symlink_metadata(journal).is_ok() {
            self.recover_locked(ctx, &self.list()?)
        } else {
            Ok(())
        }
    }

    /// Removes the log of a VDI whose image is gone. What it has goes into the log after it.
    pub(super) fn remove_log(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        if !self.has_log(vdi) {
            return Ok(());
        }
        let path = self.log_file(vdi);
        let log = match self.settled(ctx, vdi, 0) {
            Ok(log) => log,
            Err(error) if is_busy(&error) => return Err(error),
            // No list goes past it any more.
            Err(_) => return self.drop_logs(ctx, &[vdi]),
        };
        let (parent, child) = (log.header().parent, log.header().child);
        // One that does not lead back is beyond a snapshot that is not finished: no list goes from here to there. It
        // leads past this one already if this was begun before.
        let leads_back = |child: Uuid| {
            let after = Log::open_header(&self.log_file(child), Access::ReadOnly);
            after.map_or(true, |after| [vdi, parent].contains(&after.header().parent))
        };
        let is_after = child != vdi && self.has_log(child) && leads_back(child);
        let child = if is_after { child } else { Uuid::nil() };
        if !child.is_nil() {
            let absorb = || {
                let mut later = self.settled(ctx, child, 0)?;
                let failed = failed(&path);
                if later.header().size < log.header().size {
                    later.set_all().map_err(&failed)?;
                } else {
                    later.absorb(&log).map_err(&failed)?;
                }
                let header = LogHeader { parent, ..*later.header() };
                later.set_header(header).map_err(&failed)?;
                ctx.step("destroy:log-absorbed");
                Ok(())
            };
            self.with_closed_log(ctx, child, absorb, || Ok(()))?;
        }
        self.lead(parent, vdi, child)?;
        ctx.step("destroy:log-unlinked");
        drop(log);
        remove(&path)?;
        self.sync()
    }

    /// Whether of the VDI the log alone is there.
    pub(super) fn is_log_alone(&self, vdi: Uuid) -> Result<bool, ApiError> {
        self.check_there()?;
        let has_image = FileKind::ALL.iter().any(|kind| self.file(*kind, vdi).symlink_metadata().is_ok());
        Ok(!has_image && self.has_log(vdi))
    }

    /// A VDI of which the log alone is there.
    pub(super) fn info_of_log(&self, vdi: Uuid) -> VdiInfo {
        let header = Log::open_header(&self.log_file(vdi), Access::ReadOnly).map(|log| *log.header());
        changed_blocks::info_of_log(vdi, header.map(|header| header.size).map_err(|error| error.to_string()))
    }

    /// What changed from one VDI to a later one: base64 of a bit for each block of 64 KiB, the first in the highest
    /// bit of the first byte.
    pub(super) fn list_changed(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        let _held = self.lock(ctx, Share::Shared)?;
        changed_blocks::check(ctx, from, to, |vdi| self.has_log(vdi))?;
        changed_blocks::between(from, to, |vdi| self.has_log(vdi).then(|| self.log_file(vdi)))
    }
}
