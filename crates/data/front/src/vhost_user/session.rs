//! The control side of one connection: what each message does. Runs on the control thread of its server.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tapio_block::Gone;

use super::blk::{self, CONFIG_WRITEBACK, SERIAL_LEN, feature};
use super::device::DataSide;
use super::dirty::{DirtyLog, LOG_PAGE_LEN, Logging};
use super::event::{Kick, Notifier};
use super::inflight::{InflightPart, InflightRegion};
use super::memory::{GuestMemory, Mapping, MemoryError, REGIONS_MAX, Region};
use super::message::{InflightSpec, Message, RegionSpec, RingAddresses, protocol};
use super::queue::QueueSetup;
use super::ring_error::RingError;
use super::vring::QUEUE_SIZE_MAX;

/// The protocol features that we have.
pub const PROTOCOL_FEATURES: u64 = protocol::MQ
    | protocol::LOG_SHMFD
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS
    | protocol::STATUS;

/// What a session knows of its disk.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Queues, at most.
    pub queues: u16,
    /// Descriptors of a queue, at most.
    pub queue_size_max: u16,
    /// Refuse everything that changes the disk.
    pub read_only: bool,
    /// What `GET_ID` answers.
    pub serial: [u8; SERIAL_LEN],
}

/// Why a message was not obeyed. If the front end wanted an acknowledgement, that reports it; otherwise the connection
/// ends.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Refusal {
    /// Feature bits that were not offered.
    Features { offered: u64, wanted: u64 },
    /// A message that needs a feature which was not negotiated.
    NotNegotiated(&'static str),
    /// There is no such queue.
    QueueIndex { index: u32, count: u16 },
    /// A queue size, an index base, an offset that cannot be.
    Value { what: &'static str, value: u64 },
    /// The queue runs; this can change only while it stands.
    Running { index: usize, what: &'static str },
    /// Guest memory cannot be taken.
    Memory(MemoryError),
    /// A ring cannot be used.
    Ring { index: usize, error: RingError },
    /// A descriptor is of the wrong kind.
    Descriptor { what: &'static str, why: &'static str },
    /// The in-flight region or the dirty log cannot be used.
    Inflight(String),
    /// The data thread did not answer.
    Gone(Gone),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Features { offered, wanted } => {
                write!(f, "features {wanted:#x} were set, but only {offered:#x} were offered")
            }
            Self::NotNegotiated(what) => write!(f, "{what} was not negotiated"),
            Self::QueueIndex { index, count } => write!(f, "queue {index} was named; there are {count}"),
            Self::Value { what, value } => write!(f, "{what} of {value} is not possible"),
            Self::Running { index, what } => write!(f, "{what} of queue {index} cannot change while it runs"),
            Self::Memory(error) => error.fmt(f),
            Self::Ring { index, error } => write!(f, "queue {index}: {error}"),
            Self::Descriptor { what, why } => write!(f, "{what}: {why}"),
            Self::Inflight(why) => f.write_str(why),
            Self::Gone(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Refusal {}

impl From<Gone> for Refusal {
    fn from(error: Gone) -> Self {
        Self::Gone(error)
    }
}

impl From<MemoryError> for Refusal {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

/// The answer to a message.
#[derive(Debug, Default)]
pub struct Reply {
    /// The payload.
    pub payload: Vec<u8>,
    /// The descriptor that goes with it.
    pub fd: Option<OwnedFd>,
}

impl Reply {
    fn number(value: u64) -> Option<Self> {
        Some(Self { payload: value.to_ne_bytes().to_vec(), fd: None })
    }
}

/// What the front end has said about one queue.
#[derive(Debug, Default)]
struct Vring {
    size: u16,
    base: u32,
    addresses: Option<RingAddresses>,
    kick: Option<Kick>,
    call: Option<Arc<Notifier>>,
    err: Option<Arc<Notifier>>,
    enabled: bool,
    running: bool,
}

/// One connection.
#[derive(Debug)]
pub struct Session<D> {
    data: D,
    config: SessionConfig,
    offered: u64,
    features: u64,
    protocol: u64,
    memory: Arc<GuestMemory>,
    vrings: Vec<Vring>,
    inflight: Option<InflightRegion>,
    /// The dirty log of a migration, and how to tell of new bits in it.
    log: Option<Arc<Mapping>>,
    log_call: Option<Arc<Notifier>>,
    status: u64,
    /// The write-back byte of the configuration space.
    writeback: bool,
    backend: Option<OwnedFd>,
}

impl<D: DataSide> Session<D> {
    /// A connection that has said nothing yet.
    pub fn new(data: D, config: SessionConfig) -> Self {
        let vrings = (0..config.queues).map(|_| Vring::default()).collect();
        Self {
            offered: blk::features(config.read_only, config.queues),
            data,
            config,
            features: 0,
            protocol: 0,
            memory: Arc::new(GuestMemory::empty()),
            vrings,
            inflight: None,
            log: None,
            log_call: None,
            status: 0,
            writeback: true,
            backend: None,
        }
    }

    /// The data side.
    pub fn data(&self) -> &D {
        &self.data
    }

    /// The feature bits in force.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// How many queues run.
    pub fn running(&self) -> usize {
        self.vrings.iter().filter(|vring| vring.running).count()
    }

    /// Whether any message may ask for an acknowledgement.
    pub fn acknowledges(&self) -> bool {
        self.protocol & protocol::REPLY_ACK != 0
    }

    /// Takes the socket for our own requests, once it has come.
    pub fn take_backend(&mut self) -> Option<OwnedFd> {
        self.backend.take()
    }

    /// Obeys one message. `fds` are as many as [`Message::check_fds`] wants.
    pub fn handle(&mut self, message: Message, mut fds: Vec<OwnedFd>) -> Result<Option<Reply>, Refusal> {
        match message {
            Message::GetFeatures => return Ok(Reply::number(self.offered)),
            Message::SetFeatures(bits) => {
                if bits & !self.offered != 0 {
                    return Err(Refusal::Features { offered: self.offered, wanted: bits });
                }
                self.set_features(bits)?;
            }
            Message::GetProtocolFeatures => return Ok(Reply::number(PROTOCOL_FEATURES)),
            Message::SetProtocolFeatures(bits) => {
                if bits & !PROTOCOL_FEATURES != 0 {
                    return Err(Refusal::Features { offered: PROTOCOL_FEATURES, wanted: bits });
                }
                self.protocol = bits;
            }
            // Ownership has no meaning with one connection a device; RESET_OWNER is to be ignored.
            Message::SetOwner | Message::ResetOwner => {}
            Message::GetQueueNum => return Ok(Reply::number(self.config.queues.into())),
            Message::GetMaxMemSlots => return Ok(Reply::number(REGIONS_MAX as u64)),
            Message::SetMemTable(regions) => self.set_mem_table(&regions, &fds)?,
            Message::AddMemReg(spec) => self.add_region(spec, &fds)?,
            Message::RemMemReg(spec) => self.remove_region(spec)?,
            Message::SetLogBase { len, offset } => {
                self.set_log(offset, len, &fds)?;
                return Ok(Reply::number(0));
            }
            Message::SetLogFd => {
                self.needs(protocol::LOG_SHMFD, "the dirty log")?;
                self.log_call = notifier(fds.pop(), "a descriptor for news of the dirty log")?;
                self.apply_logging()?;
            }
            Message::SetVringNum { index, size } => self.set_size(index, size)?,
            Message::SetVringBase { index, base } => self.set_base(index, base)?,
            Message::SetVringAddr { index, addresses } => self.set_addresses(index, addresses)?,
            Message::GetVringBase { index } => return self.get_base(index).map(Some),
            Message::SetVringKick { index, .. } => self.set_kick(index.into(), fds.pop())?,
            Message::SetVringCall { index, .. } => self.set_call(index.into(), fds.pop())?,
            Message::SetVringErr { index, .. } => self.set_err(index.into(), fds.pop())?,
            Message::SetVringEnable { index, enable } => self.set_enable(index, enable)?,
            Message::SetBackendReqFd => {
                self.needs(protocol::BACKEND_REQ, "a socket for our requests")?;
                self.backend = fds.pop();
            }
            Message::GetConfig { offset, len, flags } => {
                return self.get_config(offset, len, flags).map(Some);
            }
            Message::SetConfig { offset, bytes, .. } => self.set_config(offset, &bytes)?,
            Message::GetInflightFd(spec) => return self.make_inflight(spec).map(Some),
            Message::SetInflightFd(spec) => self.set_inflight(spec, &fds)?,
            Message::ResetDevice => self.reset()?,
            Message::SetStatus(status) => {
                self.status = status & 0xff;
                // Writing 0 resets a virtio device.
                if self.status == 0 {
                    self.reset()?;
                }
            }
            Message::GetStatus => return Ok(Reply::number(self.status)),
        }
        Ok(None)
    }

    fn vring(&mut self, index: u32) -> Result<(usize, &mut Vring), Refusal> {
        let count = self.config.queues;
        match self.vrings.get_mut(index as usize) {
            Some(vring) => Ok((index as usize, vring)),
            None => Err(Refusal::QueueIndex { index, count }),
        }
    }

    fn standing(&mut self, index: u32, what: &'static str) -> Result<&mut Vring, Refusal> {
        let (index, vring) = self.vring(index)?;
        if vring.running { Err(Refusal::Running { index, what }) } else { Ok(vring) }
    }

    fn packed(&self) -> bool {
        self.features & feature::RING_PACKED != 0
    }

    /// Sent once to agree, and again by a migration that switches the log on or off under running queues.
    fn set_features(&mut self, bits: u64) -> Result<(), Refusal> {
        let kind = (bits ^ self.features) & feature::RING_PACKED != 0;
        if let Some(index) = self.vrings.iter().position(|vring| vring.running).filter(|_| kind) {
            return Err(Refusal::Running { index, what: "the kind" });
        }
        let log = (bits ^ self.features) & feature::LOG_ALL != 0;
        self.features = bits;
        self.apply_writeback()?;
        if log { self.apply_logging() } else { Ok(()) }
    }

    fn set_log(&mut self, offset: u64, len: u64, fds: &[OwnedFd]) -> Result<(), Refusal> {
        self.needs(protocol::LOG_SHMFD, "the dirty log")?;
        let Some(fd) = fds.first() else { return Ok(()) };
        self.check_log(len, self.memory.end())?;
        self.log = Some(Arc::new(DirtyLog::map(fd, offset, len).map_err(Refusal::Inflight)?));
        self.apply_logging()
    }

    /// A page without a bit would be lost on the way.
    fn check_log(&self, len: u64, memory_end: u64) -> Result<(), Refusal> {
        let want = memory_end.div_ceil(LOG_PAGE_LEN).div_ceil(8);
        if len < want {
            let why = format!("a dirty log of {len} bytes; memory up to {memory_end:#x} needs {want}");
            return Err(Refusal::Inflight(why));
        }
        Ok(())
    }

    /// What queue `index` has to log now.
    fn logging(&self, index: usize) -> Option<Logging> {
        let mapping = self.log.as_ref().filter(|_| self.features & feature::LOG_ALL != 0)?;
        let log = Arc::new(DirtyLog::new(Arc::clone(mapping), self.log_call.clone()));
        // Bit 0 of the flags: writes to the ring itself are logged too.
        let logged = self.vrings[index].addresses.filter(|addresses| addresses.flags & 1 != 0);
        let desc = logged.filter(|_| self.packed()).and_then(|at| self.memory.guest_of_user(at.desc));
        Some(Logging { log, ring: logged.map(|addresses| addresses.log), desc })
    }

    fn apply_logging(&self) -> Result<(), Refusal> {
        for (index, _) in self.vrings.iter().enumerate().filter(|(_, vring)| vring.running) {
            self.data.set_logging(index, self.logging(index))?;
        }
        Ok(())
    }

    fn set_mem_table(&mut self, regions: &[RegionSpec], fds: &[OwnedFd]) -> Result<(), Refusal> {
        let mut memory = GuestMemory::empty();
        for (spec, fd) in regions.iter().zip(fds) {
            memory = memory.with(Region::map(*spec, fd)?)?;
        }
        self.exchange(memory, true)
    }

    fn add_region(&mut self, spec: RegionSpec, fds: &[OwnedFd]) -> Result<(), Refusal> {
        self.needs(protocol::CONFIGURE_MEM_SLOTS, "adding memory regions")?;
        let Some(fd) = fds.first() else { return Ok(()) };
        let memory = self.memory.with(Region::map(spec, fd)?)?;
        self.exchange(memory, false)
    }

    fn remove_region(&mut self, spec: RegionSpec) -> Result<(), Refusal> {
        self.needs(protocol::CONFIGURE_MEM_SLOTS, "removing memory regions")?;
        let memory = self.memory.without(spec)?;
        self.exchange(memory, true)
    }

    fn needs(&self, bit: u64, what: &'static str) -> Result<(), Refusal> {
        if self.protocol & bit == 0 { Err(Refusal::NotNegotiated(what)) } else { Ok(()) }
    }

    fn exchange(&mut self, memory: GuestMemory, drain: bool) -> Result<(), Refusal> {
        if let Some(log) = self.log.as_ref().filter(|_| self.features & feature::LOG_ALL != 0) {
            self.check_log(log.len(), memory.end())?;
        }
        let memory = Arc::new(memory);
        if self.running() > 0 {
            self.data.set_memory(Arc::clone(&memory), drain)?;
        }
        // What was is unmapped here, when the last queue has released it.
        self.memory = memory;
        // Where a packed ring's descriptors are to the guest.
        if self.log.is_some() { self.apply_logging() } else { Ok(()) }
    }

    fn set_size(&mut self, index: u32, size: u32) -> Result<(), Refusal> {
        let max = self.config.queue_size_max.min(QUEUE_SIZE_MAX);
        let packed = self.packed();
        let vring = self.standing(index, "the size")?;
        match u16::try_from(size) {
            Ok(size) if size <= max && (size.is_power_of_two() || packed && size > 0) => vring.size = size,
            _ => return Err(Refusal::Value { what: "a queue size", value: size.into() }),
        }
        Ok(())
    }

    fn set_base(&mut self, index: u32, base: u32) -> Result<(), Refusal> {
        let packed = self.packed();
        let vring = self.standing(index, "the index")?;
        // A packed ring has two places with a wrap counter each, a split ring one index.
        if !packed && base > u16::MAX.into() {
            return Err(Refusal::Value { what: "a ring index", value: base.into() });
        }
        vring.base = base;
        Ok(())
    }

    fn set_addresses(&mut self, index: u32, addresses: RingAddresses) -> Result<(), Refusal> {
        let (index, vring) = self.vring(index)?;
        if vring.running {
            // Sent again to switch logging on or off; the ring itself must stay.
            let place = |at: RingAddresses| (at.desc, at.avail, at.used);
            if vring.addresses.map(place) != Some(place(addresses)) {
                return Err(Refusal::Running { index, what: "the addresses" });
            }
        }
        let running = vring.running;
        vring.addresses = Some(addresses);
        if running {
            return Ok(self.data.set_logging(index, self.logging(index))?);
        }
        self.try_start(index)
    }

    fn set_kick(&mut self, index: u32, fd: Option<OwnedFd>) -> Result<(), Refusal> {
        let what = "a kick descriptor";
        let Some(fd) = fd else {
            let why = "none was given; a queue that must be polled all the time is not served";
            return Err(Refusal::Descriptor { what, why });
        };
        let kick = Kick::new(fd).map_err(|why| Refusal::Descriptor { what, why })?;
        let (index, vring) = self.vring(index)?;
        if vring.running {
            self.data.set_kick(index, kick)?;
            return Ok(());
        }
        vring.kick = Some(kick);
        self.try_start(index)
    }

    fn set_call(&mut self, index: u32, fd: Option<OwnedFd>) -> Result<(), Refusal> {
        let call = notifier(fd, "a call descriptor")?;
        let (index, vring) = self.vring(index)?;
        vring.call.clone_from(&call);
        if vring.running {
            self.data.set_call(index, call)?;
        }
        Ok(())
    }

    fn set_err(&mut self, index: u32, fd: Option<OwnedFd>) -> Result<(), Refusal> {
        let err = notifier(fd, "an error descriptor")?;
        let (index, vring) = self.vring(index)?;
        vring.err.clone_from(&err);
        if vring.running {
            self.data.set_err(index, err)?;
        }
        Ok(())
    }

    fn set_enable(&mut self, index: u32, enable: bool) -> Result<(), Refusal> {
        let (index, vring) = self.vring(index)?;
        vring.enabled = enable;
        if vring.running {
            self.data.set_enabled(index, enable)?;
        }
        Ok(())
    }

    /// Starts a queue as soon as everything about it is known; the kick descriptor is what makes it start.
    fn try_start(&mut self, index: usize) -> Result<(), Refusal> {
        let (packed, logging) = (self.packed(), self.logging(index));
        let vring = &mut self.vrings[index];
        let (Some(addresses), false, true) = (vring.addresses, vring.running, vring.size > 0) else {
            return Ok(());
        };
        let Some(kick) = vring.kick.take() else { return Ok(()) };
        let size = vring.size;
        let inflight = self.inflight.as_ref().and_then(|region| {
            if packed {
                region.packed(index, size).map(InflightPart::Packed)
            } else {
                region.queue(index, size).map(InflightPart::Split)
            }
        });
        let setup = QueueSetup {
            index,
            size: vring.size,
            addresses,
            base: vring.base,
            features: self.features,
            memory: Arc::clone(&self.memory),
            call: vring.call.clone(),
            err: vring.err.clone(),
            inflight,
            logging,
            // Without protocol features there is no message to enable a queue by.
            enabled: vring.enabled || self.features & feature::PROTOCOL_FEATURES == 0,
            read_only: self.config.read_only,
            serial: self.config.serial,
        };
        self.data.start(setup, kick)?.map_err(|error| Refusal::Ring { index, error })?;
        self.vrings[index].running = true;
        Ok(())
    }

    fn get_base(&mut self, index: u32) -> Result<Reply, Refusal> {
        let (index, _) = self.vring(index)?;
        self.stop(index)?;
        let mut payload = (index as u32).to_ne_bytes().to_vec();
        payload.extend_from_slice(&self.vrings[index].base.to_ne_bytes());
        Ok(Reply { payload, fd: None })
    }

    fn stop(&mut self, index: usize) -> Result<(), Refusal> {
        let vring = &mut self.vrings[index];
        vring.kick = None;
        if vring.running {
            if let Some(base) = self.data.stop(index)? {
                vring.base = base;
            }
            vring.running = false;
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Refusal> {
        for index in 0..self.vrings.len() {
            self.stop(index)?;
            let vring = &mut self.vrings[index];
            // QEMU before 8.0 resets a device that it stops, and only then asks where its rings stood.
            let base = vring.base;
            *vring = Vring { base, call: vring.call.take(), err: vring.err.take(), ..Vring::default() };
        }
        self.status = 0;
        self.writeback = true;
        self.apply_writeback()
    }

    fn get_config(&mut self, offset: u32, len: u32, flags: u32) -> Result<Reply, Refusal> {
        let geometry = self.data.geometry()?;
        let mut space = blk::config_space(&geometry, self.config.queues, self.writeback).to_vec();
        // Drivers ask for the longest space they know; what we do not have reads as zero.
        space.resize(super::message::CONFIG_LEN_MAX, 0);
        let bytes = &space[offset as usize..(offset + len) as usize];
        Ok(Reply { payload: super::message::config_payload(offset, flags, bytes), fd: None })
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Refusal> {
        let what = "a write to the configuration space at offset";
        let (CONFIG_WRITEBACK, [value @ (0 | 1)]) = (offset, bytes) else {
            return Err(Refusal::Value { what, value: offset.into() });
        };
        if self.features & feature::CONFIG_WCE == 0 {
            return Err(Refusal::NotNegotiated("switching the write cache"));
        }
        self.writeback = *value == 1;
        self.apply_writeback()
    }

    /// virtio 1.2, 5.2.6.2: the byte counts where it was negotiated; otherwise a driver that can flush gets a cache,
    /// and
    /// one that cannot gets every write made durable.
    fn apply_writeback(&mut self) -> Result<(), Refusal> {
        let effective = if self.features & feature::CONFIG_WCE != 0 {
            self.writeback
        } else {
            self.features & feature::FLUSH != 0
        };
        Ok(self.data.set_writeback(effective)?)
    }

    fn make_inflight(&mut self, spec: InflightSpec) -> Result<Reply, Refusal> {
        self.needs(protocol::INFLIGHT_SHMFD, "the in-flight region")?;
        let even = spec.queue_size.is_power_of_two() || self.packed() && spec.queue_size > 0;
        let size_ok = even && spec.queue_size <= self.config.queue_size_max;
        if !size_ok || spec.queues == 0 || spec.queues > self.config.queues {
            let what = "an in-flight region with a number of queues";
            return Err(Refusal::Value { what, value: spec.queues.into() });
        }
        let (spec, fd) = InflightRegion::create(spec.queues, spec.queue_size)
            .map_err(|error| Refusal::Inflight(format!("the in-flight region cannot be made: {error}")))?;
        Ok(Reply { payload: spec.to_bytes().to_vec(), fd: Some(fd) })
    }

    fn set_inflight(&mut self, spec: InflightSpec, fds: &[OwnedFd]) -> Result<(), Refusal> {
        self.needs(protocol::INFLIGHT_SHMFD, "the in-flight region")?;
        if let Some(index) = self.vrings.iter().position(|vring| vring.running) {
            return Err(Refusal::Running { index, what: "the in-flight region" });
        }
        let Some(fd) = fds.first() else { return Ok(()) };
        self.inflight = Some(InflightRegion::map(spec, fd).map_err(Refusal::Inflight)?);
        Ok(())
    }
}

fn notifier(fd: Option<OwnedFd>, what: &'static str) -> Result<Option<Arc<Notifier>>, Refusal> {
    let Some(fd) = fd else { return Ok(None) };
    let notifier = Notifier::new(fd).map_err(|why| Refusal::Descriptor { what, why })?;
    Ok(Some(Arc::new(notifier)))
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
