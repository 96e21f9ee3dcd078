//! User-mode Linux: a kernel that runs as an ordinary process, without any help from the processor or from root.
//!
//! Its disks are vhost-user devices, which it knows by the names of their sockets from the start. It is started with
//! some more than it has disks (*slots*): a device without a server on its socket stays without a driver, and is
//! given one when the disk has come, by the agent in the guest. A slot has the number of its disk's position where
//! that is free.
//!
//! The kernel has interrupts for 40 such devices. Sixteen more disks are files of this host that the kernel opens
//! itself (`ubd`): files by FUSE, which the disk process makes and only the guest's user may open. The kernel's process
//! sees no file that comes later, so these disks are there from the start.

mod command;
mod mconsole;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_types::ApiError;
use uuid::Uuid;

use self::command::{FILES_MAX, HostFile, SLOTS_MAX, Wires, number_of};
use crate::agent::{HELLO_LIMIT, Refusal, Way};
use crate::boot::{self, Kernels};
use crate::confine::calls::Emulator;
use crate::confine::{Confinement, Needs, readable};
use crate::console::cause;
use crate::console::open_pipe;
use crate::errors::{
    already_there, attach_timeout, bad_power_state, detach_rejected, detach_timeout, failed, illegal_device,
    lacks_feature, quiesce, shutdown_timeout,
};
use crate::facts::{GuestDisk, GuestFacts};
use crate::fleet::{self, Fleet};
use crate::guest::initramfs;
use crate::place::{Phase, Place, Saved, SavedDisk};
use crate::process::{Process, open_log};
use crate::settings::Settings;
use crate::supervise::verdict;
use crate::traits::{
    BootField, DiskSpec, FrontSpec, PluggedDisk, ShutdownKind, VmDriver, VmEvent, VmSpec, VmState,
};

const NAME: &str = "uml";

/// How long the kernel may take until it answers, and to stop and go on.
const KERNEL_LIMIT: Duration = Duration::from_secs(20);

/// How long a guest may take to get a disk.
const PLUG_LIMIT: Duration = Duration::from_secs(30);

/// The same where the VM brings its own initramfs, which may have no agent.
const STRANGER_LIMIT: Duration = Duration::from_secs(5);

/// How long a guest is asked to let go of a disk that is taken from it by force.
const FORCE_LIMIT: Duration = Duration::from_secs(3);

/// Slots that are reserved for disks which are not plugged yet, by position.
#[derive(Debug, Default)]
struct Slots(Mutex<BTreeMap<u8, u16>>);

type DriverVm = fleet::DriverVm<Slots>;

/// The driver.
#[derive(Debug)]
pub(crate) struct Uml(Arc<Fleet<Slots>>);

impl Drop for Uml {
    fn drop(&mut self) {
        self.0.dismiss();
    }
}

fn guest(place: Place, saved: Saved) -> DriverVm {
    let way = Way::Pipes(place.join("agent.in"), place.join("agent.out"));
    DriverVm::new(place, saved, way, Slots::default())
}

impl Uml {
    /// Guests of an earlier daemon go on; those that ended meanwhile are reported.
    pub(crate) fn new(settings: &Settings) -> Self {
        let driver = Self(Fleet::new(NAME, settings));
        driver.0.adopt_all(guest, |guest, process| driver.adopt(guest, process));
        driver
    }

    /// Takes care of a process from now on.
    fn adopt(&self, guest: &Arc<DriverVm>, process: Process) -> Result<(), ApiError> {
        self.0.look_after(guest, process, true, |guest, how| verdict(guest.vm, &guest.place, how))?;
        guest.change(|saved| {
            if saved.phase == Phase::Made {
                saved.phase = Phase::Running;
            }
        })
    }

    /// The guest of VMs without a ramdisk, made when it is first needed.
    fn embedded(&self, guest: &DriverVm, kernel: &Path) -> Result<PathBuf, ApiError> {
        let settings = &self.0.settings;
        let told = |error: std::io::Error| failed(guest.vm, "cannot make its initramfs", error);
        let mut modules: Vec<PathBuf> = kernel.parent().map(Path::to_path_buf).into_iter().collect();
        let versions = fs::read_dir(&settings.uml_modules).into_iter().flatten().flatten();
        modules.extend(versions.map(|version| version.path()));
        let image = initramfs::embedded(&settings.busybox, &modules, Default::default()).map_err(told)?;
        let file = guest.place.join("initramfs");
        fs::write(&file, image).map_err(told)?;
        // For the guest's user; no other user passes through the directory.
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).map_err(told)?;
        Ok(file)
    }

    /// Starts the kernel.
    fn start(&self, guest: &Arc<DriverVm>) -> Result<(), ApiError> {
        let settings = &self.0.settings;
        let (vm, place) = (guest.vm, &guest.place);
        let told = |what: &'static str| move |error: std::io::Error| failed(vm, what, error);
        let saved = guest.saved();
        // Looked at again: disks were plugged meanwhile, which may take long.
        let spec = &boot::checked(settings, &saved.spec, Kernels::Uml)?;
        let kernel = match &spec.kernel {
            Some(file) => readable(place, file, "kernel"),
            None => fs::canonicalize(&settings.uml),
        };
        let kernel = &kernel.map_err(told("cannot use its kernel"))?;
        let initrd = match &spec.ramdisk {
            Some(file) => readable(place, file, "ramdisk").map_err(told("cannot use its ramdisk"))?,
            None => self.embedded(guest, spec.kernel.as_deref().unwrap_or(kernel))?,
        };
        let console = (
            open_pipe(&place.join("console.in")).map_err(told("cannot make its console"))?,
            open_log(place, "console.log").map_err(told("cannot make its console"))?,
        );
        let agent = (
            open_pipe(&place.join("agent.in")).map_err(told("cannot make its serial line"))?,
            open_pipe(&place.join("agent.out")).map_err(told("cannot make its serial line"))?,
        );
        let empty = place.own().join("hostfs");
        fs::create_dir_all(&empty)
            .and_then(|()| fs::set_permissions(&empty, fs::Permissions::from_mode(0o755)))
            .map_err(told("cannot make an empty directory"))?;
        let keep = [console.0.as_raw_fd(), console.1.as_raw_fd(), agent.0.as_raw_fd(), agent.1.as_raw_fd()];
        let wires = Wires { console: (keep[0], keep[1]), agent: (keep[2], keep[3]) };
        let is_file = |disk: &&SavedDisk| number_of(disk.slot).is_some();
        let (files, sockets): (Vec<_>, Vec<_>) = saved.disks.values().partition(is_file);
        let used = sockets.iter().map(|disk| disk.slot + 1).max().unwrap_or(0);
        let files = files.into_iter().map(|disk| host_file(vm, disk)).collect::<Result<Vec<_>, _>>()?;
        let (arguments, slots) = command::line(spec, &initrd, wires, used, &files)
            .map_err(|why| failed(vm, "cannot start", why))?;
        for disk in sockets {
            guest.give_socket(&disk.disk)?;
        }
        guest.change(|saved| saved.slots = slots)?;
        let mut command = Command::new(kernel);
        command.args(arguments).env_clear();
        // The guest's memory is a file there; on a tmpfs it is memory.
        command.env("TMPDIR", if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" });
        command.env("HOME", place.own()).env("PATH", "/usr/local/bin:/usr/bin:/bin");
        let mut needs = Needs {
            emulator: Emulator::Uml,
            programs: vec![kernel.clone()],
            files: vec![initrd],
            written: Vec::new(),
            disks: files.into_iter().map(|file| file.path).collect(),
            devices: Vec::new(),
            // The guest's memory is a file, in which it also keeps what it knows of it.
            memory: spec.memory + spec.memory / 8,
        };
        if let Some(preload) = &settings.uml_preload {
            let preload = fs::canonicalize(preload).map_err(told("cannot use uml_preload"))?;
            command.env("LD_PRELOAD", &preload);
            needs.programs.push(preload);
        }
        let confinement = Confinement::of(settings, place, &needs)
            .map_err(|why| failed(vm, "its guest cannot be confined", why))?;
        if !needs.disks.is_empty() && place.user().is_some() && !confinement.has_root() {
            let why = format!(
                "{} of its disks are files (ubd), which a guest with a user of its own sees only in a root of its own, \
                 and this host has no mount namespaces; unplug all but {SLOTS_MAX}, use a VM of driver qemu, or set \
                 guest-users to nothing",
                needs.disks.len()
            );
            return Err(failed(vm, "cannot start", why));
        }
        guest.agent.listen();
        let process = Process::spawn(place, vm, command, &keep, confinement)?;
        self.adopt(guest, process)?;
        guest.wait_for_kernel()
    }
}

impl DriverVm {
    /// A command to the guest's kernel.
    fn kernel(&self, command: &str, until: Instant) -> std::io::Result<String> {
        mconsole::ask(self.place.dir(), &self.place.own().join("m/mconsole"), command, until)
    }

    /// Waits until the kernel answers: then its command line was good.
    fn wait_for_kernel(&self) -> Result<(), ApiError> {
        let until = Instant::now() + KERNEL_LIMIT;
        let Some(process) = self.process() else {
            return Err(failed(self.vm, "the guest does not start", cause(&self.place, "it ended at once")));
        };
        loop {
            if self.kernel("version", Instant::now() + Duration::from_secs(1)).is_ok() {
                return Ok(());
            }
            if process.wait(Instant::now() + Duration::from_millis(10)) {
                return Err(failed(
                    self.vm,
                    "the guest does not start",
                    cause(&self.place, "its kernel ended"),
                ));
            }
            if Instant::now() >= until {
                process.kill();
                let what = format!("its kernel has not answered within {KERNEL_LIMIT:?}");
                return Err(failed(self.vm, "the guest does not start", cause(&self.place, &what)));
            }
        }
    }

    /// The slot of a disk: the one that it has or that is reserved, that of its position, or another.
    fn slot(&self, disk: &DiskSpec) -> Result<u16, ApiError> {
        let (saved, mut promised) = (self.saved(), self.own.0.lock());
        let position = disk.position;
        let is_made = saved.phase == Phase::Made;
        if let Some(known) = saved.disks.get(&position) {
            return Ok(known.slot);
        }
        if let Some(slot) = promised.get(&position) {
            return Ok(*slot);
        }
        let count = if is_made { SLOTS_MAX } else { saved.slots };
        let is_free = |slot: &u16| {
            saved.disks.values().all(|disk| disk.slot != *slot)
                && promised.values().all(|other| other != slot)
        };
        // Where a socket still is, a disk that was just unplugged may still be on its way out.
        let is_clear = |slot: &u16| is_free(slot) && !self.place.join(&slot.to_string()).exists();
        let own = Some(u16::from(position)).filter(|slot| *slot < count);
        // From the end, so that others find their own.
        let slot = own.filter(is_clear).or_else(|| (0..count).rev().find(is_clear));
        let slot = slot.or_else(|| own.filter(is_free)).or_else(|| (0..count).rev().find(is_free));
        // A file is there from the start or not at all.
        let slot = slot.or_else(|| (SLOTS_MAX..SLOTS_MAX + FILES_MAX).find(|slot| is_made && is_free(slot)));
        let slot = slot.ok_or_else(|| {
            let why = match count {
                SLOTS_MAX.. if is_made => {
                    format!("VM {} has {} disks: {}", self.vm, SLOTS_MAX + FILES_MAX, command::limit())
                }
                SLOTS_MAX.. => format!(
                    "VM {} has disks in all {count} places for those that come while it runs; shut it down and plug \
                     this one before it starts: {}",
                    self.vm,
                    command::limit()
                ),
                _ => format!(
                    "the guest was started with {count} devices and all are used; restart it with a larger \
                     platform:max_disks (at most {SLOTS_MAX})"
                ),
            };
            illegal_device(disk.vbd, position, why)
        })?;
        promised.insert(position, slot);
        Ok(slot)
    }

    /// The slot whose socket a disk is offered on.
    fn slot_of(&self, disk: &PluggedDisk) -> Result<u16, ApiError> {
        let told = |why: &str| failed(self.vm, format!("disk {}", disk.spec.position), why);
        let socket = match &disk.front {
            FrontSpec::VhostUser { socket, .. } => socket,
            FrontSpec::File { .. } => {
                let slot = self.slot(&disk.spec)?;
                let is_file = number_of(slot).is_some();
                return is_file
                    .then_some(slot)
                    .ok_or_else(|| told("it is a file, and its place is a socket's"));
            }
            _ => return Err(told("it is not offered by vhost-user")),
        };
        let name = socket.strip_prefix(self.place.dir()).ok().and_then(Path::to_str);
        let slot = name.and_then(|name| name.parse().ok()).filter(|slot| *slot < SLOTS_MAX);
        let slot = slot.ok_or_else(|| told("its socket is none that this driver chose"))?;
        let saved = self.saved();
        let is_taken =
            saved.disks.values().any(|other| other.slot == slot && other.disk.spec.vbd != disk.spec.vbd);
        if is_taken {
            return Err(already_there(disk.spec.position));
        }
        Ok(slot)
    }

    /// Lets the guest's user connect to a disk's socket.
    fn give_socket(&self, disk: &PluggedDisk) -> Result<(), ApiError> {
        let FrontSpec::VhostUser { socket, .. } = &disk.front else {
            return Err(failed(
                self.vm,
                format!("disk {}", disk.spec.position),
                "it is not offered by vhost-user",
            ));
        };
        self.place.give_away(socket)
    }

    /// Takes a disk that is a file from the kernel, which refuses while it is in use.
    fn remove_file(&self, disk: &DiskSpec, number: u16, force: bool, until: Instant) -> Result<(), ApiError> {
        if self.phase() == Phase::Paused && !force {
            return Err(detach_rejected(disk.vbd, "the guest is paused; unpause it, or use force"));
        }
        let has_ended = self.process().is_none_or(|process| process.has_ended());
        let until = if force { until.min(Instant::now() + FORCE_LIMIT) } else { until };
        match self.kernel(&format!("remove ubd{number}"), until) {
            Ok(_) => Ok(()),
            Err(_) if has_ended => Ok(()),
            Err(why) if force => {
                tracing::warn!(vm = %self.vm, vbd = %disk.vbd, "a guest keeps a disk that is taken by force: {why}");
                Ok(())
            }
            Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {
                Err(detach_timeout(disk.vbd, "the guest's kernel has not answered in time"))
            }
            Err(why) => Err(detach_rejected(disk.vbd, why.to_string())),
        }
    }

    /// Keeps that the VM has this disk; the same disk again is no error.
    fn add_disk(&self, disk: &PluggedDisk, slot: u16) -> Result<(), ApiError> {
        let position = disk.spec.position;
        if self.saved().disks.get(&position).is_some_and(|known| known.disk.spec.vbd != disk.spec.vbd) {
            return Err(already_there(position));
        }
        self.change(|saved| {
            saved.disks.insert(position, SavedDisk { disk: disk.clone(), slot });
        })
    }

    /// Lets the guest find the disk behind one of its devices.
    fn bind(&self, disk: &PluggedDisk, slot: u16) -> Result<(), ApiError> {
        let limit = if self.saved().spec.ramdisk.is_some() { STRANGER_LIMIT } else { PLUG_LIMIT };
        let asked = self.agent.ask(&format!("bind {}", Self::device(slot)), Instant::now() + limit);
        asked.map(|_| ()).map_err(|why| match why {
            Refusal::No(text) => {
                failed(self.vm, format!("the guest does not take disk {}", disk.spec.position), text)
            }
            Refusal::Silent(true) => {
                let why = format!("the guest's agent has not answered within {limit:?}");
                attach_timeout(disk.spec.vbd, why)
            }
            Refusal::Silent(false) => lacks_feature(
                self.vm,
                "no agent answers in this guest: only one that was started with Tapio's initramfs can be given disks \
                 while it runs",
            ),
        })
    }

    /// Whether the guest runs, and with our initramfs.
    fn has_our_agent(&self) -> bool {
        self.phase() == Phase::Running && self.saved().spec.ramdisk.is_none()
    }

    fn device(slot: u16) -> String {
        format!("virtio-uml.{slot}")
    }
}

/// A disk that the kernel opens as a file.
fn host_file(vm: Uuid, disk: &SavedDisk) -> Result<HostFile, ApiError> {
    let path = disk.disk.node.clone().ok_or_else(|| {
        failed(vm, format!("disk {}", disk.disk.spec.position), "its disk process has not named its file")
    })?;
    Ok(HostFile { slot: disk.slot, path, read_only: disk.disk.spec.read_only })
}

/// Whether a processor has AMX, whose registers the kernel of User-mode Linux cannot hand over by itself.
fn has_amx() -> bool {
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" amx_tile"))
}

impl VmDriver for Uml {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ApiError> {
        let settings = &self.0.settings;
        let is_program = |file: &Path| {
            fs::metadata(file).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
        };
        for (file, package) in [(&settings.uml, "user-mode-linux"), (&settings.busybox, "busybox-static")] {
            if !is_program(file) {
                return Err(ApiError::internal(format!(
                    "driver uml: there is no {}; install {package}",
                    file.display()
                )));
            }
        }
        if has_amx() && settings.uml_preload.is_none() {
            return Err(ApiError::internal(
                "driver uml: this processor has AMX, so the guest's kernel needs libtapio_uml_preload.so beside tapiod \
                 or in /usr/lib/tapio, and it is in neither",
            ));
        }
        Ok(())
    }

    fn front(&self, vm: Uuid, disk: &DiskSpec) -> Result<FrontSpec, ApiError> {
        let guest = self.0.vm(vm)?;
        let slot = guest.slot(disk)?;
        Ok(match number_of(slot) {
            Some(_) => FrontSpec::File { owner: guest.place.user() },
            None => FrontSpec::VhostUser { socket: guest.place.join(&slot.to_string()), queues: 1 },
        })
    }

    fn check_boot(&self, vm: &VmSpec, field: BootField) -> Result<(), ApiError> {
        let own = Place::of(&self.0.settings, vm.uuid)?.join("initramfs");
        let initrd = vm.ramdisk.as_deref().unwrap_or(&own);
        boot::check(&self.0.settings, vm, Kernels::Uml, field, || command::arguments_refused(vm, initrd))
    }

    fn create(&self, vm: &VmSpec) -> Result<(), ApiError> {
        self.check()?;
        let own = Place::of(&self.0.settings, vm.uuid)?.join("initramfs");
        if let Some(why) = command::refused(vm, vm.ramdisk.as_deref().unwrap_or(&own)) {
            return Err(failed(vm.uuid, "cannot be made", why));
        }
        self.0.create(vm, Kernels::Uml, guest).map(|_| ())
    }

    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError> {
        let guest = self.0.vm(vm)?;
        let position = disk.spec.position;
        let slot = guest.slot_of(disk)?;
        let is_file = number_of(slot).is_some();
        if !is_file {
            guest.give_socket(disk)?;
        }
        match guest.phase() {
            Phase::Made => guest.add_disk(disk, slot)?,
            // Already there, since the start.
            Phase::Running if is_file && guest.disk(&disk.spec).is_some() => {}
            Phase::Running if is_file => {
                let why = format!(
                    "VM {vm}: a disk that is a file of the host (ubd) is there from the start of its guest: shut it \
                     down and plug the disk before it starts"
                );
                return Err(illegal_device(disk.spec.vbd, position, why));
            }
            Phase::Paused => return Err(bad_power_state(vm, "Running", "Paused")),
            Phase::Running => {
                // Kept first: whatever dies on the way, this disk is known to be there, or on its way.
                guest.add_disk(disk, slot)?;
                if let Err(error) = guest.bind(disk, slot) {
                    guest.change(|saved| {
                        saved.disks.remove(&position);
                    })?;
                    return Err(error);
                }
            }
        }
        guest.own.0.lock().remove(&position);
        Ok(())
    }

    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let Some(guest) = self.0.find(vm) else { return Ok(()) };
        guest.own.0.lock().remove(&disk.position);
        let Some(known) = guest.disk(disk) else { return Ok(()) };
        let device = DriverVm::device(known.slot);
        if let Some(number) = number_of(known.slot).filter(|_| guest.phase() != Phase::Made) {
            guest.remove_file(disk, number, force, until)?;
            return guest.change(|saved| {
                saved.disks.remove(&disk.position);
            });
        }
        match (guest.phase(), force) {
            (Phase::Made, _) => {}
            (Phase::Paused, false) => {
                return Err(detach_rejected(
                    disk.vbd,
                    "the guest is paused and cannot be asked; unpause it, or use force",
                ));
            }
            (Phase::Running, false) => {
                guest.agent.ask(&format!("unbind {device}"), until).map_err(|why| match why {
                    Refusal::No(text) => detach_rejected(disk.vbd, text),
                    Refusal::Silent(true) => {
                        detach_timeout(disk.vbd, "the guest's agent has not answered in time")
                    }
                    Refusal::Silent(false) => {
                        detach_timeout(disk.vbd, "no agent answers in this guest; use force, or shut it down")
                    }
                })?;
            }
            (_, true) => {
                // The guest loses its disk either way, in order if it can.
                let until = until.min(Instant::now() + FORCE_LIMIT);
                if let Err(why) = guest.agent.ask(&format!("unbind {device} force"), until) {
                    tracing::warn!(%vm, vbd = %disk.vbd, "a guest keeps a disk that is taken by force: {why:?}");
                }
            }
        }
        guest.change(|saved| {
            saved.disks.remove(&disk.position);
        })
    }

    fn guest(&self, vm: Uuid, until: Instant) -> Result<Option<GuestFacts>, ApiError> {
        let guest = self.0.vm(vm)?;
        match guest.has_our_agent() {
            true => guest.agent.facts(vm, until),
            false => Ok(None),
        }
    }

    fn freeze(&self, vm: Uuid, until: Instant) -> Result<(), ApiError> {
        let guest = self.0.vm(vm)?;
        match guest.has_our_agent() {
            true => guest.agent.freeze(vm, until),
            false => {
                Err(quiesce("NOT_SUPPORTED", vm, "this guest does not run Tapio's initramfs with its agent"))
            }
        }
    }

    fn thaw(&self, vm: Uuid, until: Instant) -> Result<bool, ApiError> {
        let guest = self.0.vm(vm)?;
        if guest.has_our_agent() { guest.agent.thaw(vm, until) } else { Ok(false) }
    }

    fn trim(&self, vm: Uuid, until: Instant) -> Result<Option<u64>, ApiError> {
        let guest = self.0.vm(vm)?;
        match guest.has_our_agent() {
            true => guest.agent.trim(vm, until),
            false => Err(lacks_feature(vm, "this guest does not run Tapio's initramfs with its agent")),
        }
    }

    fn guest_disks(&self, vm: Uuid, until: Instant) -> Result<Vec<GuestDisk>, ApiError> {
        let guest = self.0.vm(vm)?;
        match guest.has_our_agent() {
            true => guest.agent.disks(vm, until),
            false => Err(lacks_feature(vm, "this guest does not run Tapio's initramfs with its agent")),
        }
    }

    fn unpause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.0.vm(vm)?;
        match guest.phase() {
            Phase::Running => Ok(()),
            Phase::Made => {
                let started = self.start(&guest);
                if started.is_err() {
                    // No event for this end: the caller gets the error, and may try again.
                    let _ = guest.change(|saved| saved.is_ending = true);
                    if let Some(process) = guest.process() {
                        process.kill();
                    }
                }
                started
            }
            Phase::Paused => {
                let until = Instant::now() + KERNEL_LIMIT;
                match guest.kernel("go", until) {
                    // It was never stopped: an earlier daemon died on the way.
                    Err(error) if error.to_string().contains("Not stopped") => {}
                    Err(error) => return Err(failed(vm, "the guest does not go on", error)),
                    Ok(_) => {}
                }
                guest.change(|saved| saved.phase = Phase::Running)
            }
        }
    }

    fn pause(&self, vm: Uuid) -> Result<(), ApiError> {
        let guest = self.0.vm(vm)?;
        if guest.phase() != Phase::Running {
            return Ok(());
        }
        let until = Instant::now() + KERNEL_LIMIT;
        // Kept before it is done: a daemon that finds "paused" lets a guest go on that may run already, which is
        // harmless, but would not let one go on that it believes to run.
        guest.change(|saved| saved.phase = Phase::Paused)?;
        guest.kernel("stop", until).map(|_| ()).map_err(|error| {
            let _ = guest.change(|saved| saved.phase = Phase::Running);
            failed(vm, "the guest does not stop", error)
        })
    }

    fn shutdown(&self, vm: Uuid, kind: ShutdownKind, until: Instant) -> Result<(), ApiError> {
        let Some(guest) = self.0.find(vm) else { return Ok(()) };
        let begun = Instant::now();
        if let Some(process) = guest.process() {
            guest.change(|saved| saved.is_ending = true)?;
            if kind == ShutdownKind::Clean {
                let asked = self.ask_to_end(&guest, &process, until);
                if let Err(error) = asked {
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
        self.0.forget(&guest);
        Ok(())
    }

    fn state(&self, vm: Uuid) -> Result<VmState, ApiError> {
        Ok(self.0.find(vm).map_or(VmState::Halted, |guest| guest.state()))
    }

    fn console(&self, vm: Uuid) -> Option<PathBuf> {
        // The socket is there as long as the guest is.
        self.0.find(vm).map(|guest| guest.place.join("console"))
    }

    fn wait_event(&self, until: Instant) -> Option<VmEvent> {
        self.0.events.wait(until)
    }
}

impl Uml {
    /// Asks the guest to end and waits for it: its agent, or by the three keys where it has none.
    fn ask_to_end(
        &self,
        guest: &DriverVm,
        process: &Process,
        until: Instant,
    ) -> Result<(), Option<ApiError>> {
        if guest.phase() == Phase::Paused {
            return Err(Some(bad_power_state(guest.vm, "Running", "Paused")));
        }
        // A guest that is still starting gets the time to get there.
        let hello = until.min(Instant::now() + HELLO_LIMIT);
        let mut is_asked = false;
        while !is_asked && !process.has_ended() {
            match guest.agent.ask("poweroff", hello.min(Instant::now() + Duration::from_secs(2))) {
                Ok(_) => is_asked = true,
                Err(Refusal::Silent(false)) if Instant::now() < hello => {}
                Err(_) => {
                    let _ = guest.kernel("cad", until.min(Instant::now() + Duration::from_secs(2)));
                    is_asked = true;
                }
            }
        }
        if process.wait(until) { Ok(()) } else { Err(None) }
    }
}
