//! A device of a Xen guest as a front end of a disk.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tapio_block::DiskHandle;
use tapio_control::{
    BlkifCounts, BlkifFront, BlkifProtocol, BlkifReport, BlkifRequest, BlkifRing as RingReport, ControlError,
    Errno, Result, RingStart,
};
use tapio_front::blkif::{BlkifOptions, BlkifRing, BlkifServer, OnRing, QueueCounts, QueueReport, Start};
use tapio_stat::ShmRoot;
use tapio_types::Movement;
use tapio_xen::blkif::Abi;
use tapio_xen::sys::{EventDevice, GrantDevice};
use tapio_xen::{Channel, Domain, GrantRef};

use crate::counter::Counter;
use crate::log;

/// How long the data thread may take for something small.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// A guest's device that is served.
#[derive(Debug)]
pub struct Blkif {
    server: BlkifServer,
    front: BlkifFront,
    pool: String,
    remote: DiskHandle,
    slot: usize,
    /// Why its pages may not be mapped, if the storage is such.
    pub only_copied: Option<String>,
}

/// Descriptors that came with a request, each to be taken once.
struct Given(Vec<Option<OwnedFd>>);

impl Given {
    fn take(&mut self, index: u32) -> Result<OwnedFd> {
        self.0.get_mut(index as usize).and_then(Option::take).ok_or_else(|| {
            ControlError::new(
                Errno::EBADF,
                format!("descriptor {index} did not come along, or was used already"),
            )
        })
    }
}

/// Whether the storage gets pages of the guest.
pub(crate) const fn maps_pages(movement: Movement) -> bool {
    match movement {
        Movement::Map | Movement::Persistent => true,
        Movement::Copy | Movement::Bounce => false,
    }
}

fn domain(front: &BlkifFront, given: &mut Given) -> Result<Domain> {
    match front.double {
        Some(index) => Domain::of_double(given.take(index)?, front.domid)
            .map_err(|error| ControlError::io("the descriptor is no memory of a double", &error)),
        None => GrantDevice::open(front.domid).map(Domain::Xen).map_err(|error| {
            ControlError::io("cannot reach the memory of other domains", &error)
                .next("on a Xen host load xen-gntdev; elsewhere use NBD or vhost-user")
        }),
    }
}

fn rings(front: &BlkifFront, given: &mut Given) -> Result<Vec<BlkifRing>> {
    let grants = |numbers: &[u32]| numbers.iter().copied().map(GrantRef).collect();
    let make = |queue: &tapio_control::BlkifQueue| {
        let channel = match queue.double {
            Some([ours, theirs]) => Channel::of_double(given.take(ours)?, given.take(theirs)?)
                .map_err(|error| ControlError::io("the descriptors are no channel of a double", &error))?,
            None => Channel::Xen(EventDevice::bind(front.domid, queue.port).map_err(|error| {
                ControlError::io(
                    format_args!("cannot bind event channel {} of domain {}", queue.port, front.domid),
                    &error,
                )
                .next("on a Xen host load xen-evtchn; the domain must have offered that port")
            })?),
        };
        Ok(BlkifRing {
            pages: grants(&queue.ring),
            responses: grants(&queue.responses),
            port: queue.port,
            channel,
        })
    };
    front.queues.iter().map(make).collect()
}

/// Where requests in flight are noted.
fn record(front: &BlkifFront) -> Option<PathBuf> {
    match ShmRoot::from_env().under_way() {
        Ok(dir) => Some(dir.join(format!("{}-{}", front.domid, front.devid))),
        Err(error) => {
            log::line(&format!(
                "{front}: requests in flight are not noted, and end with this process: {error}"
            ));
            None
        }
    }
}

impl Blkif {
    /// Connects the rings of a guest's device, which counts in `slot`.
    pub fn connect(front: &BlkifFront, fds: Vec<OwnedFd>, remote: DiskHandle, slot: usize) -> Result<Self> {
        let mut given = Given(fds.into_iter().map(Some).collect());
        let domain = domain(front, &mut given)?;
        let rings = rings(front, &mut given)?;
        let on_ring: OnRing = Box::new(move |state, now_ns| Counter::ring_of(slot, state, now_ns));
        let options = BlkifOptions {
            domain,
            abi: match front.protocol {
                BlkifProtocol::X86_32 => Abi::X86_32,
                BlkifProtocol::X86_64 => Abi::X86_64,
            },
            rings,
            movement: front.movement,
            max_indirect: front.max_indirect,
            sector_size: front.sector_size,
            read_only: front.read_only,
            record: record(front),
            start: match front.start {
                RingStart::Auto => Start::Auto,
                RingStart::Fresh => Start::Fresh,
                RingStart::Resume => Start::Resume,
            },
            log: {
                let name = front.address();
                Arc::new(move |line| log::line(&format!("{name}: {line}")))
            },
            on_ring: Some(on_ring),
        };
        let pool = match &front.pool {
            Some(pool) => pool.clone(),
            None => {
                let asked =
                    remote.call(REPLY_TIMEOUT, |data_thread| data_thread.status().pool.map(|pool| pool.name));
                asked.ok().flatten().unwrap_or_default()
            }
        };
        let server = BlkifServer::connect(options, remote.clone())
            .map_err(|error| ControlError::io(format_args!("cannot serve {front}"), &error))?;
        Ok(Self { server, front: front.clone(), pool, remote, slot, only_copied: None })
    }

    /// Whether the storage gets pages of the guest.
    pub const fn maps_pages(&self) -> bool {
        maps_pages(self.front.movement)
    }

    /// What it is called in messages.
    pub fn name(&self) -> String {
        self.front.address()
    }

    /// Rings that are served.
    pub fn connections(&self) -> u32 {
        self.server
            .state()
            .map_or(0, |state| state.rings.iter().filter(|ring| ring.broken.is_none()).count() as u32)
    }

    /// How it is doing.
    pub fn report(&self) -> BlkifReport {
        let rings = self.server.state().map_or_else(|_| Vec::new(), |state| state.rings);
        let mut counts = BlkifCounts::default();
        for ring in &rings {
            add(&mut counts, &ring.counts);
        }
        BlkifReport {
            domid: self.front.domid,
            devid: self.front.devid,
            pool: self.pool.clone(),
            movement: self.front.movement,
            only_copied: self.only_copied.clone(),
            counts,
            rings: rings.iter().map(ring_report).collect(),
        }
    }

    /// Ends it: what is in flight is answered first.
    pub fn end(self) {
        let name = self.front.address();
        if !self.server.close() {
            log::line(&format!(
                "{name}: requests have no answer; the process that serves it next repeats them"
            ));
        }
        let slot = self.slot;
        // A disk that is gone has no counters.
        let _ = self.remote.call(REPLY_TIMEOUT, move |_| Counter::no_ring(slot));
    }
}

fn ring_report(ring: &QueueReport) -> RingReport {
    RingReport {
        state: ring.counters,
        oldest: ring
            .oldest
            .iter()
            .map(|request| BlkifRequest {
                id: request.id,
                op: request.op,
                sector: request.sector,
                sectors: request.sectors,
                age_us: request.age_ns / 1000,
            })
            .collect(),
        in_flight: ring.in_flight as u32,
        broken: ring.broken.as_ref().map(ToString::to_string),
    }
}

fn add(sum: &mut BlkifCounts, counts: &QueueCounts) {
    let [message, map, disk] = counts.errors;
    let (moves, pages) = (&counts.moves, &counts.persistent);
    for (sum, count) in [
        (&mut sum.requests, counts.requests),
        (&mut sum.responses, counts.responses),
        (&mut sum.repeated, counts.repeated),
        (&mut sum.kicks_in, counts.kicks_in),
        (&mut sum.kicks_out, counts.kicks_out),
        (&mut sum.errors_message, message),
        (&mut sum.errors_map, map),
        (&mut sum.errors_disk, disk),
        (&mut sum.copy_calls, moves.copy_calls),
        (&mut sum.copied_segments, moves.copied_segments),
        (&mut sum.copied_bytes, moves.copied_bytes),
        (&mut sum.maps, moves.maps),
        (&mut sum.mapped_pages, moves.mapped_pages),
        (&mut sum.persistent_hits, pages.hits),
        (&mut sum.persistent_misses, pages.misses),
        (&mut sum.persistent_evictions, pages.evictions),
    ] {
        *sum += count;
    }
}
