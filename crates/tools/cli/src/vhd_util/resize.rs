//! `resize` and `revert`.

use std::path::PathBuf;

use clap::Args;
use tapio_format::vhd::layout::whole_blocks;
use tapio_format::vhd::offline::{self, Image, OpenOptions, ResizeStep};

use super::output::{Failure, mebibytes, stop_if_told};
use crate::number;

/// Make the virtual disk larger
///
/// The space of the metadata may not be enough for it. -f needs metadata that were reserved with create -S or
/// snapshot -S and can be used on an image whose guest is paused. -j moves data to make room and needs a journal,
/// with which a resize that was broken off is taken back, see revert.
#[derive(Debug, Args)]
pub(super) struct Resize {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Its new virtual size, rounded up to 2 MiB
    #[arg(short = 's', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "MIB")]
    size_mib: u64,
    /// Move data where needed, with this journal
    #[arg(short = 'j', value_name = "JOURNAL", required_unless_present = "fast", conflicts_with = "fast")]
    journal: Option<PathBuf>,
    /// Stay within the reserved metadata
    #[arg(short = 'f')]
    fast: bool,
}

impl Resize {
    pub fn run(self) -> Result<(), Failure> {
        let len = whole_blocks(mebibytes(self.size_mib)?);
        match &self.journal {
            Some(journal) => offline::resize_journalled(&self.name, len, journal, |step| {
                stop_if_told(match step {
                    ResizeStep::Begin => "VHD_UTIL_TEST_FAIL_RESIZE_BEGIN",
                    ResizeStep::DataMoved => "VHD_UTIL_TEST_FAIL_RESIZE_DATA_MOVED",
                    ResizeStep::MetadataMoved => "VHD_UTIL_TEST_FAIL_RESIZE_METADATA_MOVED",
                    ResizeStep::End => "VHD_UTIL_TEST_FAIL_RESIZE_END",
                });
            })?,
            None => offline::resize_fast(&mut Image::open(&self.name, OpenOptions::WRITE)?, len)?,
        }
        Ok(())
    }
}

/// Take back a resize that was broken off
#[derive(Debug, Args)]
pub(super) struct Revert {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// The journal of the resize
    #[arg(short = 'j', value_name = "JOURNAL")]
    journal: PathBuf,
}

impl Revert {
    pub fn run(self) -> Result<(), Failure> {
        Ok(offline::revert_path(&self.name, &self.journal)?)
    }
}
