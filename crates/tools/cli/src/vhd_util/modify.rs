//! `set` and `modify`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tapio_format::vhd::offline::{self, Image, OpenOptions};

use super::output::{Failure, stop_if_told};
use crate::number;

/// Set a field of an image
#[derive(Debug, Args)]
pub(super) struct Set {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// The field
    #[arg(short = 'f', value_name = "FIELD")]
    field: Field,
    /// Its new value
    #[arg(short = 'v', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "VALUE")]
    value: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Field {
    /// 1: a node that waits to be coalesced and is not shown
    Hidden,
    /// A byte for any program's use
    Marker,
}

impl Set {
    pub fn run(self) -> Result<(), Failure> {
        let value = u8::try_from(self.value)
            .map_err(|_| Failure::invalid(format!("invalid value {}", self.value.cast_signed())))?;
        let mut image = Image::open(&self.name, OpenOptions::WRITE)?;
        match self.field {
            Field::Hidden => offline::set_hidden(&mut image, value)?,
            Field::Marker => offline::set_marker(&mut image, value)?,
        }
        Ok(())
    }
}

/// Change an image's parent or physical size, or forget its data
///
/// *** Dangerous operations, use with care ***
#[derive(Debug, Args)]
pub(super) struct Modify {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Its new parent
    #[arg(short = 'p', value_name = "NEW_PARENT")]
    parent: Option<PathBuf>,
    /// The new parent is raw
    #[arg(short = 'm', requires = "parent")]
    raw_parent: bool,
    /// Put the footer at the end of this many bytes, after or before a volume changes its size
    #[arg(short = 's', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "NEW_SIZE")]
    physical_bytes: Option<u64>,
    /// Forget all data of the image itself
    #[arg(short = 'z')]
    kill_data: bool,
}

impl Modify {
    pub fn run(self) -> Result<(), Failure> {
        let mut image = Image::open(&self.name, OpenOptions::WRITE)?;
        if self.kill_data {
            offline::kill_data(&mut image)?;
        }
        if let Some(len) = self.physical_bytes {
            offline::set_physical_len(&mut image, len)?;
        }
        if let Some(parent) = &self.parent {
            stop_if_told("VHD_UTIL_TEST_FAIL_REPARENT_BEGIN");
            offline::set_parent_with(&mut image, parent, self.raw_parent, || {
                stop_if_told("VHD_UTIL_TEST_FAIL_REPARENT_LOCATOR");
            })?;
            stop_if_told("VHD_UTIL_TEST_FAIL_REPARENT_END");
        }
        Ok(())
    }
}
