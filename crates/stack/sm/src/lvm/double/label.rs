//! LVM's mark of the device: a label with a UUID, and nothing behind it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::lvm::resign::label::{ID_LEN, Id, id_of, label_of, read_from};

const SECTOR: u64 = 512;

fn open(device: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(device)
}

fn parsed(text: &str) -> io::Result<Id> {
    id_of(text).ok_or_else(|| io::Error::other(format!("'{text}' has not {ID_LEN} letters")))
}

/// Writes it, with a UUID as LVM prints it.
pub(super) fn write(device: &Path, uuid: &str) -> io::Result<()> {
    let file = open(device)?;
    file.write_all_at(&label_of(&parsed(uuid)?), SECTOR)?;
    file.sync_all()
}

pub(super) fn remove(device: &Path) -> io::Result<()> {
    let file = open(device)?;
    file.write_all_at(&[0; SECTOR as usize], SECTOR)?;
    file.sync_all()
}

/// Whether it has this UUID.
pub(super) fn is(device: &Path, uuid: &str) -> bool {
    let mut bytes = vec![0; 4 * SECTOR as usize];
    let read = open(device).and_then(|file| file.read_exact_at(&mut bytes, 0));
    read.is_ok() && read_from(&bytes).is_ok_and(|found| parsed(uuid).is_ok_and(|uuid| found == uuid))
}
