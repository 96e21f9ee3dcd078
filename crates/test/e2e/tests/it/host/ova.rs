//! VMs as OVA packages: what `xe` writes is read by qemu-img and Python, and what others write becomes VMs.

use std::fs;
use std::path::Path;
use std::process::Command;

use tapio_e2e::client::{random_file, tool};
use tapio_e2e::disk::{assert_vhd_valid, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, run};
use tapio_e2e::tools::repository;
use tapio_e2e::world::World;

const MIB: u64 = 1 << 20;

struct Story {
    world: World,
}

impl Story {
    fn new() -> Self {
        Self { world: World::new() }
    }

    fn xe(&self, args: &[&str]) -> Finished {
        run(self.world.xe().args(args))
    }

    #[track_caller]
    fn made(&self, args: &[&str]) -> String {
        self.xe(args).ok().trim().to_owned()
    }

    fn path(&self, name: &str) -> String {
        text(&self.world.scratch.join(name)).to_owned()
    }

    /// `package.py` with these words, which ends well.
    #[track_caller]
    fn python(&self, words: &[&str]) -> String {
        let program = repository().join("crates/test/e2e/tests/python/package.py");
        let mut command = Command::new("python3");
        run(command.arg(program).args(words).env("PYTHONDONTWRITEBYTECODE", "1")).ok()
    }

    /// A VM with disks of these bytes, which are files.
    fn vm(&self, name: &str, disks: &[&str]) -> String {
        let vm = self.made(&["vm-install", "template=Simulated guest", &format!("new-name-label={name}")]);
        let sr = self.made(&["sr-list", "type=file", "--minimal"]);
        for (place, disk) in disks.iter().enumerate() {
            let len = fs::metadata(disk).expect("it is there").len();
            let (sr, size) = (format!("sr-uuid={sr}"), format!("virtual-size={len}"));
            let vdi = self.made(&["vdi-create", &sr, "name-label=data", &size]);
            self.made(&["vdi-import", &format!("uuid={vdi}"), &format!("filename={disk}")]);
            let (vm, vdi) = (format!("vm-uuid={vm}"), format!("vdi-uuid={vdi}"));
            let place = format!("device={}", place * 4);
            self.made(&["vbd-create", &vm, &vdi, &place, "type=Disk", "mode=RW"]);
        }
        vm
    }

    /// Compares the disks of a VM, in their order, with files; what is longer is zero.
    #[track_caller]
    fn holds(&self, vm: &str, disks: &[&str]) {
        let session = self.world.daemon().login();
        let vm = session.text("VM.get_by_uuid", &[vm.into()]);
        let mut found: Vec<(u64, String)> = Vec::new();
        for vbd in session.call("VM.get_VBDs", &[vm.into()]).as_array().expect("a list") {
            if session.text("VBD.get_type", std::slice::from_ref(vbd)) == "Disk" {
                let place = session.text("VBD.get_userdevice", std::slice::from_ref(vbd));
                let vdi = session.call("VBD.get_VDI", std::slice::from_ref(vbd));
                found.push((place.parse().expect("a number"), session.text("VDI.get_uuid", &[vdi])));
            }
        }
        found.sort();
        assert_eq!(found.len(), disks.len());
        for ((_, vdi), disk) in found.iter().zip(disks) {
            let out = self.path("out.raw");
            self.made(&["vdi-export", &format!("uuid={vdi}"), &format!("filename={out}")]);
            let (read, mut want) = (fs::read(&out).expect("a file"), fs::read(disk).expect("a file"));
            assert!(read.len() >= want.len(), "{vdi} is shorter");
            want.resize(read.len(), 0);
            assert!(read == want, "{vdi} does not hold {disk}");
            fs::remove_file(&out).expect("yours to remove");
        }
    }

    /// How many VMs and disks there are.
    fn count(&self) -> (usize, usize) {
        let count =
            |list: &str| self.made(&[list, "--minimal"]).split(',').filter(|uuid| !uuid.is_empty()).count();
        (count("vm-list"), count("vdi-list"))
    }
}

/// A disk of this many MiB, with noise at two places and nothing between.
fn disk(path: &str, mib: u64) {
    random_file(Path::new(path), 700_000);
    let noise = fs::read(path).expect("a file");
    let mut bytes = vec![0; (mib * MIB) as usize];
    bytes[..noise.len()].copy_from_slice(&noise);
    let end = bytes.len() - 300_000;
    bytes[end..].copy_from_slice(&noise[..300_000]);
    fs::write(path, bytes).expect("room");
}

#[test]
fn a_package_is_read_by_others_and_by_us() {
    needs!("qemu-img", "python3");
    let story = Story::new();
    let (first, second) = (story.path("first.raw"), story.path("second.raw"));
    disk(&first, 48);
    disk(&second, 2);
    let vm = story.vm("web & db", &[&first, &second]);
    let memory = story.made(&["vm-param-get", &format!("uuid={vm}"), "param-name=memory-static-max"]);
    let package = story.path("vm.ova");
    let named = format!("filename={package}");
    let export = ["vm-export", &format!("uuid={vm}"), &named, "format=ova", "--progress"];
    assert_eq!(story.xe(&export).ok(), "");
    assert!(fs::metadata(&package).expect("it is there").len() < 4 * MIB, "what is zero is not in it");

    // By the libraries of Python and by qemu-img: names, sums, devices, every byte.
    let out = story.path("unpacked");
    let said = story.python(&["check", &package, &out, &memory, "web & db"]);
    let disks: Vec<&str> = said.lines().collect();
    assert_eq!(disks.len(), 2, "{said}");
    for (image, raw) in disks.iter().zip([&first, &second]) {
        let image = format!("{out}/{image}");
        let info = tool("qemu-img", &["info", "--output=json", &image]).ok();
        assert!(info.contains("\"streamOptimized\"") && info.contains("\"format\": \"vmdk\""), "{info}");
        tool("qemu-img", &["check", &image]).ok();
        tool("qemu-img", &["compare", "-f", "vmdk", "-F", "raw", &image, raw]).ok();
    }

    // By us, as another VM with the same disks.
    let made = story.made(&["vm-import", &named, "--progress"]);
    assert_ne!(made, vm);
    assert_eq!(story.made(&["vm-param-get", &format!("uuid={made}"), "param-name=name-label"]), "web & db");
    assert_eq!(
        story.made(&["vm-param-get", &format!("uuid={made}"), "param-name=memory-static-max"]),
        memory
    );
    story.holds(&made, &[&first, &second]);

    // With VHDs and the sums of old readers.
    let vhds = story.path("vhds.ova");
    let named_vhds = format!("filename={vhds}");
    story.made(&[
        "vm-export",
        &format!("uuid={vm}"),
        &named_vhds,
        "format=ova",
        "disk-format=vhd",
        "sums=sha1",
    ]);
    let out = story.path("vhds");
    let said = story.python(&["check", &vhds, &out, &memory, "web & db", "SHA1"]);
    let disks: Vec<&str> = said.lines().collect();
    for (image, raw) in disks.iter().zip([&first, &second]) {
        let image = format!("{out}/{image}");
        assert!(fs::metadata(&image).expect("it is there").len() < 8 * MIB, "what is zero is not in it");
        tool("qemu-img", &["compare", "-f", "vpc", "-F", "raw", &image, raw]).ok();
        assert_vhd_valid(Path::new(&image));
    }
    let from_vhds = story.made(&["vm-import", &named_vhds]);
    story.holds(&from_vhds, &[&first, &second]);

    // What is asked wrongly, and what is damaged, leaves nothing.
    let count = story.count();
    for (more, says) in [("preserve=true", "no UUIDs"), ("metadata=true", "no UUIDs")] {
        let said = story.xe(&["vm-import", &named, more]).fails();
        assert!(said.contains(says), "{said}");
    }
    let other = format!("filename={}", story.path("other.ova"));
    let export =
        |more: &str| story.xe(&["vm-export", &format!("uuid={vm}"), &other, "format=ova", more]).fails();
    assert!(export("compress=true").contains("cannot have compress"));
    assert!(export("disk-format=vdi").contains("vmdk and vhd are known"));
    assert!(export("sums=md5").contains("sha256 and sha1 are known"));
    let said = story.xe(&["vm-export", &format!("uuid={vm}"), &other, "sums=sha1"]).fails();
    assert!(said.contains("use format=ova"), "{said}");
    let said = story.xe(&["vm-export", &format!("uuid={vm}"), &other, "format=ovf"]).fails();
    assert!(said.contains("xva and ova are known"), "{said}");
    assert!(!Path::new(&story.path("other.ova.part")).exists());
    let mut bytes = fs::read(&package).expect("a file");
    let at = bytes.windows(4).position(|four| four == b"KDMV").expect("an image") + 70_000;
    bytes[at] ^= 0xff;
    fs::write(&package, &bytes).expect("room");
    let said = story.xe(&["vm-import", &named]).fails();
    assert!(said.contains("does not have its sum"), "{said}");
    let said = story.xe(&["vm-import", &named, "force=true"]).fails();
    assert!(said.contains("grain"), "{said}");
    assert_eq!(story.count(), count);
    story.world.finish();
}

#[test]
fn packages_of_others_become_vms_or_say_why_not() {
    needs!("qemu-img", "python3", "gzip");
    let story = Story::new();
    let raw = story.path("disk.raw");
    disk(&raw, 20);
    // As VMware's tools, VirtualBox and XenCenter put disks into packages.
    let vmdk = ["-O", "vmdk", "-o", "subformat=streamOptimized"];
    let dynamic = ["-O", "vpc", "-o", "subformat=dynamic,force_size=on"];
    let fixed = ["-O", "vpc", "-o", "subformat=fixed,force_size=on"];
    let sparse = ["-O", "vmdk", "-o", "subformat=monolithicSparse"];
    for (name, how) in [
        ("a.vmdk", &vmdk[..]),
        ("b.vhd", &dynamic),
        ("c.vhd", &fixed),
        ("d.vmdk", &sparse),
        ("e.img", &["-O", "raw"]),
    ] {
        tool("qemu-img", &[&["convert", "-f", "raw"], how, &[&raw, &story.path(name)]].concat()).ok();
    }
    let package = story.path("foreign.ova");
    let named = format!("filename={package}");
    tool("gzip", &["-k", &story.path("e.img"), &story.path("d.vmdk")]).ok();
    let images = ["a.vmdk", "b.vhd", "c.vhd", "d.vmdk", "e.img", "d.vmdk.gz", "e.img.gz"];
    let images = images.map(|name| story.path(name));
    let images: Vec<&str> = images.iter().map(String::as_str).collect();
    story.python(&[&["pack", &package][..], &images].concat());
    // Packed whole, as some are that are fetched from a web site.
    tool("gzip", &["-k", &package]).ok();
    let packed = story.made(&["vm-import", &format!("filename={package}.gz")]);
    story.holds(&packed, &[&*raw; 7]);
    let made = story.made(&["vm-import", &named]);
    let param =
        |name: &str| story.made(&["vm-param-get", &format!("uuid={made}"), &format!("param-name={name}")]);
    assert_eq!((param("name-label").as_str(), param("VCPUs-max").as_str()), ("appliance", "2"));
    assert_eq!(param("memory-static-max"), (256 * MIB).to_string());
    assert!(param("HVM-boot-params").contains("firmware: uefi"));
    story.holds(&made, &[&*raw; 7]);
    let network = story.made(&["network-list", "name-label=VM Network", "--minimal"]);
    let vifs = story.made(&[
        "vif-list",
        &format!("vm-uuid={made}"),
        &format!("network-uuid={network}"),
        "--minimal",
    ]);
    assert_eq!(vifs.split(',').filter(|uuid| !uuid.is_empty()).count(), 1);

    // An SR that cannot take it: the command ends although it has more to send, and nothing is left.
    let count = story.count();
    let place = format!("device-config:location={}", story.path("other"));
    let sr = story.made(&["sr-create", "name-label=other", "type=file", &place]);
    let pbd = story.made(&["pbd-list", &format!("sr-uuid={sr}"), "--minimal"]);
    story.made(&["pbd-unplug", &format!("uuid={pbd}")]);
    let said = story.xe(&["vm-import", &named, &format!("sr-uuid={sr}")]).fails();
    assert!(said.contains("not attached") || said.contains("SR_NOT_ATTACHED"), "{said}");

    // A file that the descriptor names and the package lacks; one that is cut off.
    story.python(&["pack", &package, images[0], &format!("missing:{}", images[1])]);
    let said = story.xe(&["vm-import", &named]).fails();
    assert!(said.contains("does not have its file 'b.vhd'"), "{said}");
    story.python(&["pack", &package, images[0]]);
    let file = fs::File::options().write(true).open(&package).expect("it is there");
    file.set_len(fs::metadata(&package).expect("it is there").len() / 2).expect("it can be cut");
    let said = story.xe(&["vm-import", &named]).fails();
    assert!(said.contains("ends early"), "{said}");
    assert_eq!(story.count(), count);
    story.world.finish();
}
