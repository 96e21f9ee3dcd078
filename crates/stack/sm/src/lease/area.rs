//! The lease area on its storage: a file, or a volume. Every read asks the storage, and every write is
//! on it when it returns.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::io::Errno;

use super::layout::{AREA_LEN, SECTOR};

/// A sector that direct I/O takes.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Aligned([u8; SECTOR]);

/// An opened area.
#[derive(Debug)]
pub(crate) struct Area {
    file: File,
}

impl Area {
    /// Opens it.
    ///
    /// # Errors
    /// It is not there.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        match options.clone().custom_flags(libc::O_DIRECT | libc::O_CLOEXEC).open(path) {
            Ok(file) => Ok(Self { file }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                // A file system of this host that has no direct I/O: its cache is one for all.
                Ok(Self { file: options.open(path)? })
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a file that holds an area of zeroes.
    ///
    /// # Errors
    /// It exists, or there is no room.
    pub(crate) fn make(path: &Path) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(AREA_LEN)?;
        file.sync_all()
    }

    /// Makes a volume hold an area of zeroes.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn clear(path: &Path) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        let zeroes = vec![0; 1 << 20];
        for at in (0..AREA_LEN).step_by(zeroes.len()) {
            file.write_all_at(&zeroes, at)?;
        }
        file.sync_all()
    }

    /// Reads sectors.
    ///
    /// # Errors
    /// The storage's; the area ends before.
    pub(crate) fn read(&self, first: usize, count: usize) -> io::Result<Vec<[u8; SECTOR]>> {
        let mut sectors = vec![Aligned([0; SECTOR]); count];
        let mut done = 0;
        while done < count {
            let mut slices: Vec<_> =
                sectors[done..].iter_mut().map(|sector| IoSliceMut::new(&mut sector.0)).collect();
            let at = ((first + done) * SECTOR) as u64;
            let len = match rustix::io::preadv(&self.file, &mut slices, at) {
                Ok(len) => len,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if len < SECTOR {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the lease area is too short"));
            }
            done += len / SECTOR;
        }
        Ok(sectors.into_iter().map(|sector| sector.0).collect())
    }

    /// Writes one, durably.
    ///
    /// # Errors
    /// The storage's; the sector may be torn.
    pub(crate) fn write(&self, at: usize, sector: &[u8; SECTOR]) -> io::Result<()> {
        let aligned = Aligned(*sector);
        self.file.write_all_at(&aligned.0, (at * SECTOR) as u64)?;
        // What the device has in its own cache is seen by other hosts; it must only survive its power.
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_come_back_and_the_end_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("area");
        Area::make(&path).expect("it is new");
        assert!(Area::make(&path).is_err());
        let area = Area::open(&path).expect("it is there");
        area.write(3, &[7; SECTOR]).expect("it is written");
        let read = area.read(2, 3).expect("they are read");
        assert_eq!(read.iter().map(|sector| sector[9]).collect::<Vec<_>>(), [0, 7, 0]);
        let last = AREA_LEN as usize / SECTOR;
        assert!(area.read(last - 1, 1).is_ok() && area.read(last, 1).is_err());
    }
}
