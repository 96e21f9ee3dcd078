//! The tree of nodes: values that never change, shared by every version of it that is still in use.
//!
//! ```text
//!   live ──▶ root' ──▶ local' ──▶ domain' ──▶ 7'        a change copies the nodes above it, and of each directory on
//!              │         │           └──────▶ 6         the way the O(log n) rows that lead there
//!   a transaction's base ─▶ root ──▶ local ──▶ ...      a snapshot is one counted reference to a root
//! ```
//!
//! Hosts have many small nodes, so one is small: short values are in it, its name is in its parent's row alone, and
//! permissions are shared with where they came from.

mod children;
mod perms;
mod value;

use std::rc::Rc;

pub use children::Children;
pub use perms::{Access, Caller, Perm, Perms};
pub use value::Value;

/// A node with all that is below it.
#[derive(Clone, Debug, Default)]
pub struct Node {
    /// What `READ` answers.
    pub value: Value,
    /// The permissions.
    pub perms: Perms,
    /// Changes with value and permissions; no two states of any node have the same number.
    pub own: u64,
    /// Changes when a child is added or removed.
    pub list: u64,
    /// What is below.
    pub children: Children,
}

/// With the two counts of its references 72 bytes, which an allocator rounds up to 80.
const _: () = assert!(size_of::<Node>() == 56);

impl Node {
    /// Bytes that count against the owner's quota, without children.
    pub fn size(&self) -> usize {
        self.value.len() + 8 * self.perms.len()
    }
}

/// A version of the tree. Cloning it copies nothing.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    root: Rc<Node>,
}

/// The parts of an absolute path that was checked.
pub fn parts(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty())
}

/// The path of the parent, and the name in it; `None` for the root.
pub fn split(path: &str) -> Option<(&str, &str)> {
    let (parent, name) = path.rsplit_once('/')?;
    if name.is_empty() {
        return None;
    }
    Some((if parent.is_empty() { "/" } else { parent }, name))
}

impl Tree {
    /// A tree with this root.
    pub fn new(root: Rc<Node>) -> Self {
        Self { root }
    }

    /// The root.
    pub fn root(&self) -> &Rc<Node> {
        &self.root
    }

    /// The root, to be changed.
    pub fn root_mut(&mut self) -> &mut Node {
        Rc::make_mut(&mut self.root)
    }

    /// Whether both are the same version.
    pub fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.root, &other.root)
    }

    /// The node at an absolute path.
    pub fn get(&self, path: &str) -> Option<&Rc<Node>> {
        parts(path).try_fold(&self.root, |node, name| node.children.get(name))
    }

    /// The node at a path, to be changed: what is shared on the way to it is copied.
    pub fn get_mut(&mut self, path: &str) -> Option<&mut Node> {
        let mut node = self.root_mut();
        for name in parts(path) {
            node = Rc::make_mut(node.children.get_mut(name)?);
        }
        Some(node)
    }

    /// Puts a node, with all that is below it, under a parent that is there; `list` becomes the parent's.
    pub fn insert(&mut self, path: &str, node: Rc<Node>, list: u64) -> bool {
        let Some((parent, name)) = split(path) else {
            self.root = node;
            return true;
        };
        let Some(parent) = self.get_mut(parent) else { return false };
        parent.children.insert(name, node);
        parent.list = list;
        true
    }

    /// Takes a node away, with all that is below it; `list` becomes the parent's.
    pub fn remove(&mut self, path: &str, list: u64) -> Option<Rc<Node>> {
        self.get(path)?;
        let (parent, name) = split(path)?;
        let parent = self.get_mut(parent)?;
        parent.list = list;
        parent.children.remove(name)
    }
}

/// Calls `visit` with the path of each node of a subtree and the node, parents first. Keeps its own stack.
pub fn walk(path: &str, node: &Rc<Node>, mut visit: impl FnMut(&str, &Rc<Node>)) {
    let top = if path == "/" { String::new() } else { path.to_owned() };
    let mut open = vec![(top, node)];
    while let Some((path, node)) = open.pop() {
        visit(if path.is_empty() { "/" } else { &path }, node);
        let from = open.len();
        open.extend(node.children.iter().map(|(name, child)| (format!("{path}/{name}"), child)));
        open[from..].reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_leaves_the_snapshot_and_the_neighbours_alone() {
        let mut tree = Tree::default();
        for path in ["/a", "/a/b", "/a/c", "/d"] {
            assert!(tree.insert(path, Rc::default(), 1));
        }
        let before = tree.clone();
        tree.get_mut("/a/b").unwrap().own = 7;
        assert_eq!(before.get("/a/b").unwrap().own, 0);
        assert_eq!(tree.get("/a/b").unwrap().own, 7);
        let same = |path| Rc::ptr_eq(before.get(path).unwrap(), tree.get(path).unwrap());
        assert!(same("/d") && same("/a/c") && !same("/a"));
        assert!(tree.remove("/a", 9).is_some() && tree.get("/a/c").is_none());
        assert!(before.get("/a/c").is_some() && tree.remove("/a", 9).is_none());
    }

    #[test]
    fn what_is_not_shared_is_changed_in_place() {
        let mut tree = Tree::default();
        tree.insert("/a", Rc::default(), 1);
        let at = Rc::as_ptr(tree.get("/a").unwrap());
        tree.get_mut("/a").unwrap().own = 3;
        assert_eq!(at, Rc::as_ptr(tree.get("/a").unwrap()));
    }

    #[test]
    fn a_walk_visits_parents_first_and_all() {
        let mut tree = Tree::default();
        for path in ["/a", "/a/b", "/a/c", "/d"] {
            tree.insert(path, Rc::default(), 1);
        }
        let mut seen = Vec::new();
        walk("/", tree.root(), |path, _| seen.push(path.to_owned()));
        assert_eq!(seen, ["/", "/a", "/a/b", "/a/c", "/d"]);
        assert_eq!(split("/a/b"), Some(("/a", "b")));
        assert_eq!(split("/a"), Some(("/", "a")));
        assert_eq!(split("/"), None);
    }
}
