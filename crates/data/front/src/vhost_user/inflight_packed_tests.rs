//! What a killed process leaves behind, at every step where it can be killed, and what this code never wrote.

use super::super::inflight::InflightRegion;
use super::super::memory::tests::memfd;
use super::super::memory::{GuestMemory, Region};
use super::super::message::{RegionSpec, RingAddresses};
use super::super::packed::{DESC_F_AVAIL, DESC_F_USED};
use super::*;

const SIZE: u16 = 8;
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000;

struct Rig {
    memory: GuestMemory,
    ring: PackedRing,
    region: InflightRegion,
    file: std::fs::File,
    len: usize,
}

fn rig() -> Rig {
    let spec = RegionSpec { guest: GUEST, len: 0x3000, user: USER, offset: 0 };
    let memory = GuestMemory::empty().with(Region::map(spec, &memfd(0x3000)).unwrap()).unwrap();
    let addresses = RingAddresses { flags: 0, desc: USER, used: USER + 0x1000, avail: USER + 0x2000, log: 0 };
    let ring = PackedRing::new(&memory, SIZE, &addresses).unwrap();
    let (spec, file) = InflightRegion::create(1, SIZE).unwrap();
    let region = InflightRegion::map(spec, &file).unwrap();
    Rig { memory, ring, region, file: file.into(), len: spec.len as usize }
}

const START: (Position, Position) = (Position::START, Position::START);

impl Rig {
    fn part(&self) -> PackedInflight {
        self.region.packed(0, SIZE).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        std::os::unix::fs::FileExt::read_exact_at(&self.file, &mut bytes, 0).unwrap();
        bytes
    }

    fn put_bytes(&self, bytes: &[u8]) {
        std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, 0).unwrap();
    }

    /// The driver makes a descriptor available.
    fn available(&self, at: Position) {
        let flags = if at.wrap { DESC_F_AVAIL } else { DESC_F_USED };
        let to = self.memory.contiguous(GUEST + 16 * u64::from(at.index) + 14, 2).unwrap();
        // SAFETY: inside the region, which this test alone uses.
        unsafe { to.copy_from(flags.to_le_bytes().as_ptr(), 2) };
    }
}

fn chain(id: u16, count: u16) -> Vec<Descriptor> {
    (0..count)
        .map(|step| Descriptor { at: u64::from(id) << 16, len: step.into(), flags: 1, next: id })
        .collect()
}

fn ids(part: &PackedInflight, marks: &[u16]) -> Vec<(u16, u16)> {
    marks
        .iter()
        .map(|mark| {
            let list: Vec<_> = part.descriptors(*mark).collect();
            let id = list[0].next;
            assert_eq!(list, chain(id, list.len() as u16));
            (id, list.len() as u16)
        })
        .collect()
}

#[test]
fn a_part_that_was_never_used_begins_where_the_front_end_says() {
    let rig = rig();
    let said = (Position { index: 5, wrap: false }, Position { index: 3, wrap: false });
    let left = rig.part().recover(&rig.ring, said);
    let want = PackedRecovered { marks: vec![], next_avail: said.0, next_used: said.1, outstanding: 0 };
    assert_eq!(left, want);
    // And stays there, whatever the front end says the next time.
    let again = rig.part().recover(&rig.ring, START);
    assert_eq!((again.next_avail, again.next_used), (said.1, said.1));
}

#[test]
fn what_has_no_answer_comes_back_whole_and_in_order() {
    let rig = rig();
    let mut part = rig.part();
    part.recover(&rig.ring, START);
    let marks: Vec<u16> =
        [(7, 2), (9, 1), (4, 3), (1, 1)].map(|(id, count)| part.begin(&chain(id, count)).unwrap()).to_vec();
    for index in 0..7 {
        rig.available(Position { index, wrap: true });
    }
    // The second is answered: one descriptor.
    let used = Position { index: 1, wrap: true };
    part.batch(&marks[1..2], used);
    rig.ring.publish(Position::START);
    part.published(&marks[1..2], used);
    let mut next = rig.part();
    let left = next.recover(&rig.ring, START);
    assert_eq!(ids(&next, &left.marks), [(7, 2), (4, 3), (1, 1)]);
    assert_eq!((left.next_used, left.outstanding), (used, 6));
    assert_eq!(left.next_avail, Position { index: 7, wrap: true });
    // The counters go on, and what was answered is free again.
    let mark = next.begin(&chain(3, 2)).unwrap();
    assert_eq!(next.begin(&chain(5, 1)), None, "nothing is left");
    let mut third = rig.part();
    let left = third.recover(&rig.ring, START);
    assert_eq!(ids(&third, &left.marks), [(7, 2), (4, 3), (1, 1), (3, 2)]);
    assert_eq!(left.next_avail, Position { index: 1, wrap: false }, "the whole ring is in flight");
    assert_eq!(left.outstanding, 8);
    assert!(third.count(mark) == 2);
}

/// A process is killed between any two stores: each byte that changes is one moment, in the order of the stores.
#[test]
fn a_process_killed_at_any_store_loses_no_request_and_answers_none_twice() {
    let stages = |stage: usize| {
        let rig = rig();
        let mut part = rig.part();
        part.recover(&rig.ring, START);
        let a = part.begin(&chain(1, 2)).unwrap();
        let b = part.begin(&chain(2, 1)).unwrap();
        let c = part.begin(&chain(3, 3)).unwrap();
        for index in 0..6 {
            rig.available(Position { index, wrap: true });
        }
        let used = Position { index: 4, wrap: true };
        // c and b are answered in one batch: at 0 and at 3.
        if stage >= 1 {
            rig.ring.publish(Position { index: 3, wrap: true });
        }
        if stage >= 2 {
            part.batch(&[c, b], used);
        }
        if stage >= 3 {
            rig.ring.publish(Position::START);
        }
        if stage >= 4 {
            part.published(&[c, b], used);
        }
        (rig, a)
    };
    for stage in 0..=4 {
        let (rig, _) = stages(stage);
        let mut next = rig.part();
        let left = next.recover(&rig.ring, START);
        if stage < 3 {
            assert_eq!(ids(&next, &left.marks), [(1, 2), (2, 1), (3, 3)], "stage {stage}");
            assert_eq!((left.next_used, left.outstanding), (Position::START, 6));
            // The second answer of the batch, which the driver has not seen, is gone from the ring.
            assert!(rig.ring.is_available(Position { index: 3, wrap: true }), "stage {stage}");
        } else {
            assert_eq!(ids(&next, &left.marks), [(1, 2)], "stage {stage}");
            assert_eq!((left.next_used, left.outstanding), (Position { index: 4, wrap: true }, 2));
        }
    }
    // Between the stores of one stage: every mixture in which the later bytes are still old.
    for stage in 1..=4 {
        let before = stages(stage - 1).0.bytes();
        let (rig, _) = stages(stage);
        let after = rig.bytes();
        let fields = [AT_FREE_HEAD, AT_USED_INDEX, AT_USED_WRAP];
        let olds = [AT_OLD_FREE_HEAD, AT_OLD_USED_INDEX, AT_OLD_USED_WRAP];
        let entries: Vec<usize> = (HEADER_LEN as usize..after.len()).step_by(2).collect();
        let order: Vec<usize> = entries.into_iter().chain(fields).chain(olds).collect();
        for cut in 0..=order.len() {
            let mut mixed = after.clone();
            for at in &order[cut..] {
                let len = if [AT_USED_WRAP, AT_OLD_USED_WRAP].contains(at) { 1 } else { 2 };
                mixed[*at..*at + len].copy_from_slice(&before[*at..*at + len]);
            }
            let (rig, _) = stages(stage);
            rig.put_bytes(&mixed);
            let mut next = rig.part();
            let left = next.recover(&rig.ring, START);
            let seen = stage >= 3;
            let want: &[(u16, u16)] = if seen { &[(1, 2)] } else { &[(1, 2), (2, 1), (3, 3)] };
            assert_eq!(ids(&next, &left.marks), want, "stage {stage}, cut {cut}");
            assert_eq!(left.outstanding, want.iter().map(|(_, count)| count).sum());
            // The part works on: everything that is free can be taken.
            let room = SIZE - left.outstanding;
            assert!(next.begin(&chain(20, room)).is_some() && next.begin(&chain(21, 1)).is_none());
        }
    }
}

#[test]
fn a_whole_ring_may_be_answered_in_one_batch() {
    for published in [false, true] {
        let rig = rig();
        let mut part = rig.part();
        part.recover(&rig.ring, START);
        let marks: Vec<u16> = (0..SIZE).map(|id| part.begin(&chain(id, 1)).unwrap()).collect();
        assert_eq!(part.begin(&chain(9, 1)), None);
        (0..SIZE).for_each(|index| rig.available(Position { index, wrap: true }));
        let used = Position { index: 0, wrap: false };
        part.batch(&marks, used);
        (1..SIZE).for_each(|index| rig.ring.publish(Position { index, wrap: true }));
        if published {
            rig.ring.publish(Position::START);
        }
        let left = rig.part().recover(&rig.ring, START);
        assert_eq!(left.marks.len(), if published { 0 } else { 8 });
        assert_eq!(left.next_used, if published { used } else { Position::START });
        assert_eq!(left.next_avail, used);
    }
}

#[test]
fn a_request_that_was_put_back_is_free_again() {
    let rig = rig();
    let mut part = rig.part();
    part.recover(&rig.ring, START);
    let first = part.begin(&chain(1, 3)).unwrap();
    let second = part.begin(&chain(2, 4)).unwrap();
    part.forget(second);
    let left = rig.part().recover(&rig.ring, START);
    assert_eq!((left.marks, left.outstanding), (vec![first], 3));
    assert_eq!(part.begin(&chain(2, 5)), Some(second));
}

#[test]
fn a_scribbled_part_is_survived() {
    let mut state = 7u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u8
    };
    for round in 0..3000 {
        let rig = rig();
        let mut part = rig.part();
        part.recover(&rig.ring, START);
        part.begin(&chain(1, 3)).unwrap();
        part.begin(&chain(2, 2)).unwrap();
        let mut bytes = rig.bytes();
        for _ in 0..1 + round % 40 {
            let at = 12 + (usize::from(random()) | usize::from(random()) << 8) % (rig.len - 12);
            bytes[at] = if round % 2 == 0 { random() } else { random() % 10 };
        }
        rig.put_bytes(&bytes);
        let mut next = rig.part();
        let left = next.recover(&rig.ring, START);
        assert!(left.outstanding <= SIZE && left.next_avail.index < SIZE && left.next_used.index < SIZE);
        let total: u16 = left.marks.iter().map(|mark| next.descriptors(*mark).count() as u16).sum();
        assert_eq!(total, left.outstanding);
        let room = SIZE - left.outstanding;
        assert_eq!(next.begin(&chain(3, room)).is_some(), room > 0 || left.outstanding == SIZE);
        assert!(next.begin(&chain(4, 1)).is_none());
        let again = rig.part().recover(&rig.ring, START);
        assert!(again.outstanding <= SIZE);
    }
}

#[test]
fn the_leavings_of_a_split_queue_are_not_taken_for_ours_nor_ours_for_its() {
    let (spec, file) = InflightRegion::create(1, SIZE).unwrap();
    let region = InflightRegion::map(spec, &file).unwrap();
    let mut split = region.queue(0, SIZE).unwrap();
    split.recover(0, 0);
    split.begin(3);
    let rig = rig();
    let mut packed = region.packed(0, SIZE).unwrap();
    // A split part has no mark of its own: what it says is checked like anything else that is foreign.
    assert!(packed.recover(&rig.ring, START).outstanding <= SIZE);
    packed.begin(&chain(1, 2)).unwrap();
    assert_eq!(region.queue(0, SIZE).unwrap().recover(4, 5).heads, Vec::<u16>::new());
}
