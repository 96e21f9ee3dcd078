//! At start: drivers get their records, what a killed daemon left half done is finished or undone, and SRs that were
//! attached are attached again.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::attached::Attached;
use super::notes::{self, Note};
use super::records::{self, Alert};
use super::vdi::{Subject, gone_bases, remove_image, remove_records};
use super::work::{Work, is_missing};
use super::{allowed, copy, own_call, plug, sr, this_host};
use crate::Toolstack;
use crate::call::Call;
use crate::db::reference_of;

/// SRs that are attached at the same time.
const PARALLEL: usize = 8;

/// Brings storage into the state that the database says, after a start. Disk processes that run must be known by now.
/// An SR that cannot be attached is a message to the administrator, and is tried again at the next start.
///
/// # Errors
/// The store's.
pub fn recover(stack: &Arc<Toolstack>) -> Result<(), ApiError> {
    let (db, storage, call) = (&stack.db, &stack.storage, own_call(stack));
    storage.record_drivers(db)?;
    let notes = notes::all(db);
    for note in &notes {
        if let Note::Holder { vdi, holder, access } = note {
            storage.put_holder(vdi, holder, Some(*access));
        }
    }
    for note in &notes {
        match note {
            Note::SrCreate(new) => sr::finish_create(&call, new),
            Note::SrDestroy { sr } => sr::finish_destroy(&call, sr),
            Note::PbdUnplug { pbd } => finish_unplug(&call, note, pbd),
            _ => {}
        }
    }
    let wanted = wanted(&call, &notes);
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL.min(wanted.len()) {
            scope.spawn(|| {
                while let Some(pbd) = wanted.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    plug_again(&call, pbd);
                }
            });
        }
    });
    forget_notes_of_gone_srs(&call)?;
    // Last, because source and target may be on different SRs.
    notes
        .iter()
        .filter(|note| matches!(note, Note::CopyInto { .. }))
        .for_each(|note| copy::resume(stack, note));
    db.change(|change| {
        for known in change.all("SR") {
            allowed::refresh_all(storage, change, &known.reference)?;
        }
        Ok(())
    })
}

/// PBDs of this host that were attached, or were about to be.
fn wanted(call: &Call, notes: &[Note]) -> Vec<String> {
    let host = this_host(&call.stack.db);
    let noted = |reference: &str| {
        notes.iter().any(|note| match note {
            Note::PbdPlug { pbd } | Note::PbdWanted { pbd } => pbd == reference,
            _ => false,
        })
    };
    let here = call.stack.db.all("PBD").into_iter().filter(|pbd| pbd.text("host") == host);
    let wanted = here.filter(|pbd| pbd.bool("currently_attached") || noted(&pbd.reference));
    wanted.map(|pbd| pbd.reference.clone()).collect()
}

fn plug_again(call: &Call, pbd: &str) {
    let Err(error) = plug::plug(call, pbd) else { return };
    let db = &call.stack.db;
    let written = db.change(|change| {
        change.set("PBD", pbd, "currently_attached", false)?;
        Note::PbdWanted { pbd: pbd.to_owned() }.put(change)
    });
    if let Err(error) = written {
        tracing::error!(pbd, %error, "that an SR is not attached could not be written");
    }
    let sr = db.get("PBD", pbd).and_then(|pbd| db.get("SR", pbd.text("SR")));
    let (uuid, name) =
        sr.map(|sr| (sr.text("uuid").to_owned(), sr.text("name_label").to_owned())).unwrap_or_default();
    let body = format!(
        "SR '{name}' ({uuid}) could not be attached at start: {error}. Its disks cannot be used; see to the storage, \
         then pbd-plug. The next start tries again."
    );
    Alert { name: "PBD_PLUG_FAILED_ON_SERVER_START", priority: 3, class: "SR", about: &uuid }
        .post(&call.stack, &body);
}

/// The SR may still be mounted, or not any more: afterwards it is not.
fn finish_unplug(call: &Call, note: &Note, pbd: &str) {
    let db = &call.stack.db;
    let finished = (|| {
        let Ok(record) = db.get("PBD", pbd) else {
            return db.change(|change| {
                note.drop_from(change);
                Ok(())
            });
        };
        let known = db.get("SR", record.text("SR"))?;
        let driver = call.stack.storage.driver(known.text("type"))?;
        let config = record.map("device_config");
        match plug::attach(call, &driver, known.uuid()?, &known.reference, &config) {
            Ok(attached) => plug::detach(call, &attached)?,
            Err(error) => tracing::info!(pbd, %error, "an SR that was being detached is gone"),
        }
        db.change(|change| {
            note.drop_from(change);
            change.set("PBD", pbd, "currently_attached", false)
        })
    })();
    if let Err(error) = finished {
        tracing::error!(pbd, %error, "an SR that was being detached stays attached");
    }
}

/// Finishes or undoes what was half done with images of an SR that is attached now.
pub(super) fn images(call: &Call, attached: &Attached) {
    let here = notes::all(&call.stack.db).into_iter();
    for note in here.filter(|note| note.sr() == Some(attached.reference.as_str())) {
        if let Err(error) = image(call, attached, &note) {
            tracing::error!(?note, %error, "what was half done stays so until the SR is attached again");
        }
    }
}

fn image(call: &Call, attached: &Attached, note: &Note) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let _changing = attached.changing();
    match note {
        // Something of this daemon's own that runs.
        Note::ImageMade { image, .. } if attached.is_building(*image) => Ok(()),
        Note::ImageMade { image, .. } => {
            if db.get("VDI", &reference_of(*image)).is_err() {
                remove_image(call, attached, *image)?;
            }
            drop_note(call, note)
        }
        Note::VdiDestroy { vdi, .. } => {
            let Ok(record) = db.get("VDI", vdi) else { return drop_note(call, note) };
            remove_image(call, attached, record.uuid()?)?;
            let subject = Subject::find_at_all(call, vdi)?;
            let gone = gone_bases(call, &subject);
            let sizes = attached.measure(&Work::new(call));
            db.change(|change| {
                note.drop_from(change);
                remove_records(change, &subject, &gone, sizes)
            })
        }
        Note::Introduce { image, fields, .. } => introduced(call, attached, note, *image, fields),
        _ => Ok(()),
    }
}

fn introduced(
    call: &Call,
    attached: &Attached,
    note: &Note,
    image: Uuid,
    fields: &BTreeMap<String, String>,
) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let info = match attached.with(|sr| sr.vdi(&Work::new(call), image)) {
        Ok(info) => info,
        Err(error) if is_missing(&error) => return drop_note(call, note),
        Err(error) => return Err(error),
    };
    db.change(|change| {
        note.drop_from(change);
        if change.get("VDI", &reference_of(image)).is_ok() {
            return Ok(());
        }
        let text = |field: &str| Value::string(fields.get(field).cloned().unwrap_or_default());
        let names = vec![("name_label", text("name_label")), ("name_description", text("name_description"))];
        records::create(change, &attached.reference, &info, names).map(drop)
    })
}

fn drop_note(call: &Call, note: &Note) -> Result<(), ApiError> {
    call.stack.db.change(|change| {
        note.drop_from(change);
        Ok(())
    })
}

/// Notes about images of an SR that has no record any more can say nothing.
fn forget_notes_of_gone_srs(call: &Call) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let known = notes::all(db);
    let gone = known.iter().filter(|note| note.sr().is_some_and(|sr| db.get("SR", sr).is_err()));
    let gone: Vec<_> = gone.collect();
    db.change(|change| {
        gone.iter().for_each(|note| note.drop_from(change));
        Ok(())
    })
}
