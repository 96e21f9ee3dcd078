//! A larger disk while it is in use, and the two copies of the footer that say how large it is.
//!
//! | step | what | why it must come here |
//! |---|---|---|
//! | 1 | the table entries of the new blocks say "unallocated", durable | whatever once stood there is believed from
//! step 2 on |
//! | 2 | the footer at the end, durable | this is the one that counts |
//! | 3 | its copy at the beginning, durable | a power cut before leaves the old one; the next opening for writing
//! copies |

use tapio_ring::{PageBuf, Storage};
use tapio_types::SECTOR_LEN;

use super::VhdLayer;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::{FOOTER_LEN, VIRTUAL_LEN_MAX};

impl<S: Storage> VhdLayer<S> {
    /// Makes the disk `len` bytes long, rounded up to whole sectors, if the table has entries for that.
    ///
    /// # Errors
    /// `InvalidArgument` for a size that a VHD cannot have or that is smaller, `NeedsPause` where the table is too
    /// small; the storage's: then the disk has its old size, and perhaps a footer of the new one.
    pub async fn grow(&self, len: u64) -> Result<()> {
        let writer = self.writer()?;
        // The footer goes to the end that the device has now: one of the old size that is there already would count.
        self.look_for_room().await?;
        let now = self.virtual_len();
        let len = len.checked_next_multiple_of(SECTOR_LEN).unwrap_or(u64::MAX);
        if len > VIRTUAL_LEN_MAX || len < now {
            let detail =
                format!("a VHD of {now} bytes cannot grow to {len}: it has {VIRTUAL_LEN_MAX} bytes at most");
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        let Ok(entries) = self.header.borrow().entries_for(len) else {
            let detail = format!(
                "the block table has {} entries, too few for {len} bytes: pause the disk, use 'vhd-util resize -j', \
                 resume it",
                self.header.borrow().entries_max
            );
            return Err(FormatError::new(FormatErrorKind::NeedsPause, detail));
        };
        // The end of the file is moved by one at a time.
        while writer.reserve.busy.replace(true) {
            writer.reserve.done.wait(&self.tasks).await;
        }
        let grown = self.grow_within_table(len, entries).await;
        writer.reserve.busy.set(false);
        writer.reserve.done.notify_all(&self.tasks);
        grown
    }

    async fn grow_within_table(&self, len: u64, entries: u32) -> Result<()> {
        self.clear_entries(entries).await?;
        if let Ok(writer) = self.writer() {
            writer.dirty.borrow_mut().grow(entries);
        }
        self.table.grow(entries);
        let old = *self.footer.borrow();
        *self.footer.borrow_mut() = old.resized(len);
        let written = async {
            self.write_footer(self.store.len() - FOOTER_LEN as u64).await?;
            self.flush().await?;
            self.write_copy(self.writer()?.log.mark()).await?;
            self.flush().await
        };
        if let Err(error) = written.await {
            *self.footer.borrow_mut() = old;
            return Err(error);
        }
        self.len.set(len);
        Ok(())
    }

    /// Step 1. The sector of the table that holds both old and new entries is written as memory has it.
    async fn clear_entries(&self, entries: u32) -> Result<()> {
        const PIECE: usize = 256 << 10;
        let old = self.table.len();
        if entries == old {
            return Ok(());
        }
        let failed = |error| FormatError::io("cannot clear the new entries of the block table", error);
        let table_offset = self.header.borrow().table_offset;
        let mut at = table_offset + (u64::from(old) * 4).next_multiple_of(SECTOR_LEN);
        let end = table_offset + (u64::from(entries) * 4).next_multiple_of(SECTOR_LEN);
        let mut page = PageBuf::zeroed(PIECE.min((end.saturating_sub(at)) as usize));
        page.fill(0xff);
        while at < end {
            let len = (end - at).min(page.len() as u64);
            let written;
            (page, written) = self.store.write_from(at, page, 0..len as usize).await;
            written.map_err(failed)?;
            at += len;
        }
        if !u64::from(old).is_multiple_of(SECTOR_LEN / 4) {
            // Entries behind the old end in its last sector: a batch writes them as unallocated, with what it knows.
            self.writer()?.dirty.borrow_mut().mark_table(old - 1);
            self.sync().await?;
        }
        self.flush().await
    }
}
