//! Plans of small SRs, each kind of obstacle, and what holds for every small forest.

use std::collections::BTreeSet;

use super::*;

const MIB: u64 = 1 << 20;

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

/// A base copy of 30 MiB.
fn base(number: u128, parent: Option<u128>) -> Node {
    Node { hidden: true, ..disk(number, parent) }
}

/// A disk that holds 30 MiB.
fn disk(number: u128, parent: Option<u128>) -> Node {
    Node {
        uuid: id(number),
        parent: parent.map(id),
        virtual_size: 64 * MIB,
        physical: 30 * MIB,
        may_shrink: true,
        ..Node::default()
    }
}

fn view(nodes: Vec<Node>) -> View {
    View { nodes, ..View::default() }
}

fn inner(image: u128, parent: u128) -> Work {
    Work::Inner { image: id(image), parent: id(parent) }
}

fn works(view: &View) -> Vec<Work> {
    plan(view).jobs.into_iter().map(|job| job.work).collect()
}

fn only_why(view: &View) -> Why {
    let plan = plan(view);
    assert_eq!((plan.jobs.len(), plan.skipped.len()), (0, 1), "{plan:?}");
    plan.skipped[0].why.clone()
}

/// A chain of a base copy, a base copy, a disk, with a snapshot on the upper base copy.
fn chain() -> Vec<Node> {
    vec![base(1, None), base(2, Some(1)), disk(3, Some(2)), disk(4, Some(2))]
}

#[test]
fn a_base_copy_between_goes_and_its_disks_are_named() {
    let plan = plan(&view(chain()));
    assert_eq!(plan.skipped, []);
    let [job] = &plan.jobs[..] else { panic!("{plan:?}") };
    assert_eq!(job.work, inner(2, 1));
    assert_eq!((job.needs, job.is_measured, job.gives_back), (30 * MIB, false, 30 * MIB));
    assert_eq!(job.disks, [id(3), id(4)]);
}

#[test]
fn nothing_is_done_where_two_need_the_parent() {
    let mut nodes = chain();
    nodes.push(disk(5, Some(1)));
    assert_eq!(plan(&view(nodes)), Plan::default());
}

#[test]
fn garbage_goes_first_and_whole() {
    let mut nodes = chain();
    nodes.extend([base(7, None), base(8, Some(7)), base(9, Some(8))]);
    let plan = plan(&view(nodes));
    assert_eq!(plan.jobs[0].work, Work::Garbage);
    assert_eq!(plan.jobs[0].gives_back, 90 * MIB);
    assert_eq!(plan.jobs[1].work, inner(2, 1), "images that go are merged nowhere");
    assert_eq!(plan.jobs.len(), 2);
}

#[test]
fn the_tallest_tree_comes_first_and_in_it_the_lowest() {
    let mut nodes = chain();
    nodes.extend([
        base(11, None),
        base(12, Some(11)),
        base(13, Some(12)),
        disk(14, Some(13)),
        disk(15, Some(13)),
    ]);
    assert_eq!(works(&view(nodes)), [inner(12, 11), inner(13, 12), inner(2, 1)]);
}

#[test]
fn a_disk_is_frozen_while_it_holds_much_and_merged_when_it_holds_little() {
    let (image, parent) = (id(2), id(1));
    let mut nodes = vec![base(1, None), disk(2, Some(1))];
    assert_eq!(works(&view(nodes.clone())), [Work::Freeze { image, parent }]);
    // Space for blocks to come, which a disk that runs takes, is not held.
    let cost = |copies: u64| MergeCost { needs: 0, copies, must_grow: false };
    let measured = |copies: u64| View { measured: [(image, cost(copies))].into(), ..view(nodes.clone()) };
    assert_eq!(works(&measured(LEAF_LEN_MAX)), [Work::Leaf { image, parent }]);
    assert_eq!(works(&measured(LEAF_LEN_MAX + 1)), [Work::Freeze { image, parent }]);
    nodes[1].physical = LEAF_LEN_MAX;
    let plan = plan(&view(nodes.clone()));
    assert_eq!(plan.jobs[0].work, Work::Leaf { image, parent });
    assert_eq!(plan.jobs[0].disks, [image]);
    nodes[1].physical += 1;
    let frozen = |times| View { freezes: [(image, times)].into(), ..view(nodes.clone()) };
    assert_eq!(works(&frozen(FREEZES_FEW - 1)), [Work::Freeze { image, parent }]);
    // It is written as fast as it is merged.
    assert_eq!(works(&frozen(FREEZES_FEW)), [Work::Leaf { image, parent }]);
    nodes[1].physical = LEAF_LEN_LAST + 1;
    let freezes = BTreeMap::from([(image, FREEZES_MAX)]);
    assert_eq!(only_why(&View { freezes, ..view(nodes) }), Why::Busy);
}

#[test]
fn inner_jobs_come_before_those_of_disks() {
    let mut nodes = vec![base(1, None), disk(2, Some(1))];
    nodes.extend([base(11, None), base(12, Some(11)), disk(13, Some(12)), disk(14, Some(12))]);
    assert_eq!(works(&view(nodes))[0], inner(12, 11));
}

#[test]
fn each_setting_is_said() {
    let off = |policy: Policy| only_why(&View { policy, ..view(chain()) }).to_string();
    let all = Policy::default();
    assert!(off(Policy { gc: false, ..all }).contains("other_config:gc=false"));
    assert!(off(Policy { coalesce: false, ..all }).contains("other_config:coalesce=false"));
    let mut nodes = vec![base(1, None), disk(2, Some(1))];
    let policy = Policy { leaf_coalesce: false, ..all };
    assert_eq!(only_why(&View { policy, ..view(nodes.clone()) }), Why::Off { key: "leaf-coalesce" });
    assert_eq!(works(&View { policy, ..view(chain()) }), [inner(2, 1)], "inner jobs go on");
    nodes[1].may_shrink = false;
    assert_eq!(only_why(&view(nodes)), Why::OffForVdi);
    let garbage = vec![base(1, None)];
    let policy = Policy { coalesce: false, ..all };
    assert_eq!(works(&View { policy, ..view(garbage.clone()) }), [Work::Garbage]);
    let policy = Policy { gc: false, ..all };
    assert_eq!(only_why(&View { policy, ..view(garbage) }), Why::Off { key: "gc" });
}

#[test]
fn each_obstacle_is_said() {
    let changed = |at: usize, change: fn(&mut Node)| {
        let mut nodes = chain();
        change(&mut nodes[at]);
        only_why(&view(nodes))
    };
    let held = changed(3, |node| node.held = Some("a copy".into()));
    assert_eq!(held, Why::Held { vdi: id(4), by: "a copy".into() });
    assert!(held.may_pass() && held.to_string().starts_with("a copy has VDI"));
    assert_eq!(changed(0, |node| node.virtual_size *= 2), Why::Smaller { parent: id(1) });
    let mut nodes = chain();
    nodes.push(Node { unreadable: true, ..disk(9, None) });
    assert_eq!(only_why(&view(nodes)), Why::Unreadable { image: id(9) });
    let mut nodes = vec![base(1, None), disk(2, Some(1))];
    nodes[0].raw = true;
    assert_eq!(only_why(&view(nodes)), Why::RawBase);
    // A parent that has to grow, and would show more of what is below it.
    let mut nodes =
        vec![base(5, None), base(1, Some(5)), base(2, Some(1)), disk(3, Some(2)), disk(4, Some(2))];
    nodes.push(disk(6, Some(5)));
    nodes[0].virtual_size = 65 * MIB;
    nodes[2].virtual_size = 66 * MIB;
    assert_eq!(only_why(&view(nodes)), Why::Smaller { parent: id(5) });
    let failed = BTreeMap::from([(id(2), "no luck".to_owned())]);
    assert_eq!(only_why(&View { failed, ..view(chain()) }), Why::Failed { error: "no luck".into() });
}

#[test]
fn a_merge_without_room_is_left_alone_once_that_is_known() {
    let mut view = View { free: Some(10 * MIB), ..view(chain()) };
    assert_eq!(works(&view), [inner(2, 1)], "the most it can need decides nothing");
    let cost = |needs: u64| MergeCost { needs, copies: needs, must_grow: false };
    view.measured.insert(id(2), cost(10 * MIB));
    let plan = plan(&view);
    assert!(plan.jobs[0].is_measured && plan.jobs[0].needs == 10 * MIB);
    view.measured.insert(id(2), cost(10 * MIB + 1));
    assert_eq!(only_why(&view), Why::NoSpace { needs: 10 * MIB + 1, free: 10 * MIB });
}

#[test]
fn a_raw_base_copy_takes_base_copies() {
    let mut nodes = chain();
    nodes[0].raw = true;
    assert_eq!(works(&view(nodes)), [inner(2, 1)]);
}

#[test]
fn a_long_chain_is_not_made_longer_and_a_loop_is_left_alone() {
    let len = tapio_format::vhd::CHAIN_DEPTH_MAX as u128;
    // Each base copy carries a snapshot beside the next one.
    let mut nodes = vec![base(1, None)];
    for at in 2..len {
        nodes.extend([base(at, Some(at - 1)), disk(1000 + at, Some(at - 1))]);
    }
    nodes.push(disk(len, Some(len - 1)));
    assert_eq!(only_why(&view(nodes)), Why::Deep);
    let nodes = vec![base(1, Some(2)), base(2, Some(1)), disk(3, Some(3))];
    assert_eq!(plan(&view(nodes)), Plan::default());
}

/// What an SR with these images reads as: the images of each disk's chain, lowest first, by what they hold. A merge
/// makes two of them one.
fn contents(nodes: &[Node], holds: &BTreeMap<Uuid, Vec<Uuid>>) -> BTreeMap<Uuid, Vec<Uuid>> {
    let of = |disk: &Node| {
        let mut chain = Vec::new();
        let mut next = Some(disk.uuid);
        while let Some(at) = next {
            chain.splice(0..0, holds[&at].iter().copied());
            next = nodes.iter().find(|node| node.uuid == at).and_then(|node| node.parent);
        }
        (disk.uuid, chain)
    };
    nodes.iter().filter(|node| !node.hidden).map(of).collect()
}

/// Does a job to a model of the SR.
fn carry_out(nodes: &mut Vec<Node>, holds: &mut BTreeMap<Uuid, Vec<Uuid>>, work: Work, fresh: u128) {
    match work {
        Work::Garbage => loop {
            let parents: BTreeSet<_> = nodes.iter().filter_map(|node| node.parent).collect();
            let before = nodes.len();
            nodes.retain(|node| !node.hidden || parents.contains(&node.uuid));
            if nodes.len() == before {
                return;
            }
        },
        Work::Inner { image, parent } => {
            let held = holds[&image].clone();
            holds.get_mut(&parent).unwrap().extend(held);
            nodes.retain(|node| node.uuid != image);
            nodes
                .iter_mut()
                .filter(|node| node.parent == Some(image))
                .for_each(|node| node.parent = Some(parent));
        }
        Work::Freeze { image, .. } => {
            let node = nodes.iter_mut().find(|node| node.uuid == image).unwrap();
            let frozen = Node { uuid: id(fresh), hidden: true, ..node.clone() };
            (node.parent, node.physical) = (Some(frozen.uuid), 0);
            let held = holds.insert(image, Vec::new()).unwrap();
            holds.insert(frozen.uuid, held);
            nodes.push(frozen);
        }
        Work::Leaf { image, parent } => {
            let mut held = holds[&parent].clone();
            held.extend(holds[&image].clone());
            holds.insert(image, held);
            let lower = nodes.iter().find(|node| node.uuid == parent).unwrap().parent;
            nodes.retain(|node| node.uuid != parent);
            nodes.iter_mut().find(|node| node.uuid == image).unwrap().parent = lower;
        }
    }
}

/// Every forest of five images, each hidden or not and holding much or little: plans end, no disk reads otherwise at
/// any time, and what is left cannot be made smaller.
#[test]
fn of_every_small_forest_the_disks_keep_what_they_read() {
    const COUNT: usize = 5;
    let (mut forests, mut jobs) = (0, 0);
    // Each image is based on none or on one before it.
    for shape in 0..(1..=COUNT).product::<usize>() {
        for hidden in 0..1 << COUNT {
            for large in [0, 0b10110] {
                let mut rest = shape;
                let mut nodes = Vec::new();
                for at in 0..COUNT {
                    let parent = (rest % (at + 1)).checked_sub(1).map(|parent| parent as u128 + 1);
                    rest /= at + 1;
                    let physical = if large >> at & 1 == 1 { 2 * LEAF_LEN_MAX } else { MIB };
                    let hidden = hidden >> at & 1 == 1;
                    nodes.push(Node { hidden, physical, ..disk(at as u128 + 1, parent) });
                }
                let mut holds = nodes.iter().map(|node| (node.uuid, vec![node.uuid])).collect();
                let before = contents(&nodes, &holds);
                let mut freezes = BTreeMap::new();
                for turn in 0_u128.. {
                    assert!(turn < 50, "it ends: {nodes:?}");
                    let plan = plan(&View { freezes: freezes.clone(), ..view(nodes.clone()) });
                    assert_eq!(plan.skipped, []);
                    let Some(job) = plan.jobs.first() else { break };
                    if let Work::Freeze { image, .. } = job.work {
                        *freezes.entry(image).or_insert(0) += 1;
                    }
                    carry_out(&mut nodes, &mut holds, job.work, 100 + turn);
                    jobs += 1;
                    assert_eq!(contents(&nodes, &holds), before, "{:?}", job.work);
                }
                let children = |uuid: Uuid| nodes.iter().filter(|node| node.parent == Some(uuid)).count();
                let visible = |uuid: Uuid| nodes.iter().any(|node| node.uuid == uuid && !node.hidden);
                for node in nodes.iter().filter(|node| node.hidden) {
                    let above: Vec<_> =
                        nodes.iter().filter(|above| above.parent == Some(node.uuid)).collect();
                    // A base copy is left where two need it, or a disk that carries others itself.
                    let is_needed =
                        above.len() > 1 || (visible(above[0].uuid) && children(above[0].uuid) > 0);
                    assert!(is_needed, "{node:?} of {nodes:?}");
                }
                forests += 1;
            }
        }
    }
    assert_eq!(forests, 120 * 32 * 2);
    assert!(jobs > forests, "{jobs}");
}
