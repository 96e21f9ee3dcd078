//! The same with several VMs or disks, a few at a time.

use crate::parallel::each;

/// VMs and disks that are looked at at a time.
const PARALLEL: usize = 16;

/// Does something with each of these on a few threads: one whose disks hang takes its time alone.
pub fn for_each<T: Sync>(all: &[T], work: impl Fn(&T) + Sync) {
    each(all, PARALLEL, work);
}
