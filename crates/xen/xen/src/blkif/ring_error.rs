//! What makes a ring unusable.

use std::fmt;

/// A ring that cannot be used, or the other side broke its rules; nothing more is taken from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingError {
    /// The guest claims more requests than the ring has slots, or took some back.
    Overrun {
        /// `req_prod` as it was read.
        req_prod: u32,
        /// Responses given so far.
        rsp_prod: u32,
    },
    /// The back end claims more responses than there are requests.
    Responses {
        /// `rsp_prod` as it was read.
        rsp_prod: u32,
        /// Responses taken so far.
        rsp_cons: u32,
    },
    /// A ring is 1, 2, 4 or 8 whole pages.
    Pages {
        /// Bytes that were to be a ring.
        len: usize,
    },
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overrun { req_prod, rsp_prod } => write!(
                f,
                "the guest's ring claims requests up to {req_prod} when {rsp_prod} are answered, which the ring \
                 cannot hold; the disk is cut off until the guest connects anew"
            ),
            Self::Responses { rsp_prod, rsp_cons } => write!(
                f,
                "the back end claims responses up to {rsp_prod} when {rsp_cons} were taken, more than there were \
                 requests; connect anew"
            ),
            Self::Pages { len } => {
                write!(
                    f,
                    "a ring is 1, 2, 4 or 8 pages of 4096 bytes, and not {len} bytes; check ring-page-order"
                )
            }
        }
    }
}

impl std::error::Error for RingError {}
