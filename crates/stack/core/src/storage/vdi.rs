//! VDIs are made, removed, taken in, forgotten, made longer and looked at again.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_sm::worker::is_unfinished;
use tapio_sm::{NewVdi, VdiInfo};
use uuid::Uuid;

use super::allowed::{NoResize, can_resize};
use super::attached::Attached;
use super::notes::Note;
use super::state::StorageState;
use super::transaction::Transaction;
use super::work::{Names, Work, is_missing};
use super::{Call, Handlers, records, tracking};
use crate::args::{Args, text_in};
use crate::db::{Change, Db, Object, reference_of};
use crate::operations::{on_sr, on_vdi};
use crate::plan::steps::step;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.create", |call, args| create(call, args.record()?, None).map(Value::String));
    handlers.on("VDI.destroy", |call, args| destroy(call, args.text(0)?).map(|()| Value::Void));
    handlers.on("VDI.introduce", introduce);
    handlers.on("VDI.forget", forget);
    handlers.on("VDI.update", update);
    handlers.on("VDI.resize", resize);
    handlers.on("VDI.resize_online", resize);
}

/// A VDI that shall be worked on, with its SR.
pub(super) struct Subject {
    pub(super) vdi: Arc<Object>,
    pub(super) uuid: Uuid,
    pub(super) sr: Arc<Attached>,
}

impl Subject {
    /// # Errors
    /// `HANDLE_INVALID`, `VDI_NOT_MANAGED`, `VDI_MISSING`, `SR_NOT_ATTACHED`, `SR_HAS_NO_PBDS`.
    pub(super) fn find(call: &Call, reference: &str) -> Result<Self, ApiError> {
        Self::usable(call, call.part.db.get("VDI", reference)?)
    }

    /// [`Self::find`] of a VDI that is known.
    ///
    /// # Errors
    /// As there.
    pub(super) fn usable(call: &Call, vdi: Arc<Object>) -> Result<Self, ApiError> {
        let subject = Self::of(call, vdi)?;
        if subject.vdi.bool("missing") {
            return Err(ApiError::new("VDI_MISSING", [subject.vdi.text("SR"), subject.reference()]));
        }
        if !subject.vdi.bool("managed") {
            return Err(ApiError::new("VDI_NOT_MANAGED", [subject.reference()]));
        }
        Ok(subject)
    }

    /// [`Self::find`] of one that may be missing or a base copy.
    ///
    /// # Errors
    /// `HANDLE_INVALID`, `SR_NOT_ATTACHED`, `SR_HAS_NO_PBDS`.
    pub(super) fn find_at_all(call: &Call, reference: &str) -> Result<Self, ApiError> {
        Self::of(call, call.part.db.get("VDI", reference)?)
    }

    fn of(call: &Call, vdi: Arc<Object>) -> Result<Self, ApiError> {
        let sr = call.part.attached(vdi.text("SR"))?;
        Ok(Self { uuid: vdi.uuid()?, vdi, sr })
    }

    pub(super) fn reference(&self) -> &str {
        &self.vdi.reference
    }

    /// A driver's error about this VDI.
    pub(super) fn told(&self, call: &Call, op: &str, error: ApiError) -> ApiError {
        Names { sr: &self.sr.reference, vdi: self.reference(), op }.translate(call, error)
    }
}

/// The VDI must not be open.
///
/// # Errors
/// `VDI_IN_USE`.
pub(super) fn not_in_use(state: &StorageState, vdi: &str, op: &str) -> Result<(), ApiError> {
    match state.use_of(vdi) {
        Some(_) => Err(ApiError::new("VDI_IN_USE", [vdi, op])),
        None => Ok(()),
    }
}

/// The VDI must not be plugged into a VM.
///
/// # Errors
/// `VDI_IN_USE`.
pub(super) fn not_plugged(db: &Db, vdi: &str, op: &str) -> Result<(), ApiError> {
    match db.find("VBD", "VDI", vdi).iter().any(|vbd| vbd.bool("currently_attached")) {
        true => Err(ApiError::new("VDI_IN_USE", [vdi, op])),
        false => Ok(()),
    }
}

/// A size in bytes.
///
/// # Errors
/// `INVALID_VALUE`.
fn bytes(size: i64, field: &str) -> Result<u64, ApiError> {
    u64::try_from(size).map_err(|_| ApiError::new("INVALID_VALUE", [field.to_owned(), size.to_string()]))
}

/// Fields that a client gives a VDI and the storage does not know.
fn given(record: &BTreeMap<String, Value>) -> Vec<(&'static str, Value)> {
    let mut fields = Vec::new();
    let names = ["name_label", "name_description", "type", "other_config", "xenstore_data", "tags"];
    for name in names.into_iter().chain(["sharable", "read_only"]) {
        if let Some(value) = record.get(name) {
            fields.push((name, value.clone()));
        }
    }
    fields
}

/// Makes a VDI from a record, for a VM where one is named; see [`made_note`]. Returns its reference.
///
/// # Errors
/// Those of `VDI.create`.
pub(crate) fn create(
    call: &Call,
    record: &BTreeMap<String, Value>,
    vm: Option<&str>,
) -> Result<String, ApiError> {
    create_as(call, record, (Uuid::new_v4(), Vec::new()), vm)
}

/// The same with this UUID, and fields of the record that no client sets.
///
/// # Errors
/// Those of `VDI.create`.
pub(super) fn create_as(
    call: &Call,
    record: &BTreeMap<String, Value>,
    (uuid, more): (Uuid, Vec<(&'static str, Value)>),
    vm: Option<&str>,
) -> Result<String, ApiError> {
    let sr = text_in(record, "SR");
    let attached = call.part.attached(sr)?;
    attached.needs("VDI_CREATE")?;
    let size = record.get("virtual_size").and_then(Value::as_int).unwrap_or_default();
    let new = NewVdi {
        uuid,
        virtual_size: bytes(size, "virtual_size")?,
        sm_config: record.get("sm_config").map(Value::to_string_map).unwrap_or_default(),
        name_label: text_in(record, "name_label").to_owned(),
        name_description: text_in(record, "name_description").to_owned(),
    };
    let operation = Transaction::enter(call, &[on_sr(sr, "vdi_create")], |_| Ok(()))?;
    let note = Note::ImageMade { sr: sr.to_owned(), image: uuid };
    operation.note(Some(&note), Some("vdi-create:noted"))?;
    let reference = reference_of(uuid);
    let names = Names { sr, vdi: &reference, op: "create" };
    let _changing = attached.changing();
    let made = attached.with(|sr| sr.create(&Work::new(call), &new)).map_err(|error| {
        operation.not_made(&note, &attached, &error);
        names.translate(call, error)
    })?;
    step("vdi-create:image-made");
    let mut sm_config = new.sm_config.clone();
    sm_config.extend(made.sm_config.clone());
    let mut fields = given(record);
    fields.extend(more);
    fields.push(("sm_config", Value::string_map(sm_config)));
    record_made(call, &operation, &note, &attached, &made, (fields, vm))
}

/// Notes about VDIs that were made for a VM and that no VBD leads to yet: each is written with the record of the VDI,
/// and dropped with the record of the VBD.
pub(crate) const MADE_NOTES: &str = "machines/disk/";

/// The key of such a note.
pub(crate) fn made_note(vdi: &str) -> String {
    format!("{MADE_NOTES}{vdi}")
}

/// Writes it, if the VDI is made for a VM.
pub(super) fn note_made(change: &mut Change<'_>, vdi: &str, vm: Option<&str>) {
    if let Some(vm) = vm {
        change.put_note(made_note(vdi), vm);
    }
}

/// Makes the record of an image that was made, for a VM where one is named; where that fails the image goes.
///
/// # Errors
/// The store's.
pub(super) fn record_made(
    call: &Call,
    operation: &Transaction<'_>,
    note: &Note,
    attached: &Attached,
    made: &VdiInfo,
    (fields, vm): (Vec<(&'static str, Value)>, Option<&str>),
) -> Result<String, ApiError> {
    let work = Work::new(call);
    let sizes = attached.measure(&work);
    let size = i64::try_from(made.virtual_size).unwrap_or(i64::MAX);
    let recorded = operation.commit(Some(note), |change| {
        let reference = match made.is_lun() {
            true => records::give(change, &attached.reference, made, fields)?,
            false => records::create(change, &attached.reference, made, fields)?,
        };
        attached.record(change, sizes, size)?;
        super::allowed::refresh(&call.part, change, "VDI", &reference)?;
        note_made(change, &reference, vm);
        Ok(reference)
    });
    recorded.inspect_err(|_| discard(call, operation, note, attached, made.uuid))
}

/// Removes an image that has no record. Where that fails its note stays, and the next attach tries again.
pub(super) fn discard(
    call: &Call,
    operation: &Transaction<'_>,
    note: &Note,
    attached: &Attached,
    image: Uuid,
) {
    match attached.with(|sr| sr.destroy(&Work::new(call), image)) {
        Err(error) if !is_missing(&error) => {
            tracing::warn!(%image, %error, "an image without a record stays until its SR is attached again");
            if is_unfinished(&error) {
                attached.owe(note.clone());
            }
        }
        _ => operation.give_up(Some(note)),
    }
}

/// Removes a VDI with its image.
///
/// # Errors
/// Those of `VDI.destroy`.
pub(crate) fn destroy(call: &Call, reference: &str) -> Result<(), ApiError> {
    let subject = Subject::find_at_all(call, reference)?;
    if !subject.vdi.bool("managed") {
        return Err(ApiError::new("VDI_NOT_MANAGED", [reference]));
    }
    subject.sr.needs("VDI_DELETE")?;
    let sr = &subject.sr.reference;
    not_plugged(&call.part.db, reference, "destroy")?;
    if !call.part.db.find("VM", "suspend_VDI", reference).is_empty() {
        // The memory of a VM goes with its end (VM.hard_shutdown), or with the checkpoint that it is of.
        return Err(ApiError::new("VDI_IN_USE", [reference, "destroy"]));
    }
    let targets = [on_sr(sr, "vdi_destroy"), on_vdi(reference, "destroy")];
    let operation = Transaction::enter(call, &targets, |state| not_in_use(state, reference, "destroy"))?;
    let note = Note::VdiDestroy { sr: sr.clone(), vdi: reference.to_owned() };
    operation.note(Some(&note), Some("vdi-destroy:noted"))?;
    let _changing = subject.sr.changing();
    if let Err(error) = remove_image(call, &subject.sr, subject.uuid) {
        operation.give_up(Some(&note));
        return Err(subject.told(call, "destroy", error));
    }
    step("vdi-destroy:image-gone");
    let gone = gone_bases(call, &subject);
    let images: Vec<Uuid> =
        gone.iter().filter_map(|base| call.part.db.get("VDI", base).ok()?.uuid().ok()).collect();
    call.part.drop_job(sr, &images);
    let sizes = subject.sr.measure(&Work::new(call));
    operation.commit(Some(&note), |change| remove_records(change, &subject, &gone, sizes))?;
    call.part.collect_later(sr);
    Ok(())
}

/// Removes an image; that it is gone already is fine.
///
/// # Errors
/// The driver's.
pub(super) fn remove_image(call: &Call, attached: &Attached, image: Uuid) -> Result<(), ApiError> {
    match attached.with(|sr| sr.destroy(&Work::new(call), image)) {
        Err(error) if is_missing(&error) => Ok(()),
        result => result,
    }
}

/// Base copies below a removed VDI that the driver removed with it.
pub(super) fn gone_bases(call: &Call, subject: &Subject) -> Vec<String> {
    let mut gone = Vec::new();
    let mut below = subject.vdi.text("parent").to_owned();
    while let Ok(base) = call.part.db.get("VDI", &below) {
        let Ok(uuid) = base.uuid() else { break };
        let is_gone = |error: &ApiError| is_missing(error);
        let look = subject.sr.with(|sr| sr.vdi(&Work::new(call), uuid));
        if base.bool("managed") || gone.contains(&below) || !look.as_ref().is_err_and(is_gone) {
            break;
        }
        gone.push(std::mem::replace(&mut below, base.text("parent").to_owned()));
    }
    gone
}

/// Removes the records of a VDI whose image is gone, and of base copies that went with it.
///
/// # Errors
/// The database's.
pub(super) fn remove_records(
    change: &mut Change<'_>,
    subject: &Subject,
    gone: &[String],
    sizes: Option<super::attached::Sizes>,
) -> Result<(), ApiError> {
    // A driver that keeps the records of its VDIs may have removed it.
    let counted = change.get("VDI", subject.reference()).map_or(0, |vdi| records::counted(&vdi));
    for reference in gone.iter().map(String::as_str).chain([subject.reference()]) {
        if change.get("VDI", reference).is_ok() {
            records::remove(change, reference)?;
        }
    }
    subject.sr.record(change, sizes, -counted)
}

fn resize(call: &Call, args: &Args) -> Result<Value, ApiError> {
    grow(call, args.text(0)?, bytes(args.int(1)?, "size")?).map(|()| Value::Void)
}

/// Makes a VDI longer.
///
/// # Errors
/// Those of `VDI.resize`.
pub(crate) fn grow(call: &Call, reference: &str, size: u64) -> Result<(), ApiError> {
    let subject = Subject::find(call, reference)?;
    tracking::has_data(&subject.vdi)?;
    let sr = &subject.sr;
    let targets = [on_sr(&sr.reference, "vdi_resize"), on_vdi(reference, "resize")];
    let operation = Transaction::enter(call, &targets, |state| {
        can_resize(sr, state.use_of(reference)).map_err(|why| match why {
            NoResize::Unsupported => ApiError::new("SR_OPERATION_NOT_SUPPORTED", [sr.reference.as_str()]),
            NoResize::InUse => ApiError::new("VDI_IN_USE", [reference, "resize"]),
        })
    })?;
    operation.note(None, None)?;
    let _changing = sr.changing();
    let grown = sr.with(|device| device.resize(&Work::new(call), subject.uuid, size));
    let grown = grown.map_err(|error| subject.told(call, "resize", error))?;
    step("vdi-resize:grown");
    let sizes = sr.measure(&Work::new(call));
    operation.commit(None, |change| {
        let more = records::update(change, &*change.get("VDI", reference)?, &grown)?;
        sr.record(change, sizes, more)
    })
}

fn update(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let subject = Subject::find_at_all(call, reference)?;
    let sr = &subject.sr;
    let targets = [on_sr(&sr.reference, "update"), on_vdi(reference, "update")];
    let operation = Transaction::enter(call, &targets, |_| Ok(()))?;
    let _changing = sr.changing();
    let info = sr.with(|device| device.vdi(&Work::new(call), subject.uuid));
    let info = info.map_err(|error| subject.told(call, "update", error))?;
    if info.is_metadata && subject.vdi.text("type") != tracking::METADATA {
        return Err(ApiError::new("VDI_MISSING", [sr.reference.as_str(), reference]));
    }
    let sizes = sr.measure(&Work::new(call));
    operation.commit(None, |change| {
        let old = change.get("VDI", reference)?;
        let more = records::update(change, &old, &info)?;
        sr.record(change, sizes, more)
    })?;
    Ok(Value::Void)
}

fn forget(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let (db, storage) = (&call.part.db, &call.part);
    let vdi = db.get("VDI", reference)?;
    let sr = vdi.text("SR").to_owned();
    let attached = storage.state().attached.get(&sr).cloned();
    let targets = [on_sr(&sr, "vdi_destroy"), on_vdi(reference, "forget")];
    not_plugged(db, reference, "forget")?;
    let operation = Transaction::enter(call, &targets, |state| not_in_use(state, reference, "forget"))?;
    let _changing = attached.as_ref().map(|attached| attached.changing());
    operation.commit(None, |change| {
        let counted = records::counted(&*change.get("VDI", reference)?);
        records::remove(change, reference)?;
        let sum = change.get("SR", &sr)?.int("virtual_allocation").saturating_sub(counted).max(0);
        change.set("SR", &sr, "virtual_allocation", sum)
    })?;
    Ok(Value::Void)
}

/// Positions of `VDI.introduce`'s parameters.
mod introduced {
    pub(super) const UUID: usize = 0;
    pub(super) const SR: usize = 3;
    pub(super) const LOCATION: usize = 8;
    /// Parameters that are fields of the same name.
    pub(super) const FIELDS: &[(usize, &str)] = &[
        (1, "name_label"),
        (2, "name_description"),
        (4, "type"),
        (5, "sharable"),
        (6, "read_only"),
        (7, "other_config"),
        (9, "xenstore_data"),
        (15, "is_a_snapshot"),
        (16, "snapshot_time"),
        (17, "snapshot_of"),
    ];
}

fn introduce(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (text, sr) = (args.text(introduced::UUID)?, args.text(introduced::SR)?);
    let location = args.text(introduced::LOCATION)?;
    let attached = call.part.attached(sr)?;
    let uuid = match text {
        "" => Uuid::new_v4(),
        _ => Uuid::parse_str(text).map_err(|_| ApiError::new("UUID_INVALID", ["VDI", text]))?,
    };
    let reference = reference_of(uuid);
    let is_free = |change: &Change<'_>| {
        if change.get("VDI", &reference).is_ok() {
            return Err(ApiError::new("UUID_INVALID", ["VDI".to_owned(), uuid.to_string()]));
        }
        let here = change.find("VDI", "SR", sr);
        match here.iter().any(|vdi| vdi.text("location") == location) {
            true => Err(ApiError::new("LOCATION_NOT_UNIQUE", [sr, location])),
            false => Ok(()),
        }
    };
    let operation = Transaction::enter(call, &[on_sr(sr, "vdi_introduce")], |_| Ok(()))?;
    let names = [(1, "name_label"), (2, "name_description")];
    let mut kept = BTreeMap::new();
    for (at, field) in names {
        kept.insert(field.to_owned(), args.text(at)?.to_owned());
    }
    let noted = |change: &mut Change<'_>| {
        is_free(change)?;
        Ok(Note::Introduce { sr: sr.to_owned(), image: uuid, fields: kept })
    };
    let note = operation.note_made(noted, "vdi-introduce:noted")?;
    let _changing = attached.changing();
    let told = Names { sr, vdi: &reference, op: "introduce" };
    let taken =
        attached.with(|device| device.introduce(&Work::new(call), uuid, location)).map_err(|error| {
            operation.give_up(Some(&note));
            told.translate(call, error)
        })?;
    step("vdi-introduce:image-taken");
    let mut sm_config = args.map(10)?;
    sm_config.extend(taken.sm_config.clone());
    let mut fields = vec![("sm_config", Value::string_map(sm_config))];
    for (at, field) in introduced::FIELDS {
        fields.push((*field, args.value(*at)?.clone()));
    }
    fields.retain(|(field, value)| *field != "snapshot_of" || value.as_str() != Some(NULL_REF));
    let sizes = attached.measure(&Work::new(call));
    let size = if taken.managed { i64::try_from(taken.virtual_size).unwrap_or(i64::MAX) } else { 0 };
    let made = operation.commit(Some(&note), |change| {
        if !attached.keeps_records() {
            is_free(change)?;
        }
        let reference = records::create(change, sr, &taken, fields)?;
        attached.record(change, sizes, size)?;
        super::allowed::refresh(&call.part, change, "VDI", &reference)?;
        Ok(reference)
    })?;
    Ok(Value::String(made))
}
