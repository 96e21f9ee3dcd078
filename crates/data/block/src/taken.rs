//! A request that the disk has taken, and where it came from.

use crate::request::Request;

/// Where a request comes from, for statistics: the slot of the front end's number among those the disk is
/// published under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u8);

impl Origin {
    /// No front end's in particular.
    pub const UNKNOWN: Self = Self(u8::MAX);

    /// The slot `index`; unknown above 254.
    pub fn of(index: usize) -> Self {
        Self(u8::try_from(index).unwrap_or(u8::MAX))
    }

    /// The slot, if it is known.
    pub const fn index(self) -> Option<usize> {
        if self.0 == u8::MAX { None } else { Some(self.0 as usize) }
    }
}

/// A request that the disk has taken.
#[derive(Debug)]
pub struct Taken {
    /// What the front end asked.
    pub request: Request,
    /// Where it came from.
    pub origin: Origin,
    /// Pages of the SR's pool that it holds.
    pub pages: u32,
    /// Number of the client it came by, modulo 256: for traces.
    pub client: u8,
}

impl From<Request> for Taken {
    fn from(request: Request) -> Self {
        Self { request, origin: Origin::UNKNOWN, pages: 0, client: 0 }
    }
}
