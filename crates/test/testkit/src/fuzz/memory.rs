//! The memory of a suspended guest, in a VDI that a client may have written.

use tapio_core::vms::MemoryHead;

/// The head of a memory image.
pub fn memory_head(bytes: &[u8]) {
    let room = bytes.len() as u64 + 4096;
    let Ok(head) = MemoryHead::decode(bytes, room) else { return };
    assert!(head.len <= room - 4096, "more data than there is room for");
    assert_eq!(MemoryHead::decode(&head.encode(), room), Ok(head), "it is read as it was written");
}
