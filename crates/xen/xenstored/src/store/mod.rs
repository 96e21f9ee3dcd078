//! The store: the live tree and the rules of reading and changing it, in a transaction or not.
//!
//! ```text
//!   request ─▶ View ─ may the caller? within its quota? ─▶ Op ─▶ apply ─▶ tree', Effects (watches, usage)
//!               │ of the live tree: at once visible, into the journal
//!               └ of a transaction: remembered, and carried out again at the commit when others came between
//! ```

mod op;
#[cfg(test)]
mod tests;
mod transaction;

use std::collections::BTreeMap;
use std::rc::Rc;

pub use op::{Change, Effects, Op, Usage, apply, usage_of};
pub use transaction::{Aspect, BELOW, LIST, OWN, Transaction};

use tapio_xenstore::wire::Errno;

use crate::quota::{Limits, Quota};
use crate::tree::{Access, Caller, Node, Perms, Tree, parts, split};

/// The live tree and what is counted about it.
#[derive(Debug)]
pub struct Store {
    /// The tree.
    pub live: Tree,
    /// The last number given to a state of a node.
    pub clock: u64,
    /// What each domain's nodes use.
    pub usage: BTreeMap<u32, Usage>,
    /// Changes that became visible since they were last taken, for the journal; each inner list is one step.
    pub journal: Option<Vec<Vec<(Caller, Op)>>>,
}

impl Default for Store {
    fn default() -> Self {
        let mut store = Self { live: Tree::default(), clock: 1, usage: BTreeMap::new(), journal: None };
        let op = Op::Make("/tool/xenstored".into());
        let mut effects = Effects::default();
        apply(&mut store.live, &op, &Caller::CONTROL, &mut store.clock, &mut effects);
        // The root came into being with the tree.
        store.usage = usage_of(&store.live);
        store
    }
}

impl Store {
    /// A store of a tree that was kept.
    pub fn of(live: Tree, clock: u64) -> Self {
        let mut store = Self { live, clock, usage: BTreeMap::new(), journal: None };
        store.usage = usage_of(&store.live);
        store
    }

    /// Counts what changes brought about.
    pub fn count(&mut self, effects: &Effects) {
        for (owner, more) in &effects.usage {
            let usage = self.usage.entry(*owner).or_default();
            usage.nodes += more.nodes;
            usage.bytes += more.bytes;
            if *usage == Usage::default() {
                self.usage.remove(owner);
            }
        }
    }

    /// What a domain's nodes use.
    pub fn usage(&self, domid: u32) -> Usage {
        self.usage.get(&domid).copied().unwrap_or_default()
    }

    /// The live tree, for one request of a caller with these limits.
    pub fn view<'a>(&'a mut self, caller: &'a Caller, limits: &'a Limits) -> View<'a> {
        View { store: self, transaction: None, caller, limits }
    }

    /// A transaction's tree, for one request.
    pub fn view_in<'a>(
        &'a mut self,
        transaction: &'a mut Transaction,
        caller: &'a Caller,
        limits: &'a Limits,
    ) -> View<'a> {
        View { store: self, transaction: Some(transaction), caller, limits }
    }

    /// Makes a change without asking; what watches are told.
    pub fn force(&mut self, caller: &Caller, op: Op) -> Vec<Change> {
        let mut effects = Effects::default();
        apply(&mut self.live, &op, caller, &mut self.clock, &mut effects);
        self.count(&effects);
        if let Some(journal) = &mut self.journal {
            journal.push(vec![(*caller, op)]);
        }
        effects.changes
    }

    /// Makes a transaction's changes visible, all or none; what watches are told.
    ///
    /// # Errors
    /// `EAGAIN` when it depends on what others changed since it began, `ENOSPC` when its nodes are beyond a quota now.
    pub fn commit(
        &mut self,
        transaction: Transaction,
        caller: &Caller,
        limits: &Limits,
    ) -> Result<Vec<Change>, Errno> {
        if transaction.log.is_empty() {
            return Ok(Vec::new());
        }
        if transaction.conflicts(&self.live) {
            return Err(Errno::EAGAIN);
        }
        let (tree, effects) = if transaction.base.is(&self.live) {
            (transaction.tree, transaction.effects)
        } else {
            let (mut tree, mut effects) = (self.live.clone(), Effects::default());
            for (caller, op) in &transaction.log {
                apply(&mut tree, op, caller, &mut self.clock, &mut effects);
            }
            (tree, effects)
        };
        if !caller.privileged && effects.of(caller.domid).nodes > 0 {
            let nodes = self.usage(caller.domid).nodes + effects.of(caller.domid).nodes;
            if limits.exceeded(Quota::Nodes, nodes.max(0) as u64) {
                return Err(Errno::ENOSPC);
            }
        }
        self.live = tree;
        self.count(&effects);
        if let Some(journal) = &mut self.journal {
            journal.push(transaction.log);
        }
        Ok(effects.changes)
    }
}

/// One request's sight of the tree.
#[derive(Debug)]
pub struct View<'a> {
    store: &'a mut Store,
    transaction: Option<&'a mut Transaction>,
    caller: &'a Caller,
    limits: &'a Limits,
}

impl View<'_> {
    fn tree(&self) -> &Tree {
        self.transaction.as_ref().map_or(&self.store.live, |transaction| &transaction.tree)
    }

    fn note(&mut self, path: &str, aspect: Aspect) -> Result<(), Errno> {
        let max = if self.caller.privileged { 0 } else { self.limits.get(Quota::TransactionNodes) };
        self.transaction.as_mut().map_or(Ok(()), |transaction| transaction.note(path, aspect, max))
    }

    /// The node of a path if the caller has this access. A missing one is `EACCES` without access to the node above it.
    fn find(&mut self, path: &str, wanted: Access, aspect: Aspect) -> Result<&Rc<Node>, Errno> {
        self.note(path, OWN | aspect)?;
        if self.tree().get(path).is_none() {
            let mut above = path;
            while let Some((parent, _)) = split(above) {
                above = parent;
                self.note(above, OWN)?;
                if let Some(node) = self.tree().get(above) {
                    let allowed = node.perms.of(self.caller).has(wanted);
                    return Err(if allowed { Errno::ENOENT } else { Errno::EACCES });
                }
            }
            return Err(Errno::ENOENT);
        }
        let caller = *self.caller;
        match self.tree().get(path) {
            Some(node) if node.perms.of(&caller).has(wanted) => Ok(node),
            Some(_) => Err(Errno::EACCES),
            None => Err(Errno::ENOENT),
        }
    }

    /// The value of a node.
    ///
    /// # Errors
    /// `ENOENT`, `EACCES`; in a transaction of an ordinary domain `ENOSPC`.
    pub fn read(&mut self, path: &str) -> Result<&[u8], Errno> {
        Ok(&self.find(path, Access::READ, 0)?.value)
    }

    /// The permissions of a node.
    ///
    /// # Errors
    /// As [`View::read`].
    pub fn perms(&mut self, path: &str) -> Result<&Perms, Errno> {
        Ok(&self.find(path, Access::READ, 0)?.perms)
    }

    /// A node whose children are to be listed.
    ///
    /// # Errors
    /// As [`View::read`].
    pub fn directory(&mut self, path: &str) -> Result<&Node, Errno> {
        Ok(self.find(path, Access::READ, LIST)?)
    }

    /// Writes a value; makes the node and what is missing above it.
    ///
    /// # Errors
    /// `EACCES`; `ENOSPC`, `ENOMEM` beyond a quota.
    pub fn write(&mut self, path: &str, value: &[u8]) -> Result<Vec<Change>, Errno> {
        match self.find(path, Access::WRITE, 0) {
            Ok(node) => {
                let size = node.size() - node.value.len() + value.len() + node.children.listing_len();
                let more = value.len() as i64 - node.value.len() as i64;
                self.check_size(size)?;
                self.check_memory(more)?;
            }
            Err(Errno::ENOENT) => self.check_new(path, value.len())?,
            Err(errno) => return Err(errno),
        }
        Ok(self.make_change(Op::Write(path.into(), value.into())))
    }

    /// Makes a node that is not there, and what is missing above it.
    ///
    /// # Errors
    /// As [`View::write`].
    pub fn mkdir(&mut self, path: &str) -> Result<Vec<Change>, Errno> {
        match self.find(path, Access::WRITE, 0) {
            Ok(_) => Ok(Vec::new()),
            Err(Errno::ENOENT) => {
                self.check_new(path, 0)?;
                Ok(self.make_change(Op::Make(path.into())))
            }
            Err(errno) => Err(errno),
        }
    }

    /// Removes a node and what is below it. One that is not there may be removed if its parent is there.
    ///
    /// # Errors
    /// `EINVAL` for the root, `ENOENT`, `EACCES`.
    pub fn remove(&mut self, path: &str) -> Result<Vec<Change>, Errno> {
        match self.find(path, Access::WRITE, BELOW) {
            Ok(_) if path == "/" => Err(Errno::EINVAL),
            Ok(_) => Ok(self.make_change(Op::Remove(path.into()))),
            Err(Errno::ENOENT) => {
                let parent = split(path).ok_or(Errno::ENOENT)?.0;
                self.note(parent, OWN)?;
                self.tree().get(parent).map(|_| Vec::new()).ok_or(Errno::ENOENT)
            }
            Err(errno) => Err(errno),
        }
    }

    /// Sets permissions. Only a privileged caller can give a node away.
    ///
    /// # Errors
    /// `ENOENT`, `EACCES`, `EPERM`, `ENOSPC`.
    pub fn set_perms(&mut self, path: &str, perms: Perms) -> Result<Vec<Change>, Errno> {
        let node = self.find(path, Access::OWNER, 0)?;
        let (owner, size) = (node.perms.owner(), node.value.len() + node.children.listing_len());
        if !self.caller.privileged && owner != perms.owner() {
            return Err(Errno::EPERM);
        }
        if !self.caller.privileged && self.limits.exceeded(Quota::Permissions, perms.len() as u64) {
            return Err(Errno::ENOSPC);
        }
        self.check_size(size + 8 * perms.len())?;
        Ok(self.make_change(Op::SetPerms(path.into(), perms)))
    }

    fn check_size(&self, size: usize) -> Result<(), Errno> {
        let beyond = !self.caller.privileged && self.limits.exceeded(Quota::NodeSize, size as u64);
        if beyond { Err(Errno::ENOSPC) } else { Ok(()) }
    }

    fn check_memory(&self, more: i64) -> Result<(), Errno> {
        if self.caller.privileged || more <= 0 {
            return Ok(());
        }
        let bytes = self.used().bytes + more;
        let beyond = self.limits.exceeded(Quota::Memory, bytes.max(0) as u64);
        if beyond { Err(Errno::ENOMEM) } else { Ok(()) }
    }

    /// What the caller's nodes use, with those of the transaction.
    fn used(&self) -> Usage {
        let mut used = self.store.usage(self.caller.domid);
        if let Some(transaction) = &self.transaction {
            let more = transaction.effects.of(self.caller.domid);
            used.nodes += more.nodes;
            used.bytes += more.bytes + transaction.bytes as i64;
        }
        used
    }

    /// Whether a node that is not there may come into being, with what is missing above it.
    fn check_new(&self, path: &str, value_len: usize) -> Result<(), Errno> {
        if self.caller.privileged {
            return Ok(());
        }
        self.check_size(value_len)?;
        let mut node = Some(self.tree().root());
        let (mut missing, mut names) = (0, 0);
        for name in parts(path) {
            let next = node.and_then(|node| node.children.get(name));
            if next.is_none() {
                missing += 1;
                names += name.len();
                if let Some(parent) = node {
                    self.check_size(parent.size() + parent.children.listing_len() + name.len() + 1)?;
                }
            }
            node = next;
        }
        let nodes = self.used().nodes + missing;
        if self.limits.exceeded(Quota::Nodes, nodes.max(0) as u64) {
            return Err(Errno::ENOSPC);
        }
        self.check_memory(missing * 128 + (names + value_len) as i64)
    }

    fn make_change(&mut self, op: Op) -> Vec<Change> {
        let Some(transaction) = &mut self.transaction else {
            return self.store.force(self.caller, op);
        };
        let clock = &mut self.store.clock;
        apply(&mut transaction.tree, &op, self.caller, clock, &mut transaction.effects);
        transaction.push(self.caller, op);
        Vec::new()
    }
}
