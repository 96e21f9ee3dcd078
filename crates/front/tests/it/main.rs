//! Front ends on real disks, over real sockets, with real and with hostile clients.

mod nbd;
mod vhost_user;
