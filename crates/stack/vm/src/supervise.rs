//! What happens without being asked for: a thread per guest waits for its end, serves its console and keeps its logs
//! short.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use tapio_log::Rotation;
use uuid::Uuid;

use crate::console::{Server, cause, last_lines};
use crate::place::Place;
use crate::poll::{poll, polled};
use crate::process::Process;
use crate::traits::VmEvent;

/// Between two looks at the length of the logs.
const LOG_INTERVAL: Duration = Duration::from_secs(2);

/// Stack of a thread that only waits.
pub(crate) const STACK_LEN: usize = 256 << 10;

/// Events of one driver, in order.
#[derive(Debug, Default)]
pub(crate) struct Events {
    queue: Mutex<VecDeque<VmEvent>>,
    came: Condvar,
}

impl Events {
    /// Adds one.
    pub(crate) fn push(&self, event: VmEvent) {
        self.queue.lock().push_back(event);
        self.came.notify_one();
    }

    /// Lets a wait look again at what it waits for.
    pub(crate) fn wake(&self) {
        // Under the lock: a wait that is about to begin has not looked yet, or gets it.
        let queue = self.queue.lock();
        self.came.notify_all();
        drop(queue);
    }

    /// Takes the next one; waits for it until what `next` says, which is asked again after each [`Self::wake`].
    pub(crate) fn wait_until(&self, next: impl Fn() -> Instant) -> Option<VmEvent> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(event) = queue.pop_front() {
                return Some(event);
            }
            let left = next().saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            self.came.wait_for(&mut queue, left);
        }
    }

    /// Takes the next one; waits for it as long as until `until`.
    pub(crate) fn wait(&self, until: Instant) -> Option<VmEvent> {
        self.wait_until(|| until)
    }
}

/// The signal by which a driver that goes away ends its threads. Guests stay.
#[derive(Debug)]
pub(crate) struct Stop(OwnedFd);

impl Stop {
    /// A signal that is not set yet.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Readable for good once [`Self::stop`] was called.
    pub(crate) fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Signals all of them.
    pub(crate) fn stop(&self) {
        // A counter that is full is set already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// What a thread looks after.
pub(crate) struct Watched {
    /// The guest's.
    pub process: Arc<Process>,
    /// Its directory.
    pub place: Place,
    /// When its logs are rotated.
    pub rotation: Rotation,
    /// Whether the console's socket is ours to serve.
    pub has_console: bool,
}

/// A log of the guest's or the emulator's, which this side rotates: neither can be told to open another file.
struct Kept {
    path: PathBuf,
    rotation: Rotation,
    /// The day of its first line, once it was looked at.
    begun: Option<u64>,
    said: bool,
}

impl Kept {
    fn new(path: PathBuf, rotation: Rotation) -> Self {
        Self { path, rotation, begun: None, said: false }
    }

    fn look(&mut self) {
        match tapio_log::shorten(&self.path, self.rotation, self.begun, SystemTime::now()) {
            Ok(begun) => (self.begun, self.said) = (Some(begun), false),
            // A driver without such a log, or a VM that is forgotten meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if !self.said => {
                tracing::warn!("{}: older parts of this log are not kept: {error}", self.path.display());
                self.said = true;
            }
            Err(_) => {}
        }
    }
}

/// Starts the thread; `ended` is called when the process has ended, unless the driver goes away before.
pub(crate) fn watch(
    watched: Watched,
    stop: Arc<Stop>,
    ended: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let mut server = watched.has_console.then(|| Server::new(&watched.place)).transpose()?;
    let mut logs =
        ["console.log", "emulator.log"].map(|name| Kept::new(watched.place.join(name), watched.rotation));
    let name = format!("guest {}", watched.process.pid());
    let body = move || {
        let mut look = Instant::now() + LOG_INTERVAL;
        let mut fds = Vec::new();
        loop {
            fds.clear();
            fds.push(polled(stop.fd(), libc::POLLIN));
            fds.push(polled(watched.process.handle(), libc::POLLIN));
            if let Some(server) = &server {
                server.fds(&mut fds);
            }
            let is_ready = poll(&mut fds, look);
            if fds[0].revents != 0 {
                return;
            }
            if fds[1].revents != 0 {
                // What the guest said last is for its clients, too.
                if let Some(server) = &mut server {
                    server.serve();
                }
                ended();
                return;
            }
            if is_ready && let Some(server) = &mut server {
                server.serve();
            }
            if Instant::now() >= look {
                logs.iter_mut().for_each(Kept::look);
                look = Instant::now() + LOG_INTERVAL;
            }
        }
    };
    thread::Builder::new().name(name).stack_size(STACK_LEN).spawn(body).map(|_| ())
}

/// What the end of a guest's process meant, by what its kernel said last.
pub(crate) fn verdict(vm: Uuid, place: &Place, status: &str) -> VmEvent {
    let console = last_lines(&place.join("console.log"), 40);
    let said = |what: &str| console.contains(what);
    if said("Kernel panic") {
        return VmEvent::Crashed(vm, cause(place, "the guest's kernel panicked"));
    }
    if said("reboot: Restarting system") {
        return VmEvent::Rebooted(vm);
    }
    if said("reboot: System halted") || said("reboot: Power down") {
        return VmEvent::Halted(vm);
    }
    VmEvent::Crashed(vm, cause(place, status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_writes_is_rotated_behind_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = Kept::new(path.clone(), Rotation { len_max: 4096, kept: 2 });
        log.look();
        assert!(!path.exists(), "a driver without a console gets none");
        let script = format!(
            "exec >>{}; for n in $(seq 1000); do echo line $n; done; echo last words",
            path.display()
        );
        let status = std::process::Command::new("sh").args(["-c", &script]).status().unwrap();
        assert!(status.success());
        log.look();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        assert!(dir.path().join("console.log.1.gz").exists());
        // A copy that cannot be made is said once, and the file stays bounded.
        std::fs::remove_file(dir.path().join("console.log.1.gz")).unwrap();
        std::fs::create_dir_all(dir.path().join("console.log.1/x")).unwrap();
        std::fs::create_dir_all(dir.path().join("console.log.2/x")).unwrap();
        std::fs::write(&path, vec![b'x'; 20_000]).unwrap();
        log.look();
        assert!(log.said);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }
}
