//! Requests of a guest of Xen, and rings with what is done on them.

use tapio_xen::GrantRef;
use tapio_xen::blkif::{Abi, DISCARD_SECURE, Request, Segment, op};

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    requests(shelf);
    rings(shelf);
    devices(shelf);
}

fn segment(grant: u32, first: u8, last: u8) -> Segment {
    Segment { grant: GrantRef(grant), first, last }
}

fn requests(shelf: &mut Shelf) {
    let mut direct =
        Request { id: 0x1_0000_0002, sector: 64, segments: 11, op: op::WRITE, ..Request::default() };
    direct.direct = std::array::from_fn(|index| segment(8 + index as u32, 0, 7));
    direct.direct[3] = segment(11, 6, 2);
    direct.direct[4] = segment(12, 0, 8);
    let mut indirect = Request { id: 7, segments: 600, indirect: true, ..Request::default() };
    indirect.grants[..2].copy_from_slice(&[GrantRef(100), GrantRef(101)]);
    let discard = Request {
        op: op::DISCARD,
        sector: 1 << 40,
        discard_sectors: u64::MAX,
        discard_flag: DISCARD_SECURE,
        ..Request::default()
    };
    let flush = Request { op: op::FLUSH_DISKCACHE, id: u64::MAX, ..Request::default() };
    let page: Vec<u8> = (0..64).flat_map(|n| segment(200 + n, n as u8 % 9, 7).encode()).collect();
    for (name, request) in
        [("direct", direct), ("indirect", indirect), ("discard", discard), ("flush", flush)]
    {
        for abi in [Abi::X86_32, Abi::X86_64] {
            let slot = request.encode(3, abi);
            shelf.put("blkif_request", &format!("{name}-{}", abi.word()), [&slot.0[..], &page].concat());
        }
    }
    let mut too_many = Request { op: op::READ, segments: 12, ..Request::default() }.encode(0, Abi::X86_64);
    too_many.0[1] = 255;
    shelf.put("blkif_request", "too-many", too_many.0);
    shelf.put("blkif_request", "unknown", [4; 112]);
}

/// What `blkif_ring` does for a byte.
mod step {
    pub const LOOK: u8 = 0;
    pub const TAKE: u8 = 1;
    pub const PUSH: u8 = 4;
    pub const PUBLISH: u8 = 6;
    pub const ARM: u8 = 7;
    pub const COUNT: u8 = 8;
    pub const RESUME: u8 = 9;
    pub const PUT: u8 = 10;
    pub const SHOW: u8 = 11;
    pub const REAP: u8 = 12;
    pub const WRITE: u8 = 13;
}

fn rings(shelf: &mut Shelf) {
    use step::*;
    let mut put = |name: &str, kind: u8, content: &[u8], steps: &[&[u8]]| {
        let len = (content.len() as u16).to_le_bytes();
        shelf.put("blkif_ring", name, [&[kind][..], &len, content, &steps.concat()].concat());
    };
    const FRESH: u8 = 0x80;
    const SPLIT: u8 = 0x10;
    let go_round: Vec<u8> = [
        PUT, PUT, PUT, SHOW, LOOK, TAKE, TAKE, TAKE, PUSH, PUSH, PUSH, PUBLISH, ARM, SHOW, REAP, REAP, REAP,
        COUNT,
    ]
    .repeat(20);
    for (name, kind) in
        [("x86-32", FRESH), ("x86-64", FRESH | 1), ("order-3", FRESH | 7), ("split", FRESH | SPLIT)]
    {
        put(name, kind, &[], &[&go_round]);
    }
    // A producer that jumps in the midst of things, on each kind of ring.
    let jump = [&[WRITE, 0, 0][..], &u32::MAX.to_le_bytes()].concat();
    let back = [&[WRITE, 0, 0][..], &1u32.to_le_bytes()].concat();
    for (name, kind) in [("jump", FRESH | 1), ("jump-split", FRESH | SPLIT | 0x20)] {
        put(
            name,
            kind,
            &[],
            &[&go_round[..24], &jump, &[LOOK, TAKE, ARM], &back, &[LOOK, TAKE, PUSH, PUBLISH, ARM]],
        );
    }
    // A ring that had been used when our process came, and one that says nonsense.
    let words = [40u32, 41, 30, 31].map(u32::to_le_bytes).concat();
    put("resumed", 1, &words, &[&[RESUME, 4, LOOK, TAKE, TAKE, PUSH, PUSH, PUSH, PUSH, PUBLISH, ARM, COUNT]]);
    put("refused", 1, &words, &[&[RESUME, 11, LOOK, COUNT]]);
    put("nonsense", 3, &[0xEE; 512], &[&[LOOK, TAKE, ARM, COUNT, PUBLISH]]);
}

/// Requests for a device, in each way in which it is served: reads, writes, a barrier, segments in pages of their own.
fn devices(shelf: &mut Shelf) {
    let mut all = Vec::new();
    let with = |op: u8, segments: &[Segment]| {
        let mut request =
            Request { op, segments: segments.len() as u16, id: 9, sector: 64, ..Request::default() };
        request.direct[..segments.len()].copy_from_slice(segments);
        request
    };
    // The numbers of grants are taken modulo those that there are.
    let pages: Vec<Segment> = (0..11).map(|page| segment(page, 0, 7)).collect();
    for op in [op::WRITE, op::READ, op::WRITE_BARRIER] {
        all.push(with(op, &[segment(0, 0, 7), segment(1, 3, 5), segment(2, 7, 7)]));
        all.push(with(op, &pages));
    }
    all.push(with(op::FLUSH_DISKCACHE, &[]));
    all.push(Request { discard_sectors: 16, ..with(op::DISCARD, &[]) });
    for op in [op::WRITE, op::READ] {
        let mut request = Request { indirect: true, segments: 40, ..with(op, &[]) };
        request.grants = [GrantRef(0); 8];
        all.push(request);
    }
    all.push(with(op::READ, &[segment(2, 5, 1)]));
    let tables: Vec<u8> = (0..64).flat_map(|page| segment(8 + page % 8, 0, 7).encode()).collect();
    for flags in [0u8, 1, 2, 3, 4, 8, 16] {
        let abi = if flags & 4 != 0 { Abi::X86_32 } else { Abi::X86_64 };
        let slots = all.iter().flat_map(|request| request.encode(0, abi).0);
        // A page of segments must not begin where a slot of requests is expected: the ring is filled up first.
        let more = (all.len()..32).flat_map(|_| with(op::READ, &[segment(3, 0, 0)]).encode(0, abi).0);
        let input: Vec<u8> =
            [flags].into_iter().chain(slots).chain(more).chain(tables.iter().copied()).collect();
        shelf.put("blkif_backend", &format!("all-{flags}"), input);
    }
}
