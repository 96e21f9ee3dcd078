//! Versions of the tree in bytes: what they share is there once.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::codec::{Damaged, Reader, Writer};
use crate::store::{Effects, Op, Usage};
use crate::tree::{Access, Caller, Children, Node, Perm, Perms, Tree};

/// Nodes with the numbers they have in the bytes.
#[derive(Debug, Default)]
pub struct NodesOut {
    numbers: HashMap<*const Node, u32>,
    out: Writer,
}

impl NodesOut {
    /// The number of a node, written with what is below it if it was not yet.
    pub fn number(&mut self, node: &Rc<Node>) -> u32 {
        // Parents wait on a stack of our own until their children have numbers: paths are long where guests want it.
        let mut open = vec![(node, false)];
        while let Some((node, ready)) = open.pop() {
            if self.numbers.contains_key(&Rc::as_ptr(node)) {
                continue;
            }
            if !ready {
                open.push((node, true));
                open.extend(node.children.iter().map(|(_, child)| (child, false)));
                continue;
            }
            self.out.bytes(&node.value);
            put_perms(&mut self.out, &node.perms);
            self.out.u64(node.own);
            self.out.u64(node.list);
            self.out.count(node.children.iter().count());
            for (name, child) in &node.children {
                self.out.bytes(name.as_bytes());
                self.out.u32(self.numbers[&Rc::as_ptr(child)]);
            }
            let number = self.numbers.len() as u32;
            self.numbers.insert(Rc::as_ptr(node), number);
        }
        self.numbers[&Rc::as_ptr(node)]
    }

    /// All of them.
    pub fn finish(self, out: &mut Writer) {
        out.count(self.numbers.len());
        out.0.extend_from_slice(&self.out.0);
    }
}

/// Reads nodes back.
pub fn get_nodes(bytes: &mut Reader<'_>) -> Result<Vec<Rc<Node>>, Damaged> {
    let count = bytes.count()?;
    let mut nodes: Vec<Rc<Node>> = Vec::new();
    // What was shared is shared again.
    let mut known: HashSet<Perms> = HashSet::new();
    for _ in 0..count {
        let value = bytes.bytes()?.into();
        let perms = get_perms(bytes)?;
        let (own, list) = (bytes.u64()?, bytes.u64()?);
        let perms = known.get(&perms).cloned().unwrap_or(perms);
        known.insert(perms.clone());
        let mut node = Node { value, perms, own, list, children: Children::default() };
        for _ in 0..bytes.count()? {
            let name = bytes.text()?;
            if name.is_empty() || name.contains(['/', '\0']) {
                return Err(Damaged("a name is none"));
            }
            node.children.insert(name, get_node(bytes, &nodes)?);
        }
        nodes.push(Rc::new(node));
    }
    Ok(nodes)
}

/// Reads the number of a node.
pub fn get_node(bytes: &mut Reader<'_>, nodes: &[Rc<Node>]) -> Result<Rc<Node>, Damaged> {
    nodes.get(bytes.u32()? as usize).cloned().ok_or(Damaged("a node is not there"))
}

/// Reads the number of a tree's root.
pub fn get_tree(bytes: &mut Reader<'_>, nodes: &[Rc<Node>]) -> Result<Tree, Damaged> {
    get_node(bytes, nodes).map(Tree::new)
}

pub fn put_perms(out: &mut Writer, perms: &Perms) {
    out.count(perms.len());
    for perm in perms.entries() {
        out.u8(perm.access.letter() as u8);
        out.u32(perm.domid);
    }
}

pub fn get_perms(bytes: &mut Reader<'_>) -> Result<Perms, Damaged> {
    let mut entries = Vec::new();
    for _ in 0..bytes.count()? {
        let access = Access::from_letter(bytes.u8()?).ok_or(Damaged("a permission is none"))?;
        entries.push(Perm { access, domid: bytes.u32()? });
    }
    Perms::new(&entries).ok_or(Damaged("a node has no owner"))
}

pub fn put_caller(out: &mut Writer, caller: &Caller) {
    out.u32(caller.domid);
    out.u32(caller.target.unwrap_or(u32::MAX));
    out.u8(caller.privileged.into());
}

pub fn get_caller(bytes: &mut Reader<'_>) -> Result<Caller, Damaged> {
    let (domid, target) = (bytes.u32()?, bytes.u32()?);
    let target = (target != u32::MAX).then_some(target);
    Ok(Caller { domid, target, privileged: bytes.u8()? != 0 })
}

/// One change with its caller.
pub fn put_op(out: &mut Writer, caller: &Caller, op: &Op) {
    put_caller(out, caller);
    match op {
        Op::Write(path, value) => {
            out.u8(0);
            out.bytes(path.as_bytes());
            out.bytes(value);
        }
        Op::Make(path) => {
            out.u8(1);
            out.bytes(path.as_bytes());
        }
        Op::Remove(path) => {
            out.u8(2);
            out.bytes(path.as_bytes());
        }
        Op::SetPerms(path, perms) => {
            out.u8(3);
            out.bytes(path.as_bytes());
            put_perms(out, perms);
        }
        Op::Forget(domid) => {
            out.u8(4);
            out.u32(*domid);
        }
    }
}

pub fn get_op(bytes: &mut Reader<'_>) -> Result<(Caller, Op), Damaged> {
    let caller = get_caller(bytes)?;
    let what = bytes.u8()?;
    let mut path = || -> Result<Rc<str>, Damaged> {
        let path = bytes.text()?;
        let known = tapio_xenstore::Path::parse(path).map_err(|_| Damaged("a path is none"))?;
        Ok(known.as_str().into())
    };
    let op = match what {
        0 => Op::Write(path()?, bytes.bytes()?.into()),
        1 => Op::Make(path()?),
        2 => Op::Remove(path()?),
        3 => Op::SetPerms(path()?, get_perms(bytes)?),
        4 => Op::Forget(bytes.u32()?),
        _ => return Err(Damaged("a change is none")),
    };
    Ok((caller, op))
}

pub fn put_usage(out: &mut Writer, effects: &Effects) {
    out.count(effects.usage.len());
    for (owner, usage) in &effects.usage {
        out.u32(*owner);
        out.u64(usage.nodes as u64);
        out.u64(usage.bytes as u64);
    }
}

pub fn get_usage(bytes: &mut Reader<'_>, effects: &mut Effects) -> Result<(), Damaged> {
    for _ in 0..bytes.count()? {
        let owner = bytes.u32()?;
        let usage = Usage { nodes: bytes.u64()? as i64, bytes: bytes.u64()? as i64 };
        effects.usage.insert(owner, usage);
    }
    Ok(())
}
