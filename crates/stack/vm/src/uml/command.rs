//! The command line of a User-mode Linux kernel.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use crate::arguments::not_plain;
use crate::traits::VmSpec;

/// The kernel takes a line of 4096 bytes (`COMMAND_LINE_SIZE`), its own name and the spaces included.
const LINE_LEN_MAX: usize = 4096;

/// Room for what the kernel puts before the arguments: its own name, or `root=98:0`.
const KERNEL_NAME_LEN: usize = 64;

/// Devices prepared for disks that come later, beyond those at the start, if `VM.platform` sets no more.
pub(super) const SPARE_SLOTS: u16 = 16;

/// As many devices by vhost-user as the kernel copes with. It is compiled with 64 interrupts (`NR_IRQS` of arch/um),
/// the first 19 of which are its own (`UM_FIRST_DYN_IRQ`); a device takes one, consoles and serial lines four: so
/// Debian's 6.1 starts with 40 disks and does not get to a shell with 44, and no option of it changes that.
pub(super) const SLOTS_MAX: u16 = 40;

/// Disks beyond these are files of the host (`ubd`), which share one of the kernel's own interrupts: `MAX_DEV` of its
/// driver. Their slots follow those of the others.
pub(super) const FILES_MAX: u16 = 16;

/// What limits the number of disks, and the next step.
pub(super) fn limit() -> String {
    format!(
        "the kernel of User-mode Linux has interrupts for {SLOTS_MAX} disks (64 in all, NR_IRQS) and {FILES_MAX} more \
         that are there from its start (ubd), which no setting changes; use a VM of driver qemu, which has 255"
    )
}

/// A disk as a file of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostFile {
    /// Its slot, from [`SLOTS_MAX`] on.
    pub slot: u16,
    /// The file.
    pub path: PathBuf,
    /// The guest may only read.
    pub read_only: bool,
}

/// The number of a file's device in the guest; none of a device by vhost-user.
pub(super) fn number_of(slot: u16) -> Option<u16> {
    slot.checked_sub(SLOTS_MAX)
}

impl HostFile {
    /// Its word of the command line: `d` for a file that is a disk, whatever lies at its beginning (the kernel would
    /// follow a name that a guest has written there), `c` for one that need not be locked.
    ///
    /// # Errors
    /// A sentence: the kernel would take a part of its name for something else.
    fn word(&self) -> Result<OsString, String> {
        let name = self
            .path
            .to_str()
            .filter(|name| !name.contains([':', ',', ' ', '"']) && not_plain(name).is_none());
        let name = name.ok_or_else(|| {
            format!(
                "the disk is the file {}, and the kernel of User-mode Linux takes no colon, comma, quote or space in \
                 such a name: choose another run directory",
                self.path.display()
            )
        })?;
        let number = number_of(self.slot).filter(|number| *number < FILES_MAX);
        let number = number.ok_or_else(|| format!("slot {} is none of a file", self.slot))?;
        let read_only = if self.read_only { "r" } else { "" };
        Ok(format!("ubd{number}{read_only}dc={name}").into())
    }
}

/// Least memory of a guest with our initramfs.
const MEMORY_MIN: u64 = 48 << 20;

/// Arguments that reach out of the guest into this host, or that the driver sets itself: their beginnings, with `_`
/// for `-`, which the kernel reads alike. The tables `.uml.setup.init` and `.init.setup` of Debian's 6.1 were read word
/// by word for what names something of the host (files, sockets, descriptors, programs) or prints something and ends
/// (`--help`); the others belong to older and newer kernels.
const RESERVED: &[&str] = &[
    "__",
    "bootconfig",
    "con",
    "daemon",
    "debug",
    "dsp=",
    "eth",
    "fake_ide",
    "gdb",
    "hostfs",
    "initrd",
    "iomem",
    "jail",
    "mconsole",
    "mem=",
    "mixer=",
    "mode=",
    "noreboot",
    "nosysemu",
    "port",
    "redirect",
    "seccomp=",
    "ssl",
    "stderr",
    "tapio_agent",
    "tapio_name",
    "time_travel",
    "tty_log",
    "ubd",
    "udb",
    "umid",
    "uml",
    "vec",
    "virtio_pci",
    "virtio_uml",
    "xterm",
];

/// Words that begin as reserved ones and are the guest's own business.
const ALLOWED: &[&str] = &["console=", "console_msg_format=", "consoleblank="];

/// The descriptors that a guest gets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wires {
    /// Console: what is typed, what is said.
    pub console: (RawFd, RawFd),
    /// Agent: commands, answers.
    pub agent: (RawFd, RawFd),
}

/// Why a VM's own arguments cannot be used. `initrd` is what it would boot.
pub(super) fn refused(spec: &VmSpec, initrd: &Path) -> Option<String> {
    if spec.memory < MEMORY_MIN {
        return Some(format!("{} bytes of memory are too few: at least {MEMORY_MIN}", spec.memory));
    }
    arguments_refused(spec, initrd)
}

/// The same of its arguments alone.
pub(super) fn arguments_refused(spec: &VmSpec, initrd: &Path) -> Option<String> {
    if let Some(why) = not_plain(&spec.kernel_args) {
        return Some(why);
    }
    if let Some(word) = spec.kernel_args.split(' ').find(|word| reaches_out(word)) {
        return Some(format!(
            "PV_args may not say '{word}': it is about this host, not about the guest; leave it out"
        ));
    }
    // Numbers of descriptors have more digits later, for which the line has room.
    let wires = Wires { console: (RawFd::MAX, RawFd::MAX), agent: (RawFd::MAX, RawFd::MAX) };
    line(spec, initrd, wires, SLOTS_MAX, &[]).err()
}

/// Whether a word means something of this host to the kernel. The kernel drops quotes before it looks at a name.
fn reaches_out(word: &str) -> bool {
    let plain = word.replace('-', "_").replace('"', "");
    let begins = |words: &[&str]| words.iter().any(|start| plain.starts_with(start));
    let is_reserved = plain != "__" && begins(RESERVED);
    (is_reserved && !begins(ALLOWED)) || (plain.starts_with("rootfstype=") && plain.contains("hostfs"))
}

/// How many devices a guest is started with: as `max_disks` says, at least those in use and some to spare.
pub(super) fn slots(spec: &VmSpec, used: u16) -> u16 {
    let wanted: u16 = spec.platform.get("max_disks").and_then(|text| text.parse().ok()).unwrap_or(0);
    wanted.max(used.saturating_add(SPARE_SLOTS)).min(SLOTS_MAX)
}

/// The arguments, and the number of devices by vhost-user among them. `used` of these have disks at the start.
///
/// The driver's own words come first, all of them: `--` in a VM's own ends what the kernel reads. A line that does
/// not fit as a whole is refused, never shortened.
///
/// # Errors
/// A sentence: the line is too long, or the VM has more disks than the kernel has devices.
pub(super) fn line(
    spec: &VmSpec,
    initrd: &Path,
    wires: Wires,
    used: u16,
    files: &[HostFile],
) -> Result<(Vec<OsString>, u16), String> {
    let slots = slots(spec, used);
    if slots < used {
        return Err(format!("{used} disks are plugged: {}", limit()));
    }
    let mut line: Vec<OsString> = vec![
        format!("mem={}M", spec.memory >> 20).into(),
        "con=null".into(),
        "ssl=null".into(),
        format!("con0=fd:{},fd:{}", wires.console.0, wires.console.1).into(),
        format!("ssl0=fd:{},fd:{}", wires.agent.0, wires.agent.1).into(),
        "tapio_agent=ttyS0".into(),
        "umid=m".into(),
        "uml_dir=./".into(),
        // A guest that mounts its host's files gets an empty directory.
        "hostfs=./hostfs".into(),
        "noreboot".into(),
        "panic=-1".into(),
    ];
    let mut with_initrd = OsString::from("initrd=");
    with_initrd.push(initrd);
    line.push(with_initrd);
    let host_name: String =
        spec.name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(32).collect();
    if !host_name.is_empty() {
        line.push(format!("tapio_name={host_name}").into());
    }
    // Relative names: the kernel is started in its own part of the VM's directory. 2 is a block device.
    line.extend((0..slots).map(|slot| OsString::from(format!("virtio_uml.device=../{slot}:2"))));
    for file in files {
        line.push(file.word()?);
    }
    if !spec.kernel_args.split(' ').any(|word| word.starts_with("loglevel=") || word == "quiet") {
        line.push("quiet".into());
    }
    line.extend(spec.kernel_args.split(' ').filter(|word| !word.is_empty()).map(OsString::from));
    let len = KERNEL_NAME_LEN + line.iter().map(|word| word.len() + 1).sum::<usize>();
    if len >= LINE_LEN_MAX {
        return Err(format!(
            "its command line has {len} bytes and a kernel of User-mode Linux takes {}: shorten PV_args, which has {}",
            LINE_LEN_MAX - 1,
            spec.kernel_args.len()
        ));
    }
    Ok((line, slots))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use uuid::Uuid;

    use super::*;

    fn spec(args: &str) -> VmSpec {
        VmSpec {
            uuid: Uuid::new_v4(),
            name: "my vm; con0=fd:0".into(),
            memory: 256 << 20,
            vcpus: 1,
            kernel: None,
            ramdisk: None,
            kernel_args: args.into(),
            platform: BTreeMap::new(),
            drives: Vec::new(),
        }
    }

    const WIRES: Wires = Wires { console: (10, 11), agent: (12, 13) };

    fn is_refused(args: &str) -> bool {
        refused(&spec(args), Path::new("/i")).is_some()
    }

    #[test]
    fn arguments_that_reach_out_of_the_guest_are_refused() {
        for word in [
            "ubd0=/etc/shadow",
            "con1=fd:3",
            "con0=fd:3",
            "console0=fd:3",
            "virtio-uml.device=/x:2",
            "rootfstype=hostfs",
            "rootfstype=ext4,hostfs",
            "hostfs=/",
            "mconsole=notify:/run/x",
            "stderr=1",
            "--help",
            "--showconfig",
            "ssl-non-raw=1",
            "mem=64G",
            "initrd=/etc/shadow",
            "uml-dir=/tmp/",
            "vec0:transport=tap",
            "tapio_agent=ttyS7",
        ] {
            assert!(is_refused(&format!("quiet {word}")), "{word}");
            // The kernel drops quotes, wherever in a name they are.
            assert!(is_refused(&format!("quiet \"{word}\"")), "\"{word}\"");
            assert!(is_refused(&format!("{}\"{}", &word[..1], &word[1..])), "{word} with a quote inside");
            assert!(is_refused(&format!("a=\"b {word}\"")), "{word} within quotes");
            for space in ["\t", "\n", "\u{b}", "\u{c}", "\r", "\u{a0}", "\u{e0}", "\0", "\u{2003}"] {
                assert!(is_refused(&format!("quiet{space}{word}")), "{space:?} before {word}");
            }
        }
        for line in
            ["", "root=/dev/vda1 ro quiet console=tty0", "tapio_run=true", "quiet -- single", "a=\"b c\""]
        {
            assert_eq!(refused(&spec(line), Path::new("/i")), None, "{line}");
        }
        assert!(refused(&VmSpec { memory: 1 << 20, ..spec("") }, Path::new("/i")).is_some());
    }

    /// Any arguments of a VM: either it is refused, or all of the driver's words are there, first and in order, and
    /// the line fits.
    #[test]
    fn no_arguments_displace_the_drivers_words() {
        let own = |args: &str, disks: &str| {
            let mut spec = spec(args);
            spec.platform.insert("max_disks".into(), disks.into());
            line(&spec, Path::new("/run/tapio/vm/x/initramfs"), WIRES, 8, &[])
        };
        let (bare, _) = own("quiet", "255").unwrap();
        // The last word is the VM's.
        let bare = &bare[..bare.len() - 1];
        let mut refused = 0;
        for len in 0..5000 {
            for args in ["x".repeat(len), "y ".repeat(len / 2), format!("-- {}", "z".repeat(len))] {
                let Ok((line, slots)) = own(&format!("quiet {args}"), "255") else {
                    refused += 1;
                    continue;
                };
                assert_eq!(&line[..bare.len()], bare, "{len}");
                assert_eq!(slots, SLOTS_MAX, "{len}");
                let whole: usize = line.iter().map(|word| word.len() + 1).sum();
                assert!(whole + "/usr/bin/linux.uml".len() < LINE_LEN_MAX, "{len}");
            }
        }
        assert!(refused > 3000, "{refused}");
        let error = own(&"x".repeat(3900), "255").unwrap_err();
        assert!(error.contains("shorten PV_args, which has 3900"), "{error}");
        assert!(bare.iter().all(|word| word != "con0=fd:0"), "a name is no argument");
        assert!(own("", "0").unwrap().1 == 24, "some to spare");
        assert!(
            line(&spec(""), Path::new("/i"), WIRES, SLOTS_MAX + 1, &[]).unwrap_err().contains("41 disks")
        );
    }

    #[test]
    fn disks_that_are_files_have_words_of_their_own() {
        let file = |slot, path: &str, read_only| HostFile { slot, path: path.into(), read_only };
        let own = [file(40, "/run/t/a/disk", false), file(55, "/run/t/b/disk", true)];
        let (words, slots) = line(&spec(""), Path::new("/i"), WIRES, 40, &own).unwrap();
        assert_eq!(slots, SLOTS_MAX);
        for word in ["ubd0dc=/run/t/a/disk", "ubd15rdc=/run/t/b/disk"] {
            assert!(words.contains(&word.into()), "{words:?}");
        }
        for wrong in ["/run/a:b", "/run/a,b", "/run/a b", "/run/\u{e4}"] {
            let why = line(&spec(""), Path::new("/i"), WIRES, 40, &[file(40, wrong, false)]).unwrap_err();
            assert!(why.contains("run directory"), "{why}");
        }
        assert!(line(&spec(""), Path::new("/i"), WIRES, 40, &[file(56, "/a", false)]).is_err());
        assert!(limit().contains("driver qemu"));
    }
}
