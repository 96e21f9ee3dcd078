//! Traces of a disk, started and stopped from the control side.

use parking_lot::Mutex;
use tapio_block::DiskHandle;
use tapio_control::{ControlError, Errno, Result, TraceReport};
use tapio_stat::ShmRoot;
use tapio_stat::trace::TraceRing;

use crate::failure::unreachable_thread;
use crate::limits::REPLY_TIMEOUT;
use crate::memory::{Budget, Share};

/// What the trace of a disk may take of the process's memory, while there is one.
#[derive(Debug, Default)]
pub struct Tracing(Mutex<Option<Share>>);

impl Tracing {
    fn keep(&self, share: Option<Share>) {
        *self.0.lock() = share;
    }

    /// Begins a trace of `events` events, and forgets the one before.
    pub fn start(
        &self,
        remote: &DiskHandle,
        budget: &Budget,
        minor: u16,
        events: u32,
    ) -> Result<TraceReport> {
        self.forget(remote)?;
        let share = budget.take(TraceRing::len_of(events))?;
        // Here and not on the data thread, which makes no files, and shall not wait for pages.
        let ring = TraceRing::create(&ShmRoot::from_env(), minor.into(), events)
            .map_err(|error| ControlError::io(format_args!("making the trace of disk {minor}"), &error))?;
        let replaced = remote
            .call(REPLY_TIMEOUT, move |data_thread| data_thread.trace().start(ring))
            .map_err(unreachable_thread)?;
        drop(replaced);
        self.keep(Some(share));
        Ok(report(minor, true, 0))
    }

    /// Ends it; answers how much was written.
    pub fn stop(&self, remote: &DiskHandle, minor: u16, forget: bool) -> Result<TraceReport> {
        let written = remote
            .call(REPLY_TIMEOUT, |data_thread| data_thread.trace().stop())
            .map_err(unreachable_thread)?;
        let written = written.ok_or_else(|| {
            ControlError::new(Errno::EINVAL, format!("disk {minor} has no trace"))
                .next("begin one with 'tapio trace start'")
        })?;
        if forget {
            self.forget(remote)?;
        }
        Ok(report(minor, false, written))
    }

    /// Ends it and removes it, if there is one.
    pub fn forget(&self, remote: &DiskHandle) -> Result<()> {
        // What comes back is dropped here: files are removed by this side.
        drop(
            remote
                .call(REPLY_TIMEOUT, |data_thread| data_thread.trace().forget())
                .map_err(unreachable_thread)?,
        );
        self.keep(None);
        Ok(())
    }
}

fn report(minor: u16, running: bool, written: u64) -> TraceReport {
    TraceReport { pid: std::process::id(), minor, running, written }
}
