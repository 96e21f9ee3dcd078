//! `fill`, `copy` and `repair`: whole contents, and whole footers.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use tapio_format::vhd::offline::{self, Image, OpenOptions};

use super::output::Failure;
use crate::number;

/// Write every sector of the disk into the image itself
#[derive(Debug, Args)]
pub(super) struct Fill {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Only give places to blocks, which then read as zeros; much faster
    #[arg(short = 'b')]
    table_only: bool,
    /// With -b: from this sector
    #[arg(
        short = 'f',
        value_parser = number::unsigned,
        allow_hyphen_values = true,
        value_name = "SEC",
        default_value_t = 0,
        requires = "table_only"
    )]
    first: u64,
    /// With -b: up to this sector, inclusive
    #[arg(
        short = 't',
        value_parser = number::unsigned,
        allow_hyphen_values = true,
        value_name = "SEC",
        requires = "table_only"
    )]
    last: Option<u64>,
    /// With -b: accepted; no table reaches beyond 2 TiB
    #[arg(short = 'B', requires = "table_only", hide = true)]
    _ignore_limit: bool,
}

impl Fill {
    pub fn run(self) -> Result<(), Failure> {
        if self.table_only {
            let mut image = Image::open(&self.name, OpenOptions::WRITE)?;
            return Ok(offline::fill_table(&mut image, self.first, self.last)?);
        }
        Ok(offline::fill(&self.name)?)
    }
}

/// Write the footer into both of its places, from whichever is whole
#[derive(Debug, Args)]
pub(super) struct Repair {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Believe the copy at the start
    #[arg(short = 'b')]
    backup: bool,
}

impl Repair {
    pub fn run(self) -> Result<(), Failure> {
        Ok(offline::repair(&self.name, self.backup)?)
    }
}

/// Copy a disk, through its whole chain, into a new image
#[derive(Debug, Args)]
pub(super) struct Copy {
    /// The image to copy
    #[arg(short = 'n', value_name = "NAME")]
    source: PathBuf,
    /// The image to make
    #[arg(short = 'N', value_name = "NEW_NAME")]
    target: PathBuf,
    /// Encrypt the new image with the key in this file, 32 or 64 bytes
    #[arg(short = 'k', value_name = "KEYFILE", conflicts_with = "key_on_stdin")]
    key_file: Option<PathBuf>,
    /// Encrypt the new image with the key on standard input, 32 or 64 bytes
    #[arg(short = 'E')]
    key_on_stdin: bool,
}

impl Copy {
    pub fn run(self) -> Result<(), Failure> {
        let key = match &self.key_file {
            Some(path) => Some(key_in(path)?),
            None if self.key_on_stdin => Some(read_key(std::io::stdin().lock(), "standard input")?),
            None => None,
        };
        Ok(offline::copy(&self.source, &self.target, key.as_deref())?)
    }
}

/// The key in a file.
pub(super) fn key_in(path: &Path) -> Result<Vec<u8>, Failure> {
    let file = std::fs::File::open(path).map_err(|error| {
        Failure::new(
            error.raw_os_error().unwrap_or(libc::EIO),
            format!("{}: cannot open: {error}", path.display()),
        )
    })?;
    read_key(file, &path.display().to_string())
}

fn read_key(from: impl Read, name: &str) -> Result<Vec<u8>, Failure> {
    let mut key = Vec::new();
    from.take(65).read_to_end(&mut key).map_err(|error| {
        Failure::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{name}: {error}"))
    })?;
    match key.len() {
        32 | 64 => Ok(key),
        len => {
            let said = if len > 64 { "more than 64".to_string() } else { len.to_string() };
            Err(Failure::invalid(format!(
                "{name}: a key has 32 or 64 bytes (256 or 512 bits) and not {said}"
            )))
        }
    }
}
