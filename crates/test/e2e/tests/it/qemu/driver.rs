//! The toolstack's driver for QEMU.

use std::time::Duration;

use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;
use tapio_e2e::tools::skip;
use tapio_e2e::toolstack::lane;
use tapio_vm::{ShutdownKind, VCPU_MASK, VCPUS_MAX};

use super::kernel;
use super::network::lives_with_networks;
use crate::conformance::{
    Console, Lab, confined, disks, ends, many, places, replaced, root_on_disk, whole_life,
};

const LIMIT: Duration = Duration::from_secs(240);

/// A VM with the lane's kernel, emulated whatever the host could do.
fn lab() -> Option<Lab> {
    lab_within(LIMIT)
}

fn lab_within(limit: Duration) -> Option<Lab> {
    let kernel = kernel()?;
    Some(Lab::new("qemu", limit, |spec| {
        spec.memory = 256 << 20;
        spec.kernel = Some(kernel.join("vmlinuz"));
        spec.platform.insert("accel".into(), "tcg".into());
    }))
}

#[test]
fn a_guest_lives_with_disks_that_come_and_go() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(mut lab) = lab() else { return };
    whole_life(&mut lab);
}

#[test]
fn a_guest_speaks_on_networks_that_come_and_go() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1], "ip", "busybox");
    let Some(mut lab) = lab() else { return };
    lives_with_networks(&mut lab);
}

#[test]
fn guests_are_confined_and_apart() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let (Some(mut first), Some(mut second)) = (lab(), lab()) else { return };
    confined(&mut first, &mut second);
}

#[test]
fn a_confined_guest_finds_the_process_that_replaces_its_disks() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(mut lab) = lab() else { return };
    replaced(&mut lab);
}

#[test]
fn every_end_of_a_guest_is_told() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(mut lab) = lab() else { return };
    ends(&mut lab);
}

#[test]
fn disks_are_in_far_places() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(mut lab) = lab() else { return };
    places(&mut lab);
}

#[test]
fn a_guest_boots_from_its_disk() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1], "mkfs.ext4");
    let Some(mut lab) = lab() else { return };
    root_on_disk(&mut lab);
}

/// A guest whose processors are emulated sees no hypervisor, and recent kernels ignore places for processors there
/// (that of the lane, 6.12, does). The kernel of the Xen lane is older.
#[test]
fn a_guest_takes_processors_while_it_runs() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(kernel) = lane("xen/vmlinux") else { return skip("needs Xen 4.17, whose kernel is taken") };
    let mut lab = Lab::new("qemu", LIMIT, |spec| {
        for (key, value) in [("accel", "tcg"), ("max_disks", "1"), (VCPUS_MAX, "3"), (VCPU_MASK, "0")] {
            spec.platform.insert(key.into(), value.into());
        }
    });
    let own = lab.scratch.join("vmlinux");
    std::fs::copy(kernel, &own).expect("a copy where kernels may lie");
    lab.spec.kernel = Some(own);
    lab.driver().create(&lab.spec).expect("made");
    assert_eq!(lab.driver().set_vcpus(lab.vm(), 2).unwrap_err().code, "VM_BAD_POWER_STATE");
    lab.driver().unpause(lab.vm()).expect("started");
    let mut console = lab.console();
    let take = |console: &mut Console, number: u32| {
        let file = format!("/sys/devices/system/cpu/cpu{number}/online");
        console.run(&format!("while ! [ -e {file} ]; do usleep 50000; done; echo 1 >{file}"));
        console.run("cat /sys/devices/system/cpu/online")
    };
    lab.driver().set_vcpus(lab.vm(), 2).expect("one more");
    assert_eq!(take(&mut console, 1), "0-1");
    drop(console);
    // Another daemon counts them, and adds the last one.
    lab.end_daemon();
    lab.start_daemon();
    assert_eq!(lab.driver().vcpus(lab.vm()), Ok(Some(2)));
    for (count, why) in
        [(1, "has 2 processors, and driver qemu takes none away"), (4, "room for 3 processors")]
    {
        let error = lab.driver().set_vcpus(lab.vm(), count).unwrap_err();
        assert!(error.code == "OPERATION_NOT_ALLOWED" && error.params[0].contains(why), "{error}");
    }
    lab.driver().set_vcpus(lab.vm(), 2).expect("nothing to do");
    lab.driver().set_vcpus(lab.vm(), 3).expect("one more");
    assert_eq!(take(&mut lab.console(), 2), "0-2");
    let tasks = std::fs::read_dir(format!("/proc/{}/task", lab.pid())).expect("its threads");
    for task in tasks.map(|task| task.expect("a thread").path().join("status")) {
        // One that has ended since has none.
        let Ok(status) = std::fs::read_to_string(task) else { continue };
        assert!(status.contains("Cpus_allowed_list:\t0\n"), "{status}");
    }
    lab.driver().shutdown(lab.vm(), ShutdownKind::Hard, lab.deadline()).expect("ended");
}

/// Whatever the host does meanwhile: 255 disks take 30 s of a processor.
const LIMIT_OF_ALL: Duration = Duration::from_secs(900);

#[test]
fn a_guest_has_all_the_disks_that_it_can() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(mut lab) = lab_within(LIMIT_OF_ALL) else { return };
    // QEMU 7.2 makes the table of the board's interrupt lines by a program of ACPI, which the guest runs for each
    // disk: a quarter of a second where the guest is emulated. The guest finds the lines in the MP table instead.
    lab.spec.kernel_args = "acpi=noirq".into();
    many(&mut lab, disks(255));
}
