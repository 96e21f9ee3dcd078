//! Raw files: what is written is read, what is refused is refused.

use tapio_block::{DiskError, Op};
use tapio_types::{Access, ImageKind, Span};

use crate::rig::{SOON, chain, directory, order, read, start, write};

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
    disk.close(SOON).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes[8192..12288], [7; 4096]);
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
    disk.close(SOON).unwrap();
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
    assert!(second.to_string().contains("open for writing in another process"), "{second}");
    disk.close(SOON).unwrap();
    start(spec).close(SOON).unwrap();
}

#[test]
fn a_paused_disk_keeps_its_guests_waiting_and_loses_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let spec = chain(&[(ImageKind::Raw, &path)], Access::ReadWrite);
    let disk = start(spec.clone());
    disk.pause(SOON).unwrap();
    // Nobody holds the file: another may write it.
    start(spec.clone()).close(SOON).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| write(&disk, 0, vec![9; 512], true));
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!waiting.is_finished());
        disk.resume(spec.clone(), SOON).unwrap();
        waiting.join().unwrap().unwrap();
    });
    assert_eq!(read(&disk, 0, 512).unwrap(), vec![9; 512]);
    disk.close(SOON).unwrap();
}
