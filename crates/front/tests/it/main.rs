//! Front ends on real disks, with real and with hostile clients.

mod nbd;
