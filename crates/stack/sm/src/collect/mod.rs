//! What the collection of an SR does next: a function of its images, without a storage.
//!
//! ```text
//! garbage    base copies that no disk needs any more go
//! inner      a base copy that is the only child of its parent goes into the parent; its children come to stand there
//! freeze     a disk that is the only child of a base copy and holds much: what it holds becomes a base copy,
//!            which the next inner job merges while the disk is used
//! leaf       a disk that is the only child of a base copy and holds little: it goes into the parent, which takes its
//!            name
//! ```
//!
//! Jobs of the tallest tree come first, of a tree the ones nearest to its root: so each byte is copied once on its way
//! down. sm-layout.md section 6.

mod forecast;
mod tree;
mod why;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::traits::MergeCost;
pub use forecast::Forecast;
use tree::Tree;
pub use why::Why;

/// A disk that holds no more than this is merged while its guest waits; as sm's.
pub const LEAF_LEN_MAX: u64 = 20 << 20;

/// What a disk may hold that is merged while its guest waits although it was frozen [`FREEZES_FEW`] times: it is
/// written as fast as it is merged, and would hold as much after each freeze.
pub const LEAF_LEN_LAST: u64 = 3 * LEAF_LEN_MAX;

/// How often what a disk holds is frozen before it may hold [`LEAF_LEN_LAST`].
pub const FREEZES_FEW: u32 = 4;

/// How often what a disk holds is frozen in one collection. A disk that still holds much then is written faster than it
/// is merged.
pub const FREEZES_MAX: u32 = 20;

/// What a disk may hold that is merged while its guest waits, after so many freezes.
const fn leaf_len_max(freezes: u32) -> u64 {
    if freezes < FREEZES_FEW { LEAF_LEN_MAX } else { LEAF_LEN_LAST }
}

/// An image of the SR.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its UUID.
    pub uuid: Uuid,
    /// The image it is based on.
    pub parent: Option<Uuid>,
    /// Whether it only carries others.
    pub hidden: bool,
    /// Whether it has a byte for each byte of the disk.
    pub raw: bool,
    /// Whether it cannot be read, so that its parent is not known.
    pub unreadable: bool,
    /// Bytes the guest sees.
    pub virtual_size: u64,
    /// Bytes it takes.
    pub physical: u64,
    /// What uses it in a way that keeps its chain as it is, as "a copy"; disks that run are no such thing.
    pub held: Option<String>,
    /// Whether the disk may go into its parent (`sm_config:leaf-coalesce`).
    pub may_shrink: bool,
}

/// What the administrator allows (`SR.other_config`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// `gc`: anything at all.
    pub gc: bool,
    /// `coalesce`: merges.
    pub coalesce: bool,
    /// `leaf-coalesce`: merges of disks into base copies.
    pub leaf_coalesce: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self { gc: true, coalesce: true, leaf_coalesce: true }
    }
}

/// All that a plan rests on.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Every image of the SR.
    pub nodes: Vec<Node>,
    /// What is allowed.
    pub policy: Policy,
    /// Bytes that are free, if that is known.
    pub free: Option<u64>,
    /// What merges take, by the image that goes, as far as the images were asked.
    pub measured: BTreeMap<Uuid, MergeCost>,
    /// How often disks were frozen in this collection.
    pub freezes: BTreeMap<Uuid, u32>,
    /// Why jobs of this collection failed, by their image.
    pub failed: BTreeMap<Uuid, String>,
}

/// One thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// All base copies that carry nothing go.
    Garbage,
    /// The base copy goes into its parent.
    Inner {
        /// The base copy.
        image: Uuid,
        /// Its parent.
        parent: Uuid,
    },
    /// What the disk holds becomes a base copy.
    Freeze {
        /// The disk.
        image: Uuid,
        /// Its parent.
        parent: Uuid,
    },
    /// The disk goes into its parent.
    Leaf {
        /// The disk.
        image: Uuid,
        /// Its parent.
        parent: Uuid,
    },
}

impl Work {
    /// The image that goes, and its parent; none for [`Self::Garbage`].
    pub const fn images(&self) -> Option<(Uuid, Uuid)> {
        match self {
            Self::Garbage => None,
            Self::Inner { image, parent } | Self::Freeze { image, parent } | Self::Leaf { image, parent } => {
                Some((*image, *parent))
            }
        }
    }
}

/// A job that can be begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// What is done.
    pub work: Work,
    /// Bytes that it needs beside what is there.
    pub needs: u64,
    /// Whether the images were asked for `needs`; else it is the most it can be.
    pub is_measured: bool,
    /// Bytes that are free again when it is done.
    pub gives_back: u64,
    /// Disks whose chain changes.
    pub disks: Vec<Uuid>,
}

/// A merge that is not done now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// The image that would go.
    pub image: Uuid,
    /// The reason, for people.
    pub why: Why,
}

/// What is to be done, in this order, and what is not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Jobs; the first is the next one. Each is judged by the SR as it is now.
    pub jobs: Vec<Job>,
    /// What is left alone.
    pub skipped: Vec<Skipped>,
}

/// Plans the collection of an SR.
pub fn plan(view: &View) -> Plan {
    let tree = Tree::of(&view.nodes);
    let mut plan = Plan::default();
    let garbage = tree.garbage();
    if !garbage.is_empty() {
        let gives_back = garbage.iter().map(|at| view.nodes[*at].physical).sum();
        match obstacle_of_all(view) {
            None => plan.jobs.push(Job {
                work: Work::Garbage,
                needs: 0,
                is_measured: true,
                gives_back,
                disks: Vec::new(),
            }),
            Some(why) => {
                plan.skipped.extend(
                    garbage.iter().map(|at| Skipped { image: view.nodes[*at].uuid, why: why.clone() }),
                );
            }
        }
    }
    let mut merges: Vec<_> = (0..view.nodes.len())
        .filter(|at| !garbage.contains(at))
        .filter_map(|at| Some((at, tree.lone_parent(at)?)))
        .filter(|(at, parent)| is_merge(&tree, *at, *parent))
        .collect();
    merges.sort_by_key(|(at, _)| {
        let node = &view.nodes[*at];
        (!node.hidden, std::cmp::Reverse(tree.height_of_tree(*at)), tree.depth(*at), node.uuid)
    });
    for (at, parent) in merges {
        match judge(view, &tree, at, parent) {
            Ok(job) => plan.jobs.push(job),
            Err(why) => plan.skipped.push(Skipped { image: view.nodes[at].uuid, why }),
        }
    }
    plan
}

/// Whether `at`, the only child of `parent`, is one that goes into its parent: a base copy that carries something, or a
/// disk that carries nothing.
fn is_merge(tree: &Tree<'_>, at: usize, parent: usize) -> bool {
    let (node, below) = (tree.node(at), tree.node(parent));
    below.hidden && !node.raw && node.hidden != tree.children(at).is_empty()
}

fn obstacle_of_all(view: &View) -> Option<Why> {
    if !view.policy.gc {
        return Some(Why::Off { key: "gc" });
    }
    let unreadable = view.nodes.iter().find(|node| node.unreadable);
    unreadable.map(|node| Why::Unreadable { image: node.uuid })
}

fn judge(view: &View, tree: &Tree<'_>, at: usize, parent: usize) -> Result<Job, Why> {
    let (node, below) = (tree.node(at), tree.node(parent));
    if let Some(why) = obstacle_of_all(view) {
        return Err(why);
    }
    if !view.policy.coalesce {
        return Err(Why::Off { key: "coalesce" });
    }
    let is_leaf = !node.hidden;
    if is_leaf {
        check_leaf(view, node, below)?;
    }
    if node.virtual_size < below.virtual_size {
        return Err(Why::Smaller { parent: below.uuid });
    }
    let lower = tree.parent(parent).map(|lower| tree.node(lower));
    if let Some(lower) = lower.filter(|lower| lower.virtual_size > below.virtual_size) {
        return Err(Why::Smaller { parent: lower.uuid });
    }
    let mut disks = tree.disks_above(at);
    if is_leaf {
        disks.push(at);
    }
    let held = disks.iter().find_map(|disk| Some((tree.node(*disk), tree.node(*disk).held.as_ref()?)));
    if let Some((disk, by)) = held {
        return Err(Why::Held { vdi: disk.uuid, by: by.clone() });
    }
    if let Some(error) = view.failed.get(&node.uuid) {
        return Err(Why::Failed { error: error.clone() });
    }
    let measured = view.measured.get(&node.uuid);
    // A disk that runs takes more than it holds: space for blocks to come.
    let (needs, holds) = measured.map_or((node.physical, node.physical), |cost| (cost.needs, cost.copies));
    if let Some(free) = view.free.filter(|free| measured.is_some() && needs > *free) {
        return Err(Why::NoSpace { needs, free });
    }
    let (image, parent) = (node.uuid, below.uuid);
    let freezes = view.freezes.get(&image).copied().unwrap_or(0);
    let work = match is_leaf {
        false => Work::Inner { image, parent },
        true if holds > leaf_len_max(freezes) => {
            if freezes >= FREEZES_MAX {
                return Err(Why::Busy);
            }
            if tree.depth(at) + 1 >= tapio_format::vhd::CHAIN_DEPTH_MAX {
                return Err(Why::Deep);
            }
            Work::Freeze { image, parent }
        }
        true => Work::Leaf { image, parent },
    };
    let disks = disks.into_iter().map(|disk| tree.node(disk).uuid).collect();
    Ok(Job { work, needs, is_measured: measured.is_some(), gives_back: node.physical, disks })
}

fn check_leaf(view: &View, node: &Node, below: &Node) -> Result<(), Why> {
    if !view.policy.leaf_coalesce {
        return Err(Why::Off { key: "leaf-coalesce" });
    }
    if !node.may_shrink {
        return Err(Why::OffForVdi);
    }
    if below.raw {
        return Err(Why::RawBase);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
