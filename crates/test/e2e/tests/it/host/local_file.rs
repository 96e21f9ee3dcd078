//! A disk as a file exported by FUSE, used as any file is.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use tapio_e2e::client::sha256;
use tapio_e2e::disk::{DiskOptions, Host, assert_vhd_valid, create_vhd, text};
use tapio_e2e::local::{device, device_of, exports_below, lacks_fuse};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

use super::MIB;

macro_rules! needs_fuse {
    ($host:expr) => {
        if let Some(why) = lacks_fuse($host) {
            return skip(&why);
        }
    };
}

fn open(path: &Path, flags: i32) -> File {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    opened.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn any_byte_of_the_file_can_be_read_and_written() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = scratch.raw_image("a.raw", 8 * MIB);
    let disk = DiskOptions::raw(&image).arg("--device").arg("fuse-file").start(scratch.path());
    let path = device_of(&host);
    let mut want = vec![0u8; 8 << 20];
    let file = open(&path, 0);
    assert_eq!(file.metadata().expect("attributes").len(), 8 * MIB);
    let mut state = 3u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for round in 0..200u64 {
        let at = next(8 * MIB - 70_000);
        let len = 1 + next(if round % 8 == 0 { 70_000 } else { 3_000 });
        let bytes = vec![round as u8 | 1; len as usize];
        file.write_all_at(&bytes, at).expect("written");
        want[at as usize..(at + len) as usize].copy_from_slice(&bytes);
        let at = next(8 * MIB - 3_000);
        let mut got = vec![0; 1 + next(3_000) as usize];
        file.read_exact_at(&mut got, at).expect("read");
        assert!(got == want[at as usize..at as usize + got.len()], "round {round}");
    }
    file.sync_all().expect("durable");
    // Past the page cache: whole sectors, and nothing else.
    let direct = open(&path, libc::O_DIRECT);
    let mut page = vec![0u8; 3 * 4096];
    let first = page.as_ptr().align_offset(4096);
    let page = &mut page[first..first + 4096];
    direct.read_exact_at(page, 4096).expect("read past the page cache");
    assert!(page == &want[4096..8192]);
    page.fill(0xd1);
    direct.write_all_at(page, 64 << 10).expect("written past the page cache");
    want[64 << 10..(64 << 10) + 4096].fill(0xd1);
    let error = direct.write_at(&page[..100], 100).expect_err("part of a sector");
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    // The end is the end.
    let mut got = [1; 16];
    assert_eq!(file.read_at(&mut got, 8 * MIB - 4).expect("up to the end"), 4);
    assert_eq!(file.write_at(&[1; 16], 8 * MIB).expect_err("beyond").raw_os_error(), Some(libc::ENOSPC));
    assert!(file.set_len(MIB).is_err(), "a disk is not cut");
    // Zeroes, by both ways of asking for them.
    let keep = FallocateFlags::KEEP_SIZE;
    fallocate(&file, FallocateFlags::PUNCH_HOLE | keep, 1 << 20, 1 << 20).expect("a hole");
    fallocate(&file, FallocateFlags::ZERO_RANGE | keep, 4 << 20, 1 << 16).expect("zeroes");
    want[1 << 20..2 << 20].fill(0);
    want[4 << 20..(4 << 20) + (1 << 16)].fill(0);
    let error = fallocate(&file, FallocateFlags::empty(), 0, 4096).expect_err("space cannot be promised");
    assert_eq!(error, Errno::OPNOTSUPP);
    drop((file, direct));
    disk.stop();
    assert!(std::fs::read(&image).expect("the image") == want, "the image holds other bytes");
    assert!(exports_below(scratch.path()).is_empty());
}

#[test]
fn holes_of_the_image_are_holes_of_the_file() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = DiskOptions::vhd(&image).arg("--device").arg("fuse-file").start(scratch.path());
    let path = device_of(&host);
    let file = open(&path, 0);
    assert_eq!(seek(&file, SeekFrom::Data(0)), Err(Errno::NXIO), "an empty disk has no data");
    file.write_all_at(&[9; 8192], 10 << 20).expect("written");
    file.sync_all().expect("durable");
    let data = seek(&file, SeekFrom::Data(0)).expect("there is data now");
    assert!((8 << 20..=10 << 20).contains(&data), "{data}");
    let hole = seek(&file, SeekFrom::Hole(10 << 20)).expect("and a hole behind it");
    assert!(((10 << 20) + 8192..=12 << 20).contains(&hole), "{hole}");
    assert_eq!(seek(&file, SeekFrom::Data(64 << 20)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Hole(63 << 20)), Ok(63 << 20));
    let listed = std::fs::read_dir(path.parent().expect("a directory")).expect("it can be listed");
    assert_eq!(listed.flatten().map(|entry| entry.file_name()).collect::<Vec<_>>(), ["disk"]);
    drop(file);
    disk.stop();
    assert_vhd_valid(&image);
}

#[test]
fn a_read_only_file_takes_no_writes() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = scratch.raw_image("a.raw", 8 * MIB);
    let disk = DiskOptions::raw(&image).nbd().arg("--devices").start(scratch.path());
    let said = device(&host, &["attach", "0", "--how", "fuse-file", "--read-only"]).ok();
    let path = Path::new(said.trim());
    let error = OpenOptions::new().write(true).open(path).expect_err("read only");
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    assert_eq!(sha256(path), sha256(&image));
    device(&host, &["detach", "0"]).ok();
    assert!(!path.exists());
    disk.stop();
}

#[test]
fn many_at_once_verify_what_they_wrote() {
    needs!("fio");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = create_vhd(scratch.join("a.vhd"), 256);
    let disk = DiskOptions::vhd(&image).arg("--device").arg("fuse-file").start(scratch.path());
    let path = device_of(&host);
    for (block, direct, engine) in
        [("4k", "1", "io_uring"), ("64k-1m", "1", "io_uring"), ("512-16k", "0", "psync")]
    {
        let args = ["--name=verify", "--rw=randwrite", "--verify=crc32c", "--size=32M", "--iodepth=32"];
        let more =
            [format!("--bsrange={block}"), format!("--direct={direct}"), format!("--ioengine={engine}")];
        let block = match block.contains('-') {
            true => more[0].clone(),
            false => format!("--bs={block}"),
        };
        let mut fio = Command::new("fio");
        fio.args(args).arg(block).args(&more[1..]).arg(format!("--filename={}", text(&path)));
        let said = run(fio.args(["--io_size=32M", "--randseed=7", "--verify_fatal=1"])).ok();
        assert!(said.contains("err= 0"), "{said}");
    }
    disk.stop();
    assert_vhd_valid(&image);
}
