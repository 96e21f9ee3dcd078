//! What a hostile guest can put into a ring, one case after the other, then at random.

use proptest::prelude::*;

use super::super::chain::{DESC_F_WRITE, Fault};
use super::super::memory::tests::memfd;
use super::super::memory::{GuestMemory, Region};
use super::super::message::{RegionSpec, RingAddresses};
use super::*;

const MEMORY_LEN: u64 = 0x1_0000;
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000;
const SIZE: u16 = 16;
const AVAIL_AT: u64 = 0x1000;
const USED_AT: u64 = 0x2000;
const TABLE_AT: u64 = 0x3000;
const DATA_AT: u64 = 0x4000;

struct Guest {
    memory: GuestMemory,
    ring: SplitRing,
}

const ADDRESSES: RingAddresses =
    RingAddresses { flags: 0, desc: USER, used: USER + USED_AT, avail: USER + AVAIL_AT, log: 0 };

fn guest() -> Guest {
    let spec = RegionSpec { guest: GUEST, len: MEMORY_LEN, user: USER, offset: 0 };
    let memory = GuestMemory::empty().with(Region::map(spec, &memfd(MEMORY_LEN)).unwrap()).unwrap();
    let ring = SplitRing::new(&memory, SIZE, &ADDRESSES).unwrap();
    Guest { memory, ring }
}

fn desc(at: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { at, len, flags, next }
}

impl Guest {
    fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.memory.contiguous(GUEST + offset, bytes.len() as u64).unwrap();
        // SAFETY: inside the region, which this test alone uses.
        unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn put(&self, table: u64, list: &[Descriptor]) {
        for (index, descriptor) in list.iter().enumerate() {
            self.write(table + 16 * index as u64, &descriptor.to_bytes());
        }
    }

    fn walk(&self, list: &[Descriptor]) -> (Result<(), RingError>, Chain) {
        self.put(0, list);
        let mut chain = Chain::default();
        (self.ring.walk(&self.memory, 0, true, &mut chain), chain)
    }

    fn refused(&self, list: &[Descriptor]) -> RingError {
        self.walk(list).0.unwrap_err()
    }

    fn fault(&self, list: &[Descriptor]) -> Option<Fault> {
        let (walked, chain) = self.walk(list);
        walked.unwrap();
        chain.fault
    }
}

const NEXT: u16 = DESC_F_NEXT;
const WRITE: u16 = DESC_F_WRITE;
const INDIRECT: u16 = DESC_F_INDIRECT;

#[test]
fn a_plain_request_is_taken_apart() {
    let data = GUEST + DATA_AT;
    let (walked, chain) = guest().walk(&[
        desc(data, 16, NEXT, 1),
        desc(data + 512, 512, NEXT | WRITE, 2),
        desc(data + 4096, 1, WRITE, 0),
    ]);
    walked.unwrap();
    assert_eq!((chain.pieces.len(), chain.readable), (3, 1));
    assert_eq!((chain.readable_len, chain.writable_len), (16, 513));
    assert_eq!(chain.status_at, Some(data + 4096));
    assert_eq!(chain.fault, None);
}

#[test]
fn the_same_request_in_an_indirect_table() {
    let guest = guest();
    let data = GUEST + DATA_AT;
    guest.put(
        TABLE_AT,
        &[
            desc(data, 16, NEXT, 2),
            desc(0, 0, 0, 0),
            desc(data + 512, 512, NEXT | WRITE, 3),
            desc(data, 1, WRITE, 0),
        ],
    );
    let (walked, chain) = guest.walk(&[desc(GUEST + TABLE_AT, 64, INDIRECT, 0)]);
    walked.unwrap();
    assert_eq!((chain.pieces.len(), chain.readable, chain.writable_len), (3, 1, 513));
}

#[test]
fn an_indirect_table_may_follow_direct_descriptors() {
    let guest = guest();
    let data = GUEST + DATA_AT;
    guest.put(TABLE_AT, &[desc(data, 1, WRITE, 0)]);
    let (walked, chain) = guest.walk(&[desc(data, 16, NEXT, 1), desc(GUEST + TABLE_AT, 16, INDIRECT, 0)]);
    walked.unwrap();
    assert_eq!((chain.pieces.len(), chain.status_at), (2, Some(data)));
}

#[test]
fn chains_that_run_in_a_circle_end() {
    let data = GUEST + DATA_AT;
    assert_eq!(guest().refused(&[desc(data, 16, NEXT, 0)]), RingError::ChainLength);
    let circle = [desc(data, 16, NEXT, 1), desc(data, 16, NEXT, 0)];
    assert_eq!(guest().refused(&circle), RingError::ChainLength);
    let guest = guest();
    guest.put(TABLE_AT, &circle);
    assert_eq!(guest.refused(&[desc(GUEST + TABLE_AT, 32, INDIRECT, 0)]), RingError::ChainLength);
}

#[test]
fn successors_and_heads_outside_the_table_are_refused() {
    let guest = guest();
    let data = GUEST + DATA_AT;
    assert_eq!(guest.refused(&[desc(data, 16, NEXT, SIZE)]), RingError::Next(SIZE));
    assert_eq!(guest.refused(&[desc(data, 16, NEXT, u16::MAX)]), RingError::Next(u16::MAX));
    let mut chain = Chain::default();
    assert_eq!(guest.ring.walk(&guest.memory, SIZE, true, &mut chain), Err(RingError::Head(SIZE)));
    guest.put(TABLE_AT, &[desc(data, 16, NEXT, 1)]);
    assert_eq!(guest.refused(&[desc(GUEST + TABLE_AT, 16, INDIRECT, 0)]), RingError::Next(1));
}

#[test]
fn indirect_tables_have_whole_descriptors_and_not_too_many() {
    let guest = guest();
    let table = GUEST + TABLE_AT;
    for len in [0, 1, 15, 17, 31, u32::MAX, 16 * (CHAIN_MAX as u32 + 1)] {
        assert_eq!(guest.refused(&[desc(table, len, INDIRECT, 0)]), RingError::IndirectLen(len));
    }
    let segments = 16 * 65535;
    assert_eq!(guest.refused(&[desc(table, segments, INDIRECT, 0)]), RingError::IndirectLen(segments));
}

#[test]
fn indirect_tables_lie_in_memory() {
    let guest = guest();
    for at in [0, GUEST - 16, GUEST + MEMORY_LEN, u64::MAX - 15, u64::MAX] {
        assert_eq!(guest.refused(&[desc(at, 16, INDIRECT, 0)]), RingError::IndirectOutside(at));
    }
    // Half inside: what is inside is read, what is outside is refused.
    let last = GUEST + MEMORY_LEN - 16;
    guest.put(MEMORY_LEN - 16, &[desc(GUEST + DATA_AT, 16, NEXT, 1)]);
    assert_eq!(guest.refused(&[desc(last, 32, INDIRECT, 0)]), RingError::IndirectOutside(last));
}

#[test]
fn indirect_inside_indirect_and_indirect_with_a_successor_are_refused() {
    let guest = guest();
    guest.put(TABLE_AT, &[desc(GUEST + TABLE_AT, 16, INDIRECT, 0)]);
    assert_eq!(guest.refused(&[desc(GUEST + TABLE_AT, 16, INDIRECT, 0)]), RingError::IndirectNested);
    guest.put(TABLE_AT, &[desc(GUEST + DATA_AT, 16, 0, 0)]);
    assert_eq!(guest.refused(&[desc(GUEST + TABLE_AT, 16, INDIRECT | NEXT, 1)]), RingError::IndirectNested);
}

#[test]
fn indirect_tables_need_negotiation() {
    let guest = guest();
    guest.put(0, &[desc(GUEST + TABLE_AT, 16, INDIRECT, 0)]);
    let mut chain = Chain::default();
    assert_eq!(guest.ring.walk(&guest.memory, 0, false, &mut chain), Err(RingError::IndirectRefused));
}

#[test]
fn buffers_outside_memory_are_faults_that_can_be_answered() {
    let data = GUEST + DATA_AT;
    let outside =
        [(0, 16), (GUEST - 1, 2), (GUEST + MEMORY_LEN - 1, 2), (u64::MAX, 1), (u64::MAX - 3, u32::MAX)];
    for (at, len) in outside {
        let list = [desc(at, len, NEXT, 1), desc(data, 1, WRITE, 0)];
        assert_eq!(guest().fault(&list), Some(Fault::Outside { at, len }));
        let (_, chain) = guest().walk(&list);
        assert_eq!(chain.status_at, Some(data), "the status byte is found all the same");
    }
    let (walked, chain) = guest().walk(&[desc(u64::MAX, 2, WRITE, 0)]);
    assert_eq!((walked, chain.status_at), (Ok(()), None));
}

#[test]
fn what_the_device_reads_comes_before_what_it_writes() {
    let data = GUEST + DATA_AT;
    assert_eq!(guest().fault(&[desc(data, 16, NEXT | WRITE, 1), desc(data, 16, 0, 0)]), Some(Fault::Order));
}

#[test]
fn descriptors_without_bytes_are_passed_over() {
    let data = GUEST + DATA_AT;
    let (walked, chain) = guest().walk(&[
        desc(data, 16, NEXT, 1),
        desc(u64::MAX, 0, NEXT, 2),
        desc(data, 0, NEXT | WRITE, 3),
        desc(data + 1, 1, NEXT | WRITE, 4),
        desc(0, 0, WRITE, 0),
    ]);
    walked.unwrap();
    assert_eq!((chain.pieces.len(), chain.status_at, chain.fault), (2, Some(data + 1), None));
    let (walked, chain) = guest().walk(&[desc(data, 0, WRITE, 0)]);
    assert_eq!((walked, chain.status_at, chain.pieces.len()), (Ok(()), None, 0));
}

#[test]
fn lengths_add_up_without_overflow() {
    let data = GUEST + DATA_AT;
    let list: Vec<_> = (0..SIZE)
        .map(|index| desc(data, u32::MAX, WRITE | if index + 1 < SIZE { NEXT } else { 0 }, index + 1))
        .collect();
    let (walked, chain) = guest().walk(&list);
    walked.unwrap();
    assert_eq!(chain.writable_len, u64::from(u32::MAX) * u64::from(SIZE));
    assert!(chain.fault.is_some());
}

#[test]
fn rings_lie_in_memory_and_are_aligned() {
    let guest = guest();
    let new = |size, change: &dyn Fn(&mut RingAddresses)| {
        let mut addresses = ADDRESSES;
        change(&mut addresses);
        SplitRing::new(&guest.memory, size, &addresses).err()
    };
    assert_eq!(new(SIZE, &|_| ()), None);
    assert_eq!(new(SIZE, &|at| at.used = USER + MEMORY_LEN - 64), Some(RingError::Outside("used ring")));
    assert_eq!(new(SIZE, &|at| at.used = 0), Some(RingError::Outside("used ring")));
    assert_eq!(new(SIZE, &|at| at.avail = u64::MAX - 1), Some(RingError::Outside("available ring")));
    assert_eq!(
        new(SIZE, &|at| at.desc = USER + MEMORY_LEN - 16),
        Some(RingError::Outside("descriptor table"))
    );
    assert_eq!(new(SIZE, &|at| at.desc += 8), Some(RingError::Misaligned("descriptor table")));
    assert_eq!(new(SIZE, &|at| at.avail += 1), Some(RingError::Misaligned("available ring")));
    assert_eq!(new(SIZE, &|at| at.used += 2), Some(RingError::Misaligned("used ring")));
    assert_eq!(new(0, &|_| ()), Some(RingError::Size(0)));
    assert_eq!(new(24, &|_| ()), Some(RingError::Size(24)));
    assert!(new(32768, &|_| ()).is_some());
}

#[test]
fn indices_wrap_and_events_are_seen_once() {
    assert!(need_event(0, 1, 0));
    assert!(!need_event(1, 1, 0));
    assert!(need_event(u16::MAX, 0, u16::MAX));
    assert!(!need_event(5, 5, 3));
    assert!(need_event(4, 5, 3));
    let guest = guest();
    guest.write(AVAIL_AT + 2, &7u16.to_le_bytes());
    guest.write(AVAIL_AT + 4 + 2 * 3, &9u16.to_le_bytes());
    assert_eq!(guest.ring.avail_index(), 7);
    assert_eq!(guest.ring.avail_head(SIZE + 3), 9);
    guest.ring.put_used(SIZE + 2, 5, 77);
    guest.ring.publish_used(3);
    let mut entry = [0; 8];
    assert!(guest.memory.read(GUEST + USED_AT + 4 + 8 * 2, &mut entry));
    assert_eq!(entry, [5, 0, 0, 0, 77, 0, 0, 0]);
    assert_eq!(guest.ring.used_index(), 3);
}

#[test]
fn interrupts_and_kicks_follow_the_flags_or_the_event_index() {
    let guest = guest();
    assert!(guest.ring.wants_interrupt(false, 0, 1));
    guest.write(AVAIL_AT, &1u16.to_le_bytes());
    assert!(!guest.ring.wants_interrupt(false, 0, 1));
    let event_at = AVAIL_AT + 4 + 2 * u64::from(SIZE);
    guest.write(event_at, &5u16.to_le_bytes());
    assert!(!guest.ring.wants_interrupt(true, 0, 5));
    assert!(guest.ring.wants_interrupt(true, 5, 6));
    guest.ring.disable_kicks(false);
    let mut flags = [0; 2];
    assert!(guest.memory.read(GUEST + USED_AT, &mut flags));
    assert_eq!(flags, [1, 0]);
    guest.ring.enable_kicks(true, 11);
    assert!(guest.memory.read(GUEST + USED_AT, &mut flags));
    assert_eq!(flags, [0, 0]);
    assert!(guest.memory.read(GUEST + USED_AT + 4 + 8 * u64::from(SIZE), &mut flags));
    assert_eq!(flags, [11, 0]);
}

fn any_descriptor() -> impl Strategy<Value = Descriptor> {
    let at = prop_oneof![
        8 => GUEST..GUEST + MEMORY_LEN,
        2 => (GUEST - 64)..GUEST + 64,
        2 => (GUEST + MEMORY_LEN - 64)..(GUEST + MEMORY_LEN + 64),
        1 => any::<u64>(),
    ];
    let len =
        prop_oneof![4 => 0u32..64, 4 => 0u32..8192, 1 => any::<u32>(), 2 => (0u32..70).prop_map(|n| n * 16)];
    let flags = prop_oneof![6 => 0u16..4, 1 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0..SIZE, 1 => any::<u16>()];
    (at, len, flags, next).prop_map(|(at, len, flags, next)| desc(at, len, flags, next))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever a table holds: the walk ends, and every piece lies inside guest memory.
    #[test]
    fn random_tables_never_lead_outside(
        table in prop::collection::vec(any_descriptor(), usize::from(SIZE)),
        indirect in prop::collection::vec(any_descriptor(), 8),
        head in 0..SIZE,
        serial in any::<[u8; 20]>(),
    ) {
        let guest = guest();
        guest.put(0, &table);
        guest.put(TABLE_AT, &indirect);
        let base = guest.memory.contiguous(GUEST, MEMORY_LEN).unwrap() as usize;
        let mut chain = Chain::default();
        if guest.ring.walk(&guest.memory, head, true, &mut chain).is_err() {
            return Ok(());
        }
        let check = |chain: &Chain| {
            for piece in &chain.pieces {
                let start = piece.iov_base as usize;
                assert!(start >= base && start + piece.iov_len <= base + MEMORY_LEN as usize);
                assert!(piece.iov_len > 0);
            }
        };
        check(&chain);
        let answerable = chain.status_at.and_then(|at| guest.memory.contiguous(at, 1)).is_some();
        if chain.fault.is_none() {
            let sum = |pieces: &[libc::iovec]| pieces.iter().map(|piece| piece.iov_len as u64).sum::<u64>();
            assert_eq!(sum(&chain.pieces[..chain.readable]), chain.readable_len);
            assert_eq!(sum(&chain.pieces[chain.readable..]), chain.writable_len);
            assert_eq!(answerable, chain.writable_len > 0);
            if answerable {
                let mut found = Vec::new();
                let plan = super::super::blk::plan(&mut chain, u64::MAX, &serial, &mut found);
                use super::super::blk::Plan;
                if let Plan::Read { span, first, count } | Plan::Write { span, first, count } = plan {
                    assert_eq!(sum(&chain.pieces[first..first + count]), span.len);
                }
                let left = Chain { pieces: chain.pieces.iter().copied().filter(|p| p.iov_len > 0).collect(), ..chain };
                check(&left);
            }
        }
    }
}
