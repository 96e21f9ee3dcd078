//! Raw files: what is written is read, what is refused is refused.

use tapio_block::{DiskError, Op};
use tapio_types::{Access, ImageKind, Span};

use crate::rig::{TIMEOUT, chain, directory, order, read, start, write, write_at_the_gate};

#[test]
fn a_raw_file_keeps_what_is_written() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let disk = start(chain(&[(ImageKind::Raw, &path)], Access::ReadWrite));
    assert_eq!(disk.geometry().len, 1 << 20);
    write(&disk, 4096, vec![7; 8192], false).unwrap();
    order(&disk, Op::Flush, Span::default()).unwrap();
    assert_eq!(read(&disk, 4096, 8192).unwrap(), vec![7; 8192]);
    order(&disk, Op::WriteZeroes { unmap: true, durable: true }, Span::new(4096, 4096)).unwrap();
    assert_eq!(read(&disk, 4096, 8192).unwrap(), [vec![0; 4096], vec![7; 4096]].concat());
    disk.close(TIMEOUT).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes[8192..12288], [7; 4096]);
}

/// What stands behind the last sector of a file is no part of the disk, and does not become one.
#[test]
fn a_raw_file_that_grows_reads_as_zero_from_its_last_sector_on() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![7; (1 << 20) + 333]).unwrap();
    let disk = start(chain(&[(ImageKind::Raw, &path)], Access::ReadWrite));
    assert_eq!(disk.geometry().len, 1 << 20);
    assert_eq!(disk.grow(2 << 20, TIMEOUT).unwrap().len, 2 << 20);
    assert_eq!(read(&disk, (1 << 20) - 512, 1536).unwrap(), [vec![7; 512], vec![0; 1024]].concat());
    disk.close(TIMEOUT).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
}

#[test]
fn requests_that_make_no_sense_are_refused_and_harm_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let disk = start(chain(&[(ImageKind::Raw, &path)], Access::ReadOnly));
    assert_eq!(write(&disk, 0, vec![0; 512], false), Err(DiskError::ReadOnly));
    assert_eq!(read(&disk, 1 << 20, 512), Err(DiskError::OutOfRange));
    assert_eq!(read(&disk, u64::MAX - 511, 512), Err(DiskError::OutOfRange));
    assert_eq!(read(&disk, 1, 512), Err(DiskError::Unaligned));
    assert_eq!(read(&disk, 0, 512).unwrap(), vec![1; 512]);
    disk.close(TIMEOUT).unwrap();
}

#[test]
fn a_second_writer_is_refused() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let spec = chain(&[(ImageKind::Raw, &path)], Access::ReadWrite);
    let disk = start(spec.clone());
    let second = tapio_block::Disk::start(spec.clone(), tapio_block::DiskOptions::default()).unwrap_err();
    assert_eq!(second.errno(), libc::EBUSY);
    assert!(second.to_string().contains("open for writing in"), "{second}");
    disk.close(TIMEOUT).unwrap();
    start(spec).close(TIMEOUT).unwrap();
}

#[test]
fn a_paused_disk_keeps_its_guests_waiting_and_loses_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let spec = chain(&[(ImageKind::Raw, &path)], Access::ReadWrite);
    let disk = start(spec.clone());
    disk.pause(TIMEOUT).unwrap();
    // The file is not held: another process may write it.
    start(spec.clone()).close(TIMEOUT).unwrap();
    write_at_the_gate(&disk, 0, vec![9; 512], || {
        disk.resume(spec.clone(), TIMEOUT).unwrap();
    });
    assert_eq!(read(&disk, 0, 512).unwrap(), vec![9; 512]);
    disk.close(TIMEOUT).unwrap();
}

#[test]
fn a_pause_that_is_joined_ends_when_the_files_are_closed() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let spec = chain(&[(ImageKind::Raw, &path)], Access::ReadWrite);
    let disk = start(spec.clone());
    for _ in 0..50 {
        write(&disk, 0, vec![9; 1 << 19], false).unwrap();
        // Given up at once or not, the pause goes on, and the second must not end before it.
        let _ = disk.pause(std::time::Duration::ZERO);
        disk.pause(TIMEOUT).unwrap();
        disk.resume(spec.clone(), TIMEOUT).unwrap();
    }
    disk.close(TIMEOUT).unwrap();
}

/// The leaf and its parents as `tap-ctl -a vhd:LEAF` would find them.
fn resolved(leaf: &std::path::Path) -> tapio_types::ChainSpec {
    tapio_format::vhd::offline::resolve_chain(leaf, Access::ReadWrite).unwrap()
}

fn assert_valid(image: &std::path::Path) {
    let options = tapio_format::vhd::offline::CheckOptions { parents: true, ..Default::default() };
    for report in tapio_format::vhd::offline::check_path(image, &options).unwrap() {
        assert!(report.is_valid(), "{}: {:?}", report.path.display(), report.findings);
    }
}

#[test]
fn a_chain_takes_writes_in_its_leaf_and_reads_from_all_its_layers() {
    use tapio_format::vhd::offline::{Shape, SnapshotOptions, create, snapshot};
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    create(&path("a.vhd"), &Shape::Dynamic, 8 << 20, 0).unwrap();
    let disk = start(resolved(&path("a.vhd")));
    write(&disk, 0, vec![1; 16384], false).unwrap();
    write(&disk, 5 << 20, vec![1; 4096], false).unwrap();
    disk.close(TIMEOUT).unwrap();
    snapshot(&path("b.vhd"), &path("a.vhd"), &SnapshotOptions::default()).unwrap();
    let disk = start(resolved(&path("b.vhd")));
    write(&disk, 4096, vec![2; 4096], true).unwrap();
    disk.pause(TIMEOUT).unwrap();
    assert_valid(&path("b.vhd"));
    snapshot(&path("c.vhd"), &path("b.vhd"), &SnapshotOptions::default()).unwrap();
    disk.resume(resolved(&path("c.vhd")), TIMEOUT).unwrap();
    write(&disk, 8192, vec![3; 512], false).unwrap();
    let want = [vec![1; 4096], vec![2; 4096], vec![3; 512], vec![1; 7680]].concat();
    assert_eq!(read(&disk, 0, 16384).unwrap(), want);
    assert_eq!(read(&disk, 5 << 20, 8192).unwrap(), [vec![1; 4096], vec![0; 4096]].concat());
    disk.close(TIMEOUT).unwrap();
    assert_valid(&path("c.vhd"));
    // The space that was set aside and not used is given back.
    let len = std::fs::metadata(path("c.vhd")).unwrap().len();
    assert!(len < 3 << 20, "one block of data takes {len} bytes");
}

#[test]
fn a_chain_that_does_not_fit_together_is_refused() {
    use tapio_format::vhd::offline::{Shape, SnapshotOptions, create, snapshot};
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    for name in ["a.vhd", "other.vhd"] {
        create(&path(name), &Shape::Dynamic, 8 << 20, 0).unwrap();
    }
    let options = SnapshotOptions { keep_empty: true, ..SnapshotOptions::default() };
    snapshot(&path("b.vhd"), &path("a.vhd"), &options).unwrap();
    let (leaf, base, other) = (path("b.vhd"), path("a.vhd"), path("other.vhd"));
    let refused = |layers: &[(ImageKind, &std::path::Path)]| {
        let spec = chain(layers, Access::ReadWrite);
        tapio_block::Disk::start(spec, tapio_block::DiskOptions::default()).unwrap_err().to_string()
    };
    let wrong = refused(&[(ImageKind::Vhd, &leaf), (ImageKind::Vhd, &other)]);
    assert!(wrong.contains("other.vhd") && wrong.contains("was made from"), "{wrong}");
    let short = refused(&[(ImageKind::Vhd, &leaf)]);
    assert!(short.contains("b.vhd") && short.contains("has a parent"), "{short}");
    let twice = refused(&[(ImageKind::Vhd, &leaf), (ImageKind::Vhd, &base), (ImageKind::Vhd, &leaf)]);
    assert!(twice.contains("its own parent") || twice.contains("has no parent"), "{twice}");
    let missing = path("gone.vhd");
    let gone = refused(&[(ImageKind::Vhd, &missing)]);
    assert!(gone.contains("gone.vhd") && gone.contains("cannot open"), "{gone}");
}

#[test]
fn an_image_that_was_cut_short_or_overlaps_is_refused_with_one_sentence() {
    use tapio_format::vhd::offline::{Shape, create};
    let directory = directory();
    let path = directory.path().join("a.vhd");
    create(&path, &Shape::Dynamic, 8 << 20, 0).unwrap();
    let disk = start(resolved(&path));
    write(&disk, 0, vec![1; 4 << 20], false).unwrap();
    disk.close(TIMEOUT).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let spec = chain(&[(ImageKind::Vhd, &path)], Access::ReadWrite);
        tapio_block::Disk::start(spec, tapio_block::DiskOptions::default()).unwrap_err().to_string()
    };
    let cut = refused(&whole[..(3 << 20)]);
    assert!(cut.contains("a.vhd") && cut.contains("truncated"), "{cut}");
    let mut overlapping = whole.clone();
    overlapping.copy_within(1536..1540, 1540);
    let overlap = refused(&overlapping);
    assert!(overlap.contains("a.vhd") && overlap.contains("overlap"), "{overlap}");
}

#[test]
fn a_chain_of_thirty_is_served_and_one_of_thirty_one_is_refused() {
    use tapio_format::FormatErrorKind;
    use tapio_format::vhd::offline::{Shape, SnapshotOptions, create, resolve_chain, snapshot};
    let directory = directory();
    let path = |level: u64| directory.path().join(format!("{level}.vhd"));
    create(&path(0), &Shape::Dynamic, 4 << 20, 0).unwrap();
    for level in 0..30u64 {
        if level > 0 {
            let options = SnapshotOptions { keep_empty: true, ..SnapshotOptions::default() };
            snapshot(&path(level), &path(level - 1), &options).unwrap();
        }
        // Each level has a sector of its own, and all write one more.
        let disk = start(resolved(&path(level)));
        write(&disk, level * 4096, vec![level as u8 + 1; 512], false).unwrap();
        write(&disk, 3 << 20, vec![level as u8 + 1; 512], false).unwrap();
        disk.close(TIMEOUT).unwrap();
    }
    let disk = start(resolved(&path(29)));
    for level in 0..30u64 {
        assert_eq!(
            read(&disk, level * 4096, 1024).unwrap(),
            [vec![level as u8 + 1; 512], vec![0; 512]].concat()
        );
    }
    assert_eq!(read(&disk, 3 << 20, 512).unwrap(), vec![30; 512]);
    disk.close(TIMEOUT).unwrap();
    let options = SnapshotOptions { keep_empty: true, ..SnapshotOptions::default() };
    snapshot(&path(30), &path(29), &options).unwrap();
    let refused = resolve_chain(&path(30), Access::ReadWrite).unwrap_err();
    assert_eq!(refused.kind(), FormatErrorKind::TooDeep);
}
