//! The toolstack's driver for QEMU.

use std::time::Duration;

use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;

use super::kernel;
use super::network::lives_with_networks;
use crate::conformance::{Lab, confined, disks, ends, many, places, replaced, root_on_disk, whole_life};

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
