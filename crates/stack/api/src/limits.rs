//! How large a message may be, counted in what it costs to hold it.

use std::fmt;

/// Bounds of a message.
#[derive(Clone, Copy, Debug)]
pub struct MessageLimits {
    /// Sets and maps within each other.
    pub depth_max: usize,
    /// Values in all, members and keys among them.
    pub values_max: usize,
}

impl Default for MessageLimits {
    /// An event's snapshot in a batch is six deep; an SR of 10,000 disks has fewer than 100,000 values in any one
    /// answer's field.
    fn default() -> Self {
        Self { depth_max: 32, values_max: 100_000 }
    }
}

/// A message that is none: what is wrong with it, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed(pub String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Malformed {}

/// What is left of a message's bounds while it is read.
#[derive(Debug)]
pub(crate) struct Budget {
    limits: MessageLimits,
    values: usize,
}

impl Budget {
    pub(crate) const fn new(limits: MessageLimits) -> Self {
        Self { limits, values: 0 }
    }

    /// Takes one value at `depth` (the outermost is 0) out of the budget.
    pub(crate) fn take(&mut self, depth: usize) -> Result<(), Malformed> {
        self.values += 1;
        if self.values > self.limits.values_max {
            return Err(Malformed(format!("the message has more than {} values", self.limits.values_max)));
        }
        if depth > self.limits.depth_max {
            return Err(Malformed(format!("the message is more than {} levels deep", self.limits.depth_max)));
        }
        Ok(())
    }
}
