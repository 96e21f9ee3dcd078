//! The command line of a User-mode Linux kernel.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::Path;

use crate::traits::VmSpec;

/// The kernel takes a line of 4096 bytes (`COMMAND_LINE_SIZE`), its own name and the spaces included.
const LINE_LEN_MAX: usize = 4096;

/// One slot: ` virtio_uml.device=NNN:2`.
const SLOT_LEN: usize = 24;

/// Devices prepared for disks that come later, beyond those at the start, where the machine says nothing.
pub(super) const SPARE_SLOTS: u16 = 16;

/// As many devices as the kernel copes with. It is compiled with 64 interrupts (`NR_IRQS` of arch/um), the first 19 of
/// which are its own (`UM_FIRST_DYN_IRQ`); a device takes one, consoles and serial lines four: so Debian's 6.1 starts
/// with 40 disks and does not get to a shell with 44, and no option of it changes that.
pub(super) const SLOTS_MAX: u16 = 40;

/// Least memory of a guest with our initramfs.
const MEMORY_MIN: u64 = 48 << 20;

/// Arguments that reach out of the guest into this machine, or that the driver sets itself: their beginnings. The
/// kernel reads `-` and `_` alike.
const RESERVED: [&str; 23] = [
    "mem=",
    "umid=",
    "uml_dir=",
    "initrd=",
    "hostfs",
    "ubd",
    "udb",
    "con",
    "ssl",
    "eth",
    "vec",
    "virtio_uml.",
    "iomem",
    "xterm",
    "debug",
    "gdb",
    "mode=",
    "fake_ide",
    "tty_log",
    "noreboot",
    "redirect",
    "port",
    "time_travel",
];

/// The descriptors that a guest gets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wires {
    /// Console: what is typed, what is said.
    pub console: (RawFd, RawFd),
    /// Agent: commands, answers.
    pub agent: (RawFd, RawFd),
}

/// Why a machine's own arguments cannot be used.
pub(super) fn refused(spec: &VmSpec) -> Option<String> {
    if spec.memory < MEMORY_MIN {
        return Some(format!("{} bytes of memory are too few: at least {MEMORY_MIN}", spec.memory));
    }
    if spec.kernel_args.chars().any(|c| c.is_control()) {
        return Some("PV_args has a control character".into());
    }
    spec.kernel_args.split(' ').find_map(|word| {
        let plain = word.replace('-', "_");
        // The console of the guest's own choice is no wire to this machine.
        let is_reserved =
            !plain.starts_with("console") && RESERVED.iter().any(|start| plain.starts_with(start));
        let reaches_out = is_reserved || plain == "rootfstype=hostfs";
        reaches_out
            .then(|| format!("PV_args may not say '{word}': it is about this host, not about the guest"))
    })
}

/// Everything but the devices.
fn base(spec: &VmSpec, initrd: &Path, wires: Wires) -> Vec<OsString> {
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
    if !spec.kernel_args.split(' ').any(|word| word.starts_with("loglevel=") || word == "quiet") {
        line.push("quiet".into());
    }
    line.extend(spec.kernel_args.split(' ').filter(|word| !word.is_empty()).map(OsString::from));
    line
}

/// How many devices a machine is started with: as it says, at least those in use and some to spare, at most what
/// fits into the line.
pub(super) fn slots(spec: &VmSpec, used: u16, line_len: usize) -> u16 {
    let wanted: u16 = spec.platform.get("max_disks").and_then(|text| text.parse().ok()).unwrap_or(0);
    let room = LINE_LEN_MAX.saturating_sub(line_len + 64) / SLOT_LEN;
    let room = u16::try_from(room).unwrap_or(0).min(SLOTS_MAX);
    wanted.max(used.saturating_add(SPARE_SLOTS)).min(room)
}

/// The arguments, and the number of devices among them. `used` devices have disks at the start.
pub(super) fn line(
    spec: &VmSpec,
    initrd: &Path,
    wires: Wires,
    used: u16,
) -> Result<(Vec<OsString>, u16), String> {
    let mut line = base(spec, initrd, wires);
    let len: usize = line.iter().map(|word| word.len() + 1).sum();
    let slots = slots(spec, used, len);
    if slots < used {
        return Err(format!(
            "the kernel's command line of {LINE_LEN_MAX} bytes has room for {slots} disks beside the machine's own \
             arguments ({len} bytes), and {used} are needed: shorten PV_args"
        ));
    }
    // Relative names: the kernel is started in the machine's directory. 2 is a block device.
    line.extend((0..slots).map(|slot| OsString::from(format!("virtio_uml.device={slot}:2"))));
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
        }
    }

    const WIRES: Wires = Wires { console: (10, 11), agent: (12, 13) };

    #[test]
    fn arguments_that_reach_out_of_the_guest_are_refused() {
        for word in
            ["ubd0=/etc/shadow", "con1=fd:3", "virtio-uml.device=/x:2", "rootfstype=hostfs", "hostfs=/"]
        {
            assert!(refused(&spec(&format!("quiet {word}"))).is_some(), "{word}");
        }
        assert!(refused(&spec("quiet\ncon0=fd:1")).is_some());
        for line in ["", "root=/dev/vda1 ro quiet console=tty0", "tapio_run=true"] {
            assert_eq!(refused(&spec(line)), None, "{line}");
        }
        assert!(refused(&VmSpec { memory: 1 << 20, ..spec("") }).is_some());
    }

    #[test]
    fn the_line_always_fits() {
        for args in ["", "root=/dev/vda ro", &"x".repeat(2000)] {
            let mut spec = spec(args);
            spec.platform.insert("max_disks".into(), "255".into());
            let (line, slots) = line(&spec, Path::new("/usr/lib/tapio/initramfs"), WIRES, 8).unwrap();
            let len: usize =
                "/usr/bin/linux.uml".len() + line.iter().map(|word| word.len() + 1).sum::<usize>();
            assert!(len < LINE_LEN_MAX, "{len} with {slots} devices");
            assert!(slots == SLOTS_MAX || args.len() == 2000, "{slots}");
            assert!(!line.iter().any(|word| word == "con0=fd:0"), "a name is no argument");
        }
        let error = line(&spec(&"x".repeat(3900)), Path::new("/i"), WIRES, 8).unwrap_err();
        assert!(error.contains("shorten PV_args"), "{error}");
        assert_eq!(super::slots(&spec(""), 8, 500), 24, "some to spare");
    }
}
