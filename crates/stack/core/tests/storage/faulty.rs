//! The file driver under another name, with what a test wants to go wrong, and what that means for others.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tapio_core::storage;
use tapio_model::{ApiError, Value};
use tapio_sm::{
    Config, Ctx, DriverInfo, Export, Fork, ForkKind, Import, Merge, MergeCost, Merged, NewVdi, OpenSpec,
    ProbeAnswer, RoomMade, RoomSpare, RoomTaken, RoomWanted, Sr, SrDriver, SrStat, VdiInfo,
};
use tapio_types::{Access, ChainSpec};
use uuid::Uuid;

use super::rig::{MIB, Rig};

static INFO: DriverInfo = DriverInfo {
    sr_type: "faulty",
    name: "Files that fail",
    description: "For tests",
    capabilities: &["VDI_CREATE", "VDI_DELETE", "VDI_SNAPSHOT", "VDI_RESIZE"],
    configuration: &[("allocation", "thick or thin")],
    is_shareable: false,
};

/// What shall go wrong, and what was seen.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Operations that fail.
    fails: Vec<&'static str>,
    /// Operations that get no answer, as of a storage that hangs.
    hangs: Vec<&'static str>,
    /// Operations that got none.
    hung: Vec<&'static str>,
    /// Operations that wait until they are let go.
    held: Vec<&'static str>,
    /// Operations that wait.
    waiting: Vec<&'static str>,
    config: Config,
}

impl Plan {
    pub(crate) fn fail(&self, op: &'static str) {
        self.state.lock().expect("no panic").fails.push(op);
    }

    fn hang(&self, op: &'static str) {
        self.state.lock().expect("no panic").hangs.push(op);
    }

    /// Waits until an operation was tried again and got no answer.
    fn wait_for_try(&self, op: &'static str) {
        let before = self.state.lock().expect("no panic").hung.len();
        until("another try", || {
            let state = self.state.lock().expect("no panic");
            state.hung[before..].contains(&op)
        });
    }

    pub(crate) fn hold(&self, op: &'static str) {
        self.state.lock().expect("no panic").held.push(op);
    }

    pub(crate) fn heal(&self) {
        let mut state = self.state.lock().expect("no panic");
        state.fails.clear();
        state.hangs.clear();
        state.held.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until an operation is in progress.
    pub(crate) fn wait_for(&self, op: &'static str) {
        let until = Instant::now() + Duration::from_secs(60);
        while !self.state.lock().expect("no panic").waiting.contains(&op) {
            assert!(Instant::now() < until, "{op} never began");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn at(&self, ctx: &dyn Ctx, op: &'static str) -> Result<(), ApiError> {
        let mut state = self.state.lock().expect("no panic");
        state.waiting.push(op);
        while state.held.contains(&op) && !ctx.is_cancelled() {
            state = self.changed.wait_timeout(state, Duration::from_millis(20)).expect("no panic").0;
        }
        // Also where it is cancelled: else the next wait for it would be over before it began.
        state.waiting.retain(|waiting| *waiting != op);
        if state.held.contains(&op) {
            return Err(ApiError::new("TASK_CANCELLED", [""]));
        }
        if state.hangs.contains(&op) {
            state.hung.push(op);
            return Err(ApiError::backend(47, "the storage hangs", "unfinished"));
        }
        if state.fails.contains(&op) { Err(ApiError::backend(200, "the cable is out", "")) } else { Ok(()) }
    }
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Faulty {
    inner: Arc<dyn SrDriver>,
    plan: Arc<Plan>,
}

struct FaultySr {
    inner: Box<dyn Sr>,
    plan: Arc<Plan>,
}

impl SrDriver for Faulty {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        self.inner.probe(ctx, config)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, size: u64) -> Result<(), ApiError> {
        self.plan.at(ctx, "create-sr")?;
        self.inner.create(ctx, sr, config, size)
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        self.plan.at(ctx, "attach")?;
        self.plan.state.lock().expect("no panic").config = config.clone();
        let inner = self.inner.attach(ctx, sr, config)?;
        Ok(Box::new(FaultySr { inner, plan: Arc::clone(&self.plan) }))
    }
}

impl Sr for FaultySr {
    fn stat(&self, ctx: &dyn Ctx) -> Result<SrStat, ApiError> {
        self.plan.at(ctx, "stat")?;
        self.inner.stat(ctx)
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        self.plan.at(ctx, "scan")?;
        self.inner.scan(ctx)
    }

    fn look(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        self.inner.look(ctx)
    }

    fn vdi(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.inner.vdi(ctx, vdi)
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        self.plan.at(ctx, "create")?;
        self.inner.create(ctx, new)
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        self.inner.introduce(ctx, vdi, location)
    }

    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.plan.at(ctx, "destroy")?;
        self.inner.destroy(ctx, vdi)
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        self.plan.at(ctx, "resize")?;
        self.inner.resize(ctx, vdi, bytes)
    }

    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid, kind: ForkKind) -> Result<Fork, ApiError> {
        self.plan.at(ctx, "fork")?;
        self.inner.fork(ctx, vdi, new, kind)
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.plan.at(ctx, "fill")?;
        self.inner.fill(ctx, into, from, base)
    }

    fn export(&self, ctx: &dyn Ctx, what: &Export, to: OwnedFd) -> Result<(), ApiError> {
        self.plan.at(ctx, "export")?;
        self.inner.export(ctx, what, to)
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.plan.at(ctx, "import")?;
        self.inner.import(ctx, what, from)
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        self.plan.at(ctx, "activate")?;
        self.inner.activate(ctx, vdi, access)
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        self.plan.at(ctx, "track")?;
        self.inner.track_changes(ctx, vdi, wanted)
    }

    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.plan.at(ctx, "destroy-data")?;
        self.inner.destroy_data(ctx, vdi)
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        self.plan.at(ctx, "changed-blocks")?;
        self.inner.changed_blocks(ctx, from, to)
    }

    fn collect_garbage(&self, ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        self.plan.at(ctx, "collect_garbage")?;
        self.inner.collect_garbage(ctx)
    }

    fn make_thin(&self, ctx: &dyn Ctx, config: &Config) -> Result<(), ApiError> {
        self.plan.at(ctx, "make_thin")?;
        self.plan.state.lock().expect("no panic").config.extend(config.clone());
        Ok(())
    }

    fn make_room(&self, ctx: &dyn Ctx, wanted: &[RoomWanted]) -> Result<RoomMade, ApiError> {
        self.inner.make_room(ctx, wanted)
    }

    fn take_room(&self, ctx: &dyn Ctx, spare: &[RoomSpare]) -> Result<RoomTaken, ApiError> {
        self.inner.take_room(ctx, spare)
    }

    fn merge_cost(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<MergeCost, ApiError> {
        self.inner.merge_cost(ctx, merge)
    }

    fn grow_base(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<(), ApiError> {
        self.inner.grow_base(ctx, merge)
    }

    fn merge(&self, ctx: &dyn Ctx, merge: &Merge, rate: u64) -> Result<(), ApiError> {
        self.plan.at(ctx, "merge")?;
        self.inner.merge(ctx, merge, rate)
    }

    fn relink(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.plan.at(ctx, "relink")?;
        self.inner.relink(ctx, merge)
    }

    fn merge_leaf(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.plan.at(ctx, "merge_leaf")?;
        self.inner.merge_leaf(ctx, merge)
    }

    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.plan.at(ctx, "deactivate")?;
        self.inner.deactivate(ctx, vdi)
    }

    fn detach(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        if let Err(error) = self.plan.at(ctx, "detach") {
            return Err((self, error));
        }
        let plan = self.plan;
        self.inner
            .detach(ctx)
            .map_err(|(inner, error)| (Box::new(Self { inner, plan }) as Box<dyn Sr>, error))
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        if let Err(error) = self.plan.at(ctx, "erase") {
            return Err((self, error));
        }
        let plan = self.plan;
        self.inner.erase(ctx).map_err(|(inner, error)| (Box::new(Self { inner, plan }) as Box<dyn Sr>, error))
    }
}

/// Adds the driver to a toolstack.
fn add_driver(rig: &Rig, plan: &Arc<Plan>) {
    let known = tapio_sm::registry(&rig.dir.join("mount"), &rig.dir.join("run"));
    let inner = known.into_iter().find(|driver| driver.info().sr_type == "file").expect("the file driver");
    rig.stack.storage.add_driver(Arc::new(Faulty { inner, plan: Arc::clone(plan) }));
}

fn config(rig: &Rig) -> Vec<(&'static str, String)> {
    let location = rig.dir.join("sr");
    vec![("location", location.to_string_lossy().into_owned())]
}

/// A toolstack with an SR of this driver.
pub(crate) fn rig() -> (Rig, Arc<Plan>, String) {
    let (rig, plan) = (Rig::new(), Arc::new(Plan::default()));
    add_driver(&rig, &plan);
    let sr = rig.text("SR.create", rig.sr_params("faulty", Value::string_map(config(&rig)))).expect("an SR");
    (rig, plan, sr)
}

#[test]
fn an_sr_becomes_thin_and_is_attached_as_that() {
    let (rig, plan, sr) = rig();
    let host = rig.stack.db.all("host")[0].reference.clone();
    let enable = |sr: &str, initial: i64, quantum: i64| {
        let params = vec![host.as_str().into(), sr.into(), initial.into(), quantum.into()];
        rig.call("LVHD.enable_thin_provisioning", params)
    };
    let device_config = || rig.get("PBD", &rig.pbd(&sr)).map("device_config");
    let before = device_config();
    plan.fail("make_thin");
    assert_eq!(enable(&sr, 0, 8 * MIB).unwrap_err().code, "SR_BACKEND_FAILURE_200");
    assert_eq!(device_config(), before, "nothing is changed");
    plan.heal();
    assert_eq!(enable(&sr, -1, 0).unwrap_err().params, ["initial-allocation", "-1"]);
    for _ in 0..2 {
        enable(&sr, 0, 8 * MIB).unwrap();
    }
    let with = |config: &BTreeMap<String, String>| {
        let key = |key: &str| config.get(key).cloned().unwrap_or_default();
        [key("allocation"), key("initial-allocation"), key("allocation-quantum")]
    };
    let thin = ["thin".to_owned(), String::new(), (8 * MIB).to_string()];
    assert_eq!(with(&device_config()), thin);
    assert_eq!(with(&rig.get("SR", &sr).map("sm_config")), thin);
    rig.call("PBD.unplug", vec![rig.pbd(&sr).into()]).unwrap();
    assert_eq!(enable(&sr, 0, 0).unwrap_err().code, "SR_NOT_ATTACHED");
    plan.state.lock().expect("no panic").config.clear();
    rig.call("PBD.plug", vec![rig.pbd(&sr).into()]).unwrap();
    assert_eq!(with(&plan.state.lock().expect("no panic").config), thin, "the driver is told at each attach");
    let files = rig.make_sr("files");
    let refused = enable(&files, 0, 0).unwrap_err();
    assert_eq!(refused.code, "SR_OPERATION_NOT_SUPPORTED");
    assert!(
        refused.params[1].contains("of type file") && refused.params[1].contains("lvmohba"),
        "{refused:?}"
    );
}

#[test]
fn a_failure_leaves_what_was() {
    let (rig, plan, sr) = rig();
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let none = || Value::string_map::<&str, &str>([]);
    for op in ["create", "destroy", "resize", "fork", "fill", "scan", "detach", "erase"] {
        plan.fail(op);
        let target: Value = vdi.as_str().into();
        let (method, params) = match op {
            "destroy" => ("VDI.destroy", vec![target]),
            "resize" => ("VDI.resize", vec![target, (8 * MIB).into()]),
            "fork" => ("VDI.snapshot", vec![target, none()]),
            "fill" => ("VDI.copy", Rig::copy_params(&vdi, &sr)),
            "scan" => ("SR.scan", vec![sr.as_str().into()]),
            "detach" => ("PBD.unplug", vec![rig.pbd(&sr).into()]),
            "erase" => {
                plan.heal();
                let (other, other_plan, other_sr) = self::rig();
                other_plan.fail("erase");
                let (code, _) = other.refused("SR.destroy", vec![other_sr.as_str().into()]);
                assert_eq!(code, "SR_BACKEND_FAILURE_200");
                other_plan.heal();
                other.call("SR.destroy", vec![other_sr.as_str().into()]).expect("it goes now");
                continue;
            }
            _ => {
                let error = rig.try_vdi(&sr, 4 * MIB, &[]).expect_err("it fails");
                assert_eq!(error.code, "SR_BACKEND_FAILURE_200");
                plan.heal();
                rig.check(&sr, "sr");
                continue;
            }
        };
        assert_eq!(rig.refused(method, params).0, "SR_BACKEND_FAILURE_200", "{op}");
        plan.heal();
        rig.check(&sr, "sr");
        let running = rig.get("SR", &sr);
        assert!(running.get("current_operations").as_map().expect("a map").is_empty(), "{op}");
    }
    assert_eq!(rig.vdi(&vdi).int("virtual_size"), 4 * MIB);
    // Sizes that cannot be told are no reason to fail what was done.
    plan.fail("stat");
    let made = rig.make_vdi(&sr, 4 * MIB);
    assert_eq!(rig.refused("SR.update", vec![sr.as_str().into()]).0, "SR_BACKEND_FAILURE_200");
    plan.heal();
    rig.call("VDI.destroy", vec![made.as_str().into()]).expect("it goes");
    rig.check(&sr, "sr");
}

#[test]
fn what_is_under_way_is_seen_and_refuses_others() {
    let (rig, plan, sr) = rig();
    let (vdi, other) = (rig.make_vdi(&sr, 4 * MIB), rig.make_vdi(&sr, 4 * MIB));
    plan.hold("fork");
    std::thread::scope(|scope| {
        let params = vec![vdi.as_str().into(), Value::string_map::<&str, &str>([])];
        let snapshot = scope.spawn(|| rig.call("VDI.snapshot", params));
        plan.wait_for("fork");
        let running = rig.vdi(&vdi).map("current_operations");
        assert_eq!(running.values().collect::<Vec<_>>(), ["snapshot"]);
        assert_eq!(
            rig.get("SR", &sr).map("current_operations").values().collect::<Vec<_>>(),
            ["vdi_snapshot"]
        );
        assert!(!rig.words("VDI", &vdi, "allowed_operations").contains(&"destroy".to_owned()));
        let (code, params) = rig.refused("VDI.destroy", vec![vdi.as_str().into()]);
        assert_eq!(code, "OTHER_OPERATION_IN_PROGRESS");
        assert_eq!(params[..3], ["VDI".to_owned(), vdi.clone(), "snapshot".to_owned()]);
        assert!(running.contains_key(&params[3]), "the task is named: {params:?}");
        assert_eq!(rig.refused("PBD.unplug", vec![rig.pbd(&sr).into()]).0, "OTHER_OPERATION_IN_PROGRESS");
        // Another disk of the same SR does not wait.
        rig.call("VDI.resize", vec![other.as_str().into(), (8 * MIB).into()]).expect("it is free");
        rig.call("VDI.destroy", vec![other.as_str().into()]).expect("it is free");
        plan.heal();
        snapshot.join().expect("no panic").expect("a snapshot");
    });
    rig.check(&sr, "sr");
    assert!(rig.words("VDI", &vdi, "allowed_operations").contains(&"destroy".to_owned()));
}

#[test]
fn a_copy_is_cancelled() {
    let (rig, plan, sr) = rig();
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    plan.hold("fill");
    let task = rig.text("Async.VDI.copy", Rig::copy_params(&vdi, &sr)).expect("a task");
    plan.wait_for("fill");
    // Readers go with it, writers do not.
    let (storage, call) = (&rig.stack.storage, rig.own_call());
    assert_eq!(
        storage::activate(&call, &rig.vdi(&vdi), "vbd", Access::ReadWrite).expect_err("it is read").code,
        "VDI_IN_USE"
    );
    drop(storage::activate(&call, &rig.vdi(&vdi), "vbd", Access::ReadOnly).expect("a second reader"));
    storage::deactivate(&call, &vdi, "vbd").expect("it lets go");
    rig.call("task.cancel", vec![task.as_str().into()]).expect("it can be");
    let began = Instant::now();
    while rig.get("task", &task).text("status") != "cancelled" {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", rig.get("task", &task));
        std::thread::sleep(Duration::from_millis(5));
    }
    rig.check(&sr, "sr");
    assert!(storage.holders().is_empty());
    assert_eq!(rig.stack.db.find("VDI", "SR", &sr).len(), 1);
}

#[test]
fn an_activation_that_fails_leaves_no_holder() {
    let (rig, plan, sr) = rig();
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let (storage, call) = (&rig.stack.storage, rig.own_call());
    plan.fail("activate");
    let error = storage::activate(&call, &rig.vdi(&vdi), "vbd", Access::ReadWrite).expect_err("it fails");
    assert_eq!(error.code, "SR_BACKEND_FAILURE_200");
    assert!(storage.holders().is_empty());
    plan.heal();
    drop(storage::activate(&call, &rig.vdi(&vdi), "vbd", Access::ReadWrite).expect("it is not in use"));
    plan.fail("deactivate");
    storage::deactivate(&call, &vdi, "vbd").expect_err("it fails");
    assert_eq!(storage.holders().len(), 1, "it still has it");
    plan.heal();
    storage::deactivate(&call, &vdi, "vbd").expect("now it lets go");
    assert!(storage.holders().is_empty());
}

#[test]
fn passwords_are_kept_as_secrets() {
    let (rig, plan) = (Rig::new(), Arc::new(Plan::default()));
    add_driver(&rig, &plan);
    let mut with_password: BTreeMap<_, _> = config(&rig).into_iter().collect();
    with_password.insert("password", "hunter2".into());
    let sr = rig.text("SR.create", rig.sr_params("faulty", Value::string_map(with_password))).expect("an SR");
    let kept = rig.get("PBD", &rig.pbd(&sr)).map("device_config");
    assert!(!kept.contains_key("password") && !kept.values().any(|value| value == "hunter2"), "{kept:?}");
    assert_eq!(
        plan.state.lock().expect("no panic").config.get("password").map(String::as_str),
        Some("hunter2")
    );
    let secrets = rig.stack.db.all("secret");
    assert_eq!((secrets.len(), kept["password_secret"].as_str()), (1, secrets[0].text("uuid")));
    let pbd = rig.pbd(&sr);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    rig.stack.db.destroy("secret", &secrets[0].reference).expect("it goes");
    assert_eq!(rig.refused("PBD.plug", vec![pbd.as_str().into()]).0, "SR_BACKEND_FAILURE_20");
    let anew = [("location", config(&rig)[0].1.clone()), ("password", "other".into())];
    rig.call("PBD.set_device_config", vec![pbd.as_str().into(), Value::string_map(anew)])
        .expect("it is unplugged");
    rig.call("PBD.plug", vec![pbd.as_str().into()]).expect("it is there again");
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    rig.call("SR.forget", vec![sr.as_str().into()]).expect("it is unplugged");
    assert!(rig.stack.db.all("secret").is_empty(), "a secret goes with its owner");
}

#[test]
fn an_sr_that_is_away_at_start_is_told_and_tried_again() {
    let (rig, plan, sr) = rig();
    let pbd = rig.pbd(&sr);
    let pairs = [("SR", sr.clone()), ("host", rig.host.clone())];
    // As after a restart: the record says attached, nothing is.
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    rig.stack.db.set("PBD", &pbd, "currently_attached", true).expect("as the last daemon left it");
    plan.fail("attach");
    crate::rig::recover(&rig.stack).expect("a daemon starts without it");
    assert!(!rig.get("PBD", &pbd).bool("currently_attached"), "{pairs:?}");
    let told = rig.stack.db.all("message");
    assert!(told.iter().any(|message| message.text("name") == "PBD_PLUG_FAILED_ON_SERVER_START"), "{told:?}");
    plan.heal();
    crate::rig::recover(&rig.stack).expect("it starts");
    assert!(rig.get("PBD", &pbd).bool("currently_attached"), "it was tried again");
    rig.check(&sr, "sr");
    plan.fail("scan");
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    rig.call("PBD.plug", vec![pbd.as_str().into()]).expect("attached, though nothing could be listed");
    let told = rig.stack.db.all("message");
    assert!(told.iter().any(|message| message.text("name") == "POST_ATTACH_SCAN_FAILED"), "{told:?}");
}

#[test]
fn an_sr_whose_creation_or_end_hung_is_put_in_order_when_the_storage_answers() {
    let (rig, plan) = (Rig::new(), Arc::new(Plan::default()));
    add_driver(&rig, &plan);
    let absent = rig.dir.join("absent").to_string_lossy().into_owned();
    let with_secret = vec![("location", absent), ("password", "secret".to_owned())];
    let create = |config: Vec<(&'static str, String)>| {
        rig.refused("SR.create", rig.sr_params("faulty", Value::string_map(config))).0
    };
    let count = |class: &str| rig.stack.db.all(class).len();
    let (srs, secrets) = (count("SR"), count("secret"));
    // It never came so far as to make anything: undone, when that is known.
    plan.hang("create-sr");
    plan.hang("attach");
    assert_eq!(create(with_secret), "SR_BACKEND_FAILURE_47");
    plan.wait_for_try("attach");
    assert_eq!((count("SR"), count("secret")), (srs, secrets + 1), "silence says nothing");
    plan.heal();
    until("the note of an SR that is not there goes", || rig.stack.db.notes("storage/sr-create").is_empty());
    assert_eq!(count("secret"), secrets);
    assert_eq!(count("SR"), srs);
    // It is made, and does not answer to the host: finished.
    plan.hang("attach");
    assert_eq!(create(config(&rig)), "SR_BACKEND_FAILURE_47");
    assert_eq!(count("SR"), srs);
    plan.heal();
    until("the SR is there", || count("SR") == srs + 1);
    let sr = rig.stack.db.all("SR").into_iter().find(|sr| sr.text("type") == "faulty").expect("the SR");
    let sr = sr.reference.clone();
    until("it is plugged", || rig.get("PBD", &rig.pbd(&sr)).bool("currently_attached"));
    until("it is free", || rig.words("SR", &sr, "allowed_operations").contains(&"destroy".to_owned()));
    // It goes on to be destroyed.
    plan.hang("erase");
    assert_eq!(rig.refused("SR.destroy", vec![sr.as_str().into()]).0, "SR_BACKEND_FAILURE_47");
    assert_eq!(count("SR"), srs + 1);
    plan.heal();
    until("the SR is gone", || count("SR") == srs);
}

#[test]
fn an_sr_that_got_a_vdi_while_its_end_hung_stays() {
    let (rig, plan, sr) = rig();
    plan.hang("erase");
    assert_eq!(rig.refused("SR.destroy", vec![sr.as_str().into()]).0, "SR_BACKEND_FAILURE_47");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    plan.heal();
    let is_noted = || !rig.stack.db.notes("storage/sr-destroy").is_empty();
    until("the end is given up", || !is_noted());
    rig.vdi(&vdi);
    rig.check(&sr, "sr");
}

#[test]
fn an_unplug_that_hung_leaves_an_sr_that_can_be_used_and_forgotten() {
    let (rig, plan, sr) = rig();
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    plan.hang("detach");
    let pbd = rig.pbd(&sr);
    assert_eq!(rig.refused("PBD.unplug", vec![pbd.as_str().into()]).0, "SR_BACKEND_FAILURE_47");
    assert!(rig.get("PBD", &pbd).bool("currently_attached"));
    plan.heal();
    rig.call("VDI.destroy", vec![vdi.into()]).expect("the SR works on");
    rig.check(&sr, "sr");
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it goes now");
    rig.call("SR.forget", vec![sr.as_str().into()]).expect("forgotten");
}
