//! Motions that are broken off: by a kill of either daemon at every step, a network that is cut, a cancel, a full SR.
//! The VM is at exactly one host with all its data, and what was copied is gone.

use std::time::Duration;

use tapio_e2e::process::{poll_until, signal};

use super::{Guest, LIMIT, MIB, Site, contents};

/// The VM is at one of the two, whole; answers whether that is the second.
#[track_caller]
fn is_at_one(one: &Site, two: &Site, guest: &Guest) -> bool {
    one.is_over();
    let (here, there) = (one.has(&guest.uuid), two.has(&guest.uuid));
    assert!(here != there, "the VM is at both hosts, or at none: {here} {there}");
    let (site, other) = if here { (one, two) } else { (two, one) };
    site.is_whole(guest);
    other.is_empty();
    there
}

fn dies_at(place: &str) -> String {
    format!("{place}:1")
}

#[test]
fn a_sender_that_is_killed_at_any_step_leaves_the_vm_at_one_host() {
    let (mut one, two) = (Site::new(), Site::new());
    let guest = one.small("web", 5);
    let here = ["motion-out:noted", "motion-out:checked", "motion-out:copied", "motion-out:prepared"];
    let there = ["motion-out:decided", "motion-out:committed", "motion-out:left"];
    for place in here {
        one.restart_with(|options| options.env("TAPIO_DIE_AT", &dies_at(place)));
        one.migrate(&two, &guest.uuid, &[]).fails();
        one.restart_with(|options| options.env("TAPIO_DIE_AT", ""));
        assert!(!is_at_one(&one, &two, &guest), "{place}");
    }
    for place in there {
        one.restart_with(|options| options.env("TAPIO_DIE_AT", &dies_at(place)));
        one.migrate(&two, &guest.uuid, &[]).fails();
        one.restart_with(|options| options.env("TAPIO_DIE_AT", ""));
        assert!(is_at_one(&one, &two, &guest), "{place}");
        two.migrate(&one, &guest.uuid, &[]).ok();
        assert!(is_at_one(&two, &one, &guest), "back after {place}");
    }
    one.finish();
    two.finish();
}

#[test]
fn a_receiver_that_is_killed_at_any_step_goes_on() {
    let (one, mut two) = (Site::new(), Site::new());
    let guest = one.small("web", 6);
    one.value(&["vm-snapshot", &format!("uuid={}", guest.uuid), "new-name-label=s"]);
    for place in
        ["motion-in:image-made", "motion-in:image-forked", "motion-in:prepared", "motion-in:committed"]
    {
        two.restart_with(|options| options.env("TAPIO_DIE_AT", &dies_at(place)));
        let mut motion = one.begins(&two, &guest.uuid, &[]);
        let died = poll_until(LIMIT, || two.world.has_ended().then_some(()));
        assert!(died.is_some(), "{place} is not reached: {}", motion.log());
        two.restart_with(|options| options.env("TAPIO_DIE_AT", ""));
        assert!(motion.wait(LIMIT).success(), "{place}: {}", motion.log());
        assert!(is_at_one(&one, &two, &guest), "{place}");
        two.migrate(&one, &guest.uuid, &[]).ok();
        assert!(is_at_one(&two, &one, &guest), "back after {place}");
    }
    one.finish();
    two.finish();
}

#[test]
fn an_administrator_decides_for_a_sender_that_does_not_come_back() {
    let (mut one, two) = (Site::new(), Site::new());
    let guest = one.small("web", 12);
    for (outcome, is_there) in [("abort", false), ("commit", true)] {
        one.restart_with(|options| options.env("TAPIO_DIE_AT", &dies_at("motion-out:prepared")));
        one.migrate(&two, &guest.uuid, &[]).fails();
        let motions = two.motions();
        let (motion, phase) = motions.first_key_value().expect("a motion waits");
        assert!(phase.as_str().is_some_and(|phase| phase.contains("prepared")), "{motions:?}");
        assert!(!two.has(&guest.uuid));
        two.value(&["host-motion-end", &format!("motion={motion}"), &format!("outcome={outcome}")]);
        assert_eq!(two.has(&guest.uuid), is_there);
        if is_there {
            two.is_whole(&guest);
        } else {
            two.is_empty();
        }
    }
    // It comes back all the same, and says that the VM is at both.
    one.restart_with(|options| options.env("TAPIO_DIE_AT", ""));
    one.is_over();
    let said = one.list(&["message-list", "name=VM_AT_TWO_HOSTS"]);
    assert_eq!(said.len(), 1, "{said:?}");
    one.is_whole(&guest);
    one.finish();
    two.finish();
}

/// A VM whose disk takes some seconds at the rate of [`SLOW`].
fn large(site: &Site) -> Guest {
    let vm = site.vm("large");
    let vdi = site.disk("root", 64);
    let places: Vec<usize> = (0..64 * 4).map(|at| at * (MIB / 4)).collect();
    let data = contents(64, 11, &places);
    site.fill(&vdi, &data);
    site.attach(&vm, &vdi, "0");
    Guest { uuid: vm, holds: [("0".to_owned(), data)].into() }
}

const SLOW: &str = "rate=8MiB";

/// Waits until some of the disk is on its way.
fn flows(to: &Site, before: u64) {
    let flows = || (to.line.passed() > before + 4 * MIB as u64).then_some(());
    assert!(poll_until(LIMIT, flows).is_some(), "nothing is sent");
}

#[test]
fn a_network_that_is_cut_is_waited_for_and_a_longer_loss_ends_the_motion() {
    let (one, two) = (Site::new(), Site::new());
    let guest = large(&one);
    // Too long.
    let before = two.line.passed();
    let mut motion = one.begins(&two, &guest.uuid, &[SLOW, "timeout=2"]);
    flows(&two, before);
    two.line.cut();
    assert!(!motion.wait(LIMIT).success());
    assert!(motion.log().contains("not reached"), "{}", motion.log());
    assert!(one.has(&guest.uuid) && !two.has(&guest.uuid));
    one.is_whole(&guest);
    two.line.mend();
    assert!(!is_at_one(&one, &two, &guest));

    // Not too long: it goes on.
    let before = two.line.passed();
    let mut motion = one.begins(&two, &guest.uuid, &[SLOW]);
    flows(&two, before);
    two.line.cut();
    std::thread::sleep(Duration::from_secs(1));
    two.line.mend();
    assert!(motion.wait(LIMIT).success(), "{}", motion.log());
    assert!(is_at_one(&one, &two, &guest));
    one.finish();
    two.finish();
}

#[test]
fn a_motion_that_is_cancelled_or_finds_no_room_leaves_all_as_it_was() {
    let (one, two) = (Site::new(), Site::new());
    let guest = large(&one);
    let before = two.line.passed();
    let mut motion = one.begins(&two, &guest.uuid, &[SLOW]);
    flows(&two, before);
    // It says how far it is, and not more than that.
    let session = one.world.daemon().login();
    let progress = poll_until(LIMIT, || {
        let tasks = session.call("task.get_all_records", &[]);
        let found = tasks
            .as_object()?
            .values()
            .find(|task| task["name_label"].as_str().is_some_and(|name| name.contains("migrate_send")))?;
        found["progress"].as_f64().filter(|progress| *progress > 0.02)
    });
    let progress = progress.expect("the task shows progress");
    let sent = (two.line.passed() - before) as f64 / (64 * MIB) as f64;
    assert!(
        progress < 0.9 && progress <= sent + 0.3,
        "{progress} of the motion with {sent} of the data sent"
    );
    signal(motion.pid().cast_signed(), libc::SIGINT).expect("it runs");
    assert!(!motion.wait(LIMIT).success());
    assert!(motion.log().contains("ancel"), "{}", motion.log());
    assert!(!is_at_one(&one, &two, &guest));

    // The receiver's disk is full for these.
    let sr = two.sr();
    let small = tapio_e2e::scratch::SmallFileSystem::mount(24 << 20);
    let Ok(small) = small else { return tapio_e2e::tools::skip("needs a small file system") };
    let place = format!("device-config:location={}", small.path().join("sr").display());
    let far = two.value(&["sr-create", "name-label=small", "type=file", &place]);
    let said = one.migrate(&two, &guest.uuid, &[&format!("destination-sr-uuid={far}")]).fails();
    assert!(
        said.to_lowercase().contains("full") || said.contains("space") || said.contains("room"),
        "{said}"
    );
    assert_ne!(sr, far);
    two.value(&["pbd-unplug", &format!("uuid={}", two.list(&["pbd-list", &format!("sr-uuid={far}")])[0])]);
    two.value(&["sr-forget", &format!("uuid={far}")]);
    assert!(!is_at_one(&one, &two, &guest));
    one.finish();
    two.finish();
}
