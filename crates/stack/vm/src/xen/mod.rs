//! Domains of a Xen host.
//!
//! xl makes and ends domains; everything about their disks is written into xenstore by this driver itself, each disk in
//! one transaction, before the guest runs or while it does. A disk process gets its front end from tapback, which sees
//! what was written here and what the guest answers. Why a domain ended is in xl's list, which is looked at when
//! xenstored says that one did.

mod bus;
mod config;
mod device;
mod domains;
mod tapback;
#[cfg(test)]
mod tests;
mod xl;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_types::ApiError;
use tapio_xenstore::XsError;
use uuid::Uuid;

use self::bus::{Bus, Sides, Written, states};
use self::device::Device;
use self::domains::{Domains, DriverVm, NAME, soon};
use crate::boot::{self, Kernels};
use crate::errors::{
    already_there, attach_timeout, bad_power_state, detach_rejected, detach_timeout, failed, shutdown_timeout,
};
use crate::guest::initramfs;
use crate::place::{Phase, SavedDisk};
use crate::poll::poll;
use crate::settings::Settings;
use crate::traits::{
    BootField, DiskSpec, FrontSpec, PluggedDisk, ShutdownKind, VmDriver, VmEvent, VmSpec, VmState,
};

/// How long xl may take to make a domain.
const CREATE_LIMIT: Duration = Duration::from_secs(60);

/// How long a guest may take to connect a disk.
const PLUG_LIMIT: Duration = Duration::from_secs(30);

/// How long the back end may take to let go of a disk of which the guest has.
const BACK_LIMIT: Duration = Duration::from_secs(10);

/// How long the terminal of a guest may take to be there.
const CONSOLE_LIMIT: Duration = Duration::from_secs(2);

/// The driver.
#[derive(Debug)]
pub(crate) struct Xen(Arc<Domains>);

impl Drop for Xen {
    fn drop(&mut self) {
        self.0.dismiss();
    }
}

impl Xen {
    /// Guests of an earlier daemon go on; those that ended meanwhile are reported.
    pub(crate) fn new(settings: &Settings) -> Self {
        Self(Domains::new(settings))
    }

    /// The guest of VMs without a ramdisk: a shell on the console.
    fn embedded(&self, guest: &DriverVm, kernel: &Path) -> Result<PathBuf, ApiError> {
        let told = |error: std::io::Error| failed(guest.vm, "cannot make its initramfs", error);
        let image =
            initramfs::embedded(&self.0.settings.busybox, &initramfs::modules_of(kernel), Default::default())
                .map_err(told)?;
        let file = guest.place.join("initramfs");
        fs::write(&file, image).map_err(told)?;
        Ok(file)
    }

    /// Makes the domain of a VM whose record is written.
    fn make(&self, guest: &DriverVm, spec: &VmSpec) -> Result<(), ApiError> {
        let vm = spec.uuid;
        let told = |why: String| failed(vm, "cannot be made", why);
        let ramdisk = match (&spec.kernel, &spec.ramdisk) {
            (Some(kernel), None) => Some(self.embedded(guest, kernel)?),
            (_, ramdisk) => ramdisk.clone(),
        };
        let text = config::text(spec, ramdisk.as_deref()).map_err(told)?;
        let file = guest.place.join("xl.cfg");
        let mut options = fs::OpenOptions::new();
        let opened = options.write(true).create(true).truncate(true).mode(0o600).open(&file);
        let written = opened.and_then(|mut out| out.write_all(text.as_bytes()));
        written.map_err(|error| told(format!("{}: {error}", file.display())))?;
        self.0.xl.create(&file, Instant::now() + CREATE_LIMIT).map_err(told)?;
        let found = self.0.bus_for(vm)?.find(vm).map_err(|error| failed(vm, "xenstore", error))?;
        let domid = found.ok_or_else(|| told("xl made a domain that xenstore does not know".into()))?;
        guest.change(|saved| saved.domid = Some(domid))
    }

    /// Waits until the guest and its back end have a disk.
    fn connected(&self, bus: &mut Bus, guest: &DriverVm, device: &Device, vbd: Uuid) -> Result<(), ApiError> {
        let until = Instant::now() + PLUG_LIMIT;
        let is_decided = |sides: &Sides| {
            sides.are_connected() || !sides.is_ours || !sides.has_domain || sides.front_gave_up()
        };
        let sides = bus.wait(guest.vm, device, vbd, until, is_decided).map_err(lost(guest.vm))?;
        if sides.are_connected() {
            return Ok(());
        }
        if !sides.has_domain {
            return Err(bad_power_state(guest.vm, "Running", "Halted"));
        }
        Err(attach_timeout(
            vbd,
            match &sides.complaint {
                Some(words) => format!("the guest refuses it: {words}"),
                None => format!(
                    "not connected within {PLUG_LIMIT:?}: {}; does the guest have a driver for Xen's disks, and does \
                     tapback run?",
                    states(&sides)
                ),
            },
        ))
    }

    /// Asks the guest for a disk and waits until both sides have let go.
    fn let_go(
        &self,
        bus: &mut Bus,
        guest: &DriverVm,
        disk: &DiskSpec,
        until: Instant,
    ) -> Result<(), ApiError> {
        let (vm, vbd) = (guest.vm, disk.vbd);
        let device = Device::of(guest.domain()?, disk.position);
        let before = bus.ask_back(vm, &device, vbd).map_err(lost(vm))?;
        if !before.is_ours || before.front_is_closed() {
            return Ok(());
        }
        let is_decided =
            |sides: &Sides| sides.front_is_closed() || !sides.is_ours || sides.complaint.is_some();
        let sides = bus.wait(vm, &device, vbd, until, is_decided).map_err(lost(vm))?;
        let is_kept = !sides.front_is_closed() && sides.is_ours;
        // Some kernels say no and let go as soon as they can; then nothing can be taken back.
        if is_kept && (bus.leave(vm, &device, vbd).map_err(lost(vm))? || sides.complaint.is_some()) {
            return Err(match &sides.complaint {
                Some(words) => detach_rejected(vbd, format!("the guest keeps it: {words}")),
                None => detach_timeout(vbd, format!("the guest has not let go of it: {}", states(&sides))),
            });
        }
        let until = until.max(Instant::now() + Duration::from_secs(1)).min(Instant::now() + BACK_LIMIT);
        let is_done = |sides: &Sides| (sides.front_is_closed() && sides.back_is_closed()) || !sides.is_ours;
        let sides = bus.wait(vm, &device, vbd, until, is_done).map_err(lost(vm))?;
        if !is_done(&sides) {
            if !sides.front_is_closed() {
                return Err(detach_timeout(
                    vbd,
                    format!("the guest is letting go of it: {}", states(&sides)),
                ));
            }
            tracing::warn!(%vm, %vbd, "the back end has not closed: {}", states(&sides));
        }
        Ok(())
    }

    /// Asks the guest to end and waits for it.
    fn ask_to_end(&self, guest: &DriverVm, until: Instant) -> Result<(), ApiError> {
        let (vm, begun) = (guest.vm, Instant::now());
        match guest.phase() {
            // Nothing of it has run yet.
            Phase::Made => return Ok(()),
            Phase::Paused => return Err(bad_power_state(vm, "Running", "Paused")),
            Phase::Running => {}
        }
        let domid = guest.domain()?;
        let mut bus = self.0.bus_for(vm)?;
        bus.ask_to_end(domid).map_err(lost(vm))?;
        if guest.wait_for_end(until) {
            return Ok(());
        }
        bus.no_longer_ask(domid).map_err(lost(vm))?;
        Err(shutdown_timeout(vm, begun.elapsed()))
    }
}

fn lost(vm: Uuid) -> impl Fn(XsError) -> ApiError {
    move |error| failed(vm, "xenstore", error)
}

impl VmDriver for Xen {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ApiError> {
        let settings = &self.0.settings.xen;
        let told = |what: String| Err(ApiError::internal(format!("driver xen: {what}")));
        let file = &settings.capabilities;
        match fs::read_to_string(file) {
            Ok(words) if words.contains("control_d") => {}
            Ok(_) => {
                return told(format!(
                    "{} does not say control_d: this is no control domain of Xen",
                    file.display()
                ));
            }
            Err(error) => {
                return told(format!(
                    "no hypervisor ({}: {error}); boot this system as Xen's dom0, or mount xenfs at /proc/xen",
                    file.display()
                ));
            }
        }
        let is_program = |data: fs::Metadata| data.is_file() && data.permissions().mode() & 0o111 != 0;
        if !fs::metadata(&settings.xl).is_ok_and(is_program) {
            return told(format!("there is no program {}; install xen-utils", settings.xl.display()));
        }
        if let Err(error) = self.0.bus() {
            return told(format!("{error}; start xenstored (or tapio-xenstored) first"));
        }
        Ok(())
    }

    fn front(&self, vm: Uuid, _: &DiskSpec) -> Result<FrontSpec, ApiError> {
        self.0.vm(vm).map(|_| FrontSpec::Xen)
    }

    fn check_boot(&self, vm: &VmSpec, field: BootField) -> Result<(), ApiError> {
        boot::check(&self.0.settings, vm, Kernels::Linux, field, || config::arguments(vm).err())
    }

    fn create(&self, vm: &VmSpec) -> Result<(), ApiError> {
        self.check()?;
        // Before anything is made: what cannot be is told early.
        config::text(vm, None).map_err(|why| failed(vm.uuid, "cannot be made", why))?;
        let vm = &boot::checked(&self.0.settings, vm, Kernels::Linux)?;
        tapback::ensure(&self.0.settings)?;
        let guest = self.0.add(vm)?;
        self.0.watch();
        self.make(&guest, vm).inspect_err(|_| {
            if let Err(error) = self.0.destroy(&guest) {
                tracing::warn!(vm = %vm.uuid, "a domain that could not be used stays: {error}");
            }
            self.0.forget(&guest);
        })
    }

    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError> {
        let guest = self.0.vm(vm)?;
        let (position, vbd) = (disk.spec.position, disk.spec.vbd);
        let path = disk.node.as_deref().filter(|_| disk.front == FrontSpec::Xen);
        let path = path.ok_or_else(|| {
            failed(vm, format!("disk {position}"), "its disk process was not named to this driver")
        })?;
        if guest.saved().disks.get(&position).is_some_and(|known| known.disk.spec.vbd != vbd) {
            return Err(already_there(position));
        }
        let device = Device::of(guest.domain()?, position);
        let mut bus = self.0.bus_for(vm)?;
        // Kept first: whatever dies on the way, this disk is known to be there, or on its way.
        let was_known = guest.has(&disk.spec);
        guest.change(|saved| {
            saved.disks.insert(position, SavedDisk { disk: disk.clone(), slot: u16::from(position) });
        })?;
        let plugged = match bus.plug(vm, &device, disk, path).map_err(lost(vm)) {
            Ok(Written::New) if guest.phase() == Phase::Running => {
                self.connected(&mut bus, &guest, &device, vbd)
            }
            // A guest that has it already is not asked again: tapback connects it to a new process.
            Ok(Written::New | Written::Known) => Ok(()),
            Ok(Written::Taken) => Err(already_there(position)),
            Ok(Written::NoDomain) => Err(bad_power_state(vm, "Running", "Halted")),
            Err(error) => Err(error),
        };
        if plugged.is_err() && !was_known {
            if let Err(error) = bus.remove(vm, &device, vbd) {
                tracing::warn!(%vm, %vbd, "a disk that did not connect stays in xenstore: {error}");
            }
            guest.change(|saved| {
                saved.disks.remove(&position);
            })?;
        }
        plugged
    }

    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let Some(guest) = self.0.find(vm) else { return Ok(()) };
        if !guest.has(disk) {
            return Ok(());
        }
        let Some(domid) = guest.domid() else { return Ok(()) };
        let mut bus = self.0.bus_for(vm)?;
        match (guest.phase(), force) {
            (Phase::Made, _) | (_, true) => {}
            (Phase::Paused, false) => {
                return Err(detach_rejected(
                    disk.vbd,
                    "the guest is paused and cannot be asked; unpause it, or use force",
                ));
            }
            (Phase::Running, false) => self.let_go(&mut bus, &guest, disk, until)?,
        }
        bus.remove(vm, &Device::of(domid, disk.position), disk.vbd).map_err(lost(vm))?;
        guest.change(|saved| {
            saved.disks.remove(&disk.position);
        })
    }

    fn unpause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.0.vm(vm)?;
        if guest.phase() == Phase::Running {
            return Ok(());
        }
        let done = self.0.xl.act("unpause", guest.domain()?, soon());
        done.map_err(|why| failed(vm, "the guest does not go on", why))?;
        guest.change(|saved| saved.phase = Phase::Running)
    }

    fn pause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.0.vm(vm)?;
        if guest.phase() != Phase::Running {
            return Ok(());
        }
        let done = self.0.xl.act("pause", guest.domain()?, soon());
        done.map_err(|why| failed(vm, "the guest does not stop", why))?;
        guest.change(|saved| saved.phase = Phase::Paused)
    }

    fn shutdown(&self, vm: Uuid, kind: ShutdownKind, until: Instant) -> Result<(), ApiError> {
        let Some(guest) = self.0.find(vm) else { return Ok(()) };
        guest.change(|saved| saved.is_ending = true)?;
        let ended = match kind {
            ShutdownKind::Clean => self.ask_to_end(&guest, until),
            ShutdownKind::Hard => Ok(()),
        };
        let ended = ended.and_then(|()| {
            let _life = guest.life();
            self.0.destroy(&guest)
        });
        if ended.is_err() {
            guest.change(|saved| saved.is_ending = false)?;
            self.0.retell(&guest);
            return ended;
        }
        self.0.forget(&guest);
        Ok(())
    }

    fn state(&self, vm: Uuid) -> Result<VmState, ApiError> {
        Ok(self.0.find(vm).map_or(VmState::Halted, |guest| guest.state()))
    }

    fn domid(&self, vm: Uuid) -> Option<u32> {
        self.0.find(vm)?.domid()
    }

    fn console(&self, vm: Uuid) -> Option<PathBuf> {
        let domid = self.domid(vm)?;
        let until = Instant::now() + CONSOLE_LIMIT;
        let mut bus = self.0.bus().ok()?;
        loop {
            match bus.console(domid) {
                // xenconsoled makes it when it learns of the domain.
                Ok(None) if Instant::now() < until => {
                    poll(&mut [], Instant::now() + Duration::from_millis(20));
                }
                found => return found.ok().flatten(),
            }
        }
    }

    fn wait_event(&self, until: Instant) -> Option<VmEvent> {
        self.0.events.wait(until)
    }
}
