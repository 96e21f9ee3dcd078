//! What is dropped, or forgotten, before its end: on a socket, where the operation is in flight until data comes.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::Command;
use std::rc::Rc;
use std::task::Poll;

use super::*;
use crate::sim::{Latency, SimHost};
use crate::uring::{Uring, UringConfig};
use crate::{Driver, Executor, Inbox, Io, PageBuf, Polling, PollingConfig, Pool, Storage};

const LEN: usize = 8192;

type Nothing = std::future::Ready<()>;

fn executor(tasks: &crate::Tasks) -> Executor<(), Nothing, fn(()) -> Nothing> {
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    Executor::new(tasks.clone(), Inbox::new(1), std::future::ready::<()>, polling)
}

/// Lets `future` begin.
async fn begin<F: Future + ?Sized>(mut future: Pin<&mut F>) {
    poll_fn(|context| {
        assert!(future.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
}

/// Begins a reception into `pool` and lets `end` do with the future what it likes; then data comes, and the memory is
/// looked at by its holder. Whether there was a ring.
fn receive(pool: &Pool, end: impl FnOnce(Pin<Box<dyn Future<Output = ()>>>) + 'static) -> bool {
    let Ok(uring) = Uring::new(UringConfig { entries: 4, ..UringConfig::default() }) else { return false };
    let (mut far, near) = UnixStream::pair().expect("sockets");
    let buffer = pool.take(LEN).expect("memory");
    let running = uring.clone();
    executor(uring.tasks()).block_on(&uring, &mut (), async move {
        let ring = running.clone();
        let mut received: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move {
            let (_, _) = ring.recv(near.as_raw_fd(), buffer, 0..LEN, true).await;
            drop(near);
        });
        begin(received.as_mut()).await;
        running.turn(false, None);
        assert_eq!(running.tasks().inner.ops_flying.get(), 1);
        end(received);
        far.write_all(&[7; LEN]).expect("taken");
        running.turn(false, None);
    });
    // The completion has its place again.
    while uring.tasks().inner.ops_flying.get() > 0 {
        uring.turn(true, None);
    }
    true
}

#[test]
fn what_is_dropped_in_flight_is_counted_and_its_memory_is_never_given_to_another() {
    set_on_drop(OnDrop::Count);
    let (pool, before) = (Pool::new(1 << 20).expect("memory"), dropped());
    if !receive(&pool, drop) {
        return;
    }
    assert!(dropped() >= before + 2, "the operation, and its memory");
    assert_eq!(pool.free_len(), pool.len() - LEN);
}

#[test]
fn what_is_forgotten_in_flight_keeps_its_memory() {
    let pool = Pool::new(1 << 20).expect("memory");
    if receive(&pool, std::mem::forget) {
        assert_eq!(pool.free_len(), pool.len() - LEN);
    }
}

#[test]
fn what_a_thread_has_in_flight_at_its_end_is_cancelled_and_its_memory_given_back() {
    let Ok(uring) = Uring::new(UringConfig { entries: 4, ..UringConfig::default() }) else { return };
    let (_far, near) = UnixStream::pair().expect("sockets");
    let pool = Pool::new(1 << 20).expect("memory");
    let (buffer, ring) = (pool.take(LEN).expect("memory"), uring.clone());
    uring.tasks().spawn(async move {
        let (_, _) = ring.recv(near.as_raw_fd(), buffer, 0..LEN, true).await;
        std::future::pending::<()>().await;
    });
    let mut executor = executor(uring.tasks());
    let tasks = uring.tasks().clone();
    executor.block_on(&uring, &mut (), async move { tasks.yield_now().await });
    assert_eq!((uring.tasks().inner.ops_flying.get(), pool.free_len()), (1, pool.len() - LEN));
    executor.end(&uring);
    assert_eq!((uring.tasks().inner.ops_flying.get(), pool.free_len()), (0, pool.len()));
}

#[test]
fn a_killed_process_of_the_simulator_drops_what_it_likes() {
    let (host, path) = (SimHost::new(1), std::path::Path::new("disk"));
    host.put(path, &[1; LEN]);
    let (process, pool) = (host.process(), Pool::new(1 << 20).expect("memory"));
    let (opening, buffer) = (process.clone(), pool.take(LEN).expect("memory"));
    process.tasks().spawn(async move {
        let store = opening.open(path, tapio_types::Access::ReadOnly).await.expect("it is there");
        let (_, _) = store.read_into(0, buffer, 0..LEN).await;
    });
    let tasks = process.tasks().clone();
    executor(process.tasks()).block_on(&process, &mut (), async move { tasks.yield_now().await });
    assert_eq!(process.tasks().inner.ops_flying.get(), 1);
    process.end();
    host.process_killed();
    assert_eq!((process.tasks().inner.ops_flying.get(), pool.free_len()), (0, pool.len()));
}

/// Drops an operation of the simulator in flight, under the rules of a debug build. For [`a_debug_build_aborts`] alone.
#[test]
#[ignore = "ends its process"]
fn drops_an_operation() {
    set_on_drop(OnDrop::Abort);
    let (host, path) = (SimHost::new(1), std::path::Path::new("disk"));
    host.put(path, &[1; LEN]);
    host.set_latency(Some(Latency { operation_ns: 1000, flush_ns: 1000 }));
    let process = host.process();
    let opening = process.clone();
    executor(process.tasks()).block_on(&process, &mut (), async move {
        let store = opening.open(path, tapio_types::Access::ReadOnly).await.expect("it is there");
        let mut read = Box::pin(store.read_into(0, PageBuf::zeroed(LEN), 0..LEN));
        begin(read.as_mut()).await;
        drop(read);
    });
    unreachable!("it was dropped");
}

#[test]
fn a_debug_build_aborts() {
    let program = std::env::current_exe().expect("this test");
    let name = "dropped::tests::drops_an_operation";
    let ended = Command::new(program).args([name, "--exact", "--ignored", "--nocapture"]).output();
    let ended = ended.expect("it starts");
    assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{:?}", ended.status);
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("an operation was dropped in flight"), "{said}");
}
