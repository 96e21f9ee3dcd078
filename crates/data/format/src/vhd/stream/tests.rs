use super::*;
use crate::vhd::BatmapHeader;

const MIB: u64 = 1 << 20;

fn shape(len: u64, parent: Option<Uuid>) -> StreamShape {
    StreamShape { len, uuid: Uuid::from_u128(7), timestamp: 5, parent }
}

/// The stream with the number of each block in its bytes.
fn whole(out: &StreamOut) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, part) in out.parts() {
        assert_eq!(at, bytes.len() as u64, "parts follow each other");
        match part {
            StreamPart::Bytes(part) => bytes.extend_from_slice(part),
            StreamPart::Block(block) => {
                bytes.extend_from_slice(&StreamOut::bitmap());
                bytes.resize(bytes.len() + BLOCK_LEN as usize, block as u8);
            }
        }
    }
    assert_eq!(bytes.len() as u64, out.len());
    bytes
}

#[test]
fn a_stream_is_an_image_that_the_offline_tools_find_nothing_wrong_with() {
    let directory = tempfile::tempdir().unwrap();
    let base = Uuid::from_u128(9);
    let write = |name: &str, shape: &StreamShape, blocks: Vec<u32>| {
        let path = directory.path().join(name);
        std::fs::write(&path, whole(&StreamOut::new(shape, blocks).unwrap())).unwrap();
        path
    };
    let parent = StreamShape { uuid: base, ..shape(9 * MIB, None) };
    write(&format!("{base}.vhd"), &parent, vec![0, 2]);
    let path = write("child.vhd", &shape(9 * MIB, Some(base)), vec![2, 4]);
    let chain = crate::vhd::offline::Chain::open(&path).unwrap();
    assert_eq!((chain.layers().len(), chain.virtual_len()), (2, 9 * MIB));
    let mut sector = [0; 512];
    for (at, value) in [(0, 0), (2 * MIB, 0), (4 * MIB, 2), (8 * MIB, 4), (9 * MIB - 512, 4)] {
        chain.read_at(at, &mut sector).unwrap();
        assert_eq!(sector, [value; 512], "at {at}");
    }
    let crate::vhd::offline::Layer::Vhd(image) = &chain.layers()[0] else { panic!("a VHD") };
    assert!(image.tolerances().is_empty(), "{:?}", image.tolerances());
    assert!(image.is_block_full(2) && image.is_block_full(4));
    let batmap: &BatmapHeader = &image.batmap().expect("as tapdisk's images have").header;
    assert!(!batmap.key_hash.is_set());
}

#[test]
fn a_stream_comes_back() {
    let bytes = whole(&StreamOut::new(&shape(7 * MIB, None), vec![1, 3]).unwrap());
    let mut stream = StreamIn::open(&*bytes).unwrap();
    assert_eq!((stream.virtual_len(), stream.is_difference()), (7 * MIB, false));
    let mut data = vec![0; stream.block_len() as usize];
    for block in [1, 3] {
        let found = stream.next_block(&mut data).unwrap().expect("a block");
        assert_eq!(found, StreamBlock { block, bitmap: StreamOut::bitmap().to_vec() });
        assert!(data.iter().all(|&byte| u32::from(byte) == block));
    }
    assert_eq!(stream.next_block(&mut data).unwrap(), None);
}

#[test]
fn what_cannot_be_read_forward_is_refused_in_words() {
    let good = whole(&StreamOut::new(&shape(7 * MIB, None), vec![1, 3]).unwrap());
    const BAT_AT: usize = FOOTER_LEN + HEADER_LEN;
    type Case = (&'static str, fn(&mut Vec<u8>));
    let cases: [Case; 4] = [
        ("cannot be read on", |bytes| bytes.truncate(100)),
        ("no VHD footer", |bytes| bytes[0] ^= 1),
        ("where what precedes it ends", |bytes| {
            let first: [u8; 4] = bytes[BAT_AT + 4..BAT_AT + 8].try_into().unwrap();
            bytes[BAT_AT + 12..BAT_AT + 16].copy_from_slice(&first);
        }),
        ("where what precedes it ends", |bytes| bytes[BAT_AT..BAT_AT + 4].fill(0)),
    ];
    for (words, change) in cases {
        let mut bytes = good.clone();
        change(&mut bytes);
        let error = StreamIn::open(&*bytes).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    let fixed = Footer::new(DiskType::Fixed, MIB).encode();
    assert_eq!(StreamIn::open(&fixed[..]).unwrap_err().kind(), FormatErrorKind::Unsupported);
    assert!(StreamOut::new(&shape(STREAM_LEN_MAX + 512, None), vec![]).is_err());
}
