//! Rings of both kinds, by both sides.

use super::super::{FrontRing, Request, op, status};
use super::*;
use crate::domain::PAGE_LEN;

/// Memory for rings, aligned to pages.
struct Area(Vec<[u64; 512]>);

impl Area {
    fn new(pages: usize) -> Self {
        Self(vec![[0; 512]; pages + 1])
    }

    fn base(&mut self) -> NonNull<u8> {
        let start = self.0.as_mut_ptr().cast::<u8>();
        NonNull::new(start.wrapping_add(start.align_offset(PAGE_LEN))).unwrap()
    }

    fn len(&self) -> usize {
        (self.0.len() - 1) * PAGE_LEN
    }

    fn word(&mut self, at: usize) -> &std::sync::atomic::AtomicU32 {
        // SAFETY: inside the area, aligned, and only accessed so.
        unsafe { self.base().byte_add(at).cast().as_ref() }
    }
}

fn request(id: u64) -> Request {
    Request { id, op: op::FLUSH_DISKCACHE, ..Request::default() }
}

fn pair(area: &mut Area, abi: Abi, first: u32) -> (FrontRing, BackRing) {
    let (base, len) = (area.base(), area.len());
    // SAFETY: the tests keep the area longer than the rings.
    unsafe {
        (FrontRing::new_at(base, len, abi, first).unwrap(), BackRing::from_raw(base, len, abi).unwrap())
    }
}

fn id_of(slot: &Slot, abi: Abi) -> u64 {
    Request::decode(slot, abi).unwrap().id
}

#[test]
fn rings_have_the_slots_of_the_specification() {
    for (abi, want) in [(Abi::X86_64, [32, 64, 128, 256]), (Abi::X86_32, [32, 64, 128, 256])] {
        for (order, want) in want.into_iter().enumerate() {
            let mut area = Area::new(1 << order);
            assert_eq!(pair(&mut area, abi, 0).1.size(), want, "{abi:?}, order {order}");
        }
    }
    for pages in [0, 3, 16] {
        let mut area = Area::new(pages);
        // SAFETY: no ring is made.
        let error = unsafe { BackRing::from_raw(area.base(), area.len(), Abi::X86_64) }.unwrap_err();
        assert_eq!(error, RingError::Pages { len: pages * PAGE_LEN });
    }
    let mut area = Area::new(1);
    // SAFETY: no ring is made.
    assert!(unsafe { BackRing::from_raw(area.base(), 100, Abi::X86_64) }.is_err());
}

#[test]
fn the_words_lie_where_the_specification_says() {
    let mut area = Area::new(1);
    let (mut front, mut back) = pair(&mut area, Abi::X86_64, 0);
    let words = |area: &mut Area| [0, 4, 8, 12].map(|at| area.word(at).load(Ordering::Relaxed));
    assert_eq!(words(&mut area), [0, 1, 0, 1]);
    assert!(front.put(&request(0x77).encode(0, Abi::X86_64)));
    assert!(front.publish());
    assert_eq!(words(&mut area), [1, 1, 0, 1]);
    // SAFETY: inside the area.
    assert_eq!(unsafe { area.base().as_ptr().add(64).read() }, op::FLUSH_DISKCACHE);
    // SAFETY: inside the area.
    assert_eq!(unsafe { area.base().as_ptr().add(72).read() }, 0x77);
    assert_eq!(back.look(), Ok(1));
    let slot = back.take().unwrap();
    back.push(&Request::decode(&slot, Abi::X86_64).unwrap().response(status::ERROR));
    assert!(back.publish());
    assert_eq!(back.arm(), Ok(false));
    assert_eq!(words(&mut area), [1, 2, 1, 1]);
    // SAFETY: inside the area.
    assert_eq!(unsafe { area.base().as_ptr().add(64).read() }, 0x77);
    assert_eq!(front.look(), Ok(1));
    assert_eq!(front.take().map(|answer| (answer.id, answer.status)), Some((0x77, -1)));
    assert_eq!(front.take(), None);
}

#[test]
fn a_full_ring_goes_round_many_times_across_the_end_of_numbers() {
    for abi in [Abi::X86_32, Abi::X86_64] {
        for order in 0..=3 {
            let mut area = Area::new(1 << order);
            let (mut front, mut back) = pair(&mut area, abi, u32::MAX - 1000);
            let mut id = 0;
            for _ in 0..3000 / back.size() {
                let begin = id;
                while front.put(&request(id).encode(0, abi)) {
                    id += 1;
                }
                assert_eq!(id - begin, u64::from(back.size()));
                let _ = front.publish();
                assert_eq!(back.look(), Ok(back.size()));
                let mut taken: Vec<u64> =
                    std::iter::from_fn(|| back.take()).map(|slot| id_of(&slot, abi)).collect();
                assert_eq!(taken, (begin..id).collect::<Vec<_>>());
                taken.reverse();
                for id in &taken {
                    back.push(&request(*id).response(0));
                }
                let _ = back.publish();
                assert_eq!(front.look(), Ok(back.size()));
                let answered: Vec<u64> =
                    std::iter::from_fn(|| front.take()).map(|answer| answer.id).collect();
                assert_eq!(answered, taken);
            }
        }
    }
}

#[test]
fn a_producer_that_jumps_is_found_at_once() {
    let mut area = Area::new(1);
    for jump in [33u32, 34, 1 << 31, u32::MAX, 3] {
        let (mut front, mut back) = pair(&mut area, Abi::X86_64, 0);
        for id in 0..5 {
            front.put(&request(id).encode(0, Abi::X86_64));
        }
        let _ = front.publish();
        assert_eq!(back.look(), Ok(5));
        (0..5).for_each(|_| assert!(back.take().is_some()));
        area.word(0).store(jump, Ordering::Relaxed);
        assert_eq!(back.look(), Err(RingError::Overrun { req_prod: jump, rsp_prod: 0 }), "{jump}");
        assert!(back.take().is_none());
        assert!(back.arm().is_err());
    }
}

#[test]
fn responses_that_were_not_asked_for_are_found() {
    let mut area = Area::new(1);
    let (mut front, _) = pair(&mut area, Abi::X86_64, 7);
    front.put(&request(1).encode(0, Abi::X86_64));
    area.word(8).store(8, Ordering::Relaxed);
    assert_eq!(front.look(), Err(RingError::Responses { rsp_prod: 8, rsp_cons: 7 }), "not shown yet");
    let _ = front.publish();
    assert_eq!(front.look(), Ok(1));
    for bad in [9, 6, 0] {
        area.word(8).store(bad, Ordering::Relaxed);
        assert!(front.look().is_err(), "{bad}");
    }
}

#[test]
#[should_panic(expected = "a response without a request")]
fn a_response_needs_a_request() {
    let mut area = Area::new(1);
    let (_, mut back) = pair(&mut area, Abi::X86_64, 0);
    back.push(&request(1).response(0));
}

#[test]
fn a_side_that_does_not_arm_is_not_notified() {
    let mut area = Area::new(1);
    let (mut front, mut back) = pair(&mut area, Abi::X86_64, 0);
    let mut notified = 0;
    for id in 0..20 {
        front.put(&request(id).encode(0, Abi::X86_64));
        notified += u32::from(front.publish());
        assert!(back.peek());
        assert_eq!(back.look(), Ok(1));
        assert!(!back.peek());
        back.take();
    }
    assert_eq!(notified, 1, "the first, for which a new ring is armed");
    assert_eq!(back.arm(), Ok(false));
    front.put(&request(20).encode(0, Abi::X86_64));
    assert!(front.publish());
    front.put(&request(21).encode(0, Abi::X86_64));
    assert!(!front.publish(), "one notification is enough");
    back.look().unwrap();
    assert_eq!(back.arm(), Ok(true), "work that was there before");
}

#[test]
fn a_front_end_can_wait_for_several_responses() {
    let mut area = Area::new(1);
    let (mut front, mut back) = pair(&mut area, Abi::X86_64, u32::MAX - 2);
    for id in 0..8 {
        front.put(&request(id).encode(0, Abi::X86_64));
    }
    let _ = front.publish();
    back.look().unwrap();
    while back.take().is_some() {}
    assert_eq!(front.arm(4), Ok(false));
    let notified: Vec<bool> = (0..8)
        .map(|id| {
            back.push(&request(id).response(0));
            back.publish()
        })
        .collect();
    assert_eq!(notified, [false, false, false, true, false, false, false, false]);
    assert_eq!(front.arm(1), Ok(true));
}

#[test]
fn a_back_end_goes_on_where_another_died() {
    let abi = Abi::X86_64;
    let mut area = Area::new(1);
    let (mut front, mut back) = pair(&mut area, abi, 0);
    for id in 0..10 {
        front.put(&request(id).encode(0, abi));
    }
    let _ = front.publish();
    back.look().unwrap();
    (0..6).for_each(|_| assert!(back.take().is_some()));
    back.push(&request(4).response(0));
    let _ = back.publish();
    back.push(&request(5).response(0));
    drop(back);
    // SAFETY: the area outlives the ring.
    let mut back = unsafe { BackRing::from_raw(area.base(), area.len(), abi) }.unwrap();
    assert_eq!(back.resume(10), Err(RingError::Overrun { req_prod: 10, rsp_prod: 1 }));
    back.resume(5).unwrap();
    assert_eq!(back.counters().req_cons, 6);
    assert_eq!(back.look(), Ok(4));
    let ids: Vec<u64> = std::iter::from_fn(|| back.take()).map(|slot| id_of(&slot, abi)).collect();
    assert_eq!(ids, [6, 7, 8, 9], "what was taken before is not read again");
    for id in [0, 1, 2, 3, 5, 6, 7, 8, 9] {
        back.push(&request(id).response(0));
    }
    let _ = back.publish();
    assert_eq!(front.look(), Ok(10));
    let mut answered: Vec<u64> = std::iter::from_fn(|| front.take()).map(|answer| answer.id).collect();
    answered.sort_unstable();
    assert_eq!(answered, (0..10).collect::<Vec<_>>());
}

#[test]
fn a_split_ring_frees_requests_when_they_are_taken() {
    let (mut asked, mut answered) = (Area::new(1), Area::new(1));
    let areas = ((asked.base(), asked.len()), (answered.base(), answered.len()));
    // SAFETY: the areas outlive the rings.
    let (mut front, mut back) = unsafe {
        (FrontRing::new_split(areas.0, areas.1).unwrap(), BackRing::split_from_raw(areas.0, areas.1).unwrap())
    };
    let mut id = 0;
    let mut fill = |front: &mut FrontRing| {
        let begin = id;
        while front.put(&request(id).encode(0, Abi::X86_64)) {
            id += 1;
        }
        let _ = front.publish();
        id - begin
    };
    for want in [32, 32, 32, 32, 0] {
        assert_eq!(fill(&mut front), want, "128 in flight, 32 of them waiting");
        assert_eq!(back.look(), Ok(want as u32));
        while back.take().is_some() {}
    }
    for id in (0..128).rev() {
        back.push(&request(id).response(0));
    }
    assert!(back.publish());
    assert_eq!(front.look(), Ok(128));
    let ids: Vec<u64> = std::iter::from_fn(|| front.take()).map(|answer| answer.id).collect();
    assert_eq!(ids, (0..128).rev().collect::<Vec<_>>());
    assert_eq!(fill(&mut front), 32);
    asked.word(0).store(128 + 33, Ordering::Relaxed);
    assert_eq!(back.look(), Err(RingError::Overrun { req_prod: 161, rsp_prod: 128 }));
    asked.word(64).store(5000, Ordering::Relaxed);
    assert_eq!(front.room(), 0, "a consumer that makes no sense gives no room");
}

#[test]
fn a_split_ring_holds_no_more_than_its_responses() {
    let (mut asked, mut answered) = (Area::new(8), Area::new(1));
    let areas = ((asked.base(), asked.len()), (answered.base(), answered.len()));
    // SAFETY: the areas outlive the rings.
    let (front, mut back) = unsafe {
        (FrontRing::new_split(areas.0, areas.1).unwrap(), BackRing::split_from_raw(areas.0, areas.1).unwrap())
    };
    assert_eq!(front.room(), 128, "256 slots for requests, 128 for responses");
    asked.word(0).store(129, Ordering::Relaxed);
    assert!(back.look().is_err());
}
