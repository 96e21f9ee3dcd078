//! A stream-optimised VMDK that is written forward.

use std::io::{self, ErrorKind, Write};

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::{AT_END, COMPRESSED, MAGIC, MARKERS, SECTOR, field};

const GRAIN_LEN: usize = 64 << 10;
const TABLE_ENTRIES: usize = 512;
/// Where the first grain is: on the border of a grain, which readers of old expect.
const OVERHEAD: u64 = 128;
const DESCRIPTION_SECTORS: u64 = 20;
/// A new line is told from what transfers of text make of it, and tables have no copies.
const NEW_LINES: u32 = 1;

const TABLE_MARKER: u32 = 1;
const DIRECTORY_MARKER: u32 = 2;
const FOOTER_MARKER: u32 = 3;

/// Writes an image: pieces of the disk in their order, then the tables.
#[derive(Debug)]
pub(crate) struct VmdkWriter<W> {
    output: W,
    sectors: u64,
    len: u64,
    directory: Vec<u32>,
    table: Vec<u32>,
    /// The grain that is being filled, and its number.
    grain: Vec<u8>,
    number: u64,
    /// What is written next.
    packed: Vec<u8>,
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, why.into())
}

fn header(capacity: u64, directory: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, MAGIC);
    put(field::VERSION, &3_u32.to_le_bytes());
    put(field::FLAGS, &(NEW_LINES | COMPRESSED | MARKERS).to_le_bytes());
    put(field::CAPACITY, &capacity.to_le_bytes());
    put(field::GRAIN, &(GRAIN_LEN as u64 / SECTOR).to_le_bytes());
    put(field::DESCRIPTION, &1_u64.to_le_bytes());
    put(field::DESCRIPTION_LEN, &DESCRIPTION_SECTORS.to_le_bytes());
    put(field::TABLE_ENTRIES, &(TABLE_ENTRIES as u32).to_le_bytes());
    put(field::DIRECTORY, &directory.to_le_bytes());
    put(field::OVERHEAD, &OVERHEAD.to_le_bytes());
    put(field::LINE_ENDS, b"\n \r\n");
    put(field::ALGORITHM, &1_u16.to_le_bytes());
    bytes
}

fn description(name: &str, capacity: u64) -> String {
    let cylinders = (capacity / (255 * 63)).clamp(1, 65_535);
    format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"streamOptimized\"\n\n\
         # Extent description\nRW {capacity} SPARSE \"{name}\"\n\n# The Disk Data Base\n#DDB\n\n\
         ddb.virtualHWVersion = \"7\"\nddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"255\"\n\
         ddb.geometry.sectors = \"63\"\nddb.adapterType = \"lsilogic\"\n"
    )
}

impl<W: Write> VmdkWriter<W> {
    /// Begins an image of a disk of `len` bytes, of whole sectors.
    ///
    /// # Errors
    /// The name is too long; the output's.
    pub(crate) fn new(mut output: W, name: &str, len: u64) -> io::Result<Self> {
        let capacity = len.div_ceil(SECTOR);
        let mut head = header(capacity, AT_END).to_vec();
        let text = description(name, capacity);
        if text.len() as u64 > DESCRIPTION_SECTORS * SECTOR {
            return Err(invalid("the name of a disk is too long"));
        }
        head.extend(text.as_bytes());
        head.resize((OVERHEAD * SECTOR) as usize, 0);
        output.write_all(&head)?;
        let tables = capacity.div_ceil((TABLE_ENTRIES * GRAIN_LEN) as u64 / SECTOR);
        Ok(Self {
            output,
            sectors: OVERHEAD,
            len,
            directory: vec![0; tables as usize],
            table: vec![0; TABLE_ENTRIES],
            grain: vec![0; GRAIN_LEN],
            number: 0,
            packed: Vec::new(),
        })
    }

    /// Writes a piece of the disk, which lies behind the one before it. What lies between is zero.
    ///
    /// # Errors
    /// It lies before another or behind the end; the image has more sectors than its tables can name; the output's.
    pub(crate) fn write(&mut self, mut at: u64, mut data: &[u8]) -> io::Result<()> {
        if at.checked_add(data.len() as u64).is_none_or(|end| end > self.len) {
            return Err(invalid("a piece lies behind the end of its disk"));
        }
        while !data.is_empty() {
            let (number, inside) = (at / GRAIN_LEN as u64, (at % GRAIN_LEN as u64) as usize);
            if number < self.number {
                return Err(invalid("a piece of a disk comes behind a later one"));
            }
            if number > self.number {
                self.end_grain(number)?;
            }
            let len = (GRAIN_LEN - inside).min(data.len());
            self.grain[inside..inside + len].copy_from_slice(&data[..len]);
            data = &data[len..];
            at += len as u64;
        }
        Ok(())
    }

    /// Writes the tables and the end; answers the output.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.end_grain(u64::MAX)?;
        let mut directory: Vec<u8> = self.directory.iter().flat_map(|sector| sector.to_le_bytes()).collect();
        directory.resize(directory.len().next_multiple_of(SECTOR as usize), 0);
        let place = self.metadata(DIRECTORY_MARKER, &directory)?;
        let footer = header(self.len.div_ceil(SECTOR), u64::from(place));
        self.metadata(FOOTER_MARKER, &footer)?;
        self.output.write_all(&[0; SECTOR as usize])?;
        Ok(self.output)
    }

    /// Writes the grain that is filled, and its table if `next` lies in another one.
    fn end_grain(&mut self, next: u64) -> io::Result<()> {
        let per_table = TABLE_ENTRIES as u64;
        if self.grain.iter().any(|byte| *byte != 0) {
            let place = self.sector()?;
            self.packed.clear();
            self.packed.extend((self.number * (GRAIN_LEN as u64 / SECTOR)).to_le_bytes());
            self.packed.extend([0; 4]);
            let mut packing = ZlibEncoder::new(std::mem::take(&mut self.packed), Compression::fast());
            packing.write_all(&self.grain)?;
            self.packed = packing.finish()?;
            let len = (self.packed.len() - 12) as u32;
            self.packed[8..12].copy_from_slice(&len.to_le_bytes());
            self.packed.resize(self.packed.len().next_multiple_of(SECTOR as usize), 0);
            self.output.write_all(&self.packed)?;
            self.sectors += self.packed.len() as u64 / SECTOR;
            self.table[(self.number % per_table) as usize] = place;
            self.grain.fill(0);
        }
        let table = self.number / per_table;
        if next / per_table != table && self.table.iter().any(|entry| *entry != 0) {
            let bytes: Vec<u8> = self.table.iter().flat_map(|sector| sector.to_le_bytes()).collect();
            self.directory[table as usize] = self.metadata(TABLE_MARKER, &bytes)?;
            self.table.fill(0);
        }
        self.number = next;
        Ok(())
    }

    /// Writes a marker and what it announces, of whole sectors; answers the sector of that.
    fn metadata(&mut self, kind: u32, bytes: &[u8]) -> io::Result<u32> {
        let mut marker = [0; SECTOR as usize];
        marker[..8].copy_from_slice(&(bytes.len() as u64 / SECTOR).to_le_bytes());
        marker[12..16].copy_from_slice(&kind.to_le_bytes());
        self.output.write_all(&marker)?;
        self.sectors += 1;
        let place = self.sector()?;
        self.output.write_all(bytes)?;
        self.sectors += bytes.len() as u64 / SECTOR;
        Ok(place)
    }

    fn sector(&self) -> io::Result<u32> {
        let why = "the image of a disk is larger than 2 TiB, which a VMDK cannot be";
        u32::try_from(self.sectors).map_err(|_| invalid(why))
    }
}
