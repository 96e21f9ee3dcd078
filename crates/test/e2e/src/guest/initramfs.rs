//! The root file systems of QEMU's guests: cpio archives ("newc").

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_vm::initramfs::{Archive, MODE_CHAR, MODE_DIR, MODE_FILE};

use crate::process::run;
use crate::tools::{find, repository};

/// The files of a guest. What goes wrong panics.
struct Files(Archive);

impl Files {
    /// Those that every guest has: directories, busybox as its shell, `lib.sh`, and a first program of `tests/guest`.
    #[track_caller]
    fn new(dirs: &[&str], init: &str) -> Self {
        let mut files = Self(Archive::default());
        for dir in dirs {
            files.put(dir, MODE_DIR, (0, 0), &[]);
        }
        // The kernel opens this for the first program before anything is mounted.
        files.put("dev/console", MODE_CHAR, (5, 1), &[]);
        let (busybox, guest) =
            (find("busybox").expect("the caller has asked for busybox"), repository().join("tests/guest"));
        files.add("bin/busybox", &busybox);
        files.add("bin/sh", &busybox);
        files.add("lib.sh", &guest.join("lib.sh"));
        files.add("init", &guest.join(init));
        files
    }

    #[track_caller]
    fn put(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.0.add(name, mode, device, content).expect("files of guests are small");
    }

    #[track_caller]
    fn add(&mut self, name: &str, from: &Path) {
        let content =
            std::fs::read(from).unwrap_or_else(|error| panic!("cannot read {}: {error}", from.display()));
        self.put(name, MODE_FILE, (0, 0), &content);
    }

    #[track_caller]
    fn write(self, to: &Path) {
        let bytes = self.0.finish().expect("an end is small");
        std::fs::write(to, bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", to.display()));
    }
}

/// Writes the archive that `tests/guest/qemu-init.sh` expects. `kernel` is the directory with the unpacked kernel.
#[track_caller]
pub(super) fn write(to: &Path, kernel: &Path) {
    let mut files = Files::new(&["bin", "dev"], "qemu-init.sh");
    let module = kernel.join("virtio_blk.ko");
    // A kernel with the driver built in has no module.
    if module.exists() {
        files.add("virtio_blk.ko", &module);
    }
    files.write(to);
}

/// Drivers of a guest that is a host of ours.
const OF_HOST: [&str; 6] = ["virtio_blk", "libcrc32c", "xfs", "loop", "nbd", "ublk_drv"];

/// Drivers of a guest with qemu-guest-agent.
const OF_AGENT: [&str; 2] = ["virtio_blk", "dummy"];

/// Writes the archive that `tests/guest/vm-init.sh` expects.
#[track_caller]
pub(super) fn write_host(to: &Path, kernel: &Path, programs: &[PathBuf]) {
    write_with(to, kernel, "vm-init.sh", programs, &OF_HOST);
}

/// Writes the archive that `tests/guest/qga-init.sh` expects.
#[track_caller]
pub(super) fn write_agent(to: &Path, kernel: &Path, program: &Path) {
    write_with(to, kernel, "qga-init.sh", &[program.to_path_buf()], &OF_AGENT);
}

/// `programs` with the libraries they need, and those drivers that `kernel` has as modules.
#[track_caller]
fn write_with(to: &Path, kernel: &Path, init: &str, programs: &[PathBuf], drivers: &[&str]) {
    let mut files = Files::new(&["bin", "sbin", "dev", "lib64", "lib"], init);
    let mut libraries = BTreeSet::new();
    for program in programs {
        let name = program.file_name().expect("a program has a name").to_string_lossy();
        files.add(&format!("sbin/{name}"), program);
        libraries.extend(libraries_of(program));
    }
    for library in libraries {
        let name = library.file_name().expect("a library has a name").to_string_lossy();
        // The loader looks for itself where it was linked to be, and for everything else in /lib.
        let dir = if name.starts_with("ld-linux") { "lib64" } else { "lib" };
        files.add(&format!("{dir}/{name}"), &library);
    }
    for name in drivers.iter().map(|driver| format!("{driver}.ko")) {
        if kernel.join(&name).exists() {
            files.add(&name, &kernel.join(&name));
        }
    }
    files.write(to);
}

/// The shared libraries of a program, by what its loader says.
#[track_caller]
fn libraries_of(program: &Path) -> Vec<PathBuf> {
    let said = run(Command::new("ldd").arg(program)).ok();
    // `name => /path (address)` or `/path (address)`; what the kernel provides has no path.
    said.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from))
        .collect()
}
