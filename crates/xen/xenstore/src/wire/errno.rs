//! Names of refusals.

use std::fmt;

macro_rules! errnos {
    ($($name:ident)*) => {
        /// Why the daemon refused something; an ERROR message has the name, not the number, because numbers differ
        /// between systems (`xsd_errors`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the names of the specification")]
        pub enum Errno { $($name),* }

        impl Errno {
            /// All that the protocol knows.
            pub const ALL: &'static [Errno] = &[$(Errno::$name),*];

            /// As on the wire.
            pub const fn name(self) -> &'static str {
                match self { $(Errno::$name => stringify!($name)),* }
            }

            /// The number on this system.
            pub const fn number(self) -> i32 {
                match self { $(Errno::$name => libc::$name),* }
            }
        }
    };
}

errnos! {
    EINVAL EACCES EEXIST EISDIR ENOENT ENOMEM ENOSPC EIO ENOTEMPTY ENOSYS EROFS EBUSY EAGAIN EISCONN E2BIG EPERM
}

impl Errno {
    /// The one of this name; what is not known counts as [`Errno::EINVAL`], as in libxenstore.
    pub fn from_name(name: &str) -> Self {
        Self::ALL.iter().copied().find(|errno| errno.name() == name).unwrap_or(Self::EINVAL)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
