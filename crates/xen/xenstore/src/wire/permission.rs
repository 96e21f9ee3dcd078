//! The domains that may read and write a node.

use std::fmt;

use super::strings::decimal;

/// Permissions of one node, at most: as many as fit into a message anyway.
pub const PERMISSIONS_MAX: usize = 1024;

/// What a domain may do with a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// `n`: nothing.
    None,
    /// `r`
    Read,
    /// `w`
    Write,
    /// `b`
    Both,
}

impl Access {
    /// The letter.
    pub const fn letter(self) -> char {
        match self {
            Self::None => 'n',
            Self::Read => 'r',
            Self::Write => 'w',
            Self::Both => 'b',
        }
    }

    /// Whether it includes reading.
    pub const fn reads(self) -> bool {
        matches!(self, Self::Read | Self::Both)
    }

    /// Whether it includes writing.
    pub const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Both)
    }
}

/// One entry of a node's list. The first names the owner, which may do everything, and what domains may that are not
/// listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Permission {
    /// What is allowed.
    pub access: Access,
    /// The domain.
    pub domid: u32,
}

impl Permission {
    /// `access` for `domid`.
    pub const fn new(access: Access, domid: u32) -> Self {
        Self { access, domid }
    }

    /// Reads `r5`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (letter, digits) = text.split_first()?;
        let access = match letter {
            b'n' => Access::None,
            b'r' => Access::Read,
            b'w' => Access::Write,
            b'b' => Access::Both,
            _ => return None,
        };
        let domid = u32::try_from(decimal(digits)?).ok()?;
        Some(Self { access, domid })
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.access.letter(), self.domid)
    }
}
