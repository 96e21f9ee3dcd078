//! Guests that go to another host of their pool with a disk on an SR that only one of the hosts has: the failures.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tapio_core::motion::{CROSSING_STEPS, LIVE_STEPS};
use tapio_fixtures::etcd::Cluster;

use super::guest::{Guest, kernel, make_vm};
use super::motion::{Two, disk_of, disks, killed, sr_of, vdis_of};
use super::rig::{Host, is_missing, make_sr, send, vdi};

/// A guest which writes at the first host, with a disk on an SR of that host alone.
struct Crossing {
    two: Two,
    vm: Value,
    guest: Guest,
    own: [Value; 2],
    /// The directories of both SRs.
    dirs: [PathBuf; 2],
}

impl Crossing {
    fn new(cluster: &Cluster, dir: &Path, kernels: &Path) -> Self {
        let two = Two::new(cluster, dir, kernels);
        let dirs = [dir.join("own-a"), dir.join("own-b")];
        let own = [make_sr(&two.a, &dirs[0], false), make_sr(&two.b, &dirs[1], false)];
        let disk = two.a.done("VDI.create", vdi(&own[0], "data"));
        two.a.done("VDI.resize", json!([disk, 64 << 20]));
        let vm = make_vm(&two.a, kernels, &[&disk]);
        two.a.done("VM.start_on", json!([vm, two.at_a, false, false]));
        let guest = Guest::of(&two.a, &vm);
        guest.wait(&two.a);
        guest.begin_to_write(&two.a);
        Self { two, vm, guest, own, dirs }
    }

    /// The disk is where its guest is, and nothing is left of it elsewhere.
    fn is_whole(&self, is_there: bool, after: &str) {
        let (host, at) = if is_there { (&self.two.b, 1) } else { (&self.two.a, 0) };
        let images = |at: usize| {
            let files = std::fs::read_dir(&self.dirs[at]).unwrap().flatten();
            files.filter(|file| file.path().extension().is_some_and(|kind| kind == "vhd")).count()
        };
        let told = || {
            let (vdis, images) = ([0, 1].map(|at| vdis_of(host, &self.own[at])), [0, 1].map(images));
            format!("{vdis:?} VDIs, {images:?} images; the receiver:\n{}", self.two.b.log())
        };
        let what = format!("there is one disk after {after}");
        host.until_or(&what, told, || {
            let is_one = |side: usize| usize::from(side == at);
            sr_of(host, &self.vm) == self.own[at]
                && (0..2).all(|side| {
                    vdis_of(host, &self.own[side]) == is_one(side) && images(side) == is_one(side)
                })
        });
    }
}

/// The call that moves a VM with its disk.
fn way(vm: &Value, own: &[Value; 2], two: &Two, there: bool) -> (&'static str, Value) {
    let (to, sr) = if there { (&two.at_b, &own[1]) } else { (&two.at_a, &own[0]) };
    let map = json!({ disk_of(&two.a, vm).as_str().unwrap(): sr });
    ("VM.migrate_send", json!([vm, { "host": to }, true, map, {}, {}]))
}

#[test]
#[ignore = "takes minutes: kills of daemons at each step with a guest that is emulated"]
fn a_guest_has_one_whole_disk_after_a_kill_at_each_step() {
    let Some(kernels) = kernel().filter(|_| !is_missing()) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut all = Crossing::new(&cluster, scratch.path(), &kernels);
    let only = std::env::var("TAPIO_STEP").unwrap_or_default();
    let steps = CROSSING_STEPS.iter().chain(LIVE_STEPS);
    for step in steps.filter(|step| step.name.contains(&only)) {
        println!("killed at {}", step.name);
        let (vm, own) = (all.vm.clone(), all.own.clone());
        killed(&mut all.two, &all.guest, &all.vm, step.name, &|two, there| way(&vm, &own, two, there));
        all.is_whole(false, step.name);
    }
    println!("{} blocks are right", all.guest.verify(&all.two.a));
    all.two.a.done("VM.hard_shutdown", json!([all.vm]));
}

#[test]
#[ignore = "takes minutes: disk processes of both hosts are killed at steps, with a guest that is emulated"]
fn a_guest_has_one_whole_disk_after_the_death_of_each_disk_process() {
    let Some(kernels) = kernel().filter(|_| !is_missing()) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut all = Crossing::new(&cluster, scratch.path(), &kernels);
    let only = std::env::var("TAPIO_STEP").unwrap_or_default();
    let cases = ["vm-migrate:landed", "vm-migrate:mirrored", "vm-migrate:sent"];
    for step in cases.into_iter().filter(|step| step.contains(&only)) {
        for of_sender in [false, true] {
            // Its guest is stopped by then, and cannot go on without the process that it had.
            if of_sender && step == "vm-migrate:sent" {
                continue;
            }
            let case = format!(
                "the disk processes of the {} die at {step}",
                if of_sender { "sender" } else { "receiver" }
            );
            println!("{case}");
            all.two.a.kill();
            all.two.a.start(&[("TAPIO_STOP_AT", step)]);
            all.two.at_rest();
            let (a, b) = (&all.two.a, &all.two.b);
            let (method, params) = way(&all.vm, &all.own, &all.two, true);
            let answer = std::thread::scope(|scope| {
                let moving = scope.spawn(|| a.call(method, params));
                a.until(&format!("the daemon stops at {step}"), || a.is_stopped());
                let dies: &Host = if of_sender { a } else { b };
                let all = dies.running("tapio-disk");
                assert!(!all.is_empty(), "{case}: there is one");
                all.iter().for_each(|pid| send(*pid, libc::SIGKILL));
                a.signal(libc::SIGCONT);
                moving.join().unwrap()
            });
            println!("  {answer:?}");
            assert!(answer.is_err(), "{case}: it cannot move");
            all.is_whole(false, &case);
            a.until(&case, || (disks(a), disks(b)) == (1, 0));
            all.guest.goes_on(a);
        }
    }
    println!("{} blocks are right", all.guest.verify(&all.two.a));
    all.two.a.done("VM.hard_shutdown", json!([all.vm]));
}
