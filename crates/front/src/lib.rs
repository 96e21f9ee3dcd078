//! Front ends: NBD and vhost-user-blk.
