//! What the operating system gives, behind types that check it.
//!
//! ```text
//!   private    what a program makes, and what is there already, closed to other users
//!   shm        directories and files in shared memory, which every local user can write to
//! ```
//!
//! Nothing here knows a disk, an image or a guest, and nothing here depends on another crate of this workspace.

pub mod private;
pub mod shm;
