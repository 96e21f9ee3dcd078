//! QEMU, with KVM where that really works and its emulator elsewhere.
//!
//! The emulator is started when the VM is made, with its processors stopped, and is controlled over QMP (the QEMU
//! Machine Protocol). A disk is a device behind a bridge, in a slot that follows from its position; bridges are there
//! from the start, because the firmware must know them for disks to come later. CD drives are emulated, and there
//! from the start, too ([`drive`]).

mod affinity;
mod balloon;
mod cd;
mod command;
mod drive;
mod guest_agent;
mod made;
mod memory;
mod probe;
mod processors;
mod qga;
mod qmp;
mod screen;
mod uefi;
mod vif;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tapio_types::ApiError;
use uuid::Uuid;

use self::command::{Kernel, Origin};
use self::qmp::{Fate, Qmp, QmpError, Told};
use crate::agent::{HELLO_LIMIT, Refusal, Way};
use crate::boot::{self, Kernels};
use crate::confine::calls::Emulator;
use crate::confine::{Confinement, Needs, readable};
use crate::console::cause;
use crate::errors::{
    already_there, attach_timeout, bad_power_state, detach_rejected, detach_timeout, failed, illegal_device,
    lacks_feature, shutdown_timeout,
};
use crate::facts::{GuestDisk, GuestFacts};
use crate::fleet::{self, Fleet};
use crate::guest::initramfs;
use crate::nvram;
use crate::place::{Phase, Place, Saved, SavedDisk};
use crate::poll::poll;
use crate::process::{Process, open_log};
use crate::settings::Settings;
use crate::supervise::verdict;
use crate::tap::{self, BridgeState};
use crate::traits::{
    BootField, DiskSpec, FrontSpec, PluggedDisk, PluggedVif, ShutdownKind, VCPU_MASK, VifSpec, VmDriver,
    VmEvent, VmSpec, VmState,
};

const NAME: &str = "qemu";

/// How long the emulator may take to start, and to answer.
const EMULATOR_LIMIT: Duration = Duration::from_secs(20);

/// How long a guest may take to find a disk.
const PLUG_LIMIT: Duration = Duration::from_secs(30);

/// How long a guest is given to let go of a disk that is taken from it by force.
const FORCE_LIMIT: Duration = Duration::from_secs(3);

/// The connection to the emulator, once there is one.
#[derive(Debug, Default)]
struct Control {
    qmp: Mutex<Option<Arc<Qmp>>>,
    /// The guest agent's port takes one conversation at a time.
    port: Mutex<()>,
    /// Viewers of its screen.
    viewers: Arc<AtomicUsize>,
}

type DriverVm = fleet::DriverVm<Control>;

/// The driver.
#[derive(Debug)]
pub(crate) struct Qemu {
    fleet: Arc<Fleet<Control>>,
    /// What was found out about the processor.
    accel: OnceLock<&'static str>,
    /// Viewers of all screens.
    viewers: Arc<AtomicUsize>,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.fleet.dismiss();
    }
}

fn guest(place: Place, saved: Saved) -> DriverVm {
    let way = Way::Socket(place.own().join("agent"));
    DriverVm::new(place, saved, way, Control::default())
}

fn soon() -> Instant {
    Instant::now() + EMULATOR_LIMIT
}

/// Whether our own initramfs, with its agent, is in the guest.
fn has_agent(spec: &VmSpec) -> bool {
    spec.kernel.is_some() && spec.ramdisk.is_none()
}

impl Qemu {
    /// Guests of an earlier daemon go on; those that ended meanwhile are reported.
    pub(crate) fn new(settings: &Settings) -> Self {
        let driver =
            Self { fleet: Fleet::new(NAME, settings), accel: OnceLock::new(), viewers: Arc::default() };
        driver.fleet.adopt_all(guest, |guest, process| driver.adopt(guest, process));
        driver
    }

    /// `kvm` or `tcg`: found out by one try, which counts until the daemon ends.
    fn accel(&self) -> &'static str {
        self.accel.get_or_init(|| {
            let settings = &self.fleet.settings;
            let known = settings.machines_dir().join("accel");
            match fs::read_to_string(&known).ok().as_deref() {
                Some("kvm") => return "kvm",
                Some("tcg") => return "tcg",
                _ => {}
            }
            let has_device = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
            let found =
                match has_device.then(|| probe::works(&settings.qemu, "kvm", &settings.machines_dir())) {
                    Some(Ok(())) => "kvm",
                    Some(Err(why)) => {
                        tracing::warn!("KVM does not work here, guests are emulated: {why}");
                        "tcg"
                    }
                    None => "tcg",
                };
            let _ = fs::write(&known, found);
            found
        })
    }

    /// Speaks to a process from now on.
    fn adopt(&self, guest: &Arc<DriverVm>, process: Process) -> Result<(), ApiError> {
        let fleet = &self.fleet;
        fleet.look_after(guest, process, false, end)?;
        let told = |error: std::io::Error| {
            failed(guest.vm, "its emulator does not answer", cause(&guest.place, &error.to_string()))
        };
        let stop = fleet.stop().map_err(told)?;
        let qmp = self.connect(guest, stop).map_err(told)?;
        *guest.own.qmp.lock() = Some(Arc::clone(&qmp));
        guest.agent.listen();
        let status = guest.run("query-status", json!({}))?;
        let phase = match status["status"].as_str() {
            Some("running") => Phase::Running,
            Some("prelaunch") => Phase::Made,
            Some("shutdown" | "guest-panicked" | "internal-error") => {
                // It ended while no daemon listened; the event is reported when the emulator's process has ended.
                let _ = guest.run("quit", json!({}));
                return Ok(());
            }
            _ => Phase::Paused,
        };
        // What it really has: a daemon may have died between keeping and doing.
        let present = guest.devices()?;
        let mut gone = Vec::new();
        for (position, disk) in guest.saved().disks {
            let is_there = match disk.disk.front {
                FrontSpec::Nbd { .. } => guest.has_medium(position)?,
                _ => present.contains(&device(position)),
            };
            if !is_there {
                gone.push(position);
            }
        }
        guest.change(|saved| {
            saved.phase = phase;
            saved.disks.retain(|position, _| !gone.contains(position));
        })?;
        guest.adopt_vifs()
    }

    /// Connects as soon as the emulator listens, or fails as soon as it has ended.
    fn connect(&self, guest: &DriverVm, stop: Arc<crate::supervise::Stop>) -> std::io::Result<Arc<Qmp>> {
        let (path, until) = (guest.place.own().join("qmp"), soon());
        while !path.exists() && Instant::now() < until {
            if guest.process().is_none_or(|process| process.has_ended()) {
                return Err(std::io::Error::other("it ended at once"));
            }
            poll(&mut [], Instant::now() + Duration::from_millis(2));
        }
        // Not for ever: a driver that goes away ends its threads.
        let (fleet, vm) = (Arc::downgrade(&self.fleet), guest.vm);
        let on_event = move |told: Told| {
            if let Some(fleet) = fleet.upgrade() {
                fleet.events.push(match told {
                    Told::Agent => VmEvent::Agent(vm),
                    Told::Memory(bytes) => VmEvent::Memory(vm, bytes),
                });
            }
        };
        Qmp::connect(&path, stop, until, Box::new(on_event))
    }

    /// Makes the VM, to boot or to be loaded.
    fn make(&self, vm: &VmSpec, origin: Origin) -> Result<(), ApiError> {
        self.check()?;
        let made = self.fleet.create(vm, Kernels::Linux, guest)?;
        let started = self.start(&made, origin);
        if started.is_err() {
            let _ = made.change(|saved| saved.is_ending = true);
            if let Some(process) = made.process() {
                process.kill();
            }
            self.fleet.forget(&made);
        }
        started
    }

    /// Starts the emulator with its processors stopped.
    fn start(&self, guest: &Arc<DriverVm>, origin: Origin) -> Result<(), ApiError> {
        let settings = &self.fleet.settings;
        let (vm, place) = (guest.vm, &guest.place);
        let spec = guest.saved().spec;
        let told = |what: &'static str| move |error: std::io::Error| failed(vm, what, error);
        let own = |file: &Option<PathBuf>, copy: &str| {
            file.as_deref().map(|file| readable(place, file, copy)).transpose()
        };
        let kernel_file = own(&spec.kernel, "kernel").map_err(told("cannot use its kernel"))?;
        let ramdisk = match (&spec.kernel, &spec.ramdisk) {
            (Some(kernel), None) => Some(self.embedded(guest, kernel, !spec.drives.is_empty())?),
            (_, ramdisk) => own(ramdisk, "ramdisk").map_err(told("cannot use its ramdisk"))?,
        };
        let kernel = kernel_file.as_deref().map(|file| Kernel {
            file,
            ramdisk: ramdisk.as_deref(),
            has_agent: has_agent(&spec),
        });
        let accel = match spec.platform.get("accel").map(String::as_str) {
            Some("kvm") => "kvm",
            Some("tcg") => "tcg",
            None => self.accel(),
            Some(other) => {
                return Err(failed(
                    vm,
                    "cannot be made",
                    format!("platform:accel is {other:?}, not kvm or tcg"),
                ));
            }
        };
        let arguments = command::line(&spec, kernel.as_ref(), accel, origin)
            .map_err(|why| failed(vm, "cannot be made", why))?;
        let firmware = uefi::of(&spec).map_err(|why| failed(vm, "cannot be made", why))?;
        if let Some(uefi) = &firmware {
            let lent = nvram::lend(settings, place, vm, &uefi.empty);
            lent.map_err(told("cannot make the variables of its firmware"))?;
        }
        let mut command = Command::new(&settings.qemu);
        command
            .args(arguments)
            .args(firmware.iter().flat_map(uefi::arguments))
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", place.own());
        command.env("TMPDIR", place.own());
        // The emulator opens it itself, by a name in a directory where it can make none.
        drop(open_log(place, "console.log").map_err(told("cannot make its console"))?);
        let needs = Needs {
            emulator: Emulator::Qemu,
            programs: vec![fs::canonicalize(&settings.qemu).map_err(told("cannot use its emulator"))?],
            files: kernel_file.into_iter().chain(ramdisk).collect(),
            written: vec![place.join("console.log")],
            disks: Vec::new(),
            devices: (accel == "kvm").then(|| "/dev/kvm".into()).into_iter().collect(),
            memory: 0,
        };
        let confinement = Confinement::of(settings, place, &needs)
            .map_err(|why| failed(vm, "its guest cannot be confined", why))?;
        let mask = spec.platform.get(VCPU_MASK).map(|text| affinity::parse(text)).transpose();
        mask.map_err(|why| failed(vm, "cannot be made", format!("VCPUs-params:mask {why}")))?;
        let process = Process::spawn(place, vm, command, &[], confinement)?;
        self.adopt(guest, process)?;
        guest.tie()
    }

    /// The initramfs of guests with a kernel and no ramdisk.
    fn embedded(&self, guest: &DriverVm, kernel: &Path, has_drives: bool) -> Result<PathBuf, ApiError> {
        let settings = &self.fleet.settings;
        let told = |error: std::io::Error| failed(guest.vm, "cannot make its initramfs", error);
        // An interface may come later.
        let devices = initramfs::Devices { drives: has_drives, networks: true };
        let image = initramfs::embedded(&settings.busybox, &initramfs::modules_of(kernel), devices);
        let image = image.map_err(told)?;
        let file = guest.place.join("initramfs");
        fs::write(&file, image).map_err(told)?;
        // For the guest's user; no other user passes through the directory.
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).map_err(told)?;
        Ok(file)
    }
}

/// What the end of a VM's process meant: what the emulator told, or its guest.
fn end(guest: &DriverVm, how: &str) -> VmEvent {
    let said = verdict(guest.vm, &guest.place, how);
    // What came last may still be on its way through the reader's thread, which ends with the connection.
    let reason =
        guest.own.qmp.lock().clone().and_then(|qmp| qmp.end(Instant::now() + Duration::from_secs(1)));
    match reason.as_deref() {
        Some("guest-panic") => VmEvent::Crashed(guest.vm, cause(&guest.place, "the guest's kernel panicked")),
        // A kernel that panicked may have been told to start anew.
        Some("guest-reset") if !matches!(said, VmEvent::Crashed(_, ref why) if why.contains("panicked")) => {
            VmEvent::Rebooted(guest.vm)
        }
        Some("guest-shutdown") => VmEvent::Halted(guest.vm),
        _ => said,
    }
}

fn device(position: u8) -> String {
    format!("d{position}")
}

/// The addresses of devices, by what QEMU calls them: `bus:slot.function` as the guest's firmware numbered them.
fn addresses(buses: &Value, into: &mut Vec<(String, String)>) {
    for found in buses.as_array().into_iter().flatten() {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        if let Some(name) = found["qdev_id"].as_str() {
            let address = format!(
                "0000:{:02x}:{:02x}.{}",
                number(&found["bus"]),
                number(&found["slot"]),
                number(&found["function"])
            );
            into.push((name.to_owned(), address));
        }
        addresses(&found["devices"], into);
        addresses(&found["pci_bridge"]["devices"], into);
    }
}

impl DriverVm {
    fn qmp(&self) -> Result<Arc<Qmp>, ApiError> {
        let connected = self.own.qmp.lock().clone();
        connected.ok_or_else(|| {
            failed(self.vm, "its emulator cannot be asked", "it has not answered since it was found")
        })
    }

    /// A command to the emulator.
    fn run(&self, command: &str, arguments: Value) -> Result<Value, ApiError> {
        let asked = self.qmp()?.run(command, arguments, soon());
        asked.map_err(|error| failed(self.vm, format!("its emulator does not do {command}"), error))
    }

    fn pci(&self) -> Result<Vec<(String, String)>, ApiError> {
        let mut found = Vec::new();
        addresses(&self.run("query-pci", json!({}))?, &mut found);
        Ok(found)
    }

    /// What QEMU calls the devices that it was given.
    fn devices(&self) -> Result<Vec<String>, ApiError> {
        let answer = self.run("qom-list", json!({ "path": "/machine/peripheral" }))?;
        let names = answer.as_array().into_iter().flatten().filter_map(|entry| entry["name"].as_str());
        Ok(names.map(str::to_owned).collect())
    }

    /// Where the guest's kernel shows a disk.
    fn path_of(&self, position: u8) -> Result<Option<String>, ApiError> {
        let name = device(position);
        let found = self.pci()?.into_iter().find(|(device, _)| *device == name);
        Ok(found.map(|(_, address)| format!("/sys/bus/pci/devices/{address}")))
    }

    /// Adds the device; it is there already when a daemon died on the way.
    fn add(&self, disk: &PluggedDisk) -> Result<(), ApiError> {
        let spec = self.saved().spec;
        let position = disk.spec.position;
        let FrontSpec::VhostUser { socket, queues } = &disk.front else {
            return Err(failed(self.vm, format!("disk {position}"), "it is not offered by vhost-user"));
        };
        // QEMU would wait for it for ever.
        fs::metadata(socket)
            .map_err(|error| failed(self.vm, format!("disk {position}: {}", socket.display()), error))?;
        let (bus, slot) = command::place_of(&spec, position).ok_or_else(|| {
            illegal_device(disk.spec.vbd, position, "the VM has fewer positions: see platform:max_disks")
        })?;
        let (id, chardev) = (device(position), format!("c{position}"));
        let qmp = self.qmp()?;
        let until = Instant::now() + PLUG_LIMIT;
        let told = |error: QmpError| match error {
            QmpError::Late => {
                attach_timeout(disk.spec.vbd, "the emulator has not answered: the disk's process may hang")
            }
            other => failed(self.vm, format!("disk {position} is refused by the emulator"), other),
        };
        let address = json!({ "type": "unix", "data": { "path": socket } });
        // Found again, a second later, when the disk process is replaced.
        let backend =
            json!({ "type": "socket", "data": { "addr": address, "server": false, "reconnect": 1 } });
        let made = qmp.run("chardev-add", json!({ "id": chardev, "backend": backend }), until);
        if let Err(error) = made {
            if self.devices()?.contains(&id) {
                return Ok(());
            }
            // Left by a daemon that died between both commands.
            let _ = qmp.run("chardev-remove", json!({ "id": chardev }), until);
            let again = qmp.run("chardev-add", json!({ "id": chardev, "backend": backend }), until);
            again.map_err(|_| told(error))?;
        }
        let mut options = json!({
            "driver": "vhost-user-blk-pci", "id": id, "chardev": chardev, "num-queues": queues,
            "bus": bus, "addr": slot, "disable-legacy": "on",
        });
        if u16::from(position) >= command::OWN_INTERRUPTS {
            options["vectors"] = json!(0);
            options["disable-legacy"] = json!("off");
            options["disable-modern"] = json!("on");
        }
        if let Some(rank) = command::boot_index(&spec, &disk.spec) {
            options["bootindex"] = json!(rank);
        }
        qmp.forget_fate(&id);
        qmp.run("device_add", options, until).map(|_| ()).map_err(|error| {
            let _ = qmp.run("chardev-remove", json!({ "id": chardev }), until);
            told(error)
        })
    }

    /// Waits until the guest shows a disk; returns at once if it has no agent.
    fn wait_for_disk(&self, disk: &PluggedDisk) -> Result<(), ApiError> {
        if !has_agent(&self.saved().spec) {
            return Ok(());
        }
        let until = Instant::now() + PLUG_LIMIT;
        loop {
            // A guest that is still starting has not numbered its buses yet, or does so again.
            if !self.agent.is_there(until) {
                return Err(attach_timeout(disk.spec.vbd, "the guest's agent does not answer"));
            }
            let path = self.path_of(disk.spec.position)?;
            let asked = path.map_or(Err(Refusal::No("the emulator has lost it".into())), |path| {
                self.agent.ask(&format!("appears {path}"), until)
            });
            match asked {
                Ok(_) => return Ok(()),
                Err(why) if Instant::now() >= until => {
                    return Err(attach_timeout(
                        disk.spec.vbd,
                        format!("the guest does not show it: {why:?}"),
                    ));
                }
                Err(Refusal::Silent(_)) => {}
                Err(Refusal::No(why)) => {
                    return Err(failed(self.vm, "the guest does not take the disk", why));
                }
            }
        }
    }

    /// Removes a disk's device; waits until it is gone.
    fn remove(&self, position: u8, until: Instant) -> Result<(), Option<Fate>> {
        self.remove_device(&device(position), until)?;
        if let Ok(qmp) = self.qmp() {
            let _ = qmp.run("chardev-remove", json!({ "id": format!("c{position}") }), soon());
        }
        Ok(())
    }

    /// Removes a device; waits until it is gone. One that is not there, or whose emulator is not, is no error.
    fn remove_device(&self, id: &str, until: Instant) -> Result<(), Option<Fate>> {
        let Ok(qmp) = self.qmp() else { return Ok(()) };
        qmp.forget_fate(id);
        match qmp.run("device_del", json!({ "id": id }), until) {
            Ok(_) => {}
            Err(QmpError::Refused(class, _)) if class == "DeviceNotFound" => return Ok(()),
            Err(QmpError::Closed) => return Ok(()),
            // It was asked before; the answer is still to come.
            Err(QmpError::Refused(..)) => {}
            Err(QmpError::Late) => return Err(None),
        }
        if self.phase() == Phase::Made {
            // No guest is there that could let go of it; a reset does it.
            let _ = qmp.run("system_reset", json!({}), until);
        }
        match qmp.fate(id, until) {
            Some(Fate::Gone) => Ok(()),
            fate => Err(fate),
        }
    }
}

impl VmDriver for Qemu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ApiError> {
        let qemu = &self.fleet.settings.qemu;
        if fs::metadata(qemu).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0) {
            return Ok(());
        }
        Err(ApiError::internal(format!(
            "driver qemu: there is no {}; install qemu-system-x86 (and seabios)",
            qemu.display()
        )))
    }

    fn front(&self, vm: Uuid, disk: &DiskSpec) -> Result<FrontSpec, ApiError> {
        let guest = self.fleet.vm(vm)?;
        let spec = guest.saved().spec;
        let position = disk.position;
        if disk.is_cd {
            return Ok(FrontSpec::Nbd { socket: guest.place.join(&position.to_string()) });
        }
        if command::place_of(&spec, position).is_none() {
            return Err(illegal_device(
                disk.vbd,
                position,
                "the VM has fewer positions: see platform:max_disks",
            ));
        }
        Ok(FrontSpec::VhostUser {
            socket: guest.place.join(&position.to_string()),
            queues: command::queues(&spec),
        })
    }

    fn check_boot(&self, vm: &VmSpec, field: BootField) -> Result<(), ApiError> {
        let arguments = || command::arguments(vm, vm.ramdisk.is_none()).err();
        boot::check(&self.fleet.settings, vm, Kernels::Linux, field, arguments)
    }

    fn create(&self, vm: &VmSpec) -> Result<(), ApiError> {
        self.make(vm, Origin::Boot)
    }

    fn set_vcpus(&self, vm: Uuid, count: u32) -> Result<(), ApiError> {
        self.fleet.vm(vm)?.set_processors(count as usize)
    }

    fn vcpus(&self, vm: Uuid) -> Result<Option<u32>, ApiError> {
        let Some(guest) = self.fleet.find(vm) else { return Ok(None) };
        let (present, _) = guest.processors()?;
        Ok(u32::try_from(present).ok())
    }

    fn set_memory(&self, vm: Uuid, bytes: u64) -> Result<(), ApiError> {
        self.fleet.vm(vm)?.set_memory(bytes)
    }

    fn memory(&self, vm: Uuid) -> Result<Option<u64>, ApiError> {
        self.fleet.find(vm).map_or(Ok(None), |guest| guest.memory())
    }

    fn check_save(&self, _: Uuid) -> Result<(), ApiError> {
        Ok(())
    }

    fn save(&self, vm: Uuid, to: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> Result<(), ApiError> {
        let guest = self.fleet.vm(vm)?;
        memory::save(&guest, to, is_cancelled)
    }

    fn saved_as(&self, vm: Uuid) -> Result<String, ApiError> {
        memory::saved_as(&*self.fleet.vm(vm)?)
    }

    fn create_saved(&self, vm: &VmSpec, kind: &str) -> Result<(), ApiError> {
        let mut vm = vm.clone();
        made::as_word(&mut vm, kind);
        made::as_it_was(&mut vm);
        self.make(&vm, Origin::Memory)
    }

    fn load(&self, vm: Uuid, from: OwnedFd) -> Result<(), ApiError> {
        let guest = self.fleet.vm(vm)?;
        memory::load(&guest, from)
    }

    fn check_migrate(&self, vm: Uuid) -> Result<(), ApiError> {
        memory::check_migrate(&*self.fleet.vm(vm)?)
    }

    fn made_as(&self, vm: Uuid) -> Result<BTreeMap<String, String>, ApiError> {
        memory::made_as(&*self.fleet.vm(vm)?)
    }

    fn migrate(
        &self,
        vm: Uuid,
        to: OwnedFd,
        is_cancelled: &dyn Fn() -> bool,
        told: &dyn Fn(f64),
    ) -> Result<(), ApiError> {
        memory::migrate(&*self.fleet.vm(vm)?, to, is_cancelled, told)
    }

    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError> {
        let guest = self.fleet.vm(vm)?;
        let position = disk.spec.position;
        if guest.saved().disks.get(&position).is_some_and(|known| known.disk.spec.vbd != disk.spec.vbd) {
            return Err(already_there(position));
        }
        if let FrontSpec::VhostUser { socket, .. } | FrontSpec::Nbd { socket } = &disk.front {
            guest.place.give_away(socket)?;
        }
        // Kept first: whatever dies on the way, this disk is known to be there, or on its way.
        guest.change(|saved| {
            saved.disks.insert(position, SavedDisk { disk: disk.clone(), slot: u16::from(position) });
        })?;
        let added = match &disk.front {
            FrontSpec::Nbd { socket } => guest.insert(disk, socket),
            _ => guest.add(disk),
        };
        let taken = added.and_then(|()| {
            if guest.phase() != Phase::Running || disk.spec.is_cd {
                return Ok(());
            }
            guest.wait_for_disk(disk).inspect_err(|_| {
                let _ = guest.remove(position, Instant::now() + FORCE_LIMIT);
            })
        });
        if taken.is_err() {
            guest.change(|saved| {
                saved.disks.remove(&position);
            })?;
        }
        taken
    }

    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let Some(guest) = self.fleet.find(vm) else { return Ok(()) };
        let Some(known) = guest.disk(disk) else { return Ok(()) };
        let (vbd, position) = (disk.vbd, disk.position);
        let phase = guest.phase();
        if matches!(known.disk.front, FrontSpec::Nbd { .. }) {
            // A guest that is paused cannot unlock its drive; one that has not begun has locked none.
            guest.take_medium(disk, force, until)?;
            return guest.change(|saved| {
                saved.disks.remove(&position);
            });
        }
        if phase == Phase::Paused && !force {
            let why = "the guest is paused and cannot be asked; unpause it, or use force";
            return Err(detach_rejected(vbd, why));
        }
        // Linux releases a device even while a file system on it is mounted: the agent is asked first.
        if phase == Phase::Running
            && !force
            && has_agent(&guest.saved().spec)
            && let Some(path) = guest.path_of(position)?
        {
            match guest.agent.ask(&format!("idle {path}"), until) {
                Ok(_) => {}
                Err(Refusal::No(text)) => return Err(detach_rejected(vbd, text)),
                Err(Refusal::Silent(_)) => {
                    return Err(detach_timeout(vbd, "the guest's agent has not answered in time"));
                }
            }
        }
        let until = if force { until.min(Instant::now() + FORCE_LIMIT) } else { until };
        match guest.remove(position, until) {
            Ok(()) => {}
            Err(why) if force => {
                tracing::warn!(%vm, %vbd, "a disk is taken from a guest that did not let go of it: {why:?}");
            }
            Err(Some(Fate::Kept)) => return Err(detach_rejected(vbd, "the guest's kernel keeps the device")),
            Err(_) => {
                let why = "the guest's kernel has not let go of the device in time; it may have no driver for \
                           hot plug, \
                           or still be starting";
                return Err(detach_timeout(vbd, why));
            }
        }
        guest.change(|saved| {
            saved.disks.remove(&position);
        })
    }

    fn keep_only(&self, is_known: &dyn Fn(Uuid) -> bool) {
        nvram::keep_only(&self.fleet.settings, is_known);
    }

    fn plug_drive(&self, vm: Uuid, disk: &DiskSpec) -> Result<(), ApiError> {
        self.fleet.vm(vm)?.make_drive(disk)
    }

    fn check_vifs(&self, _: Uuid) -> Result<(), ApiError> {
        Ok(())
    }

    fn bridge(&self, name: &str) -> Result<BridgeState, ApiError> {
        tap::bridge(name).map_err(|error| ApiError::internal(format!("bridge {name}: {error}")))
    }

    fn plug_vif(&self, vm: Uuid, vif: &VifSpec) -> Result<(), ApiError> {
        self.fleet.vm(vm)?.plug_vif(vif)
    }

    fn move_vif(&self, vm: Uuid, vif: &VifSpec) -> Result<(), ApiError> {
        self.fleet.vm(vm)?.move_vif(vif)
    }

    fn unplug_vif(&self, vm: Uuid, vif: &VifSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        self.fleet.find(vm).map_or(Ok(()), |guest| guest.unplug_vif(vif, force, until))
    }

    fn vifs(&self, vm: Uuid) -> Result<BTreeMap<u8, PluggedVif>, ApiError> {
        self.fleet.find(vm).map_or_else(|| Ok(BTreeMap::new()), |guest| guest.vifs())
    }

    fn guest(&self, vm: Uuid, until: Instant) -> Result<Option<GuestFacts>, ApiError> {
        self.fleet.vm(vm)?.facts(until)
    }

    fn freeze(&self, vm: Uuid, until: Instant) -> Result<(), ApiError> {
        self.fleet.vm(vm)?.freeze(until)
    }

    fn thaw(&self, vm: Uuid, until: Instant) -> Result<bool, ApiError> {
        self.fleet.vm(vm)?.thaw(until)
    }

    fn trim(&self, vm: Uuid, until: Instant) -> Result<Option<u64>, ApiError> {
        self.fleet.vm(vm)?.trim(until)
    }

    fn guest_disks(&self, vm: Uuid, until: Instant) -> Result<Vec<GuestDisk>, ApiError> {
        self.fleet.vm(vm)?.guest_disks(until)
    }

    fn unpause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.fleet.vm(vm)?;
        if guest.phase() == Phase::Made {
            // The firmware shall see what was plugged since, and in which order to boot from it.
            guest.run("system_reset", json!({}))?;
            // From now on a reboot of the guest is an event for the daemon, which makes the VM again.
            guest.run("set-action", json!({ "reboot": "shutdown" }))?;
            guest.set_first_memory()?;
        }
        guest.run("cont", json!({}))?;
        guest.change(|saved| saved.phase = Phase::Running)
    }

    fn pause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.fleet.vm(vm)?;
        if guest.phase() != Phase::Running {
            return Ok(());
        }
        guest.run("stop", json!({}))?;
        guest.change(|saved| saved.phase = Phase::Paused)
    }

    fn shutdown(&self, vm: Uuid, kind: ShutdownKind, until: Instant) -> Result<(), ApiError> {
        let Some(guest) = self.fleet.find(vm) else { return Ok(()) };
        let begun = Instant::now();
        if let Some(process) = guest.process() {
            guest.change(|saved| saved.is_ending = true)?;
            if kind == ShutdownKind::Clean {
                if let Err(error) = ask_to_end(&guest, &process, until) {
                    guest.change(|saved| saved.is_ending = false)?;
                    return Err(error.unwrap_or_else(|| shutdown_timeout(vm, begun.elapsed())));
                }
            } else if !process.kill() {
                return Err(failed(
                    vm,
                    "the guest does not end",
                    "its process survived SIGKILL: its disk may hang",
                ));
            }
            let _ = process.status();
        }
        self.fleet.forget(&guest);
        Ok(())
    }

    fn state(&self, vm: Uuid) -> Result<VmState, ApiError> {
        Ok(self.fleet.find(vm).map_or(VmState::Halted, |guest| {
            let has_ended = guest.process().is_none_or(|process| process.has_ended());
            if has_ended { VmState::Halted } else { guest.state() }
        }))
    }

    fn console(&self, vm: Uuid) -> Option<PathBuf> {
        let guest = self.fleet.find(vm)?;
        let has_console = command::Devices::of(&guest.saved().spec).is_ok_and(|chosen| chosen.has_console);
        guest.process().filter(|_| has_console).map(|_| guest.place.own().join("console"))
    }

    fn has_screen(&self, vm: Uuid) -> bool {
        let guest = self.fleet.find(vm).filter(|guest| guest.process().is_some());
        guest.is_some_and(|guest| {
            command::Devices::of(&guest.saved().spec).is_ok_and(|chosen| chosen.has_screen)
        })
    }

    fn open_screen(&self, vm: Uuid) -> Result<OwnedFd, ApiError> {
        let guest = self.fleet.vm(vm)?;
        if !self.has_screen(vm) {
            return Err(lacks_feature(vm, "it has no screen: set platform:vnc=true before its next start"));
        }
        let stop = self.fleet.stop().map_err(|error| failed(vm, "its screen cannot be shown", error))?;
        screen::open(&guest, &self.viewers, stop)
    }

    fn wait_event(&self, until: Instant) -> Option<VmEvent> {
        self.fleet.events.wait(until)
    }
}

/// Presses the power button, tells the agent where there is one, and waits for the end.
fn ask_to_end(guest: &DriverVm, process: &Process, until: Instant) -> Result<(), Option<ApiError>> {
    if guest.phase() != Phase::Running {
        return Err(Some(bad_power_state(guest.vm, "Running", "Paused")));
    }
    let hello = until.min(Instant::now() + HELLO_LIMIT);
    let mut has_been_told = !has_agent(&guest.saved().spec);
    // A button that is pressed while the guest starts may go unseen.
    while !process.has_ended() {
        if !has_been_told {
            has_been_told = guest.agent.ask("poweroff", hello).is_ok() || Instant::now() >= hello;
        }
        guest.ask_agent_to_end();
        let _ = guest.run("system_powerdown", json!({}));
        if process.wait(until.min(Instant::now() + Duration::from_secs(5))) {
            break;
        }
        if Instant::now() >= until {
            return Err(None);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_behind_their_bridges() {
        let answer = json!([{"bus": 0, "devices": [
            {"bus": 0, "slot": 3, "function": 0, "qdev_id": "b0", "pci_bridge": {"bus": {"number": 1}, "devices": [
                {"bus": 1, "slot": 31, "function": 0, "qdev_id": "d30"}]}},
            {"bus": 0, "slot": 1, "function": 1, "qdev_id": ""}]}]);
        let mut found = Vec::new();
        addresses(&answer, &mut found);
        assert!(found.contains(&("d30".into(), "0000:01:1f.0".into())), "{found:?}");
    }
}
