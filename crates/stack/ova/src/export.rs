//! An XVA archive becomes a package: forward, disk by disk.

use std::io::{self, Read, Seek, SeekFrom, Write};

use tapio_xva::{Document, Entry, Places, Reader};

use crate::descriptor::{Drive, Firmware, Nic, System, Written, write};
pub use crate::digest::SumKind;
use crate::digest::{Summed, sum};
pub use crate::disk_format::DiskFormat;
use crate::error::OvaError;
use crate::tar::{BLOCK, header, padding, patch};
use crate::vhd::VhdWriter;
use crate::vmdk::VmdkWriter;

/// Characters of the name that files of the package have.
const NAME_LEN_MAX: usize = 60;
const SECTOR: u64 = 512;

/// How a package is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportOptions {
    /// What the files of disks are.
    pub disks: DiskFormat,
    /// The sums of the manifest.
    pub sums: SumKind,
}

/// A disk that is to come.
#[derive(Clone, Debug)]
struct Expected {
    id: String,
    len: u64,
}

/// Writes the VM of an archive, which is not compressed, as a package into an empty file.
///
/// # Errors
/// The archive is damaged, ends early, or has not one VM; a disk is larger than its file can tell; the output's.
pub fn export(
    xva: impl Read,
    mut output: impl Read + Write + Seek,
    options: ExportOptions,
) -> Result<(), OvaError> {
    let (mut archive, document) = Reader::open(xva, true)?;
    let (mut system, expected) = system(&document)?;
    let name = file_name(&system.name);
    let href = |number: usize| format!("{name}-disk{}.{}", number + 1, options.disks.ending());
    let reserved = {
        // Sizes are known when all is written; no number is longer than this one.
        let disks = expected.iter().enumerate();
        let longest =
            |(at, disk): (usize, &Expected)| Written { href: href(at), size: u64::MAX, capacity: disk.len };
        write(&system, &disks.map(longest).collect::<Vec<_>>(), options.disks).len()
    };
    let descriptor_name = format!("{name}.ovf");
    output.write_all(&header(&descriptor_name, reserved as u64)?)?;
    output.write_all(&vec![b'\n'; reserved])?;
    output.write_all(padding(reserved as u64))?;

    let (mut disks, mut sums) = (Vec::new(), Vec::new());
    // The place among the expected disks of each that has come.
    let mut arrived: Vec<usize> = Vec::new();
    let mut ahead = next(&mut archive)?;
    while let Some(piece) = ahead.take() {
        let at = expected.iter().position(|disk| disk.id == piece.disk).filter(|at| !arrived.contains(at));
        let unknown =
            || OvaError::Wrong(format!("the archive has a disk '{}' that no drive has", piece.disk));
        let at = at.ok_or_else(unknown)?;
        let (href, len) = (href(disks.len()), expected[at].len);
        let (size, sum, following) = member(&mut archive, piece, len, &href, &mut output, options)?;
        ahead = following;
        sums.push((href.clone(), sum));
        disks.push(Written { href, size, capacity: len });
        arrived.push(at);
    }
    if arrived.len() < expected.len() {
        return Err(OvaError::Early);
    }
    // In the package disks have the numbers in which they came.
    for drive in &mut system.drives {
        drive.disk = drive.disk.and_then(|disk| arrived.iter().position(|at| *at == disk));
    }
    let mut text = write(&system, &disks, options.disks).into_bytes();
    if text.len() > reserved {
        return Err(OvaError::wrong("the descriptor is longer than was reserved: a defect of ours"));
    }
    text.resize(reserved, b'\n');
    let sums = std::iter::once((descriptor_name, sum(options.sums, &text[..])?)).chain(sums);
    let kind = options.sums.name();
    let manifest: String = sums.map(|(name, sum)| format!("{kind}({name})= {sum}\n")).collect();
    output.write_all(&header(&format!("{name}.mf"), manifest.len() as u64)?)?;
    output.write_all(manifest.as_bytes())?;
    output.write_all(padding(manifest.len() as u64))?;
    output.write_all(&[0; 2 * BLOCK])?;
    patch(&mut output, BLOCK as u64, &text)?;
    output.flush()?;
    Ok(())
}

/// A piece that is the first of the next disk.
struct Piece {
    disk: String,
    number: u32,
    data: Vec<u8>,
}

fn next<R: Read>(archive: &mut Reader<R>) -> Result<Option<Piece>, OvaError> {
    let piece = archive.next_chunk()?;
    Ok(piece.map(|piece| Piece {
        disk: piece.disk.to_owned(),
        number: piece.number,
        data: piece.data.to_vec(),
    }))
}

/// The file of a disk.
enum ImageWriter<W> {
    Vmdk(Box<VmdkWriter<Summed<W>>>),
    Vhd(Box<VhdWriter<W>>),
}

impl<W: Write + Seek> ImageWriter<W> {
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Vmdk(vmdk) => vmdk.write(at, data),
            Self::Vhd(vhd) => vhd.write(at, data),
        }
    }

    /// Its bytes, and their sum where it is known.
    fn finish(self) -> io::Result<(u64, Option<String>)> {
        match self {
            Self::Vmdk(vmdk) => {
                let (len, sum) = vmdk.finish()?.finish();
                Ok((len, Some(sum)))
            }
            Self::Vhd(vhd) => Ok((vhd.finish()?, None)),
        }
    }
}

/// Writes a disk; answers the length and the sum of its member, and the first piece of the next disk.
fn member<R: Read>(
    archive: &mut Reader<R>,
    first: Piece,
    disk_len: u64,
    href: &str,
    output: &mut (impl Read + Write + Seek),
    options: ExportOptions,
) -> Result<(u64, String, Option<Piece>), OvaError> {
    let start = output.seek(SeekFrom::End(0))?;
    output.write_all(&header(href, 0)?)?;
    let mut places = Places::new(disk_len);
    let mut image = match options.disks {
        DiskFormat::Vmdk => {
            let summed = Summed::new(options.sums, &mut *output);
            ImageWriter::Vmdk(Box::new(VmdkWriter::new(summed, href, disk_len)?))
        }
        DiskFormat::Vhd => ImageWriter::Vhd(Box::new(VhdWriter::new(&mut *output, disk_len)?)),
    };
    let mut put = |number: u32, data: &[u8]| -> Result<(), OvaError> {
        match places.place(number, data.len() as u64)? {
            Some(at) => Ok(image.write(at, data)?),
            None => Ok(()),
        }
    };
    put(first.number, &first.data)?;
    let mut following = None;
    while let Some(piece) = archive.next_chunk()? {
        if piece.disk != first.disk {
            let (disk, number) = (piece.disk.to_owned(), piece.number);
            following = Some(Piece { disk, number, data: piece.data.to_vec() });
            break;
        }
        put(piece.number, piece.data)?;
    }
    if !places.is_whole(SECTOR) {
        return Err(OvaError::Early);
    }
    let (len, known) = image.finish()?;
    let sum = match known {
        Some(sum) => sum,
        // Its table was written last, so it is read once more.
        None => {
            output.seek(SeekFrom::Start(start + BLOCK as u64))?;
            let sum = sum(options.sums, (&mut *output).take(len))?;
            output.seek(SeekFrom::End(0))?;
            sum
        }
    };
    output.write_all(padding(len))?;
    patch(output, start, &header(href, len)?)?;
    Ok((len, sum, following))
}

/// The VM of an archive, and its disks, by whose places its drives name them.
fn system(document: &Document) -> Result<(System, Vec<Expected>), OvaError> {
    let vms: Vec<&Entry> = document.of_class("VM").filter(|vm| !vm.bool("is_control_domain")).collect();
    let [vm] = vms[..] else {
        return Err(OvaError::Unsupported(format!(
            "the archive has {} VMs: a package is made of one",
            vms.len()
        )));
    };
    let boot = vm.record.get("HVM_boot_params").map(tapio_model::Value::to_string_map).unwrap_or_default();
    let is_uefi = boot.get("firmware").is_some_and(|firmware| firmware == "uefi");
    let of_vm = |class: &'static str, place: &'static str| {
        let mut found: Vec<&Entry> =
            document.of_class(class).filter(|device| device.text("VM") == vm.id).collect();
        found.sort_by_key(|device| device.text(place).parse::<u64>().unwrap_or(u64::MAX));
        found
    };
    let nics = of_vm("VIF", "device").into_iter().map(|vif| Nic {
        network: document
            .get("network", vif.text("network"))
            .map_or("", |net| net.text("name_label"))
            .to_owned(),
        mac: vif.text("MAC").to_owned(),
    });
    let mut system = System {
        name: vm.text("name_label").to_owned(),
        description: vm.text("name_description").to_owned(),
        cpus: vm.number("VCPUs_at_startup").and_then(|cpus| u32::try_from(cpus).ok()).unwrap_or(1).max(1),
        memory: vm.number("memory_static_max").unwrap_or_default().max(1 << 20),
        firmware: if is_uefi { Firmware::Uefi } else { Firmware::Bios },
        drives: Vec::new(),
        nics: nics.collect(),
    };
    let mut disks: Vec<Expected> = Vec::new();
    for (at, vbd) in of_vm("VBD", "userdevice").into_iter().enumerate() {
        let place = (at as u64, 0);
        if vbd.text("type").eq_ignore_ascii_case("CD") {
            system.drives.push(Drive { disk: None, place });
        } else if let Some(vdi) = document.get("VDI", vbd.text("VDI")) {
            let len = vdi.number("virtual_size").filter(|len| (1..=crate::DISK_LEN_MAX).contains(len));
            let len = len.ok_or_else(|| OvaError::wrong("the archive has a disk without a size"))?;
            if disks.iter().any(|disk| disk.id == vdi.id) {
                return Err(OvaError::Unsupported("the archive has a disk that two drives have".to_owned()));
            }
            system.drives.push(Drive { disk: Some(disks.len()), place });
            disks.push(Expected { id: vdi.id.clone(), len: len.next_multiple_of(SECTOR) });
        }
    }
    Ok((system, disks))
}

/// The name of files of a VM's package: what every file system and every reader takes.
fn file_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = name.trim_start_matches('.').chars().map(plain).take(NAME_LEN_MAX).collect();
    if name.is_empty() { "vm".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        assert_eq!(file_name("my VM/../x"), "my-VM-..-x");
        assert_eq!(file_name("..a"), "a");
        assert_eq!(file_name(""), "vm");
        assert_eq!(file_name(&"x".repeat(200)).len(), NAME_LEN_MAX);
    }
}
