//! User-mode Linux: a kernel that runs as an ordinary process, without any help from the processor or from root.
//!
//! Its disks are vhost-user devices, which it knows by the names of their sockets from the start. It is started with
//! some more than it has disks (*slots*): a device whose socket nobody listens at stays without a driver, and is
//! given one when the disk has come, by the agent in the guest. A slot has the number of its disk's position where
//! that is free.

mod command;
mod mconsole;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tapio_types::ApiError;
use uuid::Uuid;

use self::command::{SLOTS_MAX, Wires};
use crate::agent::{Agent, HELLO_LIMIT, Refusal, Way};
use crate::console::open_pipe;
use crate::errors::{
    already_there, attach_timeout, bad_power_state, detach_rejected, detach_timeout, failed, illegal_device,
    lacks_feature, shutdown_timeout,
};
use crate::guest::initramfs;
use crate::place::{Phase, Place, Saved, SavedDisk, found};
use crate::process::{Process, open_log};
use crate::registry::Settings;
use crate::supervise::{Events, Stop, Watched, cause, lock, verdict, watch};
use crate::traits::{DiskSpec, FrontSpec, PluggedDisk, ShutdownKind, VmDriver, VmEvent, VmSpec, VmState};

const NAME: &str = "uml";

/// How long the kernel may take until it answers, and to stop and go on.
const KERNEL_LIMIT: Duration = Duration::from_secs(20);

/// How long a guest may take to get a disk.
const PLUG_LIMIT: Duration = Duration::from_secs(30);

/// How long a guest is asked to let go of a disk that is taken from it by force.
const FORCE_LIMIT: Duration = Duration::from_secs(3);

#[derive(Debug)]
struct Machine {
    vm: Uuid,
    place: Place,
    saved: Mutex<Saved>,
    process: Mutex<Option<Arc<Process>>>,
    agent: Agent,
    /// Slots that were promised to disks which are not plugged yet, by position.
    promised: Mutex<BTreeMap<u8, u16>>,
}

/// What the driver and its threads share.
#[derive(Debug)]
struct Shared {
    settings: Settings,
    machines: Mutex<BTreeMap<Uuid, Arc<Machine>>>,
    events: Events,
}

/// The driver.
#[derive(Debug)]
pub(crate) struct Uml {
    shared: Arc<Shared>,
    stop: Option<Arc<Stop>>,
}

impl Drop for Uml {
    fn drop(&mut self) {
        if let Some(stop) = &self.stop {
            stop.stop();
        }
    }
}

impl Uml {
    /// Guests of an earlier daemon go on; those that ended meanwhile are reported.
    pub(crate) fn new(settings: &Settings) -> Self {
        let shared =
            Shared { settings: settings.clone(), machines: Mutex::default(), events: Events::default() };
        let driver = Self { shared: Arc::new(shared), stop: Stop::new().ok() };
        for (place, saved) in found(settings, NAME) {
            let vm = saved.spec.uuid;
            let (phase, is_ending, started) = (saved.phase, saved.is_ending, saved.started);
            let machine = Arc::new(Machine::new(vm, place, saved));
            lock(&driver.shared.machines).insert(vm, Arc::clone(&machine));
            match Process::find(&machine.place, started) {
                Some(process) => {
                    if let Err(error) = driver.adopt(&machine, process) {
                        tracing::warn!(%vm, "a guest that runs cannot be watched: {error}");
                    }
                }
                None if phase != Phase::Made => driver.shared.ended(&machine, is_ending, "it ended unseen"),
                None => {}
            }
        }
        driver
    }

    fn machine(&self, vm: Uuid) -> Result<Arc<Machine>, ApiError> {
        self.shared.machine(vm).ok_or_else(|| bad_power_state(vm, "Running", "Halted"))
    }

    /// Takes care of a process from now on.
    fn adopt(&self, machine: &Arc<Machine>, process: Process) -> Result<(), ApiError> {
        let process = Arc::new(process);
        let started = process.started();
        *lock(&machine.process) = Some(Arc::clone(&process));
        machine.change(|saved| {
            saved.started = started;
            if saved.phase == Phase::Made {
                saved.phase = Phase::Running;
            }
        })?;
        let told = |error: std::io::Error| failed(machine.vm, "it cannot be watched", error);
        let stop = self.stop.clone().ok_or_else(|| told(std::io::Error::other("no descriptor was free")))?;
        let (shared, ended) = (Arc::clone(&self.shared), Arc::clone(machine));
        let watched =
            Watched { process: Arc::clone(&process), place: machine.place.clone(), has_console: true };
        let on_end = move || {
            let status = process
                .status()
                .map_or_else(|| "it ended".into(), |status| format!("it ended with {status}"));
            let is_ending = lock(&ended.saved).is_ending;
            *lock(&ended.process) = None;
            shared.ended(&ended, is_ending, &status);
        };
        watch(watched, stop, on_end).map_err(told)
    }

    /// The guest of machines without a ramdisk, made when it is first needed.
    fn embedded(&self, machine: &Machine, kernel: &Path) -> Result<PathBuf, ApiError> {
        let settings = &self.shared.settings;
        let told = |error: std::io::Error| failed(machine.vm, "cannot make its initramfs", error);
        let mut modules: Vec<PathBuf> = kernel.parent().map(Path::to_path_buf).into_iter().collect();
        let versions = fs::read_dir(&settings.uml_modules).into_iter().flatten().flatten();
        modules.extend(versions.map(|version| version.path()));
        let image = initramfs::embedded(&settings.busybox, &modules).map_err(told)?;
        let file = machine.place.join("initramfs");
        fs::write(&file, image).map_err(told)?;
        machine.place.give_away(&file, settings)?;
        Ok(file)
    }

    /// Starts the kernel.
    fn start(&self, machine: &Arc<Machine>) -> Result<(), ApiError> {
        let settings = &self.shared.settings;
        let (vm, place) = (machine.vm, &machine.place);
        let told = |what: &'static str| move |error: std::io::Error| failed(vm, what, error);
        let saved = lock(&machine.saved).clone();
        let spec = &saved.spec;
        let kernel = spec.kernel.as_deref().unwrap_or(&settings.uml);
        let initrd = match &spec.ramdisk {
            Some(file) => file.clone(),
            None => self.embedded(machine, kernel)?,
        };
        let console = (
            open_pipe(&place.join("console.in")).map_err(told("cannot make its console"))?,
            open_log(place, "console.log", settings).map_err(told("cannot make its console"))?,
        );
        let agent = (
            open_pipe(&place.join("agent.in")).map_err(told("cannot make its serial line"))?,
            open_pipe(&place.join("agent.out")).map_err(told("cannot make its serial line"))?,
        );
        fs::create_dir_all(place.join("hostfs")).map_err(told("cannot make an empty directory"))?;
        let keep = [console.0.as_raw_fd(), console.1.as_raw_fd(), agent.0.as_raw_fd(), agent.1.as_raw_fd()];
        let wires = Wires { console: (keep[0], keep[1]), agent: (keep[2], keep[3]) };
        let used = saved.disks.values().map(|disk| disk.slot + 1).max().unwrap_or(0);
        let (arguments, slots) =
            command::line(spec, &initrd, wires, used).map_err(|why| failed(vm, "cannot start", why))?;
        for disk in saved.disks.values() {
            machine.give_socket(&disk.disk, settings)?;
        }
        machine.change(|saved| saved.slots = slots)?;
        let mut command = Command::new(kernel);
        command.args(arguments).env_clear();
        // The guest's memory is a file there; on a tmpfs it is memory.
        command.env("TMPDIR", if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" });
        command.env("HOME", place.dir()).env("PATH", "/usr/local/bin:/usr/bin:/bin");
        if let Some(preload) = &settings.uml_preload {
            command.env("LD_PRELOAD", preload);
        }
        machine.agent.listen();
        let process = Process::spawn(place, vm, command, &keep, settings)?;
        self.adopt(machine, process)?;
        machine.wait_for_kernel()
    }
}

impl Shared {
    fn machine(&self, vm: Uuid) -> Option<Arc<Machine>> {
        lock(&self.machines).get(&vm).cloned()
    }

    /// The process of a machine is gone: says so, unless somebody asked for it.
    fn ended(&self, machine: &Machine, is_ending: bool, status: &str) {
        let event = verdict(machine.vm, &machine.place, status);
        // First: who hears of it may make the machine again.
        self.forget(machine);
        if !is_ending {
            self.events.push(event);
        }
    }

    fn forget(&self, machine: &Machine) {
        let mut machines = lock(&self.machines);
        // Another one with its name may have been made meanwhile.
        if machines.get(&machine.vm).is_some_and(|known| std::ptr::eq(Arc::as_ptr(known), machine)) {
            machines.remove(&machine.vm);
            machine.place.remove();
        }
    }
}

impl Machine {
    fn new(vm: Uuid, place: Place, saved: Saved) -> Self {
        let agent = Agent::new(Way::Pipes(place.join("agent.in"), place.join("agent.out")));
        Self {
            vm,
            place,
            saved: Mutex::new(saved),
            process: Mutex::default(),
            agent,
            promised: Mutex::default(),
        }
    }

    /// Changes what is known, and keeps it.
    fn change(&self, change: impl FnOnce(&mut Saved)) -> Result<(), ApiError> {
        let mut saved = lock(&self.saved);
        let mut fresh = saved.clone();
        change(&mut fresh);
        self.place.save(&fresh)?;
        *saved = fresh;
        Ok(())
    }

    fn phase(&self) -> Phase {
        lock(&self.saved).phase
    }

    fn process(&self) -> Option<Arc<Process>> {
        lock(&self.process).clone()
    }

    /// A command to the guest's kernel.
    fn kernel(&self, command: &str, until: Instant) -> std::io::Result<String> {
        mconsole::ask(self.place.dir(), &self.place.join("m/mconsole"), command, until)
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

    /// The slot of a disk: the one that it has or was promised, that of its position, or another.
    fn slot(&self, disk: &DiskSpec) -> Result<u16, ApiError> {
        let (saved, mut promised) = (lock(&self.saved), lock(&self.promised));
        let position = disk.position;
        if let Some(known) = saved.disks.get(&position) {
            return Ok(known.slot);
        }
        if let Some(slot) = promised.get(&position) {
            return Ok(*slot);
        }
        let count = if saved.phase == Phase::Made { SLOTS_MAX } else { saved.slots };
        let is_free = |slot: &u16| {
            saved.disks.values().all(|disk| disk.slot != *slot)
                && promised.values().all(|other| other != slot)
        };
        let own = Some(u16::from(position)).filter(|slot| *slot < count && is_free(slot));
        // From the end, so that others find their own; before the start from the beginning, so that few are needed.
        let slot = own.or_else(|| (0..count).rev().find(is_free));
        let slot = slot.ok_or_else(|| {
            illegal_device(
                disk.vbd,
                position,
                format!("the guest was started with {count} devices and all are used; restart it with a larger platform:max_disks (at most {SLOTS_MAX})"),
            )
        })?;
        promised.insert(position, slot);
        Ok(slot)
    }

    /// Lets the guest's user connect to a disk's socket.
    fn give_socket(&self, disk: &PluggedDisk, settings: &Settings) -> Result<(), ApiError> {
        let FrontSpec::VhostUser { socket, .. } = &disk.front else {
            return Err(failed(
                self.vm,
                format!("disk {}", disk.spec.position),
                "it is not offered by vhost-user",
            ));
        };
        self.place.give_away(socket, settings)
    }

    fn device(slot: u16) -> String {
        format!("virtio-uml.{slot}")
    }
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
        let settings = &self.shared.settings;
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
        let machine = self.machine(vm)?;
        let slot = machine.slot(disk)?;
        Ok(FrontSpec::VhostUser { socket: machine.place.join(&slot.to_string()), queues: 1 })
    }

    fn create(&self, vm: &VmSpec) -> Result<(), ApiError> {
        self.check()?;
        if let Some(why) = command::refused(vm) {
            return Err(failed(vm.uuid, "cannot be made", why));
        }
        for file in vm.kernel.iter().chain(&vm.ramdisk) {
            fs::metadata(file).map_err(|error| failed(vm.uuid, file.display(), error))?;
        }
        let place = Place::of(&self.shared.settings, vm.uuid)?;
        let mut machines = lock(&self.shared.machines);
        if machines.contains_key(&vm.uuid) {
            return Err(bad_power_state(vm.uuid, "Halted", "Running"));
        }
        place.remove();
        place.make(&self.shared.settings)?;
        let saved = Saved::new(NAME, vm);
        place.save(&saved)?;
        machines.insert(vm.uuid, Arc::new(Machine::new(vm.uuid, place, saved)));
        Ok(())
    }

    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError> {
        let machine = self.machine(vm)?;
        let position = disk.spec.position;
        if lock(&machine.saved).disks.contains_key(&position) {
            return Err(already_there(position));
        }
        machine.give_socket(disk, &self.shared.settings)?;
        let slot = machine.slot(&disk.spec)?;
        match machine.phase() {
            Phase::Made => {}
            Phase::Paused => return Err(bad_power_state(vm, "Running", "Paused")),
            Phase::Running => {
                let vbd = disk.spec.vbd;
                let until = Instant::now() + PLUG_LIMIT;
                machine.agent.ask(&format!("bind {}", Machine::device(slot)), until).map_err(|why| match why {
                    Refusal::No(text) => failed(vm, format!("the guest does not take disk {position}"), text),
                    Refusal::Silent(true) => {
                        attach_timeout(vbd, format!("the guest's agent has not answered within {PLUG_LIMIT:?}"))
                    }
                    Refusal::Silent(false) => lacks_feature(
                        vm,
                        "no agent answers in this guest: only one that was started with Tapio's initramfs can be given disks while it runs",
                    ),
                })?;
            }
        }
        machine.change(|saved| {
            saved.disks.insert(position, SavedDisk { disk: disk.clone(), slot });
        })?;
        lock(&machine.promised).remove(&position);
        Ok(())
    }

    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let Some(machine) = self.shared.machine(vm) else { return Ok(()) };
        lock(&machine.promised).remove(&disk.position);
        let known = lock(&machine.saved)
            .disks
            .get(&disk.position)
            .filter(|known| known.disk.spec.vbd == disk.vbd)
            .cloned();
        let Some(known) = known else { return Ok(()) };
        let device = Machine::device(known.slot);
        match (machine.phase(), force) {
            (Phase::Made, _) => {}
            (Phase::Paused, false) => {
                return Err(detach_rejected(
                    disk.vbd,
                    "the guest is paused and cannot be asked; unpause it, or use force",
                ));
            }
            (Phase::Running, false) => {
                machine.agent.ask(&format!("unbind {device}"), until).map_err(|why| match why {
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
                if let Err(why) = machine.agent.ask(&format!("unbind {device} force"), until) {
                    tracing::warn!(%vm, vbd = %disk.vbd, "a disk is taken from a guest that did not let go of it: {why:?}");
                }
            }
        }
        machine.change(|saved| {
            saved.disks.remove(&disk.position);
        })
    }

    fn unpause(&self, vm: Uuid) -> Result<(), ApiError> {
        let machine = self.machine(vm)?;
        match machine.phase() {
            Phase::Running => Ok(()),
            Phase::Made => {
                let started = self.start(&machine);
                if started.is_err() {
                    // Not by itself: whoever started it hears of it here, and may try again.
                    let _ = machine.change(|saved| saved.is_ending = true);
                    if let Some(process) = machine.process() {
                        process.kill();
                    }
                }
                started
            }
            Phase::Paused => {
                let until = Instant::now() + KERNEL_LIMIT;
                match machine.kernel("go", until) {
                    // It was never stopped: an earlier daemon died on the way.
                    Err(error) if error.to_string().contains("Not stopped") => {}
                    Err(error) => return Err(failed(vm, "the guest does not go on", error)),
                    Ok(_) => {}
                }
                machine.change(|saved| saved.phase = Phase::Running)
            }
        }
    }

    fn pause(&self, vm: Uuid) -> Result<(), ApiError> {
        let machine = self.machine(vm)?;
        if machine.phase() != Phase::Running {
            return Ok(());
        }
        let until = Instant::now() + KERNEL_LIMIT;
        // Kept before it is done: a daemon that finds "paused" lets a guest go on that may run already, which is
        // harmless, but would not let one go on that it believes to run.
        machine.change(|saved| saved.phase = Phase::Paused)?;
        machine.kernel("stop", until).map(|_| ()).map_err(|error| {
            let _ = machine.change(|saved| saved.phase = Phase::Running);
            failed(vm, "the guest does not stop", error)
        })
    }

    fn shutdown(&self, vm: Uuid, kind: ShutdownKind, until: Instant) -> Result<(), ApiError> {
        let Some(machine) = self.shared.machine(vm) else { return Ok(()) };
        let begun = Instant::now();
        if let Some(process) = machine.process() {
            machine.change(|saved| saved.is_ending = true)?;
            if kind == ShutdownKind::Clean {
                let asked = self.ask_to_end(&machine, &process, until);
                if let Err(error) = asked {
                    machine.change(|saved| saved.is_ending = false)?;
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
        self.shared.forget(&machine);
        Ok(())
    }

    fn state(&self, vm: Uuid) -> Result<VmState, ApiError> {
        let Some(machine) = self.shared.machine(vm) else { return Ok(VmState::Halted) };
        let phase = machine.phase();
        if phase != Phase::Made && machine.process().is_none_or(|process| process.has_ended()) {
            return Ok(VmState::Halted);
        }
        Ok(if phase == Phase::Running { VmState::Running } else { VmState::Paused })
    }

    fn console(&self, vm: Uuid) -> Option<PathBuf> {
        let machine = self.shared.machine(vm)?;
        machine.process().map(|_| machine.place.join("console"))
    }

    fn wait_event(&self, until: Instant) -> Option<VmEvent> {
        self.shared.events.wait(until)
    }
}

impl Uml {
    /// Asks the guest to end and waits for it: its agent, or by the three keys where it has none.
    fn ask_to_end(
        &self,
        machine: &Machine,
        process: &Process,
        until: Instant,
    ) -> Result<(), Option<ApiError>> {
        if machine.phase() == Phase::Paused {
            return Err(Some(bad_power_state(machine.vm, "Running", "Paused")));
        }
        // A guest that is still starting gets the time to get there.
        let hello = until.min(Instant::now() + HELLO_LIMIT);
        let mut is_asked = false;
        while !is_asked && !process.has_ended() {
            match machine.agent.ask("poweroff", hello.min(Instant::now() + Duration::from_secs(2))) {
                Ok(_) => is_asked = true,
                Err(Refusal::Silent(false)) if Instant::now() < hello => {}
                Err(_) => {
                    let _ = machine.kernel("cad", until.min(Instant::now() + Duration::from_secs(2)));
                    is_asked = true;
                }
            }
        }
        if process.wait(until) { Ok(()) } else { Err(None) }
    }
}
