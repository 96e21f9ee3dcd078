//! Files of a package that are compressed: unpacked into a file without a name, because images are read at any place.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};

use flate2::bufread::MultiGzDecoder;

use crate::DISK_LEN_MAX;
use crate::error::OvaError;
use crate::span::Span;

/// Bytes that are unpacked at once; where all are zero, the file gets a hole.
const PIECE: usize = 64 << 10;

/// Whether a file begins as one that gzip made.
pub(crate) fn is_gzip(head: &[u8]) -> bool {
    head.starts_with(&[0x1f, 0x8b, 8])
}

/// The bytes of a span, forward.
struct SpanReader<'a, R> {
    input: &'a mut R,
    left: u64,
}

impl<R: Read> Read for SpanReader<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = into.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let len = self.input.read(&mut into[..len])?;
        self.left -= len as u64;
        Ok(len)
    }
}

/// A file without a name in the directory for temporary files.
pub(crate) fn new_file() -> Result<File, OvaError> {
    tempfile::tempfile().map_err(|error| OvaError::Io(about(&error)))
}

/// An error of the temporary file, with its place and what to do.
fn about(error: &io::Error) -> io::Error {
    let dir = std::env::temp_dir();
    let why = format!("unpacking into {}: {error}; set TMPDIR to a directory with room", dir.display());
    io::Error::new(error.kind(), why)
}

/// Unpacks a file of gzip's behind the end of `spool`; answers where it is. More than `limit` bytes are refused.
pub(crate) fn unpack(
    input: &mut (impl Read + Seek),
    span: Span,
    spool: &mut File,
    limit: u64,
) -> Result<Span, OvaError> {
    input.seek(SeekFrom::Start(span.offset))?;
    let packed = BufReader::with_capacity(PIECE, SpanReader { input, left: span.len });
    let mut unpacking = MultiGzDecoder::new(packed);
    let offset = spool.seek(SeekFrom::End(0)).map_err(|error| about(&error))?;
    let (mut piece, mut len) = (vec![0; PIECE], 0);
    loop {
        let count = fill(&mut unpacking, &mut piece)?;
        if count == 0 {
            break;
        }
        len += count as u64;
        if len > limit {
            return Err(OvaError::Wrong(format!(
                "it unpacks to more than the {limit} bytes that its disk can have"
            )));
        }
        let data = &piece[..count];
        let written = match data.iter().all(|byte| *byte == 0) {
            true => spool.seek(SeekFrom::Current(count as i64)).map(drop),
            false => spool.write_all(data),
        };
        written.map_err(|error| about(&error))?;
    }
    spool.set_len(offset + len).map_err(|error| about(&error))?;
    Ok(Span { offset, len })
}

/// Reads until `into` is full or all is read.
fn fill(input: &mut impl Read, into: &mut [u8]) -> Result<usize, OvaError> {
    let mut count = 0;
    while count < into.len() {
        match input.read(&mut into[count..]) {
            Ok(0) => break,
            Ok(len) => count += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(OvaError::Early),
            Err(error) => {
                return Err(OvaError::Wrong(format!("what gzip packed cannot be unpacked: {error}")));
            }
        }
    }
    Ok(count)
}

/// The package in a file: itself, or, where gzip packed all of it, unpacked.
///
/// # Errors
/// It cannot be unpacked, or not read.
pub fn unpacked(mut file: File) -> Result<File, OvaError> {
    let mut head = [0; 3];
    let count = fill(&mut file, &mut head)?;
    file.seek(SeekFrom::Start(0))?;
    if !is_gzip(&head[..count]) {
        return Ok(file);
    }
    let span = Span { offset: 0, len: file.metadata()?.len() };
    let mut spool = new_file()?;
    unpack(&mut file, span, &mut spool, DISK_LEN_MAX)?;
    Ok(spool)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn packed(data: &[u8]) -> Vec<u8> {
        let mut packing = GzEncoder::new(Vec::new(), Compression::fast());
        packing.write_all(data).unwrap();
        packing.finish().unwrap()
    }

    #[test]
    fn what_was_packed_is_unpacked_behind_what_is_there() {
        let mut data = vec![0; 3 * PIECE + 11];
        data[2 * PIECE..][..9].fill(7);
        let bytes = [&b"before"[..], &packed(&data), b"behind"].concat();
        let span = Span { offset: 6, len: bytes.len() as u64 - 12 };
        let mut spool = new_file().unwrap();
        for turn in 0..2_u64 {
            let there = unpack(&mut Cursor::new(&bytes), span, &mut spool, 1 << 20).unwrap();
            assert_eq!(there, Span { offset: turn * data.len() as u64, len: data.len() as u64 });
            let mut read = vec![1; data.len()];
            there.read(&mut spool, 0, &mut read).unwrap();
            assert!(read == data);
        }
    }

    #[test]
    fn what_is_cut_changed_or_too_much_is_refused() {
        let whole = packed(&vec![7; 100_000]);
        let refused = |bytes: &[u8], limit: u64| {
            let span = Span { offset: 0, len: bytes.len() as u64 };
            unpack(&mut Cursor::new(bytes), span, &mut new_file().unwrap(), limit).unwrap_err().to_string()
        };
        assert!(refused(&whole[..whole.len() - 9], 1 << 20).contains("ends early"));
        assert!(refused(&whole, 99_999).contains("more than the 99999 bytes"));
        let mut changed = whole.clone();
        let at = changed.len() - 6;
        changed[at] ^= 1;
        assert!(refused(&changed, 1 << 20).contains("cannot be unpacked"));
    }
}
