//! Watches a device's connection and replaces it when the kernel gave it up.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::{RECONNECT_S, Server, is_connected, reconnect, wait_for_end};
use crate::device::DeviceError;

/// A thread that sleeps until its connection breaks.
pub(super) struct Keeper {
    stop: File,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// The thread has given up.
    over: AtomicBool,
    /// The device goes: a connection that breaks stays so.
    stopping: AtomicBool,
}

impl Keeper {
    /// Watches `socket`, our end of the connection of device `index`.
    pub(super) fn start(
        index: u32,
        token: String,
        socket: OwnedFd,
        server: Arc<dyn Server>,
    ) -> Result<Self, DeviceError> {
        let failed = |error: &io::Error| DeviceError::io("no thread to watch a connection", error);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = eventfd(0, flags).map_err(|error| failed(&error.into()))?;
        let seen = stop.as_fd().try_clone_to_owned().map_err(|error| failed(&error))?;
        let shared = Arc::<Shared>::default();
        let told = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("nbd-keeper".into())
            .stack_size(128 << 10)
            .spawn(move || {
                watch(index, &token, socket, &seen, &*server, &told.stopping);
                told.over.store(true, Ordering::Release);
            })
            .map_err(|error| failed(&error))?;
        Ok(Self { stop: File::from(stop), shared })
    }

    /// Whether the device has, or is about to get, a connection.
    pub(super) fn is_connected(&self) -> bool {
        !self.shared.over.load(Ordering::Acquire)
    }

    /// Ends the watch: from now on a connection that breaks stays so. Does not wait for a thread that is waiting for
    /// the storage.
    pub(super) fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        let _ = (&self.stop).write(&1u64.to_ne_bytes());
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop();
    }
}

fn watch(
    index: u32,
    token: &str,
    mut socket: OwnedFd,
    stop: &OwnedFd,
    server: &dyn Server,
    stopping: &AtomicBool,
) {
    while wait_for_end(&socket, stop) {
        // Disconnected for good, by us or by an administrator's nbd-client -d.
        if !is_connected(index) {
            return;
        }
        // What was asked on the old connection must have ended before it is asked again on a new one.
        let drained = server.drain(Duration::from_secs(RECONNECT_S));
        if drained.is_err() || stopping.load(Ordering::Acquire) {
            return;
        }
        match reconnect(index, token, server) {
            Ok(fresh) => socket = fresh,
            Err(_) => return,
        }
    }
}
