//! The memory of another domain, as far as it granted it to us.

use std::io;
use std::os::fd::OwnedFd;

#[cfg(feature = "doubles")]
use crate::double;
use crate::sys;

/// Bytes of a granted page.
pub const PAGE_LEN: usize = 4096;

/// Names a page that a domain shares (`grant_ref_t`). 0 to 7 are reserved by the hypervisor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantRef(pub u32);

/// What a mapping of granted pages is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// The pages are only read.
    Read,
    /// The pages are read and written.
    Write,
}

/// Which way a grant copy moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the other domain into our memory: a guest's write.
    FromDomain,
    /// From our memory into the other domain: a guest's read.
    ToDomain,
}

/// `GNTST_*`: how the hypervisor says what came of one grant operation (`xen/include/public/grant_table.h`).
#[allow(missing_docs, reason = "the names of the specification")]
pub mod grant_status {
    pub const OKAY: i16 = 0;
    pub const GENERAL_ERROR: i16 = -1;
    pub const BAD_DOMAIN: i16 = -2;
    pub const BAD_GNTREF: i16 = -3;
    pub const PERMISSION_DENIED: i16 = -8;
    pub const BAD_PAGE: i16 = -9;
    pub const BAD_COPY_ARG: i16 = -10;
    pub const EAGAIN: i16 = -12;
    pub const NO_SPACE: i16 = -13;

    /// The number in words.
    pub fn name(status: i16) -> &'static str {
        match status {
            OKAY => "done",
            BAD_DOMAIN => "there is no such domain",
            BAD_GNTREF => "there is no such grant for us",
            PERMISSION_DENIED => "not permitted",
            BAD_PAGE => "the granted page is not there",
            BAD_COPY_ARG => "the copy crosses the border of a page",
            EAGAIN => "the page is not in memory at the moment",
            NO_SPACE => "the hypervisor has no room for more grants in use",
            _ => "refused without a reason; most often a read-only grant that was to be written",
        }
    }
}

/// The memory of one other domain. Cheap to clone: each queue may have its own.
///
/// A closed choice rather than a trait object: it is on the path of every request.
#[derive(Clone, Debug)]
pub enum Domain {
    /// A real one, by `/dev/xen/gntdev`.
    Xen(sys::GrantDevice),
    /// A double's, by a memfd.
    #[cfg(feature = "doubles")]
    Double(double::Guest),
}

impl Domain {
    /// The double whose memory `fd` is, as domain `domid`.
    ///
    /// # Errors
    /// It is no memory of a double; `Unsupported` in a program without doubles.
    pub fn of_double(fd: OwnedFd, domid: u32) -> io::Result<Self> {
        #[cfg(feature = "doubles")]
        return double::Guest::from_fd(fd, domid).map(Self::Double);
        #[cfg(not(feature = "doubles"))]
        {
            drop((fd, domid));
            Err(crate::without_doubles())
        }
    }

    /// The number of the domain.
    pub fn id(&self) -> u32 {
        match self {
            Self::Xen(domain) => domain.id(),
            #[cfg(feature = "doubles")]
            Self::Double(domain) => domain.id(),
        }
    }

    /// Maps pages one after the other into our memory. The mapping ends when it is dropped.
    ///
    /// For pages of a ring, kept for its life; for the pages of one request, mapped and unmapped with it; for pages
    /// that a guest grants persistently, kept in a table. Up to 32 pages without allocating.
    ///
    /// # Errors
    /// `EINVAL` for no grant at all, or one that is not there or does not allow it; nothing is mapped then.
    pub fn map(&self, grants: &[GrantRef], rights: Rights) -> io::Result<Mapped> {
        match self {
            Self::Xen(domain) => domain.map(grants, rights).map(Mapped::Xen),
            #[cfg(feature = "doubles")]
            Self::Double(domain) => domain.map(grants, rights).map(Mapped::Double),
        }
    }

    /// Carries out a batch of copies by one call of the hypervisor. Each copy has a status of its own afterwards
    /// ([`CopyBatch::status`]).
    ///
    /// # Errors
    /// The call as a whole failed; no status is set.
    pub fn copy(&self, batch: &mut CopyBatch) -> io::Result<()> {
        match self {
            Self::Xen(domain) => domain.copy(batch),
            #[cfg(feature = "doubles")]
            Self::Double(domain) => domain.copy(batch),
        }
    }
}

/// Granted pages in our memory; unmapped when dropped.
#[derive(Debug)]
pub enum Mapped {
    /// By `/dev/xen/gntdev`.
    Xen(sys::MappedGrants),
    /// In the double.
    #[cfg(feature = "doubles")]
    Double(double::MappedPages),
}

impl Mapped {
    /// Where they begin; page-aligned.
    pub fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Xen(pages) => pages.as_ptr(),
            #[cfg(feature = "doubles")]
            Self::Double(pages) => pages.as_ptr(),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Xen(pages) => pages.len(),
            #[cfg(feature = "doubles")]
            Self::Double(pages) => pages.len(),
        }
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Copies between domains to be done in one call. Kept and filled again: after warm-up it allocates nothing.
///
/// It has the layout of the ioctl (`struct gntdev_grant_copy_segment`), so that nothing is converted.
#[derive(Debug, Default)]
pub struct CopyBatch {
    pub(crate) segments: Vec<sys::CopySegment>,
}

impl CopyBatch {
    /// Forgets all copies.
    pub fn clear(&mut self) {
        self.segments.clear();
    }

    /// Copies in the batch.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Adds a copy of `len` bytes between `offset` in the page that domain `domid` granted as `grant` and `local`.
    /// `offset + len` is at most [`PAGE_LEN`], or the whole batch fails with `EINVAL`. `local` may lie across borders
    /// of pages: the kernel splits the copy.
    ///
    /// # Safety
    /// `local .. local + len` stays valid until the batch was carried out or cleared.
    pub unsafe fn push(
        &mut self,
        direction: Direction,
        domid: u32,
        grant: GrantRef,
        offset: u16,
        local: *mut u8,
        len: u16,
    ) {
        self.segments.push(sys::CopySegment::new(direction, domid, grant, offset, local, len));
    }

    /// How copy `index` went: `Err` with Xen's `GNTST_*` number.
    pub fn status(&self, index: usize) -> Result<(), i16> {
        self.segments.get(index).map_or(Err(-1), sys::CopySegment::status)
    }
}
