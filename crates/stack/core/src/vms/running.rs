//! Operations on VMs, VBDs and VIFs, from their beginning to their end.
//!
//! They hold their object as all operations do ([`crate::operations`]). It is taken, and shown to clients, in one
//! change of the database, so clients see what holds it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::ApiError;

use super::allowed::refresh;
use super::{Call, Vms};
use crate::db::{Change, Object};
use crate::operations::{Claim, Held, Operations, Target};

/// How long an operation that is in the way of a forced one may take to end by itself.
const COURTESY: Duration = Duration::from_secs(2);
/// Operations on a VM that wait for its guest, and yield to a forced one meanwhile.
const WAITING: [&str; 3] = ["clean_shutdown", "clean_reboot", "shutdown"];
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// An operation that runs; it ends when this is dropped.
#[derive(Debug)]
pub struct Running {
    vms: Arc<Vms>,
    class: &'static str,
    reference: String,
    held: Held,
}

impl Running {
    /// Begins `operation` on a VM, a VBD or a VIF, once `check` has found nothing wrong with it.
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
        let operations = &call.part.operations;
        let (held, answer) = call.part.db.change(|change| {
            let object = change.get(class, reference)?;
            check_free(operations, change, &object, operation)?;
            let target = Target { class, reference, op: operation };
            let held = operations.enter(&*call.progress, &[target], || Ok(()))?;
            let answer = check(change, &object)?;
            operations.show(change, class, reference)?;
            refresh(change, class, reference)?;
            Ok((held, answer))
        })?;
        let vms = Arc::clone(&call.part);
        Ok((Self { vms, class, reference: reference.to_owned(), held }, answer))
    }

    /// As [`Self::begin`]; operations that are in the way and do not end within a moment lose their claim: those on the
    /// VBD, on the VBDs and VIFs of the VM, and those on the VM that wait for its guest. They end when what they wait
    /// for does. `check` may be called several times; it is told whether one lost its claim.
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
                Err(error) if yields(&error) => {
                    if call.progress.is_cancelled() {
                        return Err(ApiError::new(
                            "TASK_CANCELLED",
                            [call.progress.task().unwrap_or_default()],
                        ));
                    }
                    if Instant::now() < until {
                        std::thread::sleep(LOOK);
                    } else if take_over(&call.part, class, reference)? {
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
            let params = [self.class, self.reference.as_str(), "hard_shutdown", self.held.task()];
            ApiError::new("OTHER_OPERATION_IN_PROGRESS", params)
        };
        self.held.claim().yielding(wait).unwrap_or_else(|| Err(overridden()))
    }

    /// Whether no forced operation has taken over.
    pub fn is_mine(&self) -> bool {
        self.held.claim().hold().is_some()
    }

    /// Its right to change the object.
    pub fn claim(&self) -> Arc<Claim> {
        Arc::clone(self.held.claim())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let ended = self.vms.db.change(|change| {
            // One that was taken over is shown no more.
            if self.held.release() {
                show(&self.vms.operations, change, self.class, &self.reference)?;
            }
            Ok(())
        });
        if let Err(error) = ended {
            tracing::warn!(object = self.reference, %error, "the end of an operation could not be written");
        }
    }
}

/// Whether an error says that the object is held by an operation that a forced one may take it from.
fn yields(error: &ApiError) -> bool {
    error.code == "OTHER_OPERATION_IN_PROGRESS"
        && match &error.params[..] {
            [class, _, running, ..] => {
                matches!(class.as_str(), "VBD" | "VIF") || WAITING.contains(&running.as_str())
            }
            _ => false,
        }
}

/// Takes a VBD, or the VBDs and VIFs of a VM, from all operations on them, and the VM from one that waits for the
/// guest; false if there are none.
fn take_over(vms: &Vms, class: &str, reference: &str) -> Result<bool, ApiError> {
    let (devices, vm) = match class {
        "VBD" => (vec![("VBD", reference.to_owned())], vms.db.get("VBD", reference)?.text("VM").to_owned()),
        _ => {
            let of = |class| {
                let found = vms.db.find(class, "VM", reference).into_iter();
                found.map(move |device| (class, device.reference.clone()))
            };
            (of("VBD").chain(of("VIF")).collect(), reference.to_owned())
        }
    };
    let claims = |class, of: String| {
        let claims = vms.operations.claims(&of).into_iter();
        claims.map(move |(task, claim)| (class, of.clone(), task, claim))
    };
    let found = devices.into_iter().flat_map(|(class, device)| claims(class, device)).chain(claims("VM", vm));
    // Each waits until what the operation writes at this moment is written: so no lock is held here.
    let is_taken = |class: &str, claim: &Claim| match class {
        "VBD" | "VIF" => claim.take(),
        _ => claim.take_if_yielding(),
    };
    let taken: Vec<_> = found.filter(|(class, _, _, claim)| is_taken(class, claim)).collect();
    vms.db.change(|change| {
        for (class, object, task, claim) in &taken {
            tracing::warn!(
                class,
                object,
                task = &**task,
                "an operation that hangs is overridden by a forced one"
            );
            if vms.operations.remove(object, claim) {
                show(&vms.operations, change, class, object)?;
            }
        }
        Ok(())
    })?;
    Ok(!taken.is_empty())
}

/// Shows what holds an object, if that is still there, and what may be done with it.
fn show(
    operations: &Operations,
    change: &mut Change<'_>,
    class: &'static str,
    reference: &str,
) -> Result<(), ApiError> {
    if change.get(class, reference).is_err() {
        return Ok(());
    }
    operations.show(change, class, reference)?;
    refresh(change, class, reference)
}

/// Whether an operation on a VM could begin now.
///
/// # Errors
/// That of the operation that runs, or that is blocked.
pub(super) fn could_begin(call: &Call, vm: &Object, operation: &str) -> Result<(), ApiError> {
    call.part.db.change(|change| check_free(&call.part.operations, change, vm, operation))
}

/// A VM, its VBDs and its VIFs: one operation at a time on each, and none on these during one on their VM.
fn check_free(
    operations: &Operations,
    change: &Change<'_>,
    object: &Object,
    operation: &str,
) -> Result<(), ApiError> {
    operations.check_free(object.class.name, &object.reference)?;
    if matches!(object.class.name, "VBD" | "VIF") {
        let vm = change.get("VM", object.text("VM"))?;
        return operations.check_free("VM", &vm.reference);
    }
    let blocked = object.map("blocked_operations");
    if let Some(why) = blocked.get(operation) {
        return Err(ApiError::new("OPERATION_BLOCKED", [object.reference.as_str(), why]));
    }
    let vbds = change.find("VBD", "VM", &object.reference);
    vbds.iter().try_for_each(|vbd| operations.check_free("VBD", &vbd.reference))?;
    let vifs = change.find("VIF", "VM", &object.reference);
    vifs.iter().try_for_each(|vif| operations.check_free("VIF", &vif.reference))
}
