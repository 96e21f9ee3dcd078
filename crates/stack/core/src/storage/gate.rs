//! What runs on which object, and who has which VDI open: the locks of storage operations.
//!
//! An operation names what it does to an SR and to VDIs before it begins. Two that would harm each other do not run
//! at the same time: the later one answers `OTHER_OPERATION_IN_PROGRESS` or `VDI_IN_USE`. Everything else runs in
//! parallel. No lock is held while storage works; what runs is a table, and clients see it as
//! `current_operations`.
//!
//! Order of locks: the database's may be held when this one is taken, never the other way round.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_types::Access;

use super::attached::Attached;
use crate::progress::Progress;

/// An image is being opened by a disk process: its chain must not change.
pub(super) const ACTIVATE: &str = "activate";
/// A disk process is about to let go.
pub(super) const CLOSING: &str = "closing";
/// The driver closes what it opened.
pub(super) const DEACTIVATE: &str = "deactivate";
/// A copy writes into the VDI.
pub(super) const INTO: &str = "into";

/// How long an operation waits until a disk process has opened or closed a chain.
const PATIENCE_SHORT: Duration = Duration::from_secs(30);

/// How long a plug waits for an operation that changes the chain; as long as sm's.
const PATIENCE_LONG: Duration = Duration::from_secs(120);

/// How often a waiting call looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(500);

/// Something that runs.
#[derive(Clone, Debug)]
struct Entry {
    op: &'static str,
    task: String,
    /// It is over but for the commit of its result, which no longer shows it.
    is_ending: bool,
}

/// An object and what shall be done with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'a> {
    pub(super) class: &'static str,
    pub(super) reference: &'a str,
    pub(super) op: &'static str,
}

/// The target `op` on an SR.
pub(super) const fn on_sr<'a>(reference: &'a str, op: &'static str) -> Target<'a> {
    Target { class: "SR", reference, op }
}

/// The target `op` on a VDI.
pub(super) const fn on_vdi<'a>(reference: &'a str, op: &'static str) -> Target<'a> {
    Target { class: "VDI", reference, op }
}

/// Who has a VDI open, by the holder's name (a VBD's reference).
pub(super) type Holders = BTreeMap<String, Access>;

/// The table.
#[derive(Debug, Default)]
pub(super) struct State {
    running: BTreeMap<String, Vec<Entry>>,
    /// By the VDI's reference.
    pub(super) holders: BTreeMap<String, Holders>,
    /// By the SR's reference.
    pub(super) attached: BTreeMap<String, Arc<Attached>>,
}

/// The table and who waits for it.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// Whether two operations may run on one object at the same time.
fn fits(class: &str, one: &str, other: &str) -> bool {
    let is_light = |op: &str| match class {
        "SR" => !matches!(op, "destroy" | "forget" | "plug" | "unplug" | "pbd_create" | "pbd_destroy"),
        _ => matches!(op, ACTIVATE | CLOSING | DEACTIVATE | "copy" | "update"),
    };
    is_light(one) && is_light(other)
}

/// Operations that clients do not see: they are short, and parts of others.
fn is_inner(op: &str) -> bool {
    matches!(op, ACTIVATE | CLOSING | DEACTIVATE | INTO)
}

impl State {
    fn obstacle(&self, targets: &[Target<'_>]) -> Option<(Target<'static>, String, Entry)> {
        targets.iter().find_map(|target| {
            let running = self.running.get(target.reference)?;
            let entry = running.iter().find(|entry| !fits(target.class, entry.op, target.op))?;
            let named = Target { class: target.class, reference: "", op: target.op };
            Some((named, target.reference.to_owned(), entry.clone()))
        })
    }

    /// `current_operations` of an object, for clients.
    pub(super) fn current(&self, reference: &str) -> BTreeMap<String, Value> {
        let running = self.running.get(reference).into_iter().flatten();
        let seen = running.filter(|entry| !entry.is_ending && !is_inner(entry.op));
        seen.map(|entry| (entry.task.clone(), Value::string(entry.op))).collect()
    }

    /// Whether `op` could begin as far as running operations go; it would wait for short ones.
    pub(super) fn could_begin(&self, class: &str, reference: &str, op: &str) -> bool {
        let running = self.running.get(reference).into_iter().flatten();
        let lasts = |entry: &&Entry| !entry.is_ending && !matches!(entry.op, ACTIVATE | CLOSING | DEACTIVATE);
        running.filter(lasts).all(|entry| fits(class, entry.op, op))
    }

    /// Whether several disk processes have the VDI open and one of them writes: what a fork puts on top takes one
    /// writer.
    pub(super) fn has_writers_beside(&self, vdi: &str) -> bool {
        let several = self.holders.get(vdi).is_some_and(|holders| holders.len() > 1);
        several && self.use_of(vdi) == Some(Access::ReadWrite)
    }

    /// Whether anybody has the VDI open; whether somebody writes.
    pub(super) fn use_of(&self, vdi: &str) -> Option<Access> {
        let holders = self.holders.get(vdi)?;
        let writes = holders.values().any(|access| *access == Access::ReadWrite);
        (!holders.is_empty()).then_some(if writes { Access::ReadWrite } else { Access::ReadOnly })
    }
}

impl Gate {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters the targets, all or none; `check` sees the table as it is when they are entered. Waits a short while for
    /// disk processes that open or close an image, a long one where the caller is such a process; for nothing else.
    ///
    /// # Errors
    /// `OTHER_OPERATION_IN_PROGRESS`, `VDI_IN_USE`, `TASK_CANCELLED`, or what `check` answers.
    pub(super) fn enter(
        self: &Arc<Self>,
        progress: &dyn Progress,
        targets: &[Target<'_>],
        mut check: impl FnMut(&mut State) -> Result<(), ApiError>,
    ) -> Result<Entered, ApiError> {
        let task =
            progress.task().map_or_else(|| format!("OpaqueRef:{}", uuid::Uuid::new_v4()), str::to_owned);
        let began = Instant::now();
        let mut state = self.state();
        while let Some((target, reference, entry)) = state.obstacle(targets) {
            let patience = match (entry.op, target.op) {
                (INTO, _) => Duration::ZERO,
                (ACTIVATE | CLOSING | DEACTIVATE, _) => PATIENCE_SHORT,
                (_, ACTIVATE | CLOSING | DEACTIVATE) => PATIENCE_LONG,
                _ if entry.is_ending => PATIENCE_SHORT,
                _ => Duration::ZERO,
            };
            let waited = began.elapsed();
            if waited >= patience {
                return Err(refusal(target, reference, entry));
            }
            if progress.is_cancelled() {
                return Err(ApiError::new("TASK_CANCELLED", [task]));
            }
            let wait = LOOK.min(patience - waited);
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        check(&mut state)?;
        for target in targets {
            let entry = Entry { op: target.op, task: task.clone(), is_ending: false };
            state.running.entry(target.reference.to_owned()).or_default().push(entry);
        }
        let entered = targets.iter().map(|target| (target.class, target.reference.to_owned(), target.op));
        Ok(Entered { gate: Arc::clone(self), task, targets: entered.collect() })
    }
}

fn refusal(target: Target<'_>, reference: String, entry: Entry) -> ApiError {
    if target.class == "VDI" && is_inner(entry.op) {
        return ApiError::new("VDI_IN_USE", [reference, target.op.to_owned()]);
    }
    let params = [target.class.to_owned(), reference, entry.op.to_owned(), entry.task];
    ApiError::new("OTHER_OPERATION_IN_PROGRESS", params)
}

/// An operation that is in the table, until this goes.
#[derive(Debug)]
pub(super) struct Entered {
    gate: Arc<Gate>,
    task: String,
    targets: Vec<(&'static str, String, &'static str)>,
}

impl Entered {
    /// The task, or a name that stands for one.
    pub(super) fn task(&self) -> &str {
        &self.task
    }

    /// What it was entered for.
    pub(super) fn targets(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.targets.iter().map(|(class, reference, _)| (*class, reference.as_str()))
    }

    /// Its result is about to be committed: clients no longer see it in `current_operations`.
    pub(super) fn is_ending(&self) {
        let mut state = self.gate.state();
        for (_, reference, op) in &self.targets {
            let mine = state.running.get_mut(reference).into_iter().flatten();
            for entry in mine.filter(|entry| entry.task == self.task && entry.op == *op) {
                entry.is_ending = true;
            }
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        for (_, reference, op) in &self.targets {
            let Some(running) = state.running.get_mut(reference) else { continue };
            let mine = running.iter().position(|entry| entry.task == self.task && entry.op == *op);
            mine.map(|at| running.swap_remove(at));
            if running.is_empty() {
                state.running.remove(reference);
            }
        }
        drop(state);
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Unwatched;

    fn enter(gate: &Arc<Gate>, targets: &[Target<'_>]) -> Result<Entered, ApiError> {
        gate.enter(&Unwatched::default(), targets, |_| Ok(()))
    }

    #[test]
    fn what_would_harm_each_other_does_not_run_together() {
        let gate = Arc::new(Gate::default());
        let first =
            enter(&gate, &[on_sr("s", "vdi_snapshot"), on_vdi("a", "snapshot")]).expect("nothing runs");
        let second = enter(&gate, &[on_sr("s", "vdi_resize"), on_vdi("a", "resize")]).expect_err("a is busy");
        assert_eq!(second.code, "OTHER_OPERATION_IN_PROGRESS");
        assert_eq!(second.params, ["VDI", "a", "snapshot", first.task()]);
        // Nothing of the refused one is left, and another VDI of the SR is free.
        let other = enter(&gate, &[on_sr("s", "vdi_resize"), on_vdi("b", "resize")]).expect("b is free");
        let unplug = enter(&gate, &[on_sr("s", "unplug")]).expect_err("the SR is busy");
        assert_eq!(unplug.params[..2], ["SR".to_owned(), "s".to_owned()]);
        drop((first, other));
        enter(&gate, &[on_sr("s", "unplug")]).expect("nothing runs any more");
        assert!(gate.state().running.is_empty());
    }

    #[test]
    fn copies_of_one_vdi_run_together_and_are_seen() {
        let gate = Arc::new(Gate::default());
        let one = enter(&gate, &[on_vdi("a", "copy")]).expect("nothing runs");
        let _two = enter(&gate, &[on_vdi("a", "copy")]).expect("copies only read");
        assert_eq!(gate.state().current("a").len(), 2);
        one.is_ending();
        assert_eq!(gate.state().current("a").len(), 1);
        assert!(!gate.state().could_begin("VDI", "a", "destroy"));
        assert!(gate.state().could_begin("VDI", "a", "copy"));
    }

    #[test]
    fn a_plug_waits_for_a_snapshot() {
        let gate = Arc::new(Gate::default());
        let snapshot = enter(&gate, &[on_vdi("a", "snapshot")]).expect("nothing runs");
        let waiting = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || enter(&gate, &[on_vdi("a", ACTIVATE)]).map(drop))
        };
        std::thread::sleep(Duration::from_millis(30));
        assert!(!waiting.is_finished());
        drop(snapshot);
        waiting.join().expect("no panic").expect("the snapshot is over");
    }
}
