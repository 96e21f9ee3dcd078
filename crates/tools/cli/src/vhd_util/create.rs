//! `create` and `snapshot`.

use std::path::PathBuf;

use clap::Args;
use tapio_format::vhd::layout::whole_blocks;
use tapio_format::vhd::offline::{self, Shape, SnapshotOptions};

use super::output::{Failure, mebibytes};
use crate::number;

/// Make a new image
#[derive(Debug, Args)]
pub(super) struct Create {
    /// The image to make; a file of this name is replaced
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Virtual size, rounded up to 2 MiB
    #[arg(short = 's', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "MIB")]
    size_mib: u64,
    /// Set all space aside at once: a fixed disk
    #[arg(short = 'r')]
    reserve: bool,
    /// Reserve metadata to grow to this size without moving data, see resize -f
    #[arg(
        short = 'S',
        value_parser = number::unsigned,
        allow_hyphen_values = true,
        value_name = "MIB",
        default_value_t = 0
    )]
    size_max_mib: u64,
}

impl Create {
    pub fn run(self) -> Result<(), Failure> {
        if self.size_max_mib != 0 && self.size_max_mib < self.size_mib {
            return Err(Failure::invalid("Error: <-S size> must be greater than <-s size>"));
        }
        let shape = if self.reserve { Shape::Fixed } else { Shape::Dynamic };
        let len = whole_blocks(mebibytes(self.size_mib)?);
        Ok(offline::create(&self.name, &shape, len, whole_blocks(mebibytes(self.size_max_mib)?))?)
    }
}

/// Make a child of an image, to which writes go from now on
///
/// The parent must not be written any more. An empty parent that has a parent itself is passed over: the child is
/// linked to that one.
#[derive(Debug, Args)]
pub(super) struct Snapshot {
    /// The child to make; a file of this name is replaced
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// The parent
    #[arg(short = 'p', value_name = "PARENT")]
    parent: PathBuf,
    /// Refuse a chain of more images than this
    #[arg(
        short = 'l',
        value_parser = number::unsigned,
        allow_hyphen_values = true,
        value_name = "DEPTH",
        default_value_t = 0
    )]
    depth_max: u64,
    /// The parent is raw
    #[arg(short = 'm')]
    raw_parent: bool,
    /// Reserve metadata to grow to this size without moving data, see resize -f
    #[arg(
        short = 'S',
        value_parser = number::unsigned,
        allow_hyphen_values = true,
        value_name = "MIB",
        default_value_t = 0
    )]
    size_max_mib: u64,
    /// Link to the parent even if it is empty
    #[arg(short = 'e')]
    keep_empty: bool,
}

impl Snapshot {
    pub fn run(self, debug: bool) -> Result<(), Failure> {
        let options = SnapshotOptions {
            raw_parent: self.raw_parent,
            len_max: whole_blocks(mebibytes(self.size_max_mib)?),
            depth_max: usize::try_from(self.depth_max).unwrap_or(usize::MAX),
            keep_empty: self.keep_empty,
        };
        let parent = offline::snapshot(&self.name, &self.parent, &options)?;
        if debug {
            eprintln!("vhd-util: {}: linked to {}", self.name.display(), parent.display());
        }
        Ok(())
    }
}
