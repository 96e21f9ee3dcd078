//! `read`: what is in an image, from headers to data.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tapio_format::vhd::offline::{self, Chain, Image, OpenOptions};
use tapio_format::vhd::{
    DiskType, Footer, HEADER_LEN, Header, PlatformCode, SECTOR_LEN, bitmap, footer, time,
};
use tapio_format::{FileMedium, Medium};
use tapio_types::Access;

use super::output::{Failure, hex};
use super::query::kind;

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
    #[arg(short = 't', value_name = "SEC")]
    translate: Option<u64>,
    /// Print a block's table entry
    #[arg(short = 'b', value_name = "BLK")]
    bat: Option<u64>,
    /// Write the table as a bitmap, a bit a block, first bit highest
    #[arg(short = 'B')]
    bat_bitmap: bool,
    /// Write a block's bitmap
    #[arg(short = 'm', value_name = "BLK")]
    bitmap: Option<u64>,
    /// Print whether a sector of the disk is in this image
    #[arg(short = 'i', value_name = "SEC")]
    test_bitmap: Option<u64>,
    /// Print runs of sectors in this image: first and count
    #[arg(short = 'e', value_name = "SEC")]
    extents: Option<u64>,
    /// Write the batmap
    #[arg(short = 'a')]
    batmap: bool,
    /// Print a block's bit in the batmap
    #[arg(short = 'j', value_name = "BLK")]
    test_batmap: Option<u64>,
    /// Write a block's data as they are in this image
    #[arg(short = 'd', value_name = "BLK")]
    data: Option<u64>,
    /// How many blocks, sectors or bytes
    #[arg(short = 'c', value_name = "NUM", default_value_t = 1)]
    count: u64,
    /// Write sectors of the disk, read through the whole chain
    #[arg(short = 'r', value_name = "SEC")]
    sectors: Option<u64>,
    /// Write bytes of the disk, read through the whole chain
    #[arg(short = 'R', value_name = "BYTE")]
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

/// Numbers as the user wants them.
#[derive(Clone, Copy)]
struct Numbers {
    hexadecimal: bool,
}

impl Numbers {
    fn show(self, number: u64) -> String {
        if self.hexadecimal { format!("{number:#x}") } else { number.to_string() }
    }
}

impl Read {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let numbers = Numbers { hexadecimal: self.hexadecimal };
        let image = match Image::open(&self.name, OpenOptions::LOOK) {
            Ok(image) => image,
            Err(error) => {
                if self.headers && !self.json {
                    dump(&self.name, numbers, out)?;
                }
                return Err(error.into());
            }
        };
        if self.headers && self.json {
            writeln!(out, "{:#}", headers_as_json(&image))?;
        } else if self.headers {
            print_headers(&image, numbers, out)?;
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
            (Ok(first), Some(end)) if end <= image.bat().len() => Ok(first..end),
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

fn print_headers<M: Medium>(image: &Image<M>, numbers: Numbers, out: &mut dyn Write) -> Result<(), Failure> {
    print_footer(image.footer(), numbers, out)?;
    let Some(header) = image.header() else { return Ok(()) };
    print_header(header, image.parent_name().as_deref(), numbers, out)?;
    if image.footer().disk_type == DiskType::Differencing {
        print_locators(image, header, numbers, out)?;
    }
    if let Some(batmap) = image.batmap() {
        writeln!(out, "VHD Batmap Summary:\n-------------------")?;
        writeln!(out, "Batmap offset       : {}", numbers.show(batmap.header.offset))?;
        writeln!(out, "Batmap size (secs)  : {}", numbers.show(u64::from(batmap.header.sectors)))?;
        writeln!(out, "Batmap version      : 0x{:08x}", batmap.header.version)?;
        if batmap.header.key_hash.is_set() {
            writeln!(out, "Batmap keyhash nonce: {}", hex(&batmap.header.key_hash.nonce))?;
            writeln!(out, "Batmap keyhash hash : {}", hex(&batmap.header.key_hash.hash))?;
        }
        let right = batmap.header.map_checksum(&batmap.map, image.virtual_len());
        print_checksum(batmap.header.checksum, right, out)?;
        writeln!(out)?;
    }
    Ok(())
}

fn print_checksum(stored: u32, right: u32, out: &mut dyn Write) -> Result<(), Failure> {
    let verdict = if stored == right { "Good!" } else { "Bad!" };
    writeln!(out, "Checksum            : {stored:#x}|{right:#x} ({verdict})")?;
    Ok(())
}

fn print_footer(footer: &Footer, numbers: Numbers, out: &mut dyn Write) -> Result<(), Failure> {
    let version = |version| {
        let (major, minor) = footer::version_parts(version);
        format!("Major: {major}, Minor: {minor}")
    };
    let size = |len: u64| format!("{} MB ({} Bytes)", numbers.show(len >> 20), numbers.show(len));
    let flag = |bit, name| if footer.features & bit != 0 { name } else { "" };
    let geometry = footer.geometry;
    writeln!(out, "VHD Footer Summary:\n-------------------")?;
    writeln!(out, "Cookie              : {}", text(&footer.cookie))?;
    writeln!(
        out,
        "Features            : (0x{:08x}) {}{}",
        footer.features,
        flag(footer::FEATURE_TEMPORARY, "<TEMP>"),
        flag(footer::FEATURE_RESERVED, "<RESV>")
    )?;
    writeln!(out, "File format version : {}", version(footer.version))?;
    writeln!(out, "Data offset         : {}", numbers.show(footer.data_offset))?;
    writeln!(out, "Timestamp           : {}", time::to_text(footer.timestamp))?;
    writeln!(out, "Creator Application : '{}'", text(&footer.creator_app))?;
    writeln!(out, "Creator version     : {}", version(footer.creator_version))?;
    let os = match &footer.creator_os.to_be_bytes() {
        b"Wi2k" => "Windows",
        b"Mac " => "Macintosh",
        _ => "Unknown!",
    };
    writeln!(out, "Creator OS          : {os}")?;
    writeln!(out, "Original disk size  : {}", size(footer.original_len))?;
    writeln!(out, "Current disk size   : {}", size(footer.current_len))?;
    writeln!(
        out,
        "Geometry            : Cyl: {}, Hds: {}, Sctrs: {}",
        numbers.show(u64::from(geometry.cylinders)),
        numbers.show(u64::from(geometry.heads)),
        numbers.show(u64::from(geometry.sectors))
    )?;
    writeln!(out, "                    : = {}", size(geometry.len()))?;
    writeln!(out, "Disk type           : {}", footer.disk_type.as_str())?;
    print_checksum(footer.checksum, footer.expected_checksum(), out)?;
    writeln!(out, "UUID                : {}", footer.uuid)?;
    writeln!(out, "Saved state         : {}", if footer.saved == 0 { "No" } else { "Yes" })?;
    writeln!(out, "Hidden              : {}\n", footer.hidden)?;
    Ok(())
}

fn print_header(
    header: &Header,
    parent_name: Option<&str>,
    numbers: Numbers,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let block_len = u64::from(header.block_len);
    writeln!(out, "VHD Header Summary:\n-------------------")?;
    writeln!(out, "Cookie              : {}", text(&header.cookie))?;
    writeln!(out, "Data offset (unusd) : {}", numbers.show(header.data_offset))?;
    writeln!(out, "Table offset        : {}", numbers.show(header.table_offset))?;
    writeln!(out, "Header version      : 0x{:08x}", header.version)?;
    writeln!(out, "Max BAT size        : {}", numbers.show(u64::from(header.entries_max)))?;
    writeln!(
        out,
        "Block size          : {} ({} MB)",
        numbers.show(block_len),
        numbers.show(block_len >> 20)
    )?;
    writeln!(out, "Parent name         : {}", parent_name.unwrap_or_default())?;
    writeln!(out, "Parent UUID         : {}", header.parent_uuid)?;
    writeln!(out, "Parent timestamp    : {}", time::to_text(header.parent_timestamp))?;
    print_checksum(header.checksum, header.expected_checksum(), out)?;
    writeln!(out)?;
    Ok(())
}

fn print_locators<M: Medium>(
    image: &Image<M>,
    header: &Header,
    numbers: Numbers,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    writeln!(out, "VHD Parent Locators:\n--------------------")?;
    for (index, entry) in
        header.locators.iter().enumerate().filter(|(_, entry)| entry.code != PlatformCode::None)
    {
        writeln!(out, "locator:            : {index}")?;
        writeln!(out, "       code         : {}", entry.code.as_str())?;
        writeln!(out, "       data_space   : {}", numbers.show(u64::from(entry.data_space)))?;
        writeln!(out, "       data_length  : {}", numbers.show(u64::from(entry.data_len)))?;
        writeln!(out, "       data_offset  : {}", numbers.show(entry.data_offset))?;
        match offline::locator_path(image, entry) {
            Ok(path) => writeln!(out, "       decoded name : {path}")?,
            Err(_) => writeln!(out, "failed to read parent name")?,
        }
        writeln!(out)?;
    }
    Ok(())
}

fn headers_as_json<M: Medium>(image: &Image<M>) -> serde_json::Value {
    let footer = image.footer();
    let header = image.header().map(|header| {
        let locators: Vec<_> = header
            .locators
            .iter()
            .filter(|entry| entry.code != PlatformCode::None)
            .map(|entry| {
                json!({
                    "code": entry.code.as_str(),
                    "data_space": entry.data_space,
                    "data_len": entry.data_len,
                    "data_offset": entry.data_offset,
                    "path": offline::locator_path(image, entry).ok(),
                })
            })
            .collect();
        json!({
            "table_offset": header.table_offset,
            "version": header.version,
            "entries_max": header.entries_max,
            "block_bytes": header.block_len,
            "parent_name": image.parent_name(),
            "parent_uuid": header.parent_uuid.to_string(),
            "parent_timestamp_unix": time::to_unix(header.parent_timestamp),
            "checksum": header.checksum,
            "locators": locators,
        })
    });
    let batmap = image.batmap().map(|batmap| {
        json!({
            "offset": batmap.header.offset,
            "sectors": batmap.header.sectors,
            "version": batmap.header.version,
            "checksum": batmap.header.checksum,
            "marker": batmap.header.marker,
            "key_hash": batmap.header.key_hash.is_set().then(|| hex(&batmap.header.key_hash.hash)),
        })
    });
    json!({
        "footer": {
            "cookie": text(&footer.cookie),
            "features": footer.features,
            "version": footer.version,
            "data_offset": footer.data_offset,
            "timestamp_unix": time::to_unix(footer.timestamp),
            "creator_app": text(&footer.creator_app),
            "creator_version": footer.creator_version,
            "creator_os": footer.creator_os,
            "original_bytes": footer.original_len,
            "current_bytes": footer.current_len,
            "cylinders": footer.geometry.cylinders,
            "heads": footer.geometry.heads,
            "sectors": footer.geometry.sectors,
            "type": kind(footer.disk_type),
            "checksum": footer.checksum,
            "uuid": footer.uuid.to_string(),
            "saved": footer.saved,
            "hidden": footer.hidden,
        },
        "header": header,
        "batmap": batmap,
    })
}

/// What can be seen of an image that does not open.
fn dump(path: &Path, numbers: Numbers, out: &mut dyn Write) -> Result<(), Failure> {
    let Ok(medium) = FileMedium::open(path, Access::ReadOnly) else { return Ok(()) };
    let len = medium.len().unwrap_or(0);
    let mut bytes = [0; 512];
    if len < 512 || medium.read_at(len - 512, &mut bytes).is_err() {
        return Ok(());
    }
    writeln!(out, "\n{} appears invalid; dumping headers\n", path.display())?;
    let footer = Footer::parse(&bytes);
    print_footer(&footer, numbers, out)?;
    let mut bytes = [0; HEADER_LEN];
    if medium.read_at(footer.data_offset.min(len), &mut bytes).is_ok() {
        let header = Header::parse(&bytes);
        print_header(&header, header.parent_name().as_deref(), numbers, out)?;
    }
    Ok(())
}

/// Foreign bytes that should be text, up to the first zero, with nothing that a terminal would act on.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    bytes[..end].escape_ascii().to_string()
}
