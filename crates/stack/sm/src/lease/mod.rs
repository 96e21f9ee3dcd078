//! Several hosts on one SR without a pool: leases on the storage itself. See `docs/design/shared-storage.md`.
//!
//! ```text
//! layout area    the bytes, and where they lie      seen turn   who is alive; the SR's lock among hosts
//! keeper status  renews the lease of this host      disks       its disk processes, which are stopped when that fails
//! guests         those with disks of the SR, which end when the lease does
//! member         the host in the area: joins, locks, holds VDIs, leaves           place   of an SR, made if wanted
//! ctx shared     an SR whose calls are fenced       config      when an SR has an area
//! ```
//!
//! [`Fence`] is all that changes of an SR ask of it. The lease of a pool's coordinator can be another one.

mod area;
mod config;
mod ctx;
mod disks;
mod end;
mod guests;
mod keeper;
pub mod layout;
mod member;
mod place;
pub mod seen;
mod shared;
mod status;
#[cfg(test)]
mod tests;
mod turn;

use tapio_types::ApiError;

pub use config::{HOST, SHARED};
pub(crate) use config::{SILENCE_KEY, Wanted, wanted};
pub(crate) use ctx::Fenced;
pub use guests::{end_guests_by, forget_guest, note_guest};
pub use keeper::{keep, run_keepers_as};
pub(crate) use member::{Locked, Member};
pub(crate) use place::{of_directory, of_group};
pub(crate) use shared::Shared;
pub use status::{check_kept, has_ended_guests, others_alive};

/// What says that this host may still change an SR.
pub(crate) trait Fence: Send + Sync {
    /// The fencing number: greater than that of every holder before.
    fn number(&self) -> u64;

    /// Refuses where the number is not the highest any more, or may not be.
    ///
    /// # Errors
    /// 37, with the reason and the next step.
    fn check(&self) -> Result<(), ApiError>;
}
