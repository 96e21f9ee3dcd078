//! Root file systems of guests: cpio archives ("newc"; Linux,
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{AGENT, INIT};

/// Regular file, executable.
pub const MODE_FILE: u32 = 0o100_755;

/// Directory.
pub const MODE_DIR: u32 = 0o040_755;

/// Character device.
pub const MODE_CHAR: u32 = 0o020_600;

/// Drivers of disks in the order in which they are loaded, and of the balloon; kernels have them built in, or as
/// modules.
const DRIVERS: [&str; 8] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "virtio_balloon",
    "xen-blkfront",
];

/// Drivers of CD drives, for guests that have some: in the order in which they need each other.
const CD_DRIVERS: [&str; 8] =
    ["scsi_common", "scsi_mod", "virtio_scsi", "libata", "ata_piix", "cdrom", "sr_mod", "isofs"];

/// Drivers of network interfaces, for guests that can have some: in the order in which they need each other. They are
/// loaded once there is one.
const NET_DRIVERS: [&str; 3] = ["failover", "net_failover", "virtio_net"];

/// What an embedded guest has drivers for, beside disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// CD drives: each driver costs a guest time to load.
    pub drives: bool,
    /// Network interfaces.
    pub networks: bool,
}

/// An archive that is being made.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// Adds an entry: a header of thirteen 8-digit hexadecimal fields, the name, the content, each padded to 4
    /// bytes. `device` is major and minor of a device node.
    ///
    /// # Errors
    /// Name or content are longer than the format can say (4 GiB).
    pub fn add(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let long =
            |_| io::Error::new(io::ErrorKind::FileTooLarge, format!("{name} is too large for an initramfs"));
        self.inode += 1;
        let content_len = u32::try_from(content.len()).map_err(long)?;
        let name_len = u32::try_from(name.len() + 1).map_err(long)?;
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
        Ok(())
    }

    /// Adds a file of this host.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn add_file(&mut self, name: &str, from: &Path) -> io::Result<()> {
        let told = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", from.display()));
        self.add(name, MODE_FILE, (0, 0), &fs::read(from).map_err(told)?)
    }

    /// The whole archive.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn finish(mut self) -> io::Result<Vec<u8>> {
        self.add("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.bytes)
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The embedded guest: `busybox` must be static; of the directories with kernel modules the first that has one of
/// its name is taken.
///
/// # Errors
/// A file cannot be read.
pub fn embedded(busybox: &Path, modules: &[PathBuf], devices: Devices) -> io::Result<Vec<u8>> {
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "etc", "lib"] {
        archive.add(dir, MODE_DIR, (0, 0), &[])?;
    }
    // The kernel opens this for the first program before anything is mounted.
    archive.add("dev/console", MODE_CHAR, (5, 1), &[])?;
    archive.add_file("bin/busybox", busybox)?;
    archive.add("bin/agent", MODE_FILE, (0, 0), AGENT)?;
    archive.add("init", MODE_FILE, (0, 0), INIT.as_bytes())?;
    let of_drives: &[&str] = if devices.drives { &CD_DRIVERS } else { &[] };
    let of_networks: &[&str] = if devices.networks { &NET_DRIVERS } else { &[] };
    let at_once: Vec<&str> = DRIVERS.iter().chain(of_drives).copied().collect();
    for (list, drivers) in [("drivers", &*at_once), ("net-drivers", of_networks)] {
        let mut names = String::new();
        for driver in drivers {
            if let Some(file) = modules.iter().find_map(|dir| module(dir, driver)) {
                let name = if file.extension().is_some_and(|end| end == "xz") { ".ko.xz" } else { ".ko" };
                let name = format!("{driver}{name}");
                archive.add_file(&format!("lib/{name}"), &file)?;
                names.push_str(&name);
                names.push('\n');
            }
        }
        archive.add(&format!("etc/{list}"), 0o100_644, (0, 0), names.as_bytes())?;
    }
    archive.finish()
}

/// Where the modules of a kernel can be: beside it, or in this host's tree of its version.
pub(crate) fn modules_of(kernel: &Path) -> Vec<PathBuf> {
    let beside = kernel.parent().map(Path::to_path_buf);
    let own = version(kernel).map(|version| Path::new("/lib/modules").join(version));
    beside.into_iter().chain(own).collect()
}

/// The version of a Linux kernel for x86 (Documentation/arch/x86/boot.rst, `kernel_version`): a pointer at 0x20e,
/// relative to 0x200, to a text.
fn version(kernel: &Path) -> Option<String> {
    use std::os::unix::fs::FileExt;
    let file = fs::File::open(kernel).ok()?;
    let mut at = [0; 2];
    file.read_exact_at(&mut at, 0x20e).ok()?;
    let mut text = [0; 128];
    let len = file.read_at(&mut text, 0x200 + u64::from(u16::from_le_bytes(at))).ok()?;
    let word = String::from_utf8_lossy(text.get(..len)?).split([' ', '\0']).next()?.to_owned();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
    (!word.is_empty() && !word.starts_with('.') && word.chars().all(is_plain)).then_some(word)
}

/// A module in a directory as `virtio_blk.ko`, or where a kernel's own tree has it.
fn module(dir: &Path, driver: &str) -> Option<PathBuf> {
    let dirs = ["block", "virtio", "scsi", "ata", "cdrom", "net"].map(|dir| format!("kernel/drivers/{dir}"));
    let dirs = dirs.iter().map(String::as_str);
    ["", "kernel/fs/isofs", "kernel/net/core"].into_iter().chain(dirs).find_map(|below| {
        [".ko", ".ko.xz"]
            .iter()
            .map(|end| dir.join(below).join(format!("{driver}{end}")))
            .find(|file| file.exists())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_110_bytes_and_everything_is_aligned() {
        let mut archive = Archive::default();
        archive.add("abc", MODE_FILE, (0, 0), b"hello").unwrap();
        // 110 + 4 = 114 -> 116; 5 -> 8
        assert_eq!(archive.bytes.len(), 124);
        assert_eq!(&archive.bytes[110..114], b"abc\0");
        assert_eq!(&archive.bytes[116..121], b"hello");
        assert_eq!(&archive.bytes[54..62], b"00000005");
    }

    #[test]
    fn the_embedded_guest_has_the_drivers_that_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let busybox = dir.path().join("busybox");
        fs::write(&busybox, "bb").unwrap();
        let block = dir.path().join("kernel/drivers/block");
        fs::create_dir_all(&block).unwrap();
        fs::write(block.join("virtio_blk.ko.xz"), "module").unwrap();
        let core = dir.path().join("kernel/net/core");
        fs::create_dir_all(&core).unwrap();
        fs::write(core.join("failover.ko"), "module").unwrap();
        let modules = ["/nowhere".into(), dir.path().into()];
        let networks = Devices { networks: true, ..Devices::default() };
        let image = embedded(&busybox, &modules, networks).unwrap();
        assert!(String::from_utf8_lossy(&image).contains("failover.ko\n"));
        let image = embedded(&busybox, &modules, Devices { drives: true, networks: false }).unwrap();
        assert!(!String::from_utf8_lossy(&image).contains("failover.ko"));
        let text = String::from_utf8_lossy(&image);
        assert!(
            text.contains("lib/virtio_blk.ko.xz") && text.contains("\nvirtio_blk.ko.xz\n")
                || text.contains("virtio_blk.ko.xz\n")
        );
        assert!(!text.contains("virtio_pci.ko"));
        assert!(text.contains("tapio_agent"), "the first program");
        assert!(image.windows(AGENT.len()).any(|part| part == AGENT), "the agent");
        let missing = embedded(Path::new("/nowhere/busybox"), &[], Devices::default()).unwrap_err();
        assert!(missing.to_string().contains("/nowhere/busybox"), "{missing}");
    }

    #[test]
    fn the_version_of_a_kernel_is_read_from_its_header() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("vmlinuz");
        let mut bytes = vec![0; 0x400];
        bytes[0x20e] = 0x50;
        bytes[0x250..0x260].copy_from_slice(b"6.12.1-amd64 (x)");
        fs::write(&file, &bytes).unwrap();
        assert_eq!(version(&file).as_deref(), Some("6.12.1-amd64"));
        bytes[0x250..0x260].copy_from_slice(b"../../../etc/x (");
        fs::write(&file, &bytes).unwrap();
        assert_eq!(version(&file), None);
        fs::write(&file, "short").unwrap();
        assert_eq!(version(&file), None);
    }
}
