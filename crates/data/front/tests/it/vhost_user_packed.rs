//! Packed rings: the same stories as with split ones where the ring matters, and what only packed ones have.

use std::time::{Duration, Instant};

use tapio_block::DiskOptions;
use tapio_front::vhost_user::driver::{Command, Descriptor, DriverOptions, DriverQueue};
use tapio_front::vhost_user::{VhostUserOptions, feature};
use tapio_ring::PollingConfig;
use tapio_types::Access;

use crate::vhost_user::{DISK_LEN, LIMIT, Rig, next, run, spec, verified_load, write_pattern};

fn packed() -> DriverOptions {
    let options = DriverOptions::default();
    DriverOptions { features: options.features | feature::RING_PACKED, ..options }
}

fn direct() -> DriverOptions {
    let options = packed();
    DriverOptions { features: options.features & !feature::INDIRECT_DESC, ..options }
}

#[test]
fn requests_come_back_out_of_order_and_the_ring_comes_round() {
    // Sizes that requests do not divide: chains cross the end of the ring at every place.
    for queue_size in [128, 127, 64, 33] {
        for (name, options) in [("indirect", packed()), ("direct", direct()), ("pieces", direct())] {
            let piece_len = if name == "pieces" { 1024 } else { 0 };
            let options = DriverOptions { queue_size, piece_len, buffer_len: 4096, ..options };
            let rig = Rig::small();
            let driver = rig.driver(options);
            assert_ne!(driver.features() & feature::RING_PACKED, 0);
            let mut queue = driver.start(0).unwrap();
            verified_load(&mut queue, 0, DISK_LEN, 1500, 11);
            let base = driver.stop(0).unwrap();
            assert_eq!(base, queue.base(), "{name} {queue_size}: all was answered");
            assert_eq!(rig.lines.lock().unwrap().clone(), Vec::<String>::new());
        }
    }
}

#[test]
fn a_polling_disk_serves_packed_rings() {
    let polling = PollingConfig { max_ns: 100_000, idle_min_percent: 0 };
    let options = DiskOptions { polling, ..DiskOptions::default() };
    let rig = Rig::new(DISK_LEN, VhostUserOptions::default(), options);
    let driver = rig.driver(packed());
    let mut queue = driver.start(0).unwrap();
    verified_load(&mut queue, 0, DISK_LEN, 3000, 7);
}

#[test]
fn a_packed_queue_stops_under_load_and_goes_on_where_it_stood() {
    let rig = Rig::small();
    for options in [packed(), DriverOptions { queue_size: 100, ..direct() }] {
        let driver = rig.driver(options);
        let mut queue = driver.start(0).unwrap();
        let (mut done, mut issued, depth) = (Vec::new(), 0u16, queue.room());
        for round in 0..100 {
            while queue.room() > 0 {
                queue.submit(&Command::Read { at: u64::from(issued % 1024) * 4096, len: 4096 });
                issued = issued.wrapping_add(1);
            }
            queue.kick().unwrap();
            if round % 10 == 7 {
                let base = driver.stop(0).unwrap();
                queue.reap(&mut done);
                assert_eq!(base, queue.base(), "everything taken was answered, nothing else");
                driver.resume(0, &queue, base).unwrap();
                queue.kick_always().unwrap();
            }
            if queue.room() < depth {
                queue.wait(Duration::from_secs(5)).unwrap();
            }
            queue.reap(&mut done);
        }
        drain(&mut queue, &mut done, depth);
        assert_eq!(queue.seen_used(), issued);
        drop(driver);
        rig.until("the connection ends", |state| !state.connected);
    }
}

fn drain(queue: &mut DriverQueue, done: &mut Vec<tapio_front::vhost_user::driver::Completion>, depth: usize) {
    let begin = Instant::now();
    while queue.room() < depth {
        assert!(begin.elapsed() < LIMIT, "requests were lost");
        queue.wait(Duration::from_millis(100)).unwrap();
        queue.reap(done);
    }
    assert!(done.iter().all(|completion| completion.status == 0));
}

#[test]
fn a_restarted_back_end_answers_what_the_first_took_from_a_packed_ring() {
    for options in
        [packed(), DriverOptions { queue_size: 101, piece_len: 1024, buffer_len: 4096, ..direct() }]
    {
        let mut rig = Rig::small();
        let mut driver = rig.driver(DriverOptions { inflight: true, ..options });
        let mut queue = driver.start(0).unwrap();
        let (mut issued, mut done, depth) = (0u16, Vec::new(), queue.room());
        for _ in 0..20 {
            while queue.room() > 0 {
                queue.submit(&Command::Read { at: u64::from(issued % 1024) * 4096, len: 4096 });
                issued = issued.wrapping_add(1);
            }
            queue.kick().unwrap();
            rig.server.take().unwrap().close();
            rig.listen(VhostUserOptions::default());
            rig.reconnect(&mut driver);
            // The front end's place is as old as it can be: the region knows better.
            driver.resume(0, &queue, 0x8000_8000).unwrap();
            queue.kick_always().unwrap();
            queue.reap(&mut done);
        }
        drain(&mut queue, &mut done, depth);
        assert_eq!(done.len(), usize::from(issued), "every request was answered once");
    }
}

#[test]
fn a_ring_that_is_new_may_be_given_without_wrap_counters() {
    let rig = Rig::small();
    let driver = rig.driver(packed());
    let mut queue = driver.start(0).unwrap();
    driver.stop(0).unwrap();
    driver.resume(0, &queue, 0).unwrap();
    assert_eq!(run(&mut queue, &Command::Flush).status, 0);
}

#[test]
fn a_paused_disk_leaves_requests_in_a_packed_ring() {
    let rig = Rig::small();
    let driver = rig.driver(packed());
    let mut queue = driver.start(0).unwrap();
    assert_eq!(write_pattern(&mut queue, 0, 4096, 9), 0);
    rig.disk.pause(LIMIT).unwrap();
    queue.submit(&Command::Read { at: 0, len: 4096 }).unwrap();
    queue.kick_always().unwrap();
    assert!(!queue.wait(Duration::from_millis(50)).unwrap());
    let base = driver.stop(0).unwrap();
    assert_eq!(base, queue.base(), "the request was not taken");
    driver.resume(0, &queue, base).unwrap();
    rig.disk.resume(spec(&rig.directory.path().join("image"), Access::ReadWrite), LIMIT).unwrap();
    assert_eq!(next(&mut queue).status, 0);
}

/// A hostile guest gets an error or breaks its own queue; its neighbour works on.
#[test]
fn hostile_packed_rings_hurt_only_themselves() {
    let descriptor = |at, len, flags| Descriptor { at, len, flags, next: 7 };
    let base = 0x4000_0000;
    let attacks: [(&str, Vec<Descriptor>); 7] = [
        ("a chain as long as the ring, and on", vec![descriptor(base, 16, 1); 128]),
        ("no status byte", vec![descriptor(base, 16, 0)]),
        ("a status byte outside memory", vec![descriptor(0xdead_0000_0000, 1, 2)]),
        ("a table outside memory", vec![descriptor(u64::MAX - 8, 32, 4)]),
        ("a table of odd length", vec![descriptor(base, 33, 4)]),
        ("a table in the middle of a chain", vec![descriptor(base, 32, 5)]),
        ("a table of nothing", vec![descriptor(base, 0, 4)]),
    ];
    for (name, list) in attacks {
        let rig = Rig::small();
        let driver = rig.driver(DriverOptions { queues: 2, ..packed() });
        let (mut bad, mut good) = (driver.start(0).unwrap(), driver.start(1).unwrap());
        assert_eq!(run(&mut good, &Command::Flush).status, 0);
        bad.put_packed(&list);
        bad.kick_always().unwrap();
        assert!(bad.wait_broken(LIMIT).unwrap(), "{name}: the front end is told");
        assert_eq!(write_pattern(&mut good, 0, 4096, 3), 0, "{name}: the other queue works on");
        assert_eq!(rig.lines.lock().unwrap().len(), 1, "{name}: {:?}", rig.lines.lock().unwrap());
        driver.stop(0).unwrap();
    }
}

#[test]
fn places_that_do_not_exist_are_refused() {
    let rig = Rig::small();
    let driver = rig.driver(packed());
    let queue = driver.start(0).unwrap();
    driver.stop(0).unwrap();
    for base in [0x8000_8080, 0x8080_8000, 0x7fff_8000, u32::MAX] {
        assert!(driver.resume(0, &queue, base).is_err(), "{base:#x}");
        let driver = driver.stop(0);
        assert!(driver.is_ok(), "the connection goes on");
    }
}
