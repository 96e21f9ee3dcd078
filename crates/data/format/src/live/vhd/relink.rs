//! Changes of an image's place in its chain, while it is open.

use std::path::Path;

use tapio_ring::{PageBuf, Storage};
use tapio_types::SECTOR_LEN;

use super::VhdLayer;
use crate::error::{FormatError, Result, invalid};
use crate::vhd::locator::decode_path;
use crate::vhd::offline::ParentFacts;
use crate::vhd::offline::relink::{Room, Step, plan};
use crate::vhd::{FOOTER_LEN, KeyHash};

impl<S: Storage> VhdLayer<S> {
    /// Gives the image another parent, one through which it reads the same. Durable when it returns; before, it is
    /// under one of the two at every moment.
    ///
    /// # Errors
    /// `ReadOnly` unless it is open for writing; `InvalidArgument` for an image without a parent or one that would be
    /// its own; `OutOfSpace` without room for a longer path; the storage's.
    pub async fn relink(&self, parent: &ParentFacts) -> Result<()> {
        let writer = self.writer()?;
        if !self.has_parent || parent.uuid == self.uuid() {
            return Err(invalid("the image has no parent, or would become its own"));
        }
        let freed = writer.freed.first_place().map(|sector| u64::from(sector) * SECTOR_LEN);
        let ready = writer.reserve.first_place();
        let mut first_block = ready.into_iter().chain(freed).min();
        self.table.for_each_allocated(|_, sector| {
            let at = u64::from(sector) * SECTOR_LEN;
            first_block = Some(first_block.map_or(at, |first| first.min(at)));
        });
        // Behind the metadata new blocks are given their places at any moment.
        let room = Room { batmap: self.batmap.as_ref(), first_block, behind: None };
        let relink = plan(&self.header.borrow(), self.footer.borrow().data_offset, &room, parent)?;
        for step in &relink.steps {
            match step {
                Step::Write(at, bytes) => {
                    let mut page = PageBuf::zeroed(bytes.len().next_multiple_of(FOOTER_LEN));
                    page[..bytes.len()].copy_from_slice(bytes);
                    let len = page.len();
                    let (_, written) = self.store.write_from(*at, page, 0..len).await;
                    written.map_err(|error| {
                        FormatError::io("cannot record the new parent", error).with_offset(*at)
                    })?;
                }
                Step::Flush => {
                    let flushed = self.store.flush().await;
                    flushed.map_err(|error| FormatError::io("cannot make the new parent durable", error))?;
                }
                Step::Switch => {}
            }
        }
        *self.header.borrow_mut() = relink.header;
        Ok(())
    }

    /// Whether a change of parent was broken off: a locator names another file than the header does. Other tools, which
    /// go by locators before they look at UUIDs, may not find the parent then.
    ///
    /// # Errors
    /// The storage's.
    pub async fn is_half_relinked(&self) -> Result<bool> {
        let (name, locators) = {
            let header = self.header.borrow();
            (header.parent_name(), header.locators)
        };
        let Some(name) = name.filter(|_| self.has_parent) else { return Ok(false) };
        // Other programs may write all of the path there.
        let name = Path::new(&name).file_name();
        for entry in locators.iter().filter(|entry| entry.code.is_readable()) {
            // One without a proper place is damage, which `check` tells.
            let Ok((at, len)) = entry.path_span() else { continue };
            let begin = at - at % SECTOR_LEN;
            let within = (at - begin) as usize;
            let whole = (within + len).next_multiple_of(FOOTER_LEN);
            let (page, read) = self.store.read_into(begin, PageBuf::zeroed(whole), 0..whole).await;
            read.map_err(|error| FormatError::io("cannot read a parent locator", error).with_offset(begin))?;
            let Ok(path) = decode_path(entry.code, &page[within..][..len]) else { continue };
            if Path::new(&path).file_name() != name {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The blocks that are allocated here: how many, and how many of them are not in `other`.
    pub fn blocks_beside(&self, other: Option<&Self>) -> (u32, u32) {
        let mut missing = 0;
        self.table.for_each_allocated(|block, _| {
            let known = other.is_some_and(|other| {
                other.block_shift == self.block_shift
                    && block < other.table.len()
                    && other.table.sector(block).is_some()
            });
            missing += u32::from(!known);
        });
        (self.table.allocated(), missing)
    }

    /// Bytes between the last block and the footer of a storage that has its length for good.
    pub(crate) fn room(&self) -> u64 {
        self.store.len().saturating_sub(self.data_end() + FOOTER_LEN as u64)
    }

    /// The key that the image needs, if it is encrypted.
    pub fn key_hash(&self) -> KeyHash {
        self.batmap.as_ref().map_or_else(KeyHash::default, |batmap| batmap.key_hash)
    }

    /// The largest disk that its block table has room for, in bytes.
    pub fn len_max(&self) -> u64 {
        u64::from(self.header.borrow().entries_max) * self.block_len()
    }

    /// Bytes that one more block takes in the file, its bitmap included.
    pub fn block_cost(&self) -> u64 {
        self.block_len() + self.bitmap_len
    }
}
