//! The host that receives: disks which come from SRs that only the sender has.
//!
//! Each is a new VDI with a mark in its record, and an export that the sender's disk process mirrors onto. The change
//! that makes the VM this host's takes the mark away; a VDI with the mark belongs to no VM, and one without it is never
//! removed here.

use std::collections::BTreeMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::super::{Call, Motions};
use super::{Arrival, Now, Phase};
use crate::basics::this_host;
use crate::db::{Db, Object};
use crate::operations::{MOVE, on_vdi};
use crate::plan::steps::step;
use crate::storage;
use crate::storage::outgoing::free;
use crate::storage::vdi::{MADE_NOTES, made_note};
use crate::vms::arrival;
use crate::vms::copy::MOTION;

/// In `VDI.other_config`, while no VM has the disk: the VM that it comes for.
const MARK: &str = "tapio:motion-of";

/// Beside it: the sender has its guest back, and will not decide.
const GIVEN_UP: &str = "tapio:motion-given-up";

/// A disk that the sender wants to send.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Coming {
    pub(super) vbd: Uuid,
    /// The SR's reference.
    pub(super) sr: String,
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Bytes that it takes where it is.
    pub(super) used: u64,
    /// Whether its image has no format.
    pub(super) is_raw: bool,
    pub(super) name: String,
}

/// Where the sender's disk process finds one of them.
#[derive(Serialize, Deserialize)]
pub(super) struct Landed {
    /// The new VDI's reference.
    pub(super) vdi: String,
    /// Its UUID: the name of the export.
    pub(super) uuid: Uuid,
    pub(super) address: IpAddr,
    pub(super) port: u16,
    /// The key of the only client, in hexadecimal digits. It is in no log, no note and no argument.
    pub(super) key: String,
}

/// The answer to the sender: a map with the one entry `disks`.
pub(super) type Answer = BTreeMap<String, String>;

/// What a note of [`made_note`] says of a disk of a VM that comes.
fn made_for(vm: &str) -> String {
    format!("{MOTION}arrival/{vm}")
}

/// Of this host, by the name or address at which the sender reaches it.
fn address(text: &str) -> Result<IpAddr, ApiError> {
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    let found =
        bare.parse().ok().or_else(|| (bare, 0).to_socket_addrs().ok()?.next().map(|found| found.ip()));
    found.ok_or_else(|| {
        let why =
            format!("'{text}' is no address of this host: set pool-address of tapiod, or name a network");
        ApiError::internal(why)
    })
}

/// Makes the disks, and exports them.
///
/// # Errors
/// `HOST_DISABLED`, `VM_REQUIRES_SR`, `SR_FULL`, `INVALID_VALUE`, the storage's: nothing is left then.
pub(super) fn land(
    call: &Call,
    vm: &Arc<Object>,
    now: &Now,
    args: &BTreeMap<String, String>,
) -> Result<Answer, ApiError> {
    let arg = |name: &str| args.get(name).map(String::as_str).unwrap_or_default();
    let coming: Vec<Coming> = serde_json::from_str(arg("disks"))
        .map_err(|why| ApiError::new("INVALID_VALUE", ["disks".to_owned(), why.to_string()]))?;
    let address = address(arg("address"))?;
    fits(call, vm, &coming)?;
    let from = vm.text("resident_on").to_owned();
    let mut note = Arrival { vm: vm.reference.clone(), from, phase: Phase::Landing, disks: BTreeMap::new() };
    call.part.db.change(|change| note.put(change))?;
    let landed = coming.iter().map(|disk| one(call, &mut note, now, disk, address));
    let landed: BTreeMap<Uuid, Landed> = landed.collect::<Result<_, ApiError>>()?;
    step("vm-arrive:landed");
    let text = super::text(&landed)?;
    Ok([("disks".to_owned(), text)].into())
}

/// What surely cannot come.
fn fits(call: &Call, vm: &Arc<Object>, coming: &[Coming]) -> Result<(), ApiError> {
    let db = &call.part.db;
    let host = db.get("host", &this_host(db))?;
    if !host.bool("enabled") {
        return Err(ApiError::new("HOST_DISABLED", [&host.reference]));
    }
    arrival::driver_of(&call.to(&call.part.vms), vm)?.check()?;
    let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
    for disk in coming {
        if !call.part.storage.has_attached(&disk.sr) {
            return Err(ApiError::new("VM_REQUIRES_SR", [vm.reference.as_str(), &disk.sr]));
        }
        *bytes.entry(&disk.sr).or_default() += disk.used;
    }
    for (sr, bytes) in bytes {
        if let Some(free) = free(&*db.get("SR", sr)?).filter(|free| bytes > *free) {
            return Err(ApiError::new("SR_FULL", [bytes.to_string(), free.to_string()]));
        }
    }
    Ok(())
}

fn one(
    call: &Call,
    note: &mut Arrival,
    now: &Now,
    disk: &Coming,
    address: IpAddr,
) -> Result<(Uuid, Landed), ApiError> {
    let storage = call.to(&call.part.storage);
    let record = [
        ("SR", Value::string(&disk.sr)),
        ("virtual_size", Value::Int(i64::try_from(disk.size).unwrap_or(i64::MAX))),
        ("name_label", Value::string(&disk.name)),
        ("other_config", Value::string_map([(MARK, note.vm.as_str())])),
        ("sm_config", Value::string_map(disk.is_raw.then_some(("type", "raw")))),
    ];
    let record: BTreeMap<String, Value> = record.map(|(name, value)| (name.to_owned(), value)).into();
    let vdi = storage::vdi::create(&storage, &record, Some(&made_for(&note.vm)))?;
    step("vm-arrive:disk-made");
    note.disks.insert(disk.vbd, vdi.clone());
    call.part.db.change(|change| note.put(change))?;
    let vdi = call.part.db.get("VDI", &vdi)?;
    // Nothing else is done with it until its VM has it.
    let targets = [on_vdi(&vdi.reference, MOVE)];
    now.held.lock().push(call.part.operations.enter(&*call.progress, &targets, || Ok(()))?);
    let key = format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple());
    let port = call.part.exports.land(&storage, &vdi, address, &key)?;
    Ok((disk.vbd, Landed { uuid: vdi.uuid()?, vdi: vdi.reference.clone(), address, port, key }))
}

/// All that was sent is here and durable, and nothing has the disks open any more.
///
/// # Errors
/// What was sent may not be all here: the guest cannot go on with it.
pub(super) fn close(call: &Call, note: &Arrival) -> Result<(), ApiError> {
    note.disks.values().try_for_each(|vdi| call.part.exports.landed(vdi))
}

fn is_marked(vdi: &Object, vm: &str) -> bool {
    vdi.map("other_config").get(MARK).is_some_and(|of| of == vm)
}

/// The sender, which keeps its guest, says so in the records of what it has sent: a receiver that cannot be asked now
/// finds it there.
///
/// # Errors
/// The store's.
pub(super) fn say_given_up(db: &Db, vm: &str) -> Result<(), ApiError> {
    db.change(|change| {
        for vdi in change.all("VDI").into_iter().filter(|vdi| is_marked(vdi, vm)) {
            let mut config = vdi.map("other_config");
            config.insert(GIVEN_UP.to_owned(), "true".to_owned());
            change.set("VDI", &vdi.reference, "other_config", Value::string_map(config))?;
        }
        Ok(())
    })
}

/// Whether the sender has said so.
pub(super) fn is_given_up(db: &Db, note: &Arrival) -> bool {
    let mut disks = note.disks.values().map(|vdi| db.get("VDI", vdi));
    // Nothing but an end of the arrival removes them.
    disks.any(|vdi| vdi.map_or(true, |vdi| vdi.map("other_config").contains_key(GIVEN_UP)))
}

fn notes_of(db: &Db, vm: &str) -> Vec<String> {
    let of = made_for(vm);
    let notes = db.notes(MADE_NOTES).into_iter().filter(|(_, text)| *text == of);
    notes.map(|(key, _)| key).collect()
}

/// The notes that go when the VM has its disks.
pub(super) fn settled(note: &Arrival) -> Vec<String> {
    note.disks.values().map(|vdi| made_note(vdi)).collect()
}

/// Removes the disks that came, as far as no VM has them.
///
/// # Errors
/// One of them stays.
pub(super) fn remove(motions: &Arc<Motions>, now: &Now, vm: &str) -> Result<(), ApiError> {
    let db = &motions.db;
    let storage = Call::own(motions).to(&motions.storage);
    now.held.lock().clear();
    for key in notes_of(db, vm) {
        let vdi = key.trim_start_matches(MADE_NOTES);
        motions.exports.end_landing(vdi)?;
        db.look_again("VDI", vdi)?;
        if db.get("VDI", vdi).is_ok_and(|vdi| is_marked(&vdi, vm)) {
            storage::vdi::destroy(&storage, vdi)?;
        }
        db.change(|change| {
            change.drop_note(&key);
            Ok(())
        })?;
    }
    Ok(())
}
