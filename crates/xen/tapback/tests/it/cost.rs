//! What it asks of xenstored: bounded, and counted.

use tapio_xenstore::Nodes;

use crate::world::{World, vbd};

#[test]
fn connecting_a_disk_takes_few_transactions() {
    let mut world = World::new();
    world.connected(vbd(5, 51712), 3);
    world.plugged.clear();
    let id = vbd(5, 51728);
    world.connected(id, 4);
    let [plugged] = world.plugged.as_slice() else { panic!("{:?}", world.plugged) };
    assert_eq!((plugged.id, plugged.pid, plugged.recovered), (id, 4004, false));
    // One look finds the device and publishes; one reads the rings; one writes what the disk is. An event that comes
    // a moment later than the look may cost one more.
    let cost = plugged.cost;
    assert!((3..=5).contains(&cost.transactions), "{cost:?}");
    assert!(cost.requests <= 120, "{cost:?}");
    assert!(cost.round_trips <= 24, "{cost:?}");
}

#[test]
fn nothing_is_asked_while_nothing_happens() {
    let mut world = World::new();
    world.connected(vbd(5, 51712), 3);
    world.settle();
    let before = world.tapback.counts();
    for _ in 0..20 {
        world.turn();
    }
    assert_eq!(world.tapback.counts(), before);
}

#[test]
fn the_disks_of_a_vm_share_transactions() {
    const DISKS: u32 = 255;
    let mut world = World::new();
    let ids: Vec<_> = (0..DISKS).map(|number| vbd(9, 51712 + 16 * number)).collect();
    for number in 0..DISKS {
        world.fakes.start(number as u16, 1000 + number as i32);
    }
    let mut nodes = Vec::new();
    for (number, id) in ids.iter().enumerate() {
        nodes.extend(World::back_nodes(*id, 1000 + number as i32, number as u16));
        nodes.push((World::front(*id, "state"), "1".to_owned()));
    }
    let before = world.tapback.counts();
    world.client.transaction(|t| t.write_many(&nodes)).unwrap();
    world.until("all wait for the guest", |world| {
        let states: Vec<String> = ids.iter().map(|id| World::back(*id, "state")).collect();
        world.client.read_many(&states).unwrap().iter().all(|state| state.as_deref() == Some(b"2"))
    });
    let published = world.tapback.counts() - before;
    // 64 devices a transaction, and a few for events that came in between.
    assert!(published.transactions <= 16, "{published:?}");
    for (number, id) in ids.iter().enumerate() {
        world.offer_ring(*id, 8 + number as u32);
    }
    world.until("all are connected", |world| world.tapback.devices() == (255, 255));
    world.until("all are announced", |world| world.plugged.len() == 255);
    let whole = world.tapback.counts() - before;
    assert!(whole.transactions < 2 * u64::from(DISKS), "{whole:?}");
}
