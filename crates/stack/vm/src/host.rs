//! This host itself, as XenServer's control domain: a disk that is plugged is a block device here.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_types::ApiError;
use uuid::Uuid;

use crate::errors::{already_there, bad_power_state, detach_rejected, failed};
use crate::place::{Phase, Place, Saved, SavedDisk, found};
use crate::poll::poll;
use crate::settings::Settings;
use crate::traits::{DiskSpec, FrontSpec, PluggedDisk, ShutdownKind, VmDriver, VmEvent, VmSpec, VmState};

const NAME: &str = "host";

/// How long something that looks at a device may hold it before we call it used.
const CLAIM_LIMIT: Duration = Duration::from_secs(1);

/// The driver. Its VM, the host, always runs; it is "made" when the daemon first names its UUID.
#[derive(Debug)]
pub(crate) struct Host {
    settings: Settings,
    vms: Mutex<BTreeMap<Uuid, (Place, Saved)>>,
}

impl Host {
    /// Disks that an earlier daemon plugged are still there.
    pub(crate) fn new(settings: &Settings) -> Self {
        let known = found(settings, NAME).into_iter().map(|(place, saved)| (saved.spec.uuid, (place, saved)));
        Self { settings: settings.clone(), vms: Mutex::new(known.collect()) }
    }

    fn change<T>(
        &self,
        vm: Uuid,
        change: impl FnOnce(&mut Saved) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut vms = self.vms.lock();
        let (place, saved) = vms.get_mut(&vm).ok_or_else(|| bad_power_state(vm, "Running", "Halted"))?;
        let mut fresh = saved.clone();
        let answer = change(&mut fresh)?;
        place.save(&fresh)?;
        *saved = fresh;
        Ok(answer)
    }
}

/// Opens a device for itself alone, which the kernel refuses while something is mounted on it or made of it.
fn claim(node: &Path) -> io::Result<()> {
    fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(node).map(|_| ())
}

impl VmDriver for Host {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ApiError> {
        Ok(())
    }

    fn front(&self, _: Uuid, _: &DiskSpec) -> Result<FrontSpec, ApiError> {
        Ok(FrontSpec::Device)
    }

    fn create(&self, vm: &VmSpec) -> Result<(), ApiError> {
        let mut vms = self.vms.lock();
        if vms.contains_key(&vm.uuid) {
            return Ok(());
        }
        let place = Place::of(&self.settings, vm.uuid)?;
        place.make(&self.settings)?;
        let saved = Saved { phase: Phase::Running, ..Saved::new(NAME, vm) };
        place.save(&saved)?;
        vms.insert(vm.uuid, (place, saved));
        Ok(())
    }

    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError> {
        let position = disk.spec.position;
        let node = disk.node.as_deref().ok_or_else(|| {
            failed(
                vm,
                format!("disk {position}"),
                "its process named no device; see `tapio disk device probe`",
            )
        })?;
        fs::metadata(node).map_err(|error| failed(vm, format!("device {}", node.display()), error))?;
        self.change(vm, |saved| {
            if saved.disks.get(&position).is_some_and(|known| known.disk.spec.vbd != disk.spec.vbd) {
                return Err(already_there(position));
            }
            saved.disks.insert(position, SavedDisk { disk: disk.clone(), slot: u16::from(position) });
            Ok(())
        })
    }

    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let node = self.vms.lock().get(&vm).and_then(|(_, saved)| {
            saved.has(disk).then(|| saved.disks.get(&disk.position)?.disk.node.clone()).flatten()
        });
        let Some(node) = node else { return Ok(()) };
        let until = until.min(Instant::now() + CLAIM_LIMIT);
        loop {
            if force {
                break;
            }
            match claim(&node) {
                Ok(()) => break,
                // A program that examines new devices (udev, blkid) holds it for a moment.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    if Instant::now() >= until {
                        let why = format!("{} is mounted or used; unmount it first", node.display());
                        return Err(detach_rejected(disk.vbd, why));
                    }
                    poll(&mut [], until.min(Instant::now() + Duration::from_millis(20)));
                }
                // Gone, with its process for example.
                Err(_) => break,
            }
        }
        self.change(vm, |saved| {
            saved.disks.remove(&disk.position);
            Ok(())
        })
    }

    fn unpause(&self, _: Uuid) -> Result<(), ApiError> {
        Ok(())
    }

    fn pause(&self, vm: Uuid) -> Result<(), ApiError> {
        Err(ApiError::new("OPERATION_NOT_ALLOWED", [format!("VM {vm} is this host: it cannot be paused")]))
    }

    fn shutdown(&self, vm: Uuid, _: ShutdownKind, _: Instant) -> Result<(), ApiError> {
        Err(ApiError::new(
            "OPERATION_NOT_ALLOWED",
            [format!("VM {vm} is this host: it cannot be shut down from here")],
        ))
    }

    fn state(&self, _: Uuid) -> Result<VmState, ApiError> {
        Ok(VmState::Running)
    }

    fn console(&self, _: Uuid) -> Option<PathBuf> {
        None
    }

    fn wait_event(&self, until: Instant) -> Option<VmEvent> {
        // The host has no event: its daemon would end with it.
        poll(&mut [], until);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traits::DiskFacts;

    #[test]
    fn a_disk_is_a_node_of_this_host() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path());
        let driver = Host::new(&settings);
        let vm = VmSpec {
            uuid: Uuid::new_v4(),
            name: "this host".into(),
            memory: 0,
            vcpus: 1,
            kernel: None,
            ramdisk: None,
            kernel_args: String::new(),
            platform: BTreeMap::new(),
            drives: Vec::new(),
        };
        driver.create(&vm).unwrap();
        driver.create(&vm).expect("it is always there");
        let spec =
            DiskSpec { vbd: Uuid::new_v4(), position: 0, read_only: false, is_cd: false, is_bootable: false };
        assert_eq!(driver.front(vm.uuid, &spec).unwrap(), FrontSpec::Device);
        let mut disk =
            PluggedDisk { spec, front: FrontSpec::Device, node: None, size: 1, facts: DiskFacts::default() };
        assert!(driver.plug(vm.uuid, &disk).is_err(), "no node was named");
        // O_EXCL without O_CREAT does nothing to a file: it is never in use.
        let node = dir.path().join("node");
        fs::write(&node, "").unwrap();
        disk.node = Some(node);
        driver.plug(vm.uuid, &disk).unwrap();
        let driver = Host::new(&settings);
        let until = Instant::now() + Duration::from_secs(60);
        let mut other = disk.clone();
        other.spec.vbd = Uuid::new_v4();
        assert_eq!(driver.plug(vm.uuid, &other).unwrap_err().code, "DEVICE_ALREADY_EXISTS", "still known");
        driver.unplug(vm.uuid, &disk.spec, false, until).unwrap();
        driver.unplug(vm.uuid, &disk.spec, false, until).expect("it is gone already");
        driver.plug(vm.uuid, &other).unwrap();
        assert_eq!(
            driver.shutdown(vm.uuid, ShutdownKind::Hard, until).unwrap_err().code,
            "OPERATION_NOT_ALLOWED"
        );
        assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Running);
        let begun = Instant::now();
        assert_eq!(driver.wait_event(begun + Duration::from_millis(20)), None);
        assert!(begun.elapsed() >= Duration::from_millis(20));
    }
}
