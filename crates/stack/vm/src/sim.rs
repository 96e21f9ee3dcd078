//! Simulated VMs without a guest: for tests of the toolstack, and for scale. What they do and how long it takes is
//! said by `VM.platform`, so that any client can arrange it:
//!
//! | key | meaning |
//! |---|---|
//! | `sim-create-ms` `sim-boot-ms` `sim-plug-ms` `sim-unplug-ms` `sim-pause-ms` `sim-shutdown-ms` | how long it takes |
//! | `sim-fail` | fails: `create`, `boot`, `pause`, `plug:N`, `unplug:N` (refused), `unplug-timeout:N`, `plug-vif:N`, `unplug-vif:N`, `move-vif:N`, `shutdown`, `save`, `load`, `vcpus`, `memory` |
//! | `sim-balloon-stuck` | its memory stays, whatever it is told to have |
//! | `sim-save-ms` `sim-memory` | how long its memory takes to be written, and how many bytes it has (65,536) |
//! | `sim-machine` | its memory is read by VMs alone that have the same |
//! | `sim-memory-of` | the UUID of the VM whose memory it goes on from, if that is another |
//! | `sim-event` `sim-event-ms` | `halt`, `reboot` or `crash`, so long after the start |
//! | `sim-agent` | an agent answers: `yes`, `silent` (never), `sticky` (thaws at the third try), `short` (thaws by itself) |
//! | `sim-freeze-ms` | how long a freeze takes |
//! | `sim-domid` | the number of its domain, as a host of domains would say it |
//! | `sim-front` | how disks are offered: `nothing` (default), `vhost-user` (no client), `device`, `xen` (no front end) |
//!
//! All bridges are there but those whose names begin with `missing`; names that begin with `other` are of no bridges.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_types::ApiError;
use uuid::Uuid;

use crate::errors::{
    already_there, bad_power_state, detach_rejected, detach_timeout, failed, invalid_device, quiesce,
    shutdown_timeout, vif as vif_error,
};
use crate::facts::GuestFacts;
use crate::place::{Phase, Place, Saved, SavedDisk, found};
use crate::settings::Settings;
use crate::supervise::Events;
use crate::tap::BridgeState;
use crate::traits::{
    DiskSpec, FrontSpec, PluggedDisk, PluggedVif, ShutdownKind, VifSpec, VmDriver, VmEvent, VmSpec, VmState,
};

const NAME: &str = "sim";

/// Places for network interfaces.
const VIFS_MAX: u8 = 8;

/// Longest time that a simulated step may take.
const LATENCY_MAX: Duration = Duration::from_secs(600);

#[derive(Debug)]
struct DriverVm {
    place: Place,
    saved: Mutex<Saved>,
}

/// The driver.
#[derive(Debug)]
pub(crate) struct Sim {
    settings: Settings,
    vms: Mutex<BTreeMap<Uuid, Arc<DriverVm>>>,
    /// What happens by itself, and when.
    planned: Mutex<Vec<(Instant, VmEvent)>>,
    events: Events,
}

impl Sim {
    /// VMs of an earlier daemon go on.
    pub(crate) fn new(settings: &Settings) -> Self {
        let guest = |(place, saved): (Place, Saved)| {
            (saved.spec.uuid, Arc::new(DriverVm { place, saved: Mutex::new(saved) }))
        };
        Self {
            settings: settings.clone(),
            vms: Mutex::new(found(settings, NAME).into_iter().map(guest).collect()),
            planned: Mutex::default(),
            events: Events::default(),
        }
    }

    fn known(&self, vm: Uuid) -> Result<Arc<DriverVm>, ApiError> {
        self.vms.lock().get(&vm).cloned().ok_or_else(|| bad_power_state(vm, "Running", "Halted"))
    }

    fn forget(&self, vm: Uuid) {
        if let Some(guest) = self.vms.lock().remove(&vm) {
            guest.place.remove();
        }
        self.planned.lock().retain(|(_, event)| of(event) != vm);
    }
}

fn of(event: &VmEvent) -> Uuid {
    match event {
        VmEvent::Halted(vm)
        | VmEvent::Rebooted(vm)
        | VmEvent::Crashed(vm, _)
        | VmEvent::Agent(vm)
        | VmEvent::Memory(vm, _) => *vm,
    }
}

fn duration(spec: &VmSpec, key: &str) -> Duration {
    let ms = spec.platform.get(key).and_then(|text| text.parse().ok()).unwrap_or(0);
    Duration::from_millis(ms).min(LATENCY_MAX)
}

fn fails(spec: &VmSpec, what: &str) -> bool {
    spec.platform.get("sim-fail").is_some_and(|all| all.split(',').any(|one| one.trim() == what))
}

/// Waits as `VM.platform` says; gives up at `until`.
fn takes(spec: &VmSpec, key: &str, until: Option<Instant>) -> bool {
    let wait = duration(spec, key);
    let left = until.map_or(wait, |until| until.saturating_duration_since(Instant::now()));
    thread::sleep(wait.min(left));
    wait <= left
}

/// What stands for the version of its emulator's devices.
fn machine(spec: &VmSpec) -> String {
    spec.platform.get("sim-machine").cloned().unwrap_or_default()
}

/// What stands for the guest's memory: no two VMs have the same, but for one that goes on from the memory of another
/// (`sim-memory-of`). It tells which network interfaces the guest has, as memory does.
fn memory(saved: &Saved) -> Vec<u8> {
    let spec = &saved.spec;
    let len = spec.platform.get("sim-memory").and_then(|text| text.parse().ok()).unwrap_or(65_536_usize);
    let of = spec.platform.get("sim-memory-of").and_then(|text| text.parse().ok()).unwrap_or(spec.uuid);
    of.into_bytes().into_iter().cycle().take(len.min(1 << 30)).chain(saved.vifs.keys().copied()).collect()
}

impl DriverVm {
    /// Changes what is known, and keeps it.
    fn change(&self, change: impl FnOnce(&mut Saved)) -> Result<(), ApiError> {
        let mut saved = self.saved.lock();
        let mut fresh = saved.clone();
        change(&mut fresh);
        self.place.save(&fresh)?;
        *saved = fresh;
        Ok(())
    }

    fn spec(&self) -> VmSpec {
        self.saved.lock().spec.clone()
    }
}

impl VmDriver for Sim {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ApiError> {
        Ok(())
    }

    fn front(&self, vm: Uuid, disk: &DiskSpec) -> Result<FrontSpec, ApiError> {
        let guest = self.known(vm)?;
        let spec = guest.spec();
        Ok(match spec.platform.get("sim-front").map(String::as_str) {
            Some("vhost-user") => {
                FrontSpec::VhostUser { socket: guest.place.join(&disk.position.to_string()), queues: 1 }
            }
            Some("device") => FrontSpec::Device,
            Some("xen") => FrontSpec::Xen,
            _ => FrontSpec::Nothing,
        })
    }

    fn create(&self, vm: &VmSpec) -> Result<(), ApiError> {
        if self.vms.lock().contains_key(&vm.uuid) {
            return Err(bad_power_state(vm.uuid, "Halted", "Running"));
        }
        takes(vm, "sim-create-ms", None);
        if fails(vm, "create") {
            return Err(failed(vm.uuid, "cannot be made", "it was told to fail (sim-fail=create)"));
        }
        let place = Place::of(&self.settings, vm.uuid)?;
        place.make(&self.settings)?;
        let saved = Saved::new(NAME, vm);
        place.save(&saved)?;
        self.vms.lock().insert(vm.uuid, Arc::new(DriverVm { place, saved: Mutex::new(saved) }));
        Ok(())
    }

    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        let (spec, position) = (guest.spec(), disk.spec.position);
        if guest.saved.lock().disks.get(&position).is_some_and(|known| known.disk.spec.vbd != disk.spec.vbd) {
            return Err(already_there(position));
        }
        takes(&spec, "sim-plug-ms", None);
        if fails(&spec, &format!("plug:{position}")) {
            return Err(failed(vm, format!("disk {position}"), "the guest was told to refuse it (sim-fail)"));
        }
        let saved = SavedDisk { disk: disk.clone(), slot: u16::from(position) };
        guest.change(|known| {
            known.disks.insert(position, saved);
        })
    }

    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let Ok(guest) = self.known(vm) else { return Ok(()) };
        if !guest.saved.lock().has(disk) {
            return Ok(());
        }
        let spec = guest.spec();
        let is_told = |what: &str| !force && fails(&spec, &format!("{what}:{}", disk.position));
        if is_told("unplug-timeout") {
            thread::sleep(until.saturating_duration_since(Instant::now()).min(LATENCY_MAX));
            return Err(detach_timeout(disk.vbd, "the guest was told not to answer (sim-fail)"));
        }
        if !takes(&spec, "sim-unplug-ms", Some(until)) {
            return Err(detach_timeout(disk.vbd, "the guest takes longer (sim-unplug-ms)"));
        }
        if is_told("unplug") {
            return Err(detach_rejected(disk.vbd, "the guest was told to keep it (sim-fail)"));
        }
        guest.change(|known| {
            known.disks.remove(&disk.position);
        })
    }

    fn check_vifs(&self, _: Uuid) -> Result<(), ApiError> {
        Ok(())
    }

    fn bridge(&self, name: &str) -> Result<BridgeState, ApiError> {
        Ok(match name {
            name if name.starts_with("missing") => BridgeState::Missing,
            name if name.starts_with("other") => BridgeState::Other("sim".to_owned()),
            _ => BridgeState::There,
        })
    }

    fn plug_vif(&self, vm: Uuid, vif: &VifSpec) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        let (spec, position) = (guest.spec(), vif.position);
        if position >= VIFS_MAX {
            return Err(invalid_device(position, "a simulated VM has network interfaces 0 to 7"));
        }
        if guest.saved.lock().vifs.get(&position).is_some_and(|known| known.vif != vif.vif) {
            return Err(already_there(position));
        }
        if fails(&spec, &format!("plug-vif:{position}")) {
            return Err(failed(
                vm,
                format!("network interface {position}"),
                "it was told to fail (sim-fail)",
            ));
        }
        let (tap, bridge) = (vif.bridge.as_ref().map(|_| vif.tap.clone()), vif.bridge.clone());
        let plugged = PluggedVif { vif: vif.vif, tap, bridge };
        guest.change(|known| {
            known.vifs.insert(position, plugged);
        })
    }

    fn move_vif(&self, vm: Uuid, vif: &VifSpec) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        if fails(&guest.spec(), &format!("move-vif:{}", vif.position)) {
            let what = format!("network interface {}", vif.position);
            return Err(failed(vm, what, "it was told to fail (sim-fail)"));
        }
        guest.change(|known| {
            if let Some(plugged) = known.vifs.get_mut(&vif.position) {
                plugged.bridge.clone_from(&vif.bridge);
            }
        })
    }

    fn unplug_vif(&self, vm: Uuid, vif: &VifSpec, force: bool, _: Instant) -> Result<(), ApiError> {
        let Ok(guest) = self.known(vm) else { return Ok(()) };
        if !force && fails(&guest.spec(), &format!("unplug-vif:{}", vif.position)) {
            let why = "the guest was told to keep it (sim-fail)";
            return Err(vif_error("DETACH_REJECTED", vif.vif, why));
        }
        guest.change(|known| {
            known.vifs.remove(&vif.position);
        })
    }

    fn vifs(&self, vm: Uuid) -> Result<BTreeMap<u8, PluggedVif>, ApiError> {
        Ok(self.known(vm)?.saved.lock().vifs.clone())
    }

    fn guest(&self, vm: Uuid, until: Instant) -> Result<Option<GuestFacts>, ApiError> {
        let guest = self.known(vm)?;
        let spec = guest.spec();
        match spec.platform.get("sim-agent").map(String::as_str) {
            None => Ok(None),
            Some("silent") => {
                thread::sleep(until.saturating_duration_since(Instant::now()).min(LATENCY_MAX));
                Err(failed(vm, "its guest is not known", "the agent has not answered in time (sim-agent)"))
            }
            Some(_) => Ok(Some(GuestFacts::of_words(
                "kernel=6.1.0-sim name=simulated os=Simulated%201 distro=sim release=1.2 total=65536 free=1024 \
                 ip=192.0.2.5 fs=vda,ext4,/",
            ))),
        }
    }

    fn freeze(&self, vm: Uuid, until: Instant) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        let spec = guest.spec();
        match spec.platform.get("sim-agent").map(String::as_str) {
            None => return Err(quiesce("NOT_SUPPORTED", vm, "it has no agent (sim-agent)")),
            Some("silent") => {
                thread::sleep(until.saturating_duration_since(Instant::now()).min(LATENCY_MAX));
                return Err(quiesce("PLUGIN_DEOS_NOT_RESPOND", vm, "it was told not to answer (sim-agent)"));
            }
            Some(_) => {}
        }
        // A file, so that a later daemon finds it: a guest stays frozen.
        let frozen = std::fs::write(guest.place.join("frozen"), "");
        frozen.map_err(|error| failed(vm, "cannot be frozen", error))?;
        if takes(&spec, "sim-freeze-ms", Some(until)) {
            return Ok(());
        }
        Err(quiesce("PLUGIN_DEOS_NOT_RESPOND", vm, "it takes longer (sim-freeze-ms)"))
    }

    fn thaw(&self, vm: Uuid, _: Instant) -> Result<bool, ApiError> {
        let guest = self.known(vm)?;
        let file = guest.place.join("frozen");
        let agent = guest.spec().platform.remove("sim-agent");
        let tries = std::fs::read(&file).ok().map(|text| text.len());
        if let (Some("sticky"), Some(tries @ 0..2)) = (agent.as_deref(), tries) {
            let _ = std::fs::write(&file, "x".repeat(tries + 1));
            return Err(quiesce("PLUGIN_DEOS_NOT_RESPOND", vm, "it was told to stay frozen (sim-agent)"));
        }
        let _ = std::fs::remove_file(&file);
        Ok(tries.is_some() && agent.as_deref() != Some("short"))
    }

    fn unpause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        let spec = guest.spec();
        let is_start = guest.saved.lock().phase == Phase::Made;
        if is_start {
            takes(&spec, "sim-boot-ms", None);
            if fails(&spec, "boot") {
                return Err(failed(vm, "does not start", "it was told to fail (sim-fail=boot)"));
            }
            let event = match spec.platform.get("sim-event").map(String::as_str) {
                Some("halt") => Some(VmEvent::Halted(vm)),
                Some("reboot") => Some(VmEvent::Rebooted(vm)),
                Some("crash") => {
                    Some(VmEvent::Crashed(vm, "the guest was told to crash (sim-event)".to_owned()))
                }
                _ => None,
            };
            let when = Instant::now() + duration(&spec, "sim-event-ms");
            self.planned.lock().extend(event.map(|event| (when, event)));
            self.events.wake();
        }
        guest.change(|known| known.phase = Phase::Running)
    }

    fn pause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        let spec = guest.spec();
        takes(&spec, "sim-pause-ms", None);
        if fails(&spec, "pause") {
            return Err(failed(vm, "does not pause", "it was told to fail (sim-fail=pause)"));
        }
        guest.change(|known| known.phase = Phase::Paused)
    }

    fn set_vcpus(&self, vm: Uuid, count: u32) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        if fails(&guest.spec(), "vcpus") {
            return Err(failed(vm, "its processors stay", "it was told to fail (sim-fail=vcpus)"));
        }
        guest.change(|known| known.spec.vcpus = count)
    }

    fn vcpus(&self, vm: Uuid) -> Result<Option<u32>, ApiError> {
        Ok(self.known(vm).ok().map(|guest| guest.spec().vcpus))
    }

    fn set_memory(&self, vm: Uuid, bytes: u64) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        let spec = guest.spec();
        if fails(&spec, "memory") {
            return Err(failed(vm, "its memory stays", "it was told to fail (sim-fail=memory)"));
        }
        if spec.platform.contains_key("sim-balloon-stuck") {
            return Ok(());
        }
        guest.change(|known| known.spec.memory = bytes)?;
        self.events.push(VmEvent::Memory(vm, bytes));
        Ok(())
    }

    fn memory(&self, vm: Uuid) -> Result<Option<u64>, ApiError> {
        Ok(self.known(vm).ok().map(|guest| guest.spec().memory))
    }

    fn check_save(&self, _: Uuid) -> Result<(), ApiError> {
        Ok(())
    }

    fn save(&self, vm: Uuid, to: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> Result<(), ApiError> {
        let spec = self.known(vm)?.spec();
        let mut to = File::from(to);
        let memory = memory(&self.known(vm)?.saved.lock());
        let told = |error: std::io::Error| failed(vm, "its memory cannot be written", error);
        let (first, second) = memory.split_at(memory.len() / 2);
        to.write_all(first).map_err(told)?;
        takes(&spec, "sim-save-ms", None);
        if is_cancelled() {
            return Err(ApiError::new("TASK_CANCELLED", [""]));
        }
        if fails(&spec, "save") {
            return Err(failed(vm, "its memory cannot be written", "it was told to fail (sim-fail=save)"));
        }
        to.write_all(second).map_err(told)
    }

    fn saved_as(&self, vm: Uuid) -> Result<String, ApiError> {
        Ok(machine(&self.known(vm)?.spec()))
    }

    fn create_saved(&self, vm: &VmSpec, kind: &str) -> Result<(), ApiError> {
        let own = machine(vm);
        if own != kind {
            let why = format!("it was suspended as {kind:?}, and here it would be {own:?} (sim-machine)");
            return Err(failed(vm.uuid, "cannot be made", why));
        }
        self.create(vm)
    }

    fn load(&self, vm: Uuid, from: OwnedFd) -> Result<(), ApiError> {
        let guest = self.known(vm)?;
        let spec = guest.spec();
        let mut came = Vec::new();
        let told = |error: std::io::Error| failed(vm, "its memory cannot be read", error);
        File::from(from).read_to_end(&mut came).map_err(told)?;
        if fails(&spec, "load") {
            return Err(failed(vm, "its memory cannot be read", "it was told to fail (sim-fail=load)"));
        }
        if came != memory(&guest.saved.lock()) {
            return Err(failed(vm, "its memory cannot be read", "it is not what was written"));
        }
        guest.change(|known| known.phase = Phase::Paused)
    }

    fn shutdown(&self, vm: Uuid, kind: ShutdownKind, until: Instant) -> Result<(), ApiError> {
        let Ok(guest) = self.known(vm) else { return Ok(()) };
        if kind == ShutdownKind::Clean {
            let (spec, begun) = (guest.spec(), Instant::now());
            if fails(&spec, "shutdown") {
                thread::sleep(until.saturating_duration_since(begun).min(LATENCY_MAX));
                return Err(shutdown_timeout(vm, begun.elapsed()));
            }
            if !takes(&spec, "sim-shutdown-ms", Some(until)) {
                return Err(shutdown_timeout(vm, begun.elapsed()));
            }
        }
        self.forget(vm);
        Ok(())
    }

    fn state(&self, vm: Uuid) -> Result<VmState, ApiError> {
        let Ok(guest) = self.known(vm) else { return Ok(VmState::Halted) };
        let phase = guest.saved.lock().phase;
        Ok(if phase == Phase::Running { VmState::Running } else { VmState::Paused })
    }

    fn domid(&self, vm: Uuid) -> Option<u32> {
        self.known(vm).ok()?.spec().platform.get("sim-domid")?.parse().ok()
    }

    fn console(&self, _: Uuid) -> Option<PathBuf> {
        None
    }

    fn wait_event(&self, until: Instant) -> Option<VmEvent> {
        loop {
            // A VM that is started meanwhile may plan something earlier.
            let next = || self.planned.lock().iter().map(|(when, _)| *when).min().unwrap_or(until).min(until);
            if let Some(event) = self.events.wait_until(next) {
                return Some(event);
            }
            let due = {
                let mut planned = self.planned.lock();
                let at = planned.iter().position(|(when, _)| *when <= Instant::now());
                at.map(|at| planned.remove(at).1)
            };
            if let Some(event) = due {
                self.forget(of(&event));
                self.events.push(event);
            } else if Instant::now() >= until {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traits::DiskFacts;

    fn spec(platform: &[(&str, &str)]) -> VmSpec {
        VmSpec {
            uuid: Uuid::new_v4(),
            name: "simulated".into(),
            memory: 0,
            vcpus: 1,
            kernel: None,
            ramdisk: None,
            kernel_args: String::new(),
            platform: platform.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
            drives: Vec::new(),
        }
    }

    fn disk(driver: &Sim, vm: Uuid, position: u8) -> PluggedDisk {
        let spec =
            DiskSpec { vbd: Uuid::new_v4(), position, read_only: false, is_cd: false, is_bootable: false };
        let front = driver.front(vm, &spec).unwrap();
        PluggedDisk { spec, front, node: None, size: 1, facts: DiskFacts::default() }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_storm_of_vms_lives_and_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path());
        let driver = Sim::new(&settings);
        let vms: Vec<VmSpec> = (0..125).map(|_| spec(&[])).collect();
        let begun = Instant::now();
        for vm in &vms {
            driver.create(vm).unwrap();
            for position in 0..8 {
                driver.plug(vm.uuid, &disk(&driver, vm.uuid, position)).unwrap();
            }
            driver.unpause(vm.uuid).unwrap();
        }
        println!("125 VMs with 8 disks in {:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
        drop(driver);
        let driver = Sim::new(&settings);
        for vm in &vms {
            assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Running);
            let other = disk(&driver, vm.uuid, 3);
            assert_eq!(driver.plug(vm.uuid, &other).unwrap_err().code, "DEVICE_ALREADY_EXISTS");
            driver.shutdown(vm.uuid, ShutdownKind::Clean, soon()).unwrap();
            assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Halted);
        }
        assert_eq!(fs_entries(&settings), 0, "nothing is left");
    }

    fn fs_entries(settings: &Settings) -> usize {
        std::fs::read_dir(settings.machines_dir()).unwrap().count()
    }

    #[test]
    fn failures_and_latencies_are_those_that_were_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let driver = Sim::new(&Settings::new(dir.path()));
        let told = "plug:1, unplug:2,unplug-timeout:3,shutdown,pause";
        let vm = spec(&[("sim-fail", told), ("sim-plug-ms", "30"), ("sim-front", "vhost-user")]);
        driver.create(&vm).unwrap();
        assert_eq!(driver.create(&vm).unwrap_err().code, "VM_BAD_POWER_STATE");
        let disks: Vec<PluggedDisk> = (0..4).map(|position| disk(&driver, vm.uuid, position)).collect();
        assert!(matches!(&disks[0].front, FrontSpec::VhostUser { socket, .. } if socket.ends_with("0")));
        for (position, disk) in disks.iter().enumerate() {
            let begun = Instant::now();
            assert_eq!(driver.plug(vm.uuid, disk).is_err(), position == 1);
            assert!(begun.elapsed() >= Duration::from_millis(30));
        }
        driver.plug(vm.uuid, &disks[0]).expect("the same disk again");
        driver.unpause(vm.uuid).unwrap();
        assert!(driver.pause(vm.uuid).is_err());
        let unplug = |at: usize, force| {
            driver.unplug(vm.uuid, &disks[at].spec, force, Instant::now() + Duration::from_millis(50))
        };
        unplug(1, false).expect("it was never there");
        assert_eq!(unplug(2, false).unwrap_err().code, "DEVICE_DETACH_REJECTED");
        let begun = Instant::now();
        assert_eq!(unplug(3, false).unwrap_err().code, "DEVICE_DETACH_TIMEOUT");
        assert!(begun.elapsed() >= Duration::from_millis(50) && begun.elapsed() < Duration::from_secs(300));
        unplug(2, true).unwrap();
        unplug(3, true).unwrap();
        let until = Instant::now() + Duration::from_millis(30);
        let error = driver.shutdown(vm.uuid, ShutdownKind::Clean, until).unwrap_err();
        assert_eq!(error.code, "VM_SHUTDOWN_TIMEOUT");
        assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Running, "it goes on");
        driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
        assert!(driver.create(&spec(&[("sim-fail", "create")])).is_err());
        let never = spec(&[("sim-fail", "boot")]);
        driver.create(&never).unwrap();
        assert!(driver.unpause(never.uuid).is_err());
        assert_eq!(driver.state(never.uuid).unwrap(), VmState::Paused);
    }

    #[test]
    fn events_come_when_they_were_arranged() {
        let dir = tempfile::tempdir().unwrap();
        let driver = Sim::new(&Settings::new(dir.path()));
        for (word, wanted) in [("halt", 0), ("reboot", 1), ("crash", 2)] {
            let vm = spec(&[("sim-event", word), ("sim-event-ms", "700")]);
            driver.create(&vm).unwrap();
            let begun = Instant::now();
            driver.unpause(vm.uuid).unwrap();
            let at_once = driver.wait_event(Instant::now() + Duration::from_millis(5));
            let event = at_once.or_else(|| driver.wait_event(soon())).expect("an event");
            assert!(begun.elapsed() >= Duration::from_millis(700), "{event:?} came early");
            let got = match event {
                VmEvent::Halted(_) => 0,
                VmEvent::Rebooted(_) => 1,
                VmEvent::Crashed(_, why) => why.len().min(2),
                VmEvent::Agent(_) | VmEvent::Memory(..) => 9,
            };
            assert_eq!(got, wanted);
            assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Halted);
        }
    }
}
