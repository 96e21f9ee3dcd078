//! Logs of programs.
//!
//! ```text
//!   any thread --say--> queue --> one thread --> sink: a file that it rotates, the system's log, standard error
//! ```
//!
//! [`Log`] never makes its caller wait: a queue that is full because its file system hangs or is full loses lines,
//! which are counted, and the number is written when there is room. [`Rotated`] is a file that is rotated by its
//! writer, by size and daily. [`shorten()`] does the same for a file that a child writes, which knows nothing of that.
//! [`say`] is for programs with one log. Nothing here knows what is logged.

mod days;
mod kept;
mod lines;
mod process;
mod quiet;
mod rotated;
mod shorten;

pub use days::stamp;
pub use kept::Rotation;
pub use lines::{Log, Sink};
pub use process::{Sender, capture, flush, flush_output, has_journal, is_journal, receive, say, to};
pub use rotated::Rotated;
pub use shorten::shorten;
