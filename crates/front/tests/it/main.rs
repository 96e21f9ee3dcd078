//! Front ends on real disks, with real and with hostile clients.

mod nbd;
//! Front ends over real sockets, on real disks.

mod vhost_user;
