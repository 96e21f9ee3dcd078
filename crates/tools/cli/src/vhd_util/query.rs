//! `query`: single facts, a line each in a fixed order.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tapio_format::vhd::offline::{self, Image, OpenOptions};
use tapio_format::vhd::{BLOCK_LEN, DiskType};
use tapio_format::{FileMedium, FormatError};

use super::output::{Failure, tell_tolerances};

/// Print facts about an image, one line each
///
/// The lines come in the order of the options below, whatever the order on the command line.
#[derive(Debug, Args)]
pub(super) struct Query {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Virtual size in MiB
    #[arg(short = 'v')]
    virtual_size: bool,
    /// Space that the image needs in bytes
    #[arg(short = 's')]
    physical_size: bool,
    /// The parent's path
    #[arg(short = 'p')]
    parent: bool,
    /// The hidden flag
    #[arg(short = 'f')]
    fields: bool,
    /// The marker
    #[arg(short = 'm')]
    marker: bool,
    /// Images in the chain
    #[arg(short = 'd')]
    depth: bool,
    /// Blocks in the image
    #[arg(short = 'a')]
    allocated: bool,
    /// The largest virtual size that resize -f can give, in MiB
    #[arg(short = 'S')]
    fast_resize: bool,
    /// Print the parent's path as it is recorded, without looking for it
    #[arg(short = 'u')]
    unresolved: bool,
    /// Print all facts as JSON
    #[arg(long)]
    json: bool,
}

impl Query {
    pub fn run(self, debug: bool, out: &mut dyn Write) -> Result<(), Failure> {
        let image = Image::open(&self.name, OpenOptions::LOOK)?;
        if debug {
            tell_tolerances(&image);
        }
        if self.json { self.print_json(&image, out) } else { self.print_lines(&image, out) }
    }

    fn print_lines(&self, image: &Image<FileMedium>, out: &mut dyn Write) -> Result<(), Failure> {
        // A fact that cannot be had does not keep the others from being printed.
        let mut failed = None;
        if self.virtual_size {
            writeln!(out, "{}", image.virtual_len() >> 20)?;
        }
        if self.physical_size {
            writeln!(out, "{}", image.physical_len())?;
        }
        if self.parent {
            match self.parent_of(image) {
                Ok(Some(parent)) => writeln!(out, "{parent}")?,
                Ok(None) => writeln!(out, "{} has no parent", self.name.display())?,
                Err(error) => {
                    writeln!(out, "query failed")?;
                    failed = Some(error);
                }
            }
        }
        if self.fields {
            writeln!(out, "hidden: {}", image.footer().hidden)?;
        }
        if self.marker {
            writeln!(out, "marker: {}", marker(image))?;
        }
        if self.depth {
            match offline::chain_depth(&self.name) {
                Ok(depth) => writeln!(out, "chain depth: {depth}")?,
                Err(error) => {
                    writeln!(out, "error checking chain depth: {}", -error.errno())?;
                    failed.get_or_insert(error);
                }
            }
        }
        if self.allocated {
            writeln!(out, "{}", image.allocated_blocks())?;
        }
        if self.fast_resize {
            writeln!(out, "{}", fast_resize_mib(image))?;
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn print_json(&self, image: &Image<FileMedium>, out: &mut dyn Write) -> Result<(), Failure> {
        let footer = image.footer();
        let parent = self.parent_of(image);
        let facts = json!({
            "name": self.name,
            "type": kind(footer.disk_type),
            "uuid": footer.uuid.to_string(),
            "virtual_bytes": image.virtual_len(),
            "physical_bytes": image.physical_len(),
            "allocated_blocks": image.allocated_blocks(),
            "block_bytes": image.block_len(),
            "hidden": footer.hidden,
            "marker": marker(image),
            "parent": parent.as_ref().ok().and_then(Option::as_ref),
            "parent_error": parent.as_ref().err().map(ToString::to_string),
            "raw_parent": image.has_raw_parent(),
            "chain_depth": offline::chain_depth(&self.name).ok(),
            "fast_resize_mib": fast_resize_mib(image),
            "disabled": footer.is_disabled(),
            "overlooked": image.tolerances().iter().map(ToString::to_string).collect::<Vec<_>>(),
        });
        writeln!(out, "{facts:#}")?;
        Ok(())
    }

    fn parent_of(&self, image: &Image<FileMedium>) -> Result<Option<String>, FormatError> {
        if image.footer().disk_type != DiskType::Differencing {
            return Ok(None);
        }
        if self.unresolved {
            return offline::unresolved_parent(image).map(Some);
        }
        let link = offline::resolve_parent(image)?;
        Ok(link.path().map(|path| path.display().to_string()))
    }
}

fn marker(image: &Image<FileMedium>) -> u8 {
    image.batmap().map_or(0, |batmap| batmap.header.marker)
}

fn fast_resize_mib(image: &Image<FileMedium>) -> u64 {
    image.header().map_or(0, |header| u64::from(header.entries_max) * u64::from(BLOCK_LEN >> 20))
}

/// One word for the kind of disk.
pub(super) fn kind(disk_type: DiskType) -> &'static str {
    match disk_type {
        DiskType::Fixed => "fixed",
        DiskType::Dynamic => "dynamic",
        DiskType::Differencing => "differencing",
        DiskType::Other(_) => "unknown",
    }
}
