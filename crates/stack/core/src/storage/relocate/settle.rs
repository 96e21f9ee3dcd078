//! What a move leaves that failed, or whose daemon was killed: every VDI is at one place, and nothing else is left.

use std::sync::Arc;
use std::time::Duration;

use tapio_model::ApiError;
use tapio_sm::worker::is_unfinished;
use tapio_types::Access;

use super::super::attached::Attached;
use super::super::half_done::{self, drop_note};
use super::super::notes::{self, Move, Moving, Note};
use super::super::vdi::{Subject, remove_image};
use super::super::work::Work;
use super::super::{Call, Storage, reconcile};
use super::switch;
use crate::db::reference_of;
use crate::disks::Side;

/// How long what could not be put in order is left alone.
const AGAIN: Duration = Duration::from_secs(5);

/// Puts in order what a move left that failed. Where that cannot be done now it is tried until it is.
pub(super) fn after_failure(call: &Call, to: &Attached, note: Move) {
    let own = Call::own(&call.part);
    if let Err(error) = settle(&own, &note, Since::Failure) {
        tracing::warn!(?note, %error, "a move that failed is not put in order yet");
        if to.is_in_trouble() {
            to.owe(Note::Move(note));
        } else {
            try_later(&call.part, note);
        }
    }
}

/// Tries to put a move in order until that is done; the note keeps it over a restart.
fn try_later(storage: &Arc<Storage>, note: Move) {
    let storage = Arc::downgrade(storage);
    let trying = move || loop {
        std::thread::sleep(AGAIN);
        let Some(storage) = storage.upgrade() else { return };
        match again(&Call::own(&storage), &note) {
            Ok(()) => return,
            Err(error) => tracing::warn!(?note, %error, "a move that failed is not in order yet"),
        }
    };
    if let Err(error) = std::thread::Builder::new().name("move-later".to_owned()).spawn(trying) {
        tracing::error!(%error, "a move that failed waits for the next start");
    }
}

/// Puts in order what the daemon that was killed had begun, once both SRs are attached; `is_all`: they are, or could
/// not be.
pub(in super::super) fn recover(storage: &Arc<Storage>, is_all: bool) {
    for note in notes::all(&storage.db) {
        let Note::Move(moving) = note else { continue };
        let storage = Arc::clone(storage);
        let work = move || {
            storage.wait_until_recovered(&moving.sr);
            storage.wait_until_recovered(&moving.to);
            let since = if is_all { Since::Start } else { Since::Failure };
            if let Err(error) = once_more(&Call::own(&storage), &moving, since) {
                tracing::error!(?moving, %error, "a move that was broken off waits until its SRs are attached");
            }
        };
        if is_all {
            work();
        } else if let Err(error) = std::thread::Builder::new().name("move-later".to_owned()).spawn(work) {
            tracing::error!(%error, "a move that was broken off waits for the next start");
        }
    }
}

/// What may have happened to the VDIs since the move was broken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Since {
    /// Nothing: the daemon starts, and no call has changed anything yet.
    Start,
    /// Anything: disks that no process wrote to may have been used.
    Failure,
}

/// [`settle`] of a note that another run of the daemon, or another thread, may have worked off.
///
/// # Errors
/// As there.
pub(in super::super) fn again(call: &Call, note: &Move) -> Result<(), ApiError> {
    once_more(call, note, Since::Failure)
}

fn once_more(call: &Call, note: &Move, since: Since) -> Result<(), ApiError> {
    let same = |known: &Note| matches!(known, Note::Move(known) if known.id == note.id);
    let known = notes::all(&call.part.db);
    let Some(Note::Move(now)) = known.iter().find(|known| same(known)) else { return Ok(()) };
    let is_gone = |sr: &str| call.part.db.get("SR", sr).is_err();
    if is_gone(&now.sr) || is_gone(&now.to) {
        return drop_note(call, &Note::Move(now.clone()));
    }
    settle(call, now, since)?;
    // Base copies came with images, and have a record where they stayed.
    reconcile::scan(call, &*call.part.attached(&now.to)?)
}

/// Finishes a switch that a disk process has done; ends mirrors, removes images that no VDI has, and the note.
///
/// Before the first disk goes over all that is copied is whole. So what no process writes to follows the disk that has
/// gone over, where nothing can have written to it since.
fn settle(call: &Call, note: &Move, since: Since) -> Result<(), ApiError> {
    let (from, to) = (call.part.attached(&note.sr)?, call.part.attached(&note.to)?);
    let mut left = note.clone();
    let switching = left.members.iter().find(|moving| Some(moving.image) == note.switching).cloned();
    if let Some(moving) = switching
        && is_there(call, &from, &moving)?
    {
        let still = left.members.iter().filter(|other| since == Since::Start && other.vbd.is_none());
        let gone_over: Vec<Moving> = std::iter::once(&moving).chain(still).cloned().collect();
        finish(call, (&from, &to), &mut left, &gone_over)?;
    }
    for moving in &left.members {
        if let Some(mirror) = moving.vbd.and_then(|vbd| call.part.disks.mirror(vbd)) {
            mirror.cancel()?;
        }
        to.with(|sr| sr.deactivate(&Work::new(call), moving.image))?;
    }
    for image in &left.images {
        remove_image(call, &to, *image)?;
    }
    to.admit(&note.images);
    drop_note(call, &Note::Move(left))
}

/// Whether a disk that was being switched is on its new image.
fn is_there(call: &Call, from: &Attached, moving: &Moving) -> Result<bool, ApiError> {
    let Some(vbd) = moving.vbd else { return Ok(false) };
    let disks = &call.part.disks;
    if disks.of_vbd(vbd).is_some_and(|disk| disk.is_on(moving.image)) {
        return Ok(true);
    }
    let side = disks.mirror(vbd).map_or(Side::Unknown, |mirror| mirror.side(moving.image));
    match side {
        Side::Target => Ok(true),
        Side::Source => Ok(false),
        Side::Unknown => {
            let uuid = call.part.db.get("VDI", &moving.vdi)?.uuid()?;
            Ok(from.with(|sr| sr.continued(&Work::new(call), uuid))? == Some(moving.image))
        }
    }
}

/// Makes the records of disks that are on their new images.
fn finish(
    call: &Call,
    (from, to): (&Arc<Attached>, &Arc<Attached>),
    left: &mut Move,
    gone_over: &[Moving],
) -> Result<(), ApiError> {
    let work = Work::new(call);
    for moving in gone_over {
        let Some(vbd) = moving.vbd.filter(|vbd| call.part.disks.of_vbd(*vbd).is_some()) else { continue };
        let opened = to.with(|sr| sr.activate(&work, moving.image, Access::ReadWrite))?;
        let image = moving.image;
        call.part.disks.is_moved(vbd, (&reference_of(image), image, to.uuid), &opened)?;
    }
    let members = gone_over.iter().map(|moving| Subject::find_at_all(call, &moving.vdi));
    let members = members.collect::<Result<Vec<_>, _>>()?;
    let old = switch::records(call, (from, to), left, &members.iter().collect::<Vec<_>>(), &[])?;
    for member in &members {
        from.with(|sr| sr.deactivate(&work, member.uuid))?;
    }
    for note in &old {
        if let Err(error) = half_done::image(call, from, note) {
            tracing::warn!(?note, %error, "an image that was moved stays until its SR is attached again");
            if is_unfinished(&error) {
                from.owe(note.clone());
            }
        }
    }
    Ok(())
}
