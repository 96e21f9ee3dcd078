//! Disks whose volumes are too short get room: docs/design/thin.md.
//!
//! A disk that needs less than its volume has rings as well, and its volume becomes shorter.
//!
//! A disk process rings ([`tapio_control::RoomBell`]). The disk that rang is asked what it wants, the worker of its SR
//! makes the volume longer, and the disk is told to look. A disk rings again as long as it wants room, so nothing of
//! this is remembered: a daemon that dies in the middle is rung up by the next bell, and so is its successor.
//!
//! All that is wanted of one SR goes through one thread, a few disks at a time. Each host does so for its own disks:
//! where several share an SR, their workers take turns.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_control::{BELL_LEN_MAX, RoomBell};
use tapio_model::{ApiError, Value};
use tapio_sm::{RoomMade, RoomSpare, RoomWanted, VdiInfo};
use uuid::Uuid;

use super::activate::simulated_latency;
use super::attached::Attached;
use super::records::{Alert, set_fields};
use super::work::Work;
use super::{Call, Storage};
use crate::db::{Object, reference_of};
use crate::disks::Rang;

/// Disks whose volumes become longer by one call: what is changed for all of them costs as much as for one.
const AT_ONCE: usize = 64;
/// How often it is looked whether the daemon is still there.
const LOOK: Duration = Duration::from_secs(30);
/// An SR that is full, or does not answer, is tried so often at most.
const AGAIN: Duration = Duration::from_millis(500);
/// Messages.
const FULL: &str = "SR_FULL";
const HAS_ROOM: &str = "SR_HAS_ROOM";

/// Disks that rang, by their SRs.
#[derive(Debug, Default)]
pub(super) struct Rooms(Mutex<BTreeMap<Uuid, Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    /// By their VBDs.
    rang: BTreeMap<Uuid, Rang>,
    /// A thread looks after them.
    is_tended: bool,
    /// Not before this.
    not_before: Option<Instant>,
    /// Whether the administrator was told that it is full; none where that is not known since the start.
    is_full: Option<bool>,
}

impl Rooms {
    /// Takes note of a disk that rang; whether a thread has to be started for its SR.
    fn ring(&self, rang: Rang) -> bool {
        let mut all = self.0.lock();
        let waiting = all.entry(rang.sr).or_default();
        waiting.rang.insert(rang.vbd, rang);
        !std::mem::replace(&mut waiting.is_tended, true)
    }

    /// The next of an SR, and when they may be tried; none: the thread ends.
    fn next(&self, sr: Uuid) -> Option<(Vec<Rang>, Option<Instant>)> {
        let mut all = self.0.lock();
        let waiting = all.get_mut(&sr)?;
        let mut next = Vec::new();
        while next.len() < AT_ONCE {
            let Some((_, rang)) = waiting.rang.pop_first() else { break };
            next.push(rang);
        }
        waiting.is_tended = !next.is_empty();
        waiting.is_tended.then_some((next, waiting.not_before.take()))
    }

    /// Something failed: the next try comes later. What rang is served then.
    fn later(&self, sr: Uuid) {
        self.0.lock().entry(sr).or_default().not_before = Some(Instant::now() + AGAIN);
    }

    /// The thread of an SR is not there.
    fn is_not_tended(&self, sr: Uuid) {
        self.0.lock().entry(sr).or_default().is_tended = false;
    }

    /// Whether that is news.
    fn set_full(&self, sr: Uuid, is_full: bool, before: impl FnOnce() -> bool) -> bool {
        let known = self.0.lock().entry(sr).or_default().is_full;
        let known = known.unwrap_or_else(before);
        self.0.lock().entry(sr).or_default().is_full = Some(is_full);
        known != is_full
    }
}

/// Hears disks that want room from now on.
pub fn listen(storage: &Arc<Storage>) {
    let socket = match bind(&storage.room_socket) {
        Ok(socket) => socket,
        Err(error) => {
            let path = storage.room_socket.display();
            tracing::error!(%path, %error, "disks cannot ask for room: those on thin volumes wait when theirs are full");
            return;
        }
    };
    let storage = Arc::downgrade(storage);
    let hear = move || hear(&socket, &storage);
    if let Err(error) = std::thread::Builder::new().name("room".to_owned()).spawn(hear) {
        tracing::error!(%error, "no thread hears disks that want room");
    }
}

fn bind(path: &Path) -> io::Result<UnixDatagram> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixDatagram::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

fn hear(socket: &UnixDatagram, storage: &Weak<Storage>) {
    let mut datagram = [0; BELL_LEN_MAX + 1];
    loop {
        let heard = socket.recv(&mut datagram);
        let Some(storage) = storage.upgrade() else { return };
        match heard {
            Ok(len) => {
                let rang = RoomBell::parse(&datagram[..len]).and_then(|bell| storage.disks.rang(&bell));
                if let Some(rang) = rang {
                    rings(&storage, rang);
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                tracing::error!(%error, "disks that want room are not heard any more");
                return;
            }
        }
    }
}

fn rings(storage: &Arc<Storage>, rang: Rang) {
    if !storage.rooms.ring(rang) {
        return;
    }
    let (same, sr) = (Arc::clone(storage), rang.sr);
    let tend = move || {
        // One that ends in a defect leaves the next to the next bell.
        let _tended = Tended(&same, sr);
        while let Some((next, not_before)) = same.rooms.next(sr) {
            std::thread::sleep(
                not_before.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now())),
            );
            if let Err(error) = serve(&Call::own(&same), sr, &next) {
                tracing::warn!(%sr, %error, "disks that want room have to wait");
                same.rooms.later(sr);
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("sr-room".to_owned()).spawn(tend) {
        tracing::warn!(%sr, %error, "no thread to make room for disks: tried again when one asks again");
        storage.rooms.is_not_tended(sr);
    }
}

/// A thread looks after an SR until this is dropped.
struct Tended<'a>(&'a Storage, Uuid);

impl Drop for Tended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.rooms.is_not_tended(self.1);
        }
    }
}

/// Makes room for some disks of an SR.
fn serve(call: &Call, sr: Uuid, rang: &[Rang]) -> Result<(), ApiError> {
    let storage = &call.part;
    let attached = storage.attached(&reference_of(sr))?;
    simulated_latency(call, &attached.reference);
    let (mut wanted, mut spare) = (Vec::new(), Vec::new());
    for rang in rang {
        let report = storage.disks.look_for_room(rang.vbd).unwrap_or_else(|error| {
            // One that went meanwhile wants nothing, and one that does not answer rings again.
            tracing::info!(vbd = %rang.vbd, %error, "a disk that rang does not say what it wants");
            None
        });
        match report {
            Some(report) if report.wanted > report.len => {
                wanted.push(RoomWanted { vdi: rang.vdi, len: report.wanted });
            }
            Some(report) if report.wanted == 0 && report.enough > 0 && report.enough < report.len => {
                spare.push(RoomSpare { vdi: rang.vdi, enough: report.enough });
            }
            _ => {}
        }
    }
    // Requests may wait for what is wanted, and none waits for what is spare.
    let given = give(call, &attached, &wanted);
    take_back(call, &attached, &spare);
    given
}

/// Makes the volumes of disks longer; their worker tells each of them.
fn give(call: &Call, attached: &Attached, wanted: &[RoomWanted]) -> Result<(), ApiError> {
    if wanted.is_empty() {
        return Ok(());
    }
    let (storage, sr) = (&call.part, attached.uuid);
    let made = attached.with(|sr| sr.make_room(&Work::new(call), wanted))?;
    for (vdi, error) in &made.refused {
        tracing::warn!(%sr, %vdi, %error, "the volume of a disk in use does not become longer");
    }
    if made.is_full || !made.refused.is_empty() {
        storage.rooms.later(sr);
    }
    if let Err(error) = record_sizes(call, &made.longer) {
        tracing::warn!(%sr, %error, "the records of disks have the sizes of before");
    }
    if let Some(is_full) = fullness(&made) {
        tell(call, attached, is_full, wanted);
    }
    Ok(())
}

/// Makes the volumes of disks shorter that need less than they have. What does not work now is offered again.
fn take_back(call: &Call, attached: &Attached, spare: &[RoomSpare]) {
    if spare.is_empty() {
        return;
    }
    let sr = attached.uuid;
    let taken = attached.with(|sr| sr.take_room(&Work::new(call), spare)).and_then(|taken| {
        record_sizes(call, &taken.shorter)?;
        Ok(taken)
    });
    match taken {
        Ok(taken) => {
            for (vdi, error) in &taken.refused {
                tracing::info!(%sr, %vdi, %error, "the volume of a disk in use does not become shorter");
            }
        }
        Err(error) => tracing::warn!(%sr, %error, "disks keep room that they do not need"),
    }
}

fn record_sizes(call: &Call, vdis: &[VdiInfo]) -> Result<(), ApiError> {
    call.part.db.change(|change| {
        for info in vdis {
            let size = super::attached::int(info.physical_utilisation);
            set_fields(change, &reference_of(info.uuid), vec![("physical_utilisation", size)])?;
        }
        Ok(())
    })
}

/// Whether an SR is full by what came of a growth; none where that does not say it. It has room again when all that
/// asked have some ahead: what one gets of the last extents would be news each time, and the next one finds it full.
fn fullness(made: &RoomMade) -> Option<bool> {
    if made.is_full {
        return Some(true);
    }
    (!made.longer.is_empty() && made.refused.is_empty() && !made.is_short && !made.is_tight).then_some(false)
}

/// Tells the administrator once that an SR is full, and once that it is not any more.
fn tell(call: &Call, attached: &Attached, is_full: bool, wanted: &[RoomWanted]) {
    let (db, uuid) = (&call.part.db, attached.uuid.to_string());
    let was_told = || {
        let is_of = |message: &Arc<Object>| matches!(message.text("name"), FULL | HAS_ROOM);
        let messages = db.find("message", "obj_uuid", &uuid).into_iter().filter(is_of);
        let at = |message: &Arc<Object>| match message.get("timestamp") {
            Value::DateTime(at) => *at,
            _ => 0,
        };
        messages.max_by_key(at).is_some_and(|last| last.text("name") == FULL)
    };
    if !call.part.rooms.set_full(attached.uuid, is_full, was_told) {
        return;
    }
    let vdis: BTreeSet<String> = wanted.iter().map(|wanted| wanted.vdi.to_string()).collect();
    let vdis = vdis.into_iter().collect::<Vec<_>>().join(", ");
    if is_full {
        let body = format!(
            "SR {uuid} has no room for what its thin disks write: VMs wait with writes to VDI {vdis} and go on by \
             themselves when there is room. Make its device longer, or add one to its group ('vgextend'), or destroy \
             snapshots and VDIs that are not needed"
        );
        Alert { name: FULL, priority: 1, class: "SR", about: &uuid }.post(db, &body);
    } else {
        let body = format!("SR {uuid} has room again for what its disks write");
        Alert { name: HAS_ROOM, priority: 4, class: "SR", about: &uuid }.post(db, &body);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_of_an_sr_are_served_by_one_thread_a_few_at_a_time() {
        let rooms = Rooms::default();
        let sr = Uuid::from_u128(1);
        let rang = |vbd: u128| Rang { vbd: Uuid::from_u128(vbd), vdi: Uuid::from_u128(vbd + 100), sr };
        assert!(rooms.ring(rang(1)), "the first starts a thread");
        assert!((2..72).all(|vbd| !rooms.ring(rang(vbd))));
        assert!(!rooms.ring(rang(1)), "one that rings twice is there once");
        let (first, not_before) = rooms.next(sr).expect("they wait");
        assert_eq!((first.len(), not_before), (AT_ONCE, None));
        rooms.later(sr);
        let (rest, not_before) = rooms.next(sr).expect("the others");
        assert!(rest.len() == 71 - AT_ONCE && not_before.is_some());
        assert!(rooms.next(sr).is_none());
        assert!(rooms.ring(rang(1)), "the thread has ended");
    }

    #[test]
    fn the_administrator_is_told_once() {
        let (rooms, sr) = (Rooms::default(), Uuid::from_u128(1));
        assert!(!rooms.set_full(sr, true, || true), "an earlier daemon has told it");
        assert!(rooms.set_full(sr, false, || unreachable!("it is known")));
        assert!(!rooms.set_full(sr, false, || unreachable!("it is known")));
        assert!(rooms.set_full(sr, true, || unreachable!("it is known")));
    }

    #[test]
    fn what_one_gets_of_the_last_extents_is_no_news() {
        let vdi = Uuid::from_u128(1);
        let info = VdiInfo {
            uuid: vdi,
            location: String::new(),
            virtual_size: 1 << 30,
            physical_utilisation: 64 << 20,
            managed: true,
            read_only: false,
            parent: None,
            name_label: None,
            sm_config: BTreeMap::new(),
            cbt_enabled: false,
            is_metadata: false,
            told: None,
        };
        let longer = RoomMade { longer: vec![info], ..RoomMade::default() };
        let refused = vec![(vdi, ApiError::internal("x"))];
        for (made, says) in [
            (longer.clone(), Some(false)),
            // It was long enough already.
            (RoomMade::default(), None),
            (RoomMade { refused, ..RoomMade::default() }, None),
            (RoomMade { is_tight: true, ..longer.clone() }, None),
            (RoomMade { is_short: true, is_tight: true, ..longer.clone() }, None),
            (RoomMade { is_full: true, is_short: true, is_tight: true, ..longer }, Some(true)),
            (RoomMade { is_full: true, is_short: true, is_tight: true, ..RoomMade::default() }, Some(true)),
        ] {
            assert_eq!(fullness(&made), says, "{made:?}");
        }
    }
}
