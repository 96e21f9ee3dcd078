//! VMs without the contents of their disks: records are sent, and received where the disks are.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tapio_model::{ApiError, Asked};
use tapio_xva::{Compression, Compressor, Decompressor, Document, Reader, Writer};

use super::client::Client;
use super::import::hold;
use super::plan::{How, Plan};
use super::{Call, cancelled, records, reference, told, write};
use crate::db::{Change, Db, Object};
use crate::storage::transfer::Accepted;

/// Sends the records of a VM, or of all but the templates that came with the toolstack. A VM may run.
///
/// # Errors
/// `HANDLE_INVALID`, `OPERATION_NOT_ALLOWED`; the client has gone.
pub(crate) fn export(
    call: &Call,
    vm: Option<&str>,
    (data, accepted): (OwnedFd, Accepted<'_>),
    is_taken: &dyn Fn() -> bool,
) -> Result<Vec<String>, ApiError> {
    let db = &call.part.db;
    let vms: Vec<Arc<Object>> = match vm {
        Some(vm) => vec![db.get("VM", &reference(call, "VM", vm)?)?],
        None => {
            let is_own = |vm: &Arc<Object>| {
                !vm.bool("is_control_domain") && !vm.bool("is_default_template") && !vm.bool("is_a_snapshot")
            };
            db.all("VM").into_iter().filter(is_own).collect()
        }
    };
    if let Some(host) = vms.iter().find(|vm| vm.bool("is_control_domain")) {
        let why = format!("{} is the host itself", host.text("name_label"));
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    let (document, _) = records::document_of_all(db, &vms, true)?;
    let lost = |_: io::Error| cancelled(call);
    let client = Client::new(data, &call.progress)?;
    accepted(vms.first().filter(|_| vm.is_some()).map(|vm| vm.text("uuid").to_owned()));
    let writer = Writer::new(Compressor::new(Compression::None, client), &document).map_err(lost)?;
    writer.finish().and_then(Compressor::finish).map(drop).map_err(lost)?;
    if !is_taken() {
        return Err(cancelled(call));
    }
    Ok(vms.iter().map(|vm| vm.reference.clone()).collect())
}

/// Makes VMs of records, with disks that are here.
///
/// # Errors
/// `VDI_LOCATION_MISSING` and `VDI_CONTENT_ID_MISSING` of a disk that is not here; those of an import. Then nothing was
/// made.
pub(crate) fn import(
    call: &Call,
    asked: &Asked,
    data: OwnedFd,
    accepted: Accepted<'_>,
) -> Result<Vec<String>, ApiError> {
    let Asked::ImportMetadata { restore, force, dry_run, vdis } = asked else {
        return Err(ApiError::internal("an import of something else"));
    };
    let how = How { restore: *restore, force: *force };
    let client = Client::new(data, &call.progress)?;
    accepted(None);
    let archive = Decompressor::new(client).and_then(|stream| Reader::open(stream, !how.force));
    let (mut archive, document) = archive.map_err(|error| told(call, error))?;
    let mut plan = Plan::new(&document).map_err(|error| told(call, error))?;
    let mut found = BTreeMap::new();
    for id in plan.disks.keys() {
        match disk_here(&call.part.db, &document, id, vdis) {
            Ok(vdi) => drop(found.insert(id.clone(), vdi)),
            Err(error) if how.force => {
                tracing::warn!(id, %error, "a VM is imported without a disk that is not here");
            }
            Err(error) => return Err(error),
        }
    }
    for vm in &mut plan.vms {
        vm.vbds.retain(|vbd| vbd.disk.as_ref().is_none_or(|id| found.contains_key(id)));
    }
    // To its end: an archive that was cut off is none, and its sender has been heard.
    while archive.next_chunk().map_err(|error| told(call, error))?.is_some() {}
    let _held = hold(call, &plan, how)?;
    if *dry_run {
        return Ok(Vec::new());
    }
    write::write(call, &plan, &found, how, &|_, _| Ok(()))
}

/// Makes VMs as another database has them, with disks that are here; `then` is done in the same change.
///
/// # Errors
/// As [`import`].
pub(crate) fn recover(
    call: &Call,
    from: &Db,
    vms: &[Arc<Object>],
    force: bool,
    then: write::Then<'_>,
) -> Result<Vec<String>, ApiError> {
    let how = How { restore: true, force };
    let (document, _) = records::document_of_all(from, vms, true)?;
    // As it would come: fields of an archive are texts.
    let document = Document::read(document.write().as_bytes()).map_err(|error| told(call, error))?;
    let plan = Plan::new(&document).map_err(|error| told(call, error))?;
    let mut found = BTreeMap::new();
    for id in plan.disks.keys().chain(plan.memories.keys()) {
        found.insert(id.clone(), disk_here(&call.part.db, &document, id, &[])?);
    }
    let _held = hold(call, &plan, how)?;
    let disks = plan.disks.iter().chain(&plan.memories);
    let disks: Vec<_> = disks.filter_map(|(id, disk)| Some((found.get(id)?, disk))).collect();
    let all = |change: &mut Change<'_>, made: &[String]| {
        // An SR of files knows the image of a VDI alone.
        for (vdi, disk) in &disks {
            for (field, value) in &disk.fields {
                change.set("VDI", vdi, field, value.clone())?;
            }
        }
        then(change, made)
    };
    write::write(call, &plan, &found, how, &all)
}

/// The disk here that stands for one of an archive: the one that the client names for it, or that of its SR and
/// location.
fn disk_here(db: &Db, document: &Document, id: &str, named: &[(String, String)]) -> Result<String, ApiError> {
    let absent = || ApiError::new("IMPORT_ERROR_FAILED_TO_FIND_OBJECT", [id]);
    let there = document.get("VDI", id).ok_or_else(absent)?;
    let uuid = there.text("uuid");
    if let Some((_, wanted)) = named.iter().find(|(from, _)| from.eq_ignore_ascii_case(uuid)) {
        return db.by_uuid("VDI", wanted).map(|vdi| vdi.reference.clone());
    }
    let sr = document.get("SR", there.text("SR")).map(|sr| sr.text("uuid")).unwrap_or_default();
    let (sr, location) = match db.by_uuid("SR", sr) {
        Ok(sr) => (sr, there.text("location")),
        Err(_) => return Err(ApiError::bare("VDI_CONTENT_ID_MISSING")),
    };
    let location = if location.is_empty() { uuid } else { location };
    let all = db.find("VDI", "SR", &sr.reference);
    let is_it = |vdi: &&Arc<Object>| vdi.text("location") == location || vdi.text("uuid") == location;
    let vdi = all.iter().filter(|vdi| vdi.bool("managed")).find(is_it);
    vdi.map(|vdi| vdi.reference.clone())
        .ok_or_else(|| ApiError::new("VDI_LOCATION_MISSING", [sr.reference.as_str(), location]))
}
