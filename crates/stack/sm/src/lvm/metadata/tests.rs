use super::*;

fn sr() -> SrEntry {
    SrEntry {
        uuid: Uuid::from_u128(7),
        allocation: Allocation::Thin,
        name: "Local & <large>".into(),
        description: String::new(),
    }
}

fn entry(number: u128) -> VdiEntry {
    VdiEntry { name: format!("disk {number}"), ..VdiEntry::new(Uuid::from_u128(number), "vhd") }
}

fn volume() -> (Vec<u8>, Metadata) {
    let mut medium = vec![0xaa; VOLUME_LEN as usize];
    let metadata = Metadata::create(&mut medium, sr()).unwrap();
    (medium, metadata)
}

#[test]
fn what_is_written_is_read() {
    let (mut medium, mut metadata) = volume();
    let snapshot = VdiEntry {
        description: "\"quoted\" & <tagged>".into(),
        snapshot_of: Some(Uuid::from_u128(1)),
        snapshot_time: "20261125T12:00:00Z".into(),
        read_only: true,
        ..entry(2)
    };
    for entry in [entry(1), snapshot.clone(), entry(3)] {
        metadata.put(&mut medium, entry).unwrap();
        assert_eq!(Metadata::read(&medium).unwrap(), metadata);
    }
    assert_eq!(metadata.vdi(snapshot.uuid), Some(&snapshot));
    metadata.put(&mut medium, VdiEntry { name: "renamed".into(), ..entry(1) }).unwrap();
    assert_eq!(Metadata::read(&medium).unwrap().vdi(Uuid::from_u128(1)).unwrap().name, "renamed");
    metadata.set_sr(&mut medium, SrEntry { uuid: Uuid::from_u128(8), ..sr() }).unwrap();
    assert_eq!(Metadata::read(&medium).unwrap(), metadata);
}

#[test]
fn the_layout_is_that_of_the_reference() {
    let (mut medium, mut metadata) = volume();
    metadata.put(&mut medium, entry(1)).unwrap();
    let sector = |at: usize| std::str::from_utf8(&medium[at * SECTOR..(at + 1) * SECTOR]).unwrap();
    assert_eq!(sector(0).trim_end_matches(' '), "XSSM:3072      :1:2");
    assert_eq!(
        sector(1).trim_end_matches(' '),
        format!("<?xml version=\"1.0\" ?><uuid>{}</uuid><allocation>thin</allocation>", sr().uuid)
    );
    assert_eq!(sector(2).trim_end_matches(' '), "<name_label>Local &amp; &lt;large&gt;</name_label>");
    assert!(
        sector(4).starts_with("<vdi><name_label>disk 1</name_label><name_description></name_description> ")
    );
    assert!(sector(5).contains("<deleted>0</deleted></vdi> "));
}

#[test]
fn slots_are_used_again_and_the_last_one_goes() {
    let (mut medium, mut metadata) = volume();
    for number in 1..=3 {
        metadata.put(&mut medium, entry(number)).unwrap();
    }
    metadata.remove(&mut medium, Uuid::from_u128(2)).unwrap();
    assert_eq!(metadata.slots[1], Slot::Deleted);
    assert_eq!(Metadata::read(&medium).unwrap(), metadata);
    metadata.put(&mut medium, entry(4)).unwrap();
    assert_eq!(metadata.slots.len(), 3);
    metadata.remove(&mut medium, Uuid::from_u128(3)).unwrap();
    assert_eq!(metadata.slots.len(), 2);
    assert!(medium.starts_with(b"XSSM:4096 "));
    assert_eq!(Metadata::read(&medium).unwrap(), metadata);
    metadata.remove(&mut medium, Uuid::from_u128(99)).unwrap();
}

/// A medium on which the power goes after some writes.
struct Cut(Vec<u8>, usize);

impl Medium for Cut {
    fn len(&self) -> std::io::Result<u64> {
        Medium::len(&self.0)
    }
    fn read_at(&self, at: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(at, into)
    }
    fn write_at(&mut self, at: u64, from: &[u8]) -> std::io::Result<()> {
        assert_eq!((at % 512, from.len()), (0, 512), "one sector");
        self.1 = self.1.checked_sub(1).ok_or_else(|| std::io::Error::other("no power"))?;
        self.0.write_at(at, from)
    }
    fn set_len(&mut self, len: u64) -> std::io::Result<()> {
        Medium::set_len(&mut self.0, len)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_power_cut_leaves_the_old_or_the_new() {
    type Change = fn(&mut Metadata, &mut Cut) -> Result<(), FormatError>;
    let changes: [Change; 5] = [
        |metadata, medium| metadata.put(medium, entry(4)),
        |metadata, medium| metadata.remove(medium, Uuid::from_u128(1)),
        |metadata, medium| metadata.remove(medium, Uuid::from_u128(3)),
        |metadata, medium| metadata.put(medium, VdiEntry { read_only: true, ..entry(3) }),
        |metadata, medium| metadata.set_sr(medium, SrEntry { uuid: Uuid::from_u128(9), ..sr() }),
    ];
    // With a slot that is free, and with none.
    for free in [false, true] {
        let (mut medium, mut before) = volume();
        for number in 1..=3 {
            before.put(&mut medium, entry(number)).unwrap();
        }
        if free {
            before.remove(&mut medium, Uuid::from_u128(2)).unwrap();
        }
        for (at, change) in changes.iter().enumerate() {
            for writes in 0.. {
                let mut cut = Cut(medium.clone(), writes);
                let mut after = before.clone();
                let done = change(&mut after, &mut cut);
                let found = Metadata::read(&cut.0).unwrap();
                let vdis = |metadata: &Metadata| metadata.vdis().cloned().collect::<Vec<_>>();
                let is_one = vdis(&found) == vdis(&before) || vdis(&found) == vdis(&after);
                let is_known = found.slots.iter().all(|slot| !matches!(slot, Slot::Unreadable(_)));
                assert!(is_known && (is_one || done.is_err()), "change {at}, {writes} writes: {found:?}");
                // What is said of other VDIs is as it was.
                assert_eq!(found.vdi(Uuid::from_u128(2)), before.vdi(Uuid::from_u128(2)));
                if done.is_ok() {
                    assert_eq!(found, after);
                    break;
                }
            }
        }
    }
}

#[test]
fn long_names_are_cut_between_characters() {
    let (mut medium, mut metadata) = volume();
    for (name, description) in [("&".repeat(400), "ä".repeat(400)), ("x".repeat(500), String::new())] {
        let long = VdiEntry { name, description, ..entry(1) };
        metadata.put(&mut medium, long.clone()).unwrap();
        let found = Metadata::read(&medium).unwrap();
        let found = found.vdi(long.uuid).unwrap();
        assert!(found.name.len() >= 40 && long.name.starts_with(&found.name), "{found:?}");
        assert!(long.description.starts_with(&found.description));
    }
    metadata.set_sr(&mut medium, SrEntry { name: "<".repeat(900), ..sr() }).unwrap();
    assert!(Metadata::read(&medium).unwrap().sr.name.len() > 100);
    assert_eq!((text::illegal("ok"), text::illegal("a\u{1}b")), (None, Some('\u{1}')));
}

#[test]
fn times_are_written_without_blanks() {
    assert_eq!(compact_time("Fri Nov 20 18:35:24 2026"), "20261120T18:35:24Z");
    assert_eq!(compact_time("Sat Jan  1 00:00:00 2000"), "20000101T00:00:00Z");
}

#[test]
fn what_is_no_such_volume_is_refused() {
    let (medium, _) = volume();
    let with = |head: &str| [padded(head).as_slice(), &medium[SECTOR..]].concat();
    for (what, bytes) in [
        ("nothing", Vec::new()),
        ("zeros", vec![0; 4096]),
        ("version", with("XSSM:2048      :1:1")),
        ("odd length", with("XSSM:2050      :1:2")),
        ("too long", with("XSSM:9999999999:1:2")),
        ("cut off", medium[..1024].to_vec()),
        ("no length", with("XSSM:          :1:2")),
    ] {
        assert!(Metadata::decode(&bytes).is_err(), "{what}");
    }
    // A damaged slot is left alone, and the others are read.
    let (mut medium, mut metadata) = volume();
    metadata.put(&mut medium, entry(1)).unwrap();
    metadata.put(&mut medium, entry(2)).unwrap();
    medium[HEAD + SECTOR..HEAD + SECTOR + 9].copy_from_slice(b"<uuid>x</");
    let mut found = Metadata::read(&medium).unwrap();
    assert!(matches!(found.slots[0], Slot::Unreadable(_)) && found.vdi(Uuid::from_u128(2)).is_some());
    found.put(&mut medium, entry(3)).unwrap();
    assert_eq!(found.slots.len(), 3);
}
