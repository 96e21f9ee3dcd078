//! Whether the image is as the process left it whose intent log is here, and our own claim on it.
//!
//! Records are applied only to the state of the image that they belong to, and all of them or none:
//!
//! | what is compared | what a difference means |
//! |---|---|
//! | the mark in the copy of the footer, with the log's | another process of ours, or a tool, has written the image |
//! | the footer at the end, with that copy | tapdisk has it open, was killed, or took the mark over from the copy |
//! | the length, with what it was and was about to be | a program that leaves footers alone has changed it |
//! | every record, with the table and with all others | damage, or a program that leaves no other trace |
//!
//! An image on which the log does not fit is opened all the same: it is valid, and as the last writer left it. What
//! the records speak of was answered and never flushed, and that writer has built on an image without it; to put it
//! there now would change sectors under whatever has read them since. The records are set aside, not deleted.
//!
//! While the image is open for writing it has our mark:
//!
//! | step | what | why it must come here |
//! |---|---|---|
//! | 1 | what the old log says is in place and durable | until step 3 the old mark counts: a death repeats this |
//! | 2 | the log has the new mark and the old one | a death right after step 3 must find it there |
//! | 3 | the copy of the footer has the new mark | |
//! | 4 | the log has only the new mark, and no records | from here on records belong to the new mark |
//! | 5 | at closing: all is durable and the log cleared, then the mark goes, then the log | no records, no log |

use tapio_ring::{PageBuf, Storage};
use tapio_types::SECTOR_LEN;

use super::intent::{Intent, Left};
use super::{VhdLayer, Writer};
use crate::error::{FormatError, Result};
use crate::vhd::mark::{Mark, unmarked};
use crate::vhd::{FOOTER_LEN, Footer, layout};

/// What stands where the footer belongs.
#[expect(clippy::large_enum_variant, reason = "there is one, while an image is opened")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// A footer.
    Footer(Footer),
    /// Zeroes: the file was just made longer.
    Blank,
    Other,
}

impl<S: Storage> VhdLayer<S> {
    async fn sector_at(&self, at: u64) -> Result<[u8; FOOTER_LEN]> {
        let (page, read) = self.store.read_into(at, PageBuf::zeroed(FOOTER_LEN), 0..FOOTER_LEN).await;
        read.map_err(|error| FormatError::io("cannot read a footer", error).with_offset(at))?;
        let mut bytes = [0; FOOTER_LEN];
        bytes.copy_from_slice(&page[..FOOTER_LEN]);
        Ok(bytes)
    }

    /// The copy of the footer, if there is a usable one.
    pub(super) async fn copy_of_footer(&self) -> Result<Option<Footer>> {
        Ok(Footer::decode(&self.sector_at(0).await?).ok().map(|(footer, _)| footer))
    }

    /// Whether the image is as `left` has it. The inner error says why it is not.
    pub(super) async fn fits(&self, left: &Left) -> Result<std::result::Result<(), String>> {
        let copy = self.copy_of_footer().await?;
        let len = self.store.len();
        let end = match len.is_multiple_of(SECTOR_LEN) {
            true => self.sector_at(len - FOOTER_LEN as u64).await?,
            false => [0xff; FOOTER_LEN],
        };
        let end = match Footer::decode(&end) {
            Ok((footer, _)) => End::Footer(footer),
            Err(_) if end.iter().all(|&byte| byte == 0) => End::Blank,
            Err(_) => End::Other,
        };
        let may_be_longer = !self.store.info().resizable;
        Ok(belongs(left, copy.as_ref(), (len, may_be_longer), end).and_then(|()| self.agrees(&left.intents)))
    }

    /// Every record fits to the table and to all others.
    fn agrees(&self, intents: &[Intent]) -> std::result::Result<(), String> {
        let block_len = self.header.borrow().block_len;
        let (sectors, span_len) = (block_len / SECTOR_LEN as u32, layout::block_span_len(block_len));
        let begin = layout::metadata_end(&self.header.borrow(), self.batmap.as_ref());
        let mut places = Vec::new();
        self.table.for_each_allocated(|block, sector| places.push((sector, block)));
        for intent in intents {
            let (block, sector) = (intent.block, intent.sector);
            if block >= self.table.len() || u32::from(intent.first) + u32::from(intent.count) > sectors {
                return Err(format!("a record is about sectors of block {block} that it does not have"));
            }
            match self.table.sector(block) {
                Some(known) if known == sector => {}
                Some(known) => {
                    return Err(format!(
                        "a record has block {block} at sector {sector}, the table at {known}"
                    ));
                }
                None => {
                    let at = u64::from(sector) * SECTOR_LEN;
                    let is_place = layout::place_block(at, block_len).is_ok_and(|place| place == sector);
                    if at < begin || at + span_len + FOOTER_LEN as u64 > self.store.len() || !is_place {
                        return Err(format!(
                            "a record has block {block} at sector {sector}, where no block can be"
                        ));
                    }
                    places.push((sector, block));
                }
            }
        }
        places.sort_unstable();
        places.dedup();
        for pair in places.windows(2) {
            let ((one, block), (other, second)) = (pair[0], pair[1]);
            if u64::from(other - one) * SECTOR_LEN < span_len {
                return Err(format!(
                    "with the records, blocks {block} and {second} overlap at sector {other}"
                ));
            }
        }
        Ok(())
    }

    /// Steps 2 to 4. Writes the copy of the footer anew also where it was another than the one at the end, because the
    /// power went while the disk grew.
    pub(super) async fn claim(&self, writer: &Writer, remarks: &mut Vec<String>) -> Result<()> {
        let copy = self.copy_of_footer().await?;
        let mark = Mark::draw(copy.as_ref().and_then(Mark::on));
        let agrees = copy.is_some_and(|copy| unmarked(&copy).encode() == self.footer.borrow().encode());
        writer.log.will_have_mark(mark);
        self.write_copy(Some(mark)).await?;
        if !agrees && !self.footer.borrow().is_old_creator() {
            remarks.push("the copy of the footer was another: it is written anew".into());
            self.flush().await?;
        }
        writer.log.has_mark();
        let len = self.store.len();
        writer.log.will_have_len(len, len);
        Ok(())
    }

    /// The second half of step 5. Nothing is in the log any more.
    pub(super) async fn release(&self) -> Result<()> {
        self.write_copy(None).await?;
        self.flush().await
    }

    /// Writes the copy of the footer, with `mark` on it.
    pub(super) async fn write_copy(&self, mark: Option<Mark>) -> Result<()> {
        let mut copy = *self.footer.borrow();
        if copy.is_old_creator() {
            // Early creators keep different things in the two.
            copy = self.copy_of_footer().await?.map_or(copy, |copy| unmarked(&copy));
        }
        let mut page = PageBuf::zeroed(FOOTER_LEN);
        page.copy_from_slice(&mark.map_or(copy, |mark| mark.put_on(&copy)).encode());
        let (_, written) = self.store.write_from(0, page, 0..FOOTER_LEN).await;
        written.map_err(|error| FormatError::io("cannot write the copy of the footer", error).with_offset(0))
    }
}

/// The first three rows of the module's first table.
///
/// A device `may_be_longer`: its owner makes it so while the image is in use, and puts the footer at its end. One that
/// was being made shorter may have become longer again.
fn belongs(
    left: &Left,
    copy: Option<&Footer>,
    (len, may_be_longer): (u64, bool),
    end: End,
) -> std::result::Result<(), String> {
    let mark = copy.and_then(Mark::on);
    let (Some(copy), true) = (copy, mark.is_some_and(|mark| left.marks.contains(&mark.number()))) else {
        return Err("another program has opened the image for writing since".into());
    };
    let shortest = left.lens[0].min(left.lens[1]);
    let longest = left.lens[0].max(left.lens[1]);
    match end {
        End::Footer(footer) => {
            let same =
                |copy: &Footer| Footer { creator_os: footer.creator_os, ..*copy }.encode() == footer.encode();
            // Between two of its steps a disk that grows has its new size only at the end.
            let agrees = footer.is_old_creator() || same(copy) || same(&copy.resized(footer.current_len));
            if Mark::on(&footer).is_some() || !agrees {
                return Err("another program has written the footer since".into());
            }
            if !(left.lens.contains(&len) || may_be_longer && len > shortest) {
                return Err(format!("another program has made the image {len} bytes long since"));
            }
        }
        End::Blank if (shortest..=longest).contains(&len) => {}
        End::Blank | End::Other => {
            return Err("another program has the image open for writing, or was killed".into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhd::DiskType;

    #[test]
    fn a_log_belongs_to_the_state_that_its_process_left_and_to_no_other() {
        let footer = Footer::new(DiskType::Dynamic, 64 << 20);
        let (mark, other) = (Mark::draw(None), Mark::draw(None));
        let left = Left { intents: Vec::new(), marks: [7, mark.number()], lens: [4096, 8192] };
        let copy = mark.put_on(&footer);
        let end = End::Footer(footer);
        let fits = |copy: Option<&Footer>, len, end| belongs(&left, copy, (len, false), end).is_ok();
        assert!(belongs(&left, Some(&copy), (12288, true), end).is_ok(), "a device that was made longer");
        assert!(belongs(&left, Some(&copy), (6144, true), end).is_ok(), "shorter, and longer again");
        assert!(belongs(&left, Some(&copy), (2048, true), end).is_err());
        assert!(belongs(&left, Some(&copy), (12288, true), End::Blank).is_err());
        assert!(fits(Some(&copy), 4096, end) && fits(Some(&copy), 8192, end));
        assert!(fits(Some(&copy), 4096, End::Footer(footer.resized(128 << 20))), "it was growing");
        assert!(fits(Some(&copy), 6144, End::Blank), "it was being made longer");
        assert!(!fits(Some(&copy), 6144, end) && !fits(Some(&copy), 12288, End::Blank));
        assert!(!fits(None, 4096, end) && !fits(Some(&footer), 4096, end));
        assert!(!fits(Some(&other.put_on(&footer)), 4096, end), "another host's process");
        assert!(!fits(Some(&copy), 4096, End::Other), "tapdisk's footer while it has the image open");
        assert!(!fits(Some(&copy), 4096, End::Footer(copy)), "taken over from the copy");
        let hidden = Footer { hidden: 1, ..footer };
        assert!(!fits(Some(&copy), 4096, End::Footer(hidden)), "written at the end alone");
    }
}
