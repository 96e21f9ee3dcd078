//! The children of a node: an ordered map that shares what two versions have in common.
//!
//! ```text
//!              ┌ names "m\0n\0p\0"  nodes [m, n, p] ┐        a row: neighbours, their names as a listing has them
//!         left │                                    │ right
//!   "a\0c\0" [a, c]                           "x\0z\0" [x, z]
//! ```
//!
//! A weight-balanced tree rather than a hash trie, because a listing needs an order that stays (`DIRECTORY_PART` goes
//! on at a byte offset), and rather than one sorted array, because a directory of a hundred thousand children would be
//! copied for each of them. Most directories are one row. Every branch knows how many bytes of listing are below it,
//! so a change and a jump to any offset cost O(log n), and a listing copies whole rows. What no snapshot shares is
//! changed in place.
//!
//! Balance: with the weight of a branch as the branches from it on plus one, no side weighs more than three times the
//! other; a double rotation where the inner grandchild weighs twice the outer or more (Adams' trees with the one pair
//! of whole numbers that is proved to work for insertion and removal).

use std::cmp::Ordering;
use std::rc::Rc;
use std::slice;

use super::Node;

const DELTA: usize = 3;
const GAMMA: usize = 2;
/// Children of a row. More save memory; each is counted up when a change copies a row that a snapshot shares. A row
/// with a reference of its own would be copied less, and cost every look-up a cache line: that was measured to be more.
const ROW_MAX: usize = if cfg!(test) { 4 } else { 32 };
/// Bytes of the names of a row, unless it has one child.
const ROW_LEN_MAX: usize = 2048;

/// One more than that, until the row is split, is counted in a byte.
const _: () = assert!(ROW_MAX < u8::MAX as usize);

type Link = Option<Rc<Branch>>;

/// The children of a node. Cloning it counts one reference.
#[derive(Clone, Debug, Default)]
pub struct Children {
    root: Link,
}

#[derive(Clone, Debug)]
struct Branch {
    row: Row,
    left: Link,
    right: Link,
    /// Branches here and below.
    branches: usize,
    /// Bytes of the names here and below, each with its NUL.
    bytes: usize,
}

/// Neighbours: at least one, without room for more.
#[derive(Clone, Debug, Default)]
struct Row {
    /// In order, a NUL behind each.
    names: Box<str>,
    nodes: Box<[Rc<Node>]>,
}

/// Where a name is in a row, or would be.
struct Place {
    /// Names before it.
    index: usize,
    /// Bytes before it.
    at: usize,
    found: bool,
}

impl Row {
    fn new(name: &str, node: Rc<Node>) -> Self {
        let mut row = Self::default();
        row.insert(&Place { index: 0, at: 0, found: false }, name, node);
        row
    }

    /// Halves the bytes until the name is found: a table of where names begin would be half as large as they are.
    fn place(&self, name: &str) -> Place {
        let (names, name) = (self.names.as_bytes(), name.as_bytes());
        let is_end = |byte: &u8| *byte == 0;
        // In single bytes, which a processor counts sixteen at a time.
        let index =
            |at: usize| names[..at].iter().fold(0u8, |sum, byte| sum.wrapping_add(is_end(byte).into()));
        let index = |at| usize::from(index(at));
        let (mut from, mut to) = (0, names.len());
        while from < to {
            let middle = usize::midpoint(from, to);
            let start = names[from..middle].iter().rposition(is_end).map_or(from, |end| from + end + 1);
            let len = names[start..].iter().position(is_end).unwrap_or(names.len() - start);
            match name.cmp(&names[start..start + len]) {
                Ordering::Less => to = start,
                Ordering::Greater => from = start + len + 1,
                Ordering::Equal => return Place { index: index(start), at: start, found: true },
            }
        }
        Place { index: index(from), at: from, found: false }
    }

    fn insert(&mut self, place: &Place, name: &str, node: Rc<Node>) {
        let (before, behind) = self.names.split_at(place.at);
        self.names = [before, name, "\0", behind].concat().into();
        let mut nodes = std::mem::take(&mut self.nodes).into_vec();
        nodes.reserve_exact(1);
        nodes.insert(place.index, node);
        self.nodes = nodes.into();
    }

    /// What is at `place` has a name of `len` bytes.
    fn remove(&mut self, place: &Place, len: usize) -> Rc<Node> {
        self.names = [&self.names[..place.at], &self.names[place.at + len + 1..]].concat().into();
        let mut nodes = std::mem::take(&mut self.nodes).into_vec();
        let node = nodes.remove(place.index);
        self.nodes = nodes.into();
        node
    }

    /// The upper half, when it has become too long.
    fn split(&mut self) -> Option<Self> {
        let count = self.nodes.len();
        if count <= ROW_MAX && (self.names.len() <= ROW_LEN_MAX || count == 1) {
            return None;
        }
        let mut nodes = std::mem::take(&mut self.nodes).into_vec();
        let upper = nodes.split_off(count / 2).into();
        self.nodes = nodes.into();
        let at = self.names.split_inclusive('\0').take(self.nodes.len()).map(str::len).sum();
        let (before, behind) = self.names.split_at(at);
        let row = Self { names: behind.into(), nodes: upper };
        self.names = before.into();
        Some(row)
    }
}

impl Branch {
    fn link(row: Row) -> Link {
        let bytes = row.names.len();
        Some(Rc::new(Self { row, left: None, right: None, branches: 1, bytes }))
    }

    fn sum(&mut self) {
        self.branches = 1 + branches(&self.left) + branches(&self.right);
        self.bytes = self.row.names.len() + bytes(&self.left) + bytes(&self.right);
    }
}

fn branches(link: &Link) -> usize {
    link.as_ref().map_or(0, |branch| branch.branches)
}

fn bytes(link: &Link) -> usize {
    link.as_ref().map_or(0, |branch| branch.bytes)
}

fn weight(link: &Link) -> usize {
    branches(link) + 1
}

impl Children {
    /// Bytes of a listing: every name with a NUL.
    pub fn listing_len(&self) -> usize {
        bytes(&self.root)
    }

    /// The child of this name.
    pub fn get(&self, name: &str) -> Option<&Rc<Node>> {
        let mut link = &self.root;
        while let Some(branch) = link {
            let place = branch.row.place(name);
            match place {
                Place { found: true, index, .. } => return branch.row.nodes.get(index),
                Place { at: 0, .. } => link = &branch.left,
                Place { at, .. } if at == branch.row.names.len() => link = &branch.right,
                Place { .. } => return None,
            }
        }
        None
    }

    /// The child of this name, to be changed: what is shared on the way to it is copied.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Rc<Node>> {
        let mut link = &mut self.root;
        loop {
            let branch = Rc::make_mut(link.as_mut()?);
            match branch.row.place(name) {
                Place { found: true, index, .. } => {
                    return branch.row.nodes.get_mut(index);
                }
                Place { at: 0, .. } => link = &mut branch.left,
                Place { at, .. } if at == branch.row.names.len() => link = &mut branch.right,
                Place { .. } => return None,
            }
        }
    }

    /// Adds a child, or puts another in the place of the one with this name. The name has no NUL.
    pub fn insert(&mut self, name: &str, node: Rc<Node>) {
        debug_assert!(!name.contains('\0'), "it ends names");
        insert(&mut self.root, name, node);
    }

    /// Takes a child away.
    pub fn remove(&mut self, name: &str) -> Option<Rc<Node>> {
        self.get(name)?;
        remove(&mut self.root, name)
    }

    /// Appends the listing from byte `offset` on, whole names, until `room` bytes are used. True when that was the
    /// rest.
    pub fn list(&self, offset: usize, room: usize, out: &mut Vec<u8>) -> bool {
        let mut skip = offset;
        let end = out.len() + room;
        list(&self.root, &mut skip, end, out)
    }

    /// All children in the order of their names.
    pub fn iter(&self) -> Iter<'_> {
        let mut iter = Iter { names: "", nodes: [].iter(), above: Vec::new() };
        iter.descend(&self.root);
        iter
    }
}

impl<'a> IntoIterator for &'a Children {
    type Item = (&'a str, &'a Rc<Node>);
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// Children in the order of their names.
#[derive(Debug)]
pub struct Iter<'a> {
    /// What is left of a row.
    names: &'a str,
    nodes: slice::Iter<'a, Rc<Node>>,
    above: Vec<&'a Branch>,
}

impl<'a> Iter<'a> {
    fn descend(&mut self, mut link: &'a Link) {
        while let Some(branch) = link {
            self.above.push(branch);
            link = &branch.left;
        }
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a str, &'a Rc<Node>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.names.is_empty() {
            let branch = self.above.pop()?;
            (self.names, self.nodes) = (&branch.row.names, branch.row.nodes.iter());
            self.descend(&branch.right);
        }
        let (name, rest) = self.names.split_once('\0')?;
        self.names = rest;
        Some((name, self.nodes.next()?))
    }
}

fn list(link: &Link, skip: &mut usize, end: usize, out: &mut Vec<u8>) -> bool {
    let Some(branch) = link else { return true };
    if *skip >= branch.bytes {
        *skip -= branch.bytes;
        return true;
    }
    if !list(&branch.left, skip, end, out) {
        return false;
    }
    // Only a client that invents offsets begins in the middle of a name.
    if let Some(names) = branch.row.names.as_bytes().get(*skip..) {
        *skip = 0;
        let room = end - out.len();
        if names.len() > room {
            let whole = names[..room].iter().rposition(|byte| *byte == 0).map_or(0, |last| last + 1);
            out.extend_from_slice(&names[..whole]);
            return false;
        }
        out.extend_from_slice(names);
    } else {
        *skip -= branch.row.names.len();
    }
    list(&branch.right, skip, end, out)
}

fn insert(link: &mut Link, name: &str, node: Rc<Node>) {
    let Some(shared) = link else {
        *link = Branch::link(Row::new(name, node));
        return;
    };
    let branch = Rc::make_mut(shared);
    match branch.row.place(name) {
        Place { found: true, index, .. } => {
            branch.row.nodes[index] = node;
            return;
        }
        Place { at: 0, .. } if branch.left.is_some() => insert(&mut branch.left, name, node),
        Place { at, .. } if at == branch.row.names.len() && branch.right.is_some() => {
            insert(&mut branch.right, name, node);
        }
        place => {
            branch.row.insert(&place, name, node);
            if let Some(upper) = branch.row.split() {
                insert_first(&mut branch.right, upper);
            }
        }
    }
    branch.sum();
    balance(link);
}

fn insert_first(link: &mut Link, row: Row) {
    let Some(shared) = link else {
        *link = Branch::link(row);
        return;
    };
    let branch = Rc::make_mut(shared);
    insert_first(&mut branch.left, row);
    branch.sum();
    balance(link);
}

/// The name is there.
fn remove(link: &mut Link, name: &str) -> Option<Rc<Node>> {
    let branch = Rc::make_mut(link.as_mut()?);
    let removed = match branch.row.place(name) {
        Place { found: false, at: 0, .. } => remove(&mut branch.left, name),
        Place { found: false, .. } => remove(&mut branch.right, name),
        place => {
            let node = branch.row.remove(&place, name.len());
            if branch.row.nodes.is_empty() {
                match (branch.left.take(), branch.right.take()) {
                    (None, other) | (other, None) => {
                        *link = other;
                        return Some(node);
                    }
                    (left, mut right) => {
                        branch.row = take_first(&mut right)?;
                        branch.left = left;
                        branch.right = right;
                    }
                }
            }
            Some(node)
        }
    };
    branch.sum();
    balance(link);
    removed
}

fn take_first(link: &mut Link) -> Option<Row> {
    let branch = Rc::make_mut(link.as_mut()?);
    if branch.left.is_none() {
        let first = std::mem::take(&mut branch.row);
        *link = branch.right.take();
        return Some(first);
    }
    let first = take_first(&mut branch.left);
    branch.sum();
    balance(link);
    first
}

fn balance(link: &mut Link) {
    let Some(branch) = link.as_ref() else { return };
    let (left, right) = (weight(&branch.left), weight(&branch.right));
    if right > DELTA * left {
        let doubly = branch.right.as_ref().is_some_and(|r| weight(&r.left) >= GAMMA * weight(&r.right));
        if doubly && let Some(branch) = link.as_mut() {
            rotate_right(&mut Rc::make_mut(branch).right);
        }
        rotate_left(link);
    } else if left > DELTA * right {
        let doubly = branch.left.as_ref().is_some_and(|l| weight(&l.right) >= GAMMA * weight(&l.left));
        if doubly && let Some(branch) = link.as_mut() {
            rotate_left(&mut Rc::make_mut(branch).left);
        }
        rotate_right(link);
    }
}

fn rotate_left(link: &mut Link) {
    let Some(mut top) = link.take() else { return };
    let below = Rc::make_mut(&mut top);
    let Some(mut riser) = below.right.take() else {
        *link = Some(top);
        return;
    };
    let above = Rc::make_mut(&mut riser);
    below.right = above.left.take();
    below.sum();
    above.left = Some(top);
    above.sum();
    *link = Some(riser);
}

fn rotate_right(link: &mut Link) {
    let Some(mut top) = link.take() else { return };
    let below = Rc::make_mut(&mut top);
    let Some(mut riser) = below.left.take() else {
        *link = Some(top);
        return;
    };
    let above = Rc::make_mut(&mut riser);
    below.left = above.right.take();
    below.sum();
    above.right = Some(top);
    above.sum();
    *link = Some(riser);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn node(value: u8) -> Rc<Node> {
        Rc::new(Node { value: [value][..].into(), ..Node::default() })
    }

    /// Depth of a link whose sums and balance are right.
    fn check(link: &Link) -> usize {
        let Some(branch) = link else { return 0 };
        let (left, right) = (weight(&branch.left), weight(&branch.right));
        assert!(left <= DELTA * right && right <= DELTA * left, "{left} beside {right}");
        assert_eq!(branch.branches, 1 + branches(&branch.left) + branches(&branch.right));
        assert_eq!(branch.bytes, branch.row.names.len() + bytes(&branch.left) + bytes(&branch.right));
        let (names, nodes) = (&branch.row.names, branch.row.nodes.len());
        assert!((1..=ROW_MAX).contains(&nodes) && (names.len() <= ROW_LEN_MAX || nodes == 1), "{nodes}");
        assert_eq!(names.matches('\0').count(), nodes);
        1 + check(&branch.left).max(check(&branch.right))
    }

    fn names(children: &Children) -> Vec<String> {
        children.iter().map(|(name, _)| name.to_string()).collect()
    }

    proptest! {
        #[test]
        fn it_is_a_map_and_old_versions_stay(steps in prop::collection::vec((0u8..4, 0u16..80), 1..200)) {
            let mut children = Children::default();
            let mut model = BTreeMap::new();
            let mut versions = Vec::new();
            for (what, number) in steps {
                let name = format!("n{number}");
                match what {
                    0 | 1 => {
                        children.insert(&name, node(what));
                        model.insert(name, what);
                    }
                    2 => {
                        let found = children.remove(&name).map(|node| node.value[0]);
                        prop_assert_eq!(found, model.remove(&name));
                    }
                    _ => {
                        if let Some(found) = children.get_mut(&name) {
                            Rc::make_mut(found).value = [9][..].into();
                            model.insert(name, 9);
                        }
                    }
                }
                check(&children.root);
                versions.push((children.clone(), model.clone()));
                if versions.len() > 5 {
                    versions.remove(0);
                }
                for (children, model) in &versions {
                    let found: Vec<_> = children.iter().map(|(name, node)| (name.to_string(), node.value[0])).collect();
                    let wanted: Vec<_> = model.iter().map(|(name, value)| (name.clone(), *value)).collect();
                    prop_assert_eq!(found, wanted);
                }
            }
        }
    }

    #[test]
    fn a_large_directory_is_flat_and_its_listing_can_begin_anywhere() {
        let mut children = Children::default();
        for number in 0..100_000u32 {
            children.insert(&format!("{number:06}"), node(0));
        }
        assert!(check(&children.root) <= 36, "depth {}", check(&children.root));
        assert_eq!(children.listing_len(), 700_000);
        let mut out = Vec::new();
        assert!(!children.list(7 * 50_000, 70, &mut out));
        assert_eq!(out.len(), 70);
        assert_eq!(&out[..14], b"050000\x00050001\x00");
        out.clear();
        assert!(children.list(7 * 99_999, 70, &mut out));
        assert_eq!(out, b"099999\0");
        out.clear();
        assert!(children.list(3, 9, &mut out) || out == b"000\x00");
    }

    #[test]
    fn rows_of_long_names_are_short() {
        let mut children = Children::default();
        let name = |number: usize| format!("{number}{}", "x".repeat(900));
        for number in 0..9 {
            children.insert(&name(number), node(0));
            check(&children.root);
        }
        assert!(branches(&children.root) >= 4, "{}", branches(&children.root));
        assert!((0..9).all(|number| children.remove(&name(number)).is_some()));
        assert!(children.root.is_none() && children.listing_len() == 0);
    }

    #[test]
    fn the_whole_listing_is_the_parts_one_after_the_other() {
        let mut children = Children::default();
        for name in ["a", "bb", "ccc", "dddd", "e"] {
            children.insert(name, node(0));
        }
        assert_eq!(names(&children), ["a", "bb", "ccc", "dddd", "e"]);
        for room in 5..20 {
            let mut whole = Vec::new();
            loop {
                let mut part = Vec::new();
                let last = children.list(whole.len(), room, &mut part);
                whole.extend(part);
                if last {
                    break;
                }
            }
            assert_eq!(whole, b"a\0bb\0ccc\0dddd\0e\0");
        }
    }
}
