//! A disk that a VM uses moves: its process mirrors it onto the new image, and goes over to that.

use std::time::Duration;

use tapio_control::{MirrorCopy, MirrorReport, MirrorState};
use tapio_model::ApiError;
use tapio_sm::{Ctx, OpenSpec, RoomWanted};
use tapio_types::{Access, ChainSpec};
use uuid::Uuid;

use super::super::notes::{Move, Note};
use super::super::vdi::Subject;
use super::super::work::Work;
use super::build::COPYING;
use super::plan::{Place, Plan};
use super::{Call, Moved, OP, Writer, switch};
use crate::db::reference_of;
use crate::disks::{Mirror, Phase, Side};
use crate::operations::{SWITCH, on_vdi};
use crate::plan::steps::step;

/// How often a mirror is asked how far it is.
const LOOK: Duration = Duration::from_millis(100);

/// The images that the process of a writer has open.
///
/// # Errors
/// `VDI_IN_USE`: the disk is just being plugged or unplugged.
pub(super) fn chain(call: &Call, member: &Subject, writer: &Writer) -> Result<ChainSpec, ApiError> {
    let note = call.part.disks.of_vbd(writer.vbd).filter(|note| note.phase == Phase::Running);
    let chain = note.filter(|note| note.vdi_uuid == member.uuid).and_then(|note| note.chain);
    let busy = || ApiError::new("VDI_IN_USE", [member.reference(), OP]);
    chain.filter(|chain| chain.access == Access::ReadWrite).ok_or_else(busy)
}

/// The second side of a mirror asks for no room: it has all of its space at once.
///
/// # Errors
/// The SR has no room for all of it; the driver's.
pub(crate) fn make_whole(call: &Call, sr: &str, image: Uuid) -> Result<(), ApiError> {
    let wanted = [RoomWanted { vdi: image, len: u64::MAX }];
    match call.part.attached(sr)?.with(|sr| sr.make_room(&Work::new(call), &wanted)) {
        // Other storages give all of it anyway.
        Err(error) if error.code == "SR_BACKEND_FAILURE_38" => Ok(()),
        Ok(made) => match made.refused.into_iter().next() {
            Some((_, error)) => Err(error),
            None if made.is_short => {
                let text =
                    format!("the SR has no room for all of {image}, which a move of a disk in use takes");
                Err(ApiError::backend(44, text, ""))
            }
            None => Ok(()),
        },
        Err(error) => Err(error),
    }
}

/// The disk is where it was, and says why.
fn lost(member: &Subject, why: &str) -> ApiError {
    lost_of(member.reference(), why)
}

/// [`lost`] of a VDI's reference.
pub(crate) fn lost_of(vdi: &str, why: &str) -> ApiError {
    tracing::warn!(vdi, why, "a disk that is used was not moved");
    ApiError::new("MIRROR_FAILED", [vdi, why])
}

impl Moved<'_> {
    /// Moves a disk that is used; answers the note by which its old image goes.
    pub(super) fn move_live(
        &self,
        note: &mut Move,
        (member, writer): (&Subject, &Writer),
        (place, copy): (Place, MirrorCopy),
        (bases, plan): (&[Uuid], &Plan),
    ) -> Result<Note, ApiError> {
        let work = Work::new(self.call);
        let opened = self.to.with(|sr| sr.activate(&work, place.image, Access::ReadWrite))?;
        make_whole(self.call, &self.to.reference, place.image)?;
        let mirror = self.call.part.disks.mirror(writer.vbd);
        let mirror = mirror.ok_or_else(|| lost(member, "its disk process is gone: move it again"))?;
        mirror.start(&opened.chain, copy, 0).map_err(|error| lost(member, &said(&error)))?;
        step("disk:mirrored");
        let share = place.bytes as f64 / plan.bytes.max(1) as f64;
        loop {
            self.wait(&mirror, member, share)?;
            if let Some(old) = self.switch(note, (member, writer), (place.image, &opened), &mirror, bases)? {
                return Ok(old);
            }
        }
    }

    /// Waits until both sides of the mirror are the same.
    fn wait(&self, mirror: &Mirror, member: &Subject, share: f64) -> Result<(), ApiError> {
        let work = self.work(COPYING * (1.0 - share), 1.0);
        loop {
            if self.call.progress.is_cancelled() {
                return Err(ApiError::bare("TASK_CANCELLED"));
            }
            let report = check(mirror, member)?;
            if report.state == MirrorState::InSync {
                return Ok(());
            }
            let all = report.copied_bytes.saturating_add(report.dirty_bytes);
            if report.listed && all > 0 {
                work.progress(report.copied_bytes as f64 / all as f64 * 0.98);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Goes over; none where the guest was quicker and something is to be copied again.
    fn switch(
        &self,
        note: &mut Move,
        (member, writer): (&Subject, &Writer),
        (image, opened): (Uuid, &OpenSpec),
        mirror: &Mirror,
        bases: &[Uuid],
    ) -> Result<Option<Note>, ApiError> {
        let (call, vdi) = (self.call, member.reference());
        let _switch = call.part.operations.enter(&*call.progress, &[on_vdi(vdi, SWITCH)], || {
            let state = call.part.state();
            let holders = state.holders.get(vdi);
            let is_same = holders.is_some_and(|all| all.len() == 1 && all.contains_key(&writer.holder));
            is_same.then_some(()).ok_or_else(|| lost(member, "it was unplugged meanwhile: move it again"))
        })?;
        if check(mirror, member)?.state != MirrorState::InSync {
            return Ok(None);
        }
        note.switching = Some(image);
        let written = Note::Move(note.clone());
        call.part.db.change(|change| written.put(change))?;
        step("disk:in-sync");
        let mut old = None;
        let pivoted = mirror.pivot(image, |side| {
            let is_there = match side {
                Side::Target => true,
                Side::Source => false,
                Side::Unknown => {
                    self.from.with(|sr| sr.continued(&Work::new(call), member.uuid))? == Some(image)
                }
            };
            if !is_there {
                return Err(lost(member, "its disk process ended before it went over: move it again"));
            }
            call.part.disks.is_moved(writer.vbd, (&reference_of(image), image, self.to.uuid), opened)?;
            old = switch::records(call, (&self.from, &self.to), note, &[member], bases)?.pop();
            Ok(())
        });
        match (pivoted, old) {
            (Ok(()), Some(old)) => {
                if let Err(error) = self.from.with(|sr| sr.deactivate(&Work::new(call), member.uuid)) {
                    tracing::warn!(vdi = %member.uuid, %error, "the storage did not close what was moved away");
                }
                Ok(Some(old))
            }
            (Ok(()), None) => Err(ApiError::internal("a disk was switched and no record")),
            // The guest wrote in the last moment: it is copied once more.
            (Err(_), None) if check(mirror, member).is_ok() && mirror.side(image) == Side::Source => Ok(None),
            (Err(error), _) => Err(error),
        }
    }
}

/// Where a mirror stands that is to go on.
///
/// # Errors
/// `MIRROR_FAILED`, with why it cannot.
pub(crate) fn look_at_mirror(mirror: &Mirror, vdi: &str) -> Result<MirrorReport, ApiError> {
    let lost = |why: &str| lost_of(vdi, why);
    if !mirror.is_there() {
        return Err(lost("its disk process ended, or it was unplugged: move it again"));
    }
    let report = mirror.status().map_err(|error| lost(&said(&error)))?;
    let report = report.ok_or_else(|| lost("its mirror was ended by someone else: move it again"))?;
    match report.state {
        MirrorState::Degraded => {
            Err(lost(&report.reason.unwrap_or_else(|| "its new storage does not answer".to_owned())))
        }
        MirrorState::Copying | MirrorState::InSync => Ok(report),
    }
}

fn check(mirror: &Mirror, member: &Subject) -> Result<MirrorReport, ApiError> {
    look_at_mirror(mirror, member.reference())
}

/// The sentence of a driver's error.
pub(crate) fn said(error: &ApiError) -> String {
    error.params.get(1).filter(|text| !text.is_empty()).cloned().unwrap_or_else(|| error.to_string())
}
