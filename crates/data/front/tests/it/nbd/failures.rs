//! A disk that fails below its clients.

use std::fs::File;

use tapio_block::DiskOptions;
use tapio_front::nbd::client::ClientError;
use tapio_front::nbd::wire::{Style, command, error};

use super::{Rig, Where, pattern};

/// Cuts the image behind the disk's back: what lies beyond cannot be read any more.
fn cut(rig: &Rig, len: u64) {
    File::options().write(true).open(&rig.path).unwrap().set_len(len).unwrap();
}

#[test]
fn a_failed_part_of_a_read_is_told_with_its_place_and_the_rest_is_there() {
    for place in [Where::Shm, Where::OnDisk] {
        let rig = Rig::with(8 << 20, place, DiskOptions::default());
        let bytes = pattern(1, 8 << 20);
        rig.client().write(0, &bytes, false).unwrap();
        cut(&rig, 5 << 20);
        for style in [Style::Structured, Style::Extended] {
            let mut client = rig.client_of(style);
            let reply = client.call(command::READ, 0, 4 << 20, 2 << 20, &[]).unwrap();
            let (number, message) = reply.error.expect("half of it is gone");
            assert_eq!(number, error::IO);
            assert!(message.contains("failed"), "{message}");
            for (at, data) in &reply.data {
                assert!(*data == bytes[*at as usize..][..data.len()]);
            }
            assert_eq!(reply.data.iter().map(|(_, data)| data.len()).sum::<usize>(), 1 << 20);
            assert!(client.read(0, 1 << 20).unwrap() == bytes[..1 << 20], "the connection goes on");
        }
        assert!(rig.server.connections().iter().all(|info| info.failures > 0));
    }
}

#[test]
fn without_structured_replies_a_late_failure_drops_the_connection_and_an_early_one_does_not() {
    let rig = Rig::new(16 << 20);
    let bytes = pattern(2, 16 << 20);
    rig.client().write(0, &bytes, false).unwrap();
    cut(&rig, 8 << 20);
    let mut client = rig.client_of(Style::Simple);
    let early = client.read(8 << 20, 8 << 20).unwrap_err();
    assert!(matches!(early, ClientError::Request { error: error::IO, .. }), "{early}");
    let small = client.read(8 << 20, 4096).unwrap_err();
    assert!(matches!(small, ClientError::Request { error: error::IO, .. }), "{small}");
    assert!(client.read(0, 8 << 20).unwrap() == bytes[..8 << 20]);
    let late = client.read(4 << 20, 8 << 20).unwrap_err();
    assert!(matches!(late, ClientError::Io(_)), "{late}");
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
}
