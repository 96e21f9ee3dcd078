//! The host that sends: disks on SRs that only it has go along, to SRs that only the receiver has.
//!
//! ```text
//!       host that sends                                 host that receives
//!   a  note of the departure, with its disks
//!   b                                                   note of the arrival; new VDIs, each with a mark and an export
//!                                                       that one client may write (land, see `landing`)
//!   c  each disk process mirrors onto its export, until
//!      both sides are the same; writes go to both
//!   1  as every guest goes, see the module above: its memory, while it runs and writes
//!   4  the guest has stopped: all mirrors are the same
//!      still (seal). It closes the disks, and with them
//!      the mirrors
//!   5                                                   closes the exports: all that came is durable. Opens the new
//!                                                       VDIs for the guest, and notes that (open)
//!   6  one change: the record names the other host, its
//!      VBDs lead to the new VDIs, which lose their mark;
//!      a note that the old VDIs go
//!   7                                                   the guest goes on
//!   8  removes the old images
//! ```
//!
//! What a kill or a cut leaves:
//!
//! - before 6 the record says that the sender has the VM. Its disks were complete all the time: mirrors end, the guest
//!   goes on on them. The sender says in the records of the new VDIs that it has given up; the receiver removes them;
//! - from 6 on the record says that the receiver has the VM, whose VDIs have no mark. The old ones go, by their note.
//!
//! A mirror that loses its second side (the network, the receiver's disk process, a full SR) fails the motion, not the
//! guest. The receiver gives up what came when its daemon starts again, or when it hears nothing of the sender for too
//! long, so the sender says now and then that it is there.
//!
//! An export is reached over TLS with a key that is made for it, and that the two daemons tell each other over the TLS
//! of the pool. The disk processes read it from a file that is gone when they have.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_control::{MirrorCopy, MirrorReport, MirrorState};
use tapio_model::ApiError;
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use super::super::Call;
use super::landing::{Coming, Landed};
use super::there::There;
use super::{Crossing, Departure};
use crate::db::Object;
use crate::disks::{KEY_USER, Mirror, Phase};
use crate::operations::{Held, MOVE, on_sr, on_vdi};
use crate::plan::steps::step;
use crate::progress::Progress;
use crate::storage::outgoing::{Idle, hold_off};
use crate::storage::relocate::{look_at_mirror, lost_of, said};

/// How long the receiver may take to make the disks.
const LAND: Duration = Duration::from_secs(300);
/// How long it may take to answer that it is there.
const SHORT: Duration = Duration::from_secs(30);
/// How often mirrors are asked how far they are.
const LOOK: Duration = Duration::from_millis(100);
/// How often the receiver is told that the sender is there.
const TELL: Duration = Duration::from_secs(15);
/// How long what a guest wrote last may take to reach the other side, when it has stopped.
const SEAL: Duration = Duration::from_secs(60);

/// One of the disks.
struct Disk {
    /// The VDI here.
    from: String,
    /// The VDI there.
    to: String,
    mirror: Mirror,
}

/// Disks that are mirrored to the other host.
pub(super) struct Mirrors<'a> {
    disks: Vec<Disk>,
    _held: Held,
    _idle: Vec<Idle<'a>>,
}

/// The images of a disk of a guest, which writes them, with its size.
fn source(call: &Call, vbd: Uuid, vdi: &Object) -> Result<(ChainSpec, u64), ApiError> {
    let note = call.part.vms.disks.of_vbd(vbd).filter(|note| note.vdi == vdi.reference);
    let found = note.and_then(|note| Some((note.chain?, note.size)));
    let found = found.filter(|(chain, _)| chain.access == Access::ReadWrite);
    found.ok_or_else(|| lost_of(&vdi.reference, "it is just being plugged or unplugged: move the VM again"))
}

impl<'a> Mirrors<'a> {
    /// Has the receiver make the disks, and begins to mirror onto them.
    ///
    /// # Errors
    /// Those of `host.receive_guest`; `MIRROR_FAILED`, `OTHER_OPERATION_IN_PROGRESS`. Mirrors may have begun.
    pub(super) fn begin(
        call: &'a Call,
        note: &Departure,
        there: &There<'_>,
        rate: Option<u64>,
    ) -> Result<Self, ApiError> {
        let (db, storage) = (&call.part.db, &call.part.storage);
        let mut vdis = BTreeMap::new();
        for (vbd, crossing) in &note.disks {
            vdis.insert(*vbd, db.get("VDI", &crossing.vdi)?);
        }
        let targets = vdis.values().map(|vdi| on_vdi(&vdi.reference, MOVE));
        let targets: Vec<_> =
            targets.chain(vdis.values().map(|vdi| on_sr(vdi.text("SR"), "vdi_mirror"))).collect();
        let held = call.part.operations.enter(&*call.progress, &targets, || Ok(()))?;
        let idle = vdis.values().map(|vdi| hold_off(storage, vdi.text("SR"))).collect();
        let mut coming = Vec::new();
        for (vbd, vdi) in &vdis {
            let (chain, size) = source(call, *vbd, vdi)?;
            let is_raw = matches!(&chain.layers[..], [only] if only.kind == ImageKind::Raw);
            let sr = note.disks.get(vbd).map(|crossing| crossing.to.clone()).unwrap_or_default();
            let used = u64::try_from(vdi.int("physical_utilisation")).unwrap_or_default();
            let name = vdi.text("name_label").to_owned();
            coming.push(Coming { vbd: *vbd, sr, size, used, is_raw, name });
        }
        let address = there.host_address()?;
        let answer = there.ask("land", &[("disks", &super::text(&coming)?), ("address", &address)], LAND)?;
        let landed = answer.get("disks").map(String::as_str).unwrap_or_default();
        let mut landed: BTreeMap<Uuid, Landed> = serde_json::from_str(landed)
            .map_err(|_| ApiError::internal("the other host does not say where the disks are to go"))?;
        step("vm-migrate:landed");
        call.part.pool.catch_up();
        // Each has its part of the rate.
        let rate = rate.map_or(0, |rate| (rate / vdis.len().max(1) as u64).max(1));
        let mut disks = Vec::new();
        for (vbd, vdi) in &vdis {
            let landed =
                landed.remove(vbd).ok_or_else(|| ApiError::internal("the other host has lost a disk"))?;
            disks.push(mirrored(call, *vbd, vdi, landed, rate)?);
        }
        Ok(Self { disks, _held: held, _idle: idle })
    }

    /// Waits until both sides of all mirrors are the same.
    ///
    /// # Errors
    /// `MIRROR_FAILED`, `TASK_CANCELLED`; the receiver has given it up.
    pub(super) fn wait(&self, there: &There<'_>, progress: &dyn Progress) -> Result<(), ApiError> {
        let mut told = Instant::now();
        loop {
            if progress.is_cancelled() {
                return Err(ApiError::new("TASK_CANCELLED", [progress.task().unwrap_or_default()]));
            }
            let reports = self.look()?;
            if reports.iter().all(is_same) {
                return Ok(());
            }
            let copied: u64 = reports.iter().map(|report| report.copied_bytes).sum();
            let all: u64 = reports.iter().map(|report| report.dirty_bytes).sum::<u64>() + copied;
            if all > 0 && reports.iter().all(|report| report.listed) {
                progress.set(copied as f64 / all as f64 * 0.98);
            }
            if told.elapsed() >= TELL {
                told = Instant::now();
                match there.ask("wait", &[], SHORT) {
                    // The mirrors say whether the network is lost.
                    Err(error) if error.code == "CANNOT_CONTACT_HOST" => {
                        tracing::info!(%error, "the other host does not hear that disks are on their way");
                    }
                    other => drop(other?),
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    fn look(&self) -> Result<Vec<MirrorReport>, ApiError> {
        self.disks.iter().map(|disk| look_at_mirror(&disk.mirror, &disk.from)).collect()
    }

    /// The guest has stopped: what it wrote last is on both sides.
    ///
    /// # Errors
    /// `MIRROR_FAILED`.
    pub(super) fn seal(&self) -> Result<(), ApiError> {
        let until = Instant::now() + SEAL;
        while !self.look()?.iter().all(is_same) {
            if Instant::now() >= until {
                let vdi = self.disks.first().map_or("", |disk| disk.from.as_str());
                return Err(lost_of(vdi, "what the guest wrote last does not reach the other host"));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// The VDIs here, and those that they become there.
    pub(super) fn becoming(&self) -> Vec<(String, String)> {
        self.disks.iter().map(|disk| (disk.from.clone(), disk.to.clone())).collect()
    }
}

fn is_same(report: &MirrorReport) -> bool {
    report.state == MirrorState::InSync && report.dirty_bytes == 0
}

fn mirrored(call: &Call, vbd: Uuid, vdi: &Arc<Object>, landed: Landed, rate: u64) -> Result<Disk, ApiError> {
    let disks = &call.part.vms.disks;
    let (from, lost) = (vdi.reference.clone(), |why: &str| lost_of(&vdi.reference, why));
    let mirror = disks.mirror(vbd).ok_or_else(|| lost("its disk process is gone: move the VM again"))?;
    let key = disks.key_file(vbd, &landed.key)?;
    let host = match landed.address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    };
    let uri = format!(
        "nbds://{KEY_USER}@{host}:{}/{}?tls-psk-file={}&reconnect=10",
        landed.port,
        landed.uuid,
        escaped(&key.path().to_string_lossy())
    );
    let layer = LayerSpec { kind: ImageKind::Nbd, path: uri.into() };
    let target = ChainSpec { layers: vec![layer], access: Access::ReadWrite };
    mirror.start(&target, MirrorCopy::Allocated, rate).map_err(|error| lost(&said(&error)))?;
    Ok(Disk { from, to: landed.vdi, mirror })
}

/// A value in the query of a URI.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                escaped.push(byte.into());
            }
            other => escaped.push_str(&format!("%{other:02X}")),
        }
    }
    escaped
}

/// Ends the mirrors of a guest that stays.
///
/// # Errors
/// A disk process does not answer.
pub(super) fn end(call: &Call, disks: &BTreeMap<Uuid, Crossing>) -> Result<(), ApiError> {
    let all = &call.part.vms.disks;
    // Images that are given up are closed, and a mirror with them.
    let has_images = |vbd: &&Uuid| all.of_vbd(**vbd).is_some_and(|note| note.phase == Phase::Running);
    let mirrors = disks.keys().filter(has_images).filter_map(|vbd| all.mirror(*vbd));
    mirrors.into_iter().try_for_each(|mirror| mirror.cancel())
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn a_path_in_a_uri_has_no_characters_of_the_uri() {
        assert_eq!(escaped("/run/tapio/keys-1/a.psk"), "/run/tapio/keys-1/a.psk");
        assert_eq!(escaped("/run/a b&c=d#é"), "/run/a%20b%26c%3Dd%23%C3%A9");
    }
}
