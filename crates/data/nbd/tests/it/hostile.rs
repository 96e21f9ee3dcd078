//! Servers that say what they should not. The storage neither trusts nor waits for them, and goes on with the next.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tapio_nbd::wire::{
    EXTENDED_REPLY_MAGIC, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, option, option_reply,
};
use tapio_ring::Storage;

use crate::rig::{Place, TIMEOUT, on_ring, open, read, write};

const LEN: u64 = 1 << 20;

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, payload: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    out.extend_from_slice(payload);
}

/// Talks through the handshake; structured replies if `structured`.
fn greet(stream: &mut UnixStream, structured: bool) -> std::io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream
        .write_all(&[&MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &3u16.to_be_bytes()].concat())?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let option = u32::from_be_bytes([header[8], header[9], header[10], header[11]]);
        let len = u32::from_be_bytes([header[12], header[13], header[14], header[15]]);
        stream.read_exact(&mut vec![0; len as usize])?;
        let mut out = Vec::new();
        match option {
            option::STRUCTURED_REPLY if structured => reply(&mut out, option, option_reply::ACK, &[]),
            option::GO => {
                // Size, then flags: has flags, flush, trim, zeroes.
                let export = [&[0, 0][..], &LEN.to_be_bytes(), &0x65u16.to_be_bytes()].concat();
                reply(&mut out, option, option_reply::INFO, &export);
                reply(&mut out, option, option_reply::ACK, &[]);
            }
            _ => reply(&mut out, option, option_reply::ERR_UNSUP, &[]),
        }
        stream.write_all(&out)?;
        if option == option::GO {
            return Ok(());
        }
    }
}

/// The cookie of the next request, whose header is read.
fn next(stream: &mut UnixStream) -> std::io::Result<u64> {
    let mut header = [0; 28];
    stream.read_exact(&mut header)?;
    Ok(u64::from_be_bytes(header[8..16].try_into().unwrap()))
}

fn simple(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
    [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    [
        &STRUCTURED_REPLY_MAGIC.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &(payload.len() as u32).to_be_bytes(),
        payload,
    ]
    .concat()
}

/// Serves connections, one after the other: the first ones as `lie` says, from the `honest`-th on as is right.
fn serve(place: &Place, structured: bool, lies: usize, lie: impl Fn(u64) -> Vec<u8> + Send + 'static) {
    let listener = UnixListener::bind(place.socket()).unwrap();
    std::thread::spawn(move || {
        for connection in 0.. {
            let Ok((mut stream, _)) = listener.accept() else { return };
            if greet(&mut stream, structured).is_err() {
                continue;
            }
            while let Ok(cookie) = next(&mut stream) {
                let answer = if connection < lies {
                    lie(cookie)
                } else if structured {
                    let data = [&0u64.to_be_bytes()[..], &[9; 4096]].concat();
                    chunk(1, 1, cookie, &data)
                } else {
                    simple(0, cookie, &[9; 4096])
                };
                if stream.write_all(&answer).is_err() {
                    break;
                }
                if connection < lies {
                    // And nothing more on this one, but it stays open: half closed.
                    let _ = stream.shutdown(std::net::Shutdown::Read);
                    let _ = stream.read(&mut [0; 1]);
                    break;
                }
            }
            if connection > 50 {
                return;
            }
        }
    });
}

#[test]
fn every_lie_costs_the_connection_and_the_request_is_asked_again() {
    type Lie = (&'static str, bool, fn(u64) -> Vec<u8>);
    let lies: [Lie; 14] = [
        ("another cookie", false, |cookie| simple(0, cookie ^ 1, &[9; 4096])),
        ("a generation that is gone", false, |cookie| simple(0, cookie ^ (1 << 40), &[9; 4096])),
        ("a place that is none", false, |cookie| simple(0, cookie | 0xffff_ff00, &[9; 4096])),
        ("garbage", false, |_| vec![0xa5; 64]),
        ("extended where none was agreed", true, |_| EXTENDED_REPLY_MAGIC.to_be_bytes().repeat(10)),
        ("simple data where chunks were agreed", true, |cookie| simple(0, cookie, &[9; 4096])),
        ("data before the range", true, |cookie| {
            chunk(1, 1, cookie, &[&(u64::MAX - 4095).to_be_bytes()[..], &[9; 4096]].concat())
        }),
        ("data behind the range", true, |cookie| {
            chunk(1, 1, cookie, &[&4096u64.to_be_bytes()[..], &[9; 512]].concat())
        }),
        ("too much data", true, |cookie| {
            chunk(1, 1, cookie, &[&0u64.to_be_bytes()[..], &[9; 8192]].concat())
        }),
        ("too little data", true, |cookie| {
            chunk(1, 1, cookie, &[&0u64.to_be_bytes()[..], &[9; 512]].concat())
        }),
        ("the same data twice", true, |cookie| {
            let once = chunk(0, 1, cookie, &[&0u64.to_be_bytes()[..], &[9; 4096]].concat());
            [once.clone(), once].concat()
        }),
        ("a hole of all there is", true, |cookie| {
            chunk(1, 2, cookie, &[&0u64.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat())
        }),
        ("extents for a read", true, |cookie| chunk(1, 5, cookie, &[0; 12])),
        ("a chunk of no known kind", true, |cookie| chunk(1, 77, cookie, &[0; 12])),
    ];
    for (what, structured, lie) in lies {
        let place = Place::new();
        serve(&place, structured, 2, lie);
        let target = place.target("", "reconnect=60");
        on_ring(|uring| async move {
            let store = open(&uring, &target).await.unwrap();
            assert_eq!(store.len(), LEN);
            let found = read(&store, 0, 4096).await;
            assert!(found.is_ok_and(|bytes| bytes == [9; 4096]), "{what}");
        });
    }
}

#[test]
fn a_server_that_only_lies_is_given_up() {
    let place = Place::new();
    serve(&place, false, usize::MAX, |_| vec![0xa5; 64]);
    let target = place.target("", "reconnect=1");
    on_ring(|uring| async move {
        let store = open(&uring, &target).await.unwrap();
        let begin = Instant::now();
        let error = read(&store, 0, 4096).await.unwrap_err();
        assert!(error.to_string().contains("does not keep to the protocol"), "{error}");
        assert!(begin.elapsed() < TIMEOUT);
    });
}

#[test]
fn an_error_before_all_of_a_write_was_taken_waits_until_its_memory_is_free() {
    let place = Place::new();
    let listener = UnixListener::bind(place.socket()).unwrap();
    let taking = Arc::new(AtomicBool::new(false));
    let takes = Arc::clone(&taking);
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        greet(&mut stream, false).unwrap();
        let cookie = next(&mut stream).unwrap();
        stream.write_all(&simple(28, cookie, &[])).unwrap();
        // The data is taken only now. A client that tells the error before it is taken tells it in this time: no state
        // shows that it will not. A test that is late proves less, and does not fail.
        std::thread::sleep(Duration::from_millis(200));
        takes.store(true, Ordering::SeqCst);
        let mut data = vec![0; LEN as usize];
        stream.read_exact(&mut data).unwrap();
        assert!(data.iter().all(|byte| *byte == 5), "the memory was used for something else meanwhile");
        let cookie = next(&mut stream).unwrap();
        stream.write_all(&simple(0, cookie, &[9; 512])).unwrap();
        // The goodbye, or the end.
        let _ = stream.read(&mut [0; 64]);
    });
    let target = place.target("", "reconnect=0");
    on_ring(|uring| async move {
        let store = open(&uring, &target).await.unwrap();
        let error = write(&store, 0, &vec![5; LEN as usize]).await.unwrap_err();
        assert!(taking.load(Ordering::SeqCst), "told before the memory was free");
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(read(&store, 0, 512).await.unwrap(), [9; 512]);
    });
    server.join().unwrap();
}

#[test]
fn an_endless_handshake_ends() {
    for kind in [0u8, 1, 2] {
        let place = Place::new();
        let listener = UnixListener::bind(place.socket()).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let greeting =
                [&MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &3u16.to_be_bytes()].concat();
            if kind > 0 {
                let _ = stream.write_all(&greeting);
            }
            let mut more = Vec::new();
            reply(&mut more, option::EXTENDED_HEADERS, option_reply::INFO, &[0; 1000]);
            // Says the same again and again, or something that is no greeting.
            let said = if kind == 0 { vec![b'x'; 100] } else { more };
            for _ in 0..5000 {
                if kind == 2 || stream.write_all(&said).is_err() {
                    return;
                }
            }
        });
        let target = place.target("", "");
        let begin = Instant::now();
        let failed = on_ring(|uring| async move { open(&uring, &target).await.is_err() });
        assert!(failed && begin.elapsed() < TIMEOUT);
    }
}
