//! Exports are started, found again and ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_control::command::{EXPORT_NAMES_MAX, SecretName};
use tapio_model::ApiError;
use tapio_types::Access;
use tapio_vm::DiskSpec;
use uuid::Uuid;

use super::{Call, Export, Exports, Identity, State};
use crate::db::{Object, reference_of};
use crate::disks::{ExportNote, Note, Phase, Place, Rights, Tuning};
use crate::plan::steps::step;
use crate::sessions::Session;
use crate::storage::{self, Opening};

/// How long an export may take to be there.
pub(super) const START: Duration = Duration::from_secs(120);
/// How long a question without work behind it may take.
pub(super) const ASK: Duration = Duration::from_secs(5);
/// How long the end of one may take.
const END: Duration = Duration::from_secs(30);

/// The name of an export among those that have a VDI open.
pub(super) fn holder(id: Uuid) -> String {
    format!("nbd {id}")
}

/// Serves a VDI at these places, and lets a session in by a name; answers how it is served.
///
/// # Errors
/// `VDI_IN_USE` of one that is open for writing, the storage's, the process's.
pub(super) fn grant(
    call: &Call,
    vdi: &Arc<Object>,
    (places, identity): (&[Place], &Identity),
    (name, session): (&str, &Arc<Session>),
) -> Result<ExportNote, ApiError> {
    loop {
        let export = call.part.entry(&vdi.reference);
        let mut state = export.state.lock();
        if state.is_over {
            continue;
        }
        let served = served(call, &export, vdi, places, identity).inspect_err(|_| {
            state.is_over = true;
            call.part.open.lock().remove(&export.vdi);
        })?;
        while state.grants.len() >= EXPORT_NAMES_MAX {
            let oldest =
                state.grants.iter().min_by_key(|(_, (_, since))| *since).map(|(name, _)| name.clone());
            oldest.map(|oldest| state.grants.remove(&oldest));
        }
        state.grants.insert(name.to_owned(), (Arc::clone(session), Instant::now()));
        state.used = Instant::now();
        call.part.admit(&export, &state, &[])?;
        drop(state);
        // Its lease is looked after from now on.
        call.part.disks.look_at_exports();
        return Ok(served);
    }
}

/// The export as it is served, by a process that was there or is started.
fn served(
    call: &Call,
    export: &Export,
    vdi: &Arc<Object>,
    places: &[Place],
    identity: &Identity,
) -> Result<ExportNote, ApiError> {
    let disks = &call.part.disks;
    let note = disks.of_vbd(export.id).filter(|note| note.phase == Phase::Running);
    if let Some(served) = note.and_then(|note| note.export)
        && disks.serves(export.id)
    {
        // Clients of before stay at the places that they know.
        if served.places == places || disks.clients(export.id, Instant::now() + ASK)? > 0 {
            return Ok(served);
        }
    }
    if disks.of_vbd(export.id).is_some() {
        clear(&call.part, export.id, &export.vdi)?;
    }
    start(call, export.id, vdi, places, identity).inspect_err(|_| {
        if let Err(error) = clear(&call.part, export.id, &export.vdi) {
            tracing::warn!(vdi = vdi.text("uuid"), %error, "an export that could not be made is not all gone");
        }
    })
}

fn start(
    call: &Call,
    id: Uuid,
    vdi: &Arc<Object>,
    places: &[Place],
    identity: &Identity,
) -> Result<ExportNote, ApiError> {
    let exports = &call.part;
    let (disks, options, until) = (&exports.disks, exports.options(), Instant::now() + START);
    let client_time_s = u32::try_from(options.client_time.as_secs().max(1)).unwrap_or(u32::MAX);
    let export = ExportNote {
        places: places.to_vec(),
        port: 0,
        tls: identity.dir.clone(),
        is_written: false,
        client_time_s,
        fronts: Vec::new(),
    };
    let spec = DiskSpec { vbd: id, position: 0, read_only: true, is_cd: false, is_bootable: false };
    let (of, sr) = ((vdi.reference.as_str(), vdi.uuid()?), exports.db.get("SR", vdi.text("SR"))?);
    let note = Note::starting(spec, (Uuid::nil(), ""), of, sr.uuid()?, Tuning::default());
    disks.note(Note { export: Some(export), ..note })?;
    disks.start(id, Rights::of(sr.text("type"), false), until)?;
    let opening: Opening = storage::activate(&call.to(&exports.storage), vdi, &holder(id), Access::ReadOnly)?;
    step("nbd-export:activated");
    disks.open(id, &opening.with, until)?;
    drop(opening);
    let note = disks.export(id, options.ports.0..=options.ports.1, until)?;
    step("nbd-export:offered");
    disks.is_running(id)?;
    tracing::info!(vdi = vdi.text("uuid"), pid = note.process.map(|process| process.pid), "exported by NBD");
    note.export.ok_or_else(|| ApiError::internal("an export that is none"))
}

/// Ends the process and releases the VDI, as far as they are there.
pub(super) fn clear(exports: &Arc<Exports>, id: Uuid, vdi: &str) -> Result<(), ApiError> {
    exports.disks.end(id, true, Instant::now() + END)?;
    step("nbd-export:ended");
    storage::deactivate(&crate::call::Call::own(&exports.storage), vdi, &holder(id))?;
    exports.disks.forget(id);
    // What waited for the end of it need not wait longer.
    if let Ok(vdi) = exports.db.get("VDI", vdi) {
        exports.storage.collect_later(vdi.text("SR"));
    }
    Ok(())
}

impl Exports {
    /// The export of a VDI, which need not have a process.
    fn entry(&self, vdi: &str) -> Arc<Export> {
        let mut open = self.open.lock();
        let new = || {
            let state = State { is_over: false, grants: BTreeMap::new(), used: Instant::now() };
            Arc::new(Export::new(Uuid::new_v4(), vdi, state))
        };
        Arc::clone(open.entry(vdi.to_owned()).or_insert_with(new))
    }

    /// All exports.
    pub(super) fn all(&self) -> Vec<Arc<Export>> {
        self.open.lock().values().cloned().collect()
    }

    /// Gives the process the names that are valid.
    pub(super) fn admit(&self, export: &Export, state: &State, cut: &[String]) -> Result<(), ApiError> {
        let names: Vec<_> = state.grants.keys().cloned().map(SecretName).collect();
        let cut: Vec<_> = cut.iter().cloned().map(SecretName).collect();
        self.disks.admit(export.id, &names, &cut, Instant::now() + ASK)
    }

    /// Ends an export; the caller has its state.
    pub(super) fn end(self: &Arc<Self>, export: &Export, state: &mut State) -> Result<(), ApiError> {
        clear(self, export.id, &export.vdi)?;
        state.is_over = true;
        self.open.lock().remove(&export.vdi);
        tracing::info!(vdi = export.vdi, "exported by NBD no longer");
        Ok(())
    }

    /// Ends the export of a VDI that an operation needs, if it has no clients; whether it has ended.
    pub(super) fn gives_way(self: &Arc<Self>, vdi: &str) -> bool {
        let Some(export) = self.open.lock().get(vdi).cloned() else { return false };
        // One that is being started is in use.
        let Some(mut state) = export.state.try_lock() else { return false };
        if state.is_over {
            return true;
        }
        if self.disks.clients(export.id, Instant::now() + ASK).is_ok_and(|clients| clients > 0) {
            return false;
        }
        self.end(&export, &mut state)
            .inspect_err(|error| tracing::warn!(vdi, %error, "an export without clients does not end"))
            .is_ok()
    }
}

/// Finds the exports of an earlier daemon. What runs goes on for the clients that it has; no session of then is valid.
pub(crate) fn recover(exports: &Arc<Exports>) {
    let notes = exports.disks.exports();
    for note in &notes {
        let id = note.spec.vbd;
        // A mirror that goes on without this daemon ends: its motion has ended with the daemon.
        let is_read = note.export.as_ref().is_some_and(|export| !export.is_written);
        let runs = is_read && note.phase == Phase::Running && exports.disks.serves(id);
        if runs && exports.disks.admit(id, &[], &[], Instant::now() + ASK).is_ok() {
            let state = State { is_over: false, grants: BTreeMap::new(), used: Instant::now() };
            let export = Export::new(id, &note.vdi, state);
            exports.open.lock().insert(note.vdi.clone(), Arc::new(export));
            continue;
        }
        tracing::info!(vdi = %note.vdi_uuid, "an export that was half done or has died is ended");
        if let Err(error) = clear(exports, id, &note.vdi) {
            tracing::warn!(vdi = %note.vdi_uuid, %error, "an export is not all gone");
        }
    }
    for (vdi, name, _) in exports.storage.holders() {
        let id = name.strip_prefix("nbd ").and_then(|id| Uuid::parse_str(id).ok());
        let is_left = id.is_some_and(|id| !notes.iter().any(|note| note.spec.vbd == id));
        if is_left
            && let Err(error) = storage::deactivate(&crate::call::Call::own(&exports.storage), &vdi, &name)
        {
            tracing::warn!(vdi, %error, "a VDI stays active");
        }
    }
}

/// Whether the SR of an export can be used now.
pub(super) fn has_sr(exports: &Exports, note: &Note) -> bool {
    !exports.storage.is_recovering(&reference_of(note.sr))
}
