//! The root file systems of QEMU's guests: cpio archives ("newc").

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_vm::initramfs::{Archive, MODE_CHAR, MODE_DIR, MODE_FILE};

use crate::process::run;
use crate::tools::{find, repository};

/// Writes the archive that `tests/guest/qemu-init.sh` expects. `kernel` is the directory with the unpacked kernel.
#[track_caller]
pub(super) fn write(to: &Path, kernel: &Path) {
    let guest = repository().join("tests/guest");
    let read = |path: &Path| {
        std::fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
    };
    let busybox = find("busybox").expect("the caller has asked for busybox");
    let mut archive = Archive::default();
    let mut add = |name: &str, mode: u32, device: (u32, u32), content: &[u8]| {
        archive.add(name, mode, device, content).expect("files of guests are small");
    };
    add("bin", MODE_DIR, (0, 0), &[]);
    add("dev", MODE_DIR, (0, 0), &[]);
    // The kernel opens this for the first program before anything is mounted.
    add("dev/console", MODE_CHAR, (5, 1), &[]);
    add("bin/busybox", MODE_FILE, (0, 0), &read(&busybox));
    add("bin/sh", MODE_FILE, (0, 0), &read(&busybox));
    add("lib.sh", MODE_FILE, (0, 0), &read(&guest.join("lib.sh")));
    add("init", MODE_FILE, (0, 0), &read(&guest.join("qemu-init.sh")));
    let module = kernel.join("virtio_blk.ko");
    // A kernel with the driver built in has no module.
    if module.exists() {
        add("virtio_blk.ko", MODE_FILE, (0, 0), &read(&module));
    }
    let bytes = archive.finish().expect("an end is small");
    let written = std::fs::File::create(to).and_then(|mut file| file.write_all(&bytes));
    written.unwrap_or_else(|error| panic!("cannot write {}: {error}", to.display()));
}

/// Writes the archive that `tests/guest/vm-init.sh` expects: `programs` with the libraries they need, and the
/// drivers of `kernel`.
#[track_caller]
pub(super) fn write_host(to: &Path, kernel: &Path, programs: &[PathBuf]) {
    let guest = repository().join("tests/guest");
    let read = |path: &Path| {
        std::fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
    };
    let busybox = find("busybox").expect("the caller has asked for busybox");
    let mut archive = Archive::default();
    let mut add = |name: &str, mode: u32, device: (u32, u32), content: &[u8]| {
        archive.add(name, mode, device, content).expect("files of guests are small");
    };
    for dir in ["bin", "sbin", "dev", "lib64", "lib"] {
        add(dir, MODE_DIR, (0, 0), &[]);
    }
    add("dev/console", MODE_CHAR, (5, 1), &[]);
    add("bin/busybox", MODE_FILE, (0, 0), &read(&busybox));
    add("bin/sh", MODE_FILE, (0, 0), &read(&busybox));
    add("lib.sh", MODE_FILE, (0, 0), &read(&guest.join("lib.sh")));
    add("init", MODE_FILE, (0, 0), &read(&guest.join("vm-init.sh")));
    let mut libraries = BTreeSet::new();
    for program in programs {
        let name = program.file_name().expect("a program has a name").to_string_lossy();
        add(&format!("sbin/{name}"), MODE_FILE, (0, 0), &read(program));
        libraries.extend(libraries_of(program));
    }
    for library in libraries {
        let name = library.file_name().expect("a library has a name").to_string_lossy();
        // The loader looks for itself where it was linked to be, and for everything else in /lib.
        let dir = if name.starts_with("ld-linux") { "lib64" } else { "lib" };
        add(&format!("{dir}/{name}"), MODE_FILE, (0, 0), &read(&library));
    }
    for module in std::fs::read_dir(kernel).expect("the directory of the kernel").flatten() {
        let name = module.file_name().to_string_lossy().into_owned();
        if name.ends_with(".ko") {
            add(&name, MODE_FILE, (0, 0), &read(&module.path()));
        }
    }
    let bytes = archive.finish().expect("an end is small");
    std::fs::write(to, &bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", to.display()));
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
