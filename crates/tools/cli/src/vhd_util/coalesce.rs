//! `coalesce`.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use tapio_format::vhd::offline;

use super::output::Failure;

/// Merge an image into its parent
///
/// Afterwards the image can be taken out of the chain: give its children its parent with modify -p, then remove it.
/// A merge that was broken off can be repeated. Prints how many sectors were written.
#[derive(Debug, Args)]
pub(super) struct Coalesce {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Leave zeros out where the parent has none of its own
    #[arg(short = 's')]
    sparse: bool,
    /// Say how far it is
    #[arg(short = 'p')]
    progress: bool,
    /// Accepted and not used
    #[arg(short = 'o', hide = true, value_name = "IGNORED")]
    _output: Option<String>,
    /// Accepted and not used
    #[arg(short = 'a', hide = true, value_name = "IGNORED")]
    _ancestor: Option<String>,
    /// Accepted and not used
    #[arg(short = 'x', hide = true, value_name = "IGNORED")]
    _size: Option<String>,
}

impl Coalesce {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let mut written = Ok(());
        let done = offline::coalesce_path(&self.name, self.sparse, |block, blocks| {
            if self.progress && written.is_ok() {
                written = progress(out, block, blocks);
            }
        })?;
        written?;
        write!(out, "Coalesced {} sectors", done.sectors)?;
        Ok(())
    }
}

fn progress(out: &mut dyn Write, block: u32, blocks: u32) -> Result<(), Failure> {
    if block == blocks {
        writeln!(out, "\r100.00%")?;
    } else {
        write!(out, "\r{:6.2}%", f64::from(block) / f64::from(blocks) * 100.0)?;
    }
    out.flush()?;
    Ok(())
}
