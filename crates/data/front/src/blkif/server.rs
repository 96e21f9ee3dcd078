//! A device of a guest as the control thread holds it.

use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use tapio_block::{DataThread, DiskHandle, Gone, QueueHandle};
use tapio_types::Movement;
use tapio_xen::blkif::{Abi, BackRing};
use tapio_xen::{Channel, Domain, GrantRef, Mapped, Rights};

use super::device::{self, Device, Telling};
use super::queue::{Queue, QueueSetup};
use super::record::{Left, Record, RecordQueue};
use super::report::QueueReport;
use super::standing::Standing;
use super::{Log, OnRing};

/// A thread of the disk answers questions within this time, or it is gone.
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
    id: u64,
    /// The threads that serve its rings, the disk's owner first.
    threads: Vec<QueueHandle>,
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

/// A ring that can be served, on its way to its thread.
struct Ready {
    index: usize,
    ring: BackRing,
    channel: Channel,
    record: RecordQueue,
    repeat: Left,
}

/// What the rings of a device have in common.
#[derive(Clone)]
struct Common {
    domain: Domain,
    movement: Movement,
    max_indirect: u16,
    sector_size: u32,
    read_only: bool,
    log: Log,
}

impl Common {
    /// Has a thread serve `rings` of device `id`. Runs on that thread.
    fn attach(self, thread: &DataThread, id: u64, rings: Vec<Ready>, telling: Telling) {
        let domain = Rc::new(self.domain);
        let make = |ready: Ready| {
            let channel = Rc::new(ready.channel);
            let setup = QueueSetup {
                index: ready.index,
                ring: ready.ring,
                channel: Rc::clone(&channel),
                domain: Rc::clone(&domain),
                movement: self.movement,
                pool: thread.uring.pool().clone(),
                record: ready.record,
                repeat: ready.repeat,
                max_indirect: self.max_indirect,
                sector_size: self.sector_size,
                read_only: self.read_only,
            };
            (Rc::new(Queue::new(setup, thread.port.client())), channel)
        };
        let queues = rings.into_iter().map(make).collect();
        Device::attach(thread, id, queues, self.log, telling);
    }
}

/// The threads that serve `count` rings, the disk's owner first. Ring `n` is that of thread `n` modulo their number.
fn threads(remote: &DiskHandle, count: usize) -> Vec<QueueHandle> {
    let mut threads = vec![remote.queue(0)];
    while threads.len() < count.min(remote.threads_max()) {
        match remote.queue(threads.len()) {
            // There is no other one to be had: as many as there are serve all rings.
            QueueHandle::Owner(_) => break,
            queue @ QueueHandle::Queue(_) => threads.push(queue),
        }
    }
    threads
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
        let prepared = prepare(&domain, abi, rings)?;
        let Some(entries) = prepared.iter().map(|one| one.ring.size()).max() else {
            return Err(invalid("a device without rings".into()));
        };
        let count = prepared.len() as u32;
        let record = match &options.record {
            Some(path) => Record::open(path, count, entries, options.start != Start::Fresh)?,
            None => Record::private(count, entries)?,
        };
        let mut ready = Vec::new();
        for (index, mut one) in prepared.into_iter().enumerate() {
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
            let repeat = match left {
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
            ready.push(Ready { index, ring: one.ring, channel: one.channel, record: part, repeat });
        }
        let common = Common { domain, movement, max_indirect, sector_size, read_only, log: options.log };
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let mut server = Self { id, threads: Vec::new(), record: None, ended: false };
        let attached = server.attach(&remote, &common, ready, options.on_ring);
        attached.map_err(|gone| io::Error::new(io::ErrorKind::NotConnected, gone.to_string()))?;
        // Not before: where a thread is missing, what a former process left for its rings stays.
        server.record = Some(record);
        Ok(server)
    }

    /// Gives each ring to its thread.
    fn attach(
        &mut self,
        remote: &DiskHandle,
        common: &Common,
        rings: Vec<Ready>,
        on_ring: Option<OnRing>,
    ) -> Result<(), Gone> {
        let threads = threads(remote, rings.len());
        let mut parts: Vec<Vec<Ready>> = threads.iter().map(|_| Vec::new()).collect();
        for ring in rings {
            parts[ring.index % threads.len()].push(ring);
        }
        let others = threads.len() - 1;
        let others = (others > 0 && on_ring.is_some()).then(|| Standing::new(others, remote.waker()));
        let mut on_ring = on_ring;
        for (number, (thread, rings)) in threads.into_iter().zip(parts).enumerate() {
            let telling = match (on_ring.take(), &others) {
                (Some(on_ring), others) => Telling::Here { on_ring, others: others.clone() },
                (None, Some(standing)) => Telling::Owner { standing: Arc::clone(standing), part: number - 1 },
                (None, None) => Telling::Nowhere,
            };
            let (id, common) = (self.id, common.clone());
            thread.call(CALL_MAX, move |thread| common.attach(thread, id, rings, telling))?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// How it is doing.
    ///
    /// # Errors
    /// A thread of the disk is gone.
    pub fn state(&self) -> Result<BlkifState, Gone> {
        let id = self.id;
        let mut rings = Vec::new();
        // The owner comes last, and tells what the others have said.
        for thread in self.threads.iter().rev() {
            let reports = move |_: &DataThread| {
                device::find(id).map_or_else(Vec::new, |device| {
                    device.tell(None);
                    device.reports(OLDEST_MAX)
                })
            };
            rings.extend(thread.call(CALL_MAX, reports)?);
        }
        rings.sort_unstable_by_key(|(index, _)| *index);
        Ok(BlkifState { rings: rings.into_iter().map(|(_, report)| report).collect() })
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
        let deadline = Instant::now() + DRAIN_MAX;
        let (settled, all_settled) = sync_channel(self.threads.len());
        // On all threads at once: none waits for a storage that another waits for too.
        let mut clean = true;
        for thread in &self.threads {
            let settled = settled.clone();
            let halted = thread.call(CALL_MAX, move |thread| {
                let queues = device::find(id).map_or_else(Vec::new, |device| device.queues());
                for queue in &queues {
                    queue.halt();
                }
                thread.port.tasks().spawn(async move {
                    for queue in &queues {
                        queue.settled().await;
                    }
                    // Unless the caller has stopped waiting.
                    let _ = settled.send(());
                });
            });
            clean &= halted.is_ok();
        }
        drop(settled);
        for _ in &self.threads {
            let left = deadline.saturating_duration_since(Instant::now());
            clean &= all_settled.recv_timeout(left).is_ok();
        }
        for thread in &self.threads {
            clean &= thread.call(CALL_MAX, move |thread| Device::remove(thread, id)) == Ok(true);
        }
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
