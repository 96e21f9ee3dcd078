//! The data plane's second images, logs and mirrors, in the words of the control protocol.

use std::sync::Arc;
use std::time::Duration;

use tapio_block::{
    Beside, CopyWhat, DiskFailure, MirrorOptions, MirrorPhase, MirrorStatus, Signal, StandbyOptions,
};
use tapio_control::{
    ControlError, Errno, ImageSource, MirrorCopy, MirrorPivoted, MirrorReport, MirrorRequest, MirrorState,
    Result,
};
use tapio_types::{Access, ChainSpec};

use crate::chain::chain;
use crate::counter::Counter;
use crate::failure::unreachable_thread;
use crate::host_disk::HostDisk;
use crate::limits::{LATE, SOON};
use crate::log;
use crate::table::{PlaneMirror, Wishes};

/// Added to the patience with the second side: opening it, or closing it, may use that up more than once.
const MARGIN: Duration = Duration::from_secs(10);

/// What the data thread is to open beside the images.
pub fn beside(wishes: &Wishes) -> Result<Beside> {
    let mut beside = Beside { log: wishes.log.clone(), ..Beside::default() };
    let Some(secondary) = &wishes.secondary else { return Ok(beside) };
    match &secondary.marker {
        Some(marker) => {
            let image = leaf(&secondary.image)?;
            // Of an earlier life of this disk.
            let _ = std::fs::remove_file(marker);
            let marker = marker.clone();
            let on_use = Signal(Arc::new(move || {
                if let Err(error) = std::fs::write(&marker, "") {
                    log::line(&format!("{} cannot be made: {error}", marker.display()));
                }
            }));
            beside.standby = Some(StandbyOptions { image, took_over: false, on_use });
        }
        None => {
            let target = chain(&secondary.image, Access::ReadWrite)?;
            let options = MirrorOptions { copy: CopyWhat::Nothing, ..MirrorOptions::default() };
            beside.mirror = Some((target, options));
        }
    }
    Ok(beside)
}

/// The one image that is named: its parents are those of the disk.
fn leaf(image: &ImageSource) -> Result<tapio_types::LayerSpec> {
    let text = image.text();
    tapio_types::parse_type_and_path(&text)
        .map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))
}

fn name(target: &ChainSpec) -> String {
    target.layers.first().map_or_else(String::new, ToString::to_string)
}

fn report(status: &MirrorStatus) -> Option<MirrorReport> {
    let state = match status.phase {
        MirrorPhase::Copying => MirrorState::Copying,
        MirrorPhase::InSync => MirrorState::InSync,
        MirrorPhase::Degraded => MirrorState::Degraded,
        MirrorPhase::Ended => return None,
    };
    Some(MirrorReport {
        job: status.job,
        target: name(&status.target),
        state,
        reason: status.failure.as_ref().map(ToString::to_string),
        dirty_bytes: status.dirty,
        copied_bytes: status.copied,
        listed: status.listed,
        rate: status.rate,
        unanswered: status.unanswered as u64,
    })
}

impl PlaneMirror for HostDisk {
    fn mirror_start(&self, request: &MirrorRequest) -> Result<MirrorReport> {
        let target = chain(&request.target, Access::ReadWrite)?;
        let options = MirrorOptions {
            copy: match request.copy {
                MirrorCopy::Allocated => CopyWhat::Allocated,
                MirrorCopy::Leaf => CopyWhat::Leaf,
                MirrorCopy::Everything => CopyWhat::Everything,
                MirrorCopy::Nothing => CopyWhat::Nothing,
            },
            rate: request.rate,
            patience: Duration::from_millis(request.patience_ms.into()),
        };
        self.with(|disk| disk.mirror_start(target, options, LATE))?;
        let started = self.mirror_status()?;
        started.ok_or_else(|| ControlError::new(Errno::EIO, "the mirror ended as soon as it had begun"))
    }

    fn mirror_status(&self) -> Result<Option<MirrorReport>> {
        Ok(self.with(|disk| disk.mirror_status(SOON))?.as_ref().and_then(report))
    }

    fn mirror_resume(&self) -> Result<()> {
        self.with(|disk| disk.mirror_resume(LATE))
    }

    fn mirror_rate(&self, rate: u64) -> Result<()> {
        self.with(|disk| disk.mirror_set_rate(rate, SOON))
    }

    fn mirror_pivot(&self) -> Result<(ImageSource, MirrorPivoted)> {
        let pivoted = self.with(|disk| disk.mirror_pivot(LATE))?;
        let image = name(&pivoted.spec);
        let shown = image.clone();
        self.remote
            .call(SOON, move |_| Counter::with(|stats| stats.set_image(&shown)))
            .map_err(unreachable_thread)?;
        let moved = MirrorPivoted { image, stalled_us: pivoted.stalled_ns / 1000 };
        Ok((ImageSource::Chain(pivoted.spec.layers), moved))
    }

    fn mirror_cancel(&self) -> Result<()> {
        self.with(|disk| -> std::result::Result<(), DiskFailure> { disk.mirror_cancel(LATE + MARGIN) })
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::table::Secondary;

    #[test]
    fn a_standby_removes_the_word_of_an_earlier_one_and_gives_its_own() {
        let directory = tempfile::tempdir().expect("a directory can be made");
        let marker = directory.path().join("tapdisk-enospc7");
        std::fs::write(&marker, "old").expect("written");
        let image = ImageSource::Leaf("vhd:/cache/leaf.vhd".into());
        let secondary = Some(Secondary { image, marker: Some(marker.clone()) });
        let made = beside(&Wishes { secondary, log: None }).expect("sound");
        assert!(!marker.exists() && made.mirror.is_none());
        let standby = made.standby.expect("it stands by");
        assert_eq!(standby.image.path, PathBuf::from("/cache/leaf.vhd"));
        (standby.on_use.0)();
        assert!(marker.exists());
    }

    #[test]
    fn a_second_image_without_a_marker_is_a_mirror_of_changes_alone() {
        let image = ImageSource::Leaf("aio:/copy.raw".into());
        let secondary = Some(Secondary { image, marker: None });
        let made = beside(&Wishes { secondary, log: Some("/x.cbtlog".into()) }).expect("sound");
        let (target, options) = made.mirror.expect("a mirror");
        assert_eq!((name(&target), options.copy), ("aio:/copy.raw".into(), CopyWhat::Nothing));
        assert_eq!(made.log, Some("/x.cbtlog".into()));
    }
}
