//! The children of a node: an ordered map that shares what two versions have in common.
//!
//! A weight-balanced tree rather than a hash trie, because a listing needs an order that stays (`DIRECTORY_PART` goes
//! on at a byte offset), and rather than a sorted array, because a directory of a hundred thousand children would be
//! copied for each of them. Every branch knows how many children and how many bytes of listing are below it, so a
//! change and a jump to any offset cost O(log n). What no snapshot shares is changed in place.
//!
//! Balance: with the weight of a branch as its children plus one, no side weighs more than three times the other; a
//! double rotation where the inner grandchild weighs twice the outer or more (Adams' trees with the one pair of whole
//! numbers that is proved to work for insertion and removal).

use std::cmp::Ordering;
use std::rc::Rc;

use super::Node;

const DELTA: usize = 3;
const GAMMA: usize = 2;

type Link = Option<Rc<Branch>>;

/// The children of a node. Cloning it counts one reference.
#[derive(Clone, Debug, Default)]
pub struct Children {
    root: Link,
}

#[derive(Clone, Debug)]
struct Branch {
    name: Rc<str>,
    node: Rc<Node>,
    left: Link,
    right: Link,
    /// Children here and below.
    count: usize,
    /// Bytes of their names, each with its NUL.
    bytes: usize,
}

impl Branch {
    fn sum(&mut self) {
        self.count = 1 + count(&self.left) + count(&self.right);
        self.bytes = self.name.len() + 1 + bytes(&self.left) + bytes(&self.right);
    }
}

fn count(link: &Link) -> usize {
    link.as_ref().map_or(0, |branch| branch.count)
}

fn bytes(link: &Link) -> usize {
    link.as_ref().map_or(0, |branch| branch.bytes)
}

fn weight(link: &Link) -> usize {
    count(link) + 1
}

impl Children {
    /// How many.
    pub fn len(&self) -> usize {
        count(&self.root)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// Bytes of a listing: every name with a NUL.
    pub fn listing_len(&self) -> usize {
        bytes(&self.root)
    }

    /// The child of this name.
    pub fn get(&self, name: &str) -> Option<&Rc<Node>> {
        let mut link = &self.root;
        while let Some(branch) = link {
            match name.cmp(&branch.name) {
                Ordering::Less => link = &branch.left,
                Ordering::Greater => link = &branch.right,
                Ordering::Equal => return Some(&branch.node),
            }
        }
        None
    }

    /// The child of this name, to be changed: what is shared on the way to it is copied.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Rc<Node>> {
        self.get(name)?;
        let mut link = &mut self.root;
        loop {
            let branch = Rc::make_mut(link.as_mut()?);
            match name.cmp(&branch.name) {
                Ordering::Less => link = &mut branch.left,
                Ordering::Greater => link = &mut branch.right,
                Ordering::Equal => return Some(&mut branch.node),
            }
        }
    }

    /// Adds a child, or puts another in the place of the one with this name.
    pub fn insert(&mut self, name: &str, node: Rc<Node>) {
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
        let mut iter = Iter { above: Vec::new() };
        iter.descend(&self.root);
        iter
    }
}

impl<'a> IntoIterator for &'a Children {
    type Item = (&'a Rc<str>, &'a Rc<Node>);
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// Children in the order of their names.
#[derive(Debug)]
pub struct Iter<'a> {
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
    type Item = (&'a Rc<str>, &'a Rc<Node>);

    fn next(&mut self) -> Option<Self::Item> {
        let branch = self.above.pop()?;
        self.descend(&branch.right);
        Some((&branch.name, &branch.node))
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
    let name = branch.name.as_bytes();
    if *skip > name.len() {
        *skip -= name.len() + 1;
    } else {
        // Only a client that invents offsets begins in the middle of a name.
        let piece = &name[*skip..];
        if out.len() + piece.len() + 1 > end {
            return false;
        }
        out.extend_from_slice(piece);
        out.push(0);
        *skip = 0;
    }
    list(&branch.right, skip, end, out)
}

fn insert(link: &mut Link, name: &str, node: Rc<Node>) {
    let Some(shared) = link else {
        let bytes = name.len() + 1;
        *link = Some(Rc::new(Branch { name: name.into(), node, left: None, right: None, count: 1, bytes }));
        return;
    };
    let branch = Rc::make_mut(shared);
    match name.cmp(&branch.name) {
        Ordering::Less => insert(&mut branch.left, name, node),
        Ordering::Greater => insert(&mut branch.right, name, node),
        Ordering::Equal => {
            branch.node = node;
            return;
        }
    }
    branch.sum();
    balance(link);
}

/// The name is there.
fn remove(link: &mut Link, name: &str) -> Option<Rc<Node>> {
    let branch = Rc::make_mut(link.as_mut()?);
    let removed = match name.cmp(&branch.name) {
        Ordering::Less => remove(&mut branch.left, name),
        Ordering::Greater => remove(&mut branch.right, name),
        Ordering::Equal => {
            let node = branch.node.clone();
            match (branch.left.take(), branch.right.take()) {
                (None, other) | (other, None) => {
                    *link = other;
                    return Some(node);
                }
                (left, mut right) => {
                    let (name, node) = take_first(&mut right)?;
                    branch.name = name;
                    branch.node = node;
                    branch.left = left;
                    branch.right = right;
                }
            }
            Some(node)
        }
    };
    branch.sum();
    balance(link);
    removed
}

fn take_first(link: &mut Link) -> Option<(Rc<str>, Rc<Node>)> {
    let branch = Rc::make_mut(link.as_mut()?);
    if branch.left.is_none() {
        let first = (branch.name.clone(), branch.node.clone());
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
        Rc::new(Node { value: Rc::from([value].as_slice()), ..Node::default() })
    }

    /// Depth of a link whose sums and balance are right.
    fn check(link: &Link) -> usize {
        let Some(branch) = link else { return 0 };
        let (left, right) = (weight(&branch.left), weight(&branch.right));
        assert!(left <= DELTA * right && right <= DELTA * left, "{left} beside {right}");
        assert_eq!(branch.count, 1 + count(&branch.left) + count(&branch.right));
        assert_eq!(branch.bytes, branch.name.len() + 1 + bytes(&branch.left) + bytes(&branch.right));
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
                            Rc::make_mut(found).value = Rc::from([9].as_slice());
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
