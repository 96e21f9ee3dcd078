//! Both layouts against bytes that were laid out by hand from the specification, and there and back.

use super::*;

fn slot(bytes: &[(usize, &[u8])]) -> Slot {
    let mut slot = Slot([0; REQUEST_LEN_MAX]);
    for (at, bytes) in bytes {
        slot.put(*at, bytes);
    }
    slot
}

const ID: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const ID_NUMBER: u64 = 0x0807_0605_0403_0201;

#[test]
fn a_direct_request_lies_where_the_specification_says() {
    let segment = [9, 0, 0, 0, 2, 7, 0xAA, 0xBB];
    let last = [10, 1, 0, 0, 0, 0, 0, 0];
    for (abi, id_at) in [(Abi::X86_64, 8), (Abi::X86_32, 4)] {
        let bytes = slot(&[
            (0, &[op::WRITE, 11, 0x34, 0x12]),
            (id_at, &ID),
            (id_at + 8, &[0, 0, 0, 0, 1, 0, 0, 0]),
            (id_at + 16, &segment),
            (id_at + 16 + 80, &last),
        ]);
        let request = Request::decode(&bytes, abi).unwrap();
        assert_eq!((request.id, request.op, request.indirect), (ID_NUMBER, op::WRITE, false));
        assert_eq!((request.sector, request.segments), (1 << 32, 11));
        assert_eq!(request.direct[0], Segment { grant: GrantRef(9), first: 2, last: 7 });
        assert_eq!(request.direct[10], Segment { grant: GrantRef(266), first: 0, last: 0 });
        assert_eq!(request.direct_segments().len(), 11);
        assert_eq!(id_at + 16 + 88, abi.request_len());
    }
}

#[test]
fn an_indirect_request_lies_where_the_specification_says() {
    for (abi, id_at) in [(Abi::X86_64, 8), (Abi::X86_32, 4)] {
        let bytes = slot(&[
            (0, &[op::INDIRECT, op::READ, 0x01, 0x02]),
            (id_at, &ID),
            (id_at + 8, &[7]),
            (id_at + 16, &[0xFF, 0xFF]),
            (id_at + 20, &[20, 0, 0, 0, 21, 0, 0, 0, 22, 0, 0, 0]),
        ]);
        let request = Request::decode(&bytes, abi).unwrap();
        assert_eq!((request.op, request.indirect, request.segments), (op::READ, true, 513));
        assert_eq!((request.id, request.sector), (ID_NUMBER, 7));
        assert_eq!(request.indirect_pages(), [GrantRef(20), GrantRef(21)]);
        assert!(request.direct_segments().is_empty());
        assert_eq!(request.response(status::OKAY), Response { id: ID_NUMBER, op: op::READ, status: 0 });
    }
}

#[test]
fn a_discard_lies_where_the_specification_says() {
    for (abi, id_at) in [(Abi::X86_64, 8), (Abi::X86_32, 4)] {
        let bytes = slot(&[
            (0, &[op::DISCARD, DISCARD_SECURE]),
            (id_at, &ID),
            (id_at + 8, &[8]),
            (id_at + 16, &[0, 1]),
        ]);
        let request = Request::decode(&bytes, abi).unwrap();
        assert_eq!((request.sector, request.discard_sectors, request.discard_flag), (8, 256, 1));
        assert_eq!(request.segments, 0);
    }
}

#[test]
fn what_is_no_request_is_named_and_can_be_answered() {
    let refused = |first: [u8; 4], abi| {
        let malformed = Request::decode(&slot(&[(0, &first), (8, &ID)]), abi).unwrap_err();
        (malformed.error, malformed.response())
    };
    let abi = Abi::X86_64;
    let (error, response) = refused([4, 1, 0, 0], abi);
    assert_eq!(error, RequestError::Op(4));
    assert_eq!(response, Response { id: ID_NUMBER, op: 4, status: status::EOPNOTSUPP });
    assert_eq!(refused([op::READ, 12, 0, 0], abi).0, RequestError::Segments(12));
    assert_eq!(refused([op::READ, 12, 0, 0], abi).1.status, status::ERROR);
    assert_eq!(refused([op::WRITE, 0, 0, 0], abi).0, RequestError::Segments(0));
    assert_eq!(refused([op::INDIRECT, op::READ, 0, 0], abi).0, RequestError::Segments(0));
    assert_eq!(refused([op::INDIRECT, op::READ, 1, 0x10], abi).0, RequestError::Segments(4097));
    assert_eq!(refused([op::INDIRECT, op::WRITE_BARRIER, 1, 0], abi).0, RequestError::Indirect(2));
    assert_eq!(refused([op::INDIRECT, op::INDIRECT, 1, 0], abi).0, RequestError::Indirect(6));
    for op in [op::FLUSH_DISKCACHE, op::WRITE_BARRIER] {
        assert!(Request::decode(&slot(&[(0, &[op])]), abi).is_ok(), "without data");
    }
}

#[test]
fn responses_have_one_layout() {
    let response = Response { id: ID_NUMBER, op: op::WRITE, status: status::EOPNOTSUPP };
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 1, 0, 0xFE, 0xFF];
    assert_eq!(response.encode(), bytes);
    assert_eq!(Response::decode(&bytes), response);
}

#[test]
fn segments_stay_inside_their_page() {
    let span = |first, last| Segment { grant: GrantRef(8), first, last }.span();
    assert_eq!(span(0, 7), Some((0, 4096)));
    assert_eq!(span(3, 3), Some((1536, 512)));
    for (first, last) in [(0, 8), (8, 8), (1, 0), (0, 255), (255, 255), (7, 6)] {
        assert_eq!(span(first, last), None, "{first} to {last}");
    }
}

#[test]
fn a_page_of_segments_is_copied() {
    let segments: Vec<Segment> =
        (0..512).map(|n| Segment { grant: GrantRef(n * 77), first: n as u8 % 8, last: 7 }).collect();
    let words: Vec<u64> = segments.iter().map(|segment| u64::from_ne_bytes(segment.encode())).collect();
    let mut copy = vec![Segment::default(); 512];
    // SAFETY: the words are as many, and aligned.
    unsafe { Segment::copy_from_page(words.as_ptr().cast(), &mut copy) };
    assert_eq!(copy, segments);
}

#[test]
fn the_words_of_xenstore() {
    for abi in [Abi::X86_32, Abi::X86_64] {
        assert_eq!(Abi::from_word(abi.word()), Some(abi));
    }
    assert_eq!(Abi::from_word("arm-abi"), None);
    assert_eq!(Abi::from_word(""), None);
}

mod there_and_back {
    use proptest::prelude::*;

    use super::*;

    fn segment() -> impl Strategy<Value = Segment> {
        (any::<u32>(), any::<u8>(), any::<u8>()).prop_map(|(grant, first, last)| Segment {
            grant: GrantRef(grant),
            first,
            last,
        })
    }

    fn request() -> impl Strategy<Value = Request> {
        let direct =
            (0u8..4, 0usize..=11, proptest::array::uniform11(segment())).prop_map(|(op, count, all)| {
                let count = if op < 2 { count.max(1) } else { count };
                let mut request = Request { op, segments: count as u16, ..Request::default() };
                request.direct[..count].copy_from_slice(&all[..count]);
                request
            });
        let indirect =
            (0u8..2, 1u16..=4096, proptest::array::uniform8(any::<u32>())).prop_map(|(op, count, all)| {
                let mut request = Request { op, segments: count, indirect: true, ..Request::default() };
                let pages = usize::from(count).div_ceil(512);
                request.grants[..pages].copy_from_slice(&all.map(GrantRef)[..pages]);
                request
            });
        let discard = (any::<u64>(), any::<u8>()).prop_map(|(discard_sectors, discard_flag)| Request {
            op: op::DISCARD,
            discard_sectors,
            discard_flag,
            ..Request::default()
        });
        (prop_oneof![direct, indirect, discard], any::<u64>(), any::<u64>())
            .prop_map(|(request, id, sector)| Request { id, sector, ..request })
    }

    proptest! {
        #[test]
        fn requests(request in request(), handle in any::<u16>(), wide in any::<bool>()) {
            let abi = if wide { Abi::X86_64 } else { Abi::X86_32 };
            let slot = request.encode(handle, abi);
            prop_assert!(slot.0[abi.request_len()..].iter().all(|byte| *byte == 0));
            prop_assert_eq!(Request::decode(&slot, abi), Ok(request));
        }
    }
}
