//! What was half done with images of an SR is finished or undone.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::attached::Attached;
use super::notes::{self, Note};
use super::vdi::{Subject, gone_bases, remove_image, remove_records};
use super::work::{Work, is_missing};
use super::{Call, cbt, records};
use crate::db::reference_of;

/// Finishes or undoes what was half done with images of an SR that is attached now.
pub(super) fn images(call: &Call, attached: &Attached) {
    let here = notes::all(&call.part.db).into_iter();
    for note in here.filter(|note| note.sr() == Some(attached.reference.as_str())) {
        if let Err(error) = image(call, attached, &note) {
            tracing::error!(?note, %error, "what was half done stays so until the SR is attached again");
        }
    }
}

pub(super) fn image(call: &Call, attached: &Attached, note: &Note) -> Result<(), ApiError> {
    let db = &call.part.db;
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
        Note::DataDestroy { vdi, .. } => {
            if db.get("VDI", vdi).is_err() {
                return drop_note(call, note);
            }
            let subject = Subject::find_at_all(call, vdi)?;
            cbt::data_destroy_again(call, attached, note, &subject)
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
    let db = &call.part.db;
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

pub(super) fn drop_note(call: &Call, note: &Note) -> Result<(), ApiError> {
    call.part.db.change(|change| {
        note.drop_from(change);
        Ok(())
    })
}
