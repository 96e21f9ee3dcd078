//! What a request of the storage may cost: counted, not timed.
//!
//! One binary of its own, because it counts every allocation of its process by thread.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::cell::{Cell, RefCell};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use tapio_fixtures::counting::{Counting, allocations};
use tapio_nbd::NbdStore;
use tapio_nbd::client::ExportInfo;
use tapio_nbd::wire::{SIMPLE_REPLY_MAGIC, Style, command};
use tapio_ring::uring::{Uring, UringConfig};
use tapio_ring::{Executor, Inbox, Io, Notify, PageBuf, Polling, PollingConfig, Storage};

const LEN: u64 = 1 << 20;
const REQUEST_LEN: usize = 4096;
const DEPTH: u64 = 16;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Answers every request well, on a thread of its own.
fn serve(mut stream: UnixStream) {
    let mut header = [0; 28];
    let mut data = vec![0; REQUEST_LEN];
    while stream.read_exact(&mut header).is_ok() {
        let command = u16::from_be_bytes([header[6], header[7]]);
        if command == command::WRITE && stream.read_exact(&mut data).is_err() {
            return;
        }
        let mut reply = Vec::with_capacity(16 + REQUEST_LEN);
        reply.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        reply.extend_from_slice(&0u32.to_be_bytes());
        reply.extend_from_slice(&header[8..16]);
        if command == command::READ {
            reply.extend_from_slice(&data);
        }
        if stream.write_all(&reply).is_err() {
            return;
        }
    }
}

/// Reads, writes and flushes, until it is over.
async fn worker(store: Rc<NbdStore>, place: u64, rounds: Rc<Cell<u64>>, over: Rc<Cell<bool>>) {
    let mut page = PageBuf::zeroed(REQUEST_LEN);
    let at = place * REQUEST_LEN as u64;
    while !over.get() {
        let (read, written);
        (page, read) = store.read_into(at, page, 0..REQUEST_LEN).await;
        read.unwrap();
        (page, written) = store.write_from(at, page, 0..REQUEST_LEN).await;
        written.unwrap();
        store.flush().await.unwrap();
        rounds.set(rounds.get() + 1);
    }
}

#[test]
fn after_the_first_ones_requests_allocate_nothing_and_share_system_calls() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || serve(theirs));
    let uring = Uring::new(UringConfig::default()).unwrap();
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    let tasks = uring.tasks().clone();
    let mut executor = Executor::new(tasks.clone(), Inbox::<()>::new(1), |()| async {}, polling);
    let ring = uring.clone();
    let (rounds, allocations, enters) = executor.block_on(&uring, &mut (), async move {
        let target = "nbd+unix:///?socket=/nonexistent&reconnect=0".parse().unwrap();
        // Flags: it has some, and flush.
        let export = ExportInfo { len: LEN, flags: 5, ..ExportInfo::default() };
        let store = Rc::new(NbdStore::over(&ring, target, ours.into(), Style::Simple, export).unwrap());
        let (rounds, over) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        for place in 0..DEPTH {
            let (store, rounds, over) = (Rc::clone(&store), Rc::clone(&rounds), Rc::clone(&over));
            tasks.spawn(worker(store, place, rounds, over));
        }
        let reached = async |wanted: u64| {
            let notify = Notify::default();
            while rounds.get() < wanted {
                let until = Io::now_ns(&ring) + 1_000_000;
                notify.wait_until(&tasks, until).await;
                notify.notify_all(&tasks);
            }
        };
        reached(2_000).await;
        let before = (rounds.get(), allocations(), ring.counters().enters);
        reached(before.0 + 2_000).await;
        let after = (rounds.get(), allocations(), ring.counters().enters);
        over.set(true);
        (after.0 - before.0, after.1 - before.1, after.2 - before.2)
    });
    executor.end(&uring);
    server.join().unwrap();
    assert!(rounds >= 2_000);
    assert!(allocations <= 4, "{allocations} allocations for {} requests", rounds * 3);
    // A reception at most for each request, however the other thread's replies fall.
    assert!(enters <= rounds * 3 + 1_000, "{enters} calls of the ring for {} requests", rounds * 3);
}
