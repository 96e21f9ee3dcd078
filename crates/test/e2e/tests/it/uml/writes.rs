//! A power cut in the middle of changes of an SR of volumes: the writes of a guest's device are recorded by the kernel,
//! put back here up to moments at which everything was durable, and each device is attached in another guest.
//! The stories are in `tests/guest/uml-writes.sh`.
//!
//! `TAPIO_MOMENTS=100` tries as many moments, seven in a guest.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_fixtures::log_writes::Log;

use super::volume_groups::on_two_disks_of;

/// A few seconds for each moment, where nothing else runs.
const LIMIT: Duration = Duration::from_secs(200);
const DEVICE_LEN: u64 = 128 << 20;
/// How many devices a guest gets at once.
const DEVICES: usize = 7;

#[test]
#[ignore = "minutes of LVM's programs: for a developer who changes steps among volumes"]
fn a_power_cut_at_any_moment_of_a_change_of_volumes_loses_nothing() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "lvm", "dmsetup");
    let count = std::env::var("TAPIO_MOMENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(7);
    let scratch = Scratch::on_disk();
    let sizes = [("a.raw", DEVICE_LEN), ("log.raw", 4 * DEVICE_LEN)];
    let report = on_two_disks_of(&scratch, "writes_recorded", sizes, LIMIT);
    let log = Log::open(&scratch.join("log.raw")).expect("the kernel wrote a log");
    let moments = log.moments("begin", count);
    assert_eq!(moments.len(), count, "of {} entries", log.entries.len());
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    for some in moments.chunks(DEVICES) {
        let scratch = Scratch::on_disk();
        let disks: Vec<_> = some
            .iter()
            .map(|moment| {
                let device = scratch.raw_image(&format!("{moment}.raw"), DEVICE_LEN);
                log.replay(*moment, &device).expect("the writes are put back");
                DiskOptions::raw(&device).vhost_user().start(scratch.path())
            })
            .collect();
        let mut guest = Uml::new("writes_replayed", &disks[0].vhost);
        for disk in &disks[1..] {
            guest = guest.disk(&disk.vhost);
        }
        let guest =
            guest.with("bin", &programs).with("sr", report.text("sr")).with("vdi", report.text("vdi"));
        let replayed = guest.within(LIMIT).run(&scratch);
        assert_eq!(replayed.number("moments"), some.len() as u64);
        disks.into_iter().for_each(|disk| disk.stop());
    }
}
