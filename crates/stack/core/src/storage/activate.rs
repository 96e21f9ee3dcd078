//! VDIs are opened for disk processes: one writer or many readers, unless it may be shared.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tapio_model::{ApiError, Value};
use tapio_sm::OpenSpec;
use tapio_types::{Access, ImageKind};

use super::notes::Note;
use super::state::StorageState;
use super::vdi::Subject;
use super::work::Work;
use super::{Call, Storage, allowed, this_host, tracking};
use crate::db::{Change, Object};
use crate::operations::{ACTIVATE, CLOSING, DEACTIVATE, Held, on_sr, on_vdi};
use crate::plan::steps::step;

/// A VDI that is ready to be opened. Its chain does not change until this goes: keep it until the disk process has
/// opened the images, or failed to.
#[derive(Debug)]
pub struct Opening {
    /// The images, and the log of changed blocks.
    pub with: OpenSpec,
    _held: Held,
}

const fn word(access: Access) -> &'static str {
    match access {
        Access::ReadOnly => "RO",
        Access::ReadWrite => "RW",
    }
}

/// Whether one more holder may have the VDI open in addition to the present ones.
fn shares(state: &StorageState, vdi: &str, holder: &str, access: Access) -> bool {
    let others = state.holders.get(vdi).into_iter().flatten().filter(|(known, _)| *known != holder);
    let mut others = others.map(|(_, access)| *access);
    match access {
        Access::ReadWrite => others.next().is_none(),
        Access::ReadOnly => others.all(|other| other == Access::ReadOnly),
    }
}

/// In `SR.other_config`: milliseconds that the SR's VDIs take to be made ready, for measurements of what slower storage
/// costs on a host that has none.
const SIMULATED_LATENCY: &str = "simulated-latency-ms";
/// Longest.
const SIMULATED_LATENCY_MAX: Duration = Duration::from_secs(60);

pub(super) fn simulated_latency(call: &Call, sr: &str) {
    let Ok(sr) = call.part.db.get("SR", sr) else { return };
    let wanted =
        sr.get("other_config").as_map().and_then(|map| map.get(SIMULATED_LATENCY)?.as_str()?.parse().ok());
    if let Some(ms) = wanted {
        thread::sleep(Duration::from_millis(ms).min(SIMULATED_LATENCY_MAX));
    }
}

fn close(call: &Call, subject: &Subject) {
    if let Err(error) = subject.sr.with(|sr| sr.deactivate(&Work::new(call), subject.uuid)) {
        tracing::warn!(vdi = %subject.uuid, %error, "the storage did not close what it had opened");
    }
}

/// Makes a VDI, as the caller found it, ready for a disk process on behalf of `holder`, a VBD's reference. Repeating it
/// counts once. Waits for an operation that changes the chain, at most two minutes. The holder is kept over a restart,
/// until [`deactivate`].
///
/// # Errors
/// `VDI_IN_USE`, `VDI_READONLY`, `VDI_MISSING`, `VDI_NOT_MANAGED`, `SR_NOT_ATTACHED`, `TASK_CANCELLED`, the
/// driver's.
pub fn activate(call: &Call, vdi: &Arc<Object>, holder: &str, access: Access) -> Result<Opening, ApiError> {
    let subject = Subject::usable(call, Arc::clone(vdi))?;
    let vdi = subject.reference();
    let is_sharable = subject.vdi.bool("sharable");
    let mut before = None;
    let targets = [on_sr(&subject.sr.reference, ACTIVATE), on_vdi(vdi, ACTIVATE)];
    let held = loop {
        let entered = call.part.operations.enter(&*call.progress, &targets, || {
            let mut state = call.part.state();
            if !is_sharable && !shares(&state, vdi, holder, access) {
                return Err(ApiError::new("VDI_IN_USE", [vdi, "attach"]));
            }
            let holders = state.holders.entry(vdi.to_owned()).or_default();
            before = holders.insert(holder.to_owned(), access);
            Ok(())
        });
        match entered {
            Ok(held) => break held,
            Err(error) if call.part.has_yielded(&error) => {}
            Err(error) => return Err(error),
        }
    };
    match open(call, vdi, holder, (access, before)) {
        Ok(with) => Ok(Opening { with, _held: held }),
        Err(error) => {
            call.part.put_holder(vdi, holder, before);
            Err(error)
        }
    }
}

/// [`deactivate`], which waits neither for the storage nor for an operation that waits for it.
///
/// # Errors
/// The store's.
pub fn release(call: &Call, vdi: &str, holder: &str) -> Result<(), ApiError> {
    let vdi = &*call.part.moved_to(vdi);
    let Some(access) = call.part.put_holder(vdi, holder, None) else { return Ok(()) };
    if let Ok(subject) = Subject::find_at_all(call, vdi) {
        close(call, &subject);
    }
    let host = this_host(&call.part.db);
    let note = Note::Holder { vdi: vdi.to_owned(), holder: holder.to_owned(), access };
    call.part.db.change(|change| {
        note.drop_from(change);
        match change.get("VDI", vdi) {
            Ok(_) => call.part.tag(&host, change, vdi),
            Err(_) => Ok(()),
        }
    })
}

fn open(
    call: &Call,
    vdi: &str,
    holder: &str,
    (access, before): (Access, Option<Access>),
) -> Result<OpenSpec, ApiError> {
    // What was waited for may have changed it; from here on nothing does.
    let subject = Subject::find(call, vdi)?;
    tracking::has_data(&subject.vdi)?;
    if access == Access::ReadWrite && subject.vdi.bool("read_only") {
        return Err(ApiError::new("VDI_READONLY", [vdi]));
    }
    simulated_latency(call, &subject.sr.reference);
    let opened = subject.sr.with(|sr| sr.activate(&Work::new(call), subject.uuid, access));
    let with = opened.map_err(|error| subject.told(call, "attach", error))?;
    // Several writers can share bytes, not the metadata of an image.
    let is_plain = matches!(&with.chain.layers[..], [only] if only.kind != ImageKind::Vhd);
    let written = if !is_plain && !shares(&call.part.state(), vdi, holder, access) {
        Err(ApiError::new("VDI_IN_USE", [vdi, "attach"]))
    } else {
        let host = this_host(&call.part.db);
        let note = Note::Holder { vdi: vdi.to_owned(), holder: holder.to_owned(), access };
        call.part.db.change(|change| {
            if !call.part.state().holders.get(vdi).is_some_and(|holders| holders.contains_key(holder)) {
                // A forced unplug did not wait for the storage.
                return Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]));
            }
            note.put(change)?;
            call.part.tag(&host, change, vdi)
        })
    };
    // The driver counts; a holder that comes again has been counted.
    if written.is_err() || before.is_some() {
        close(call, &subject);
    }
    written.map(|()| with)
}

/// Keeps the chain of a VDI as it is, from before its disk process closes the images until after. Waits for an
/// operation that changes the chain.
///
/// # Errors
/// `HANDLE_INVALID`, `OTHER_OPERATION_IN_PROGRESS`, `TASK_CANCELLED`.
pub fn closing(call: &Call, vdi: &str) -> Result<Held, ApiError> {
    loop {
        let now = call.part.moved_to(vdi);
        call.part.db.get("VDI", &now)?;
        let held = call.part.operations.enter(&*call.progress, &[on_vdi(&now, CLOSING)], || Ok(()))?;
        // What was waited for may have moved the disk to another VDI.
        if call.part.moved_to(vdi) == now {
            return Ok(held);
        }
    }
}

/// Undoes [`activate`]; that `holder` does not have it is fine.
///
/// # Errors
/// The driver's, the store's; then the holder still has it.
pub fn deactivate(call: &Call, vdi: &str, holder: &str) -> Result<(), ApiError> {
    deactivate_if(call, vdi, holder, &|| Ok(()))
}

/// [`deactivate`], if `may` agrees once nothing opens or closes the VDI any more.
///
/// # Errors
/// As there, and what `may` answers.
pub(super) fn deactivate_if(
    call: &Call,
    vdi: &str,
    holder: &str,
    may: &dyn Fn() -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    let vdi = &*call.part.moved_to(vdi);
    let has = |state: &StorageState| state.holders.get(vdi)?.get(holder).copied();
    if has(&call.part.state()).is_none() {
        return Ok(());
    }
    let Ok(record) = call.part.db.get("VDI", vdi) else {
        let access = call.part.put_holder(vdi, holder, None);
        let note = access.map(|access| Note::Holder { vdi: vdi.into(), holder: holder.into(), access });
        return call.part.db.change(|change| {
            note.inspect(|note| note.drop_from(change));
            Ok(())
        });
    };
    let targets = [on_vdi(vdi, DEACTIVATE), on_sr(record.text("SR"), ACTIVATE)];
    // An SR that is being attached, for as long as its storage takes, does not know of this VDI yet.
    let is_attached = call.part.state().attached.contains_key(record.text("SR"));
    let targets = if is_attached { &targets[..] } else { &targets[..1] };
    let held = call.part.operations.enter(&*call.progress, targets, may)?;
    if let Ok(sr) = call.part.attached(record.text("SR")) {
        let uuid = record.uuid()?;
        sr.with(|device| device.deactivate(&Work::new(call), uuid))?;
    }
    step("vdi-deactivate:closed");
    let Some(access) = call.part.put_holder(vdi, holder, None) else { return Ok(()) };
    let host = this_host(&call.part.db);
    let note = Note::Holder { vdi: vdi.to_owned(), holder: holder.to_owned(), access };
    let written = call.part.db.change(|change| {
        note.drop_from(change);
        call.part.tag(&host, change, vdi)
    });
    drop(held);
    written.inspect_err(|_| {
        call.part.put_holder(vdi, holder, Some(access));
    })
}

impl Storage {
    /// The VDI that has the disk of this one now: itself, unless it was moved since the caller looked.
    fn moved_to(&self, vdi: &str) -> String {
        let state = self.state();
        let mut now = vdi;
        while let Some(next) = state.moved.get(now) {
            now = next;
        }
        now.to_owned()
    }

    /// Sets or removes a holder; answers what it was before.
    pub(super) fn put_holder(&self, vdi: &str, holder: &str, access: Option<Access>) -> Option<Access> {
        let mut state = self.state();
        let holders = state.holders.entry(vdi.to_owned()).or_default();
        let before = match access {
            Some(access) => holders.insert(holder.to_owned(), access),
            None => holders.remove(holder),
        };
        if holders.is_empty() {
            state.holders.remove(vdi);
        }
        before
    }

    /// Makes `sm_config` say how it is open, as sm's activation protocol does, and what is allowed now.
    pub(super) fn tag(&self, host: &str, change: &mut Change<'_>, vdi: &str) -> Result<(), ApiError> {
        let key = format!("host_{host}");
        let mut sm_config = change.get("VDI", vdi)?.map("sm_config");
        let now = self.state().use_of(vdi).map(|access| word(access).to_owned());
        if sm_config.get(&key) != now.as_ref() {
            match now {
                Some(now) => sm_config.insert(key, now),
                None => sm_config.remove(&key),
            };
            change.set("VDI", vdi, "sm_config", Value::string_map(sm_config))?;
        }
        allowed::refresh(self, change, "VDI", vdi)
    }
}
