//! Front ends over real sockets, on real disks.

mod vhost_user;
