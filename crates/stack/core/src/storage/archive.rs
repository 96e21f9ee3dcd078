//! Disks of VMs on their way into an archive and out of one.
//!
//! An export holds all disks of its VM from its beginning, so that they are of one moment. An import makes a VDI whose
//! image has no record until it is whole; a VDI that is whole is noted as made for a VM until that VM is there.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use tapio_model::{ApiError, Value};
use tapio_sm::{Export, HEAD_LEN, Import, NewVdi, StreamFormat};
use tapio_types::{Access, ChainSpec};
use uuid::Uuid;

use super::Call;
use super::copy::Reading;
use super::notes::Note;
use super::transaction::Transaction;
use super::vdi::{Subject, discard, record_made};
use super::work::{Names, Work};
use crate::db::reference_of;
use crate::operations::{on_sr, on_vdi};
use crate::plan::steps::step;

/// Bytes in front of what an export of pieces sends.
pub(crate) const STREAM_HEAD_LEN: usize = HEAD_LEN;

/// Disks that are held for an export.
pub(crate) struct Sources<'a> {
    operation: Transaction<'a>,
    reading: Option<Reading<'a>>,
    pub(super) disks: Vec<Source>,
}

/// One of them.
pub(crate) struct Source {
    pub(super) subject: Subject,
    pub(super) chain: ChainSpec,
}

/// Holds VDIs, and opens them for reading.
///
/// # Errors
/// `HANDLE_INVALID`, `VDI_IN_USE` of one that is open for writing, the driver's.
pub(crate) fn hold<'a>(call: &'a Call, vdis: &[String]) -> Result<Sources<'a>, ApiError> {
    let named: BTreeSet<&String> = vdis.iter().collect();
    let subjects = named.into_iter().map(|vdi| Subject::find(call, vdi)).collect::<Result<Vec<_>, _>>()?;
    let targets: Vec<_> = subjects.iter().map(|subject| on_vdi(subject.reference(), "copy")).collect();
    let operation = Transaction::enter(call, &targets, |state| {
        let used = subjects.iter().find(|vdi| state.use_of(vdi.reference()) == Some(Access::ReadWrite));
        used.map_or(Ok(()), |vdi| Err(ApiError::new("VDI_IN_USE", [vdi.reference(), "export"])))
    })?;
    operation.note(None, None)?;
    let mut reading = Reading::new(call, &operation);
    let mut disks = Vec::new();
    for subject in subjects {
        let chain = reading.open(&subject)?;
        disks.push(Source { subject, chain });
    }
    Ok(Sources { operation, reading: Some(reading), disks })
}

impl Sources<'_> {
    /// One of them.
    ///
    /// # Errors
    /// It is not held.
    pub(crate) fn disk(&self, vdi: &str) -> Result<&Source, ApiError> {
        let found = self.disks.iter().find(|disk| disk.subject.reference() == vdi);
        found.ok_or_else(|| ApiError::new("HANDLE_INVALID", ["VDI", vdi]))
    }

    /// Closes them; nothing else may change them yet.
    pub(crate) fn close(&mut self) {
        self.reading = None;
    }

    /// Lets them go.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        drop(self.reading);
        self.operation.commit(None, |_| Ok(()))
    }
}

impl Source {
    /// Sends the pieces of the disk that are not zero. `call` has the progress of this disk.
    ///
    /// # Errors
    /// Those of the images, `TASK_CANCELLED`.
    pub(crate) fn send(&self, call: &Call, to: OwnedFd) -> Result<(), ApiError> {
        let (chain, uuid, format) = (self.chain.clone(), self.subject.uuid, StreamFormat::Chunked);
        let what = Export { chain, uuid, base: None, format, start: 0 };
        let sent = self.subject.sr.with(|sr| sr.export(&Work::new(call), &what, to));
        sent.map_err(|error| self.subject.told(call, "export", error))
    }
}

/// A disk that is to be made.
#[derive(Clone, Debug)]
pub(crate) struct NewDisk {
    /// Bytes, of whole sectors.
    pub(crate) len: u64,
    /// Fields of its record.
    pub(crate) fields: Vec<(&'static str, Value)>,
}

impl NewDisk {
    fn text(&self, field: &str) -> String {
        let found = self.fields.iter().find(|(name, _)| *name == field);
        found.and_then(|(_, value)| value.as_str()).unwrap_or_default().to_owned()
    }
}

/// Makes a VDI of what `feed` writes: pieces with their places. It says whether it could write all of it. The VDI is
/// noted as made for `vm`. Answers its reference.
///
/// # Errors
/// What `feed` answers, the driver's; then there is no VDI.
pub(crate) fn receive(
    call: &Call,
    sr: &str,
    disk: NewDisk,
    vm: &str,
    feed: impl FnOnce(UnixStream) -> Result<bool, ApiError>,
) -> Result<String, ApiError> {
    let attached = call.part.attached(sr)?;
    attached.needs("VDI_CREATE")?;
    let image = Uuid::new_v4();
    let new = NewVdi {
        uuid: image,
        virtual_size: disk.len,
        sm_config: std::collections::BTreeMap::new(),
        name_label: disk.text("name_label"),
        name_description: disk.text("name_description"),
    };
    let failed = |error: std::io::Error| ApiError::internal(format!("an import cannot begin: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let operation = Transaction::enter(call, &[on_sr(sr, "vdi_create")], |_| Ok(()))?;
    let note = Note::ImageMade { sr: sr.to_owned(), image };
    let _building = attached.build(image);
    operation.note(Some(&note), Some("vm-import:image-noted"))?;
    let vdi = reference_of(image);
    let told = |error| Names { sr, vdi: &vdi, op: "import" }.translate(call, error);
    let made = {
        let _changing = attached.changing();
        attached.with(|device| device.create(&Work::new(call), &new))
    };
    made.map_err(|error| {
        operation.not_made(&note, &attached, &error);
        told(error)
    })?;
    step("vm-import:image-made");
    let what = Import { into: image, format: StreamFormat::Chunked, start: 0, len: None };
    let received = thread::scope(|scope| {
        let import = || attached.with(|device| device.import(&Work::new(call), &what, OwnedFd::from(theirs)));
        let working = scope.spawn(import);
        let fed = feed(ours);
        let defect =
            |_| Err(ApiError::internal("an import ended in a defect of ours; the daemon's log has more"));
        let worked = working.join().unwrap_or_else(defect);
        match fed {
            Ok(true) => worked,
            // The storage wanted no more.
            Ok(false) => worked.and_then(|()| Err(ApiError::internal("the storage ended an import early"))),
            Err(error) => Err(error),
        }
    });
    let filled = received.and_then(|()| attached.with(|device| device.vdi(&Work::new(call), image)));
    let filled = filled.map_err(|error| {
        if attached.is_in_trouble() {
            attached.owe(note.clone());
        } else {
            discard(call, &operation, &note, &attached, image);
        }
        told(error)
    })?;
    step("vm-import:image-filled");
    let _changing = attached.changing();
    record_made(call, &operation, &note, &attached, &filled, (disk.fields, Some(vm)))
}
