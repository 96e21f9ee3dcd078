//! Logs of changed blocks: the volume `<vdi>.cbtlog` beside that of an image, and alone where the image is gone.
//!
//! What they mean, and what becomes of one that is not complete, is said in `dir::cbt`. A volume has one name, so
//! that a snapshot gives the log of the VDI to the snapshot by renaming it, and there is none for the VDI until the
//! new one has its name: a kill between the two is finished or undone with the fork.
//!
//! ```text
//! enable, disable    journal cbt_<vdi>_closed; the disk closes; the log comes or goes; the disk goes on; the journal
//!                    goes
//! snapshot           NEWLOG-<vdi> before the disk closes; once the leaf has its name the old log gets the snapshot's,
//!                    and NEWLOG-<vdi> that of the VDI's; before that where the disk goes on meanwhile (`swap`)
//! destroy            the image; its log into the log after it; the pointers; the log
//! data_destroy       the image alone
//! ```

use std::path::PathBuf;

use tapio_format::FileMedium;
use tapio_format::cbt::{Log, LogHeader, SIZE_MAX, log_len};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::VolumeSr;
use crate::changed_blocks::{self, failed, is_busy};
use crate::dir::facts::FileKind;
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::{Listed, Volume};
use crate::lvm::journal::{Journal, Kind};
use crate::lvm::{names, read, size};
use crate::traits::{Ctx, Notice, VdiInfo};

/// Whether changed blocks of the VDI are tracked.
pub(super) fn has_log(listed: &Listed, vdi: Uuid) -> bool {
    listed.volumes.contains_key(&names::log_volume(vdi))
}

/// The VDIs that have logs.
fn tracked(listed: &Listed) -> impl Iterator<Item = Uuid> + '_ {
    listed.volumes.keys().filter_map(|name| match names::role(name) {
        names::Role::Log(vdi) => Some(vdi),
        _ => None,
    })
}

/// A VDI of which the log alone is there.
pub(super) fn info_of_log(vdi: Uuid, volume: &Volume) -> VdiInfo {
    let header = read::first_sector(volume)
        .map_err(|error| error.to_string())
        .and_then(|sector| LogHeader::decode(&sector).map_err(|error| error.to_string()));
    changed_blocks::info_of_log(vdi, header.map(|header| header.size))
}

/// The length of the volume of a log of a disk of so many bytes.
fn volume_len(disk: u64) -> u64 {
    size::rounded(log_len(disk))
}

impl VolumeSr {
    /// The path of a log, which is reachable.
    fn log(&self, vdi: Uuid) -> Result<PathBuf, ApiError> {
        let name = names::log_volume(vdi);
        self.reach(&self.group.list()?, [name.as_str()])?;
        Ok(self.group.path(&name))
    }

    /// A log that no disk is open on, for a disk of at least `size` bytes. If it is not complete, or damaged,
    /// everything counts as changed in it from now on. `known_as` is the VDI that clients know, where it has just got
    /// another's name.
    fn settled_log(
        &self,
        ctx: &dyn Ctx,
        (vdi, known_as): (Uuid, Uuid),
        size: u64,
    ) -> Result<Log<FileMedium>, ApiError> {
        let path = self.log(vdi)?;
        let failed = failed(&path);
        let opened = Log::open_header(&path, Access::ReadWrite).map_err(&failed)?;
        let opened = Some(opened).filter(|log| (1..=SIZE_MAX).contains(&log.header().size));
        let mut log = opened.map_or_else(|| self.replaced_log(vdi, size), Ok)?;
        let is_complete = log.check_whole().is_ok() && log.header().consistent == 1;
        let size = size.max(log.header().size).max(1);
        let name = names::log_volume(vdi);
        let listed = self.group.list()?;
        if let Some(volume) = listed.volumes.get(&name).filter(|volume| volume.size < log_len(size)) {
            drop(log);
            self.check_room(&listed, volume_len(size) - volume.size)?;
            self.group.resize(&name, volume.size, volume_len(size))?;
            log = Log::open_header(&path, Access::ReadWrite).map_err(&failed)?;
        }
        if !is_complete && log.header().consistent != 0 {
            let header = *log.header();
            log.set_header(LogHeader { consistent: 0, ..header }).map_err(&failed)?;
        }
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
    fn replaced_log(&self, vdi: Uuid, size: u64) -> Result<Log<FileMedium>, ApiError> {
        let path = self.log(vdi)?;
        let mut log = Log::create(&path, size.max(1)).map_err(failed(&path))?;
        let mut header = *log.header();
        for other in tracked(&self.group.list()?).filter(|other| *other != vdi) {
            let Ok(known) = Log::open_header(&self.log(other)?, Access::ReadOnly) else { continue };
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
        listed: &Listed,
        vdi: Uuid,
        size: u64,
    ) -> Result<Option<PathBuf>, ApiError> {
        if !has_log(listed, vdi) {
            return Ok(None);
        }
        // A disk that is open has the log open.
        if ctx.live(vdi).is_some() {
            return self.log(vdi).map(Some);
        }
        match self.settled_log(ctx, (vdi, vdi), size) {
            Ok(_) => self.log(vdi).map(Some),
            Err(error) if is_busy(&error) => Err(error),
            Err(error) => {
                self.drop_logs(ctx, &[vdi])?;
                ctx.notice(vdi, Notice::LogGone, &error.to_string());
                Ok(None)
            }
        }
    }

    /// The log that a running disk goes on with.
    pub(super) fn log_to_go_on(
        &self,
        listed: &Listed,
        vdi: Uuid,
        access: Access,
    ) -> Result<Option<PathBuf>, ApiError> {
        if access == Access::ReadWrite && has_log(listed, vdi) { self.log(vdi).map(Some) } else { Ok(None) }
    }

    /// Gives logs up that cannot be used: no log leads to them any more, so that they are in no list, and they go. No
    /// disk is open on them.
    pub(super) fn drop_logs(&self, ctx: &dyn Ctx, vdis: &[Uuid]) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        for other in tracked(&listed).filter(|other| !vdis.contains(other)) {
            let path = self.log(other)?;
            let known = *Log::open_header(&path, Access::ReadOnly).map_err(failed(&path))?.header();
            if vdis.contains(&known.child) {
                self.lead(other, known.child, Uuid::nil())?;
            }
        }
        ctx.step("lv:cbt-given-up");
        let gone: Vec<String> =
            vdis.iter().filter(|vdi| has_log(&listed, **vdi)).map(|vdi| names::log_volume(*vdi)).collect();
        self.group.remove(&gone.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Makes the log of `from` lead to `new` where it led to `old`.
    fn lead(&self, from: Uuid, old: Uuid, new: Uuid) -> Result<(), ApiError> {
        if from.is_nil() || !has_log(&self.group.list()?, from) {
            return Ok(());
        }
        let path = self.log(from)?;
        let mut log = Log::open_header(&path, Access::ReadWrite).map_err(failed(&path))?;
        let header = *log.header();
        if header.child != old {
            return Ok(());
        }
        log.set_header(LogHeader { child: new, ..header }).map_err(failed(&path))
    }

    /// Does `work` with the log of a VDI while no disk is open on it. If the disk does not go on, `undo` is done before
    /// it is tried again.
    fn with_closed_log(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        work: impl FnOnce() -> Result<(), ApiError>,
        undo: impl FnOnce() -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let Some(disk) = ctx.live(vdi).filter(|disk| disk.access() == Access::ReadWrite) else {
            return work();
        };
        let journal = Journal::new(Kind::Cbt, vdi, "closed");
        journal.write(&self.group)?;
        ctx.step("lv:cbt-journal");
        // Without an answer it may be closed, or close later: the next recovery has it go on.
        disk.pause()?;
        ctx.step("lv:cbt-paused");
        let done = work();
        let resumed = self.go_on(vdi, disk.as_ref());
        let is_running = resumed.is_ok() || undo().and_then(|()| self.go_on(vdi, disk.as_ref())).is_ok();
        ctx.step("lv:cbt-resumed");
        // The next recovery tries again with a disk that stays paused.
        if is_running {
            journal.remove(&self.group)?;
        }
        done.and(resumed)
    }

    /// A disk that was closed for a change of its log goes on.
    pub(super) fn recover_log(&self, ctx: &dyn Ctx, journal: &Journal) -> Result<(), ApiError> {
        if let Some(disk) = ctx.live(journal.image) {
            // It was paused, or was going to be, or goes on already.
            let _ = disk.pause();
            if let Err(error) = self.go_on(journal.image, disk.as_ref()) {
                tracing::warn!("the disk of VDI {} does not go on with its log: {error}", journal.image);
                return Ok(());
            }
        }
        journal.remove(&self.group)
    }

    /// Starts or ends the tracking of changed blocks, also while a disk runs.
    pub(super) fn track(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.settled_volumes(ctx)?;
        let facts = self.whole(&listed, vdi)?;
        if facts.kind == FileKind::Raw {
            return Err(errors::fail(66, format_args!("{vdi} is raw: changed blocks of VHDs are tracked")));
        }
        if facts.hidden {
            return Err(errors::fail(66, format_args!("{vdi} is a base copy: take the VDI above it")));
        }
        if has_log(&listed, vdi) == wanted {
            return self.info_in(&listed, vdi);
        }
        let live = ctx.live(vdi);
        if live.is_none() {
            self.check_unused(ctx, &listed, vdi, if wanted { "enable_cbt" } else { "disable_cbt" })?;
        }
        let _pin = self.pin([names::log_volume(vdi)]);
        let remove_log = || {
            let name = names::log_volume(vdi);
            if has_log(&self.group.list()?, vdi) { self.group.remove(&[&name]) } else { Ok(()) }
        };
        if wanted {
            let is_open = live.is_some_and(|disk| disk.access() == Access::ReadWrite);
            let make = || {
                self.make_log(ctx, &listed, vdi, facts.virtual_size, is_open)?;
                ctx.step("lv:cbt-enabled");
                Ok(())
            };
            self.with_closed_log(ctx, vdi, make, remove_log)?;
        } else {
            let end = || {
                match self.settled_log(ctx, (vdi, vdi), 0) {
                    Ok(log) => self.lead(log.header().parent, vdi, Uuid::nil())?,
                    Err(error) if is_busy(&error) => return Err(error),
                    Err(_) => self.drop_logs(ctx, &[vdi])?,
                }
                ctx.step("lv:cbt-unlinked");
                remove_log()?;
                ctx.step("lv:cbt-disabled");
                Ok(())
            };
            self.with_closed_log(ctx, vdi, end, || Ok(()))?;
        }
        drop(_pin);
        self.unreach();
        self.info_now(vdi)
    }

    /// An empty log under a name that no storage manager takes for one's.
    fn fresh_log(&self, listed: &Listed, vdi: Uuid, size: u64, header: LogHeader) -> Result<(), ApiError> {
        let (fresh, len) = (names::new_log_volume(vdi), volume_len(size));
        self.check_room(listed, len)?;
        let path = self.group.create(&fresh, len, None)?;
        let made = Log::create(&path, size).and_then(|mut log| log.set_header(header));
        if made.is_err() {
            let _ = self.group.remove(&[&fresh]);
        }
        made.map_err(|error| errors::image(457, &error))
    }

    /// Makes the first log of a VDI, whole under its name. That of a disk that runs is not complete until it was
    /// settled: if the disk's process dies before it has the log open, the next one may not know of it.
    fn make_log(
        &self,
        ctx: &dyn Ctx,
        listed: &Listed,
        vdi: Uuid,
        size: u64,
        is_open: bool,
    ) -> Result<(), ApiError> {
        let header = LogHeader { consistent: i32::from(!is_open), ..LogHeader::default() };
        self.fresh_log(listed, vdi, size, header)?;
        ctx.step("lv:cbt-log-made");
        self.group.rename(&names::new_log_volume(vdi), &names::log_volume(vdi))
    }

    /// Before a snapshot closes a disk: the log that the VDI goes on with lies beside.
    pub(super) fn prepare_log(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        snapshot: Uuid,
        size: u64,
    ) -> Result<(), ApiError> {
        let path = self.log(vdi)?;
        let old = Log::open_header(&path, Access::ReadOnly);
        // A log does not become shorter along the chain of them.
        let old_size = old.map_or(0, |log| log.header().size);
        let size = if old_size <= SIZE_MAX { size.max(old_size) } else { size };
        let header = LogHeader { parent: snapshot, consistent: 1, ..LogHeader::default() };
        self.fresh_log(&self.group.list()?, vdi, size, header)?;
        ctx.step("lv:fork-log-made");
        Ok(())
    }

    /// The snapshot that is being made is in no list.
    pub(super) fn untracked(&self, ctx: &dyn Ctx, vdi: Uuid, why: &ApiError) {
        ctx.notice(vdi, Notice::SnapshotUntracked, &why.to_string());
    }

    /// Once a snapshot's leaf has its name: the old log becomes that of the snapshot, the new one takes its place. No
    /// disk is open on them. Repeating it finishes it.
    ///
    /// What keeps the logs from that does not keep the snapshot from being made: both are given up then.
    pub(super) fn switch_logs(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        snapshot: Option<Uuid>,
    ) -> Result<(), ApiError> {
        let Some(snapshot) = snapshot else { return Ok(()) };
        match self.try_switch_logs(ctx, vdi, snapshot) {
            Err(error) if !is_busy(&error) => {
                self.drop_logs(ctx, &[snapshot, vdi])?;
                // The last, because there is nothing to switch without it.
                self.remove_fresh_log(vdi)?;
                ctx.notice(vdi, Notice::SnapshotUntracked, &error.to_string());
                ctx.notice(vdi, Notice::LogGone, "the log of changed blocks is gone");
                Ok(())
            }
            done => done,
        }
    }

    /// The old log gets the snapshot's name and the new one the VDI's while a disk notes in the old one.
    pub(super) fn switch_open_logs(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        snapshot: Option<Uuid>,
    ) -> Result<(), ApiError> {
        let Some(snapshot) = snapshot else { return Ok(()) };
        self.group.rename(&names::log_volume(vdi), &names::log_volume(snapshot))?;
        ctx.step("lv:fork-log-named");
        self.group.rename(&names::new_log_volume(vdi), &names::log_volume(vdi))?;
        ctx.step("lv:fork-log-switched");
        Ok(())
    }

    /// Once the new log has the VDI's name and the old one is closed: the logs lead to each other. Repeating it
    /// finishes it, and without such logs there is nothing to do. A log that cannot be used is given up; the VDI goes
    /// on with its new one, to which no list comes then.
    pub(super) fn link_logs(&self, ctx: &dyn Ctx, vdi: Uuid, snapshot: Option<Uuid>) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let Some(snapshot) = snapshot.filter(|snapshot| has_log(&listed, *snapshot)) else { return Ok(()) };
        if !has_log(&listed, vdi) {
            return Ok(());
        }
        match self.try_link_logs(ctx, vdi, snapshot) {
            Err(error) if !is_busy(&error) => {
                self.drop_logs(ctx, &[snapshot])?;
                ctx.notice(vdi, Notice::SnapshotUntracked, &error.to_string());
                Ok(())
            }
            done => done,
        }
    }

    fn try_link_logs(&self, ctx: &dyn Ctx, vdi: Uuid, snapshot: Uuid) -> Result<(), ApiError> {
        let own = self.log(vdi)?;
        let after = Log::open_header(&own, Access::ReadOnly).map_err(failed(&own))?;
        // It was begun anew since.
        if after.header().parent != snapshot {
            return Ok(());
        }
        drop(after);
        let mut log = self.settled_log(ctx, (snapshot, vdi), 0)?;
        let header = LogHeader { child: vdi, ..*log.header() };
        if header.child != log.header().child {
            log.set_header(header).map_err(failed(&self.group.path(&names::log_volume(snapshot))))?;
        }
        drop(log);
        self.lead(header.parent, vdi, snapshot)?;
        ctx.step("lv:fork-log-linked");
        Ok(())
    }

    fn remove_fresh_log(&self, vdi: Uuid) -> Result<(), ApiError> {
        let fresh = names::new_log_volume(vdi);
        if self.group.list()?.volumes.contains_key(&fresh) { self.group.remove(&[&fresh]) } else { Ok(()) }
    }

    fn try_switch_logs(&self, ctx: &dyn Ctx, vdi: Uuid, snapshot: Uuid) -> Result<(), ApiError> {
        let (fresh, own, kept) =
            (names::new_log_volume(vdi), names::log_volume(vdi), names::log_volume(snapshot));
        let listed = self.group.list()?;
        if !listed.volumes.contains_key(&fresh) {
            return Ok(());
        }
        if !listed.volumes.contains_key(&kept) {
            self.group.rename(&own, &kept)?;
        }
        ctx.step("lv:fork-log-named");
        let mut log = self.settled_log(ctx, (snapshot, vdi), 0)?;
        let header = LogHeader { child: vdi, ..*log.header() };
        log.set_header(header).map_err(failed(&self.group.path(&kept)))?;
        drop(log);
        self.lead(header.parent, vdi, snapshot)?;
        ctx.step("lv:fork-log-linked");
        self.group.rename(&fresh, &own)?;
        ctx.step("lv:fork-log-switched");
        Ok(())
    }

    /// Makes the logs as they were before a snapshot. No disk is open on them. Repeating it finishes it.
    pub(super) fn undo_logs(&self, ctx: &dyn Ctx, vdi: Uuid, snapshot: Option<Uuid>) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let has_fresh = listed.volumes.contains_key(&names::new_log_volume(vdi));
        if let Some(snapshot) = snapshot.filter(|snapshot| has_log(&listed, *snapshot)) {
            let (own, kept) = (names::log_volume(vdi), names::log_volume(snapshot));
            let path = self.group.path(&kept);
            let failed = failed(&path);
            let mut log = self.settled_log(ctx, (snapshot, vdi), 0)?;
            // The new log was there already: what a disk noted in it counts.
            if !has_fresh && has_log(&listed, vdi) {
                let since = self.settled_log(ctx, (vdi, vdi), 0)?;
                if since.header().size > log.header().size {
                    log.grow(since.header().size).map_err(&failed)?;
                }
                log.absorb(&since).map_err(&failed)?;
            }
            let header = LogHeader { child: Uuid::nil(), ..*log.header() };
            log.set_header(header).map_err(&failed)?;
            drop(log);
            self.lead(header.parent, snapshot, vdi)?;
            if has_log(&listed, vdi) {
                self.group.remove(&[&own])?;
            }
            self.group.rename(&kept, &own)?;
        }
        self.remove_fresh_log(vdi)
    }

    /// Removes the log of a VDI whose image is gone. What it has goes into the log after it.
    pub(super) fn remove_log(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        if !has_log(&listed, vdi) {
            return Ok(());
        }
        let log = match self.settled_log(ctx, (vdi, vdi), 0) {
            Ok(log) => log,
            Err(error) if is_busy(&error) => return Err(error),
            // No list goes past it any more.
            Err(_) => return self.drop_logs(ctx, &[vdi]),
        };
        let path = self.group.path(&names::log_volume(vdi));
        let failed = failed(&path);
        let (parent, child) = (log.header().parent, log.header().child);
        // One that does not lead back is beyond a snapshot that is not finished: no list goes from here to there. It
        // leads past this one already if this was begun before.
        let is_after = child != vdi && has_log(&listed, child) && {
            let path = self.log(child)?;
            let after = Log::open_header(&path, Access::ReadOnly);
            after.map_or(true, |after| [vdi, parent].contains(&after.header().parent))
        };
        let child = if is_after { child } else { Uuid::nil() };
        if !child.is_nil() {
            let absorb = || {
                let mut later = self.settled_log(ctx, (child, child), 0)?;
                if later.header().size < log.header().size {
                    later.set_all().map_err(&failed)?;
                } else {
                    later.absorb(&log).map_err(&failed)?;
                }
                let header = LogHeader { parent, ..*later.header() };
                later.set_header(header).map_err(&failed)?;
                ctx.step("lv:destroy-log-absorbed");
                Ok(())
            };
            self.with_closed_log(ctx, child, absorb, || Ok(()))?;
        }
        self.lead(parent, vdi, child)?;
        ctx.step("lv:destroy-log-unlinked");
        drop(log);
        self.group.remove(&[&names::log_volume(vdi)])
    }

    /// A log that cannot be made longer does not keep its VDI from that: it is given up.
    pub(super) fn grow_log(&self, ctx: &dyn Ctx, vdi: Uuid, size: u64) -> Result<(), ApiError> {
        match self.settled_log(ctx, (vdi, vdi), size) {
            Err(error) if !is_busy(&error) => {
                self.drop_logs(ctx, &[vdi])?;
                ctx.notice(vdi, Notice::ResizeUntracked, &error.to_string());
                Ok(())
            }
            done => done.map(drop),
        }
    }

    /// What changed from one VDI to a later one; see [`crate::Sr::changed_blocks`].
    pub(super) fn list_changed(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.settled_volumes(ctx)?;
        changed_blocks::check(ctx, from, to, |vdi| has_log(&listed, vdi))?;
        let logs: Vec<String> = tracked(&listed).map(names::log_volume).collect();
        self.reach(&listed, logs.iter().map(String::as_str))?;
        let log_of = |vdi| has_log(&listed, vdi).then(|| self.group.path(&names::log_volume(vdi)));
        let listed_as = changed_blocks::between(from, to, log_of);
        self.unreach();
        listed_as
    }
}
