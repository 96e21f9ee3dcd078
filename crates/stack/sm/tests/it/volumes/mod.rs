//! SRs of logical volumes, over a double of LVM: the stories of their life, and kills in the middle of each.

mod damage;
mod kills;
mod life;
mod live;
mod stories;
mod whole_srs;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use tapio_format::FileMedium;
use tapio_format::vhd::offline::{CheckOptions, Severity, check_path};
use tapio_sm::lvm::double::Host;
use tapio_sm::lvm::metadata::Metadata;
use tapio_sm::{Config, Sr, SrDriver, VdiInfo};
use tapio_types::Access;
use uuid::Uuid;

use crate::support::{Watch, driver, skip};

pub const MIB: u64 = 1 << 20;
/// Room for all volumes of a group.
pub const ROOM: u64 = 256 * MIB;

/// A device with LVM, and an SR on it.
pub struct Volumes {
    pub host: Host,
    pub sr: Uuid,
    pub config: Config,
    /// Goes last.
    pub dir: tempfile::TempDir,
}

impl Volumes {
    /// None, and a line about it, where there are no loop devices to be had.
    pub fn new() -> Option<Self> {
        let memory = Path::new("/dev/shm");
        let dir = match tempfile::tempdir_in(memory) {
            Ok(dir) => dir,
            Err(_) => tempfile::tempdir().unwrap(),
        };
        match Host::new(dir.path(), ROOM) {
            Ok(host) => {
                let device = host.device().display().to_string();
                let config = Config::from([("device".to_string(), device)]);
                Some(Self { host, sr: Uuid::new_v4(), config, dir })
            }
            Err(_) => {
                skip("needs loop devices");
                None
            }
        }
    }

    pub fn driver(&self, sr_type: &str) -> Arc<dyn SrDriver> {
        driver(self.dir.path(), sr_type)
    }

    pub fn create(&self) -> Box<dyn Sr> {
        self.driver("lvm").create(&Watch::default(), self.sr, &self.config, 0).unwrap();
        self.attach(&Watch::default())
    }

    pub fn attach(&self, ctx: &Watch) -> Box<dyn Sr> {
        self.driver("lvm").attach(ctx, self.sr, &self.config).unwrap()
    }

    /// Names of its volumes.
    pub fn names(&self) -> Vec<String> {
        self.host.volumes().into_keys().collect()
    }

    /// What the volume of the metadata says.
    pub fn metadata(&self) -> Metadata {
        let path = self.host.path("MGT");
        Metadata::read(&FileMedium::open(&path, Access::ReadOnly).unwrap()).unwrap()
    }

    /// What must hold of an SR that is attached, whatever happened before: every volume is of an image that can be
    /// used, nothing half made is left, and the metadata name the images. Nothing is open.
    pub fn check(&self, sr: &dyn Sr, what: &str) -> Vec<VdiInfo> {
        let ctx = Watch::default();
        let found = sr.scan(&ctx).unwrap_or_else(|error| panic!("{what}: {error}"));
        for info in &found {
            assert!(!info.sm_config.contains_key("damaged"), "{what}: {info:?}");
        }
        let known: BTreeSet<Uuid> = found.iter().map(|info| info.uuid).collect();
        let tracked: BTreeSet<Uuid> =
            found.iter().filter(|info| info.cbt_enabled).map(|info| info.uuid).collect();
        for name in self.names() {
            let of =
                |uuid: &str, of: &BTreeSet<Uuid>| Uuid::try_parse(uuid).is_ok_and(|uuid| of.contains(&uuid));
            let is_image = name.strip_prefix("VHD-").or_else(|| name.strip_prefix("LV-"));
            let is_one = is_image.is_some_and(|uuid| of(uuid, &known))
                || name.strip_suffix(".cbtlog").is_some_and(|uuid| of(uuid, &tracked));
            assert!(is_one || name == "MGT", "{what}: {name} of {:?}", self.names());
        }
        let parents: BTreeSet<Uuid> = found.iter().filter_map(|info| info.parent).collect();
        for info in found.iter().filter(|info| !info.managed) {
            assert!(parents.contains(&info.uuid), "{what}: a base copy that no image needs");
        }
        for info in found.iter().filter(|info| info.managed && !info.is_metadata) {
            self.check_chain(sr, info, what);
        }
        let said = self.metadata();
        let names: BTreeMap<Uuid, &str> = said.vdis().map(|entry| (entry.uuid, &*entry.vdi_type)).collect();
        let wanted: BTreeMap<Uuid, &str> = found
            .iter()
            .map(|info| (info.uuid, info.sm_config.get("vdi_type").map_or("vhd", String::as_str)))
            .collect();
        assert_eq!(names, wanted, "{what}: what the metadata say");
        assert_eq!(said.vdis().count(), wanted.len(), "{what}: a VDI that has two places in the metadata");
        assert_eq!(self.host.reachable(), ["MGT"], "{what}: volumes that nothing needs are reachable");
        found
    }

    fn check_chain(&self, sr: &dyn Sr, info: &VdiInfo, what: &str) {
        let ctx = Watch::default();
        let chain = sr.activate(&ctx, info.uuid, Access::ReadOnly);
        let chain = chain.unwrap_or_else(|error| panic!("{what}: {error}")).chain;
        for layer in chain.layers.iter().filter(|layer| layer.kind == tapio_types::ImageKind::Vhd) {
            for report in check_path(&layer.path, &CheckOptions::default()).unwrap() {
                // Parents lie in the directory of the double, where locators do not lead: the driver has checked them.
                let is_own = |kind: String| !kind.starts_with("Parent");
                let wrong: Vec<_> = report
                    .findings
                    .iter()
                    .filter(|one| one.severity == Severity::Error && is_own(format!("{:?}", one.kind)))
                    .collect();
                assert!(wrong.is_empty(), "{what}: {}: {wrong:?}", layer.path.display());
            }
        }
        sr.deactivate(&ctx, info.uuid).unwrap();
    }

    /// Forgets what this host knew, as a reboot does, but for what is reachable.
    pub fn forget(&self) {
        let _ = std::fs::remove_dir_all(self.dir.path().join("run"));
    }
}
