//! The rings of all domains, and where they come from.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use super::ring::{Page, Ring};
use crate::domains::Platform;
use crate::watches::ConnId;

/// A ring with its connection.
#[derive(Debug)]
pub struct Served {
    /// The connection.
    pub conn: ConnId,
    /// The page and the channel.
    pub ring: Ring,
    /// Requests were left in it, because their answers would not have been taken.
    pub stalled: bool,
    /// There is more room in it than the guest was told.
    pub consumed: bool,
}

impl Served {
    /// A ring of which nothing was read.
    pub fn new(conn: ConnId, ring: Ring) -> Self {
        Self { conn, ring, stalled: false, consumed: false }
    }
}

/// Maps pages and binds channels: of a hypervisor, or of a double of it.
pub trait Source: std::fmt::Debug {
    /// The ring page of a domain.
    ///
    /// # Errors
    /// It cannot be mapped.
    fn page(&mut self, domid: u32, gfn: u64) -> io::Result<Page>;

    /// Our end of a domain's channel.
    ///
    /// # Errors
    /// It cannot be bound.
    fn channel(&mut self, domid: u32, port: u32) -> io::Result<tapio_xen::Channel>;
}

/// Rings by domain, shared by the server that asks for them and the loop that serves them.
#[derive(Debug, Default)]
pub struct Rings {
    /// By domain.
    pub served: BTreeMap<u32, Served>,
    /// Domains whose channel is new, to be waited for.
    pub fresh: Vec<u32>,
}

/// Both ends of it.
pub type SharedRings = Rc<RefCell<Rings>>;

/// The platform of a server with rings.
#[derive(Debug)]
pub struct RingPlatform {
    rings: SharedRings,
    source: Box<dyn Source>,
}

impl RingPlatform {
    /// Makes rings of what this source has.
    pub fn new(rings: SharedRings, source: Box<dyn Source>) -> Self {
        Self { rings, source }
    }
}

impl Platform for RingPlatform {
    fn introduce(&mut self, conn: ConnId, domid: u32, gfn: u64, port: u32, features: u32) -> io::Result<()> {
        let page = self.source.page(domid, gfn)?;
        let channel = self.source.channel(domid, port)?;
        let mut ring = Ring::new(page, channel)?;
        ring.offer(features);
        if ring.wants_reset() {
            ring.reset();
        }
        // A guest that waits for us since before we were there.
        ring.notify();
        let mut rings = self.rings.borrow_mut();
        rings.served.insert(domid, Served::new(conn, ring));
        rings.fresh.push(domid);
        Ok(())
    }

    fn rebind(&mut self, domid: u32, port: u32) -> io::Result<()> {
        let mut rings = self.rings.borrow_mut();
        let served =
            rings.served.get_mut(&domid).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        let channel = self.source.channel(domid, port)?;
        served.ring.set_channel(channel);
        served.ring.notify();
        rings.fresh.push(domid);
        Ok(())
    }

    fn release(&mut self, domid: u32) {
        self.rings.borrow_mut().served.remove(&domid);
    }
}
