//! Discards and zeroes: what a guest no longer needs goes back to the file system, whole blocks of a VHD with their
//! place in it.
//!
//! A write of zeroes finds some of its sectors absent: they were never written, or their block was given back.
//! The data of such a block can come back if the process dies, until its removal is durable and out of the intent log:
//!
//! | step | what | why it must come here |
//! |---|---|---|
//! | 1 | what is there is made zero | while that is written, a discard beside it may give back the rest of the block |
//! | 2 | what is absent is only noted | so whether data can come back is known after the last look, not before |
//! | 3 | if anything was absent: every block that was given back is forgotten | the guest is answered now |

use tapio_format::Result;
use tapio_format::live::Layer;
use tapio_ring::{Storage, Zeroing};
use tapio_types::Span;

use super::{Chain, Piece, Target};
use crate::meter::Meter;

impl<S: Storage> Chain<S> {
    /// Makes `span` read as zero.
    ///
    /// # Errors
    /// As [`Chain::write`].
    pub async fn write_zeroes(&self, span: Span, how: Zeroing, meter: &Meter) -> Result<()> {
        self.clear(span, how, true, meter).await
    }

    /// Releases what the leaf keeps for `span`; what it does not keep stays as it is.
    ///
    /// # Errors
    /// As [`Chain::write`].
    pub async fn discard(&self, span: Span, meter: &Meter) -> Result<()> {
        // A VHD's blocks are given back by what they are known to read as afterwards; of a raw image nothing is known.
        let how = match self.leaf() {
            Layer::Raw(_) | Layer::Shared(_) => Zeroing::Discard,
            Layer::Vhd(_) => Zeroing::Unmap,
        };
        self.clear(span, how, false, meter).await
    }

    /// `zeroed`: all of it must read as zero afterwards. Without it what lies below the leaf may stay, and of an
    /// encrypted leaf everything but whole blocks, where zeroes would have to be written as ciphertext.
    async fn clear(&self, span: Span, how: Zeroing, zeroed: bool, meter: &Meter) -> Result<()> {
        let _visit = self.leaf().enter();
        let is_encrypted = self.leaf().cipher().is_some();
        let mut any_absent = false;
        let mut left = span;
        while !left.is_empty() {
            let (len, target) = self.resolve(left).await?;
            let is_concerned = match target {
                Target::Zero => false,
                Target::Data { layer, .. } => layer == 0 || zeroed,
            };
            if !is_concerned {
                any_absent = true;
                left = left.skip(len);
                continue;
            }
            // A block at a time, so that each can be given back.
            let piece = match self.leaf() {
                Layer::Raw(_) | Layer::Shared(_) => left,
                Layer::Vhd(vhd) => {
                    let (_, block) = vhd.block_span(left.start);
                    left.prefix(block.start + block.len - left.start)
                }
            };
            if zeroed || !is_encrypted {
                any_absent |= self.clear_piece(piece, how, zeroed, meter).await?;
            }
            // Of an encrypted block the ciphertext is still there, and a process that dies now may bring it back.
            if how != Zeroing::Keep && !(zeroed && is_encrypted) {
                Box::pin(self.give_back(piece.start, span)).await?;
            }
            left = left.skip(piece.len);
        }
        if zeroed && any_absent {
            self.forget_freed().await?;
        }
        Ok(())
    }

    /// Waits until nothing that a guest does not see any more could come back if the process died: in the leaf, and in
    /// images that were the leaf a moment ago.
    async fn forget_freed(&self) -> Result<()> {
        for link in self.links[..1].iter().chain(self.unsettled()) {
            if let Layer::Vhd(image) = &link.layer
                && image.has_freed_data()
            {
                Box::pin(image.forget_freed()).await?;
            }
        }
        Ok(())
    }

    /// Writes zeroes wherever `span`, which lies in one block, has data. Returns whether some of it had none.
    async fn clear_piece(&self, span: Span, how: Zeroing, zeroed: bool, meter: &Meter) -> Result<bool> {
        let mut any_absent = false;
        let mut left = span;
        while !left.is_empty() {
            let (len, target) = self.resolve(left).await?;
            let mut piece = left.prefix(len);
            if let Target::Data { layer, .. } = target
                && (layer == 0 || zeroed)
            {
                let extent = self.prepare(piece).await?;
                piece = piece.prefix(extent.len);
                self.write_piece(extent, piece, Piece::Zero(how), meter).await?;
            } else {
                any_absent = true;
            }
            left = left.skip(piece.len);
        }
        Ok(any_absent)
    }

    /// Gives the block at `at` back where nothing is lost by that, after `asked` was cleared.
    async fn give_back(&self, at: u64, asked: Span) -> Result<()> {
        let Layer::Vhd(leaf) = self.leaf() else { return Ok(()) };
        // What would come to light may not be durable yet. And a leaf that another is merged into is read from above.
        if self.links.iter().any(|link| link.is_volatile()) {
            return Ok(());
        }
        let (block, kept) = leaf.block_span(at);
        let all = asked.start <= kept.start && asked.start + asked.len >= kept.start + kept.len;
        let look = leaf.look(block).await;
        // A parent's old data must not come to light.
        if leaf.may_give_back(block, all, look)
            && self.is_zero_below(kept).await?
            && leaf.give_back(block, all, look)
        {
            leaf.settle().await?;
        }
        Ok(())
    }

    /// Whether all layers below the leaf read as zero in `span`, as far as that is known without reading.
    async fn is_zero_below(&self, span: Span) -> Result<bool> {
        let mut left = span;
        while !left.is_empty() {
            let (mut len, target) = self.resolve_from(1, left).await?;
            if let Target::Data { layer, offset } = target {
                let layer = &self.links[layer].layer;
                let (known, is_data) = layer.store().data_run(Span::new(offset, len)).await;
                if is_data || layer.cipher().is_some() {
                    return Ok(false);
                }
                len = known;
            }
            left = left.skip(len);
        }
        Ok(true)
    }
}
