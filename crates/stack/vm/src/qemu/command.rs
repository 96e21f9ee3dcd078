//! QEMU's command line.

use std::ffi::OsString;
use std::path::Path;

use super::balloon::{self, MEMORY_MIN};
use super::cd;
use super::qmp::AGENT_PORT;
use crate::arguments::not_plain;
use crate::firmware::{FIRMWARE_TEXT, FIRMWARE_TEXTS, firmware_text_is_plain};
use crate::traits::{BOOT_ORDER, DiskSpec, VCPUS_MAX, VmSpec};

/// Disks behind one bridge: its places 1 to 31.
const PER_BRIDGE: u16 = 31;

/// More bridges than this do not get their windows of ports from the firmware (36 KiB in windows of 4), and the guest
/// does not start.
const BRIDGES_MAX: u16 = 8;

/// First slot of the bridges on the root bus, and of the disks for which no bridge is left.
const BRIDGES_AT: u16 = 0x8;
pub(super) const REST_AT: u16 = 0x18;

/// Slots from here to those are of network interfaces (`vif`).
#[cfg(test)]
pub(super) const BRIDGES_END: u16 = BRIDGES_AT + BRIDGES_MAX;

/// Slots of the guest agent's serial port, and of a SCSI controller.
const SERIAL_AT: u16 = 0x4;
const SCSI_AT: u16 = 0x5;

/// Slot of the balloon.
const BALLOON_AT: u16 = 0x6;

/// Slots for disks if `VM.platform` does not set their number.
const PLACES: u16 = 255;

/// Disks up to this place have interrupts of their own. A processor has some 200 of them, a disk takes one for each
/// queue and one more; the others share lines, and have their registers in ports, as virtio had before 1.0: the
/// emulator looks at every region of memory for each disk whenever a guest maps one, which took minutes of the start
/// of a guest with 255 disks.
pub(super) const OWN_INTERRUPTS: u16 = 48;

/// The key of a platform for the machine type.
pub(super) const MACHINE: &str = "machine";

/// Longest command line of a kernel: what is longer is cut off in silence (`COMMAND_LINE_SIZE` of Linux on x86, less
/// its end).
const CMDLINE_LEN_MAX: usize = 2047;

/// What boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kernel<'a> {
    /// The kernel's file.
    pub file: &'a Path,
    /// Its initramfs.
    pub ramdisk: Option<&'a Path>,
    /// Whether that is ours, with an agent.
    pub has_agent: bool,
}

/// What its guest begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Firmware or a kernel.
    Boot,
    /// Memory and devices of an earlier emulator.
    Memory,
}

/// A comma in a value is written twice.
fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

/// A word of the platform that goes into an option: nothing that could begin another one.
fn word<'a>(spec: &'a VmSpec, key: &str, also: &str, default: &'a str) -> Result<&'a str, String> {
    let value = spec.platform.get(key).map_or(default, String::as_str);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c) || also.contains(c);
    if value.is_empty() || value.len() > 256 || value.starts_with('-') || !value.chars().all(is_plain) {
        return Err(format!("platform:{key} is {value:?}: letters, digits and ._-{also} are possible"));
    }
    Ok(value)
}

/// Devices that a guest has only if its platform says so. Each that is emulated and polled by its guest costs the host
/// processor time while the guest does nothing: a USB controller with a tablet most of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Devices {
    /// `hvm_serial`: a serial console, unless it is `none`.
    pub has_console: bool,
    /// `vnc`: a screen.
    pub has_screen: bool,
    /// `usb`: a USB controller.
    pub has_usb: bool,
    /// `usb_tablet`: a pointer at it, which has one also without `usb`.
    pub has_tablet: bool,
    /// `parallel`: a port where nothing is connected, unless it is `none`.
    pub has_parallel: bool,
}

impl Devices {
    /// What a platform says.
    ///
    /// # Errors
    /// A sentence: the key, its value and what is possible.
    pub(super) fn of(spec: &VmSpec) -> Result<Self, String> {
        let truth = |key: &str| match spec.platform.get(key).map(String::as_str) {
            None | Some("" | "false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(other) => Err(format!("platform:{key} is {other:?}: true and false are possible")),
        };
        let port = |key: &str, default: bool, known: &[&str]| match spec.platform.get(key).map(String::as_str)
        {
            None | Some("") => Ok(default),
            Some("none") => Ok(false),
            Some(word) if known.contains(&word) => Ok(true),
            Some(other) => {
                Err(format!("platform:{key} is {other:?}: none and {} are possible", known.join(", ")))
            }
        };
        let has_tablet = truth("usb_tablet")?;
        Ok(Self {
            has_console: port("hvm_serial", true, &["pty"])?,
            has_screen: truth("vnc")?,
            has_usb: truth("usb")? || has_tablet,
            has_tablet,
            has_parallel: port("parallel", false, &["null"])?,
        })
    }
}

/// The rank of a disk when the firmware looks for something to boot: the place of its letter in `HVM_boot_params:order`
/// (`c` disks, `d` CDs), and among those its position. None boots that is not bootable, unless its letter is there.
pub(super) fn boot_index(spec: &VmSpec, disk: &DiskSpec) -> Option<u32> {
    let position = u32::from(disk.position) + 1;
    let letter = if disk.is_cd { 'd' } else { 'c' };
    match spec.platform.get(BOOT_ORDER).filter(|order| !order.is_empty()) {
        None => disk.is_bootable.then_some(position),
        Some(order) => {
            let rank = order.chars().position(|one| one.eq_ignore_ascii_case(&letter))?;
            // A data disk of a VM that names its boot disk is tried behind it.
            let behind = if disk.is_bootable || disk.is_cd { 0 } else { 256 };
            Some(u32::try_from(rank).ok()? * 512 + behind + position)
        }
    }
}

/// The processors that it starts with, and the most that it can have.
fn vcpus(spec: &VmSpec) -> (u32, u32) {
    let count = spec.vcpus.clamp(1, 255);
    let most = spec.platform.get(VCPUS_MAX).and_then(|text| text.parse().ok()).unwrap_or(count);
    (count, most.clamp(count, 255))
}

/// Queues of its disks: for the processors that it may come to have, because an emulator that reads its memory offers
/// the same.
pub(super) fn queues(spec: &VmSpec) -> u16 {
    let processors = u16::try_from(vcpus(spec).1.min(16)).unwrap_or(1);
    let queues = spec.platform.get("queues").and_then(|text| text.parse().ok()).unwrap_or(4);
    // More would only take interrupts.
    queues.clamp(1, processors)
}

/// Its processors, in sockets of as many cores as its platform says. Some systems use only so many sockets.
///
/// # Errors
/// A sentence: the key, its value and what is possible.
fn processors(spec: &VmSpec) -> Result<String, String> {
    let (count, most) = vcpus(spec);
    let mut option = count.to_string();
    if most > count {
        option.push_str(&format!(",maxcpus={most}"));
    }
    let Some(text) = spec.platform.get("cores-per-socket").filter(|text| !text.is_empty()) else {
        return Ok(option);
    };
    match text.parse::<u32>() {
        Ok(cores) if cores > 0 && most.is_multiple_of(cores) => {
            Ok(format!("{option},sockets={},cores={cores},threads=1", most / cores))
        }
        _ => Err(format!(
            "platform:cores-per-socket is {text:?}: a number by which the VM's {most} processors (VCPUs-max) can be divided \
             is possible"
        )),
    }
}

/// Values of `-smbios`, one for each structure of which the VM has texts.
///
/// # Errors
/// A sentence: the key, its value and what is possible.
fn smbios(spec: &VmSpec) -> Result<Vec<String>, String> {
    let mut options: Vec<String> = Vec::new();
    let mut last = None;
    for known in FIRMWARE_TEXTS {
        let value = spec.platform.get(&format!("{FIRMWARE_TEXT}{}", known.key));
        let Some(value) = value.filter(|value| !value.is_empty()) else { continue };
        if !firmware_text_is_plain(value) {
            return Err(format!("bios_strings:{} is {value:?}: printable ASCII is possible", known.key));
        }
        let pair = format!("{}={}", known.option, escaped(value));
        match options.last_mut().filter(|_| last == Some(known.structure)) {
            Some(option) => *option = format!("{option},{pair}"),
            None => options.push(format!("type={},{pair}", known.structure)),
        }
        last = Some(known.structure);
    }
    Ok(options)
}

/// Bridges for as many disks as the VM shall have.
pub(super) fn bridges(spec: &VmSpec) -> u16 {
    let places = spec.platform.get("max_disks").and_then(|text| text.parse().ok()).unwrap_or(PLACES);
    places.clamp(1, PLACES).div_ceil(PER_BRIDGE).min(BRIDGES_MAX)
}

/// Where the disk of a position is: bus and place.
pub(super) fn place_of(spec: &VmSpec, position: u8) -> Option<(String, String)> {
    let (bridge, slot) = (u16::from(position) / PER_BRIDGE, u16::from(position) % PER_BRIDGE);
    match bridge {
        BRIDGES_MAX.. if bridges(spec) == BRIDGES_MAX => {
            Some(("pci.0".into(), format!("{:#x}", REST_AT + slot)))
        }
        _ if bridge < bridges(spec) => Some((format!("b{bridge}"), format!("{:#x}", slot + 1))),
        _ => None,
    }
}

/// What the kernel is told.
///
/// # Errors
/// A sentence: why the VM's own arguments cannot be used.
pub(super) fn arguments(spec: &VmSpec, has_agent: bool) -> Result<String, String> {
    if let Some(why) = not_plain(&spec.kernel_args) {
        return Err(why);
    }
    // An emulated timer that a busy host serves late is no defect of the board, over which the kernel would panic.
    let console = if Devices::of(spec)?.has_console { "console=ttyS0 " } else { "" };
    let mut arguments = format!("{console}panic=-1 no_timer_check");
    if has_agent {
        arguments.push_str(" quiet tapio_agent=ttyS1");
    }
    if !spec.kernel_args.is_empty() {
        arguments.push(' ');
        arguments.push_str(&spec.kernel_args);
    }
    if arguments.len() > CMDLINE_LEN_MAX {
        return Err(format!(
            "its kernel's command line has {} bytes and {CMDLINE_LEN_MAX} reach a guest: shorten PV_args, which has {}",
            arguments.len(),
            spec.kernel_args.len()
        ));
    }
    Ok(arguments)
}

/// The arguments. `accel` is `kvm` or `tcg`.
pub(super) fn line(
    spec: &VmSpec,
    kernel: Option<&Kernel<'_>>,
    accel: &str,
    origin: Origin,
) -> Result<Vec<OsString>, String> {
    if spec.memory < MEMORY_MIN {
        return Err(format!("{} bytes of memory are too few: at least {MEMORY_MIN}", spec.memory));
    }
    if let Some(why) = not_plain(&spec.kernel_args) {
        return Err(why);
    }
    let most = balloon::most(spec);
    let mib = most.unwrap_or(spec.memory) >> 20;
    let kind = word(spec, MACHINE, "", "pc")?;
    if !(kind == "pc" || kind.starts_with("pc-i440fx")) {
        return Err(format!(
            "platform:machine is {kind:?}: only pc and its versions (pc-i440fx-...) have the bridges for disks"
        ));
    }
    let (accel, cpu) = match accel {
        "kvm" => ("kvm", "host"),
        // One thread for all processors: with one each, the emulator of QEMU 7.2 now and then runs a half-patched
        // instruction of a Linux guest.
        _ => ("tcg,thread=single", "qemu64"),
    };
    let cpu = word(spec, "cpu", ",+=", cpu)?;
    let name: String = spec.name.chars().filter(|c| !c.is_control()).take(64).collect();
    let mut line: Vec<OsString> = Vec::new();
    let mut option = |name: &str, value: &str| line.extend([OsString::from(name), OsString::from(value)]);
    option("-name", &format!("guest={}", escaped(&name)));
    option("-machine", &format!("{kind},memory-backend=memory"));
    // Disk processes map the guest's memory: a shared mapping of a file that can be handed to them.
    option("-object", &format!("memory-backend-memfd,id=memory,size={mib}M,share=on"));
    option("-accel", accel);
    option("-cpu", cpu);
    option("-smp", &processors(spec)?);
    option("-m", &format!("{mib}M"));
    for structure in smbios(spec)? {
        option("-smbios", &structure);
    }
    option("-display", "none");
    option("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    // The emulator stays, paused, until the daemon has read that its guest ended, and why.
    option("-action", "shutdown=pause,panic=pause");
    // Relative names: it is started in its own part of the VM's directory.
    option("-chardev", "socket,id=qmp,path=qmp,server=on,wait=off");
    option("-mon", "chardev=qmp,mode=control");
    let chosen = Devices::of(spec)?;
    if chosen.has_console {
        option(
            "-chardev",
            "socket,id=console,path=console,server=on,wait=off,logfile=../console.log,logappend=on",
        );
        option("-device", "isa-serial,index=0,chardev=console");
    }
    option("-chardev", "socket,id=agent,path=agent,server=on,wait=off");
    option("-device", "isa-serial,index=1,chardev=agent");
    option("-chardev", &format!("socket,id={AGENT_PORT},path={AGENT_PORT},server=on,wait=off"));
    option("-device", &format!("virtio-serial-pci,id=serial,addr={SERIAL_AT:#x},max_ports=2"));
    option(
        "-device",
        &format!(
            "virtserialport,id={AGENT_PORT},bus=serial.0,nr=1,chardev={AGENT_PORT},name=org.qemu.guest_agent.0"
        ),
    );
    option("-device", "pvpanic");
    if most.is_some() {
        option("-device", &format!("virtio-balloon-pci,id=balloon,addr={BALLOON_AT:#x}"));
    }
    let bus = cd::Bus::of(spec)?;
    if bus == cd::Bus::Scsi {
        option("-device", &format!("virtio-scsi-pci,id=scsi,addr={SCSI_AT:#x}"));
    }
    for one in &spec.drives {
        let words: Vec<String> = cd::options(spec, one, boot_index(spec, one))?
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        option("-device", words.join(",").trim_start_matches("driver="));
    }
    if chosen.has_screen {
        // Without a display of the emulator's, which would look at the screen every three seconds: see `screen`.
        option("-device", "VGA,addr=0x2");
    }
    if chosen.has_usb {
        option("-device", "piix3-usb-uhci,id=usb,addr=0x3");
    }
    if chosen.has_tablet {
        option("-device", "usb-tablet,bus=usb.0");
    }
    if chosen.has_parallel {
        option("-chardev", "null,id=parallel");
        option("-device", "isa-parallel,index=0,chardev=parallel");
    }
    for bridge in 0..bridges(spec) {
        let address = BRIDGES_AT + bridge;
        option(
            "-device",
            &format!("pci-bridge,id=b{bridge},chassis_nr={},bus=pci.0,addr={address:#x}", bridge + 1),
        );
    }
    line.extend(["-nodefaults", "-no-user-config", "-S"].map(OsString::from));
    if origin == Origin::Memory {
        line.extend(["-incoming", "defer"].map(OsString::from));
    }
    if let Some(kernel) = kernel {
        line.extend(["-kernel".into(), kernel.file.into()]);
        if let Some(ramdisk) = kernel.ramdisk {
            line.extend(["-initrd".into(), ramdisk.into()]);
        }
        let arguments = arguments(spec, kernel.has_agent)?;
        line.extend(["-append".into(), arguments.into()]);
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use uuid::Uuid;

    use super::*;
    use crate::traits::MEMORY_MAX;

    fn spec(platform: &[(&str, &str)]) -> VmSpec {
        VmSpec {
            uuid: Uuid::new_v4(),
            name: "a,debug-threads=on\n-monitor".into(),
            memory: 256 << 20,
            vcpus: 2,
            kernel: None,
            ramdisk: None,
            kernel_args: String::new(),
            platform: platform
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect::<BTreeMap<_, _>>(),
            drives: Vec::new(),
        }
    }

    #[test]
    fn names_begin_no_options() {
        let line = line(&spec(&[]), None, "tcg", Origin::Boot).unwrap();
        assert!(line.contains(&"guest=a,,debug-threads=on-monitor".into()), "{line:?}");
        for (key, value) in [
            ("machine", "pc,dump=on"),
            ("machine", "q35"),
            ("cpu", "x y"),
            ("cpu", "-monitor"),
            ("machine", ""),
        ] {
            assert!(super::line(&spec(&[(key, value)]), None, "kvm", Origin::Boot).is_err(), "{key}={value}");
        }
        assert!(super::line(&spec(&[("cpu", "max,+avx,-smap")]), None, "kvm", Origin::Boot).is_ok());
        assert!(super::line(&VmSpec { memory: 1, ..spec(&[]) }, None, "kvm", Origin::Boot).is_err());
        assert!(
            super::line(&VmSpec { kernel_args: "a\nb".into(), ..spec(&[]) }, None, "kvm", Origin::Boot)
                .is_err()
        );
    }

    /// Whatever text a VM carries, it is refused or stays within the one value that it belongs to.
    #[test]
    fn hostile_text_becomes_no_option() {
        let kernel =
            Kernel { file: Path::new("/boot/k"), ramdisk: Some(Path::new("/boot/r")), has_agent: true };
        let words = |spec: &VmSpec| line(spec, Some(&kernel), "kvm", Origin::Boot);
        let bare = words(&VmSpec { name: String::new(), ..spec(&[]) }).unwrap();
        // Where a VM's text may be: after -name, -machine, -cpu, -append, and -smp (a number of cores).
        let own: Vec<usize> = ["-name", "-machine", "-cpu", "-append", "-smp"]
            .map(|option| 1 + bare.iter().position(|w| w == option).unwrap())
            .into();
        let hostile: Vec<String> = (0..=0x17f_u32)
            .filter_map(char::from_u32)
            .flat_map(|c| {
                [
                    format!("{c}"),
                    format!("a{c}b=c"),
                    format!("{c}-monitor"),
                    format!("x,{c}id=y,file=/etc/shadow"),
                ]
            })
            .chain(["-- -monitor stdio".into(), ",,,".into(), "x".repeat(70_000), "a=b,c=d,".repeat(400)])
            .collect();
        for text in &hostile {
            for key in
                ["machine", "cpu", "accel", "cores-per-socket", "vnc", "queues", "max_disks", "unknown"]
            {
                let Ok(line) = words(&VmSpec { name: String::new(), ..spec(&[(key, text)]) }) else {
                    continue;
                };
                // What these two are for.
                if (key == "vnc" && text == "1") || (key == "max_disks" && text.parse::<u16>().is_ok()) {
                    continue;
                }
                assert_eq!(line.len(), bare.len(), "{key}={text:?}");
                let changed = line.iter().zip(&bare).enumerate().filter(|(_, (is, was))| is != was);
                let changed: Vec<usize> = changed.map(|(at, _)| at).collect();
                assert!(changed.iter().all(|at| own.contains(at)), "{key}={text:?}");
                let plain = |c: char| c.is_ascii_alphanumeric() || "._-,+=".contains(c);
                assert!(line[own[2]].to_str().unwrap().chars().all(plain), "{key}={text:?}");
            }
            let named = words(&VmSpec { name: text.clone(), ..spec(&[]) }).unwrap();
            let name = named[own[0]].to_str().unwrap();
            assert!(!name.replace(",,", "").contains(','), "{name}");
            assert_eq!(named.len(), bare.len());
            let Ok(line) = words(&VmSpec { name: String::new(), kernel_args: text.clone(), ..spec(&[]) })
            else {
                continue;
            };
            let append = line[own[3]].to_str().unwrap();
            assert!(append.len() <= CMDLINE_LEN_MAX && append.starts_with(bare[own[3]].to_str().unwrap()));
            assert_eq!((line.len(), &line[..own[3]]), (bare.len(), &bare[..own[3]]), "{text:?}");
        }
    }

    #[test]
    fn every_position_has_its_own_place() {
        let spec = spec(&[]);
        let places: BTreeSet<_> = (0..=254).map(|position| place_of(&spec, position).unwrap()).collect();
        assert_eq!(places.len(), 255);
        assert_eq!(bridges(&spec), 8);
        assert_eq!(place_of(&spec, 254), Some(("pci.0".into(), "0x1e".into())));
        let few = super::tests::spec(&[("max_disks", "8")]);
        assert_eq!((bridges(&few), place_of(&few, 30).is_some(), place_of(&few, 31)), (1, true, None));
    }

    #[test]
    fn queues_follow_the_processors_within_bounds() {
        assert_eq!(queues(&spec(&[])), 2);
        assert_eq!(queues(&spec(&[("queues", "900")])), 2);
        assert_eq!(queues(&VmSpec { vcpus: 64, ..spec(&[("queues", "900")]) }), 16);
        assert_eq!(queues(&VmSpec { vcpus: 64, ..spec(&[]) }), 4);
    }

    #[test]
    fn processors_are_in_sockets_of_as_many_cores_as_the_platform_says() {
        let of = |vcpus, cores: &str| processors(&VmSpec { vcpus, ..spec(&[("cores-per-socket", cores)]) });
        assert_eq!((processors(&spec(&[])), of(4, "")), (Ok("2".into()), Ok("4".into())));
        assert_eq!(of(4, "2"), Ok("4,sockets=2,cores=2,threads=1".into()));
        for wrong in ["0", "3", "8", "-1", "2,maxcpus=9"] {
            assert!(of(4, wrong).unwrap_err().contains("cores-per-socket"), "{wrong}");
        }
    }

    #[test]
    fn texts_of_the_firmware_stay_within_their_values() {
        let key = |name: &str| format!("{FIRMWARE_TEXT}{name}");
        let of = |pairs: &[(&str, &str)]| {
            let pairs: Vec<(String, &str)> = pairs.iter().map(|(name, text)| (key(name), *text)).collect();
            let pairs: Vec<(&str, &str)> = pairs.iter().map(|(name, text)| (name.as_str(), *text)).collect();
            smbios(&spec(&pairs))
        };
        assert_eq!(of(&[("system-version", "")]), Ok(Vec::new()));
        let texts = [
            ("bios-vendor", "A, Inc.,file=/etc/shadow"),
            ("system-product-name", "P"),
            ("system-manufacturer", "M"),
            ("enclosure-asset-tag", "7"),
        ];
        let expected =
            ["type=0,vendor=A,, Inc.,,file=/etc/shadow", "type=1,manufacturer=M,product=P", "type=3,asset=7"];
        assert_eq!(of(&texts).unwrap(), expected);
        for wrong in ["a\nb", "\u{e9}", &"x".repeat(513)] {
            assert!(of(&[("bios-vendor", wrong)]).unwrap_err().contains("bios_strings:bios-vendor"));
        }
    }

    #[test]
    fn the_emulator_has_the_most_memory_and_a_balloon() {
        let words = |platform: &[(&str, &str)]| {
            let line = line(&spec(platform), None, "tcg", Origin::Boot).unwrap();
            line.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
        };
        let room = words(&[(MEMORY_MAX, "512")]);
        assert!(room.contains("size=512M") && room.contains("-m 512M"), "{room}");
        assert!(room.contains("virtio-balloon-pci,id=balloon,addr=0x6"), "{room}");
        // The memory that it shall have is there in any case.
        assert!(words(&[(MEMORY_MAX, "1")]).contains("-m 256M"));
        for without in
            [&[][..], &[(MEMORY_MAX, "")], &[(MEMORY_MAX, "x,y")], &[(MEMORY_MAX, "99999999999999999999")]]
        {
            let line = words(without);
            assert!(!line.contains("balloon") && line.contains("-m 256M"), "{line}");
        }
    }

    #[test]
    fn there_is_room_for_as_many_processors_as_the_vm_may_have() {
        let of = |vcpus, platform: &[(&str, &str)]| processors(&VmSpec { vcpus, ..spec(platform) });
        assert_eq!(of(1, &[(VCPUS_MAX, "4")]), Ok("1,maxcpus=4".into()));
        assert_eq!(of(4, &[(VCPUS_MAX, "4")]), Ok("4".into()), "as it was before the last one was added");
        let cores = ("cores-per-socket", "2");
        assert_eq!(of(1, &[(VCPUS_MAX, "4"), cores]), Ok("1,maxcpus=4,sockets=2,cores=2,threads=1".into()));
        assert!(of(2, &[(VCPUS_MAX, "3"), cores]).unwrap_err().contains("3 processors"));
        assert_eq!(of(2, &[(VCPUS_MAX, "900")]), Ok("2,maxcpus=255".into()));
        for nonsense in ["", "x,y", "1", "-3"] {
            assert_eq!(of(2, &[(VCPUS_MAX, nonsense)]), Ok("2".into()), "{nonsense}");
        }
        assert_eq!(queues(&spec(&[(VCPUS_MAX, "3")])), 3);
    }

    #[test]
    fn the_platform_says_which_devices_there_are() {
        let words = |platform: &[(&str, &str)]| {
            let line = line(&spec(platform), None, "tcg", Origin::Boot).unwrap();
            line.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
        };
        let plain = words(&[]);
        assert!(
            plain.contains("isa-serial,index=0,chardev=console") && plain.contains("index=1,chardev=agent")
        );
        for device in ["usb", "parallel", "vnc", "VGA"] {
            assert!(!plain.contains(device), "{device}: {plain}");
        }
        let dense = [("usb", "false"), ("usb_tablet", "false"), ("hvm_serial", "none"), ("parallel", "none")];
        let dense = words(&dense);
        assert!(!dense.contains("console") && dense.contains("index=1,chardev=agent"), "{dense}");
        assert!(!dense.contains("usb") && !dense.contains("parallel"), "{dense}");
        let full =
            words(&[("usb_tablet", "true"), ("hvm_serial", "pty"), ("parallel", "null"), ("vnc", "1")]);
        for device in
            ["piix3-usb-uhci,id=usb", "usb-tablet,bus=usb.0", "isa-parallel", "VGA,addr=0x2", "index=0"]
        {
            assert!(full.contains(device), "{device}: {full}");
        }
        assert!(full.contains("-display none") && !full.contains("-vnc"), "{full}");
        assert!(words(&[("usb", "true")]).contains("uhci") && !words(&[("usb", "true")]).contains("tablet"));
        for wrong in [("usb", "maybe"), ("hvm_serial", "tcp:0.0.0.0:1"), ("parallel", "/dev/lp0")] {
            let why = line(&spec(&[wrong]), None, "tcg", Origin::Boot).unwrap_err();
            assert!(why.contains(wrong.0) && why.contains(wrong.1), "{why}");
        }
    }

    #[test]
    fn disks_boot_in_the_order_of_their_letters() {
        let disk = |position, is_cd, is_bootable| DiskSpec {
            vbd: uuid::Uuid::new_v4(),
            position,
            read_only: is_cd,
            is_cd,
            is_bootable,
        };
        let (system, data, cd) = (disk(0, false, true), disk(1, false, false), disk(3, true, false));
        let order = |order: &str, disk: &DiskSpec| boot_index(&spec(&[(BOOT_ORDER, order)]), disk);
        assert_eq!(boot_index(&spec(&[]), &system), Some(1));
        assert_eq!((boot_index(&spec(&[]), &data), order("", &cd)), (None, None));
        assert!(order("cd", &system) < order("cd", &data) && order("cd", &data) < order("cd", &cd));
        assert!(order("dcn", &cd) < order("dcn", &system));
        assert_eq!((order("n", &system), order("c", &cd)), (None, None));
    }
}
