//! Round trips of every structure, over any bytes.

use proptest::prelude::*;
use tapio_format::vhd::journal::{ENTRY_LEN, Entry, HEADER_LEN as JOURNAL_LEN, JournalHeader};
use tapio_format::vhd::locator::{decode_path, encode_path};
use tapio_format::vhd::{Bat, BatmapHeader, BitOrder, Footer, Header, PlatformCode, bitmap};

fn any_bytes<const N: usize>() -> impl Strategy<Value = [u8; N]> {
    prop::collection::vec(any::<u8>(), N).prop_map(|bytes| bytes.try_into().unwrap())
}

/// The bytes with the four at `field` taken from `other`.
fn with_field<const N: usize>(mut bytes: [u8; N], field: usize, other: &[u8; N]) -> [u8; N] {
    bytes[field..field + 4].copy_from_slice(&other[field..field + 4]);
    bytes
}

proptest! {
    #[test]
    fn a_footer_keeps_every_byte(bytes in any_bytes::<512>()) {
        let encoded = Footer::parse(&bytes).encode();
        prop_assert_eq!(with_field(encoded, 64, &bytes), bytes);
        prop_assert_eq!(Footer::parse(&encoded).encode(), encoded);
        let _ = Footer::decode(&bytes);
        let mut named = encoded;
        named[..8].copy_from_slice(b"conectix");
        let _ = Footer::decode(&Footer::parse(&named).encode());
    }

    #[test]
    fn a_header_keeps_every_byte(bytes in any_bytes::<1024>()) {
        let encoded = Header::parse(&bytes).encode();
        prop_assert_eq!(with_field(encoded, 36, &bytes), bytes);
        let mut named = bytes;
        named[..8].copy_from_slice(b"cxsparse");
        let header = Header::parse(&Header::parse(&named).encode());
        let _ = (Header::decode(&header.encode()), header.parent_name(), header.parent_name_old());
        for entry in &header.locators {
            let _ = (entry.space_len(), entry.path_span());
        }
    }

    #[test]
    fn a_batmap_header_keeps_every_byte(bytes in any_bytes::<512>(), entries in any::<u32>()) {
        prop_assert_eq!(BatmapHeader::parse(&bytes).encode(), bytes);
        let mut named = bytes;
        named[..8].copy_from_slice(b"tdbatmap");
        let _ = BatmapHeader::decode(&named, &Header::new(entries));
    }

    #[test]
    fn a_journal_keeps_what_it_means(bytes in any_bytes::<JOURNAL_LEN>(), entry in any_bytes::<ENTRY_LEN>()) {
        let mut named = bytes;
        named[..8].copy_from_slice(b"vjournal");
        if let Ok(header) = JournalHeader::decode(&named) {
            prop_assert_eq!(&header.encode()[..64], &named[..64]);
        }
        let mut named = entry;
        named[..16].copy_from_slice(b"\xaa\xaa\x12\x34\x43\x21\xaa\xaa\0\0\0\x08\0\0\x02\0");
        if let Ok(entry) = Entry::decode(&named) {
            prop_assert_eq!(entry.encode(), named);
        }
    }

    #[test]
    fn a_table_comes_back(entries in prop::collection::vec(any::<u32>(), 0..600)) {
        let mut bat = Bat::new(entries.len() as u32);
        for (block, &entry) in (0..).zip(&entries) {
            bat.set(block, entry);
        }
        let bytes = bat.encode();
        prop_assert_eq!(bytes.len() % 512, 0);
        let read = Bat::decode(&bytes, bat.len()).unwrap();
        prop_assert_eq!(read.entries(), entries.as_slice());
    }

    #[test]
    fn any_path_comes_back(path in "[^\0\\\\]{1,60}") {
        for code in [PlatformCode::MacX, PlatformCode::W2ku, PlatformCode::W2ru] {
            let back = decode_path(code, &encode_path(code, &path).unwrap());
            // A drive letter is dropped, and what is nothing without it is no path.
            if !path.starts_with("C:") && !path.starts_with("c:") {
                prop_assert_eq!(back.unwrap(), path.clone());
            }
        }
    }

    #[test]
    fn any_bytes_are_a_path_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        for code in [PlatformCode::MacX, PlatformCode::W2ku, PlatformCode::W2ru, PlatformCode::Wi2k] {
            if let Ok(path) = decode_path(code, &bytes) {
                prop_assert!(!path.is_empty() && !path.contains('\0'));
            }
        }
    }

    #[test]
    fn runs_of_bits_are_the_bits(map in prop::collection::vec(prop_oneof![Just(0u8), Just(255), any::<u8>()], 0..64),
                                 start in 0usize..520, len in 0usize..520) {
        let mut at = start;
        for (value, first, count) in bitmap::runs(&map, start, start + len) {
            prop_assert_eq!(first, at);
            prop_assert!((first..first + count).all(|bit| bitmap::test(&map, bit) == value));
            at += count;
        }
        prop_assert_eq!(at, start + len);
        let set = (0..len).filter(|&bit| bitmap::test(&map, bit)).count();
        prop_assert_eq!(bitmap::count_set(&map, len), set);
        let mut twice = map.clone();
        BitOrder::LsbFirst.swap(&mut twice);
        BitOrder::LsbFirst.swap(&mut twice);
        prop_assert_eq!(twice, map);
    }
}
