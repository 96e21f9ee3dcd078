//! Kills and power cuts at every change of every operation that changes an image.

use std::path::Path;

use tapio_format::vhd::offline::{
    Chain, CheckOptions, CoalesceTarget, FindingKind, Image, Layer, OpenOptions, ParentFacts, Report, Shape,
    SnapshotOptions, check, check_path, coalesce, coalesce_paced, create, create_on, kill_data, resize_fast,
    resolve_parent, set_hidden, set_marker, set_parent, snapshot,
};
use tapio_format::vhd::{DiskType, KeyHash};
use tapio_format::{FormatErrorKind, Medium};

use crate::build::{Model, Plan, Random, contents, layer, open, scribble};
use crate::recorder::{History, Recorder};

/// The states that `history` can be stopped in: after a kill at each change, and some after a power cut at each.
fn each_stop(history: &History, mut test: impl FnMut(Recorder, Stop)) {
    let mut random = Random(history.len() as u64);
    for count in 0..=history.len() {
        test(history.killed_after(count), Stop { count, cut: false });
        for _ in 0..3 {
            test(history.cut_after(count, &mut random), Stop { count, cut: true });
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Stop {
    count: usize,
    /// Whether the power went, so that what was not flushed may be lost.
    cut: bool,
}

/// The image is valid, apart from findings of the kinds allowed.
fn assert_valid(medium: &Recorder, allowed: &[FindingKind], stop: Stop) {
    let report = check(medium, &CheckOptions::default()).unwrap();
    let bad: Vec<_> = report.findings.iter().filter(|finding| !allowed.contains(&finding.kind)).collect();
    let only_warned =
        bad.iter().all(|finding| finding.severity == tapio_format::vhd::offline::Severity::Warning);
    assert!(only_warned, "{stop:?}: {bad:?}");
}

/// After a power cut a growing file may have its new length and not yet its new footer.
fn lost_footer(stop: Stop) -> &'static [FindingKind] {
    if stop.cut { &[FindingKind::PrimaryFooter, FindingKind::Length] } else { &[] }
}

/// A file that a power cut left at an odd length gets the end that a file system gives it: whole sectors.
fn reopened(medium: Recorder, stop: Stop) -> Image<Recorder> {
    Image::open_on(medium, Path::new("test.vhd"), OpenOptions::WRITE)
        .unwrap_or_else(|error| panic!("{stop:?}: {error}"))
}

/// A child and its parent: what coalescing starts from.
struct Family {
    leaf: Image<Vec<u8>>,
    parent: Vec<u8>,
    model: Model,
}

fn family(parent_type: DiskType, device: bool, seed: u64) -> Family {
    let mut random = Random(seed);
    let mut plan = Plan::new(parent_type);
    if device {
        plan.device_len = 400 << 10;
    }
    let mut parent = open(plan.build());
    let mut model = Model::new(plan.len());
    scribble(&mut parent, &mut model, &mut random, 6);
    let child_plan = Plan { parent: Some(parent.footer().uuid), ..Plan::new(DiskType::Differencing) };
    let mut leaf = open(child_plan.build());
    scribble(&mut leaf, &mut model, &mut random, 8);
    let mut parent = parent.into_medium();
    if device {
        // The device's own length: the footer stands at its end.
        let footer = parent[parent.len() - 512..].to_vec();
        parent.truncate(plan.device_len as usize - 512);
        parent.extend(footer);
    }
    Family { leaf, parent, model }
}

fn through(leaf: &Image<Vec<u8>>, parent: &Recorder) -> Vec<u8> {
    let leaf = open(leaf.medium().clone());
    let parent: Vec<u8> = bytes_of(parent);
    contents(&Chain::new(vec![layer(leaf), layer(open(parent))]))
}

fn bytes_of(medium: &Recorder) -> Vec<u8> {
    let mut bytes = vec![0; medium.len().unwrap() as usize];
    medium.read_at(0, &mut bytes).unwrap();
    bytes
}

fn coalesce_survives(parent_type: DiskType, device: bool, sparse: bool, seed: u64) {
    let Family { leaf, parent, model } = family(parent_type, device, seed);
    let medium = Recorder::new(parent, device);
    let history = medium.history();
    let target = CoalesceTarget::Vhd(Box::new(open(medium)));
    // Made durable at the end, or before each block.
    let done = coalesce_paced(&leaf, target, sparse, |_, _| Ok(seed % 3 == 1)).unwrap();
    assert!(done.sectors > 0);
    let mut stops = 0;
    each_stop(&history, |medium, stop| {
        stops += 1;
        let mut allowed = lost_footer(stop).to_vec();
        // A cut within the one write of header and map.
        allowed.extend(stop.cut.then_some(FindingKind::Batmap));
        assert_valid(&medium, &allowed, stop);
        assert!(through(&leaf, &medium) == model.bytes, "{stop:?}: the leaf reads other data");
        // A second run finishes the work.
        let history = medium.history();
        coalesce(&leaf, CoalesceTarget::Vhd(Box::new(reopened(medium, stop))), sparse, |_, _| ()).unwrap();
        let medium = history.killed_after(history.len());
        assert_valid(&medium, &[], stop);
        let alone = contents(&Chain::new(vec![layer(open(bytes_of(&medium)))]));
        assert!(alone == model.bytes, "{stop:?}: the parent alone reads other data");
    });
    assert!(stops > 20, "only {stops} places to stop at");
}

#[test]
fn coalescing_into_a_dynamic_file_survives_any_stop() {
    for seed in 0..6 {
        coalesce_survives(DiskType::Dynamic, false, seed % 2 == 1, seed);
    }
}

#[test]
fn coalescing_into_a_device_survives_any_stop() {
    for seed in 0..3 {
        coalesce_survives(DiskType::Dynamic, true, false, seed);
    }
}

#[test]
fn coalescing_into_a_fixed_disk_survives_any_stop() {
    coalesce_survives(DiskType::Fixed, false, false, 1);
}

#[test]
fn coalescing_into_a_raw_parent_survives_any_stop() {
    let Family { leaf, model, .. } = family(DiskType::Fixed, false, 9);
    let raw = vec![0; model.bytes.len() - 8192];
    let medium = Recorder::new(raw, false);
    let history = medium.history();
    coalesce(&leaf, CoalesceTarget::Raw(medium), false, |_, _| ()).unwrap();
    each_stop(&history, |medium, stop| {
        let history = medium.history();
        coalesce(&leaf, CoalesceTarget::Raw(medium), false, |_, _| ()).unwrap();
        let after = history.killed_after(history.len());
        let chain = |medium: Recorder| {
            let raw = Layer::raw(bytes_of(&medium), Path::new("raw")).unwrap();
            contents(&Chain::new(vec![layer(open(leaf.medium().clone())), raw]))
        };
        let merged = bytes_of(&after);
        let seen = chain(after);
        assert!(merged == seen, "{stop:?}");
    });
}

#[test]
fn a_parent_that_grows_for_its_child_survives_any_stop() {
    for parent_type in [DiskType::Dynamic, DiskType::Fixed] {
        let plan = Plan { blocks: 8, spare: 256, block_len: 2 << 20, ..Plan::new(parent_type) };
        let small = Plan { blocks: 2, spare: 300, ..plan.clone() };
        let mut model = Model::new(plan.len());
        let mut parent = open(small.build());
        parent.write_at(0, &[1; 4096]).unwrap();
        parent.commit().unwrap();
        model.write(0, &[1; 4096]);
        let child =
            Plan { parent: Some(parent.footer().uuid), blocks: 3, ..Plan::new(DiskType::Differencing) };
        let mut leaf = open(Plan { block_len: 2 << 20, ..child }.build());
        leaf.write_at(5 << 20, &[2; 1024]).unwrap();
        leaf.commit().unwrap();
        model.bytes.truncate(6 << 20);
        model.write(5 << 20, &[2; 1024]);
        let medium = Recorder::new(parent.into_medium(), false);
        let history = medium.history();
        coalesce(&leaf, CoalesceTarget::Vhd(Box::new(open(medium))), false, |_, _| ()).unwrap();
        each_stop(&history, |medium, stop| {
            let mut allowed = lost_footer(stop).to_vec();
            allowed.push(FindingKind::FootersDiffer);
            assert_valid(&medium, &allowed, stop);
            assert!(through(&leaf, &medium) == model.bytes, "{stop:?}");
        });
        let medium = history.killed_after(history.len());
        assert_valid(&medium, &[], Stop { count: 0, cut: false });
        let alone = contents(&Chain::new(vec![layer(open(bytes_of(&medium)))]));
        assert!(alone[..6 << 20] == model.bytes[..]);
    }
}

#[test]
fn a_device_holds_a_new_image_whole_or_none() {
    let parent = ParentFacts {
        uuid: uuid::Uuid::new_v4(),
        timestamp: 0,
        name: "parent.vhd".into(),
        relative_path: "./parent.vhd".into(),
        key_hash: KeyHash::default(),
    };
    for shape in [Shape::Dynamic, Shape::Differencing(parent)] {
        let old = Plan { device_len: 64 << 10, ..Plan::new(DiskType::Dynamic) }.build();
        let mut medium = Recorder::new(old, true);
        let history = medium.history();
        create_on(&mut medium, &shape, 64 << 20, 0).unwrap();
        let mut seen = [0, 0];
        // Before the first change the old image is there, and so it is until its footers are gone.
        each_stop(&history, |medium, stop| {
            match Image::open_on(medium.clone(), Path::new("dev"), OpenOptions::READ) {
                Ok(image) if image.virtual_len() == 64 << 20 => {
                    seen[0] += 1;
                    assert_eq!(image.allocated_blocks(), 0);
                    assert_eq!(image.parent_name().is_some(), shape != Shape::Dynamic);
                    assert_valid(&medium, &[FindingKind::PrimaryFooter, FindingKind::FootersDiffer], stop);
                }
                Ok(image) => assert!(stop.count <= 4 && image.virtual_len() == 192 << 10, "{stop:?}"),
                Err(error) => {
                    seen[1] += 1;
                    assert_eq!(error.kind(), FormatErrorKind::NotThisFormat, "{stop:?}: {error}");
                }
            }
            let mut again = medium;
            create_on(&mut again, &shape, 64 << 20, 0).unwrap();
            assert_valid(&again, &[], stop);
        });
        assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
    }
}

/// Runs `change` on an image with data, stops it everywhere, and lets `after` judge what opens.
fn change_survives(
    plan: &Plan,
    allowed: &[FindingKind],
    change: impl Fn(&mut Image<Recorder>),
    after: impl Fn(&Image<Recorder>, &[u8], Stop),
) {
    let mut image = open(plan.build());
    let mut model = Model::new(plan.len());
    scribble(&mut image, &mut model, &mut Random(5), 5);
    let medium = Recorder::new(image.into_medium(), plan.device_len > 0);
    let history = medium.history();
    change(&mut open(medium));
    assert!(history.len() > 0);
    each_stop(&history, |medium, stop| {
        let mut all = allowed.to_vec();
        all.extend(lost_footer(stop));
        assert_valid(&medium, &all, stop);
        let mut image = reopened(medium, stop);
        after(&image, &model.bytes, stop);
        change(&mut image);
        assert_valid(&image.into_medium(), &[], stop);
    });
}

#[test]
fn hiding_survives_any_stop() {
    for disk_type in [DiskType::Dynamic, DiskType::Fixed] {
        change_survives(
            &Plan::new(disk_type),
            &[FindingKind::FootersDiffer],
            |image| set_hidden(image, 1).unwrap(),
            |image, model, stop| {
                assert!(image.footer().hidden <= 1);
                assert!(
                    contents(&Chain::new(vec![layer(open(bytes_of(image.medium())))])) == model,
                    "{stop:?}"
                );
            },
        );
    }
}

#[test]
fn marking_survives_any_stop() {
    change_survives(
        &Plan::new(DiskType::Dynamic),
        &[],
        |image| set_marker(image, 7).unwrap(),
        |image, _, _| assert!([0, 7].contains(&image.batmap().unwrap().header.marker)),
    );
}

#[test]
fn growing_within_the_table_survives_any_stop() {
    let plan = Plan { blocks: 2, spare: 300, block_len: 2 << 20, ..Plan::new(DiskType::Dynamic) };
    change_survives(
        &plan,
        &[FindingKind::FootersDiffer],
        |image| resize_fast(image, 600 << 20).unwrap(),
        |image, model, stop| {
            assert!([4 << 20, 600 << 20].contains(&image.virtual_len()), "{stop:?}");
            let mut bytes = vec![0; model.len()];
            let chain = Chain::new(vec![layer(open(bytes_of(image.medium())))]);
            chain.read_at(0, &mut bytes).unwrap();
            assert!(bytes == model, "{stop:?}");
            assert_eq!(image.allocated_blocks(), 2, "{stop:?}");
        },
    );
}

#[test]
fn forgetting_data_survives_any_stop() {
    change_survives(
        &Plan::new(DiskType::Dynamic),
        &[],
        |image| kill_data(image).unwrap(),
        |image, _, _| assert!(image.allocated_blocks() <= 12),
    );
}

#[test]
fn a_full_device_leaves_both_images_whole() {
    let Family { leaf, mut parent, model } = family(DiskType::Dynamic, true, 4);
    let footer = parent[parent.len() - 512..].to_vec();
    // Room for one more block than there are.
    let used = open(parent.clone()).physical_len() as usize + 20_000;
    parent.truncate(used.next_multiple_of(512));
    parent.extend(footer);
    let medium = Recorder::new(parent, true);
    let history = medium.history();
    let target = CoalesceTarget::Vhd(Box::new(open(medium)));
    let error = coalesce(&leaf, target, false, |_, _| ()).unwrap_err();
    assert_eq!(error.kind(), FormatErrorKind::OutOfSpace, "{error}");
    let stop = Stop { count: history.len(), cut: false };
    let medium = history.killed_after(history.len());
    assert_valid(&medium, &[], stop);
    assert!(through(&leaf, &medium) == model.bytes);
}

/// A kill while the parent is changed leaves a path to the old one or to the new one, with the UUID that belongs to it.
#[test]
fn another_parent_survives_any_kill() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    create(&at("old.vhd"), &Shape::Dynamic, 4 << 20, 0).unwrap();
    std::fs::create_dir(at("elsewhere")).unwrap();
    for (new, with_data) in [("new.vhd", true), ("elsewhere/a-much-longer-name.vhd", true), ("n.vhd", false)]
    {
        create(&at(new), &Shape::Dynamic, 4 << 20, 0).unwrap();
        snapshot(&at("leaf.vhd"), &at("old.vhd"), &SnapshotOptions::default()).unwrap();
        let open = |medium| Image::open_on(medium, &at("leaf.vhd"), OpenOptions::WRITE).unwrap();
        let mut image = open(Recorder::new(std::fs::read(at("leaf.vhd")).unwrap(), false));
        if with_data {
            image.write_at(0, &[1; 512]).unwrap();
            image.commit().unwrap();
        }
        let medium = Recorder::new(bytes_of(image.medium()), false);
        let history = medium.history();
        set_parent(&mut open(medium), &at(new), false).unwrap();
        let uuid_of = |path: &Path| Image::open(path, OpenOptions::READ).unwrap().footer().uuid;
        let mut seen = [0, 0];
        for count in 0..=history.len() {
            let medium = history.killed_after(count);
            let image = open(medium);
            let link = resolve_parent(&image).unwrap();
            let parent = link.path().unwrap();
            assert_eq!(uuid_of(parent), image.header().unwrap().parent_uuid, "{new} after {count}");
            let is_new = parent == at(new).canonicalize().unwrap();
            seen[usize::from(is_new)] += 1;
            // Done again, all three locators are there.
            let again = Recorder::new(bytes_of(image.medium()), false);
            let work = again.history();
            set_parent(&mut open(again), &at(new), false).unwrap();
            let bytes = bytes_of(&work.killed_after(work.len()));
            std::fs::write(at("leaf.vhd"), bytes).unwrap();
            let reports =
                check_path(&at("leaf.vhd"), &CheckOptions { parents: true, ..Default::default() }).unwrap();
            assert!(reports.iter().all(Report::is_valid), "{new} after {count}: {reports:?}");
            let image = Image::open(&at("leaf.vhd"), OpenOptions::READ).unwrap();
            let locators = image.header().unwrap().locators;
            assert_eq!(locators.iter().filter(|entry| entry.data_len > 0).count(), 3, "{new} after {count}");
            snapshot(&at("leaf.vhd"), &at("old.vhd"), &SnapshotOptions::default()).unwrap();
        }
        assert!(seen[0] > 2 && seen[1] > 1, "{seen:?}");
    }
}
