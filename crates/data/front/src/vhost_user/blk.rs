//! The block device: features, configuration space, and what a request asks for.
//!
//! Numbers and layouts: virtio 1.2, section 5.2 "Block Device". Pure functions; the memory of a request comes in as a
//! [`Chain`] whose pieces were checked.

use tapio_block::{DiskError, Geometry};
use tapio_types::{SECTOR_LEN, Span};

use super::chain::Chain;
use super::memory::copy_out;

/// Feature bits of the device and of the transport.
#[allow(missing_docs)]
pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Of vhost: what we write is logged.
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Of vhost-user: there are protocol features.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Data segments of one request that we announce: with header and status they fit a queue of 128.
pub const SEG_MAX: u32 = 126;
/// Ranges in one discard or write-zeroes request.
pub const RANGES_MAX: usize = 32;
/// Sectors of one such range: 2 GiB.
pub const RANGE_SECTORS_MAX: u32 = 1 << 22;
/// Bytes of our configuration space.
pub const CONFIG_LEN: usize = 60;
/// Where the write-back byte is in it: the one byte that a driver may write.
pub const CONFIG_WRITEBACK: u32 = 32;
/// Bytes of the identity that `GET_ID` gives.
pub const SERIAL_LEN: usize = 20;

const HEADER_LEN: u64 = 16;
const RANGE_LEN: u64 = 16;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;

/// What a request's status byte says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Failed, or made no sense.
    IoError = 1,
    /// Not something that this device does.
    Unsupported = 2,
}

impl From<Result<(), DiskError>> for Status {
    fn from(result: Result<(), DiskError>) -> Self {
        match result {
            Ok(()) => Self::Ok,
            Err(DiskError::Unsupported) => Self::Unsupported,
            Err(_) => Self::IoError,
        }
    }
}

/// What we offer for a disk.
pub fn features(read_only: bool, queues: u16) -> u64 {
    let mut bits = feature::VERSION_1
        | feature::RING_PACKED
        | feature::LOG_ALL
        | feature::INDIRECT_DESC
        | feature::EVENT_IDX
        | feature::PROTOCOL_FEATURES
        | feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::TOPOLOGY
        | feature::FLUSH
        | feature::CONFIG_WCE;
    if queues > 1 {
        bits |= feature::MQ;
    }
    bits | if read_only { feature::RO } else { feature::DISCARD | feature::WRITE_ZEROES }
}

/// The configuration space (`struct virtio_blk_config`, little endian).
pub fn config_space(geometry: &Geometry, queues: u16, writeback: bool) -> [u8; CONFIG_LEN] {
    let mut space = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    let block_len = geometry.logical_block_len.max(SECTOR_LEN as u32);
    let physical_exp = (geometry.physical_block_len / block_len).max(1).ilog2();
    put(0, &(geometry.len / SECTOR_LEN).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &block_len.to_le_bytes());
    put(24, &[physical_exp as u8]);
    // min_io_size: one logical block.
    put(26, &1u16.to_le_bytes());
    put(CONFIG_WRITEBACK as usize, &[u8::from(writeback)]);
    put(34, &queues.to_le_bytes());
    put(36, &RANGE_SECTORS_MAX.to_le_bytes());
    put(40, &(RANGES_MAX as u32).to_le_bytes());
    put(44, &((geometry.physical_block_len / SECTOR_LEN as u32).max(1)).to_le_bytes());
    put(48, &RANGE_SECTORS_MAX.to_le_bytes());
    put(52, &(RANGES_MAX as u32).to_le_bytes());
    put(56, &[1]);
    space
}

/// One range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Range {
    /// Bytes of the disk.
    pub span: Span,
    /// Its space may be given back.
    pub unmap: bool,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Fill the pieces `first .. first + count` from `span`.
    Read { span: Span, first: usize, count: usize },
    /// Write them to `span`.
    Write { span: Span, first: usize, count: usize },
    /// Make everything durable.
    Flush,
    /// Forget the ranges that were found.
    Discard,
    /// Make the ranges that were found read as zero.
    WriteZeroes,
    /// Answered without the disk; `written` bytes were put into the request's memory.
    Answer { status: Status, written: u32 },
}

impl Plan {
    const fn answer(status: Status) -> Self {
        Self::Answer { status, written: 0 }
    }
}

/// Reads a request's header and says what it asks for.
///
/// Cuts the header and the status byte off the chain's pieces, so that what stays is data. The chain has a status
/// byte and no fault. `negotiated` are the feature bits in force; the ranges of a discard are put into `found`, which
/// keeps its memory from request to request.
pub fn plan(chain: &mut Chain, negotiated: u64, serial: &[u8; SERIAL_LEN], found: &mut Vec<Range>) -> Plan {
    let mut header = [0; HEADER_LEN as usize];
    let Some(first) = take_front(chain, &mut header) else { return Plan::answer(Status::IoError) };
    let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let sector = u64::from_le_bytes(*header.last_chunk().expect("16 bytes end with 8"));
    cut_status(chain);
    let (readable, end) = (chain.readable, chain.pieces.len());
    let data_in = chain.writable_len - 1;
    let data_out = chain.readable_len - HEADER_LEN;
    match kind {
        TYPE_IN => match span(sector, data_in) {
            Some(span) if span.len > 0 => Plan::Read { span, first: readable, count: end - readable },
            _ => Plan::answer(Status::IoError),
        },
        TYPE_OUT => match span(sector, data_out) {
            Some(span) if span.len > 0 => Plan::Write { span, first, count: readable - first },
            _ => Plan::answer(Status::IoError),
        },
        TYPE_FLUSH => Plan::Flush,
        TYPE_GET_ID => {
            let written = put_serial(&chain.pieces[readable..end], serial);
            Plan::Answer { status: Status::Ok, written }
        }
        TYPE_DISCARD if negotiated & feature::DISCARD != 0 => {
            ranges(chain, first, data_out, false, found).map_or_else(Plan::answer, |()| Plan::Discard)
        }
        TYPE_WRITE_ZEROES if negotiated & feature::WRITE_ZEROES != 0 => {
            ranges(chain, first, data_out, true, found).map_or_else(Plan::answer, |()| Plan::WriteZeroes)
        }
        _ => Plan::answer(Status::Unsupported),
    }
}

fn span(sector: u64, len: u64) -> Option<Span> {
    let start = sector.checked_mul(SECTOR_LEN)?;
    start.checked_add(len)?;
    Some(Span::new(start, len))
}

/// Copies the first bytes of the readable part out and cuts them off; gives the first piece that is left.
fn take_front(chain: &mut Chain, into: &mut [u8]) -> Option<usize> {
    if chain.readable_len < into.len() as u64 {
        return None;
    }
    let (mut done, mut index) = (0, 0);
    while done < into.len() {
        let piece = chain.pieces.get_mut(index).filter(|_| index < chain.readable)?;
        let len = piece.iov_len.min(into.len() - done);
        // SAFETY: every piece of a chain lies inside guest memory.
        unsafe { copy_out(piece.iov_base.cast(), &mut into[done..done + len]) };
        piece.iov_base = piece.iov_base.wrapping_byte_add(len);
        piece.iov_len -= len;
        done += len;
        index += usize::from(piece.iov_len == 0);
    }
    Some(index)
}

/// Cuts the last byte for writing, the status, off the pieces.
fn cut_status(chain: &mut Chain) {
    if chain.pieces.len() > chain.readable
        && let Some(last) = chain.pieces.last_mut()
    {
        last.iov_len -= 1;
        if last.iov_len == 0 {
            chain.pieces.pop();
        }
    }
}

fn put_serial(pieces: &[libc::iovec], serial: &[u8; SERIAL_LEN]) -> u32 {
    let mut done = 0;
    for piece in pieces {
        let len = piece.iov_len.min(SERIAL_LEN - done);
        // SAFETY: every piece of a chain lies inside guest memory; nothing else of ours refers to it.
        unsafe { piece.iov_base.cast::<u8>().copy_from(serial[done..done + len].as_ptr(), len) };
        done += len;
    }
    done as u32
}

/// The ranges of a discard (`zeroes` false) or write-zeroes request (virtio 1.2, 5.2.6.2).
fn ranges(chain: &Chain, first: usize, len: u64, zeroes: bool, found: &mut Vec<Range>) -> Result<(), Status> {
    found.clear();
    let count = len / RANGE_LEN;
    if count == 0 || !len.is_multiple_of(RANGE_LEN) || count > RANGES_MAX as u64 {
        return Err(Status::IoError);
    }
    let mut bytes = [0; RANGES_MAX * RANGE_LEN as usize];
    let mut done = 0;
    for piece in &chain.pieces[first..chain.readable] {
        // SAFETY: every piece lies inside guest memory; together they have `len` bytes, which fit the array.
        unsafe { copy_out(piece.iov_base.cast(), &mut bytes[done..done + piece.iov_len]) };
        done += piece.iov_len;
    }
    for bytes in bytes[..len as usize].as_chunks::<16>().0 {
        let word = u128::from_le_bytes(*bytes);
        let (sector, sectors, flags) = (word as u64, (word >> 64) as u32, (word >> 96) as u32);
        // Unknown flags, and the unmap flag where it has no meaning, are not an error but something we do not do.
        if flags & !1 != 0 || (!zeroes && flags != 0) {
            return Err(Status::Unsupported);
        }
        if sectors > RANGE_SECTORS_MAX {
            return Err(Status::IoError);
        }
        let span = span(sector, u64::from(sectors) * SECTOR_LEN).ok_or(Status::IoError)?;
        found.push(Range { span, unmap: flags & 1 != 0 });
    }
    Ok(())
}

/// The identity as the guest reads it: cut or filled with zero bytes.
pub fn serial_bytes(serial: &str) -> [u8; SERIAL_LEN] {
    let mut bytes = [0; SERIAL_LEN];
    for (place, byte) in bytes.iter_mut().zip(serial.bytes()) {
        *place = byte;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = feature::DISCARD | feature::WRITE_ZEROES;

    /// A chain over memory of this test: pieces to read, then pieces to write.
    fn chain(readable: &mut [Vec<u8>], writable: &mut [Vec<u8>]) -> Chain {
        let piece =
            |bytes: &mut Vec<u8>| libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let len = |parts: &[Vec<u8>]| parts.iter().map(|part| part.len() as u64).sum();
        Chain {
            readable: readable.len(),
            readable_len: len(readable),
            writable_len: len(writable),
            status_at: Some(0),
            fault: None,
            direct: Vec::new(),
            pieces: readable.iter_mut().chain(writable.iter_mut()).map(piece).collect(),
        }
    }

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        bytes
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend_from_slice(&sectors.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes
    }

    fn run(readable: &mut [Vec<u8>], writable: &mut [Vec<u8>]) -> Plan {
        plan(&mut chain(readable, writable), ALL, &serial_bytes("serial"), &mut Vec::new())
    }

    #[test]
    fn a_read_names_its_data_without_header_and_status() {
        let (mut out, mut into) = ([header(TYPE_IN, 8)], [vec![0; 512], vec![0; 513]]);
        let mut chain = chain(&mut out, &mut into);
        let got = plan(&mut chain, ALL, &[0; 20], &mut Vec::new());
        assert_eq!(got, Plan::Read { span: Span::new(4096, 1024), first: 1, count: 2 });
        assert_eq!(chain.pieces[2].iov_len, 512);
    }

    #[test]
    fn a_header_may_be_split_at_every_byte_and_followed_by_data_at_once() {
        for cut in 1..16 {
            let mut bytes = header(TYPE_OUT, 3);
            let mut rest = bytes.split_off(cut);
            rest.extend_from_slice(&[9; 512]);
            let (mut out, mut into) = ([bytes, rest], [vec![0; 1]]);
            let mut chain = chain(&mut out, &mut into);
            let got = plan(&mut chain, ALL, &[0; 20], &mut Vec::new());
            assert_eq!(got, Plan::Write { span: Span::new(3 * 512, 512), first: 1, count: 1 });
            assert_eq!(chain.pieces[1].iov_len, 512);
            // SAFETY: the piece lies in `out`.
            assert_eq!(unsafe { chain.pieces[1].iov_base.cast::<u8>().read() }, 9);
            assert_eq!(chain.pieces.len(), 2);
        }
    }

    #[test]
    fn short_headers_and_sectors_that_overflow_fail() {
        let failed = Plan::answer(Status::IoError);
        assert_eq!(run(&mut [vec![0; 15]], &mut [vec![0; 513]]), failed);
        assert_eq!(run(&mut [], &mut [vec![0; 513]]), failed);
        assert_eq!(run(&mut [header(TYPE_IN, u64::MAX)], &mut [vec![0; 513]]), failed);
        assert_eq!(run(&mut [header(TYPE_IN, u64::MAX / 512)], &mut [vec![0; 1025]]), failed);
        assert_eq!(run(&mut [header(TYPE_IN, 0)], &mut [vec![0; 1]]), failed);
        assert_eq!(run(&mut [header(TYPE_OUT, 0)], &mut [vec![0; 1]]), failed);
    }

    #[test]
    fn the_identity_is_filled_with_zeroes_and_cut_to_the_buffer() {
        let mut into = [vec![1; 8], vec![1; 13]];
        let got = run(&mut [header(TYPE_GET_ID, 0)], &mut into);
        assert_eq!(got, Plan::Answer { status: Status::Ok, written: 20 });
        assert_eq!(into[0], *b"serial\0\0");
        assert_eq!(into[1][..12], [0; 12]);
        assert_eq!(into[1][12], 1, "the status byte is not part of the identity");
        let mut small = [vec![1; 5]];
        let got = run(&mut [header(TYPE_GET_ID, 0)], &mut small);
        assert_eq!(got, Plan::Answer { status: Status::Ok, written: 4 });
        assert_eq!(small[0], *b"seri\x01");
        let mut large = [vec![1; 64]];
        run(&mut [header(TYPE_GET_ID, 0)], &mut large);
        assert_eq!(large[0][20], 1, "what lies behind the identity stays");
    }

    #[test]
    fn discards_come_as_ranges() {
        let mut body = range(8, 16, 0);
        body.extend(range(64, 1, 0));
        let (mut out, mut into, mut found) = ([header(TYPE_DISCARD, 0), body], [vec![0]], Vec::new());
        assert_eq!(plan(&mut chain(&mut out, &mut into), ALL, &[0; 20], &mut found), Plan::Discard);
        let want = [Span::new(4096, 8192), Span::new(64 * 512, 512)];
        assert_eq!(found.iter().map(|range| range.span).collect::<Vec<_>>(), want);
    }

    #[test]
    fn ranges_that_make_no_sense_are_refused_with_the_status_that_virtio_asks_for() {
        let status = |kind, body: Vec<u8>| run(&mut [header(kind, 0), body], &mut [vec![0]]);
        let unsupported = Plan::answer(Status::Unsupported);
        let failed = Plan::answer(Status::IoError);
        assert_eq!(status(TYPE_DISCARD, range(0, 8, 1)), unsupported);
        assert_eq!(status(TYPE_WRITE_ZEROES, range(0, 8, 2)), unsupported);
        assert_eq!(status(TYPE_WRITE_ZEROES, range(0, RANGE_SECTORS_MAX + 1, 0)), failed);
        assert_eq!(status(TYPE_WRITE_ZEROES, range(u64::MAX, 1, 0)), failed);
        assert_eq!(status(TYPE_WRITE_ZEROES, vec![0; 15]), failed);
        assert_eq!(status(TYPE_WRITE_ZEROES, vec![0; 17]), failed);
        assert_eq!(status(TYPE_WRITE_ZEROES, Vec::new()), failed);
        assert_eq!(status(TYPE_WRITE_ZEROES, vec![0; 16 * (RANGES_MAX + 1)]), failed);
        assert!(matches!(status(TYPE_WRITE_ZEROES, vec![0; 16 * RANGES_MAX]), Plan::WriteZeroes));
    }

    #[test]
    fn what_was_not_negotiated_or_does_not_exist_is_unsupported() {
        let unsupported = Plan::answer(Status::Unsupported);
        for kind in [2, 10, 14, 0x8000_0000, u32::MAX] {
            assert_eq!(run(&mut [header(kind, 0)], &mut [vec![0; 20]]), unsupported);
        }
        let (mut out, mut into) = ([header(TYPE_DISCARD, 0), range(0, 8, 0)], [vec![0]]);
        assert_eq!(plan(&mut chain(&mut out, &mut into), 0, &[0; 20], &mut Vec::new()), unsupported);
    }

    #[test]
    fn the_configuration_space_follows_the_geometry() {
        let geometry = Geometry {
            len: 10 << 20,
            logical_block_len: 512,
            physical_block_len: 4096,
            read_only: false,
            transfer_max: 1 << 20,
        };
        let space = config_space(&geometry, 3, true);
        assert_eq!(space[..8], 20480u64.to_le_bytes());
        assert_eq!(space[20..24], 512u32.to_le_bytes());
        assert_eq!(space[24], 3);
        assert_eq!(space[32], 1);
        assert_eq!(space[34..36], 3u16.to_le_bytes());
        assert_eq!(space[44..48], 8u32.to_le_bytes());
        // The length stays in units of 512 bytes.
        let space = config_space(&Geometry { logical_block_len: 4096, ..geometry }, 3, true);
        assert_eq!(space[..8], 20480u64.to_le_bytes());
        assert_eq!(space[20..24], 4096u32.to_le_bytes());
        assert_eq!(space[24], 0);
        assert_eq!(space[44..48], 8u32.to_le_bytes());
    }
}
