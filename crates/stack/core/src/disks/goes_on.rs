//! Disks that were asked to pause and did not in time.
//!
//! A process that has begun to end its requests goes on with that when its caller waits no more, and is paused when the
//! last one has ended: a storage that hung for a minute would leave its guest stopped for ever. So the disk is looked
//! after until it has gone on.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tapio_model::ApiError;
use uuid::Uuid;

use super::busy::Busy;
use super::{Table, ids};

/// How long one try may take: others may want the disk meanwhile.
const TRY: Duration = Duration::from_secs(10);
/// Between two tries.
const AGAIN: Duration = Duration::from_secs(1);

/// Lets a disk go on as soon as its requests have ended, with the images that its note names then.
pub(super) fn as_soon_as_it_can(table: &Arc<Table>, vbd: Uuid) {
    let table = Arc::clone(table);
    let tries = move || {
        while let Err(error) = once(&table, vbd) {
            tracing::warn!(%vbd, %error, "a disk that was not paused in time cannot go on yet; it is tried again");
            thread::sleep(AGAIN);
        }
    };
    if let Err(error) = thread::Builder::new().name("disk-goes-on".to_owned()).spawn(tries) {
        tracing::error!(%vbd, %error, "a disk that was not paused in time may stay paused: there is no thread for it");
    }
}

/// Nothing is left to be done where the disk is gone, its process has died (another one opens the images), or a client
/// has paused it.
fn once(table: &Arc<Table>, vbd: Uuid) -> Result<(), ApiError> {
    let note_of = || table.lock().get(&vbd).filter(|note| note.paused.is_none()).cloned();
    if note_of().is_none() {
        return Ok(());
    }
    let until = Instant::now() + TRY;
    let _busy = Busy::begin_of_paused(table, vbd, until)?;
    let Some((note, (process, minor))) = note_of().and_then(|note| Some((note.clone(), ids(&note).ok()?)))
    else {
        return Ok(());
    };
    let Some(with) = note.open_spec() else { return Ok(()) };
    if !table.backend.is_alive(process) {
        return Ok(());
    }
    // Joins what was begun; one that another operation has let go on meanwhile is paused for a moment.
    table.backend.pause(process, minor, until)?;
    table.backend.resume(process, minor, &with, Instant::now() + TRY)
}
