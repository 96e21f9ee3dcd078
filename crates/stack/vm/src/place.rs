//! The directory of one VM, and what is kept there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tapio_types::ApiError;
use uuid::Uuid;

use crate::errors::failed;
use crate::settings::Settings;
use crate::traits::{DiskSpec, PluggedDisk, PluggedVif, VmSpec};

/// Longest path of a UNIX socket: `sun_path` has 108 bytes, one of them for the end.
const SOCKET_PATH_MAX: usize = 107;

/// Longest name of a socket in a VM's directory (`g/m/mconsole`).
const SOCKET_NAME_MAX: usize = 12;

/// A record larger than this was not written by us.
const RECORD_LEN_MAX: u64 = 4 << 20;

/// The state of a VM's life cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Made, its guest has not begun.
    Made,
    /// The guest runs.
    Running,
    /// The guest's processors are stopped.
    Paused,
}

/// A disk that is plugged into the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedDisk {
    /// What was plugged.
    #[serde(flatten)]
    pub disk: PluggedDisk,
    /// Which of the guest's devices it is, where these have numbers.
    pub slot: u16,
}

/// What a driver must know of a VM to find it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// Which driver.
    pub driver: String,
    /// The VM.
    pub spec: VmSpec,
    /// Where it is in its life.
    pub phase: Phase,
    /// When its process started, in the kernel's ticks: another process may get the same id later.
    pub started: Option<u64>,
    /// The number of its domain, on Xen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domid: Option<u32>,
    /// How many devices for disks the guest was started with.
    pub slots: u16,
    /// Whether the toolstack asked for its end.
    pub is_ending: bool,
    /// By position.
    pub disks: BTreeMap<u8, SavedDisk>,
    /// By position.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vifs: BTreeMap<u8, PluggedVif>,
}

impl Saved {
    /// A VM that was just made.
    pub(crate) fn new(driver: &str, spec: &VmSpec) -> Self {
        Self {
            driver: driver.to_owned(),
            spec: spec.clone(),
            phase: Phase::Made,
            started: None,
            domid: None,
            slots: 0,
            is_ending: false,
            disks: BTreeMap::new(),
            vifs: BTreeMap::new(),
        }
    }

    /// Whether the VM has this very disk.
    pub(crate) fn has(&self, disk: &DiskSpec) -> bool {
        self.disks.get(&disk.position).is_some_and(|known| known.disk.spec.vbd == disk.vbd)
    }
}

/// The directory of one VM.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    vm: Uuid,
    dir: PathBuf,
}

impl Place {
    /// Of this VM.
    ///
    /// # Errors
    /// The run directory's name is too long for sockets.
    pub(crate) fn of(settings: &Settings, vm: Uuid) -> Result<Self, ApiError> {
        let dir = settings.machines_dir().join(vm.simple().to_string());
        let (len, max) = (dir.as_os_str().as_bytes().len(), SOCKET_PATH_MAX - SOCKET_NAME_MAX - 1);
        if len > max {
            let what = format!("its directory {} has a name of {len} bytes", dir.display());
            let why = format!(
                "names of sockets in it could exceed {SOCKET_PATH_MAX}; choose a shorter run directory (at most {max})"
            );
            return Err(failed(vm, what, why));
        }
        Ok(Self { vm, dir })
    }

    /// Its path.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A file in it.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The part of it that is its guest's process's: its working directory, and the only one in which it can make
    /// anything. What the daemon trusts lies above it. VMs made by earlier versions have one directory for both.
    pub(crate) fn own(&self) -> PathBuf {
        let own = self.join("g");
        if own.is_dir() { own } else { self.dir.clone() }
    }

    /// The guest's user and group, where it has its own.
    pub(crate) fn user(&self) -> Option<(u32, u32)> {
        let data = fs::metadata(self.own()).ok()?;
        (data.uid() != tapio_sys::process::user()).then(|| (data.uid(), data.gid()))
    }

    /// Makes it, with a user for its guest where settings say so. The directory is the daemon's; the guest's group may
    /// pass through it, and sockets that disk processes make there belong to that group, too.
    ///
    /// # Errors
    /// The file system's; no user is left.
    pub(crate) fn make(&self, settings: &Settings) -> Result<(), ApiError> {
        /// Two VMs that are made at the same time choose their users one after the other.
        static CHOOSING: Mutex<()> = Mutex::new(());
        let told = |error: io::Error| failed(self.vm, format!("cannot make {}", self.dir.display()), error);
        if let Some(above) = self.dir.parent() {
            tapio_sys::private::make_dir(above, 0o711).map_err(told)?;
        }
        let own = self.join("g");
        for dir in [&self.dir, &own] {
            match fs::DirBuilder::new().mode(0o700).create(dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(told(error)),
                _ => {}
            }
        }
        fs::set_permissions(&own, fs::Permissions::from_mode(0o700)).map_err(told)?;
        let Some(range) = settings.guest_users else {
            return fs::set_permissions(&self.dir, fs::Permissions::from_mode(0o700)).map_err(told);
        };
        let _choosing = CHOOSING.lock();
        let user = range.choose(self.vm, &taken(settings, &own)).ok_or_else(|| {
            let why = format!("all {} users of guest-users ({range}) have running VMs", range.count);
            failed(self.vm, "there is no user for its guest", why)
        })?;
        std::os::unix::fs::chown(&own, Some(user), Some(user)).map_err(told)?;
        std::os::unix::fs::chown(&self.dir, None, Some(user)).map_err(told)?;
        fs::set_permissions(&self.dir, fs::Permissions::from_mode(0o2710)).map_err(told)
    }

    /// Makes the guest's user the owner of a file, where guests have one.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn give_away(&self, file: &Path) -> Result<(), ApiError> {
        let Some((uid, gid)) = self.user() else { return Ok(()) };
        std::os::unix::fs::chown(file, Some(uid), Some(gid))
            .map_err(|error| failed(self.vm, format!("cannot give {} to user {uid}", file.display()), error))
    }

    /// The record of the VM; none where there is no such VM.
    ///
    /// # Errors
    /// The record cannot be read, or is not ours.
    pub(crate) fn load(&self) -> Result<Option<Saved>, ApiError> {
        let file = self.join("machine.json");
        let told = |why: String| failed(self.vm, format!("cannot read {}", file.display()), why);
        match fs::metadata(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(told(error.to_string())),
            Ok(data) if data.len() > RECORD_LEN_MAX => return Err(told("it is too long".into())),
            Ok(_) => {}
        }
        let text = fs::read(&file).map_err(|error| told(error.to_string()))?;
        serde_json::from_slice(&text).map(Some).map_err(|error| told(error.to_string()))
    }

    /// Keeps what is known: the record is replaced as a whole, so that a reader finds the old or the new one. The
    /// directory (in /run) and the guests do not survive a power cut, so nothing is flushed.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn save(&self, saved: &Saved) -> Result<(), ApiError> {
        let (file, fresh) = (self.join("machine.json"), self.join("machine.new"));
        let told = |error: io::Error| failed(self.vm, format!("cannot write {}", file.display()), error);
        let text = serde_json::to_vec(saved).map_err(|error| told(error.into()))?;
        let mut options = fs::OpenOptions::new();
        let mut out =
            options.write(true).create(true).truncate(true).mode(0o600).open(&fresh).map_err(told)?;
        out.write_all(&text).map_err(told)?;
        fs::rename(&fresh, &file).map_err(told)
    }

    /// Forgets the VM. The record goes first; sockets that belong to disk processes stay, and the directory
    /// with them.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_file(self.join("machine.json"));
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_disk = name.as_bytes().iter().all(u8::is_ascii_digit);
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let _ = fs::remove_dir_all(entry.path());
            } else if !is_disk {
                let _ = fs::remove_file(entry.path());
            }
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Users that other VMs have.
fn taken(settings: &Settings, own: &Path) -> BTreeSet<u32> {
    let all = fs::read_dir(settings.machines_dir()).into_iter().flatten().flatten();
    let owners = all.map(|entry| entry.path().join("g")).filter(|dir| dir != own);
    owners.filter_map(|dir| fs::metadata(dir).ok()).map(|data| data.uid()).collect()
}

/// The VMs of a driver that an earlier daemon made.
pub(crate) fn found(settings: &Settings, driver: &str) -> Vec<(Place, Saved)> {
    let mut vms = Vec::new();
    for entry in fs::read_dir(settings.machines_dir()).into_iter().flatten().flatten() {
        let Some(vm) = entry.file_name().to_str().and_then(|name| Uuid::try_parse(name).ok()) else {
            continue;
        };
        let Ok(place) = Place::of(settings, vm) else { continue };
        match place.load() {
            Ok(Some(saved)) if saved.driver == driver => vms.push((place, saved)),
            Ok(Some(_)) => {}
            // A directory that stayed because disk processes ended after their VM; it is removed only if it is empty.
            Ok(None) => drop(fs::remove_dir(place.dir())),
            Err(error) => tracing::warn!(%vm, "a VM's record is ignored: {error}"),
        }
    }
    vms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traits::{DiskFacts, FrontSpec};

    fn spec() -> VmSpec {
        VmSpec {
            uuid: Uuid::new_v4(),
            name: "a\nname".into(),
            memory: 1 << 30,
            vcpus: 2,
            kernel: Some("/boot/k".into()),
            ramdisk: None,
            kernel_args: "quiet".into(),
            platform: BTreeMap::from([("max_disks".into(), "40".into())]),
            drives: Vec::new(),
        }
    }

    #[test]
    fn what_is_saved_is_found_by_its_driver_alone() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path());
        let spec = spec();
        let place = Place::of(&settings, spec.uuid).unwrap();
        place.make(&settings).unwrap();
        assert_eq!(place.load().unwrap(), None);
        let mut saved = Saved::new("uml", &spec);
        let disk =
            DiskSpec { vbd: Uuid::new_v4(), position: 7, read_only: true, is_cd: false, is_bootable: false };
        let front = FrontSpec::VhostUser { socket: place.join("7"), queues: 1 };
        let disk = PluggedDisk { spec: disk, front, node: None, size: 5, facts: DiskFacts::default() };
        saved.disks.insert(7, SavedDisk { disk, slot: 7 });
        place.save(&saved).unwrap();
        assert_eq!(place.load().unwrap().as_ref(), Some(&saved));
        assert_eq!(found(&settings, "uml").len(), 1);
        assert_eq!(found(&settings, "qemu").len(), 0);
        fs::write(place.join("7"), "").unwrap();
        place.remove();
        assert_eq!(place.load().unwrap(), None);
        assert!(place.join("7").exists(), "a disk's socket is not the driver's to remove");
    }

    #[test]
    fn a_run_directory_that_is_too_long_is_refused() {
        let settings = Settings::new(Path::new(&format!("/{}", "x".repeat(70))));
        let error = Place::of(&settings, Uuid::new_v4()).unwrap_err();
        assert!(error.params[0].contains("shorter run directory"), "{error}");
    }

    #[test]
    fn a_damaged_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path());
        let place = Place::of(&settings, Uuid::new_v4()).unwrap();
        place.make(&settings).unwrap();
        fs::write(place.join("machine.json"), "{").unwrap();
        assert!(place.load().unwrap_err().params[0].contains("machine.json"));
        assert!(found(&settings, "uml").is_empty());
    }
}
