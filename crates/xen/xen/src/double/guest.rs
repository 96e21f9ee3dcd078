//! A double's domain as a back end sees it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use super::memory::{DoubleVm, Memory};
use crate::domain::{CopyBatch, Direction, GrantRef, PAGE_LEN, Rights, grant_status};
use crate::sys::CopySegment;

/// A double's domain as a back end sees it: made of the memfd that the domain handed over.
#[derive(Clone, Debug)]
pub struct Guest {
    memory: Arc<Memory>,
    domid: u32,
    /// The back end's own number.
    us: u32,
}

impl Guest {
    /// The domain behind a memfd, under the number `domid`; the back end is domain 0.
    ///
    /// # Errors
    /// It is no memory of a [`DoubleVm`].
    pub fn from_fd(fd: OwnedFd, domid: u32) -> io::Result<Self> {
        Self::from_fd_for(fd, domid, 0)
    }

    /// The same for a back end in domain `us`.
    ///
    /// # Errors
    /// As of [`Guest::from_fd`].
    pub fn from_fd_for(fd: OwnedFd, domid: u32, us: u32) -> io::Result<Self> {
        Ok(Self { memory: Arc::new(Memory::open(fd)?), domid, us })
    }

    /// The domain of `vm`, as a back end in domain 0 sees it.
    ///
    /// # Errors
    /// No descriptor or no memory is left.
    pub fn of(vm: &DoubleVm, domid: u32) -> io::Result<Self> {
        Self::from_fd(vm.share()?, domid)
    }

    /// The domain's number.
    pub fn id(&self) -> u32 {
        self.domid
    }

    pub(crate) fn map(&self, grants: &[GrantRef], rights: Rights) -> io::Result<MappedPages> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        if grants.is_empty() {
            return Err(invalid());
        }
        let mut pinned = Pinned { memory: Arc::clone(&self.memory), grants: Grants::new(grants), count: 0 };
        let mut frames = Frames::new(grants.len());
        for grant in grants {
            let page = self.memory.pin(*grant, self.us, rights).map_err(|_| invalid())?;
            frames.as_mut_slice()[pinned.count] = page;
            pinned.count += 1;
        }
        let frames = frames.as_slice();
        let len = grants.len() * PAGE_LEN;
        let mut base = ptr::null_mut();
        let in_a_row = frames.windows(2).all(|pair| pair[1] == pair[0].wrapping_add(1));
        if !in_a_row {
            // SAFETY: a new range of addresses, to be covered page by page.
            base = unsafe {
                let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
                libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, kind, -1, 0)
            };
            if base == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
        }
        let protection = match rights {
            Rights::Read => libc::PROT_READ,
            Rights::Write => libc::PROT_READ | libc::PROT_WRITE,
        };
        let mut mapped =
            MappedPages { base: base.cast(), len: if in_a_row { 0 } else { len }, _pinned: pinned };
        let mut done = 0;
        while done < frames.len() {
            let run =
                frames[done..].windows(2).take_while(|pair| pair[1] == pair[0].wrapping_add(1)).count() + 1;
            let (at, fixed) = if in_a_row {
                (ptr::null_mut(), 0)
            } else {
                (mapped.base.wrapping_add(done * PAGE_LEN), libc::MAP_FIXED)
            };
            let offset = self.memory.offset(frames[done]) as i64;
            let (kind, fd) = (libc::MAP_SHARED | fixed, self.memory.fd.as_raw_fd());
            // SAFETY: pages of the memfd, over the range reserved above or at an address of the kernel's choice.
            let got = unsafe { libc::mmap(at.cast(), run * PAGE_LEN, protection, kind, fd, offset) };
            if got == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            if in_a_row {
                (mapped.base, mapped.len) = (got.cast(), len);
            }
            done += run;
        }
        Ok(mapped)
    }

    pub(crate) fn copy(&self, batch: &mut CopyBatch) -> io::Result<()> {
        // SAFETY: no arguments. It stands for the one call that the real device takes for a batch.
        unsafe { libc::syscall(libc::SYS_getpid) };
        if batch.segments.iter().any(|segment| !segment.is_well_formed()) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        for segment in &mut batch.segments {
            segment.status = self.copy_one(segment).err().unwrap_or(grant_status::OKAY);
        }
        Ok(())
    }

    fn copy_one(&self, segment: &CopySegment) -> Result<(), i16> {
        let (direction, domid, grant, offset, local) = segment.parts();
        if domid != self.domid {
            return Err(grant_status::BAD_DOMAIN);
        }
        let len = usize::from(segment.len);
        let rights = if direction == Direction::FromDomain { Rights::Read } else { Rights::Write };
        let page = self.memory.pin(grant, self.us, rights)?;
        let theirs = self.memory.page(page).wrapping_add(usize::from(offset));
        // SAFETY: the page is the domain's and `offset + len` inside it (`is_well_formed`); our end is valid by the
        // contract of `CopyBatch::push`. The domain may change its page meanwhile: the bytes are then a mixture, which
        // only the domain itself can notice.
        unsafe {
            match direction {
                Direction::FromDomain => ptr::copy_nonoverlapping(theirs, local, len),
                Direction::ToDomain => ptr::copy_nonoverlapping(local, theirs, len),
            }
        }
        self.memory.unpin(grant);
        Ok(())
    }
}

/// As many as a mapping of an ordinary request has, without allocating.
const FEW: usize = 32;

/// Numbers of pages, while they are mapped.
enum Frames {
    Few([u32; FEW], usize),
    Many(Vec<u32>),
}

impl Frames {
    fn new(count: usize) -> Self {
        if count <= FEW { Self::Few([0; FEW], count) } else { Self::Many(vec![0; count]) }
    }

    fn as_mut_slice(&mut self) -> &mut [u32] {
        match self {
            Self::Few(frames, count) => &mut frames[..*count],
            Self::Many(frames) => frames,
        }
    }

    fn as_slice(&self) -> &[u32] {
        match self {
            Self::Few(frames, count) => &frames[..*count],
            Self::Many(frames) => frames,
        }
    }
}

/// The grants of a mapping.
#[derive(Debug)]
enum Grants {
    Few([GrantRef; FEW]),
    Many(Box<[GrantRef]>),
}

impl Grants {
    fn new(grants: &[GrantRef]) -> Self {
        if grants.len() > FEW {
            return Self::Many(grants.into());
        }
        let mut few = [GrantRef::default(); FEW];
        few[..grants.len()].copy_from_slice(grants);
        Self::Few(few)
    }
}

/// Uses of grants, ended when dropped.
#[derive(Debug)]
struct Pinned {
    memory: Arc<Memory>,
    grants: Grants,
    count: usize,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let grants = match &self.grants {
            Grants::Few(grants) => grants.as_slice(),
            Grants::Many(grants) => grants,
        };
        for grant in &grants[..self.count] {
            self.memory.unpin(*grant);
        }
    }
}

/// Pages of a double's domain in our memory.
#[derive(Debug)]
pub struct MappedPages {
    base: *mut u8,
    len: usize,
    /// Dropped after the pages were unmapped.
    _pinned: Pinned,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for MappedPages {}

impl MappedPages {
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: made by `Guest::map` with this length; every user of it keeps this value.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}
