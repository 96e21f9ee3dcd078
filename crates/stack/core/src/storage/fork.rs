//! Snapshots and clones.

use std::collections::BTreeMap;

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_sm::{Fork, ForkKind};
use uuid::Uuid;

use super::notes::Note;
use super::transaction::Transaction;
use super::vdi::{Subject, discard, note_made};
use super::work::Work;
use super::{Call, Handlers, allowed, records, tracking};
use crate::operations::{on_sr, on_vdi};
use crate::plan::steps::step;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.snapshot", |call, args| {
        fork(call, args.text(0)?, &args.map(1)?, ForkKind::Snapshot, None).map(Value::String)
    });
    handlers.on("VDI.clone", |call, args| {
        fork(call, args.text(0)?, &args.map(1)?, ForkKind::Clone, None).map(Value::String)
    });
}

/// What of a VDI's record its snapshot or clone gets as well.
const INHERITED: &[&str] =
    &["name_label", "name_description", "type", "sharable", "other_config", "xenstore_data", "tags"];

/// Makes a snapshot or a clone of a VDI, for a VM where one is named; see [`super::vdi::made_note`]. Returns its
/// reference.
///
/// # Errors
/// Those of `VDI.snapshot` and `VDI.clone`.
pub(crate) fn fork(
    call: &Call,
    reference: &str,
    params: &BTreeMap<String, String>,
    asked: ForkKind,
    vm: Option<&str>,
) -> Result<String, ApiError> {
    let kind = match params.get("type").map(String::as_str) {
        None | Some("" | "double") => asked,
        Some("single") if asked == ForkKind::Snapshot => ForkKind::Single,
        Some(other) => return Err(ApiError::new("INVALID_VALUE", ["driver_params:type", other])),
    };
    let subject = Subject::find(call, reference)?;
    tracking::has_data(&subject.vdi)?;
    let (op, sr_op, capability) = match asked {
        ForkKind::Clone => ("clone", "vdi_clone", "VDI_CLONE"),
        _ => ("snapshot", "vdi_snapshot", "VDI_SNAPSHOT"),
    };
    subject.sr.needs(capability)?;
    let sr = &subject.sr;
    let targets = [on_sr(&sr.reference, sr_op), on_vdi(reference, op)];
    let operation =
        Transaction::enter(call, &targets, |state| match state.is_shared_by_a_writer(reference) {
            true => Err(ApiError::new("VDI_IN_USE", [reference, op])),
            false => Ok(()),
        })?;
    let image = Uuid::new_v4();
    let is_single = kind == ForkKind::Single;
    let note = (!is_single).then(|| Note::ImageMade { sr: sr.reference.clone(), image });
    operation.note(note.as_ref(), (!is_single).then_some("vdi-fork:noted"))?;
    let _changing = sr.changing();
    let began = records::now();
    let forked =
        sr.with(|device| device.fork(&Work::new(call), subject.uuid, image, kind)).map_err(|error| {
            match &note {
                Some(note) => operation.not_made(note, sr, &error),
                None => operation.give_up(None),
            }
            if is_chain_full(&error) {
                // Nothing helps but what is shorter.
                call.part.collect_now(&sr.reference);
            }
            subject.told(call, op, error)
        })?;
    step(if is_single { "vdi-single:image-made" } else { "vdi-fork:image-made" });
    let made = record(call, &operation, note.as_ref(), &subject, &forked, (kind, began, vm));
    made.inspect(|_| call.part.collect_later(&sr.reference)).inspect_err(|_| {
        if let Some(note) = &note {
            discard(call, &operation, note, sr, image);
        }
    })
}

/// Whether a driver says that a chain has as many images as it may have.
fn is_chain_full(error: &ApiError) -> bool {
    error.code == "SR_BACKEND_FAILURE_109"
}

/// Writes what a fork made; answers the reference of the new VDI, or of the old one where none is new.
fn record(
    call: &Call,
    operation: &Transaction<'_>,
    note: Option<&Note>,
    subject: &Subject,
    forked: &Fork,
    (kind, began, vm): (ForkKind, i64, Option<&str>),
) -> Result<String, ApiError> {
    let (sr, storage) = (&subject.sr, &call.part);
    let sizes = sr.measure(&Work::new(call));
    operation.commit(note, |change| {
        let old = change.get("VDI", subject.reference())?;
        let mut more = records::update(change, &old, &forked.origin)?;
        if let Some(base) = &forked.base {
            more += records::put(change, &sr.reference, base)?;
            allowed::refresh(storage, change, "VDI", &crate::db::reference_of(base.uuid))?;
        }
        if kind == ForkKind::Single {
            sr.record(change, sizes, more)?;
            return Ok(subject.reference().to_owned());
        }
        let mut fields: Vec<_> = INHERITED.iter().map(|field| (*field, old.get(field).clone())).collect();
        fields.push(("read_only", Value::Bool(forked.made.read_only || old.bool("read_only"))));
        let is_snapshot = kind == ForkKind::Snapshot;
        fields.push(("is_a_snapshot", Value::Bool(is_snapshot)));
        fields.push(("snapshot_of", Value::string(if is_snapshot { subject.reference() } else { NULL_REF })));
        fields.push(("snapshot_time", Value::DateTime(if is_snapshot { began } else { 0 })));
        let reference = records::create(change, &sr.reference, &forked.made, fields)?;
        more += i64::try_from(forked.made.virtual_size).unwrap_or(i64::MAX);
        sr.record(change, sizes, more)?;
        allowed::refresh(storage, change, "VDI", &reference)?;
        note_made(change, &reference, vm);
        Ok(reference)
    })
}
