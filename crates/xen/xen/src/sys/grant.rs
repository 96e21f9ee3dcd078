//! `/dev/xen/gntdev`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use super::{call, request};
use crate::domain::{CopyBatch, Direction, GrantRef, PAGE_LEN, Rights, grant_status};

/// `struct gntdev_grant_copy_segment`: 24 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopySegment {
    /// An address, or a foreign page: grant 0..32, offset 32..48, domain 48..64. So is the destination.
    source: u64,
    dest: u64,
    pub(crate) len: u16,
    flags: u16,
    pub(crate) status: i16,
}

/// `GNTCOPY_source_gref`: the source is a foreign page.
const SOURCE_GREF: u16 = 1;
/// `GNTCOPY_dest_gref`.
const DEST_GREF: u16 = 2;

impl CopySegment {
    pub(crate) fn new(
        direction: Direction,
        domid: u32,
        grant: GrantRef,
        offset: u16,
        local: *mut u8,
        len: u16,
    ) -> Self {
        let ours = local as u64;
        let theirs = u64::from(grant.0) | u64::from(offset) << 32 | u64::from(domid as u16) << 48;
        let (source, dest, flags) = match direction {
            Direction::FromDomain => (theirs, ours, SOURCE_GREF),
            Direction::ToDomain => (ours, theirs, DEST_GREF),
        };
        Self { source, dest, len, flags, status: 0 }
    }

    /// Direction, domain, grant, offset in the page, address of ours.
    #[cfg(feature = "doubles")]
    pub(crate) fn parts(&self) -> (Direction, u32, GrantRef, u16, *mut u8) {
        let (direction, theirs, ours) = if self.flags == SOURCE_GREF {
            (Direction::FromDomain, self.source, self.dest)
        } else {
            (Direction::ToDomain, self.dest, self.source)
        };
        let offset = (theirs >> 32) as u16;
        (direction, (theirs >> 48) as u32, GrantRef(theirs as u32), offset, ours as *mut u8)
    }

    /// Whether it stays inside a page: the kernel refuses a batch in which one does not.
    #[cfg(feature = "doubles")]
    pub(crate) fn is_well_formed(&self) -> bool {
        let (.., offset, _) = self.parts();
        usize::from(offset) + usize::from(self.len) <= PAGE_LEN
    }

    pub(crate) fn status(&self) -> Result<(), i16> {
        if self.status == 0 { Ok(()) } else { Err(self.status) }
    }
}

const PATH: &str = "/dev/xen/gntdev";
/// Grants of a mapping that is described without allocating.
const FEW: usize = 32;
/// `count`, `pad` and `index` of `ioctl_gntdev_map_grant_ref`, in words of eight bytes; a grant is one more.
const MAP_WORDS: usize = 2;
/// How often a copy is repeated whose page is not in memory. The kernel itself waits for it, half a minute if need be.
const AGAIN_MAX: usize = 8;

/// The pages of one domain by an open `/dev/xen/gntdev`. Clones are the same open device, also for several threads: the
/// kernel has a lock around its list of mappings, and holds none while it copies.
#[derive(Clone, Debug)]
pub struct GrantDevice {
    device: Arc<OwnedFd>,
    domid: u32,
}

impl GrantDevice {
    /// The memory of domain `domid`.
    ///
    /// # Errors
    /// There is no device, or this process may not open it.
    pub fn open(domid: u32) -> io::Result<Self> {
        Ok(Self::from_fd(Self::open_device()?, domid))
    }

    /// The same by a device that is open already.
    pub fn from_fd(device: OwnedFd, domid: u32) -> Self {
        Self { device: Arc::new(device), domid }
    }

    /// An open device, for [`GrantDevice::from_fd`] in another process.
    ///
    /// # Errors
    /// As of [`GrantDevice::open`].
    pub fn open_device() -> io::Result<OwnedFd> {
        super::open(PATH).map(OwnedFd::from)
    }

    /// Allows so many grants to be mapped at once by this device, before anything else is done with it. False: this
    /// kernel has no such limit.
    ///
    /// # Errors
    /// The kernel refuses the number, or something is mapped already.
    pub fn set_max_grants(&self, count: u32) -> io::Result<bool> {
        let mut count = count;
        // SAFETY: one number of 32 bits, as `ioctl_gntdev_set_max_grants` has.
        match unsafe { call(self.device.as_raw_fd(), request::SET_MAX_GRANTS, &raw mut count) } {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The domain's number.
    pub fn id(&self) -> u32 {
        self.domid
    }

    pub(crate) fn map(&self, grants: &[GrantRef], rights: Rights) -> io::Result<MappedGrants> {
        let count = u32::try_from(grants.len()).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let mut few = [0u64; MAP_WORDS + FEW];
        let mut many = Vec::new();
        let words = if grants.len() <= FEW {
            &mut few[..MAP_WORDS + grants.len()]
        } else {
            many.resize(MAP_WORDS + grants.len(), 0);
            many.as_mut_slice()
        };
        words[0] = u64::from(count);
        for (word, grant) in words[MAP_WORDS..].iter_mut().zip(grants) {
            *word = u64::from(self.domid) | u64::from(grant.0) << 32;
        }
        let fd = self.device.as_raw_fd();
        // SAFETY: `ioctl_gntdev_map_grant_ref` with as many grants as it says, aligned to eight.
        unsafe { call(fd, request::MAP_GRANT_REF, words.as_mut_ptr())? };
        let (index, len) = (words[1], grants.len() * PAGE_LEN);
        let mut mapped = MappedGrants { device: Arc::clone(&self.device), index, base: ptr::null_mut(), len };
        let protection = match rights {
            Rights::Read => libc::PROT_READ,
            Rights::Write => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, index as i64) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        mapped.base = base.cast();
        Ok(mapped)
    }

    pub(crate) fn copy(&self, batch: &mut CopyBatch) -> io::Result<()> {
        self.copy_segments(&mut batch.segments)?;
        if batch.segments.iter().any(|segment| segment.status == grant_status::EAGAIN) {
            self.copy_again(batch)?;
        }
        Ok(())
    }

    fn copy_segments(&self, segments: &mut [CopySegment]) -> io::Result<()> {
        if segments.is_empty() {
            return Ok(());
        }
        let count = u32::try_from(segments.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
        let mut argument = CopyArgument { count, segments: segments.as_mut_ptr() };
        // SAFETY: `ioctl_gntdev_grant_copy` with as many segments as it says; their ends on our side are valid by the
        // contract of `CopyBatch::push`.
        unsafe { call(self.device.as_raw_fd(), request::GRANT_COPY, &raw mut argument) }.map(drop)
    }

    /// Copies whose page was being brought in.
    #[cold]
    fn copy_again(&self, batch: &mut CopyBatch) -> io::Result<()> {
        for _ in 0..AGAIN_MAX {
            let places: Vec<usize> = (0..batch.segments.len())
                .filter(|index| batch.segments[*index].status == grant_status::EAGAIN)
                .collect();
            let mut segments: Vec<CopySegment> = places.iter().map(|index| batch.segments[*index]).collect();
            if segments.is_empty() {
                return Ok(());
            }
            std::thread::yield_now();
            self.copy_segments(&mut segments)?;
            for (place, segment) in places.into_iter().zip(segments) {
                batch.segments[place].status = segment.status;
            }
        }
        Ok(())
    }
}

/// `struct ioctl_gntdev_grant_copy`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CopyArgument {
    count: u32,
    segments: *mut CopySegment,
}

/// What is done when a mapping ends, however it ends: the other side can clean up after a process that died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmapAction {
    /// The byte at this offset in the mapping becomes zero.
    ClearByte(usize),
    /// An event is sent on this port of ours.
    Notify(u32),
}

/// Mapped pages.
#[derive(Debug)]
pub struct MappedGrants {
    device: Arc<OwnedFd>,
    /// What the device calls the mapping.
    index: u64,
    /// Null while nothing is mapped yet.
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for MappedGrants {}

impl MappedGrants {
    /// Says what is done when the mapping ends.
    ///
    /// # Errors
    /// The byte is outside, or the port is not ours.
    pub fn on_unmap(&self, action: UnmapAction) -> io::Result<()> {
        let (at, kind, port) = match action {
            UnmapAction::ClearByte(at) => (at, 1u64, 0),
            UnmapAction::Notify(port) => (0, 2, port),
        };
        if at >= self.len {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut argument = [self.index + at as u64, kind | u64::from(port) << 32];
        let fd = self.device.as_raw_fd();
        // SAFETY: `ioctl_gntdev_unmap_notify`: a number of 64 bits, two of 32.
        unsafe { call(fd, request::SET_UNMAP_NOTIFY, argument.as_mut_ptr()) }.map(drop)
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for MappedGrants {
    fn drop(&mut self) {
        if !self.base.is_null() {
            // SAFETY: made by `GrantDevice::map` with this length; every user of it keeps this value.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
        let mut argument = [self.index, (self.len / PAGE_LEN) as u64];
        // SAFETY: `ioctl_gntdev_unmap_grant_ref`: a number of 64 bits, two of 32.
        let _ = unsafe { call(self.device.as_raw_fd(), request::UNMAP_GRANT_REF, argument.as_mut_ptr()) };
    }
}
