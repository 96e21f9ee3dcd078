//! Every command in every style, against the image itself.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use tapio_block::DiskOptions;
use tapio_front::nbd::client::{Client, ClientError, ClientOptions, Reply};
use tapio_front::nbd::wire::{
    RequestHeader, Style, allocation, command, command_flag, error, put_request, transmission_flag,
};
use tapio_front::nbd::{Export, ExportError};

use super::{Rig, TIMEOUT, Where, pattern};

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

fn refused(client: &mut Client, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) -> u32 {
    let reply: Reply = client.call(command, flags, offset, len, payload).unwrap();
    let (error, message) = reply.error.expect("must be refused");
    assert_eq!(client.style() == Style::Simple, message.is_empty(), "{message}");
    error
}

fn write_and_read(rig: &Rig, len: u64) {
    for (index, style) in STYLES.into_iter().enumerate() {
        let mut client = rig.client_of(style);
        assert_eq!(client.export().len, len);
        for (step, (at, size)) in [
            (0, 512),
            (4096, 4096),
            (512, 3 * 512),
            (65536, 64 << 10),
            (1 << 20, 1 << 20),
            (3 << 20, (5 << 20) + 512),
            (len - 512, 512),
        ]
        .into_iter()
        .enumerate()
        {
            let bytes = pattern((index * 100 + step) as u64, size);
            client.write(at, &bytes, step % 2 == 0).unwrap();
            assert!(rig.image(at, size) == bytes, "image differs: {style:?} {at} {size}");
            assert!(client.read(at, size as u64).unwrap() == bytes, "read differs: {style:?} {at} {size}");
        }
        let all = client.read(0, 32 << 20).unwrap();
        assert!(all == rig.image(0, 32 << 20), "the whole differs: {style:?}");
        client.flush().unwrap();
        client.disconnect().unwrap();
    }
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
}

#[test]
fn what_is_written_is_read_in_every_style_and_size() {
    let len = (40 << 20) + 512;
    write_and_read(&Rig::new(len), len);
    write_and_read(&Rig::with(len, Where::OnDisk, DiskOptions::default()), len);
    // A pool so small that everything has to be cut and waited for.
    let small = DiskOptions { pool_len: 1 << 20, queue_depth: 4, ..DiskOptions::default() };
    write_and_read(&Rig::with(len, Where::Shm, small), len);
}

#[test]
fn zeroes_trims_and_block_status_follow_the_image() {
    let rig = Rig::with(64 << 20, Where::Shm, DiskOptions::default());
    for style in [Style::Structured, Style::Extended] {
        let mut client = rig.client_of(style);
        assert!(client.allocation_id().is_some());
        client.zero(0, 64 << 20, 0).unwrap();
        assert_eq!(client.allocation(0, 64 << 20).unwrap(), [(64 << 20, 3)]);
        client.write(1 << 20, &pattern(1, 1 << 20), false).unwrap();
        client.write(8 << 20, &pattern(2, 4096), false).unwrap();
        let hole = u64::from(allocation::HOLE | allocation::ZERO);
        let extents = client.allocation(0, 64 << 20).unwrap();
        let expected = [(1 << 20, hole), (1 << 20, 0), (6 << 20, hole), (4096, 0), ((56 << 20) - 4096, hole)];
        assert_eq!(extents, expected);
        let one = client.call(command::BLOCK_STATUS, command_flag::REQ_ONE, 512 << 10, 8 << 20, &[]).unwrap();
        assert_eq!(one.extents, [(512 << 10, hole)]);
        // Zeroed in place: reads zero, whatever became of the space.
        client.zero(1 << 20, 64 << 10, command_flag::NO_HOLE).unwrap();
        assert!(client.read(1 << 20, 64 << 10).unwrap().iter().all(|byte| *byte == 0));
        assert!(
            client.read((1 << 20) + (64 << 10), 4096).unwrap() == rig.image((1 << 20) + (64 << 10), 4096)
        );
        client.trim(0, 2 << 20).unwrap();
        let durable = client.call(command::TRIM, command_flag::FUA, 8 << 20, 4096, &[]).unwrap();
        assert_eq!(durable.error, None);
        let durable = client.call(command::WRITE_ZEROES, command_flag::FUA, 0, 64 << 20, &[]).unwrap();
        assert_eq!(durable.error, None);
        assert!(rig.image(0, 64 << 20).iter().all(|byte| *byte == 0));
        client.call(command::CACHE, 0, 0, 64 << 20, &[]).unwrap();
        client.disconnect().unwrap();
    }
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
}

#[test]
fn what_makes_no_sense_is_refused_and_the_stream_stays_in_step() {
    let rig = Rig::new(8 << 20);
    for style in STYLES {
        let mut client = rig.client_of(style);
        let end = 8 << 20;
        let data = pattern(3, 4096);
        client.write(0, &data, false).unwrap();
        assert_eq!(refused(&mut client, command::READ, 0, end, 512, &[]), error::INVAL);
        assert_eq!(refused(&mut client, command::READ, 0, 1, 512, &[]), error::INVAL);
        assert_eq!(refused(&mut client, command::READ, 0, 0, 33 << 20, &[]), error::INVAL);
        let big = vec![7; 300 << 10];
        assert_eq!(refused(&mut client, command::WRITE, 0, end, big.len() as u64, &big), error::NOSPC);
        assert_eq!(refused(&mut client, command::WRITE, 0, 1, 511, &big[..511]), error::INVAL);
        assert_eq!(refused(&mut client, command::WRITE, 1 << 10, 0, 512, &big[..512]), error::INVAL);
        assert_eq!(refused(&mut client, command::WRITE_ZEROES, 0, end - 512, 1024, &[]), error::NOSPC);
        assert_eq!(refused(&mut client, command::TRIM, 0, end, 512, &[]), error::INVAL);
        assert_eq!(refused(&mut client, command::RESIZE, 0, 0, 1 << 20, &[]), error::INVAL);
        assert_eq!(refused(&mut client, 77, 0, 0, 0, &[]), error::INVAL);
        assert_eq!(refused(&mut client, command::FLUSH, 0, 0, 512, &[]), error::INVAL);
        let fast = command_flag::FAST_ZERO;
        assert_eq!(refused(&mut client, command::WRITE_ZEROES, fast, 0, 512, &[]), error::NOTSUP);
        if style == Style::Simple {
            assert_eq!(refused(&mut client, command::BLOCK_STATUS, 0, 0, 512, &[]), error::INVAL);
        } else {
            let df = client.call(command::READ, command_flag::DF, 0, 1 << 20, &[]).unwrap();
            assert_eq!((df.error, df.data.len()), (None, 1));
            assert_eq!(
                refused(&mut client, command::READ, command_flag::DF, 0, 4 << 20, &[]),
                error::OVERFLOW
            );
            assert_eq!(refused(&mut client, command::BLOCK_STATUS, 0, 0, 0, &[]), error::INVAL);
        }
        // Requests for nothing get nothing.
        assert!(client.read(512, 0).unwrap().is_empty());
        client.write(512, &[], true).unwrap();
        client.trim(0, 0).unwrap();
        assert_eq!(client.read(0, 4096).unwrap(), data);
        client.disconnect().unwrap();
    }
    assert_eq!(rig.server.counters().protocol_errors, 0);
}

#[test]
fn a_read_only_export_of_a_writable_disk_refuses_every_change() {
    let rig = Rig::new(1 << 20);
    let export = Export {
        read_only: true,
        description: "look, do not touch".into(),
        ..Export::new("view", rig.disk.remote().clone())
    };
    rig.server.add_export(export.clone()).unwrap();
    assert_eq!(rig.server.add_export(export), Err(ExportError::Exists("view".into())));
    let mut writer = rig.client();
    writer.write(0, &pattern(4, 4096), false).unwrap();
    let mut reader = Client::connect(&rig.address(), &ClientOptions::all("view"), TIMEOUT).unwrap();
    let flags = reader.export().flags;
    assert_ne!(flags & transmission_flag::READ_ONLY, 0);
    assert_eq!(flags & transmission_flag::SEND_TRIM, 0);
    assert_eq!(reader.export().description.as_deref(), Some("look, do not touch"));
    assert_eq!(reader.export().block_lens, Some((512, 4096, 32 << 20)));
    assert_eq!(refused(&mut reader, command::WRITE, 0, 0, 512, &[0; 512]), error::PERM);
    assert_eq!(refused(&mut reader, command::TRIM, 0, 0, 512, &[]), error::PERM);
    assert_eq!(refused(&mut reader, command::WRITE_ZEROES, 0, 0, 512, &[]), error::PERM);
    assert_eq!(reader.read(0, 4096).unwrap(), pattern(4, 4096));
    // With two exports the empty name means neither.
    let error = Client::connect(&rig.address(), &ClientOptions::all(""), TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::Option { .. }), "{error}");
    rig.server.remove_export("view", true).unwrap();
    assert!(reader.read(0, 512).is_err());
    let mut only = Client::connect(&rig.address(), &ClientOptions::all(""), TIMEOUT).unwrap();
    assert_eq!(only.export().name.as_deref(), Some("disk"));
    assert_eq!(only.read(0, 4096).unwrap(), pattern(4, 4096));
}

#[test]
fn many_requests_under_way_are_each_answered_once() {
    let rig = Rig::new(16 << 20);
    for style in STYLES {
        let mut client = rig.client_of(style);
        let (mut waiting, mut bytes) = (std::collections::BTreeMap::new(), Vec::new());
        for cookie in 0..1000u64 {
            let (command, len, payload) = match cookie % 5 {
                0 => (command::WRITE, 4096, pattern(cookie, 4096)),
                1 => (command::FLUSH, 0, Vec::new()),
                2 => (command::TRIM, 4096, Vec::new()),
                3 => (command::READ, 4096, Vec::new()),
                _ => (command::WRITE_ZEROES, 4096, Vec::new()),
            };
            let offset = if command == command::FLUSH { 0 } else { cookie % 100 * 4096 };
            let extended_write = style == Style::Extended && command == command::WRITE;
            let flags = if extended_write { command_flag::PAYLOAD_LEN } else { 0 };
            put_request(style, &RequestHeader { flags, command, cookie, offset, len }, &mut bytes);
            bytes.extend_from_slice(&payload);
            waiting.insert(cookie, if command == command::READ { len } else { 0 });
        }
        let mut stream = UnixStream::from(client.as_fd().try_clone_to_owned().unwrap());
        let sender = std::thread::spawn(move || stream.write_all(&bytes).unwrap());
        let mut reply = Reply::default();
        while !waiting.is_empty() {
            // With simple replies the length of the data follows from the request alone.
            let (cookie, done) = receive(&mut client, &waiting, &mut reply);
            if done {
                assert!(waiting.remove(&cookie).is_some(), "answered twice: {cookie}");
            }
        }
        sender.join().unwrap();
        assert_eq!(reply.error, None);
        client.disconnect().unwrap();
    }
}

/// Receives one reply whatever its request was.
fn receive(
    client: &mut Client,
    waiting: &std::collections::BTreeMap<u64, u64>,
    reply: &mut Reply,
) -> (u64, bool) {
    if client.style() != Style::Simple {
        return client.receive(0, reply).unwrap();
    }
    let (cookie, done) = client.receive(0, reply).unwrap();
    let mut left = waiting[&cookie];
    while left > 0 {
        let mut data = vec![0; left as usize];
        let got = read_raw(client, &mut data);
        left -= got as u64;
    }
    (cookie, done)
}

fn read_raw(client: &Client, into: &mut [u8]) -> usize {
    let fd = client.as_fd().try_clone_to_owned().unwrap();
    UnixStream::from(fd).read(into).unwrap()
}
