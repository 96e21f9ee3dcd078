//! The mirror of a disk.

use std::time::Duration;

use tapio_block::{CopyWhat, MirrorOptions, MirrorPhase, MirrorStatus as Status, Owner};
use tapio_control::command::{
    Call, Done, Handle, MirrorCancel, MirrorPivot, MirrorRate, MirrorResume, MirrorStart, MirrorStatus,
};
use tapio_control::{ControlError, Errno, MirrorCopy, MirrorPivoted, MirrorReport, MirrorState, Result};
use tapio_types::{Access, ChainSpec};

use crate::chain::chain;
use crate::host::Host;
use crate::host_disk::HostDisk;
use crate::limits::IMAGES_TIMEOUT;
use crate::table::{Plane, PlaneDisk, Table};

/// Added to the timeout of the second side: opening it, or closing it, may use that up more than once.
const MARGIN: Duration = Duration::from_secs(10);

impl Handle<MirrorStart> for Table<Host> {
    fn handle(&self, command: MirrorStart, _: &mut Call<'_>) -> Result<MirrorReport> {
        let disk = self.running(command.minor)?;
        let target = chain(&command.target, Access::ReadWrite)?;
        disk.check_images(&target)?;
        let options = MirrorOptions {
            copy: match command.copy {
                MirrorCopy::Allocated => CopyWhat::Allocated,
                MirrorCopy::Leaf => CopyWhat::Leaf,
                MirrorCopy::Everything => CopyWhat::Everything,
                MirrorCopy::Nothing => CopyWhat::Nothing,
            },
            rate: command.rate,
            timeout: Duration::from_millis(command.timeout_ms.into()),
        };
        disk.order(IMAGES_TIMEOUT, move |data_thread| async move {
            data_thread.core().mirror_start(&target, options).await.map(drop)
        })?;
        let ended = || ControlError::new(Errno::EIO, "the mirror ended as soon as it had begun");
        status(&disk)?.ok_or_else(ended)
    }
}

impl Handle<MirrorStatus> for Table<Host> {
    fn handle(&self, command: MirrorStatus, _: &mut Call<'_>) -> Result<Option<MirrorReport>> {
        status(&*self.opened(command.minor)?)
    }
}

impl Handle<MirrorResume> for Table<Host> {
    fn handle(&self, command: MirrorResume, _: &mut Call<'_>) -> Result<Done> {
        let resume = |data_thread: Owner| async move { data_thread.core().mirror_resume().await };
        self.running(command.minor)?.order(IMAGES_TIMEOUT, resume).map(|()| Done {})
    }
}

impl Handle<MirrorRate> for Table<Host> {
    fn handle(&self, command: MirrorRate, _: &mut Call<'_>) -> Result<Done> {
        let set = move |data_thread: &Owner| data_thread.core().mirror_set_rate(command.rate);
        self.running(command.minor)?.ask(set).map(|()| Done {})
    }
}

impl<P: Plane> Handle<MirrorPivot> for Table<P> {
    fn handle(&self, command: MirrorPivot, _: &mut Call<'_>) -> Result<MirrorPivoted> {
        let (image, pivoted) = self.running(command.minor)?.mirror_pivot()?;
        if let Some(open) = &mut self.disk(command.minor)?.now.lock().open {
            open.image = image;
        }
        Ok(pivoted)
    }
}

impl Handle<MirrorCancel> for Table<Host> {
    fn handle(&self, command: MirrorCancel, _: &mut Call<'_>) -> Result<Done> {
        let cancel = |data_thread: Owner| async move { data_thread.core().mirror_cancel().await };
        self.opened(command.minor)?.order(IMAGES_TIMEOUT + MARGIN, cancel).map(|()| Done {})
    }
}

impl HostDisk {
    /// The second side of the disk's mirror, if it has one.
    pub(crate) fn mirror_target(&self) -> Result<Option<ChainSpec>> {
        let status = self.ask(|data_thread| Ok(data_thread.core().mirror_status()))?;
        let is_used = |status: &Status| status.phase != MirrorPhase::Ended;
        Ok(status.filter(is_used).map(|status| status.target))
    }
}

fn status(disk: &HostDisk) -> Result<Option<MirrorReport>> {
    Ok(disk.ask(|data_thread| Ok(data_thread.core().mirror_status()))?.as_ref().and_then(report))
}

fn report(status: &Status) -> Option<MirrorReport> {
    let state = match status.phase {
        MirrorPhase::Copying => MirrorState::Copying,
        MirrorPhase::InSync => MirrorState::InSync,
        MirrorPhase::Degraded => MirrorState::Degraded,
        MirrorPhase::Ended => return None,
    };
    Some(MirrorReport {
        job: status.job,
        target: crate::tap_options::name(&status.target),
        state,
        reason: status.failure.as_ref().map(ToString::to_string),
        dirty_bytes: status.dirty,
        copied_bytes: status.copied,
        listed: status.listed,
        rate: status.rate,
        unanswered: status.unanswered as u64,
    })
}
