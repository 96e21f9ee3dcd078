//! What happened since a moment: what events are made of.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tapio_model::Class;

use super::Db;
use super::object::{Generation, Object};

/// What happened to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// It was made.
    Add,
    /// It changed.
    Mod,
    /// It is no more.
    Del,
}

/// All that happened to one object.
#[derive(Clone, Debug)]
pub struct Happening {
    /// What, seen from the moment asked about.
    pub operation: Operation,
    /// Its class.
    pub class: &'static Class,
    /// Its reference.
    pub reference: String,
    /// As it is now; none when it is no more.
    pub object: Option<Arc<Object>>,
    /// When it happened last.
    pub at: Generation,
}

/// All that happened since a moment.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Each object at most once, in order of time.
    pub happenings: Vec<Happening>,
    /// The moment up to which this tells.
    pub generation: Generation,
    /// How many objects each class has, for classes that were asked for.
    pub counts: BTreeMap<&'static str, usize>,
    /// How many objects there are that would vanish with the daemon, in classes that were asked for.
    pub volatile: usize,
}

impl Db {
    /// What happened after `after` to the objects that `wants` names. `after` 0 is before everything: each object is
    /// an addition. `volatile` is what the [`History`] of that moment said. None where it is not known any more, or
    /// the moment has not been yet.
    pub fn history(
        &self,
        after: Generation,
        volatile: usize,
        classes: &[&'static Class],
        wants: impl Fn(&Class, &str) -> bool,
    ) -> Option<History> {
        let tables = self.read();
        if after > 0 {
            let is_of_another_run = after <= tables.started;
            if after < tables.forgotten() || after > tables.generation || (is_of_another_run && volatile > 0)
            {
                return None;
            }
        }
        let mut history = History { generation: tables.generation, ..History::default() };
        for class in classes {
            history.counts.insert(class.name, tables.count(class.name));
            history.volatile += tables.count_volatile(class.name);
        }
        if after == 0 {
            for class in classes {
                let fitting = tables.all(class.name).filter(|object| wants(class, &object.reference));
                history.happenings.extend(fitting.map(|object| happened(Operation::Add, object)));
            }
            return Some(history);
        }
        if tables.generation == after {
            return Some(history);
        }
        // Objects that were known at the moment, and ended after it; some are there again.
        let mut ended: BTreeMap<(&str, &str), Generation> = BTreeMap::new();
        for gone in tables.gone_after(after) {
            if wants(gone.class, &gone.reference) && gone.created <= after {
                ended.insert((gone.class.name, &gone.reference), gone.deleted);
            }
        }
        let mut seen = BTreeSet::new();
        for object in tables.modified_after(after).filter(|object| wants(object.class, &object.reference)) {
            let key = (object.class.name, object.reference.as_str());
            let is_known = object.created <= after || ended.contains_key(&key);
            seen.insert(key);
            history.happenings.push(happened(if is_known { Operation::Mod } else { Operation::Add }, object));
        }
        for gone in tables.gone_after(after) {
            let key = (gone.class.name, gone.reference.as_str());
            if ended.get(&key) == Some(&gone.deleted) && !seen.contains(&key) {
                history.happenings.push(Happening {
                    operation: Operation::Del,
                    class: gone.class,
                    reference: gone.reference.clone(),
                    object: None,
                    at: gone.deleted,
                });
            }
        }
        history.happenings.sort_by_key(|happening| happening.at);
        Some(history)
    }
}

fn happened(operation: Operation, object: &Arc<Object>) -> Happening {
    Happening {
        operation,
        class: object.class,
        reference: object.reference.clone(),
        object: Some(Arc::clone(object)),
        at: object.modified,
    }
}
