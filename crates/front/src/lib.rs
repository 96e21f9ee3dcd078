//! Front ends: NBD and vhost-user-blk.

pub mod nbd;
