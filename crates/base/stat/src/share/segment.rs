//! The file of a device: the first disk makes it, the last one removes it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tapio_sys::shm::{PrivateDir, SharedMemory};

use super::layout::{MAGIC, SEGMENT_LEN, SLOTS, VERSION, at};
use super::{DeviceName, WEIGHT_DEFAULT};
use crate::pool::layout::Owner;
use crate::pool::owner;
use crate::reader::names;
use crate::shm::{ShmRoot, Turn, private_dir};

/// A segment in memory.
#[derive(Debug)]
pub struct Mapping(SharedMemory);

impl Mapping {
    fn of(file: &File) -> io::Result<Self> {
        SharedMemory::of(file, SEGMENT_LEN).map(Self)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < SEGMENT_LEN / 8, "outside the segment");
        // SAFETY: inside the mapping, as just checked, and aligned; every bit pattern is a valid number.
        unsafe { self.0.base().cast::<AtomicU64>().add(at).as_ref() }
    }

    #[inline]
    pub fn load(&self, at: usize) -> u64 {
        self.word(at).load(Relaxed)
    }

    #[inline]
    pub fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Relaxed);
    }

    fn owner(&self, slot: usize) -> Owner {
        Owner(self.load(at::owner(slot)))
    }

    /// Counts the disks anew. With the turn.
    fn count(&self) -> u64 {
        let count = (0..SLOTS).filter(|slot| self.owner(*slot) != Owner::NONE).count() as u64;
        self.store(at::MEMBERS, count);
        count
    }

    /// Frees the slots of processes that are dead. With the turn.
    fn reclaim(&self, ours: Owner) {
        for slot in 0..SLOTS {
            let there = self.owner(slot);
            if there != Owner::NONE && there != ours && owner::is_dead(there) {
                self.store(at::owner(slot), 0);
            }
        }
    }
}

/// Where a device's file is.
#[derive(Clone, Debug)]
pub struct Place {
    root: ShmRoot,
    name: DeviceName,
}

impl Place {
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    fn dir(&self) -> io::Result<PrivateDir> {
        PrivateDir::open(&self.root.shares())
    }

    /// The segment that is there; `None` for none, or what is none.
    fn open(&self) -> io::Result<Option<Mapping>> {
        let file = match self.dir().and_then(|dir| dir.file(self.name.as_str(), true)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = [0; 24];
        if file.metadata()?.len() != SEGMENT_LEN as u64 || file.read_exact_at(&mut bytes, 0).is_err() {
            return Ok(None);
        }
        let word = |at: usize| bytes[at * 8..].first_chunk().map(|word| u64::from_ne_bytes(*word));
        let version = word(at::VERSION).unwrap_or(0);
        if word(at::MAGIC) != Some(MAGIC) || version == VERSION && word(at::SLOTS) != Some(SLOTS as u64) {
            return Ok(None);
        }
        if version != VERSION {
            let path = self.root.shares().join(self.name.as_str());
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{} has layout {version}, not {VERSION}: its disks are of another tapio",
                    path.display()
                ),
            ));
        }
        Mapping::of(&file).map(Some)
    }

    fn create(&self) -> io::Result<Mapping> {
        let dir = self.dir()?;
        match dir.remove(self.name.as_str()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = dir.new_file(self.name.as_str())?;
        file.set_len(SEGMENT_LEN as u64)?;
        let memory = Mapping::of(&file)?;
        memory.store(at::SLOTS, SLOTS as u64);
        memory.store(at::VERSION, VERSION);
        memory.store(at::MAGIC, MAGIC);
        Ok(memory)
    }

    /// Called by a disk that leaves: the last one takes the file away.
    pub fn leave(&self, memory: &Mapping, slot: usize) {
        // Without the turn the slot is freed by the next disk that comes, and the file by the next process that starts.
        let Ok(_turn) = Turn::take(&self.root) else { return };
        memory.store(at::owner(slot), 0);
        if memory.count() > 0 {
            return;
        }
        if let Ok(dir) = self.dir() {
            // A failure leaves a file for the next process that cleans.
            let _ = dir.remove(self.name.as_str());
        }
        // Not empty: other devices.
        let _ = fs::remove_dir(self.root.shares());
    }
}

/// Takes a place at the device of that name for the disk of that minor number of this process.
///
/// # Errors
/// The segment is full of disks, has another layout, or cannot be made.
pub fn take_slot(root: &ShmRoot, name: &DeviceName, minor: u32) -> io::Result<(Mapping, Place, usize)> {
    let ours = owner::ourselves()?;
    let place = Place { root: root.clone(), name: name.clone() };
    let _turn = Turn::take(root)?;
    private_dir(&root.shares())?;
    let memory = match place.open()? {
        Some(memory) => memory,
        None => place.create()?,
    };
    memory.reclaim(ours);
    let slot = (0..SLOTS).find(|slot| memory.owner(*slot) == Owner::NONE).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::StorageFull,
            format!("device {} has {SLOTS} disks, which is all that can share it", name.as_str()),
        )
    })?;
    for word in [at::cost(slot), at::bytes(slot), at::busy(slot), at::flags(slot), at::until(slot)] {
        memory.store(word, 0);
    }
    memory.store(at::weight(slot), WEIGHT_DEFAULT.into());
    memory.store(at::minor(slot), minor.into());
    memory.store(at::owner(slot), ours.0);
    memory.store(at::USED, memory.load(at::USED).clamp(slot as u64 + 1, SLOTS as u64));
    memory.count();
    Ok((memory, place, slot))
}

/// Removes the files of devices whose disks are all dead.
///
/// # Errors
/// The directory exists and cannot be listed.
pub fn clean_shares(root: &ShmRoot) -> io::Result<()> {
    if !root.shares().exists() {
        return Ok(());
    }
    let _turn = Turn::take(root)?;
    for name in names(&root.shares())? {
        let Ok(name) = name.parse::<DeviceName>() else { continue };
        let place = Place { root: root.clone(), name };
        if let Ok(Some(memory)) = place.open() {
            memory.reclaim(Owner::NONE);
            if memory.count() == 0 {
                let _ = place.dir().and_then(|dir| dir.remove(place.name()));
            }
        }
    }
    let _ = fs::remove_dir(root.shares());
    Ok(())
}
