//! Disks on a model of a device: the real slots and the real rule, with a clock and a queue of the test's own.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::layout::{SLOTS, at};
use super::sample::flag;
use super::{DeviceName, PERIOD_NS, ShareMember, WEIGHT_MAX, clean_shares, join};
use crate::shm::ShmRoot;

const SECOND: u64 = 1_000_000_000;
const KIB: u64 = 1024;

/// A device: one server with a queue, and a way to it.
#[derive(Clone, Copy, Debug)]
struct Device {
    /// Bytes a second of its server.
    rate: u64,
    /// What each piece takes at the server beside its bytes.
    each_ns: u64,
    /// What each piece takes beside the server, however many there are.
    way_ns: u64,
    /// The server is slower or faster by up to so many in 100, from piece to piece.
    noise: u64,
    /// Servers, which have the rate together.
    servers: usize,
    /// What a piece of another disk than the last one takes more.
    seek_ns: u64,
    /// It gives out what it has in slices, at once, as a rate limit of the kernel does; 0: it does not.
    slice_ns: u64,
}

const fn device(mib: u64, each_us: u64, way_us: u64) -> Device {
    Device {
        rate: mib << 20,
        each_ns: each_us * 1000,
        way_ns: way_us * 1000,
        noise: 0,
        servers: 1,
        seek_ns: 0,
        slice_ns: 0,
    }
}

/// What a guest does: `depth` requests of `bytes`, each as soon as the one before it has ended and `think_ns` passed.
#[derive(Clone, Copy, Debug)]
struct Load {
    depth: usize,
    bytes: u64,
    think_ns: u64,
    weight: u32,
    latency_us: u64,
}

const fn load(depth: usize, kib: u64) -> Load {
    Load { depth, bytes: kib * KIB, think_ns: 50_000, weight: 100, latency_us: 0 }
}

struct Disk {
    load: Load,
    member: ShareMember,
    /// Requests that have pieces to go: what is left, and which.
    queue: VecDeque<(u64, usize)>,
    /// Bytes of each request that have not come back.
    open: Vec<u64>,
    waits: bool,
    moved: u64,
    is_dead: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Begin { disk: usize, request: usize },
    End { disk: usize, request: usize, bytes: u64, began_ns: u64 },
}

struct World {
    device: Device,
    disks: Vec<Disk>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    now: u64,
    free_ns: Vec<u64>,
    last: usize,
    is_fair: bool,
    random: u64,
    _dir: tempfile::TempDir,
}

impl World {
    fn new(device: Device, loads: &[Load], is_fair: bool) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, name) = (ShmRoot::new(dir.path()), "8-0".parse::<DeviceName>().expect("a name"));
        let disks = loads.iter().enumerate().map(|(index, load)| {
            let mut member = join(&root, &name, index as u32).expect("joined");
            member.set(load.weight, load.latency_us);
            Disk {
                load: *load,
                member,
                queue: VecDeque::new(),
                open: vec![0; load.depth],
                waits: false,
                moved: 0,
                is_dead: false,
            }
        });
        let disks: Vec<Disk> = disks.collect();
        let mut events = BinaryHeap::new();
        for (disk, load) in loads.iter().enumerate() {
            events.extend(
                (0..load.depth).map(|request| Reverse((disk as u64, Event::Begin { disk, request }))),
            );
        }
        let (now, free_ns, random) = (0, vec![0; device.servers], 0x9e37_79b9_7f4a_7c15);
        Self { device, disks, events, now, free_ns, last: 0, is_fair, random, _dir: dir }
    }

    fn service_ns(&mut self, bytes: u64) -> u64 {
        let exact = bytes * SECOND / self.device.rate + self.device.each_ns;
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let noise = self.device.noise;
        if noise == 0 { exact } else { exact * (100 - noise + self.random % (2 * noise + 1)) / 100 }
    }

    /// When the device has done a piece.
    fn serve(&mut self, index: usize, bytes: u64) -> u64 {
        let mut service = self.service_ns(bytes);
        if std::mem::replace(&mut self.last, index) != index {
            service += self.device.seek_ns;
        }
        let server = (0..self.device.servers).min_by_key(|server| self.free_ns[*server]).unwrap_or(0);
        let begin = self.free_ns[server].max(self.now);
        self.free_ns[server] = begin + service * self.device.servers as u64;
        match self.device.slice_ns {
            0 => self.free_ns[server],
            // What a slice has is given out at its beginning.
            slice => (begin / slice * slice).max(self.now),
        }
    }

    fn send(&mut self, index: usize) {
        let seat = self.disks[index].member.seat();
        while let Some((rest, request)) = self.disks[index].queue.front().copied() {
            let now = self.now;
            let member = &mut self.disks[index].member;
            let piece = if seat.competes() { member.piece(rest, now) } else { Some(rest) };
            let disk = &mut self.disks[index];
            let Some(bytes) = piece else {
                if !std::mem::replace(&mut disk.waits, true) {
                    seat.waits(self.now);
                }
                return;
            };
            if std::mem::take(&mut disk.waits) {
                seat.waited();
            }
            disk.queue.pop_front();
            if bytes < rest {
                disk.queue.push_front((rest - bytes, request));
            }
            seat.begin(bytes, self.now);
            let end = Event::End { disk: index, request, bytes, began_ns: self.now };
            let done = self.serve(index, bytes) + self.device.way_ns;
            self.events.push(Reverse((done, end)));
        }
    }

    /// Runs for so long; what each disk moved.
    fn run(&mut self, time_ns: u64) -> Vec<u64> {
        let (before, until): (Vec<u64>, u64) = (self.moved(), self.now + time_ns);
        while let Some(Reverse((at, event))) = self.events.pop() {
            if at > until {
                self.events.push(Reverse((at, event)));
                break;
            }
            self.now = at;
            match event {
                Event::Begin { disk, request } => {
                    let bytes = self.disks[disk].load.bytes;
                    self.disks[disk].open[request] = bytes;
                    self.disks[disk].queue.push_back((bytes, request));
                    self.send(disk);
                }
                Event::End { disk: index, .. } if self.disks[index].is_dead => {}
                Event::End { disk: index, request, bytes, began_ns } => {
                    let disk = &mut self.disks[index];
                    disk.moved += bytes;
                    let seat = disk.member.seat();
                    seat.end(bytes, began_ns, at);
                    if self.is_fair && seat.is_due(at) {
                        disk.member.look(at);
                    }
                    disk.open[request] -= bytes;
                    if disk.open[request] == 0 {
                        let begin = Event::Begin { disk: index, request };
                        self.events.push(Reverse((at + disk.load.think_ns, begin)));
                    }
                    self.send(index);
                }
            }
        }
        self.now = until;
        self.moved().iter().zip(before).map(|(now, before)| now - before).collect()
    }

    fn moved(&self) -> Vec<u64> {
        self.disks.iter().map(|disk| disk.moved).collect()
    }
}

/// What the disks move in 10 s, after 5 s to settle.
fn moved(device: Device, loads: &[Load], is_fair: bool) -> Vec<u64> {
    let mut world = World::new(device, loads, is_fair);
    world.run(5 * SECOND);
    world.run(10 * SECOND)
}

/// With and without, and the total of the first in 100 of the second.
fn both(device: Device, loads: &[Load]) -> (Vec<u64>, Vec<u64>, u64) {
    let (fair, free) = (moved(device, loads, true), moved(device, loads, false));
    let kept = fair.iter().sum::<u64>() * 100 / free.iter().sum::<u64>();
    (fair, free, kept)
}

fn ratio(moved: &[u64]) -> f64 {
    moved[0] as f64 / moved[1] as f64
}

/// `dd bs=1408K` beside `dd bs=88K`, as a ring of 44 KiB requests carries them.
const SEED: [Load; 2] = [load(32, 44), load(2, 44)];
/// The same, as a ring of large requests does.
const LARGE: [Load; 2] = [load(1, 1408), load(1, 88)];

#[test]
fn large_and_small_requests_get_the_same_of_a_device_with_a_queue() {
    let slices = |slice_ns| Device { slice_ns, ..device(90, 0, 200) };
    let devices = [
        device(90, 0, 100),
        device(90, 0, 0),
        device(10, 0, 0),
        device(400, 5, 50),
        device(1000, 0, 20),
        device(60, 300, 0),
        slices(100_000_000),
        slices(20_000_000),
    ];
    for device in devices {
        for loads in [SEED, LARGE] {
            // Large requests are cheaper there than the small ones between which time is shared: see below.
            if device.each_ns > 5_000 && loads[0].depth == 1 {
                continue;
            }
            let (fair, free, kept) = both(device, &loads);
            assert!(ratio(&free) > 6.0, "the model is unfair: {free:?}");
            let even = ratio(&fair);
            assert!((0.8..1.35).contains(&even) && kept >= 97, "{device:?} {loads:?}: {even} with {kept} %");
        }
    }
}

#[test]
fn a_device_so_slow_that_no_request_ends_in_a_period_is_shared() {
    let (fair, free, kept) = both(device(10, 0, 0), &[load(32, 44), load(1, 44)]);
    assert!(ratio(&free) > 20.0 && ratio(&fair) < 1.5 && kept >= 97, "{fair:?} with {kept} %, not {free:?}");
}

#[test]
fn a_noisy_device_is_shared_too() {
    for (noise, most) in [(10, 1.3), (40, 1.3), (90, 1.8)] {
        let device = Device { noise, ..device(90, 0, 100) };
        for loads in [SEED, LARGE] {
            let (fair, _, kept) = both(device, &loads);
            let even = ratio(&fair);
            assert!((0.6..most).contains(&even) && kept >= 94, "{noise} {loads:?}: {even} with {kept} %");
        }
    }
}

#[test]
fn where_small_requests_cost_much_the_total_counts_more_than_evenness() {
    // Half of the bytes in requests of 88 KiB are a twelfth less of all bytes.
    for device in [device(400, 20, 50), device(60, 300, 0)] {
        let (fair, free, kept) = both(device, &LARGE);
        assert!(ratio(&fair) < ratio(&free) && kept >= 93, "{fair:?} with {kept} %, not {free:?}");
    }
}

#[test]
fn where_alternating_costs_seeks_the_total_counts_more_than_evenness() {
    for seek_ns in [1_000_000, 5_000_000] {
        for loads in [SEED, LARGE] {
            let (fair, free, kept) = both(Device { seek_ns, ..device(90, 0, 100) }, &loads);
            assert!(
                ratio(&fair) < ratio(&free) && kept >= 94,
                "{seek_ns}: {fair:?} with {kept} %, not {free:?}"
            );
        }
    }
}

#[test]
fn a_device_of_many_servers_keeps_its_total() {
    for (servers, device) in [(4, device(200, 20, 50)), (16, device(1000, 50, 50))] {
        for loads in [SEED, LARGE, [load(32, 44), load(1, 44)], [load(32, 44), load(32, 4)]] {
            let (fair, free, kept) = both(Device { servers, ..device }, &loads);
            assert!(
                kept >= 94 && fair[1] * 100 >= free[1] * 97,
                "{servers} {loads:?}: {fair:?}, not {free:?}"
            );
        }
    }
}

#[test]
fn a_guest_that_mostly_thinks_holds_up_nobody() {
    let thinks = Load { think_ns: 1_000_000, ..load(1, 4) };
    for device in [device(90, 0, 100), device(1000, 0, 100), device(100_000, 0, 1_000)] {
        let (fair, free, kept) = both(device, &[load(32, 44), thinks]);
        assert!(kept >= 93 && fair[1] >= free[1], "{device:?}: {fair:?} with {kept} %, not {free:?}");
    }
}

#[test]
fn a_device_without_a_queue_loses_nothing() {
    // Whatever one disk does, the other gets its answers as soon: there is nothing to share.
    for device in [device(100_000, 0, 10_000), device(100_000, 0, 1_000), device(2_000, 0, 5_000)] {
        let (fair, free, kept) = both(device, &SEED);
        assert!(kept >= 95, "{device:?}: {kept} %");
        assert!(fair[1] * 100 >= free[1] * 98, "{device:?}");
    }
}

#[test]
fn a_share_that_is_not_used_is_lent() {
    // A guest that thinks more than it waits.
    let idle = Load { think_ns: 5_000_000, ..load(1, 4) };
    let (fair, free, kept) = both(device(90, 0, 100), &[load(32, 44), idle]);
    assert!(kept >= 97 && fair[0] * 100 >= free[0] * 97, "{kept} %");
    // One that ends: the other has everything from the next period on.
    let mut world = World::new(device(90, 0, 100), &SEED, true);
    world.run(5 * SECOND);
    world.disks[1].load.think_ns = 1000 * SECOND;
    world.run(8 * PERIOD_NS);
    let alone = world.run(SECOND);
    assert!(alone[0] * 100 / (90 << 20) >= 98, "{alone:?}");
    assert_eq!(world.disks[0].member.facts().even_percent, None);
}

#[test]
fn weights_are_kept() {
    for (weight, range) in [(300, 2.1..3.9), (25, 0.18..0.36)] {
        let loads = [load(32, 44), Load { weight, ..load(32, 44) }];
        let (fair, _, kept) = both(device(90, 0, 100), &loads);
        let got = 1.0 / ratio(&fair);
        assert!(range.contains(&got) && kept >= 94, "{weight}: {got} with {kept} %");
    }
}

#[test]
fn many_disks_are_even() {
    let loads = [load(32, 44), load(1, 1408), load(8, 64), load(2, 44), load(4, 128)];
    let (fair, _, kept) = both(device(200, 0, 100), &loads);
    let (most, least) = (fair.iter().max().expect("some"), fair.iter().min().expect("some"));
    assert!(*most as f64 / (*least as f64) < 1.7 && kept >= 93, "{fair:?} with {kept} %");
}

#[test]
fn a_latency_target_is_worth_more_than_throughput_and_less_than_a_part() {
    let target = Load { latency_us: 3_000, ..load(1, 16) };
    let mut world = World::new(device(90, 0, 100), &[load(32, 64), target], true);
    let free = moved(device(90, 0, 100), &[load(32, 64), load(1, 16)], false);
    world.run(5 * SECOND);
    let fair = world.run(10 * SECOND);
    // At one request in flight, its rate is its latency.
    let latency = |moved: u64| 10.0 * 1e6 * f64::from(16 << 10) / moved as f64 - 50.0;
    assert!(latency(free[1]) > 15_000.0, "{}", latency(free[1]));
    assert!(latency(fair[1]) < 3_600.0, "{}", latency(fair[1]));
    assert!(fair[0] * 2 > free[0], "the other keeps its part: {fair:?}");
}

#[test]
fn a_disk_that_is_killed_or_stuck_limits_nobody() {
    let mut world = World::new(device(90, 0, 100), &SEED, true);
    world.run(5 * SECOND);
    assert!(world.disks[0].member.facts().even_percent.is_some());
    // Killed in the middle of everything: its slot stays as it was.
    world.disks[1].is_dead = true;
    world.run(8 * PERIOD_NS);
    assert_eq!(world.disks[0].member.facts().even_percent, None);
    let alone = world.run(SECOND);
    assert!(alone[0] * 100 / (90 << 20) >= 98, "{alone:?}");
}

#[test]
fn counters_that_wrap_change_nothing() {
    let mut world = World::new(device(90, 0, 100), &SEED, true);
    for disk in &world.disks {
        disk.member.start_at(u64::MAX - (100 << 20));
    }
    world.run(5 * SECOND);
    let fair = world.run(20 * SECOND);
    assert!((0.7..1.4).contains(&ratio(&fair)), "{fair:?}");
}

/// A disk that lies in its own slot, in every period.
#[test]
fn whatever_a_slot_says_the_others_keep_their_part() {
    let mut random = 1_u64;
    let mut next = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        random >> 16
    };
    for round in 0..6_u64 {
        let mut world = World::new(device(90, 0, 100), &SEED, true);
        for period in 0..150 {
            world.run(PERIOD_NS);
            let words = match round % 3 {
                // It says that it waits, moves nothing, and is late; then that the device does more than it can.
                0 => [period, period, period * PERIOD_NS, WEIGHT_MAX.into(), flag::LATE, u64::MAX],
                1 => [period, (period << 30) * 100, period * PERIOD_NS, 1000, 0, u64::MAX],
                _ => [
                    next() << (next() % 40),
                    next() << (next() % 40),
                    next() % (1 << 40),
                    next(),
                    next(),
                    next(),
                ],
            };
            world.disks[1].member.lie(words);
        }
        let before = world.moved();
        world.run(SECOND);
        // A tenth is what such a weight leaves.
        let moved = (world.moved()[0] - before[0]) * 100 / (90 << 20);
        assert!(moved >= 8, "round {round}: {moved} %");
    }
}

#[test]
fn clocks_that_began_at_different_times_are_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, name) = (ShmRoot::new(dir.path()), "8-0".parse::<DeviceName>().expect("a name"));
    let disks = [0, 1].map(|minor| join(&root, &name, minor).expect("joined"));
    // One process has run for an hour, the other one has just begun.
    disks[0].set_clock(3600 * SECOND);
    disks[1].set_clock(0);
    let until = |disk: &ShareMember, now| {
        let seat = disk.seat();
        seat.begin(4096, now);
        seat.end(4096, now, now + 1000);
        disk.until()
    };
    let [old, new] = [until(&disks[0], 3600 * SECOND), until(&disks[1], 0)];
    // A minute for a host that is slow between the two.
    assert!(old.abs_diff(new) < 60 * SECOND, "{old} and {new}");
}

#[test]
fn slots_are_given_out_once_and_taken_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, name) = (ShmRoot::new(dir.path()), "8-0".parse::<DeviceName>().expect("a name"));
    let first = join(&root, &name, 0).expect("joined");
    assert!(!first.seat().is_shared());
    let second = join(&root, &name, 1).expect("joined");
    assert!(first.seat().is_shared() && second.facts().disks == 2);
    let other = join(&root, &"8-16".parse().expect("a name"), 2).expect("another device");
    assert!(!other.seat().is_shared());
    drop(second);
    assert!(!first.seat().is_shared());
    // A process that died: of a number that no process has.
    let memory = std::fs::OpenOptions::new().write(true).open(root.shares().join("8-0")).expect("there");
    let dead = (u64::from(u32::MAX) << 32 | 7).to_ne_bytes();
    std::os::unix::fs::FileExt::write_all_at(&memory, &dead, at::owner(5) as u64 * 8).expect("written");
    let more: Vec<_> = (1..SLOTS as u32).map(|minor| join(&root, &name, minor).expect("joined")).collect();
    join(&root, &name, 300).expect_err("it is full");
    assert_eq!(first.facts().disks, SLOTS as u64);
    drop((first, more, other));
    assert!(!root.shares().exists(), "the last one took the files away");
    clean_shares(&root).expect("nothing to clean");
}

#[test]
fn files_of_dead_disks_and_of_other_layouts_are_known() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, name) = (ShmRoot::new(dir.path()), "8-0".parse::<DeviceName>().expect("a name"));
    let member = join(&root, &name, 0).expect("joined");
    let path = root.shares().join("8-0");
    let bytes = std::fs::read(&path).expect("there");
    clean_shares(&root).expect("cleaned");
    assert!(path.exists(), "a living disk has it");
    drop(member);
    std::fs::create_dir_all(root.shares()).expect("made");
    let mut dead = bytes.clone();
    dead[at::owner(0) * 8..][..8].copy_from_slice(&(u64::from(u32::MAX) << 32).to_ne_bytes());
    std::fs::write(&path, &dead).expect("written");
    clean_shares(&root).expect("cleaned");
    assert!(!path.exists());
    std::fs::create_dir_all(root.shares()).expect("made");
    let mut newer = bytes;
    newer[8] = 9;
    std::fs::write(&path, &newer).expect("written");
    assert!(join(&root, &name, 0).expect_err("another layout").to_string().contains("layout 9"));
    std::fs::write(&path, b"nonsense").expect("written");
    join(&root, &name, 0).expect("made anew");
}

#[test]
fn a_weight_is_never_nonsense_and_a_late_disk_says_so() {
    let mut world = World::new(device(90, 0, 100), &[load(1, 4)], true);
    world.disks[0].member.set(0, 1);
    assert_eq!(world.disks[0].member.facts().weight, 1);
    world.disks[0].member.set(u32::MAX, 1);
    assert_eq!(world.disks[0].member.facts().weight, WEIGHT_MAX);
    world.run(SECOND);
    assert_eq!(world.disks[0].member.flags() & flag::LATE, flag::LATE);
}
