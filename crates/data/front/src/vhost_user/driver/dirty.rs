//! The log of a live migration as a front end keeps it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::super::blk::feature;
use super::super::dirty::LOG_PAGE_LEN;
use super::super::memory::{Mapping, memfd};
use super::super::message::id;
use super::{Driver, GUEST_BASE, protocol_error};

/// A log that is shared with the back end.
#[derive(Debug)]
pub(super) struct LogFile {
    mapping: Mapping,
    len: u64,
    fd: OwnedFd,
}

impl LogFile {
    fn new(len: u64) -> io::Result<Self> {
        let fd = memfd(c"vhost-user-log", len)?;
        let mapping = Mapping::new(fd.as_fd(), 0, len).map_err(|error| protocol_error(error.to_string()))?;
        Ok(Self { mapping, len, fd })
    }
}

/// The pages that a back end says to have written.
#[derive(Clone, Debug)]
pub struct DirtyPages {
    file: Arc<LogFile>,
}

impl DirtyPages {
    /// Guest addresses of the pages since the last call, in order.
    pub fn take(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for index in 0..self.file.len {
            // SAFETY: the byte lies inside the mapping, which is accessed by atomic operations alone.
            let byte = unsafe { AtomicU8::from_ptr(self.file.mapping.as_ptr().add(index as usize)) };
            if byte.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let bits = byte.swap(0, Ordering::AcqRel);
            let set = (0..8).filter(|bit| bits & 1 << bit != 0);
            pages.extend(set.map(|bit| (index * 8 + bit) * LOG_PAGE_LEN));
        }
        pages
    }
}

impl Driver {
    /// Begins to log what the device writes to memory, as a front end does that migrates its guest: `queues` run.
    pub fn start_log(&mut self, queues: &[u16]) -> io::Result<DirtyPages> {
        let end = GUEST_BASE + self.memory.mapping.len();
        let file = Arc::new(LogFile::new(end.div_ceil(LOG_PAGE_LEN).div_ceil(8))?);
        let payload = [file.len.to_ne_bytes(), 0u64.to_ne_bytes()].concat();
        self.ask(id::SET_LOG_BASE, &payload, &[file.fd.as_fd()])?;
        self.tell(id::SET_FEATURES, &(self.features | feature::LOG_ALL).to_ne_bytes(), &[])?;
        self.log = Some(Arc::clone(&file));
        queues.iter().try_for_each(|queue| self.set_addresses(*queue))?;
        Ok(DirtyPages { file })
    }

    /// Ends the logging.
    pub fn stop_log(&mut self, queues: &[u16]) -> io::Result<()> {
        self.log = None;
        self.tell(id::SET_FEATURES, &self.features.to_ne_bytes(), &[])?;
        queues.iter().try_for_each(|queue| self.set_addresses(*queue))
    }
}
