//! Byte for byte what the reference makes.

use std::path::Path;

use tapio_format::FormatErrorKind;
use tapio_format::vhd::offline::{
    Chain, CheckOptions, Image, OpenOptions, Shape, SnapshotOptions, check_path, coalesce_path, copy, create,
    fill, fill_table, kill_data, resize_fast, resolve_chain, set_parent, set_physical_len, snapshot,
    unresolved_parent,
};
use tapio_format::vhd::{DiskType, Footer, Geometry};
use tapio_types::{Access, ImageKind};

const MIB: u64 = 1 << 20;

fn check_clean(path: &Path) {
    for report in
        check_path(path, &tapio_format::vhd::offline::CheckOptions { parents: true, ..Default::default() })
            .unwrap()
    {
        assert!(report.is_valid(), "{report:?}");
    }
}

#[test]
fn a_new_disk_of_64_mib() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vhd");
    create(&path, &Shape::Dynamic, 64 * MIB, 0).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 3584);
    assert_eq!(bytes[..512], bytes[3072..], "footer and copy");
    let footer = &bytes[3072..];
    assert_eq!(&footer[..24], b"conectix\0\0\0\x02\0\x01\0\0\0\0\0\0\0\0\x02\0");
    assert_eq!(&footer[28..40], b"tap\0\0\x01\0\x03\0\0\0\0");
    assert_eq!(&footer[56..64], &[0x03, 0xc3, 8, 17, 0, 0, 0, 3], "963/8/17, dynamic");
    assert_eq!(&footer[84..86], &[0, 0]);
    assert_eq!(&bytes[512..536], b"cxsparse\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0\0\0\x06\0");
    assert_eq!(&bytes[536..548], &[0, 1, 0, 0, 0, 0, 0, 32, 0, 0x20, 0, 0]);
    assert_eq!(bytes[1536..1664], [0xff; 128], "32 entries");
    assert_eq!(bytes[1664..2048], [0; 384], "the rest of the table's sector");
    assert_eq!(&bytes[2048..2076], b"tdbatmap\0\0\0\0\0\0\x0a\0\0\0\0\x01\0\x01\0\x02\xff\xff\xff\xff");
    assert_eq!(bytes[2076..3072], [0; 996]);
    check_clean(&path);
}

#[test]
fn a_child_in_the_same_directory() {
    let dir = tempfile::tempdir().unwrap();
    let [parent, child] = ["a.vhd", "b.vhd"].map(|name| dir.path().join(name));
    create(&parent, &Shape::Dynamic, 64 * MIB, 0).unwrap();
    snapshot(&child, &parent, &SnapshotOptions::default()).unwrap();
    let bytes = std::fs::read(&child).unwrap();
    let parent_bytes = std::fs::read(&parent).unwrap();
    assert_eq!(bytes.len(), 5120);
    assert_eq!(bytes[4608 + 60..4608 + 64], [0, 0, 0, 4], "differencing");
    assert_eq!(bytes[512 + 40..512 + 56], parent_bytes[68..84], "the parent's UUID");
    assert_eq!(&bytes[512 + 64..512 + 74], b"\0a\0.\0v\0h\0d");
    let entry = |code: &[u8; 4], offset: u16| {
        let mut entry = code.to_vec();
        entry.extend([0, 0, 2, 0, 0, 0, 0, 14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        entry.extend(offset.to_be_bytes());
        entry
    };
    let at = 512 + 576;
    assert_eq!(bytes[at..at + 24], entry(b"MacX", 3072));
    assert_eq!(bytes[at + 24..at + 48], entry(b"W2ku", 3584));
    assert_eq!(bytes[at + 48..at + 72], entry(b"W2ru", 4096));
    assert_eq!(bytes[at + 72..at + 192], [0; 120]);
    assert_eq!(&bytes[3072..3088], b"file://./a.vhd\0\0");
    assert_eq!(&bytes[3584..3600], b".\0\\\0a\0.\0v\0h\0d\0\0\0");
    assert_eq!(bytes[3584..4096], bytes[4096..4608]);
    check_clean(&child);
}

#[test]
fn room_to_grow_is_a_longer_table_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vhd");
    create(&path, &Shape::Dynamic, 64 * MIB, 2 << 40).unwrap();
    let image = Image::open(&path, OpenOptions::READ).unwrap();
    assert_eq!(image.virtual_len(), 64 * MIB);
    assert_eq!(image.header().unwrap().entries_max, 1 << 20);
    assert_eq!(image.bat().len(), 32);
    assert_eq!(image.physical_len(), 1536 + (4 << 20) + 512 + (128 << 10) + 512);
    check_clean(&path);
}

#[test]
fn sizes_are_kept_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vhd");
    create(&path, &Shape::Dynamic, 3 * MIB - 512, 0).unwrap();
    assert_eq!(Image::open(&path, OpenOptions::READ).unwrap().virtual_len(), 3 * MIB - 512);
    for (len, len_max) in
        [(0, 0), ((32 << 40) + 1, 0), (u64::MAX, 0), (4 * MIB, 2 * MIB), (2 * MIB, (32 << 40) + 1)]
    {
        let error = create(&dir.path().join("x.vhd"), &Shape::Dynamic, len, len_max).unwrap_err();
        assert_eq!(error.kind(), FormatErrorKind::InvalidArgument, "{len} {len_max}");
    }
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["a.vhd"], "a failed create leaves nothing behind");
}

#[test]
fn a_fixed_disk_is_data_and_a_footer_with_its_space_set_aside() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.vhd");
    create(&path, &Shape::Fixed, 4 * MIB, 0).unwrap();
    let facts = std::fs::metadata(&path).unwrap();
    assert_eq!(facts.len(), 4 * MIB + 512);
    assert!(facts.blocks() * 512 >= 4 * MIB, "{} sectors", facts.blocks());
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes[..4 << 20].iter().all(|&byte| byte == 0));
    let footer = Footer::decode(bytes[4 << 20..].try_into().unwrap()).unwrap().0;
    assert_eq!((footer.disk_type, footer.data_offset), (DiskType::Fixed, u64::MAX));
    check_clean(&path);
}

#[test]
fn an_empty_parent_is_passed_over_unless_told_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c, d] = ["a.vhd", "b.vhd", "c.vhd", "d.vhd"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    snapshot(&b, &a, &SnapshotOptions::default()).unwrap();
    assert_eq!(snapshot(&c, &b, &SnapshotOptions::default()).unwrap().file_name(), a.file_name());
    let keep = SnapshotOptions { keep_empty: true, ..Default::default() };
    assert_eq!(snapshot(&d, &b, &keep).unwrap().file_name(), b.file_name());
    let mut leaf = Image::open(&b, OpenOptions::WRITE).unwrap();
    leaf.write_at(0, &[1; 512]).unwrap();
    leaf.commit().unwrap();
    assert_eq!(snapshot(&c, &b, &SnapshotOptions::default()).unwrap().file_name(), b.file_name());
}

#[test]
fn depth_is_limited_where_asked() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a.vhd", "b.vhd", "c.vhd"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    let two = SnapshotOptions { depth_max: 2, keep_empty: true, ..Default::default() };
    snapshot(&b, &a, &two).unwrap();
    let error = snapshot(&c, &b, &two).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (FormatErrorKind::TooDeep, libc::ENOSPC));
    assert!(!c.exists());
}

#[test]
fn a_raw_parent_is_named_and_found() {
    let dir = tempfile::tempdir().unwrap();
    let [raw, child] = ["r.raw", "c.vhd"].map(|name| dir.path().join(name));
    std::fs::write(&raw, vec![7; 4 << 20]).unwrap();
    snapshot(&child, &raw, &SnapshotOptions { raw_parent: true, ..Default::default() }).unwrap();
    let image = Image::open(&child, OpenOptions::READ).unwrap();
    assert!(image.has_raw_parent() && image.header().unwrap().parent_uuid.is_nil());
    let spec = resolve_chain(&child, Access::ReadOnly).unwrap();
    let kinds: Vec<_> = spec.layers.iter().map(|layer| layer.kind).collect();
    assert_eq!(kinds, [ImageKind::Vhd, ImageKind::Raw]);
    check_clean(&child);
}

#[test]
fn loops_gaps_and_strangers_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a.vhd", "b.vhd", "c.vhd"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    let keep = SnapshotOptions { keep_empty: true, ..Default::default() };
    snapshot(&b, &a, &keep).unwrap();
    snapshot(&c, &b, &keep).unwrap();
    let kind = |path: &Path| resolve_chain(path, Access::ReadOnly).unwrap_err().kind();
    assert_eq!(resolve_chain(&c, Access::ReadWrite).unwrap().layers.len(), 3);

    let mut image = Image::open(&b, OpenOptions::WRITE).unwrap();
    set_parent(&mut image, &c, false).unwrap();
    assert_eq!(kind(&c), FormatErrorKind::Loop);
    assert!(
        check_path(&c, &tapio_format::vhd::offline::CheckOptions { parents: true, ..Default::default() })
            .unwrap()
            .iter()
            .any(|report| !report.is_valid())
    );
    assert_eq!(set_parent(&mut image, &b, false).unwrap_err().kind(), FormatErrorKind::InvalidArgument);
    set_parent(&mut image, &a, false).unwrap();
    check_clean(&c);

    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    let error = resolve_chain(&c, Access::ReadOnly).unwrap_err();
    assert_eq!(error.kind(), FormatErrorKind::Corrupt);
    assert!(error.to_string().contains("UUID"), "{error}");

    std::fs::remove_file(&a).unwrap();
    let error = resolve_chain(&c, Access::ReadOnly).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (FormatErrorKind::Missing, libc::ENOENT));
    assert_eq!(error.path().and_then(Path::file_name), b.file_name(), "{error}");
    assert_eq!(unresolved_parent(&image).unwrap(), "./a.vhd");
}

#[test]
fn chains_longer_than_thirty_do_not_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = |index: usize| dir.path().join(format!("{index}.vhd"));
    create(&path(0), &Shape::Dynamic, 4 * MIB, 0).unwrap();
    let keep = SnapshotOptions { keep_empty: true, ..Default::default() };
    for index in 1..=30 {
        snapshot(&path(index), &path(index - 1), &keep).unwrap();
    }
    assert_eq!(resolve_chain(&path(29), Access::ReadOnly).unwrap().layers.len(), 30);
    assert_eq!(resolve_chain(&path(30), Access::ReadOnly).unwrap_err().kind(), FormatErrorKind::TooDeep);
}

#[test]
fn chains_move_with_their_directory() {
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    std::fs::create_dir_all(old.join("sub")).unwrap();
    create(&old.join("a.vhd"), &Shape::Dynamic, 4 * MIB, 0).unwrap();
    snapshot(&old.join("sub/b.vhd"), &old.join("a.vhd"), &SnapshotOptions::default()).unwrap();
    let new = dir.path().join("new");
    std::fs::rename(&old, &new).unwrap();
    let leaf = new.join("sub/b.vhd");
    assert_eq!(unresolved_parent(&Image::open(&leaf, OpenOptions::READ).unwrap()).unwrap(), "../a.vhd");
    check_clean(&leaf);
    // Seen through a link from elsewhere, the parent is still beside the image itself.
    let link = dir.path().join("link.vhd");
    std::os::unix::fs::symlink(&leaf, &link).unwrap();
    assert_eq!(resolve_chain(&link, Access::ReadOnly).unwrap().layers.len(), 2);
}

#[test]
fn a_parent_with_a_longer_path_finds_room() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a.vhd", "b.vhd", "c.vhd"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    snapshot(&b, &a, &SnapshotOptions::default()).unwrap();
    let mut image = Image::open(&b, OpenOptions::WRITE).unwrap();
    image.write_at(512, &[3; 512]).unwrap();
    image.commit().unwrap();
    drop(image);
    snapshot(&c, &a, &SnapshotOptions::default()).unwrap();
    // Too long for the old places, for some of the gap before the first block, and for anything with blocks.
    for (depth, locators, fits) in [(1, 3, true), (4, 1, true), (15, 0, false)] {
        let mut long = dir.path().to_path_buf();
        long.extend(std::iter::repeat_n("x".repeat(240), depth));
        std::fs::create_dir_all(&long).unwrap();
        let long = long.join("p.vhd");
        create(&long, &Shape::Dynamic, 4 * MIB, 0).unwrap();
        for path in [&b, &c] {
            let mut image = Image::open(path, OpenOptions::WRITE).unwrap();
            let done = set_parent(&mut image, &long, false);
            drop(image);
            if !fits && *path == b {
                assert_eq!(done.unwrap_err().kind(), FormatErrorKind::OutOfSpace);
                continue;
            }
            done.unwrap();
            check_clean(path);
            let spec = resolve_chain(path, Access::ReadOnly).unwrap();
            assert_eq!(spec.layers[1].path, long.canonicalize().unwrap());
            let image = Image::open(path, OpenOptions::READ).unwrap();
            let found = image.header().unwrap().locators.iter().filter(|entry| entry.data_len > 0).count();
            assert!(found >= locators, "{path:?}, depth {depth}: {found}");
        }
    }
    let chain = tapio_format::vhd::offline::Chain::open(&b).unwrap();
    let mut bytes = [0; 1024];
    chain.read_at(0, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[512]), (0, 3));
    let mut image = Image::open(&b, OpenOptions::WRITE).unwrap();
    set_parent(&mut image, &a, false).unwrap();
    image.write_at(3 * MIB, &[4; 512]).unwrap();
    image.commit().unwrap();
    drop(image);
    check_clean(&b);
    assert_eq!(Image::open(&b, OpenOptions::READ).unwrap().header().unwrap().locators[2].data_len, 14);
}

#[test]
fn the_footer_moves_with_the_physical_size_and_data_can_be_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vhd");
    create(&path, &Shape::Dynamic, 8 * MIB, 0).unwrap();
    let mut image = Image::open(&path, OpenOptions::WRITE).unwrap();
    image.write_at(MIB, &[9; 4096]).unwrap();
    image.commit().unwrap();
    let physical = image.physical_len();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), physical);
    assert!(set_physical_len(&mut image, physical - 512).is_err());
    set_physical_len(&mut image, physical + 4096).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), physical + 4096);
    check_clean(&path);
    drop(image);
    let mut image = Image::open(&path, OpenOptions::WRITE).unwrap();
    assert_eq!(image.physical_len(), physical);
    kill_data(&mut image).unwrap();
    assert_eq!(image.allocated_blocks(), 0);
    drop(image);
    check_clean(&path);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 3584);
}

#[test]
fn whole_blocks_are_marked_in_the_batmap() {
    let dir = tempfile::tempdir().unwrap();
    let [parent, child, copied] = ["p.vhd", "c.vhd", "o.vhd"].map(|name| dir.path().join(name));
    let marked = |path: &Path| {
        let image = Image::open(path, OpenOptions::READ).unwrap();
        (0..image.bat().len()).map(|block| image.is_block_full(block)).collect::<Vec<_>>()
    };
    create(&parent, &Shape::Dynamic, 8 * MIB, 0).unwrap();
    snapshot(&child, &parent, &SnapshotOptions { keep_empty: true, ..Default::default() }).unwrap();
    let mut image = Image::open(&child, OpenOptions::WRITE).unwrap();
    image.write_at(2 * MIB, &vec![7; 2 << 20]).unwrap();
    image.write_at(6 * MIB, &vec![7; 1 << 20]).unwrap();
    image.finish().unwrap();
    drop(image);
    assert_eq!(marked(&child), [false, true, false, false]);
    coalesce_path(&child, false, |_, _| ()).unwrap();
    assert_eq!(marked(&parent), [false, true, false, false], "coalescing");
    copy(&child, &copied, None).unwrap();
    assert_eq!(marked(&copied), [false, true, false, false], "copying");
    let mut image = Image::open(&copied, OpenOptions::WRITE).unwrap();
    fill_table(&mut image, 0, Some(0)).unwrap();
    drop(image);
    assert_eq!(marked(&copied), [true, true, false, false], "filling the table");
    fill(&child).unwrap();
    assert_eq!(marked(&child), [true; 4], "filling");
    for path in [&parent, &child, &copied] {
        check_clean(path);
    }
}

#[test]
fn a_parent_whose_name_xenserver_cannot_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [parent, child] = ["\u{e9}.vhd", "c.vhd"].map(|name| dir.path().join(name));
    create(&parent, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    let error = snapshot(&child, &parent, &SnapshotOptions::default()).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (FormatErrorKind::InvalidArgument, libc::EILSEQ));
    assert!(!child.exists());
    // The child's own name and directory are recorded nowhere.
    let below = dir.path().join("\u{fc}");
    std::fs::create_dir(&below).unwrap();
    let plain = dir.path().join("p.vhd");
    create(&plain, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    snapshot(&below.join("\u{e9}.vhd"), &plain, &SnapshotOptions::default()).unwrap();
}

#[test]
fn the_numbers_of_files_that_are_no_images() {
    let dir = tempfile::tempdir().unwrap();
    let number = |name: &str| Image::open(&dir.path().join(name), OpenOptions::READ).unwrap_err().errno();
    for (name, len, errno) in
        [("empty", 0, libc::EPIPE), ("short", 100, libc::EIO), ("zeros", 70_000, libc::EINVAL)]
    {
        std::fs::write(dir.path().join(name), vec![0; len]).unwrap();
        assert_eq!(number(name), errno, "{name}");
    }
    std::fs::create_dir(dir.path().join("dir")).unwrap();
    assert_eq!((number("dir"), number("none")), (libc::EISDIR, libc::ENOENT));
}

#[test]
fn a_geometry_larger_than_the_disk_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vhd");
    create(&path, &Shape::Dynamic, 20 * MIB, 0).unwrap();
    let mut image = Image::open(&path, OpenOptions::WRITE).unwrap();
    image.footer_mut().geometry = Geometry::MAX;
    image.write_footer().unwrap();
    drop(image);
    let report = check_path(&path, &CheckOptions::default()).unwrap().remove(0);
    assert!(
        report.findings[0].sentence.starts_with("primary footer invalid: geometry too large"),
        "{report:?}"
    );
    assert_eq!(report.errno(), libc::EINVAL);
}

#[test]
fn a_parent_that_is_gone_has_a_number_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let [parent, child] = ["p.vhd", "c.vhd"].map(|name| dir.path().join(name));
    create(&parent, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    snapshot(&child, &parent, &SnapshotOptions::default()).unwrap();
    std::fs::remove_file(&parent).unwrap();
    assert_eq!(check_path(&child, &CheckOptions::default()).unwrap()[0].errno(), libc::ENOENT);
}

#[test]
fn images_of_32_tib_are_made_and_have_children() {
    let dir = tempfile::tempdir().unwrap();
    let [parent, child] = ["p.vhd", "c.vhd"].map(|name| dir.path().join(name));
    for len in [(2040 << 30) + 2 * MIB, (2 << 40) + 2 * MIB, 32 << 40] {
        create(&parent, &Shape::Dynamic, len, 0).unwrap();
        snapshot(&child, &parent, &SnapshotOptions { keep_empty: true, ..Default::default() }).unwrap();
        let mut image = Image::open(&child, OpenOptions::WRITE).unwrap();
        image.write_at(len - 512, &[5; 512]).unwrap();
        image.commit().unwrap();
        drop(image);
        let mut sector = [0; 512];
        Chain::open(&child).unwrap().read_at(len - 512, &mut sector).unwrap();
        assert_eq!(sector, [5; 512], "{len}");
        check_clean(&child);
    }
}

/// What stands behind the last sector of a raw parent was never part of the disk, and does not become one.
#[test]
fn a_raw_parent_that_grows_reads_as_zero_from_its_last_sector_on() {
    let dir = tempfile::tempdir().unwrap();
    let (raw, child) = (dir.path().join("r.raw"), dir.path().join("c.vhd"));
    let whole = 4 * MIB - 512;
    std::fs::write(&raw, vec![7; 4 * MIB as usize - 100]).unwrap();
    snapshot(&child, &raw, &SnapshotOptions { raw_parent: true, ..Default::default() }).unwrap();
    let mut image = Image::open(&child, OpenOptions::WRITE).unwrap();
    resize_fast(&mut image, 4 * MIB).unwrap();
    image.write_at(MIB, &[9; 512]).unwrap();
    image.finish().unwrap();
    let mut expected = [vec![7; whole as usize], vec![0; 512]].concat();
    expected[MIB as usize..MIB as usize + 512].fill(9);
    let mut seen = vec![1; 4 * MIB as usize];
    Chain::open(&child).unwrap().read_at(0, &mut seen).unwrap();
    assert!(seen == expected, "through the child");
    coalesce_path(&child, false, |_, _| ()).unwrap();
    assert!(std::fs::read(&raw).unwrap() == expected, "in the parent");
}
