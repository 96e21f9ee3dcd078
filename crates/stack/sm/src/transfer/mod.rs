//! The contents of a disk to a socket and from one: what exports and imports over HTTP move.
//!
//! ```text
//!   chain ── pieces ── raw | VHD ──▶ socket ──▶ the daemon ──▶ HTTP          export
//!   image ◀── runs of sectors ◀── raw | chunks | VHD ◀── socket ◀── HTTP     import
//! ```
//!
//! The bytes of an import come from a client and are read here, in the worker of the SR. A piece of at most two MiB is
//! held at a time, besides the block table of a VHD.

mod export;
mod import;
mod wire;

use serde::{Deserialize, Serialize};
use tapio_format::FileMedium;
use tapio_format::vhd::offline::Layer;
use tapio_types::{ApiError, ChainSpec};
use uuid::Uuid;

use crate::fill::source::Source;
pub(crate) use export::export;
pub(crate) use import::import;

/// How a disk is written as a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamFormat {
    /// The bytes of the disk.
    Raw,
    /// A VHD: dynamic, or the difference to another disk.
    Vhd,
    /// Pieces with their places (`u64` offset, `u32` length, the lowest byte first, data), the last one empty. An
    /// export has what the images hold: of a whole disk what is not zero, of a difference zeros too.
    Chunked,
}

/// A disk to be sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// Its images.
    pub chain: ChainSpec,
    /// Names it in a VHD.
    pub uuid: Uuid,
    /// The disk that this is the difference to, and its name in a VHD.
    pub base: Option<(ChainSpec, Uuid)>,
    /// How.
    pub format: StreamFormat,
    /// The byte of the stream with which it begins; of pieces the byte of the disk, which is the end of one.
    pub start: u64,
}

/// What is received into a VDI.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Import {
    /// The VDI, which nothing else uses.
    pub into: Uuid,
    /// How it is written.
    pub format: StreamFormat,
    /// Raw: the byte of the disk with which the stream begins.
    pub start: u64,
    /// Raw: bytes of the stream; none for all from `start` to the end of the disk.
    pub len: Option<u64>,
}

/// Bytes in front of an exported stream: [`Head`].
pub const HEAD_LEN: usize = 16;

/// What comes before an exported stream on its socket: two numbers, the lowest byte first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Bytes of the whole stream.
    pub(crate) len: u64,
    /// Changes with the contents of the stream.
    pub(crate) tag: u64,
}

impl Head {
    pub(crate) fn encode(self) -> [u8; HEAD_LEN] {
        let mut bytes = [0; HEAD_LEN];
        bytes[..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..].copy_from_slice(&self.tag.to_le_bytes());
        bytes
    }
}

/// Refuses images that are encrypted: their key is with the disk process, and what they hold is no disk without it.
fn check_plain(source: &Source, vdi: Uuid) -> Result<(), ApiError> {
    let is_encrypted = |layer: &Layer<FileMedium>| match layer {
        Layer::Vhd(image) => image.batmap().is_some_and(|batmap| batmap.header.key_hash.is_set()),
        Layer::Raw { .. } => false,
    };
    match source.files().is_some_and(|chain| chain.layers().iter().any(is_encrypted)) {
        true => Err(ApiError::new("VDI_IS_ENCRYPTED", [vdi.to_string()])),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
