//! Sectors of a lease area, which every host of an SR writes.

use std::collections::BTreeMap;

use tapio_sm::lease::layout::{Beat, HOSTS, Header, SECTOR, SILENCE_MS, Turn, decode_open, encode_open};
use tapio_sm::lease::seen::{Health, Seen};

/// A sector as it is, and the same with a sum that is right: whatever another host wrote, whole or not.
pub fn lease_sectors(bytes: &[u8]) {
    try_sector(bytes);
    let mut sector = [0; SECTOR];
    let len = bytes.len().min(SECTOR - 4);
    sector[..len].copy_from_slice(&bytes[..len]);
    for letters in [b"TPLH", b"TPLB", b"TPLT", b"TPLO"] {
        sector[..4].copy_from_slice(letters);
        let sum = crc32fast::hash(&sector[..SECTOR - 4]);
        sector[SECTOR - 4..].copy_from_slice(&sum.to_le_bytes());
        try_sector(&sector);
    }
}

fn try_sector(bytes: &[u8]) {
    if let Some(header) = Header::decode(bytes) {
        assert!(SILENCE_MS.contains(&header.silence_ms));
        assert_eq!(Header::decode(&header.encode()), Some(header));
    }
    if let Some(beat) = Beat::decode(bytes) {
        assert_eq!(Beat::decode(&beat.encode()).as_ref(), Some(&beat));
        assert!(!beat.named().contains(char::is_control), "{}", beat.named());
        let mut seen = Seen::default();
        seen.look(0, Some(&beat), 5);
        let health = seen.health(0, Some(&beat), (5 + u64::from(*SILENCE_MS.start()), 2_000));
        assert_eq!(matches!(health, Health::Dead(_)), !beat.has_left);
    }
    if let Some(turn) = Turn::decode(bytes) {
        assert!(turn.dead.keys().all(|slot| usize::from(*slot) < HOSTS));
        assert_eq!(Turn::decode(&turn.encode()), Some(turn));
    }
    if let Some(open) = decode_open(bytes) {
        let all: BTreeMap<_, _> = open.into_iter().collect();
        let again = encode_open(7, &all);
        assert_eq!(
            again.iter().flat_map(|sector| decode_open(sector).expect("ours")).collect::<BTreeMap<_, _>>(),
            all
        );
    }
}
