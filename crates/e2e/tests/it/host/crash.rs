//! The process dies in the middle of work. What a flush covered is there afterwards, and the image is valid.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd, snapshot_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until};
use tapio_e2e::scratch::Scratch;

/// Writes generations of 64 KiB blocks in a scattered order; after each flush notes in a file which generation of
/// which block is safe. Block contents name their block and generation.
const WRITER: &str = "
import os, random
random.seed(SEED)
log = open(LOG, 'a')
generation = START
blocks = list(range(0, 480))
while True:
    generation += 1
    batch = random.sample(blocks, 24)
    for block in batch:
        h.pwrite(b'%08d:%08d' % (block, generation) * (65536 // 17) + bytes(65536 % 17), block * 65536)
    h.flush()
    log.write(''.join('%d %d\\n' % (block, generation) for block in batch))
    log.flush()
";

/// Every block holds a generation at least as new as the last flushed one, whole.
const CHECKER: &str = "
safe = {}
for line in open(LOG):
    if line.endswith('\\n') and len(line.split()) == 2:
        block, generation = map(int, line.split())
        safe[block] = generation
newest = max(safe.values())
assert len(safe) > 20, safe
for block in range(480):
    data = h.pread(65536, block * 65536)
    kinds = set()
    for at in range(0, 65536 - 17 + 1, 17):
        kinds.add(data[at:at + 17])
    found = []
    for kind in kinds:
        if kind == bytes(17):
            found.append(0)
            continue
        # A sector boundary of a torn, never flushed write may cut a label; a flushed block is whole.
        if block in safe and kind[:8] == b'%08d' % block and kind[8:9] == b':':
            found.append(int(kind[9:]))
    if block in safe:
        assert found and min(found) >= safe[block], (block, safe[block], sorted(found))
print(newest)
";

fn crash_in_rounds(image: &Path, scratch: &Scratch, rounds: u32) {
    let log = scratch.join("flushed.log");
    std::fs::write(&log, "").expect("the log can be made");
    let mut generation = 0;
    for round in 0..rounds {
        let disk = DiskOptions::vhd(image).nbd().start(scratch.path());
        let script = format!("SEED = {round}\nSTART = {generation}\nLOG = {:?}\n{WRITER}", text(&log));
        let mut nbdsh_command = Command::new("nbdsh");
        nbdsh_command.env("PATH", "/usr/bin:/bin").args(["-u", &disk.uri(), "-c", &script]);
        let writer = Running::start(&mut nbdsh_command, &scratch.join("writer.log"));
        let before = std::fs::metadata(&log).expect("the log").len();
        let wrote = poll_until(Duration::from_secs(30), || {
            (std::fs::metadata(&log).expect("the log").len() > before + 300).then_some(())
        });
        assert!(wrote.is_some(), "the writer does not get on: {}", writer.log());
        // At a moment that differs from round to round.
        std::thread::sleep(Duration::from_millis(u64::from(round * 37 % 120)));
        disk.crash();
        drop(writer);
        assert_vhd_valid(image);
        let disk = DiskOptions::vhd(image).nbd().start(scratch.path());
        let newest = nbdsh(&disk.uri(), &format!("LOG = {:?}\n{CHECKER}", text(&log)));
        disk.stop();
        // The interrupted batch may have left its generation in some blocks.
        generation = newest.trim().parse::<u32>().expect("a number") + 1;
    }
    assert_vhd_valid(image);
}

#[test]
fn kill_under_load_loses_nothing_that_was_flushed() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 32);
    crash_in_rounds(&image, &scratch, 6);
}

#[test]
fn kill_under_load_in_a_chain_loses_nothing_that_was_flushed() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let disk = DiskOptions::vhd(&base).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'b' * (31 << 20), 0)\nh.flush()");
    disk.stop();
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    crash_in_rounds(&leaf, &scratch, 4);
}
