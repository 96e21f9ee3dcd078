//! What the kernel says to devices of the host: requests by FUSE, answers by netlink.

use tapio_front::device::fuse::wire::{Call, HEAD_LEN, Header, IN_HEADER_LEN, TRANSFER_MAX};
use tapio_front::device::nbd::netlink;

/// A request as it is received. What is read from it lies in it, and nothing is read from what is cut short.
pub fn fuse_request(bytes: &[u8]) {
    let Some(header) = Header::parse(bytes) else {
        assert!(bytes.len() < IN_HEADER_LEN);
        return;
    };
    let body = &bytes[IN_HEADER_LEN..];
    let Some(call) = Call::parse(&header, body) else {
        assert!(bytes.len() < HEAD_LEN + TRANSFER_MAX, "every call is shorter than its longest data");
        return;
    };
    match call {
        Call::Lookup { name } => assert!(name.len() <= body.len() && !name.contains(&0)),
        Call::Write { .. } => assert!(header.is_write()),
        call => assert!(!header.is_write(), "{call:?}"),
    }
    // The same bytes say the same again, whatever follows them.
    let mut longer = body.to_vec();
    longer.push(0);
    assert_eq!(Call::parse(&header, &longer), Some(call));
}

/// An answer to a command.
pub fn netlink_answer(bytes: &[u8]) {
    if let Ok(Some(index)) = netlink::foreign(bytes) {
        assert!(bytes.windows(4).any(|window| window == index.to_ne_bytes()), "a number out of nowhere");
    }
}
