//! Our own page: its layout, and reading it.
//!
//! The page is an array of 64-bit words of the host's own byte order (readers run on the same host), laid out
//! as [`Page`]. A reader checks magic, version and length; a writer stores the magic last.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU64, Ordering};

use tapio_types::{IoLimits, RingState};

use crate::shm::Words;
use crate::vbd::VbdId;
use crate::{
    BUCKETS, DelayCounts, Histogram, KINDS, KindCounts, PollCounts, RingUse, STAGES, Snapshot, TIMED_KINDS,
};

/// Bytes of a page file.
pub const PAGE_LEN: usize = 8192;
/// Layout number. A reader refuses any other.
pub const PAGE_VERSION: u64 = 1;
/// Longest image name a page holds, in bytes; longer ones lose their beginning.
pub const IMAGE_LEN_MAX: usize = 256;
/// Domain and device numbers under which one disk can be published at a time.
pub const VBD_SLOTS: usize = 8;

/// "TAPIOSTA" as the first eight bytes of the file.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"TAPIOSTA");
/// In `vbds`: nothing here.
pub(crate) const VACANT: u64 = u64::MAX;

/// Byte offset of the generation of the image's name.
pub(crate) const GENERATION_AT: usize = offset_of!(Page, image_generation);

/// The layout.
#[repr(C)]
pub(crate) struct Page {
    pub magic: u64,
    pub version: u64,
    pub len: u64,
    pub pid: u64,
    pub minor: u64,
    pub created_unix_ns: u64,
    pub queue_depth: u64,
    /// Odd while `image_len` and `image` are being replaced.
    pub image_generation: u64,
    pub image_len: u64,
    pub image: [u64; IMAGE_LEN_MAX / 8],
    /// domid << 32 | devid, or `VACANT`.
    pub vbds: [u64; VBD_SLOTS],
    pub kinds: [KindWords; KINDS],
    pub poll: PollWords,
    pub latency: [[HistogramWords; STAGES]; TIMED_KINDS],
    /// Limits in the order of [`limit_words`]; zero in pages of programs that knew none.
    pub limits: [u64; LIMIT_WORDS],
    pub delays: [u64; 3],
    /// Bits of [`flag`]; zero in pages of programs that knew none.
    pub flags: u64,
    /// Where the ring behind each of `vbds` stands, see [`ring_words`]; zero in pages of programs that knew none.
    pub rings: [[u64; RING_USE_WORDS]; VBD_SLOTS],
}

/// What is wrong with a disk now.
pub(crate) mod flag {
    /// It answers from its reserve of memory.
    pub const LOW_MEMORY: u64 = 1;
    /// The second side of its mirror was lost.
    pub const MIRROR_LOST: u64 = 2;
}

const LIMIT_WORDS: usize = 9;
const RING_WORDS: usize = 4;
/// Behind the ring's own words: requests in it times nanoseconds, and until when that was counted.
pub(crate) const RING_USE_WORDS: usize = RING_WORDS + 2;

/// A ring as words. What is compared with each other shares a word, so that a reader never sees more answers than
/// requests.
pub(crate) const fn ring_words(ring: &RingState) -> [u64; RING_WORDS] {
    const fn pair(high: u32, low: u32) -> u64 {
        (high as u64) << 32 | low as u64
    }
    [
        pair(0, ring.size),
        pair(ring.req_prod, ring.rsp_prod),
        pair(ring.req_cons, ring.rsp_pvt),
        pair(ring.req_event, ring.rsp_event),
    ]
}

fn ring_of(words: &[u64], queue_depth: u64) -> RingUse {
    let pair = |index: usize| {
        let word = words.get(index).copied().unwrap_or(0);
        ((word >> 32) as u32, word as u32)
    };
    let (req_prod, rsp_prod) = pair(1);
    let (req_cons, rsp_pvt) = pair(2);
    let (req_event, rsp_event) = pair(3);
    // Before its first request a front end without a ring of its own has the disk's queue.
    let size = match pair(0).1 {
        0 => u32::try_from(queue_depth).unwrap_or(u32::MAX),
        size => size,
    };
    let state = RingState { size, req_prod, req_cons, req_event, rsp_prod, rsp_pvt, rsp_event };
    RingUse { state, request_ns: words.get(RING_WORDS).copied().unwrap_or(0) }
}

/// Limits as words.
pub(crate) const fn limit_words(limits: &IoLimits) -> [u64; LIMIT_WORDS] {
    [
        limits.iops,
        limits.bps,
        limits.read_iops,
        limits.read_bps,
        limits.write_iops,
        limits.write_bps,
        limits.burst_ms as u64,
        limits.burst_ios,
        limits.burst_bytes,
    ]
}

fn limits_of(words: &[u64]) -> IoLimits {
    let word = |index: usize| words.get(index).copied().unwrap_or(0);
    IoLimits {
        iops: word(0),
        bps: word(1),
        read_iops: word(2),
        read_bps: word(3),
        write_iops: word(4),
        write_bps: word(5),
        burst_ms: word(6) as u32,
        burst_ios: word(7),
        burst_bytes: word(8),
    }
}

#[repr(C)]
pub(crate) struct KindWords {
    pub submitted: u64,
    pub completed: u64,
    pub errors: u64,
    pub bytes: u64,
}

#[repr(C)]
pub(crate) struct PollWords {
    pub spin_ns: u64,
    pub hits: u64,
    pub misses: u64,
    pub wakeups: u64,
    pub enters: u64,
    pub out_of_requests: u64,
}

#[repr(C)]
pub(crate) struct HistogramWords {
    pub sum_ns: u64,
    pub counts: [u64; BUCKETS],
}

const _: () = assert!(size_of::<Page>() <= PAGE_LEN);
const _: () = assert!(PAGE_LEN.is_multiple_of(4096));

/// Word indices of the fields.
pub(crate) mod at {
    use super::*;

    macro_rules! words {
        ($($name:ident = $field:ident;)*) => { $(pub const $name: usize = offset_of!(Page, $field) / 8;)* };
    }
    words! {
        MAGIC = magic; VERSION = version; LEN = len; PID = pid; MINOR = minor; CREATED = created_unix_ns;
        QUEUE_DEPTH = queue_depth; IMAGE_GENERATION = image_generation; IMAGE_LEN = image_len; IMAGE = image;
        VBDS = vbds; KINDS = kinds; POLL = poll; LATENCY = latency; LIMITS = limits; DELAYS = delays; FLAGS = flags;
        RINGS = rings;
    }
    pub const KIND_WORDS: usize = size_of::<KindWords>() / 8;
    pub const SUBMITTED: usize = offset_of!(KindWords, submitted) / 8;
    pub const COMPLETED: usize = offset_of!(KindWords, completed) / 8;
    pub const ERRORS: usize = offset_of!(KindWords, errors) / 8;
    pub const BYTES: usize = offset_of!(KindWords, bytes) / 8;
    pub const SPIN_NS: usize = POLL + offset_of!(PollWords, spin_ns) / 8;
    pub const HITS: usize = POLL + offset_of!(PollWords, hits) / 8;
    pub const MISSES: usize = POLL + offset_of!(PollWords, misses) / 8;
    pub const WAKEUPS: usize = POLL + offset_of!(PollWords, wakeups) / 8;
    pub const ENTERS: usize = POLL + offset_of!(PollWords, enters) / 8;
    pub const OUT_OF_REQUESTS: usize = POLL + offset_of!(PollWords, out_of_requests) / 8;
    pub const HISTOGRAM_WORDS: usize = size_of::<HistogramWords>() / 8;

    /// First word of the ring behind a slot.
    pub const fn ring(slot: usize) -> usize {
        RINGS + slot * super::RING_USE_WORDS
    }
    /// From there: requests and answers; requests times time; time of the last change.
    pub const RING_USED: usize = 1;
    pub const RING_REQUEST_NS: usize = super::RING_WORDS;
    pub const RING_SINCE: usize = super::RING_WORDS + 1;

    /// First word of a histogram.
    pub const fn histogram(kind: usize, stage: usize) -> usize {
        LATENCY + (kind * super::STAGES + stage) * HISTOGRAM_WORDS
    }
}

/// Why a file is not a page of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParsePageError {
    /// Shorter than the layout.
    Short {
        /// Bytes found.
        len: usize,
    },
    /// The magic number is not there: something else, or a disk that is just being made.
    Magic,
    /// A layout this reader does not know.
    Version(u64),
}

impl std::fmt::Display for ParsePageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Short { len } => write!(f, "{len} bytes are too few for a page of counters"),
            Self::Magic => f.write_str("this is not a page of counters"),
            Self::Version(found) => {
                write!(
                    f,
                    "layout {found} is not the known {PAGE_VERSION}: use the tapio that came with the disk"
                )
            }
        }
    }
}

impl std::error::Error for ParsePageError {}

/// Reads a page from a copy of its bytes.
///
/// # Errors
/// The bytes are not a page of the known layout.
pub fn parse_page(bytes: &[u8]) -> Result<Snapshot, ParsePageError> {
    if bytes.len() < size_of::<Page>() {
        return Err(ParsePageError::Short { len: bytes.len() });
    }
    let mut words = [0u64; PAGE_LEN / 8];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = chunk.try_into().map_or(0, u64::from_ne_bytes);
    }
    parse_words(&words)
}

/// Reads the page that this process writes itself.
pub(crate) fn read_live(live: &Words) -> Result<Snapshot, ParsePageError> {
    let mut words = [0u64; PAGE_LEN / 8];
    // A few attempts at a quiet moment of the image's name; the writer changes it once per resume.
    for _ in 0..8 {
        for (word, cell) in words.iter_mut().zip(live.as_slice()) {
            *word = cell.load(Ordering::Acquire);
        }
        let after = live.as_slice()[at::IMAGE_GENERATION].load(Ordering::Acquire);
        if after & 1 == 0 && after == words[at::IMAGE_GENERATION] {
            break;
        }
        words[at::IMAGE_GENERATION] = 1;
    }
    parse_words(&words)
}

fn parse_words(words: &[u64; PAGE_LEN / 8]) -> Result<Snapshot, ParsePageError> {
    if words[at::MAGIC] != MAGIC {
        return Err(ParsePageError::Magic);
    }
    if words[at::VERSION] != PAGE_VERSION {
        return Err(ParsePageError::Version(words[at::VERSION]));
    }
    let queue_depth = words[at::QUEUE_DEPTH];
    let slots = words[at::VBDS..at::VBDS + VBD_SLOTS].iter().enumerate();
    let slots: Vec<(usize, u64)> =
        slots.map(|(slot, word)| (slot, *word)).filter(|(_, word)| *word != VACANT).collect();
    let ring = |slot: usize| ring_of(&words[at::ring(slot)..at::ring(slot) + RING_USE_WORDS], queue_depth);
    Ok(Snapshot {
        pid: words[at::PID] as u32,
        minor: words[at::MINOR] as u32,
        created_unix_ns: words[at::CREATED],
        image: image(words),
        vbds: slots
            .iter()
            .map(|(_, word)| VbdId { domid: (word >> 32) as u32, devid: *word as u32 })
            .collect(),
        rings: slots.iter().map(|(slot, _)| ring(*slot)).collect(),
        queue_depth,
        kinds: std::array::from_fn(|kind| {
            let first = at::KINDS + kind * at::KIND_WORDS;
            KindCounts {
                submitted: words[first + at::SUBMITTED],
                completed: words[first + at::COMPLETED],
                errors: words[first + at::ERRORS],
                bytes: words[first + at::BYTES],
            }
        }),
        poll: PollCounts {
            spin_ns: words[at::SPIN_NS],
            hits: words[at::HITS],
            misses: words[at::MISSES],
            wakeups: words[at::WAKEUPS],
            enters: words[at::ENTERS],
            out_of_requests: words[at::OUT_OF_REQUESTS],
        },
        latency: std::array::from_fn(|kind| {
            std::array::from_fn(|stage| {
                let first = at::histogram(kind, stage);
                let mut counts = [0; BUCKETS];
                counts.copy_from_slice(&words[first + 1..first + 1 + BUCKETS]);
                Histogram { counts, sum_ns: words[first] }
            })
        }),
        limits: limits_of(&words[at::LIMITS..at::LIMITS + LIMIT_WORDS]),
        delays: DelayCounts {
            requests: words[at::DELAYS],
            time_ns: words[at::DELAYS + 1],
            waiting: words[at::DELAYS + 2],
        },
        low_memory: words[at::FLAGS] & flag::LOW_MEMORY != 0,
        mirror_lost: words[at::FLAGS] & flag::MIRROR_LOST != 0,
    })
}

/// The image's name; empty when it was just being replaced.
fn image(words: &[u64; PAGE_LEN / 8]) -> String {
    if words[at::IMAGE_GENERATION] & 1 == 1 {
        return String::new();
    }
    let len = (words[at::IMAGE_LEN] as usize).min(IMAGE_LEN_MAX);
    let bytes: Vec<u8> =
        words[at::IMAGE..at::IMAGE + IMAGE_LEN_MAX / 8].iter().flat_map(|word| word.to_ne_bytes()).collect();
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// Replaces the image's name. The tail of a long one says more than its beginning.
pub(crate) fn store_image(page: &Words, image: &str) {
    let mut cut = image.len().saturating_sub(IMAGE_LEN_MAX);
    while !image.is_char_boundary(cut) {
        cut += 1;
    }
    let tail = &image.as_bytes()[cut..];
    let words = page.as_slice();
    let generation = words[at::IMAGE_GENERATION].load(Ordering::Relaxed);
    words[at::IMAGE_GENERATION].store(generation | 1, Ordering::Relaxed);
    std::sync::atomic::fence(Ordering::Release);
    words[at::IMAGE_LEN].store(tail.len() as u64, Ordering::Release);
    for (index, cell) in words[at::IMAGE..at::IMAGE + IMAGE_LEN_MAX / 8].iter().enumerate() {
        let mut eight = [0; 8];
        let part = tail.get(index * 8..).unwrap_or(&[]);
        let len = part.len().min(8);
        eight[..len].copy_from_slice(&part[..len]);
        AtomicU64::store(cell, u64::from_ne_bytes(eight), Ordering::Release);
    }
    words[at::IMAGE_GENERATION].store((generation | 1).wrapping_add(1), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_zeroes_or_noise_is_refused() {
        assert_eq!(parse_page(&[0; PAGE_LEN]), Err(ParsePageError::Magic));
        assert_eq!(parse_page(&[7; 100]), Err(ParsePageError::Short { len: 100 }));
        let mut newer = [0; PAGE_LEN];
        newer[..8].copy_from_slice(b"TAPIOSTA");
        newer[8] = 9;
        assert_eq!(parse_page(&newer), Err(ParsePageError::Version(9)));
    }

    #[test]
    fn a_long_image_name_keeps_its_end_on_a_character() {
        let page = Words::anonymous(PAGE_LEN).expect("memory");
        page.set(at::MAGIC, MAGIC);
        page.set(at::VERSION, PAGE_VERSION);
        let name = format!("vhd:/{}ü{}.vhd", "a".repeat(300), "b".repeat(251));
        store_image(&page, &name);
        let read = read_live(&page).expect("valid").image;
        assert!(read.len() <= IMAGE_LEN_MAX && name.ends_with(&read), "{read}");
        store_image(&page, "aio:/x");
        assert_eq!(read_live(&page).expect("valid").image, "aio:/x");
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_behind_a_good_head_are_read_without_panic(
            noise in proptest::collection::vec(0u8..=255, PAGE_LEN - 16),
        ) {
            let mut bytes = Vec::from(*b"TAPIOSTA\x01\0\0\0\0\0\0\0");
            bytes.extend_from_slice(&noise);
            let snapshot = parse_page(&bytes).expect("head is good");
            let _ = (snapshot.in_flight(), snapshot.latency[0][0].quantile_ns(0.9));
        }
    }
}
