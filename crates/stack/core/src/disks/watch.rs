//! Notices when a disk process ends.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_sys::poll::{self, PollFd, PollFlags};
use tapio_sys::process;
use uuid::Uuid;

use super::backend::Process;
use super::processes::pidfd;

/// Longest time until a process that was just added is watched.
const TURN: Duration = Duration::from_millis(250);

/// Descriptors of the processes that are watched.
#[derive(Debug, Default)]
pub(super) struct Watch(Mutex<BTreeMap<Uuid, Option<OwnedFd>>>);

impl Watch {
    /// Watches a process; one that is gone already is reported at once.
    pub fn add(&self, vbd: Uuid, process: Process) {
        // Processes that are only pretended have no number.
        if process.pid > 0 {
            self.0.lock().insert(vbd, pidfd(process));
        }
    }

    /// It may end.
    pub fn remove(&self, vbd: Uuid) {
        self.0.lock().remove(&vbd);
    }

    /// A VBD whose process has ended; it is not watched any more.
    pub fn wait(&self, until: Instant) -> Option<Uuid> {
        loop {
            let mut watched = self.0.lock();
            if let Some(vbd) = watched.iter().find(|(_, fd)| fd.is_none()).map(|(vbd, _)| *vbd) {
                watched.remove(&vbd);
                return Some(vbd);
            }
            // Duplicates, because others may end their watch, and with it the descriptor, while this waits.
            let fds: Vec<(Uuid, OwnedFd)> =
                watched.iter().filter_map(|(vbd, fd)| Some((*vbd, fd.as_ref()?.try_clone().ok()?))).collect();
            drop(watched);
            let left = until.saturating_duration_since(Instant::now()).min(TURN);
            if left.is_zero() {
                return None;
            }
            if fds.is_empty() {
                thread::sleep(left);
                continue;
            }
            let mut polls: Vec<PollFd<'_>> =
                fds.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
            if !poll::any(&mut polls, Some(left)).is_ok_and(|is_ready| is_ready) {
                continue;
            }
            let ready = polls.iter().zip(&fds).find(|(poll, _)| !poll.revents().is_empty());
            let ended = ready.map(|(_, (vbd, _))| *vbd);
            // One that is not watched any more was ended by us.
            if let Some(vbd) = ended.filter(|vbd| self.0.lock().remove(vbd).is_some()) {
                fds.iter().filter(|(of, _)| *of == vbd).for_each(|(_, fd)| process::reap(fd));
                return Some(vbd);
            }
        }
    }
}
