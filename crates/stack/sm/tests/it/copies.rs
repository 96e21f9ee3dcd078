//! Contents from one VDI into another.

use tapio_format::vhd::offline::{Image, OpenOptions};
use tapio_sm::{ForkKind, Sr};
use tapio_types::{Access, ChainSpec};
use uuid::Uuid;

use crate::support::{Place, Watch, blocks, fork, make, read, skip, write};

const MIB: u64 = 1 << 20;

fn chain(sr: &dyn Sr, vdi: Uuid) -> ChainSpec {
    let ctx = Watch::default();
    let chain = sr.activate(&ctx, vdi, Access::ReadOnly).unwrap().chain;
    sr.deactivate(&ctx, vdi).unwrap();
    chain
}

#[test]
fn a_copy_reads_the_same_and_stays_thin() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    for (from_format, into_format) in [("vhd", "vhd"), ("vhd", "raw"), ("raw", "vhd"), ("raw", "raw")] {
        let from = make(sr.as_ref(), 64 * MIB, from_format);
        write(sr.as_ref(), from, 0, 1);
        write(sr.as_ref(), from, 33 * MIB + 512, 2);
        // Zeros that were written are zeros.
        write(sr.as_ref(), from, 50 * MIB, 0);
        fork(sr.as_ref(), from, ForkKind::Single);
        write(sr.as_ref(), from, 63 * MIB, 3);
        let into = make(sr.as_ref(), 64 * MIB, into_format);
        sr.fill(&ctx, into, &chain(sr.as_ref(), from), None).unwrap();
        let got = [0, 33 * MIB + 512, 50 * MIB, 63 * MIB].map(|at| read(sr.as_ref(), into, at));
        assert_eq!(got, [1, 2, 0, 3], "{from_format} into {into_format}");
        let info = sr.vdi(&ctx, into).unwrap();
        assert!(info.physical_utilisation < 16 * MIB, "{} bytes", info.physical_utilisation);
        if into_format == "vhd" {
            assert_eq!(blocks(&chain(sr.as_ref(), into)), 3);
        }
        assert_eq!(ctx.progress.load(std::sync::atomic::Ordering::Relaxed), 1_000_000);
    }
}

#[test]
fn raw_files_are_copied_with_their_holes() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let (from, into) = (make(sr.as_ref(), 256 * MIB, "raw"), make(sr.as_ref(), 300 * MIB, "raw"));
    for at in [0, 100, 255] {
        write(sr.as_ref(), from, at * MIB, (at / 2) as u8 + 1);
    }
    sr.fill(&ctx, into, &chain(sr.as_ref(), from), None).unwrap();
    assert_eq!([0, 100, 255].map(|at| read(sr.as_ref(), into, at * MIB)), [1, 51, 128]);
    let info = sr.vdi(&ctx, into).unwrap();
    assert!(info.physical_utilisation < MIB, "{} bytes", info.physical_utilisation);
    // A second copy over the first: what is a hole now reads as zeros there.
    let other = make(sr.as_ref(), 256 * MIB, "raw");
    write(sr.as_ref(), other, MIB, 9);
    sr.fill(&ctx, into, &chain(sr.as_ref(), other), None).unwrap();
    assert_eq!([0, 1, 100].map(|at| read(sr.as_ref(), into, at * MIB)), [0, 9, 0]);
}

#[test]
fn a_delta_holds_what_differs_and_is_laid_over_the_old() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 4 * MIB, "vhd");
    for sector in 0..8 {
        write(sr.as_ref(), vdi, sector * 512, b'a');
    }
    let snapshot = fork(sr.as_ref(), vdi, ForkKind::Snapshot).made.uuid;
    write(sr.as_ref(), vdi, 0, b'b');
    // What was data and is zero now belongs to the difference.
    write(sr.as_ref(), vdi, 512, 0);
    let backup = make(sr.as_ref(), 4 * MIB, "vhd");
    sr.fill(&ctx, backup, &chain(sr.as_ref(), snapshot), None).unwrap();
    for (base, what) in [(snapshot, "related"), (backup, "unrelated")] {
        let (base, vdi) = (chain(sr.as_ref(), base), chain(sr.as_ref(), vdi));
        let delta = make(sr.as_ref(), 4 * MIB, "vhd");
        sr.fill(&ctx, delta, &vdi, Some(&base)).unwrap();
        let spec = chain(sr.as_ref(), delta);
        let image = Image::open(&spec.layers[0].path, OpenOptions::READ).unwrap();
        let bits: u32 = image.bitmap(0).unwrap().unwrap().iter().map(|byte| byte.count_ones()).sum();
        assert_eq!((image.allocated_blocks(), bits), (1, 2), "{what}");
        let copy = make(sr.as_ref(), 4 * MIB, "vhd");
        sr.fill(&ctx, copy, &base, None).unwrap();
        sr.fill(&ctx, copy, &spec, None).unwrap();
        let got: Vec<u8> = (0..9).map(|sector| read(sr.as_ref(), copy, sector * 512)).collect();
        assert_eq!(got, [b"b\0aaaaaa".as_slice(), &[0]].concat(), "{what}");
    }
}

#[test]
fn a_delta_against_a_disk_that_went_its_own_way_is_right_too() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    write(sr.as_ref(), vdi, 4 * MIB, 2);
    let other = fork(sr.as_ref(), vdi, ForkKind::Clone).made.uuid;
    write(sr.as_ref(), other, 4 * MIB, 9);
    write(sr.as_ref(), other, 6 * MIB, 9);
    write(sr.as_ref(), vdi, 2 * MIB, 3);
    let copy = make(sr.as_ref(), 8 * MIB, "vhd");
    sr.fill(&ctx, copy, &chain(sr.as_ref(), other), None).unwrap();
    let delta = make(sr.as_ref(), 8 * MIB, "vhd");
    sr.fill(&ctx, delta, &chain(sr.as_ref(), vdi), Some(&chain(sr.as_ref(), other))).unwrap();
    sr.fill(&ctx, copy, &chain(sr.as_ref(), delta), None).unwrap();
    assert_eq!([0, 2, 4, 6].map(|at| read(sr.as_ref(), copy, at * MIB)), [1, 3, 2, 0]);
}

#[test]
fn a_copy_is_refused_or_stopped_with_a_reason() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let (small, large) = (make(sr.as_ref(), 4 * MIB, "vhd"), make(sr.as_ref(), 64 * MIB, "vhd"));
    for block in 0..32 {
        write(sr.as_ref(), large, block * 2 * MIB, 7);
    }
    let from = chain(sr.as_ref(), large);
    assert_eq!(sr.fill(&ctx, small, &from, None).unwrap_err().code, "SR_BACKEND_FAILURE_79");
    let into = make(sr.as_ref(), 64 * MIB, "vhd");
    let cancelled = Watch { cancel_at: Some("fill:half"), ..Watch::default() };
    assert_eq!(sr.fill(&cancelled, into, &from, None).unwrap_err().code, "TASK_CANCELLED");
    let active = sr.activate(&ctx, into, Access::ReadWrite).unwrap().chain;
    assert_eq!(sr.fill(&ctx, into, &from, None).unwrap_err().code, "VDI_IN_USE");
    sr.deactivate(&ctx, into).unwrap();
    let holder = Image::open(&active.layers[0].path, OpenOptions::WRITE).unwrap();
    let error = sr.fill(&ctx, into, &from, None).unwrap_err();
    assert!(error.params[1].contains("open for writing"), "{error}");
    drop(holder);
    sr.fill(&ctx, into, &from, None).unwrap();
    assert!((0..32).all(|block| read(sr.as_ref(), into, block * 2 * MIB) == 7));
    let missing = ChainSpec { layers: Vec::new(), access: Access::ReadOnly };
    sr.fill(&ctx, into, &missing, None).unwrap();
    assert_eq!(read(sr.as_ref(), into, 0), 7, "nothing was to be copied");
}

#[test]
fn another_reader_finds_the_same_in_a_copy() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let (from, into) = (make(sr.as_ref(), 64 * MIB, "raw"), make(sr.as_ref(), 64 * MIB, "vhd"));
    let mut state = 1u32;
    for _ in 0..200 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        write(sr.as_ref(), from, u64::from(state >> 15) % (64 * MIB / 512) * 512, (state >> 8) as u8);
    }
    sr.fill(&ctx, into, &chain(sr.as_ref(), from), None).unwrap();
    let file = |vdi: Uuid, kind: &str| place.images().join(format!("{vdi}.{kind}"));
    let compared = std::process::Command::new("qemu-img")
        .args(["compare", "-f", "raw", "-F", "vpc"])
        .args([file(from, "raw"), file(into, "vhd")])
        .output();
    match compared {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(_) => skip("needs qemu-img"),
    }
}
