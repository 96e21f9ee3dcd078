//! A package of a VM with a disk, its parts, and a VHD.

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use tapio_format::vhd::{DiskType, Footer};
use tapio_xva::{end_members, put_member};

use super::Shelf;

const DESCRIPTOR: &str = "<?xml version='1.0'?><ovf:Envelope xmlns:ovf='o' xmlns:rasd='r'><References>\
    <File ovf:id='f' ovf:href='a.vhd' ovf:size='512'/></References><DiskSection>\
    <Disk ovf:diskId='d' ovf:fileRef='f' ovf:capacity='2' ovf:capacityAllocationUnits='byte * 2^20'/>\
    <Disk ovf:diskId='e' ovf:capacity='1' ovf:capacityAllocationUnits='MegaBytes'/></DiskSection>\
    <VirtualSystemCollection ovf:id='c'><VirtualSystem ovf:id='vm'><Name>a &lt;b&gt; &#65;</Name>\
    <AnnotationSection><Annotation>x</Annotation></AnnotationSection><VirtualHardwareSection><Item>\
    <rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item><Item>\
    <rasd:AllocationUnits>byte*2^20</rasd:AllocationUnits><rasd:ResourceType>4</rasd:ResourceType>\
    <rasd:VirtualQuantity>64</rasd:VirtualQuantity></Item><StorageItem><rasd:HostResource>ovf:/disk/d\
    </rasd:HostResource><rasd:ResourceType>17</rasd:ResourceType></StorageItem><Item>\
    <rasd:HostResource>ovf:/disk/e</rasd:HostResource><rasd:ResourceType>17</rasd:ResourceType></Item><Item>\
    <rasd:ResourceType>15</rasd:ResourceType></Item><Item><rasd:Connection>lan</rasd:Connection>\
    <rasd:ResourceType>10</rasd:ResourceType></Item><Config ovf:key='firmware' ovf:value='efi'/>\
    </VirtualHardwareSection></VirtualSystem></VirtualSystemCollection></ovf:Envelope>";

/// A stream-optimised VMDK of 64 KiB in grains of 4 KiB, two of which it has. What our own writer makes is too long to
/// be kept.
fn vmdk() -> std::io::Result<Vec<u8>> {
    let header = |directory: u64| {
        let mut bytes = vec![0; 512];
        let fields: [(usize, &[u8]); 10] = [
            (0, b"KDMV"),
            (4, &3_u32.to_le_bytes()),
            (8, &0x3_0001_u32.to_le_bytes()),
            (12, &128_u64.to_le_bytes()),
            (20, &8_u64.to_le_bytes()),
            (28, &1_u64.to_le_bytes()),
            (36, &1_u64.to_le_bytes()),
            (44, &8_u32.to_le_bytes()),
            (56, &directory.to_le_bytes()),
            (77, &1_u16.to_le_bytes()),
        ];
        for (at, value) in fields {
            bytes[at..at + value.len()].copy_from_slice(value);
        }
        bytes
    };
    let whole = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(512), 0);
    let mut image = header(u64::MAX);
    image.extend(b"# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n");
    whole(&mut image);
    let mut table = [0_u32; 8];
    for grain in [0, 5_u64] {
        table[grain as usize] = (image.len() / 512) as u32;
        let mut packing = ZlibEncoder::new(Vec::new(), Compression::fast());
        packing.write_all(&[grain as u8 + 1; 4096])?;
        let packed = packing.finish()?;
        image.extend((grain * 8).to_le_bytes());
        image.extend((packed.len() as u32).to_le_bytes());
        image.extend(packed);
        whole(&mut image);
    }
    let metadata = |image: &mut Vec<u8>, kind: u32, bytes: &[u8]| {
        image.extend(1_u64.to_le_bytes());
        image.extend([0; 4]);
        image.extend(kind.to_le_bytes());
        whole(image);
        let place = (image.len() / 512) as u32;
        image.extend(bytes);
        whole(image);
        place
    };
    let table: Vec<u8> = table.iter().flat_map(|sector| sector.to_le_bytes()).collect();
    let table = metadata(&mut image, 1, &table);
    let directory = metadata(&mut image, 2, &[table.to_le_bytes(), [0; 4]].concat());
    metadata(&mut image, 3, &header(u64::from(directory)));
    image.extend([0; 512]);
    Ok(image)
}

/// A sparse VMDK of 64 KiB in grains of 4 KiB, two of which it has.
fn sparse_vmdk() -> Vec<u8> {
    let mut image = vec![0; 4 * 512];
    let fields: [(usize, &[u8]); 8] = [
        (0, b"KDMV"),
        (4, &1_u32.to_le_bytes()),
        (8, &5_u32.to_le_bytes()),
        (12, &128_u64.to_le_bytes()),
        (20, &8_u64.to_le_bytes()),
        (44, &8_u32.to_le_bytes()),
        (56, &1_u64.to_le_bytes()),
        (64, &8_u64.to_le_bytes()),
    ];
    for (at, value) in fields {
        image[at..at + value.len()].copy_from_slice(value);
    }
    // The directory in sector 1, its two tables in 2 and 3; the grain 1 is zero, and says so.
    for (at, sector) in [(512, 2_u32), (516, 3), (1024, 4), (1028, 1), (1536 + 4, 12)] {
        image[at..at + 4].copy_from_slice(&sector.to_le_bytes());
    }
    image.extend([1; 4096]);
    image.extend([2; 4096]);
    image
}

/// A file of gzip's with one block, which is stored as it is: what a mutation changes there is seen.
fn gzip(data: &[u8]) -> Vec<u8> {
    let len = data.len() as u16;
    let (head, sum) = ([0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 1], crc32fast::hash(data));
    let parts: [&[u8]; 6] = [
        &head,
        &len.to_le_bytes(),
        &(!len).to_le_bytes(),
        data,
        &sum.to_le_bytes(),
        &u32::from(len).to_le_bytes(),
    ];
    parts.concat()
}

fn package(file: &str, image: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    put_member(&mut bytes, "a.ovf", DESCRIPTOR.replace("a.vhd", file).as_bytes())?;
    put_member(&mut bytes, "a.mf", b"SHA256(a.vhd)= 00\nSHA1(a.ovf)= 00\n")?;
    put_member(&mut bytes, file, image)?;
    end_members(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn put_into(shelf: &mut Shelf) {
    shelf.put("ova_descriptor", "collection", DESCRIPTOR);
    shelf.put("ova_descriptor", "entity", "<!DOCTYPE a [<!ENTITY b 'c'>]><Envelope>&b;</Envelope>");
    shelf.put("ova_descriptor", "deep", "<Envelope><VirtualSystemCollection>".repeat(40));
    // A fixed VHD is its data and a footer.
    let mut footer = Footer::new(DiskType::Fixed, 1024);
    (footer.uuid, footer.timestamp) = (uuid::Uuid::from_u128(7), 0);
    let fixed = [&[5; 1024][..], &footer.encode()].concat();
    let vmdk = vmdk().unwrap_or_default();
    shelf.put("ova", "fixed", package("a.vhd", &fixed).unwrap_or_default());
    shelf.put("ova", "vmdk", package("a.vmdk", &vmdk).unwrap_or_default());
    let raw = [[0_u8; 512], [3; 512], [0; 512], [0; 512]].concat();
    let packed = gzip(&raw);
    let whole = package("a.img.gz", &packed).unwrap_or_default();
    shelf.put("ova", "raw", package("a.img", &raw).unwrap_or_default());
    shelf.put("ova_packed", "package", gzip(&whole));
    shelf.put("ova_packed", "two", [packed.clone(), packed].concat());
    shelf.put("ova", "packed", whole);
    shelf.put("ova_image", "sparse", sparse_vmdk());
    shelf.put("ova_image", "fixed", fixed);
    shelf.put("ova_image", "vmdk", vmdk);
}
