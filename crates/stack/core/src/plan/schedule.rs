//! What may run next: the state of all plans and permits, without threads and clocks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A leaf that was passed this often by younger ones keeps what it needs from them until it has run.
const PASSED_MAX: u32 = 64;

/// The permits that a leaf needs in addition to the host's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permits {
    /// One of this VM.
    pub vm: Option<Arc<str>>,
    /// One of this SR.
    pub sr: Option<Arc<str>>,
}

/// How many leaves may run at a time; at least one each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// On this host.
    pub host: usize,
    /// For one VM.
    pub vm: usize,
    /// On one SR.
    pub sr: usize,
}

/// A plan without its work.
#[derive(Clone, Debug)]
pub(super) enum Shape {
    Serial(Vec<Shape>),
    Parallel(Vec<Shape>),
    BestEffort(Box<Shape>),
    Leaf { permits: Permits, undo: bool },
}

pub(super) type RunId = u64;

/// A leaf that may run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Taken {
    pub run: RunId,
    /// Place among the nodes of the run.
    pub node: usize,
    /// Place among the leaves of the plan.
    pub leaf: usize,
    /// Whether the leaf is taken back.
    pub undo: bool,
}

/// How a leaf ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Waiting,
    Running,
    Done,
    Failed,
    Skipped,
    Undone,
}

/// What became of a leaf, in the caller's unit of time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub leaf: usize,
    pub undo: bool,
    pub parent: usize,
    pub queued: u64,
    pub started: u64,
    pub ended: u64,
    pub outcome: Outcome,
}

#[derive(Debug)]
enum Kind {
    Serial {
        next: usize,
    },
    Parallel {
        left: usize,
        ok: bool,
    },
    /// The whole plan, or a part that may fail.
    Scope {
        best_effort: bool,
        stopped: bool,
        undoing: bool,
    },
    Leaf {
        permits: Permits,
        undoable: bool,
        leaf: usize,
        undo_of: Option<usize>,
    },
}

#[derive(Debug)]
struct Node {
    parent: Option<usize>,
    children: Vec<usize>,
    kind: Kind,
    queued: u64,
    started: u64,
    ended: u64,
    outcome: Outcome,
}

#[derive(Debug)]
struct Run {
    nodes: Vec<Node>,
    leaves: usize,
    finished: Option<bool>,
}

#[derive(Debug)]
struct Waiting {
    run: RunId,
    node: usize,
    permits: Permits,
    passed: u32,
}

/// All plans that run.
#[derive(Debug)]
pub(super) struct Schedule {
    pub limits: Limits,
    runs: BTreeMap<RunId, Run>,
    next_run: RunId,
    /// Oldest first.
    queue: VecDeque<Waiting>,
    running: usize,
    vms: BTreeMap<Arc<str>, usize>,
    srs: BTreeMap<Arc<str>, usize>,
}

impl Schedule {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            runs: BTreeMap::new(),
            next_run: 1,
            queue: VecDeque::new(),
            running: 0,
            vms: BTreeMap::new(),
            srs: BTreeMap::new(),
        }
    }

    /// Leaves that run.
    pub const fn running(&self) -> usize {
        self.running
    }

    /// Leaves that wait for permits.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Begins a plan.
    pub fn submit(&mut self, shape: &Shape, now: u64) -> RunId {
        let id = self.next_run;
        self.next_run += 1;
        let mut run = Run { nodes: Vec::new(), leaves: 0, finished: None };
        let root = run.add(None, Kind::Scope { best_effort: false, stopped: false, undoing: false });
        let child = run.grow(root, shape);
        run.nodes[root].children.push(child);
        self.runs.insert(id, run);
        self.start(id, child, now);
        id
    }

    /// No leaf of the plan begins any more; what was done is undone.
    pub fn cancel(&mut self, id: RunId, now: u64) {
        if self.runs.get(&id).is_some_and(|run| run.finished.is_none() && !run.is_undoing(0)) {
            self.stop(id, 0, now);
        }
    }

    /// Whether the plan has ended, and how; a plan that has is forgotten by [`Self::forget`].
    pub fn finished(&self, id: RunId) -> Option<bool> {
        self.runs.get(&id)?.finished
    }

    /// What became of the leaves, in the order in which they were made; undoing comes last.
    pub fn records(&self, id: RunId) -> Vec<Record> {
        let Some(run) = self.runs.get(&id) else { return Vec::new() };
        let record = |node: &Node| match node.kind {
            Kind::Leaf { leaf, undo_of, .. } => Some(Record {
                leaf,
                undo: undo_of.is_some(),
                parent: node.parent.unwrap_or(0),
                queued: node.queued,
                started: node.started,
                ended: node.ended,
                outcome: node.outcome,
            }),
            _ => None,
        };
        run.nodes.iter().filter_map(record).collect()
    }

    /// Whether the leaf's failure is none of the whole plan's.
    pub fn is_excused(&self, taken: Taken) -> bool {
        let Some(run) = self.runs.get(&taken.run) else { return false };
        matches!(run.nodes[run.scope_of(taken.node)].kind, Kind::Scope { best_effort: true, .. })
    }

    /// Leaves of the plan itself that have ended, and all of them.
    pub fn progress(&self, id: RunId) -> (usize, usize) {
        let Some(run) = self.runs.get(&id) else { return (0, 0) };
        let ended = run.nodes.iter().filter(|node| {
            let counts = matches!(node.kind, Kind::Leaf { undo_of: None, .. });
            counts && !matches!(node.outcome, Outcome::Waiting | Outcome::Running)
        });
        (ended.count(), run.leaves)
    }

    pub fn forget(&mut self, id: RunId) {
        self.runs.remove(&id);
    }

    /// The oldest leaf whose permits are all there; it has them from now on.
    pub fn take(&mut self, now: u64) -> Option<Taken> {
        if self.running >= self.limits.host.max(1) {
            return None;
        }
        // What those have a right to that were passed too often.
        let (mut kept_vms, mut kept_srs) = (Vec::new(), Vec::new());
        let mut found = None;
        for (place, waiting) in self.queue.iter().enumerate() {
            let free = |name: &Option<Arc<str>>, held: &BTreeMap<Arc<str>, usize>, max: usize| match name {
                Some(name) => held.get(name).copied().unwrap_or(0) < max.max(1),
                None => true,
            };
            let Permits { vm, sr } = &waiting.permits;
            let is_kept = vm.as_ref().is_some_and(|vm| kept_vms.contains(vm))
                || sr.as_ref().is_some_and(|sr| kept_srs.contains(sr));
            if !is_kept && free(vm, &self.vms, self.limits.vm) && free(sr, &self.srs, self.limits.sr) {
                found = Some(place);
                break;
            }
            if waiting.passed >= PASSED_MAX {
                kept_vms.extend(vm.clone());
                kept_srs.extend(sr.clone());
            }
        }
        let found = found?;
        self.queue.range_mut(..found).for_each(|older| older.passed += 1);
        let waiting = self.queue.remove(found)?;
        self.running += 1;
        for (name, held) in [(&waiting.permits.vm, &mut self.vms), (&waiting.permits.sr, &mut self.srs)] {
            if let Some(name) = name {
                *held.entry(Arc::clone(name)).or_default() += 1;
            }
        }
        let node = &mut self.runs.get_mut(&waiting.run)?.nodes[waiting.node];
        node.started = now;
        node.outcome = Outcome::Running;
        let Kind::Leaf { leaf, undo_of, .. } = node.kind else { return None };
        Some(Taken { run: waiting.run, node: waiting.node, leaf, undo: undo_of.is_some() })
    }

    /// A leaf that was taken has ended.
    pub fn end(&mut self, taken: Taken, ok: bool, now: u64) {
        self.running -= 1;
        let Some(run) = self.runs.get_mut(&taken.run) else { return };
        let node = &mut run.nodes[taken.node];
        node.ended = now;
        node.outcome = if ok { Outcome::Done } else { Outcome::Failed };
        let Kind::Leaf { permits, undo_of, .. } = &node.kind else { return };
        for (name, held) in [(&permits.vm, &mut self.vms), (&permits.sr, &mut self.srs)] {
            let Some(name) = name else { continue };
            if let Some(count) = held.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    held.remove(name);
                }
            }
        }
        if let Some(of) = *undo_of {
            // Undoing goes on whatever happens.
            run.nodes[of].outcome = Outcome::Undone;
            self.ended(taken.run, taken.node, true, now);
            return;
        }
        if !ok {
            let scope = run.scope_of(taken.node);
            self.stop(taken.run, scope, now);
        }
        self.ended(taken.run, taken.node, ok, now);
    }

    fn start(&mut self, id: RunId, node: usize, now: u64) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        if run.is_stopped(node) {
            run.skip(node, now);
            self.ended(id, node, false, now);
            return;
        }
        let children = run.nodes[node].children.clone();
        match &mut run.nodes[node].kind {
            Kind::Leaf { permits, .. } => {
                let permits = permits.clone();
                run.nodes[node].queued = now;
                self.queue.push_back(Waiting { run: id, node, permits, passed: 0 });
            }
            _ if children.is_empty() => self.ended(id, node, true, now),
            Kind::Serial { .. } | Kind::Scope { .. } => self.start(id, children[0], now),
            Kind::Parallel { .. } => {
                for child in children {
                    self.start(id, child, now);
                }
            }
        }
    }

    /// Nothing below the scope begins any more.
    fn stop(&mut self, id: RunId, scope: usize, now: u64) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        if let Kind::Scope { stopped, .. } = &mut run.nodes[scope].kind {
            *stopped = true;
        }
        let is_below = |waiting: &Waiting| waiting.run == id && run.is_stopped(waiting.node);
        let skipped: Vec<usize> =
            self.queue.iter().filter(|waiting| is_below(waiting)).map(|waiting| waiting.node).collect();
        self.queue.retain(|waiting| !is_below(waiting));
        for node in skipped {
            if let Some(run) = self.runs.get_mut(&id) {
                run.skip(node, now);
            }
            self.ended(id, node, false, now);
        }
    }

    /// A node has ended: what does that mean for the one above it?
    fn ended(&mut self, id: RunId, node: usize, ok: bool, now: u64) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        let Some(parent) = run.nodes[node].parent else { return };
        let children = run.nodes[parent].children.len();
        match &mut run.nodes[parent].kind {
            Kind::Serial { next } => {
                *next += 1;
                let rest = *next;
                if ok && rest < children {
                    let child = run.nodes[parent].children[rest];
                    self.start(id, child, now);
                } else {
                    for place in rest..children {
                        run.skip(run.nodes[parent].children[place], now);
                    }
                    self.ended(id, parent, ok, now);
                }
            }
            Kind::Parallel { left, ok: all } => {
                *left -= 1;
                *all &= ok;
                if *left == 0 {
                    let ok = *all;
                    self.ended(id, parent, ok, now);
                }
            }
            Kind::Scope { best_effort, stopped, undoing } => {
                let (failed, best_effort) = (*stopped, *best_effort);
                let is_first = !std::mem::replace(undoing, failed);
                if failed
                    && is_first
                    && let Some(undo) = run.undo(node, parent)
                {
                    self.start(id, undo, now);
                    return;
                }
                if best_effort {
                    // Where something above was stopped, that undoes what this did.
                    self.ended(id, parent, true, now);
                } else {
                    run.finished = Some(!failed);
                }
            }
            Kind::Leaf { .. } => {}
        }
    }
}

impl Run {
    fn add(&mut self, parent: Option<usize>, kind: Kind) -> usize {
        self.nodes.push(Node {
            parent,
            children: Vec::new(),
            kind,
            queued: 0,
            started: 0,
            ended: 0,
            outcome: Outcome::Waiting,
        });
        self.nodes.len() - 1
    }

    fn grow(&mut self, parent: usize, shape: &Shape) -> usize {
        let (kind, parts) = match shape {
            Shape::Serial(parts) => (Kind::Serial { next: 0 }, parts.as_slice()),
            Shape::Parallel(parts) => (Kind::Parallel { left: parts.len(), ok: true }, parts.as_slice()),
            Shape::BestEffort(part) => (
                Kind::Scope { best_effort: true, stopped: false, undoing: false },
                std::slice::from_ref(&**part),
            ),
            Shape::Leaf { permits, undo } => {
                let leaf = self.leaves;
                self.leaves += 1;
                let kind = Kind::Leaf { permits: permits.clone(), undoable: *undo, leaf, undo_of: None };
                (kind, &[] as &[Shape])
            }
        };
        let node = self.add(Some(parent), kind);
        for part in parts {
            let child = self.grow(node, part);
            self.nodes[node].children.push(child);
        }
        node
    }

    /// The nearest part around it that may fail on its own.
    fn scope_of(&self, node: usize) -> usize {
        let mut at = node;
        while let Some(parent) = self.nodes[at].parent {
            at = parent;
            if matches!(self.nodes[at].kind, Kind::Scope { .. }) {
                break;
            }
        }
        at
    }

    fn is_undoing(&self, scope: usize) -> bool {
        matches!(self.nodes[scope].kind, Kind::Scope { undoing: true, .. })
    }

    /// Whether something around it was stopped. What undoes is not.
    fn is_stopped(&self, node: usize) -> bool {
        let mut at = node;
        while let Some(parent) = self.nodes[at].parent {
            if let Kind::Scope { stopped: true, undoing, .. } = self.nodes[parent].kind {
                let is_undo = undoing && self.nodes[parent].children.get(1) == Some(&at);
                if is_undo {
                    return false;
                }
                return true;
            }
            at = parent;
        }
        false
    }

    fn skip(&mut self, node: usize, now: u64) {
        if matches!(self.nodes[node].kind, Kind::Leaf { .. }) {
            let node = &mut self.nodes[node];
            node.outcome = Outcome::Skipped;
            (node.started, node.ended) = (now, now);
            if node.queued == 0 {
                node.queued = now;
            }
        }
        for child in self.nodes[node].children.clone() {
            self.skip(child, now);
        }
    }

    /// Adds what undoes the first child of `scope`.
    fn undo(&mut self, child: usize, scope: usize) -> Option<usize> {
        let undo = self.undo_of(child, scope)?;
        self.nodes[scope].children.push(undo);
        Some(undo)
    }

    /// What undoes `node`, in reverse where it went in order, at once where it went at once.
    fn undo_of(&mut self, node: usize, parent: usize) -> Option<usize> {
        let mut children = self.nodes[node].children.clone();
        let kind = match &self.nodes[node].kind {
            Kind::Leaf { permits, undoable, leaf, undo_of: None } => {
                if !undoable || self.nodes[node].outcome != Outcome::Done {
                    return None;
                }
                let (permits, leaf) = (permits.clone(), *leaf);
                let kind = Kind::Leaf { permits, undoable: false, leaf, undo_of: Some(node) };
                return Some(self.add(Some(parent), kind));
            }
            Kind::Leaf { .. } => return None,
            Kind::Scope { .. } => return self.undo_of(*children.first()?, parent),
            Kind::Serial { .. } => {
                children.reverse();
                Kind::Serial { next: 0 }
            }
            Kind::Parallel { .. } => Kind::Parallel { left: 0, ok: true },
        };
        let group = self.add(Some(parent), kind);
        let made: Vec<usize> = children.into_iter().filter_map(|child| self.undo_of(child, group)).collect();
        if made.is_empty() {
            return None;
        }
        if let Kind::Parallel { left, .. } = &mut self.nodes[group].kind {
            *left = made.len();
        }
        self.nodes[group].children = made;
        Some(group)
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
