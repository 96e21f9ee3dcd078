//! An image lets go of everything it holds: what is below it has the same, and comes to light.
//!
//! | step | what | why it must come here |
//! |---|---|---|
//! | 1 | bitmaps and table are made durable, the intent log is cleared | a record would put its block back when the process dies |
//! | 2 | the batmap says that no block is whole, durable | what is not there must not be called whole |
//! | 3 | no block has a place, durable | a part of this is as good as all of it, because what is below reads the same |

use tapio_ring::Storage;

use super::{VhdLayer, Writer};
use crate::error::{FormatError, FormatErrorKind, Result};

impl<S: Storage> VhdLayer<S> {
    /// Lets go of everything the image holds: from now on it reads as its parent alone, or as zero. Nothing may be
    /// in flight, and whatever is below must read the same, durably. Durable when it returns; a power cut before leaves
    /// some blocks there and others not.
    ///
    /// # Errors
    /// `ReadOnly` unless it is open for writing; the storage's. Then it holds what it held, and until its storage says
    /// so again no write to it is answered.
    pub async fn empty(&self) -> Result<()> {
        let writer = self.writer()?;
        // A search for free places must not find those of blocks that may come back.
        while writer.reserve.busy.replace(true) {
            writer.reserve.done.wait(&self.tasks).await;
        }
        let emptied = self.empty_in_order(writer).await;
        writer.reserve.busy.set(false);
        writer.reserve.done.notify_all(&self.tasks);
        emptied
    }

    async fn empty_in_order(&self, writer: &Writer) -> Result<()> {
        self.forget_freed().await?;
        self.sync().await?;
        if !writer.is_clean() {
            let detail = "the image is being written while it is to be emptied";
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        writer.log.clear_all();
        let mut blocks = Vec::new();
        self.table.for_each_allocated(|block, sector| blocks.push((block, sector)));
        // Which are whole is read from their bitmaps again, should they have to come back.
        blocks.iter().for_each(|&(block, _)| self.table.clear_full(block));
        writer.dirty.borrow_mut().batmap = true;
        self.write_batmap().await?;
        self.sync().await?;
        self.bitmaps.borrow_mut().forget();
        {
            let mut dirty = writer.dirty.borrow_mut();
            for &(block, _) in &blocks {
                self.table.clear(block);
                dirty.mark_table(block);
            }
        }
        let emptied = self.sync().await;
        if emptied.is_err() {
            let mut dirty = writer.dirty.borrow_mut();
            for &(block, sector) in &blocks {
                self.table.set_sector(block, sector);
                dirty.mark_table(block);
            }
            writer.owes_table.set(!blocks.is_empty());
        }
        emptied
    }
}
