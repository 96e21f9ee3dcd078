//! Failures while a guest goes to another host of its pool: a process dies, the network is cut, the task is cancelled.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_fixtures::etcd::Cluster;
use tapio_fixtures::network::Network;

use super::guest::{Guest, kernel, make_vm};
use super::motion::{Two, disks};
use super::rig::{Failure, Host, is_missing, send, skipped, vdi};

const DISK: &str = "tapio-disk";
const EMULATOR: &str = "qemu-system";

/// Where a guest may be at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    Stays,
    Moves,
    /// At one of the two.
    Either,
    /// Its only emulator was killed: it is started again, at one of the two.
    Crashes,
}

/// The steps of the sender (`vm-migrate:`) and the receiver at which a process of that host dies.
const CASES: &[(&str, &str, Ends)] = &[
    ("vm-arrive:made", DISK, Ends::Stays),
    ("vm-arrive:made", EMULATOR, Ends::Stays),
    ("vm-arrive:read", DISK, Ends::Stays),
    ("vm-arrive:read", EMULATOR, Ends::Stays),
    ("vm-arrive:opened", DISK, Ends::Stays),
    ("vm-migrate:prepared", DISK, Ends::Either),
    ("vm-migrate:sent", DISK, Ends::Moves),
    ("vm-migrate:closed", DISK, Ends::Moves),
    ("vm-migrate:opened", DISK, Ends::Moves),
    ("vm-arrive:opened", EMULATOR, Ends::Either),
    ("vm-migrate:prepared", EMULATOR, Ends::Crashes),
];

fn kill(host: &Host, program: &str, signal: i32) -> usize {
    let all = host.running(program);
    all.iter().for_each(|pid| send(*pid, signal));
    all.len()
}

/// Emulators of a host. Their own numbers mean nothing outside of a namespace.
fn emulators(host: &Host) -> usize {
    host.running(EMULATOR).len()
}

/// A guest with two disks on the first host, which writes to one of them.
fn start(two: &Two, kernels: &std::path::Path) -> (Value, Guest) {
    let disk = |name: &str| two.a.done("VDI.create", vdi(&two.sr, name));
    let both = [disk("data"), disk("more")];
    two.a.done("VDI.resize", json!([both[0], 64 << 20]));
    let vm = make_vm(&two.a, kernels, &both.each_ref());
    two.a.done("VM.start_on", json!([vm, two.at_a, false, false]));
    let guest = Guest::of(&two.a, &vm);
    guest.wait(&two.a);
    guest.begin_to_write(&two.a);
    (vm, guest)
}

/// Moves the guest to the second host; the daemon to which a step belongs stops there, and goes on after `meanwhile`.
fn moved_with(
    two: &mut Two,
    vm: &Value,
    step: &str,
    meanwhile: impl FnOnce(&Host),
) -> Result<Value, Failure> {
    let of_sender = step.starts_with("vm-migrate:");
    let host = if of_sender { &mut two.a } else { &mut two.b };
    host.kill();
    host.start(&[("TAPIO_STOP_AT", step)]);
    two.at_rest();
    let host = if of_sender { &two.a } else { &two.b };
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| two.a.call("VM.pool_migrate", json!([vm, two.at_b, {}])));
        host.until(&format!("the daemon stops at {step}"), || host.is_stopped());
        meanwhile(host);
        host.signal(libc::SIGCONT);
        moving.join().unwrap()
    })
}

/// The guest is at one host, with its disks and its emulator there alone: which one.
fn place<'a>(two: &'a Two, vm: &Value, after: &str) -> &'a Host {
    let mut found = None;
    two.a.until_or(
        &format!("the guest is at one host after {after}"),
        || format!("{:?}; the log of the receiver:\n{}", two.resident(vm), two.b.log()),
        || {
            let resident = two.resident(vm);
            let (host, other) =
                if resident.as_ref() == Some(&two.at_b) { (&two.b, &two.a) } else { (&two.a, &two.b) };
            let is_one = resident.is_some()
                && (emulators(host), emulators(other)) == (1, 0)
                && (disks(host), disks(other)) == (2, 0);
            found = is_one.then_some(host);
            is_one
        },
    );
    found.expect("a host")
}

#[test]
#[ignore = "takes minutes: a process of each host is killed at each step, with a guest that is emulated"]
fn a_guest_is_at_one_host_after_the_death_of_each_process() {
    let Some(kernels) = kernel().filter(|_| !is_missing()) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut two = Two::new(&cluster, scratch.path(), &kernels);
    let (vm, guest) = start(&two, &kernels);
    let only = std::env::var("TAPIO_STEP").unwrap_or_default();
    for (step, program, ends) in CASES.iter().filter(|(step, ..)| step.contains(&only)) {
        let case = format!("{program} killed at {step}");
        println!("{case}");
        if *program == EMULATOR && *ends != Ends::Stays {
            // What it has written so far is compared with its memory while there is that.
            println!("  {} blocks are right", guest.verify(&two.a));
            guest.begin_to_write(&two.a);
        }
        let answer = moved_with(&mut two, &vm, step, |host| {
            assert!(kill(host, program, libc::SIGKILL) > 0, "{case}: there is one");
        });
        println!("  {answer:?}");
        let host = place(&two, &vm, &case);
        let has_moved = std::ptr::eq(host, &raw const two.b);
        if *ends == Ends::Crashes || (*program == EMULATOR && has_moved) {
            guest.wait(host);
            guest.begin_to_write(host);
        } else {
            assert_eq!(answer.is_ok(), has_moved, "{case}: {answer:?}");
            let is_right = *ends == Ends::Either || has_moved == (*ends == Ends::Moves);
            assert!(is_right, "{case}: moved: {has_moved}");
        }
        guest.goes_on(host);
        if has_moved {
            two.b.done("VM.pool_migrate", json!([vm, two.at_a, {}]));
            guest.goes_on(&two.a);
        }
    }
    println!("{} blocks are right", guest.verify(&two.a));
    two.a.done("VM.hard_shutdown", json!([vm]));
}

/// Moves the guest to the second host; the emulator there is stopped, so that the memory stays on its way until
/// `meanwhile` is done.
pub fn stalled(two: &mut Two, vm: &Value, meanwhile: impl FnOnce(&Two, &Value)) -> Result<Value, Failure> {
    two.b.kill();
    two.b.start(&[("TAPIO_STOP_AT", "vm-arrive:made")]);
    two.at_rest();
    let two = &*two;
    // Asked of the receiver, which has it done by the sender.
    let task = two.b.done("Async.VM.pool_migrate", json!([vm, two.at_b, {}]));
    two.b.until("the receiver has made the VM", || two.b.is_stopped());
    assert_eq!(kill(&two.b, EMULATOR, libc::SIGSTOP), 1);
    two.b.signal(libc::SIGCONT);
    two.a.until("its memory is on its way", || {
        let found = two.a.call("task.get_by_name_label", json!(["Memory of a VM"])).unwrap_or_default();
        let is_pending = |task: &Value| two.a.call("task.get_status", json!([task])) == Ok(json!("pending"));
        found.as_array().is_some_and(|all| all.iter().any(is_pending))
    });
    meanwhile(two, &task);
    // It may have ended by now.
    kill(&two.b, EMULATOR, libc::SIGCONT);
    let status = || two.b.call("task.get_status", json!([task])).unwrap_or_default();
    two.b.until("the task has ended", || {
        status().as_str().is_some_and(|status| !matches!(status, "pending" | "cancelling"))
    });
    if status() == json!("success") {
        return Ok(Value::Null);
    }
    let words = two.b.done("task.get_error_info", json!([task]));
    Err(words.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect())
}

/// The guest is at the first host after what was done, and writes.
#[track_caller]
fn stays(two: &Two, vm: &Value, guest: &Guest, what: &str) {
    assert!(std::ptr::eq(place(two, vm, what), &raw const two.a), "it stays after {what}");
    guest.goes_on(&two.a);
}

/// The guest is at the second host after what was done, and goes back.
#[track_caller]
fn moves(two: &Two, vm: &Value, guest: &Guest, what: &str) {
    assert!(std::ptr::eq(place(two, vm, what), &raw const two.b), "it moves after {what}");
    guest.goes_on(&two.b);
    two.b.done("VM.pool_migrate", json!([vm, two.at_a, {}]));
    guest.goes_on(&two.a);
}

#[test]
#[ignore = "takes minutes: the network is cut at each step, and its silence is waited for"]
fn a_guest_is_at_one_host_after_each_cut_of_the_network() {
    let Some(kernels) = kernel().filter(|_| !is_missing()) else { return };
    let network = match Network::new(3) {
        Ok(network) => Arc::new(network),
        Err(why) => return skipped(&format!("needs network namespaces: {why}")),
    };
    let scratch = tempfile::tempdir().unwrap();
    // The database is at a third host, which both reach all the time.
    let cluster = Cluster::start_on(&network, scratch.path(), 1);
    let places = [1, 2].map(|at| Some((network.clone(), at)));
    let mut two = Two::placed(&cluster, scratch.path(), &kernels, places);
    let (vm, guest) = start(&two, &kernels);
    let (cut, mend) = (|| network.cut(1, 2), || network.mend(1, 2));

    // For a moment: nothing is lost.
    let moved = stalled(&mut two, &vm, |_, _| {
        cut();
        std::thread::sleep(Duration::from_secs(2));
        mend();
    });
    assert_eq!(moved, Ok(Value::Null), "{}", two.a.log());
    moves(&two, &vm, &guest, "a short cut");

    // Until it counts as lost, while memory is sent: the guest goes on meanwhile.
    let failed = stalled(&mut two, &vm, |two, _| {
        cut();
        guest.goes_on(&two.a);
        two.a.until("the sender has given up", || {
            two.a.log().contains("a VM that was to move stays") && guest_operations(&two.a, &vm) == 0
        });
        mend();
    });
    println!("cut while memory is sent: {failed:?}");
    assert!(failed.is_err(), "{failed:?}");
    stays(&two, &vm, &guest, "a cut while memory is sent");

    // The receiver is never asked to open the disks.
    let failed = moved_with(&mut two, &vm, "vm-migrate:closed", |_| cut());
    println!("cut before the disks are opened: {failed:?}");
    assert_eq!(failed.unwrap_err()[0], "CANNOT_CONTACT_HOST");
    guest.goes_on(&two.a);
    mend();
    stays(&two, &vm, &guest, "a cut before the disks are opened");

    // The receiver has the disks, and the sender does not hear it: the guest is stopped until the receiver has closed
    // them.
    let failed = std::thread::scope(|scope| {
        moved_with(&mut two, &vm, "vm-arrive:opened", |_| {
            cut();
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(30));
                mend();
            });
        })
    });
    println!("cut after the disks were opened: {failed:?}");
    stays(&two, &vm, &guest, "a cut after the disks were opened");

    // It is decided, and the receiver finds that in the database.
    let moved = moved_with(&mut two, &vm, "vm-migrate:opened", |_| cut());
    assert!(moved.is_ok(), "{moved:?}");
    two.b.until("the guest runs at the receiver", || two.resident(&vm).as_ref() == Some(&two.at_b));
    guest.goes_on(&two.b);
    mend();
    two.at_rest();
    moves(&two, &vm, &guest, "a cut behind the decision");

    // The receiver loses the database too, and starts again.
    let failed = moved_with(&mut two, &vm, "vm-arrive:opened", |host| {
        (0..2).for_each(|other| network.cut(other, 2));
        let is_cut = || host.call("VM.set_name_description", json!([vm, "cut"])).is_err();
        host.signal(libc::SIGCONT);
        host.until("the receiver can change nothing", is_cut);
        (0..2).for_each(|other| network.mend(other, 2));
    });
    println!("the receiver was alone: {failed:?}");
    two.at_rest();
    if place(&two, &vm, "a receiver that was alone").dir == two.b.dir {
        moves(&two, &vm, &guest, "a receiver that was alone");
    }
    guest.goes_on(&two.a);
    println!("{} blocks are right", guest.verify(&two.a));
    two.a.done("VM.hard_shutdown", json!([vm]));
}

/// How many operations a VM has.
fn guest_operations(host: &Host, vm: &Value) -> usize {
    let all = host.call("VM.get_current_operations", json!([vm])).unwrap_or_default();
    all.as_object().map_or(0, serde_json::Map::len)
}
