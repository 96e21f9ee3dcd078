//! What is asked of the file apart from its data.

use std::rc::Rc;

use tapio_block::Op;
use tapio_types::{SECTOR_LEN, Span};

use super::Server;
use crate::device::fuse::wire::{Answer, Call, Header, OPEN_DIRECT, OPEN_KEEP_CACHE};

/// The handle of a file that was opened past the page cache.
pub(super) const DIRECT: u64 = 1;
/// The handle of every other open file.
const CACHED: u64 = 0;
/// Searches for holes at once; further ones get an error that asks to try again.
const SEEKS_MAX: u32 = 16;
/// Extents that are asked for in one go.
const EXTENTS_MAX: usize = 256;
/// Longest piece that is looked at in one go.
const SEEK_LEN: u64 = 1 << 30;

const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32;
const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE as u32;

impl Server {
    pub(super) fn of_the_file(self: &Rc<Self>, header: &Header, call: Call<'_>) {
        let (unique, node) = (header.unique, self.node());
        match call {
            Call::Open { flags } => {
                let flags = flags as i32;
                if node.read_only && flags & libc::O_ACCMODE != libc::O_RDONLY {
                    return self.answer(unique, libc::EROFS);
                }
                let (handle, how) = match flags & libc::O_DIRECT {
                    0 => (CACHED, OPEN_KEEP_CACHE),
                    _ => (DIRECT, OPEN_DIRECT),
                };
                self.send(&mut Answer::open(unique, handle, how));
            }
            // The length is the disk's, and so are owner and mode; times are not kept.
            Call::SetAttr { len, harmless } => match (len, harmless) {
                (None, true) => self.send(&mut Answer::attr(unique, header.node, &node)),
                (Some(len), true) if len == node.len => {
                    self.send(&mut Answer::attr(unique, header.node, &node));
                }
                _ => self.answer(unique, libc::EPERM),
            },
            Call::Fsync => self.plain(unique, Op::Flush, Span::new(0, 0)),
            Call::Fallocate { offset, len, mode } => {
                let span = Span::new(offset, len);
                let unmap = match mode {
                    // A program that punches a hole may read it and count on zeroes, so that it is more than a hint.
                    mode if mode == PUNCH_HOLE | KEEP_SIZE => true,
                    mode if mode == ZERO_RANGE | KEEP_SIZE => false,
                    _ => return self.answer(unique, libc::EOPNOTSUPP),
                };
                if node.read_only {
                    return self.answer(unique, libc::EROFS);
                }
                // The kernel may ask beyond the end, where there is nothing to do.
                let span = span.prefix(node.len.saturating_sub(offset));
                if span.is_empty() {
                    return self.answer(unique, 0);
                }
                if !span.is_aligned(SECTOR_LEN) {
                    return self.answer(unique, libc::EINVAL);
                }
                self.plain(unique, Op::WriteZeroes { unmap, durable: false }, span);
            }
            Call::Seek { offset, whence } => self.seek(unique, offset, whence),
            _ => self.answer(unique, libc::ENOSYS),
        }
    }

    fn seek(self: &Rc<Self>, unique: u64, offset: u64, whence: u32) {
        let hole = match whence as i32 {
            libc::SEEK_HOLE => true,
            libc::SEEK_DATA => false,
            _ => return self.answer(unique, libc::EINVAL),
        };
        if self.seeks.get() >= SEEKS_MAX {
            return self.answer(unique, libc::EAGAIN);
        }
        self.seeks.set(self.seeks.get() + 1);
        let server = Rc::clone(self);
        self.port.tasks().spawn(async move {
            match server.find(offset, hole).await {
                Ok(at) => server.send(&mut Answer::new(unique, 0).u64(at)),
                Err(errno) => server.answer(unique, errno),
            }
            server.seeks.set(server.seeks.get() - 1);
        });
    }

    /// The first byte from `offset` that lies in a hole, or in data.
    async fn find(&self, offset: u64, hole: bool) -> Result<u64, i32> {
        let end = self.node().len;
        let mut at = offset / SECTOR_LEN * SECTOR_LEN;
        if offset >= end {
            return Err(libc::ENXIO);
        }
        while at < end {
            let span = Span::new(at, (end - at).min(SEEK_LEN));
            let extents = self.port.extents(span, EXTENTS_MAX).await.map_err(|error| error.errno())?;
            for extent in extents {
                if (extent.hole && extent.zero) == hole {
                    return Ok(at.max(offset));
                }
                if extent.len == 0 {
                    return Err(libc::EIO);
                }
                at += extent.len;
            }
        }
        // Behind the last byte there is a hole, and no data.
        if hole { Ok(end) } else { Err(libc::ENXIO) }
    }
}
