//! Other people's servers: what is written is read, by us and by what they keep it in.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use tapio_load::Random;
use tapio_nbd::NbdStore;
use tapio_ring::{PageBuf, Segments, Storage, Zeroing};
use tapio_types::{Access, Span};

use crate::rig::{Place, Server, all, has, on_ring, open, pattern, pause, read, write};

const LEN: u64 = 32 << 20;

/// Many requests of all sizes at once, each on a range of its own, against what they should have left.
async fn exercise(uring: tapio_ring::uring::Uring, store: NbdStore) -> Vec<u8> {
    const PARTS: u64 = 64;
    let part_len = LEN / PARTS;
    let store = Rc::new(store);
    let jobs = (0..PARTS).map(|part| {
        let store = Rc::clone(&store);
        async move {
            let mut random = Random::new(part + 1);
            let start = part * part_len;
            let mut model = vec![0; part_len as usize];
            for round in 0..12 {
                let at = random.below(part_len / 512) * 512;
                let len = (random.below(if round == 7 { part_len / 512 } else { 64 }) + 1) * 512;
                let len = len.min(part_len - at);
                let range = at as usize..(at + len) as usize;
                match random.below(4) {
                    0 | 1 => {
                        let bytes = pattern(part * 100 + round, len as usize);
                        write(&store, start + at, &bytes).await.unwrap();
                        model[range].copy_from_slice(&bytes);
                    }
                    2 => {
                        let how = if random.below(2) == 0 { Zeroing::Unmap } else { Zeroing::Keep };
                        store.zero(Span::new(start + at, len), how).await.unwrap();
                        model[range].fill(0);
                    }
                    _ => {
                        let found = read(&store, start + at, len as usize).await.unwrap();
                        assert!(found == model[range], "part {part}, round {round}");
                    }
                }
            }
            let found = read(&store, start, part_len as usize).await.unwrap();
            assert!(found == model, "part {part} at the end");
        }
    });
    all(&uring, jobs.collect()).await;
    store.flush().await.unwrap();
    read(&store, 0, LEN as usize).await.unwrap()
}

fn exercise_file(place: &Place, options: &'static str) {
    let target = place.target("", options);
    let found = on_ring(|uring| async move {
        let store = open(&uring, &target).await.unwrap();
        assert_eq!(store.len(), LEN);
        exercise(uring, store).await
    });
    let mut kept = vec![0; LEN as usize];
    File::open(place.path("disk")).unwrap().read_exact_at(&mut kept, 0).unwrap();
    assert!(found == kept, "the file of the server holds something else");
}

fn file(place: &Place) -> String {
    let path = place.path("disk");
    File::create(&path).unwrap().set_len(LEN).unwrap();
    path.display().to_string()
}

#[test]
fn nbdkit_keeps_what_is_written() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let path = file(&place);
    let _server = Server::nbdkit(&place, &["file", &path]);
    exercise_file(&place, "");
    file(&place);
    exercise_file(&place, "connections=4");
}

#[test]
fn requests_that_come_together_go_by_all_connections() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let log = place.path("log");
    let _server =
        Server::nbdkit(&place, &["--filter=log", "memory", "32M", &format!("logfile={}", log.display())]);
    let target = place.target("", "connections=4");
    on_ring(|uring| async move {
        let store = Rc::new(open(&uring, &target).await.unwrap());
        while store.connections() < 4 {
            pause(&uring, 1).await;
        }
        let reads = (0..16).map(|number| {
            let store = Rc::clone(&store);
            async move { drop(read(&store, number << 16, 1 << 16).await.unwrap()) }
        });
        all(&uring, reads.collect()).await;
    });
    let log = std::fs::read_to_string(&log).unwrap();
    let of =
        |number: u32| log.lines().filter(|line| line.contains(&format!("connection={number} Read "))).count();
    // The one that asked whether it listens may have been the first.
    let counts: Vec<_> = (1..=5).map(of).filter(|count| *count > 0).collect();
    assert!(counts.len() == 4 && counts.iter().sum::<usize>() == 16, "{counts:?}: {log}");
}

#[test]
fn qemu_nbd_keeps_what_is_written() {
    if !has("qemu-nbd") {
        return;
    }
    let place = Place::new();
    let path = file(&place);
    let socket = place.socket().display().to_string();
    let arguments = ["-f", "raw", "-k", &socket, "-e", "4", "-t", "--cache=writeback", &path];
    let _server = Server::start(&place, "qemu-nbd", &arguments);
    exercise_file(&place, "connections=2");
}

#[test]
fn requests_larger_than_the_server_takes_are_split_and_scattered_memory_is_filled() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let arguments = [
        "--filter=blocksize-policy",
        "memory",
        "8M",
        "blocksize-minimum=512",
        "blocksize-preferred=4K",
        "blocksize-maximum=64K",
        "blocksize-error-policy=error",
    ];
    let _server = Server::nbdkit(&place, &arguments);
    let target = place.target("", "");
    on_ring(|uring| async move {
        let store = open(&uring, &target).await.unwrap();
        assert_eq!(store.info().align, 512);
        let bytes = pattern(3, 1 << 20);
        write(&store, 4096, &bytes).await.unwrap();
        assert!(read(&store, 4096, 1 << 20).await.unwrap() == bytes);
        // 704 pieces: more than go into one send or one reception.
        let pieces: Vec<PageBuf> = (0..704).map(|_| PageBuf::zeroed(512)).collect();
        let base = |piece: &PageBuf| std::ptr::from_ref::<[u8]>(piece).cast_mut().cast();
        let table: Vec<_> =
            pieces.iter().map(|piece| libc::iovec { iov_base: base(piece), iov_len: 64 }).collect();
        // SAFETY: the pieces and the table outlive the operations, which are awaited here.
        let scattered = unsafe { Segments::from_iovecs(&table, 64 * 704) };
        store.read(4096, scattered).await.unwrap();
        for (index, piece) in pieces.iter().enumerate() {
            assert_eq!(piece[..64], bytes[index * 64..][..64]);
        }
        store.write(2 << 20, scattered).await.unwrap();
        assert!(read(&store, 2 << 20, 64 * 704).await.unwrap() == bytes[..64 * 704]);
    });
}

#[test]
fn holes_are_known_after_asking_once() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let _server = Server::nbdkit(&place, &["memory", "1G"]);
    let target = place.target("", "");
    on_ring(|uring| async move {
        let store = open(&uring, &target).await.unwrap();
        write(&store, 64 << 20, &pattern(1, 4096)).await.unwrap();
        assert_eq!(store.data_run(Span::new(0, 1 << 30)).await, (1 << 30, true), "nothing is known yet");
        let (len, has_data) = store.known_runs(Span::new(0, 1 << 30), 1).await[0];
        assert_eq!((len, has_data), (64 << 20, false));
        assert_eq!(store.data_run(Span::new(4096, 4096)).await, (4096, false));
        assert!(store.data_run(Span::new(64 << 20, 4096)).await.1);
        write(&store, 0, &pattern(2, 512)).await.unwrap();
        assert_eq!(store.data_run(Span::new(0, 4096)).await, (4096, true), "forgotten by writing");
        assert!(store.known_runs(Span::new(0, 1 << 30), 1).await[0].1);
    });
}

#[test]
fn what_the_server_refuses_fails_with_its_reason_and_nothing_else_does() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let arguments = ["--filter=error", "memory", "8M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"];
    let _server = Server::nbdkit(&place, &arguments);
    let target = place.target("", "");
    on_ring(|uring| async move {
        let store = open(&uring, &target).await.unwrap();
        let error = write(&store, 0, &[1; 512]).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        store.flush().await.unwrap();
        assert_eq!(read(&store, 0, 512).await.unwrap(), [0; 512]);
        assert!(read(&store, 8 << 20, 512).await.is_err(), "outside");
        let full = write(&store, 8 << 20, &[1; 512]).await.unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    });
}

#[test]
fn an_export_that_cannot_be_what_is_asked_is_refused_with_a_reason() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let none = place.target("", "");
    let error = on_ring(move |uring| async move { open(&uring, &none).await.unwrap_err() });
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    let _server = Server::nbdkit(&place, &["-r", "memory", "8M"]);
    let target = place.target("", "");
    on_ring(|uring| async move {
        let error = open(&uring, &target).await.unwrap_err().to_string();
        assert!(error.contains("read-only"), "{error}");
        let only = NbdStore::open(&uring, target.parse().unwrap(), Access::ReadOnly, |_| {}).await.unwrap();
        assert!(read(&only, 0, 512).await.is_ok());
        assert_eq!(write(&only, 0, &[1; 512]).await.unwrap_err().raw_os_error(), Some(libc::EROFS));
        only.flush().await.unwrap();
    });
}

#[test]
fn large_blocks_are_refused_with_a_way_out() {
    if !has("nbdkit") {
        return;
    }
    let place = Place::new();
    let sizes = ["blocksize-minimum=16K", "blocksize-preferred=16K", "blocksize-maximum=64K"];
    let _server =
        Server::nbdkit(&place, &[&["--filter=blocksize-policy", "memory", "8M"][..], &sizes[..]].concat());
    let target = place.target("", "");
    let error = on_ring(|uring| async move { open(&uring, &target).await.unwrap_err().to_string() });
    assert!(error.contains("blocks of 16384 bytes") && error.contains("--filter=blocksize"), "{error}");
}
