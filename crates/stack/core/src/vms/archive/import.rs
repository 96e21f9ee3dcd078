//! VMs are received.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use tapio_model::{ApiError, Asked, NULL_REF};
use tapio_types::SECTOR_LEN;
use tapio_xva::{Chunk, Places, Reader};

use super::super::allowed::bad_power_state;
use super::super::made::remove_unused;
use super::super::memory::is_memory;
use super::super::running::Running;
use super::client::Client;
use super::decoder::{self, Plain};
use super::part::Part;
use super::plan::{How, Plan};
use super::{Call, lookup, reference, told, write};
use crate::plan::steps::step;
use crate::storage::archive::{NewDisk, receive};
use crate::storage::transfer::Accepted;

type Archive = Reader<Plain>;

/// Makes VMs of an archive; their references.
///
/// # Errors
/// `IMPORT_ERROR...` of what is no such archive, `DEFAULT_SR_NOT_FOUND`, those of VMs that are here; those of the
/// storage. Then nothing was made.
pub(crate) fn import(
    call: &Call,
    asked: &Asked,
    data: OwnedFd,
    accepted: Accepted<'_>,
) -> Result<Vec<String>, ApiError> {
    let Asked::ImportVm { sr, restore, force } = asked else {
        return Err(ApiError::internal("an import of something else"));
    };
    let how = How { restore: *restore, force: *force };
    let sr = target(call, sr.as_deref())?;
    let client = Client::new(data, &call.progress)?;
    accepted(None);
    let archive = decoder::plain(call, client).and_then(|stream| Reader::open(stream, !how.force));
    let (mut archive, document) = archive.map_err(|error| told(call, error))?;
    let plan = Plan::new(&document).map_err(|error| told(call, error))?;
    drop(document);
    let _held = hold(call, &plan, how)?;
    let mut made = BTreeMap::new();
    let result = disks(call, &sr, &mut archive, &plan, &mut made).and_then(|()| {
        step("vm-import:disks-made");
        write::write(call, &plan, &made, how, &|_, _| Ok(()))
    });
    if result.is_err() {
        for vdi in made.values() {
            if let Err(error) = remove_unused(call, vdi) {
                tracing::warn!(vdi, %error, "a disk of an import that failed stays until the next start");
            }
        }
    }
    result
}

/// The SR for the disks.
fn target(call: &Call, named: Option<&str>) -> Result<String, ApiError> {
    let db = &call.part.db;
    let sr = match named {
        Some(sr) => reference(call, "SR", sr)?,
        None => {
            let pool = db.all("pool");
            let default = pool.first().map_or(NULL_REF, |pool| pool.text("default_SR"));
            let found = db.get("SR", default).map_err(|_| ApiError::new("DEFAULT_SR_NOT_FOUND", [default]));
            found?.reference.clone()
        }
    };
    if db.get("SR", &sr)?.text("content_type") == "iso" {
        return Err(ApiError::new("SR_OPERATION_NOT_SUPPORTED", [sr]));
    }
    Ok(sr)
}

/// Takes the VMs that are to be replaced, if they may be.
///
/// # Errors
/// `VM_BAD_POWER_STATE`, `VM_TO_IMPORT_IS_NOT_NEWER_VERSION`, `OPERATION_NOT_ALLOWED`, `IMPORT_ERROR`.
pub(super) fn hold(call: &Call, plan: &Plan, how: How) -> Result<Vec<Running>, ApiError> {
    let mut held = Vec::new();
    if !how.restore {
        return Ok(held);
    }
    let mut uuids = BTreeSet::new();
    for vm in &plan.vms {
        if uuid::Uuid::parse_str(&vm.uuid).is_err() || !uuids.insert(&vm.uuid) {
            let shown: String = vm.uuid.chars().take(40).collect();
            let why = format!(
                "the UUID '{shown}' of a VM is none, or that of another too: import it without restore"
            );
            return Err(ApiError::new("IMPORT_ERROR", [why]));
        }
        let Ok(here) = call.part.db.by_uuid("VM", &vm.uuid) else { continue };
        let (running, ()) = Running::begin(call, "VM", &here.reference, "import", |_, here| {
            if here.bool("is_control_domain")
                || here.bool("is_default_template")
                || here.bool("is_a_snapshot")
            {
                let why = format!("{} cannot be replaced by an import", here.text("name_label"));
                return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
            }
            if here.text("power_state") != "Halted" {
                return Err(bad_power_state(here, "Halted"));
            }
            if !how.force && vm.version <= here.int("version") {
                let (ours, theirs) = (here.int("version").to_string(), vm.version.to_string());
                let params = [here.reference.clone(), ours, theirs];
                return Err(ApiError::new("VM_TO_IMPORT_IS_NOT_NEWER_VERSION", params));
            }
            Ok(())
        })?;
        held.push(running);
    }
    Ok(held)
}

/// A piece that is the first of the next disk.
struct Piece {
    disk: String,
    number: u32,
    data: Vec<u8>,
}

impl From<Chunk<'_>> for Piece {
    fn from(chunk: Chunk<'_>) -> Self {
        Self { disk: chunk.disk.to_owned(), number: chunk.number, data: chunk.data.to_vec() }
    }
}

fn next(call: &Call, archive: &mut Archive) -> Result<Option<Piece>, ApiError> {
    let piece = archive.next_chunk().map_err(|error| told(call, error))?;
    Ok(piece.map(Piece::from))
}

/// Makes the disks of the archive, one after the other.
fn disks(
    call: &Call,
    sr: &str,
    archive: &mut Archive,
    plan: &Plan,
    made: &mut BTreeMap<String, String>,
) -> Result<(), ApiError> {
    let storage = lookup::to_storage(call);
    let all = plan.disks.values().chain(plan.memories.values()).map(|disk| disk.len).sum();
    let (mut done, mut passed) = (0, BTreeSet::new());
    let mut ahead = next(call, archive)?;
    while let Some(piece) = ahead.take() {
        let id = piece.disk.clone();
        let memory = plan.memories.get(&id).filter(|_| !plan.disks.contains_key(&id));
        if let Some(memory) = memory.filter(|_| !is_ours(&piece)) {
            if !passed.insert(id) {
                return Err(unexpected(&piece));
            }
            ahead = copy(call, archive, piece, memory.len, &mut |_, _| Ok(true))?.1;
            continue;
        }
        let disk = plan.disks.get(&id).or(memory).filter(|_| !made.contains_key(&id));
        let disk: &NewDisk = disk.ok_or_else(|| unexpected(&piece))?;
        let part = Part::of(&storage, done, disk.len, all);
        let vdi = receive(&part, sr, disk.clone(), &id, |to| {
            let (is_whole, following) = feed(call, archive, piece, disk.len, to)?;
            ahead = following;
            Ok(is_whole)
        })?;
        made.insert(id, vdi);
        step("vm-import:disk-made");
        done += disk.len;
    }
    match plan.disks.keys().all(|id| made.contains_key(id)) {
        true => Ok(()),
        false => Err(ApiError::bare("IMPORT_ERROR_PREMATURE_EOF")),
    }
}

/// Whether the first piece of a memory is the head of one that this toolstack wrote; a VM with another one is halted.
fn is_ours(piece: &Piece) -> bool {
    piece.number == 0 && is_memory(&piece.data)
}

fn unexpected(piece: &Piece) -> ApiError {
    let found: String = format!("{}/{:08}", piece.disk, piece.number).chars().take(80).collect();
    ApiError::new("IMPORT_ERROR_UNEXPECTED_FILE", ["the next disk of ova.xml".to_owned(), found])
}

/// Writes a disk to the storage: pieces with their places, the last one empty.
fn feed(
    call: &Call,
    archive: &mut Archive,
    first: Piece,
    len: u64,
    mut to: UnixStream,
) -> Result<(bool, Option<Piece>), ApiError> {
    let mut write = |at: u64, data: &[u8]| {
        let padding = data.len().wrapping_neg() % SECTOR_LEN as usize;
        let mut head = [0; 12];
        head[..8].copy_from_slice(&at.to_le_bytes());
        head[8..].copy_from_slice(&((data.len() + padding) as u32).to_le_bytes());
        let zeros = [0; SECTOR_LEN as usize];
        let written = to.write_all(&head).and_then(|()| to.write_all(data));
        Ok(written.and_then(|()| to.write_all(&zeros[..padding])).is_ok())
    };
    let (is_taken, following) = copy(call, archive, first, len, &mut write)?;
    Ok((is_taken && write(len, &[])?, following))
}

/// What takes the pieces of a disk, each with its place; it says whether it wants more.
type To<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<bool, ApiError>;

/// Gives the pieces of a disk with their places to `to`, until it wants no more; answers whether it took all, and the
/// first piece of the next disk.
fn copy(
    call: &Call,
    archive: &mut Archive,
    first: Piece,
    len: u64,
    to: To<'_>,
) -> Result<(bool, Option<Piece>), ApiError> {
    let mut places = Places::new(len);
    let id = first.disk.clone();
    let mut put = |number: u32, data: &[u8]| match places
        .place(number, data.len() as u64)
        .map_err(|error| told(call, error))?
    {
        Some(at) => to(at, data),
        None => Ok(true),
    };
    let mut is_taken = put(first.number, &first.data)?;
    drop(first);
    let mut following = None;
    while is_taken {
        let Some(piece) = archive.next_chunk().map_err(|error| told(call, error))? else { break };
        if piece.disk != id {
            following = Some(piece.into());
            break;
        }
        is_taken = put(piece.number, piece.data)?;
    }
    if is_taken && !places.is_whole(SECTOR_LEN) {
        return Err(ApiError::bare("IMPORT_ERROR_PREMATURE_EOF"));
    }
    Ok((is_taken, following))
}
