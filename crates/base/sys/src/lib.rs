//! What the operating system gives, behind types that check it.
//!
//! ```text
//!   process    whether a process is there, and which one it is
//!   poll       waiting for descriptors
//!   epoll      the same of many, which may come and go meanwhile
//!   lock       advisory locks of files
//!   memory     what the allocator keeps
//!   socket     which process is at the other end; descriptors that travel with bytes
//!   successor  taking the place of a process that was killed
//!   private    what a program makes, and what is there already, closed to other users
//!   shm        directories and files in shared memory, which every local user can write to
//! ```
//!
//! Nothing here knows a disk, an image or a guest, and nothing here depends on another crate of this workspace.

pub mod epoll;
pub mod lock;
pub mod memory;
pub mod poll;
pub mod private;
pub mod process;
pub mod shm;
pub mod socket;
pub mod successor;
