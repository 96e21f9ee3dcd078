//! The memory of a double's domain: a memfd with a header, a grant table and pages.
//!
//! ```text
//!   0      magic u64, pages u32, grants u32
//!   4096   the grant table: a u64 for each grant
//!   ...    the pages, from the next border of a page
//! ```
//!
//! A grant is one word, so that every change of it is one atomic step: the page, the domain that may map it, whether
//! only for reading, and how often it is in use. A domain cannot take a grant back that is in use, as on Xen.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

use crate::domain::{GrantRef, PAGE_LEN, Rights, grant_status};

/// At the start of the memfd.
const MAGIC: u64 = 0x5450_4f49_584e_4442;
/// Grants that the hypervisor keeps for itself.
const GRANTS_RESERVED: u32 = 8;
/// Grants of a domain, at least.
const GRANTS_MIN: u32 = 1024;
/// Pages of a domain, at most: 4 GiB.
const PAGES_MAX: u32 = 1 << 20;

/// A grant: page 0..32, domain 32..48, in use 48..62, only for reading 62, there 63.
const DOMAIN_SHIFT: u32 = 32;
const USES_SHIFT: u32 = 48;
const USE: u64 = 1 << USES_SHIFT;
const USES: u64 = 0x3FFF << USES_SHIFT;
const READ_ONLY: u64 = 1 << 62;
const THERE: u64 = 1 << 63;

/// The whole memfd in our memory.
pub(super) struct Memory {
    pub(super) fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    pub(super) pages: u32,
    grants: u32,
    data_at: usize,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("pages", &self.pages).field("grants", &self.grants).finish()
    }
}

// SAFETY: the mapping belongs to no thread; the table is accessed by atomic operations, pages as raw memory.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by us with this length, and there is no pointer into it any longer: every
        // holder of one keeps this value alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn bad(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn data_at(grants: u32) -> usize {
    (PAGE_LEN + 8 * grants as usize).next_multiple_of(PAGE_LEN)
}

impl Memory {
    fn map(fd: OwnedFd, pages: u32, grants: u32) -> io::Result<Self> {
        let data_at = data_at(grants);
        let len = data_at + pages as usize * PAGE_LEN;
        // SAFETY: a new mapping of a file that cannot shrink, at an address of the kernel's choice.
        let base = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), len, rights, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| bad("memory at address 0".into()))?;
        Ok(Self { fd, base, len, pages, grants, data_at })
    }

    fn new(pages: u32) -> io::Result<Self> {
        if pages == 0 || pages > PAGES_MAX {
            let why = format!("a double's domain has 1 to {PAGES_MAX} pages, not {pages}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(c"xen-double", flags)?);
        let grants = GRANTS_MIN.max(2 * pages + GRANTS_RESERVED);
        file.set_len((data_at(grants) + pages as usize * PAGE_LEN) as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let header =
            [MAGIC.to_ne_bytes(), (u64::from(pages) | u64::from(grants) << 32).to_ne_bytes()].concat();
        file.write_all_at(&header, 0)?;
        Self::map(file.into(), pages, grants)
    }

    /// The memory that another process made.
    pub(super) fn open(fd: OwnedFd) -> io::Result<Self> {
        if !fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(bad("a double's domain is a memfd that cannot shrink, and this is none".into()));
        }
        let file = File::from(fd);
        let mut header = [0; 16];
        file.read_exact_at(&mut header, 0)?;
        let [magic, sizes] = [0, 8].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_ne_bytes(word)
        });
        let (pages, grants) = (sizes as u32, (sizes >> 32) as u32);
        let fits = pages <= PAGES_MAX && grants <= 4 * PAGES_MAX;
        let len = file.metadata()?.len();
        if magic != MAGIC || !fits || (data_at(grants) + pages as usize * PAGE_LEN) as u64 != len {
            return Err(bad(format!(
                "this is no memory of a double's domain: {len} bytes, header {header:?}"
            )));
        }
        Self::map(file.into(), pages, grants)
    }

    fn grant(&self, grant: GrantRef) -> Option<&AtomicU64> {
        if grant.0 < GRANTS_RESERVED || grant.0 >= self.grants {
            return None;
        }
        // SAFETY: inside the table, aligned to eight, and only accessed so.
        Some(unsafe { self.base.byte_add(PAGE_LEN + 8 * grant.0 as usize).cast().as_ref() })
    }

    /// Where a page lies in the memfd.
    pub(super) fn offset(&self, page: u32) -> usize {
        self.data_at + page as usize * PAGE_LEN
    }

    pub(super) fn page(&self, page: u32) -> *mut u8 {
        debug_assert!(page < self.pages, "outside the domain");
        // SAFETY: inside the mapping: callers have checked the page.
        unsafe { self.base.as_ptr().add(self.offset(page)) }
    }

    /// Begins to use a grant: the page, or Xen's number of why not.
    pub(super) fn pin(&self, grant: GrantRef, by: u32, rights: Rights) -> Result<u32, i16> {
        let word = self.grant(grant).ok_or(grant_status::BAD_GNTREF)?;
        let mut now = word.load(Ordering::Relaxed);
        loop {
            let page = now as u32;
            if now & THERE == 0 || now >> DOMAIN_SHIFT & 0xFFFF != u64::from(by) {
                return Err(grant_status::BAD_GNTREF);
            }
            if rights == Rights::Write && now & READ_ONLY != 0 {
                return Err(grant_status::GENERAL_ERROR);
            }
            if page >= self.pages {
                return Err(grant_status::BAD_PAGE);
            }
            if now & USES == USES {
                return Err(grant_status::NO_SPACE);
            }
            match word.compare_exchange_weak(now, now + USE, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(page),
                Err(changed) => now = changed,
            }
        }
    }

    /// Ends a use that [`Memory::pin`] began.
    pub(super) fn unpin(&self, grant: GrantRef) {
        if let Some(word) = self.grant(grant) {
            word.fetch_sub(USE, Ordering::Release);
        }
    }
}

/// Why a grant is not taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevokeError {
    /// There is no such grant.
    Unknown,
    /// So many uses are made of it.
    InUse(u32),
}

/// A domain of the double as it sees itself: its memory, and what it grants of it.
///
/// Cheap to clone; all clones are the same domain. Memory is handed out raw: tests change it from other threads while a
/// back end looks at it, as a hostile guest does.
#[derive(Clone, Debug)]
pub struct DoubleVm {
    memory: Arc<Memory>,
    /// Where to look for a free grant next.
    next_grant: Arc<AtomicU32>,
    /// Pages handed out by [`DoubleVm::take_pages`].
    taken: Arc<AtomicU32>,
}

impl DoubleVm {
    /// A domain with `pages` pages of 4 KiB.
    ///
    /// # Errors
    /// No memory, or a senseless number of pages.
    pub fn new(pages: u32) -> io::Result<Self> {
        let next_grant = Arc::new(AtomicU32::new(GRANTS_RESERVED));
        Ok(Self { memory: Arc::new(Memory::new(pages)?), next_grant, taken: Arc::default() })
    }

    /// The memfd: what a back end makes its [`Guest`](super::Guest) of, in this process or another.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd.as_fd()
    }

    /// A copy of the descriptor.
    ///
    /// # Errors
    /// Too many are open.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.memory.fd.try_clone()
    }

    /// Pages.
    pub fn pages(&self) -> u32 {
        self.memory.pages
    }

    /// Sets `count` pages in a row aside, each for one caller; the first one. `None` if there are not so many.
    pub fn take_pages(&self, count: u32) -> Option<u32> {
        let more = |taken: u32| taken.checked_add(count).filter(|end| *end <= self.pages());
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
    }

    /// Where pages begin in our memory; the next ones follow. Others may read and write there at any time.
    ///
    /// # Panics
    /// There is no such page.
    pub fn page(&self, page: u32) -> NonNull<u8> {
        assert!(page < self.pages(), "page {page} of {}", self.pages());
        NonNull::new(self.memory.page(page)).unwrap_or(NonNull::dangling())
    }

    fn range(&self, page: u32, offset: usize, len: usize) -> *mut u8 {
        let at = page as usize * PAGE_LEN + offset;
        let all = self.pages() as usize * PAGE_LEN;
        assert!(at.checked_add(len).is_some_and(|end| end <= all), "outside the domain");
        // SAFETY: inside the pages, as just checked.
        unsafe { self.page(0).as_ptr().add(at) }
    }

    /// Copies out of memory, from `offset` in `page` on.
    ///
    /// # Panics
    /// It reaches outside the domain.
    pub fn read(&self, page: u32, offset: usize, into: &mut [u8]) {
        let from = self.range(page, offset, into.len());
        // SAFETY: inside the pages; a byte that changes meanwhile is one or the other.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Copies into memory, from `offset` in `page` on.
    ///
    /// # Panics
    /// It reaches outside the domain.
    pub fn write(&self, page: u32, offset: usize, from: &[u8]) {
        let into = self.range(page, offset, from.len());
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
    }

    /// Lets domain `to` use a page.
    ///
    /// # Errors
    /// No such page, or all grants are given.
    pub fn grant(&self, page: u32, rights: Rights, to: u32) -> io::Result<GrantRef> {
        if page >= self.pages() {
            let why = format!("the domain has {} pages, none with number {page}", self.pages());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        self.grant_raw(u64::from(page), rights, to)
    }

    /// Grants a page that is not there: what a hostile guest may put into its table.
    ///
    /// # Errors
    /// All grants are given.
    pub fn grant_absent(&self, rights: Rights, to: u32) -> io::Result<GrantRef> {
        self.grant_raw(u64::from(u32::MAX), rights, to)
    }

    fn grant_raw(&self, page: u64, rights: Rights, to: u32) -> io::Result<GrantRef> {
        let read_only = if rights == Rights::Read { READ_ONLY } else { 0 };
        let word = page | u64::from(to & 0xFFFF) << DOMAIN_SHIFT | read_only | THERE;
        let (first, count) = (GRANTS_RESERVED, self.memory.grants - GRANTS_RESERVED);
        for _ in 0..count {
            let next = self.next_grant.fetch_add(1, Ordering::Relaxed);
            let grant = GrantRef(first + next % count);
            let Some(entry) = self.memory.grant(grant) else { continue };
            if entry.compare_exchange(0, word, Ordering::Release, Ordering::Relaxed).is_ok() {
                return Ok(grant);
            }
        }
        let why = format!("all {count} grants of the domain are given");
        Err(io::Error::new(io::ErrorKind::StorageFull, why))
    }

    /// Takes a grant back.
    ///
    /// # Errors
    /// It is in use: the other domain has the page mapped.
    pub fn revoke(&self, grant: GrantRef) -> Result<(), RevokeError> {
        let entry = self.memory.grant(grant).ok_or(RevokeError::Unknown)?;
        let mut now = entry.load(Ordering::Relaxed);
        loop {
            if now & THERE == 0 {
                return Err(RevokeError::Unknown);
            }
            if now & USES != 0 {
                return Err(RevokeError::InUse(((now & USES) >> USES_SHIFT) as u32));
            }
            match entry.compare_exchange_weak(now, 0, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(changed) => now = changed,
            }
        }
    }

    /// How many uses are made of a grant at the moment.
    pub fn uses(&self, grant: GrantRef) -> u32 {
        self.memory
            .grant(grant)
            .map_or(0, |entry| ((entry.load(Ordering::Acquire) & USES) >> USES_SHIFT) as u32)
    }

    /// What the hypervisor does when a back end's process ends, however: whatever it had mapped is unmapped. To be
    /// called when the process was killed; one that ended by itself has let go.
    pub fn back_end_died(&self) {
        for index in GRANTS_RESERVED..self.memory.grants {
            if let Some(entry) = self.memory.grant(GrantRef(index)) {
                entry.fetch_and(!USES, Ordering::AcqRel);
            }
        }
    }
}
