//! From an archive to a package and back.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};

use tapio_model::Value;
use tapio_xva::{CHUNK_LEN, Document, Entry, Places, Reader, Version, Writer};

use crate::{
    DiskFormat, ExportOptions, Firmware, Import, OvaError, Package, SumKind, export, is_package, unpacked,
};

const MIB: usize = 1 << 20;

fn entry(class: &str, id: &str, fields: &[(&str, &str)]) -> Entry {
    let record = fields.iter().map(|(name, value)| ((*name).to_owned(), Value::string(*value))).collect();
    Entry { class: class.to_owned(), id: id.to_owned(), record }
}

/// A VM with two disks, a drive and an interface; the disks with a little in them.
fn archive() -> (Vec<u8>, [Vec<u8>; 2]) {
    let text = String::new;
    let version = Version {
        hostname: text(),
        date: text(),
        product_brand: text(),
        product_version: text(),
        build_number: text(),
        major: 2,
        minor: 0,
    };
    let mut vm = entry(
        "VM",
        "Ref:0",
        &[
            ("name_label", "a VM & more"),
            ("name_description", "two\nlines"),
            ("VCPUs_at_startup", "3"),
            ("memory_static_max", "805306368"),
        ],
    );
    vm.record.insert("HVM_boot_params".into(), Value::string_map([("firmware", "uefi")]));
    let objects = vec![
        vm,
        entry("VBD", "Ref:1", &[("VM", "Ref:0"), ("VDI", "Ref:9"), ("userdevice", "10"), ("type", "Disk")]),
        entry("VBD", "Ref:2", &[("VM", "Ref:0"), ("VDI", "Ref:8"), ("userdevice", "0"), ("type", "Disk")]),
        entry("VBD", "Ref:3", &[("VM", "Ref:0"), ("VDI", ""), ("userdevice", "3"), ("type", "CD")]),
        entry(
            "VIF",
            "Ref:4",
            &[("VM", "Ref:0"), ("network", "Ref:5"), ("device", "0"), ("MAC", "02:00:00:00:00:07")],
        ),
        entry("network", "Ref:5", &[("name_label", "lan")]),
        entry("VDI", "Ref:8", &[("virtual_size", "12582912")]),
        entry("VDI", "Ref:9", &[("virtual_size", "1536")]),
    ];
    let mut first = vec![0; 12 * MIB];
    for (at, byte) in [(0, 1), (MIB + 7, 2), (9 * MIB, 3)] {
        first[at..at + 5000].fill(byte);
    }
    let second: Vec<u8> = (0..1536_u32).map(|at| ((at * 31) >> 3) as u8).collect();
    let mut writer = Writer::new(Vec::new(), &Document { version, objects }).unwrap();
    for number in [0, 1, 9, 11] {
        writer.chunk("Ref:8", number, &first[number as usize * CHUNK_LEN..][..CHUNK_LEN]).unwrap();
    }
    writer.chunk("Ref:9", 0, &second).unwrap();
    (writer.finish().unwrap(), [first, second])
}

fn package() -> Vec<u8> {
    package_as(ExportOptions::default())
}

fn package_as(options: ExportOptions) -> Vec<u8> {
    let mut package = Cursor::new(Vec::new());
    export(&archive().0[..], &mut package, options).unwrap();
    package.into_inner()
}

fn gzip(data: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut packing = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packing.write_all(data).unwrap();
    packing.finish().unwrap()
}

/// The document, and the disks.
fn imported(package: &[u8], is_checked: bool) -> Result<(Document, BTreeMap<String, Vec<u8>>), OvaError> {
    let mut package = Package::open(Cursor::new(package), is_checked, |_| ())?;
    let import = Import::plan(&mut package)?;
    let (len, mut archive) = (import.len(), Vec::new());
    import.send(&mut package, &mut archive)?;
    assert_eq!(archive.len() as u64, len, "the length is known before");
    let (mut reader, document) = Reader::open(&archive[..], true)?;
    let mut disks: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut places = BTreeMap::new();
    while let Some(chunk) = reader.next_chunk()? {
        let len = document.get("VDI", chunk.disk).unwrap().number("virtual_size").unwrap();
        let disk = disks.entry(chunk.disk.to_owned()).or_insert_with(|| vec![0; len as usize]);
        let places = places.entry(chunk.disk.to_owned()).or_insert_with(|| Places::new(len));
        let at = places.place(chunk.number, chunk.data.len() as u64)?.unwrap() as usize;
        disk[at..at + chunk.data.len()].copy_from_slice(chunk.data);
    }
    assert!(places.values().all(|places| places.is_whole(512)));
    Ok((document, disks))
}

#[test]
fn a_vm_comes_back_with_its_devices_and_every_byte() {
    let package = package();
    assert!(is_package(&package[..]) && !is_package(&archive().0[..]));
    let opened = Package::open(Cursor::new(&package[..]), true, |_| ()).unwrap();
    let system = &opened.descriptor().systems[0];
    assert_eq!((system.name.as_str(), system.cpus, system.firmware), ("a VM & more", 3, Firmware::Uefi));
    for file in &opened.descriptor().files {
        assert_eq!(file.size, Some(opened.file(&file.href).unwrap().len));
    }
    let (document, disks) = imported(&package, true).unwrap();
    let vm = document.of_class("VM").next().unwrap();
    assert_eq!((vm.text("name_label"), vm.text("name_description")), ("a VM & more", "two\nlines"));
    assert_eq!((vm.number("VCPUs_max"), vm.number("memory_static_max")), (Some(3), Some(768 << 20)));
    assert_eq!(vm.record["HVM_boot_params"].to_string_map()["firmware"], "uefi");
    let (_, originals) = archive();
    let mut drives: Vec<_> = document.of_class("VBD").collect();
    drives.sort_by_key(|vbd| vbd.text("userdevice").to_owned());
    let kinds: Vec<_> = drives.iter().map(|vbd| vbd.text("type")).collect();
    assert_eq!(kinds, ["Disk", "Disk", "CD"], "a drive comes behind the disks");
    for (vbd, original) in drives.iter().zip(&originals) {
        assert!(disks[vbd.text("VDI")] == *original, "{}", vbd.text("userdevice"));
    }
    assert!(drives[0].bool("bootable") && !drives[1].bool("bootable"));
    let vif = document.of_class("VIF").next().unwrap();
    assert_eq!(vif.text("MAC"), "02:00:00:00:00:07");
    assert_eq!(document.get("network", vif.text("network")).unwrap().text("name_label"), "lan");
}

#[test]
fn a_package_is_small_and_begins_with_its_descriptor() {
    let package = package();
    assert!(package.len() < 2 * MIB, "{} bytes: what is zero is not in it", package.len());
    let mut members = tapio_xva::Members::new(&package[..]);
    let mut names = Vec::new();
    while let Some(member) = members.next().unwrap() {
        names.push(member.name);
    }
    let expected = ["a-VM---more.ovf", "a-VM---more-disk1.vmdk", "a-VM---more-disk2.vmdk", "a-VM---more.mf"];
    assert_eq!(names, expected);
}

#[test]
fn damage_is_told_by_the_manifest_and_what_is_cut_off_too() {
    let whole = package();
    let mut package = whole.clone();
    let at = package.windows(4).position(|four| four == b"KDMV").unwrap() + 65_540;
    package[at] ^= 1;
    assert!(
        matches!(imported(&package, true), Err(OvaError::Damaged { name }) if name.ends_with("disk1.vmdk"))
    );
    for len in [0, 700, whole.len() / 2, whole.len() - 1024] {
        let refused = imported(&whole[..len], true);
        assert!(matches!(refused, Err(OvaError::Early | OvaError::Wrong(_))), "{len}: {refused:?}");
    }
}

/// A package of these members behind a descriptor with one disk in `file`.
fn of(file: &str, attributes: &str, members: &[(&str, &[u8])]) -> Vec<u8> {
    let text = format!(
        "<Envelope><References><File id='f' href='{file}' {attributes}/></References><DiskSection><Disk diskId='d' \
         fileRef='f'/></DiskSection><VirtualSystem id='vm'><VirtualHardwareSection><Item><ResourceType>17\
         </ResourceType><HostResource>ovf:/disk/d</HostResource></Item></VirtualHardwareSection></VirtualSystem>\
         </Envelope>"
    );
    let mut bytes = Vec::new();
    tapio_xva::put_member(&mut bytes, "a.ovf", text.as_bytes()).unwrap();
    for (name, data) in members {
        tapio_xva::put_member(&mut bytes, name, data).unwrap();
    }
    tapio_xva::end_members(&mut bytes).unwrap();
    bytes
}

/// A VHD of 4 MiB with a MiB of sevens in its second block.
fn vhd(shape: tapio_format::vhd::offline::Shape) -> Vec<u8> {
    use tapio_format::vhd::offline::{Image, OpenOptions, create};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vhd");
    create(&path, &shape, 4 << 20, 0).unwrap();
    let mut image = Image::open(&path, OpenOptions::WRITE).unwrap();
    image.write_at(2 << 20, &vec![7; MIB]).and_then(|()| image.finish()).unwrap();
    drop(image);
    std::fs::read(&path).unwrap()
}

#[test]
fn vhds_of_both_kinds_are_read() {
    use tapio_format::vhd::offline::Shape;
    for shape in [Shape::Dynamic, Shape::Fixed] {
        let (_, disks) = imported(&of("a.vhd", "", &[("a.vhd", &vhd(shape))]), true).unwrap();
        let disk = disks.values().next().unwrap();
        assert_eq!(disk.len(), 4 << 20);
        assert!(disk[2 * MIB..3 * MIB].iter().all(|byte| *byte == 7));
        assert!(disk[..2 * MIB].iter().chain(&disk[3 * MIB..]).all(|byte| *byte == 0));
    }
}

#[test]
fn raw_disks_are_told_by_their_names_or_their_lengths() {
    let mut raw = vec![0; 3 * MIB];
    raw[MIB + 100..][..9].fill(7);
    for name in ["a.img", "A.RAW"] {
        let (_, disks) = imported(&of(name, "", &[(name, &raw)]), true).unwrap();
        assert!(disks.into_values().eq([raw.clone()]), "{name}");
    }
    let sized = |capacity: usize| {
        let capacity = format!("<Disk capacity='{capacity}' ");
        let package = of("a", "", &[("a", &raw)]);
        let text = String::from_utf8_lossy(&package[512..]);
        let text = text.get(..text.find("</Envelope>").unwrap() + 11).unwrap().replace("<Disk ", &capacity);
        let mut bytes = Vec::new();
        tapio_xva::put_member(&mut bytes, "a.ovf", text.as_bytes()).unwrap();
        tapio_xva::put_member(&mut bytes, "a", &raw).unwrap();
        tapio_xva::end_members(&mut bytes).unwrap();
        imported(&bytes, true)
    };
    assert!(sized(3 * MIB).unwrap().1.into_values().eq([raw.clone()]));
    assert!(sized(2 * MIB).unwrap_err().to_string().contains("neither a VMDK nor a VHD"));
    let foreign: [(usize, &[u8], &str); 3] = [
        (0, b"QFI\xfb", "qcow2"),
        (0, b"vhdxfile", "VHDX"),
        (64, &[0x7f, 0x10, 0xda, 0xbe], "VDI of VirtualBox"),
    ];
    for (at, magic, says) in foreign {
        let mut other = vec![0; 1024];
        other[at..at + magic.len()].copy_from_slice(magic);
        let said = imported(&of("a.img", "", &[("a.img", &other)]), true).unwrap_err().to_string();
        assert!(said.contains(says), "{said}");
    }
    assert!(imported(&of("a.img", "", &[("a.img", &raw[..700])]), true).is_err(), "no whole sectors");
}

#[test]
fn what_gzip_packed_is_unpacked() {
    use tapio_format::vhd::offline::Shape;
    let mut raw = vec![0; 3 * MIB];
    raw[MIB + 100..][..9].fill(7);
    let vhd = vhd(Shape::Dynamic);
    for attributes in ["compression='gzip'", ""] {
        let (_, disks) = imported(&of("a.img.gz", attributes, &[("a.img.gz", &gzip(&raw))]), true).unwrap();
        assert!(disks.into_values().eq([raw.clone()]), "{attributes}");
        let (_, disks) = imported(&of("a", attributes, &[("a", &gzip(&vhd))]), true).unwrap();
        assert!(disks.values().all(|disk| disk[2 * MIB..3 * MIB].iter().all(|byte| *byte == 7)));
    }
    // The sum is that of the packed file.
    let packed = gzip(&raw);
    let sum = crate::digest::sum(SumKind::Sha1, &packed[..]).unwrap();
    let manifest = format!("SHA1(a.img.gz)= {sum}\n");
    let package = of("a.img.gz", "", &[("a.img.gz", &packed), ("a.mf", manifest.as_bytes())]);
    imported(&package, true).unwrap();
    // A package that was packed whole, and an archive of ours, which is none.
    let whole = gzip(&self::package());
    assert!(is_package(&whole[..]) && !is_package(&gzip(&archive().0)[..]));
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &whole).unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    let mut opened = Package::open(unpacked(file).unwrap(), true, |_| ()).unwrap();
    assert!(!Import::plan(&mut opened).unwrap().is_empty());
}

#[test]
fn packages_are_written_with_other_disks_and_sums() {
    let package = package_as(ExportOptions { disks: DiskFormat::Vhd, sums: SumKind::Sha1 });
    let text = String::from_utf8_lossy(&package);
    assert!(text.contains("SHA1(a-VM---more-disk1.vhd)= ") && !text.contains("SHA256("));
    let (document, disks) = imported(&package, true).unwrap();
    let (_, originals) = archive();
    let mut drives: Vec<_> = document.of_class("VBD").filter(|vbd| vbd.text("type") == "Disk").collect();
    drives.sort_by_key(|vbd| vbd.text("userdevice").to_owned());
    for (vbd, original) in drives.iter().zip(&originals) {
        assert!(disks[vbd.text("VDI")] == *original, "{}", vbd.text("userdevice"));
    }
    let mut changed = package.clone();
    let at = changed.windows(8).position(|eight| eight == b"cxsparse").unwrap() + 1100;
    changed[at] ^= 1;
    assert!(matches!(imported(&changed, true), Err(OvaError::Damaged { .. })));
}

#[test]
fn what_cannot_be_read_says_which_disk_and_why() {
    let refused = |package: &[u8]| imported(package, true).unwrap_err().to_string();
    let empty: &[u8] = &[0; 1024];
    for (package, says) in [
        (of("a.vmdk", "", &[]), "does not have its file 'a.vmdk'"),
        (of("../../etc/passwd", "", &[]), "does not have its file"),
        (of("a", "", &[("a", empty)]), "neither a VMDK nor a VHD"),
        (of("a", "", &[("a", b"COWD")]), "old VMDK of ESX"),
        (of("a", "", &[("a", b"# Disk DescriptorFile")]), "in other files"),
        (of("a", "compression='gzip'", &[("a", empty)]), "which is not so"),
        (of("a", "compression='bzip2'", &[("a", empty)]), "compressed by bzip2"),
        (of("a", "chunkSize='7'", &[("a", empty)]), "cut in chunks"),
        (of("a", "", &[("a", empty), ("a.mf", b"SHA1(a)= 00")]), "'a' does not have its sum"),
        (of("a", "", &[("a", empty), ("a.mf", b"MD5(a)= 00")]), "sums by MD5"),
        (of("a", "", &[("a", empty), ("a.mf", b"nonsense")]), "not understood"),
        (of("a", "", &[("a", empty), ("a", empty)]), "'a' twice"),
        (archive().0, "begins with 'ova.xml'"),
    ] {
        let said = refused(&package);
        assert!(said.contains(says), "{says}: {said}");
    }
}

#[test]
fn a_reader_that_seeks_reads_the_sums_once() {
    let package = package();
    let mut seen = 0;
    Package::open(Cursor::new(&package[..]), true, |at| {
        assert!(at >= seen);
        seen = at;
    })
    .unwrap();
    assert!(seen as usize <= package.len() && seen > 0);
    let mut text = String::new();
    (&package[512..]).take(38).read_to_string(&mut text).unwrap();
    assert_eq!(text, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>");
}
