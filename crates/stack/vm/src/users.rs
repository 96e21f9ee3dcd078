//! The users that guests run as: one of its own for each VM, out of a range that no other program uses.
//!
//! A VM's user is recorded in the file system alone: as the owner of the directory that its process may write
//! to. So a daemon that starts knows it for all guests that it finds, and two VMs never have the same one.

use std::collections::BTreeSet;

use uuid::Uuid;

/// Numbers of users, and of groups: a user's group has its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserRange {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl UserRange {
    /// Numbers that neither systemd nor `useradd` nor subordinate users of containers take: systemd's documentation
    /// ("Users, Groups, UIDs and GIDs") calls 1879048192 to 2147352575 unused.
    pub const DEFAULT: Self = Self { first: 0x7000_0000, count: 0x1_0000 };

    /// `FIRST-LAST`, without root and without 4294967295, which is no user.
    ///
    /// # Errors
    /// A sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let told = || format!("'{text}': FIRST-LAST is expected, as 1879048192-1879113727");
        let (first, last) = text.split_once('-').ok_or_else(told)?;
        let first: u32 = first.trim().parse().map_err(|_| told())?;
        let last: u32 = last.trim().parse().map_err(|_| told())?;
        if first == 0 || last < first || last == u32::MAX {
            return Err(told());
        }
        Ok(Self { first, count: last - first + 1 })
    }

    /// A user for this VM that is none of `taken`: from a place that follows from the VM, so that what one VM left
    /// behind is hardly ever another's.
    pub(crate) fn choose(self, vm: Uuid, taken: &BTreeSet<u32>) -> Option<u32> {
        let begin = u32::try_from(vm.as_u128() % u128::from(self.count)).unwrap_or(0);
        (0..self.count).map(|step| self.first + (begin + step) % self.count).find(|uid| !taken.contains(uid))
    }
}

impl std::fmt::Display for UserRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.first + (self.count - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vm_has_another_user_until_there_are_none() {
        let range = UserRange { first: 1000, count: 16 };
        let mut taken = BTreeSet::new();
        for number in 0..16_u128 {
            // All begin at the same place.
            let uid = range.choose(Uuid::from_u128(number * 16), &taken).unwrap();
            assert!((1000..1016).contains(&uid) && taken.insert(uid), "{uid}");
        }
        assert_eq!(range.choose(Uuid::nil(), &taken), None);
        taken.remove(&1007);
        assert_eq!(range.choose(Uuid::nil(), &taken), Some(1007));
    }

    #[test]
    fn ranges_are_read_as_they_are_shown() {
        let shown = UserRange::DEFAULT.to_string();
        assert_eq!(UserRange::parse(&shown), Ok(UserRange::DEFAULT));
        assert_eq!(UserRange::parse("5 - 5"), Ok(UserRange { first: 5, count: 1 }));
        for bad in ["", "5", "0-10", "10-5", "1-4294967295", "a-b", "1-2-3", "-1-5"] {
            assert!(UserRange::parse(bad).is_err(), "{bad}");
        }
    }
}
