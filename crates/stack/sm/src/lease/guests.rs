//! The guests of this host that have disks on an SR. They end before another host may start the same VMs.
//!
//! `RUN_DIR/leased-guests/SR/VM` is an empty file for each of them: the toolstack makes it before the guest gets a disk
//! of the SR and removes it when the guest has ended. The keeper of the lease ends guests by it, with or without the
//! daemon.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use uuid::Uuid;

/// Ends the guest of a VM of this host, by the run directory. Returns whether there is none any more.
pub type End = fn(run_dir: &Path, vm: Uuid) -> bool;

static END: OnceLock<End> = OnceLock::new();

/// Has keepers end guests in this way. Without it they end none.
pub fn end_guests_by(end: End) {
    let _ = END.set(end);
}

fn all(run_dir: &Path) -> PathBuf {
    run_dir.join("leased-guests")
}

fn of(run_dir: &Path, sr: Uuid) -> PathBuf {
    all(run_dir).join(sr.to_string())
}

/// Notes that a guest is about to have a disk of an SR.
///
/// # Errors
/// The run directory's.
pub fn note_guest(run_dir: &Path, sr: Uuid, vm: Uuid) -> io::Result<()> {
    let dir = of(run_dir, sr);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(vm.to_string()), "")
}

/// A guest has ended.
pub fn forget_guest(run_dir: &Path, vm: Uuid) {
    for sr in fs::read_dir(all(run_dir)).into_iter().flatten().flatten() {
        let _ = fs::remove_file(sr.path().join(vm.to_string()));
    }
}

/// Ends the guests that have disks of an SR.
pub(super) fn end_guests(run_dir: &Path, sr: Uuid) {
    let Some(end) = END.get() else { return };
    for entry in fs::read_dir(of(run_dir, sr)).into_iter().flatten().flatten() {
        let vm = entry.file_name().to_str().and_then(|name| Uuid::parse_str(name).ok());
        let Some(vm) = vm else { continue };
        if end(run_dir, vm) {
            tracing::error!("VM {vm} is ended: its disks on SR {sr} may be another host's");
            let _ = fs::remove_file(entry.path());
        } else {
            tracing::error!("VM {vm} cannot be ended, although its disks on SR {sr} may be another host's");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_of_one_sr_are_ended_once_and_others_stay() {
        static ENDED: parking_lot::Mutex<Vec<Uuid>> = parking_lot::Mutex::new(Vec::new());
        end_guests_by(|_, vm| {
            ENDED.lock().push(vm);
            true
        });
        let scratch = tempfile::tempdir().unwrap();
        let [sr, other] = [Uuid::new_v4(), Uuid::new_v4()];
        let [ended, elsewhere, over] = [Uuid::new_v4(), Uuid::new_v4(), Uuid::new_v4()];
        note_guest(scratch.path(), sr, ended).unwrap();
        note_guest(scratch.path(), other, elsewhere).unwrap();
        note_guest(scratch.path(), sr, over).unwrap();
        note_guest(scratch.path(), other, over).unwrap();
        forget_guest(scratch.path(), over);
        end_guests(scratch.path(), sr);
        end_guests(scratch.path(), sr);
        assert_eq!(*ENDED.lock(), [ended]);
    }
}
