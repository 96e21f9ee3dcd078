//! Rings of one device on several threads of its disk.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tapio_block::{DataThread, Disk, DiskOptions, Owner, QueueHandle};
use tapio_front::blkif::{BlkifServer, Broken, Start};
use tapio_load::{Load, Mix};
use tapio_types::{Access, ChainSpec, ImageKind, IoLimits, LayerSpec, Movement, RingState};
use tapio_xen::Rights;
use tapio_xen::blkfront::{Blkfront, Command, Completion, FrontOptions, FrontQueue, Invitation};
use tapio_xen::blkif::{RingError, op, status};
use tapio_xen::double::DoubleVm;

use super::blkif::{DISK_LEN, LIMIT, Rig, Wanted, fill, ok};
use super::blkif_advisories::{Hand, request, whole};

const MOVEMENTS: [Movement; 4] = [Movement::Copy, Movement::Persistent, Movement::Map, Movement::Bounce];
const BLOCK: u32 = 8192;

fn on_threads(threads: usize) -> DiskOptions {
    DiskOptions { threads, ..DiskOptions::default() }
}

/// A rig whose disk has two threads, with a front end of so many queues.
fn rig(queues: u32, wanted: &Wanted) -> (Rig, Blkfront, Vec<FrontQueue>) {
    let mut rig = Rig::new(on_threads(2));
    let persistent = wanted.movement == Movement::Persistent;
    let options = FrontOptions { queues, buffer_len: BLOCK, persistent, ..FrontOptions::default() };
    let mut front = Blkfront::new(options).unwrap();
    rig.connect(front.invitation().unwrap(), wanted);
    let queues = front.take_queues();
    (rig, front, queues)
}

fn disk(rig: &Rig) -> &Disk {
    rig.disk.as_ref().unwrap()
}

/// Does something while a thread of the disk is busy with something else.
fn while_busy(thread: &QueueHandle, act: impl FnOnce()) {
    let (busy, is_busy) = channel();
    let (enough, is_enough) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let hold = move |_: &DataThread| {
                busy.send(()).unwrap();
                // Also where the test has failed.
                let _ = is_enough.recv_timeout(LIMIT);
            };
            thread.call(2 * LIMIT, hold).unwrap();
        });
        is_busy.recv_timeout(LIMIT).unwrap();
        act();
        drop(enough);
    });
}

fn set_limits(rig: &Rig, limits: IoLimits) {
    let set = move |owner: &Owner| owner.admission().set_limits(&limits);
    disk(rig).remote().call(LIMIT, set).unwrap();
}

fn reap_all(queue: &mut FrontQueue) -> Vec<Completion> {
    let mut done = Vec::new();
    queue.kick().unwrap();
    while queue.under_way() > 0 {
        assert!(queue.wait(LIMIT).unwrap(), "{} requests without an answer", queue.under_way());
        queue.reap(&mut done).unwrap();
    }
    assert!(done.iter().all(|done| done.status == status::OKAY), "{done:?}");
    done
}

fn ask_to_write(queue: &mut FrontQueue, at: u64, mark: u8) {
    fill(queue, mark);
    queue.submit(&Command::Write { at, len: BLOCK }).unwrap().unwrap();
}

fn assert_holds(queue: &mut FrontQueue, at: u64, mark: u8) {
    let done = ok(queue, &Command::Read { at, len: BLOCK });
    let bytes = &queue.buffer(done.slot.unwrap())[..BLOCK as usize];
    assert!(bytes.iter().all(|byte| *byte == mark), "at {at}: {} instead of {mark}", bytes[0]);
}

#[test]
fn each_ring_is_served_by_its_thread() {
    for movement in MOVEMENTS {
        let (mut rig, _front, mut queues) = rig(3, &Wanted { movement, ..Wanted::default() });
        let threads = disk(&rig).remote().threads();
        assert_eq!(threads.len(), 2, "two threads serve three rings");
        let span = DISK_LEN / 4;
        for (index, queue) in queues.iter_mut().enumerate() {
            // Its thread has the images from now on.
            ok(queue, &Command::Read { at: 0, len: BLOCK });
            while_busy(&threads[1 - index % 2], || {
                for round in 0..100 {
                    let (at, mark) = (index as u64 * span + round * u64::from(BLOCK), round as u8 + 1);
                    fill(queue, mark);
                    ok(queue, &Command::Write { at, len: BLOCK });
                    let mut there = vec![0; BLOCK as usize];
                    rig.image().read_exact_at(&mut there, at).unwrap();
                    assert!(there.iter().all(|byte| *byte == mark));
                    assert_holds(queue, at, mark);
                }
            });
            ok(queue, &Command::Flush);
            ok(queue, &Command::Barrier { at: index as u64 * span, len: BLOCK });
        }
        // What one ring wrote another one reads.
        for index in 0..3u64 {
            assert_holds(&mut queues[(index as usize + 1) % 3], index * span + 4 * u64::from(BLOCK), 5);
        }
        for (index, ring) in rig.rings().iter().enumerate() {
            let counts = ring.counts;
            assert_eq!((counts.requests, counts.responses, ring.in_flight), (204, 204, 0), "ring {index}");
            if movement == Movement::Persistent {
                assert!(counts.persistent.hits > 0 && counts.persistent.misses > 0, "pages of its own");
            }
        }
        assert!(rig.close());
        assert!(!rig.record().exists(), "nothing is in flight");
        assert!(queues.iter().all(|queue| queue.stuck_grants() == 0), "{movement:?}: nothing stays mapped");
    }
}

#[test]
fn a_disk_with_one_thread_serves_every_ring_by_it() {
    let mut rig = Rig::new(on_threads(1));
    let mut front = Blkfront::new(FrontOptions { queues: 3, ..FrontOptions::default() }).unwrap();
    rig.connect(front.invitation().unwrap(), &Wanted::default());
    for (index, queue) in front.take_queues().iter_mut().enumerate() {
        ok(queue, &Command::Write { at: index as u64 * 4096, len: 4096 });
    }
    assert_eq!(disk(&rig).remote().threads().len(), 1);
    assert!(rig.close());
}

/// Each queue writes and remembers what was answered, while the back end goes and comes again.
#[test]
fn closing_under_load_loses_no_answer_of_any_ring() {
    for movement in MOVEMENTS {
        let wanted = Wanted { movement, ..Wanted::default() };
        let (mut rig, front, mut queues) = rig(4, &wanted);
        let invitations: Vec<Invitation> = (0..6).map(|_| front.invitation_of(&queues).unwrap()).collect();
        let (enough, answered) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 4]);
        let span = DISK_LEN / 4;
        std::thread::scope(|scope| {
            for (index, queue) in queues.iter_mut().enumerate() {
                let (enough, answered) = (&enough, &answered[index]);
                scope.spawn(move || {
                    let places = span / u64::from(BLOCK);
                    let mut holds = vec![0u8; places as usize];
                    let (mut next, mut done) = (0, Vec::new());
                    while !enough.load(Ordering::Relaxed) {
                        // One write of a place at a time: it is known what it must hold.
                        for _ in 0..16 {
                            let place = (next % places) as usize;
                            holds[place] = holds[place].wrapping_add(1);
                            ask_to_write(
                                queue,
                                index as u64 * span + next % places * u64::from(BLOCK),
                                holds[place],
                            );
                            next += 1;
                        }
                        queue.kick().unwrap();
                        while queue.under_way() > 0 {
                            assert!(
                                queue.wait(LIMIT).unwrap(),
                                "queue {index}: {} in flight",
                                queue.under_way()
                            );
                            let count = queue.reap(&mut done).unwrap() as u64;
                            answered.fetch_add(count, Ordering::Relaxed);
                        }
                    }
                    assert!(done.iter().all(|done| done.status == status::OKAY), "queue {index}");
                    assert_eq!(done.len() as u64, next, "queue {index}: one answer for each request");
                    for (place, mark) in holds.iter().enumerate().filter(|(_, mark)| **mark > 0) {
                        assert_holds(queue, index as u64 * span + place as u64 * u64::from(BLOCK), *mark);
                    }
                });
            }
            for invitation in invitations {
                let before = answered.each_ref().map(|count| count.load(Ordering::Relaxed));
                rig.until("work on every ring", |_| {
                    answered
                        .iter()
                        .zip(before)
                        .all(|(count, before)| count.load(Ordering::Relaxed) > before + 50)
                });
                assert!(rig.close(), "every request that was taken is answered");
                rig.connect(invitation, &wanted);
            }
            enough.store(true, Ordering::Relaxed);
        });
        let threads = disk(&rig).remote().threads().len();
        assert_eq!(threads, 2);
        assert!(rig.close());
        assert!(queues.iter().all(|queue| queue.stuck_grants() == 0), "{movement:?}: nothing stays mapped");
    }
}

/// Requests of every ring wait in a paused disk. They go on with it, or with the next process that serves the rings.
#[test]
fn a_pause_holds_the_rings_of_all_threads() {
    let (mut rig, front, mut queues) = rig(2, &Wanted::default());
    let layer = LayerSpec { kind: ImageKind::Raw, path: rig.directory.path().join("image") };
    let chain = ChainSpec { layers: vec![layer], access: Access::ReadWrite };
    for (index, queue) in queues.iter_mut().enumerate() {
        ask_to_write(queue, index as u64 * u64::from(BLOCK), 1);
        reap_all(queue);
    }
    disk(&rig).pause(LIMIT).unwrap();
    for (index, queue) in queues.iter_mut().enumerate() {
        ask_to_write(queue, index as u64 * u64::from(BLOCK), 2);
        queue.kick().unwrap();
        assert!(!queue.wait(Duration::from_millis(50)).unwrap(), "the disk is paused");
    }
    for ring in rig.rings() {
        assert_eq!((ring.counts.requests, ring.counters.used()), (1, 1));
    }
    disk(&rig).resume(chain.clone(), LIMIT).unwrap();
    for (index, queue) in queues.iter_mut().enumerate() {
        reap_all(queue);
        assert_holds(queue, index as u64 * u64::from(BLOCK), 2);
    }
    // The device is closed while the disk is paused.
    disk(&rig).pause(LIMIT).unwrap();
    for (index, queue) in queues.iter_mut().enumerate() {
        ask_to_write(queue, index as u64 * u64::from(BLOCK), 3);
        queue.kick().unwrap();
    }
    assert!(rig.close(), "nothing was taken");
    disk(&rig).resume(chain, LIMIT).unwrap();
    rig.connect(front.invitation_of(&queues).unwrap(), &Wanted::default());
    for (index, queue) in queues.iter_mut().enumerate() {
        reap_all(queue);
        assert_holds(queue, index as u64 * u64::from(BLOCK), 3);
    }
    assert!(rig.close());
}

/// What the threads have taken waits for its turn at the owner, for hours; a device that is closed does not.
#[test]
fn closing_does_not_wait_for_limits() {
    let (mut rig, _front, mut queues) = rig(2, &Wanted::default());
    set_limits(&rig, IoLimits { bps: 1, burst_bytes: 4096, ..Default::default() });
    for (index, queue) in queues.iter_mut().enumerate() {
        for block in 0..16 {
            ask_to_write(queue, (16 * index as u64 + block) * u64::from(BLOCK), 7);
        }
        queue.kick().unwrap();
    }
    rig.until("requests of both rings are taken", |rig| {
        rig.rings().iter().all(|ring| ring.counts.requests > 0)
    });
    assert!(rig.close(), "every request that was taken is answered");
    for queue in &mut queues {
        let mut done = Vec::new();
        queue.reap(&mut done).unwrap();
        assert!(!done.is_empty() && done.iter().all(|done| done.status == status::OKAY), "{done:?}");
    }
}

/// A guest with two rings on two threads, one of which it writes by hand.
fn one_by_hand(bad: usize) -> (Rig, Hand, FrontQueue) {
    let options = FrontOptions { buffer_len: BLOCK, ..FrontOptions::default() };
    let vm = DoubleVm::new(64 + options.pages()).unwrap();
    vm.take_pages(64).unwrap();
    let hand = Hand::on(vm.clone());
    let mut front = Blkfront::on(vm, options).unwrap();
    let mut invitation = front.invitation().unwrap();
    invitation.rings.insert(bad, hand.invitation().rings.remove(0));
    let mut rig = Rig::new(on_threads(2));
    rig.connect(invitation, &Wanted::default());
    assert_eq!(disk(&rig).remote().threads().len(), 2);
    (rig, hand, front.take_queues().remove(0))
}

fn works(queue: &mut FrontQueue, requests_max: u64) {
    for (mix, seed) in [(Mix::RandomWrite, 1), (Mix::RandomRead, 2)] {
        let load = Load {
            mix,
            block_len: BLOCK,
            depth: 8,
            span_len: DISK_LEN,
            time: LIMIT,
            requests_max,
            spin: false,
            seed,
        };
        let report = load.run(queue).unwrap();
        assert_eq!((report.count, report.errors), (requests_max, 0));
    }
}

/// Whatever one ring is filled with, the other one, on another thread, is served; and the other way round.
#[test]
fn a_hostile_ring_stops_no_ring_of_another_thread() {
    for bad in [0, 1] {
        let (mut rig, mut hand, mut queue) = one_by_hand(bad);
        let (own, foreign) = (hand.grant(1, Rights::Write), hand.vm.grant(2, Rights::Write, 77).unwrap());
        let (absent, for_reading) =
            (hand.vm.grant_absent(Rights::Write, 0).unwrap(), hand.grant(3, Rights::Read));
        let mut senseless = 0;
        std::thread::scope(|scope| {
            let good = scope.spawn(|| works(&mut queue, 1000));
            while senseless < 100 || !good.is_finished() {
                for grant in [foreign, absent, for_reading] {
                    let answer = hand.ask(&request(op::READ, senseless, 0, &[whole(grant)]));
                    assert_eq!(answer.status, status::ERROR, "it is not granted to us for writing");
                }
                let past_the_end = request(op::WRITE, senseless, DISK_LEN / 512, &[whole(own)]);
                assert_eq!(hand.ask(&past_the_end).status, status::ERROR);
                assert_eq!(hand.ask(&request(op::READ, senseless, 0, &[whole(own)])).status, status::OKAY);
                hand.notify();
                senseless += 1;
            }
            good.join().unwrap();
        });
        // Its producer jumps: the ring is broken, and the other one is not.
        hand.set_word(0, u32::MAX / 2);
        hand.notify();
        rig.until("a broken ring", |rig| rig.rings()[bad].broken.is_some());
        let rings = rig.rings();
        assert!(matches!(rings[bad].broken, Some(Broken::Ring(RingError::Overrun { .. }))), "{rings:?}");
        assert!(rings[1 - bad].broken.is_none(), "{rings:?}");
        rig.until("a line in the log", |rig| !rig.lines.lock().unwrap().is_empty());
        works(&mut queue, 200);
        assert!(rig.close());
        assert_eq!((hand.vm.uses(hand.grant), queue.stuck_grants()), (0, 0));
    }
}

/// A thread that ends lets go of the guest's memory, whether its device was closed or not.
#[test]
fn threads_that_end_with_the_disk_let_go_of_their_rings() {
    for movement in MOVEMENTS {
        let (mut rig, front, mut queues) = rig(2, &Wanted { movement, ..Wanted::default() });
        for (index, queue) in queues.iter_mut().enumerate() {
            ask_to_write(queue, index as u64 * u64::from(BLOCK), 1);
            reap_all(queue);
        }
        let grants: Vec<_> = queues.iter().map(|queue| queue.invitation().unwrap().ring[0]).collect();
        assert!(grants.iter().all(|grant| front.vm().uses(*grant) == 1), "the rings are mapped");
        disk(&rig).close(LIMIT).unwrap();
        assert!(grants.iter().all(|grant| front.vm().uses(*grant) == 0), "{movement:?}: no thread has them");
        assert!(queues.iter().all(|queue| queue.stuck_grants() == 0), "{movement:?}");
        assert!(rig.server.as_ref().unwrap().state().is_err());
        assert!(!rig.close(), "what was in flight is not known");
    }
}

/// Statistics have one writer, the owner: it is told of rings that it does not serve, also when it has nothing to do.
#[test]
fn the_owner_tells_where_the_rings_of_all_threads_stand() {
    let mut rig = Rig::new(on_threads(2));
    let front = FrontOptions { queues: 2, buffer_len: BLOCK, ..FrontOptions::default() };
    let mut front = Blkfront::new(front).unwrap();
    let told = Arc::new(Mutex::new((RingState::default(), None)));
    let mut options =
        rig.options(front.invitation().unwrap(), &Wanted { start: Start::Fresh, ..Wanted::default() });
    let last = Arc::clone(&told);
    options.on_ring = Some(Box::new(move |state, _| {
        *last.lock().unwrap() = (*state, std::thread::current().name().map(str::to_owned));
    }));
    rig.server = Some(BlkifServer::connect(options, disk(&rig).remote().clone()).unwrap());
    let mut queues = front.take_queues();
    let is_told = |count: u32| {
        rig.until("the last answer is told of", |_| {
            let (state, thread) = told.lock().unwrap().clone();
            (state.rsp_prod, state.used()) == (count, 0) && thread.as_deref() == Some("tapio-data")
        });
    };
    for round in 1..=3u32 {
        for block in 0..20 {
            ask_to_write(&mut queues[1], block * u64::from(BLOCK), 1);
        }
        reap_all(&mut queues[1]);
        is_told(21 * round - 1);
        // The owner does it, and is told of nothing else after that.
        ok(&mut queues[1], &Command::Flush);
        is_told(21 * round);
    }
    // The owner has nothing to do any more, not even to give memory back, and this request is not for it either.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(queues[1].ask(&Command::Read { at: DISK_LEN, len: BLOCK }).unwrap().status, status::ERROR);
    is_told(64);
    ok(&mut queues[0], &Command::Read { at: 0, len: 4096 });
    rig.until("both rings are told of", |_| told.lock().unwrap().0.rsp_prod == 65);
    assert_eq!(told.lock().unwrap().0.size, 64, "slots of both rings");
    // A report tells at once.
    disk(&rig).pause(LIMIT).unwrap();
    ask_to_write(&mut queues[1], 0, 1);
    queues[1].kick().unwrap();
    rig.until("what waits is told of with a report", |rig| {
        assert_eq!(rig.rings().len(), 2);
        told.lock().unwrap().0.used() == 1
    });
    assert!(rig.close());
}
