//! Which images are made, in which order, so that VDIs arrive as the tree that they are: an image that several of them
//! are based on is copied once.
//!
//! An image that one VDI alone needs is copied into the same image as the one above it, as a garbage collection would
//! merge them; an image that several need becomes a base copy there, by a clone. The contents of each VDI are the same.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

/// A VDI that moves.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Its images, leaf first.
    pub(crate) layers: Vec<LayerSpec>,
    /// Bytes a guest sees.
    pub(crate) size: u64,
    /// Whether a disk process writes to it: then its leaf is mirrored, and not copied.
    pub(crate) is_live: bool,
}

/// What is known of an image: bytes a guest would see, bytes it takes.
pub(crate) type Facts = (u64, u64);

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// An empty image; raw where the lowest image of the source is.
    Create { image: Uuid, size: u64, is_raw: bool },
    /// It becomes longer.
    Grow { image: Uuid, size: u64 },
    /// What `from` holds and `base` does not.
    Fill { image: Uuid, from: ChainSpec, base: Option<ChainSpec>, bytes: u64 },
    /// Another one of the same contents.
    Fork { image: Uuid, new: Uuid },
}

/// Where a VDI arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) image: Uuid,
    /// Whether the image holds what lies below the leaf of a VDI that is mirrored.
    pub(crate) has_below: bool,
    /// Bytes that its leaf takes.
    pub(crate) bytes: u64,
    /// Images between it and the lowest one, itself too: what is higher goes first when the sources are removed.
    pub(crate) depth: usize,
}

/// All there is to do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) ops: Vec<Op>,
    /// Every image that has no driver's name, in no order.
    pub(crate) images: Vec<Uuid>,
    /// One for each source.
    pub(crate) places: Vec<Place>,
    /// Bytes that the images take together, as far as is known.
    pub(crate) bytes: u64,
}

#[derive(Debug)]
struct Node {
    layers: Vec<LayerSpec>,
    children: Vec<usize>,
    parent: Option<usize>,
    source: Option<usize>,
    facts: Facts,
    is_live: bool,
}

/// Plans the move of all sources, of which `facts` tells what their images are.
pub(crate) fn plan(sources: &[Source], facts: &dyn Fn(&LayerSpec) -> Option<Facts>) -> Plan {
    let mut nodes: Vec<Node> = Vec::new();
    let mut known: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for (source, of) in sources.iter().enumerate() {
        let mut parent = None;
        for at in (0..of.layers.len()).rev() {
            let layers = of.layers[at..].to_vec();
            let node = *known.entry(layers[0].path.clone()).or_insert_with(|| {
                let facts = facts(&layers[0]).unwrap_or((of.size, 0));
                nodes.push(Node { layers, children: vec![], parent, source: None, facts, is_live: false });
                nodes.len() - 1
            });
            if let Some(parent) = parent.filter(|parent: &usize| !nodes[*parent].children.contains(&node)) {
                nodes[parent].children.push(node);
            }
            if at == 0 {
                (nodes[node].source, nodes[node].is_live) = (Some(source), of.is_live);
                nodes[node].facts.0 = of.size;
            }
            parent = Some(node);
        }
    }
    let nothing = Place { image: Uuid::nil(), has_below: false, bytes: 0, depth: 0 };
    let mut made =
        Making { plan: Plan { places: vec![nothing; sources.len()], ..Plan::default() }, nodes: &nodes };
    for (root, node) in nodes.iter().enumerate().filter(|(_, node)| node.parent.is_none()) {
        let is_raw = node.layers[0].kind == ImageKind::Raw;
        let (image, size) = (made.draw(), node.facts.0);
        made.plan.ops.push(Op::Create { image, size, is_raw });
        made.visit(root, image, size, 1);
    }
    made.plan.bytes = nodes.iter().map(|node| node.facts.1).fold(0, u64::saturating_add);
    made.plan
}

struct Making<'a> {
    plan: Plan,
    nodes: &'a [Node],
}

impl Making<'_> {
    fn draw(&mut self) -> Uuid {
        let image = Uuid::new_v4();
        self.plan.images.push(image);
        image
    }

    /// Brings what the node holds into an image that has what lies below it, and then what lies above it.
    fn visit(&mut self, at: usize, image: Uuid, size: u64, depth: usize) {
        let node = &self.nodes[at];
        let (wanted, bytes) = node.facts;
        if wanted > size {
            self.plan.ops.push(Op::Grow { image, size: wanted });
        }
        let chain = |layers: &[LayerSpec]| ChainSpec { layers: layers.to_vec(), access: Access::ReadOnly };
        if !node.is_live {
            let base = node.parent.map(|_| chain(&node.layers[1..]));
            self.plan.ops.push(Op::Fill { image, from: chain(&node.layers), base, bytes });
        }
        // A VDI that others are based on is the first of those that go on from here.
        let stays = node.source.map(|source| (None, source));
        let on: Vec<(Option<usize>, usize)> =
            stays.into_iter().chain(node.children.iter().map(|child| (Some(*child), 0))).collect();
        let mut images = vec![image];
        for _ in on.iter().skip(1) {
            let new = self.draw();
            self.plan.ops.push(Op::Fork { image, new });
            images.push(new);
        }
        for ((child, source), image) in on.into_iter().zip(images) {
            match child {
                Some(child) => self.visit(child, image, wanted.max(size), depth + 1),
                None => {
                    let has_below = self.nodes[at].parent.is_some();
                    self.plan.places[source] = Place { image, has_below, bytes, depth };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(names: &[&str]) -> Vec<LayerSpec> {
        let layer = |name: &&str| LayerSpec { kind: ImageKind::Vhd, path: PathBuf::from(name) };
        names.iter().map(layer).collect()
    }

    fn source(names: &[&str], is_live: bool) -> Source {
        Source { layers: layers(names), size: 8, is_live }
    }

    fn of(sources: &[Source]) -> Plan {
        plan(sources, &|_| Some((8, 1)))
    }

    fn filled(plan: &Plan) -> Vec<(Uuid, String)> {
        let each = plan.ops.iter().filter_map(|op| match op {
            Op::Fill { image, from, .. } => Some((*image, from.layers[0].path.display().to_string())),
            _ => None,
        });
        each.collect()
    }

    #[test]
    fn what_two_have_in_common_is_copied_once() {
        let plan =
            of(&[source(&["leaf", "base", "root"], true), source(&["snapshot", "base", "root"], false)]);
        let names: Vec<_> = filled(&plan).into_iter().map(|(_, name)| name).collect();
        assert_eq!(names, ["root", "base", "snapshot"], "the leaf is mirrored");
        let forks = plan.ops.iter().filter(|op| matches!(op, Op::Fork { .. })).count();
        assert_eq!((forks, plan.images.len()), (1, 2), "root and base become one image");
        assert_ne!(plan.places[0].image, plan.places[1].image);
        assert!(plan.places[0].has_below && plan.places[0].depth == 3);
    }

    #[test]
    fn forks_come_before_what_is_written_above_them() {
        let plan = of(&[
            source(&["a", "base"], false),
            source(&["b", "base"], false),
            source(&["c", "base"], false),
        ]);
        let first_own = plan
            .ops
            .iter()
            .position(|op| matches!(op, Op::Fill { from, .. } if from.layers[0].path.as_os_str() != "base"));
        let last_fork = plan.ops.iter().rposition(|op| matches!(op, Op::Fork { .. }));
        assert!(last_fork < first_own, "{:?}", plan.ops);
        assert_eq!(plan.images.len(), 3);
    }

    #[test]
    fn a_vdi_that_another_is_based_on_keeps_its_contents() {
        let plan = of(&[source(&["below"], false), source(&["above", "below"], false)]);
        assert_ne!(plan.places[0].image, plan.places[1].image);
        let own = filled(&plan).into_iter().find(|(_, name)| name == "above").expect("it is copied");
        assert_eq!(own.0, plan.places[1].image, "what lies above does not go into the one below");
        assert!(plan.places[1].depth > plan.places[0].depth);
    }

    #[test]
    fn images_become_longer_where_their_disks_did() {
        let sizes = |layer: &LayerSpec| Some((if layer.path.as_os_str() == "base" { 4 } else { 8 }, 1));
        let plan = plan(&[source(&["leaf", "base"], false)], &sizes);
        let image = plan.places[0].image;
        assert_eq!(plan.ops[0], Op::Create { image, size: 4, is_raw: false });
        assert!(plan.ops.contains(&Op::Grow { image, size: 8 }));
        assert!(of(&[]).ops.is_empty());
    }
}
