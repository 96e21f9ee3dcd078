//! Images on real block devices: loop devices over files.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, Host, Tap, create_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_front::vhost_user::driver::{self, Driver, DriverOptions, DriverQueue};

use super::MIB;
use super::queue_threads::{change, has_queue_threads};

const LIMIT: Duration = Duration::from_secs(60);

/// A loop device over a file; detached when dropped.
struct Loop {
    device: PathBuf,
}

impl Loop {
    fn over(scratch: &Scratch, len: u64, filling: u8) -> Result<Self, String> {
        Self::with_sectors(512, scratch, len, filling)
    }

    fn with_sectors(sector: u32, scratch: &Scratch, len: u64, filling: u8) -> Result<Self, String> {
        let file = scratch.join("device");
        std::fs::write(&file, vec![filling; len as usize]).map_err(|error| error.to_string())?;
        let sector = sector.to_string();
        let out = Command::new("losetup")
            .args(["--sector-size", &sector, "--find", "--show", text(&file)])
            .output();
        let out = out.map_err(|error| format!("losetup: {error}"))?;
        if !out.status.success() {
            return Err(String::from_utf8_lossy(&out.stderr).trim().to_owned());
        }
        Ok(Self { device: String::from_utf8_lossy(&out.stdout).trim().into() })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run(Command::new("losetup").arg("--detach").arg(&self.device));
    }
}

/// A file system on a device; unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    fn of(device: &Path, at: PathBuf) -> Result<Self, String> {
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-b", "4096"]).arg(device));
        std::fs::create_dir(&at).map_err(|error| error.to_string())?;
        let out = Command::new("mount").arg(device).arg(&at).output().map_err(|error| error.to_string())?;
        if out.status.success() { Ok(Self(at)) } else { Err(String::from_utf8_lossy(&out.stderr).into()) }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        run(Command::new("umount").arg(&self.0));
    }
}

/// Whether process `pid` has `image` open past the page cache.
fn is_direct(pid: u32, image: &Path) -> bool {
    let image = std::fs::canonicalize(image).expect("it is there");
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process runs");
    open.flatten().filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path == image)).any(|fd| {
        let info = format!("/proc/{pid}/fdinfo/{}", fd.file_name().display());
        let info = std::fs::read_to_string(info).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
        flags.is_some_and(|flags| flags & libc::O_DIRECT as u32 != 0)
    })
}

/// Requests of 512 bytes beside one another, on what lies over sectors of 4096.
const PARTS: &str = "
import struct
size = h.get_size()
def sector(n, mark): return struct.pack('>QQ', n, mark) * 32
top = size // 512
model = {}
# Beside one another, in any order, some in flight at once; whole blocks among them.
for round in range(3):
    cookies = []
    for n in list(range(1, 40, 2)) + list(range(0, 40, 2)) + [top - 1, top - 3, top - 2, 4096 * 2 - 1, 4096 * 2]:
        model[n] = sector(n, round)
        cookies.append((h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(model[n])), n * 512)))
    while h.aio_in_flight() > 0:
        h.poll(-1)
    for cookie in cookies:
        assert h.aio_command_completed(cookie)
    block = b''.join(sector(n, 100 + round) for n in range(8, 16))
    h.pwrite(block, 8 * 512)
    model.update({n: sector(n, 100 + round) for n in range(8, 16)})
    # Odd places, longer than what is copied as a whole.
    long = b''.join(sector(n, 200 + round) for n in range(101, 101 + 200))
    h.pwrite(long, 101 * 512)
    model.update({n: sector(n, 200 + round) for n in range(101, 301)})
    h.zero(5 * 512, 3 * 512)
    model.update({n: bytes(512) for n in range(3, 8)})
    h.zero(40 * 512, 203 * 512)
    model.update({n: bytes(512) for n in range(203, 243)})
    h.flush()
for n, data in model.items():
    assert h.pread(512, n * 512) == data, n
assert h.pread(200 * 512, 101 * 512) == b''.join(model[n] for n in range(101, 301))
assert h.pread(3 * 512, size - 3 * 512) == b''.join(model[n] for n in range(top - 3, top))
# What was never written is zero.
assert h.pread(512, 4096 * 2 * 512 + 512) == bytes(512)
assert h.pread(512, 41 * 512) == bytes(512)
";

#[test]
fn parts_of_long_sectors_are_written_beside_one_another() {
    needs!("nbdsh", "mkfs.ext4");
    let scratch = Scratch::on_disk();
    let device = match Loop::with_sectors(4096, &scratch, 96 * MIB, 0) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    // The device itself, and a VHD that is the device.
    for vhd in [false, true] {
        let disk = if vhd {
            // What the disk before left shows where a VHD reads what it did not write.
            vhd_util(&["create", "-n", text(&device.device), "-s", "16"]).ok();
            DiskOptions::vhd(&device.device)
        } else {
            DiskOptions::raw(&device.device).arg("--sector-size=512")
        };
        let disk = disk.nbd().start(scratch.path());
        assert!(is_direct(disk.process.pid(), &device.device), "vhd: {vhd}");
        nbdsh(&disk.uri(), PARTS);
        disk.stop();
        if vhd {
            vhd_util(&["check", "-n", text(&device.device)]).ok();
        }
    }
    // Files on a file system on it: raw ones that end inside of a block and not, and VHDs, whose footer does.
    let mount = match Mount::of(&device.device, scratch.join("mount")) {
        Ok(mount) => mount,
        Err(why) => return skip(&format!("needs to mount: {why}")),
    };
    for len in [8 * MIB, 8 * MIB + 512, 8 * MIB + 3584] {
        let image = mount.0.join(format!("{len}.raw"));
        let file = std::fs::File::create(&image).and_then(|file| file.set_len(len));
        file.expect("an image can be made");
        let disk = DiskOptions::raw(&image).nbd().start(scratch.path());
        assert!(is_direct(disk.process.pid(), &image), "{len}");
        nbdsh(&disk.uri(), PARTS);
        disk.stop();
        assert_eq!(std::fs::metadata(&image).expect("it is there").len(), len);
    }
    let image = mount.0.join("a.vhd");
    vhd_util(&["create", "-n", text(&image), "-s", "16"]).ok();
    let child = mount.0.join("b.vhd");
    vhd_util(&["snapshot", "-n", text(&child), "-p", text(&image)]).ok();
    for image in [&image, &child] {
        let disk = DiskOptions::vhd(image).nbd().start(scratch.path());
        assert!(is_direct(disk.process.pid(), image));
        nbdsh(&disk.uri(), PARTS);
        // Killed, it is put in order by the one that comes next.
        disk.crash();
        let disk = DiskOptions::vhd(image).nbd().start(scratch.path());
        nbdsh(&disk.uri(), PARTS);
        disk.stop();
        vhd_util(&["check", "-n", text(image)]).ok();
    }
}

/// Whole blocks by one connection and parts of them by another, at once: neither takes from the other what is its own.
const MEETING: &str = "
other = nbd.NBD()
other.connect_uri(URI)
def until_done(*handles):
    while any(handle.aio_in_flight() for handle in handles):
        for handle in handles:
            if handle.aio_in_flight():
                handle.poll(-1)
# A VHD has all of it from here on.
h.pwrite(bytes(2 << 20), 0)
h.flush()
for round in range(1, 251):
    wholes, parts = (h, other) if round % 2 else (other, h)
    whole = nbd.Buffer.from_bytearray(bytearray([round]) * 4096)
    part = nbd.Buffer.from_bytearray(bytearray([0xff]) * 512)
    cookies = []
    for block in range(48):
        cookies.append((wholes, wholes.aio_pwrite(whole, block * 4096)))
        cookies.append((parts, parts.aio_pwrite(part, block * 4096 + block % 8 * 512)))
    until_done(h, other)
    for handle, cookie in cookies:
        assert handle.aio_command_completed(cookie)
    data = h.pread(48 * 4096, 0)
    for block in range(48):
        for sector in range(8):
            at = block * 4096 + sector * 512
            may = [round, 0xff] if sector == block % 8 else [round]
            assert data[at] in may and data[at:at + 512] == bytes([data[at]]) * 512, (round, block, sector, data[at])
other.shutdown()
";

#[test]
fn parts_of_long_sectors_meet_whole_ones_on_several_connections() {
    needs!("nbdsh", "mkfs.ext4");
    let scratch = Scratch::on_disk();
    let device = match Loop::with_sectors(4096, &scratch, 96 * MIB, 0) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    let meeting = |uri: &str| nbdsh(uri, &MEETING.replace("URI", &format!("{uri:?}")));
    // Writes to one block wait for one another, which those of one thread do.
    let disk = DiskOptions::raw(&device.device).arg("--sector-size=512").arg("--threads=2").nbd();
    let disk = disk.start(scratch.path());
    meeting(&disk.uri());
    assert!(has_queue_threads(disk.process.pid(), 0), "the owner serves such a disk alone");
    disk.stop();

    // A disk that has a thread more, and goes on with an image on such a device.
    let mount = match Mount::of(&device.device, scratch.join("mount")) {
        Ok(mount) => mount,
        Err(why) => return skip(&format!("needs to mount: {why}")),
    };
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 16);
    let disk = DiskOptions::vhd(&base).arg("--threads=2").nbd().start_on(&host, scratch.path());
    let tap = Tap::found(&host, &format!("vhd:{}", text(&base)));
    meeting(&disk.uri());
    assert!(has_queue_threads(tap.pid, 1));
    let child = mount.0.join("child.vhd");
    change(&host, &tap, &["snapshot", text(&child)]);
    assert!(is_direct(tap.pid, &child));
    meeting(&disk.uri());
    tap.forget();
    disk.stop();
    vhd_util(&["check", "-n", text(&child)]).ok();
}

/// One request of a vhost-user guest, which must go well; its place in the guest's memory.
fn ask(queue: &mut DriverQueue, command: &driver::Command<'_>) -> u16 {
    let slot = queue.submit(command).expect("a free slot");
    queue.kick().expect("the disk listens");
    let mut done = Vec::new();
    let begin = Instant::now();
    while queue.reap(&mut done) == 0 {
        assert!(begin.elapsed() < LIMIT, "no answer in time");
        queue.wait(Duration::from_millis(100)).expect("the disk lives");
    }
    assert_eq!(done[0].status, 0, "{command:?}");
    slot
}

#[test]
fn a_vhost_user_guest_is_told_of_long_sectors_and_may_use_parts() {
    let scratch = Scratch::on_disk();
    let device = match Loop::with_sectors(4096, &scratch, 16 * MIB, 7) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    for (argument, told) in
        [("--sector-size=4096", 4096_u32), ("--sector-size=512", 512), ("--threads=2", 4096)]
    {
        let disk = DiskOptions::raw(&device.device).vhost_user().arg("--queues=2").arg(argument);
        let disk = disk.start(scratch.path());
        let options = DriverOptions { queues: 2, ..DriverOptions::default() };
        let driver = Driver::connect(&disk.vhost, options).expect("the device");
        assert_eq!(driver.config()[20..24], told.to_le_bytes(), "{argument}");
        assert_eq!(driver.capacity(), 16 * MIB, "in units of 512 bytes whatever sectors have");
        for index in 0..2 {
            let mut queue = driver.start(index).expect("a queue");
            let at = (1 + u64::from(index)) * MIB;
            for (at, len, filling) in [(at, 8192, 1), (at + 512, 512, 2), (at + 4096 - 512, 1024, 3)] {
                let slot = queue.next_slot().expect("a free slot");
                queue.buffer(slot)[..len as usize].fill(filling);
                ask(&mut queue, &driver::Command::Write { at, len });
            }
            let slot = ask(&mut queue, &driver::Command::Read { at: at - 4096, len: 16384 });
            let sector = |filling: u8, count: usize| vec![filling; count * 512];
            let want = [(7, 8), (1, 1), (2, 1), (1, 5), (3, 2), (1, 7), (7, 8)];
            let want: Vec<u8> =
                want.into_iter().flat_map(|(filling, count)| sector(filling, count)).collect();
            assert!(queue.buffer(slot)[..16384] == want, "{argument}, queue {index}");
        }
        drop(driver);
        disk.stop();
    }
}

/// What a client finds that asks about block sizes, and one that does not.
const LONG: &str = "
size = h.get_size()
asks = h.get_block_size(nbd.SIZE_MINIMUM)
assert asks == 4096, asks
block = bytes(range(256)) * 16
h.pwrite(block, 8192)
assert h.pread(4096, 8192) == block
for at, count in [(512, 4096), (8192, 512)]:
    try:
        h.pread(count, at)
    except nbd.Error as error:
        assert error.errno == 'EINVAL', error
    else:
        assert False, at
other = nbd.NBD()
other.set_request_block_size(False)
other.connect_uri(URI)
other.pwrite(b'x' * 512, 8192 + 1024)
assert other.pread(1024, 8192 + 512) == block[512:1024] + b'x' * 512
other.shutdown()
assert h.pread(4096, 8192) == block[:1024] + b'x' * 512 + block[1536:]
";

#[test]
fn a_raw_device_with_long_sectors_is_a_disk_with_long_sectors() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let device = match Loop::with_sectors(4096, &scratch, 16 * MIB, 0) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    let script = |uri: &str| LONG.replace("URI", &format!("{uri:?}"));
    let host = Host::new(&scratch);
    let tap = host.create(&format!("aio:{}", device.device.display()));
    nbdsh(&tap.uri(), &script(&tap.uri()));

    // Clients keep what they were told, whatever the disk goes on with.
    let same = scratch.join("same.raw");
    let odd = scratch.join("odd.raw");
    for (file, len) in [(&same, 16 * MIB), (&odd, 16 * MIB + 512)] {
        let made = std::fs::File::create(file).and_then(|file| file.set_len(len));
        made.expect("an image can be made");
    }
    tap.ctl("pause", &[]).ok();
    let why = tap.ctl("unpause", &["-a", &format!("aio:{}", odd.display())]).fails();
    assert!(why.contains("guests were told of sectors of 4096 bytes"), "{why}");
    assert!(why.contains("odd.raw") && why.contains("make the image longer"), "{why}");
    tap.ctl("unpause", &["-a", &format!("aio:{}", same.display())]).ok();
    nbdsh(&tap.uri(), &script(&tap.uri()));
    tap.destroy();

    // An export of such a disk is one for the next process, and its parts are served there.
    let near = DiskOptions::raw(&device.device).nbd().start(scratch.path());
    let far = DiskOptions::remote(&near.uri()).nbd().start(scratch.path());
    nbdsh(&far.uri(), &script(&far.uri()));
    far.stop();
    let far = DiskOptions::remote(&near.uri()).arg("--sector-size=512").nbd().start(scratch.path());
    nbdsh(
        &far.uri(),
        &format!("assert h.get_block_size(nbd.SIZE_MINIMUM) == 512\nh.zero(16 << 20, 0)\n{PARTS}"),
    );
    far.stop();
    near.stop();

    // A disk that cannot have what is wanted is refused with the reason.
    let why = DiskOptions::raw(&odd).arg("--sector-size=4096").nbd().refused(scratch.path());
    assert!(why.contains("no whole number of sectors of 4096") && why.contains("odd.raw"), "{why}");
    // A VHD is served so where that is asked for.
    let image = scratch.join("a.vhd");
    vhd_util(&["create", "-n", text(&image), "-s", "16"]).ok();
    let disk = DiskOptions::vhd(&image).arg("--sector-size=4096").nbd().start(scratch.path());
    nbdsh(&disk.uri(), &script(&disk.uri()));
    disk.stop();
}

#[test]
fn a_raw_device_is_a_disk() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let device = match Loop::over(&scratch, 16 * MIB, 7) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    let disk = DiskOptions::raw(&device.device).nbd().start(scratch.path());
    let script = "
assert h.get_size() == 16 << 20
assert h.pread(4096, 8 << 20) == b'\\7' * 4096
h.pwrite(b'x' * 8192, 4096)
h.zero(4096, 8192)
h.flush()
assert h.pread(12288, 4096) == b'x' * 4096 + bytes(4096) + b'\\7' * 4096
h.trim(1 << 20, 1 << 20)
assert h.pread(4096, 0) == b'\\7' * 4096
";
    nbdsh(&disk.uri(), script);
    disk.stop();
}

#[test]
fn a_vhd_on_a_device_does_not_show_what_its_last_owner_left() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let device = match Loop::over(&scratch, 24 * MIB, 0xee) {
        Ok(device) => device,
        Err(why) => return skip(&format!("needs a loop device: {why}")),
    };
    vhd_util(&["create", "-n", text(&device.device), "-s", "16"]).ok();
    let disk = DiskOptions::vhd(&device.device).nbd().start(scratch.path());
    let script = "
assert h.get_size() == 16 << 20
h.pwrite(b'x' * 4096, 5 << 20)
assert h.pread(1 << 20, 5 << 20) == b'x' * 4096 + bytes((1 << 20) - 4096)
h.flush()
";
    nbdsh(&disk.uri(), script);
    disk.stop();
    vhd_util(&["check", "-n", text(&device.device)]).ok();
    // The footer is at the end of the device, where it was.
    let query = vhd_util(&["query", "-n", text(&device.device), "-vf"]).ok();
    assert_eq!(query.lines().collect::<Vec<_>>(), ["16", "hidden: 0"]);
    let disk = DiskOptions::vhd(&device.device).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "assert h.pread(1 << 20, 5 << 20) == b'x' * 4096 + bytes((1 << 20) - 4096)");
    disk.stop();
}
