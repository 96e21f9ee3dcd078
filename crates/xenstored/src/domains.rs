//! What is known of each domain, and the side of the hypervisor that the server needs.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use crate::quota::Limits;
use crate::tree::Perms;
use crate::watches::ConnId;

/// The first number that is no domain's (`DOMID_FIRST_RESERVED`).
pub const DOMID_MAX: u32 = 0x7ff0;

/// The server can be asked to begin a ring anew.
pub const FEATURE_RECONNECTION: u32 = 1;
/// The server writes into the ring why it stopped.
pub const FEATURE_ERROR: u32 = 2;
/// Watches may have a depth.
pub const FEATURE_WATCH_DEPTH: u32 = 4;
/// All that the server has.
pub const FEATURES: u32 = FEATURE_RECONNECTION | FEATURE_ERROR | FEATURE_WATCH_DEPTH;

/// A domain.
#[derive(Clone, Debug, Default)]
pub struct Domain {
    /// Its ring is served: the page and the event channel, as they were introduced.
    pub introduced: Option<(u64, u32)>,
    /// Its connection.
    pub conn: Option<ConnId>,
    /// The domain it acts for.
    pub target: Option<u32>,
    /// It was told to everybody that it has shut down.
    pub shutdown: bool,
    /// Features that were set for it.
    pub features: Option<u32>,
    /// Limits of its own.
    pub limits: Option<Limits>,
}

/// All domains that something is known of.
#[derive(Debug, Default)]
pub struct Domains {
    /// By number.
    pub known: BTreeMap<u32, Domain>,
    /// Limits of those without limits of their own.
    pub limits: Limits,
    /// Who may watch `@introduceDomain` and `@releaseDomain`, beside the control domain.
    pub special: BTreeMap<String, Perms>,
}

impl Domains {
    /// The limits of a domain.
    pub fn limits(&self, domid: u32) -> &Limits {
        self.known.get(&domid).and_then(|domain| domain.limits.as_ref()).unwrap_or(&self.limits)
    }

    /// Whether a domain's ring is served. The control domain's always is.
    pub fn introduced(&self, domid: u32) -> bool {
        domid == 0 || self.known.get(&domid).is_some_and(|domain| domain.introduced.is_some())
    }

    /// Who may watch a special name.
    pub fn special(&self, name: &str) -> Perms {
        let general = || name.split('/').next().and_then(|name| self.special.get(name));
        self.special.get(name).or_else(general).cloned().unwrap_or_default()
    }
}

/// How a domain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It runs, or may again.
    Running,
    /// It has shut down or crashed and is still there.
    Shutdown,
    /// It is gone.
    Gone,
}

/// What carries the bytes of domains: rings and event channels of a hypervisor, or nothing.
pub trait Platform: fmt::Debug {
    /// Serves the ring of a domain from now on; its connection is `conn`.
    ///
    /// # Errors
    /// The page cannot be mapped, or the channel not be bound.
    fn introduce(&mut self, conn: ConnId, domid: u32, gfn: u64, port: u32, features: u32) -> io::Result<()>;

    /// The domain has another event channel for the same ring.
    ///
    /// # Errors
    /// The channel cannot be bound.
    fn rebind(&mut self, domid: u32, port: u32) -> io::Result<()>;

    /// Lets go of a domain's ring.
    fn release(&mut self, domid: u32);
}

/// No hypervisor: domains are remembered, and have no connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHypervisor;

impl Platform for NoHypervisor {
    fn introduce(&mut self, _: ConnId, _: u32, _: u64, _: u32, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn rebind(&mut self, _: u32, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn release(&mut self, _: u32) {}
}
