//! What a hostile guest can put into a packed ring, one case after the other, then at random.

use proptest::prelude::*;

use super::super::chain::Fault;
use super::super::memory::Region;
use super::super::memory::tests::memfd;
use super::super::message::RegionSpec;
use super::*;

const MEMORY_LEN: u64 = 0x1_0000;
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000;
const SIZE: u16 = 16;
const DRIVER_AT: u64 = 0x1000;
const DEVICE_AT: u64 = 0x2000;
const TABLE_AT: u64 = 0x3000;
const DATA: u64 = GUEST + 0x4000;

const ADDRESSES: RingAddresses =
    RingAddresses { flags: 0, desc: USER, used: USER + DEVICE_AT, avail: USER + DRIVER_AT, log: 0 };

struct Guest {
    memory: GuestMemory,
    ring: PackedRing,
}

fn guest() -> Guest {
    let spec = RegionSpec { guest: GUEST, len: MEMORY_LEN, user: USER, offset: 0 };
    let memory = GuestMemory::empty().with(Region::map(spec, &memfd(MEMORY_LEN)).unwrap()).unwrap();
    let ring = PackedRing::new(&memory, SIZE, &ADDRESSES).unwrap();
    Guest { memory, ring }
}

fn desc(at: u64, len: u32, flags: u16, id: u16) -> Descriptor {
    Descriptor { at, len, flags, next: id }
}

const NEXT: u16 = DESC_F_NEXT;
const WRITE: u16 = DESC_F_WRITE;
const INDIRECT: u16 = DESC_F_INDIRECT;

impl Guest {
    fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.memory.contiguous(GUEST + offset, bytes.len() as u64).unwrap();
        // SAFETY: inside the region, which this test alone uses.
        unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(self.memory.read(GUEST + offset, &mut bytes));
        bytes
    }

    /// A chain from `at` on, around the end of the ring.
    fn put(&self, at: Position, list: &[Descriptor]) {
        let mut place = at;
        for descriptor in list {
            let flags = descriptor.flags | place.available();
            let bytes = Descriptor { flags, ..*descriptor }.to_packed_bytes();
            self.write(16 * u64::from(place.index), &bytes);
            place = place.after(1, SIZE);
        }
    }

    fn walk(&self, at: Position, room: u16, list: &[Descriptor]) -> (Result<(u16, u16), RingError>, Chain) {
        self.put(at, list);
        let mut chain = Chain::default();
        (self.ring.walk(&self.memory, at, room, (true, true), &mut chain), chain)
    }

    fn refused(&self, list: &[Descriptor]) -> RingError {
        self.walk(Position::START, SIZE, list).0.unwrap_err()
    }
}

#[test]
fn a_request_is_taken_apart_at_every_place_of_the_ring() {
    let guest = guest();
    let request = [desc(DATA, 16, NEXT, 0), desc(DATA + 512, 512, NEXT | WRITE, 0), desc(DATA, 1, WRITE, 77)];
    for wrap in [true, false] {
        for index in 0..SIZE {
            let at = Position { index, wrap };
            let (walked, chain) = guest.walk(at, 3, &request);
            assert_eq!(walked, Ok((77, 3)), "the id is that of the last descriptor");
            assert!(guest.ring.is_available(at));
            assert!(!guest.ring.is_available(Position { wrap: !wrap, ..at }));
            assert_eq!((chain.pieces.len(), chain.readable, chain.writable_len), (3, 1, 513));
            assert_eq!((chain.status_at, chain.fault, chain.direct.len()), (Some(DATA), None, 3));
        }
    }
}

#[test]
fn a_table_is_read_from_end_to_end_whatever_its_flags_say() {
    let guest = guest();
    let table = [desc(DATA, 16, 0, 9), desc(DATA + 512, 512, NEXT | WRITE, 9), desc(DATA + 8, 1, WRITE, 9)];
    for (index, descriptor) in table.iter().enumerate() {
        guest.write(TABLE_AT + 16 * index as u64, &descriptor.to_packed_bytes());
    }
    let request = [desc(GUEST + TABLE_AT, 48, INDIRECT, 5)];
    let (walked, chain) = guest.walk(Position::START, SIZE, &request);
    assert_eq!(walked, Ok((5, 1)));
    assert_eq!((chain.pieces.len(), chain.readable, chain.status_at), (3, 1, Some(DATA + 8)));
    let mut chain = Chain::default();
    let refused = guest.ring.walk(&guest.memory, Position::START, SIZE, (false, false), &mut chain);
    assert_eq!(refused, Err(RingError::IndirectRefused));
    // The same from descriptors that were kept.
    walk_kept(&guest.memory, request.into_iter(), true, &mut chain).unwrap();
    assert_eq!(chain.pieces.len(), 3);
}

#[test]
fn malformed_chains_and_tables_are_refused() {
    let guest = guest();
    let table = GUEST + TABLE_AT;
    for len in [0, 1, 15, 17, 31, u32::MAX, 16 * (CHAIN_MAX as u32 + 1)] {
        assert_eq!(guest.refused(&[desc(table, len, INDIRECT, 0)]), RingError::IndirectLen(len));
    }
    for at in [0, GUEST - 16, GUEST + MEMORY_LEN, u64::MAX - 15, u64::MAX] {
        assert_eq!(guest.refused(&[desc(at, 16, INDIRECT, 0)]), RingError::IndirectOutside(at));
    }
    assert_eq!(guest.refused(&[desc(table, 16, INDIRECT | NEXT, 0)]), RingError::IndirectNested);
    guest.write(TABLE_AT, &desc(table, 16, INDIRECT, 0).to_packed_bytes());
    assert_eq!(guest.refused(&[desc(table, 16, INDIRECT, 0)]), RingError::IndirectNested);
    assert_eq!(guest.refused(&[desc(DATA, 1, NEXT, 0); 16]), RingError::ChainLength);
    let short = guest.walk(Position::START, 2, &[desc(DATA, 1, NEXT, 0); 3]).0;
    assert_eq!(short, Err(RingError::Overrun), "more than the ring has room for");
    let none = guest.walk(Position::START, 0, &[desc(DATA, 1, WRITE, 0)]).0;
    assert_eq!(none, Err(RingError::Overrun));
    let (walked, chain) = guest.walk(Position::START, SIZE, &[desc(u64::MAX, 2, WRITE, 0)]);
    assert_eq!((walked, chain.status_at), (Ok((0, 1)), None));
    assert_eq!(chain.fault, Some(Fault::Outside { at: u64::MAX, len: 2 }));
    let endless = std::iter::repeat(desc(DATA, 1, NEXT, 0));
    let mut chain = Chain::default();
    assert_eq!(walk_kept(&guest.memory, endless, true, &mut chain), Err(RingError::ChainLength));
    assert_eq!(walk_kept(&guest.memory, [].into_iter(), true, &mut chain), Err(RingError::ChainLength));
}

#[test]
fn answers_become_visible_with_their_flags() {
    let guest = guest();
    for at in [Position { index: 3, wrap: true }, Position { index: 3, wrap: false }] {
        guest.put(at, &[desc(DATA, 100, 0, 1)]);
        guest.ring.put_used(at, 0x1234, 77);
        assert!(guest.ring.is_available(at));
        guest.ring.publish(at);
        assert!(!guest.ring.is_available(at));
        let got = Descriptor::parse_packed(guest.read(48));
        let used = if at.wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 };
        assert_eq!(got, desc(DATA, 77, WRITE | used, 0x1234));
        guest.ring.mark_available(at);
        assert!(guest.ring.is_available(at));
    }
}

#[test]
fn rings_lie_in_memory_and_are_aligned() {
    let guest = guest();
    let new = |size, change: &dyn Fn(&mut RingAddresses)| {
        let mut addresses = ADDRESSES;
        change(&mut addresses);
        PackedRing::new(&guest.memory, size, &addresses).err()
    };
    for size in [1, 3, 16, 24, 4096] {
        assert_eq!(new(size, &|_| ()), None, "{size}");
    }
    assert_eq!(new(4097, &|_| ()), Some(RingError::Outside("descriptor ring")));
    assert_eq!(new(SIZE, &|at| at.desc += 8), Some(RingError::Misaligned("descriptor ring")));
    assert_eq!(new(SIZE, &|at| at.avail += 2), Some(RingError::Misaligned("driver's event word")));
    assert_eq!(new(SIZE, &|at| at.avail = 0), Some(RingError::Outside("driver's event word")));
    let end = USER + MEMORY_LEN - 2;
    assert_eq!(new(SIZE, &|at| at.used = end), Some(RingError::Outside("device's event word")));
    assert_eq!(new(0, &|_| ()), Some(RingError::Size(0)));
    assert_eq!(new(32769, &|_| ()), Some(RingError::Size(32769)));
}

/// Against counting by hand: an event names one descriptor of the present round or the one before.
#[test]
fn an_event_is_seen_when_its_descriptor_is_passed() {
    for size in [1u16, 5, 8] {
        let place = |count: u32| Position {
            index: (count % u32::from(size)) as u16,
            wrap: (count / u32::from(size)).is_multiple_of(2),
        };
        for from in 0..4 * u32::from(size) {
            for step in 1..=u32::from(size) {
                for event in from.saturating_sub(u32::from(size) - 1)..from + u32::from(size) {
                    let new = from + step;
                    // Names at most one round back, as seen from the new place.
                    if event + u32::from(size) <= new {
                        continue;
                    }
                    let got = packed_need_event(place(event).to_bits(), place(from), place(new), size);
                    assert_eq!(got, (from..new).contains(&event), "{size}: {from} + {step}, event {event}");
                }
            }
        }
    }
}

#[test]
fn interrupts_and_kicks_follow_the_event_words() {
    let guest = guest();
    let word = |flags: u16, at: Position| [at.to_bits().to_le_bytes(), flags.to_le_bytes()].concat();
    let (old, new) = (Position { index: 15, wrap: true }, Position { index: 1, wrap: false });
    assert!(guest.ring.wants_interrupt(old, new));
    guest.write(DRIVER_AT, &word(EVENT_DISABLE, old));
    assert!(!guest.ring.wants_interrupt(old, new));
    guest.write(DRIVER_AT, &word(EVENT_DESC, Position { index: 0, wrap: false }));
    assert!(guest.ring.wants_interrupt(old, new));
    guest.write(DRIVER_AT, &word(EVENT_DESC, new));
    assert!(!guest.ring.wants_interrupt(old, new));
    guest.ring.disable_kicks(false);
    assert_eq!(guest.read(DEVICE_AT), [0, 0, 1, 0]);
    assert!(!guest.ring.enable_kicks(false, new));
    assert_eq!(guest.read(DEVICE_AT), [1, 0, 0, 0], "where does not matter, but that");
    assert!(!guest.ring.enable_kicks(true, Position { index: 2, wrap: true }));
    assert_eq!(guest.read(DEVICE_AT), [2, 0x80, 2, 0]);
    guest.put(new, &[desc(DATA, 1, WRITE, 0)]);
    assert!(guest.ring.enable_kicks(true, new), "the driver was faster");
}

fn any_descriptor() -> impl Strategy<Value = Descriptor> {
    let at = prop_oneof![
        8 => GUEST..GUEST + MEMORY_LEN,
        2 => (GUEST + MEMORY_LEN - 64)..(GUEST + MEMORY_LEN + 64),
        1 => any::<u64>(),
    ];
    let len =
        prop_oneof![4 => 0u32..64, 4 => 0u32..8192, 1 => any::<u32>(), 2 => (0u32..70).prop_map(|n| n * 16)];
    let flags = prop_oneof![6 => 0u16..4, 1 => 0u16..8, 1 => any::<u16>()];
    (at, len, flags, any::<u16>()).prop_map(|(at, len, flags, id)| desc(at, len, flags, id))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever a ring holds: the walk ends, stays within its room, and every piece lies inside guest memory.
    #[test]
    fn random_rings_never_lead_outside(
        table in prop::collection::vec(any_descriptor(), usize::from(SIZE)),
        indirect in prop::collection::vec(any_descriptor(), 8),
        bits in any::<u16>(),
        room in 0..=SIZE,
    ) {
        let guest = guest();
        for (base, list) in [(0, &table), (TABLE_AT, &indirect)] {
            for (index, descriptor) in list.iter().enumerate() {
                guest.write(base + 16 * index as u64, &descriptor.to_packed_bytes());
            }
        }
        let at = Position { index: bits % SIZE, ..Position::from_bits(bits) };
        let base = guest.memory.contiguous(GUEST, MEMORY_LEN).unwrap() as usize;
        let mut chain = Chain::default();
        let Ok((_, count)) = guest.ring.walk(&guest.memory, at, room, (true, true), &mut chain) else {
            return Ok(());
        };
        assert!(count <= room && usize::from(count) == chain.direct.len());
        for piece in &chain.pieces {
            let start = piece.iov_base as usize;
            assert!(start >= base && start + piece.iov_len <= base + MEMORY_LEN as usize && piece.iov_len > 0);
        }
        assert_eq!(at.after(count, SIZE).before(count, SIZE), at);
    }
}
