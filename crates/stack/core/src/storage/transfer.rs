//! VDIs that are exported and imported over HTTP.
//!
//! An export is a copy whose target is a client: it holds the VDI as a copy does, so that it can be neither removed nor
//! changed, nor opened for writing meanwhile. An import into a VDI holds it alone. A daemon that is killed leaves an
//! export nothing to undo, an import into a VDI a part of the data there, and an import into a new VDI an image without
//! a record, which is removed.

use std::os::fd::OwnedFd;

use tapio_model::{ApiError, Asked, ImageFormat, Value};
use tapio_sm::{Export, Import, NewVdi, StreamFormat};
use tapio_types::Access;
use uuid::Uuid;

use super::attached::Attached;
use super::notes::Note;
use super::transaction::Transaction;
use super::vdi::{Subject, discard, not_in_use, not_plugged, record_made};
use super::work::{Names, Work};
use super::{Call, Storage, copy, records, tracking};
use crate::db::reference_of;
use crate::operations::{INTO, on_sr, on_vdi};

/// Tells that a transfer was accepted, and of which VDI.
pub(crate) type Accepted<'a> = &'a mut dyn FnMut(Option<String>);

const fn format_of(format: ImageFormat) -> StreamFormat {
    match format {
        ImageFormat::Raw => StreamFormat::Raw,
        ImageFormat::Vhd => StreamFormat::Vhd,
        ImageFormat::Chunked => StreamFormat::Chunked,
    }
}

/// The reference of what a client names by reference or UUID.
fn reference(storage: &Storage, class: &str, name: &str) -> Result<String, ApiError> {
    if name.starts_with("OpaqueRef:") {
        return storage.db.get(class, name).map(|object| object.reference.clone());
    }
    storage.db.by_uuid(class, name).map(|object| object.reference.clone())
}

/// Looks whether an import names a VDI that is there.
///
/// # Errors
/// `HANDLE_INVALID`, `UUID_INVALID`.
pub(crate) fn probe(storage: &Storage, vdi: Option<&str>) -> Result<(), ApiError> {
    vdi.map_or(Ok(()), |vdi| reference(storage, "VDI", vdi).map(drop))
}

/// Sends a VDI; `is_taken` says in the end whether the client has taken it.
///
/// # Errors
/// `HANDLE_INVALID`, `VDI_IN_USE` of one that is open for writing, `VDI_TOO_LARGE`, the driver's.
pub(crate) fn export(
    call: &Call,
    asked: &Asked,
    data: OwnedFd,
    accepted: Accepted<'_>,
    is_taken: &dyn Fn() -> bool,
) -> Result<String, ApiError> {
    let Asked::Export { vdi, base, format, start } = asked else {
        return Err(ApiError::internal("an export of something else"));
    };
    let named = |name: &String| Subject::find(call, &reference(&call.part, "VDI", name)?);
    let source = named(vdi)?;
    let base = base.as_ref().map(named).transpose()?;
    let mut targets = vec![on_vdi(source.reference(), "copy")];
    if let Some(base) = base.as_ref().filter(|base| base.reference() != source.reference()) {
        targets.push(on_vdi(base.reference(), "copy"));
    }
    let operation = Transaction::enter(call, &targets, |state| {
        for vdi in [Some(&source), base.as_ref()].into_iter().flatten().map(Subject::reference) {
            if state.use_of(vdi) == Some(Access::ReadWrite) {
                return Err(ApiError::new("VDI_IN_USE", [vdi, "export"]));
            }
        }
        Ok(())
    })?;
    operation.note(None, None)?;
    let told = |error| source.told(call, "export", error);
    {
        let (_reading, chain, below) = copy::open(call, &operation, &source, base.as_ref())?;
        accepted(Some(source.uuid.to_string()));
        let base = below.zip(base.as_ref().map(|base| base.uuid));
        let what = Export { chain, uuid: source.uuid, base, format: format_of(*format), start: *start };
        source.sr.with(|sr| sr.export(&Work::new(call), &what, data)).map_err(told)?;
        // The images stay as they are until all was read from them and nearly all is out.
        if !is_taken() {
            return Err(told(ApiError::bare("TASK_CANCELLED")));
        }
    }
    operation.commit(None, |_| Ok(()))?;
    Ok(source.reference().to_owned())
}

/// Receives a VDI; its reference.
///
/// # Errors
/// `HANDLE_INVALID`, `VDI_IN_USE`, `VDI_READONLY`, `VDI_TOO_SMALL`, `IMPORT_ERROR...`, the driver's.
pub(crate) fn import(
    call: &Call,
    asked: &Asked,
    data: OwnedFd,
    accepted: Accepted<'_>,
) -> Result<String, ApiError> {
    let Asked::Import { vdi, sr, format, start, len } = asked else {
        return Err(ApiError::internal("an import of something else"));
    };
    let what = Import { into: Uuid::nil(), format: format_of(*format), start: *start, len: *len };
    match (vdi, sr) {
        (Some(vdi), _) => {
            let target = Subject::find(call, &reference(&call.part, "VDI", vdi)?)?;
            into_vdi(call, &target, Import { into: target.uuid, ..what }, data, accepted)
        }
        (None, Some(sr)) => {
            let sr = reference(&call.part, "SR", sr)?;
            let size = len.filter(|_| *format == ImageFormat::Raw && *start == 0);
            let why = "a new VDI is made for a raw image whose length is known";
            let size = size.ok_or_else(|| ApiError::new("IMPORT_ERROR", [why]))?;
            let attached = call.part.attached(&sr)?;
            attached.needs("VDI_CREATE")?;
            into_new(call, &attached, size, what, data, accepted)
        }
        (None, None) => Err(ApiError::new("VDI_MISSING", ["", ""])),
    }
}

fn into_vdi(
    call: &Call,
    target: &Subject,
    what: Import,
    data: OwnedFd,
    accepted: Accepted<'_>,
) -> Result<String, ApiError> {
    let into = target.reference();
    tracking::has_data(&target.vdi)?;
    if target.vdi.bool("read_only") {
        return Err(ApiError::new("VDI_READONLY", [into]));
    }
    let room = u64::try_from(target.vdi.int("virtual_size")).unwrap_or_default();
    let needed = what.start.saturating_add(what.len.unwrap_or_default());
    if what.format == StreamFormat::Raw && needed > room {
        return Err(ApiError::new("VDI_TOO_SMALL", [into.to_owned(), needed.to_string()]));
    }
    not_plugged(&call.part.db, into, "import")?;
    let attached = &target.sr;
    let targets = [on_sr(&attached.reference, "vdi_create"), on_vdi(into, INTO)];
    let operation = Transaction::enter(call, &targets, |state| not_in_use(state, into, "import"))?;
    operation.note(None, None)?;
    accepted(Some(target.uuid.to_string()));
    let told = |error| target.told(call, "import", error);
    let received = attached.with(|device| device.import(&Work::new(call), &what, data)).map_err(told);
    // Also of one that was interrupted: it may have taken room.
    let found = attached.with(|device| device.vdi(&Work::new(call), target.uuid)).map_err(told);
    let sizes = attached.measure(&Work::new(call));
    let recorded = found.and_then(|found| {
        operation.commit(None, |change| {
            let more = records::update(change, &*change.get("VDI", into)?, &found)?;
            attached.record(change, sizes, more)
        })
    });
    received?;
    recorded?;
    Ok(into.to_owned())
}

fn into_new(
    call: &Call,
    attached: &Attached,
    size: u64,
    what: Import,
    data: OwnedFd,
    accepted: Accepted<'_>,
) -> Result<String, ApiError> {
    let sr = &attached.reference;
    let image = Uuid::new_v4();
    let (name_label, name_description) = ("Imported VDI".to_owned(), String::new());
    let sm_config = std::collections::BTreeMap::new();
    let new = NewVdi { uuid: image, virtual_size: size, sm_config, name_label, name_description };
    let operation = Transaction::enter(call, &[on_sr(sr, "vdi_create")], |_| Ok(()))?;
    let note = Note::ImageMade { sr: sr.clone(), image };
    let _building = attached.build(image);
    operation.note(Some(&note), None)?;
    let vdi = reference_of(image);
    let told = |error| Names { sr, vdi: &vdi, op: "import" }.translate(call, error);
    let made = {
        let _changing = attached.changing();
        attached.with(|device| device.create(&Work::new(call), &new))
    };
    made.map_err(|error| {
        operation.not_made(&note, attached, &error);
        told(error)
    })?;
    accepted(None);
    let what = Import { into: image, ..what };
    let received = attached
        .with(|device| device.import(&Work::new(call), &what, data))
        .and_then(|()| attached.with(|device| device.vdi(&Work::new(call), image)));
    let filled = received.map_err(|error| {
        if attached.is_in_trouble() {
            attached.owe(note.clone());
        } else {
            discard(call, &operation, &note, attached, image);
        }
        // What there was of it is gone: there is nothing to go on with.
        let is_cut = &*error.code == "IMPORT_ERROR_PREMATURE_EOF";
        told(if is_cut { ApiError::bare("IMPORT_ERROR_PREMATURE_EOF") } else { error })
    })?;
    let _changing = attached.changing();
    let fields = vec![
        ("name_label", Value::string(&new.name_label)),
        ("name_description", Value::string(&new.name_description)),
    ];
    record_made(call, &operation, &note, attached, &filled, (fields, None))
}
