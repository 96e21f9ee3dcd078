//! What an NBD server says to the storage, and the beginning of TLS with a pre-shared key.

use tapio_front::nbd::wire::{Style, chunk};

use super::Shelf;
use super::talk::{piece, simple};

pub(super) fn put_into(shelf: &mut Shelf) {
    replies(shelf);
    hello(shelf);
}

/// The storage's name for its request of this number: one place in its table, used again and again.
const fn cookie(number: u64) -> u64 {
    number << 32
}

fn replies(shelf: &mut Shelf) {
    let target = "nbd_store";
    // Read, write, zero, flush, and the same again.
    let mut stream = vec![0];
    for number in 1..=8 {
        stream.extend(simple(0, cookie(number), if number % 4 == 1 { &[1; 8192] } else { &[] }));
    }
    shelf.put(target, "simple", stream);
    shelf.put(
        target,
        "simple-errors",
        [vec![0], simple(5, cookie(1), &[]), simple(28, cookie(2), &[])].concat(),
    );
    for (name, style, bits) in [("structured", Style::Structured, 1u8), ("extended", Style::Extended, 2)] {
        let data = |at: u64, len: usize| [&at.to_be_bytes()[..], &vec![9; len]].concat();
        let mut stream = vec![bits];
        // Read, extents, write, zero, flush.
        stream.extend(piece(style, false, chunk::OFFSET_DATA, cookie(1), &data(4096, 4096)));
        let hole = [&0u64.to_be_bytes()[..], &4096u32.to_be_bytes()].concat();
        stream.extend(piece(style, true, chunk::OFFSET_HOLE, cookie(1), &hole));
        let extents = [1u32, 4096, 0, 8192, 3].map(u32::to_be_bytes).concat();
        stream.extend(piece(style, true, chunk::BLOCK_STATUS, cookie(2), &extents));
        for number in 3..=5 {
            stream.extend(piece(style, true, chunk::NONE, cookie(number), &[]));
        }
        let error = [&22u32.to_be_bytes()[..], &4u16.to_be_bytes(), b"nope"].concat();
        stream.extend(piece(style, true, chunk::ERROR, cookie(6), &error));
        let extents =
            [&1u32.to_be_bytes()[..], &1u32.to_be_bytes(), &(1u64 << 20).to_be_bytes(), &[0; 8]].concat();
        stream.extend(piece(style, true, chunk::BLOCK_STATUS_EXT, cookie(7), &extents));
        stream.extend(simple(0, cookie(8), &[]));
        shelf.put(target, name, stream);
        // Outside of what was asked for, on either side.
        for (what, at) in [("before", u64::MAX - 100), ("behind", 8000)] {
            let mut stream = vec![bits];
            stream.extend(piece(style, true, chunk::OFFSET_DATA, cookie(1), &data(at, 512)));
            shelf.put(target, &format!("{name}-{what}"), stream);
        }
    }
}

fn counted(width: usize, bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[4 - width..], bytes].concat()
}

fn hello(shelf: &mut Shelf) {
    let extension = |number: u16, data: &[u8]| [&number.to_be_bytes()[..], &counted(2, data)].concat();
    let share = [&0x001du16.to_be_bytes()[..], &counted(2, &[9; 32])].concat();
    let identity = [counted(2, b"alice"), vec![0; 4]].concat();
    let keys = [counted(2, &identity), counted(2, &counted(1, &[5; 32]))].concat();
    let extensions = [
        extension(43, &counted(1, &0x0304u16.to_be_bytes())),
        extension(45, &counted(1, &[1])),
        extension(51, &counted(2, &share)),
        extension(41, &keys),
    ]
    .concat();
    let suites = counted(2, &[0x13, 0x01, 0x13, 0x03]);
    let body = [&[3, 3][..], &[7; 32], &[0], &suites, &[1, 0], &counted(2, &extensions)].concat();
    let message = [&[1][..], &counted(3, &body)].concat();
    shelf.put("tls_psk", "client-hello", [&[22, 3, 1][..], &counted(2, &message)].concat());
    let extensions =
        [extension(43, &0x0304u16.to_be_bytes()), extension(51, &share), extension(41, &[0, 0])].concat();
    let body = [&[3, 3][..], &[7; 32], &[0], &[0x13, 0x01, 0], &counted(2, &extensions)].concat();
    let message = [&[2][..], &counted(3, &body)].concat();
    let ignored = [20, 3, 3, 0, 1, 1];
    let server = [&[22, 3, 3][..], &counted(2, &message), &ignored, &[23, 3, 3, 0, 40], &[8; 40]].concat();
    shelf.put("tls_psk", "server-hello", server);
    shelf.put("tls_psk", "alert", [21, 3, 3, 0, 2, 2, 115]);
}
