//! What makes a ring unusable.

use std::fmt;

/// Why a ring cannot be used, or not any longer. After one of these the queue is broken until it is set up anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingError {
    /// The size is not a power of two up to 32768; of a packed ring, not a number up to that.
    Size(u32),
    /// A part of the ring does not lie inside one region of guest memory.
    Outside(&'static str),
    /// A part of the ring is not aligned as virtio demands.
    Misaligned(&'static str),
    /// The available index is ahead of us by more than the ring holds.
    AvailJump { from: u16, to: u16 },
    /// A head lies outside the descriptor table.
    Head(u16),
    /// A head was made available again before it was answered.
    HeadBusy(u16),
    /// More descriptors of a packed ring are in use than it has.
    Overrun,
    /// The place to read on at does not exist.
    Base(u32),
    /// A descriptor names a successor outside its table.
    Next(u16),
    /// A chain is longer than a request may be, or runs in a circle.
    ChainLength,
    /// An indirect table has no whole number of descriptors, none at all, or more than a request may have.
    IndirectLen(u32),
    /// An indirect table lies outside guest memory.
    IndirectOutside(u64),
    /// An indirect descriptor inside an indirect table.
    IndirectNested,
    /// An indirect descriptor that was not negotiated.
    IndirectRefused,
    /// A request without a status byte that can be written: it cannot be answered.
    NoStatus,
    /// The event counter that kicks the queue cannot be read.
    Kick(i32),
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(size) => {
                write!(
                    f,
                    "a queue of {size} descriptors; it must be a power of two up to 32768 (packed: any number)"
                )
            }
            Self::Outside(part) => write!(f, "the {part} lies outside guest memory"),
            Self::Misaligned(part) => write!(f, "the {part} is not aligned"),
            Self::AvailJump { from, to } => {
                write!(f, "the available index jumped from {from} to {to}, further than the ring is long")
            }
            Self::Head(head) => write!(f, "request head {head} lies outside the descriptor table"),
            Self::HeadBusy(head) => write!(f, "request head {head} was given again before it was answered"),
            Self::Overrun => write!(f, "more descriptors are in use than the ring has"),
            Self::Base(base) => write!(f, "a ring cannot be read on at {base:#x}"),
            Self::Next(next) => write!(f, "a descriptor is followed by {next}, outside its table"),
            Self::ChainLength => write!(f, "a descriptor chain is too long or runs in a circle"),
            Self::IndirectLen(len) => write!(f, "an indirect table has {len} bytes"),
            Self::IndirectOutside(at) => write!(f, "an indirect table at {at:#x} lies outside guest memory"),
            Self::IndirectNested => write!(f, "an indirect descriptor inside an indirect table"),
            Self::IndirectRefused => write!(f, "an indirect descriptor that was not negotiated"),
            Self::NoStatus => write!(f, "a malformed request without a status byte"),
            Self::Kick(errno) => {
                write!(f, "the kick event cannot be read: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for RingError {}
