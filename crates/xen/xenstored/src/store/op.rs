//! Changes of the tree, and carrying them out.
//!
//! Every change is one of these, whether it comes from a request, from the commit of a transaction or from the log on
//! disk, so all three do the same. The caller's permission was checked before.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::tree::{Caller, Children, Node, Perms, Tree, Value, parts, split, walk};

/// What a node costs in addition to its value, name and permissions, in bytes of the memory quota.
const NODE_COST: usize = 96;

/// A change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// A node has this value; what is missing above it comes into being.
    Write(Rc<str>, Value),
    /// A node comes into being, with what is missing above it.
    Make(Rc<str>),
    /// A node goes, with what is below it.
    Remove(Rc<str>),
    /// A node has these permissions.
    SetPerms(Rc<str>, Perms),
    /// A domain is gone: so are its nodes, and what was said about it.
    Forget(u32),
}

impl Op {
    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        32 + match self {
            Self::Write(path, value) => path.len() + value.len(),
            Self::Make(path) | Self::Remove(path) => path.len(),
            Self::SetPerms(path, perms) => path.len() + 8 * perms.len(),
            Self::Forget(_) => 0,
        }
    }
}

/// What watches are told.
#[derive(Clone, Debug)]
pub enum Change {
    /// A node came into being or changed.
    Changed {
        /// The node.
        path: Rc<str>,
        /// Its permissions before, when they are what changed.
        before: Option<Perms>,
    },
    /// A node went.
    Gone {
        /// The node.
        path: Rc<str>,
        /// It, with what was below it.
        node: Rc<Node>,
    },
}

/// What a domain's nodes use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// How many nodes.
    pub nodes: i64,
    /// Bytes of them.
    pub bytes: i64,
}

/// What changes bring about in addition to the new tree.
#[derive(Clone, Debug, Default)]
pub struct Effects {
    /// For the watches, in order.
    pub changes: Vec<Change>,
    /// More or less used, by owner.
    pub usage: BTreeMap<u32, Usage>,
}

impl Effects {
    fn count(&mut self, owner: u32, nodes: i64, bytes: i64) {
        let usage = self.usage.entry(owner).or_default();
        usage.nodes += nodes;
        usage.bytes += bytes;
    }

    /// What more an owner uses.
    pub fn of(&self, owner: u32) -> Usage {
        self.usage.get(&owner).copied().unwrap_or_default()
    }
}

fn cost(path: &str, node: &Node) -> i64 {
    let name = path.rsplit('/').next().map_or(0, str::len);
    (NODE_COST + name + node.size()) as i64
}

/// Carries out a change. `clock` counts on with every state of a node.
pub fn apply(tree: &mut Tree, op: &Op, caller: &Caller, clock: &mut u64, effects: &mut Effects) {
    match op {
        Op::Write(path, value) => {
            // Most are there: they are looked for once.
            match tree.get_mut(path) {
                Some(node) => write(node, value, clock, effects),
                None => write(make(tree, path, caller, clock, effects), value, clock, effects),
            }
            effects.changes.push(Change::Changed { path: path.clone(), before: None });
        }
        Op::Make(path) => {
            make(tree, path, caller, clock, effects);
            effects.changes.push(Change::Changed { path: path.clone(), before: None });
        }
        Op::Remove(path) => remove(tree, path, clock, effects),
        Op::SetPerms(path, perms) => {
            // Toolstacks say of each node of a directory what they said of the directory.
            let above = split(path).and_then(|(parent, _)| tree.get(parent)).map(|parent| &parent.perms);
            let perms = above.filter(|above| *above == perms).unwrap_or(perms).clone();
            let Some(node) = tree.get_mut(path) else { return };
            *clock += 1;
            node.own = *clock;
            let (old_owner, old_cost) = (node.perms.owner(), cost(path, node));
            let before = std::mem::replace(&mut node.perms, perms.clone());
            let new_cost = cost(path, node);
            effects.count(old_owner, -1, -old_cost);
            effects.count(perms.owner(), 1, new_cost);
            effects.changes.push(Change::Changed { path: path.clone(), before: Some(before) });
        }
        Op::Forget(domid) => forget(tree, *domid, clock, effects),
    }
}

fn write(node: &mut Node, value: &Value, clock: &mut u64, effects: &mut Effects) {
    effects.count(node.perms.owner(), 0, value.len() as i64 - node.value.len() as i64);
    node.value = value.clone();
    *clock += 1;
    node.own = *clock;
}

/// The node of a path, brought into being if need be with what is missing above it.
fn make<'a>(
    tree: &'a mut Tree,
    path: &str,
    caller: &Caller,
    clock: &mut u64,
    effects: &mut Effects,
) -> &'a mut Node {
    let mut node = tree.root_mut();
    for name in parts(path) {
        if node.children.get(name).is_none() {
            *clock += 1;
            node.list = *clock;
            let child = Node {
                value: Value::default(),
                perms: node.perms.inherited_by(caller),
                own: *clock,
                list: *clock,
                children: Children::default(),
            };
            effects.count(child.perms.owner(), 1, cost(name, &child));
            node.children.insert(name, Rc::new(child));
        }
        node = match node.children.get_mut(name) {
            Some(child) => Rc::make_mut(child),
            None => unreachable!("it was put there"),
        };
    }
    node
}

fn remove(tree: &mut Tree, path: &Rc<str>, clock: &mut u64, effects: &mut Effects) {
    *clock += 1;
    let Some(node) = tree.remove(path, *clock) else { return };
    walk(path, &node, |path, node| effects.count(node.perms.owner(), -1, -cost(path, node)));
    effects.changes.push(Change::Gone { path: path.clone(), node });
}

/// A domain that gets a number again must not get what the number's earlier domain could reach.
fn forget(tree: &mut Tree, domid: u32, clock: &mut u64, effects: &mut Effects) {
    let mut owned: Vec<String> = Vec::new();
    let mut named = Vec::new();
    walk("/", tree.root(), |path, node| {
        let inside = owned
            .last()
            .is_some_and(|top| path.strip_prefix(top.as_str()).is_some_and(|rest| rest.starts_with('/')));
        if inside {
            return;
        }
        if node.perms.owner() == domid && path != "/" {
            owned.push(path.to_owned());
        } else if let Some(perms) = node.perms.without(domid) {
            named.push((path.to_owned(), perms));
        }
    });
    for path in owned {
        remove(tree, &path.into(), clock, effects);
    }
    for (path, perms) in named {
        if let Some(node) = tree.get_mut(&path) {
            *clock += 1;
            node.own = *clock;
            let less = 8 * (node.perms.len() as i64 - perms.len() as i64);
            effects.count(perms.owner(), 0, -less);
            node.perms = perms;
        }
    }
}

/// What the nodes of a whole tree use, by owner.
pub fn usage_of(tree: &Tree) -> BTreeMap<u32, Usage> {
    let mut effects = Effects::default();
    walk("/", tree.root(), |path, node| {
        effects.count(node.perms.owner(), 1, cost(path, node));
    });
    effects.usage
}
