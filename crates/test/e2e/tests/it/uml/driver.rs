//! The toolstack's driver for User-mode Linux.

use std::time::Duration;

use tapio_e2e::guest::Uml;
use tapio_e2e::needs;

use tapio_vm::{DiskSpec, FrontSpec, ShutdownKind, VmState, initramfs};
use uuid::Uuid;

use crate::conformance::{Lab, confined, disks, ends, many, places, root_on_disk, whole_life};

const LIMIT: Duration = Duration::from_secs(180);

#[test]
fn a_guest_lives_with_disks_that_come_and_go() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    whole_life(&mut Lab::new("uml", LIMIT, |_| ()));
}

#[test]
fn every_end_of_a_guest_is_told() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    ends(&mut Lab::new("uml", LIMIT, |_| ()));
}

#[test]
fn disks_are_in_far_places() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    places(&mut Lab::new("uml", LIMIT, |_| ()));
}

#[test]
fn a_guest_boots_from_its_disk() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2]);
    root_on_disk(&mut Lab::new("uml", LIMIT, |_| ()));
}

#[test]
fn guests_are_confined_and_apart() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    confined(&mut Lab::new("uml", LIMIT, |_| ()), &mut Lab::new("uml", LIMIT, |_| ()));
}

#[test]
fn a_guest_without_an_agent_cannot_be_given_disks_while_it_runs() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    let mut lab = Lab::new("uml", LIMIT, |_| ());
    let mut archive = initramfs::Archive::default();
    archive.add("dev", initramfs::MODE_DIR, (0, 0), &[]).expect("small");
    archive.add("dev/console", initramfs::MODE_CHAR, (5, 1), &[]).expect("small");
    archive.add_file("busybox", &tapio_e2e::tools::find("busybox").expect("asked for")).expect("small");
    let init = b"#!/busybox sh\necho here\nwhile :; do /busybox sleep 1; done\n";
    archive.add("init", initramfs::MODE_FILE, (0, 0), init).expect("small");
    let ramdisk = lab.scratch.join("own.cpio");
    std::fs::write(&ramdisk, archive.finish().expect("small")).expect("written");
    lab.spec.ramdisk = Some(ramdisk);
    lab.driver().create(&lab.spec).expect("made");
    lab.driver().unpause(lab.vm()).expect("started");
    let hot = lab.disk(0, |_| ());
    let error = lab.driver().plug(lab.vm(), &hot.disk).expect_err("no agent is there to take it");
    assert_eq!(error.code, "VM_LACKS_FEATURE", "{error}");
    // Three keys end it: its kernel starts anew, which here means that it ends.
    lab.driver().shutdown(lab.vm(), ShutdownKind::Clean, lab.deadline()).expect("ended");
    assert_eq!(lab.driver().state(lab.vm()).expect("a state"), VmState::Halted);
}

#[test]
fn a_guest_that_does_not_start_says_why() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    let mut lab = Lab::new("uml", LIMIT, |_| ());
    let good = lab.spec.clone();
    lab.spec.kernel = Some("/bin/false".into());
    let error = lab.driver().create(&lab.spec).expect_err("this is no kernel");
    assert!(error.code == "INVALID_VALUE" && error.params[0] == "PV_kernel", "{error}");
    // A kernel that cannot be executed.
    let copy = lab.scratch.join("linux");
    std::fs::write(
        &copy,
        std::fs::read(tapio_e2e::tools::find("linux.uml").expect("asked for")).expect("read"),
    )
    .expect("written");
    lab.spec.kernel = Some(copy.clone());
    lab.driver().create(&lab.spec).expect("made");
    let error = lab.driver().unpause(lab.vm()).expect_err("it is no program");
    assert!(error.params[0].contains(&format!("cannot start {}", copy.display())), "{error}");
    lab.driver().shutdown(lab.vm(), ShutdownKind::Hard, lab.deadline()).expect("cleared away");
    lab.spec = good;
    lab.spec.kernel_args = "ubd0=/etc/passwd".into();
    let error = lab.driver().create(&lab.spec).expect_err("this reaches out of the guest");
    assert!(error.params[0].contains("ubd0"), "{error}");
    lab.spec.kernel_args.clear();
    lab.spec.kernel = Some("/no/such/kernel".into());
    let error = lab.driver().create(&lab.spec).expect_err("there is none");
    assert_eq!(error.params[..2], ["PV_kernel", "/no/such/kernel"], "{error}");
    lab.assert_gone();
}

#[test]
fn a_guest_has_as_many_disks_as_it_can() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    let mut lab = Lab::new("uml", LIMIT, |spec| spec.memory = 512 << 20);
    many(&mut lab, disks(40));
}

#[test]
fn one_disk_more_than_the_kernel_can_is_refused_with_the_next_step() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    let lab = Lab::new("uml", LIMIT, |_| ());
    lab.driver().create(&lab.spec).expect("made");
    let front = |position| {
        let spec =
            DiskSpec { vbd: Uuid::new_v4(), position, read_only: false, is_cd: false, is_bootable: false };
        lab.driver().front(lab.vm(), &spec)
    };
    for position in 0..56 {
        let is_file = matches!(front(position).expect("a place"), FrontSpec::File { .. });
        assert_eq!(is_file, position >= 40, "{position}");
    }
    let error = front(56).expect_err("it is full");
    let said = error.to_string();
    for part in [&*lab.vm().to_string(), "56 disks", "64 in all", "driver qemu"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    lab.driver().shutdown(lab.vm(), ShutdownKind::Hard, lab.deadline()).expect("forgotten");
}

#[test]
fn a_disk_comes_and_goes_again_and_again() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    let mut lab = Lab::new("uml", LIMIT, |_| ());
    lab.driver().create(&lab.spec).expect("made");
    lab.driver().unpause(lab.vm()).expect("started");
    let mut console = lab.console();
    let disk = lab.disk(3, |_| ());
    // More often than the kernel has interrupts: they come back.
    let mut took: Vec<Duration> = (0..60)
        .map(|_| {
            let begun = std::time::Instant::now();
            lab.driver().plug(lab.vm(), &disk.disk).expect("there");
            let took = begun.elapsed();
            lab.driver().unplug(lab.vm(), &disk.disk.spec, false, lab.deadline()).expect("gone");
            took
        })
        .collect();
    took.sort();
    println!("hot plug: median {:?}, longest {:?}", took[30], took[59]);
    assert_eq!(console.run("grep -c ' vd' /proc/partitions || true"), "0");
}
