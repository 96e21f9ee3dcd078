//! The root file systems of the lane: dom0's, with the guests' inside.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_vm::initramfs::{Archive, MODE_CHAR, MODE_DIR, MODE_FILE};

use super::Lane;
use crate::process::run;
use crate::scratch::Scratch;
use crate::tools::{find, our, repository};

/// Programs of the toolstack, below `usr/lib/xen-4.17/bin`: `xl` starts some by this path.
const TOOLSTACK: [&str; 6] =
    ["xl", "xenstored", "xenconsoled", "xen-init-dom0", "libxl-save-helper", "xenstore-control"];
/// Programs below `usr/bin`.
const XENSTORE: [&str; 8] = [
    "xenstore-chmod",
    "xenstore-exists",
    "xenstore-list",
    "xenstore-ls",
    "xenstore-read",
    "xenstore-rm",
    "xenstore-watch",
    "xenstore-write",
];
/// Names that `tapio` answers to.
const LINKS: [&str; 4] = ["tap-ctl", "vhd-util", "xsiostat", "xe"];
/// Drivers of dom0. Those of guests are in their own archive.
const GUEST_DRIVERS: [&str; 6] = ["xen-blkfront", "crc16", "crc32c_generic", "mbcache", "jbd2", "ext4"];

/// Writes dom0's archive: the toolstack, `programs` of ours without what only debuggers need, drivers, the kernel and
/// the archive of the guests with those of `in_guests`.
#[track_caller]
pub(super) fn write_dom0(
    to: &Path,
    lane: &Lane,
    programs: &[String],
    in_guests: &[String],
    scratch: &Scratch,
) {
    let mut image = Image::new();
    for dir in ["usr", "usr/lib", "usr/lib/xen-4.17", "usr/lib/xen-4.17/bin", "usr/bin", "boot"] {
        image.dir(dir);
    }
    let root = lane.join("root");
    for name in TOOLSTACK {
        image.program(
            &format!("usr/lib/xen-4.17/bin/{name}"),
            &root.join("usr/lib/xen-4.17/bin").join(name),
            &root,
        );
    }
    for name in XENSTORE {
        image.program(&format!("usr/bin/{name}"), &root.join("usr/bin").join(name), &root);
    }
    image.ours(programs, &root, scratch);
    if programs.iter().any(|name| name == "tapio") {
        for link in LINKS {
            image.link(&format!("sbin/{link}"), "tapio");
        }
    }
    for module in std::fs::read_dir(&lane.dir).expect("the directory of the lane").flatten() {
        let name = module.file_name().to_string_lossy().into_owned();
        if name.ends_with(".ko") {
            image.file(&name, &module.path());
        }
    }
    image.script("init", "xen-init.sh");
    image.script("disks.sh", "xen-disks.sh");
    image.script("toolstack.sh", "xen-toolstack.sh");
    image.script("stories.sh", "xen-stories.sh");
    image.script("lib.sh", "lib.sh");
    image.file("boot/vmlinux", &lane.join("vmlinux"));
    let guest = scratch.join("guest.cpio");
    write_guest(&guest, lane, in_guests, scratch);
    image.file("boot/guest.cpio", &guest);
    image.finish(to);
}

/// Writes the archive of the guests: busybox, the front end of a disk, a file system, `programs` of ours.
#[track_caller]
fn write_guest(to: &Path, lane: &Lane, programs: &[String], scratch: &Scratch) {
    let mut image = Image::new();
    if !programs.is_empty() {
        image.ours(programs, &lane.join("root"), scratch);
    }
    for name in GUEST_DRIVERS {
        let file = lane.join(&format!("{name}.ko"));
        if file.exists() {
            image.file(&format!("{name}.ko"), &file);
        }
    }
    image.script("init", "xen-guest.sh");
    image.script("lib.sh", "lib.sh");
    image.finish(to);
}

/// An archive with what every one has: busybox, a console, directories.
struct Image {
    archive: Archive,
    libraries: BTreeSet<PathBuf>,
}

impl Image {
    #[track_caller]
    fn new() -> Self {
        let mut image = Self { archive: Archive::default(), libraries: BTreeSet::new() };
        for dir in ["bin", "sbin", "dev", "lib64", "lib"] {
            image.dir(dir);
        }
        // The kernel opens this for the first program before anything is mounted.
        image.add("dev/console", MODE_CHAR, (5, 1), &[]);
        let busybox = find("busybox").expect("the lane has asked for busybox");
        image.file("bin/busybox", &busybox);
        image.link("bin/sh", "busybox");
        image
    }

    #[track_caller]
    fn add(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.archive.add(name, mode, device, content).expect("files of guests are small");
    }

    fn dir(&mut self, name: &str) {
        self.add(name, MODE_DIR, (0, 0), &[]);
    }

    fn link(&mut self, name: &str, to: &str) {
        // S_IFLNK with all permissions.
        self.add(name, 0o120_777, (0, 0), to.as_bytes());
    }

    #[track_caller]
    fn file(&mut self, name: &str, from: &Path) {
        let content =
            std::fs::read(from).unwrap_or_else(|error| panic!("cannot read {}: {error}", from.display()));
        self.add(name, MODE_FILE, (0, 0), &content);
    }

    #[track_caller]
    fn script(&mut self, name: &str, script: &str) {
        self.file(name, &repository().join("tests/guest").join(script));
    }

    /// A program, and a note of the libraries it needs; those of `root` are found too.
    #[track_caller]
    fn program(&mut self, name: &str, from: &Path, root: &Path) {
        self.file(name, from);
        self.libraries.extend(libraries_of(from, root));
    }

    /// Programs of ours in `sbin`, and the libraries of all programs so far.
    #[track_caller]
    fn ours(&mut self, programs: &[String], root: &Path, scratch: &Scratch) {
        for name in programs {
            let file = stripped(name, scratch);
            let place = file.file_name().expect("a program has a name").to_string_lossy().into_owned();
            self.program(&format!("sbin/{place}"), &file, root);
        }
        self.libraries(root);
    }

    /// The libraries of all programs.
    #[track_caller]
    fn libraries(&mut self, root: &Path) {
        // The C library loads this one by itself when a thread is cancelled.
        let unwinder = Path::new("/lib/x86_64-linux-gnu/libgcc_s.so.1");
        if unwinder.exists() && !self.libraries.iter().any(|library| library.ends_with("libgcc_s.so.1")) {
            self.libraries.extend([unwinder.to_path_buf()]);
            self.libraries.extend(libraries_of(unwinder, root));
        }
        let mut there = BTreeSet::new();
        for library in std::mem::take(&mut self.libraries) {
            let name = library.file_name().expect("a library has a name").to_string_lossy().into_owned();
            // The loader looks for itself where it was linked to be, and for everything else in /lib.
            let dir = if name.starts_with("ld-linux") { "lib64" } else { "lib" };
            if there.insert(name.clone()) {
                self.file(&format!("{dir}/{name}"), &library);
            }
        }
    }

    #[track_caller]
    fn finish(self, to: &Path) {
        let bytes = self.archive.finish().expect("an end is small");
        std::fs::write(to, &bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", to.display()));
    }
}

/// The shared libraries of a program, by what its loader says when it also looks below `root`.
#[track_caller]
fn libraries_of(program: &Path, root: &Path) -> Vec<PathBuf> {
    let below =
        ["usr/lib/x86_64-linux-gnu", "usr/lib/xen-4.17/lib/x86_64-linux-gnu"].map(|dir| root.join(dir));
    let path = below.map(|dir| dir.display().to_string()).join(":");
    let finished = run(Command::new("ldd").arg(program).env("LD_LIBRARY_PATH", path));
    // A program without libraries makes ldd fail.
    let said = finished.stdout;
    assert!(!said.contains("not found"), "{} lacks a library:\n{said}", program.display());
    // `name => /path (address)` or `/path (address)`; what the kernel provides has no path.
    said.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from))
        .collect()
}

/// A program of ours without what only debuggers need: the archive is memory.
#[track_caller]
fn stripped(program: &str, scratch: &Scratch) -> PathBuf {
    let from = our(program);
    let to = scratch.join(&from.file_name().expect("a program has a name").to_string_lossy());
    run(Command::new("strip").arg("-o").arg(&to).arg(&from)).ok();
    to
}
