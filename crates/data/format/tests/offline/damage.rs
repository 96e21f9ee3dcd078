//! Images that are broken: each gives a finding or an error that names it, and nothing panics.

use std::path::Path;

use proptest::prelude::*;
use tapio_format::vhd::footer::{COOKIE_DISABLED, Footer};
use tapio_format::vhd::offline::{
    Chain, CheckOptions, FindingKind, Image, OpenOptions, check, resolve_parent, unresolved_parent,
};
use tapio_format::vhd::{DiskType, Header, bat};
use tapio_format::{FormatErrorKind, Medium};

use crate::build::{Model, Plan, Random, layer, open, scribble};

fn sound() -> Vec<u8> {
    let plan = Plan { parent: Some(uuid::Uuid::new_v4()), ..Plan::new(DiskType::Differencing) };
    let mut image = open(plan.build());
    scribble(&mut image, &mut Model::new(plan.len()), &mut Random(3), 8);
    image.into_medium()
}

fn kinds(bytes: &Vec<u8>) -> Vec<FindingKind> {
    check(bytes, &CheckOptions::default()).unwrap().findings.iter().map(|finding| finding.kind).collect()
}

/// Gives the block's table entry a new value.
fn set_entry(bytes: &mut Vec<u8>, block: u64, sector: u32) {
    bytes.write_at(1536 + block * 4, &sector.to_be_bytes()).unwrap();
}

fn change_header(bytes: &mut Vec<u8>, change: impl FnOnce(&mut Header)) {
    let mut header = Header::decode(bytes[512..1536].try_into().unwrap()).unwrap();
    change(&mut header);
    bytes.write_at(512, &header.encode()).unwrap();
}

fn change_footers(bytes: &mut Vec<u8>, change: impl FnOnce(&mut Footer)) {
    let end = bytes.len() as u64 - 512;
    let mut footer = Footer::decode(bytes[end as usize..].try_into().unwrap()).unwrap().0;
    change(&mut footer);
    bytes.write_at(end, &footer.encode()).unwrap();
    bytes.write_at(0, &footer.encode()).unwrap();
}

#[test]
fn each_rule_finds_its_damage() {
    type Damage = fn(&mut Vec<u8>);
    let cases: [(FindingKind, Damage); 22] = [
        (FindingKind::Length, |b| b.truncate(100)),
        (FindingKind::Length, |b| b.truncate(b.len() - 100)),
        (FindingKind::PrimaryFooter, |b| b.truncate(b.len() - 1024)),
        (FindingKind::BackupFooter, |b| b[20] ^= 1),
        (FindingKind::FootersDiffer, |b| {
            let other = Footer { saved: 1, ..Footer::parse(b[..512].try_into().unwrap()) };
            b.write_at(0, &other.encode()).unwrap();
        }),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.features = 0)),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.features = 0xf2)),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.version = 0x0001_0007)),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.timestamp = u32::MAX)),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.creator_version = 0x0001_0004)),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.hidden = 2)),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.reserved[9] = 2)),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.uuid = uuid::Uuid::nil())),
        (FindingKind::PrimaryFooter, |b| change_footers(b, |f| f.geometry.cylinders = 60_000)),
        (FindingKind::Disabled, |b| change_footers(b, |f| f.cookie = COOKIE_DISABLED)),
        (FindingKind::Header, |b| b[600] ^= 1),
        (FindingKind::Header, |b| change_header(b, |h| h.reserved2[3] = 1)),
        (FindingKind::Header, |b| change_header(b, |h| h.table_offset = 1 << 40)),
        (FindingKind::Table, |b| change_header(b, |h| h.entries_max = 3)),
        (FindingKind::Table, |b| set_entry(b, 0, 2)),
        (FindingKind::Table, |b| set_entry(b, 0, 0x7fff_ffff)),
        (FindingKind::DifferencingHeader, |b| change_header(b, |h| h.parent_timestamp = u32::MAX)),
    ];
    assert_eq!(kinds(&sound()), [FindingKind::Header], "only that blocks are small");
    for (index, (kind, damage)) in cases.into_iter().enumerate() {
        let mut bytes = sound();
        damage(&mut bytes);
        assert!(kinds(&bytes).contains(&kind), "case {index}: {kind:?} not in {:?}", kinds(&bytes));
    }
}

#[test]
fn blocks_in_one_place_are_found() {
    let mut bytes = sound();
    let image = open(bytes.clone());
    let (block, sector) = image.bat().allocated().next().unwrap();
    let free = (0..image.bat().len()).find(|&block| image.bat().entry(block).is_none());
    let other = free.unwrap_or_else(|| (block + 1) % image.bat().len());
    for shift in [0, 1, 20] {
        set_entry(&mut bytes, u64::from(other), sector + shift);
        assert!(kinds(&bytes).contains(&FindingKind::Overlap), "shift {shift}: {:?}", kinds(&bytes));
    }
    let skip = CheckOptions { skip_overlap: true, ..Default::default() };
    set_entry(&mut bytes, u64::from(other), sector);
    assert!(check(&bytes, &skip).unwrap().is_valid());
}

#[test]
fn data_where_the_bitmap_is_clear_is_found() {
    let mut image = open(Plan::new(DiskType::Dynamic).build());
    image.write_at(0, &[1; 512]).unwrap();
    image.commit().unwrap();
    let at = image.data_offset(0).unwrap() + 1024;
    let mut bytes = image.into_medium();
    let options = CheckOptions { bitmaps: true, ..Default::default() };
    assert!(check(&bytes, &options).unwrap().is_valid());
    bytes.write_at(at, &[1]).unwrap();
    let report = check(&bytes, &options).unwrap();
    assert!(report.findings.iter().any(|finding| finding.kind == FindingKind::Bitmap), "{report:?}");
}

#[test]
fn a_batmap_bit_without_a_block_is_found() {
    let mut bytes = Plan::new(DiskType::Dynamic).build();
    let image = open(bytes.clone());
    let mut batmap = image.batmap().unwrap().clone();
    batmap.map[0] = 0x10;
    batmap.header.checksum = batmap.header.map_checksum(&batmap.map, image.virtual_len());
    bytes.write_at(2048, &batmap.header.encode()).unwrap();
    bytes.write_at(batmap.header.offset, &batmap.map).unwrap();
    assert!(kinds(&bytes).contains(&FindingKind::Batmap));
}

#[test]
fn a_disabled_image_opens_only_to_be_looked_at() {
    let mut bytes = sound();
    change_footers(&mut bytes, |footer| footer.cookie = COOKIE_DISABLED);
    let open = |options| Image::open_on(bytes.clone(), Path::new("x"), options);
    assert_eq!(open(OpenOptions::READ).unwrap_err().kind(), FormatErrorKind::Disabled);
    assert!(open(OpenOptions::READ).unwrap_err().to_string().contains("revert"));
    assert!(open(OpenOptions::LOOK).unwrap().footer().is_disabled());
}

#[test]
fn an_image_cut_off_says_so() {
    let bytes = sound();
    for len in (0..bytes.len()).step_by(512).chain([1, 511, 1000]) {
        let cut = bytes[..len].to_vec();
        match Image::open_on(cut.clone(), Path::new("x"), OpenOptions::LOOK) {
            Ok(image) => assert_eq!(image.footer_source(), tapio_format::vhd::FooterSource::Backup, "{len}"),
            Err(error) => assert!(
                matches!(
                    error.kind(),
                    FormatErrorKind::NotThisFormat | FormatErrorKind::Corrupt | FormatErrorKind::Io
                ),
                "{len}: {error}"
            ),
        }
        assert!(!check(&cut, &CheckOptions::default()).unwrap().is_valid(), "{len}");
    }
}

/// Everything a tool may do with foreign bytes. Only that it ends without a panic matters here.
fn handle(bytes: &Vec<u8>) {
    let all = CheckOptions { bitmaps: true, counts: true, ..Default::default() };
    let _ = check(bytes, &all);
    let look = OpenOptions::LOOK;
    for options in [look, OpenOptions { use_backup: true, ..look }] {
        let Ok(image) = Image::open_on(bytes.clone(), Path::new("/nonexistent/x.vhd"), options) else {
            continue;
        };
        let _ =
            (unresolved_parent(&image), resolve_parent(&image), image.physical_len(), image.parent_name());
        let len = image.virtual_len().min(1 << 20) & !511;
        let _ = Chain::new(vec![layer(image)]).read_at(0, &mut vec![0; len as usize]);
    }
    if let Ok(mut image) = Image::open_on(bytes.clone(), Path::new("x.vhd"), OpenOptions::WRITE) {
        let _ = image.write_at(0, &[1; 1024]).and_then(|()| image.commit());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Bytes of the metadata changed, checksums made right again or not.
    #[test]
    fn nothing_panics_on_changed_bytes(
        changes in prop::collection::vec((0usize..4096, any::<u8>()), 1..12),
        repair in any::<bool>(),
        cut in prop::option::of(0usize..8192),
    ) {
        let mut bytes = sound();
        let end = bytes.len();
        for (at, value) in changes {
            // The first half goes to the headers, the rest to the footer and whatever is before it.
            let at = if at < 3072 { at } else { end - 1 - (at - 3072) };
            bytes[at] = value;
        }
        if repair {
            let footer = Footer::parse(bytes[end - 512..].try_into().unwrap()).encode();
            let copy = Footer::parse(bytes[..512].try_into().unwrap()).encode();
            let header = Header::parse(bytes[512..1536].try_into().unwrap()).encode();
            bytes[end - 512..].copy_from_slice(&footer);
            bytes[..512].copy_from_slice(&copy);
            bytes[512..1536].copy_from_slice(&header);
        }
        if let Some(cut) = cut {
            bytes.truncate(end - cut.min(end));
        }
        handle(&bytes);
    }

    #[test]
    fn nothing_panics_on_any_table(entries in prop::collection::vec(prop_oneof![
        any::<u32>(), 0u32..200, Just(bat::UNALLOCATED), Just(bat::UNALLOCATED - 1)
    ], 12)) {
        let mut bytes = sound();
        for (block, entry) in (0..).zip(entries) {
            set_entry(&mut bytes, block, entry);
        }
        handle(&bytes);
    }
}
