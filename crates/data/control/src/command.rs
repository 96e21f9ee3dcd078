//! The commands of our own protocol: each is a structure that says what it answers, and all of them are [`Command`].
//!
//! ```text
//!   tapio disk, tapiod ──OwnClient::call(&Grow { minor, len })──▶ {"command":"grow","minor":0,"len":…}
//!                                                                       │ server: check, and wait for its turn
//!   Result<DiskInfo> ◀──{"ok":{"sectors":…}}── Handle<Grow>::handle ◀───┘
//! ```
//!
//! To add one: a structure with its [`DiskCommand`] in the file of its topic, its name in the table below, and
//! [`Handle`] of the disk process (`crates/data/disk/src/commands`), without which that does not compile.

mod disk;
mod fronts;
mod images;
mod mirror;
mod room;
mod settings;

use std::fmt;
use std::os::fd::OwnedFd;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::key::Key;
use crate::{ControlError, Errno, Result};

pub use disk::{Attach, Close, Detach, DiskInfo, Grow, Hello, List, Open, Pause, Quit, Resume, Stats};
pub use fronts::{EXPORT_NAMES_MAX, FrontAdd, FrontAdmit, FrontFollow, FrontList, FrontRemove, SecretName};
pub use images::{Commit, JobCancel, JobList, JobRate, Snapshot, SwapLeaf};
pub use mirror::{MirrorCancel, MirrorPivot, MirrorRate, MirrorResume, MirrorStart, MirrorStatus};
pub use room::{LookForRoom, Shorten};
pub use settings::{Limits, SetLimits, SetPolling, SetShare, SetTransfers, TraceStart, TraceStop};

/// One thing that a disk process can be asked.
pub trait DiskCommand: Clone + Into<Command> {
    /// What it answers.
    type Reply: Serialize + DeserializeOwned;
    /// Whether it may run at the same time as any other command: it must not wait for one, nor for the storage.
    const IS_CONCURRENT: bool = false;

    /// Checks everything that can be wrong without looking at a disk; `fds` descriptors came along.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    fn check(&self, _fds: usize) -> Result<()> {
        Ok(())
    }
}

/// What a command answers that has nothing to tell: `{}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {}

/// Does what a command asks.
pub trait Handle<C: DiskCommand> {
    /// Does it, and says what came of it.
    ///
    /// # Errors
    /// Why it cannot be done.
    fn handle(&self, command: C, call: &mut Call<'_>) -> Result<C::Reply>;
}

/// The client of a command. An operation that waits looks here now and then.
pub trait Caller {
    /// The client has hung up, or the process is asked to end: the wait is in vain.
    fn gone(&self) -> bool;
}

/// The process itself, which waits for what it asks.
struct Itself;

impl Caller for Itself {
    fn gone(&self) -> bool {
        false
    }
}

/// What comes with a command in addition to its text.
pub struct Call<'a> {
    /// The client.
    pub caller: &'a dyn Caller,
    /// Descriptors that came along, which the command names by index. What is not taken is closed.
    pub fds: Vec<OwnedFd>,
    /// The key of the image that is to be opened.
    pub key: Option<Key>,
}

impl<'a> Call<'a> {
    /// A call with nothing but its text.
    pub fn of(caller: &'a dyn Caller) -> Self {
        Self { caller, fds: Vec::new(), key: None }
    }

    /// A call that the process makes itself.
    pub fn of_itself() -> Self {
        Self::of(&Itself)
    }
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("fds", &self.fds).field("key", &self.key).finish_non_exhaustive()
    }
}

macro_rules! commands {
    ($($name:ident)*) => {
        /// What can be asked.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(tag = "command", rename_all = "kebab-case")]
        pub enum Command {
            /// See [`Hello`], which the server answers by itself.
            Hello(Hello),
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name),)*
        }

        impl Command {
            #[cfg(test)]
            pub(crate) const COUNT: usize = 1 + [$(stringify!($name)),*].len();

            /// See [`DiskCommand::check`].
            ///
            /// # Errors
            /// `EINVAL` with what is wrong.
            pub fn check(&self, fds: usize) -> Result<()> {
                match self {
                    Self::Hello(command) => command.check(fds),
                    $(Self::$name(command) => command.check(fds),)*
                }
            }

            /// See [`DiskCommand::IS_CONCURRENT`].
            pub const fn is_concurrent(&self) -> bool {
                match self {
                    Self::Hello(_) => Hello::IS_CONCURRENT,
                    $(Self::$name(_) => $name::IS_CONCURRENT,)*
                }
            }

            /// Has it handled, and writes what it answers.
            pub(crate) fn run(self, host: &dyn Handlers, call: &mut Call<'_>) -> Result<Value> {
                match self {
                    Self::Hello(command) => value(command.answer()?),
                    $(Self::$name(command) => value(Handle::<$name>::handle(host, command, call)?),)*
                }
            }
        }

        impl From<Hello> for Command {
            fn from(command: Hello) -> Self {
                Self::Hello(command)
            }
        }

        $(impl From<$name> for Command {
            fn from(command: $name) -> Self {
                Self::$name(command)
            }
        })*

        /// Handles every command.
        pub trait Handlers: $(Handle<$name> +)* {}

        impl<T: $(Handle<$name> +)* ?Sized> Handlers for T {}
    };
}

commands! {
    List Stats Attach Detach Open Grow Close Pause Resume DiskInfo Quit
    FrontAdd FrontRemove FrontFollow FrontAdmit FrontList
    SetPolling SetLimits SetShare SetTransfers Limits TraceStart TraceStop
    MirrorStart MirrorStatus MirrorResume MirrorRate MirrorPivot MirrorCancel
    Snapshot SwapLeaf Commit JobList JobCancel JobRate LookForRoom Shorten
}

fn value(of: impl Serialize) -> Result<Value> {
    serde_json::to_value(of)
        .map_err(|error| ControlError::new(Errno::EIO, format!("the answer cannot be written: {error}")))
}
