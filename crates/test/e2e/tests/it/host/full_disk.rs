//! A file system that fills up under a disk.

use std::process::Command;
use std::time::{Duration, Instant};

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd};
use tapio_e2e::needs;
use tapio_e2e::process::Running;
use tapio_e2e::scratch::{Scratch, SmallFileSystem};
use tapio_e2e::tools::skip;

use super::MIB;

/// Writes until the first ENOSPC, and leaves the list of what was acknowledged in `done`. What was refused before is
/// written again once there is room.
const FILL: &str = "
import errno, os
done = []
at = 0
while True:
    try:
        h.pwrite(bytes([at // STEP % 251 + 1]) * STEP, at)
    except nbd.Error as error:
        assert error.errnum == errno.ENOSPC, error
        break
    done.append(at)
    at += STEP
    assert at < 200 << 20, 'the file system never filled up'
assert done, 'not even the first write fitted'
def check():
    for start in done:
        assert h.pread(STEP, start) == bytes([start // STEP % 251 + 1]) * STEP, start
check()
# Refused once is not refused for ever, and not a broken disk.
for again in range(3):
    try:
        h.pwrite(b'!' * STEP, at)
        raise SystemExit('there was room after all')
    except nbd.Error as error:
        assert error.errnum == errno.ENOSPC, error
h.flush()
check()
os.unlink(BALLAST)
h.pwrite(b'!' * STEP, at)
h.flush()
assert h.pread(STEP, at) == b'!' * STEP
check()
";

fn fill(vhd: bool, step: u64) {
    let small = match SmallFileSystem::mount(32 * MIB) {
        Ok(small) => small,
        Err(reason) => return skip(&format!("needs root to mount: {reason}")),
    };
    let scratch = Scratch::on_disk();
    let ballast = small.path().join("ballast");
    std::fs::write(&ballast, vec![1; 12 << 20]).expect("the ballast fits");
    let options = if vhd {
        DiskOptions::vhd(&create_vhd(small.path().join("a.vhd"), 256))
    } else {
        let path = small.path().join("a.raw");
        std::fs::File::create(&path).and_then(|file| file.set_len(256 * MIB)).expect("a sparse file fits");
        DiskOptions::raw(&path)
    };
    let disk = options.nbd().start(scratch.path());
    nbdsh(&disk.uri(), &format!("STEP = {step}\nBALLAST = {ballast:?}\n{FILL}"));
    disk.stop();
    if vhd {
        assert_vhd_valid(&small.path().join("a.vhd"));
    }
}

#[test]
fn a_vhd_gives_enospc_and_recovers() {
    needs!("nbdsh");
    fill(true, 1 << 20);
}

#[test]
fn a_vhd_gives_enospc_to_small_writes_and_recovers() {
    needs!("nbdsh");
    // One write per block of 2 MiB would never fill it; many within a block meet the end in the middle of one.
    fill(true, 64 << 10);
}

#[test]
fn a_raw_image_gives_enospc_and_recovers() {
    needs!("nbdsh");
    fill(false, 1 << 20);
}

/// With `--no-space wait` the guest's write waits until there is room, and gets no error.
#[test]
fn a_write_waits_for_space_if_that_is_wished() {
    needs!("nbdsh");
    let small = match SmallFileSystem::mount(32 * MIB) {
        Ok(small) => small,
        Err(reason) => return skip(&format!("needs root to mount: {reason}")),
    };
    let scratch = Scratch::on_disk();
    let ballast = small.path().join("ballast");
    std::fs::write(&ballast, vec![1; 12 << 20]).expect("the ballast fits");
    let image = create_vhd(small.path().join("a.vhd"), 256);
    let disk = DiskOptions::vhd(&image).arg("--no-space").arg("wait").nbd().start(scratch.path());
    let script = "
for at in range(0, 26 << 20, 1 << 20):
    h.pwrite(b'w' * (1 << 20), at)
    print(at, flush=True)
h.flush()
assert all(bytes(h.pread(1 << 20, at)) == b'w' * (1 << 20) for at in range(0, 26 << 20, 1 << 20))
print('done', flush=True)
";
    let mut nbdsh = Command::new("nbdsh");
    nbdsh.env("PATH", "/usr/bin:/bin").args(["-u", &disk.uri(), "-c", script]);
    let mut writer = Running::start(&mut nbdsh, &scratch.join("writer.log"));
    // It gets as far as there is room, and stays there.
    let mut before = (usize::MAX, Instant::now());
    writer.wait_for("the writer to stand still", Duration::from_secs(60), || {
        let lines = std::fs::read_to_string(scratch.join("writer.log")).map_or(0, |log| log.lines().count());
        if lines != before.0 {
            before = (lines, Instant::now());
        }
        (lines >= 10 && before.1.elapsed() > Duration::from_millis(1500)).then_some(())
    });
    assert!(before.0 < 26, "the file system never filled up");
    std::fs::remove_file(&ballast).expect("the ballast is there");
    assert!(writer.wait(Duration::from_secs(60)).success(), "{}", writer.log());
    assert!(writer.log().lines().any(|line| line == "done"), "{}", writer.log());
    disk.stop();
    assert_vhd_valid(&image);
}
