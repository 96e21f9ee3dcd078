//! A cloud image: made a template, installed from, given settings, started, logged in to and shut down.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tapio_e2e::disk::text;
use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;
use tapio_e2e::process::run_within;
use tapio_e2e::tools::skip;
use tapio_e2e::toolstack::lane;
use tapio_e2e::world::World;

/// The start of a whole system, emulated: 90 s of a processor. A busy host gives a fraction of one.
const BOOT_LIMIT: Duration = Duration::from_secs(1500);
const LIMIT: Duration = Duration::from_secs(300);

const PASSWORD: &str = "a long password";
/// Of `PASSWORD` the hash, as settings have it; an account that may log in with it, and with a key.
const USER_DATA: &str = "#cloud-config
hostname: seedling
locale: false
ssh_genkeytypes: [ed25519]
users:
  - name: ada
    lock_passwd: false
    passwd: $6$saltsalt$ogagvq0Pjr193ZPB.HypvBMyPzX5.R0RbFClGl4TpXA6c1E3vaXRBr7Fh3EboXPK0JpozDUqDYwy8wHA1YWYF.
    shell: /bin/bash
    ssh_authorized_keys:
      - ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGNvbW1lbnQgb2YgYSBrZXkgd2l0aG91dCBhIG1h ada@desk
";

/// The terminal of a guest, over the API's `/console`.
struct Terminal {
    stream: TcpStream,
    seen: String,
}

impl Terminal {
    #[track_caller]
    fn of(world: &World) -> Self {
        let session = world.daemon().login();
        let records = session.call("console.get_all_records", &[]);
        let mut all = records.as_object().expect("records").values();
        let console = all.find(|record| record["protocol"] == "vt100").expect("a serial console");
        let (_, query) =
            console["location"].as_str().expect("a text").split_once("/console?").expect("a path");
        let address = world.daemon().http.strip_prefix("http://").expect("an address");
        let mut stream = TcpStream::connect(address).expect("the daemon listens");
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a limit");
        let request = format!("CONNECT /console?{query}&session_id={} HTTP/1.0\r\n\r\n", session.reference);
        stream.write_all(request.as_bytes()).expect("sent");
        let mut terminal = Self { stream, seen: String::new() };
        assert!(terminal.until("\r\n\r\n", LIMIT).contains(" 200 "), "{}", terminal.seen);
        terminal
    }

    /// Reads until `text` has come; all that came since the last one that was waited for.
    #[track_caller]
    fn until(&mut self, text: &str, limit: Duration) -> String {
        let (until, mut bytes) = (Instant::now() + limit, [0; 4096]);
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => panic!("the console ended before '{text}': {}", self.seen),
                Ok(len) => self.seen.push_str(&String::from_utf8_lossy(&bytes[..len])),
                Err(_) => assert!(Instant::now() < until, "no '{text}': {}", self.seen),
            }
        }
    }

    fn types(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\n").as_bytes()).expect("typed");
    }
}

/// The image, or none with a line that says so.
fn image() -> Option<PathBuf> {
    let version = lane("cloud-image/version").and_then(|file| std::fs::read_to_string(file).ok());
    let found = lane("cloud-image/disk.raw").filter(|_| version.is_some_and(|text| text.contains("UEFI")));
    if found.is_none() {
        skip("needs a cloud image (scripts/setup cloud makes it)");
    }
    found
}

/// Makes a template `debian` of the image, and a VM `web` of that with settings of its own; the template's UUID. `more`
/// are further words for `vm-param-set` of the template.
#[track_caller]
fn installed(world: &World, image: &Path, more: &[&str]) -> String {
    let xe = |words: &[&str]| run_within(world.xe().args(words), LIMIT).ok().trim_end().to_owned();
    let template = xe(&["vm-install", "template=Other install media", "new-name-label=debian"]);
    let disk = xe(&["vbd-list", "vm-name-label=debian", "type=Disk", "params=vdi-uuid", "--minimal"]);
    let file = format!("filename={}", text(image));
    xe(&["vdi-import", &format!("uuid={disk}"), &file, "format=raw"]);
    xe(&["vm-memory-set", "vm=debian", "memory=512MiB"]);
    let uuid = format!("uuid={template}");
    let platform = ["vm-param-set", &uuid, "platform:accel=tcg", "platform:max_disks=8"];
    xe(&[&platform[..], more].concat());
    xe(&["template-param-set", &uuid, "is-a-template=true"]);
    // A VM of it, with its own settings.
    xe(&["vm-install", "template=debian", "new-name-label=web"]);
    let user = world.scratch.join("user-data");
    std::fs::write(&user, USER_DATA).expect("settings");
    xe(&["vm-cloud-init-add", "vm=web", &format!("user-data={}", text(&user))]);
    template
}

#[test]
#[ignore = "two minutes of a processor; HACKING.md says when to run it"]
fn a_cloud_image_is_installed_from_and_boots_to_a_login() {
    needs!(Qemu::TOOLS[0]);
    let Some(image) = image() else { return };
    let world = World::new();
    let xe = |words: &[&str]| run_within(world.xe().args(words), LIMIT).ok().trim_end().to_owned();
    let template = installed(&world, &image, &[]);
    let begun = Instant::now();
    xe(&["vm-start", "vm=web"]);
    let mut terminal = Terminal::of(&world);
    terminal.until("seedling login: ", BOOT_LIMIT);
    println!("a login after {} s", begun.elapsed().as_secs());
    terminal.types("ada");
    terminal.until("Password: ", LIMIT);
    terminal.types(PASSWORD);
    terminal.until("ada@seedling:~$", BOOT_LIMIT);
    // What the terminal echoes of it must not look like the answer.
    terminal.types("echo sa''id $(hostname) $(id -un) $(df --output=size -m / | tail -n 1) $(cat ~/.ssh/authorized_keys) .");
    terminal.until("said ", LIMIT);
    let said = terminal.until(" .", LIMIT);
    let words: Vec<&str> = said.split_whitespace().collect();
    assert_eq!((words[0], words[1]), ("seedling", "ada"), "{said}");
    // The image has less than a gibibyte, the template's disk eight.
    let mib: u64 = words[2].parse().expect("a size");
    assert!(mib > 7000, "the root has grown: {said}");
    assert!(said.contains("ada@desk"), "the key: {said}");
    run_within(world.xe().args(["vm-shutdown", "vm=web"]), BOOT_LIMIT).ok();
    println!("shut down after {} s", begun.elapsed().as_secs());
    // As its own power button would: services stopped, file systems unmounted.
    terminal.until("reboot: Power down", LIMIT);
    assert_eq!(xe(&["vm-list", "name-label=web", "params=power-state", "--minimal"]), "halted");
    xe(&["vm-uninstall", "vm=web", "--force"]);
    xe(&["template-uninstall", &format!("template-uuid={template}"), "--force"]);
    world.finish();
}

/// The same image, by the boot loader of its EFI system partition: a clone of the template has no variables of UEFI.
#[test]
#[ignore = "two minutes of a processor; HACKING.md says when to run it"]
fn a_cloud_image_boots_to_a_login_by_uefi() {
    needs!(Qemu::TOOLS[0]);
    if !Path::new("/usr/share/OVMF/OVMF_VARS_4M.fd").exists() {
        return skip("needs /usr/share/OVMF/OVMF_VARS_4M.fd");
    }
    let Some(image) = image() else { return };
    let world = World::new();
    installed(&world, &image, &["HVM-boot-params:firmware=uefi"]);
    run_within(world.xe().args(["vm-start", "vm=web"]), LIMIT).ok();
    let mut terminal = Terminal::of(&world);
    terminal.until("seedling login: ", BOOT_LIMIT);
    terminal.types("ada");
    terminal.until("Password: ", LIMIT);
    terminal.types(PASSWORD);
    terminal.until("ada@seedling:~$", BOOT_LIMIT);
    terminal.types("[ -d /sys/firmware/efi ] && echo by u''efi");
    terminal.until("by uefi", LIMIT);
    run_within(world.xe().args(["vm-shutdown", "vm=web", "--force"]), LIMIT).ok();
    world.finish();
}
