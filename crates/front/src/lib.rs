//! Front ends: NBD and vhost-user-blk.

pub mod nbd;
pub mod vhost_user;
