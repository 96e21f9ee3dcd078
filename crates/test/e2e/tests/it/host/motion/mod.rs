//! VMs move between two daemons without a pool, each with directories, an SR and a port of its own.

mod broken;
mod line;
mod moved;
mod rules;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_e2e::disk::{assert_vhd_valid, text};
use tapio_e2e::process::{Finished, Running, poll_until, run_within};
use tapio_e2e::toolstack::DaemonOptions;
use tapio_e2e::world::World;

use self::line::Line;

const MIB: usize = 1 << 20;

/// What anything may take on a busy host.
const LIMIT: Duration = Duration::from_secs(180);

/// A host: its daemon, and the line that others reach it by.
struct Site {
    world: World,
    line: Line,
}

/// A VM, with what each of its disks and those of its snapshots holds, by the name of the VDI.
struct Guest {
    uuid: String,
    holds: BTreeMap<String, Vec<u8>>,
}

/// Bytes of a disk: `len` MiB that are zero but for blocks of 64 KiB at these places, which `seed` makes.
fn contents(len: usize, seed: u64, places: &[usize]) -> Vec<u8> {
    let mut data = vec![0; len * MIB];
    write(&mut data, seed, places);
    data
}

fn write(data: &mut [u8], seed: u64, places: &[usize]) {
    for place in places {
        let mut state = seed ^ (*place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for byte in &mut data[*place..*place + (64 << 10)] {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *byte = (state >> 32) as u8;
        }
    }
}

impl Site {
    fn new() -> Self {
        Self::with(|options| options)
    }

    fn with(change: impl FnOnce(DaemonOptions) -> DaemonOptions) -> Self {
        let line = Line::new();
        let address = format!("--set=pool-address={}", line.address);
        let world = World::with(|options| change(options.arg(&address)));
        let site = Self { world, line };
        site.is_led();
        let sr = site.sr();
        site.value(&["sr-param-set", &format!("uuid={sr}"), "other-config:gc-quiet=100000"]);
        site
    }

    fn is_led(&self) {
        self.line.leads_to(self.world.daemon().https.as_deref().expect("HTTPS is served"));
    }

    fn restart_with(&mut self, change: impl FnOnce(DaemonOptions) -> DaemonOptions) {
        self.world.restart_with(change);
        self.is_led();
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.world.xe();
        command.args(words);
        command
    }

    fn xe(&self, words: &[&str]) -> Finished {
        run_within(&mut self.command(words), LIMIT)
    }

    #[track_caller]
    fn value(&self, words: &[&str]) -> String {
        self.xe(words).ok().trim_end().to_owned()
    }

    fn list(&self, words: &[&str]) -> Vec<String> {
        let said = self.value(&[words, &["--minimal"]].concat());
        said.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }

    #[track_caller]
    fn param(&self, class: &str, uuid: &str, name: &str) -> String {
        let (uuid, name) = (format!("uuid={uuid}"), format!("param-name={name}"));
        self.value(&[&format!("{class}-param-get"), &uuid, &name])
    }

    fn sr(&self) -> String {
        self.value(&["sr-list", "name-label=Local storage", "--minimal"])
    }

    /// Writes a disk by a client.
    fn fill(&self, vdi: &str, data: &[u8]) {
        let file = self.world.scratch.join("import.raw");
        fs::write(&file, data).expect("written");
        self.value(&[
            "vdi-import",
            &format!("uuid={vdi}"),
            &format!("filename={}", text(&file)),
            "format=raw",
        ]);
        fs::remove_file(file).expect("yours to remove");
    }

    #[track_caller]
    fn read(&self, vdi: &str) -> Vec<u8> {
        let file = self.world.scratch.join("export.raw");
        self.value(&["vdi-export", &format!("uuid={vdi}"), &format!("filename={}", text(&file))]);
        let data = fs::read(&file).expect("it was exported");
        fs::remove_file(file).expect("yours to remove");
        data
    }

    fn disk(&self, name: &str, len: usize) -> String {
        let (sr, size) = (format!("sr-uuid={}", self.sr()), format!("virtual-size={}", len * MIB));
        self.value(&["vdi-create", &sr, &format!("name-label={name}"), &size])
    }

    fn vm(&self, name: &str) -> String {
        self.value(&["vm-create", &format!("name-label={name}")])
    }

    fn attach(&self, vm: &str, vdi: &str, place: &str) -> String {
        let (vm, vdi, place) =
            (format!("vm-uuid={vm}"), format!("vdi-uuid={vdi}"), format!("device={place}"));
        self.value(&["vbd-create", &vm, &vdi, &place, "type=Disk", "mode=RW", "bootable=true"])
    }

    /// The VDI of a VM at a place.
    #[track_caller]
    fn vdi_at(&self, vm: &str, place: &str) -> String {
        let found = self.list(&[
            "vbd-list",
            &format!("vm-uuid={vm}"),
            &format!("userdevice={place}"),
            "params=vdi-uuid",
        ]);
        found.into_iter().next().expect("a disk is there")
    }

    /// A VM with one disk.
    fn small(&self, name: &str, seed: u64) -> Guest {
        let vm = self.vm(name);
        let vdi = self.disk("root", 16);
        let data = contents(16, seed, &[0, 5 * MIB, 15 * MIB]);
        self.fill(&vdi, &data);
        self.attach(&vm, &vdi, "0");
        Guest { uuid: vm, holds: BTreeMap::from([("0".to_owned(), data)]) }
    }

    /// The words of a command that moves a VM to another host.
    fn words(&self, to: &Site, vm: &str, more: &[&str]) -> Vec<String> {
        let password = to.world.scratch.join("password");
        let mut words = vec![
            "vm-migrate".to_owned(),
            format!("uuid={vm}"),
            format!("remote-master={}", to.line.address),
            "remote-username=alice".to_owned(),
            format!("remote-password-file={}", text(&password)),
        ];
        words.extend(more.iter().map(|word| (*word).to_owned()));
        words
    }

    fn migrate(&self, to: &Site, vm: &str, more: &[&str]) -> Finished {
        let words = self.words(to, vm, more);
        self.xe(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Begins a motion, and does not wait for it.
    fn begins(&self, to: &Site, vm: &str, more: &[&str]) -> Running {
        let mut command = self.world.xe();
        command.args(self.words(to, vm, more));
        let log = (0..).map(|number| self.world.scratch.join(&format!("motion.{number}.log")));
        Running::start(&mut command, &log.into_iter().find(|log| !log.exists()).expect("a free name"))
    }

    fn has(&self, vm: &str) -> bool {
        self.list(&["vm-list", &format!("uuid={vm}")]).len() == 1
    }

    fn images(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.world.scratch.join("sr")).expect("the SR's directory").flatten();
        let images = entries.map(|entry| entry.path()).filter(|path| {
            let is_image = path.extension().is_some_and(|end| end == "vhd" || end == "raw");
            is_image && !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
        });
        images.collect()
    }

    /// Bytes that all images take.
    fn used(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let each = self.images().into_iter().map(|path| fs::metadata(path).expect("an image").blocks() * 512);
        each.sum()
    }

    /// Nothing of a motion is here: no disk, no image, no note.
    #[track_caller]
    fn is_empty(&self) {
        let is_empty = poll_until(LIMIT, || {
            let nothing =
                self.images().is_empty() && self.list(&["vdi-list"]).is_empty() && self.motions().is_empty();
            nothing.then_some(())
        });
        let (vdis, motions) = (self.list(&["vdi-list"]), self.motions());
        assert!(is_empty.is_some(), "left: {:?} {vdis:?} {motions:?}", self.images());
    }

    fn motions(&self) -> BTreeMap<String, Value> {
        let session = self.world.daemon().login();
        let host = session.call("host.get_all", &[])[0].clone();
        let told = session.call("host.get_motions", &[host]);
        serde_json::from_value(told).unwrap_or_default()
    }

    /// Waits until no motion is known here.
    #[track_caller]
    fn is_over(&self) {
        assert!(
            poll_until(LIMIT, || self.motions().is_empty().then_some(())).is_some(),
            "{:?}",
            self.motions()
        );
    }

    /// A VM is here with all that its disks hold, whole and usable.
    #[track_caller]
    fn is_whole(&self, guest: &Guest) {
        for (place, data) in &guest.holds {
            let vdi = self.vdi_at(&guest.uuid, place);
            assert_eq!(self.param("vdi", &vdi, "sr-uuid"), self.sr());
            let found = self.read(&vdi);
            let differs = found.iter().zip(data).position(|(one, other)| one != other);
            assert!(found.len() == data.len() && differs.is_none(), "disk {place} differs at {differs:?}");
        }
        for image in self.images().iter().filter(|path| path.extension().is_some_and(|end| end == "vhd")) {
            assert_vhd_valid(image);
        }
        let session = self.world.daemon().login();
        let vm = session.text("VM.get_by_uuid", &[json!(guest.uuid)]);
        let free = poll_until(LIMIT, || {
            let now = session.call("VM.get_current_operations", &[json!(vm)]);
            now.as_object().is_some_and(serde_json::Map::is_empty).then_some(())
        });
        assert!(
            free.is_some(),
            "the VM is held: {}",
            session.call("VM.get_current_operations", &[json!(vm)])
        );
    }

    #[track_caller]
    fn finish(self) {
        self.world.finish();
    }
}
