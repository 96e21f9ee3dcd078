//! Known classes of mistakes of back ends of block devices and rings, each tried on ours. What is told of each is what
//! went wrong elsewhere; a test is named after the advisory that made the class known.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tapio_front::blkif::{Broken, Start};
use tapio_types::Movement;
use tapio_xen::blkfront::{Blkfront, Command, FrontOptions, Invitation, RingInvitation};
use tapio_xen::blkif::{Abi, FrontRing, Request, Response, RingError, Segment, Slot, op, status};
use tapio_xen::double::{DoubleVm, Wire};
use tapio_xen::{GrantRef, Rights};

use super::blkif::{DISK_LEN, LIMIT, Rig, Wanted, ok, rig};

const MOVEMENTS: [Movement; 4] = [Movement::Copy, Movement::Persistent, Movement::Map, Movement::Bounce];

/// A guest that writes its ring by hand. Page 0 is its ring, the others are its own.
pub struct Hand {
    pub vm: DoubleVm,
    ring: FrontRing,
    wire: Wire,
    theirs: Wire,
    pub grant: GrantRef,
}

impl Hand {
    fn new() -> Self {
        Self::on(DoubleVm::new(64).unwrap())
    }

    /// A guest in a domain that is there.
    pub fn on(vm: DoubleVm) -> Self {
        // SAFETY: the page stays as long as `vm`, which lives as long as the ring; nothing else refers into it.
        let ring = unsafe { FrontRing::new(vm.page(0), 4096, Abi::X86_64).unwrap() };
        let (wire, theirs) = Wire::pair().unwrap();
        let grant = vm.grant(0, Rights::Write, 0).unwrap();
        Self { vm, ring, wire, theirs, grant }
    }

    pub fn invitation(&self) -> Invitation {
        let wire = self.theirs.try_clone().unwrap();
        let rings = vec![RingInvitation { ring: vec![self.grant], responses: Vec::new(), wire }];
        Invitation { memory: self.vm.share().unwrap(), abi: Abi::X86_64, persistent: false, rings }
    }

    pub fn grant(&self, page: u32, rights: Rights) -> GrantRef {
        self.vm.grant(page, rights, 0).unwrap()
    }

    fn put(&mut self, request: &Request) {
        assert!(self.ring.put(&request.encode(0, Abi::X86_64)), "the ring is full");
    }

    fn kick(&mut self) {
        if self.ring.publish() {
            self.notify();
        }
    }

    pub fn notify(&self) {
        use std::io::Write;
        let (_, theirs) = self.wire.as_fds();
        let mut event = std::fs::File::from(theirs.try_clone_to_owned().unwrap());
        event.write_all(&1u64.to_ne_bytes()).unwrap();
    }

    /// The next `count` answers.
    fn answers(&mut self, count: usize) -> Vec<Response> {
        let (end, mut all) = (Instant::now() + LIMIT, Vec::new());
        while all.len() < count {
            self.ring.look().unwrap();
            while let Some(answer) = self.ring.take() {
                all.push(answer);
            }
            assert!(Instant::now() < end, "{} of {count} answers", all.len());
            std::thread::sleep(Duration::from_micros(200));
        }
        assert_eq!(all.len(), count, "more answers than requests");
        all
    }

    pub fn ask(&mut self, request: &Request) -> Response {
        self.put(request);
        self.kick();
        self.answers(1)[0]
    }

    /// A word of the ring's header: 0 `req_prod`, 1 `req_event`, 2 `rsp_prod`, 3 `rsp_event`.
    pub fn set_word(&self, index: usize, value: u32) {
        self.vm.write(0, index * 4, &value.to_le_bytes());
    }
}

pub fn request(op: u8, id: u64, sector: u64, segments: &[Segment]) -> Request {
    let mut request = Request { op, id, sector, segments: segments.len() as u16, ..Request::default() };
    request.direct[..segments.len()].copy_from_slice(segments);
    request
}

pub fn whole(grant: GrantRef) -> Segment {
    Segment { grant, first: 0, last: 7 }
}

fn hand(wanted: &Wanted) -> (Rig, Hand) {
    let mut rig = Rig::new(tapio_block::DiskOptions::default());
    let hand = Hand::new();
    rig.connect(hand.invitation(), wanted);
    (rig, hand)
}

/// The disk works for another guest.
fn another_guest_works(rig: &Rig) {
    let mut front = Blkfront::new(FrontOptions::default()).unwrap();
    let options = rig.options(front.invitation().unwrap(), &Wanted::default());
    let options = tapio_front::blkif::BlkifOptions { record: None, ..options };
    let remote = rig.disk.as_ref().unwrap().remote().clone();
    let server = tapio_front::blkif::BlkifServer::connect(options, remote).unwrap();
    let queue = &mut front.take_queues()[0];
    for block in 0..32 {
        ok(queue, &Command::Write { at: DISK_LEN - 4096 * (block + 1), len: 4096 });
    }
    assert!(server.close());
}

/// A guest moved its producer further than the ring is long, and the back end ran through requests that are none, for
/// as long as the numbers last. (First told of a network back end; block back ends had the same.)
#[test]
fn xsa_39_indices_that_jump_stop_their_ring_and_nothing_else() {
    for jump in [33, 1 << 16, u32::MAX / 2, u32::MAX - 5] {
        let (mut rig, mut hand) = hand(&Wanted::default());
        let grant = hand.grant(1, Rights::Write);
        assert_eq!(hand.ask(&request(op::READ, 1, 0, &[whole(grant)])).status, status::OKAY);
        hand.set_word(0, 1u32.wrapping_add(jump));
        hand.notify();
        rig.until("a broken ring", |rig| rig.rings()[0].broken.is_some());
        let ring = rig.rings().remove(0);
        assert!(matches!(ring.broken, Some(Broken::Ring(RingError::Overrun { .. }))), "{:?}", ring.broken);
        assert_eq!((ring.counts.requests, ring.in_flight), (1, 0));
        rig.until("a line in the log", |rig| !rig.lines.lock().unwrap().is_empty());
        another_guest_works(&rig);
        assert!(rig.close());
        assert_eq!(hand.vm.uses(hand.grant), 0);
    }
}

/// What a guest writes into words that are the back end's own changes nothing: those are never read back.
#[test]
fn xsa_39_the_back_ends_own_words_are_not_believed() {
    let (mut rig, mut hand) = hand(&Wanted::default());
    let grant = hand.grant(1, Rights::Write);
    for value in [7, u32::MAX, 1 << 20] {
        hand.set_word(1, value);
        hand.set_word(2, value);
        hand.set_word(3, value);
        hand.put(&request(op::READ, 2, 0, &[whole(grant)]));
        let _ = hand.ring.publish();
        hand.notify();
        rig.until("an answer", |rig| {
            let counts = rig.counts();
            counts.requests > 0 && counts.requests == counts.responses
        });
        // The front end's view of the numbers, put right again.
        let counters = rig.rings()[0].counters;
        hand.set_word(2, counters.rsp_prod);
        hand.set_word(3, counters.rsp_prod);
        hand.answers(1);
    }
    assert_eq!(rig.rings()[0].broken, None);
    assert!(rig.close());
}

/// Disks that were unplugged left mappings, memory and threads behind, until there were none left.
#[test]
fn xsa_71_devices_that_come_and_go_leave_nothing_behind() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    for movement in MOVEMENTS {
        let (mut rig, mut hand) = hand(&Wanted { movement, ..Wanted::default() });
        let grant = hand.grant(1, Rights::Write);
        let mut before = None;
        for round in 0..40 {
            assert_eq!(hand.ask(&request(op::WRITE, round, 0, &[whole(grant)])).status, status::OKAY);
            assert!(rig.close());
            assert_eq!((hand.vm.uses(grant), hand.vm.uses(hand.grant)), (0, 0), "{movement:?}");
            rig.connect(hand.invitation(), &Wanted { movement, ..Wanted::default() });
            if round == 5 {
                before = Some(descriptors());
            }
        }
        // Other tests of this process open some as well, and close them.
        let before = before.unwrap();
        rig.until("about as few descriptors as before", |_| descriptors() < before + 30);
        assert!(rig.close());
    }
}

/// The network back end was kept busy for ever by requests that were refused one by one without an end to the loop.
#[test]
fn cve_2010_4247_nonsense_without_end_leaves_the_thread_to_others() {
    let (mut rig, mut hand) = hand(&Wanted::default());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            let mut id = 0;
            while !stop.load(Ordering::Relaxed) {
                id += 1;
                let nonsense = Slot([(id % 251) as u8 | 0x40; 112]);
                if !hand.ring.put(&nonsense) {
                    let _ = hand.ring.publish();
                    hand.notify();
                    hand.ring.look().unwrap();
                    while hand.ring.take().is_some() {}
                }
            }
        });
        rig.until("much nonsense", |rig| rig.counts().requests > 1_000);
        another_guest_works(&rig);
        stop.store(true, Ordering::Relaxed);
    });
    let counts = rig.counts();
    assert_eq!(counts.errors[0], counts.requests);
    assert!(counts.requests > 0);
    assert!(rig.close());
}

/// A guest that may only read a disk discarded it.
#[test]
fn cve_2013_2140_a_disk_that_may_only_be_read_is_not_discarded() {
    let (mut rig, mut hand) = hand(&Wanted { read_only: true, ..Wanted::default() });
    rig.image().write_all_at(&[7; 8192], 0).unwrap();
    let discard = Request { discard_sectors: 16, ..request(op::DISCARD, 3, 0, &[]) };
    assert_eq!(hand.ask(&discard).status, status::ERROR);
    let mut there = [0; 8192];
    rig.image().read_exact_at(&mut there, 0).unwrap();
    assert_eq!(there, [7; 8192]);
    assert!(rig.close());
}

/// A request was checked in memory that the guest could still write, and then read there again.
#[test]
fn xsa_155_what_changes_after_it_was_looked_at_changes_nothing() {
    for movement in MOVEMENTS {
        let (mut rig, mut hand) = hand(&Wanted { movement, max_indirect: 512, ..Wanted::default() });
        // The last megabyte must stay as it is: no request that is right reaches there.
        let guard = DISK_LEN - (1 << 20);
        rig.image().write_all_at(&[0x5a; 1 << 20], guard).unwrap();
        let page = hand.grant(1, Rights::Write);
        let table = hand.grant(2, Rights::Write);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let vm = hand.vm.clone();
            let stop = &stop;
            scope.spawn(move || {
                let good = whole(page).encode();
                let bad = [
                    Segment { grant: page, first: 7, last: 0 }.encode(),
                    Segment { grant: page, first: 0, last: 255 }.encode(),
                    Segment { grant: GrantRef(u32::MAX), first: 200, last: 201 }.encode(),
                ];
                let mut state = 1u64;
                while !stop.load(Ordering::Relaxed) {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let segment = (state >> 33) as usize % 64;
                    let bytes = if state >> 62 == 0 { &bad[(state >> 20) as usize % 3] } else { &good };
                    vm.write(2, segment * 8, bytes);
                    // The requests in the ring: operation, number of segments, sector.
                    let slot = 64 + (state >> 40) as usize % 32 * 112;
                    match state >> 61 {
                        0 => vm.write(0, slot + 1, &[255]),
                        1 => vm.write(0, slot + 2, &[255, 255]),
                        2 => vm.write(0, slot + 28, &[255; 32]),
                        _ => {}
                    }
                }
            });
            for round in 0..300u64 {
                let count = 1 + round % 64;
                let mut indirect = request(op::WRITE, round, 0, &[]);
                (indirect.indirect, indirect.segments, indirect.grants[0]) = (true, count as u16, table);
                hand.put(&indirect);
                hand.put(&request(op::WRITE, round, 8 * (round % 64), &[whole(page); 11]));
                hand.kick();
                for answer in hand.answers(2) {
                    assert!(matches!(answer.status, status::OKAY | status::ERROR), "{answer:?}");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut there = vec![0; 1 << 20];
        rig.image().read_exact_at(&mut there, guard).unwrap();
        assert!(there.iter().all(|byte| *byte == 0x5a), "{movement:?}");
        another_guest_works(&rig);
        assert!(rig.close());
        assert_eq!((hand.vm.uses(page), hand.vm.uses(table)), (0, 0));
    }
}

/// Answers were copied with their padding, which was whatever lay on the back end's stack.
#[test]
fn xsa_216_an_answer_holds_nothing_but_the_answer() {
    let (mut rig, mut hand) = hand(&Wanted::default());
    let grant = hand.grant(1, Rights::Write);
    for (number, last) in [(0u64, 7), (1, 9), (2, 7)] {
        let asked = request(op::READ, 0x1122_3344_5566_7788, 0, &[Segment { grant, first: 0, last }]);
        let answer = hand.ask(&asked);
        let mut slot = [0; 112];
        hand.vm.read(0, 64 + number as usize * 112, &mut slot);
        let mut want = asked.encode(0, Abi::X86_64).0;
        want[..8].copy_from_slice(&asked.id.to_le_bytes());
        want[8..12].copy_from_slice(&[
            op::READ,
            0,
            answer.status.to_le_bytes()[0],
            answer.status.to_le_bytes()[1],
        ]);
        assert_eq!(slot, want, "everything behind the answer is what the guest wrote");
    }
    assert!(rig.close());
}

/// A read that fails gives the guest nothing of what was in the buffer before.
#[test]
fn xsa_216_a_read_that_fails_shows_nothing() {
    let (mut rig, mut hand) = hand(&Wanted::default());
    let grant = hand.grant(1, Rights::Write);
    hand.vm.write(1, 0, &[0xcc; 4096]);
    assert_eq!(hand.ask(&request(op::WRITE, 1, 0, &[whole(grant)])).status, status::OKAY);
    hand.vm.write(1, 0, &[0x11; 4096]);
    let past_the_end = DISK_LEN / 512 - 4;
    assert_eq!(hand.ask(&request(op::READ, 2, past_the_end, &[whole(grant)])).status, status::ERROR);
    let mut there = [0; 4096];
    hand.vm.read(1, 0, &mut there);
    assert_eq!(there, [0x11; 4096]);
    assert!(rig.close());
}

/// Pages of a guest were taken for neighbours and moved as one, because their numbers were.
#[test]
fn xsa_229_pages_that_only_look_like_neighbours_are_not() {
    for movement in MOVEMENTS {
        let (mut rig, mut hand) = hand(&Wanted { movement, ..Wanted::default() });
        // Grants in a row name pages in disorder, one of them twice.
        let pages = [5, 3, 4, 9, 3];
        let grants = pages.map(|page| hand.grant(page, Rights::Write));
        for page in pages {
            hand.vm.write(page, 0, &[page as u8; 4096]);
        }
        let segments: Vec<Segment> = grants.iter().map(|grant| whole(*grant)).collect();
        assert_eq!(hand.ask(&request(op::WRITE, 1, 80, &segments)).status, status::OKAY);
        for (index, page) in pages.iter().enumerate() {
            let mut there = [0; 4096];
            rig.image().read_exact_at(&mut there, 40960 + index as u64 * 4096).unwrap();
            assert_eq!(there, [*page as u8; 4096], "{movement:?} {index}");
        }
        let targets = [11, 10, 12, 14, 13];
        let back: Vec<Segment> = targets.iter().map(|page| whole(hand.grant(*page, Rights::Write))).collect();
        assert_eq!(hand.ask(&request(op::READ, 2, 80, &back)).status, status::OKAY);
        for (page, target) in pages.iter().zip(targets) {
            let mut there = [0; 4096];
            hand.vm.read(target, 0, &mut there);
            assert_eq!(there, [*page as u8; 4096], "{movement:?}");
        }
        assert!(rig.close());
    }
}

/// A guest that notifies without end kept a processor of the host from everything else.
#[test]
fn xsa_332_notifications_in_storms_cost_a_bounded_number_of_wake_ups() {
    let (mut rig, mut hand) = hand(&Wanted::default());
    let grant = hand.grant(1, Rights::Write);
    let begin = Instant::now();
    let mut sent = 0u64;
    // On a busy host this thread may be kept from storming for a while.
    while begin.elapsed() < Duration::from_millis(400) || sent < 10_000 {
        hand.notify();
        sent += 1;
    }
    let (took, woken) = (begin.elapsed().as_millis() as u64, rig.counts().kicks_in);
    // One for each pause of five milliseconds, and those before the first one.
    assert!(woken < 100 + took / 2, "{woken} wake-ups for {sent} notifications in {took} ms");
    assert!(sent > 4 * woken, "{sent} notifications are no storm");
    // The guest is served, once it asks something, and others all the time.
    assert_eq!(hand.ask(&request(op::READ, 1, 0, &[whole(grant)])).status, status::OKAY);
    another_guest_works(&rig);
    assert_eq!(rig.rings()[0].broken, None);
    assert!(rig.close());
}

/// A device that was connected and disconnected in quick succession was used after it was freed.
#[test]
fn xsa_350_devices_that_are_connected_and_disconnected_under_requests() {
    for movement in MOVEMENTS {
        let (mut rig, mut hand) = hand(&Wanted { movement, ..Wanted::default() });
        let grant = hand.grant(1, Rights::Write);
        let mut answered = 0;
        for round in 0..60u64 {
            for id in 0..16 {
                hand.put(&request(op::WRITE, id, (round * 16 + id) % 1024 * 8, &[whole(grant); 5]));
            }
            hand.kick();
            // At another moment each time.
            std::thread::sleep(Duration::from_micros(round * 13 % 400));
            rig.close();
            answered += hand.ring.look().unwrap();
            while hand.ring.take().is_some() {}
            rig.connect(hand.invitation(), &Wanted { movement, start: Start::Auto, ..Wanted::default() });
            // What the first connection did not answer, the second does: no request is lost or answered twice.
            let left = hand.ring.under_way() as usize;
            hand.notify();
            assert!(hand.answers(left).iter().all(|answer| answer.status == status::OKAY));
            answered += left as u32;
        }
        assert_eq!(answered, 60 * 16);
        assert!(rig.close());
    }
}

/// A grant that fails: of a batch the rest was served wrongly, or not at all; an error of the hypervisor was taken for
/// a defect of the back end, which ended; and what such a request had mapped by then stayed mapped.
#[test]
fn xsa_361_362_365_a_grant_that_fails_in_a_batch_fails_its_request_alone() {
    for movement in MOVEMENTS {
        let (mut rig, mut hand) = hand(&Wanted { movement, ..Wanted::default() });
        let good = hand.grant(1, Rights::Write);
        let absent = hand.vm.grant_absent(Rights::Write, 0).unwrap();
        let others = hand.vm.grant(2, Rights::Write, 77).unwrap();
        let read_only = hand.grant(3, Rights::Read);
        for bad in [GrantRef(0), GrantRef(9_999_999), absent, others, read_only] {
            for operation in [op::READ, op::WRITE] {
                for id in 0..8u64 {
                    let mut segments = [whole(good); 4];
                    if id == 3 {
                        segments[2] = whole(bad);
                    }
                    hand.put(&request(operation, id, id * 32, &segments));
                }
                hand.kick();
                let answers = hand.answers(8);
                // A page that may be read is good enough for a write, where it is not mapped for good.
                let enough = bad == read_only && operation == op::WRITE && movement != Movement::Persistent;
                for answer in answers {
                    let want = if answer.id == 3 && !enough { status::ERROR } else { status::OKAY };
                    assert_eq!(answer.status, want, "{movement:?} {bad:?} {operation}: {answer:?}");
                }
            }
        }
        // The segments of an indirect request, in a page that is not there.
        let mut indirect = request(op::WRITE, 1, 0, &[]);
        (indirect.indirect, indirect.segments, indirect.grants[0]) = (true, 40, absent);
        assert_eq!(hand.ask(&indirect).status, status::ERROR);
        assert!(rig.counts().errors[1] > 0);
        assert!(rig.close());
        assert_eq!(hand.vm.uses(good), 0, "{movement:?}: nothing of a request that failed stays mapped");
    }
}

/// Numbers that make no sense, one by one: each is refused, and the ring goes on.
#[test]
fn requests_that_make_no_sense_are_refused_one_by_one() {
    let (mut rig, mut hand) = hand(&Wanted { max_indirect: 64, ..Wanted::default() });
    let grant = hand.grant(1, Rights::Write);
    let end = DISK_LEN / 512;
    let segment = |first, last| Segment { grant, first, last };
    let mut refused = vec![
        request(op::READ, 1, 0, &[segment(5, 4)]),
        request(op::READ, 1, 0, &[segment(0, 8)]),
        request(op::WRITE, 1, 0, &[segment(255, 255)]),
        request(op::READ, 1, end, &[segment(0, 0)]),
        request(op::WRITE, 1, end - 1, &[segment(0, 1)]),
        request(op::WRITE, 1, u64::MAX, &[segment(0, 0)]),
        request(op::READ, 1, u64::MAX / 512 + 1, &[segment(0, 0)]),
        request(op::WRITE_BARRIER, 1, end, &[segment(0, 0)]),
        request(op::READ, 1, 0, &[]),
        request(op::WRITE, 1, 0, &[]),
        Request { discard_sectors: u64::MAX, ..request(op::DISCARD, 1, 8, &[]) },
        Request { discard_sectors: 0, ..request(op::DISCARD, 1, 8, &[]) },
    ];
    let table = hand.grant(2, Rights::Write);
    for segments in [0, 65, 4096, 4097, u16::MAX] {
        let mut many = request(op::READ, 1, 0, &[]);
        (many.indirect, many.segments) = (true, segments);
        many.grants = [table; 8];
        refused.push(many);
    }
    for request in &refused {
        assert_eq!(hand.ask(request).status, status::ERROR, "{request:?}");
        assert_eq!(hand.ask(&self::request(op::READ, 9, 0, &[whole(grant)])).status, status::OKAY);
    }
    for number in [4, 6, 7, 100, 255] {
        let mut slot = Slot([0; 112]);
        slot.0[0] = number;
        slot.0[1] = 255;
        slot.0[8] = 42;
        assert!(hand.ring.put(&slot));
        hand.kick();
        let answer = hand.answers(1)[0];
        assert!(answer.status < 0 && answer.id == 42, "{answer:?}");
    }
    // The same name for many requests is the guest's own affair.
    for _ in 0..32 {
        hand.put(&request(op::READ, 7, 0, &[whole(grant)]));
    }
    hand.kick();
    assert!(hand.answers(32).iter().all(|answer| (answer.id, answer.status) == (7, status::OKAY)));
    assert!(rig.close());
}

/// The guest's memory is gone while requests are in flight: they fail or do not, the disk lives on.
#[test]
fn a_guest_whose_grants_go_while_it_is_served_hurts_itself_alone() {
    for movement in MOVEMENTS {
        let (mut rig, _front, mut queues) =
            rig(FrontOptions::default(), &Wanted { movement, ..Wanted::default() });
        let queue = &mut queues[0];
        for block in 0..32 {
            queue.submit(&Command::Write { at: block * 40960, len: 40960 }).unwrap().unwrap();
        }
        queue.kick().unwrap();
        drop(queues);
        another_guest_works(&rig);
        rig.close();
    }
}
