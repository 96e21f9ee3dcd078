//! What lies in an SR's directory, and what a prober prints.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use tapio_sm::block_device::marks;
use tapio_sm::lvm::metadata::{Metadata, Slot, SrEntry, VOLUME_LEN};
use tapio_sm::worker::{Frames, FromWorker, ToWorker, encode};
use tapio_sm::{CloneJournal, Config, Ctx, Found, LiveDisk, MergeJournal, Sr, registry};
use tapio_types::Access;
use uuid::Uuid;

/// The journals of a fork and of merges, and by the same bytes what `blkid` prints.
pub fn sm_journal(bytes: &[u8]) {
    let name = format!("clone_{}", Uuid::from_u128(1));
    if let Some(journal) = CloneJournal::decode(&name, bytes) {
        assert_eq!(journal.file_name(), name);
        assert!(journal.base != journal.vdi && journal.new != Some(journal.vdi));
        assert_eq!(CloneJournal::decode(&name, journal.encode().as_bytes()), Some(journal));
        assert!(bytes.starts_with(journal.encode().as_bytes()), "something was added or left out");
    }
    // The name is as foreign as the content.
    let text = String::from_utf8_lossy(bytes);
    if let Some(journal) = CloneJournal::decode(&text, bytes) {
        assert_eq!(journal.file_name(), text);
    }
    for word in ["coalesce", "relink", "leaf"] {
        let name = format!("{word}_{}", Uuid::from_u128(1));
        match MergeJournal::decode(&name, bytes) {
            Some(Found::Ours(journal)) => {
                assert_eq!(journal.file_name(), name);
                assert_eq!(journal.encode().as_bytes(), bytes, "ours, to the byte");
            }
            Some(Found::NotWhole) => assert!(bytes.iter().all(|byte| *byte == 0)),
            Some(Found::Foreign) => {}
            None => panic!("{name} is the name of a journal"),
        }
    }
    let found = tapio_sm::parse_blkid(&text);
    let len: usize = found.iter().map(|(key, value)| key.len() + value.len() + 1).sum();
    assert!(len <= text.len(), "more than there was");
}

/// The first bytes of a disk or of what lies on it, and by the same bytes its last ones. The first byte says which
/// partition is asked for, and how long sectors are.
pub fn device_marks(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let sector_len = if first & 0x80 == 0 { 512 } else { 4096 };
    let number = u32::from(first & 0x7f);
    if let Some(uuid) = marks::partition_uuid(bytes, sector_len, number) {
        let is_mbr = uuid.len() == 11 && uuid.ends_with(&format!("-{number:02x}"));
        assert!(is_mbr || Uuid::try_parse(&uuid).is_ok_and(|uuid| !uuid.is_nil()), "{uuid}");
        assert!(number > 0 || is_mbr, "partitions are counted from one");
        assert_eq!(marks::partition_uuid(&bytes[..440.min(bytes.len())], sector_len, number), None);
    }
    if marks::is_physical_volume(bytes) {
        assert!(
            marks::is_physical_volume(&bytes[..bytes.len().min(2048)]),
            "the label is in the first sectors"
        );
    }
    let member = marks::raid_member(bytes, &[]);
    assert!(member.is_none() || bytes.len() >= 256);
    if member.is_none() && marks::raid_member(&[], bytes).is_some() {
        assert!(bytes.len() >= 256);
    }
}

/// What a storage worker and its daemon receive from each other, in pieces whose length the first byte says.
pub fn sm_worker(bytes: &[u8]) {
    let Some((step, bytes)) = bytes.split_first() else { return };
    let step = usize::from(*step).max(1);
    listen::<ToWorker>(bytes, step);
    listen::<FromWorker>(bytes, step);
}

fn listen<T: serde::Serialize + serde::de::DeserializeOwned>(bytes: &[u8], step: usize) {
    let (mut frames, mut whole) = (Frames::default(), Frames::default());
    whole.feed(bytes);
    for piece in bytes.chunks(step) {
        frames.feed(piece);
        while let Ok(Some(message)) = frames.take::<T>() {
            let same = whole.take::<T>().expect("the same bytes").expect("the same message");
            // What was understood can be said again.
            let again = encode(&message).expect("it came in a message");
            assert_eq!(again, encode(&same).expect("it came in a message"));
            let mut back = Frames::default();
            back.feed(&again);
            assert!(back.take::<T>().is_ok_and(|back| back.is_some()), "our own words");
            assert!(back.is_empty());
        }
    }
}

/// The metadata volume of an SR of volumes, and by the same bytes a journal with its value inside,
/// a table of LVM's, and its own description of a group on a device.
pub fn sm_volumes(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Some(value) = tapio_sm::lvm::value_inside(bytes) {
        assert!(text.contains(&value), "more than there was");
    }
    let _ = tapio_sm::lvm::commands::rows(&text);
    tapio_sm::lvm::description::check_bytes(bytes);
    let Ok(said) = Metadata::decode(bytes) else { return };
    assert!(said.slots.len() as u64 * 1024 + 2048 <= VOLUME_LEN);
    // What was understood can be said again. Names are cut once.
    let again = |said: &Metadata| {
        let mut medium = Vec::new();
        let mut fresh = Metadata::create(&mut medium, said.sr.clone()).expect("memory");
        for slot in &said.slots {
            if let Slot::Used(entry) = slot {
                fresh.put(&mut medium, entry.clone()).expect("memory");
            }
        }
        Metadata::read(&medium)
    };
    let Ok(first) = again(&said) else { panic!("our own words") };
    assert_eq!(first.sr.uuid, said.sr.uuid);
    if first.slots.iter().all(|slot| matches!(slot, Slot::Used(_))) {
        assert_eq!(again(&first), Ok(first));
    }
    let mut medium = bytes.to_vec();
    let mut renamed = said.clone();
    renamed.set_sr(&mut medium, SrEntry { uuid: Uuid::from_u128(3), ..said.sr }).expect("memory");
    assert_eq!(Metadata::read(&medium).map(|said| said.slots), Ok(renamed.slots));
}

struct NoContext;

impl Ctx for NoContext {
    fn is_cancelled(&self) -> bool {
        false
    }
    fn progress(&self, _: f64) {}
    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        None
    }
    fn step(&self, _: &'static str) {}
}

struct Attached {
    sr: Box<dyn Sr>,
    directory: tempfile::TempDir,
}

fn attach() -> Attached {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let config = Config::from([("location".to_string(), at("images").display().to_string())]);
    let drivers = registry(&at("mount"), &at("run"));
    let file = drivers.iter().find(|driver| driver.info().sr_type == "file").map(Arc::clone);
    let file = file.expect("the driver of directories");
    file.create(&NoContext, Uuid::from_u128(9), &config, 0).expect("an SR");
    let sr = file.attach(&NoContext, Uuid::from_u128(9), &config).expect("an SR");
    Attached { sr, directory }
}

/// An image that lies in an SR's directory: scanned, looked at and opened.
pub fn sm_image(bytes: &[u8]) {
    thread_local! {
        static ATTACHED: RefCell<Option<Attached>> = const { RefCell::new(None) };
    }
    let vdi = Uuid::from_u128(5);
    ATTACHED.with_borrow_mut(|attached| {
        let Attached { sr, directory } = attached.get_or_insert_with(attach);
        let path = directory.path().join("images").join(format!("{vdi}.vhd"));
        std::fs::write(&path, bytes).expect("room for the image");
        let found = sr.scan(&NoContext).expect("a scan never fails for an image");
        assert_eq!(found.len(), 1);
        let info = &found[0];
        assert_eq!(sr.vdi(&NoContext, vdi).expect("it is there").virtual_size, info.virtual_size);
        match sr.activate(&NoContext, vdi, Access::ReadOnly) {
            Ok(with) => {
                assert!(!info.sm_config.contains_key("damaged"), "{info:?}");
                assert!(
                    with.chain.layers.iter().all(|layer| layer.path.starts_with(Path::new(directory.path())))
                );
                sr.deactivate(&NoContext, vdi).expect("it was active");
            }
            Err(error) => {
                let text = error.params.get(1).map_or("", String::as_str);
                assert!(text.len() > 20, "an error that says nothing: {error}");
            }
        }
    });
}
