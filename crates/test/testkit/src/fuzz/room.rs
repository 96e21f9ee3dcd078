//! Bells of disks that want room.

use tapio_control::RoomBell;

/// What is heard is what would be rung, and names a process and a disk that there can be.
pub(super) fn room_bell(bytes: &[u8]) {
    let Some(bell) = RoomBell::parse(bytes) else { return };
    assert!(bell.pid > 0 && i32::try_from(bell.pid).is_ok() && bell.minor < tapio_control::MINOR_MAX);
    assert_eq!(RoomBell::parse(&bell.datagram()), Some(bell));
}
