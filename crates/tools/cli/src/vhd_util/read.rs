//! `read`: what is in an image, from headers to data.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_format::vhd::{SECTOR_LEN, bitmap};
use tapio_format::{FileMedium, Medium};

use super::headers;
use super::output::{Failure, Numbers};
use crate::number;

/// The most bytes of data held at once.
const PIECE_LEN: u64 = 2 << 20;

/// Print headers, tables and data of an image
#[derive(Debug, Args)]
pub(super) struct Read {
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: PathBuf,
    /// Print footer, header, parent locators and batmap header
    #[arg(short = 'p')]
    headers: bool,
    /// Print where a sector of the disk is in the file
    #[arg(short = 't', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "SEC")]
    translate: Option<u64>,
    /// Print a block's table entry
    #[arg(short = 'b', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "BLK")]
    bat: Option<u64>,
    /// Write the table as a bitmap, a bit a block, first bit highest
    #[arg(short = 'B')]
    bat_bitmap: bool,
    /// Write a block's bitmap
    #[arg(short = 'm', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "BLK")]
    bitmap: Option<u64>,
    /// Print whether a sector of the disk is in this image
    #[arg(short = 'i', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "SEC")]
    test_bitmap: Option<u64>,
    /// Print runs of sectors in this image: first and count
    #[arg(short = 'e', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "SEC")]
    extents: Option<u64>,
    /// Write the batmap
    #[arg(short = 'a')]
    batmap: bool,
    /// Print a block's bit in the batmap
    #[arg(short = 'j', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "BLK")]
    test_batmap: Option<u64>,
    /// Write a block's data as they are in this image
    #[arg(short = 'd', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "BLK")]
    data: Option<u64>,
    /// How many blocks, sectors or bytes
    #[arg(
        short = 'c',
        value_parser = number::unsigned,
        allow_hyphen_values = true,
        value_name = "NUM",
        default_value_t = 1
    )]
    count: u64,
    /// Write sectors of the disk, read through the whole chain
    #[arg(short = 'r', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "SEC")]
    sectors: Option<u64>,
    /// Write bytes of the disk, read through the whole chain
    #[arg(short = 'R', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "BYTE")]
    bytes: Option<u64>,
    /// Print numbers in hexadecimal
    #[arg(short = 'x')]
    hexadecimal: bool,
    /// Accepted: reads are cached by the system anyway
    #[arg(short = 'C', hide = true)]
    _cached: bool,
    /// With -p: print as JSON
    #[arg(long, requires = "headers")]
    json: bool,
}

impl Read {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let numbers = Numbers { hexadecimal: self.hexadecimal };
        let image = match Image::open(&self.name, OpenOptions::LOOK) {
            Ok(image) => image,
            Err(error) => {
                if self.headers && !self.json {
                    headers::dump(&self.name, numbers, out)?;
                }
                return Err(error.into());
            }
        };
        if self.headers && self.json {
            writeln!(out, "{:#}", headers::as_json(&image))?;
        } else if self.headers {
            headers::print(&image, numbers, out)?;
        }
        if let Some(sector) = self.translate {
            self.check_sectors(&image, sector)?;
            print_places(&image, sector, self.count, numbers, out)?;
        }
        if let Some(block) = self.bat {
            for block in self.blocks(&image, block)? {
                let entry =
                    image.bat().entry(block).map(|sector| numbers.show(u64::from(sector) * SECTOR_LEN));
                let place = entry.as_deref().unwrap_or("not allocated");
                writeln!(out, "block: {}: offset: {place}", numbers.show(u64::from(block)))?;
            }
        }
        if self.bat_bitmap {
            out.write_all(&bat_as_bitmap(&image)?)?;
        }
        if let Some(block) = self.bitmap {
            for block in self.blocks(&image, block)? {
                match image.bitmap_on_disk(block)? {
                    Some(map) => out.write_all(&map)?,
                    None => writeln!(out, "block {} not allocated", numbers.show(u64::from(block)))?,
                }
            }
        }
        if let Some(sector) = self.test_bitmap {
            self.check_sectors(&image, sector)?;
            print_bits(&image, sector, self.count, numbers, out)?;
        }
        if let Some(sector) = self.extents {
            self.check_sectors(&image, sector)?;
            print_extents(&image, sector, self.count, numbers, out)?;
        }
        if self.batmap {
            let batmap = image.batmap().ok_or_else(|| self.no_batmap())?;
            out.write_all(&batmap.map)?;
        }
        if let Some(block) = self.test_batmap {
            for block in self.blocks(&image, block)? {
                let batmap = image.batmap().ok_or_else(|| self.no_batmap())?;
                let bit = u8::from(bitmap::test(&batmap.map, block as usize));
                writeln!(out, "batmap for block {}: {bit}", numbers.show(u64::from(block)))?;
            }
        }
        if let Some(block) = self.data {
            self.write_blocks(&image, block, numbers, out)?;
        }
        if let Some(sector) = self.sectors {
            self.check_sectors(&image, sector)?;
            self.write_disk(sector * SECTOR_LEN, self.count * SECTOR_LEN, out)?;
        }
        if let Some(byte) = self.bytes {
            if byte.checked_add(self.count).is_none_or(|end| end > image.virtual_len()) {
                return Err(self.past_the_end(&format!("byte {byte}")));
            }
            self.write_disk(byte, self.count, out)?;
        }
        Ok(())
    }

    fn no_batmap(&self) -> Failure {
        Failure::invalid(format!("{}: has no batmap that can be read", self.name.display()))
    }

    fn past_the_end(&self, what: &str) -> Failure {
        let message = format!(
            "{}: {what} and {} from there reach past the end of the disk",
            self.name.display(),
            self.count
        );
        Failure::new(libc::ERANGE, message)
    }

    fn check_sectors(&self, image: &Image<FileMedium>, sector: u64) -> Result<(), Failure> {
        match sector.checked_add(self.count) {
            Some(end) if end <= image.virtual_len() / SECTOR_LEN => Ok(()),
            _ => Err(self.past_the_end(&format!("sector {sector}"))),
        }
    }

    fn blocks(&self, image: &Image<FileMedium>, block: u64) -> Result<std::ops::Range<u32>, Failure> {
        match (u32::try_from(block), block.checked_add(self.count).and_then(|end| u32::try_from(end).ok())) {
            (Ok(first), Some(end)) if end <= table_len(image) => Ok(first..end),
            _ => Err(self.past_the_end(&format!("block {block}"))),
        }
    }

    fn write_blocks(
        &self,
        image: &Image<FileMedium>,
        block: u64,
        numbers: Numbers,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        let mut data = vec![0; image.block_len() as usize];
        for block in self.blocks(image, block)? {
            match image.data_offset(block) {
                Some(at) => {
                    image.medium().read_at(at, &mut data).map_err(|error| {
                        Failure::new(libc::EIO, format!("{}: block {block}: {error}", self.name.display()))
                    })?;
                    out.write_all(&data)?;
                }
                None => writeln!(out, "block {} not allocated", numbers.show(u64::from(block)))?,
            }
        }
        Ok(())
    }

    fn write_disk(&self, at: u64, len: u64, out: &mut dyn Write) -> Result<(), Failure> {
        let chain = Chain::open(&self.name)?;
        let (mut at, end) = (at, at + len);
        let mut data = vec![0; PIECE_LEN as usize];
        while at < end {
            let start = at - at % SECTOR_LEN;
            let stop = end.min(start + PIECE_LEN);
            let piece = &mut data[..(stop - start).next_multiple_of(SECTOR_LEN) as usize];
            chain.read_at(start, piece)?;
            out.write_all(&piece[(at - start) as usize..(stop - start) as usize])?;
            at = stop;
        }
        Ok(())
    }
}

/// Entries in the table of the image, those kept for growth included.
fn table_len<M: Medium>(image: &Image<M>) -> u32 {
    image.header().map_or(0, |header| header.entries_max)
}

/// One bit a block, as XenServer keeps it with a VDI.
fn bat_as_bitmap<M: Medium>(image: &Image<M>) -> Result<Vec<u8>, Failure> {
    if image.header().is_none() {
        return Err(Failure::invalid(format!("{}: a fixed disk has no block table", image.path().display())));
    }
    let mut map = vec![0; (image.bat().len() as usize).div_ceil(8)];
    for (block, _) in image.bat().allocated() {
        bitmap::set(&mut map, block as usize);
    }
    Ok(map)
}

fn print_places<M: Medium>(
    image: &Image<M>,
    sector: u64,
    count: u64,
    numbers: Numbers,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    for sector in sector..sector + count {
        let (block, within) = place(image, sector);
        let at = match image.header() {
            Some(_) => image.data_offset(block).map(|data| data + within * SECTOR_LEN),
            None => Some(sector * SECTOR_LEN),
        };
        let at = at.map_or_else(|| "not allocated".to_string(), |at| numbers.show(at));
        writeln!(
            out,
            "logical sector {}: block number: {}, sector offset: {}, file offset: {at}",
            numbers.show(sector),
            numbers.show(u64::from(block)),
            numbers.show(within)
        )?;
    }
    Ok(())
}

/// The block of a sector, and the sector within it.
fn place<M: Medium>(image: &Image<M>, sector: u64) -> (u32, u64) {
    let per_block = image.block_sectors() as u64;
    (u32::try_from(sector / per_block).unwrap_or(u32::MAX), sector % per_block)
}

/// The runs of sectors that are, or are not, in this image, within a range of the disk.
fn runs<M: Medium>(
    image: &Image<M>,
    sector: u64,
    count: u64,
    mut each: impl FnMut(bool, u64, u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (mut at, end) = (sector, sector + count);
    while at < end {
        let (block, within) = place(image, at);
        let here = (image.block_sectors() as u64 - within).min(end - at);
        let map = match image.header() {
            Some(_) => image.bitmap_on_disk(block)?.unwrap_or_default(),
            None => vec![0xff; image.block_sectors().div_ceil(8)],
        };
        for (present, first, count) in bitmap::runs(&map, within as usize, (within + here) as usize) {
            each(present, at - within + first as u64, count as u64)?;
        }
        at += here;
    }
    Ok(())
}

fn print_bits<M: Medium>(
    image: &Image<M>,
    sector: u64,
    count: u64,
    numbers: Numbers,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    runs(image, sector, count, |present, first, count| {
        for sector in first..first + count {
            let (block, within) = place(image, sector);
            let (block, within) = (numbers.show(u64::from(block)), numbers.show(within));
            writeln!(out, "block {block}: sec: {within}: {}", u8::from(present))?;
        }
        Ok(())
    })
}

fn print_extents<M: Medium>(
    image: &Image<M>,
    sector: u64,
    count: u64,
    numbers: Numbers,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let mut open: Option<(u64, u64)> = None;
    let mut done = Vec::new();
    runs(image, sector, count, |present, first, count| {
        match &mut open {
            Some((start, len)) if present && *start + *len == first => *len += count,
            _ if present => done.extend(open.replace((first, count))),
            _ => {}
        }
        Ok(())
    })?;
    done.extend(open);
    for (first, count) in done {
        writeln!(out, "{} {}", numbers.show(first), numbers.show(count))?;
    }
    Ok(())
}
