//! The life of a disk, and deaths around it.

use std::time::Duration;

use tapio_control::{BlkifProtocol, DiskInfo, Polling, RingStart};
use tapio_tapback::Settings;
use tapio_types::Movement;
use tapio_xenstore::Nodes;

use crate::world::{World, vbd};

#[test]
fn a_disk_is_plugged_used_and_unplugged() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 77);
    world.plug(id, 77, 3);
    world.until_state(id, "2");
    for (name, value) in [
        ("max-ring-page-order", "3"),
        ("max-ring-pages", "8"),
        ("multi-queue-max-queues", "4"),
        ("feature-flush-cache", "1"),
        ("feature-barrier", "1"),
        ("feature-discard", "1"),
        ("feature-max-indirect-segments", "256"),
        ("hotplug-status", "connected"),
    ] {
        assert_eq!(world.value(&World::back(id, name)).as_deref(), Some(value), "{name}");
    }
    assert_eq!(world.value(&World::back(id, "sectors")), None, "not known before the disk is asked");
    world.offer_ring(id, 8);
    world.until_state(id, "4");
    for (name, value) in [("sectors", "2048"), ("sector-size", "512"), ("info", "0"), ("kthread-pid", "77")] {
        assert_eq!(world.value(&World::back(id, name)).as_deref(), Some(value), "{name}");
    }
    let ring = world.fakes.ring(id).expect("a ring");
    assert_eq!((ring.queues[0].ring.as_slice(), ring.queues[0].port), (&[8][..], 108));
    assert_eq!((ring.protocol, ring.start, ring.read_only), (BlkifProtocol::X86_64, RingStart::Fresh, false));
    assert_eq!(ring.movement, Movement::Copy);
    world.set_front(id, "4");
    world.settle();
    // The toolstack wants it back.
    let leave = [("online", "0"), ("state", "5")].map(|(name, value)| (World::back(id, name), value));
    world.client.transaction(|t| t.write_many(&leave)).unwrap();
    world.settle();
    assert!(world.fakes.ring(id).is_some(), "the guest has not let go of it");
    world.set_front(id, "5");
    world.settle();
    world.set_front(id, "6");
    world.until_state(id, "6");
    assert!(world.fakes.ring(id).is_none());
    assert_eq!(world.fakes.log(), ["connect 5,51712 to 3 of 77 Fresh", "disconnect 5,51712"]);
    world.remove(id);
    world.until("nothing is known", |world| world.tapback.devices() == (0, 0));
    assert_eq!(world.back_state(id), None, "a removed directory does not come back");
}

#[test]
fn a_guest_connects_again_as_often_as_it_likes() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.connected(id, 3);
    for grant in 20..23 {
        world.set_front(id, "5");
        world.until_state(id, "5");
        world.set_front(id, "6");
        world.until_state(id, "6");
        world.set_front(id, "1");
        world.until_state(id, "2");
        world.offer_ring(id, grant);
        world.until_state(id, "4");
        assert_eq!(world.fakes.ring(id).unwrap().queues[0].ring, [grant]);
        world.set_front(id, "4");
    }
    // A guest that crashed says nothing of that.
    world.set_front(id, "1");
    world.until_state(id, "2");
    assert!(world.fakes.ring(id).is_none());
    world.offer_ring(id, 30);
    world.until_state(id, "4");
    assert_eq!(world.fakes.ring(id).unwrap().queues[0].ring, [30]);
}

#[test]
fn a_guest_that_vanishes_keeps_nothing() {
    let mut world = World::new();
    let (gone, stays) = (vbd(5, 51712), vbd(6, 51712));
    world.connected(gone, 3);
    world.connected(stays, 4);
    // Its own directory first, as when a domain is destroyed.
    world.client.remove("/local/domain/5").unwrap();
    world.until_state(gone, "6");
    assert!(world.fakes.ring(gone).is_none());
    world.client.remove("/local/domain/0/backend/vbd3/5").unwrap();
    world.until("one is known", |world| world.tapback.devices() == (1, 1));
    assert!(world.fakes.ring(stays).is_some());
    assert!(world.fakes.log().contains(&"disconnect 5,51712 by force".to_owned()));
}

#[test]
fn directories_that_are_removed_while_it_connects_stay_removed() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 77);
    world.fakes.hold(true);
    world.plug(id, 77, 3);
    world.until_state(id, "2");
    world.offer_ring(id, 8);
    for _ in 0..20 {
        world.turn();
    }
    world.remove(id);
    for _ in 0..5 {
        world.turn();
    }
    world.fakes.hold(false);
    world.until("nothing is known", |world| world.tapback.devices() == (0, 0));
    assert!(world.fakes.ring(id).is_none());
    assert_eq!(
        world.client.directory("/local/domain/0/backend/vbd3/5").unwrap().unwrap_or_default(),
        [""; 0]
    );
    // It may come again.
    world.connected(id, 3);
}

#[test]
fn a_disk_process_that_dies_is_followed_by_the_next() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.connected(id, 3);
    world.plugged.clear();
    world.fakes.kill(3);
    world.until("it is missed", |world| world.tapback.devices() == (1, 0));
    for _ in 0..10 {
        world.turn();
    }
    assert_eq!(world.back_state(id).as_deref(), Some("4"), "the guest waits");
    world.fakes.start(3, 99);
    world.client.write(&World::back(id, "physical-device-path"), "/run/blktap-control/nbd99.3").unwrap();
    world.until("it is connected", |world| !world.plugged.is_empty());
    let ring = world.fakes.ring(id).expect("a ring");
    assert_eq!(ring.start, RingStart::Auto, "requests that were in flight are repeated");
    assert_eq!(world.value(&World::back(id, "kthread-pid")).as_deref(), Some("99"));
    assert_eq!(world.back_state(id).as_deref(), Some("4"));
    assert!(world.plugged[0].recovered);
}

#[test]
fn a_disk_process_may_come_late_or_refuse() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.plug(id, 4003, 3);
    world.until_state(id, "2");
    world.offer_ring(id, 8);
    world.settle();
    assert_eq!(world.back_state(id).as_deref(), Some("2"));
    world.fakes.start(3, 4003);
    world.until_state(id, "4");
}

#[test]
fn a_restarted_program_takes_over_what_works() {
    let mut world = World::new();
    let (works, waits) = (vbd(5, 51712), vbd(5, 51728));
    world.connected(works, 3);
    world.plug(waits, 4004, 4);
    world.until_state(waits, "2");
    let log = world.fakes.log();
    world.restart();
    world.until("it is taken over", |world| world.tapback.devices() == (2, 1));
    world.settle();
    assert_eq!(world.fakes.log(), log, "nothing was connected or disconnected");
    assert_eq!(world.back_state(works).as_deref(), Some("4"));
    world.fakes.start(4, 4004);
    world.offer_ring(waits, 9);
    world.until_state(waits, "4");
    // One that died while no tapback ran, and whose ring is not served.
    world.fakes.kill(3);
    world.fakes.start(3, 4003);
    world.restart();
    world.until("both work", |world| world.tapback.devices() == (2, 2));
    assert!(world.fakes.ring(works).is_some());
}

#[test]
fn xenstored_may_be_restarted_in_place() {
    // Its connection breaks; rings do not.
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.connected(id, 3);
    let log = world.fakes.log();
    let client = world.connect();
    world.tapback.reconnect(client).unwrap();
    world.settle();
    assert_eq!(world.fakes.log(), log);
    world.set_front(id, "5");
    world.until_state(id, "5");
}

#[test]
fn a_disk_that_grows_is_told_to_the_guest() {
    // Ours tell, and are asked once for each time; others are asked again and again.
    for foreign in [false, true] {
        let every = if foreign { Duration::from_millis(5) } else { Duration::from_secs(3600) };
        let mut world = World::with(Settings { length_every: every, ..Settings::default() });
        world.fakes.state().foreign = foreign;
        let id = vbd(5, 51712);
        world.connected(id, 3);
        let mut guest = world.connect();
        guest.watch(&World::back(id, "state"), "state").unwrap();
        assert!(guest.wait_event(None).unwrap().is_some(), "the first event of a watch");
        for (times, sectors, told) in [(1, 8000, "8000"), (2, 8008, "8008")] {
            world.fakes.grow(DiskInfo { sectors, sector_size: 4096, info: 0 });
            world.until("it is written", |world| {
                world.value(&World::back(id, "sectors")).as_deref() == Some(told)
            });
            let until = std::time::Instant::now() + Duration::from_secs(60);
            assert!(guest.wait_event(Some(until)).unwrap().is_some(), "the guest is told to look again");
            assert_eq!(world.back_state(id).as_deref(), Some("4"));
            world.settle();
            assert!(foreign || world.fakes.state().asked == times, "{}", world.fakes.state().asked);
        }
    }
}

#[test]
fn a_disk_process_that_reports_no_more_is_asked_again() {
    let mut world = World::with(Settings { length_every: Duration::from_millis(5), ..Settings::default() });
    let id = vbd(5, 51712);
    world.connected(id, 3);
    world.settle();
    assert_eq!(world.fakes.state().asked, 0);
    world.fakes.state().followers.clear();
    world.until("it is asked", |world| world.fakes.state().asked > 1);
    // Another tapback is told again, by a process that goes on.
    world.restart();
    world.until("the ring is found again", |world| world.fakes.state().followers.contains_key(&id));
    world.settle();
    world.fakes.grow(DiskInfo { sectors: 7000, sector_size: 512, info: 0 });
    world.until("it is written", |world| world.value(&World::back(id, "sectors")).as_deref() == Some("7000"));
}

#[test]
fn polling_is_passed_on_when_it_changes() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 4003);
    let set =
        |world: &mut World, us: &str| world.client.write(&World::back(id, "polling-duration"), us).unwrap();
    set(&mut world, "8000");
    world.connected(id, 3);
    assert_eq!(world.fakes.ring(id).unwrap().polling, Some(Polling { max_us: 8000, idle_percent: 0 }));
    assert_eq!(world.fakes.state().polling, None);
    world.client.write(&World::back(id, "polling-idle-threshold"), "50").unwrap();
    let expected = Polling { max_us: 8000, idle_percent: 50 };
    world.until("it is set", |world| world.fakes.state().polling == Some(expected));
    set(&mut world, "0");
    let expected = Polling { max_us: 0, idle_percent: 50 };
    world.until("it is off", |world| world.fakes.state().polling == Some(expected));
}

#[test]
fn a_disk_for_reading_is_one() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 77);
    let nodes = [("mode", "r"), ("device-type", "cdrom"), ("removable", "1")];
    world.plug(id, 77, 3);
    for (name, value) in nodes {
        world.client.write(&World::back(id, name), value).unwrap();
    }
    world.until_state(id, "2");
    world.offer_ring(id, 8);
    world.until_state(id, "4");
    let ring = world.fakes.ring(id).unwrap();
    assert!(ring.read_only && ring.cdrom && ring.removable);
    assert_eq!(world.value(&World::back(id, "info")).as_deref(), Some("7"));
    assert_eq!(world.value(&World::back(id, "feature-discard")).as_deref(), Some("0"));
}

#[test]
fn large_rings_and_queues_arrive_whole() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 77);
    world.plug(id, 77, 3);
    world.until_state(id, "2");
    let mut nodes = vec![("ring-page-order".to_owned(), 3), ("multi-queue-num-queues".to_owned(), 2)];
    for queue in 0..2 {
        nodes.extend((0..8).map(|page| (format!("queue-{queue}/ring-ref{page}"), 100 * queue + page)));
        nodes.push((format!("queue-{queue}/event-channel"), 50 + queue));
    }
    let nodes: Vec<(String, String)> =
        nodes.into_iter().map(|(name, value)| (World::front(id, &name), value.to_string())).collect();
    world.client.write_many(&nodes).unwrap();
    world.set_front(id, "3");
    world.until_state(id, "4");
    let ring = world.fakes.ring(id).unwrap();
    assert_eq!(ring.queues.len(), 2);
    assert_eq!(ring.queues[1].ring, (100..108).collect::<Vec<u32>>());
    assert_eq!((ring.queues[1].port, ring.protocol), (51, BlkifProtocol::X86_32));
}
