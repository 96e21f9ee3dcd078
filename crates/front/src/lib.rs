//! Front ends: NBD and vhost-user-blk.
//!
//! Each pulls requests from its guest while the disk's [`tapio_block::Port`] has room, and answers them in batches.
//! Must never
//! know a format, nor another front end.

pub mod nbd;
pub mod vhost_user;
