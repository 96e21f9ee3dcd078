//! The process dies in the middle of work. What a flush covered is there afterwards, and the image is valid.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd, snapshot_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until};
use tapio_e2e::scratch::Scratch;

/// Writes generations of 64 KiB blocks in a scattered order; after each flush notes in a file which generation of
/// which block is safe. A block is filled with a label of 16 bytes, its number and generation: no sector cuts one.
pub(super) const WRITER: &str = "
import os, random
random.seed(SEED)
log = open(LOG, 'a')
generation = START
blocks = list(range(0, 480))
while True:
    generation += 1
    batch = random.sample(blocks, 24)
    for block in batch:
        h.pwrite(b'%07d:%07d\\n' % (block, generation) * 4096, block * 65536)
    h.flush()
    log.write(''.join('%d %d\\n' % (block, generation) for block in batch))
    log.flush()
";

/// Every block that was flushed holds its last flushed generation, or newer, in every label.
pub(super) const CHECKER: &str = "
safe = {}
for line in open(LOG):
    if line.endswith('\\n') and len(line.split()) == 2:
        block, generation = map(int, line.split())
        safe[block] = generation
newest = max(safe.values())
assert len(safe) > 20, safe
for block in safe:
    data = bytes(h.pread(65536, block * 65536))
    labels = {data[at:at + 16] for at in range(0, 65536, 16)}
    assert all(label[:8] == b'%07d:' % block for label in labels), (block, sorted(labels)[:3])
    # A newer write that no flush covered may be there in part.
    oldest = min(int(label[8:]) for label in labels)
    assert oldest >= safe[block], (block, safe[block], oldest)
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
        let wrote = poll_until(Duration::from_secs(60), || {
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

/// A guest that was told that a write is done will not write it again, flushed or not: the death of the process alone
/// must not lose it. Until the image was opened again, the tools say what it is owed and leave it alone.
#[test]
fn kill_loses_nothing_that_was_answered() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let disk = DiskOptions::vhd(&base).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'b' * (31 << 20), 0)\nh.flush()");
    disk.stop();
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let disk = DiskOptions::vhd(&leaf).nbd().start(scratch.path());
    // No flush: the answers are all that there is.
    let write = "for n in range(200):\n    h.pwrite(b'%08d' % n * 64, n * 151552)";
    nbdsh(&disk.uri(), write);
    disk.crash();
    let refused = vhd_util(&["coalesce", "-n", text(&leaf)]);
    let said = refused.stdout.clone();
    refused.fails();
    assert!(said.contains("leaf.vhd") && said.contains("open it once"), "{said}");
    let disk = DiskOptions::vhd(&leaf).nbd().start(scratch.path());
    let check = "
for n in range(200):
    assert h.pread(512, n * 151552) == b'%08d' % n * 64, n
    assert h.pread(512, n * 151552 + 512) == b'b' * 512, n
";
    nbdsh(&disk.uri(), check);
    disk.stop();
    assert_vhd_valid(&leaf);
    vhd_util(&["coalesce", "-n", text(&leaf)]).ok();
    let disk = DiskOptions::vhd(&base).nbd().start(scratch.path());
    nbdsh(&disk.uri(), check);
    disk.stop();
}
