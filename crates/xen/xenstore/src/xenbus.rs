//! Where a device of a guest stands (`xen/include/public/io/xenbus.h`).

use std::fmt;

use super::wire::decimal;

/// The `state` that each side of a device writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum XenbusState {
    /// The other side is not there yet, or no longer.
    Unknown = 0,
    /// It begins.
    Initialising = 1,
    /// It has said what it offers, and waits for the other side.
    InitWait = 2,
    /// It has said everything, and waits to be connected.
    Initialised = 3,
    /// It works.
    Connected = 4,
    /// It ends: there is no new work.
    Closing = 5,
    /// It has let go of everything.
    Closed = 6,
    /// It changes.
    Reconfiguring = 7,
    /// It has changed.
    Reconfigured = 8,
}

impl XenbusState {
    /// All of them, by number.
    pub const ALL: [Self; 9] = [
        Self::Unknown,
        Self::Initialising,
        Self::InitWait,
        Self::Initialised,
        Self::Connected,
        Self::Closing,
        Self::Closed,
        Self::Reconfiguring,
        Self::Reconfigured,
    ];

    /// Its number, as xenstore has it.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Reads the value of a node; `None` if it is no state.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let number = usize::try_from(decimal(value)?).ok()?;
        Self::ALL.get(number).copied()
    }

    /// The specification's name of it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "Unknown",
            Self::Initialising => "Initialising",
            Self::InitWait => "InitWait",
            Self::Initialised => "Initialised",
            Self::Connected => "Connected",
            Self::Closing => "Closing",
            Self::Closed => "Closed",
            Self::Reconfiguring => "Reconfiguring",
            Self::Reconfigured => "Reconfigured",
        }
    }
}

/// The number.
impl fmt::Display for XenbusState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_their_numbers() {
        for (number, state) in XenbusState::ALL.into_iter().enumerate() {
            assert_eq!(state.number() as usize, number);
            assert_eq!(XenbusState::parse(state.to_string().as_bytes()), Some(state));
        }
        assert_eq!(XenbusState::parse(b"4"), Some(XenbusState::Connected));
        for bad in [&b""[..], b"9", b"-1", b"4 ", b"4\0", b"x", b"99999999999999999999"] {
            assert_eq!(XenbusState::parse(bad), None, "{bad:?}");
        }
    }
}
