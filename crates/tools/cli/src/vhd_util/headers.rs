//! Headers of an image for people, for the programs that parse them, and as JSON.

use std::io::Write;
use std::path::Path;

use serde_json::json;
use tapio_format::vhd::offline::{self, Image};
use tapio_format::vhd::{DiskType, Footer, HEADER_LEN, Header, PlatformCode, footer, time};
use tapio_format::{FileMedium, Medium};
use tapio_types::Access;

use super::output::{Failure, Numbers, hex};
use super::query::kind;

pub(super) fn print<M: Medium>(
    image: &Image<M>,
    numbers: Numbers,
    out: &mut dyn Write,
) -> Result<(), Failure> {
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

pub(super) fn as_json<M: Medium>(image: &Image<M>) -> serde_json::Value {
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
pub(super) fn dump(path: &Path, numbers: Numbers, out: &mut dyn Write) -> Result<(), Failure> {
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
