//! The rings of a Xen guest on a real disk process: the guest is a double, its memory and its event channels are
//! descriptors that are handed over.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_control::command as ask;
use tapio_control::{BlkifFront, BlkifQueue, Front, FrontEntry, OwnClient, RingStart, RunDir};
use tapio_e2e::disk::{Host, Tap, assert_vhd_valid, create_vhd, snapshot_vhd, text};
use tapio_e2e::hanging::{Call, HangingFs};
use tapio_e2e::process::{poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_load::{Load, Mix};
use tapio_types::Movement;
use tapio_xen::blkfront::{Blkfront, Command, FrontOptions, FrontQueue, Invitation};
use tapio_xen::blkif::status;

use super::queue_threads::{has_queue_threads, queue_thread_switches};

const DISK_MIB: u64 = 16;
const LIMIT: Duration = Duration::from_secs(60);
pub(super) const DOMID: u32 = 9;
pub(super) const DEVID: u32 = 51712;

/// Gives the rings of a guest to a disk.
pub(super) fn connect(
    scratch: &Scratch,
    tap: &Tap,
    invitation: Invitation,
    movement: Movement,
    start: RingStart,
) -> FrontEntry {
    let disk = (tap.pid as i32, tap.minor as u16);
    connect_at(&scratch.join("run"), disk, DOMID, invitation, movement, start)
}

/// The same, of a process with its control socket in `run`, and its disk of this number; the guest is `domid`.
pub(super) fn connect_at(
    run: &Path,
    (pid, minor): (i32, u16),
    domid: u32,
    invitation: Invitation,
    movement: Movement,
    start: RingStart,
) -> FrontEntry {
    let mut fds: Vec<OwnedFd> = vec![invitation.memory];
    let mut queues = Vec::new();
    for (index, ring) in invitation.rings.into_iter().enumerate() {
        let (ours, theirs) = ring.wire.into_fds();
        let first = fds.len() as u32;
        fds.extend([ours, theirs]);
        queues.push(BlkifQueue {
            ring: ring.ring.iter().map(|grant| grant.0).collect(),
            responses: ring.responses.iter().map(|grant| grant.0).collect(),
            port: index as u32,
            double: Some([first, first + 1]),
        });
    }
    let front = BlkifFront { movement, start, double: Some(0), ..BlkifFront::new(domid, DEVID, queues) };
    let ask = ask::FrontAdd { minor, front: Front::Blkif(Box::new(front)), vbd: None };
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut client = OwnClient::connect(&RunDir::new(run), pid).expect("it answers");
    client.call(&ask, &borrowed, Some(LIMIT)).expect("the rings are served")
}

/// A raw image and a chain of three VHDs.
fn images(scratch: &Scratch) -> [String; 2] {
    let raw = scratch.join("disk.raw");
    let file = std::fs::File::create(&raw).expect("an image");
    file.set_len(DISK_MIB << 20).expect("its length");
    let base = create_vhd(scratch.join("base.vhd"), DISK_MIB);
    let middle = snapshot_vhd(scratch.join("middle.vhd"), &base);
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &middle);
    [format!("aio:{}", raw.display()), format!("vhd:{}", leaf.display())]
}

const BLOCK: u32 = 16 << 10;

/// What a block holds: its number and its generation, over and over.
fn fill(bytes: &mut [u8], block: u64, generation: u64) {
    for words in bytes.chunks_exact_mut(16) {
        words[..8].copy_from_slice(&block.to_le_bytes());
        words[8..].copy_from_slice(&generation.to_le_bytes());
    }
}

fn write(queue: &mut FrontQueue, block: u64, generation: u64) {
    let slot = queue.next_slot().expect("a slot is free");
    fill(&mut queue.buffer(slot)[..BLOCK as usize], block, generation);
    let command = Command::Write { at: block * u64::from(BLOCK), len: BLOCK };
    queue.submit(&command).expect("grants are left").expect("a slot is free");
}

fn reap_all(queue: &mut FrontQueue) {
    let mut done = Vec::new();
    while queue.under_way() > 0 {
        assert!(queue.wait(LIMIT).expect("the ring is whole"), "{} without an answer", queue.under_way());
        queue.reap(&mut done).expect("each answer is of a request in flight");
    }
    assert!(done.iter().all(|done| done.status == status::OKAY), "{done:?}");
}

fn verify(queue: &mut FrontQueue, generations: &[u64]) {
    let mut want = vec![0; BLOCK as usize];
    for (block, generation) in generations.iter().enumerate().filter(|(_, generation)| **generation > 0) {
        let read = Command::Read { at: block as u64 * u64::from(BLOCK), len: BLOCK };
        let done = queue.ask(&read).expect("answered");
        assert_eq!(done.status, status::OKAY);
        fill(&mut want, block as u64, *generation);
        let slot = done.slot.expect("a slot");
        assert!(queue.buffer(slot)[..BLOCK as usize] == want[..], "block {block} of generation {generation}");
    }
}

fn stop(scratch: &Scratch, tap: Tap) {
    tap.destroy();
    let left: Vec<PathBuf> = std::fs::read_dir(scratch.join("shm/tapio-blkif"))
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_back_end_of_a_guest_is_told_when_its_disk_grows() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let tap = host.create(&images(&scratch)[0]);
    let front = Blkfront::new(FrontOptions::default()).expect("a double");
    let invitation = front.invitation().expect("descriptors");
    let entry = connect(&scratch, &tap, invitation, Movement::Copy, RingStart::Fresh);
    let mut client =
        OwnClient::connect(&RunDir::new(scratch.join("run")), tap.pid as i32).expect("it answers");
    let mut follow = |front: u32| {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_read_timeout(Some(LIMIT)).expect("a limit");
        let ask = ask::FrontFollow { minor: tap.minor as u16, front };
        let told = client.call(&ask, &[theirs.as_fd()], Some(LIMIT));
        drop(theirs);
        let news = move |bytes: &mut [u8]| ours.read(bytes).expect("news, or their end");
        told.map(|info| (info, news))
    };
    let (before, mut first) = follow(entry.id).expect("it tells");
    assert_eq!(before.sectors, DISK_MIB << 11);
    let grow = |size: &str| drop(run(&mut host.tapio(&["disk", "grow", &tap.minor.to_string(), size])).ok());
    grow("32MiB");
    assert_eq!(first(&mut [0; 8]), 1);
    let (grown, mut second) = follow(entry.id).expect("it tells another");
    assert_eq!(grown.sectors, 32 << 11);
    assert_eq!(first(&mut [0; 8]), 0, "and the first no more");
    // The disk does not wait for a reader that takes no news.
    grow("48MiB");
    grow("64MiB");
    assert!(matches!(second(&mut [0; 8]), 1 | 2));
    assert!(follow(entry.id + 1).is_err(), "there is no such front end");
    let remove = ask::FrontRemove { minor: tap.minor as u16, front: entry.id, force: false };
    client.call(&remove, &[], Some(LIMIT)).expect("removed");
    let mut rest = [0; 8];
    while second(&mut rest) > 0 {}
    stop(&scratch, tap);
}

#[test]
fn a_guest_works_on_its_disk_and_everybody_can_see_it() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    for (image, movement) in images(&scratch).iter().zip([Movement::Copy, Movement::Persistent]) {
        let tap = host.create(image);
        let persistent = movement == Movement::Persistent;
        let options = FrontOptions { buffer_len: BLOCK, persistent, ..FrontOptions::default() };
        let mut front = Blkfront::new(options).expect("a double");
        let invitation = front.invitation().expect("descriptors");
        let entry = connect(&scratch, &tap, invitation, movement, RingStart::Fresh);
        assert_eq!(entry.front.address(), format!("xen:{DOMID}/{DEVID}"));
        let queue = &mut front.take_queues()[0];
        let mut generations = vec![0; 512];
        for round in 1..=4u64 {
            for block in (0..512).step_by(round as usize) {
                if queue.room() == 0 {
                    queue.kick().expect("woken");
                    reap_all(queue);
                }
                write(queue, block, round);
                generations[block as usize] = round;
            }
            queue.kick().expect("woken");
            reap_all(queue);
        }
        verify(queue, &generations);

        // The disk is paused: requests wait in the ring, and reports show it.
        tap.ctl("pause", &[]).ok();
        for block in 0..8 {
            write(queue, block, 9);
            generations[block as usize] = 9;
        }
        queue.kick().expect("woken");
        let stats = tap.ctl("stats", &[]).ok();
        let stats: serde_json::Value = serde_json::from_str(&stats).expect("JSON");
        let xenbus = &stats["xenbus"];
        assert_eq!((xenbus["domid"].as_u64(), xenbus["devid"].as_u64()), (Some(9), Some(51712)), "{stats}");
        assert_eq!(xenbus["reqs"][0], xenbus["reqs"][1], "what waits in the ring was not taken: {stats}");
        assert!(xenbus["reqs"][0].as_u64() > Some(1000), "{stats}");
        let pid = tap.pid.to_string();
        let shown = run(&mut host.tapio(&["disk", "stats", "-p", &pid])).ok();
        assert!(shown.contains(&format!("xen {DOMID}/{DEVID}:")), "{shown}");
        assert!(shown.contains("ring 0 of 32:"), "{shown}");
        let json = run(&mut host.tapio(&["disk", "stats", "-p", &pid, "--json"])).ok();
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let ring = &json[0]["blkif"][0]["rings"][0];
        let waiting =
            ring["req-prod"].as_u64().zip(ring["req-cons"].as_u64()).map(|(prod, cons)| prod - cons);
        assert_eq!(waiting, Some(8), "{json}");
        let moved = &json[0]["blkif"][0]["counts"];
        let number = |name: &str| moved[name].as_u64().unwrap_or(0);
        match movement {
            Movement::Persistent => {
                assert!(number("persistent-hits") > number("persistent-misses"), "{moved}");
                assert_eq!(number("copy-calls"), 0, "{moved}");
            }
            _ => assert!(number("copied-segments") >= number("requests"), "{moved}"),
        }
        let sampled = run(&mut host.tapio(&["xsiostat", "--format", "6.1", "-i", "1", "-c", "2"])).ok();
        let row = sampled.lines().rfind(|line| line.contains("51712")).unwrap_or_default().to_owned();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert!(words.windows(2).any(|pair| pair[0].contains("32") && pair[1].contains('8')), "{sampled}");
        tap.ctl("unpause", &[]).ok();
        reap_all(queue);
        verify(queue, &generations);

        let id = entry.id.to_string();
        let minor = tap.minor.to_string();
        run(&mut host.tapio(&["disk", "front", "remove", "-p", &pid, "-m", &minor, &id])).ok();
        let ring = queue.invitation().expect("descriptors").ring[0];
        assert_eq!(front.vm().uses(ring), 0, "nothing is mapped any more");
        stop(&scratch, tap);
    }
    assert_vhd_valid(&scratch.join("leaf.vhd"));
}

#[test]
fn what_a_killed_process_left_is_done_by_the_next() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    for (round, image) in images(&scratch).iter().enumerate() {
        for movement in [Movement::Copy, Movement::Persistent, Movement::Map] {
            let persistent = movement == Movement::Persistent;
            let options = FrontOptions {
                buffer_len: BLOCK,
                order: 1,
                depth: 48,
                persistent,
                ..FrontOptions::default()
            };
            let mut front = Blkfront::new(options).expect("a double");
            let mut queues = front.take_queues();
            let mut generations = vec![0u64; 256];
            let mut start = RingStart::Fresh;
            let mut tap = host.create(image);
            for generation in 1..=6u64 {
                connect(&scratch, &tap, front.invitation_of(&queues).expect("descriptors"), movement, start);
                let queue = &mut queues[0];
                // What the process before left without an answer is answered by this one, each request once.
                queue.kick().expect("woken");
                reap_all(queue);
                verify(queue, &generations);
                for block in 0..256u64 {
                    if queue.room() == 0 {
                        queue.kick().expect("woken");
                        assert!(queue.wait(LIMIT).expect("the ring is whole"));
                        queue.reap(&mut Vec::new()).expect("each answer is of a request in flight");
                    }
                    write(queue, block, generation);
                    generations[block as usize] = generation;
                    queue.kick().expect("woken");
                    if block == 64 + generation * 29 + round as u64 {
                        break;
                    }
                }
                tap.kill();
                front.vm().back_end_died();
                tap = host.create(image);
                start = if generation % 2 == 0 { RingStart::Auto } else { RingStart::Resume };
            }
            connect(&scratch, &tap, front.invitation_of(&queues).expect("descriptors"), movement, start);
            reap_all(&mut queues[0]);
            verify(&mut queues[0], &generations);
            stop(&scratch, tap);
        }
    }
    assert_vhd_valid(&scratch.join("leaf.vhd"));
}

/// Two rings, each on a thread of its own, through kills, a pause and a snapshot: what one thread has taken and not
/// answered is done by the same ring's thread in the next process.
#[test]
fn rings_of_a_device_are_served_by_several_threads() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    for image in images(&scratch) {
        let options = FrontOptions { queues: 2, buffer_len: BLOCK, ..FrontOptions::default() };
        let mut front = Blkfront::new(options).expect("a double");
        let mut queues = front.take_queues();
        // Each queue has every second block.
        let mut generations = vec![0u64; 512];
        let mut start = RingStart::Fresh;
        let mut tap = host.create_with_threads(&image, 2);
        for generation in 1..=4u64 {
            let invitation = front.invitation_of(&queues).expect("descriptors");
            connect(&scratch, &tap, invitation, Movement::Copy, start);
            assert!(has_queue_threads(tap.pid, 1), "two threads serve two rings");
            for queue in &mut queues {
                queue.kick().expect("woken");
                reap_all(queue);
                verify(queue, &generations);
            }
            let before = queue_thread_switches(tap.pid);
            for block in 0..512u64 {
                let queue = &mut queues[block as usize % 2];
                if queue.room() == 0 {
                    queue.kick().expect("woken");
                    reap_all(queue);
                }
                write(queue, block, generation);
                generations[block as usize] = generation;
            }
            for queue in &mut queues {
                queue.kick().expect("woken");
            }
            if generation % 2 == 0 {
                queues.iter_mut().for_each(reap_all);
                // It may sleep a little later than it has answered.
                let has_slept = || (queue_thread_switches(tap.pid) > before).then_some(());
                assert!(
                    poll_until(LIMIT, has_slept).is_some(),
                    "the thread beside the owner has served its ring"
                );
                tap.ctl("pause", &[]).ok();
                write(&mut queues[1], 1, generation);
                queues[1].kick().expect("woken");
                tap.ctl("unpause", &[]).ok();
                reap_all(&mut queues[1]);
            }
            tap.kill();
            front.vm().back_end_died();
            tap = host.create_with_threads(&image, 2);
            start = RingStart::Resume;
        }
        let entry = connect(
            &scratch,
            &tap,
            front.invitation_of(&queues).expect("descriptors"),
            Movement::Copy,
            start,
        );
        for queue in &mut queues {
            reap_all(queue);
            verify(queue, &generations);
        }
        let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
        let json = run(&mut host.tapio(&["disk", "stats", "-p", &pid, "--json"])).ok();
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let rings = json[0]["blkif"][0]["rings"].as_array().expect("rings");
        let answered: Vec<_> = rings.iter().map(|ring| ring["rsp-prod"].as_u64() > Some(500)).collect();
        assert_eq!(answered, [true, true], "{json}");
        run(&mut host.tapio(&["disk", "front", "remove", "-p", &pid, "-m", &minor, &entry.id.to_string()]))
            .ok();
        for queue in &queues {
            let ring = queue.invitation().expect("descriptors").ring[0];
            assert_eq!(front.vm().uses(ring), 0, "nothing is mapped any more");
        }
        stop(&scratch, tap);
    }
    assert_vhd_valid(&scratch.join("leaf.vhd"));
}

/// A flush is the owner's, whatever thread's ring asked for it: when it takes longer than it may, the guest has its
/// answer all the same.
#[test]
fn a_flush_that_hangs_is_answered_on_every_ring() {
    let scratch = Scratch::on_disk();
    let hanging = match HangingFs::start(&scratch) {
        Ok(hanging) => hanging,
        Err(why) => return skip(&why),
    };
    let image = format!("aio:{}", text(&hanging.raw_image("image", DISK_MIB << 20)));
    let host = Host::new(&scratch);
    let mut create = host.tapio(&["tap-ctl", "create", "-a", &image, "-t", "1"]);
    run(create.env("TAPIO_THREADS", "2")).ok();
    let tap = host.find(&image);
    let options = FrontOptions { queues: 2, buffer_len: BLOCK, ..FrontOptions::default() };
    let mut front = Blkfront::new(options).expect("a double");
    let invitation = front.invitation().expect("descriptors");
    connect(&scratch, &tap, invitation, Movement::Copy, RingStart::Fresh);
    assert!(has_queue_threads(tap.pid, 1), "two threads serve two rings");
    let mut queues = front.take_queues();
    for (index, queue) in queues.iter_mut().enumerate() {
        write(queue, index as u64, 1);
        queue.kick().expect("woken");
        reap_all(queue);
    }
    hanging.hang(Call::Sync);
    for (index, queue) in queues.iter_mut().enumerate() {
        let done = queue.ask(&Command::Flush).expect("answered");
        assert_eq!(done.status, status::ERROR, "ring {index}");
        assert!(hanging.held() > 0, "it hangs");
    }
    hanging.go_on();
    for queue in &mut queues {
        assert_eq!(queue.ask(&Command::Flush).expect("answered").status, status::OKAY);
        verify(queue, &[1, 1]);
    }
    stop(&scratch, tap);
}

/// The kernel ends the operations of a killed process, and lets go of its image, a little later than of the process.
#[test]
fn an_image_opens_at_once_after_a_kill_in_the_middle_of_writes() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    for image in images(&scratch) {
        for _ in 0..10 {
            let tap = host.create(&image);
            let options = FrontOptions { buffer_len: BLOCK, order: 1, depth: 60, ..FrontOptions::default() };
            let mut front = Blkfront::new(options).expect("a double");
            let invitation = front.invitation().expect("descriptors");
            connect(&scratch, &tap, invitation, Movement::Copy, RingStart::Fresh);
            let queue = &mut front.take_queues()[0];
            for block in 0..60 {
                write(queue, block * 16 % 1021, 1);
            }
            queue.kick().expect("woken");
            assert!(queue.wait(LIMIT).expect("the ring is whole"), "the writes have begun");
            tap.kill();
        }
        host.create(&image).destroy();
    }
    assert_vhd_valid(&scratch.join("leaf.vhd"));
}

/// The guest is gone in the middle of its requests: its memory fails, the process and the disk live on.
#[test]
fn a_guest_that_is_destroyed_takes_nothing_with_it() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let [image, _] = images(&scratch);
    let tap = host.create(&image);
    let mut front = Blkfront::new(FrontOptions::default()).expect("a double");
    let entry =
        connect(&scratch, &tap, front.invitation().expect("descriptors"), Movement::Copy, RingStart::Auto);
    let mut queues = front.take_queues();
    for block in 0..16 {
        let command = Command::Write { at: block * 4096, len: 4096 };
        queues[0].submit(&command).expect("grants").expect("a slot");
    }
    queues[0].kick().expect("woken");
    drop((queues, front));
    let pid = tap.pid.to_string();
    let (minor, id) = (tap.minor.to_string(), entry.id.to_string());
    run(&mut host.tapio(&["disk", "front", "remove", "-p", &pid, "-m", &minor, &id])).ok();
    // The next guest finds the disk as usual.
    let mut front = Blkfront::new(FrontOptions::default()).expect("a double");
    connect(&scratch, &tap, front.invitation().expect("descriptors"), Movement::Copy, RingStart::Auto);
    let load = Load {
        mix: Mix::RandomWrite,
        block_len: 4096,
        depth: 16,
        span_len: DISK_MIB << 20,
        time: LIMIT,
        requests_max: 500,
        spin: false,
        seed: 3,
    };
    let report = load.run(&mut front.take_queues()[0]).expect("served");
    assert_eq!((report.count, report.errors), (500, 0));
    stop(&scratch, tap);
}

/// A process that ends in good order while its disk is paused leaves what was asked to the next.
#[test]
fn a_process_that_is_replaced_hands_its_requests_over() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let [image, _] = images(&scratch);
    let tap = host.create(&image);
    let mut front =
        Blkfront::new(FrontOptions { buffer_len: BLOCK, ..FrontOptions::default() }).expect("a double");
    connect(&scratch, &tap, front.invitation().expect("descriptors"), Movement::Copy, RingStart::Auto);
    let mut queues = front.take_queues();
    tap.ctl("pause", &[]).ok();
    let mut generations = vec![0; 16];
    for block in 0..16 {
        write(&mut queues[0], block, 5);
        generations[block as usize] = 5;
    }
    queues[0].kick().expect("woken");
    tap.destroy();
    assert_eq!(poll_until(LIMIT, || host.list().is_empty().then_some(())), Some(()));
    let tap = host.create(&image);
    let invitation = front.invitation_of(&queues).expect("descriptors");
    connect(&scratch, &tap, invitation, Movement::Copy, RingStart::Resume);
    reap_all(&mut queues[0]);
    verify(&mut queues[0], &generations);
    stop(&scratch, tap);
}
