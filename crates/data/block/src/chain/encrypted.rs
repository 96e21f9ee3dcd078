//! Sectors of an encrypted leaf on their way to the storage, and of any encrypted layer on their way from it.
//!
//! A guest's memory holds plain text only: what is written is encrypted in buffers of the disk's own, of which there
//! are a bounded number; what is read is decrypted where it was read to.

use std::cell::{Cell, RefCell};
use std::io;

use tapio_format::live::Layer;
use tapio_format::vhd::crypt::DiskCipher;
use tapio_ring::{Notify, PageBuf, Segments, Storage, Tasks};
use tapio_types::{SECTOR_LEN, Span};

use super::Piece;

/// Bytes of a buffer; longer writes go in several pieces.
const BUFFER_LEN: usize = 128 << 10;
/// Buffers of a disk, at most; made when they are needed first.
const BUFFERS_MAX: usize = 16;
/// What is decrypted at once.
const PIECE_LEN: u64 = 4096;

/// Memory to encrypt in.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: RefCell<Vec<PageBuf>>,
    made: Cell<usize>,
    returned: Notify,
}

impl Buffers {
    async fn take(&self, tasks: &Tasks) -> PageBuf {
        loop {
            if let Some(buffer) = self.free.borrow_mut().pop() {
                return buffer;
            }
            if self.made.get() < BUFFERS_MAX {
                self.made.set(self.made.get() + 1);
                return PageBuf::zeroed(BUFFER_LEN);
            }
            self.returned.wait(tasks).await;
        }
    }

    fn give(&self, buffer: PageBuf, tasks: &Tasks) {
        self.free.borrow_mut().push(buffer);
        self.returned.notify_all(tasks);
    }

    /// Writes `what` for the `span` of the disk at `offset`, encrypted.
    pub(super) async fn write<S: Storage>(
        &self,
        leaf: &Layer<S>,
        cipher: &DiskCipher,
        tasks: &Tasks,
        (span, offset): (Span, u64),
        what: Piece,
    ) -> io::Result<()> {
        let mut buffer = self.take(tasks).await;
        let mut done = 0;
        let mut result = Ok(());
        while done < span.len && result.is_ok() {
            let len = (span.len - done).min(BUFFER_LEN as u64);
            let bytes = &mut buffer[..len as usize];
            match what {
                Piece::Data(from) => from.slice(done, len).copy_to(bytes),
                Piece::Zero(_) => bytes.fill(0),
            }
            cipher.encrypt((span.start + done) / SECTOR_LEN, bytes);
            (buffer, result) = leaf.store().write_from(offset + done, buffer, 0..len as usize).await;
            done += len;
        }
        self.give(buffer, tasks);
        result
    }
}

/// Decrypts what was read from the byte `at` of the disk on.
pub(super) fn decrypt(cipher: &DiskCipher, at: u64, data: Segments) {
    let mut bytes = [0; PIECE_LEN as usize];
    let mut done = 0;
    while done < data.len() {
        let piece = data.slice(done, PIECE_LEN.min(data.len() - done));
        let bytes = &mut bytes[..piece.len() as usize];
        piece.copy_to(bytes);
        cipher.decrypt((at + done) / SECTOR_LEN, bytes);
        piece.copy_from(bytes);
        done += piece.len();
    }
}
