//! At start: drivers get their records, what a killed daemon left half done is finished or undone, and SRs that were
//! attached are attached again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tapio_model::ApiError;
use tapio_sm::worker::is_unfinished;

use super::half_done::drop_note;
use super::notes::{self, Note};
use super::records::Alert;
use super::retry::{AGAIN, Job, spawn, until_done};
use super::{Call, Storage, allowed, copy, plug, queues, relocate, sr, this_host};
use crate::db::reference_of;

/// Makes the records true before the first call: drivers are known, so are the holders of VDIs, and no SR is attached
/// yet. Touches no storage. Disk processes that run must be known by now.
///
/// # Errors
/// The store's.
pub fn open(storage: &Arc<Storage>) -> Result<(), ApiError> {
    let (db, call) = (&storage.db, Call::own(storage));
    storage.record_drivers()?;
    let notes = notes::all(db);
    for note in &notes {
        if let Note::Holder { vdi, holder, access } = note {
            storage.put_holder(vdi, holder, Some(*access));
        }
    }
    let mut wanted = wanted(&call, &notes);
    wanted.retain(|pbd| {
        let sr = db.get("PBD", pbd).map(|pbd| pbd.text("SR").to_owned());
        sr.is_ok_and(|sr| !storage.state().attached.contains_key(&sr))
    });
    db.change(|change| {
        for pbd in &wanted {
            Note::PbdWanted { pbd: pbd.clone() }.put(change)?;
            change.set("PBD", pbd, "currently_attached", false)?;
        }
        for known in change.all("SR") {
            allowed::refresh_all(storage, change, &known.reference)?;
        }
        Ok(())
    })
}

/// Brings storage into the state that the database says, after [`open`]: each SR on a thread of its own, because any of
/// them may hang. Returns when all are in order, and at `until` with those that are not yet left to their threads.
/// An SR that cannot be attached is a message to the administrator, and is tried again at the next start; one that
/// hangs, and one that was being made, unplugged or destroyed, is tried again until that is done.
///
/// # Errors
/// The store's.
pub fn recover(storage: &Arc<Storage>, until: Instant) -> Result<(), ApiError> {
    let (db, call) = (&storage.db, Call::own(storage));
    let notes = notes::all(db);
    let mut jobs: BTreeMap<String, Vec<Job>> = BTreeMap::new();
    let sr_of =
        |pbd: &str| db.get("PBD", pbd).map_or_else(|_| pbd.to_owned(), |pbd| pbd.text("SR").to_owned());
    for note in &notes {
        let (sr, job) = match note {
            Note::SrCreate(new) => (reference_of(new.uuid), sr::create_job(new.clone())),
            Note::SrDestroy { sr } => (sr.clone(), sr::destroy_job(sr.clone())),
            Note::PbdUnplug { pbd } => (sr_of(pbd), unplug_job(note.clone(), pbd.clone())),
            _ => continue,
        };
        jobs.entry(sr).or_default().push(job);
    }
    for pbd in wanted(&call, &notes) {
        jobs.entry(sr_of(&pbd)).or_default().push(Job::certain(move |call| plug_until_answered(call, &pbd)));
    }
    // All of them, before the first may end.
    for sr in jobs.keys() {
        storage.recovering.begins(sr, None);
    }
    for (sr, jobs) in jobs {
        let of = sr.clone();
        spawn(storage, &sr, None, move |call| {
            jobs.iter().for_each(|job| until_done(call, job));
            call.part.recovering.is_over(&of, None);
        });
    }
    let is_all = storage.recovering.wait_for_all(Some(until));
    if !is_all {
        let left = storage.recovering.srs();
        tracing::warn!(?left, "some SRs are not attached yet; all else goes on without them");
    }
    forget_notes_of_gone_srs(&call)?;
    queues::restore_left(&call);
    relocate::recover(storage, is_all);
    // Last, because source and target may be on different SRs.
    for note in notes.into_iter().filter(|note| matches!(note, Note::CopyInto { .. })) {
        if is_all {
            copy::resume(storage, &note);
            continue;
        }
        let storage = Arc::clone(storage);
        let later = move || {
            storage.recovering.wait_for_all(None);
            copy::resume(&storage, &note);
        };
        if let Err(error) = std::thread::Builder::new().name("copy-later".to_owned()).spawn(later) {
            tracing::error!(%error, "a copy that was interrupted waits for the next start");
        }
    }
    db.change(|change| {
        for known in change.all("SR") {
            allowed::refresh_all(storage, change, &known.reference)?;
        }
        Ok(())
    })
}

/// Plugs a PBD; where its storage hangs, again and again, until it answers or the PBD is not wanted any more.
fn plug_until_answered(call: &Call, pbd: &str) {
    let note = Note::PbdWanted { pbd: pbd.to_owned() };
    let mut is_told = false;
    loop {
        // It may have gone with an SR that was being destroyed.
        if call.part.db.get("PBD", pbd).is_err() {
            return;
        }
        let Err(error) = plug::plug(call, pbd) else { return };
        if !is_told {
            tell(call, pbd, &error);
            is_told = true;
        }
        if !is_unfinished(&error) {
            return;
        }
        std::thread::sleep(AGAIN);
        if !notes::all(&call.part.db).contains(&note) {
            return;
        }
    }
}

/// PBDs of this host that were attached, or were about to be.
fn wanted(call: &Call, notes: &[Note]) -> Vec<String> {
    let host = this_host(&call.part.db);
    let noted = |reference: &str| {
        notes.iter().any(|note| match note {
            Note::PbdPlug { pbd } | Note::PbdWanted { pbd } => pbd == reference,
            _ => false,
        })
    };
    let here = call.part.db.all("PBD").into_iter().filter(|pbd| pbd.text("host") == host);
    let wanted = here.filter(|pbd| pbd.bool("currently_attached") || noted(&pbd.reference));
    wanted.map(|pbd| pbd.reference.clone()).collect()
}

/// Reports to the administrator an SR that is not attached; the note that it is wanted stays.
fn tell(call: &Call, pbd: &str, error: &ApiError) {
    let db = &call.part.db;
    let sr = db.get("PBD", pbd).and_then(|pbd| db.get("SR", pbd.text("SR")));
    let (uuid, name) =
        sr.map(|sr| (sr.text("uuid").to_owned(), sr.text("name_label").to_owned())).unwrap_or_default();
    let body = format!(
        "SR '{name}' ({uuid}) could not be attached at start: {error}. Its disks cannot be used; see to the storage, \
         then pbd-plug. The next start tries again; a storage that hangs is tried until it answers."
    );
    Alert { name: "PBD_PLUG_FAILED_ON_SERVER_START", priority: 3, class: "SR", about: &uuid }
        .post(&call.part.db, &body);
}

fn unplug_job(note: Note, pbd: String) -> Job {
    Job::noted(note.clone(), move |call| finish_unplug(call, &note, &pbd))
}

/// The SR may still be mounted, or not any more: afterwards it is not.
fn finish_unplug(call: &Call, note: &Note, pbd: &str) -> Result<(), ApiError> {
    let db = &call.part.db;
    let Ok(record) = db.get("PBD", pbd) else { return drop_note(call, note) };
    let known = db.get("SR", record.text("SR"))?;
    let driver = call.part.driver(known.text("type"))?;
    let config = record.map("device_config");
    match plug::attach(call, &driver, known.uuid()?, &known.reference, &config) {
        Ok(attached) => plug::detach(call, &attached)?,
        Err(error) if is_unfinished(&error) => return Err(error),
        Err(error) => tracing::info!(pbd, %error, "an SR that was being detached is gone"),
    }
    db.change(|change| {
        note.drop_from(change);
        change.set("PBD", pbd, "currently_attached", false)
    })
}

/// Notes about images of an SR that has no record any more can say nothing.
fn forget_notes_of_gone_srs(call: &Call) -> Result<(), ApiError> {
    let db = &call.part.db;
    let known = notes::all(db);
    let gone = known.iter().filter(|note| note.sr().is_some_and(|sr| db.get("SR", sr).is_err()));
    let gone: Vec<_> = gone.collect();
    db.change(|change| {
        gone.iter().for_each(|note| note.drop_from(change));
        Ok(())
    })
}
