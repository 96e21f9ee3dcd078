//! A file in the file of a package.

use std::io::{Read, Seek, SeekFrom};

use crate::error::OvaError;

/// Where a file lies in the package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Of its first byte.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

impl Span {
    /// Reads bytes of the file.
    ///
    /// # Errors
    /// They are not all in it; the input's.
    pub(crate) fn read(
        &self,
        input: &mut (impl Read + Seek),
        at: u64,
        into: &mut [u8],
    ) -> Result<(), OvaError> {
        let end = at.checked_add(into.len() as u64).filter(|end| *end <= self.len);
        let Some(_) = end else {
            let why = format!(
                "{} bytes at byte {at} lie behind the end of the file at byte {}",
                into.len(),
                self.len
            );
            return Err(OvaError::Wrong(why));
        };
        input.seek(SeekFrom::Start(self.offset.saturating_add(at)))?;
        Ok(input.read_exact(into)?)
    }
}
