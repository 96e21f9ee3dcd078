//! What a guest writes: rings in shared memory, and the requests that are found in them.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use tapio_front::vhost_user::foreign::{
    CHAIN_MAX, Chain, GuestMemory, InflightPart, InflightRegion, Plan, Position, Range, Region, Ring,
    RingAddresses, RingSetup, SERIAL_LEN, SplitRing, plan,
};
use tapio_front::vhost_user::{RANGES_MAX, RegionSpec, feature};

use super::session::memfd;
use super::take;

/// Guest memory is two regions with a hole between them, so that descriptors can cross a border and fall into nothing.
pub const REGION_LEN: u64 = 16 << 10;
/// Where the guest sees the first region.
pub const GUEST: u64 = 0x10_0000;
/// Where it sees the second: right behind the first in its addresses, elsewhere in the file.
pub const GUEST_SECOND: u64 = GUEST + REGION_LEN;
const USER: u64 = 0x7000_0000;
/// Where the available ring is in memory.
pub const AVAIL_AT: usize = 0x1000;
/// Where the used ring is in memory.
pub const USED_AT: usize = 0x1800;

/// The memory that one thread uses for all its inputs: mapping is dear.
struct Rig {
    memory: GuestMemory,
    base: *mut u8,
    second: *mut u8,
}

impl Rig {
    fn new() -> Self {
        let file: OwnedFd = memfd(2 * REGION_LEN);
        let first = RegionSpec { guest: GUEST, len: REGION_LEN, user: USER, offset: 0 };
        let second = RegionSpec {
            guest: GUEST_SECOND,
            len: REGION_LEN,
            user: USER + 2 * REGION_LEN,
            offset: REGION_LEN,
        };
        let map = |spec| Region::map(spec, &file).expect("memory is mapped");
        let memory = GuestMemory::empty().with(map(first)).and_then(|memory| memory.with(map(second)));
        let memory = memory.expect("two regions");
        let find = |at| memory.contiguous(at, REGION_LEN).expect("a whole region");
        let (base, second) = (find(GUEST), find(GUEST_SECOND));
        Self { memory, base, second }
    }

    fn fill(&self, bytes: &[u8]) {
        for (index, to) in [self.base, self.second].into_iter().enumerate() {
            let part = bytes.get(index * REGION_LEN as usize..).unwrap_or_default();
            let len = part.len().min(REGION_LEN as usize);
            // SAFETY: both pointers are the beginnings of regions of this length, which this thread alone uses.
            unsafe {
                to.copy_from(part.as_ptr(), len);
                to.add(len).write_bytes(0, REGION_LEN as usize - len);
            }
        }
    }

    fn holds(&self, piece: &libc::iovec) -> bool {
        let start = piece.iov_base.addr();
        [self.base, self.second].iter().any(|base| {
            let base = base.addr();
            start >= base && start + piece.iov_len <= base + REGION_LEN as usize
        })
    }
}

thread_local! {
    static RIG: Rig = Rig::new();
}

/// A queue in guest memory: a byte for its size, one for features, then the memory's content.
pub fn vring(bytes: &[u8]) {
    let mut rest = bytes;
    let [size, flags] = take::<2>(&mut rest);
    let size = 1u16 << (size % 8);
    RIG.with(|rig| {
        rig.fill(rest);
        let addresses = RingAddresses {
            flags: 0,
            desc: USER,
            used: USER + USED_AT as u64,
            avail: USER + AVAIL_AT as u64,
            log: 0,
        };
        let ring = SplitRing::new(&rig.memory, size, &addresses).expect("the ring lies in memory");
        let negotiated = if flags & 2 == 0 { feature::DISCARD | feature::WRITE_ZEROES } else { 0 };
        let mut chain = Chain::default();
        let mut ranges = Vec::new();
        // The heads that the driver made available, wherever its index stands, and every descriptor as a head.
        let available = (0..size).map(|index| ring.avail_head(index));
        for head in available.chain(0..size).collect::<Vec<_>>() {
            if ring.walk(&rig.memory, head, flags & 1 == 0, &mut chain).is_err() {
                continue;
            }
            examine(rig, &mut chain, negotiated, &mut ranges);
            ring.put_used(head, head, 1);
        }
        let index = ring.avail_index();
        ring.publish_used(index);
        assert_eq!(ring.used_index(), index);
        let _ = (ring.wants_interrupt(flags & 4 != 0, 0, index), ring.enable_kicks(flags & 4 != 0, index));
        ring.disable_kicks(flags & 4 != 0);
    });
}

/// Descriptors of the largest packed ring that is tried.
const PACKED_SIZE_MAX: u8 = 64;
/// Requests of one input that are taken.
const TAKEN_MAX: usize = 256;

/// A packed queue: a byte for its size, one for features, four for where it is read on; where the features ask for an
/// in-flight region, its content; then the memory's content. Everything that can be taken is taken and answered, some
/// at once, some in the opposite order, as a queue does it.
pub fn packed_vring(bytes: &[u8]) {
    let mut rest = bytes;
    let [size, flags] = take::<2>(&mut rest);
    let base = u32::from_le_bytes(take::<4>(&mut rest));
    let size = u16::from(size % PACKED_SIZE_MAX) + 1;
    let inflight = (flags & 8 != 0).then(|| {
        let (spec, file) = InflightRegion::create(1, size).expect("a region is made");
        let (content, tail) = rest.split_at((spec.len as usize).min(rest.len()));
        rest = tail;
        let region = InflightRegion::map(spec, &file).expect("a region is mapped");
        File::from(file).write_all_at(content, 0).expect("room");
        InflightPart::Packed(region.packed(0, size).expect("the region has a part for this queue"))
    });
    RIG.with(|rig| {
        rig.fill(rest);
        let addresses = RingAddresses {
            flags: 0,
            desc: USER,
            used: USER + USED_AT as u64,
            avail: USER + AVAIL_AT as u64,
            log: 0,
        };
        let ring = Ring::new(RingSetup {
            memory: &rig.memory,
            size,
            addresses: &addresses,
            base,
            event_index: flags & 4 != 0,
            indirect: flags & 1 == 0,
            packed: true,
            inflight,
        });
        match ring {
            Ok((ring, marks)) => use_packed(rig, ring, &marks, size, flags),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}

fn use_packed(rig: &Rig, mut ring: Ring, marks: &[u16], size: u16, flags: u8) {
    assert!(marks.len() <= usize::from(size));
    let negotiated = if flags & 2 == 0 { feature::DISCARD | feature::WRITE_ZEROES } else { 0 };
    let (mut chain, mut ranges, mut open) = (Chain::default(), Vec::new(), Vec::new());
    let mut again = marks.iter().copied();
    for turn in 0..TAKEN_MAX {
        let mark = again.next();
        if mark.is_none() && !ring.has_next() {
            break;
        }
        let found = match mark {
            Some(mark) => ring.find_again(mark, &rig.memory, &mut chain),
            None => ring.find(&rig.memory, &mut chain),
        };
        let mut ticket = match found {
            Ok(ticket) => ticket,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                break;
            }
        };
        assert!((1..=size).contains(&ticket.count));
        ring.take(&mut ticket, mark.is_none(), &chain).expect("what was found fits the in-flight region");
        examine(rig, &mut chain, negotiated, &mut ranges);
        if turn % 5 == 4 {
            // As a queue does that is halted.
            ring.give_back(ticket, mark.is_none());
            break;
        }
        open.push(ticket);
        let taken: u32 = open.iter().map(|ticket| u32::from(ticket.count)).sum();
        assert!(taken <= u32::from(size), "more descriptors in use than there are");
        if turn % 3 == 2 {
            open.drain(..).rev().for_each(|ticket| ring.answer(ticket, 1));
            assert!(ring.has_answers());
            let _ = ring.publish();
        }
    }
    open.into_iter().for_each(|ticket| ring.answer(ticket, 1));
    if ring.has_answers() {
        let _ = ring.publish();
    }
    let base = ring.base();
    for bits in [base as u16, (base >> 16) as u16] {
        assert!(Position::from_bits(bits).index < size);
    }
    let _ = (ring.peek(), ring.enable_kicks());
    ring.disable_kicks();
}

fn examine(rig: &Rig, chain: &mut Chain, negotiated: u64, ranges: &mut Vec<Range>) {
    assert!(chain.pieces.len() <= CHAIN_MAX + 256 && chain.readable <= chain.pieces.len());
    let outside = chain.pieces.iter().find(|piece| piece.iov_len == 0 || !rig.holds(piece));
    assert!(outside.is_none(), "a piece outside guest memory");
    if chain.fault.is_some() || chain.status_at.is_none() {
        return;
    }
    let len = |pieces: &[libc::iovec]| pieces.iter().map(|piece| piece.iov_len as u64).sum::<u64>();
    assert_eq!(len(&chain.pieces[..chain.readable]), chain.readable_len);
    assert_eq!(len(&chain.pieces[chain.readable..]), chain.writable_len);
    requested(chain, negotiated, ranges);
    let outside = chain.pieces.iter().find(|piece| !rig.holds(piece));
    assert!(outside.is_none(), "what is left of a piece is outside guest memory");
}

/// What the request asks for must lie in its pieces, and be as long as they are.
fn requested(chain: &mut Chain, negotiated: u64, ranges: &mut Vec<Range>) {
    match plan(chain, negotiated, &[b's'; SERIAL_LEN], ranges) {
        Plan::Read { span, first, count } | Plan::Write { span, first, count } => {
            let pieces = chain.pieces.get(first..first + count).expect("the data's pieces are there");
            let len: u64 = pieces.iter().map(|piece| piece.iov_len as u64).sum();
            assert_eq!(span.len, len, "the data has another length than its pieces");
            assert!(span.len > 0 && span.end().is_some());
        }
        Plan::Discard | Plan::WriteZeroes => {
            assert!(negotiated != 0 && (1..=RANGES_MAX).contains(&ranges.len()));
            assert!(ranges.iter().all(|range| range.span.end().is_some()));
        }
        Plan::Answer { written, .. } => assert!(written as usize <= SERIAL_LEN),
        Plan::Flush => {}
    }
}

/// A request without a ring: a byte for how many pieces are read, one for how many are written, one for features, a
/// byte of length (times 8, plus 1 for the last to be written) for each piece, then the bytes to read.
pub fn virtio_blk(bytes: &[u8]) {
    let mut rest = bytes;
    let [readable, writable, flags] = take::<3>(&mut rest);
    let mut lens = |count: u8| (0..count).map(|_| usize::from(take::<1>(&mut rest)[0])).collect::<Vec<_>>();
    let (read_lens, write_lens) = (lens(readable % 40), lens(writable % 40));
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    for len in read_lens {
        let (head, tail) = rest.split_at(len.min(rest.len()));
        rest = tail;
        let mut piece = head.to_vec();
        piece.resize(len, 0);
        pieces.push(piece);
    }
    pieces.retain(|piece| !piece.is_empty());
    let readable = pieces.len();
    pieces.extend(write_lens.into_iter().filter(|len| *len > 0).map(|len| vec![0xee; len]));
    if pieces.len() == readable {
        // A request without a status byte does not come this far.
        pieces.push(vec![0xee]);
    }
    let sum = |pieces: &[Vec<u8>]| pieces.iter().map(|piece| piece.len() as u64).sum();
    let mut chain = Chain {
        readable,
        readable_len: sum(&pieces[..readable]),
        writable_len: sum(&pieces[readable..]),
        status_at: Some(0),
        fault: None,
        direct: Vec::new(),
        pieces: pieces
            .iter_mut()
            .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() })
            .collect(),
    };
    let negotiated = if flags & 1 == 0 { feature::DISCARD | feature::WRITE_ZEROES } else { 0 };
    requested(&mut chain, negotiated, &mut Vec::new());
    let status = pieces.last().and_then(|piece| piece.last());
    assert_eq!(status, Some(&0xee), "the status byte is not the request's to write here");
}
