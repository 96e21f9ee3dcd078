//! A disk process is started while the storage makes its VDI ready, and either may fail.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tapio_core::disks::Backend;
use tapio_model::{ApiError, Value};
use tapio_vm::{DiskSpec, FrontSpec, PluggedDisk, ShutdownKind, VmDriver, VmEvent, VmSpec, VmState};
use uuid::Uuid;

use crate::pretend::Pretend;
use crate::rig::{MIB, Rig};

fn wait(what: &str, is_there: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_there() {
        assert!(Instant::now() < until, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_unplug_waits_for_the_process_that_takes_the_place_of_one_that_died() {
    let backend = Arc::new(Pretend::default());
    let rig = Rig::with(Arc::clone(&backend) as Arc<dyn Backend>);
    let vbd = rig.make_vbd(&rig.control_domain(), &rig.make_vdi(&rig.make_sr(), MIB));
    rig.call("VBD.plug", vec![vbd.as_str().into()]);
    let uuid = rig.get("VBD", &vbd).uuid().expect("a uuid");
    let starting = backend.starting.lock().expect("no panic");
    let unplug = std::thread::scope(|scope| {
        let again = scope.spawn(|| rig.stack.disks.restart(uuid, Instant::now() + Duration::from_secs(60)));
        wait("the end of the first process", || backend.ours().is_empty());
        let unplug = rig.text("Async.VBD.unplug", vec![vbd.as_str().into()]);
        wait("the step of the unplug that has to wait", || {
            let steps = rig.stack.plans.timeline(&unplug).map(|timeline| timeline.steps).unwrap_or_default();
            steps.iter().any(|step| step.result == "running")
        });
        // Without a wait for the other process it would be through by now. Nothing shows that a step waits; on a host
        // where it has not come so far the test proves less, and does not fail.
        std::thread::sleep(Duration::from_millis(200));
        drop(starting);
        again.join().expect("no panic").expect("it starts");
        unplug
    });
    assert_eq!(rig.finished(&unplug).text("status"), "success");
    assert!(backend.ours().is_empty() && rig.stack.disks.of_vbd(uuid).is_none());
    rig.check(Some(&*backend));
    // What goes has no need of another process.
    assert!(rig.stack.disks.restart(uuid, Instant::now()).is_err());
}

/// A driver that counts how often it is asked for a front end.
struct Counted {
    inner: Arc<dyn VmDriver>,
    fronts: AtomicUsize,
}

impl VmDriver for Counted {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn check(&self) -> Result<(), ApiError> {
        self.inner.check()
    }

    fn front(&self, vm: Uuid, disk: &DiskSpec) -> Result<FrontSpec, ApiError> {
        self.fronts.fetch_add(1, Ordering::Relaxed);
        self.inner.front(vm, disk)
    }

    fn create(&self, vm: &VmSpec) -> Result<(), ApiError> {
        self.inner.create(vm)
    }

    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError> {
        self.inner.plug(vm, disk)
    }

    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        self.inner.unplug(vm, disk, force, until)
    }

    fn unpause(&self, vm: Uuid) -> Result<(), ApiError> {
        self.inner.unpause(vm)
    }

    fn pause(&self, vm: Uuid) -> Result<(), ApiError> {
        self.inner.pause(vm)
    }

    fn shutdown(&self, vm: Uuid, kind: ShutdownKind, until: Instant) -> Result<(), ApiError> {
        self.inner.shutdown(vm, kind, until)
    }

    fn state(&self, vm: Uuid) -> Result<VmState, ApiError> {
        self.inner.state(vm)
    }

    fn console(&self, vm: Uuid) -> Option<PathBuf> {
        self.inner.console(vm)
    }

    fn wait_event(&self, until: Instant) -> Option<VmEvent> {
        self.inner.wait_event(until)
    }
}

#[test]
fn a_plug_asks_for_its_front_end_once_and_a_note_is_written_when_it_changes() {
    let backend = Arc::new(Pretend::default());
    let rig = Rig::with(Arc::clone(&backend) as Arc<dyn Backend>);
    let inner = rig.stack.vms.driver("host").expect("the host takes disks");
    let driver = Arc::new(Counted { inner, fronts: AtomicUsize::new(0) });
    rig.stack.vms.add_driver(Arc::clone(&driver) as Arc<dyn VmDriver>);
    let vbd = rig.make_vbd(&rig.control_domain(), &rig.make_vdi(&rig.make_sr(), MIB));
    rig.call("VBD.plug", vec![vbd.as_str().into()]);
    assert_eq!(driver.fronts.load(Ordering::Relaxed), 1);
    let uuid = rig.get("VBD", &vbd).uuid().expect("a uuid");
    let path = rig.dir.join("run/disks").join(format!("{uuid}.json"));
    // Each note that is written is a new file.
    let file = || std::fs::metadata(&path).expect("the note").ino();
    let before = file();
    rig.stack.disks.is_running(uuid).expect("it runs already");
    assert_eq!(file(), before, "nothing has changed");
    rig.stack.disks.is_ending(uuid, Instant::now()).expect("it is noted");
    assert_ne!(file(), before);
    rig.stack.disks.goes_on(uuid);
    rig.call("VBD.unplug", vec![vbd.as_str().into()]);
    rig.check(Some(&*backend));
}

/// A VDI that one disk of the host reads, and a second that may.
struct Readers {
    rig: Rig,
    backend: Arc<Pretend>,
    vdi: String,
    second: String,
}

impl Readers {
    fn new() -> Self {
        let backend = Arc::new(Pretend::default());
        let rig = Rig::with(Arc::clone(&backend) as Arc<dyn Backend>);
        let vdi = rig.make_vdi(&rig.make_sr(), MIB);
        let record = Rig::vbd_record(&rig.control_domain(), &vdi, &[("mode", "RO".into())]);
        let first = rig.text("VBD.create", vec![record.clone()]);
        let second = rig.text("VBD.create", vec![record]);
        rig.call("VBD.plug", vec![first.into()]);
        Self { rig, backend, vdi, second }
    }

    /// Begins to plug the second while a snapshot, which waits for `pausing`, keeps the storage from making it ready;
    /// answers the tasks of both once there is a process.
    fn plugs_beside_a_snapshot(&self) -> (String, String) {
        let rig = &self.rig;
        let none = Value::string_map::<&str, &str>([]);
        let snapshot = rig.text("Async.VDI.snapshot", vec![self.vdi.as_str().into(), none]);
        let runs = || {
            rig.get("VDI", &self.vdi).get("current_operations").as_map().is_some_and(|map| !map.is_empty())
        };
        wait("the snapshot", runs);
        let plug = rig.text("Async.VBD.plug", vec![self.second.as_str().into()]);
        let uuid = rig.get("VBD", &self.second).uuid().expect("a uuid");
        wait("a process with a number", || {
            let note = rig.stack.disks.of_vbd(uuid);
            note.is_some_and(|note| note.process.is_some() && note.minor == Some(1) && note.chain.is_none())
        });
        assert_eq!(rig.stack.storage.holders().len(), 1, "the storage has not begun");
        (snapshot, plug)
    }

    fn plug(&self) -> String {
        let task = self.rig.text("Async.VBD.plug", vec![self.second.as_str().into()]);
        assert_eq!(self.rig.finished(&task).text("status"), "success");
        task
    }
}

#[test]
fn a_process_waits_for_the_storage() {
    let readers = Readers::new();
    let held = readers.backend.pausing.lock().expect("no panic");
    let (snapshot, plug) = readers.plugs_beside_a_snapshot();
    drop(held);
    for task in [snapshot, plug] {
        let ended = readers.rig.finished(&task);
        assert_eq!(ended.text("status"), "success", "{ended:?}");
    }
    assert_eq!(readers.backend.ours().len(), 2);
    readers.rig.check(Some(&*readers.backend));
}

#[test]
fn a_process_ends_where_the_storage_is_given_up() {
    let readers = Readers::new();
    let held = readers.backend.pausing.lock().expect("no panic");
    let (snapshot, plug) = readers.plugs_beside_a_snapshot();
    readers.rig.call("task.cancel", vec![plug.as_str().into()]);
    assert_eq!(readers.rig.finished(&plug).text("status"), "cancelled");
    drop(held);
    assert_eq!(readers.rig.finished(&snapshot).text("status"), "success");
    assert_eq!(readers.backend.ours().len(), 1);
    readers.rig.check(Some(&*readers.backend));
    // Its number is free again.
    readers.plug();
    assert!(readers.rig.stack.disks.all().iter().any(|note| note.minor == Some(1)));
}

#[test]
fn whichever_fails_the_other_is_taken_back_and_the_storage_is_heard_first() {
    let readers = Readers::new();
    let (rig, backend) = (&readers.rig, &readers.backend);
    let refused = |vbd: &str| {
        let error = rig.refused("VBD.plug", vec![vbd.into()]);
        assert_eq!(backend.ours().len(), 1, "{error}");
        rig.check(Some(&**backend));
        error.code.into_owned()
    };
    let writer = rig.make_vbd(&rig.control_domain(), &readers.vdi);
    assert_eq!(refused(&writer), "VDI_IN_USE");
    backend.fails.store(true, Ordering::Relaxed);
    assert_eq!(refused(&readers.second), "SR_BACKEND_FAILURE_453");
    assert_eq!(refused(&writer), "VDI_IN_USE");
    backend.fails.store(false, Ordering::Relaxed);
    let timeline = rig.stack.plans.timeline(&readers.plug()).expect("it is kept");
    let steps: Vec<_> =
        timeline.steps.iter().map(|step| (step.name.as_str(), step.result.as_str())).collect();
    let names = ["activate the VDI", "start a disk process", "open the images", "plug the disk into the VM"];
    assert_eq!(steps, names.map(|name| (name, "ok")));
    rig.check(Some(&**backend));
}
