//! Archives of VMs, and the records in them.

use tapio_xva::{CHUNK_LEN_MAX, Decompressor, Document, Places, Reader};

/// Bytes of all pieces that are looked at: a little of a compressed stream can be much.
const TOTAL_MAX: u64 = 64 << 20;

/// An archive is read to its end: pieces stay within bounds and on their disk, and are read again as they are written.
pub(super) fn xva(bytes: &[u8]) {
    let Ok(stream) = Decompressor::new(bytes) else { return };
    let Ok((mut archive, document)) = Reader::open(stream, false) else { return };
    check(&document);
    let size = 1 << 40;
    let (mut places, mut of, mut end) = (Places::new(size), String::new(), 0);
    let mut total = 0;
    while let Ok(Some(chunk)) = archive.next_chunk() {
        assert!(chunk.data.len() <= CHUNK_LEN_MAX);
        if chunk.disk != of {
            (places, of, end) = (Places::new(size), chunk.disk.to_owned(), 0);
        }
        let Ok(place) = places.place(chunk.number, chunk.data.len() as u64) else { return };
        if let Some(at) = place {
            assert!(at >= end && at + chunk.data.len() as u64 <= size, "pieces lie behind each other");
            end = at + chunk.data.len() as u64;
        }
        total += chunk.data.len() as u64;
        if total > TOTAL_MAX {
            return;
        }
    }
}

/// Records are written and read again as they were.
pub(super) fn xva_document(bytes: &[u8]) {
    if let Ok(document) = Document::read(bytes) {
        check(&document);
    }
}

fn check(document: &Document) {
    let text = document.write();
    let again = Document::read(text.as_bytes()).expect("our own document");
    let second = again.write();
    let third = Document::read(second.as_bytes()).expect("our own document");
    assert_eq!(third.write(), second, "the same once it is ours");
    assert_eq!(again.objects.len(), document.objects.len());
}
