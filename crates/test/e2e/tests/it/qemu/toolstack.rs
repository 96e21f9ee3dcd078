//! QEMU under the daemon.

use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;

use super::kernel;
use crate::machines::{Guest, verified_disks_and_a_moment};
use crate::suspended::memory_and_disks_of_one_moment;

#[test]
fn a_guest_verifies_its_disks() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1], "nbdcopy");
    let Some(kernel) = kernel() else { return };
    let kernel = format!("PV-kernel={}", text(&kernel.join("vmlinuz")));
    let more = [kernel.as_str(), "platform:accel=tcg"];
    let guest = Guest::install("Tapio QEMU guest", Duration::from_secs(180), &more);
    verified_disks_and_a_moment(&guest);
    guest.world.finish();
}

#[test]
fn a_guest_is_suspended_and_goes_back_to_a_checkpoint() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(kernel) = kernel() else { return };
    let kernel = format!("PV-kernel={}", text(&kernel.join("vmlinuz")));
    let more = [kernel.as_str(), "platform:accel=tcg"];
    let guest = Guest::install("Tapio QEMU guest", Duration::from_secs(180), &more);
    memory_and_disks_of_one_moment(&guest);
    guest.world.finish();
}
