//! A virtqueue of either kind with its cursors and its part of the in-flight region: what a queue asks of its ring.

use super::chain::Chain;
use super::dirty::Logging;
use super::inflight::{InflightPart, InflightQueue};
use super::inflight_packed::PackedInflight;
use super::memory::GuestMemory;
use super::message::RingAddresses;
use super::packed::{PackedRing, Position, walk_kept};
use super::ring_error::RingError;
use super::vring::SplitRing;

/// Names a request from its taking to its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// What the answer names it by: the head of its chain in a split ring, the buffer's id in a packed one.
    pub id: u16,
    /// Descriptors of the ring that it takes up.
    pub count: u16,
    /// Its entry in the in-flight region.
    pub mark: u16,
}

/// Where a ring is and how it is used.
#[derive(Debug)]
pub struct RingSetup<'a> {
    /// The guest's memory.
    pub memory: &'a GuestMemory,
    /// Descriptors.
    pub size: u16,
    /// Its parts.
    pub addresses: &'a RingAddresses,
    /// Where it is to be read on, as `SET_VRING_BASE` carries it.
    pub base: u32,
    /// Both sides agreed on the event index.
    pub event_index: bool,
    /// Both sides agreed on indirect descriptors.
    pub indirect: bool,
    /// Both sides agreed on a packed ring.
    pub packed: bool,
    /// Where requests in flight are noted.
    pub inflight: Option<InflightPart>,
}

/// A ring with its cursors.
#[derive(Debug)]
pub enum Ring {
    /// Descriptor table, available and used ring.
    Split(Split),
    /// One ring for all.
    Packed(Packed),
}

/// A split ring with its cursors.
#[derive(Debug)]
pub struct Split {
    ring: SplitRing,
    event_index: bool,
    indirect: bool,
    next_avail: u16,
    /// How far the driver was when we looked last.
    seen_avail: u16,
    next_used: u16,
    published: u16,
    /// By head: whether the guest waits for its answer.
    busy: Box<[bool]>,
    inflight: Option<InflightQueue>,
    batch: Vec<u16>,
}

/// A packed ring with its cursors.
#[derive(Debug)]
pub struct Packed {
    ring: PackedRing,
    event_index: bool,
    indirect: bool,
    next_avail: Position,
    next_used: Position,
    published: Position,
    /// Descriptors taken and not yet answered. Ids are the driver's own affair: using one twice confuses it alone.
    outstanding: u16,
    inflight: Option<PackedInflight>,
    batch: Vec<u16>,
}

impl Ring {
    /// Finds a ring in memory and takes up where the last owner stopped. The second value are the marks of the
    /// requests that are to be repeated, oldest first.
    pub fn new(setup: RingSetup<'_>) -> Result<(Self, Vec<u16>), RingError> {
        let RingSetup { memory, size, addresses, base, event_index, indirect, packed, inflight } = setup;
        if packed {
            let ring = PackedRing::new(memory, size, addresses)?;
            let (ring, marks) = Packed::new(ring, base, (event_index, indirect), inflight)?;
            return Ok((Self::Packed(ring), marks));
        }
        let ring = SplitRing::new(memory, size, addresses)?;
        let base = u16::try_from(base).map_err(|_| RingError::Base(base))?;
        let used = ring.used_index();
        let mut inflight = match inflight {
            Some(InflightPart::Split(part)) => Some(part),
            _ => None,
        };
        let (marks, next_avail) = match &mut inflight {
            Some(part) => {
                let left = part.recover(used, base);
                (left.heads, left.next_avail)
            }
            None => (Vec::new(), base),
        };
        let split = Split {
            ring,
            event_index,
            indirect,
            next_avail,
            seen_avail: next_avail,
            next_used: used,
            published: used,
            busy: vec![false; usize::from(size)].into_boxed_slice(),
            inflight,
            batch: Vec::new(),
        };
        Ok((Self::Split(split), marks))
    }

    /// Goes on with the same ring in other memory.
    pub fn rebind(&mut self, memory: &GuestMemory, addresses: &RingAddresses) -> Result<(), RingError> {
        match self {
            Self::Split(split) => split.ring = SplitRing::new(memory, split.ring.size(), addresses)?,
            Self::Packed(packed) => packed.ring = PackedRing::new(memory, packed.ring.size(), addresses)?,
        }
        Ok(())
    }

    /// Looks how far the driver has come: before a round of [`Ring::has_next`].
    #[inline]
    pub fn look(&mut self) -> Result<(), RingError> {
        if let Self::Split(split) = self {
            let avail = split.ring.avail_index();
            if avail.wrapping_sub(split.next_avail) > split.ring.size() {
                return Err(RingError::AvailJump { from: split.next_avail, to: avail });
            }
            split.seen_avail = avail;
        }
        Ok(())
    }

    /// Whether there is a request to take.
    #[inline]
    pub fn has_next(&self) -> bool {
        match self {
            Self::Split(split) => split.next_avail != split.seen_avail,
            Self::Packed(packed) => packed.ring.is_available(packed.next_avail),
        }
    }

    /// Whether the driver has put a request there since.
    #[inline]
    pub fn peek(&self) -> bool {
        match self {
            Self::Split(split) => split.ring.avail_index() != split.next_avail,
            Self::Packed(packed) => packed.ring.is_available(packed.next_avail),
        }
    }

    /// Collects the memory of the next request, which stays in the ring until [`Ring::take`].
    #[inline]
    pub fn find(&self, memory: &GuestMemory, chain: &mut Chain) -> Result<Ticket, RingError> {
        match self {
            Self::Split(split) => split.walk(split.ring.avail_head(split.next_avail), memory, chain),
            Self::Packed(packed) => {
                let room = packed.ring.size() - packed.outstanding;
                let how = (packed.indirect, packed.inflight.is_some());
                let (id, count) = packed.ring.walk(memory, packed.next_avail, room, how, chain)?;
                Ok(Ticket { id, count, mark: 0 })
            }
        }
    }

    /// Collects the memory of a request that is repeated.
    pub fn find_again(
        &self,
        mark: u16,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Ticket, RingError> {
        match self {
            Self::Split(split) => split.walk(mark, memory, chain),
            Self::Packed(packed) => {
                let Some(inflight) = &packed.inflight else { return Err(RingError::Head(mark)) };
                let mut id = 0;
                let kept = inflight.descriptors(mark).inspect(|descriptor| id = descriptor.next);
                walk_kept(memory, kept, packed.indirect, chain)?;
                Ok(Ticket { id, count: inflight.count(mark), mark })
            }
        }
    }

    /// Takes a request that was found; `fresh`: from the ring, not from the in-flight region.
    #[inline]
    pub fn take(&mut self, ticket: &mut Ticket, fresh: bool, chain: &Chain) -> Result<(), RingError> {
        match self {
            Self::Split(split) => {
                split.busy[usize::from(ticket.id)] = true;
                if fresh {
                    split.next_avail = split.next_avail.wrapping_add(1);
                    if let Some(inflight) = &mut split.inflight {
                        inflight.begin(ticket.id);
                    }
                }
            }
            Self::Packed(packed) if fresh => {
                if let Some(inflight) = &mut packed.inflight {
                    ticket.mark = inflight.begin(&chain.direct).ok_or(RingError::Overrun)?;
                }
                packed.next_avail = packed.next_avail.after(ticket.count, packed.ring.size());
                packed.outstanding += ticket.count;
            }
            Self::Packed(_) => {}
        }
        Ok(())
    }

    /// Puts the request that was taken last back.
    pub fn give_back(&mut self, ticket: Ticket, fresh: bool) {
        match self {
            Self::Split(split) => {
                split.busy[usize::from(ticket.id)] = false;
                if fresh {
                    split.next_avail = split.next_avail.wrapping_sub(1);
                    if let Some(inflight) = &mut split.inflight {
                        inflight.forget(ticket.id);
                    }
                }
            }
            Self::Packed(packed) if fresh => {
                packed.next_avail = packed.next_avail.before(ticket.count, packed.ring.size());
                packed.outstanding -= ticket.count;
                if let Some(inflight) = &mut packed.inflight {
                    inflight.forget(ticket.mark);
                }
            }
            Self::Packed(_) => {}
        }
    }

    /// Puts an answer into the ring; it becomes visible with [`Ring::publish`].
    #[inline]
    pub fn answer(&mut self, ticket: Ticket, written: u32) {
        match self {
            Self::Split(split) => {
                split.busy[usize::from(ticket.id)] = false;
                split.ring.put_used(split.next_used, ticket.id, written);
                split.next_used = split.next_used.wrapping_add(1);
                if let Some(inflight) = &mut split.inflight {
                    inflight.batch(ticket.id);
                    split.batch.push(ticket.id);
                }
            }
            Self::Packed(packed) => {
                packed.ring.put_used(packed.next_used, ticket.id, written);
                // The driver reads on at the first answer of the batch: that one becomes visible last.
                if packed.next_used != packed.published {
                    packed.ring.publish(packed.next_used);
                }
                packed.next_used = packed.next_used.after(ticket.count, packed.ring.size());
                packed.outstanding -= ticket.count;
                if packed.inflight.is_some() {
                    packed.batch.push(ticket.mark);
                }
            }
        }
    }

    /// Whether there are answers that are not visible yet.
    #[inline]
    pub fn has_answers(&self) -> bool {
        match self {
            Self::Split(split) => split.published != split.next_used,
            Self::Packed(packed) => packed.published != packed.next_used,
        }
    }

    /// Makes answers visible. Tells whether the driver wants an interrupt for them.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(split) => {
                let (old, new) = (split.published, split.next_used);
                split.ring.publish_used(new);
                split.published = new;
                if let Some(inflight) = &mut split.inflight {
                    inflight.published(&split.batch, new);
                    split.batch.clear();
                }
                split.ring.wants_interrupt(split.event_index, old, new)
            }
            Self::Packed(packed) => {
                let (old, new) = (packed.published, packed.next_used);
                match &mut packed.inflight {
                    Some(inflight) => {
                        inflight.batch(&packed.batch, new);
                        packed.ring.publish(old);
                        inflight.published(&packed.batch, new);
                        packed.batch.clear();
                    }
                    None => packed.ring.publish(old),
                }
                packed.published = new;
                packed.ring.wants_interrupt(old, new)
            }
        }
    }

    /// Marks what [`Ring::publish`] is about to change, and has changed since the last time, in the dirty log.
    pub fn log_answers(&self, logging: &Logging) {
        let Some(at) = logging.ring else { return };
        match self {
            Self::Split(split) => {
                let size = u64::from(split.ring.size());
                // Flags and index, entries, event index.
                logging.log.mark(at, 4);
                let (from, to) = (split.published, split.next_used);
                for index in 0..to.wrapping_sub(from) {
                    let place = u64::from(from.wrapping_add(index) & (split.ring.size() - 1));
                    logging.log.mark(at.saturating_add(4 + 8 * place), 8);
                }
                logging.log.mark(at.saturating_add(4 + 8 * size), 2);
            }
            Self::Packed(packed) => {
                logging.log.mark(at, 4);
                let Some(desc) = logging.desc else { return };
                // Answers lie among the descriptors from the old place to the new one.
                let (from, to) = (packed.published, packed.next_used);
                let mark = |from: u16, to: u16| {
                    logging.log.mark(desc + 16 * u64::from(from), 16 * u64::from(to - from));
                };
                if from.wrap == to.wrap {
                    mark(from.index, to.index);
                } else {
                    mark(from.index, packed.ring.size());
                    mark(0, to.index);
                }
            }
        }
    }

    /// Asks for kicks; whether a request is there already.
    #[inline]
    pub fn enable_kicks(&self) -> bool {
        match self {
            Self::Split(split) => {
                split.ring.enable_kicks(split.event_index, split.next_avail) != split.next_avail
            }
            Self::Packed(packed) => packed.ring.enable_kicks(packed.event_index, packed.next_avail),
        }
    }

    /// Kicks are not needed.
    #[inline]
    pub fn disable_kicks(&self) {
        match self {
            Self::Split(split) => split.ring.disable_kicks(split.event_index),
            Self::Packed(packed) => packed.ring.disable_kicks(packed.event_index),
        }
    }

    /// Where the ring is to be read on, as `GET_VRING_BASE` answers it.
    pub fn base(&self) -> u32 {
        match self {
            Self::Split(split) => split.next_avail.into(),
            Self::Packed(packed) => {
                u32::from(packed.next_avail.to_bits()) | u32::from(packed.next_used.to_bits()) << 16
            }
        }
    }
}

impl Split {
    #[inline]
    fn walk(&self, head: u16, memory: &GuestMemory, chain: &mut Chain) -> Result<Ticket, RingError> {
        if head >= self.ring.size() {
            return Err(RingError::Head(head));
        }
        if self.busy[usize::from(head)] {
            return Err(RingError::HeadBusy(head));
        }
        self.ring.walk(memory, head, self.indirect, chain)?;
        Ok(Ticket { id: head, count: 1, mark: head })
    }
}

impl Packed {
    fn new(
        ring: PackedRing,
        base: u32,
        (event_index, indirect): (bool, bool),
        inflight: Option<InflightPart>,
    ) -> Result<(Self, Vec<u16>), RingError> {
        let avail = Position::from_bits(base as u16);
        let used = Position::from_bits((base >> 16) as u16);
        if avail.index >= ring.size() || used.index >= ring.size() {
            return Err(RingError::Base(base));
        }
        // User-mode Linux says 0 for every new ring. A driver that has come round once has left marks in the first
        // descriptor, so that this cannot be the beginning of a later round.
        let said =
            if base == 0 && ring.is_untouched() { (Position::START, Position::START) } else { (avail, used) };
        let mut inflight = match inflight {
            Some(InflightPart::Packed(part)) => Some(part),
            _ => None,
        };
        let (marks, (next_avail, next_used), outstanding) = match &mut inflight {
            Some(part) => {
                let left = part.recover(&ring, said);
                (left.marks, (left.next_avail, left.next_used), left.outstanding)
            }
            None => (Vec::new(), said, 0),
        };
        let packed = Self {
            ring,
            event_index,
            indirect,
            next_avail,
            next_used,
            published: next_used,
            outstanding,
            inflight,
            batch: Vec::new(),
        };
        Ok((packed, marks))
    }
}
