//! The right of an operation to change the objects that it holds.

use parking_lot::{RwLock, RwLockReadGuard};

/// The right of an operation to change the objects that it holds. A forced operation takes it from one that hangs:
/// whatever that one still does, when its storage or its guest answers at last, it changes nothing any more.
#[derive(Debug, Default)]
pub(crate) struct Claim {
    right: RwLock<Right>,
}

/// How an operation stands to its objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Right {
    /// It holds them.
    #[default]
    Held,
    /// It waits for a guest, and a forced operation on the VM may take over.
    Yields,
    /// A forced operation has taken over.
    Lost,
    /// It has ended by itself.
    Over,
}

impl Claim {
    /// While this is held the right is not taken away; none if it was. Only for what ends by itself.
    pub(crate) fn hold(&self) -> Option<RwLockReadGuard<'_, Right>> {
        let right = self.right.read();
        matches!(*right, Right::Held | Right::Yields).then_some(right)
    }

    /// Waits for a guest, while a forced operation may take over; none if one did.
    pub(crate) fn yielding<T>(&self, wait: impl FnOnce() -> T) -> Option<T> {
        *self.right.write() = Right::Yields;
        let answer = wait();
        let mut right = self.right.write();
        if *right == Right::Lost {
            return None;
        }
        *right = Right::Held;
        Some(answer)
    }

    fn take_from(&self, rights: &[Right]) -> bool {
        let mut right = self.right.write();
        let is_taken = rights.contains(&right);
        if is_taken {
            *right = Right::Lost;
        }
        is_taken
    }

    /// Takes the right away; false if the operation has ended. Waits for what [`Self::hold`]s it: the caller must hold
    /// no lock.
    pub(crate) fn take(&self) -> bool {
        self.take_from(&[Right::Held, Right::Yields])
    }

    /// The same, of an operation that waits for a guest; false for others.
    pub(crate) fn take_if_yielding(&self) -> bool {
        self.take_from(&[Right::Yields])
    }

    /// The operation ends.
    pub(super) fn end(&self) {
        let mut right = self.right.write();
        if *right != Right::Lost {
            *right = Right::Over;
        }
    }
}
