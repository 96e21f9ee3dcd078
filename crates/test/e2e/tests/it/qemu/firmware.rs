//! What starts a guest of QEMU: BIOS and UEFI.

use std::time::Duration;

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
    let mut command = guest.world.xe();
    let timeout = format!("timeout={}", LIMIT.as_secs());
    command.args(["console", "vm=guest", "until=started by its BIOS", &timeout]);
    let nothing = std::fs::File::open("/dev/null").expect("it is there");
    let said = run_with_input(&mut command, Some(nothing), LIMIT);
    assert!(said.stdout.contains("started by its BIOS"), "{said:?}");
    // Every thread of the emulator is where the VM's mask says: its main loop, and that of the guest's processors.
    let allowed = allowed(&guest);
    assert!(allowed.len() >= 2 && allowed.iter().all(|list| list == "0"), "{allowed:?}");
    guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    guest.world.finish();
}

/// UEFI firmware, which keeps its variables from run to run, as long as there is the VM.
#[test]
fn a_guest_boots_by_uefi_and_keeps_its_variables() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(kernel) = kernel() else { return };
    let vars = std::fs::read("/usr/share/OVMF/OVMF_VARS_4M.fd");
    let Ok(empty) = vars else {
        tapio_e2e::tools::skip("needs /usr/share/OVMF/OVMF_VARS_4M.fd");
        return;
    };
    let kernel = format!("PV-kernel={}", text(&kernel.join("vmlinuz")));
    let more =
        [kernel.as_str(), "platform:accel=tcg", "platform:max_disks=8", "HVM-boot-params:firmware=uefi"];
    let guest = Guest::install("Tapio QEMU guest", LIMIT, &more);
    guest.start();
    assert_eq!(guest.shell("[ -d /sys/firmware/efi ] && echo '= uefi'"), ["uefi"]);
    guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    let vm = guest.value(&["vm-list", "name-label=guest", "--minimal"]);
    let kept = guest.world.scratch.join("state/nvram").join(format!("{vm}.fd"));
    let written = std::fs::read(&kept).expect("its variables");
    assert!(written.len() == empty.len() && written != empty, "the firmware has written variables");
    guest.ok(&["vm-uninstall", "vm=guest", "--force"]);
    assert!(!kept.exists(), "they go with the VM");
    guest.world.finish();
}
