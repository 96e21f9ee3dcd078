//! Servers that die, stall and come back while requests are in flight.

use std::fs::File;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tapio_load::Random;
use tapio_ring::Storage;

use crate::rig::{Place, Server, TIMEOUT, all, has, on_ring, open, pattern, pause, read, write};

const LEN: u64 = 8 << 20;

fn image(place: &Place) -> String {
    let path = place.path("disk");
    File::create(&path).unwrap().set_len(LEN).unwrap();
    path.display().to_string()
}

/// Set when it is dropped, by a panic too: the thread that waits for it ends.
struct SetAtEnd(Arc<AtomicBool>);

impl Drop for SetAtEnd {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_server_that_is_killed_and_restarted_again_and_again_costs_time_and_nothing_else() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let path = image(&place);
    let target = place.target("", "connections=2&reconnect=60&unflushed=keep");
    let server = Server::nbdkit(&place, &["file", &path]);
    let done = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&done);
    let (rounds, restarts) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (all_rounds, all_restarts) = (Arc::clone(&rounds), Arc::clone(&restarts));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut server = server;
            while !done.load(Ordering::Relaxed) {
                // Sixteen parts always have a request in flight: the kill comes in the middle of some.
                let seen = rounds.load(Ordering::Relaxed);
                while rounds.load(Ordering::Relaxed) < seen + 20 && !done.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                server.kill();
                // For a while there is none.
                std::thread::sleep(Duration::from_millis(20));
                server = Server::nbdkit(&place, &["file", &path]);
                restarts.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ends = SetAtEnd(ended);
        on_ring(move |uring| async move {
            let store = Rc::new(open(&uring, &target).await.unwrap());
            let parts = (0..16u64).map(|part| {
                let store = Rc::clone(&store);
                let (rounds, restarts) = (Arc::clone(&all_rounds), Arc::clone(&all_restarts));
                async move {
                    let mut random = Random::new(part);
                    let part_len = LEN / 16;
                    let mut model = vec![0; part_len as usize];
                    while restarts.load(Ordering::Relaxed) < 8 || rounds.load(Ordering::Relaxed) < 200 {
                        let at = random.below(part_len / 512 - 256) * 512;
                        let len = (random.below(255) + 1) * 512;
                        let range = at as usize..(at + len) as usize;
                        if random.below(2) == 0 {
                            let bytes = pattern(random.next(), len as usize);
                            write(&store, part * part_len + at, &bytes).await.unwrap();
                            model[range].copy_from_slice(&bytes);
                        } else {
                            let found = read(&store, part * part_len + at, len as usize).await.unwrap();
                            assert!(found == model[range], "part {part} at {at}");
                        }
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                    let found = read(&store, part * part_len, part_len as usize).await.unwrap();
                    assert!(found == model, "part {part} at the end");
                }
            });
            all(&uring, parts.collect()).await;
            store.flush().await.unwrap();
        });
    });
}

#[test]
fn writes_that_were_answered_and_not_flushed_make_the_next_flush_fail_once() {
    if !has("nbdkit") {
        return;
    }
    for (unflushed, flushed_before, fails) in
        [("fail", false, true), ("fail", true, false), ("keep", false, false)]
    {
        let place = Place::new();
        let path = image(&place);
        let target = place.target("", &format!("unflushed={unflushed}"));
        let server = Server::nbdkit(&place, &["file", &path]);
        let (to_killer, kill) = mpsc::channel();
        std::thread::scope(|scope| {
            let place = &place;
            let path = &path;
            scope.spawn(move || {
                kill.recv().unwrap();
                server.kill();
                let server = Server::nbdkit(place, &["file", path]);
                kill.recv().unwrap();
                server.kill();
            });
            on_ring(move |uring| async move {
                let store = open(&uring, &target).await.unwrap();
                write(&store, 0, &[7; 4096]).await.unwrap();
                if flushed_before {
                    store.flush().await.unwrap();
                }
                to_killer.send(()).unwrap();
                while store.connections() > 0 {
                    pause(&uring, 1).await;
                }
                // Waits for the new server.
                assert_eq!(read(&store, 0, 4096).await.unwrap(), [7; 4096]);
                let flush = store.flush().await;
                assert_eq!(flush.is_err(), fails, "{unflushed} {flushed_before}: {flush:?}");
                store.flush().await.unwrap();
                to_killer.send(()).unwrap();
            });
        });
    }
}

#[test]
fn without_a_timeout_requests_fail_at_once_and_work_again_when_the_server_is_back() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let path = image(&place);
    let target = place.target("", "reconnect=0");
    let server = Server::nbdkit(&place, &["file", &path]);
    std::thread::scope(|scope| {
        let (to_killer, kill) = mpsc::channel();
        let (place, path) = (&place, &path);
        scope.spawn(move || {
            kill.recv().unwrap();
            server.kill();
            kill.recv().unwrap();
            let _server = Server::nbdkit(place, &["file", path]);
            kill.recv().unwrap();
        });
        on_ring(move |uring| async move {
            let store = open(&uring, &target).await.unwrap();
            to_killer.send(()).unwrap();
            while store.connections() > 0 {
                pause(&uring, 1).await;
            }
            // No server comes before this has ended, and the ordinary patience is a minute.
            let begin = Instant::now();
            let error = read(&store, 0, 512).await.unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::NotConnected, "{error}");
            assert!(begin.elapsed() < TIMEOUT / 2);
            to_killer.send(()).unwrap();
            let begin = Instant::now();
            while read(&store, 0, 512).await.is_err() {
                assert!(begin.elapsed() < TIMEOUT, "it never comes back");
                pause(&uring, 10).await;
            }
            to_killer.send(()).unwrap();
        });
    });
}

#[test]
fn requests_wait_as_long_as_configured_and_then_fail() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let target = place.target("", "reconnect=1");
    let server = Server::nbdkit(&place, &["memory", "8M"]);
    on_ring(move |uring| async move {
        let store = open(&uring, &target).await.unwrap();
        server.kill();
        let begin = Instant::now();
        let error = write(&store, 0, &[1; 512]).await.unwrap_err();
        let waited = begin.elapsed();
        assert!(error.to_string().contains("unreachable"), "{error}");
        assert!(waited >= Duration::from_millis(900) && waited < TIMEOUT, "waited {waited:?}");
        // New ones need not wait again. One that fails later than that was kept by a busy host, or did wait.
        let mut fails_at_once = false;
        while !fails_at_once {
            assert!(begin.elapsed() < TIMEOUT, "new ones wait again");
            let begin = Instant::now();
            assert!(write(&store, 0, &[1; 512]).await.is_err());
            fails_at_once = begin.elapsed() < Duration::from_millis(900);
        }
    });
}

#[test]
fn a_silent_server_is_given_up_after_the_time_limit() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let target = place.target("", "timeout=1&reconnect=5");
    let server = Server::nbdkit(&place, &["memory", "8M"]);
    on_ring(move |uring| async move {
        let store = open(&uring, &target).await.unwrap();
        write(&store, 0, &[1; 512]).await.unwrap();
        server.freeze();
        // The clock of the ring's turn is from before.
        pause(&uring, 1).await;
        let begin = Instant::now();
        let error = read(&store, 0, 512).await.unwrap_err();
        let waited = begin.elapsed();
        assert!(waited >= Duration::from_millis(950) && waited < TIMEOUT, "{waited:?}: {error}");
        server.signal(libc::SIGCONT);
        let begin = Instant::now();
        while read(&store, 0, 512).await.is_err() {
            assert!(begin.elapsed() < TIMEOUT, "it never comes back");
            pause(&uring, 20).await;
        }
        assert_eq!(read(&store, 0, 512).await.unwrap(), [1; 512]);
    });
}

#[test]
fn a_slow_server_is_not_a_silent_one() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let target = place.target("", "timeout=8&reconnect=0");
    let _server = Server::nbdkit(&place, &["--filter=delay", "memory", "8M", "rdelay=600ms", "wdelay=600ms"]);
    on_ring(move |uring| async move {
        let store = Rc::new(open(&uring, &target).await.unwrap());
        // Together longer than the limit, which is for each request.
        let begin = Instant::now();
        let jobs = (0..8).map(|index| {
            let store = Rc::clone(&store);
            async move {
                for round in 0..7 {
                    write(&store, index * 4096, &[index as u8 + round; 4096]).await.unwrap();
                    let found = read(&store, index * 4096, 4096).await.unwrap();
                    assert_eq!(found, [index as u8 + round; 4096]);
                }
            }
        });
        all(&uring, jobs.collect()).await;
        assert!(begin.elapsed() >= Duration::from_secs(8));
        assert_eq!(store.connections(), 1);
    });
}

#[test]
fn an_export_that_grew_is_larger_after_the_next_connection_and_one_that_shrank_is_refused() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let path = image(&place);
    let target = place.target("", "reconnect=20");
    let server = Server::nbdkit(&place, &["file", &path]);
    std::thread::scope(|scope| {
        let (to_server, told) = mpsc::channel();
        let (place, path) = (&place, &path);
        scope.spawn(move || {
            let mut server = server;
            for len in [2 * LEN, LEN] {
                told.recv().unwrap();
                server.kill();
                File::options().write(true).open(path).unwrap().set_len(len).unwrap();
                server = Server::nbdkit(place, &["file", path]);
            }
            told.recv().unwrap();
        });
        on_ring(move |uring| async move {
            let store = open(&uring, &target).await.unwrap();
            assert_eq!(store.len(), LEN);
            to_server.send(()).unwrap();
            let begin = Instant::now();
            while store.len() == LEN {
                assert!(begin.elapsed() < TIMEOUT, "it does not grow");
                pause(&uring, 5).await;
            }
            write(&store, 2 * LEN - 512, &[3; 512]).await.unwrap();
            to_server.send(()).unwrap();
            while store.connections() > 0 {
                pause(&uring, 1).await;
            }
            let error = read(&store, 0, 512).await.unwrap_err().to_string();
            assert!(error.contains("has shrunk"), "{error}");
            assert_eq!(store.len(), 2 * LEN);
            to_server.send(()).unwrap();
        });
    });
}
