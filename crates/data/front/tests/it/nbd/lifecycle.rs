//! Exports, sockets and connections that come and go while clients work.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tapio_front::nbd::client::{Address, Client, ClientError, ClientOptions, Haggle};
use tapio_front::nbd::load::run;
use tapio_front::nbd::wire::{Style, option_reply};
use tapio_front::nbd::{Drained, Export, ExportError, NbdServer};
use tapio_load::{Load, Mix};

use super::{Rig, TIMEOUT, pattern, wait_until};

#[test]
fn exports_are_listed_and_described_by_name() {
    let rig = Rig::new(1 << 20);
    let export =
        Export { description: "the same again".into(), ..Export::new("two", rig.disk.remote().clone()) };
    rig.server.add_export(export).unwrap();
    let haggle = Haggle::begin(&rig.address(), TIMEOUT).unwrap();
    let list = haggle.list().unwrap();
    assert_eq!(list, [("disk".into(), String::new()), ("two".into(), "the same again".into())]);
    let info = haggle.info("two").unwrap();
    assert_eq!((info.len, info.name.as_deref()), (1 << 20, Some("two")));
    let error = haggle.info("three").unwrap_err();
    assert!(matches!(error, ClientError::Option { reply: option_reply::ERR_UNKNOWN, .. }), "{error}");
    haggle.abort().unwrap();
    let name = "x".repeat(5000);
    let refused = rig.server.add_export(Export::new(name.clone(), rig.disk.remote().clone()));
    assert_eq!(refused, Err(ExportError::BadName(name)));
    assert_eq!(rig.server.remove_export("none", false), Err(ExportError::Unknown("none".into())));
}

#[test]
fn tcp_and_unix_reach_the_same_disk() {
    let rig = Rig::new(1 << 20);
    let (id, bound) = rig.server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut by_tcp = Client::connect(&Address::Tcp(bound), &ClientOptions::all("disk"), TIMEOUT).unwrap();
    let mut by_unix = rig.client();
    by_tcp.write(4096, &pattern(1, 65536), false).unwrap();
    assert_eq!(by_unix.read(4096, 65536).unwrap(), pattern(1, 65536));
    let peers: Vec<_> = rig.server.connections().into_iter().map(|info| info.peer).collect();
    assert!(peers.iter().any(|peer| peer.starts_with("127.0.0.1:")), "{peers:?}");
    assert!(peers.iter().any(|peer| peer.starts_with("unix:pid=")), "{peers:?}");
    assert!(rig.server.close_listener(id));
    assert!(!rig.server.close_listener(id));
    wait_until(
        || Haggle::begin(&Address::Tcp(bound), Duration::from_millis(200)).is_err(),
        "the socket to be closed",
    );
    assert_eq!(by_tcp.read(4096, 65536).unwrap(), pattern(1, 65536));
}

#[test]
fn an_export_in_use_is_removed_only_by_force_and_its_name_can_be_used_again() {
    let rig = Rig::new(1 << 20);
    let mut client = rig.client();
    let refused = rig.server.remove_export("disk", false);
    assert_eq!(refused, Err(ExportError::InUse { name: "disk".into(), count: 1 }));
    client.read(0, 512).unwrap();
    rig.server.remove_export("disk", true).unwrap();
    assert!(client.read(0, 512).is_err());
    rig.wait_connections(0);
    rig.server.add_export(Export::new("disk", rig.disk.remote().clone())).unwrap();
    rig.client().read(0, 512).unwrap();
}

#[test]
fn one_connection_can_be_cut_off_and_the_others_stay() {
    let rig = Rig::new(1 << 20);
    let mut first = rig.client();
    let mut second = rig.client();
    first.read(0, 512).unwrap();
    // The one that has asked for something is the first.
    let used = rig.server.connections().into_iter().find(|info| info.requests > 0).unwrap();
    assert!(rig.server.close_connection(used.id));
    assert!(first.read(0, 512).is_err());
    second.read(0, 512).unwrap();
    assert!(!rig.server.close_connection(u64::MAX));
    rig.wait_connections(1);
}

#[test]
fn there_are_at_most_sixty_four_connections_and_one_place_is_free_again_after_each() {
    let rig = Rig::new(1 << 20);
    let mut clients: Vec<_> = (0..64).map(|_| rig.client()).collect();
    let error = Client::connect(&rig.address(), &ClientOptions::all("disk"), TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::Option { reply: option_reply::ERR_POLICY, .. }), "{error}");
    for client in &mut clients {
        client.read(0, 4096).unwrap();
    }
    // Another server of the same disk has places of its own, but the disk's memory is reserved already.
    let other = NbdServer::new().unwrap();
    other.add_export(Export::new("", rig.disk.remote().clone())).unwrap();
    let socket = rig.socket.with_extension("other");
    other.listen_unix(&socket, 0o600).unwrap();
    let address = Address::Unix(socket);
    assert!(Client::connect(&address, &ClientOptions::all(""), TIMEOUT).unwrap().read(0, 4096).is_err());
    clients.pop().unwrap().disconnect().unwrap();
    rig.wait_connections(63);
    let mut client = Client::connect(&address, &ClientOptions::all(""), TIMEOUT).unwrap();
    client.read(0, 4096).unwrap();
    client.disconnect().unwrap();
    wait_until(|| other.connections().is_empty(), "the other server's client to go");
    rig.client().read(0, 4096).unwrap();
}

/// Writes numbered blocks one after the other until told to stop; every acknowledged one must be there in the end.
fn steady_writer(rig: &Rig, stop: &AtomicBool, answered: &AtomicU64) -> u64 {
    let mut client = rig.client();
    let mut count = 0;
    while !stop.load(Ordering::SeqCst) {
        client.write(count % 256 * 4096, &pattern(count, 4096), false).unwrap();
        count += 1;
        answered.store(count, Ordering::SeqCst);
    }
    client.disconnect().unwrap();
    count
}

#[test]
fn pausing_the_disk_or_holding_the_export_loses_no_request() {
    let rig = Rig::new(1 << 20);
    let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| steady_writer(&rig, &stop, &answered));
        let count = || answered.load(Ordering::SeqCst);
        let goes_on = || {
            let before = count();
            wait_until(|| count() >= before + 40 || writer.is_finished(), "the writer to go on");
        };
        for _ in 0..5 {
            goes_on();
            rig.disk.pause(TIMEOUT).unwrap();
            let before = rig.image(0, 1 << 20);
            // The write that waits has been taken from the client, and is not answered.
            wait_until(|| rig.server.connections()[0].requests > count(), "a write that waits");
            assert!(rig.image(0, 1 << 20) == before, "a write while the disk was paused");
            rig.disk.resume(rig.spec(), TIMEOUT).unwrap();
            goes_on();
            rig.server.drain("disk", Drained::Keep, TIMEOUT).unwrap();
            let before = rig.image(0, 1 << 20);
            // A held connection counts nothing, so no state shows that the client's next write has come.
            std::thread::sleep(Duration::from_millis(20));
            assert!(rig.image(0, 1 << 20) == before, "a write while the export was held");
            rig.server.resume("disk").unwrap();
        }
        stop.store(true, Ordering::SeqCst);
        writer.join().unwrap()
    });
    assert!(written > 256, "only {written} writes");
    for block in 0..256 {
        let last = (written - 1) / 256 * 256 + block;
        let last = if last < written { last } else { last - 256 };
        assert!(rig.image(block * 4096, 4096) == pattern(last, 4096), "block {block} is not write {last}");
    }
}

#[test]
fn a_client_that_comes_while_the_export_is_held_waits_like_the_others() {
    let rig = Rig::new(1 << 20);
    rig.server.drain("disk", Drained::Keep, TIMEOUT).unwrap();
    let address = rig.address();
    let late = std::thread::spawn(move || {
        let begin = Instant::now();
        let mut client = Client::connect(&address, &ClientOptions::all("disk"), TIMEOUT).unwrap();
        client.read(0, 4096).unwrap();
        begin.elapsed()
    });
    rig.wait_connections(1);
    // A held connection counts nothing, so no state shows that the client's read has come.
    std::thread::sleep(Duration::from_millis(100));
    rig.server.resume("disk").unwrap();
    assert!(late.join().unwrap() >= Duration::from_millis(100));
}

#[test]
fn draining_answers_what_was_taken_and_then_disconnects() {
    let rig = Rig::new(16 << 20);
    let load = Load {
        mix: Mix::RandomWrite,
        block_len: 4096,
        depth: 32,
        span_len: 0,
        // It is ended below.
        time: TIMEOUT * 3,
        requests_max: u64::MAX,
        spin: false,
        seed: 1,
    };
    let address = rig.address();
    let options = ClientOptions { export: "disk".into(), style: Style::Structured, allocation: false };
    let worker = std::thread::spawn(move || run(&address, &options, &load, 2));
    rig.wait_connections(2);
    let busy = || rig.server.connections().iter().all(|info| info.requests > 100);
    wait_until(busy, "both connections to work");
    rig.server.drain("disk", Drained::Close, TIMEOUT).unwrap();
    assert!(worker.join().unwrap().is_err(), "the load must notice");
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
    rig.client().read(0, 4096).unwrap();
}

#[test]
fn a_paused_disk_does_not_keep_its_clients_from_being_closed() {
    let rig = Rig::new(1 << 20);
    let mut client = rig.client();
    client.read(0, 512).unwrap();
    rig.disk.pause(TIMEOUT).unwrap();
    client.send(0, 0, 0, 512, &[]).unwrap();
    rig.wait_requests(2);
    rig.server.remove_export("disk", true).unwrap();
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
}

#[test]
fn dropping_the_server_ends_its_connections_but_not_the_disk() {
    let rig = Rig::new(1 << 20);
    let mut client = rig.client();
    client.write(0, &pattern(9, 4096), false).unwrap();
    let Rig { server, disk, socket, path, _dir } = rig;
    let slow = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let begin = Instant::now();
    drop(server);
    assert!(begin.elapsed() < Duration::from_secs(10), "closing took {:?}", begin.elapsed());
    assert!(client.read(0, 512).is_err());
    assert!(!socket.exists());
    drop(slow);
    let server = NbdServer::new().unwrap();
    server.add_export(Export::new("again", disk.remote().clone())).unwrap();
    server.listen_unix(&socket, 0o600).unwrap();
    let mut client = Client::connect(&Address::Unix(socket), &ClientOptions::all(""), TIMEOUT).unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), pattern(9, 4096));
    drop((server, path));
    disk.close(TIMEOUT).unwrap();
}

#[test]
fn a_disk_that_ends_takes_its_connections_along() {
    let rig = Rig::new(1 << 20);
    let mut client = rig.client();
    client.read(0, 512).unwrap();
    let Rig { server, disk, socket, .. } = rig;
    disk.close(TIMEOUT).unwrap();
    assert!(client.read(0, 512).is_err());
    assert!(server.connections().is_empty());
    let error = Client::connect(&Address::Unix(socket), &ClientOptions::all("disk"), TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::Option { reply: option_reply::ERR_SHUTDOWN, .. }), "{error}");
}
