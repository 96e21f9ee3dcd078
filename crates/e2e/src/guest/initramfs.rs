//! The root file systems of QEMU's guests: cpio archives ("newc").

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::run;
use crate::tools::{find, repository};

/// Regular file, executable.
const MODE_FILE: u32 = 0o100_755;

/// Directory.
const MODE_DIR: u32 = 0o040_755;

/// Character device.
const MODE_CHAR: u32 = 0o020_600;

/// Writes the archive that `tests/guest/qemu-init.sh` expects. `kernel` is the directory with the unpacked kernel.
#[track_caller]
pub(super) fn write(to: &Path, kernel: &Path) {
    let guest = repository().join("tests/guest");
    let read = |path: &Path| {
        std::fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
    };
    let busybox = find("busybox").expect("the caller has asked for busybox");
    let mut archive = Archive { bytes: Vec::new(), inode: 0 };
    archive.add("bin", MODE_DIR, (0, 0), &[]);
    archive.add("dev", MODE_DIR, (0, 0), &[]);
    // The kernel opens this for the first program before anything is mounted.
    archive.add("dev/console", MODE_CHAR, (5, 1), &[]);
    archive.add("bin/busybox", MODE_FILE, (0, 0), &read(&busybox));
    archive.add("bin/sh", MODE_FILE, (0, 0), &read(&busybox));
    archive.add("lib.sh", MODE_FILE, (0, 0), &read(&guest.join("lib.sh")));
    archive.add("init", MODE_FILE, (0, 0), &read(&guest.join("qemu-init.sh")));
    let module = kernel.join("virtio_blk.ko");
    // A kernel with the driver built in has no module.
    if module.exists() {
        archive.add("virtio_blk.ko", MODE_FILE, (0, 0), &read(&module));
    }
    archive.add("TRAILER!!!", 0, (0, 0), &[]);
    let written = std::fs::File::create(to).and_then(|mut file| file.write_all(&archive.bytes));
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
    let mut archive = Archive { bytes: Vec::new(), inode: 0 };
    for dir in ["bin", "sbin", "dev", "lib64", "lib"] {
        archive.add(dir, MODE_DIR, (0, 0), &[]);
    }
    archive.add("dev/console", MODE_CHAR, (5, 1), &[]);
    archive.add("bin/busybox", MODE_FILE, (0, 0), &read(&busybox));
    archive.add("bin/sh", MODE_FILE, (0, 0), &read(&busybox));
    archive.add("lib.sh", MODE_FILE, (0, 0), &read(&guest.join("lib.sh")));
    archive.add("init", MODE_FILE, (0, 0), &read(&guest.join("vm-init.sh")));
    let mut libraries = BTreeSet::new();
    for program in programs {
        let name = program.file_name().expect("a program has a name").to_string_lossy();
        archive.add(&format!("sbin/{name}"), MODE_FILE, (0, 0), &read(program));
        libraries.extend(libraries_of(program));
    }
    for library in libraries {
        let name = library.file_name().expect("a library has a name").to_string_lossy();
        // The loader looks for itself where it was linked to be, and for everything else in /lib.
        let dir = if name.starts_with("ld-linux") { "lib64" } else { "lib" };
        archive.add(&format!("{dir}/{name}"), MODE_FILE, (0, 0), &read(&library));
    }
    for module in std::fs::read_dir(kernel).expect("the directory of the kernel").flatten() {
        let name = module.file_name().to_string_lossy().into_owned();
        if name.ends_with(".ko") {
            archive.add(&name, MODE_FILE, (0, 0), &read(&module.path()));
        }
    }
    archive.add("TRAILER!!!", 0, (0, 0), &[]);
    std::fs::write(to, &archive.bytes)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", to.display()));
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

struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// One entry: a header of thirteen 8-digit hexadecimal fields, the name, the content, each padded to 4 bytes.
    fn add(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inode += 1;
        let content_len = u32::try_from(content.len()).expect("initramfs files are small");
        let name_len = u32::try_from(name.len() + 1).expect("initramfs names are short");
        let fields = [self.inode, mode, 0, 0, 1, 0, content_len, 0, 0, device.0, device.1, name_len, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_110_bytes_and_everything_is_aligned() {
        let mut archive = Archive { bytes: Vec::new(), inode: 0 };
        archive.add("abc", MODE_FILE, (0, 0), b"hello");
        // 110 + 4 = 114 -> 116; 5 -> 8
        assert_eq!(archive.bytes.len(), 124);
        assert_eq!(&archive.bytes[110..114], b"abc\0");
        assert_eq!(&archive.bytes[116..121], b"hello");
        assert_eq!(&archive.bytes[54..62], b"00000005");
    }
}
