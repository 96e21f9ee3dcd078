//! Whole contents: into a new image, and into every block of an image.

use std::path::Path;

use tapio_types::Span;

use super::chain::Chain;
use super::create::{create_on, write_new};
use super::image::{Image, OpenOptions, PendingBitmap};
use super::modify::set_key_hash;
use super::{Layer, Shape};
use crate::error::{FormatError, FormatErrorKind, Result, invalid};
use crate::medium::{FileMedium, Lent, Medium, PageBuffer};
use crate::vhd::crypt::DiskCipher;
use crate::vhd::{DiskType, KeyHash, SECTOR_LEN, bitmap, layout};

/// How much is read at once.
const PIECE_LEN: u64 = 2 << 20;

/// Copies the disk whose leaf is at `source` into a new image at `target` that depends on nothing: a fixed disk for a
/// fixed disk, else a dynamic one. With a key of 32 or 64 bytes the new image is encrypted.
///
/// # Errors
/// `Exists` for a target that is there, `InvalidArgument` for an encrypted fixed disk and for odd keys, those of the
/// chain and of the system.
pub fn copy(source: &Path, target: &Path, key: Option<&[u8]>) -> Result<()> {
    if std::fs::symlink_metadata(target).is_ok() {
        return Err(FormatError::new(FormatErrorKind::Exists, "exists already: choose a different name")
            .with_path(target));
    }
    let chain = Chain::open(source)?;
    let is_fixed =
        matches!(chain.layers(), [Layer::Vhd(image)] if image.footer().disk_type == DiskType::Fixed);
    if let Some(Layer::Vhd(leaf)) = chain.layers().first()
        && leaf.batmap().is_some_and(|batmap| batmap.header.key_hash.is_set())
    {
        return Err(invalid("is encrypted already: its data would be encrypted twice").with_path(source));
    }
    let cipher = key.map(DiskCipher::new).transpose()?;
    if is_fixed && key.is_some() {
        return Err(invalid("a fixed disk has no place for the fingerprint of a key").with_path(source));
    }
    let shape = if is_fixed { Shape::Fixed } else { Shape::Dynamic };
    let len = chain.virtual_len();
    write_new(target, |medium| {
        create_on(medium, &shape, len, 0)?;
        let mut image = Image::open_on(Lent(medium), target, OpenOptions::WRITE)?;
        if let Some(key) = key {
            set_key_hash(&mut image, KeyHash::of([0; 32], key))?;
        }
        copy_data(&chain, &mut image, cipher.as_ref())
    })
}

/// Copies all sectors that are not zero.
fn copy_data<M: Medium, T: Medium>(
    source: &Chain<M>,
    target: &mut Image<T>,
    cipher: Option<&DiskCipher>,
) -> Result<()> {
    let len = source.virtual_len();
    let mut data = PageBuffer::new(PIECE_LEN as usize);
    for at in (0..len).step_by(PIECE_LEN as usize) {
        let span = Span::new(at, PIECE_LEN.min(len - at));
        if source.extents(span)?.iter().all(|extent| extent.place.is_none()) {
            continue;
        }
        let piece = &mut data[..span.len as usize];
        source.read_at(at, piece)?;
        let sectors = piece.len() / SECTOR_LEN as usize;
        let mut full = vec![0; sectors.div_ceil(8)];
        for (index, sector) in piece.chunks_exact(SECTOR_LEN as usize).enumerate() {
            if sector.iter().any(|&byte| byte != 0) {
                bitmap::set(&mut full, index);
            }
        }
        for (_, first, count) in bitmap::runs(&full, 0, sectors).filter(|(is_data, ..)| *is_data) {
            let start = first * SECTOR_LEN as usize;
            let run = &mut piece[start..start + count * SECTOR_LEN as usize];
            if let Some(cipher) = cipher {
                cipher.encrypt(at / SECTOR_LEN + first as u64, run);
            }
            target.write_at(at + start as u64, run)?;
        }
    }
    target.finish()
}

/// Writes every sector of the disk into the image itself, so that it reads no parent any more.
///
/// # Errors
/// `OutOfSpace`, those of the chain and of the system. What was written until then stays; the image is valid.
pub fn fill(path: &Path) -> Result<()> {
    let chain = Chain::open(path)?;
    let mut image = Image::open(path, OpenOptions::WRITE)?;
    let len = chain.virtual_len();
    let mut data = PageBuffer::new(image.block_len() as usize);
    for at in (0..len).step_by(data.len()) {
        let piece = &mut data[..u64::from(image.block_len()).min(len - at) as usize];
        // The chain sees what is committed; a block is read before it is written, so that is what it needs.
        chain.read_at(at, piece)?;
        image.write_at(at, piece)?;
    }
    image.finish()
}

/// Gives places to all blocks that hold any of the sectors `first` to `last`, without writing data: they read as
/// zeros from then on, not as the parent. Blocks that are in the image already are left as they are.
///
/// # Errors
/// `InvalidArgument` for a fixed disk and for sectors behind the end, `OutOfSpace`, those of the medium.
pub fn fill_table<M: Medium>(image: &mut Image<M>, first: u64, last: Option<u64>) -> Result<()> {
    if image.header().is_none() {
        return Err(invalid("a fixed disk has no blocks to give places to").with_path(image.path()));
    }
    let sectors = image.virtual_len() / SECTOR_LEN;
    let last = last.unwrap_or(sectors.saturating_sub(1));
    if first > last || last >= sectors {
        let error = invalid(format!("there are no sectors {first} to {last} in a disk of {sectors}"));
        let number = if first > last { libc::EINVAL } else { libc::ERANGE };
        return Err(error.with_path(image.path()).with_errno(number));
    }
    let per_block = image.block_sectors() as u64;
    for block in (first / per_block) as u32..=(last / per_block) as u32 {
        if image.block_sector(block).is_none() {
            image.allocate_whole(block)?;
        }
    }
    image.finish()
}

impl<M: Medium> Image<M> {
    /// Gives the block a place with all of its bits set.
    fn allocate_whole(&mut self, block: u32) -> Result<()> {
        self.allocate(block)?;
        let len = layout::bitmap_len(self.block_len()) as usize;
        if let Some(PendingBitmap { map, .. }) = self.pending.bitmaps.get_mut(&block) {
            *map = vec![0xff; len];
        }
        self.commit_if_many()
    }
}

/// Writes the footer, found in either of its places, into both; gives an image without a UUID one.
///
/// # Errors
/// As [`Image::open`], those of the medium.
pub fn repair(path: &Path, use_backup: bool) -> Result<()> {
    let mut image: Image<FileMedium> = Image::open(path, OpenOptions { use_backup, ..OpenOptions::WRITE })?;
    if image.footer().uuid.is_nil() {
        image.footer_mut().uuid = uuid::Uuid::new_v4();
    }
    image.write_footer()
}
