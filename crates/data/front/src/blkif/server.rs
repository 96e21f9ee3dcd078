//! A device of a guest as the control thread holds it.

use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tapio_block::{DiskHandle, Gone};
use tapio_types::Movement;
use tapio_xen::blkif::{Abi, BackRing};
use tapio_xen::{Channel, Domain, GrantRef, Mapped, Rights};

use super::device::{self, Device};
use super::queue::{Queue, QueueSetup};
use super::record::Record;
use super::report::QueueReport;
use super::{Log, OnRing};

/// The data thread answers questions within this time, or it is gone.
const CALL_MAX: Duration = Duration::from_secs(10);
/// Requests in flight end within this time, or their storage is stuck.
const DRAIN_MAX: Duration = Duration::from_secs(30);
/// Requests of a ring that a report names.
const OLDEST_MAX: usize = 8;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What is done about requests that a former process took and did not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// They are repeated if they are of these very rings.
    #[default]
    Auto,
    /// The rings are new ones: they are forgotten.
    Fresh,
    /// They are repeated; those of other rings are an error.
    Resume,
}

/// A ring of a device.
#[derive(Debug)]
pub struct BlkifRing {
    /// Grants of its pages.
    pub pages: Vec<GrantRef>,
    /// Grants of the pages of its responses, where those have pages of their own.
    pub responses: Vec<GrantRef>,
    /// The guest's end of the event channel, as a number.
    pub port: u32,
    /// Our end.
    pub channel: Channel,
}

/// What a device is and how it is served.
pub struct BlkifOptions {
    /// The guest.
    pub domain: Domain,
    /// Layout of the rings.
    pub abi: Abi,
    /// The rings.
    pub rings: Vec<BlkifRing>,
    /// How data is moved.
    pub movement: Movement,
    /// Segments of an indirect request, at most.
    pub max_indirect: u16,
    /// Bytes of a sector as the guest was told: 512 or 4096.
    pub sector_size: u32,
    /// Refuse everything that changes the disk. A disk that is read-only itself is always served so.
    pub read_only: bool,
    /// Where requests in flight are noted; without a record they are forgotten with the process.
    pub record: Option<PathBuf>,
    /// What is done about those of a former process.
    pub start: Start,
    /// Where a line goes that an operator should see.
    pub log: Log,
    /// Told where the rings stand.
    pub on_ring: Option<OnRing>,
}

impl std::fmt::Debug for BlkifOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlkifOptions")
            .field("domain", &self.domain)
            .field("rings", &self.rings)
            .field("movement", &self.movement)
            .finish_non_exhaustive()
    }
}

/// How a device is doing.
#[derive(Clone, Debug)]
pub struct BlkifState {
    /// Its rings.
    pub rings: Vec<QueueReport>,
}

/// A connected device of a guest. Ends when dropped.
#[derive(Debug)]
pub struct BlkifServer {
    remote: DiskHandle,
    id: u64,
    record: Option<Record>,
    ended: bool,
}

/// A number for what a ring is made of: another ring has another.
fn identity(domid: u32, abi: Abi, ring: &BlkifRing) -> u64 {
    // FNV-1a: no defence against an attacker is needed, the record is ours.
    let grants = |grants: &[GrantRef]| grants.iter().map(|grant| u64::from(grant.0)).collect::<Vec<_>>();
    let mut words =
        vec![u64::from(domid), abi.request_len() as u64, u64::from(ring.port), ring.pages.len() as u64];
    words.extend(grants(&ring.pages));
    words.extend(grants(&ring.responses));
    words
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// A ring, mapped, and its identity.
struct Prepared {
    ring: BackRing,
    channel: Channel,
    identity: u64,
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn prepare(domain: &Domain, abi: Abi, rings: Vec<BlkifRing>) -> io::Result<Vec<Prepared>> {
    let map = |grants: &[GrantRef], index: usize| -> io::Result<Mapped> {
        domain.map(grants, Rights::Write).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("ring {index} of domain {}: its pages cannot be mapped: {error}", domain.id()),
            )
        })
    };
    let make = |(index, ring): (usize, BlkifRing)| {
        let identity = identity(domain.id(), abi, &ring);
        let pages = map(&ring.pages, index)?;
        let made = if ring.responses.is_empty() {
            BackRing::new(pages, abi)
        } else if abi == Abi::X86_64 {
            BackRing::new_split(pages, map(&ring.responses, index)?)
        } else {
            return Err(invalid(format!("ring {index}: a ring of responses alone has the 64-bit layout")));
        };
        let ring_made = made.map_err(|error| invalid(format!("ring {index}: {error}")))?;
        Ok(Prepared { ring: ring_made, channel: ring.channel, identity })
    };
    rings.into_iter().enumerate().map(make).collect()
}

impl BlkifServer {
    /// Connects the rings of a guest's device to the disk behind `remote`.
    ///
    /// # Errors
    /// The guest does not grant its rings, they make no sense, another process serves the device, or the disk is gone.
    pub fn connect(options: BlkifOptions, remote: DiskHandle) -> io::Result<Self> {
        let BlkifOptions { domain, abi, rings, movement, max_indirect, sector_size, read_only, .. } = options;
        let mut prepared = prepare(&domain, abi, rings)?;
        let Some(entries) = prepared.iter().map(|one| one.ring.size()).max() else {
            return Err(invalid("a device without rings".into()));
        };
        let count = prepared.len() as u32;
        let record = match &options.record {
            Some(path) => Record::open(path, count, entries, options.start != Start::Fresh)?,
            None => Record::private(count, entries)?,
        };
        let mut starts = Vec::new();
        for (index, one) in prepared.iter_mut().enumerate() {
            let mut part = record.queue(index as u32);
            let rsp_prod = one.ring.next_response();
            let left = match record.is_inherited() {
                true => part.recover(one.identity, rsp_prod),
                false => {
                    part.begin(one.identity, rsp_prod);
                    Ok(Vec::new())
                }
            };
            let left = left.map_err(|mismatch| mismatch.to_string()).and_then(|left| {
                one.ring.resume(left.len() as u32).map(|()| left).map_err(|error| error.to_string())
            });
            let left = match left {
                Ok(left) => left,
                Err(why) if options.start == Start::Resume => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, format!("ring {index}: {why}")));
                }
                Err(why) => {
                    (options.log)(&format!("ring {index}: {why}; they are forgotten"));
                    part.begin(one.identity, rsp_prod);
                    Vec::new()
                }
            };
            starts.push((part, left));
        }
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (log, on_ring) = (options.log, options.on_ring);
        let attached = remote.call(CALL_MAX, move |data_thread| {
            let domain = Rc::new(domain);
            let mut queues = Vec::new();
            for (index, (one, (record, repeat))) in prepared.into_iter().zip(starts).enumerate() {
                let channel = Rc::new(one.channel);
                let setup = QueueSetup {
                    index,
                    ring: one.ring,
                    channel: Rc::clone(&channel),
                    domain: Rc::clone(&domain),
                    movement,
                    pool: data_thread.uring.pool().clone(),
                    record,
                    repeat,
                    max_indirect,
                    sector_size,
                    read_only,
                };
                queues.push((Rc::new(Queue::new(setup, data_thread.port.client())), channel));
            }
            Device::attach(data_thread, id, queues, log, on_ring);
        });
        attached.map_err(|gone| io::Error::new(io::ErrorKind::NotConnected, gone.to_string()))?;
        Ok(Self { remote, id, record: Some(record), ended: false })
    }

    /// How it is doing.
    ///
    /// # Errors
    /// The data thread is gone.
    pub fn state(&self) -> Result<BlkifState, Gone> {
        let id = self.id;
        self.remote.call(CALL_MAX, move |data_thread| {
            let queues = device::find(id).map_or_else(Vec::new, |device| {
                device.tell(None);
                device.queues()
            });
            let now_ns = data_thread.port.tasks().turn_ns();
            BlkifState { rings: queues.iter().map(|queue| queue.report(now_ns, OLDEST_MAX)).collect() }
        })
    }

    /// Ends it: nothing new is taken, what is in flight is answered, memory and event channels are let go. Where a
    /// storage is stuck, its requests are left unanswered. Whether everything was answered.
    pub fn close(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        if std::mem::replace(&mut self.ended, true) {
            return true;
        }
        let id = self.id;
        let drained = self.remote.call_async(DRAIN_MAX, move |_| async move {
            let queues = device::find(id).map_or_else(Vec::new, |device| device.queues());
            for queue in &queues {
                queue.halt();
            }
            for queue in &queues {
                queue.settled().await;
            }
        });
        let clean = self.remote.call(CALL_MAX, move |data_thread| Device::remove(data_thread, id));
        let clean = drained.is_ok() && clean == Ok(true);
        if let Some(record) = self.record.take().filter(|_| clean) {
            // With something in flight it stays: the next process that serves the rings repeats that.
            record.remove();
        }
        clean
    }
}

impl Drop for BlkifServer {
    fn drop(&mut self) {
        self.end();
    }
}
