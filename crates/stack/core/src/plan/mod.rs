//! Operations as plans of small steps.
//!
//! ```text
//!   Serial ─┬─ create                       a leaf does the work, and it alone takes permits: one of the host,
//!           ├─ Parallel ─┬─ plug vda        one of its VM, one of its SR. All at once or none, so what
//!           │            └─ plug vdb        waits holds nothing, and no nesting can starve.
//!           └─ unpause
//! ```
//!
//! When a leaf fails, those that run go on to their end, those that have not begun never do, and what was done is
//! undone in reverse. Below [`Plan::BestEffort`] that happens too, and the rest goes on as if it had not been asked
//! for.
//!
//! A leaf may do a part of its work on a thread of its own ([`Doing::alongside`]), which takes no permits of its own.
//!
//! | module | holds |
//! |---|---|
//! | `tree` | what a plan is |
//! | `doing` | what a running step is given |
//! | `schedule` | what may run next: a state machine without threads and clocks |
//! | `runner` | the threads around it |
//! | `timeline` | what ran when, for people |
//! | `steps` | named places at which tests end the process |

mod doing;
mod runner;
mod schedule;
pub mod steps;
mod timeline;
mod tree;

pub use doing::Doing;
pub use runner::Plans;
pub use schedule::{Limits, Permits};
pub use timeline::{Timeline, TimelineStep};
pub use tree::{Leaf, Plan, Work};
