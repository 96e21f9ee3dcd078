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

/// The sums that a manifest has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumKind {
    /// For readers of OVF 1.x from before 2012.
    Sha1,
    /// For the others.
    #[default]
    Sha256,
}

impl SumKind {
    /// As a manifest names it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "SHA1",
            Self::Sha256 => "SHA256",
        }
    }
}

enum Hasher {
    Sha1(Sha1),
    Sha256(Sha256),
}

impl Hasher {
    fn new(kind: SumKind) -> Self {
        match kind {
            SumKind::Sha1 => Self::Sha1(Sha1::new()),
            SumKind::Sha256 => Self::Sha256(Sha256::new()),
        }
    }

    fn update(&mut self, data: &[u8]) {
        match self {
            Self::Sha1(sha1) => sha1.update(data),
            Self::Sha256(sha256) => sha256.update(data),
        }
    }

    fn finish(self) -> String {
        match self {
            Self::Sha1(sha1) => hex(&sha1.finalize()),
            Self::Sha256(sha256) => hex(&sha256.finalize()),
        }
    }
}

/// The sum of what is read to the end.
pub(crate) fn sum(kind: SumKind, mut input: impl Read) -> io::Result<String> {
    let (mut hasher, mut piece) = (Hasher::new(kind), vec![0; PIECE]);
    loop {
        match input.read(&mut piece) {
            Ok(0) => return Ok(hasher.finish()),
            Ok(len) => hasher.update(&piece[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
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
    hasher: Hasher,
    len: u64,
}

impl<W: Write> Summed<W> {
    pub(crate) fn new(kind: SumKind, output: W) -> Self {
        Self { output, hasher: Hasher::new(kind), len: 0 }
    }

    pub(crate) fn finish(self) -> (u64, String) {
        (self.len, self.hasher.finish())
    }
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.output.write(data)?;
        self.hasher.update(&data[..len]);
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
        for (kind, expected) in [(SumKind::Sha1, &sums.sha1), (SumKind::Sha256, &sums.sha256)] {
            let mut summed = Summed::new(kind, Vec::new());
            summed.write_all(b"abc").unwrap();
            assert_eq!(summed.finish(), (3, expected.clone()));
            assert_eq!(sum(kind, &b"abc"[..]).unwrap(), *expected);
        }
    }
}
