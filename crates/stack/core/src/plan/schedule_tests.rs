use std::collections::BTreeSet;

use tapio_load::Random;

use super::*;

fn names(prefix: &str, count: u64) -> Vec<Arc<str>> {
    (0..count).map(|n| format!("{prefix}{n}").into()).collect()
}

fn random_shape(random: &mut Random, depth: u64, vms: &[Arc<str>], srs: &[Arc<str>]) -> Shape {
    let kind = if depth == 0 { 9 } else { random.below(10) };
    let parts = |random: &mut Random| {
        let count = random.below(5);
        (0..count).map(|_| random_shape(random, depth - 1, vms, srs)).collect::<Vec<_>>()
    };
    match kind {
        0..=2 => Shape::Serial(parts(random)),
        3..=5 => Shape::Parallel(parts(random)),
        6 => Shape::BestEffort(Box::new(random_shape(random, depth - 1, vms, srs))),
        _ => {
            let vm = vms.get(random.below(vms.len() as u64 + 1) as usize).cloned();
            let sr = srs.get(random.below(srs.len() as u64 + 1) as usize).cloned();
            Shape::Leaf { permits: Permits { vm, sr }, undo: random.below(4) > 0 }
        }
    }
}

#[derive(Default)]
struct World {
    now: u64,
    /// When it ends, what, and whether well.
    running: BTreeSet<(u64, Taken, bool)>,
    /// Leaves in the order in which they ended: run, leaf, undo, ok.
    log: Vec<(RunId, usize, bool, bool)>,
}

/// Runs everything to its end on a clock that jumps.
fn simulate(schedule: &mut Schedule, world: &mut World, mut cost: impl FnMut(Taken) -> (u64, bool)) {
    loop {
        while let Some(taken) = schedule.take(world.now) {
            let (len, ok) = cost(taken);
            world.running.insert((world.now + len, taken, ok));
            check_permits(schedule, world);
        }
        let Some((end, taken, ok)) = world.running.pop_first() else { return };
        world.now = end;
        world.log.push((taken.run, taken.leaf, taken.undo, ok));
        schedule.end(taken, ok, end);
    }
}

fn check_permits(schedule: &Schedule, world: &World) {
    let Limits { host, vm, sr } = schedule.limits;
    assert!(world.running.len() <= host);
    let mut held: BTreeMap<Arc<str>, usize> = BTreeMap::new();
    for (_, taken, _) in &world.running {
        let Kind::Leaf { permits, .. } = &schedule.runs[&taken.run].nodes[taken.node].kind else {
            panic!("a leaf was taken that is none");
        };
        for name in [&permits.vm, &permits.sr].into_iter().flatten() {
            *held.entry(Arc::clone(name)).or_default() += 1;
        }
    }
    for (name, count) in held {
        let max = if name.starts_with("vm") { vm } else { sr };
        assert!(count <= max, "{name} has {count} of {max}");
    }
}

fn seeds() -> Vec<u64> {
    match std::env::var("TAPIO_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => (1..400).collect(),
    }
}

#[test]
fn random_plans_end_keep_to_their_permits_and_undo_exactly_what_ran() {
    for seed in seeds() {
        let mut random = Random::new(seed);
        let (vms, srs) = (names("vm", 1 + random.below(4)), names("sr", 1 + random.below(2)));
        let limits = Limits {
            host: 1 + random.below(6) as usize,
            vm: 1 + random.below(3) as usize,
            sr: 1 + random.below(3) as usize,
        };
        let mut schedule = Schedule::new(limits);
        let mut world = World::default();
        let shapes: Vec<Shape> =
            (0..1 + random.below(6)).map(|_| random_shape(&mut random, 4, &vms, &srs)).collect();
        let runs: Vec<RunId> = shapes.iter().map(|shape| schedule.submit(shape, 0)).collect();
        let failures = random.below(3) * 8;
        simulate(&mut schedule, &mut world, |_| (1 + random.below(20), random.below(100) >= failures));
        assert_eq!((schedule.running(), schedule.waiting()), (0, 0), "seed {seed}");
        for run in runs {
            let ok = schedule.finished(run).unwrap_or_else(|| panic!("seed {seed}: run {run} never ends"));
            check_undone(&schedule, run, ok, &world.log, seed);
        }
    }
}

/// Whatever ran well below a part that failed was undone once, after it ran; nothing else was.
fn check_undone(schedule: &Schedule, id: RunId, ok: bool, log: &[(RunId, usize, bool, bool)], seed: u64) {
    let run = &schedule.runs[&id];
    let stopped_above = |node: usize| {
        let mut at = node;
        while let Some(parent) = run.nodes[at].parent {
            at = parent;
            if matches!(run.nodes[at].kind, Kind::Scope { stopped: true, .. }) {
                return true;
            }
        }
        false
    };
    assert_eq!(ok, !matches!(run.nodes[0].kind, Kind::Scope { stopped: true, .. }), "seed {seed}");
    for (place, node) in run.nodes.iter().enumerate() {
        let Kind::Leaf { undoable, leaf, undo_of: None, .. } = node.kind else { continue };
        let ran: Vec<usize> = (0..log.len()).filter(|at| log[*at].0 == id && log[*at].1 == leaf).collect();
        let undone: Vec<&usize> = ran.iter().filter(|at| log[**at].2).collect();
        let well = ran.iter().any(|at| !log[*at].2 && log[*at].3);
        let wanted = undoable && well && stopped_above(place);
        assert_eq!(undone.len(), usize::from(wanted), "seed {seed}: leaf {leaf} of run {id}");
        assert!(ran.len() - undone.len() <= 1, "seed {seed}: leaf {leaf} ran twice");
        assert_ne!(node.outcome, Outcome::Running, "seed {seed}");
        if ok && !stopped_above(place) {
            assert!(well, "seed {seed}: leaf {leaf} of a plan that went well did not run");
        }
    }
}

fn leaf(vm: &str) -> Shape {
    Shape::Leaf { permits: Permits { vm: Some(vm.into()), sr: None }, undo: true }
}

#[test]
fn undoing_goes_backwards() {
    let mut schedule = Schedule::new(Limits { host: 4, vm: 4, sr: 4 });
    let serial = Shape::Serial((0..4).map(|_| leaf("vm")).collect());
    let run = schedule.submit(&serial, 0);
    let mut world = World::default();
    simulate(&mut schedule, &mut world, |taken| (1, taken.leaf != 2 || taken.undo));
    let order: Vec<(usize, bool)> = world.log.iter().map(|(_, leaf, undo, _)| (*leaf, *undo)).collect();
    assert_eq!(order, [(0, false), (1, false), (2, false), (1, true), (0, true)]);
    assert_eq!(schedule.finished(run), Some(false));
    assert_eq!(schedule.records(run)[3].outcome, Outcome::Skipped);
}

#[test]
fn what_runs_ends_and_what_waits_never_begins() {
    let mut schedule = Schedule::new(Limits { host: 2, vm: 9, sr: 9 });
    let run = schedule.submit(&Shape::Parallel((0..5).map(|_| leaf("vm")).collect()), 0);
    let mut world = World::default();
    // Leaf 0 fails early, leaf 1 is at work then and ends well later.
    simulate(&mut schedule, &mut world, |taken| (if taken.leaf == 0 { 1 } else { 5 }, taken.leaf != 0));
    let order: Vec<(usize, bool)> = world.log.iter().map(|(_, leaf, undo, _)| (*leaf, *undo)).collect();
    assert_eq!(order, [(0, false), (1, false), (1, true)]);
    assert_eq!(schedule.finished(run), Some(false));
}

#[test]
fn a_part_that_may_fail_is_undone_and_the_rest_goes_on() {
    let mut schedule = Schedule::new(Limits { host: 1, vm: 1, sr: 1 });
    let part = Shape::BestEffort(Box::new(Shape::Serial(vec![leaf("vm"), leaf("vm")])));
    let run = schedule.submit(&Shape::Serial(vec![part, leaf("vm")]), 0);
    let mut world = World::default();
    simulate(&mut schedule, &mut world, |taken| (1, taken.leaf != 1));
    let order: Vec<(usize, bool)> = world.log.iter().map(|(_, leaf, undo, _)| (*leaf, *undo)).collect();
    assert_eq!(order, [(0, false), (1, false), (0, true), (2, false)]);
    assert_eq!(schedule.finished(run), Some(true));
}

#[test]
fn a_cancelled_plan_is_undone() {
    let mut schedule = Schedule::new(Limits { host: 1, vm: 1, sr: 1 });
    let run = schedule.submit(&Shape::Serial(vec![leaf("vm"), leaf("vm")]), 0);
    let first = schedule.take(0).expect("a leaf");
    schedule.cancel(run, 1);
    assert_eq!(schedule.finished(run), None, "the running leaf is waited for");
    schedule.end(first, true, 2);
    let undo = schedule.take(2).expect("its undoing");
    assert!(undo.undo);
    schedule.end(undo, true, 3);
    assert_eq!((schedule.finished(run), schedule.take(3)), (Some(false), None));
}

#[test]
fn many_steps_take_as_long_as_the_limit_says() {
    for (count, limit) in [(1, 10), (2, 10), (8, 10), (10, 10), (20, 10), (64, 10), (128, 10), (255, 10)] {
        let mut schedule = Schedule::new(Limits { host: 100, vm: limit, sr: 100 });
        let plan = Shape::Serial(vec![
            leaf("vm"),
            Shape::Parallel((0..count).map(|_| leaf("vm")).collect()),
            leaf("vm"),
        ]);
        let run = schedule.submit(&plan, 0);
        let mut world = World::default();
        simulate(&mut schedule, &mut world, |taken| {
            (if taken.leaf == 0 || taken.leaf == count + 1 { 1 } else { 1_000 }, true)
        });
        assert_eq!(schedule.finished(run), Some(true));
        let serial = 1_000 * count as u64 + 2;
        let speed_up = serial as f64 / world.now as f64;
        let ideal = count as f64 / count.div_ceil(limit) as f64;
        assert!(speed_up >= 0.9 * ideal, "{count} steps: {speed_up:.2} of {ideal:.2}");
    }
}

#[test]
fn no_leaf_waits_for_ever_behind_younger_ones() {
    // One leaf needs a VM and an SR that younger leaves, which need one of both, take whenever they are free.
    let mut schedule = Schedule::new(Limits { host: 3, vm: 1, sr: 1 });
    let both = Shape::Leaf { permits: Permits { vm: Some("vm".into()), sr: Some("sr".into()) }, undo: false };
    let only = |vm: bool| {
        let (vm, sr) = if vm { (Some("vm".into()), None) } else { (None, Some("sr".into())) };
        Shape::Leaf { permits: Permits { vm, sr }, undo: false }
    };
    schedule.submit(&only(true), 0);
    schedule.submit(&only(false), 0);
    let (mut vm, mut sr) = (schedule.take(0).expect("vm"), schedule.take(0).expect("sr"));
    let old = schedule.submit(&both, 0);
    for now in 1..1_000 {
        if schedule.finished(old).is_some() {
            return;
        }
        // The VM is released while the SR is held, and the other way round.
        schedule.submit(&only(now % 2 == 0), now);
        let held = if now % 2 == 0 { &mut vm } else { &mut sr };
        schedule.end(*held, true, now);
        let Some(next) = schedule.take(now) else {
            let other = if now % 2 == 0 { &mut sr } else { &mut vm };
            schedule.end(*other, true, now);
            let next = schedule.take(now).expect("the old leaf");
            assert_eq!(next.run, old);
            return;
        };
        *held = next;
    }
    panic!("the old leaf never ran");
}
