//! An archive that is written.

use std::io::{self, Write};

use crate::document::Document;
use crate::{DOCUMENT, digest, tar};

/// Writes an archive: the document, then disk by disk, then the end.
#[derive(Debug)]
pub struct Writer<W>(W);

impl<W: Write> Writer<W> {
    /// Begins an archive.
    ///
    /// # Errors
    /// The output's.
    pub fn new(mut output: W, document: &Document) -> io::Result<Self> {
        tar::put(&mut output, DOCUMENT, document.write().as_bytes())?;
        Ok(Self(output))
    }

    /// Writes a piece of a disk, with its sum.
    ///
    /// # Errors
    /// The output's.
    pub fn chunk(&mut self, disk: &str, number: u64, data: &[u8]) -> io::Result<()> {
        let name = format!("{disk}/{number:08}");
        tar::put(&mut self.0, &name, data)?;
        tar::put(&mut self.0, &format!("{name}.xxhash"), digest::xxhash(data).as_bytes())
    }

    /// Writes the end.
    ///
    /// # Errors
    /// The output's.
    pub fn finish(mut self) -> io::Result<W> {
        tar::end(&mut self.0)?;
        Ok(self.0)
    }
}
