//! What kernels say to devices of the host.

use super::Shelf;

/// Opcodes of FUSE with as many bytes as their arguments have.
const CALLS: [(&str, u32, usize); 16] = [
    ("init", 26, 64),
    ("getattr", 3, 16),
    ("setattr", 4, 88),
    ("open", 14, 8),
    ("read", 15, 40),
    ("write", 16, 40 + 512),
    ("statfs", 17, 0),
    ("release", 18, 24),
    ("fsync", 20, 16),
    ("flush", 25, 24),
    ("opendir", 27, 8),
    ("readdir", 28, 40),
    ("interrupt", 36, 8),
    ("fallocate", 43, 32),
    ("lseek", 46, 24),
    ("unknown", 4096, 16),
];

pub fn put_into(shelf: &mut Shelf) {
    for (name, opcode, len) in CALLS {
        let arguments: Vec<u8> = (0..len).map(|at| if at % 8 == 0 { at as u8 } else { 0 }).collect();
        shelf.put("fuse_request", name, request(opcode, &arguments));
    }
    shelf.put("fuse_request", "lookup", request(1, b"disk\0"));
    let index = attribute(1, &5u32.to_le_bytes());
    let connected = message(0x1b, &[&[1, 1, 0, 0][..], &index].concat());
    let done = message(2, &[&0u32.to_le_bytes()[..], &[0; 16]].concat());
    shelf.put("netlink_answer", "connected", [connected, done].concat());
    shelf.put("netlink_answer", "refused", message(2, &[&(-16i32).to_le_bytes()[..], &[0; 16]].concat()));
    let family = [attribute(2, b"nbd\0"), attribute(1, &27u16.to_le_bytes())].concat();
    shelf.put("netlink_answer", "family", message(0x10, &[&[1, 2, 0, 0][..], &family].concat()));
}

fn request(opcode: u32, arguments: &[u8]) -> Vec<u8> {
    let len = 40 + arguments.len() as u32;
    let words = [len.to_le_bytes(), opcode.to_le_bytes()].concat();
    let node = [7u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
    [&words[..], &node, &[0; 16], arguments].concat()
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = (4 + value.len() as u16).to_le_bytes().to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn message(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (16 + payload.len() as u32).to_le_bytes().to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.resize(16, 0);
    bytes.extend(payload);
    bytes
}
