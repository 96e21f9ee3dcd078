//! The memory of a guest in a VDI, its memory image.
//!
//! ```text
//! byte 0      "TapioMem", version (4 bytes), 0 (4), bytes that follow (8), their SHA-256 (32): all little endian
//! byte 4096   what the driver wrote
//! ```
//!
//! The head is written last, so an image that was cut off has none. Data pass through the storage as those of an import
//! and an export do: the worker of the SR writes and reads the images, in whatever format they are.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use sha2::{Digest, Sha256};
use tapio_model::{ApiError, Asked, ImageFormat};
use tapio_vm::VmDriver;
use uuid::Uuid;

use super::{Call, lookup};
use crate::storage::transfer;

const MAGIC: [u8; 8] = *b"TapioMem";
const VERSION: u32 = 1;
/// Where the driver's data begin.
const DATA_AT: u64 = 4096;
/// Bytes of the head that mean something.
const HEAD_LEN: usize = 56;
/// What the storage puts in front of an export.
const EXPORT_HEAD_LEN: usize = 16;
/// What the storage writes is whole sectors.
const SECTOR_LEN: usize = 512;
/// Bytes that are passed on at a time.
const PIECE_LEN: usize = 256 << 10;

/// The head of a memory image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHead {
    /// Bytes that the driver wrote.
    pub len: u64,
    /// Their SHA-256.
    pub digest: [u8; 32],
}

impl MemoryHead {
    /// As it lies in the image.
    pub fn encode(&self) -> [u8; SECTOR_LEN] {
        let mut bytes = [0; SECTOR_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..HEAD_LEN].copy_from_slice(&self.digest);
        bytes
    }

    /// Reads the head of an image of `room` bytes.
    ///
    /// # Errors
    /// A sentence: it is none, of a later version, or of more data than there is room for.
    pub fn decode(bytes: &[u8], room: u64) -> Result<Self, String> {
        let head = bytes.first_chunk::<HEAD_LEN>().ok_or("it is shorter than its head")?;
        if head[..8] != MAGIC {
            return Err("it has no head: it was not written to its end, or holds something else".to_owned());
        }
        let version = head[8..12].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        if version != VERSION {
            return Err(format!("it is of version {version}, and this toolstack reads {VERSION}"));
        }
        let len = head[16..24].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if len > room.saturating_sub(DATA_AT) {
            return Err(format!("its head tells of {len} bytes, and it has {room}"));
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(&head[24..]);
        Ok(Self { len, digest })
    }
}

/// Bytes that the memory image of a guest has room for: its memory, what the driver adds to each page, its devices.
pub(super) fn room_for(memory: u64) -> u64 {
    const DEVICES: u64 = 64 << 20;
    (DATA_AT + memory + memory / 16 + DEVICES).next_multiple_of(2 << 20)
}

fn unreadable(vdi: &str, why: impl std::fmt::Display) -> ApiError {
    ApiError::new("SUSPEND_IMAGE_NOT_ACCESSIBLE", [vdi.to_owned(), why.to_string()])
}

fn pair() -> Result<(UnixStream, UnixStream), ApiError> {
    UnixStream::pair().map_err(|error| ApiError::internal(format!("a socket for a guest's memory: {error}")))
}

/// A piece of the storage's stream of chunks.
fn chunk(to: &mut impl Write, at: u64, data: &[u8]) -> io::Result<()> {
    let mut head = [0; 12];
    head[..8].copy_from_slice(&at.to_le_bytes());
    head[8..].copy_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_le_bytes());
    to.write_all(&head)?;
    to.write_all(data)
}

/// Passes on what the driver writes, to its end; the head that belongs to it. The storage takes whole sectors.
fn collect(mut from: impl Read, to: &mut impl Write) -> io::Result<MemoryHead> {
    let (mut hash, mut len) = (Sha256::new(), 0);
    let mut piece = Vec::with_capacity(PIECE_LEN);
    loop {
        piece.clear();
        let count = from.by_ref().take(PIECE_LEN as u64).read_to_end(&mut piece)?;
        if count == 0 {
            return Ok(MemoryHead { len, digest: hash.finalize().into() });
        }
        hash.update(&piece);
        piece.resize(count.next_multiple_of(SECTOR_LEN), 0);
        chunk(to, DATA_AT + len, &piece)?;
        len += count as u64;
    }
}

/// Writes the memory of a paused VM into a VDI.
///
/// # Errors
/// The driver's, those of an import into the VDI. The VM is paused still, the image is of no use.
pub(super) fn save(call: &Call, driver: &dyn VmDriver, vm: Uuid, vdi: &str) -> Result<(), ApiError> {
    let storage = lookup::to_storage(call);
    let asked = Asked::Import {
        vdi: Some(vdi.to_owned()),
        sr: None,
        format: ImageFormat::Chunked,
        start: 0,
        len: None,
    };
    let (mut ours, theirs) = pair()?;
    let (from, to) = pair()?;
    let is_cancelled = || call.progress.is_cancelled();
    thread::scope(|scope| {
        let stored = scope.spawn(|| transfer::import(&storage, &asked, OwnedFd::from(theirs), &mut |_| {}));
        let passed = scope.spawn(move || {
            let head = collect(from, &mut ours)?;
            Ok::<_, io::Error>((head, ours))
        });
        let saved = driver.save(vm, OwnedFd::from(to), &is_cancelled);
        let passed = passed.join().map_err(|_| ApiError::internal("a thread of a suspend has panicked"))?;
        let written = match (&saved, passed) {
            (Ok(()), Ok((head, mut ours))) => {
                chunk(&mut ours, 0, &head.encode()).and_then(|()| chunk(&mut ours, 0, &[])).map(|()| head.len)
            }
            // Without an end to its stream the storage takes none of it for whole.
            (Err(_), _) => Ok(0),
            (Ok(()), Err(error)) => Err(error),
        };
        let stored = stored.join().map_err(|_| ApiError::internal("a thread of a suspend has panicked"))?;
        // A storage that takes no more is why the driver fails, unless the storage only misses the end.
        match (saved, stored) {
            (Err(error), Err(why)) if is_cut(&why) => Err(error),
            (_, Err(error)) => Err(error),
            (saved, Ok(_)) => saved,
        }?;
        let len = written.map_err(|error| ApiError::internal(format!("the memory of VM {vm}: {error}")))?;
        tracing::info!(%vm, vdi, len, "the memory of a guest is written");
        Ok(())
    })
}

fn is_cut(error: &ApiError) -> bool {
    error.code == "IMPORT_ERROR_PREMATURE_EOF"
}

/// Passes on what was written; whether it is that.
fn deliver(from: &mut impl Read, to: &mut impl Write, head: &MemoryHead) -> io::Result<bool> {
    let (mut hash, mut left) = (Sha256::new(), head.len);
    let mut bytes = vec![0; PIECE_LEN];
    while left > 0 {
        let wanted = usize::try_from(left).map_or(PIECE_LEN, |left| left.min(PIECE_LEN));
        from.read_exact(&mut bytes[..wanted])?;
        hash.update(&bytes[..wanted]);
        to.write_all(&bytes[..wanted])?;
        left -= wanted as u64;
    }
    Ok(<[u8; 32]>::from(hash.finalize()) == head.digest)
}

/// Reads the memory of a VM out of a VDI into the VM, which was made for it and is paused then.
///
/// # Errors
/// `SUSPEND_IMAGE_NOT_ACCESSIBLE` for an image that is damaged or none; the driver's, those of an export of the VDI.
pub(super) fn load(call: &Call, driver: &dyn VmDriver, vm: Uuid, vdi: &str) -> Result<(), ApiError> {
    let storage = lookup::to_storage(call);
    let asked = Asked::Export { vdi: vdi.to_owned(), base: None, format: ImageFormat::Raw, start: 0 };
    let (mut ours, theirs) = pair()?;
    let (from, mut to) = pair()?;
    thread::scope(|scope| {
        let sent =
            scope.spawn(|| transfer::export(&storage, &asked, OwnedFd::from(theirs), &mut |_| {}, &|| true));
        let mut first = vec![0; EXPORT_HEAD_LEN + DATA_AT as usize];
        if let Err(error) = ours.read_exact(&mut first) {
            drop(ours);
            let told = sent.join().map_err(|_| ApiError::internal("a thread of a resume has panicked"))?;
            return Err(told.err().unwrap_or_else(|| unreadable(vdi, error)));
        }
        let (export, first) = first.split_at(EXPORT_HEAD_LEN);
        let room = export.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let head = MemoryHead::decode(first, room).map_err(|why| unreadable(vdi, why))?;
        let passed = scope.spawn(move || deliver(&mut ours, &mut to, &head));
        let loaded = driver.load(vm, OwnedFd::from(from));
        let passed = passed.join().map_err(|_| ApiError::internal("a thread of a resume has panicked"))?;
        // All was read that counts: the rest of the VDI is not waited for.
        let sent = sent.join().map_err(|_| ApiError::internal("a thread of a resume has panicked"))?;
        match (passed, loaded, sent) {
            (Ok(false), ..) => {
                Err(unreadable(vdi, "its data are not those that were written: it is damaged"))
            }
            (Ok(true), loaded, _) => loaded,
            (Err(_), Err(error), _) => Err(error),
            (Err(_), Ok(()), Err(error)) => Err(error),
            (Err(error), Ok(()), Ok(_)) => Err(unreadable(vdi, error)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_as_it_was_written_and_nothing_else_is_one() {
        let head = MemoryHead { len: 77, digest: [5; 32] };
        let bytes = head.encode();
        assert_eq!(MemoryHead::decode(&bytes, 1 << 20), Ok(head));
        assert!(MemoryHead::decode(&[0; 4096], 1 << 20).unwrap_err().contains("no head"));
        assert!(MemoryHead::decode(&bytes[..50], 1 << 20).is_err());
        assert!(MemoryHead::decode(&bytes, DATA_AT + 76).unwrap_err().contains("77 bytes"));
        let mut later = bytes;
        later[8] = 2;
        assert!(MemoryHead::decode(&later, 1 << 20).unwrap_err().contains("version 2"));
    }

    #[test]
    fn what_comes_in_pieces_is_passed_on_in_sectors() {
        let mut out = Vec::new();
        let head = collect(&b"abc"[..], &mut out).unwrap();
        assert_eq!((head.len, head.digest), (3, Sha256::digest(b"abc").into()));
        assert_eq!(out.len(), 12 + SECTOR_LEN);
        assert_eq!((&out[..12], &out[12..16]), (&[0, 16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0][..], &b"abc\0"[..]));
        let mut out = Vec::new();
        let long = vec![9; PIECE_LEN + 5];
        assert_eq!(collect(&long[..], &mut out).unwrap().len, long.len() as u64);
        assert_eq!(out.len(), 2 * 12 + PIECE_LEN + SECTOR_LEN);
    }

    #[test]
    fn data_that_changed_are_seen() {
        let digest = Sha256::digest(b"memory").into();
        let head = MemoryHead { len: 6, digest };
        let mut out = Vec::new();
        assert!(deliver(&mut &b"memory and more"[..], &mut out, &head).unwrap());
        assert_eq!(out, b"memory");
        assert!(!deliver(&mut &b"memorx"[..], &mut Vec::new(), &head).unwrap());
        assert!(deliver(&mut &b"mem"[..], &mut Vec::new(), &head).is_err());
    }
}
