//! A device that becomes shorter while the image is in use: what lies behind its last block is given back to the owner
//! of the device, which cuts it off afterwards.
//!
//! | step | what | why it must come here |
//! |---|---|---|
//! | 1 | no place behind the new end can be taken any more | the other steps take time |
//! | 2 | the intent log has the length of now and the one to come | a process that dies after step 3 or the cut has one |
//! | 3 | the footer is at the new end too, durable | a device that is cut there ends in a footer |
//! | 4 | the footer at the old end is zeroes, durable | the image would take its room back when it looks for some |
//! | 5 | the image ends at the new end | from here on its owner may cut the device |
//!
//! A process that opens the device between 4 and the cut takes the copy of the footer, and all of the device. So the
//! owner sees to it that none does while it cuts, and the successor of an owner that died puts a footer at the end.

use tapio_ring::{PageBuf, Storage};
use tapio_types::SECTOR_LEN;

use super::room::RoomWanted;
use super::{VhdLayer, Writer};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::{FOOTER_LEN as FOOTER_BYTES, layout};

const FOOTER_LEN: u64 = FOOTER_BYTES as u64;
/// What is offered at least.
pub(super) const SPARE_MIN: u64 = 16 << 20;

impl<S: Storage> VhdLayer<S> {
    /// Where the last block ends, and the last place that was a block's a moment ago.
    fn used_end(&self, writer: &Writer) -> u64 {
        let block_len = self.header.borrow().block_len;
        let span_len = layout::block_span_len(block_len);
        let end = writer.freed.pending_end(|sector| u64::from(sector) * SECTOR_LEN + span_len);
        self.data_end().max(end)
    }

    /// Bytes of the device that the image needs, with `ahead` bytes for blocks to come.
    pub(super) async fn enough(&self, writer: &Writer, ahead: u64) -> u64 {
        self.reclaim(writer).await;
        let end = self.used_end(writer);
        end.saturating_add(ahead).saturating_add(FOOTER_LEN).min(self.store.len())
    }

    /// Ends the image at the byte `to` of its device, which the image knows to have `from` bytes, so that the owner of
    /// the device can cut off what is behind.
    ///
    /// # Errors
    /// `InvalidArgument`: there is a block behind that end, the image has another length, or it is a file, and nothing
    /// has changed. The storage's: the device may be without a footer at its end, which its owner has to put there.
    pub async fn shorten(&self, from: u64, to: u64) -> Result<()> {
        let writer = self.writer()?;
        while writer.reserve.busy.replace(true) {
            writer.reserve.done.wait(&self.tasks).await;
        }
        let shortened = self.shorten_alone(writer, from, to).await;
        writer.reserve.busy.set(false);
        writer.reserve.done.notify_all(&self.tasks);
        self.room_was_given(writer, shortened.is_ok());
        shortened
    }

    async fn shorten_alone(&self, writer: &Writer, from: u64, to: u64) -> Result<()> {
        let refused = |detail: String| Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        self.reclaim(writer).await;
        let len = self.store.len();
        if self.store.info().resizable || writer.closing.get() || len != from {
            return refused(format!(
                "the image ends at byte {len}, and is not to end at {to} instead of {from}"
            ));
        }
        if to >= from || !to.is_multiple_of(layout::DATA_ALIGN) {
            return refused(format!("an image of {from} bytes does not become shorter by ending at {to}"));
        }
        let used = self.used_end(writer);
        let end = to - FOOTER_LEN;
        if used > end {
            return refused(format!("the image has blocks up to byte {used}: it cannot end at {to}"));
        }
        // Step 1.
        let place_end = |sector: u32| self.place_span(sector).end().unwrap_or(u64::MAX);
        let last = writer.reserve.keep_until(end, place_end).max(writer.freed.keep_until(end, place_end));
        writer.reserve.set_tail(used.max(last).min(writer.reserve.tail()));
        // Steps 2 and 3.
        writer.log.will_have_len(from, to);
        self.write_footer(end).await?;
        self.flush().await?;
        // Step 4.
        let at = from - FOOTER_LEN;
        let (_, written) = self.store.write_from(at, PageBuf::zeroed(FOOTER_BYTES), 0..FOOTER_BYTES).await;
        written.map_err(|error| {
            FormatError::io("cannot clear the footer at the old end", error).with_offset(at)
        })?;
        self.flush().await?;
        self.store.ends_at(to);
        Ok(())
    }

    /// What is offered to the owner of the device, if that is enough to be worth a change.
    pub(super) fn offer(&self, enough: u64) -> Option<RoomWanted> {
        let len = self.store.len();
        (len.saturating_sub(enough) >= SPARE_MIN).then_some(RoomWanted {
            len,
            wanted: enough,
            is_waiting: false,
        })
    }
}
