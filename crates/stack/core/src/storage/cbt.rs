//! Changed block tracking: switched on and off, listed, and what is left when the data of a snapshot go.
//!
//! Whether blocks of a VDI are tracked is a fact of its storage, and `cbt_enabled` follows it. What is tracked is kept
//! by the driver and the disk process (`tapio_sm`, `dir/cbt.rs`).

use tapio_model::{ApiError, Value};
use tapio_sm::VdiInfo;
use tapio_types::Access;

use super::attached::{Attached, Sizes};
use super::notes::Note;
use super::tracking::{is_reducible, is_trackable, is_tracked};
use super::transaction::Transaction;
use super::vdi::{Subject, gone_bases, not_in_use, not_plugged};
use super::work::Work;
use super::{Call, Handlers, records};
use crate::args::Args;
use crate::db::Change;
use crate::operations::{on_sr, on_vdi};
use crate::plan::steps::step;

/// What `other_config` says of it, for products that compare contents by it.
const CONTENT_ID: (&str, &str) = ("content_id", "/No content: this is a cbt_metadata VDI/");

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.enable_cbt", |call, args| track(call, args, true));
    handlers.on("VDI.disable_cbt", |call, args| track(call, args, false));
    handlers.on("VDI.data_destroy", data_destroy);
    handlers.on("VDI.list_changed_blocks", list_changed_blocks);
}

fn track(call: &Call, args: &Args, wanted: bool) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let subject = Subject::find(call, reference)?;
    let sr = &subject.sr;
    sr.needs("VDI_CONFIG_CBT")?;
    is_trackable(&subject.vdi)?;
    let (op, sr_op) =
        if wanted { ("enable_cbt", "vdi_enable_cbt") } else { ("disable_cbt", "vdi_disable_cbt") };
    let targets = [on_sr(&sr.reference, sr_op), on_vdi(reference, op)];
    let operation = Transaction::enter(call, &targets, |_| Ok(()))?;
    operation.note(None, None)?;
    let _changing = sr.changing();
    let tracked = sr.with(|device| device.track_changes(&Work::new(call), subject.uuid, wanted));
    let tracked = tracked.map_err(|error| subject.told(call, op, error))?;
    step("vdi-track:switched");
    let sizes = sr.measure(&Work::new(call));
    operation.commit(None, |change| {
        let more = records::update(change, &*change.get("VDI", reference)?, &tracked)?;
        sr.record(change, sizes, more)
    })?;
    Ok(Value::Void)
}

fn data_destroy(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let subject = Subject::find(call, reference)?;
    let sr = &subject.sr;
    sr.needs("VDI_CONFIG_CBT")?;
    is_reducible(&subject.vdi)?;
    not_plugged(&call.part.db, reference, "data_destroy")?;
    let targets = [on_sr(&sr.reference, "vdi_data_destroy"), on_vdi(reference, "data_destroy")];
    let operation = Transaction::enter(call, &targets, |state| not_in_use(state, reference, "data_destroy"))?;
    let note = Note::DataDestroy { sr: sr.reference.clone(), vdi: reference.to_owned() };
    operation.note(Some(&note), Some("vdi-data-destroy:noted"))?;
    let _changing = sr.changing();
    let done = sr.with(|device| device.destroy_data(&Work::new(call), subject.uuid));
    let left = done.map_err(|error| {
        operation.not_made(&note, sr, &error);
        subject.told(call, "data_destroy", error)
    })?;
    step("vdi-data-destroy:image-gone");
    let gone = gone_bases(call, &subject);
    let sizes = sr.measure(&Work::new(call));
    operation.commit(Some(&note), |change| record_reduced(change, sr, reference, &left, &gone, sizes))?;
    call.part.collect_later(&sr.reference);
    Ok(Value::Void)
}

/// Does once more what was broken off.
///
/// # Errors
/// The driver's, the database's.
pub(super) fn data_destroy_again(
    call: &Call,
    attached: &Attached,
    note: &Note,
    subject: &Subject,
) -> Result<(), ApiError> {
    let left = attached.with(|device| device.destroy_data(&Work::new(call), subject.uuid))?;
    let gone = gone_bases(call, subject);
    let sizes = attached.measure(&Work::new(call));
    call.part.db.change(|change| {
        note.drop_from(change);
        record_reduced(change, attached, subject.reference(), &left, &gone, sizes)
    })
}

/// Writes that the data of a VDI are gone, with base copies that went as well.
fn record_reduced(
    change: &mut Change<'_>,
    attached: &Attached,
    reference: &str,
    left: &VdiInfo,
    gone: &[String],
    sizes: Option<Sizes>,
) -> Result<(), ApiError> {
    let old = change.get("VDI", reference)?;
    let mut other_config = old.map("other_config");
    other_config.insert(CONTENT_ID.0.to_owned(), CONTENT_ID.1.to_owned());
    change.set("VDI", reference, "other_config", Value::string_map(other_config))?;
    let more = records::update(change, &old, left)?;
    for base in gone {
        records::remove(change, base)?;
    }
    attached.record(change, sizes, more)
}

fn list_changed_blocks(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let from = Subject::find(call, args.text(0)?)?;
    let to = Subject::find(call, args.text(1)?)?;
    let sr = &from.sr;
    sr.needs("VDI_CONFIG_CBT")?;
    if sr.uuid != to.sr.uuid {
        let text = format!("{} and {} lie in different SRs", from.uuid, to.uuid);
        return Err(tapio_sm::errors::fail(460, text));
    }
    is_tracked(&from.vdi)?;
    is_tracked(&to.vdi)?;
    let (op, reference) = ("list_changed_blocks", to.reference());
    let targets = [
        on_sr(&sr.reference, "vdi_list_changed_blocks"),
        on_vdi(from.reference(), op),
        on_vdi(reference, op),
    ];
    let targets = if from.uuid == to.uuid { &targets[..2] } else { &targets[..] };
    // What a disk that is written has changed is in the memory of its process.
    let operation = Transaction::enter(call, targets, |state| match state.use_of(reference) {
        Some(Access::ReadWrite) => Err(ApiError::new("VDI_IN_USE", [reference, op])),
        _ => Ok(()),
    })?;
    operation.note(None, None)?;
    let listed = sr.with(|device| device.changed_blocks(&Work::new(call), from.uuid, to.uuid));
    let listed = listed.map_err(|error| to.told(call, op, error))?;
    operation.commit(None, |_| Ok(()))?;
    Ok(Value::String(listed))
}
