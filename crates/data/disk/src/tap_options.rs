//! The data plane's second images and logs, in the words of the control protocol.

use std::sync::Arc;

use tapio_block::{CopyWhat, MirrorOptions, Signal, StandbyOptions, TapOptions};
use tapio_control::{ControlError, Errno, ImageSource, Result};
use tapio_types::{Access, ChainSpec};

use crate::chain::chain;
use crate::log;
use crate::table::TapRequest;

/// The taps that the data thread opens with the images.
pub fn tap_options(request: &TapRequest) -> Result<TapOptions> {
    let mut options = TapOptions { log: request.log.clone(), ..TapOptions::default() };
    let Some(secondary) = &request.secondary else { return Ok(options) };
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
            options.standby = Some(StandbyOptions { image, took_over: false, on_use });
        }
        None => {
            let target = chain(&secondary.image, Access::ReadWrite)?;
            let mirror = MirrorOptions { copy: CopyWhat::Nothing, ..MirrorOptions::default() };
            options.mirror = Some((target, mirror));
        }
    }
    Ok(options)
}

/// The one image that is named: its parents are those of the disk.
fn leaf(image: &ImageSource) -> Result<tapio_types::LayerSpec> {
    let text = image.text();
    tapio_types::parse_type_and_path(&text)
        .map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))
}

/// The leaf of a chain, as `type:/path`.
pub fn name(target: &ChainSpec) -> String {
    target.layers.first().map_or_else(String::new, ToString::to_string)
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
        let made = tap_options(&TapRequest { secondary, log: None }).expect("sound");
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
        let made = tap_options(&TapRequest { secondary, log: Some("/x.cbtlog".into()) }).expect("sound");
        let (target, options) = made.mirror.expect("a mirror");
        assert_eq!((name(&target), options.copy), ("aio:/copy.raw".into(), CopyWhat::Nothing));
        assert_eq!(made.log, Some("/x.cbtlog".into()));
    }
}
