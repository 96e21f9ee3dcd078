use tapio_types::{ImageKind, LayerSpec};
use tempfile::TempDir;

use super::*;
use crate::vhd::offline::{ParentFacts, Shape, create};

fn vhd(dir: &TempDir, name: &str) -> LayerSpec {
    let path = dir.path().join(name);
    create(&path, &Shape::Dynamic, 4 << 20, 0).expect("an image can be made");
    LayerSpec { kind: ImageKind::Vhd, path }
}

fn child(dir: &TempDir, name: &str, parent: &LayerSpec) -> LayerSpec {
    let path = dir.path().join(name);
    let facts = ParentFacts::gather(&path, &parent.path, parent.kind == ImageKind::Raw).expect("a parent").0;
    create(&path, &Shape::Differencing(facts), 4 << 20, 0).expect("an image can be made");
    LayerSpec { kind: ImageKind::Vhd, path }
}

fn raw(dir: &TempDir, name: &str) -> LayerSpec {
    let path = dir.path().join(name);
    fs::write(&path, [7; 4096]).expect("written");
    LayerSpec { kind: ImageKind::Raw, path }
}

fn on_top(below: &LayerSpec, leaf: &LayerSpec) {
    note(&Move::OnTop { below: below.clone(), leaf: leaf.clone() }).expect("noted");
}

fn leads_to(image: &LayerSpec) -> PathBuf {
    follow(image).expect("it can be followed").leaf.path
}

#[test]
fn notes_are_followed_to_the_newest_image_and_writing_older_ones_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    for base in [vhd(&dir, "a b%.vhd"), raw(&dir, "base.raw")] {
        let stem = base.path.file_stem().expect("a name").to_string_lossy().into_owned();
        let middle = child(&dir, &format!("{stem}-1.vhd"), &base);
        on_top(&base, &middle);
        let leaf = child(&dir, &format!("{stem}-2.vhd"), &middle);
        on_top(&middle, &leaf);
        assert_eq!((leads_to(&base), leads_to(&middle)), (leaf.path.clone(), leaf.path.clone()));
        assert_eq!(
            follow(&leaf).expect("no note"),
            Followed { leaf: leaf.clone(), reason: None, from: None }
        );
        let why = check_writable(&base, &follow(&base).expect("notes lead somewhere"))
            .expect_err("it is a parent now")
            .to_string();
        assert!(why.contains("after a snapshot") && why.contains(".continued"), "{why}");
        check_writable(&leaf, &follow(&leaf).expect("notes lead somewhere")).expect("it is the leaf");
        let mode = fs::metadata(place(&base).expect("a place")).expect("a note").mode();
        assert_eq!(mode & 0o777, 0o600);
        // Merged away: what its note says is all there is.
        fs::remove_file(&middle.path).expect("removed");
        assert_eq!(leads_to(&base), leaf.path);
        fs::remove_file(&leaf.path).expect("removed");
        let why = follow(&base).expect_err("the newest is gone").to_string();
        assert!(why.contains("is not there") && why.contains("remove"), "{why}");
    }
}

#[test]
fn a_note_for_another_image_is_not_followed() {
    let dir = tempfile::tempdir().expect("a directory");
    let base = vhd(&dir, "base.vhd");
    let leaf = child(&dir, "leaf.vhd", &base);
    on_top(&base, &leaf);
    // The newest image is another one of that name.
    let stranger = child(&dir, "leaf.vhd", &base);
    assert!(follow(&base).expect_err("another UUID").to_string().contains("and was uuid="), "{stranger}");
    // The old one is another one: its note is not true any more, and goes.
    let base = vhd(&dir, "base.vhd");
    assert_eq!(leads_to(&base), base.path);
    assert!(!place(&base).expect("a place").exists());
    let raw_base = raw(&dir, "base.raw");
    on_top(&raw_base, &child(&dir, "on-raw.vhd", &raw_base));
    let other = raw(&dir, "other.raw");
    fs::rename(&other.path, &raw_base.path).expect("renamed");
    assert!(follow(&raw_base).expect_err("another file").to_string().contains("for another image"));
}

#[test]
fn a_commit_leads_back_and_a_mirror_there_and_back_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let base = vhd(&dir, "base.vhd");
    let leaf = child(&dir, "leaf.vhd", &base);
    on_top(&base, &leaf);
    note(&Move::Down { leaf: leaf.clone(), parent: base.clone() }).expect("noted");
    fs::remove_file(&leaf.path).expect("yours to remove");
    assert_eq!((leads_to(&base), leads_to(&leaf)), (base.path.clone(), base.path.clone()));
    let copy = vhd(&dir, "copy.vhd");
    let away = |near: &LayerSpec, far: &LayerSpec| Move::Away { near: near.clone(), far: far.clone() };
    note(&away(&base, &copy)).expect("noted");
    assert_eq!(leads_to(&leaf), copy.path);
    note(&away(&copy, &base)).expect("noted");
    assert_eq!((leads_to(&base), leads_to(&copy)), (base.path.clone(), base.path.clone()));
    note(&Move::Stays { image: copy.clone(), other: base }).expect("taken back");
    assert_eq!(leads_to(&copy), copy.path);
}

#[test]
fn the_note_of_a_standby_is_ready_before_it_is_needed_and_leads_to_both_images() {
    for is_child in [true, false] {
        let dir = tempfile::tempdir().expect("a directory");
        let base = vhd(&dir, "base.vhd");
        let leaf = child(&dir, "leaf.vhd", &base);
        let standby = child(&dir, "standby.vhd", if is_child { &leaf } else { &base });
        let overflow = Overflow { leaf: leaf.clone(), standby: standby.clone(), is_child };
        let ready = ready(&place(&leaf).expect("a place"));
        note(&Move::MayOverflow(overflow.clone())).expect("ready");
        assert!(ready.exists());
        // It is not true yet.
        check_writable(&leaf, &follow(&leaf).expect("notes lead somewhere")).expect("it is the leaf");
        note(&Move::NeverOverflows { leaf: leaf.clone() }).expect("gone");
        assert!(!ready.exists());
        note(&Move::MayOverflow(overflow.clone())).expect("ready");
        let made = fs::metadata(&ready).expect("there").ino();
        note(&Move::MayOverflow(overflow.clone())).expect("ready still");
        assert_eq!(
            fs::metadata(&ready).expect("there").ino(),
            made,
            "a full storage has no room for another"
        );
        for _ in 0..2 {
            note(&Move::Overflows(overflow.clone())).expect("noted");
            assert!(!ready.exists());
            let followed = follow(&leaf).expect("it can be followed");
            assert!(followed.stands_on(&leaf, &standby) && !followed.stands_on(&base, &standby));
            assert!(!followed.stands_on(&leaf, &base));
            assert_eq!(followed.below(), (!is_child).then_some(&leaf));
        }
        let why = check_writable(&leaf, &follow(&leaf).expect("notes lead somewhere"))
            .expect_err("the disk is both")
            .to_string();
        assert!(why.contains("standby.vhd") && why.contains(".continued"), "{why}");
        assert_eq!(check_not_below_standby(&leaf.path).is_err(), !is_child);
        // Where it moves from there on, the leaf's name leads.
        let copy = vhd(&dir, "copy.vhd");
        note(&Move::Away { near: standby.clone(), far: copy.clone() }).expect("noted");
        assert_eq!(leads_to(&leaf), copy.path);
        note(&Move::Overflows(overflow)).expect("it is empty again, and stands by again");
        note(&Move::Down { leaf: standby.clone(), parent: leaf.clone() }).expect("noted");
        assert_eq!((leads_to(&leaf), leads_to(&standby)), (leaf.path.clone(), leaf.path.clone()));
    }
}

#[test]
fn a_directory_that_moves_takes_its_notes_along_and_nonsense_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let base = vhd(&dir, "base.vhd");
    let leaf = child(&dir, "leaf.vhd", &base);
    on_top(&base, &leaf);
    let moved = dir.path().join("moved");
    fs::create_dir(&moved).expect("made");
    for path in [&base.path, &leaf.path, &place(&base).expect("a place")] {
        fs::rename(path, moved.join(path.file_name().expect("a name"))).expect("moved");
    }
    let base = LayerSpec { kind: ImageKind::Vhd, path: moved.join("base.vhd") };
    assert_eq!(leads_to(&base), moved.join("leaf.vhd"));
    let place = place(&base).expect("a place");
    let good = fs::read_to_string(&place).expect("text");
    for bad in
        ["", "tapio", &good[..good.len() - 1], &good.replace("leaf.vhd", "../leaf.vhd"), &"x".repeat(40_000)]
    {
        fs::write(&place, bad).expect("written");
        assert_eq!(follow(&base).expect_err(bad).kind(), FormatErrorKind::Corrupt, "{bad}");
    }
    fs::write(&place, good.replace("leaf.vhd", "%2e%2e%2fleaf.vhd")).expect("written");
    assert!(follow(&base).is_err());
}

#[test]
fn every_error_of_the_system_leaves_the_note_of_before() {
    let dir = tempfile::tempdir().expect("a directory");
    let base = vhd(&dir, "base.vhd");
    let leaf = child(&dir, "leaf.vhd", &base);
    on_top(&base, &leaf);
    let place = place(&base).expect("a place");
    // What is in the way of the new note cannot be taken out of it.
    let partial = place.with_extension("continued.new");
    fs::create_dir_all(partial.join("in the way")).expect("made");
    let other = child(&dir, "other.vhd", &base);
    assert!(note(&Move::OnTop { below: base.clone(), leaf: other }).is_err());
    assert_eq!(leads_to(&base), leaf.path);
    let copy = vhd(&dir, "copy.vhd");
    note(&Move::Away { near: copy.clone(), far: leaf.clone() }).expect("noted");
    assert!(note(&Move::Away { near: base.clone(), far: copy.clone() }).is_err());
    assert_eq!(leads_to(&copy), leaf.path, "the far side's own note is back");
}
