//! The batmap on disk: which blocks are present as a whole. Other tools and the next opening read it; while the image
//! is open the table in memory knows.

use tapio_ring::{PageBuf, Storage};

use super::VhdLayer;
use crate::error::{FormatError, Result};
use crate::vhd::{BatmapHeader, FOOTER_LEN, bitmap};

impl<S: Storage> VhdLayer<S> {
    /// Writes the batmap: one bit for each block that is present as a whole. The bitmaps that say so are durable.
    pub(super) async fn write_batmap(&self) -> Result<()> {
        let Some(batmap) = &self.batmap else { return Ok(()) };
        let mut page = PageBuf::zeroed(FOOTER_LEN + batmap.len() as usize);
        let map_len = batmap.len() as usize;
        let map = &mut page[FOOTER_LEN..];
        self.table.for_each_allocated(|block, _| {
            if self.table.is_full(block) && (block as usize) < map_len * 8 {
                bitmap::set(map, block as usize);
            }
        });
        self.put_batmap(batmap, page).await
    }

    /// Makes durable that none of `blocks` is full. Bits are only cleared: whatever part of that a power cut leaves has
    /// another sum than the header before or after says, so it is not believed.
    pub(super) async fn clear_in_batmap(&self, blocks: &[u32]) -> Result<()> {
        let Some(batmap) = self.batmap.as_ref().filter(|_| !blocks.is_empty()) else { return Ok(()) };
        let map_len = batmap.len() as usize;
        let page = PageBuf::zeroed(FOOTER_LEN + map_len);
        let (mut page, read) =
            self.store.read_into(batmap.offset, page, FOOTER_LEN..FOOTER_LEN + map_len).await;
        read.map_err(|error| FormatError::io("cannot read the batmap", error).with_offset(batmap.offset))?;
        let map = &mut page[FOOTER_LEN..];
        let mut any = false;
        for block in blocks.iter().map(|&block| block as usize).filter(|&block| block < map_len * 8) {
            any |= bitmap::test(map, block);
            bitmap::clear(map, block);
        }
        if !any {
            return Ok(());
        }
        self.put_batmap(batmap, page).await?;
        self.flush().await
    }

    /// Writes the map that `page` holds behind room for its header, and that header.
    async fn put_batmap(&self, batmap: &BatmapHeader, mut page: PageBuf) -> Result<()> {
        let len = FOOTER_LEN + batmap.len() as usize;
        let (head, map) = page.split_at_mut(FOOTER_LEN);
        let mut header = *batmap;
        header.checksum = header.map_checksum(&map[..batmap.len() as usize], self.virtual_len());
        head.copy_from_slice(&header.encode());
        let at = crate::vhd::batmap::header_offset(&self.header.borrow());
        let failed = |error| FormatError::io("cannot write the batmap", error).with_offset(at);
        if batmap.offset == at + FOOTER_LEN as u64 {
            return self.store.write_from(at, page, 0..len).await.1.map_err(failed);
        }
        let (page, written) = self.store.write_from(batmap.offset, page, FOOTER_LEN..len).await;
        written.map_err(failed)?;
        self.store.write_from(at, page, 0..FOOTER_LEN).await.1.map_err(failed)
    }
}
