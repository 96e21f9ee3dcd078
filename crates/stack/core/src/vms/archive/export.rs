//! A VM is sent.

use std::io::{self, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use tapio_model::{ApiError, ArchiveCompression, Asked};
use tapio_xva::{CHUNK_LEN, Compression, Compressor, Writer};

use super::super::StorageCall;
use super::super::allowed::bad_power_state;
use super::super::running::Running;
use super::client::Client;
use super::part::Part;
use super::{Call, cancelled, lookup, records, reference};
use crate::storage::archive::{STREAM_HEAD_LEN, Source, hold};
use crate::storage::transfer::Accepted;

/// Sends a VM; `is_taken` says in the end whether the client has taken it.
///
/// # Errors
/// `HANDLE_INVALID`, `VM_BAD_POWER_STATE`, `VDI_IN_USE`, those of the storage.
pub(crate) fn export(
    call: &Call,
    asked: &Asked,
    data: OwnedFd,
    accepted: Accepted<'_>,
    is_taken: &dyn Fn() -> bool,
) -> Result<String, ApiError> {
    let Asked::ExportVm { vm, compression, preserve_power_state } = asked else {
        return Err(ApiError::internal("an export of something else"));
    };
    let vm = reference(call, "VM", vm)?;
    let (_running, vm) = Running::begin(call, "VM", &vm, "export", |change, vm| {
        if vm.bool("is_control_domain") {
            let why = format!("{} is the host itself", vm.text("name_label"));
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        if !matches!(vm.text("power_state"), "Halted" | "Suspended") {
            return Err(bad_power_state(vm, "Halted"));
        }
        change.get("VM", &vm.reference)
    })?;
    let (document, disks) = records::document(&call.part.db, &vm, *preserve_power_state)?;
    let storage = lookup::to_storage(call);
    let vdis: Vec<String> = disks.iter().map(|disk| disk.vdi.clone()).collect();
    let sources = hold(&storage, &vdis)?;
    let lost = |_: io::Error| cancelled(call);
    let client = Client::new(data, &call.progress)?;
    accepted(Some(vm.text("uuid").to_owned()));
    let compression = match compression {
        ArchiveCompression::None => Compression::None,
        ArchiveCompression::Gzip => Compression::Gzip,
        ArchiveCompression::Zstd => Compression::Zstd,
    };
    let mut writer = Writer::new(Compressor::new(compression, client), &document).map_err(lost)?;
    let all: u64 = disks.iter().map(|disk| disk.len).sum();
    let mut done = 0;
    for disk in &disks {
        let part = Part::of(&storage, done, disk.len, all);
        send(call, &part, sources.disk(&disk.vdi)?, disk, &mut writer)?;
        done += disk.len;
    }
    // The client's end of the stream.
    writer.finish().and_then(Compressor::finish).map(drop).map_err(lost)?;
    // The images stay as they are until all was read from them and nearly all is out.
    if !is_taken() {
        return Err(cancelled(call));
    }
    sources.finish()?;
    Ok(vm.reference.clone())
}

/// Sends a disk: its first piece, its last, and all between them that are not zero.
fn send(
    call: &Call,
    part: &StorageCall,
    source: &Source,
    disk: &records::Disk,
    writer: &mut Writer<impl Write>,
) -> Result<(), ApiError> {
    let failed = |error: io::Error| ApiError::internal(format!("an export cannot begin: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    thread::scope(|scope| {
        let sending = scope.spawn(|| source.send(part, OwnedFd::from(theirs)));
        let copied = copy(BufReader::with_capacity(CHUNK_LEN, ours), disk, writer);
        let defect =
            |_| Err(ApiError::internal("an export ended in a defect of ours; the daemon's log has more"));
        let sent = sending.join().unwrap_or_else(defect);
        match copied {
            Ok(()) => sent,
            // What the storage answers is the cause, if it is not the end of what it sent to.
            Err(Ended::Storage) => {
                sent.and_then(|()| Err(ApiError::internal("the storage ended an export early")))
            }
            Err(Ended::Client) => Err(cancelled(call)),
        }
    })
}

/// Which end of an export has ended early.
enum Ended {
    Storage,
    Client,
}

fn copy(mut from: impl Read, disk: &records::Disk, writer: &mut Writer<impl Write>) -> Result<(), Ended> {
    let mut read = |into: &mut [u8]| from.read_exact(into).map_err(|_| Ended::Storage);
    let mut head = [0; STREAM_HEAD_LEN];
    read(&mut head)?;
    let len = head.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let count = len.div_ceil(CHUNK_LEN as u64);
    let len_of = |number: u64| (len - number * CHUNK_LEN as u64).min(CHUNK_LEN as u64) as usize;
    let mut data = vec![0; CHUNK_LEN];
    let mut put = |number: u64, data: &[u8]| writer.chunk(&disk.id, number, data).map_err(|_| Ended::Client);
    let mut next = 0;
    loop {
        let mut head = [0; 12];
        read(&mut head)?;
        let (at, bytes) = head.split_at(8);
        let at = at.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let bytes = bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize;
        let number = at / CHUNK_LEN as u64;
        let is_end = bytes == 0;
        if (is_end || number > 0) && next == 0 && count > 0 {
            data.fill(0);
            put(0, &data[..len_of(0)])?;
            next = 1;
        }
        if is_end {
            break;
        }
        if number < next || number >= count || bytes != len_of(number) {
            return Err(Ended::Storage);
        }
        read(&mut data[..bytes])?;
        put(number, &data[..bytes])?;
        next = number + 1;
    }
    if next < count {
        data.fill(0);
        put(count - 1, &data[..len_of(count - 1)])?;
    }
    Ok(())
}
