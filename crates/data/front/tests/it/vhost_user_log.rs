//! The log of a live migration: exactly the pages that the device wrote are in it.

use std::collections::BTreeSet;
use std::time::Duration;

use tapio_front::vhost_user::driver::{Command, DirtyPages, DriverOptions, DriverQueue};
use tapio_front::vhost_user::feature;

use crate::vhost_user::{Rig, next, run, write_pattern};

const PAGE: u64 = 4096;

fn pages(from: u64, len: u64) -> BTreeSet<u64> {
    (from / PAGE..=(from + len - 1) / PAGE).map(|page| page * PAGE).collect()
}

/// What was logged, without the pages of rings and status bytes.
fn data_pages(log: &DirtyPages, queue: &DriverQueue, depth: u16) -> BTreeSet<u64> {
    let first = queue.buffer_guest(0);
    let end = queue.buffer_guest(depth);
    log.take().into_iter().filter(|page| (first..end).contains(page)).collect()
}

fn ways() -> [DriverOptions; 4] {
    let depth = 8;
    let base = DriverOptions { buffer_len: 128 << 10, depth, ..DriverOptions::default() };
    let packed = base.features | feature::RING_PACKED;
    [
        base.clone(),
        DriverOptions { features: packed, ..base.clone() },
        DriverOptions { features: packed & !feature::INDIRECT_DESC, piece_len: 3000, ..base.clone() },
        DriverOptions { memory_slots: true, piece_len: 4096, ..base },
    ]
}

#[test]
fn reads_dirty_exactly_the_pages_they_fill_and_writes_none() {
    let rig = Rig::small();
    for options in ways() {
        let depth = options.depth;
        let mut driver = rig.driver(options.clone());
        let mut queue = driver.start(0).unwrap();
        assert_eq!(write_pattern(&mut queue, 0, 128 << 10, 5), 0);
        let log = driver.start_log(&[0]).unwrap();
        assert!(log.take().is_empty(), "nothing was done yet");
        for len in [512, 4096, 4608, 65536, 128 << 10] {
            let slot = queue.next_slot().unwrap();
            assert_eq!(run(&mut queue, &Command::Read { at: 512, len }).status, 0);
            let want = pages(queue.buffer_guest(slot), len.into());
            assert_eq!(data_pages(&log, &queue, depth), want, "{len} bytes, {options:?}");
        }
        assert_eq!(write_pattern(&mut queue, 0, 8192, 6), 0);
        let all = log.take();
        let (first, end) = (queue.buffer_guest(0), queue.buffer_guest(depth));
        assert!(all.iter().all(|page| !(first..end).contains(page)), "a write fills no buffer: {all:x?}");
        // The status byte and the ring were written, in pages of their own.
        assert!(all.len() >= 2 && all.len() <= 4, "{all:x?}");
        let slot = queue.next_slot().unwrap();
        run(&mut queue, &Command::Identity);
        assert_eq!(data_pages(&log, &queue, depth), pages(queue.buffer_guest(slot), 20));
        driver.stop_log(&[0]).unwrap();
        assert_eq!(run(&mut queue, &Command::Read { at: 0, len: 4096 }).status, 0);
        assert!(log.take().is_empty(), "the log is off");
        drop(driver);
        rig.until("the connection ends", |state| !state.connected);
    }
}

#[test]
fn requests_that_are_under_way_when_the_log_begins_are_in_it() {
    let rig = Rig::small();
    let mut driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    driver.enable(0, false).unwrap();
    let slot = queue.next_slot().unwrap();
    queue.submit(&Command::Read { at: 0, len: 8192 }).unwrap();
    queue.kick_always().unwrap();
    let log = driver.start_log(&[0]).unwrap();
    assert!(!queue.wait(Duration::from_millis(20)).unwrap());
    driver.enable(0, true).unwrap();
    assert_eq!(next(&mut queue).status, 0);
    let want = pages(queue.buffer_guest(slot), 8192);
    assert_eq!(data_pages(&log, &queue, 32), want);
}
