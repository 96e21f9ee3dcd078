//! A double of the hypervisor: a domain is a memfd with a grant table in it, event channels are pairs of eventfds.
//!
//! The other side of [`crate::Domain`] and [`crate::Channel`] for tests, fuzzers and benchmarks on any host. Both
//! sides may be processes of their own: what they share are descriptors. [`DoubleVm`] is the domain as it sees itself,
//! [`Guest`] the same as a back end sees it, [`Wire`] an end of an event channel.
//!
//! # What its costs stand for
//! [`Domain::copy`](crate::Domain::copy) makes one system call a batch and then looks up, pins and copies page by page
//! in this process, as the hypervisor does: entering the kernel, the checks and the copying are there. Not there are
//! the hypercall itself (one in 16 copies of the real device), the locks of grant tables and the pages' mapping in the
//! hypervisor. [`Domain::map`](crate::Domain::map) makes a system call for each run of neighbouring pages, where the
//! real one makes two for all; tearing down costs one `munmap` with the kernel's flush of translations, where the real
//! one adds a hypercall and flushes on other processors. So what rings and notifications cost here is what they cost,
//! and what grant operations cost here is less than on Xen.

mod guest;
mod memory;
mod wire;

pub use guest::{Guest, MappedPages};
pub use memory::{DoubleVm, RevokeError};
pub use wire::Wire;

#[cfg(test)]
mod tests;
