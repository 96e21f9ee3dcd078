//! The memory of a guest in a VDI, its memory image.
//!
//! ```text
//! byte 0      "TapioMem", version (4 bytes), 0 (4), bytes that follow (8), their SHA-256 (32): all little endian
//! byte 64     what the VM must be made as, a word of its driver's, and zeros to byte 128: none in older images
//! byte 128    the places of its network interfaces, a bit each (8): none in older images
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
/// Bytes of the head that are there in every image.
const HEAD_LEN: usize = 56;
/// The place of the machine type, and its longest name.
const MACHINE_AT: usize = 64;
const MACHINE_LEN_MAX: usize = 64;
/// The place of the network interfaces.
const VIFS_AT: usize = 128;
/// What the storage puts in front of an export.
const EXPORT_HEAD_LEN: usize = 16;
/// What the storage writes is whole sectors.
const SECTOR_LEN: usize = 512;
/// Bytes that are passed on at a time.
const PIECE_LEN: usize = 256 << 10;

/// The head of a memory image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryHead {
    /// Bytes that the driver wrote.
    pub len: u64,
    /// Their SHA-256.
    pub digest: [u8; 32],
    /// What the VM must be made as, in the words of its driver; empty: as its platform says.
    pub machine: String,
    /// The places of its network interfaces: bit N is VIF N.
    pub vifs: u64,
}

/// Whether it can stand for a machine type in the head and on a command line.
fn is_machine(name: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
    name.len() <= MACHINE_LEN_MAX && name.iter().all(is_plain) && name.first() != Some(&b'-')
}

impl MemoryHead {
    /// As it lies in the image.
    pub fn encode(&self) -> [u8; SECTOR_LEN] {
        let mut bytes = [0; SECTOR_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..HEAD_LEN].copy_from_slice(&self.digest);
        // A longer one is refused before it comes here.
        let machine = self.machine.as_bytes();
        let machine = &machine[..machine.len().min(MACHINE_LEN_MAX)];
        bytes[MACHINE_AT..MACHINE_AT + machine.len()].copy_from_slice(machine);
        bytes[VIFS_AT..VIFS_AT + 8].copy_from_slice(&self.vifs.to_le_bytes());
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
        let machine = bytes.get(MACHINE_AT..MACHINE_AT + MACHINE_LEN_MAX).unwrap_or_default();
        let end = machine.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
        if !is_machine(&machine[..end]) {
            return Err("its head names no machine type that there could be".to_owned());
        }
        let machine = String::from_utf8_lossy(&machine[..end]).into_owned();
        let vifs =
            bytes.get(VIFS_AT..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Ok(Self { len, digest, machine, vifs })
    }

    /// The places of its network interfaces.
    pub fn places(&self) -> impl Iterator<Item = u8> {
        let vifs = self.vifs;
        (0..64).filter(move |place| vifs >> place & 1 == 1)
    }
}

/// Whether these bytes are the begin of a memory image that was written to its end.
pub(super) fn is_memory(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
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
fn collect(mut from: impl Read, to: &mut impl Write, machine: &str, vifs: u64) -> io::Result<MemoryHead> {
    let (mut hash, mut len) = (Sha256::new(), 0);
    let mut piece = Vec::with_capacity(PIECE_LEN);
    loop {
        piece.clear();
        let count = from.by_ref().take(PIECE_LEN as u64).read_to_end(&mut piece)?;
        if count == 0 {
            let machine = machine.to_owned();
            return Ok(MemoryHead { len, digest: hash.finalize().into(), machine, vifs });
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
    let machine = driver.saved_as(vm)?;
    if !is_machine(machine.as_bytes()) {
        return Err(ApiError::internal(format!(
            "VM {vm} has the machine type {machine:?}, which cannot be kept"
        )));
    }
    let vifs =
        driver.vifs(vm)?.into_keys().filter(|place| *place < 64).fold(0, |bits, place| bits | 1 << place);
    let (mut ours, theirs) = pair()?;
    let (from, to) = pair()?;
    let is_cancelled = || call.progress.is_cancelled();
    thread::scope(|scope| {
        let stored = scope.spawn(|| transfer::import(&storage, &asked, OwnedFd::from(theirs), &mut |_| {}));
        let passed = scope.spawn(move || {
            let head = collect(from, &mut ours, &machine, vifs)?;
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

/// Sends the image of a VDI, raw, for as long as it is read.
fn export(call: &Call, vdi: &str, to: UnixStream) -> Result<(), ApiError> {
    let asked = Asked::Export { vdi: vdi.to_owned(), base: None, format: ImageFormat::Raw, start: 0 };
    transfer::export(&lookup::to_storage(call), &asked, OwnedFd::from(to), &mut |_| {}, &|| true).map(drop)
}

/// The head of an image whose export begins; none if the export ends before it, of which the export knows the cause.
fn read_head(from: &mut UnixStream, vdi: &str) -> Option<Result<MemoryHead, ApiError>> {
    let mut first = vec![0; EXPORT_HEAD_LEN + DATA_AT as usize];
    from.read_exact(&mut first).ok()?;
    let (export, first) = first.split_at(EXPORT_HEAD_LEN);
    let room = export.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    Some(MemoryHead::decode(first, room).map_err(|why| unreadable(vdi, why)))
}

/// Why there was no head: what the thread of the export says.
fn no_head(vdi: &str, sent: thread::Result<Result<(), ApiError>>) -> ApiError {
    match sent {
        Ok(Err(error)) => error,
        Ok(Ok(())) => unreadable(vdi, "it is shorter than its head"),
        Err(_) => ApiError::internal("a thread of a resume has panicked"),
    }
}

/// What the head of a memory image says.
///
/// # Errors
/// `SUSPEND_IMAGE_NOT_ACCESSIBLE` for an image that is damaged or none; those of an export of the VDI.
pub(super) fn head(call: &Call, vdi: &str) -> Result<MemoryHead, ApiError> {
    let (mut ours, theirs) = pair()?;
    thread::scope(|scope| {
        let sent = scope.spawn(|| export(call, vdi, theirs));
        let head = read_head(&mut ours, vdi);
        // The rest is not read, at which the export fails.
        drop(ours);
        let sent = sent.join();
        head.unwrap_or_else(|| Err(no_head(vdi, sent)))
    })
}

/// Reads the memory of a VM out of a VDI into the VM, which was made for it and is paused then.
///
/// # Errors
/// `SUSPEND_IMAGE_NOT_ACCESSIBLE` for an image that is damaged or none; the driver's, those of an export of the VDI.
pub(super) fn load(call: &Call, driver: &dyn VmDriver, vm: Uuid, vdi: &str) -> Result<(), ApiError> {
    let (mut ours, theirs) = pair()?;
    let (from, mut to) = pair()?;
    thread::scope(|scope| {
        let sent = scope.spawn(|| export(call, vdi, theirs));
        let Some(head) = read_head(&mut ours, vdi) else {
            drop(ours);
            return Err(no_head(vdi, sent.join()));
        };
        let head = head?;
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
        let head = MemoryHead { len: 77, digest: [5; 32], machine: "pc-i440fx-7.2".into(), vifs: 0b101 };
        let bytes = head.encode();
        assert_eq!(head.places().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(MemoryHead::decode(&bytes, 1 << 20), Ok(head));
        // One of an earlier version says nothing there; one that says what no driver could is none.
        let (mut older, mut strange) = (bytes, bytes);
        older[MACHINE_AT..].fill(0);
        let older = MemoryHead::decode(&older, 1 << 20).unwrap();
        assert_eq!((older.machine.as_str(), older.places().count()), ("", 0));
        for name in [&b"pc,accel=kvm"[..], b"-nodefaults", b"pc\0pc", b"pc i440fx"] {
            strange[MACHINE_AT..].fill(0);
            strange[MACHINE_AT..MACHINE_AT + name.len()].copy_from_slice(name);
            assert!(MemoryHead::decode(&strange, 1 << 20).unwrap_err().contains("machine type"), "{name:?}");
        }
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
        let head = collect(&b"abc"[..], &mut out, "pc", 0).unwrap();
        assert_eq!((head.len, head.digest), (3, Sha256::digest(b"abc").into()));
        assert_eq!(out.len(), 12 + SECTOR_LEN);
        assert_eq!((&out[..12], &out[12..16]), (&[0, 16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0][..], &b"abc\0"[..]));
        let mut out = Vec::new();
        let long = vec![9; PIECE_LEN + 5];
        assert_eq!(collect(&long[..], &mut out, "", 0).unwrap().len, long.len() as u64);
        assert_eq!(out.len(), 2 * 12 + PIECE_LEN + SECTOR_LEN);
    }

    #[test]
    fn data_that_changed_are_seen() {
        let digest = Sha256::digest(b"memory").into();
        let head = MemoryHead { len: 6, digest, machine: String::new(), vifs: 0 };
        let mut out = Vec::new();
        assert!(deliver(&mut &b"memory and more"[..], &mut out, &head).unwrap());
        assert_eq!(out, b"memory");
        assert!(!deliver(&mut &b"memorx"[..], &mut Vec::new(), &head).unwrap());
        assert!(deliver(&mut &b"mem"[..], &mut Vec::new(), &head).is_err());
    }
}
