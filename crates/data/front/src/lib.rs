//! Front ends: NBD, vhost-user-blk, rings of Xen guests, and devices of this host.
//!
//! Each pulls requests from its guest while the disk's [`tapio_block::Port`] has room, and answers them in batches.
//! Must never
//! know a format, nor another front end.

pub mod blkif;
pub mod device;
pub mod nbd;
pub mod vhost_user;
