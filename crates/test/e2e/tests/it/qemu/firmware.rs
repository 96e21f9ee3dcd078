//! What starts a guest of QEMU: BIOS and UEFI.

use std::time::Duration;

use serde_json::json;
use tapio_e2e::disk::text;
use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;
use tapio_e2e::process::run_with_input;

use super::kernel;
use crate::machines::Guest;

const LIMIT: Duration = Duration::from_secs(180);

/// A first sector that writes a text to the serial port, at each tick of the clock.
pub fn boot_sector(said: &str) -> Vec<u8> {
    // xor ax,ax; mov ds,ax; mov si,TEXT; next: lodsb; or al,al; jz wait; mov dx,0x3f8; out dx,al; jmp next;
    // wait: sti; hlt; jmp 0
    let mut sector = vec![
        0x31, 0xc0, 0x8e, 0xd8, 0xbe, 0x16, 0x7c, 0xac, 0x08, 0xc0, 0x74, 0x06, 0xba, 0xf8, 0x03, 0xee, 0xeb,
        0xf5, 0xfb, 0xf4, 0xeb, 0xea,
    ];
    sector.extend(said.bytes());
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

/// The processors on which each thread of the guest's emulator may run.
fn allowed(guest: &Guest) -> Vec<String> {
    let vm = guest.value(&["vm-list", "name-label=guest", "--minimal"]).replace('-', "");
    let pid = guest.world.scratch.join("run/vm").join(vm).join("pid");
    let pid = std::fs::read_to_string(pid).expect("its process");
    let threads = std::fs::read_dir(format!("/proc/{}/task", pid.trim())).expect("its threads");
    let allowed = threads.flatten().map(|thread| {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        line.unwrap_or_default().trim().to_owned()
    });
    // One that has ended since has no such line.
    allowed.filter(|list| !list.is_empty()).collect()
}

/// Waits until a text has come on the guest's console.
#[track_caller]
fn says(guest: &Guest, what: &str) {
    let mut command = guest.world.xe();
    let (until, timeout) = (format!("until={what}"), format!("timeout={}", LIMIT.as_secs()));
    command.args(["console", "vm=guest", &until, &timeout]);
    let nothing = std::fs::File::open("/dev/null").expect("it is there");
    let said = run_with_input(&mut command, Some(nothing), LIMIT);
    assert!(said.stdout.contains(what), "{said:?}");
}

/// As a cloud image is installed: a raw image on the disk of the template for such systems, and settings on a CD.
#[test]
fn a_guest_boots_from_an_image_by_its_bios() {
    needs!(Qemu::TOOLS[0]);
    let more = ["platform:accel=tcg", "VCPUs-params:mask=0"];
    let guest = Guest::install("Other install media", LIMIT, &more);
    let image = guest.world.scratch.join("image.raw");
    let mut bytes = boot_sector("started by its BIOS\r\n");
    bytes.resize(1 << 20, 0);
    std::fs::write(&image, bytes).expect("an image");
    let (vdi, file) = (format!("uuid={}", guest.vdi_at(0)), format!("filename={}", text(&image)));
    guest.ok(&["vdi-import", &vdi, &file, "format=raw"]);
    let user = guest.world.scratch.join("user-data");
    std::fs::write(&user, "#cloud-config\n").expect("settings");
    guest.ok(&["vm-cloud-init-add", "vm=guest", &format!("user-data={}", text(&user))]);
    guest.ok(&["vm-start", "vm=guest"]);
    says(&guest, "started by its BIOS");
    // Every thread of the emulator is where the VM's mask says: its main loop, and that of the guest's processors.
    let allowed = allowed(&guest);
    assert!(allowed.len() >= 2 && allowed.iter().all(|list| list == "0"), "{allowed:?}");
    guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    guest.world.finish();
}

/// A program of UEFI that writes a text to the serial port, at each tick of the clock: PE32+, one section, at any
/// place.
fn uefi_program(said: &str) -> Vec<u8> {
    // lea rsi,[rip+TEXT]; next: lodsb; test al,al; jz wait; mov dx,0x3f8; out dx,al; jmp next; wait: sti; hlt; jmp 0
    let code = [
        0x48, 0x8d, 0x35, 0x10, 0, 0, 0, 0xac, 0x84, 0xc0, 0x74, 0x07, 0x66, 0xba, 0xf8, 0x03, 0xee, 0xeb,
        0xf4, 0xfb, 0xf4, 0xeb, 0xe9,
    ];
    let mut file = vec![0; 0x200];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"MZ");
    put(0x3c, &0x40_u32.to_le_bytes());
    // The COFF header: x86-64, one section, 240 bytes of optional header, executable.
    put(0x40, b"PE\0\0\x64\x86\x01\0");
    put(0x54, &[0xf0, 0, 0x22, 0]);
    // The optional header: PE32+, code of 0x200 bytes, entry and code at 0x1000.
    put(0x58, &0x20b_u16.to_le_bytes());
    for (at, value) in [(0x5c, 0x200), (0x68, 0x1000), (0x6c, 0x1000), (0x78, 0x1000), (0x7c, 0x200)] {
        put(at, &u32::to_le_bytes(value));
    }
    // Of the image 0x2000 bytes, of headers 0x200; an application; 16 directories, all empty.
    for (at, value) in [(0x90, 0x2000), (0x94, 0x200), (0x9c, 10), (0xc4, 16)] {
        put(at, &u32::to_le_bytes(value));
    }
    put(0x148, b".text\0\0\0");
    for (at, value) in [(0x150, 0x200), (0x154, 0x1000), (0x158, 0x200), (0x15c, 0x200), (0x16c, 0x6000_0020)]
    {
        put(at, &u32::to_le_bytes(value));
    }
    file.extend(code);
    file.extend(said.bytes());
    file.resize(0x400, 0);
    file
}

/// A disk with a FAT12 file system and `\EFI\BOOT\BOOTX64.EFI`, where UEFI looks on each disk.
fn uefi_disk(program: &[u8]) -> Vec<u8> {
    const SECTOR: usize = 512;
    let mut disk = vec![0; 1024 * SECTOR];
    let mut put = |at: usize, bytes: &[u8]| disk[at..at + bytes.len()].copy_from_slice(bytes);
    // One sector a cluster, one reserved, two tables of three sectors, 32 entries in the root, 1024 sectors.
    put(0, b"\xeb\x3c\x90MSWIN4.1\0\x02\x01\x01\0\x02\x20\0\0\x04\xf8\x03\0\x20\0\x40\0");
    put(0x26, b"\x29\x01\x02\x03\x04NO NAME    FAT12   ");
    put(510, &[0x55, 0xaa]);
    // Clusters 2 and 3 are the directories, 4 and 5 the file: 12 bits each.
    let table = b"\xf8\xff\xff\xff\xff\xff\x05\xf0\xff";
    put(SECTOR, table);
    put(4 * SECTOR, table);
    let entry = |name: &[u8; 11], kind: u8, cluster: u16, len: usize| {
        let mut entry = [0; 32];
        entry[..11].copy_from_slice(name);
        entry[11] = kind;
        entry[26..28].copy_from_slice(&cluster.to_le_bytes());
        entry[28..].copy_from_slice(&u32::try_from(len).expect("short").to_le_bytes());
        entry
    };
    let at = |cluster: usize| (7 + 2 + cluster - 2) * SECTOR;
    put(7 * SECTOR, &entry(b"EFI        ", 0x10, 2, 0));
    for (cluster, above, name, kind, next, len) in
        [(2_u16, 0, b"BOOT       ", 0x10, 3, 0), (3, 2, b"BOOTX64 EFI", 0x20, 4, program.len())]
    {
        let place = at(usize::from(cluster));
        put(place, &entry(b".          ", 0x10, cluster, 0));
        put(place + 32, &entry(b"..         ", 0x10, above, 0));
        put(place + 64, &entry(name, kind, next, len));
    }
    put(at(4), program);
    disk
}

/// UEFI firmware starts what lies on the disk, and keeps its variables from run to run, as long as there is the VM. A
/// kernel sees the CD drive, although the firmware had no reason to look at it.
#[test]
fn a_guest_boots_from_its_disk_by_uefi_and_keeps_its_variables() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(kernel) = kernel() else { return };
    let vars = std::fs::read("/usr/share/OVMF/OVMF_VARS_4M.fd");
    let Ok(empty) = vars else {
        tapio_e2e::tools::skip("needs /usr/share/OVMF/OVMF_VARS_4M.fd");
        return;
    };
    let more = ["platform:accel=tcg", "platform:max_disks=8", "HVM-boot-params:firmware=uefi"];
    let guest = Guest::install("Other install media", LIMIT, &more);
    let image = guest.world.scratch.join("image.raw");
    std::fs::write(&image, uefi_disk(&uefi_program("started by UEFI\r\n"))).expect("an image");
    let (vdi, file) = (format!("uuid={}", guest.vdi_at(0)), format!("filename={}", text(&image)));
    guest.ok(&["vdi-import", &vdi, &file, "format=raw"]);
    guest.ok(&["vm-start", "vm=guest"]);
    says(&guest, "started by UEFI");
    guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    let vm = guest.value(&["vm-list", "name-label=guest", "--minimal"]);
    let kept = guest.world.scratch.join("state/nvram").join(format!("{vm}.fd"));
    let written = std::fs::read(&kept).expect("its variables");
    assert!(written.len() == empty.len() && written != empty, "the firmware has written variables");
    let (of, kernel) = (format!("vm-uuid={vm}"), format!("PV-kernel={}", text(&kernel.join("vmlinuz"))));
    guest.value(&["vbd-create", &of, "type=CD", "mode=RO", "device=3"]);
    guest.ok(&["vm-param-set", &format!("uuid={vm}"), &kernel]);
    // Texts that hold what could begin another option.
    let session = guest.world.daemon().login();
    let reference = session.call("VM.get_by_uuid", &[vm.clone().into()]);
    session.call("VM.set_bios_strings", &[reference, json!({ "system-manufacturer": "Maker, Inc." })]);
    guest.start();
    let seen = guest.shell(
        "[ -d /sys/firmware/efi ] && echo '= uefi'; [ -e /sys/block/sr0 ] && echo '= a drive'; \
         echo \"= $(cat /sys/class/dmi/id/sys_vendor)\"",
    );
    assert_eq!(seen, ["uefi", "a drive", "Maker, Inc."]);
    guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    guest.ok(&["vm-uninstall", "vm=guest", "--force"]);
    assert!(!kept.exists(), "they go with the VM");
    guest.world.finish();
}
