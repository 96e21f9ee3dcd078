//! Nodes that make no sense.

use tapio_tapback::{Fault, Trouble};
use tapio_xenstore::Nodes;

use crate::world::{World, vbd};

#[test]
fn a_guest_that_writes_nonsense_is_told_so_and_can_mend_it() {
    let mut world = World::new();
    let (bad, good) = (vbd(5, 51712), vbd(6, 51712));
    world.connected(good, 4);
    world.fakes.start(3, 77);
    let long = "9".repeat(2000);
    for (name, value, says) in [
        ("ring-page-order", "31", "ring-page-order is 31"),
        ("ring-page-order", "-1", "no number"),
        ("ring-page-order", long.as_str(), "no number"),
        ("num-ring-pages", "3", "num-ring-pages is 3"),
        ("multi-queue-num-queues", "4294967295", "4294967295"),
        ("multi-queue-num-queues", "2", "queue-0/ring-ref0 is missing"),
        ("event-channel", "\u{1b}[2J", "no number"),
        ("protocol", "vax-abi", "vax-abi"),
        ("ring-ref", "", "no number"),
    ] {
        world.plug(bad, 77, 3);
        world.until_state(bad, "2");
        world.offer_ring(bad, 8);
        // Before the program can have looked: the last word counts.
        world.client.write(&World::front(bad, name), value).unwrap();
        world.set_front(bad, "1");
        world.settle();
        world.set_front(bad, "3");
        world.until_state(bad, "5");
        let error = world.value(&World::error(bad)).expect("an error");
        assert!(error.contains(says), "{name}: {error}");
        assert!(!error.contains('\u{1b}') && error.len() < 300, "{error}");
        assert!(world.fakes.ring(bad).is_none());
        // It closes, removes what was wrong, and begins again.
        world.set_front(bad, "6");
        world.until_state(bad, "6");
        world.client.remove(&World::front(bad, name)).unwrap();
        world.set_front(bad, "1");
        world.until_state(bad, "2");
        world.offer_ring(bad, 9);
        world.until_state(bad, "4");
        world.until("the error is gone", |world| world.value(&World::error(bad)).is_none());
        world.remove(bad);
        world.until("it is forgotten", |world| world.tapback.devices() == (1, 1));
    }
    assert!(world.fakes.ring(good).is_some(), "the neighbour noticed nothing");
}

#[test]
fn a_front_end_without_its_nodes_is_refused() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 77);
    world.plug(id, 77, 3);
    world.until_state(id, "2");
    world.set_front(id, "3");
    world.until_state(id, "5");
    assert!(world.value(&World::error(id)).unwrap().starts_with("2 ring-ref0 is missing"));
}

#[test]
fn states_that_are_none_are_refused() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.plug(id, 77, 3);
    world.until_state(id, "2");
    for absurd in ["99", "-4", "Connected", ""] {
        world.set_front(id, absurd);
        world.until_state(id, "5");
        assert!(world.value(&World::error(id)).unwrap().starts_with("22 the front end's state"), "{absurd}");
        world.set_front(id, "6");
        world.until_state(id, "6");
        world.set_front(id, "1");
        world.until_state(id, "2");
    }
}

#[test]
fn another_domain_s_directory_is_never_touched() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 77);
    for foreign in ["/local/domain/0/device/vbd/51712", "/local/domain/6/device/vbd/51712", "/vm/secret"] {
        world.client.write(&format!("{foreign}/state"), "3").unwrap();
        world.client.write(&format!("{foreign}/ring-ref"), "8").unwrap();
        let mut nodes = World::back_nodes(id, 77, 3);
        nodes[0].1 = foreign.into();
        world.client.transaction(|t| t.write_many(&nodes)).unwrap();
        world.until_state(id, "5");
        assert!(world.value(&World::error(id)).unwrap().contains("is expected"));
        assert!(world.fakes.ring(id).is_none());
        world.remove(id);
        world.until("it is forgotten", |world| world.tapback.devices() == (0, 0));
        assert_eq!(world.value(&World::error(id)), None, "an error goes with its device");
    }
    let mut nodes = World::back_nodes(id, 77, 3);
    nodes[1].1 = "0".into();
    world.client.transaction(|t| t.write_many(&nodes)).unwrap();
    world.until_state(id, "5");
}

#[test]
fn what_a_disk_process_refuses_is_said_where_people_look() {
    let mut world = World::new();
    let id = vbd(5, 51712);
    world.fakes.start(3, 77);
    let fault = Fault { errno: 22, text: "grant 8 is not there".into() };
    world.fakes.state().refuse = Some(Trouble::Refused(fault));
    world.plug(id, 77, 3);
    world.until_state(id, "2");
    world.offer_ring(id, 8);
    world.until_state(id, "5");
    assert_eq!(world.value(&World::error(id)).as_deref(), Some("22 grant 8 is not there"));
    world.fakes.state().refuse = None;
    world.set_front(id, "6");
    world.until_state(id, "6");
    world.set_front(id, "1");
    world.until_state(id, "2");
    world.offer_ring(id, 9);
    world.until_state(id, "4");
}

#[test]
fn directories_that_are_no_devices_are_passed_over() {
    let mut world = World::new();
    for odd in ["x/51712", "5/x", "99999999999/1", "5/99999999999", "5/-1", "007/51712/deep/er"] {
        world.client.write(&format!("/local/domain/0/backend/vbd3/{odd}/frontend"), "x").unwrap();
    }
    world.connected(vbd(5, 51728), 3);
    world.restart();
    world.settle();
    world.until("the good one", |world| world.tapback.devices().1 == 1);
}
