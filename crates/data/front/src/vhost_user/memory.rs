//! Guest memory: regions that the front end shares, mapped here, and addresses turned into pointers.

use std::ffi::CStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, fstat, memfd_create};

use super::message::RegionSpec;

/// Regions at once; what `GET_MAX_MEM_SLOTS` answers.
pub const REGIONS_MAX: usize = 256;
/// The longest region taken: more than any host has.
const REGION_LEN_MAX: u64 = 1 << 46;
const PAGE_LEN: u64 = 4096;

/// Why memory cannot be taken.
#[derive(Debug)]
pub enum MemoryError {
    /// The description contradicts itself.
    Invalid { region: RegionSpec, why: &'static str },
    /// The file behind a region is shorter than the region: touching the rest would kill us.
    FileTooShort { region: RegionSpec, file_len: u64 },
    /// There are too many.
    TooMany,
    /// There is no such region.
    Missing { region: RegionSpec },
    /// The kernel refused.
    Io { region: RegionSpec, source: io::Error },
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |region: &RegionSpec| format!("memory region {:#x}+{:#x}", region.guest, region.len);
        match self {
            Self::Invalid { region, why } => write!(f, "{}: {why}", name(region)),
            Self::FileTooShort { region, file_len } => write!(
                f,
                "{}: its file has {file_len:#x} bytes, fewer than the region needs from offset {:#x}",
                name(region),
                region.offset
            ),
            Self::TooMany => write!(f, "more than {REGIONS_MAX} memory regions"),
            Self::Missing { region } => write!(f, "{}: was never added", name(region)),
            Self::Io { region, source } => write!(f, "{}: cannot be mapped: {source}", name(region)),
        }
    }
}

impl std::error::Error for MemoryError {}

/// A shared mapping of a piece of a file; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    map_len: usize,
    /// Where the wanted piece begins in the mapping.
    skip: usize,
    len: u64,
}

// SAFETY: the mapping is plain shared memory that belongs to no thread; every access goes through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above; a `Mapping` offers no access through references.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, after checking that the file has them.
    ///
    /// A file that shrinks later raises SIGBUS when it is touched. Where the file takes a seal against shrinking
    /// (a memfd made for it), the seal is set and that cannot happen; for other files (hugetlbfs, files in /dev/shm)
    /// it remains possible, and ends the process of this one disk.
    pub fn new(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, MapError> {
        let end = offset.checked_add(len).ok_or(MapError::Overflow)?;
        let examined = || fstat(file).map_err(|error| MapError::Io(error.into()));
        if FileType::from_raw_mode(examined()?.st_mode) != FileType::RegularFile {
            return Err(MapError::NotAFile);
        }
        let _ = fcntl_add_seals(file, SealFlags::SHRINK);
        // The length is read once more: the file may have shrunk before the seal held.
        let stat = examined()?;
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        if file_len < end {
            return Err(MapError::TooShort { file_len });
        }
        // hugetlbfs maps whole huge pages only, and says their size here.
        let unit = u64::try_from(stat.st_blksize).unwrap_or(0).max(PAGE_LEN);
        let unit = if unit.is_power_of_two() { unit } else { PAGE_LEN };
        let start = offset & !(unit - 1);
        let map_len = (end - start).checked_next_multiple_of(unit).ok_or(MapError::Overflow)?;
        let map_len = usize::try_from(map_len).map_err(|_| MapError::Overflow)?;
        let start_i64 = i64::try_from(start).map_err(|_| MapError::Overflow)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; no existing memory is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                start_i64,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(MapError::Io(io::Error::last_os_error()));
        }
        // A core file of this process must not carry the guest's memory.
        // SAFETY: the range is the mapping just made.
        unsafe { libc::madvise(base, map_len, libc::MADV_DONTDUMP) };
        Ok(Self { base: base.cast(), map_len, skip: (offset - start) as usize, len })
    }

    /// Where the piece begins.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `skip` lies inside the mapping.
        unsafe { self.base.add(self.skip) }
    }

    /// Bytes of the piece.
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new`; a holder of pointers into it holds the mapping too.
        unsafe { libc::munmap(self.base.cast(), self.map_len) };
    }
}

/// Why a file cannot be mapped.
#[derive(Debug)]
pub enum MapError {
    /// Offset and length do not fit the address space.
    Overflow,
    /// Not a regular file: a memfd, a file in tmpfs or hugetlbfs.
    NotAFile,
    /// The file has fewer bytes.
    TooShort { file_len: u64 },
    /// The kernel refused.
    Io(io::Error),
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overflow => f.write_str("offset and length do not fit the address space"),
            Self::NotAFile => f.write_str("the descriptor is not a regular file"),
            Self::TooShort { file_len } => write!(f, "the file has only {file_len:#x} bytes"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

/// One region of guest memory.
#[derive(Debug)]
pub struct Region {
    spec: RegionSpec,
    mapping: Mapping,
}

impl Region {
    /// Checks the description and maps the region.
    pub fn map(spec: RegionSpec, file: &OwnedFd) -> Result<Self, MemoryError> {
        use std::os::fd::AsFd;
        let invalid = |why| MemoryError::Invalid { region: spec, why };
        if spec.len == 0 {
            return Err(invalid("it has no bytes"));
        }
        if spec.len > REGION_LEN_MAX {
            return Err(invalid("it is longer than 64 TiB"));
        }
        if spec.guest.checked_add(spec.len).is_none() {
            return Err(invalid("it reaches past the end of the guest's address space"));
        }
        if spec.user.checked_add(spec.len).is_none() {
            return Err(invalid("it reaches past the end of the front end's address space"));
        }
        let mapping = Mapping::new(file.as_fd(), spec.offset, spec.len).map_err(|error| match error {
            MapError::Overflow => invalid("its offset and length do not fit a file"),
            MapError::NotAFile => invalid("its descriptor is not a regular file; share memory from a memfd"),
            MapError::TooShort { file_len } => MemoryError::FileTooShort { region: spec, file_len },
            MapError::Io(source) => MemoryError::Io { region: spec, source },
        })?;
        Ok(Self { spec, mapping })
    }

    fn end(&self) -> u64 {
        self.spec.guest + self.spec.len
    }
}

/// All of a guest's memory: a value that never changes. A change makes a new one that shares what stays.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    /// In the order of guest addresses.
    regions: Vec<Arc<Region>>,
}

impl GuestMemory {
    /// No memory.
    pub const fn empty() -> Self {
        Self { regions: Vec::new() }
    }

    /// This memory and one region more.
    pub fn with(&self, region: Region) -> Result<Self, MemoryError> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let new = region.spec;
        for old in &self.regions {
            let old = old.spec;
            let overlap = |a: u64, b: u64| a < b + old.len && b < a + new.len;
            if overlap(new.guest, old.guest) {
                return Err(MemoryError::Invalid {
                    region: new,
                    why: "it overlaps another in guest addresses",
                });
            }
            if overlap(new.user, old.user) {
                let why = "it overlaps another in the front end's addresses";
                return Err(MemoryError::Invalid { region: new, why });
            }
        }
        let mut regions = self.regions.clone();
        let at = regions.partition_point(|other| other.spec.guest < new.guest);
        regions.insert(at, Arc::new(region));
        Ok(Self { regions })
    }

    /// This memory without the region that has the same addresses and length.
    pub fn without(&self, spec: RegionSpec) -> Result<Self, MemoryError> {
        let same = |region: &Arc<Region>| {
            let old = region.spec;
            (old.guest, old.user, old.len) == (spec.guest, spec.user, spec.len)
        };
        let at = self.regions.iter().position(same).ok_or(MemoryError::Missing { region: spec })?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(Self { regions })
    }

    /// How many regions there are.
    #[cfg(test)]
    pub fn region_count(&self) -> usize {
        self.regions.len()
    }

    /// The pointer behind guest address `at`, and how many bytes follow it there, at most `len`. `None` outside.
    pub fn translate(&self, at: u64, len: u64) -> Option<(*mut u8, u64)> {
        let index = self.regions.partition_point(|region| region.end() <= at);
        let region = self.regions.get(index)?;
        let offset = at.checked_sub(region.spec.guest)?;
        // SAFETY: `at` lies below the end of the region, so the offset is inside its mapping.
        let pointer = unsafe { region.mapping.as_ptr().add(offset as usize) };
        Some((pointer, len.min(region.end() - at)))
    }

    /// The pointer to `len` contiguous bytes at guest address `at`.
    pub fn contiguous(&self, at: u64, len: u64) -> Option<*mut u8> {
        self.translate(at, len).filter(|(_, found)| *found == len).map(|(pointer, _)| pointer)
    }

    /// The pointer to `len` contiguous bytes at address `user` of the front end, as ring addresses are given.
    pub fn user_contiguous(&self, user: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.spec.user)?;
            let fits = offset < region.spec.len && len <= region.spec.len - offset;
            // SAFETY: the offset was just found to lie inside the region.
            fits.then(|| unsafe { region.mapping.as_ptr().add(offset as usize) })
        })
    }

    /// The guest address behind address `user` of the front end.
    pub fn guest_of_user(&self, user: u64) -> Option<u64> {
        self.regions.iter().map(|region| region.spec).find_map(|spec| {
            let offset = user.checked_sub(spec.user)?;
            (offset < spec.len).then(|| spec.guest + offset)
        })
    }

    /// The guest addresses of `len` bytes behind a pointer that [`GuestMemory::translate`] gave.
    pub fn guest_ranges(&self, pointer: *const u8, len: u64, mut each: impl FnMut(u64, u64)) {
        for region in &self.regions {
            let offset = (pointer.addr() as u64).wrapping_sub(region.mapping.as_ptr().addr() as u64);
            if offset < region.spec.len {
                each(region.spec.guest + offset, len.min(region.spec.len - offset));
                return;
            }
        }
    }

    /// The end of the highest region.
    pub fn end(&self) -> u64 {
        self.regions.last().map_or(0, |region| region.end())
    }

    /// Copies `into.len()` bytes out of guest memory, once; false when they are not all there.
    pub fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let mut done = 0;
        while done < into.len() {
            let Some(address) = at.checked_add(done as u64) else { return false };
            let Some((pointer, len)) = self.translate(address, (into.len() - done) as u64) else {
                return false;
            };
            // SAFETY: `translate` found `len` bytes behind the pointer.
            unsafe { copy_out(pointer, &mut into[done..done + len as usize]) };
            done += len as usize;
        }
        true
    }
}

/// Copies bytes that others may be changing: every byte is read exactly once.
///
/// # Safety
/// `from` is valid for reading `into.len()` bytes.
pub unsafe fn copy_out(from: *const u8, into: &mut [u8]) {
    let (words, rest) = into.as_chunks_mut::<8>();
    if (from as usize).is_multiple_of(8) {
        let mut at = from;
        for word in words {
            // SAFETY: inside the range that the caller vouches for, and aligned.
            *word = unsafe { at.cast::<u64>().read_volatile() }.to_ne_bytes();
            // SAFETY: at most one past the range.
            at = unsafe { at.add(8) };
        }
        for (index, byte) in rest.iter_mut().enumerate() {
            // SAFETY: inside the range that the caller vouches for.
            *byte = unsafe { at.add(index).read_volatile() };
        }
        return;
    }
    for (index, byte) in into.iter_mut().enumerate() {
        // SAFETY: inside the range that the caller vouches for.
        *byte = unsafe { from.add(index).read_volatile() };
    }
}

/// A file in memory, whose length others can be kept from changing.
pub(super) fn memfd(name: &CStr, len: u64) -> io::Result<OwnedFd> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(len)?;
    Ok(file.into())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn memfd(len: u64) -> OwnedFd {
        super::memfd(c"guest", len).unwrap()
    }

    fn spec(guest: u64, len: u64, user: u64, offset: u64) -> RegionSpec {
        RegionSpec { guest, len, user, offset }
    }

    fn region(guest: u64, len: u64, user: u64) -> Region {
        Region::map(spec(guest, len, user, 0), &memfd(len)).unwrap()
    }

    #[test]
    fn addresses_are_found_in_their_region_and_nowhere_else() {
        let memory = GuestMemory::empty()
            .with(region(0x10_0000, 0x2000, 0x7000_0000))
            .unwrap()
            .with(region(0, 0x1000, 0x6000_0000))
            .unwrap();
        assert!(memory.contiguous(0, 0x1000).is_some());
        assert!(memory.contiguous(0xfff, 2).is_none());
        assert!(memory.translate(0x1000, 1).is_none());
        assert!(memory.translate(0xf_ffff, 1).is_none());
        assert!(memory.contiguous(0x10_0000, 0x2000).is_some());
        assert!(memory.contiguous(0x10_1fff, 1).is_some());
        assert!(memory.translate(0x10_2000, 1).is_none());
        assert!(memory.translate(u64::MAX, u64::MAX).is_none());
        assert_eq!(memory.user_contiguous(0x7000_1000, 16), memory.contiguous(0x10_1000, 16));
        assert!(memory.user_contiguous(0x7000_1ff8, 16).is_none());
        assert!(memory.user_contiguous(u64::MAX, u64::MAX).is_none());
    }

    #[test]
    fn neighbours_are_read_across_their_border() {
        let memory = GuestMemory::empty()
            .with(region(0, 0x1000, 0))
            .unwrap()
            .with(region(0x1000, 0x1000, 0x9000))
            .unwrap();
        for at in 0xff8..0x1008 {
            // SAFETY: inside the two regions, used by this test alone.
            unsafe { memory.contiguous(at, 1).unwrap().write(at as u8) };
        }
        let mut bytes = [0; 16];
        assert!(memory.read(0xff8, &mut bytes));
        assert_eq!(bytes, [0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff, 0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(!memory.read(0x1ff8, &mut bytes));
        assert!(!memory.read(u64::MAX - 3, &mut bytes));
    }

    #[test]
    fn contradictory_regions_are_refused() {
        let file = memfd(0x2000);
        let refused =
            |spec| Region::map(spec, &file).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused(spec(0, 0, 0, 0)).contains("no bytes"));
        assert!(refused(spec(u64::MAX - 0xfff, 0x2000, 0, 0)).contains("guest's address space"));
        assert!(refused(spec(0, 0x2000, u64::MAX - 0xfff, 0)).contains("front end's address space"));
        assert!(refused(spec(0, 0x2000, 0, u64::MAX)).contains("do not fit"));
        assert!(refused(spec(0, 1 << 50, 0, 0)).contains("64 TiB"));
        assert!(refused(spec(0, 0x2001, 0, 0)).contains("fewer"));
        assert!(refused(spec(0, 0x1000, 0, 0x1001)).contains("fewer"));
        let null = std::fs::File::open("/dev/null").unwrap().into();
        let error = Region::map(spec(0, 0x1000, 0, 0), &null).unwrap_err();
        assert!(error.to_string().contains("not a regular file"));
    }

    #[test]
    fn overlapping_regions_are_refused_in_either_address_space() {
        let memory = GuestMemory::empty().with(region(0x1000, 0x2000, 0x10_0000)).unwrap();
        assert!(memory.with(region(0x2fff, 0x1000, 0x20_0000)).is_err());
        assert!(memory.with(region(0, 0x1001, 0x20_0000)).is_err());
        assert!(memory.with(region(0x5000, 0x1000, 0x10_1fff)).is_err());
        assert!(memory.with(region(0x3000, 0x1000, 0x10_2000)).is_ok());
    }

    #[test]
    fn only_a_region_that_is_there_can_go() {
        let memory = GuestMemory::empty().with(region(0x1000, 0x2000, 0x10_0000)).unwrap();
        assert!(memory.without(spec(0x1000, 0x1000, 0x10_0000, 0)).is_err());
        assert_eq!(memory.without(spec(0x1000, 0x2000, 0x10_0000, 0)).unwrap().region_count(), 0);
    }

    #[test]
    fn a_memfd_is_sealed_against_shrinking() {
        let file = memfd(0x2000);
        let _region = Region::map(spec(0, 0x2000, 0, 0), &file).unwrap();
        assert!(std::fs::File::from(file).set_len(0).is_err());
    }

    #[test]
    fn a_region_may_begin_in_the_middle_of_a_page() {
        let file = memfd(0x3000);
        let region = Region::map(spec(0, 0x1000, 0, 0x1200), &file).unwrap();
        let memory = GuestMemory::empty().with(region).unwrap();
        // SAFETY: inside the region, used by this test alone.
        unsafe { memory.contiguous(0, 1).unwrap().write(7) };
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::from(file), &mut byte, 0x1200).unwrap();
        assert_eq!(byte, [7]);
    }

    #[test]
    fn bytes_are_copied_whatever_their_alignment() {
        let source: Vec<u8> = (0..64).collect();
        for start in 0..9 {
            for len in 0..40 {
                let mut out = vec![0; len];
                // SAFETY: the range lies inside `source`.
                unsafe { copy_out(source.as_ptr().add(start), &mut out) };
                assert_eq!(out, source[start..start + len]);
            }
        }
    }
}
