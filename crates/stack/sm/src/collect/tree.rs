//! The images of an SR as trees.

use std::collections::HashMap;

use uuid::Uuid;

use super::Node;

/// Images by what they are based on. Those whose parents lead back to themselves belong to no tree.
pub(super) struct Tree<'a> {
    nodes: &'a [Node],
    /// The image each one is based on, if it is there.
    parents: Vec<Option<usize>>,
    children: Vec<Vec<usize>>,
    /// Images below each one and itself; none in a loop.
    depths: Vec<Option<usize>>,
    roots: Vec<Option<usize>>,
    /// By root: images in its longest chain.
    heights: HashMap<usize, usize>,
    /// Every image after the one it is based on.
    order: Vec<usize>,
}

impl<'a> Tree<'a> {
    pub(super) fn of(nodes: &'a [Node]) -> Self {
        let places: HashMap<Uuid, usize> =
            nodes.iter().enumerate().map(|(at, node)| (node.uuid, at)).collect();
        let parents: Vec<_> =
            nodes.iter().map(|node| node.parent.and_then(|parent| places.get(&parent).copied())).collect();
        let mut children = vec![Vec::new(); nodes.len()];
        for (at, parent) in parents.iter().enumerate() {
            if let Some(parent) = parent {
                children[*parent].push(at);
            }
        }
        let (mut depths, mut roots) = (vec![None; nodes.len()], vec![None; nodes.len()]);
        let mut order: Vec<usize> = (0..nodes.len()).filter(|at| parents[*at].is_none()).collect();
        let mut heights = HashMap::new();
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            next += 1;
            let below = parents[at];
            let depth = below.and_then(|below| depths[below]).unwrap_or(0) + 1;
            let root = below.and_then(|below| roots[below]).unwrap_or(at);
            (depths[at], roots[at]) = (Some(depth), Some(root));
            let height = heights.entry(root).or_insert(depth);
            *height = depth.max(*height);
            order.extend(&children[at]);
        }
        Self { nodes, parents, children, depths, roots, heights, order }
    }

    pub(super) fn node(&self, at: usize) -> &'a Node {
        &self.nodes[at]
    }

    pub(super) fn parent(&self, at: usize) -> Option<usize> {
        self.parents[at]
    }

    pub(super) fn children(&self, at: usize) -> &[usize] {
        &self.children[at]
    }

    /// Images in its chain.
    pub(super) fn depth(&self, at: usize) -> usize {
        self.depths[at].unwrap_or(0)
    }

    /// Images in the longest chain of its tree.
    pub(super) fn height_of_tree(&self, at: usize) -> usize {
        self.roots[at].and_then(|root| self.heights.get(&root)).copied().unwrap_or(0)
    }

    /// The image it is based on, if it alone is based on that.
    pub(super) fn lone_parent(&self, at: usize) -> Option<usize> {
        self.depths[at]?;
        self.parents[at].filter(|parent| self.children[*parent].len() == 1)
    }

    /// Base copies that carry nothing but such base copies.
    pub(super) fn garbage(&self) -> Vec<usize> {
        let mut is_garbage = vec![false; self.nodes.len()];
        for at in self.order.iter().rev().copied() {
            let node = &self.nodes[at];
            is_garbage[at] =
                node.hidden && !node.unreadable && self.children[at].iter().all(|above| is_garbage[*above]);
        }
        (0..self.nodes.len()).filter(|at| is_garbage[*at]).collect()
    }

    /// Disks whose chain has the image, itself left out.
    pub(super) fn disks_above(&self, at: usize) -> Vec<usize> {
        let mut found = Vec::new();
        // Of a tree: no image is met twice.
        let mut left = self.children[at].clone();
        while let Some(above) = left.pop() {
            left.extend(&self.children[above]);
            if !self.nodes[above].hidden {
                found.push(above);
            }
        }
        found.sort_by_key(|disk| self.nodes[*disk].uuid);
        found
    }
}
