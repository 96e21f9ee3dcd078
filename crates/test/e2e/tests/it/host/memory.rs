//! What a disk of the largest size takes of the host's memory.

use std::time::Duration;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, create_vhd};
use tapio_e2e::needs;
use tapio_e2e::process::poll_until;
use tapio_e2e::scratch::Scratch;

use super::queue_threads::has_queue_threads;

/// Memory of a process in KiB that is not its program's file.
fn own_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("the process lives");
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).expect("the kernel tells");
        line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).expect("a number")
    };
    field("Pss_Anon:") + field("Pss_Shmem:")
}

#[test]
fn the_largest_vhd_takes_little_more_than_its_table() {
    needs!("nbdsh");
    let scratch = Scratch::in_memory();
    let image = create_vhd(scratch.join("a.vhd"), 2040 << 10);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    let pid = disk.process.pid();
    let before = own_kib(pid);
    assert!(before < 1800, "{before} KiB before anything is written");
    // Every page of the table is touched; 6 MiB in all is what such a disk may have (docs/performance.md).
    nbdsh(
        &disk.uri(),
        "for at in range(4096): h.pwrite(b'x' * 4096, (at * 1021 % 4096) * (510 << 20))\nh.flush()",
    );
    let small = poll_until(Duration::from_secs(60), || (own_kib(pid) < (6 << 10)).then_some(()));
    assert!(small.is_some(), "{} KiB at rest, of which the table of 2040 GiB takes 4080", own_kib(pid));
    disk.stop();
}

/// The map that queue threads read has as many words as the table; it is given back when they have nothing to do.
#[test]
fn several_threads_do_not_double_the_table_of_an_idle_disk() {
    needs!("nbdsh");
    let scratch = Scratch::in_memory();
    let image = create_vhd(scratch.join("a.vhd"), 2040 << 10);
    let disk = DiskOptions::vhd(&image).nbd().arg("--threads").arg("2").start(scratch.path());
    let pid = disk.process.pid();
    // Written and read by a connection of each thread; every page of the table and of the map is touched.
    nbdsh(
        &disk.uri(),
        "other = nbd.NBD()\nother.connect_uri(h.get_uri())\n\
         for at in range(4096): (h if at % 2 else other).pwrite(b'x' * 4096, (at * 1021 % 4096) * (510 << 20))\n\
         h.flush()\n\
         for at in range(4096): (other if at % 2 else h).pread(4096, (at * 1021 % 4096) * (510 << 20) + (3 << 20))",
    );
    assert!(has_queue_threads(pid, 1));
    let small = poll_until(Duration::from_secs(60), || (own_kib(pid) < (6 << 10)).then_some(()));
    assert!(small.is_some(), "{} KiB at rest, of which the table of 2040 GiB takes 4080", own_kib(pid));
    disk.stop();
}
