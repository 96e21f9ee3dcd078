//! The bytes of a volume by the devices below it, to be read and written while no volume of its group is reachable.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tapio_format::Medium;

use super::super::group::Volume;

/// A piece of the volume.
#[derive(Debug)]
struct Piece {
    start: u64,
    len: u64,
    file: File,
    /// Where the piece begins on the device.
    at: u64,
}

/// A volume, or a whole device.
#[derive(Debug)]
pub(super) struct Pieces(Vec<Piece>);

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

impl Pieces {
    /// Of a volume that is made of plain pieces of these devices alone, whose paths have no links.
    ///
    /// # Errors
    /// It is not; those of opening.
    pub(super) fn of(volume: &Volume, devices: &[PathBuf]) -> io::Result<Self> {
        let mut pieces = Vec::new();
        let mut next = 0;
        for segment in &volume.segments {
            let (device, at) = segment.place.as_ref().ok_or_else(|| odd("it is no plain volume"))?;
            if segment.start != next {
                return Err(odd("a part of it is missing"));
            }
            // LVM has its own choice of a name.
            if !devices.contains(&std::fs::canonicalize(device)?) {
                return Err(odd("a part of it is on a device that is not resigned"));
            }
            pieces.push(Piece { start: next, len: segment.len, file: open(device)?, at: *at });
            next += segment.len;
        }
        if next != volume.size {
            return Err(odd("a part of it is missing"));
        }
        Ok(Self(pieces))
    }

    /// The first bytes of a device.
    ///
    /// # Errors
    /// Those of opening.
    pub(super) fn beginning(device: &Path, len: u64) -> io::Result<Self> {
        Ok(Self(vec![Piece { start: 0, len, file: open(device)?, at: 0 }]))
    }

    /// Calls `each` for every part of `len` bytes from `at`: the device, the byte on it, and the part's place in the
    /// transfer.
    fn parts(
        &self,
        at: u64,
        len: usize,
        mut each: impl FnMut(&File, u64, std::ops::Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        let end = at.checked_add(len as u64).filter(|end| self.len().is_ok_and(|all| *end <= all));
        let end = end.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "behind its end"))?;
        for piece in &self.0 {
            let (from, to) = (piece.start.max(at), (piece.start + piece.len).min(end));
            if from < to {
                let range = (from - at) as usize..(to - at) as usize;
                each(&piece.file, piece.at + (from - piece.start), range)?;
            }
        }
        Ok(())
    }
}

impl Medium for Pieces {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.last().map_or(0, |piece| piece.start + piece.len))
    }

    fn is_device(&self) -> bool {
        true
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.parts(at, into.len(), |file, at, range| file.read_exact_at(&mut into[range], at))
    }

    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        self.parts(at, from.len(), |file, at, range| file.write_all_at(&from[range], at))
    }

    fn set_len(&mut self, _: u64) -> io::Result<()> {
        Err(odd("a volume has the length that it has"))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.iter().try_for_each(|piece| piece.file.sync_data())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::group::Segment;
    use super::*;

    #[test]
    fn bytes_go_to_the_pieces_they_belong_to() {
        let dir = tempfile::tempdir().unwrap();
        let devices: Vec<PathBuf> = ["a", "b"].map(|name| dir.path().join(name)).into();
        for device in &devices {
            std::fs::write(device, [b'.'; 64]).unwrap();
        }
        let segment = |start, len, device: usize, at| Segment {
            start,
            len,
            place: Some((devices[device].clone(), at)),
        };
        let volume = Volume {
            size: 24,
            segments: vec![segment(0, 16, 0, 32), segment(16, 8, 1, 8)],
            ..Volume::default()
        };
        let mut pieces = Pieces::of(&volume, &devices).unwrap();
        assert_eq!(pieces.len().unwrap(), 24);
        pieces.write_at(14, b"abcd").unwrap();
        pieces.flush().unwrap();
        let on = |device: usize| std::fs::read(&devices[device]).unwrap();
        assert_eq!((&on(0)[46..48], &on(1)[8..10]), (&b"ab"[..], &b"cd"[..]));
        assert_eq!((on(0).iter().filter(|byte| **byte == b'.').count(), on(1)[10]), (62, b'.'));
        let mut read = [0; 6];
        pieces.read_at(13, &mut read).unwrap();
        assert_eq!(&read, b".abcd.");
        assert!(pieces.write_at(22, b"xyz").is_err() && pieces.read_at(u64::MAX, &mut read).is_err());
        let refused =
            |volume: &Volume, devices: &[PathBuf]| Pieces::of(volume, devices).unwrap_err().to_string();
        assert!(refused(&volume, &devices[..1]).contains("not resigned"));
        assert!(refused(&Volume { size: 25, ..volume.clone() }, &devices).contains("missing"));
    }
}
