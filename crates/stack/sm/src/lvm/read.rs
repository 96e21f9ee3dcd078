//! What the image in a volume says, read without making the volume reachable: through the devices below it.
//!
//! A scan so needs no activation, which takes a program for each. What is read is what is on the devices: this side
//! writes durably before it says that something is done, and disk processes write past the page cache.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use tapio_format::PageBuffer;

use super::group::{HIDDEN, Volume};
use super::names;
use crate::dir::facts::{Facts, FileKind, ReadAt};

/// Reads past the page cache begin and end on a multiple of this.
const ALIGN: u64 = 4096;

/// A volume's bytes, by the devices below it.
struct Through<'a>(&'a Volume);

impl Through<'_> {
    /// Reads from one page.
    fn read_page(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let (page, within) = (at / ALIGN * ALIGN, (at % ALIGN) as usize);
        let segment = self
            .0
            .segments
            .iter()
            .find(|segment| (segment.start..segment.start + segment.len).contains(&page));
        let segment =
            segment.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "behind its end"))?;
        let (device, start) = segment
            .place
            .as_ref()
            .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "it is no plain logical volume"))?;
        let mut buffer = PageBuffer::new(ALIGN as usize);
        read_direct(device, start + (page - segment.start), &mut buffer)?;
        into.copy_from_slice(&buffer[within..within + into.len()]);
        Ok(())
    }
}

fn read_direct(device: &Path, at: u64, into: &mut [u8]) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT | libc::O_CLOEXEC).open(device)?;
    file.read_exact_at(into, at)
}

impl ReadAt for Through<'_> {
    fn read_at_once(&self, mut into: &mut [u8], mut at: u64) -> io::Result<()> {
        while !into.is_empty() {
            let here = usize::try_from(ALIGN - at % ALIGN).map_or(into.len(), |here| here.min(into.len()));
            let (first, rest) = into.split_at_mut(here);
            self.read_page(first, at)?;
            at += here as u64;
            into = rest;
        }
        Ok(())
    }
}

/// What the image says. What is wrong with it is `damage`.
pub(super) fn facts(volume: &Volume, kind: FileKind) -> Facts {
    let mut facts = Facts::unread(kind, volume.size);
    match kind {
        FileKind::Raw => {
            facts.virtual_size = volume.size;
            facts.hidden = volume.tags.iter().any(|tag| tag == HIDDEN);
        }
        FileKind::Vhd => {
            facts.damage = facts.read_vhd(&Through(volume), volume.size).err();
            // Parents are known by their images, whatever the group was called when they were recorded.
            if let Some(parent) = &mut facts.parent {
                match names::image_of_recorded(&parent.name) {
                    Some((uuid, kind)) => parent.name = kind.file_name(uuid),
                    None => {
                        facts.damage =
                            Some(format!("its parent is called '{}', as no image is", parent.name));
                    }
                }
            }
        }
    }
    facts
}

/// The first sector of a volume.
///
/// # Errors
/// The devices'.
pub(super) fn first_sector(volume: &Volume) -> io::Result<[u8; 512]> {
    let mut sector = [0; 512];
    Through(volume).read_at_once(&mut sector, 0)?;
    Ok(sector)
}
