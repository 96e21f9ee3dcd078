//! The file of a pool: the first disk makes it, the last one removes it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use tapio_sys::shm::{PrivateDir, SharedMemory};

use super::layout::{MAGIC, Owner, PAGES_MAX, SEGMENT_LEN, SLOTS, VERSION, at};
use super::ledger::{Ledger, Memory};
use super::{PAGES_DEFAULT, PoolName, owner};
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
}

impl Memory for Mapping {
    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::SeqCst)
    }

    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::SeqCst);
    }

    fn swap(&self, at: usize, old: u64, new: u64) -> bool {
        self.word(at).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// Where a pool's files are.
#[derive(Clone, Debug)]
pub struct Place {
    root: ShmRoot,
    name: PoolName,
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

impl Place {
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    fn dir(&self) -> io::Result<PrivateDir> {
        PrivateDir::open(&self.root.pools())
    }

    fn path(&self) -> PathBuf {
        self.root.pools().join(self.name.as_str())
    }

    /// What wakes the disk of a slot: a FIFO, which a thread can wait for in its ring on any kernel.
    fn bell(&self, slot: usize) -> String {
        format!(".{}.{slot}", self.name.as_str())
    }

    fn open_bell(&self, slot: usize) -> io::Result<File> {
        self.dir()?.fifo_or_new(&self.bell(slot))
    }

    pub fn open_bell_of_other(&self, slot: usize) -> io::Result<File> {
        self.dir()?.fifo_of_other(&self.bell(slot))
    }

    fn open(&self) -> io::Result<Option<(File, Header)>> {
        let file = match self.dir().and_then(|dir| dir.file(self.name.as_str(), true)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        let mut bytes = [0; 32];
        if metadata.len() != SEGMENT_LEN as u64 || file.read_exact_at(&mut bytes, 0).is_err() {
            return Ok(None);
        }
        match Header::parse(&bytes) {
            Some(Header { version, .. }) if version != VERSION => Err(invalid(format!(
                "{} has layout {version}, not {VERSION}: unplug the disks that use it, or use their tapio",
                self.path().display()
            ))),
            Some(header) => Ok(Some((file, header))),
            None => Ok(None),
        }
    }

    fn create(&self, total: u32) -> io::Result<Ledger<Mapping>> {
        // What is there is damaged, or has no living disk: disks that still use it go on among themselves.
        let dir = self.dir()?;
        match dir.remove(self.name.as_str()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = dir.new_file(self.name.as_str())?;
        file.set_len(SEGMENT_LEN as u64)?;
        Ok(Ledger::format(Mapping::of(&file)?, total))
    }

    /// Called by a disk that has left: the last one takes the files away.
    pub fn leave(&self, ledger: &Ledger<Mapping>) {
        // Without the turn the files stay, and go with the next process that starts.
        let Ok(turn) = Turn::take(&self.root) else { return };
        if has_living(ledger) {
            return;
        }
        self.remove(&turn);
    }

    fn remove(&self, _turn: &Turn) {
        let Ok(dir) = self.dir() else { return };
        // The pool first: bells without a pool mean nothing. Failures leave files for the next one that cleans.
        let _ = dir.remove(self.name.as_str());
        let prefix = format!(".{}.", self.name.as_str());
        for name in names(&self.root.pools()).unwrap_or_default() {
            let slot = name.strip_prefix(&prefix);
            if slot.is_some_and(|slot| slot.parse::<u8>().is_ok()) {
                let _ = dir.remove(&name);
            }
        }
        // Not empty: other pools.
        let _ = fs::remove_dir(self.root.pools());
    }
}

fn has_living(ledger: &Ledger<Mapping>) -> bool {
    (0..SLOTS).map(|slot| ledger.owner(slot)).any(|owner| owner != Owner::NONE && !owner::is_dead(owner))
}

/// The first words of a segment.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    pub version: u64,
    pub total: u32,
}

impl Header {
    /// `None` for what is no segment, or none with a pool in it.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(*bytes.get(at * 8..)?.first_chunk()?));
        let total = u32::try_from(word(at::TOTAL)?).ok()?;
        let sound = word(at::MAGIC)? == MAGIC && (1..=PAGES_MAX).contains(&total);
        let version = word(at::VERSION)?;
        (sound && (version != VERSION || word(at::SLOTS)? == SLOTS as u64)).then_some(Self { version, total })
    }
}

/// A slot of a pool that a disk of this process has taken.
#[derive(Debug)]
pub struct TakenSlot {
    pub ledger: Ledger<Mapping>,
    pub place: Place,
    pub slot: usize,
    pub owner: Owner,
    /// What others write a byte into to wake this disk.
    pub bell: File,
}

/// Takes a slot of a pool; see [`super::join`].
pub fn take_slot(root: &ShmRoot, name: &PoolName, pages: Option<u32>, minor: u32) -> io::Result<TakenSlot> {
    if let Some(pages) = pages.filter(|pages| !(1..=PAGES_MAX).contains(pages)) {
        return Err(invalid(format!("a pool has 1 to {PAGES_MAX} pages, not {pages}")));
    }
    let ours = owner::ourselves()?;
    let place = Place { root: root.clone(), name: name.clone() };
    let _turn = Turn::take(root)?;
    private_dir(&root.pools())?;
    let found = match place.open()? {
        Some((file, header)) => {
            let ledger = Ledger { memory: Mapping::of(&file)?, total: header.total };
            // One that only dead processes had is made anew: it may have been left half-way.
            has_living(&ledger).then_some(ledger)
        }
        None => None,
    };
    let ledger = match (found, pages) {
        (Some(ledger), Some(pages)) if ledger.total != pages => {
            return Err(invalid(format!(
                "pool {} has {} pages, not {pages}: leave the number out, or unplug its disks first",
                name.as_str(),
                ledger.total
            )));
        }
        (Some(ledger), _) => {
            // A quick look at each: hundreds of disks join one after the other. Those that it misses are found by
            // a disk that waits for pages, or below.
            ledger.reclaim(ours, &owner::is_gone);
            ledger
        }
        (None, pages) => place.create(pages.unwrap_or(PAGES_DEFAULT))?,
    };
    let found = ledger.join(ours, minor).or_else(|| {
        ledger.reclaim(ours, &owner::is_dead);
        ledger.join(ours, minor)
    });
    let slot = found.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::StorageFull,
            format!("pool {} has {SLOTS} disks, which is all it can have", name.as_str()),
        )
    })?;
    match place.open_bell(slot) {
        Ok(bell) => Ok(TakenSlot { ledger, place, slot, owner: ours, bell }),
        Err(error) => {
            ledger.leave(slot);
            Err(error)
        }
    }
}

/// Removes pools whose disks are all dead.
///
/// # Errors
/// The directory exists and cannot be listed.
pub fn clean_pools(root: &ShmRoot) -> io::Result<()> {
    if !root.pools().exists() {
        return Ok(());
    }
    let turn = Turn::take(root)?;
    for name in names(&root.pools())? {
        let Ok(name) = name.parse::<PoolName>() else { continue };
        let place = Place { root: root.clone(), name };
        if let Ok(Some((file, header))) = place.open()
            && let Ok(memory) = Mapping::of(&file)
            && !has_living(&Ledger { memory, total: header.total })
        {
            place.remove(&turn);
        }
    }
    Ok(())
}
