//! A disk on an export of another disk: our client against our server.

use std::path::PathBuf;

use tapio_block::{Disk, DiskOptions};
use tapio_front::nbd::client::{Address, Client, ClientOptions};
use tapio_front::nbd::{Export, NbdServer};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};

use super::{Rig, TIMEOUT, pattern};

fn over(rig: &Rig, options: &str) -> ChainSpec {
    let path = PathBuf::from(format!("{}&{options}", rig.uri()));
    let layers = vec![LayerSpec { kind: ImageKind::Nbd, path }];
    ChainSpec { layers, access: Access::ReadWrite }
}

/// A disk on the rig's export, its server, and a client of that.
fn stacked(rig: &Rig, options: &str) -> (Disk, NbdServer, Client) {
    let disk = Disk::start(over(rig, options), DiskOptions::default()).unwrap();
    let server = NbdServer::new().unwrap();
    server.add_export(Export::new("upper", disk.remote().clone())).unwrap();
    let socket = rig.socket.with_extension("upper");
    server.listen_unix(&socket, 0o600).unwrap();
    let client = Client::connect(&Address::Unix(socket), &ClientOptions::all("upper"), TIMEOUT).unwrap();
    (disk, server, client)
}

#[test]
fn what_is_written_above_lies_below() {
    let rig = Rig::new(64 << 20);
    for options in ["", "connections=4"] {
        let (disk, server, mut client) = stacked(&rig, options);
        assert_eq!(client.export().len, 64 << 20);
        let bytes = pattern(4, 3 << 20);
        client.write(1 << 20, &bytes, true).unwrap();
        assert!(rig.image(1 << 20, 3 << 20) == bytes);
        assert!(client.read(1 << 20, 3 << 20).unwrap() == bytes);
        client.zero(2 << 20, 1 << 20, 0).unwrap();
        client.flush().unwrap();
        assert!(rig.image(2 << 20, 1 << 20).iter().all(|byte| *byte == 0));
        // What is a hole below is a hole above.
        let map = client.allocation(0, 64 << 20).unwrap();
        let data: u64 = map.iter().filter(|(_, flags)| flags & 2 == 0).map(|(len, _)| len).sum();
        assert_eq!(data, 2 << 20, "{map:?}");
        client.trim(0, 64 << 20).unwrap();
        client.disconnect().unwrap();
        server.close();
        disk.close(TIMEOUT).unwrap();
    }
    // Everything said goodbye.
    rig.wait_connections(0);
    assert_eq!(rig.server.counters().vanished, 0);
}

#[test]
fn a_server_that_is_cut_off_again_and_again_is_not_noticed_above() {
    let rig = Rig::new(64 << 20);
    let (disk, server, mut client) = stacked(&rig, "connections=2&unflushed=keep");
    for round in 0..12u64 {
        for connection in rig.server.connections() {
            rig.server.close_connection(connection.id);
        }
        let bytes = pattern(round, 256 << 10);
        let at = (round % 7) << 20;
        client.write(at, &bytes, false).unwrap();
        assert!(client.read(at, 256 << 10).unwrap() == bytes, "round {round}");
    }
    client.flush().unwrap();
    client.disconnect().unwrap();
    server.close();
    disk.close(TIMEOUT).unwrap();
}

#[test]
fn an_export_that_is_not_there_says_so() {
    let rig = Rig::new(1 << 20);
    let mut spec = over(&rig, "");
    let name = rig.uri().replace("///disk", "///nothing");
    spec.layers[0].path = PathBuf::from(&name);
    rig.server.add_export(Export::new("other", rig.disk.remote().clone())).unwrap();
    let error = Disk::start(spec, DiskOptions::default()).unwrap_err().to_string();
    assert!(error.contains("no export 'nothing'") && error.contains("cannot open"), "{error}");
    let mut spec = over(&rig, "conections=4");
    let error = Disk::start(spec.clone(), DiskOptions::default()).unwrap_err().to_string();
    assert!(error.contains("'conections' is no option"), "{error}");
    spec.layers[0].path = PathBuf::from("nbd://127.0.0.1:1/");
    let begin = std::time::Instant::now();
    assert!(Disk::start(spec, DiskOptions::default()).is_err());
    assert!(begin.elapsed() < TIMEOUT);
}
