//! A VMDK that is read by its tables, at any place.

use std::io::{Read, Seek};

use flate2::bufread::ZlibDecoder;

use super::{AT_END, COMPRESSED, MAGIC, MARKERS, SECTOR, field, u16_at, u32_at, u64_at};
use crate::DISK_LEN_MAX;
use crate::error::OvaError;
use crate::span::Span;

/// Bytes of the largest grain that is read.
const GRAIN_LEN_MAX: u64 = 1 << 20;
/// Bytes of the smallest.
const GRAIN_LEN_MIN: u64 = 4096;
/// Entries of the largest table of grains.
const TABLE_ENTRIES_MAX: u64 = 4096;
/// Tables of the largest directory: 16 MiB of memory.
const TABLES_MAX: u64 = 4 << 20;
/// Bytes of the description that are looked at.
const DESCRIPTION_LEN_MAX: u64 = 20 * SECTOR;
/// Grains that are all zero have the place 1, in images that say so.
const ZERO_GRAINS: u32 = 1 << 2;

/// A sparse VMDK.
#[derive(Debug)]
pub(crate) struct Vmdk {
    span: Span,
    len: u64,
    grain_len: u64,
    table_entries: u64,
    is_compressed: bool,
    has_zero_grains: bool,
    directory: Vec<u32>,
    /// The table that was read last, and its number.
    table: Option<(u64, Vec<u32>)>,
    /// The grain that was unpacked last, and its number.
    grain: Option<(u64, Vec<u8>)>,
}

fn wrong(why: impl std::fmt::Display) -> OvaError {
    OvaError::Wrong(format!("a VMDK: {why}"))
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32_at(word, 0)).collect()
}

impl Vmdk {
    /// Opens it; `head` are its first bytes.
    ///
    /// # Errors
    /// It contradicts itself, is a difference to another image, or packed in a way that is not read.
    pub(crate) fn open(
        input: &mut (impl Read + Seek),
        span: Span,
        head: &[u8; 512],
    ) -> Result<Self, OvaError> {
        check_description(input, span, head)?;
        let mut header = *head;
        if u64_at(head, field::DIRECTORY) == AT_END {
            let place = span.len.checked_sub(2 * SECTOR).ok_or_else(|| wrong("it ends early"))?;
            span.read(input, place, &mut header)?;
            if !header.starts_with(MAGIC) {
                return Err(wrong("it has no footer where one must be: it was cut off, fetch it again"));
            }
        }
        let (version, flags) = (u32_at(&header, field::VERSION), u32_at(&header, field::FLAGS));
        let is_compressed = flags & COMPRESSED != 0;
        if !(1..=3).contains(&version) {
            return Err(OvaError::Unsupported(format!("a VMDK of version {version}: 1 to 3 are read")));
        }
        if is_compressed && (flags & MARKERS == 0 || u16_at(&header, field::ALGORITHM) != 1) {
            return Err(OvaError::Unsupported("a VMDK that is compressed in an unknown way".to_owned()));
        }
        let in_bytes = |at: usize| u64_at(&header, at).saturating_mul(SECTOR);
        let (len, grain_len) = (in_bytes(field::CAPACITY), in_bytes(field::GRAIN));
        if len == 0 || len > DISK_LEN_MAX {
            return Err(wrong(format_args!("a disk of {len} bytes; up to {DISK_LEN_MAX} are read")));
        }
        if !grain_len.is_power_of_two() || !(GRAIN_LEN_MIN..=GRAIN_LEN_MAX).contains(&grain_len) {
            return Err(wrong(format_args!("grains of {grain_len} bytes")));
        }
        let table_entries = u64::from(u32_at(&header, field::TABLE_ENTRIES));
        if !(1..=TABLE_ENTRIES_MAX).contains(&table_entries) {
            return Err(wrong(format_args!("tables of {table_entries} grains")));
        }
        let tables = len.div_ceil(grain_len * table_entries);
        if tables > TABLES_MAX || tables * 4 > span.len {
            return Err(wrong(format_args!(
                "a directory of {tables} tables in a file of {} bytes",
                span.len
            )));
        }
        let mut bytes = vec![0; tables as usize * 4];
        span.read(input, in_bytes(field::DIRECTORY), &mut bytes)?;
        let has_zero_grains = flags & ZERO_GRAINS != 0;
        let directory = words(&bytes);
        // Each table takes its place in the file.
        let there = directory.iter().filter(|sector| **sector != 0).count() as u64;
        if there * table_entries * 4 > span.len {
            return Err(wrong(format_args!("{there} tables in a file of {} bytes", span.len)));
        }
        let (table, grain) = (None, None);
        Ok(Self {
            span,
            len,
            grain_len,
            table_entries,
            is_compressed,
            has_zero_grains,
            directory,
            table,
            grain,
        })
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The sector of a grain; none where it is zero.
    fn place(&mut self, input: &mut (impl Read + Seek), grain: u64) -> Result<Option<u32>, OvaError> {
        let number = grain / self.table_entries;
        let Some(sector) = self.directory.get(number as usize).copied().filter(|sector| *sector != 0) else {
            return Ok(None);
        };
        if self.table.as_ref().is_none_or(|(known, _)| *known != number) {
            let mut bytes = vec![0; self.table_entries as usize * 4];
            self.span.read(input, u64::from(sector) * SECTOR, &mut bytes)?;
            self.table = Some((number, words(&bytes)));
        }
        let entry =
            self.table.as_ref().and_then(|(_, table)| table.get((grain % self.table_entries) as usize));
        let is_zero = |entry: u32| entry == 0 || (self.has_zero_grains && entry == 1);
        Ok(entry.copied().filter(|entry| !is_zero(*entry)))
    }

    pub(crate) fn next_held(
        &mut self,
        input: &mut (impl Read + Seek),
        at: u64,
    ) -> Result<Option<u64>, OvaError> {
        let mut grain = at / self.grain_len;
        while grain * self.grain_len < self.len {
            // A table that is not there has no grain.
            if self.directory.get((grain / self.table_entries) as usize).is_none_or(|sector| *sector == 0) {
                grain = (grain / self.table_entries + 1) * self.table_entries;
                continue;
            }
            if self.place(input, grain)?.is_some() {
                return Ok(Some(at.max(grain * self.grain_len)));
            }
            grain += 1;
        }
        Ok(None)
    }

    pub(crate) fn read(
        &mut self,
        input: &mut (impl Read + Seek),
        mut at: u64,
        mut into: &mut [u8],
    ) -> Result<(), OvaError> {
        while !into.is_empty() {
            if at >= self.len {
                into.fill(0);
                return Ok(());
            }
            let (grain, inside) = (at / self.grain_len, at % self.grain_len);
            let len = (self.grain_len - inside).min(into.len() as u64) as usize;
            let (data, rest) = into.split_at_mut(len);
            match self.place(input, grain)? {
                None => data.fill(0),
                Some(sector) if self.is_compressed => {
                    self.unpack(input, grain, sector)?;
                    let whole = self.grain.as_ref().map_or(&[][..], |(_, whole)| whole);
                    data.copy_from_slice(&whole[inside as usize..][..len]);
                }
                Some(sector) => self.span.read(input, u64::from(sector) * SECTOR + inside, data)?,
            }
            into = rest;
            at += len as u64;
        }
        Ok(())
    }

    /// Unpacks a grain, unless it is the one that was unpacked last.
    fn unpack(&mut self, input: &mut (impl Read + Seek), grain: u64, sector: u32) -> Result<(), OvaError> {
        if self.grain.as_ref().is_some_and(|(known, _)| *known == grain) {
            return Ok(());
        }
        let place = u64::from(sector) * SECTOR;
        let mut marker = [0; 12];
        self.span.read(input, place, &mut marker)?;
        let (sector, len) = (u64_at(&marker, 0), u64::from(u32_at(&marker, 8)));
        if sector != grain * (self.grain_len / SECTOR) {
            return Err(wrong(format_args!(
                "at byte {place} is sector {sector} of the disk, not grain {grain}"
            )));
        }
        if len == 0 || len > self.grain_len * 2 {
            return Err(wrong(format_args!("grain {grain} has {len} packed bytes")));
        }
        let mut packed = vec![0; len as usize];
        self.span.read(input, place + 12, &mut packed)?;
        let (_, mut whole) = self.grain.take().unwrap_or_default();
        whole.clear();
        // A byte more than a grain has would be one too many.
        let mut unpacking = ZlibDecoder::new(&packed[..]).take(self.grain_len + 1);
        unpacking
            .read_to_end(&mut whole)
            .map_err(|error| wrong(format_args!("grain {grain} cannot be unpacked: {error}")))?;
        let needed = self.grain_len.min(self.len - grain * self.grain_len);
        if (whole.len() as u64) < needed || whole.len() as u64 > self.grain_len {
            return Err(wrong(format_args!("grain {grain} has {} bytes, not {needed}", whole.len())));
        }
        whole.resize(self.grain_len as usize, 0);
        self.grain = Some((grain, whole));
        Ok(())
    }
}

/// An image that is a difference to another one names it.
fn check_description(input: &mut (impl Read + Seek), span: Span, head: &[u8]) -> Result<(), OvaError> {
    let (start, len) = (u64_at(head, field::DESCRIPTION), u64_at(head, field::DESCRIPTION_LEN));
    let (Some(start), Some(len)) = (start.checked_mul(SECTOR), len.checked_mul(SECTOR)) else {
        return Err(wrong("its description lies nowhere"));
    };
    let mut bytes = vec![0; len.min(DESCRIPTION_LEN_MAX) as usize];
    if start == 0 || bytes.is_empty() {
        return Ok(());
    }
    span.read(input, start, &mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let parent = text.lines().find_map(|line| line.trim().strip_prefix("parentCID="));
    match parent.map(str::trim) {
        None => Ok(()),
        Some(none) if none.eq_ignore_ascii_case("ffffffff") => Ok(()),
        Some(_) => Err(OvaError::Unsupported(
            "a VMDK that is a difference to another one, which is not in the package: export it whole"
                .to_owned(),
        )),
    }
}
