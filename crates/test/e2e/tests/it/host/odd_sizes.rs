//! Disks whose size is no whole number of blocks, and raw files that end in part of a sector: every change of a chain
//! keeps the size in sectors and every byte up to the last.

use std::path::{Path, PathBuf};

use tapio_e2e::client::{copy_out, nbdsh, random_file};
use tapio_e2e::disk::{DiskOptions, Host, Tap, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;

use super::MIB;

const SECTOR: u64 = 512;

/// Bytes of raw files: a part of a sector at the end, no whole blocks, both behind a whole block, and one sector short.
const SIZES: [u64; 4] = [4 * MIB - 100, 10_481_664, 6 * MIB + 333, 6 * MIB - SECTOR];

/// The whole sectors of `len` bytes: what a guest has.
const fn whole(len: u64) -> u64 {
    len / SECTOR * SECTOR
}

/// A disk and what its guest must read.
struct Story {
    scratch: Scratch,
    host: Host,
    expected: Vec<u8>,
    written: u8,
}

impl Story {
    /// With a raw file of `len` random bytes.
    fn new(len: u64) -> (Self, PathBuf) {
        let scratch = Scratch::on_disk();
        let raw = scratch.join("r.raw");
        random_file(&raw, len);
        let mut expected = std::fs::read(&raw).expect("the raw file");
        expected.truncate(whole(len) as usize);
        let host = Host::new(&scratch);
        (Self { scratch, host, expected, written: 0 }, raw)
    }

    fn len(&self) -> u64 {
        self.expected.len() as u64
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// Writes at the beginning, over a border of blocks, and over the last sectors.
    fn write(&mut self, uri: &str) {
        let len = self.len();
        let mut script = String::new();
        for (at, count) in [(SECTOR, 5), (2 * MIB - 3 * SECTOR, 7), (len - 9 * SECTOR, 3), (len - SECTOR, 1)]
        {
            self.written += 1;
            let count = count * SECTOR;
            self.expected[at as usize..(at + count) as usize].fill(self.written);
            script += &format!("h.pwrite(bytes([{}]) * {count}, {at})\n", self.written);
        }
        nbdsh(uri, &(script + "h.flush()"));
    }

    /// What a client reads: the size, the tail in one request, and everything.
    #[track_caller]
    fn judge(&self, uri: &str, when: &str) {
        let (expected, seen) = (self.path("expected"), self.path("seen"));
        std::fs::write(&expected, &self.expected).expect("written");
        nbdsh(
            uri,
            &format!(
                "data = open({:?}, 'rb').read()
assert h.get_size() == len(data), ({when:?}, h.get_size(), len(data))
assert h.pread(65536, len(data) - 65536) == data[-65536:], {when:?}",
                text(&expected)
            ),
        );
        copy_out(uri, &seen);
        let seen = std::fs::read(&seen).expect("the copy");
        assert_eq!(seen.len(), self.expected.len(), "{when}");
        let differs =
            seen.chunks(512).zip(self.expected.chunks(512)).position(|(seen, wanted)| seen != wanted);
        assert_eq!(differs, None, "{when}: the first sector that differs");
    }

    /// Serves a file for a moment.
    #[track_caller]
    fn judge_file(&self, options: &DiskOptions, when: &str) {
        let disk = options.clone().nbd().start(self.scratch.path());
        self.judge(&disk.uri(), when);
        disk.stop();
    }

    /// Serves a VHD for a moment and writes to it.
    fn write_file(&mut self, leaf: &Path, when: &str) {
        let disk = DiskOptions::vhd(leaf).nbd().start(self.scratch.path());
        self.judge(&disk.uri(), when);
        self.write(&disk.uri());
        self.judge(&disk.uri(), when);
        disk.stop();
    }

    #[track_caller]
    fn disk(&self, tap: &Tap, command: &[&str], args: &[&str]) -> String {
        let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
        run(&mut self.host.tapio(&[&["disk"], command, &["-p", &pid, "-m", &minor], args].concat())).ok()
    }
}

/// The image, and those below it, are as the storage manager wants them.
#[track_caller]
fn check(leaf: &Path) {
    let said = vhd_util(&["check", "-n", text(leaf), "-p"]).ok();
    assert!(said.lines().all(|line| line.ends_with("is valid")), "{said}");
}

fn vhd(path: &Path) -> String {
    format!("vhd:{}", text(path))
}

fn aio(path: &Path) -> String {
    format!("aio:{}", text(path))
}

fn file_len(path: &Path) -> u64 {
    std::fs::metadata(path).expect("it exists").len()
}

fn snapshot_of_raw(child: &Path, raw: &Path) {
    vhd_util(&["snapshot", "-m", "-n", text(child), "-p", text(raw), "-S", "64"]).ok();
}

#[test]
fn images_at_rest_keep_their_size_and_their_tail() {
    needs!("nbdsh", "nbdcopy");
    for len in SIZES {
        let (mut story, raw) = Story::new(len);
        let [first, second, clone] = ["first.vhd", "second.vhd", "clone.vhd"].map(|name| story.path(name));
        story.judge_file(&DiskOptions::raw(&raw), "the raw file");
        snapshot_of_raw(&first, &raw);
        story.write_file(&first, "a child");
        vhd_util(&["snapshot", "-n", text(&second), "-p", text(&first)]).ok();
        vhd_util(&["snapshot", "-n", text(&clone), "-p", text(&first)]).ok();
        let before = story.expected.clone();
        story.write_file(&second, "a grandchild");
        // The other child has nothing of it.
        let after = std::mem::replace(&mut story.expected, before);
        story.judge_file(&DiskOptions::vhd(&clone), "a clone");
        story.write_file(&clone, "a clone");
        check(&clone);
        std::fs::remove_file(&clone).expect("removed");
        story.expected = after;
        check(&second);
        for (image, into) in [(&second, "the child"), (&first, "the raw file")] {
            let said = vhd_util(&["coalesce", "-n", text(image)]).ok();
            assert!(said.starts_with("Coalesced "), "{said}");
            story.judge_file(&DiskOptions::vhd(&second), &format!("coalesced into {into}"));
            check(&second);
        }
        story.judge_file(&DiskOptions::raw(&raw), "the raw file at last");
        assert_eq!(file_len(&raw), len);
    }
}

/// The child of a raw file that ends in part of a sector becomes larger: what stands in that part is no data of the
/// disk, and the requests that reach over it end.
#[test]
fn a_child_that_outgrew_its_ragged_parent_reads_as_zero_behind_it() {
    needs!("nbdsh", "nbdcopy");
    for len in [4 * MIB - 100, 6 * MIB + 333] {
        let (mut story, raw) = Story::new(len);
        let [child, filled, leaf] = ["child.vhd", "filled.vhd", "leaf.vhd"].map(|name| story.path(name));
        snapshot_of_raw(&child, &raw);
        vhd_util(&["resize", "-f", "-n", text(&child), "-s", "8"]).ok();
        story.expected.resize(8 << 20, 0);
        story.judge_file(&DiskOptions::vhd(&child), "grown");
        // Blocks without data between the leaf and the raw file.
        vhd_util(&["snapshot", "-e", "-n", text(&filled), "-p", text(&child)]).ok();
        vhd_util(&["fill", "-b", "-n", text(&child)]).ok();
        let zero = vec![0; 8 << 20];
        let data = std::mem::replace(&mut story.expected, zero);
        story.judge_file(&DiskOptions::vhd(&filled), "over blocks that were filled with zeroes");
        // Anew, without them.
        story.expected = data;
        snapshot_of_raw(&child, &raw);
        vhd_util(&["resize", "-f", "-n", text(&child), "-s", "8"]).ok();
        vhd_util(&["snapshot", "-e", "-n", text(&leaf), "-p", text(&child)]).ok();
        let disk = DiskOptions::vhd(&leaf).nbd().start(story.scratch.path());
        nbdsh(&disk.uri(), "h.pwrite(b'w' * 1024, 1 << 20)\nh.flush()");
        story.expected[1 << 20..(1 << 20) + 1024].fill(b'w');
        story.judge(&disk.uri(), "a grandchild");
        disk.stop();
        for image in [&leaf, &child] {
            vhd_util(&["coalesce", "-n", text(image)]).ok();
            check(&leaf);
        }
        assert_eq!(file_len(&raw), 8 * MIB);
        story.judge_file(&DiskOptions::raw(&raw), "the parent that had to grow");
        story.judge_file(&DiskOptions::vhd(&leaf), "through all of them");
    }
}

#[test]
fn a_disk_in_use_keeps_its_size_and_its_tail() {
    needs!("nbdsh", "nbdcopy");
    for len in SIZES {
        let (mut story, raw) = Story::new(len);
        let tap = story.host.create(&aio(&raw));
        let uri = tap.uri();
        story.judge(&uri, "the raw file");
        story.write(&uri);
        let leaves = ["one.vhd", "two.vhd"].map(|name| story.path(name));
        for leaf in &leaves {
            story.disk(&tap, &["snapshot"], &[text(leaf)]);
            story.judge(&uri, "a snapshot");
            story.write(&uri);
        }
        check(&leaves[1]);
        let size = vhd_util(&["query", "-n", text(&leaves[1]), "-S"]).ok();
        println!("{len}: {size}");
        // The one in the middle, then the leaf, into a file that ends in part of a sector.
        for image in &leaves {
            story.disk(&tap, &["commit"], &[text(image)]);
            story.judge(&uri, "a commit");
            story.write(&uri);
        }
        assert_eq!(tap.row().expect("listed").args, Some(aio(&raw)));
        assert_eq!(whole(file_len(&raw)), whole(len));
        // To another storage of the very size.
        let target = story.scratch.raw_image("target.raw", whole(len));
        story.disk(&tap, &["mirror", "start"], &["--target", &aio(&target), "--wait"]);
        story.write(&uri);
        story.disk(&tap, &["mirror", "pivot"], &[]);
        assert_eq!(tap.row().expect("listed").args, Some(aio(&target)));
        story.judge(&uri, "a mirror");
        story.write(&uri);
        tap.destroy();
        assert_eq!(file_len(&target), whole(len));
        assert!(std::fs::read(&target).expect("readable") == story.expected, "{len}");
    }
}

/// Growing makes zeroes of what stood behind the last sector, in the leaf and below it.
#[test]
fn a_disk_that_grows_shows_nothing_of_what_stood_behind_its_last_sector() {
    needs!("nbdsh", "nbdcopy");
    for (len, larger) in [(4 * MIB - 100, 4 * MIB), (6 * MIB + 333, 10_481_664)] {
        let (mut story, raw) = Story::new(len);
        let tap = story.host.create(&aio(&raw));
        let (uri, minor) = (tap.uri(), tap.minor.to_string());
        let grow = |story: &mut Story, to: u64| {
            run(&mut story.host.tapio(&["disk", "grow", &minor, &to.to_string()])).ok();
            story.expected.resize(to as usize, 0);
            story.judge(&uri, "grown");
            story.write(&uri);
            story.judge(&uri, "written behind the old end");
        };
        grow(&mut story, larger);
        assert_eq!(file_len(&raw), larger);
        tap.destroy();
        // A ragged file again, below a leaf that grows and is committed.
        let file = std::fs::OpenOptions::new().append(true).open(&raw).expect("opened");
        std::io::Write::write_all(&mut &file, &[0xee; 333]).expect("appended");
        let tap = story.host.create(&aio(&raw));
        let (uri, minor) = (tap.uri(), tap.minor.to_string());
        let leaf = story.path("leaf.vhd");
        story.disk(&tap, &["snapshot"], &[text(&leaf)]);
        story.judge(&uri, "a snapshot");
        run(&mut story.host.tapio(&["disk", "grow", &minor, &(12 * MIB).to_string()])).ok();
        story.expected.resize(12 << 20, 0);
        nbdsh(&uri, "h.pwrite(b'g' * 512, 11 << 20)\nh.flush()");
        story.expected[11 << 20..(11 << 20) + 512].fill(b'g');
        story.judge(&uri, "the leaf has grown");
        check(&leaf);
        story.disk(&tap, &["commit"], &[text(&leaf)]);
        story.judge(&uri, "a commit that makes the parent larger");
        tap.destroy();
        assert!(std::fs::read(&raw).expect("readable") == story.expected, "{len}");
        // What is left of the leaf still reads so.
        story.judge_file(&DiskOptions::image(vhd(&leaf)), "the leaf that was committed");
    }
}
