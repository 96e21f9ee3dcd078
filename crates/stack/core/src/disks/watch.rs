//! Notices when a disk process ends.
//!
//! A host has a thousand disks that do nothing: the thread that watches their processes sleeps until one ends, and
//! starting or ending a watch costs the same whether there are few or many.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::Instant;

use parking_lot::Mutex;
use tapio_sys::epoll::{Epoll, Ready};
use tapio_sys::process;
use uuid::Uuid;

use super::backend::Process;
use super::processes::pidfd;

/// Processes that are watched.
#[derive(Debug)]
pub(super) struct Watch {
    /// None if the kernel gives none: then no death is noticed before the next start.
    epoll: Option<Epoll>,
    watched: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    /// By the keys that the kernel knows them by.
    fds: BTreeMap<u64, (Uuid, OwnedFd)>,
    keys: BTreeMap<Uuid, u64>,
    next: u64,
    /// Those that had ended before they were watched.
    ended: VecDeque<Uuid>,
}

impl Watched {
    fn take(&mut self, key: u64) -> Option<(Uuid, OwnedFd)> {
        let (vbd, fd) = self.fds.remove(&key)?;
        self.keys.remove(&vbd);
        Some((vbd, fd))
    }
}

impl Watch {
    /// None is watched yet.
    pub fn new() -> Self {
        let epoll = Epoll::new().inspect_err(|error| {
            tracing::error!(%error, "disk processes cannot be watched: their deaths are noticed at the next start");
        });
        Self { epoll: epoll.ok(), watched: Mutex::default() }
    }

    /// Watches a process; one that is gone already is reported at once.
    pub fn add(&self, vbd: Uuid, process: Process) {
        // Processes that are only pretended have no number.
        if process.pid <= 0 {
            return;
        }
        let Some(epoll) = &self.epoll else { return };
        let fd = pidfd(process);
        let mut watched = self.watched.lock();
        Self::drop_watch(&mut watched, epoll, vbd);
        let key = watched.next;
        watched.next += 1;
        match fd.filter(|fd| {
            epoll.add(fd, key).inspect_err(|error| tracing::warn!(%vbd, %error, "not watched")).is_ok()
        }) {
            Some(fd) => {
                watched.keys.insert(vbd, key);
                watched.fds.insert(key, (vbd, fd));
            }
            None => {
                watched.ended.push_back(vbd);
                epoll.wake();
            }
        }
    }

    /// It may end.
    pub fn remove(&self, vbd: Uuid) {
        if let Some(epoll) = &self.epoll {
            Self::drop_watch(&mut self.watched.lock(), epoll, vbd);
        }
    }

    fn drop_watch(watched: &mut Watched, epoll: &Epoll, vbd: Uuid) {
        watched.ended.retain(|other| *other != vbd);
        let key = watched.keys.get(&vbd).copied();
        if let Some((_, fd)) = key.and_then(|key| watched.take(key)) {
            // A child that is just being started has a copy of the descriptor: closing it may not be enough.
            let _ = epoll.remove(&fd);
        }
    }

    /// Ends a wait, or the next one, without a death.
    pub fn wake(&self) {
        self.epoll.iter().for_each(Epoll::wake);
    }

    /// A VBD whose process has ended, which is not watched any more; none at `until`, if there is one, or when the
    /// wait was ended.
    pub fn wait(&self, until: Option<Instant>) -> Option<Uuid> {
        let left = || until.map(|until| until.saturating_duration_since(Instant::now()));
        let Some(epoll) = &self.epoll else {
            left().map_or_else(std::thread::park, std::thread::sleep);
            return None;
        };
        loop {
            if let Some(vbd) = self.watched.lock().ended.pop_front() {
                return Some(vbd);
            }
            match epoll.wait(left()) {
                Ok(Ready::Key(key)) => {
                    let mut watched = self.watched.lock();
                    // One that is not watched any more was ended by us.
                    if let Some((vbd, fd)) = watched.take(key) {
                        let _ = epoll.remove(&fd);
                        drop(watched);
                        process::reap(&fd);
                        return Some(vbd);
                    }
                }
                Ok(Ready::Woken) => return self.watched.lock().ended.pop_front(),
                Ok(Ready::TimedOut) => return None,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::error!(%error, "disk processes are not watched");
                    return None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::Duration;

    use tapio_sys::process::Stat;

    use super::*;

    fn sleeper() -> (Child, Process) {
        let child = Command::new("sleep").arg("1000").spawn().expect("started");
        let started = Stat::of(child.id()).expect("it is there").start;
        let process = Process { pid: i32::try_from(child.id()).expect("a number"), started };
        (child, process)
    }

    #[test]
    fn the_deaths_of_watched_processes_are_noticed_and_no_others() {
        let watch = Watch::new();
        let soon = || Some(Instant::now() + Duration::from_secs(20));
        let (mut first, first_process) = sleeper();
        let (mut second, second_process) = sleeper();
        let (one, two, gone) = (Uuid::new_v4(), Uuid::new_v4(), Uuid::new_v4());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| watch.wait(soon()));
            watch.add(one, first_process);
            watch.add(two, second_process);
            first.kill().expect("killed");
            assert_eq!(waits.join().expect("no panic"), Some(one));
        });
        watch.add(gone, Process { pid: first_process.pid, started: 1 });
        assert_eq!(watch.wait(soon()), Some(gone), "one that is gone is reported at once");
        watch.remove(two);
        second.kill().expect("killed");
        assert_eq!(watch.wait(Some(Instant::now())), None, "it was to end");
        watch.wake();
        assert_eq!(watch.wait(None), None);
        let _ = (first.wait(), second.wait());
        assert!(watch.watched.lock().fds.is_empty());
    }
}
