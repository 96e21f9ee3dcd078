//! What is known of each domain, and the side of the hypervisor that the server needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::rc::Rc;

use crate::quota::{Limits, QUOTAS};
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
    /// All watchers were told that it has shut down.
    pub shutdown: bool,
    /// Features that were set for it.
    pub features: Option<u32>,
    /// Limits of its own.
    pub limits: Option<Limits>,
}

/// What of all this is written down by itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// What is about all domains.
    General,
    /// One domain, with the watches of its connection.
    Domain(u32),
    /// Whether a domain has a watch of this path and token: guests make and drop them as they like.
    Watch(u32, Rc<str>, Rc<[u8]>),
}

/// All domains that something is known of.
#[derive(Debug, Default)]
pub struct Domains {
    known: BTreeMap<u32, Domain>,
    pub(crate) general: General,
    /// What changed since it was written to the journal; none without a journal.
    pub(crate) changed: Option<BTreeSet<Part>>,
}

/// What is about all domains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct General {
    /// Limits of those without limits of their own.
    pub limits: Limits,
    /// Limits that the program was started with.
    pub given: Limits,
    /// The domains that may watch `@introduceDomain` and `@releaseDomain`, apart from the control domain.
    pub special: BTreeMap<String, Perms>,
}

impl Domains {
    /// By number.
    pub fn known(&self) -> &BTreeMap<u32, Domain> {
        &self.known
    }

    /// One that is known, introduced or not.
    pub fn get(&self, domid: u32) -> Option<&Domain> {
        self.known.get(&domid)
    }

    /// One that is known, to be changed.
    pub fn change(&mut self, domid: u32) -> Option<&mut Domain> {
        if self.known.contains_key(&domid) {
            self.mark(Part::Domain(domid));
        }
        self.known.get_mut(&domid)
    }

    /// One, to be changed; it is known from now on.
    pub fn entry(&mut self, domid: u32) -> &mut Domain {
        self.mark(Part::Domain(domid));
        self.known.entry(domid).or_default()
    }

    /// What is about all domains, to be changed.
    pub fn general_mut(&mut self) -> &mut General {
        self.mark(Part::General);
        &mut self.general
    }

    /// Something is to be written down.
    pub(crate) fn mark(&mut self, part: Part) {
        if let Some(changed) = &mut self.changed {
            changed.insert(part);
        }
    }

    /// A domain is gone, and what was said about it. That is written down with its nodes, as
    /// [`crate::store::Op::Forget`]. Answers what it was, and the connections of those that acted for it.
    pub fn forget(&mut self, domid: u32) -> (Domain, Vec<ConnId>) {
        let domain = self.known.remove(&domid).unwrap_or_default();
        let mut agents = Vec::new();
        for other in self.known.values_mut().filter(|other| other.target == Some(domid)) {
            other.target = None;
            agents.extend(other.conn);
        }
        self.general.special.remove(&format!("@releaseDomain/{domid}"));
        (domain, agents)
    }

    /// The program begins, with these limits of its command line. What was set while it ran before stays; of the two
    /// the last word counts: a quota that is given otherwise than then is as it is given now.
    pub fn begin_with(&mut self, given: Limits) {
        let general = self.general_mut();
        for (name, ..) in QUOTAS {
            if let (Some(now), then) = (given.by_name(name), general.given.by_name(name))
                && Some(now) != then
            {
                general.limits.set(name, now);
            }
        }
        general.given = given;
    }

    /// The limits of a domain.
    pub fn limits(&self, domid: u32) -> &Limits {
        self.known.get(&domid).and_then(|domain| domain.limits.as_ref()).unwrap_or(&self.general.limits)
    }

    /// Whether a domain's ring is served. The control domain's always is.
    pub fn introduced(&self, domid: u32) -> bool {
        domid == 0 || self.known.get(&domid).is_some_and(|domain| domain.introduced.is_some())
    }

    /// The domains that may watch a special name.
    pub fn special(&self, name: &str) -> Perms {
        let special = &self.general.special;
        let general = || name.split('/').next().and_then(|name| special.get(name));
        special.get(name).or_else(general).cloned().unwrap_or_default()
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
