//! Room on a device that becomes longer when it is asked for: how a disk stands, and the bell that it rings.
//!
//! A disk whose volume is too short rings: it sends a datagram to the socket that `TAPIO_ROOM_SOCKET` names. The bell
//! says which disk rang, and for people what it wants. Who hears it asks the disk itself ([`LookForRoom`]), by the
//! process that it knows the disk to have. A bell that was forged or lost does no harm: it is rung again as long as
//! room is wanted, and what counts is the disk's answer, not the bell. A disk that needs less than it has rings as
//! well, a few times.
//!
//! [`LookForRoom`]: crate::command::LookForRoom

use serde::{Deserialize, Serialize};

use crate::MINOR_MAX;

/// Names the socket of the daemon that hears bells.
pub const ROOM_SOCKET_VARIABLE: &str = "TAPIO_ROOM_SOCKET";
/// Longest datagram.
pub const BELL_LEN_MAX: usize = 1024;

/// A disk wants room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomBell {
    /// Of the disk process.
    pub pid: u32,
    /// Minor number.
    pub minor: u16,
    /// Bytes of the volume as the disk knows it.
    pub len: u64,
    /// Bytes that it shall have at least; fewer than it has: those are enough.
    pub wanted: u64,
    /// Requests wait.
    pub waiting: bool,
}

impl RoomBell {
    /// The datagram.
    pub fn datagram(&self) -> Vec<u8> {
        // Numbers and a truth value: they can be written.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What a datagram says; none where it is no bell.
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        if datagram.len() > BELL_LEN_MAX {
            return None;
        }
        let bell: Self = serde_json::from_slice(datagram).ok()?;
        let is_possible = bell.pid > 0 && i32::try_from(bell.pid).is_ok() && bell.minor < MINOR_MAX;
        is_possible.then_some(bell)
    }
}

/// How the room of a disk stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomReport {
    /// Bytes of the volume.
    pub len: u64,
    /// Bytes of it up to the end of what is set aside for blocks.
    pub used: u64,
    /// With less room than this ahead, more is asked for, in bytes.
    pub ahead: u64,
    /// Bytes that the volume shall have at least; 0 while no room is wanted.
    pub wanted: u64,
    /// Bytes of the volume that are enough, with what is kept ahead; 0 where the rest is not worth a change.
    #[serde(default)]
    pub enough: u64,
    /// Milliseconds for which requests have waited for room; none while none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_ms: Option<u64>,
    /// How often the volume has become longer while it was open.
    pub grown: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_is_heard_as_it_was_rung_and_nothing_else_is_one() {
        let bell = RoomBell { pid: 7, minor: 3, len: 8 << 20, wanted: 72 << 20, waiting: true };
        let datagram = bell.datagram();
        assert_eq!(RoomBell::parse(&datagram), Some(bell.clone()));
        assert!(datagram.len() < BELL_LEN_MAX);
        let silly = [RoomBell { pid: 0, ..bell.clone() }, RoomBell { minor: MINOR_MAX, ..bell }];
        for bad in silly.map(|bell| bell.datagram()).into_iter().chain([
            Vec::new(),
            b"{}".to_vec(),
            b"[1]".to_vec(),
            vec![b'1'; BELL_LEN_MAX + 1],
            br#"{"pid":4294967295,"minor":1,"len":1,"wanted":1,"waiting":true}"#.to_vec(),
        ]) {
            assert_eq!(RoomBell::parse(&bad), None, "{}", String::from_utf8_lossy(&bad));
        }
    }
}
