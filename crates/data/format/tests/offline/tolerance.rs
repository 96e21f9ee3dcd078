//! Images that are a little wrong, or old, or foreign, and are read all the same.

use std::path::Path;

use tapio_format::vhd::footer::Footer;
use tapio_format::vhd::offline::{Chain, CheckOptions, FindingKind, Image, OpenOptions, Severity, check};
use tapio_format::vhd::{
    BatmapHeader, DiskType, FooterSource, Header, LocatorEntry, PlatformCode, Tolerance, batmap, bitmap,
};
use tapio_format::{FormatErrorKind, Medium};

use crate::build::{Model, Plan, Random, contents, layer, open, scribble};

fn look(bytes: &[u8]) -> Image<Vec<u8>> {
    Image::open_on(bytes.to_vec(), Path::new("test.vhd"), OpenOptions::LOOK).unwrap()
}

fn image_with_data(plan: &Plan) -> (Vec<u8>, Model) {
    let mut image = open(plan.build());
    let mut model = Model::new(plan.len());
    scribble(&mut image, &mut model, &mut Random(3), 8);
    (image.into_medium(), model)
}

fn errors(bytes: &Vec<u8>, options: &CheckOptions) -> Vec<FindingKind> {
    let report = check(bytes, options).unwrap();
    report.findings.iter().filter(|f| f.severity == Severity::Error).map(|finding| finding.kind).collect()
}

fn footer_of(bytes: &[u8]) -> Footer {
    Footer::decode(bytes[bytes.len() - 512..].try_into().unwrap()).unwrap().0
}

fn put_footers(bytes: &mut Vec<u8>, footer: &Footer) {
    let at = bytes.len() as u64 - 512;
    bytes.write_at(at, &footer.encode()).unwrap();
    bytes.write_at(0, &footer.encode()).unwrap();
}

#[test]
fn a_footer_of_511_bytes() {
    let (mut bytes, model) = image_with_data(&Plan::new(DiskType::Dynamic));
    bytes.pop();
    let image = look(&bytes);
    assert_eq!(image.footer_source(), FooterSource::Short);
    assert_eq!(image.tolerances(), [Tolerance::ShortFooter]);
    assert_eq!(contents(&Chain::new(vec![layer(image)])), model.bytes);
    assert_eq!(errors(&bytes, &CheckOptions::default()), []);
    // Written once, it is whole.
    let mut image = open(bytes);
    image.write_footer().unwrap();
    assert_eq!(look(image.medium()).footer_source(), FooterSource::Primary);
}

#[test]
fn a_lost_footer_is_found_in_its_copy() {
    let (mut bytes, model) = image_with_data(&Plan::new(DiskType::Dynamic));
    let end = bytes.len();
    bytes[end - 512..].fill(0);
    let image = look(&bytes);
    assert_eq!(image.footer_source(), FooterSource::Backup);
    assert_eq!(contents(&Chain::new(vec![layer(image)])), model.bytes);
    assert_eq!(errors(&bytes, &CheckOptions::default()), [FindingKind::PrimaryFooter]);
    let overlook = CheckOptions { ignore_footer: true, ..Default::default() };
    assert_eq!(errors(&bytes, &overlook), []);
    let mut image = open(bytes);
    image.commit().unwrap();
    assert_eq!(errors(image.medium(), &CheckOptions::default()), []);
}

#[test]
fn the_start_of_a_fixed_disk_is_the_guests_and_no_footer() {
    let mut bytes = Plan::new(DiskType::Fixed).build();
    let forged = Footer { uuid: uuid::Uuid::nil(), ..footer_of(&bytes) };
    bytes.write_at(0, &forged.encode()).unwrap();
    assert_eq!(look(&bytes).footer_source(), FooterSource::Primary);
    assert_eq!(errors(&bytes, &CheckOptions::default()), []);
    let end = bytes.len();
    bytes[end - 512..].fill(0);
    let error = Image::open_on(bytes, Path::new("x"), OpenOptions::LOOK).unwrap_err();
    assert_eq!(error.kind(), FormatErrorKind::NotThisFormat);
}

#[test]
fn the_oldest_creator_counts_bits_from_the_other_end() {
    let plan = Plan { creator: (*b"tap\0", 1), ..Plan::new(DiskType::Dynamic) };
    let mut image = open(plan.build());
    assert!(image.batmap().is_none());
    image.write_at(0, &[7; 512]).unwrap();
    image.commit().unwrap();
    let map_at = image.data_offset(0).unwrap() as usize - 512;
    let bytes = image.into_medium();
    assert_eq!(bytes[map_at], 0x01, "bit 0 is the low one");
    let (_, model) = image_with_data(&Plan::new(DiskType::Dynamic));
    let (bytes, old_model) = image_with_data(&plan);
    assert_eq!(model, old_model);
    assert_eq!(contents(&Chain::new(vec![layer(look(&bytes))])), model.bytes);
    assert_eq!(errors(&bytes, &CheckOptions { bitmaps: true, ..Default::default() }), []);
}

#[test]
fn old_creators_keep_the_hidden_flag_in_the_copy() {
    for version in [0x0000_0001, 0x0001_0001] {
        let (mut bytes, _) =
            image_with_data(&Plan { creator: (*b"tap\0", version), ..Plan::new(DiskType::Dynamic) });
        bytes[85] = 1;
        let image = look(&bytes);
        assert_eq!(image.footer().hidden, 1);
        assert_eq!(image.tolerances(), [Tolerance::HiddenFromBackup]);
        assert_eq!(errors(&bytes, &CheckOptions::default()), [], "version {version:#x}");
    }
}

#[test]
fn foreign_creators_have_no_batmap() {
    let plan = Plan { creator: (*b"qem2", 0x0005_0003), ..Plan::new(DiskType::Dynamic) };
    let (bytes, model) = image_with_data(&plan);
    let image = look(&bytes);
    assert!(image.batmap().is_none() && image.tolerances().is_empty());
    assert_eq!(contents(&Chain::new(vec![layer(image)])), model.bytes);
    assert_eq!(errors(&bytes, &CheckOptions::default()), []);
}

#[test]
fn a_batmap_that_does_not_hold_is_not_used() {
    let (bytes, model) = image_with_data(&Plan::new(DiskType::Dynamic));
    let header = look(&bytes).header().unwrap().clone();
    let at = batmap::header_offset(&header);
    for (change, tolerance) in [
        (at, Tolerance::NoBatmap),
        (at + 24, Tolerance::BatmapChecksum),
        (at + 512, Tolerance::BatmapChecksum),
    ] {
        let mut bytes = bytes.clone();
        bytes[change as usize] ^= 0x40;
        let image = look(&bytes);
        assert_eq!(image.tolerances(), [tolerance]);
        assert_eq!(contents(&Chain::new(vec![layer(image)])), model.bytes);
        assert_eq!(errors(&bytes, &CheckOptions::default()), [FindingKind::Batmap]);
    }
}

#[test]
fn a_batmap_of_version_1_1_sums_signed_bytes() {
    let (mut bytes, _) =
        image_with_data(&Plan { creator: (*b"tap\0", 0x0001_0001), ..Plan::new(DiskType::Dynamic) });
    let image = look(&bytes);
    let (header, bat) = (image.header().unwrap().clone(), image.bat().clone());
    let at = batmap::header_offset(&header);
    let block = bat.allocated().next().unwrap().0;
    let mut map = vec![0; 512];
    bitmap::set(&mut map, block as usize);
    map[0] |= 0x80;
    let mut found = BatmapHeader::new(at + 512, 1);
    found.version = batmap::VERSION_SIGNED;
    found.checksum = found.map_checksum(&map, image.virtual_len());
    assert_ne!(found.checksum, BatmapHeader::new(at + 512, 1).map_checksum(&map, image.virtual_len()));
    bytes.write_at(at, &found.encode()).unwrap();
    bytes.write_at(at + 512, &map).unwrap();
    assert!(look(&bytes).is_block_full(block));
}

#[test]
fn block_sizes_from_one_page_to_two_mebibytes() {
    for shift in 12..=21 {
        let plan = Plan {
            block_len: 1 << shift,
            blocks: (48u32 >> (shift - 12).min(4)).max(2),
            ..Plan::new(DiskType::Dynamic)
        };
        let (bytes, model) = image_with_data(&plan);
        assert!(contents(&Chain::new(vec![layer(look(&bytes))])) == model.bytes, "{}", 1 << shift);
        assert_eq!(
            errors(&bytes, &CheckOptions { bitmaps: true, ..Default::default() }),
            [],
            "{}",
            1 << shift
        );
    }
}

#[test]
fn a_size_that_is_not_whole_blocks_ends_where_it_says() {
    let mut bytes = Plan::new(DiskType::Dynamic).build();
    let short = Footer { current_len: footer_of(&bytes).current_len - 15 * 512, ..footer_of(&bytes) };
    put_footers(&mut bytes, &short.resized(short.current_len));
    let mut image = open(bytes);
    let last = image.virtual_len() - 512;
    image.write_at(last, &[6; 512]).unwrap();
    assert!(image.write_at(last + 512, &[6; 512]).is_err());
    image.commit().unwrap();
    let all = contents(&Chain::new(vec![layer(image)]));
    assert_eq!((all[last as usize - 1], all[last as usize], all.len() as u64), (0, 6, last + 512));
}

#[test]
fn locator_space_in_sectors_is_understood() {
    let plan = Plan { parent: Some(uuid::Uuid::new_v4()), ..Plan::new(DiskType::Differencing) };
    let mut bytes = plan.build();
    let mut header = Header::decode(bytes[512..1536].try_into().unwrap()).unwrap();
    header.locators[0].data_space = 1;
    bytes.write_at(512, &header.encode()).unwrap();
    let image = look(&bytes);
    assert_eq!(tapio_format::vhd::offline::unresolved_parent(&image).unwrap(), "./parent.vhd");
    // A locator of a code that is never read does not keep the others from being read.
    header.locators[1] = header.locators[0];
    header.locators[0] = LocatorEntry { code: PlatformCode::Wi2k, ..header.locators[0] };
    bytes.write_at(512, &header.encode()).unwrap();
    assert_eq!(tapio_format::vhd::offline::unresolved_parent(&look(&bytes)).unwrap(), "./parent.vhd");
}

#[test]
fn a_layer_shorter_than_its_child_reads_as_zeros_behind_its_end() {
    for parent_type in [DiskType::Fixed, DiskType::Dynamic] {
        let small = Plan { blocks: 2, ..Plan::new(parent_type) };
        let mut parent = open(small.build());
        let all = vec![5; small.len() as usize];
        parent.write_at(0, &all).unwrap();
        parent.commit().unwrap();
        let child = Plan { parent: Some(parent.footer().uuid), ..Plan::new(DiskType::Differencing) };
        let seen = contents(&Chain::new(vec![layer(open(child.build())), layer(parent)]));
        let (low, high) = seen.split_at(all.len());
        assert!(low == all && high.iter().all(|&byte| byte == 0));
    }
}
