//! What requests cost besides time: allocations, system calls, wake-ups.

use std::time::Duration;

use tapio_block::DiskOptions;
use tapio_fixtures::counting::allocations;
use tapio_front::nbd::client::ClientOptions;
use tapio_front::nbd::load::{Sending, run, run_sending};
use tapio_front::nbd::wire::Style;
use tapio_load::{Load, LoadReport, Mix};

use super::{Rig, TIMEOUT, Where};

fn load(rig: &Rig, write: bool, block_len: u32, depth: u32, style: Style) -> LoadReport {
    let load = Load {
        mix: if write { Mix::RandomWrite } else { Mix::RandomRead },
        block_len,
        depth,
        span_len: 0,
        // As many as show a cost, however long a busy host takes for them.
        time: TIMEOUT,
        requests_max: (256 << 20) / u64::from(block_len.max(64 << 10)),
        spin: false,
        seed: 3,
    };
    let options = ClientOptions { export: "disk".into(), style, allocation: false };
    let report = run(&rig.address(), &options, &load, 1).unwrap();
    assert_eq!(report.errors, 0);
    assert!(report.count > 10, "only {} requests", report.count);
    rig.wait_connections(0);
    report
}

#[test]
fn requests_allocate_nothing_after_warm_up() {
    let rig = Rig::new(64 << 20);
    for (write, block_len, depth) in
        [(false, 4096, 32), (true, 4096, 32), (false, 1 << 20, 8), (true, 1 << 20, 8)]
    {
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            let counted = |rig: &Rig| {
                let before = rig.disk.remote().call(TIMEOUT, |_| allocations()).unwrap();
                let report = load(rig, write, block_len, depth, style);
                (rig.disk.remote().call(TIMEOUT, |_| allocations()).unwrap() - before, report.count)
            };
            // The first connection warms up the thread; the second shows what a connection itself needs.
            counted(&rig);
            let (allocations, requests) = counted(&rig);
            assert!(
                allocations < 60,
                "{allocations} allocations for {requests} requests: write {write}, {block_len}, {style:?}"
            );
        }
    }
}

#[test]
fn a_batch_of_requests_shares_its_system_calls() {
    let rig = Rig::with(64 << 20, Where::OnDisk, DiskOptions::default());
    load(&rig, true, 1 << 20, 4, Style::Structured);
    let enters = || rig.disk.status(TIMEOUT).unwrap().ring.enters;
    let turns = || {
        let before = enters();
        let report = load(&rig, false, 4096, 32, Style::Structured);
        (enters() - before) as f64 / report.count as f64
    };
    // For each turn of the ring there is at most one send by a call of its own. A host whose processors are busy hands
    // out requests one by one, so one of ten attempts is enough.
    let mut attempts = (0..10).map(|_| turns());
    assert!(attempts.any(|each| each <= 1.0), "more turns of the ring than requests");
}

#[test]
fn requests_that_are_sent_one_by_one_are_all_answered() {
    let rig = Rig::new(1 << 20);
    for write in [false, true] {
        let load = Load {
            mix: if write { Mix::RandomWrite } else { Mix::RandomRead },
            block_len: 4096,
            depth: 8,
            span_len: 0,
            time: TIMEOUT,
            requests_max: 500,
            spin: false,
            seed: 4,
        };
        let options = ClientOptions { export: "disk".into(), style: Style::Structured, allocation: false };
        let report = run_sending(&rig.address(), &options, &load, 4, Sending::Singly).unwrap();
        assert_eq!((report.count, report.errors, report.latencies.count()), (4 * 500, 0, 4 * 500));
        assert!(report.cpu > Duration::ZERO, "the cost of four threads is known");
    }
    rig.wait_connections(0);
}

#[test]
fn an_idle_connection_wakes_no_thread() {
    let rig = Rig::new(1 << 20);
    let mut clients: Vec<_> = (0..4).map(|_| rig.client()).collect();
    for client in &mut clients {
        client.read(0, 4096).unwrap();
    }
    // Asking how often the thread slept wakes it, and a second later it gives memory back: after that, nothing.
    let slept_in = |idle: Duration| {
        std::thread::sleep(Duration::from_millis(1500));
        let before = rig.disk.status(TIMEOUT).unwrap().ring.sleeps;
        std::thread::sleep(idle);
        rig.disk.status(TIMEOUT).unwrap().ring.sleeps - before
    };
    // On a busy host that second is longer, and the memory goes back in the time that is measured: a second attempt
    // finds nothing to give back.
    let mut attempts =
        (0..3).map(|_| (slept_in(Duration::from_millis(1500)), slept_in(Duration::from_millis(4500))));
    assert!(attempts.any(|(short, long)| long <= short), "more sleeps in 4.5 s of idleness than in 1.5 s");
}
