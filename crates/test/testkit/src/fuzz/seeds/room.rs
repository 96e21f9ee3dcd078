//! Bells of disks that want room.

use tapio_control::RoomBell;

use super::Shelf;

pub fn put_into(shelf: &mut Shelf) {
    let bell = RoomBell { pid: 4711, minor: 3, len: 8 << 20, wanted: 72 << 20, waiting: false };
    shelf.put("room_bell", "ahead", bell.datagram());
    let bell = RoomBell { pid: 1, minor: 0, len: 0, wanted: u64::MAX, waiting: true };
    shelf.put("room_bell", "waiting", bell.datagram());
}
