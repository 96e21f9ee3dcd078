//! Disks in use move between storage repositories and are made anew, by `xe`, under a verified load, with kills and
//! cancels in the middle.

mod broken;
mod load;
mod moved;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use tapio_e2e::disk::{Host, assert_vhd_valid, text, vhd_util};
use tapio_e2e::local::lacks_fuse;
use tapio_e2e::process::{Finished, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_e2e::world::World;

use self::load::Model;

const LEN: usize = 32 << 20;

/// Whether disks can be plugged into this host; says so where not.
fn has_devices() -> bool {
    let scratch = Scratch::on_disk();
    let lacks = lacks_fuse(&Host::new(&scratch));
    lacks.as_deref().map(skip).is_none()
}

/// A daemon with SRs that nothing collects meanwhile.
struct Care {
    world: World,
}

/// A disk that this host uses.
struct Plugged {
    vbd: String,
    device: PathBuf,
}

impl Care {
    fn new(world: World) -> Self {
        let care = Self { world };
        care.calm(&care.default_sr());
        care
    }

    fn xe(&self, words: &[&str]) -> Finished {
        run(self.world.xe().args(words))
    }

    #[track_caller]
    fn value(&self, words: &[&str]) -> String {
        self.xe(words).ok().trim_end().to_owned()
    }

    fn default_sr(&self) -> String {
        self.value(&["sr-list", "type=file", "name-label=Local storage", "--minimal"])
    }

    fn calm(&self, sr: &str) {
        self.value(&["sr-param-set", &format!("uuid={sr}"), "other-config:gc-quiet=100000"]);
    }

    /// One more SR of files, in `name` below the world.
    fn sr(&self, name: &str) -> String {
        let location = format!("device-config:location={}", text(&self.world.scratch.join(name)));
        let sr = self.value(&["sr-create", &format!("name-label={name}"), "type=file", &location]);
        self.calm(&sr);
        sr
    }

    fn disk(&self, sr: &str, more: &[&str]) -> String {
        let (sr, size) = (format!("sr-uuid={sr}"), format!("virtual-size={LEN}"));
        self.value(&[&["vdi-create", &sr, "name-label=data", &size], more].concat())
    }

    /// Plugs a disk into this host.
    fn plug(&self, vdi: &str) -> Plugged {
        let host = self.value(&["vm-list", "is-control-domain=true", "--minimal"]);
        let (vm, vdi) = (format!("vm-uuid={host}"), format!("vdi-uuid={vdi}"));
        let vbd = self.value(&["vbd-create", &vm, &vdi, "device=autodetect", "type=Disk", "mode=RW"]);
        self.value(&["vbd-plug", &format!("uuid={vbd}")]);
        let device = self.param("vbd", &vbd, "device");
        Plugged { device: Path::new("/dev").join(device), vbd }
    }

    fn unplug(&self, disk: &Plugged) {
        let uuid = format!("uuid={}", disk.vbd);
        self.value(&["vbd-unplug", &uuid]);
        self.value(&["vbd-destroy", &uuid]);
    }

    #[track_caller]
    fn param(&self, class: &str, uuid: &str, name: &str) -> String {
        let (uuid, name) = (format!("uuid={uuid}"), format!("param-name={name}"));
        self.value(&[&format!("{class}-param-get"), &uuid, &name])
    }

    /// The VDI that a VBD leads to.
    #[track_caller]
    fn disk_of(&self, plugged: &Plugged) -> String {
        self.param("vbd", &plugged.vbd, "vdi-uuid")
    }

    #[track_caller]
    fn migrate(&self, vdi: &str, sr: &str, more: &[&str]) -> String {
        let (vdi, sr) = (format!("uuid={vdi}"), format!("sr-uuid={sr}"));
        self.value(&[&["vdi-pool-migrate", &vdi, &sr], more].concat())
    }

    /// Compares the contents of a VDI that nothing writes, as a client gets them.
    #[track_caller]
    fn holds(&self, vdi: &str, model: &Model) {
        let file = self.world.scratch.join("exported.raw");
        self.value(&["vdi-export", &format!("uuid={vdi}"), &format!("filename={}", text(&file))]);
        model.compare(vdi, File::open(&file).expect("it was exported"));
        fs::remove_file(file).expect("yours to remove");
    }

    /// Images in the directory of an SR; nothing else is there but what belongs to the SR.
    #[track_caller]
    fn images(&self, dir: &str) -> Vec<String> {
        let (mut images, mut left) = (Vec::new(), Vec::new());
        for path in self.files(dir) {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            match path.extension().and_then(|end| end.to_str()) {
                Some("vhd" | "raw") if !name.starts_with('.') => {
                    images.push(path.file_stem().expect("a name").to_string_lossy().into_owned());
                }
                _ if ["continued", "partial", "clone_", "coalesce_"]
                    .iter()
                    .any(|mark| name.contains(mark)) =>
                {
                    left.push(name);
                }
                _ => {}
            }
        }
        assert!(left.is_empty(), "{dir}: {left:?} are left");
        images
    }

    /// Images in the directory of an SR whose daemon is dead: whatever else is there.
    fn images_now(&self, dir: &str) -> Vec<String> {
        let files =
            self.files(dir).into_iter().filter(|path| path.extension().is_some_and(|end| end == "vhd"));
        files.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect()
    }

    fn files(&self, dir: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.world.scratch.join(dir)).expect("the SR's directory").flatten();
        entries.map(|entry| entry.path()).collect()
    }

    /// All images of an SR that nothing writes are whole.
    #[track_caller]
    fn is_valid(&self, dir: &str) {
        let files = self.files(dir).into_iter();
        files.filter(|path| path.extension().is_some_and(|end| end == "vhd")).for_each(|path| {
            assert_vhd_valid(&path);
        });
    }

    /// The image that the image of a VDI is based on, by `vhd-util`.
    #[track_caller]
    fn parent(&self, dir: &str, vdi: &str) -> String {
        let image = self.world.scratch.join(dir).join(format!("{vdi}.vhd"));
        let said = vhd_util(&["query", "-n", text(&image), "-p"]).ok();
        let name = Path::new(said.trim()).file_stem().map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or(said)
    }

    /// The records agree with what there is: the doctor finds nothing in the SRs.
    #[track_caller]
    fn is_healthy(&self, srs: &[&str]) {
        let session = self.world.daemon().login();
        for sr in srs {
            let sr = session.text("SR.get_by_uuid", &[serde_json::json!(sr)]);
            let found = session.text("SR.diagnose", &[serde_json::json!(sr)]);
            let found: serde_json::Value = serde_json::from_str(&found).expect("findings");
            // How full this host is is its own affair.
            let found = found.as_array().expect("a list").iter();
            let found: Vec<_> = found.filter(|found| found["kind"] != "sr-nearly-full").collect();
            assert!(found.is_empty(), "{found:?}");
        }
    }
}
