//! `/dev/xen/gntalloc`: pages of ours for another domain.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use super::{call, open, request};
use crate::domain::{GrantRef, PAGE_LEN, Rights};

const PATH: &str = "/dev/xen/gntalloc";
/// Pages at once, at most: the device's own limit is 1024 for all processes unless its module was told another.
const PAGES_MAX: usize = 1024;
/// `domid`, `flags`, `count` and `index` of `ioctl_gntalloc_alloc_gref`, in words of four bytes.
const ALLOC_WORDS: usize = 4;

/// Pages of our memory that another domain may use; taken back when dropped, or when the other domain has let go.
#[derive(Debug)]
pub struct SharedPages {
    device: OwnedFd,
    index: u64,
    base: NonNull<u8>,
    grants: Vec<GrantRef>,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for SharedPages {}

impl SharedPages {
    /// Pages that are zero, and may be read or also written by domain `domid`.
    ///
    /// # Errors
    /// There is no device, or it has not so many pages left.
    pub fn new(domid: u16, count: usize, rights: Rights) -> io::Result<Self> {
        if count == 0 || count > PAGES_MAX {
            let why = format!("{count} pages to share with domain {domid}; 1 to {PAGES_MAX} are possible");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let device: OwnedFd = open(PATH)?.into();
        let mut words = vec![0u64; (ALLOC_WORDS + count).div_ceil(2)];
        let writable = if rights == Rights::Write { 1u64 } else { 0 };
        words[0] = u64::from(domid) | writable << 16 | (count as u64) << 32;
        // SAFETY: `ioctl_gntalloc_alloc_gref` with room for as many grants as it asks for, aligned to eight.
        unsafe { call(device.as_raw_fd(), request::ALLOC_GREF, words.as_mut_ptr())? };
        let index = words[1];
        let grants =
            (0..count).map(|n| GrantRef((words[2 + n / 2] >> (32 * (n % 2))) as u32)).collect::<Vec<_>>();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            let (len, fd) = (count * PAGE_LEN, device.as_raw_fd());
            libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, index as i64)
        };
        let error = io::Error::last_os_error();
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Self { device, index, base, grants })
            }
            // Closing the device gives the pages back.
            _ => Err(error),
        }
    }

    /// The grants, page by page.
    pub fn grants(&self) -> &[GrantRef] {
        &self.grants
    }

    /// Where the pages begin. The other domain may read and perhaps write there at any time.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.grants.len() * PAGE_LEN
    }

    /// Whether there are no pages; there always are.
    pub fn is_empty(&self) -> bool {
        self.grants.is_empty()
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        // SAFETY: made by `new` with this length; every user of it keeps this value.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len()) };
        let mut argument = [self.index, self.grants.len() as u64];
        // SAFETY: `ioctl_gntalloc_dealloc_gref`: a number of 64 bits, one of 32.
        let _ = unsafe { call(self.device.as_raw_fd(), request::DEALLOC_GREF, argument.as_mut_ptr()) };
    }
}
