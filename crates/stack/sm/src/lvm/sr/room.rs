//! Room for disks in use whose volumes are too short: see `lvm::thin` and docs/design/thin.md.
//!
//! ```text
//! 1  no process takes the place of the running disk's until this is over
//! 2  journal inflate_<vdi>_<len>                    a kill: nothing has changed
//! 3  the volume becomes longer                      a kill: recovery puts the footer at its end
//! 4  the footer, as it is at the old end, is written to the new one, durably
//! 5  the journal goes                               a kill before: recovery removes it
//! ```
//!
//! The disk goes on meanwhile: it knows the old end, and nothing that it has lies behind that. It uses the room once it
//! finds its footer there. The journals of several volumes go at once.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

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
use crate::lvm::{names, read, size};
use crate::traits::{Ctx, RoomMade, RoomWanted, VdiInfo};

/// A volume that is to become longer.
struct Goal {
    vdi: Uuid,
    volume: Volume,
    growth: Growth,
}

impl VolumeSr {
    /// What counts for the disk in a volume.
    pub(super) fn provision_of(&self, volume: &Volume) -> Provision {
        Wanted::of(volume).over(self.provision)
    }

    /// The same of an image that is there.
    pub(super) fn provision_in(&self, listed: &Listed, vdi: Uuid) -> Provision {
        listed.image(vdi).map_or(self.provision, |(volume, _)| self.provision_of(volume))
    }

    /// How long the volume of a leaf is that is going to be written. It is reachable.
    pub(super) fn len_in_use(&self, listed: &Listed, vdi: Uuid, facts: &Facts) -> Result<u64, ApiError> {
        let provision = self.provision_in(listed, vdi);
        if !provision.is_thin {
            return Ok(size::full(facts.virtual_size));
        }
        let image = super::create::open(&self.path(FileKind::Vhd, vdi), tapio_types::Access::ReadOnly)?;
        Ok(provision.len_written(facts.virtual_size, image.physical_len()))
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
            let goal = provision.longer(facts.virtual_size, volume.size, *len);
            let growth = Growth { len: volume.size, needs, goal };
            goals.push(Goal { vdi: *vdi, volume: volume.clone(), growth });
        }
        goals
    }

    pub(super) fn make_room_for(&self, ctx: &dyn Ctx, wanted: &[RoomWanted]) -> Result<RoomMade, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut listed = self.settled_volumes(ctx)?;
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
        let mut journals = Vec::new();
        for (goal, to) in goals.iter().zip(allot(free, &growths)) {
            made.is_short |= to < goal.growth.needs;
            made.is_tight |= to < goal.growth.goal;
            if to <= goal.growth.len {
                made.is_full = true;
                continue;
            }
            match self.lengthen(ctx, goal, to) {
                Ok(journal) => journals.push(journal),
                Err(error) => {
                    tracing::warn!(sr = %self.sr, vdi = %goal.vdi, %error, "a volume does not become longer");
                    made.refused.push((goal.vdi, error));
                }
            }
        }
        Journal::remove_all(&self.group, &journals)?;
        ctx.step("lv:room-done");
        if journals.is_empty() {
            return Ok(made);
        }
        let listed = self.group.list()?;
        for journal in &journals {
            made.longer.push(self.info_in(&listed, journal.image)?);
        }
        Ok(made)
    }

    /// Steps 1 to 4; the journal is there still.
    fn lengthen(&self, ctx: &dyn Ctx, goal: &Goal, to: u64) -> Result<Journal, ApiError> {
        let Goal { vdi, volume, .. } = goal;
        let live = ctx.live(*vdi);
        if let Some(disk) = &live {
            disk.hold(false)?;
        }
        let path = self.path(FileKind::Vhd, *vdi);
        let failed = |error: io::Error| errors::io(54, "cannot move the footer of", &path, &error);
        let (file, footer) = footer_at(&path, volume.size).map_err(failed)?;
        let journal = Journal::new(Kind::Inflate, *vdi, volume.size);
        journal.write(&self.group)?;
        ctx.step("lv:room-journal");
        if let Err(error) = self.group.resize(&volume.name, volume.size, to) {
            journal.remove(&self.group)?;
            return Err(error);
        }
        ctx.step("lv:room-longer");
        let written =
            file.write_all_at(&footer, size::rounded(to) - FOOTER_LEN as u64).and_then(|()| file.sync_data());
        // The journal stays: the next operation puts the footer there.
        written.map_err(failed)?;
        ctx.step("lv:room-footer");
        drop(live);
        Ok(journal)
    }
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
