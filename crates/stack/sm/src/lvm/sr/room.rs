//! Room for disks in use whose volumes are too short: see `lvm::thin` and docs/design/thin.md.
//!
//! ```text
//! 1  no process takes the place of the running disk's until this is over
//! 2  journal inflate_<vdi>_<len>                    a kill: nothing has changed
//! 3  the volume becomes longer                      a kill: recovery puts the footer at its end
//! 4  the footer, as it is at the old end, is written to the new one, durably; the disk is told
//! 5  the journal goes                               a kill before: recovery removes it
//! ```
//!
//! The disk goes on meanwhile: it knows the old end, and nothing that it has lies behind that. It uses the room once it
//! finds its footer there.
//!
//! Several volumes take each step together: one process of LVM writes all journals and then makes the volumes longer,
//! another removes the journals. LVM stops at the first command that fails, and is asked then how far it came.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tapio_format::vhd::{FOOTER_LEN, Footer};
use tapio_types::ApiError;
use uuid::Uuid;

use super::VolumeSr;
use crate::dir::facts::{Facts, FileKind};
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::{Listed, Volume};
use crate::lvm::journal::{Journal, Kind};
use crate::lvm::thin::{Growth, Provision, Wanted, allot};
use crate::lvm::{description, names, read, size};
use crate::traits::{Ctx, LiveDisk, RoomMade, RoomWanted, VdiInfo};

/// Volumes that become longer by one process of LVM: the first of them wait for the last.
const AT_ONCE: usize = 8;

/// A volume that is to become longer.
struct Goal {
    vdi: Uuid,
    volume: Volume,
    facts: Facts,
    growth: Growth,
}

/// One that may begin.
struct Ready<'a> {
    goal: &'a Goal,
    to: u64,
    journal: Journal,
    /// No process takes its place as long as this is there.
    disk: Option<Box<dyn LiveDisk>>,
    path: PathBuf,
    file: File,
    footer: [u8; FOOTER_LEN],
}

impl VolumeSr {
    /// What counts for the disk in a volume.
    pub(super) fn provision_of(&self, volume: &Volume) -> Provision {
        Wanted::of(volume).over(self.provision())
    }

    /// The same of an image that is there.
    pub(super) fn provision_in(&self, listed: &Listed, vdi: Uuid) -> Provision {
        listed.image(vdi).map_or(self.provision(), |(volume, _)| self.provision_of(volume))
    }

    /// How long the volume of a leaf is that is going to be written. It is reachable.
    pub(super) fn len_in_use(&self, listed: &Listed, vdi: Uuid, facts: &Facts) -> Result<u64, ApiError> {
        let provision = self.provision_in(listed, vdi);
        if !provision.is_thin {
            return Ok(size::full(facts.virtual_size));
        }
        let image = super::create::open(&self.path(FileKind::Vhd, vdi), tapio_types::Access::ReadOnly)?;
        let room = self.first_room(&provision, listed.free);
        Ok(provision.len_written(facts.virtual_size, image.physical_len(), room))
    }

    /// What a disk that begins to be written has ahead.
    pub(super) fn first_room(&self, provision: &Provision, free: u64) -> u64 {
        provision.first_room(free, self.active.all().len() + 1)
    }

    /// Says how the space of a VDI is given.
    pub(super) fn describe(&self, volume: &Volume, info: &mut VdiInfo) {
        if volume.name.starts_with("VHD-") && info.managed {
            let word = if self.provision_of(volume).is_thin { "thin" } else { "thick" };
            info.sm_config.insert("allocation".into(), word.into());
        }
    }

    /// What is to become longer, of what is wanted; refused in `made` is what cannot.
    fn goals(&self, listed: &Listed, wanted: &[RoomWanted], made: &mut RoomMade) -> Vec<Goal> {
        let mut goals: Vec<Goal> = Vec::new();
        for RoomWanted { vdi, len } in wanted {
            let Some(volume) = listed.volumes.get(&names::volume(FileKind::Vhd, *vdi)) else {
                made.refused.push((*vdi, errors::vdi_missing(self.sr, *vdi)));
                continue;
            };
            let facts = read::facts(volume, FileKind::Vhd);
            if let Some(why) = facts.damage {
                made.refused.push((*vdi, errors::fail(65, format_args!("{vdi}: {why}"))));
                continue;
            }
            let provision = self.provision_of(volume);
            let full = size::full(facts.virtual_size);
            let needs = size::rounded(*len).min(full);
            let is_known = goals.iter().any(|goal| goal.vdi == *vdi);
            if facts.hidden || !volume.is_writable || volume.size >= needs || is_known {
                continue;
            }
            let disks = self.active.all().len().max(wanted.len());
            let least = provision.first_room(listed.free, disks);
            let bounds = (least, provision.step_max(listed.free, disks).max(least));
            let step = self.steps.next(*vdi, bounds, Instant::now());
            let goal = provision.longer(facts.virtual_size, volume.size, (*len, step));
            let growth = Growth { len: volume.size, needs, goal };
            goals.push(Goal { vdi: *vdi, volume: volume.clone(), facts, growth });
        }
        goals
    }

    pub(super) fn make_room_for(&self, ctx: &dyn Ctx, wanted: &[RoomWanted]) -> Result<RoomMade, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        // A guest waits: LVM is asked where its own description does not say it.
        let described = description::of(&self.group).filter(|listed| !Self::is_unsettled(listed));
        let mut listed = described.map_or_else(|| self.settled_volumes(ctx), Ok)?;
        let mut made = RoomMade::default();
        let mut goals = self.goals(&listed, wanted, &mut made);
        let needs = |goals: &[Goal]| {
            let more = |goal: &Goal| goal.growth.needs - goal.growth.len + size::EXTENT;
            goals.iter().map(more).fold(0_u64, u64::saturating_add)
        };
        if needs(&goals) > listed.free {
            // The device may have become longer since.
            self.group.grow();
            listed = self.group.list()?;
        }
        // Each has a journal meanwhile.
        let all = goals.len();
        goals.truncate(usize::try_from(listed.free / (2 * size::EXTENT)).unwrap_or(usize::MAX));
        made.is_full = goals.len() < all;
        made.is_short = made.is_full;
        made.is_tight = made.is_full;
        let free = listed.free.saturating_sub(goals.len() as u64 * size::EXTENT);
        let growths: Vec<Growth> = goals.iter().map(|goal| goal.growth).collect();
        let mut granted = Vec::new();
        for (goal, to) in goals.iter().zip(allot(free, &growths)) {
            made.is_short |= to < goal.growth.needs;
            made.is_tight |= to < goal.growth.goal;
            if to > goal.growth.len {
                granted.push((goal, to));
            } else {
                made.is_full = true;
            }
        }
        let mut longer = Vec::new();
        for some in granted.chunks(AT_ONCE) {
            longer.extend(self.lengthen(ctx, some, &mut made)?);
        }
        let journals: Vec<Journal> = longer.iter().map(|ready| ready.journal.clone()).collect();
        Journal::remove_all(&self.group, &journals)?;
        ctx.step("lv:room-done");
        for Ready { goal, to, .. } in longer {
            self.steps.note(goal.vdi, to - goal.growth.len, Instant::now());
            let has_log = listed.volumes.contains_key(&names::log_volume(goal.vdi));
            let facts = Facts { physical: to, ..goal.facts.clone() };
            let mut info = crate::dir::info(goal.vdi, &facts, 0, has_log);
            self.describe(&goal.volume, &mut info);
            made.longer.push(info);
        }
        Ok(made)
    }

    /// Steps 1 to 4 for some volumes; the journals of those that are answered are there still.
    fn lengthen<'a>(
        &self,
        ctx: &dyn Ctx,
        granted: &[(&'a Goal, u64)],
        made: &mut RoomMade,
    ) -> Result<Vec<Ready<'a>>, ApiError> {
        let mut refuse = |vdi: Uuid, error: ApiError| {
            tracing::warn!(sr = %self.sr, %vdi, %error, "a volume does not become longer");
            made.refused.push((vdi, error));
        };
        let mut all = Vec::new();
        for (goal, to) in granted {
            match self.ready_for_room(ctx, goal, *to) {
                Ok(ready) => all.push(ready),
                Err(error) => refuse(goal.vdi, error),
            }
        }
        let mut lines = Vec::new();
        for ready in &all {
            match ready.journal.line(&self.group) {
                Some((_, line)) => lines.push(line),
                None => ready.journal.write(&self.group)?,
            }
        }
        lines.extend(all.iter().map(|ready| self.group.line_extend(&ready.goal.volume.name, ready.to)));
        if let Err(error) = self.run_lines(ctx, &lines) {
            tracing::info!(sr = %self.sr, %error, "volumes become longer one by one");
            all = self.lengthen_each(ctx, all, &mut refuse)?;
        }
        ctx.step("lv:room-longer");
        let mut done = Vec::new();
        for mut ready in all {
            let end = size::rounded(ready.to) - FOOTER_LEN as u64;
            let written = ready.file.write_all_at(&ready.footer, end).and_then(|()| ready.file.sync_data());
            if let Err(error) = written {
                // The journal stays: the next operation puts the footer there.
                refuse(ready.goal.vdi, cannot_move(&ready.path, &error));
                continue;
            }
            ctx.step("lv:room-footer");
            if let Some(disk) = ready.disk.take() {
                disk.look_for_room();
            }
            done.push(ready);
        }
        Ok(done)
    }

    /// Steps 2 and 3. Where several hosts have the SR, each command is a process of its own: before each it is looked
    /// whether this host has its lease still, and the worker ends where it has not.
    fn run_lines(&self, ctx: &dyn Ctx, lines: &[Vec<String>]) -> Result<(), ApiError> {
        let at_once = if self.locks.member().is_some() { 1 } else { lines.len().max(1) };
        lines.chunks(at_once).try_for_each(|some| {
            ctx.step("lv:room-begins");
            self.group.run_all(59, some)
        })
    }

    /// Step 1 for a volume.
    fn ready_for_room<'a>(&self, ctx: &dyn Ctx, goal: &'a Goal, to: u64) -> Result<Ready<'a>, ApiError> {
        let disk = ctx.live(goal.vdi);
        if let Some(disk) = &disk {
            disk.hold(false)?;
        }
        let path = self.path(FileKind::Vhd, goal.vdi);
        let (file, footer) =
            footer_at(&path, goal.volume.size).map_err(|error| cannot_move(&path, &error))?;
        let journal = Journal::new(Kind::Inflate, goal.vdi, goal.volume.size);
        Ok(Ready { goal, to, journal, disk, path, file, footer })
    }

    /// Steps 2 and 3 one by one, after LVM failed in the middle of those of all: those that are longer.
    fn lengthen_each<'a>(
        &self,
        ctx: &dyn Ctx,
        all: Vec<Ready<'a>>,
        refuse: &mut impl FnMut(Uuid, ApiError),
    ) -> Result<Vec<Ready<'a>>, ApiError> {
        let listed = self.group.list()?;
        let mut longer = Vec::new();
        for ready in all {
            ctx.step("lv:room-begins");
            let Goal { vdi, volume, .. } = ready.goal;
            let is_longer =
                listed.volumes.get(&volume.name).is_some_and(|now| now.size >= size::rounded(ready.to));
            let has_journal =
                ready.journal.line(&self.group).is_none_or(|(name, _)| listed.volumes.contains_key(&name));
            let written = if has_journal { Ok(()) } else { ready.journal.write(&self.group) };
            if is_longer {
                longer.push(ready);
            } else if let Err(error) = written {
                refuse(*vdi, error);
            } else if let Err(error) = self.group.resize(&volume.name, volume.size, ready.to) {
                ready.journal.remove(&self.group)?;
                refuse(*vdi, error);
            } else {
                longer.push(ready);
            }
        }
        Ok(longer)
    }
}

fn cannot_move(path: &Path, error: &io::Error) -> ApiError {
    errors::io(54, "cannot move the footer of", path, error)
}

/// The footer at the end of a volume of `len` bytes, as it is.
fn footer_at(path: &Path, len: u64) -> io::Result<(File, [u8; FOOTER_LEN])> {
    // Not locked against writers: the disk process writes before this part.
    let file = File::options().read(true).write(true).open(path)?;
    let mut footer = [0; FOOTER_LEN];
    file.read_exact_at(&mut footer, len - FOOTER_LEN as u64)?;
    match Footer::decode(&footer) {
        Ok((known, _)) if known.disk_type.is_dynamic() => Ok((file, footer)),
        Ok(_) => Err(io::Error::other("it is a fixed disk, which has all of its space")),
        Err(error) => Err(io::Error::other(format!("its end has none: {error}"))),
    }
}
