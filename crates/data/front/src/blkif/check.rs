//! What a request asks of the disk, checked against everything that can be wrong with it. Pure functions on what was
//! copied out of the guest's memory.

use tapio_types::Span;
use tapio_xen::GrantRef;
use tapio_xen::blkif::{DISCARD_SECURE, Request, Segment, op};

/// What stands behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the disk.
    pub len: u64,
    /// Bytes of a sector as the guest was told: 512 or 4096.
    pub sector_size: u32,
    /// Segments of an indirect request, at most.
    pub max_indirect: u16,
    /// Whether everything that changes the disk is refused.
    pub read_only: bool,
}

/// A piece of a guest's page that a request moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The page.
    pub grant: GrantRef,
    /// Where in it.
    pub at: u16,
    /// Bytes: 512 to 4096.
    pub len: u16,
}

/// What is wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// More segments than were offered.
    Segments,
    /// A segment that ends before it begins, or outside its page.
    Segment,
    /// It is no whole number of the disk's sectors, or reaches past the end of the disk or the largest number.
    Range,
    /// It changes a disk that may only be read.
    ReadOnly,
    /// What it wants was never offered.
    Unsupported,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read into its pieces.
    Read(Span),
    /// Write its pieces.
    Write(Span),
    /// Make durable what was answered, then write its pieces, if it has some, durably. `alone`: after all requests
    /// before it have ended, and before any after it begins.
    Flush {
        /// What to write; empty without pieces.
        data: Span,
        /// A barrier.
        alone: bool,
    },
    /// The content is not needed any more.
    Discard(Span),
}

/// The pieces of a request's segments; gives their bytes. `into` is empty before.
///
/// They are counted in 512 bytes whatever the disk's sectors are: memory that Linux reads 4096 bytes into may begin at
/// any multiple of 512, and then a sector lies in two pages. All of them together have to be whole sectors.
///
/// # Errors
/// A segment makes no sense.
pub fn pieces(segments: impl Iterator<Item = Segment>, into: &mut Vec<Piece>) -> Result<u64, Fault> {
    let mut bytes = 0;
    for segment in segments {
        let (at, len) = segment.span().ok_or(Fault::Segment)?;
        bytes += u64::from(len);
        into.push(Piece { grant: segment.grant, at, len });
    }
    Ok(bytes)
}

/// The place on the disk of `bytes` from a sector of 512 bytes on.
fn span(sector: u64, bytes: u64, limits: &Limits) -> Result<Span, Fault> {
    let start = sector.checked_mul(512).ok_or(Fault::Range)?;
    let end = start.checked_add(bytes).ok_or(Fault::Range)?;
    let sector_size = u64::from(limits.sector_size);
    if end > limits.len || !start.is_multiple_of(sector_size) || !bytes.is_multiple_of(sector_size) {
        return Err(Fault::Range);
    }
    Ok(Span::new(start, bytes))
}

/// What a request whose pieces have `bytes` wants.
///
/// # Errors
/// It cannot have it.
pub fn operation(request: &Request, bytes: u64, limits: &Limits) -> Result<Operation, Fault> {
    if request.indirect && request.segments > limits.max_indirect {
        return Err(Fault::Segments);
    }
    let changes = match request.op {
        op::READ => false,
        op::FLUSH_DISKCACHE | op::WRITE_BARRIER => bytes > 0,
        _ => true,
    };
    if changes && limits.read_only {
        return Err(Fault::ReadOnly);
    }
    match request.op {
        op::READ => span(request.sector, bytes, limits).map(Operation::Read),
        op::WRITE => span(request.sector, bytes, limits).map(Operation::Write),
        op::WRITE_BARRIER | op::FLUSH_DISKCACHE => {
            let alone = request.op == op::WRITE_BARRIER;
            // Without data the sector means nothing.
            let data = if bytes == 0 { Span::new(0, 0) } else { span(request.sector, bytes, limits)? };
            Ok(Operation::Flush { data, alone })
        }
        op::DISCARD if request.discard_flag & DISCARD_SECURE != 0 => Err(Fault::Unsupported),
        op::DISCARD => {
            let bytes = request.discard_sectors.checked_mul(512).ok_or(Fault::Range)?;
            if bytes == 0 {
                return Err(Fault::Range);
            }
            span(request.sector, bytes, limits).map(Operation::Discard)
        }
        _ => Err(Fault::Unsupported),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { len: 1 << 20, sector_size: 512, max_indirect: 32, read_only: false };

    fn request(op: u8, sector: u64) -> Request {
        Request { op, sector, segments: 1, ..Request::default() }
    }

    /// All segments that there can be.
    #[test]
    fn every_segment_is_inside_its_page_or_refused() {
        for first in 0..=u8::MAX {
            for last in 0..=u8::MAX {
                let mut into = Vec::new();
                let got = pieces([Segment { grant: GrantRef(9), first, last }].into_iter(), &mut into);
                assert_eq!(got.is_ok(), first <= last && last < 8, "{first} {last}");
                if let Ok(bytes) = got {
                    let piece = into[0];
                    assert_eq!(bytes, u64::from(piece.len));
                    assert!(piece.len >= 512 && piece.at + piece.len <= 4096);
                }
            }
        }
    }

    #[test]
    fn nothing_reaches_past_the_end_or_around_the_largest_number() {
        let last = LIMITS.len / 512 - 1;
        assert_eq!(
            operation(&request(op::READ, last), 512, &LIMITS),
            Ok(Operation::Read(Span::new(last * 512, 512)))
        );
        let starts = [last + 1, u64::MAX, u64::MAX / 512, u64::MAX / 512 + 1, 1 << 55, (1 << 55) - 1];
        for sector in starts {
            for op in [op::READ, op::WRITE, op::WRITE_BARRIER, op::FLUSH_DISKCACHE] {
                assert_eq!(
                    operation(&request(op, sector), 4096, &LIMITS),
                    Err(Fault::Range),
                    "{op} {sector}"
                );
            }
            let discard = Request { discard_sectors: 8, ..request(op::DISCARD, sector) };
            assert_eq!(operation(&discard, 0, &LIMITS), Err(Fault::Range), "{sector}");
        }
        for sectors in [0, 2049, u64::MAX, u64::MAX / 512, 1 << 55] {
            let discard = Request { discard_sectors: sectors, ..request(op::DISCARD, 0) };
            assert_eq!(operation(&discard, 0, &LIMITS), Err(Fault::Range), "{sectors}");
        }
    }

    #[test]
    fn large_sectors_are_whole() {
        let limits = Limits { sector_size: 4096, ..LIMITS };
        assert_eq!(
            operation(&request(op::WRITE, 8), 4096, &limits),
            Ok(Operation::Write(Span::new(4096, 4096)))
        );
        assert_eq!(operation(&request(op::WRITE, 4), 4096, &limits), Err(Fault::Range));
        for bytes in [512, 3584, 4096 + 512] {
            for op in [op::READ, op::WRITE, op::WRITE_BARRIER, op::FLUSH_DISKCACHE] {
                assert_eq!(operation(&request(op, 8), bytes, &limits), Err(Fault::Range), "{op} {bytes}");
            }
        }
        let discard = Request { discard_sectors: 4, ..request(op::DISCARD, 0) };
        assert_eq!(operation(&discard, 0, &limits), Err(Fault::Range));
    }

    #[test]
    fn a_disk_that_may_only_be_read_is() {
        let limits = Limits { read_only: true, ..LIMITS };
        for op in [op::WRITE, op::WRITE_BARRIER, op::FLUSH_DISKCACHE] {
            assert_eq!(operation(&request(op, 0), 512, &limits), Err(Fault::ReadOnly), "{op}");
        }
        let discard = Request { discard_sectors: 8, ..request(op::DISCARD, 0) };
        assert_eq!(operation(&discard, 0, &limits), Err(Fault::ReadOnly));
        assert!(matches!(operation(&request(op::READ, 0), 512, &limits), Ok(Operation::Read(_))));
        let flush = operation(&request(op::FLUSH_DISKCACHE, u64::MAX), 0, &limits);
        assert_eq!(flush, Ok(Operation::Flush { data: Span::new(0, 0), alone: false }));
    }

    #[test]
    fn what_was_not_offered_is_refused() {
        let many = Request { indirect: true, segments: 33, ..request(op::READ, 0) };
        assert_eq!(operation(&many, 33 * 4096, &LIMITS), Err(Fault::Segments));
        let secure = Request { discard_sectors: 8, discard_flag: DISCARD_SECURE, ..request(op::DISCARD, 0) };
        assert_eq!(operation(&secure, 0, &LIMITS), Err(Fault::Unsupported));
        assert_eq!(operation(&request(9, 0), 0, &LIMITS), Err(Fault::Unsupported));
    }
}
