//! Clients that do not keep to the protocol, or keep to it and do harm.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use tapio_front::nbd::client::{Client, ClientOptions, Haggle};
use tapio_front::nbd::limits::{HANDSHAKES_MAX, HELD_LEN_MAX};
use tapio_front::nbd::wire::{
    OPTION_MAGIC, RequestHeader, Style, command, command_flag, option, put_request,
};

use super::{Rig, TIMEOUT, pattern, wait_until};

fn raw(rig: &Rig) -> UnixStream {
    let stream = UnixStream::connect(&rig.socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// A stream that is past the handshake.
fn in_transmission(rig: &Rig, style: Style) -> UnixStream {
    let stream = UnixStream::from(rig.client_of(style).into_fd());
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn request(command: u16, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let header = RequestHeader { flags: 0, command, cookie: 1, offset, len };
    put_request(Style::Structured, &header, &mut bytes);
    bytes
}

/// Waits until the server has closed the stream, reading what it still says.
fn wait_closed(mut stream: UnixStream) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "not closed in time: {error}");
        }
    }
}

fn still_works(rig: &Rig) {
    let mut client = rig.client();
    let bytes = pattern(5, 4096);
    client.write(8192, &bytes, false).unwrap();
    assert_eq!(client.read(8192, 4096).unwrap(), bytes);
    client.disconnect().unwrap();
}

#[test]
fn half_a_header_of_any_length_harms_no_other_client() {
    let rig = Rig::new(1 << 20);
    let whole = request(command::WRITE, 0, 4096);
    for cut in 1..whole.len() {
        let mut stream = in_transmission(&rig, Style::Structured);
        stream.write_all(&whole[..cut]).unwrap();
    }
    // And a whole header with a part of its payload.
    for len in [0, 1, 511, 4095] {
        let mut stream = in_transmission(&rig, Style::Structured);
        stream.write_all(&whole).unwrap();
        stream.write_all(&vec![1; len]).unwrap();
    }
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
    assert_eq!(rig.image(0, 4096), vec![0; 4096], "a torn write reached the disk");
    still_works(&rig);
}

#[test]
fn a_large_write_that_stops_half_way_gives_its_memory_back() {
    let rig = Rig::new(64 << 20);
    for len in [100 << 10, 3 << 20, 20 << 20] {
        let mut stream = in_transmission(&rig, Style::Structured);
        stream.write_all(&request(command::WRITE, 0, 32 << 20)).unwrap();
        stream.write_all(&vec![1; len]).unwrap();
        drop(stream);
    }
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
    still_works(&rig);
}

#[test]
fn garbage_after_the_handshake_ends_the_connection() {
    let rig = Rig::new(1 << 20);
    let mut stream = in_transmission(&rig, Style::Structured);
    stream.write_all(&[0x55; 28]).unwrap();
    wait_closed(stream);
    let mut stream = in_transmission(&rig, Style::Extended);
    stream.write_all(&request(command::READ, 0, 512)).unwrap();
    wait_closed(stream);
    let mut stream = in_transmission(&rig, Style::Structured);
    stream.write_all(&request(command::WRITE, 0, u64::from(u32::MAX))).unwrap();
    wait_closed(stream);
    // What came before the garbage is still answered.
    let mut stream = in_transmission(&rig, Style::Structured);
    stream.write_all(&[request(command::FLUSH, 0, 0), vec![0xff; 64]].concat()).unwrap();
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    wait_closed(stream);
    wait_until(|| rig.server.counters().protocol_errors == 4, "four protocol errors");
    still_works(&rig);
}

#[test]
fn garbage_in_the_handshake_ends_it() {
    let rig = Rig::new(1 << 20);
    let option = |option: u32, len: u32| {
        [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes()].concat()
    };
    let flags = 3u32.to_be_bytes().to_vec();
    let flood: Vec<u8> = (0..2000).flat_map(|_| option(option::LIST, 0)).collect();
    for bytes in [
        vec![0xff; 4],
        [flags.clone(), vec![0; 16]].concat(),
        [flags.clone(), option(option::GO, u32::MAX)].concat(),
        [flags.clone(), option(option::EXPORT_NAME, 0x7fff_ffff)].concat(),
        [flags.clone(), flood].concat(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ] {
        let mut stream = raw(&rig);
        // The server may close before it has read everything.
        let _ = stream.write_all(&bytes);
        wait_closed(stream);
    }
    still_works(&rig);
    assert_eq!(rig.server.counters().handshakes_failed, 6);
}

#[test]
fn slow_handshakes_give_way_to_a_client_that_means_it() {
    let rig = Rig::new(1 << 20);
    let idle: Vec<_> = (0..HANDSHAKES_MAX * 2).map(|_| raw(&rig)).collect();
    still_works(&rig);
    assert!(rig.server.counters().handshakes_evicted > 0, "it waited until the others met their deadline");
    drop(idle);
}

#[test]
fn a_handshake_that_trickles_meets_its_deadline() {
    let rig = Rig::new(1 << 20);
    let mut stream = raw(&rig);
    let begin = Instant::now();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    let mut far = stream.try_clone().unwrap();
    let closed = std::thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = far.read_to_end(&mut rest);
        begin.elapsed()
    });
    // One byte a second would last an hour.
    for byte in OPTION_MAGIC.to_be_bytes().iter().cycle().take(90) {
        std::thread::sleep(Duration::from_secs(1));
        if stream.write_all(&[*byte]).is_err() {
            break;
        }
    }
    let elapsed = closed.join().unwrap();
    assert!((9..60).contains(&elapsed.as_secs()), "closed after {elapsed:?}");
}

#[test]
fn ten_thousand_connections_in_turn_leave_nothing_behind() {
    let rig = Rig::new(1 << 20);
    let count_fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    still_works(&rig);
    rig.wait_connections(0);
    let before = count_fds();
    for index in 0..10_000 {
        if index % 32 == 0 {
            // A client that is gone keeps its place until the data thread has noticed.
            rig.wait_connections(0);
        }
        match index % 4 {
            0 => drop(raw(&rig)),
            1 => drop(Haggle::begin(&rig.address(), TIMEOUT).unwrap()),
            2 => drop(rig.client()),
            _ => {
                let mut client = rig.client();
                client.send(command::READ, 0, 0, 4096, &[]).unwrap();
            }
        }
    }
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
    // The listener alone is left of the server's sockets, which all have its name.
    let sockets = || {
        let all = std::fs::read_to_string("/proc/net/unix").unwrap();
        all.lines().filter(|line| line.ends_with(rig.socket.to_str().unwrap())).count()
    };
    wait_until(|| sockets() == 1, "connections to be closed");
    // Other tests of this process have hundreds of files of their own, but not one for each of these connections.
    wait_until(|| count_fds() < before + 1500, "descriptors to be closed");
    still_works(&rig);
}

#[test]
fn a_client_that_never_reads_holds_only_its_own_memory_and_the_others_go_on() {
    let rig = Rig::new(64 << 20);
    let mut hogs = Vec::new();
    for _ in 0..40 {
        let stream = in_transmission(&rig, Style::Structured);
        stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        let reads: Vec<u8> = (0..64).flat_map(|_| request(command::READ, 0, 8 << 20)).collect();
        let _ = (&stream).write_all(&reads);
        hogs.push(stream);
    }
    let mut client = rig.client();
    let begin = Instant::now();
    for round in 0..20u64 {
        let bytes = pattern(round, 3 << 20);
        client.write(round << 20, &bytes, false).unwrap();
        assert!(client.read(round << 20, 3 << 20).unwrap() == bytes);
    }
    assert!(begin.elapsed() < TIMEOUT, "starved: {:?}", begin.elapsed());
    let used = rig.pool_used();
    assert!(used <= 32 << 20, "the hogs hold {used} bytes");
    drop(hogs);
    rig.wait_connections(1);
    wait_until(|| rig.pool_used() <= HELD_LEN_MAX, "memory to come back");
    client.disconnect().unwrap();
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
}

#[test]
fn a_client_that_stops_in_the_middle_of_writes_does_not_starve_the_others() {
    let rig = Rig::new(64 << 20);
    let mut hogs = Vec::new();
    for _ in 0..60 {
        let mut stream = in_transmission(&rig, Style::Structured);
        stream.write_all(&request(command::WRITE, 0, 32 << 20)).unwrap();
        stream.write_all(&[1; 300 << 10]).unwrap();
        hogs.push(stream);
    }
    let mut client = rig.client();
    for round in 0..20u64 {
        let bytes = pattern(round, 1 << 20);
        client.write(40 << 20, &bytes, round % 2 == 0).unwrap();
        assert!(client.read(40 << 20, 1 << 20).unwrap() == bytes);
    }
    drop(hogs);
    rig.wait_connections(1);
}

#[test]
fn a_client_that_leaves_with_requests_in_flight_is_cleaned_up_after() {
    let rig = Rig::new(64 << 20);
    for round in 0..50u64 {
        let mut stream = in_transmission(&rig, Style::Structured);
        let mut bytes: Vec<u8> = (0..round).flat_map(|i| request(command::READ, i * 4096, 1 << 20)).collect();
        bytes.extend(request(command::BLOCK_STATUS, 0, 64 << 20));
        bytes.extend(request(command::FLUSH, 0, 0));
        if round % 2 == 0 {
            bytes.extend(request(command::DISC, 0, 0));
        }
        stream.write_all(&bytes).unwrap();
    }
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
    still_works(&rig);
}

#[test]
fn extended_lengths_beyond_all_bounds_are_refused() {
    let rig = Rig::new(1 << 20);
    let mut client = rig.client_of(Style::Extended);
    for command in
        [command::READ, command::TRIM, command::WRITE_ZEROES, command::CACHE, command::BLOCK_STATUS]
    {
        for (offset, len) in
            [(0, u64::MAX), (u64::MAX, 512), (u64::MAX - 511, u64::MAX - 511), (512, 1 << 62)]
        {
            let reply = client.call(command, 0, offset, len, &[]).unwrap();
            assert!(reply.error.is_some(), "{command} {offset} {len}");
        }
    }
    // A payload that a command does not take is read past.
    let payload = [9; 100];
    let reply = client.call(command::TRIM, command_flag::PAYLOAD_LEN, 0, 100, &payload).unwrap();
    assert!(reply.error.is_some());
    client.read(0, 512).unwrap();
    client.disconnect().unwrap();
}

#[test]
fn a_goodbye_with_replies_unread_is_not_waited_for_for_ever() {
    let rig = Rig::new(64 << 20);
    let mut stream = in_transmission(&rig, Style::Structured);
    // More than the socket's buffers hold, less than would keep the server from reading on to the goodbye.
    let reads: Vec<u8> = (0..7).flat_map(|_| request(command::READ, 0, 1 << 20)).collect();
    stream.write_all(&[reads, request(command::DISC, 0, 0)].concat()).unwrap();
    wait_until(|| rig.server.connections().iter().any(|info| info.requests == 8), "the goodbye to be read");
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
    drop(stream);
    let options = ClientOptions { export: "disk".into(), style: Style::Simple, allocation: false };
    Client::connect(&rig.address(), &options, TIMEOUT).unwrap().disconnect().unwrap();
}

/// A seeded stream of requests, sensible and not, cut somewhere.
fn random_stream(seed: u64, style: Style) -> Vec<u8> {
    let dice = pattern(seed, 4096);
    let mut dice = dice.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
    let mut roll = |sides: u64| dice.next().unwrap_or(0) % sides;
    let mut bytes = Vec::new();
    for cookie in 0..roll(60) {
        let command = roll(10) as u16;
        let command = if command == command::DISC { command::READ } else { command };
        let offset =
            [0, 512, 4096, 1 << 20, (8 << 20) - 512, u64::MAX - 100, roll(u64::MAX)][roll(7) as usize];
        let len = [0, 512, 4096, 300 << 10, 3 << 20, roll(1 << 16), roll(1 << 33)][roll(7) as usize];
        let len = if style == Style::Extended { len } else { len & 0xffff_ffff };
        let flags = if roll(3) == 0 { roll(64) as u16 } else { 0 };
        put_request(style, &RequestHeader { flags, command, cookie, offset, len }, &mut bytes);
        if command == command::WRITE {
            // Sometimes not as long as announced: what follows is then taken for data.
            let sent = if roll(8) == 0 { roll(1 << 16) } else { len };
            bytes.resize(bytes.len() + sent.min(4 << 20) as usize, 0x5a);
        }
    }
    bytes.truncate(bytes.len() - roll(64).min(bytes.len() as u64) as usize);
    bytes
}

#[test]
fn no_stream_of_requests_harms_the_server() {
    let rig = Rig::new(8 << 20);
    for seed in 1..=300 {
        let style = [Style::Simple, Style::Structured, Style::Extended][seed as usize % 3];
        let stream = in_transmission(&rig, style);
        let mut reader = stream.try_clone().unwrap();
        let answers = std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
        let _ = (&stream).write_all(&random_stream(seed, style));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = answers.join().unwrap();
    }
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
    still_works(&rig);
}
