//! The other side: a driver that uses a vhost-user-blk device, without a guest.
//!
//! It is the load generator of benchmarks and the double of a guest in tests. Memory is a memfd of its own; each queue
//! has a fixed number of slots with a buffer each, so that nothing is allocated per request. Errors of the protocol are
//! `io::Error`s with a sentence.

mod dirty;
mod queue;
mod ring;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tapio_sys::poll::{self, PollFd, PollFlags};

use super::blk::{SEG_MAX, feature};
use super::channel::Channel;
use super::event::eventfd;
use super::inflight::InflightRegion;
use super::memory::{Mapping, memfd};
use super::message::{Header, InflightSpec, RegionSpec, config_payload, id, protocol};

pub use super::chain::Descriptor;
pub use dirty::DirtyPages;
pub use queue::{Command, Completion, DriverQueue};

/// Answers of a back end come within this time. Stopping a queue waits for its requests.
const REPLY_MAX: Duration = Duration::from_secs(40);
/// Where the guest of ours sees its memory.
const GUEST_BASE: u64 = 0x4000_0000;
/// Where the front end of ours pretends to have it mapped.
const USER_BASE: u64 = 0x7000_0000_0000;
/// Bytes of the configuration space that are asked for.
const CONFIG_LEN: usize = 60;

/// How to use a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverOptions {
    /// Queues.
    pub queues: u16,
    /// Descriptors of each queue, a power of two.
    pub queue_size: u16,
    /// Requests in flight on each queue, at most.
    pub depth: u16,
    /// Bytes of the buffer of each request.
    pub buffer_len: u32,
    /// Data goes in pieces of this length; 0: in one piece.
    pub piece_len: u32,
    /// Feature bits that are used if the device offers them.
    pub features: u64,
    /// Use the in-flight region if the device has one.
    pub inflight: bool,
    /// Guest memory is given region by region rather than as one table.
    pub memory_slots: bool,
}

impl Default for DriverOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 128,
            depth: 32,
            buffer_len: 64 << 10,
            piece_len: 0,
            features: !(feature::CONFIG_WCE | feature::RING_PACKED),
            inflight: false,
            memory_slots: false,
        }
    }
}

/// Guest memory of ours.
#[derive(Debug)]
pub(crate) struct Memory {
    file: OwnedFd,
    mapping: Mapping,
}

impl Memory {
    fn new(len: u64) -> io::Result<Self> {
        let file = memfd(c"vhost-user-driver", len)?;
        let mapping =
            Mapping::new(file.as_fd(), 0, len).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self { file, mapping })
    }

    /// The pointer to `len` bytes at `offset`.
    pub(crate) fn at(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.mapping.len()),
            "outside the driver's memory"
        );
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.mapping.as_ptr().add(offset as usize) }
    }
}

/// Where the parts of a queue lie in memory, as offsets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    /// Header, status, ranges and indirect table of each slot.
    pub control: u64,
    pub buffers: u64,
    pub end: u64,
}

/// Bytes of control memory of a slot: header, status and 32 ranges in the first 1024, the indirect table in the rest.
pub(crate) const CONTROL_LEN: u64 = 1024 + 16 * (SEG_MAX as u64 + 2);

impl Layout {
    fn new(start: u64, options: &DriverOptions) -> Self {
        let size = u64::from(options.queue_size);
        let page = |at: u64| at.next_multiple_of(4096);
        let desc = page(start);
        let avail = page(desc + 16 * size);
        let used = page(avail + 6 + 2 * size);
        let control = page(used + 6 + 8 * size);
        let buffers = page(control + CONTROL_LEN * u64::from(options.depth));
        let end = page(buffers + page(options.buffer_len.into()) * u64::from(options.depth));
        Self { desc, avail, used, control, buffers, end }
    }
}

/// A connection to a back end.
#[derive(Debug)]
pub struct Driver {
    channel: Channel,
    /// Never signalled: waits end by their deadlines.
    quiet: OwnedFd,
    options: DriverOptions,
    memory: Arc<Memory>,
    layouts: Vec<Layout>,
    features: u64,
    protocol: u64,
    config: Vec<u8>,
    inflight: Option<(InflightSpec, Arc<OwnedFd>)>,
    log: Option<Arc<dirty::LogFile>>,
}

fn protocol_error(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl Driver {
    /// Connects, negotiates and shares memory. Queues are started by [`Driver::start`].
    pub fn connect(path: &Path, options: DriverOptions) -> io::Result<Self> {
        let mut layouts = Vec::new();
        let mut end = 0;
        for _ in 0..options.queues {
            let layout = Layout::new(end, &options);
            end = layout.end;
            layouts.push(layout);
        }
        let memory = Arc::new(Memory::new(end)?);
        Self::with_memory(path, options, memory, layouts, None)
    }

    fn with_memory(
        path: &Path,
        options: DriverOptions,
        memory: Arc<Memory>,
        layouts: Vec<Layout>,
        inflight: Option<(InflightSpec, Arc<OwnedFd>)>,
    ) -> io::Result<Self> {
        let channel = Channel::new(UnixStream::connect(path)?.into());
        let (features, protocol, config) = (0, 0, Vec::new());
        let quiet = eventfd()?;
        let mut driver = Self {
            channel,
            quiet,
            options,
            memory,
            layouts,
            features,
            protocol,
            config,
            inflight,
            log: None,
        };
        driver.negotiate()?;
        driver.share_memory()?;
        driver.share_inflight()?;
        Ok(driver)
    }

    /// Connects anew, with the memory and the in-flight region as they are: what a front end does when its back end
    /// was restarted.
    /// When it fails, it can be tried again.
    pub fn reconnect(&mut self, path: &Path) -> io::Result<()> {
        // A back end serves one front end at a time.
        // A socket that is gone already does not mind.
        let _ = rustix::net::shutdown(self.channel.as_fd(), rustix::net::Shutdown::Both);
        let inflight = self.inflight.as_ref().map(|(spec, fd)| (*spec, Arc::clone(fd)));
        let (memory, layouts) = (Arc::clone(&self.memory), self.layouts.clone());
        *self = Self::with_memory(path, self.options.clone(), memory, layouts, inflight)?;
        Ok(())
    }

    /// Whether the back end has closed the connection, or died.
    pub fn is_lost(&self) -> bool {
        let mut polled = [PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::RDHUP)];
        poll::any(&mut polled, Some(Duration::ZERO)).unwrap_or(false)
    }

    /// The options.
    pub fn options(&self) -> &DriverOptions {
        &self.options
    }

    /// The feature bits in force.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The configuration space as it was at the start.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// Bytes of the disk.
    pub fn capacity(&self) -> u64 {
        self.config.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)) * 512
    }

    /// Reads the configuration space again.
    pub fn read_config(&self) -> io::Result<Vec<u8>> {
        let payload = config_payload(0, 0, &[0; CONFIG_LEN]);
        let (reply, _) = self.ask(id::GET_CONFIG, &payload, &[])?;
        reply
            .get(12..12 + CONFIG_LEN)
            .map(<[u8]>::to_vec)
            .ok_or_else(|| protocol_error(format!("a configuration space of {} bytes came", reply.len())))
    }

    /// Writes bytes of the configuration space.
    pub fn write_config(&self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        self.tell(id::SET_CONFIG, &config_payload(offset, 0, bytes), &[])
    }

    /// Starts queue `index` with an empty ring.
    pub fn start(&self, index: u16) -> io::Result<DriverQueue> {
        let layout = self.layouts[usize::from(index)];
        let queue = DriverQueue::new(
            Arc::clone(&self.memory),
            layout,
            &self.options,
            self.features,
            GUEST_BASE,
            (eventfd()?, eventfd()?, eventfd()?),
        );
        self.resume(index, &queue, queue.base())?;
        Ok(queue)
    }

    /// Starts a queue that was stopped or lost its back end; the ring is read on at `base`.
    pub fn resume(&self, index: u16, queue: &DriverQueue, base: u32) -> io::Result<()> {
        let place = index;
        let index = u32::from(index);
        let state = |value: u32| [index.to_ne_bytes(), value.to_ne_bytes()].concat();
        self.tell(id::SET_VRING_NUM, &state(self.options.queue_size.into()), &[])?;
        self.tell(id::SET_VRING_BASE, &state(base), &[])?;
        self.set_addresses(place)?;
        let number = u64::from(index).to_ne_bytes();
        let (kick, call, err) = queue.descriptors();
        self.tell(id::SET_VRING_ERR, &number, &[err])?;
        self.tell(id::SET_VRING_CALL, &number, &[call])?;
        self.tell(id::SET_VRING_KICK, &number, &[kick])?;
        if self.features & feature::PROTOCOL_FEATURES != 0 {
            self.tell(id::SET_VRING_ENABLE, &state(1), &[])?;
        }
        Ok(())
    }

    /// Sends where a ring is, and whether writes to it are logged.
    fn set_addresses(&self, index: u16) -> io::Result<()> {
        let layout = self.layouts[usize::from(index)];
        let log = u32::from(self.log.is_some());
        let mut addresses = [u32::from(index).to_ne_bytes(), log.to_ne_bytes()].concat();
        for offset in [layout.desc, layout.used, layout.avail] {
            addresses.extend_from_slice(&(USER_BASE + offset).to_ne_bytes());
        }
        addresses.extend_from_slice(&(GUEST_BASE + layout.used).to_ne_bytes());
        self.tell(id::SET_VRING_ADDR, &addresses, &[])
    }

    /// Stops a queue, after what is in flight; gives where the ring is to be read on.
    pub fn stop(&self, index: u16) -> io::Result<u32> {
        let payload = [u32::from(index).to_ne_bytes(), [0; 4]].concat();
        let (reply, _) = self.ask(id::GET_VRING_BASE, &payload, &[])?;
        let base = reply.get(4..8).and_then(<[u8]>::first_chunk).map(|bytes| u32::from_ne_bytes(*bytes));
        base.ok_or_else(|| protocol_error(format!("no ring index in {reply:?}")))
    }

    /// Allows or forbids a queue to take requests.
    pub fn enable(&self, index: u16, enable: bool) -> io::Result<()> {
        let payload = [u32::from(index).to_ne_bytes(), u32::from(enable).to_ne_bytes()].concat();
        self.tell(id::SET_VRING_ENABLE, &payload, &[])
    }

    /// Shares the memory again, as a front end does whose memory layout has changed.
    pub fn share_memory(&self) -> io::Result<()> {
        let len = self.memory.mapping.len();
        let fd = self.memory.file.as_fd();
        let region = RegionSpec { guest: GUEST_BASE, len, user: USER_BASE, offset: 0 };
        if self.options.memory_slots && self.protocol & protocol::CONFIGURE_MEM_SLOTS != 0 {
            // In two halves, so that buffers cross from one region into the next.
            let half = (len / 2).next_multiple_of(4096);
            let low = RegionSpec { len: half, ..region };
            let high = RegionSpec {
                guest: region.guest + half,
                len: len - half,
                user: region.user + half,
                offset: half,
            };
            for region in [low, high] {
                let payload = [&[0; 8][..], &region.to_bytes()].concat();
                self.tell(id::ADD_MEM_REG, &payload, &[fd])?;
            }
            return Ok(());
        }
        let payload = [&1u32.to_ne_bytes()[..], &[0; 4], &region.to_bytes()].concat();
        self.tell(id::SET_MEM_TABLE, &payload, &[fd])
    }

    /// Sends any message, with any descriptors: for tests of back ends.
    pub fn send_raw(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.channel.send(Header::request(request, payload.len() as u32, false), payload, fds)
    }

    /// Marks requests as in flight in the region, as a back end does that took them and died: for tests of back ends.
    pub fn mark_in_flight(&self, index: u16, heads: &[u16]) -> io::Result<()> {
        let Some((spec, fd)) = &self.inflight else { return Ok(()) };
        let region = InflightRegion::map(*spec, fd).map_err(protocol_error)?;
        if self.features & feature::RING_PACKED != 0 {
            return Err(protocol_error("requests of a packed ring are not marked by heads".to_owned()));
        }
        if let Some(mut queue) = region.queue(index.into(), self.options.queue_size) {
            heads.iter().for_each(|head| queue.begin(*head));
        }
        Ok(())
    }

    fn negotiate(&mut self) -> io::Result<()> {
        let offered = self.number(id::GET_FEATURES)?;
        if offered & feature::VERSION_1 == 0 || offered & feature::PROTOCOL_FEATURES == 0 {
            return Err(protocol_error(format!("the device offers only the features {offered:#x}")));
        }
        self.tell_quietly(id::SET_OWNER, &[], &[])?;
        let wanted = protocol::MQ
            | protocol::REPLY_ACK
            | protocol::CONFIG
            | protocol::BACKEND_REQ
            | protocol::LOG_SHMFD
            | if self.options.inflight { protocol::INFLIGHT_SHMFD } else { 0 }
            | if self.options.memory_slots { protocol::CONFIGURE_MEM_SLOTS } else { 0 };
        self.protocol = self.number(id::GET_PROTOCOL_FEATURES)? & wanted;
        self.tell_quietly(id::SET_PROTOCOL_FEATURES, &self.protocol.to_ne_bytes(), &[])?;
        if self.options.queues > 1 {
            let queues = self.number(id::GET_QUEUE_NUM)?;
            if queues < self.options.queues.into() {
                return Err(protocol_error(format!("the device has only {queues} queues")));
            }
        }
        let known = feature::VERSION_1
            | feature::PROTOCOL_FEATURES
            | feature::SEG_MAX
            | feature::RO
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::TOPOLOGY
            | feature::CONFIG_WCE
            | feature::MQ
            | feature::DISCARD
            | feature::WRITE_ZEROES
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::RING_PACKED;
        let must = feature::VERSION_1 | feature::PROTOCOL_FEATURES;
        self.features = offered & known & (self.options.features | must);
        self.tell(id::SET_FEATURES, &self.features.to_ne_bytes(), &[])?;
        self.config = self.read_config()?;
        Ok(())
    }

    fn share_inflight(&mut self) -> io::Result<()> {
        if self.protocol & protocol::INFLIGHT_SHMFD == 0 {
            return Ok(());
        }
        if self.inflight.is_none() {
            let spec = InflightSpec {
                len: 0,
                offset: 0,
                queues: self.options.queues,
                queue_size: self.options.queue_size,
            };
            let (reply, mut fds) = self.ask(id::GET_INFLIGHT_FD, &spec.to_bytes(), &[])?;
            let len = reply.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
            let (Some(len), Some(fd)) = (len, fds.pop()) else {
                return Err(protocol_error("no in-flight region came".to_owned()));
            };
            self.inflight = Some((InflightSpec { len, ..spec }, Arc::new(fd)));
        }
        match &self.inflight {
            Some((spec, fd)) => self.tell(id::SET_INFLIGHT_FD, &spec.to_bytes(), &[fd.as_fd()]),
            None => Ok(()),
        }
    }

    fn number(&self, request: u32) -> io::Result<u64> {
        let (reply, _) = self.ask(request, &[], &[])?;
        reply.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes)).ok_or_else(|| {
            protocol_error(format!("message {request} was answered with {} bytes", reply.len()))
        })
    }

    fn ask(
        &self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        self.channel.send(Header::request(request, payload.len() as u32, false), payload, fds)?;
        self.answer(request)
    }

    fn answer(&self, request: u32) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let (header, payload, fds) = self
            .channel
            .receive_reply(REPLY_MAX, self.quiet.as_fd())
            .map_err(|error| protocol_error(format!("message {request}: {error}")))?;
        if header.request != request || !header.is_reply() {
            return Err(protocol_error(format!("message {request} was answered by {header:?}")));
        }
        Ok((payload, fds))
    }

    fn tell_quietly(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.channel.send(Header::request(request, payload.len() as u32, false), payload, fds)
    }

    /// Sends a message that has no answer of its own, and waits until it was obeyed.
    fn tell(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let ack = self.protocol & protocol::REPLY_ACK != 0;
        self.channel.send(Header::request(request, payload.len() as u32, ack), payload, fds)?;
        if !ack {
            return Ok(());
        }
        let (reply, _) = self.answer(request)?;
        if reply == 0u64.to_ne_bytes() {
            Ok(())
        } else {
            Err(protocol_error(format!("message {request} was refused")))
        }
    }
}
