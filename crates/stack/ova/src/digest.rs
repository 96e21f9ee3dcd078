//! Sums of files, as manifests have them.

use std::fmt::Write as _;
use std::io::{self, Read, Write};

use sha1::{Digest, Sha1};
use sha2::Sha256;

/// Bytes that are read at once.
const PIECE: usize = 64 << 10;

/// Both sums of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) sha1: String,
    pub(crate) sha256: String,
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Sums up what is read to the end.
pub(crate) fn sums(mut input: impl Read, mut at: impl FnMut(u64)) -> io::Result<Sums> {
    let (mut sha1, mut sha256) = (Sha1::new(), Sha256::new());
    let mut piece = vec![0; PIECE];
    loop {
        let len = match input.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        sha1.update(&piece[..len]);
        sha256.update(&piece[..len]);
        at(len as u64);
    }
    Ok(Sums { sha1: hex(&sha1.finalize()), sha256: hex(&sha256.finalize()) })
}

/// Counts and sums up what is written through it.
pub(crate) struct Summed<W> {
    output: W,
    sha256: Sha256,
    pub(crate) len: u64,
}

impl<W: Write> Summed<W> {
    pub(crate) fn new(output: W) -> Self {
        Self { output, sha256: Sha256::new(), len: 0 }
    }

    pub(crate) fn finish(self) -> (u64, String) {
        (self.len, hex(&self.sha256.finalize()))
    }
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.output.write(data)?;
        self.sha256.update(&data[..len]);
        self.len += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_published_ones() {
        let sums = sums(&b"abc"[..], |_| ()).unwrap();
        assert_eq!(sums.sha1, "a9993e364706816aba3e25717850c26c9cd0d89d");
        assert_eq!(sums.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let mut summed = Summed::new(Vec::new());
        summed.write_all(b"abc").unwrap();
        assert_eq!(summed.finish(), (3, sums.sha256.clone()));
        assert_eq!(sha256(b"abc"), sums.sha256);
    }
}
