//! Front ends: NBD and vhost-user-blk.

pub mod vhost_user;
