//! The room of a disk on a device that becomes longer: the bell that is rung for it, and how it stands.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;

use tapio_control::{ROOM_SOCKET_VARIABLE, RoomBell, RoomReport};
use tapio_format::live::vhd::{AskForRoom, RoomGauge, RoomPlace, RoomWanted};

/// Rings for one disk.
#[derive(Debug)]
struct Bell {
    socket: UnixDatagram,
    daemon: PathBuf,
    minor: u16,
}

impl AskForRoom for Bell {
    fn ask(&self, wanted: &RoomWanted) {
        let bell = RoomBell {
            pid: std::process::id(),
            minor: self.minor,
            len: wanted.len,
            wanted: wanted.wanted,
            waiting: wanted.is_waiting,
        };
        // While no daemon hears it nothing is lost: it is rung again.
        let _ = self.socket.send_to(&bell.datagram(), &self.daemon);
    }
}

/// The room of a disk.
#[derive(Debug, Default)]
pub struct Room {
    bell: Option<Arc<Bell>>,
    gauge: Arc<RoomGauge>,
}

impl Room {
    /// Of the disk with this number; one of a process that no daemon has started asks nowhere.
    pub fn of(minor: u16) -> Self {
        let daemon =
            std::env::var_os(ROOM_SOCKET_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let bell = daemon.and_then(|daemon| {
            let socket = UnixDatagram::unbound().ok()?;
            // The data thread rings: it waits for no daemon.
            socket.set_nonblocking(true).ok()?;
            Some(Arc::new(Bell { socket, daemon, minor }))
        });
        Self { bell, gauge: Arc::default() }
    }

    /// Where images ask.
    pub fn place(&self) -> RoomPlace {
        match &self.bell {
            Some(bell) => RoomPlace::new(Arc::<Bell>::clone(bell), Arc::clone(&self.gauge)),
            None => RoomPlace::default(),
        }
    }

    /// How it stands; none where the disk asks for no room.
    pub fn report(&self) -> Option<RoomReport> {
        let facts = self.gauge.facts();
        (facts.len > 0).then(|| RoomReport {
            len: facts.len,
            used: facts.used,
            ahead: facts.ahead,
            wanted: facts.wanted,
            enough: facts.enough,
            waiting_ms: facts.waiting.map(|waiting| u64::try_from(waiting.as_millis()).unwrap_or(u64::MAX)),
            grown: facts.grown,
        })
    }
}
