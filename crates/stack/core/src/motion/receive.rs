//! The host that receives: it makes what the sender asks for, and decides nothing.
//!
//! Disks that come are VDIs with a note of their motion. What the sender has asked for last is durable when it is
//! answered, so a sender that lost the network, or whose peer was killed, asks again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tapio_model::{ApiError, Asked, NULL_REF, Value};
use tapio_sm::ForkKind;
use uuid::Uuid;

use super::notes::{In, Phase};
use super::records::Records;
use super::{Call, Motions, text_of};
use crate::accounts::Peer;
use crate::args::Args;
use crate::basics::this_host;
use crate::db::Db;
use crate::plan::steps::step;
use crate::sessions::MOTION_LOGIN;
use crate::storage;
use crate::storage::outgoing::free;
use crate::storage::vdi::{MADE_NOTES, made_note};
use crate::vms::copy::MOTION;

/// VMs that are received at a time, and that are sent.
pub(super) const AT_A_TIME: usize = 3;

/// How long a motion that no sender has begun yet is waited for, in seconds.
const UNBEGUN: u64 = 3600;

/// How often is looked for motions without a word of their sender.
const LOOK: Duration = Duration::from_secs(5);

/// What of a motion is only of this run.
#[derive(Debug)]
pub(super) struct Now {
    /// When the sender was heard last.
    pub(super) heard: Instant,
    /// Held for reading while a step works, for writing while it ends.
    pub(super) steps: Arc<RwLock<()>>,
}

impl Default for Now {
    fn default() -> Self {
        Self { heard: Instant::now(), steps: Arc::default() }
    }
}

/// What a sender asks before it sends anything.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Question {
    /// Bytes that come into each SR.
    pub(super) srs: BTreeMap<String, u64>,
    pub(super) networks: Vec<String>,
    /// UUIDs of VMs, which are to be free.
    pub(super) vms: Vec<Uuid>,
    /// Seconds without a word of the sender after which all is given up.
    pub(super) timeout: u64,
}

pub(super) fn digest(secret: &str) -> String {
    Sha256::digest(secret.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether an upload of a session that is for a motion goes into a disk of that.
///
/// # Errors
/// `RBAC_PERMISSION_DENIED`.
pub(crate) fn may_send(db: &Db, motion: &str, asked: &Result<Asked, ApiError>) -> Result<(), ApiError> {
    let into = match asked {
        Ok(Asked::Import { vdi: Some(vdi), sr: None, .. }) => Uuid::parse_str(vdi).ok(),
        _ => None,
    };
    let note = into.and_then(|vdi| db.notes(&made_note(&crate::db::reference_of(vdi))).into_iter().next());
    match note.is_some_and(|(_, of)| of == format!("{MOTION}{motion}")) {
        true => Ok(()),
        false => Err(crate::roles::denied("http/put_import_raw_vdi")),
    }
}

/// Checks the login of a sender. One that comes when its motion is over must learn that: it may have decided.
///
/// # Errors
/// `HANDLE_INVALID`: there is no such motion; `SESSION_AUTHENTICATION_FAILED`.
pub(super) fn admit(db: &Db, motion: &str, secret: &str, peer: &Peer) -> Result<(), ApiError> {
    let id = Uuid::parse_str(motion).map_err(|_| ApiError::new("HANDLE_INVALID", ["motion", motion]))?;
    let known = In::find(db, id)?;
    let is_peer = known.peer.as_ref().is_none_or(|print| peer.certificate.as_ref() == Some(print));
    match is_peer && known.secret == digest(secret) {
        true => Ok(()),
        false => {
            let why = "this is not the host, or not the secret, of that motion";
            Err(ApiError::new("SESSION_AUTHENTICATION_FAILED", [motion, why]))
        }
    }
}

/// `host.migrate_receive`.
pub(super) fn prepare(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (host, network, options) = (args.text(0)?, args.text(1)?, args.map(2)?);
    let db = &call.part.db;
    let record = db.get("host", host)?;
    if !record.bool("enabled") {
        return Err(ApiError::new("HOST_DISABLED", [host]));
    }
    let address = call.part.address_on(host, network)?;
    let (certificate, _) = call.part.pool.link()?.certificate();
    let certificate: String = certificate.iter().map(|byte| format!("{byte:02x}")).collect();
    let (id, secret) = (Uuid::new_v4(), format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple()));
    let note = In {
        id,
        secret: digest(&secret),
        peer: options.get("source-fingerprint").filter(|print| !print.is_empty()).cloned(),
        phase: Phase::Receiving,
        records: None,
        made: Vec::new(),
        timeout: UNBEGUN,
    };
    db.change(|change| note.put(change))?;
    call.part.now.lock().insert(id, Now::default());
    let url = format!("https://{address}");
    Ok(Value::string_map([
        ("host", host.to_owned()),
        ("session_id", format!("{id}/{secret}")),
        ("SM", format!("{url}/services/SM")),
        ("xenops", format!("{url}/services/xenops")),
        ("master", url),
        ("certificate", certificate),
    ]))
}

/// `host.receive_motion`.
pub(super) fn receive(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (id, what, args) = (args.text(0)?, args.text(1)?, args.map(2)?);
    let id = Uuid::parse_str(id).map_err(|_| ApiError::new("UUID_INVALID", ["motion", id]))?;
    let is_sender = call.caller.user == format!("{MOTION_LOGIN}{id}");
    let is_by_hand = call.caller.role >= tapio_model::Role::PoolAdmin && matches!(what, "commit" | "abort");
    if !is_sender && !is_by_hand {
        return Err(crate::roles::denied("host.receive_motion"));
    }
    let steps = {
        let mut now = call.part.now.lock();
        let now = now.entry(id).or_default();
        now.heard = Instant::now();
        Arc::clone(&now.steps)
    };
    let answer = match what {
        "check" | "create" | "grow" | "fork" => {
            let _working = steps.read();
            let note = In::find(&call.part.db, id)?;
            if note.phase != Phase::Receiving {
                return Err(wrong(&note, what));
            }
            match what {
                "check" => check(call, note, &args)?,
                "create" => create(call, id, &args)?,
                "grow" => grow(call, id, &args)?,
                _ => fork(call, id, &args)?,
            }
        }
        "prepare" | "commit" | "abort" | "end" => {
            let _ending = steps.write();
            match (what, In::find(&call.part.db, id)) {
                ("prepare", note) => prepared(call, note?, &args)?,
                ("commit", note) => commit(call, note?)?,
                ("abort", Ok(note)) => abort(call, note)?,
                ("end", Ok(note)) => end(call, note)?,
                // It is over already.
                _ => BTreeMap::new(),
            }
        }
        other => return Err(ApiError::new("INVALID_VALUE", ["step", other])),
    };
    // A step may have taken its time.
    if let Some(now) = call.part.now.lock().get_mut(&id) {
        now.heard = Instant::now();
    }
    Ok(Value::string_map(answer))
}

type Answer = Result<BTreeMap<String, String>, ApiError>;

fn one(name: &str, value: impl Into<String>) -> BTreeMap<String, String> {
    BTreeMap::from([(name.to_owned(), value.into())])
}

fn wrong(note: &In, what: &str) -> ApiError {
    let why = format!("motion {} is {:?}: {what} is not possible now", note.id, note.phase);
    ApiError::new("OPERATION_NOT_ALLOWED", [why])
}

fn arg<'a>(args: &'a BTreeMap<String, String>, name: &str) -> Result<&'a str, ApiError> {
    args.get(name).map(String::as_str).ok_or_else(|| ApiError::new("INVALID_VALUE", [name, "it is missing"]))
}

fn number(args: &BTreeMap<String, String>, name: &str) -> Result<u64, ApiError> {
    let text = arg(args, name)?;
    text.parse().map_err(|_| ApiError::new("INVALID_VALUE", [name, text]))
}

/// The reference of a disk of this motion.
fn own(call: &Call, id: Uuid, args: &BTreeMap<String, String>) -> Result<String, ApiError> {
    let text = arg(args, "vdi")?;
    let uuid = Uuid::parse_str(text).map_err(|_| ApiError::new("UUID_INVALID", ["VDI", text]))?;
    let vdi = crate::db::reference_of(uuid);
    let notes = call.part.db.notes(&made_note(&vdi));
    match notes.iter().any(|(_, of)| *of == format!("{MOTION}{id}")) {
        true => Ok(vdi),
        false => Err(ApiError::new("HANDLE_INVALID", ["VDI", &vdi])),
    }
}

fn check(call: &Call, mut note: In, args: &BTreeMap<String, String>) -> Answer {
    let db = &call.part.db;
    let text = arg(args, "question")?;
    let asked: Question = serde_json::from_str(text)
        .map_err(|why| ApiError::new("INVALID_VALUE", ["question".to_owned(), why.to_string()]))?;
    let host = db.get("host", &this_host(db))?;
    if !host.bool("enabled") {
        return Err(ApiError::new("HOST_DISABLED", [&host.reference]));
    }
    for (sr, bytes) in &asked.srs {
        let record = db.get("SR", sr)?;
        if !call.part.storage.has_attached(sr) {
            return Err(ApiError::new("SR_NOT_ATTACHED", [sr]));
        }
        let is_able = ["vdi_create", "vdi_destroy", "vdi_clone"];
        let can = record.get("allowed_operations").as_set().unwrap_or_default();
        let has = |word: &str| can.iter().any(|able| able.as_str() == Some(word));
        if record.text("content_type") == "iso" || !is_able.iter().all(|word| has(word)) {
            return Err(ApiError::new(
                "SR_DOES_NOT_SUPPORT_MIGRATION",
                [sr.as_str(), "VDI_CREATE;VDI_CLONE"],
            ));
        }
        if let Some(free) = free(&record).filter(|free| bytes > free) {
            return Err(ApiError::new("SR_FULL", [bytes.to_string(), free.to_string()]));
        }
    }
    asked.networks.iter().try_for_each(|network| db.get("network", network).map(drop))?;
    for vm in &asked.vms {
        if db.by_uuid("VM", &vm.to_string()).is_ok() {
            return Err(ApiError::new("DUPLICATE_VM", [crate::db::reference_of(*vm)]));
        }
    }
    let busy = In::all(db).iter().filter(|other| other.id != note.id && other.timeout != UNBEGUN).count();
    if busy >= AT_A_TIME {
        return Err(ApiError::new("TOO_MANY_STORAGE_MIGRATES", [AT_A_TIME.to_string()]));
    }
    note.timeout = asked.timeout.clamp(1, UNBEGUN - 1);
    db.change(|change| note.put(change))?;
    let pool = db.all("pool").first().cloned();
    let named = |object: Option<&crate::db::Object>, field: &str| {
        let sr = object.map_or(NULL_REF, |object| object.text(field)).to_owned();
        db.get("SR", &sr).map_or_else(|_| NULL_REF.to_owned(), |sr| sr.reference.clone())
    };
    let suspend = [named(pool.as_deref(), "suspend_image_SR"), named(Some(&*host), "suspend_image_sr")];
    let suspend = suspend.into_iter().find(|sr| sr != NULL_REF).unwrap_or_else(|| NULL_REF.to_owned());
    Ok([("default_SR", named(pool.as_deref(), "default_SR")), ("suspend_SR", suspend)]
        .map(|(name, sr)| (name.to_owned(), sr))
        .into())
}

fn create(call: &Call, id: Uuid, args: &BTreeMap<String, String>) -> Answer {
    let size = i64::try_from(number(args, "size")?).unwrap_or(i64::MAX);
    let shape = if arg(args, "kind")? == "raw" { Some(("type", "raw")) } else { None };
    let record = [
        ("SR", Value::string(arg(args, "sr")?)),
        ("virtual_size", Value::Int(size)),
        ("name_label", Value::string(arg(args, "name")?)),
        ("sm_config", Value::string_map(shape)),
    ];
    let record: BTreeMap<String, Value> = record.map(|(name, value)| (name.to_owned(), value)).into();
    let storage = call.to(&call.part.storage);
    let made = storage::vdi::create(&storage, &record, Some(&format!("{MOTION}{id}")))?;
    step("motion-in:image-made");
    Ok(one("vdi", text_of(&call.part.db, "VDI", &made, "uuid")?))
}

fn grow(call: &Call, id: Uuid, args: &BTreeMap<String, String>) -> Answer {
    let vdi = own(call, id, args)?;
    storage::vdi::grow(&call.to(&call.part.storage), &vdi, number(args, "size")?)?;
    Ok(BTreeMap::new())
}

fn fork(call: &Call, id: Uuid, args: &BTreeMap<String, String>) -> Answer {
    let vdi = own(call, id, args)?;
    let storage = call.to(&call.part.storage);
    let of = format!("{MOTION}{id}");
    let made = storage::fork_vdi(&storage, &vdi, &BTreeMap::new(), ForkKind::Clone, Some(&of))?;
    step("motion-in:image-forked");
    Ok(one("vdi", text_of(&call.part.db, "VDI", &made, "uuid")?))
}

/// From here on only the sender, or an administrator, ends it.
fn prepared(call: &Call, mut note: In, args: &BTreeMap<String, String>) -> Answer {
    let text = arg(args, "records")?;
    let records: Records = serde_json::from_str(text)
        .map_err(|why| ApiError::new("INVALID_VALUE", ["records".to_owned(), why.to_string()]))?;
    match note.phase {
        Phase::Receiving => {}
        Phase::Prepared if note.records.as_ref() == Some(&records) => return Ok(BTreeMap::new()),
        _ => return Err(wrong(&note, "prepare")),
    }
    for vdi in &records.vdis {
        own(call, note.id, &one("vdi", vdi.image.to_string()))?;
    }
    (note.phase, note.records) = (Phase::Prepared, Some(records));
    call.part.db.change(|change| {
        note.records.as_ref().map_or(Ok(()), |records| records.check(change))?;
        note.put(change)
    })?;
    step("motion-in:prepared");
    Ok(BTreeMap::new())
}

fn commit(call: &Call, mut note: In) -> Answer {
    if note.phase != Phase::Committed {
        let records = match (note.phase, note.records.take()) {
            (Phase::Prepared, Some(records)) => records,
            _ => return Err(wrong(&note, "commit")),
        };
        call.part.db.change(|change| {
            note.made = records.write(change)?;
            note.phase = Phase::Committed;
            for vdi in &records.vdis {
                let vdi = crate::db::reference_of(vdi.image);
                crate::storage::refresh_vdi(&call.part.storage, change, &vdi)?;
            }
            note.put(change)
        })?;
        step("motion-in:committed");
    }
    Ok(one("vm", note.made.first().cloned().unwrap_or_default()))
}

fn abort(call: &Call, mut note: In) -> Answer {
    if note.phase == Phase::Committed {
        return Ok(one("vm", note.made.first().cloned().unwrap_or_default()));
    }
    note.phase = Phase::Aborting;
    call.part.db.change(|change| note.put(change))?;
    step("motion-in:aborting");
    remove_disks(call, note.id)?;
    call.part.db.change(|change| {
        note.drop_from(change);
        Ok(())
    })?;
    call.part.now.lock().remove(&note.id);
    Ok(BTreeMap::new())
}

fn end(call: &Call, note: In) -> Answer {
    if note.phase != Phase::Committed {
        return Err(wrong(&note, "end"));
    }
    remove_disks(call, note.id)?;
    call.part.db.change(|change| {
        note.drop_from(change);
        Ok(())
    })?;
    call.part.now.lock().remove(&note.id);
    Ok(BTreeMap::new())
}

/// Removes the disks of a motion that no VM has.
///
/// # Errors
/// One of them stays: an upload into it has not ended yet, or its SR is not there.
fn remove_disks(call: &Call, id: Uuid) -> Result<(), ApiError> {
    let db = &call.part.db;
    let of = format!("{MOTION}{id}");
    let notes = db.notes(MADE_NOTES).into_iter().filter(|(_, motion)| *motion == of);
    let mut failed = None;
    for (key, _) in notes {
        let vdi = key.trim_start_matches(MADE_NOTES);
        let removed = match db.get("VDI", vdi) {
            Ok(_) => storage::vdi::destroy(&call.to(&call.part.storage), vdi),
            Err(_) => Ok(()),
        };
        match removed {
            Ok(()) => db.change(|change| {
                change.drop_note(&key);
                Ok(())
            })?,
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Gives up motions whose senders say nothing while disks come, and finishes the removal of others.
pub(super) fn tend(motions: &Arc<Motions>) -> Result<(), ApiError> {
    let motions = Arc::downgrade(motions);
    let tending = move || loop {
        std::thread::sleep(LOOK);
        let Some(motions) = motions.upgrade() else { return };
        for note in In::all(&motions.db) {
            let (silent, steps) = {
                let mut now = motions.now.lock();
                let now = now.entry(note.id).or_default();
                (now.heard.elapsed(), Arc::clone(&now.steps))
            };
            let is_over = match note.phase {
                Phase::Receiving => silent > Duration::from_secs(note.timeout),
                Phase::Aborting => silent > LOOK,
                // The sender says that it has heard of it; one that is told that there is no such motion has the VM.
                Phase::Prepared | Phase::Committed => false,
            };
            let Some(_ending) = steps.try_write().filter(|_| is_over) else { continue };
            let call = Call::own(&motions);
            // It may have gone on since.
            let Ok(note) = In::find(&motions.db, note.id) else { continue };
            let done = match note.phase {
                Phase::Receiving | Phase::Aborting => abort(&call, note),
                Phase::Prepared | Phase::Committed => continue,
            };
            if let Err(error) = done {
                tracing::warn!(%error, "what came of a VM that was given up is not all gone yet");
            }
        }
    };
    let thread = std::thread::Builder::new().name("motions".to_owned()).spawn(tending);
    thread.map(drop).map_err(|error| ApiError::internal(format!("no thread for motions: {error}")))
}
