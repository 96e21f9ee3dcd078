//! Numbers of the ioctls (Linux `include/uapi/xen/{gntdev,evtchn,gntalloc}.h`).
//!
//! All have the direction "none": the size of the argument in bits 16 to 29, the letter in 8 to 15, the number in 0 to
//! 7.

const fn number(letter: u8, number: u32, len: usize) -> u32 {
    (len as u32) << 16 | (letter as u32) << 8 | number
}

/// `IOCTL_GNTDEV_MAP_GRANT_REF`: which grants the next mapping is of.
pub const MAP_GRANT_REF: u32 = number(b'G', 0, 24);
/// `IOCTL_GNTDEV_UNMAP_GRANT_REF`.
pub const UNMAP_GRANT_REF: u32 = number(b'G', 1, 16);
/// `IOCTL_GNTDEV_SET_MAX_GRANTS`; kernels since 5.5 have no such limit for a descriptor.
pub const SET_MAX_GRANTS: u32 = number(b'G', 3, 4);
/// `IOCTL_GNTDEV_SET_UNMAP_NOTIFY`.
pub const SET_UNMAP_NOTIFY: u32 = number(b'G', 7, 16);
/// `IOCTL_GNTDEV_GRANT_COPY`.
pub const GRANT_COPY: u32 = number(b'G', 8, 16);

/// `IOCTL_GNTALLOC_ALLOC_GREF`.
pub const ALLOC_GREF: u32 = number(b'G', 5, 24);
/// `IOCTL_GNTALLOC_DEALLOC_GREF`.
pub const DEALLOC_GREF: u32 = number(b'G', 6, 16);

/// `IOCTL_EVTCHN_BIND_INTERDOMAIN`: answers with the port.
pub const BIND_INTERDOMAIN: u32 = number(b'E', 1, 8);
/// `IOCTL_EVTCHN_BIND_UNBOUND_PORT`: answers with the port.
pub const BIND_UNBOUND_PORT: u32 = number(b'E', 2, 4);
/// `IOCTL_EVTCHN_UNBIND`.
pub const UNBIND: u32 = number(b'E', 3, 4);
/// `IOCTL_EVTCHN_NOTIFY`.
pub const NOTIFY: u32 = number(b'E', 4, 4);
/// `IOCTL_EVTCHN_RESET`.
pub const RESET: u32 = number(b'E', 5, 0);
/// `IOCTL_EVTCHN_RESTRICT_DOMID`.
pub const RESTRICT_DOMID: u32 = number(b'E', 6, 2);
