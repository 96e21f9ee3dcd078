//! What the keeper of a host's lease has found, for the storage worker of the same SR: a file below the run directory.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tapio_types::ApiError;
use uuid::Uuid;

use super::seen::Seen;
use crate::errors;

/// Milliseconds since this host was started. It counts while the host sleeps.
pub(crate) fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1000).saturating_add(nanoseconds / 1_000_000)
}

/// How long after the end of a lease guests may go on without their disks: until an eighth before others count the host
/// as dead.
pub(crate) const fn grace_ms(silence_ms: u32) -> u64 {
    silence_ms as u64 * 3 / 8
}

/// What is known of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// The host's place in the area.
    pub(crate) slot: u8,
    /// Its fencing number.
    pub(crate) generation: u64,
    /// Until when the lease is this host's, by its clock.
    pub(crate) until_ms: u64,
    /// Milliseconds of silence after which a host counts as dead.
    pub(crate) silence_ms: u32,
    /// Why it is lost, if it is.
    pub(crate) lost: Option<String>,
    /// Beats of others.
    pub(crate) seen: Seen,
}

impl Status {
    /// Why nothing may be changed for this generation now, if so.
    pub(crate) fn refusal(&self, generation: u64, now_ms: u64) -> Option<String> {
        if self.generation != generation {
            return Some(format!(
                "it has generation {generation} and the lease is that of {}",
                self.generation
            ));
        }
        if let Some(why) = &self.lost {
            return Some(why.clone());
        }
        (now_ms >= self.until_ms).then(|| {
            let late = now_ms - self.until_ms;
            format!(
                "its lease ended {late} ms ago and is not renewed: see to the storage, and to the host's load"
            )
        })
    }

    fn has_ended_guests(&self, now_ms: u64) -> bool {
        self.lost.is_some() || now_ms >= self.until_ms + grace_ms(self.silence_ms)
    }
}

/// Where the files of a lease are on this host.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    directory: PathBuf,
    sr: Uuid,
}

impl Files {
    pub(crate) fn of(run_dir: &Path, sr: Uuid) -> Self {
        Self { directory: run_dir.join("lease"), sr }
    }

    /// The directory is there.
    pub(crate) fn make(&self) -> io::Result<()> {
        fs::create_dir_all(&self.directory)
    }

    fn status(&self) -> PathBuf {
        self.directory.join(self.sr.to_string())
    }

    /// Locked by the keeper while it lives; its process number is in it.
    pub(crate) fn keeper(&self) -> PathBuf {
        self.directory.join(format!("{}.keeper", self.sr))
    }

    /// Locked, shared, by whatever uses the lease.
    pub(crate) fn users(&self) -> PathBuf {
        self.directory.join(format!("{}.users", self.sr))
    }

    pub(crate) fn read(&self) -> io::Result<Status> {
        serde_json::from_slice(&fs::read(self.status())?).map_err(io::Error::other)
    }

    /// A reader finds the one of before or this.
    pub(crate) fn write(&self, status: &Status) -> io::Result<()> {
        let path = self.status();
        let fresh = path.with_extension("new");
        fs::write(&fresh, serde_json::to_vec(status).map_err(io::Error::other)?)?;
        fs::rename(&fresh, &path)
    }

    fn lost(&self, vdi: Uuid) -> PathBuf {
        self.directory.join("lost").join(vdi.to_string())
    }

    /// Notes that a VDI was lost with the lease: no disk process takes the place of its own.
    pub(crate) fn lose(&self, vdi: Uuid) -> io::Result<()> {
        let path = self.lost(vdi);
        fs::create_dir_all(path.parent().unwrap_or(&self.directory))?;
        fs::write(path, format!("{}\n", self.sr))
    }

    /// This host has the VDI anew.
    pub(crate) fn regain(&self, vdi: Uuid) {
        let _ = fs::remove_file(self.lost(vdi));
    }

    pub(crate) fn is_lost(&self, vdi: Uuid) -> bool {
        self.lost(vdi).exists()
    }

    pub(crate) fn remove(&self) {
        let _ = fs::remove_file(self.status());
    }
}

/// Refuses to open a VDI again that this host lost together with its lease: another host may have it.
///
/// # Errors
/// 46.
pub fn check_kept(run_dir: &Path, vdi: Uuid) -> Result<(), ApiError> {
    if !Files::of(run_dir, Uuid::nil()).is_lost(vdi) {
        return Ok(());
    }
    let text = "this host was silent for too long, another one may have it: unplug it, then plug it where it is used";
    Err(errors::fail(46, format_args!("VDI {vdi}: {text}")))
}

/// The other hosts whose beats on an SR go on, as this host's keeper sees them; none where this host has no lease of it
/// that is certain.
pub fn others_alive(run_dir: &Path, sr: Uuid) -> Option<BTreeSet<Uuid>> {
    let status = Files::of(run_dir, sr).read().ok()?;
    let now = now_ms();
    if status.lost.is_some() || now >= status.until_ms {
        return None;
    }
    Some(status.seen.alive((now, status.silence_ms.into())).collect())
}

/// Whether the lease of this host on an SR is lost, or so late that guests with disks there had to end.
pub fn has_ended_guests(run_dir: &Path, sr: Uuid) -> bool {
    Files::of(run_dir, sr).read().is_ok_and(|status| status.has_ended_guests(now_ms()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_good_for_one_generation_until_its_time() {
        let status = Status {
            slot: 2,
            generation: 7,
            until_ms: 20_000,
            silence_ms: 40_000,
            lost: None,
            seen: Seen::default(),
        };
        assert_eq!(status.refusal(7, 19_999), None);
        assert!(status.refusal(7, 20_000).is_some_and(|why| why.contains("0 ms ago")));
        assert!(status.refusal(6, 1).is_some() && status.refusal(8, 1).is_some());
        let lost = Status { lost: Some("host b counts it as dead".into()), ..status.clone() };
        assert_eq!(lost.refusal(7, 1).as_deref(), Some("host b counts it as dead"));
        let guests_end = 20_000 + 15_000;
        assert!(!status.has_ended_guests(guests_end - 1) && status.has_ended_guests(guests_end));
        assert!(lost.has_ended_guests(1));
        let dir = tempfile::tempdir().expect("a directory");
        let files = Files::of(dir.path(), Uuid::nil());
        files.make().expect("it is made");
        assert!(files.read().is_err());
        files.write(&status).expect("it is written");
        assert_eq!(files.read().expect("it is read"), status);
        let vdi = Uuid::from_u128(4);
        files.lose(vdi).expect("it is noted");
        assert_eq!(check_kept(dir.path(), vdi).expect_err("it is lost").code, "SR_BACKEND_FAILURE_46");
        files.regain(vdi);
        assert_eq!(check_kept(dir.path(), vdi), Ok(()));
        assert!(now_ms() > 0);
    }
}
