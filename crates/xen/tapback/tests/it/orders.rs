//! The toolstack, the guest, the disk process and this program in every order.

use tapio_stat::VbdId;
use tapio_xenstore::Nodes;

use crate::world::{World, vbd};

/// All orders of `count` things.
fn permutations(count: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for thing in 0..count {
        all = all
            .into_iter()
            .flat_map(|order: Vec<usize>| {
                (0..=order.len()).map(move |at| {
                    let mut longer = order.clone();
                    longer.insert(at, thing);
                    longer
                })
            })
            .collect();
    }
    all
}

/// The guest's driver does what it must when it sees our state, as Linux's does.
fn guest(world: &mut World, id: VbdId, offered: &mut bool) {
    let front = world.value(&World::front(id, "state"));
    match (front.as_deref(), world.back_state(id).as_deref()) {
        (Some("1"), Some("2")) => {
            world.offer_ring(id, 8);
            *offered = true;
        }
        (Some("3"), Some("4")) => world.set_front(id, "4"),
        _ => {}
    }
}

/// To the end: closed by the guest, removed by the toolstack.
fn finish(world: &mut World, id: VbdId, what: &str) {
    let mut offered = false;
    world.until(what, |world| {
        guest(world, id, &mut offered);
        world.back_state(id).as_deref() == Some("4")
            && world.value(&World::front(id, "state")).as_deref() == Some("4")
    });
    assert!(world.fakes.ring(id).is_some(), "{what}");
    world.set_front(id, "6");
    world.until_state(id, "6");
    assert!(world.fakes.ring(id).is_none(), "{what}");
    world.remove(id);
    world.until("it is forgotten", |world| world.tapback.devices().0 == 0);
    assert_eq!(world.back_state(id), None);
}

#[test]
fn the_toolstack_s_nodes_in_every_order() {
    let mut world = World::new();
    world.fakes.start(3, 77);
    for (number, order) in permutations(6).into_iter().enumerate() {
        let id = vbd(1 + number as u32, 51712);
        world.set_front(id, "1");
        let nodes = World::back_nodes(id, 77, 3);
        // In some runs the program looks at each step, in others at several at once.
        for (step, node) in order.into_iter().enumerate() {
            let (path, value) = &nodes[node];
            world.client.write(path, value).unwrap();
            if (number >> step) & 1 == 0 {
                world.turn();
            }
        }
        finish(&mut world, id, &format!("order {number}"));
    }
}

#[test]
fn everybody_in_every_order() {
    const STEPS: [&str; 6] =
        ["back end", "front end", "disk process", "its path", "restart", "guest in a hurry"];
    for (number, order) in permutations(STEPS.len()).into_iter().enumerate() {
        // A program, a xenstore and a host of their own for each would be slow: they are used for a while.
        thread_local! { static WORLD: std::cell::RefCell<Option<World>> = const { std::cell::RefCell::new(None) }; }
        WORLD.with_borrow_mut(|kept| {
            let world = kept.get_or_insert_with(World::new);
            let id = vbd(1 + number as u32, 51712);
            for step in &order {
                match STEPS[*step] {
                    "back end" => {
                        let mut nodes = World::back_nodes(id, 77, 3);
                        nodes.remove(3);
                        world.client.transaction(|t| t.write_many(&nodes)).unwrap();
                    }
                    "front end" => {
                        let path = World::front(id, "state");
                        // The guest may have been faster.
                        if world.value(&path).is_none() {
                            world.client.write(&path, "1").unwrap();
                        }
                    }
                    "disk process" => world.fakes.start(3, 77),
                    "its path" => {
                        let path = "/run/blktap-control/nbd77.3";
                        world.client.write(&World::back(id, "physical-device-path"), path).unwrap();
                    }
                    "restart" => world.restart(),
                    _ => world.offer_ring(id, 8),
                }
                if number % 2 == 0 {
                    world.turn();
                }
            }
            let names: Vec<_> = order.iter().map(|step| STEPS[*step]).collect();
            finish(world, id, &names.join(", "));
            world.fakes.kill(3);
        });
    }
}
