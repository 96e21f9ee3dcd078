//! How a front end uses a disk.

use std::io;

use crate::blkif::{
    Abi, DIRECT_SEGMENTS_MAX, INDIRECT_PER_PAGE, INDIRECT_SEGMENTS_MAX, RING_ORDER_MAX, ring_slots, split,
};
use crate::domain::PAGE_LEN;

/// Queues of a device, at most.
const QUEUES_MAX: u32 = 64;
/// Requests of a queue that have a buffer, at most.
const DEPTH_MAX: u32 = 1024;

/// How to use a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontOptions {
    /// Layout of the rings.
    pub abi: Abi,
    /// Pages of a ring as a power of two, 0 to 3; of a split ring those of the requests.
    pub order: u32,
    /// Split rings, with so many pages of responses as a power of two.
    pub split: Option<u32>,
    /// Queues.
    pub queues: u32,
    /// Requests in flight on each queue, at most.
    pub depth: u32,
    /// Bytes of the buffer of each request.
    pub buffer_len: u32,
    /// Bytes of a segment, 512 to 4096, a power of two; shorter ones lie in the same pages, so there are more of them.
    pub segment_len: u32,
    /// Segments of an indirect request; 0: all requests are direct. Requests of up to 11 segments are direct anyway.
    pub indirect: u16,
    /// Pages are granted once and for all, rather than for each request.
    pub persistent: bool,
    /// Bytes of a sector: 512 or 4096. Requests are multiples of it.
    pub sector_size: u32,
    /// Domain of the back end.
    pub back_end: u32,
}

impl Default for FrontOptions {
    fn default() -> Self {
        Self {
            abi: Abi::X86_64,
            order: 0,
            split: None,
            queues: 1,
            depth: 32,
            buffer_len: (DIRECT_SEGMENTS_MAX * PAGE_LEN) as u32,
            segment_len: PAGE_LEN as u32,
            indirect: 0,
            persistent: false,
            sector_size: 512,
            back_end: 0,
        }
    }
}

/// What a back end publishes about itself and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// `max-ring-page-order`.
    pub order: u32,
    /// `multi-queue-max-queues`.
    pub queues: u32,
    /// `feature-max-indirect-segments`; 0 where it is missing.
    pub indirect: u16,
    /// `feature-persistent`.
    pub persistent: bool,
    /// [`split::FEATURE`].
    pub split: bool,
    /// `sector-size`.
    pub sector_size: u32,
}

impl Default for Offer {
    /// What a back end offers that publishes nothing.
    fn default() -> Self {
        Self { order: 0, queues: 1, indirect: 0, persistent: false, split: false, sector_size: 512 }
    }
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

impl FrontOptions {
    /// The same, as far as the back end goes along. Buffers shrink with the segments that are left.
    #[must_use]
    pub fn within(&self, offer: &Offer) -> Self {
        let mut options = Self {
            order: self.order.min(offer.order),
            split: self.split.filter(|_| offer.split).map(|order| order.min(offer.order)),
            queues: self.queues.min(offer.queues.max(1)),
            indirect: self.indirect.min(offer.indirect),
            persistent: self.persistent && offer.persistent,
            sector_size: self.sector_size.max(offer.sector_size),
            ..self.clone()
        };
        let most = options.segments_max() as u32 * options.segment_len;
        options.buffer_len = options.buffer_len.min(most) / options.sector_size * options.sector_size;
        options.depth = options.depth.min(options.ring_size());
        options
    }

    /// Requests in flight on a ring, at most.
    pub fn ring_size(&self) -> u32 {
        match self.split {
            Some(order) => split::response_slots(1 << order),
            None => ring_slots(self.abi, 1 << self.order),
        }
    }

    /// Segments of a request, at most.
    pub fn segments_max(&self) -> usize {
        usize::from(self.indirect).max(DIRECT_SEGMENTS_MAX)
    }

    /// Bytes of the longest request.
    pub fn request_len_max(&self) -> u32 {
        self.buffer_len.min(self.segments_max() as u32 * self.segment_len)
    }

    pub(super) fn ring_pages(&self) -> u32 {
        1 << self.order
    }

    pub(super) fn response_pages(&self) -> u32 {
        self.split.map_or(0, |order| 1 << order)
    }

    pub(super) fn buffer_pages(&self) -> u32 {
        self.buffer_len.div_ceil(PAGE_LEN as u32)
    }

    pub(super) fn indirect_pages(&self) -> u32 {
        usize::from(self.indirect).div_ceil(INDIRECT_PER_PAGE) as u32
    }

    /// Pages of memory that a device takes.
    pub fn pages(&self) -> u32 {
        let slot = self.buffer_pages() + self.indirect_pages();
        self.queues * (self.ring_pages() + self.response_pages() + self.depth * slot)
    }

    /// Whether that is possible at all.
    ///
    /// # Errors
    /// `InvalidInput` with a sentence.
    pub fn check(&self) -> io::Result<()> {
        let orders = [Some(self.order), self.split];
        if orders.into_iter().flatten().any(|order| order > RING_ORDER_MAX) {
            return Err(invalid(format!("a ring has at most 8 pages, which is order {RING_ORDER_MAX}")));
        }
        if self.split.is_some() && self.abi != Abi::X86_64 {
            return Err(invalid("split rings have the layout x86_64-abi alone".into()));
        }
        if self.queues == 0 || self.queues > QUEUES_MAX {
            return Err(invalid(format!("{} queues; 1 to {QUEUES_MAX} are possible", self.queues)));
        }
        let depth_max = self.ring_size().min(DEPTH_MAX);
        if self.depth == 0 || self.depth > depth_max {
            return Err(invalid(format!(
                "{} requests in flight; this ring holds 1 to {depth_max}",
                self.depth
            )));
        }
        if !matches!(self.sector_size, 512 | 4096) {
            return Err(invalid(format!("a sector of {} bytes; 512 or 4096 are possible", self.sector_size)));
        }
        let segment = self.segment_len;
        if !segment.is_power_of_two() || segment < 512 || segment > PAGE_LEN as u32 {
            return Err(invalid(format!("a segment of {segment} bytes; 512 to 4096 are possible")));
        }
        if usize::from(self.indirect) > INDIRECT_SEGMENTS_MAX {
            return Err(invalid(format!("an indirect request has at most {INDIRECT_SEGMENTS_MAX} segments")));
        }
        let most = self.segments_max() as u32 * segment;
        if self.buffer_len == 0 || !self.buffer_len.is_multiple_of(self.sector_size) || self.buffer_len > most
        {
            let why =
                format!("a buffer of {} bytes; a request holds up to {most}, in sectors", self.buffer_len);
            return Err(invalid(why));
        }
        Ok(())
    }
}
