//! Which operation holds which object: the locks of operations on VMs, VBDs, SRs and VDIs.
//!
//! An operation names what it does to which objects before it begins. Two that would harm each other do not run at the
//! same time: the later one gets `OTHER_OPERATION_IN_PROGRESS` or `VDI_IN_USE`, or waits where the other is short. No
//! lock is held while an operation works; what runs is a table, which clients see as `current_operations`.
//!
//! The table is in memory, as that field is. What an operation leaves half done when the daemon ends is in notes of the
//! store, which the parts write and work off.
//!
//! Order of locks: the database's, then this one, then that of the storage's state.

mod claim;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_model::{ApiError, Value};

use crate::db::Change;
use crate::progress::Progress;

pub(crate) use claim::Claim;

/// An image is being opened by a disk process: its chain must not change.
pub(crate) const ACTIVATE: &str = "activate";
/// A disk process is about to close an image.
pub(crate) const CLOSING: &str = "closing";
/// The driver closes what it opened.
pub(crate) const DEACTIVATE: &str = "deactivate";
/// The chains of disks change, for a moment: a base copy leaves them.
pub(crate) const COLLECT: &str = "coalesce";
/// A disk process goes over to other images, which is short, in an operation [`MOVE`] that takes long.
pub(crate) const SWITCH: &str = "switch";
/// The VDI is moved to another SR, or within its own; disk processes may come and go meanwhile.
pub(crate) const MOVE: &str = "mirror";
/// A copy writes into the VDI.
pub(crate) const INTO: &str = "into";

/// How long an operation waits until a disk process has opened or closed a chain.
const SHORT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a plug waits for an operation that changes the chain; as long as sm's.
const CHAIN_TIMEOUT: Duration = Duration::from_secs(120);

/// How often a waiting call looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(500);

/// An operation that holds an object.
#[derive(Clone, Debug)]
struct Entry {
    op: &'static str,
    task: Arc<str>,
    claim: Arc<Claim>,
    /// It is over but for the commit of its result, which no longer shows it.
    is_ending: bool,
}

/// An object and what shall be done with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) class: &'static str,
    pub(crate) reference: &'a str,
    pub(crate) op: &'static str,
}

/// The target `op` on an SR.
pub(crate) const fn on_sr<'a>(reference: &'a str, op: &'static str) -> Target<'a> {
    Target { class: "SR", reference, op }
}

/// The target `op` on a VDI.
pub(crate) const fn on_vdi<'a>(reference: &'a str, op: &'static str) -> Target<'a> {
    Target { class: "VDI", reference, op }
}

type Table = BTreeMap<String, Vec<Entry>>;

/// The operations that run, by the objects that they hold.
#[derive(Debug, Default)]
pub(crate) struct Operations {
    table: Mutex<Table>,
    changed: Condvar,
}

/// Whether two operations may hold one object at the same time.
fn fits(class: &str, one: &str, other: &str) -> bool {
    if class == "VDI" && [one, other].contains(&MOVE) {
        let with_move = |op: &str| matches!(op, ACTIVATE | CLOSING | DEACTIVATE | SWITCH | "update");
        return (one == MOVE && with_move(other)) || (other == MOVE && with_move(one));
    }
    let is_light = |op: &str| match class {
        "SR" => !matches!(op, "destroy" | "forget" | "plug" | "unplug" | "pbd_create" | "pbd_destroy"),
        "VDI" => matches!(op, ACTIVATE | CLOSING | DEACTIVATE | "copy" | "update" | "list_changed_blocks"),
        _ => false,
    };
    is_light(one) && is_light(other)
}

/// Operations that clients do not see: they are short, and parts of others.
fn is_inner(op: &str) -> bool {
    matches!(op, ACTIVATE | CLOSING | DEACTIVATE | COLLECT | INTO | SWITCH)
}

/// How long an operation waits for one that is in its way.
fn timeout(entry: &Entry, op: &str) -> Duration {
    match (entry.op, op) {
        (INTO, _) => Duration::ZERO,
        (ACTIVATE | CLOSING | DEACTIVATE | COLLECT, _) => SHORT_TIMEOUT,
        (_, ACTIVATE | CLOSING | DEACTIVATE) => CHAIN_TIMEOUT,
        _ if entry.is_ending => SHORT_TIMEOUT,
        _ => Duration::ZERO,
    }
}

/// The first target that something else holds, and that.
fn obstacle<'a, 'b>(table: &'b Table, targets: &'b [Target<'a>]) -> Option<(&'b Target<'a>, &'b Entry)> {
    targets.iter().find_map(|target| {
        let held = table.get(target.reference)?;
        let entry = held.iter().find(|entry| !fits(target.class, entry.op, target.op))?;
        Some((target, entry))
    })
}

fn in_progress(class: &str, reference: &str, entry: &Entry) -> ApiError {
    ApiError::new("OTHER_OPERATION_IN_PROGRESS", [class, reference, entry.op, &entry.task])
}

fn refusal(target: &Target<'_>, entry: &Entry) -> ApiError {
    if target.class == "VDI" && is_inner(entry.op) {
        return ApiError::new("VDI_IN_USE", [target.reference, target.op]);
    }
    in_progress(target.class, target.reference, entry)
}

impl Operations {
    /// Takes the targets, all or none, once `check` has found nothing wrong; no other operation comes between. Waits a
    /// short while for disk processes that open or close an image, a long one where the caller is such a process; for
    /// nothing else, and never for a VM or a VBD, which are taken in a change of the database.
    ///
    /// # Errors
    /// `OTHER_OPERATION_IN_PROGRESS`, `VDI_IN_USE`, `TASK_CANCELLED`, or what `check` answers.
    pub(crate) fn enter(
        self: &Arc<Self>,
        progress: &dyn Progress,
        targets: &[Target<'_>],
        check: impl FnOnce() -> Result<(), ApiError>,
    ) -> Result<Held, ApiError> {
        let task =
            progress.task().map_or_else(|| format!("OpaqueRef:{}", uuid::Uuid::new_v4()), str::to_owned);
        let began = Instant::now();
        let mut table = self.table.lock();
        while let Some((target, entry)) = obstacle(&table, targets) {
            let left = timeout(entry, target.op).saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(refusal(target, entry));
            }
            if progress.is_cancelled() {
                return Err(ApiError::new("TASK_CANCELLED", [task]));
            }
            self.changed.wait_for(&mut table, LOOK.min(left));
        }
        check()?;
        let (task, claim): (Arc<str>, Arc<Claim>) = (task.into(), Arc::default());
        for target in targets {
            let entry = Entry { op: target.op, task: task.clone(), claim: claim.clone(), is_ending: false };
            table.entry(target.reference.to_owned()).or_default().push(entry);
        }
        let targets = targets.iter().map(|target| (target.class, target.reference.to_owned())).collect();
        Ok(Held { operations: Arc::clone(self), task, targets, claim })
    }

    /// Whether an object is free for whatever it may be.
    ///
    /// # Errors
    /// `OTHER_OPERATION_IN_PROGRESS`.
    pub(crate) fn check_free(&self, class: &str, reference: &str) -> Result<(), ApiError> {
        let table = self.table.lock();
        let entry = table.get(reference).and_then(|held| held.first());
        entry.map_or(Ok(()), |entry| Err(in_progress(class, reference, entry)))
    }

    /// Whether `op` could begin as far as running operations go; it would wait for short ones.
    pub(crate) fn could_begin(&self, class: &str, reference: &str, op: &str) -> bool {
        let table = self.table.lock();
        let held = table.get(reference).into_iter().flatten();
        let lasts = |entry: &&Entry| {
            !entry.is_ending && !matches!(entry.op, ACTIVATE | CLOSING | DEACTIVATE | COLLECT)
        };
        held.filter(lasts).all(|entry| fits(class, entry.op, op))
    }

    /// Whether an operation of this kind holds the object.
    pub(crate) fn is_held_by(&self, reference: &str, op: &str) -> bool {
        let table = self.table.lock();
        table.get(reference).into_iter().flatten().any(|entry| entry.op == op && !entry.is_ending)
    }

    /// `current_operations` of an object.
    fn current(&self, reference: &str) -> BTreeMap<String, Value> {
        let table = self.table.lock();
        let held = table.get(reference).into_iter().flatten();
        let seen = held.filter(|entry| !entry.is_ending && !is_inner(entry.op));
        seen.map(|entry| (entry.task.to_string(), Value::string(entry.op))).collect()
    }

    /// Makes `current_operations` of an object say what holds it; an object that is gone is left alone.
    ///
    /// # Errors
    /// The database's.
    pub(crate) fn show(&self, change: &mut Change<'_>, class: &str, reference: &str) -> Result<(), ApiError> {
        let Ok(object) = change.get(class, reference) else { return Ok(()) };
        let current = Value::Map(self.current(reference));
        if object.get("current_operations") == &current {
            return Ok(());
        }
        change.set(class, reference, "current_operations", current)
    }

    /// The tasks and the claims of the operations that hold an object.
    pub(crate) fn claims(&self, reference: &str) -> Vec<(Arc<str>, Arc<Claim>)> {
        let table = self.table.lock();
        let held = table.get(reference).into_iter().flatten();
        held.map(|entry| (Arc::clone(&entry.task), Arc::clone(&entry.claim))).collect()
    }

    /// Takes an object from the operation with this claim; false if it does not hold it.
    pub(crate) fn remove(&self, reference: &str, claim: &Arc<Claim>) -> bool {
        let mut table = self.table.lock();
        let Some(held) = table.get_mut(reference) else { return false };
        let before = held.len();
        held.retain(|entry| !Arc::ptr_eq(&entry.claim, claim));
        let is_removed = held.len() < before;
        if held.is_empty() {
            table.remove(reference);
        }
        drop(table);
        self.changed.notify_all();
        is_removed
    }
}

/// Objects that an operation holds, until this goes.
#[derive(Debug)]
pub struct Held {
    operations: Arc<Operations>,
    task: Arc<str>,
    targets: Vec<(&'static str, String)>,
    claim: Arc<Claim>,
}

impl Held {
    /// The task, or a name that stands for one.
    pub(crate) fn task(&self) -> &str {
        &self.task
    }

    /// The objects: class and reference.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.targets.iter().map(|(class, reference)| (*class, reference.as_str()))
    }

    /// The right to change them.
    pub(crate) fn claim(&self) -> &Arc<Claim> {
        &self.claim
    }

    /// The result is about to be committed: clients no longer see the operation in `current_operations`. Others wait
    /// for its end.
    pub(crate) fn is_ending(&self) {
        let mut table = self.operations.table.lock();
        for (_, reference) in &self.targets {
            let held = table.get_mut(reference).into_iter().flatten();
            for entry in held.filter(|entry| Arc::ptr_eq(&entry.claim, &self.claim)) {
                entry.is_ending = true;
            }
        }
    }

    /// Gives the objects back now; false if they were taken over.
    pub(crate) fn release(&self) -> bool {
        let removed =
            self.targets.iter().map(|(_, reference)| self.operations.remove(reference, &self.claim));
        removed.fold(false, |any, is_removed| any | is_removed)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.claim.end();
        self.release();
    }
}

#[cfg(test)]
mod tests;
