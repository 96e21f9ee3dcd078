//! What a daemon leaves to the one after it on disk.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::domains::Domains;
use crate::store::Store;
use crate::watches::Watch;

/// What a directory of the journal holds.
#[derive(Debug, Default)]
pub struct Kept {
    /// The tree.
    pub store: Store,
    /// The domains, without connections.
    pub domains: Domains,
    /// The watches that each domain's connection had.
    pub watches: BTreeMap<u32, Vec<(Rc<str>, Watch)>>,
}
