//! What is being done with machines and their disks, and what may be.
//!
//! `current_operations` is the lock: it is looked at and set in one change of the database.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};

use super::{Call, Machines};
use crate::db::{Change, Object};

/// How long an operation that is in the way of a forced one may take to end by itself.
const COURTESY: Duration = Duration::from_secs(2);
/// Operations on a VM that wait for its guest, and yield to a forced one meanwhile.
const WAITING: [&str; 3] = ["clean_shutdown", "clean_reboot", "shutdown"];
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// The right of an operation to change what it is about. A forced operation takes it from one that hangs: whatever that
/// one still does, when its storage or its guest answers at last, it changes nothing any more.
#[derive(Debug, Default)]
pub struct Claim {
    right: RwLock<Right>,
}

/// How an operation stands to its object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Right {
    /// It is its own. That of a VBD can be taken away all the same.
    #[default]
    Held,
    /// It waits for the guest, and a forced operation on the VM may take over.
    Yields,
    /// A forced operation has taken over.
    Lost,
}

impl Claim {
    /// While this is held nobody takes the right away; none where it is gone. Only for what ends by itself.
    pub fn hold(&self) -> Option<RwLockReadGuard<'_, Right>> {
        let right = self.right.read().unwrap_or_else(PoisonError::into_inner);
        (*right != Right::Lost).then_some(right)
    }

    /// Waits for a guest, while a forced operation may take over; none where one did.
    pub fn yielding<T>(&self, wait: impl FnOnce() -> T) -> Option<T> {
        *self.write() = Right::Yields;
        let answer = wait();
        let mut right = self.write();
        if *right == Right::Lost {
            return None;
        }
        *right = Right::Held;
        Some(answer)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Right> {
        self.right.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_away(&self) {
        *self.write() = Right::Lost;
    }

    /// Takes the right of an operation on a VM; false where that does not merely wait for the guest.
    fn take_if_yielding(&self) -> bool {
        let mut right = self.write();
        let yields = *right == Right::Yields;
        if yields {
            *right = Right::Lost;
        }
        yields
    }
}

/// Claims of operations that run: the object, the operation's key, the claim.
pub type Claims = Mutex<Vec<(String, String, Arc<Claim>)>>;

/// An operation that runs; it ends when this is dropped.
#[derive(Debug)]
pub struct Running {
    vms: Arc<Machines>,
    class: &'static str,
    reference: String,
    key: String,
    claim: Arc<Claim>,
}

impl Running {
    /// Begins `operation` on a VM or a VBD, once `check` has found nothing wrong with it.
    ///
    /// # Errors
    /// `HANDLE_INVALID`, `OTHER_OPERATION_IN_PROGRESS`, `OPERATION_BLOCKED`, what `check` answers.
    pub fn begin<T>(
        call: &Call,
        class: &'static str,
        reference: &str,
        operation: &'static str,
        check: impl FnOnce(&mut Change<'_>, &Object) -> Result<T, ApiError>,
    ) -> Result<(Self, T), ApiError> {
        let key = call
            .progress
            .task()
            .map_or_else(|| format!("OpaqueRef:{}", uuid::Uuid::new_v4()), ToOwned::to_owned);
        let answer = call.part.db.change(|change| {
            let object = change.get(class, reference)?;
            refuse_beside(change, &object, operation)?;
            let answer = check(change, &object)?;
            let mut operations = object.get("current_operations").as_map().cloned().unwrap_or_default();
            operations.insert(key.clone(), Value::string(operation));
            change.set(class, reference, "current_operations", Value::Map(operations))?;
            refresh(change, class, reference)?;
            Ok(answer)
        })?;
        let claim = Arc::<Claim>::default();
        claims(&call.part).push((reference.to_owned(), key.clone(), Arc::clone(&claim)));
        let running =
            Self { vms: Arc::clone(&call.part), class, reference: reference.to_owned(), key, claim };
        Ok((running, answer))
    }

    /// As [`Self::begin`]; operations that are in the way and do not end within a moment lose their claim: those on the
    /// VBD, on the VBDs of the VM, and those on the VM that wait for its guest. They end when what they wait for does.
    /// `check` may be called several times; it is told whether one lost its claim.
    ///
    /// # Errors
    /// As [`Self::begin`]: an operation on the VM that does more than wait for the guest stays in the way.
    pub fn begin_by_force<T>(
        call: &Call,
        class: &'static str,
        reference: &str,
        operation: &'static str,
        mut check: impl FnMut(&mut Change<'_>, &Object, bool) -> Result<T, ApiError>,
    ) -> Result<(Self, T), ApiError> {
        let until = Instant::now() + COURTESY;
        let mut is_forced = false;
        loop {
            let begun = Self::begin(call, class, reference, operation, |change, object| {
                check(change, object, is_forced)
            });
            match begun {
                Err(error)
                    if error.code == "OTHER_OPERATION_IN_PROGRESS"
                        && match &error.params[..] {
                            [class, _, running, ..] => class == "VBD" || WAITING.contains(&running.as_str()),
                            _ => false,
                        } =>
                {
                    if call.progress.is_cancelled() {
                        return Err(ApiError::new(
                            "TASK_CANCELLED",
                            [call.progress.task().unwrap_or_default()],
                        ));
                    }
                    if Instant::now() < until {
                        std::thread::sleep(LOOK);
                    } else if take_claims(call, class, reference)? {
                        is_forced = true;
                    } else {
                        return Err(error);
                    }
                }
                begun => return begun,
            }
        }
    }

    /// What `wait` comes to, which waits for the guest of a VM: a forced operation may take over meanwhile.
    ///
    /// # Errors
    /// `OTHER_OPERATION_IN_PROGRESS`: one did; or what `wait` answers.
    pub fn waiting<T>(&self, wait: impl FnOnce() -> Result<T, ApiError>) -> Result<T, ApiError> {
        let overridden = || {
            let params = [self.class, self.reference.as_str(), "hard_shutdown", self.key.as_str()];
            ApiError::new("OTHER_OPERATION_IN_PROGRESS", params)
        };
        self.claim.yielding(wait).unwrap_or_else(|| Err(overridden()))
    }

    /// Whether no forced operation has taken over.
    pub fn is_mine(&self) -> bool {
        self.claim.hold().is_some()
    }

    /// Its right to change the object.
    pub fn claim(&self) -> Arc<Claim> {
        Arc::clone(&self.claim)
    }
}

fn claims(vms: &Machines) -> MutexGuard<'_, Vec<(String, String, Arc<Claim>)>> {
    vms.claims.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the claims of all operations on a VBD, or on the VBDs of a VM, and of one on the VM that waits for the guest;
/// false where there are none.
fn take_claims(call: &Call, class: &str, reference: &str) -> Result<bool, ApiError> {
    let db = &call.part.db;
    let (vbds, vm) = match class {
        "VBD" => (vec![reference.to_owned()], db.get("VBD", reference)?.text("VM").to_owned()),
        _ => {
            let vbds = db.find("VBD", "VM", reference);
            (vbds.iter().map(|vbd| vbd.reference.clone()).collect(), reference.to_owned())
        }
    };
    let mut taken = Vec::new();
    claims(&call.part).retain(|(of, key, claim)| {
        let class = if vbds.contains(of) {
            claim.take_away();
            "VBD"
        } else if *of == vm && claim.take_if_yielding() {
            "VM"
        } else {
            return true;
        };
        taken.push((class, of.clone(), key.clone()));
        false
    });
    db.change(|change| {
        for (class, object, key) in &taken {
            tracing::warn!(
                class,
                object,
                task = key,
                "an operation that hangs is overridden by a forced one"
            );
            end(change, class, object, key)?;
        }
        Ok(())
    })?;
    Ok(!taken.is_empty())
}

/// Takes an operation out of those that run on an object.
fn end(change: &mut Change<'_>, class: &'static str, reference: &str, key: &str) -> Result<(), ApiError> {
    let Ok(object) = change.get(class, reference) else { return Ok(()) };
    let mut operations = object.get("current_operations").as_map().cloned().unwrap_or_default();
    if operations.remove(key).is_none() {
        return Ok(());
    }
    change.set(class, reference, "current_operations", Value::Map(operations))?;
    refresh(change, class, reference)
}

impl Drop for Running {
    fn drop(&mut self) {
        claims(&self.vms).retain(|(_, _, claim)| !Arc::ptr_eq(claim, &self.claim));
        let ended = self.vms.db.change(|change| end(change, self.class, &self.reference, &self.key));
        if let Err(error) = ended {
            tracing::warn!(object = self.reference, %error, "the end of an operation could not be written");
        }
    }
}

fn other(object: &Object) -> Option<ApiError> {
    let (task, operation) = object.get("current_operations").as_map()?.iter().next()?;
    let operation = operation.as_str().unwrap_or_default();
    Some(ApiError::new(
        "OTHER_OPERATION_IN_PROGRESS",
        [object.class.name, &object.reference, operation, task],
    ))
}

/// A machine and its disks: one operation at a time on each, and none of a disk beside one of its machine.
fn refuse_beside(change: &Change<'_>, object: &Object, operation: &str) -> Result<(), ApiError> {
    other(object).map_or(Ok(()), Err)?;
    if object.class.name == "VBD" {
        let vm = change.get("VM", object.text("VM"))?;
        return other(&vm).map_or(Ok(()), Err);
    }
    let blocked = object.map("blocked_operations");
    if let Some(why) = blocked.get(operation) {
        return Err(ApiError::new("OPERATION_BLOCKED", [object.reference.as_str(), why]));
    }
    let disks = change.find("VBD", "VM", &object.reference);
    disks.iter().find_map(|vbd| other(vbd)).map_or(Ok(()), Err)
}

/// Brings `allowed_operations` of an object, and of those that it decides over, up to date.
///
/// # Errors
/// The store's.
pub fn refresh(change: &mut Change<'_>, class: &str, reference: &str) -> Result<(), ApiError> {
    let vm = if class == "VM" {
        reference.to_owned()
    } else {
        change.get(class, reference)?.text("VM").to_owned()
    };
    // A VBD whose machine is gone goes with it.
    let Ok(vm) = change.get("VM", &vm) else { return Ok(()) };
    let is_busy = |object: &Object| other(object).is_some();
    let vm_busy = is_busy(&vm);
    // A machine that starts brings up to 255 disks along, each of which comes here.
    let vbds = match class {
        "VBD" if vm_busy => vec![change.get("VBD", reference)?],
        _ => change.find("VBD", "VM", &vm.reference),
    };
    let words = if vm_busy || vbds.iter().any(|vbd| is_busy(vbd)) { Vec::new() } else { of_vm(&vm) };
    change.set("VM", &vm.reference, "allowed_operations", Value::strings(words))?;
    for vbd in vbds.iter().filter(|vbd| class == "VM" || vbd.reference == reference) {
        let words = if vm_busy || is_busy(vbd) { Vec::new() } else { of_vbd(vbd, &vm) };
        change.set("VBD", &vbd.reference, "allowed_operations", Value::strings(words))?;
    }
    if class == "VM" {
        let words: &[&str] = if vm_busy { &[] } else { &["attach"] };
        for vif in change.find("VIF", "VM", &vm.reference) {
            change.set("VIF", &vif.reference, "allowed_operations", Value::strings(words.iter().copied()))?;
        }
    }
    Ok(())
}

/// What may be done with a machine in the state that it is in.
pub fn of_vm(vm: &Object) -> Vec<&'static str> {
    if vm.bool("is_control_domain") {
        return Vec::new();
    }
    if vm.bool("is_a_snapshot") {
        return vec!["clone", "copy", "destroy"];
    }
    if vm.bool("is_a_template") {
        let mut words = vec!["clone", "copy", "provision"];
        words.extend((!vm.bool("is_default_template")).then_some("destroy"));
        return words;
    }
    match vm.text("power_state") {
        "Running" => vec![
            "pause",
            "clean_shutdown",
            "hard_shutdown",
            "shutdown",
            "clean_reboot",
            "hard_reboot",
            "snapshot",
            "power_state_reset",
        ],
        "Paused" => {
            vec!["unpause", "hard_shutdown", "shutdown", "hard_reboot", "snapshot", "power_state_reset"]
        }
        _ => vec!["start", "start_on", "clone", "copy", "snapshot", "destroy", "power_state_reset"],
    }
}

/// What may be done with a disk of a machine in that state.
fn of_vbd(vbd: &Object, vm: &Object) -> Vec<&'static str> {
    let mut words = vec!["attach"];
    if vbd.text("type") == "CD" && !vm.bool("is_a_template") {
        words.push(if vbd.bool("empty") { "insert" } else { "eject" });
    }
    if is_live(vm) {
        if vbd.bool("currently_attached") {
            if vbd.bool("unpluggable") {
                words.extend(["unplug", "unplug_force"]);
            }
        } else {
            words.push("plug");
        }
    }
    words
}

/// Whether disks can be plugged into it.
pub fn is_live(vm: &Object) -> bool {
    matches!(vm.text("power_state"), "Running" | "Paused")
}

/// `VM_BAD_POWER_STATE`, as clients know it: in small letters.
pub fn bad_power_state(vm: &Object, expected: &str) -> ApiError {
    ApiError::new(
        "VM_BAD_POWER_STATE",
        [vm.reference.clone(), expected.to_lowercase(), vm.text("power_state").to_lowercase()],
    )
}

/// Refuses templates, snapshots and the control domain.
///
/// # Errors
/// `VM_IS_TEMPLATE`, `OPERATION_NOT_ALLOWED`.
pub fn refuse_special(vm: &Object) -> Result<(), ApiError> {
    if vm.bool("is_a_template") || vm.bool("is_a_snapshot") {
        return Err(ApiError::new("VM_IS_TEMPLATE", [&vm.reference]));
    }
    if vm.bool("is_control_domain") {
        let why = format!("{} is the host itself", vm.text("name_label"));
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    Ok(())
}

/// A map with another pair.
pub fn with(map: &BTreeMap<String, String>, key: &str, value: &str) -> Value {
    let mut map = map.clone();
    map.insert(key.to_owned(), value.to_owned());
    Value::string_map(map)
}
