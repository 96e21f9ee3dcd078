//! The journalled resize: what it moves, and every place in which it can be stopped.

use std::path::Path;

use tapio_format::vhd::DiskType;
use tapio_format::vhd::offline::{
    Chain, CheckOptions, Image, OpenOptions, ResizeStep, Severity, Shape, SnapshotOptions, check, check_path,
    create, resize_journalled, resize_with_journal, revert, revert_path, snapshot,
};
use tapio_format::{FormatErrorKind, Medium};

use crate::build::{Model, Plan, Random, contents, layer, open, scribble};
use crate::recorder::{History, Recorder};

const MIB: u64 = 1 << 20;

fn bytes_of(medium: &Recorder) -> Vec<u8> {
    let mut bytes = vec![0; medium.len().unwrap() as usize];
    medium.read_at(0, &mut bytes).unwrap();
    bytes
}

fn assert_holds(bytes: Vec<u8>, model: &Model, stop: &str) {
    let report = check(&bytes, &CheckOptions::default()).unwrap();
    let errors: Vec<_> =
        report.findings.iter().filter(|finding| finding.severity == Severity::Error).collect();
    assert!(errors.is_empty(), "{stop}: {errors:?}");
    let seen = contents(&Chain::new(vec![layer(open(bytes))]));
    let (low, high) = seen.split_at(model.bytes.len());
    assert!(low == model.bytes, "{stop}: other data");
    assert!(high.iter().all(|&byte| byte == 0), "{stop}: data behind the old end");
}

/// A resize that was run, with everything that it did.
fn resized(plan: &Plan, to: u64, journal_device: bool) -> (History, Model, Vec<u8>) {
    let mut image = open(plan.build());
    let mut model = Model::new(plan.len());
    scribble(&mut image, &mut model, &mut Random(8), 10);
    let mut bytes = image.into_medium();
    if plan.device_len > 0 {
        let footer = bytes[bytes.len() - 512..].to_vec();
        bytes.truncate(plan.device_len as usize - 512);
        bytes.extend(footer);
    }
    let image = Recorder::new(bytes.clone(), plan.device_len > 0);
    let mut journal =
        image.beside(if journal_device { vec![0xee; 1 << 20] } else { Vec::new() }, journal_device);
    let history = History::of(&[&image, &journal]);
    let mut steps = Vec::new();
    resize_with_journal(open(image), to, &mut journal, |step| steps.push(step)).unwrap();
    assert_eq!(steps, [ResizeStep::Begin, ResizeStep::DataMoved, ResizeStep::MetadataMoved]);
    (history, model, bytes)
}

fn survives(plan: &Plan, to: u64, journal_device: bool) {
    let (history, model, before) = resized(plan, to, journal_device);
    let mut random = Random(1);
    let (mut disabled, mut reverted_again) = (0, 0);
    for count in 0..=history.len() {
        for cut in 0..3 {
            let stop = format!("after {count} of {}, cut {cut}", history.len());
            let state = || match cut {
                0 => history.all_killed_after(count),
                _ => history.all_cut_after(count, &mut random.clone()),
            };
            let media = state();
            random.next();
            let (image, journal) = (&media[0], &media[1]);
            match Image::open_on(image.clone(), Path::new("x"), OpenOptions::READ) {
                Ok(_) => {
                    let bytes = bytes_of(image);
                    let seen = contents(&Chain::new(vec![layer(open(bytes))]));
                    assert!(seen[..model.bytes.len()] == model.bytes, "{stop}: open, but with other data");
                }
                Err(error) => {
                    assert_eq!(error.kind(), FormatErrorKind::Disabled, "{stop}: {error}");
                    disabled += 1;
                }
            }
            // A new world begins with what the stop left.
            let fresh = Recorder::new(bytes_of(image), plan.device_len > 0);
            let work = fresh.history();
            match revert(fresh, journal) {
                Ok(()) => {
                    let after = bytes_of(&work.killed_after(work.len()));
                    assert_eq!(after.len(), before.len(), "{stop}");
                    assert_holds(after, &model, &stop);
                    // Reverting is stopped as well, here and there, and done again.
                    for part in 0..work.len() {
                        if (part + count) % 5 == 0 {
                            let half = work.killed_after(part);
                            let again = Recorder::new(bytes_of(&half), plan.device_len > 0);
                            let work = again.history();
                            revert(again, journal).unwrap();
                            assert_holds(bytes_of(&work.killed_after(work.len())), &model, &stop);
                            reverted_again += 1;
                        }
                    }
                }
                // A journal that was not finished: the image was not touched.
                Err(error) => {
                    assert_eq!(error.kind(), FormatErrorKind::NotThisFormat, "{stop}: {error}");
                    assert!(bytes_of(image) == before, "{stop}: changed before the journal was safe");
                }
            }
        }
    }
    assert!(disabled > 10 && reverted_again > 10, "{disabled} {reverted_again}");
    let done = history.all_killed_after(history.len());
    assert_holds(bytes_of(&done[0]), &model, "done");
    assert_eq!(open(bytes_of(&done[0])).virtual_len(), to);
}

#[test]
fn growing_a_file_survives_any_stop() {
    survives(&Plan::new(DiskType::Dynamic), 8 * MIB, false);
}

#[test]
fn growing_far_moves_several_blocks_and_survives_any_stop() {
    survives(&Plan::new(DiskType::Dynamic), 256 * MIB, false);
}

#[test]
fn growing_on_a_device_survives_any_stop() {
    survives(&Plan { device_len: 1 << 20, ..Plan::new(DiskType::Dynamic) }, 32 * MIB, true);
}

#[test]
fn a_device_too_small_is_not_touched() {
    let plan = Plan { device_len: 64 << 10, blocks: 4, ..Plan::new(DiskType::Dynamic) };
    let mut image = open(plan.build());
    image.write_at(0, &[1; 512]).unwrap();
    image.commit().unwrap();
    let mut bytes = image.into_medium();
    let footer = bytes[bytes.len() - 512..].to_vec();
    bytes.truncate(36 << 10);
    bytes.extend(footer);
    let image = Recorder::new(bytes.clone(), true);
    let mut journal = image.beside(Vec::new(), false);
    let history = History::of(&[&image, &journal]);
    let error = resize_with_journal(open(image), 64 * MIB, &mut journal, |_| ()).unwrap_err();
    assert_eq!(error.kind(), FormatErrorKind::OutOfSpace, "{error}");
    assert_eq!(history.len(), 0);
}

#[test]
fn a_chain_grows_with_its_locators() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, journal] = ["a.vhd", "b.vhd", "j"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    snapshot(&b, &a, &SnapshotOptions::default()).unwrap();
    let mut model = Model::new(4 * MIB);
    let mut image = Image::open(&b, OpenOptions::WRITE).unwrap();
    scribble(&mut image, &mut model, &mut Random(2), 4);
    drop(image);
    resize_journalled(&b, 300 * 1024 * MIB, &journal, |_| ()).unwrap();
    assert!(!journal.exists());
    for report in
        check_path(&b, &CheckOptions { parents: true, bitmaps: true, ..Default::default() }).unwrap()
    {
        assert!(report.is_valid(), "{report:?}");
    }
    let chain = Chain::open(&b).unwrap();
    assert_eq!((chain.layers().len(), chain.virtual_len()), (2, 300 * 1024 * MIB));
    let mut bytes = vec![0; 4 << 20];
    chain.read_at(0, &mut bytes).unwrap();
    assert!(bytes == model.bytes);
    let mut image = Image::open(&b, OpenOptions::WRITE).unwrap();
    image.write_at(299 * 1024 * MIB, &[9; 512]).unwrap();
    image.commit().unwrap();
    assert!(check_path(&b, &CheckOptions::default()).unwrap()[0].is_valid());
}

#[test]
fn a_journal_is_for_one_image_and_one_time() {
    let dir = tempfile::tempdir().unwrap();
    let [a, other, journal] = ["a.vhd", "other.vhd", "j"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    create(&other, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    let before = std::fs::read(&a).unwrap();
    let mut stopped = false;
    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        resize_journalled(&a, 10_000 * MIB, &journal, |step| {
            if step == ResizeStep::MetadataMoved {
                stopped = true;
                std::panic::resume_unwind(Box::new(()));
            }
        })
    }));
    assert!(killed.is_err() && stopped);
    assert_eq!(Image::open(&a, OpenOptions::READ).unwrap_err().kind(), FormatErrorKind::Disabled);
    assert_eq!(
        resize_journalled(&other, 10_000 * MIB, &journal, |_| ()).unwrap_err().kind(),
        FormatErrorKind::Exists
    );
    assert!(revert_path(&other, &journal).unwrap_err().to_string().contains("the journal is of image"));
    revert_path(&a, &journal).unwrap();
    assert!(!journal.exists());
    assert!(std::fs::read(&a).unwrap() == before);
    assert_eq!(revert_path(&a, &journal).unwrap_err().kind(), FormatErrorKind::Missing);
    std::fs::write(&journal, vec![1; 600]).unwrap();
    assert_eq!(revert_path(&a, &journal).unwrap_err().kind(), FormatErrorKind::NotThisFormat);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [a, fixed, journal] = ["a.vhd", "f.vhd", "j"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 4 * MIB, 0).unwrap();
    for len in [2 * MIB, (32 << 40) + 1, u64::MAX] {
        let error = resize_journalled(&a, len, &journal, |_| ()).unwrap_err();
        assert_eq!(error.kind(), FormatErrorKind::InvalidArgument, "{len}");
    }
    assert!(!journal.exists());
    create(&fixed, &Shape::Fixed, 2 * MIB, 0).unwrap();
    resize_journalled(&fixed, 8 * MIB, &journal, |_| ()).unwrap();
    assert!(check_path(&fixed, &CheckOptions::default()).unwrap()[0].is_valid());
    assert_eq!(Chain::open(&fixed).unwrap().virtual_len(), 8 * MIB);
}
