//! Full and delta copies.

use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_sm::{NewVdi, VdiInfo};
use tapio_types::{Access, ChainSpec};
use uuid::Uuid;

use super::attached::Attached;
use super::notes::Note;
use super::records::{self, Alert};
use super::transaction::Transaction;
use super::vdi::{Subject, discard, not_in_use, not_plugged, record_made};
use super::work::{Names, Work};
use super::{Call, Handlers, Storage, tracking};
use crate::db::Object;
use crate::operations::{ACTIVATE, INTO, on_sr, on_vdi};
use crate::plan::steps::step;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.copy", |call, args| {
        let named = |at: usize| {
            args.text(at).map(|text| Some(text).filter(|text| *text != NULL_REF && !text.is_empty()))
        };
        let to = Copy { sr: named(1)?, base: named(2)?, into: named(3)? };
        copy(call, args.text(0)?, &to, None).map(Value::String)
    });
}

/// What of a VDI's record its copy gets as well, and the VDI of an archive.
pub(crate) const INHERITED: &[&str] = &[
    "name_label",
    "name_description",
    "type",
    "sharable",
    "read_only",
    "other_config",
    "xenstore_data",
    "tags",
];

/// Where a VDI is copied to: references.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copy<'a> {
    /// The SR of a new VDI.
    pub(crate) sr: Option<&'a str>,
    /// The VDI that the copy is a difference to.
    pub(crate) base: Option<&'a str>,
    /// The VDI that it goes into, in the place of a new one.
    pub(crate) into: Option<&'a str>,
}

/// Copies a VDI; a new one may be made for a VM, see [`super::vdi::made_note`]. Returns the reference of the copy.
///
/// # Errors
/// Those of `VDI.copy`.
pub(crate) fn copy(call: &Call, source: &str, to: &Copy<'_>, vm: Option<&str>) -> Result<String, ApiError> {
    let source = Subject::find(call, source)?;
    tracking::has_data(&source.vdi)?;
    let base = to.base.map(|base| Subject::find(call, base)).transpose()?;
    if let Some(base) = &base {
        tracking::has_data(&base.vdi)?;
    }
    match to.into {
        Some(into) => copy_into(call, &source, base.as_ref(), into, to.sr),
        None => {
            let sr = to.sr.ok_or_else(|| ApiError::new("HANDLE_INVALID", ["SR", NULL_REF]))?;
            copy_new(call, &source, base.as_ref(), sr, vm)
        }
    }
}

/// Whether an image has a byte for each byte of the disk, so that a difference cannot be told from zeroes.
fn is_raw(sm_config: &std::collections::BTreeMap<String, String>) -> bool {
    sm_config.get("type").is_some_and(|value| value == "raw")
        || sm_config.get("vdi_type").is_some_and(|value| value == "aio")
}

/// VDIs that a copy reads; nothing writes to them until this goes.
pub(super) struct Reading<'a> {
    call: &'a Call,
    holder: String,
    /// With the SR where it has opened the VDI.
    opened: Vec<(Arc<Object>, Option<Arc<Attached>>)>,
}

impl<'a> Reading<'a> {
    /// Of none yet.
    pub(super) fn new(call: &'a Call, operation: &Transaction<'_>) -> Self {
        Self { call, holder: format!("copy {}", operation.task()), opened: Vec::new() }
    }

    /// Opens a VDI for reading.
    ///
    /// # Errors
    /// `VDI_IN_USE`, the driver's.
    pub(super) fn open(&mut self, subject: &Subject) -> Result<ChainSpec, ApiError> {
        let storage = &self.call.part;
        let vdi = subject.reference();
        let targets = [on_sr(&subject.sr.reference, ACTIVATE), on_vdi(vdi, ACTIVATE)];
        let _held = storage.operations.enter(&*self.call.progress, &targets, || {
            let mut state = storage.state();
            if state.use_of(vdi) == Some(Access::ReadWrite) {
                return Err(ApiError::new("VDI_IN_USE", [vdi, "copy"]));
            }
            state.holders.entry(vdi.to_owned()).or_default().insert(self.holder.clone(), Access::ReadOnly);
            Ok(())
        })?;
        let chain = subject.sr.with(|sr| sr.activate(&Work::new(self.call), subject.uuid, Access::ReadOnly));
        let is_open = chain.is_ok().then(|| Arc::clone(&subject.sr));
        self.opened.push((Arc::clone(&subject.vdi), is_open));
        chain.map(|with| with.chain).map_err(|error| subject.told(self.call, "copy", error))
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        for (vdi, sr) in std::mem::take(&mut self.opened) {
            self.call.part.put_holder(&vdi.reference, &self.holder, None);
            let closed = sr
                .zip(vdi.uuid().ok())
                .map(|(sr, uuid)| sr.with(|device| device.deactivate(&Work::new(self.call), uuid)));
            if let Some(Err(error)) = closed {
                let vdi = vdi.text("uuid");
                tracing::warn!(vdi, %error, "the storage did not close what a copy had read");
            }
            // What waited for the end of it need not wait longer.
            self.call.part.collect_later(vdi.text("SR"));
        }
    }
}

/// Chains of the source, and of what the copy is a difference to.
pub(super) fn open<'a>(
    call: &'a Call,
    operation: &Transaction<'_>,
    source: &Subject,
    base: Option<&Subject>,
) -> Result<(Reading<'a>, ChainSpec, Option<ChainSpec>), ApiError> {
    let mut reading = Reading::new(call, operation);
    let chain = reading.open(source)?;
    let below = base.map(|base| reading.open(base)).transpose()?;
    Ok((reading, chain, below))
}

fn copy_new(
    call: &Call,
    source: &Subject,
    base: Option<&Subject>,
    sr: &str,
    vm: Option<&str>,
) -> Result<String, ApiError> {
    let attached = call.part.attached(sr)?;
    attached.needs("VDI_CREATE")?;
    let operation = begin(call, source, base, sr, None)?;
    let image = Uuid::new_v4();
    let note = Note::ImageMade { sr: sr.to_owned(), image };
    let _building = attached.build(image);
    operation.note(Some(&note), Some("vdi-copy:noted"))?;
    let filled = (|| {
        let made = make(call, source, &attached, image)?;
        step("vdi-copy:image-made");
        if base.is_some() && is_raw(&made.sm_config) {
            return Err(ApiError::new("VDI_NOT_SPARSE", [crate::db::reference_of(image)]));
        }
        let (_reading, chain, below) = open(call, &operation, source, base)?;
        attached.with(|device| device.fill(&Work::part(call, 0.02, 0.98), image, &chain, below.as_ref()))?;
        attached.with(|device| device.vdi(&Work::new(call), image))
    })();
    let filled = match filled {
        Ok(info) => info,
        Err(error) => {
            if attached.is_in_trouble() {
                attached.owe(note);
            } else {
                discard(call, &operation, &note, &attached, image);
            }
            return Err(Names { sr, vdi: source.reference(), op: "copy" }.translate(call, error));
        }
    };
    step("vdi-copy:filled");
    let _changing = attached.changing();
    let fields = INHERITED.iter().map(|field| (*field, source.vdi.get(field).clone())).collect();
    record_made(call, &operation, &note, &attached, &filled, (fields, vm))
}

fn begin<'a>(
    call: &'a Call,
    source: &Subject,
    base: Option<&Subject>,
    sr: &str,
    into: Option<&str>,
) -> Result<Transaction<'a>, ApiError> {
    let mut targets = vec![on_vdi(source.reference(), "copy"), on_sr(sr, "vdi_create")];
    if let Some(base) = base.filter(|base| base.reference() != source.reference()) {
        targets.push(on_vdi(base.reference(), "copy"));
    }
    targets.extend(into.map(|into| on_vdi(into, INTO)));
    Transaction::enter(call, &targets, |state| {
        let read = [Some(source), base];
        for vdi in read.into_iter().flatten().map(Subject::reference) {
            if state.use_of(vdi) == Some(Access::ReadWrite) {
                return Err(ApiError::new("VDI_IN_USE", [vdi, "copy"]));
            }
        }
        into.map_or(Ok(()), |into| not_in_use(state, into, "copy"))
    })
}

fn make(call: &Call, source: &Subject, attached: &Attached, image: Uuid) -> Result<VdiInfo, ApiError> {
    let size = u64::try_from(source.vdi.int("virtual_size")).unwrap_or_default();
    let new = NewVdi {
        uuid: image,
        virtual_size: size,
        sm_config: std::collections::BTreeMap::new(),
        name_label: source.vdi.text("name_label").to_owned(),
        name_description: source.vdi.text("name_description").to_owned(),
    };
    let _changing = attached.changing();
    attached.with(|device| device.create(&Work::new(call), &new))
}

fn copy_into(
    call: &Call,
    source: &Subject,
    base: Option<&Subject>,
    into: &str,
    sr: Option<&str>,
) -> Result<String, ApiError> {
    let target = Subject::find(call, into)?;
    let attached = &target.sr;
    tracking::has_data(&target.vdi)?;
    if into == source.reference() || base.is_some_and(|base| base.reference() == into) {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["a VDI cannot be copied into itself"]));
    }
    if sr.is_some_and(|sr| sr != attached.reference) {
        let what = "into_vdi lies in another SR than the one that was named: leave one of the two away";
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [what]));
    }
    if target.vdi.bool("read_only") {
        return Err(ApiError::new("VDI_READONLY", [into]));
    }
    let size = source.vdi.int("virtual_size");
    if target.vdi.int("virtual_size") < size {
        return Err(ApiError::new("VDI_TOO_SMALL", [into.to_owned(), size.to_string()]));
    }
    if base.is_some() && is_raw(&target.vdi.map("sm_config")) {
        return Err(ApiError::new("VDI_NOT_SPARSE", [into]));
    }
    not_plugged(&call.part.db, into, "copy")?;
    let operation = begin(call, source, base, &attached.reference, Some(into))?;
    let note = Note::CopyInto {
        sr: attached.reference.clone(),
        source: source.reference().to_owned(),
        base: base.map(|base| base.reference().to_owned()),
        into: into.to_owned(),
    };
    operation.note(Some(&note), Some("vdi-copy:into-noted"))?;
    // A copy that failed has told its caller that the VDI holds a part; one that was killed could not.
    fill_into(call, &operation, &note, (source, base, &target))
        .inspect_err(|_| operation.give_up(Some(&note)))?;
    Ok(into.to_owned())
}

fn fill_into(
    call: &Call,
    operation: &Transaction<'_>,
    note: &Note,
    (source, base, target): (&Subject, Option<&Subject>, &Subject),
) -> Result<(), ApiError> {
    let attached = &target.sr;
    let filled = (|| {
        let (_reading, chain, below) = open(call, operation, source, base)?;
        attached
            .with(|device| device.fill(&Work::part(call, 0.02, 0.98), target.uuid, &chain, below.as_ref()))?;
        attached.with(|device| device.vdi(&Work::new(call), target.uuid))
    })();
    let filled = filled.map_err(|error| target.told(call, "copy", error))?;
    step("vdi-copy:into-filled");
    let sizes = attached.measure(&Work::new(call));
    operation.commit(Some(note), |change| {
        let more = records::update(change, &*change.get("VDI", target.reference())?, &filled)?;
        attached.record(change, sizes, more)
    })
}

/// Does once more, in the background, what a killed daemon had begun to copy into a VDI. When this returns nothing else
/// can use the VDIs until that is done.
pub(super) fn resume(storage: &Arc<Storage>, note: &Note) {
    let (entered, is_entered) = std::sync::mpsc::channel();
    let (storage, note) = (Arc::clone(storage), note.clone());
    let copying = move || {
        let call = Call::own(&storage);
        if let Err(error) = copy_again(&call, &note, entered) {
            tracing::warn!(?note, %error, "a copy that was interrupted cannot be finished");
        }
    };
    match std::thread::Builder::new().name("copy".to_owned()).spawn(copying) {
        // It says so, or it has ended.
        Ok(_) => drop(is_entered.recv()),
        Err(error) => tracing::error!(%error, "a copy that was interrupted waits for the next start"),
    }
}

fn copy_again(call: &Call, note: &Note, entered: std::sync::mpsc::Sender<()>) -> Result<(), ApiError> {
    let Note::CopyInto { source, base, into, sr } = note else { return Ok(()) };
    let db = &call.part.db;
    let drop_note = || {
        db.change(|change| {
            note.drop_from(change);
            Ok(())
        })
    };
    let Ok(record) = db.get("VDI", into) else { return drop_note() };
    let target = Subject::find(call, into)?;
    let copied = (|| {
        let source = Subject::find(call, source)?;
        let base = base.as_deref().map(|base| Subject::find(call, base)).transpose()?;
        let operation = begin(call, &source, base.as_ref(), sr, Some(into))?;
        operation.note(Some(note), None)?;
        let _ = entered.send(());
        fill_into(call, &operation, note, (&source, base.as_ref(), &target))
    })();
    let Err(error) = copied else { return Ok(()) };
    let (uuid, name) = (record.text("uuid"), record.text("name_label"));
    let body = format!(
        "The copy into VDI '{name}' ({uuid}) was interrupted and cannot be repeated: {error}. The VDI holds a part of it; \
         copy again, or destroy it."
    );
    Alert { name: "VDI_COPY_INTERRUPTED", priority: 3, class: "VDI", about: uuid }.post(&call.part.db, &body);
    drop_note()
}
