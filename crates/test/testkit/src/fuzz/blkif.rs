//! What a guest of Xen writes: requests, and the words of its rings while they are used.

use std::ptr::NonNull;

use tapio_xen::blkif::{
    Abi, BackRing, DIRECT_SEGMENTS_MAX, FrontRing, INDIRECT_PAGES_MAX, INDIRECT_PER_PAGE,
    INDIRECT_SEGMENTS_MAX, REQUEST_LEN_MAX, Request, Response, SEGMENT_LEN, Segment, Slot, op,
};
use tapio_xen::domain::PAGE_LEN;

use super::take;

const ABIS: [Abi; 2] = [Abi::X86_32, Abi::X86_64];

/// The bytes of a request, read in both layouts; what follows is pages of segments.
pub fn blkif_request(bytes: &[u8]) {
    let mut rest = bytes;
    let slot = Slot(take::<REQUEST_LEN_MAX>(&mut rest));
    for abi in ABIS {
        match Request::decode(&slot, abi) {
            Ok(request) => examine(&request, &slot, abi),
            Err(malformed) => {
                let response = malformed.response();
                assert!(response.status < 0 && response.id == malformed.id && response.op == slot.0[0]);
                assert_eq!(Response::decode(&response.encode()), response);
            }
        }
    }
    // In pages a guest's segments are aligned; an input's may lie anywhere.
    let words: Vec<u64> = rest.chunks_exact(SEGMENT_LEN).map(word).collect();
    let mut segments = vec![Segment::default(); words.len().min(INDIRECT_SEGMENTS_MAX)];
    // SAFETY: there are at least as many words, and they are aligned.
    unsafe { Segment::copy_from_page(words.as_ptr().cast(), &mut segments) };
    segments.iter().for_each(check_span);
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes.try_into().unwrap_or_default())
}

fn check_span(segment: &Segment) {
    if let Some((offset, len)) = segment.span() {
        assert!(len >= 512 && usize::from(offset) + usize::from(len) <= PAGE_LEN, "{segment:?}");
        assert!(offset.is_multiple_of(512) && len.is_multiple_of(512));
    } else {
        assert!(segment.last > 7 || segment.first > segment.last, "{segment:?} lies inside its page");
    }
}

fn examine(request: &Request, slot: &Slot, abi: Abi) {
    assert!(matches!(request.op, 0..=3 | 5), "{request:?}");
    let segments = usize::from(request.segments);
    if request.indirect {
        assert!((1..=INDIRECT_SEGMENTS_MAX).contains(&segments) && request.op <= op::WRITE, "{request:?}");
        let pages = request.indirect_pages().len();
        assert!(pages <= INDIRECT_PAGES_MAX && pages == segments.div_ceil(INDIRECT_PER_PAGE));
        assert!(request.direct_segments().is_empty());
    } else {
        assert!(segments <= DIRECT_SEGMENTS_MAX && request.direct_segments().len() == segments);
        assert!(request.op > op::WRITE || segments > 0, "nothing to move: {request:?}");
        request.direct_segments().iter().for_each(check_span);
    }
    // What a front end would have written for the same is understood as the same, and answered by the same name.
    assert_eq!(Request::decode(&request.encode(0, abi), abi).as_ref(), Ok(request));
    let id_at = if abi == Abi::X86_64 { 8 } else { 4 };
    let response = request.response(-1);
    assert_eq!(response.encode()[..8], slot.0[id_at..id_at + 8]);
    assert_eq!(Response::decode(&response.encode()), response);
}

/// Pages of a ring, at most, and as many for responses.
const PAGES: usize = 8;
/// Steps of one input.
const STEPS_MAX: usize = 4096;

/// Memory for rings, with a page before, between and behind that nothing may touch.
struct Rig {
    _memory: Vec<[u64; 512]>,
    base: *mut u8,
}

const GUARD: u8 = 0xC5;

impl Rig {
    fn new() -> Self {
        let mut memory = vec![[0u64; 512]; 2 * PAGES + 4];
        let start = memory.as_mut_ptr().cast::<u8>();
        let base = start.wrapping_add(start.align_offset(PAGE_LEN));
        Self { _memory: memory, base }
    }

    /// Where page `page` of the rig begins: 0 guards, `PAGES + 1` guards, `2 * PAGES + 2` guards.
    fn page(&self, page: usize) -> *mut u8 {
        assert!(page < 2 * PAGES + 3);
        self.base.wrapping_add(page * PAGE_LEN)
    }

    fn areas(&self, pages: [usize; 2]) -> [(NonNull<u8>, usize); 2] {
        [(1, pages[0]), (PAGES + 2, pages[1])]
            .map(|(page, pages)| (NonNull::new(self.page(page)).expect("memory"), pages * PAGE_LEN))
    }

    fn fill(&self, content: &[u8], pages: [usize; 2]) {
        for page in 0..2 * PAGES + 3 {
            // SAFETY: a page of the rig, which this thread alone uses.
            unsafe { self.page(page).write_bytes(GUARD, PAGE_LEN) };
        }
        for (area, pages) in self.areas(pages).into_iter().zip(pages) {
            let len = content.len().min(pages * PAGE_LEN);
            // SAFETY: inside the area; what is behind the content is zero.
            unsafe {
                area.0.as_ptr().write_bytes(0, area.1);
                area.0.as_ptr().copy_from_nonoverlapping(content.as_ptr(), len);
            }
        }
    }

    fn check_guards(&self, pages: [usize; 2]) {
        let used =
            |page: usize| (1..=pages[0]).contains(&page) || (PAGES + 2..PAGES + 2 + pages[1]).contains(&page);
        for page in (0..2 * PAGES + 3).filter(|page| !used(*page)) {
            // SAFETY: a page of the rig.
            let bytes = unsafe { std::slice::from_raw_parts(self.page(page), PAGE_LEN) };
            assert!(bytes.iter().all(|byte| *byte == GUARD), "page {page} was written");
        }
    }
}

thread_local! {
    static RIG: Rig = Rig::new();
}

/// Both sides of a ring in memory that the input changes between their steps.
///
/// A byte for the kind, two for how much content there is, the content of the first pages; then steps of a byte each,
/// some with more: what one side does, or what is written where.
pub fn blkif_ring(bytes: &[u8]) {
    let mut rest = bytes;
    let [kind, low, high] = take::<3>(&mut rest);
    let split = kind & 0x10 != 0;
    let abi = if split { Abi::X86_64 } else { ABIS[usize::from(kind & 1)] };
    let pages = [1 << (kind >> 1 & 3), if split { 1 << (kind >> 5 & 3) } else { 0 }];
    let (content, steps) = rest.split_at(usize::from(u16::from_le_bytes([low, high])).min(rest.len()));
    RIG.with(|rig| {
        rig.fill(content, pages);
        play(rig, abi, pages, kind & 0x80 != 0, steps);
        rig.check_guards(pages);
    });
}

fn play(rig: &Rig, abi: Abi, pages: [usize; 2], fresh: bool, mut steps: &[u8]) {
    let [one, two] = rig.areas(pages);
    // SAFETY: the rig outlives both, and is accessed by this thread alone.
    let mut front = fresh.then(|| unsafe {
        let made =
            if pages[1] > 0 { FrontRing::new_split(one, two) } else { FrontRing::new(one.0, one.1, abi) };
        made.expect("a ring of this size")
    });
    // SAFETY: as above.
    let mut back = unsafe {
        let made = if pages[1] > 0 {
            BackRing::split_from_raw(one, two)
        } else {
            BackRing::from_raw(one.0, one.1, abi)
        };
        made.expect("a ring of this size")
    };
    let size = back.size();
    let (mut held, mut asked) = (0u32, 0u32);
    for _ in 0..STEPS_MAX {
        if steps.is_empty() {
            break;
        }
        let [step] = take::<1>(&mut steps);
        match step % 16 {
            0 => {
                let waiting = back.look();
                assert!(waiting.is_err() || waiting.is_ok_and(|waiting| waiting + held <= size));
            }
            1..=3 => {
                let waiting = back.waiting();
                let slot = back.take();
                assert_eq!(slot.is_some(), waiting > 0);
                if let Some(slot) = slot {
                    held += 1;
                    let _ = Request::decode(&slot, abi);
                }
            }
            4 | 5 if held > 0 => {
                back.push(&Response { id: u64::from(step), op: step, status: -1 });
                held -= 1;
            }
            6 => drop(back.publish()),
            7 => drop(back.arm()),
            8 => {
                let counters = back.counters();
                assert_eq!(counters.req_cons.wrapping_sub(counters.rsp_pvt), held);
                assert!(counters.rsp_pvt.wrapping_sub(counters.rsp_prod) <= size);
                let _ = back.peek();
            }
            9 if held == 0 => {
                let [count] = take::<1>(&mut steps);
                // A new process: it knows what it may go on with, or is refused.
                // SAFETY: as above.
                back = unsafe {
                    let made = if pages[1] > 0 {
                        BackRing::split_from_raw(one, two)
                    } else {
                        BackRing::from_raw(one.0, one.1, abi)
                    };
                    made.expect("a ring of this size")
                };
                if back.resume(count.into()).is_ok() {
                    assert!(u32::from(count) <= size);
                    held = count.into();
                }
            }
            10..=12 => {
                if let Some(front) = &mut front {
                    asked = play_front(front, step, asked, abi);
                }
            }
            _ => {
                let [at_low, at_high, value @ ..] = take::<6>(&mut steps);
                let at = usize::from(u16::from_le_bytes([at_low, at_high]));
                // Most of what matters is in the first words of each area.
                let at = if step & 0x10 == 0 { at % 132 } else { at } & !3;
                let area = if step & 0x20 != 0 && pages[1] > 0 { two } else { one };
                // SAFETY: inside the area, aligned to four.
                unsafe { area.0.as_ptr().add(at % area.1).cast::<u32>().write(u32::from_le_bytes(value)) };
            }
        }
        assert!(held <= size, "more in flight than the ring holds");
    }
}

/// A step of the front end; how many requests have no answer then.
fn play_front(front: &mut FrontRing, step: u8, mut asked: u32, abi: Abi) -> u32 {
    match step % 16 {
        10 => {
            let room = front.room();
            assert!(room + asked <= front.size(), "{room} and {asked}");
            let request = Request { id: step.into(), op: op::FLUSH_DISKCACHE, ..Request::default() };
            let put = front.put(&request.encode(0, abi));
            assert_eq!(put, room > 0);
            asked += u32::from(put);
        }
        11 => {
            let _ = (front.publish(), front.peek());
            if let Ok(waiting) = front.look() {
                assert!(waiting <= asked, "{waiting} answers to {asked} requests");
            }
        }
        _ => {
            if front.take().is_some() {
                asked -= 1;
            }
            let _ = (front.arm(u32::from(step >> 4)), front.counters());
        }
    }
    assert_eq!(front.under_way(), asked);
    asked
}
