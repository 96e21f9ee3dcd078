//! What idle disks look like on their host.

use std::fs;
use std::thread;
use std::time::Duration;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, create_vhd};
use tapio_e2e::needs;
use tapio_e2e::process::poll_until;
use tapio_e2e::scratch::Scratch;

/// More than there are programs on a host that wait for I/O at every moment.
const DISKS: usize = 24;

/// Threads of the host that wait for I/O now (proc(5)).
fn procs_blocked() -> usize {
    let stat = fs::read_to_string("/proc/stat").expect("proc(5)");
    let count = stat.lines().find_map(|line| line.strip_prefix("procs_blocked "));
    count.and_then(|count| count.parse().ok()).expect("a count")
}

/// An administrator takes `iowait` for a storage that is too slow.
#[test]
fn idle_disks_do_not_wait_for_io() {
    needs!("nbdsh");
    let scratch = Scratch::in_memory();
    let disks: Vec<_> = (0..DISKS)
        .map(|index| {
            let dir = scratch.join(&format!("{index}"));
            fs::create_dir(&dir).expect("a directory");
            let disk = DiskOptions::vhd(&create_vhd(dir.join("a.vhd"), 4)).nbd().start(&dir);
            nbdsh(&disk.uri(), "h.pwrite(b'x' * 4096, 0)\nh.flush()");
            disk
        })
        .collect();
    // Other programs of a busy host wait now and then: the fewest of some looks are those that wait all the time.
    let is_quiet = poll_until(Duration::from_secs(60), || {
        let looks = (0..20).map(|_| {
            thread::sleep(Duration::from_millis(5));
            procs_blocked()
        });
        looks.min().filter(|fewest| *fewest < DISKS / 2)
    });
    assert!(is_quiet.is_some(), "{} threads wait for I/O", procs_blocked());
    disks.into_iter().for_each(|disk| disk.stop());
}
