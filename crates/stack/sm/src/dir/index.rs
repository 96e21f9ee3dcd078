//! Which images there are: looked at anew only where a file has changed since it was last looked at.
//!
//! A change of ours ([`Index::begin`], [`Index::end`]) keeps what is known true without a look at the other images, as
//! long as the directory is as the last look or change left it: no file came, went or was renamed by another program.
//! What that cannot show is an image that is given another parent in place. Programs that do so shorten chains, and
//! the image between is still known as its parent's child until it is removed, which changes the directory. Nor does it
//! show a change by another program within the same tick of the file system's clock (some milliseconds) as the last one
//! of ours. Before a base copy is removed all images are looked at.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use uuid::Uuid;

use super::facts::{Facts, FileKind};
use super::journal;

/// Threads that look at images side by side: most of the time they wait for the storage.
const THREADS_MAX: usize = 8;
/// So many images are worth a thread.
const IMAGES_PER_THREAD: usize = 64;

/// Clocks of file systems tick this slowly at most: what changed more recently than that before it was looked at may
/// have changed since without a trace.
const TICK_S: i64 = 2;

/// By these a file is known to be as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    len: u64,
    blocks: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Debug)]
struct Known {
    /// None where it does not tell a change for sure.
    stamp: Option<Stamp>,
    facts: Arc<Facts>,
}

/// One image that was looked at.
type Looked = ((Uuid, FileKind), Option<Stamp>, Arc<Facts>);

/// What is known of a directory's images.
#[derive(Debug)]
pub(crate) struct Index {
    directory: PathBuf,
    state: Mutex<State>,
    /// Files whose state or content was asked for.
    asked: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    images: HashMap<(Uuid, FileKind), Known>,
    /// How many images name each one as their parent.
    children: HashMap<Uuid, u32>,
    /// Virtual sizes of all disks together.
    virtual_size: u128,
    /// The directory as the last look or the last change of ours left it; none where that is not known.
    directory: Option<Stamp>,
    /// Looks at the whole directory so far.
    looks: u64,
}

/// A change of ours that has begun; the SR's lock is held until [`Index::end`].
#[derive(Debug)]
pub(crate) struct Own {
    /// The look that what is known rests on; none where the directory has changed since.
    on: Option<u64>,
}

fn parent_of(facts: &Facts) -> Option<Uuid> {
    facts.parent.as_ref().and_then(|parent| FileKind::of_file(&parent.name)).map(|(uuid, _)| uuid)
}

impl State {
    fn put(&mut self, image: (Uuid, FileKind), known: Known) {
        self.take(image);
        if let Some(parent) = parent_of(&known.facts) {
            *self.children.entry(parent).or_insert(0) += 1;
        }
        if !known.facts.hidden {
            self.virtual_size += u128::from(known.facts.virtual_size);
        }
        self.images.insert(image, known);
    }

    fn take(&mut self, image: (Uuid, FileKind)) {
        let Some(known) = self.images.remove(&image) else { return };
        if let Some(parent) = parent_of(&known.facts)
            && let Some(count) = self.children.get_mut(&parent)
        {
            *count -= 1;
            if *count == 0 {
                self.children.remove(&parent);
            }
        }
        if !known.facts.hidden {
            self.virtual_size -= u128::from(known.facts.virtual_size);
        }
    }

    fn children(&self, image: Uuid) -> u32 {
        self.children.get(&image).copied().unwrap_or(0)
    }
}

/// What lies in the directory.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// Images by UUID.
    pub(crate) images: BTreeMap<Uuid, Arc<Facts>>,
    /// What changes of several steps left: names of files.
    pub(crate) leftovers: Vec<String>,
    /// VDIs that have a log of changed blocks.
    pub(crate) logs: BTreeSet<Uuid>,
}

impl Listing {
    /// The UUID of the image that this one names as its parent.
    pub(crate) fn parent_of(&self, facts: &Facts) -> Option<Uuid> {
        parent_of(facts)
    }

    /// How many images name each one as their parent.
    pub(crate) fn children(&self) -> HashMap<Uuid, u32> {
        let mut children = HashMap::new();
        for parent in self.images.values().filter_map(|facts| self.parent_of(facts)) {
            *children.entry(parent).or_insert(0) += 1;
        }
        children
    }

    /// Whether an image only carries others: a hidden VHD, and a raw one that is a parent, which has no flag.
    pub(crate) fn is_base(facts: &Facts, children: u32) -> bool {
        facts.hidden || (facts.kind == FileKind::Raw && children > 0)
    }
}

impl Index {
    pub(crate) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_path_buf(), state: Mutex::default(), asked: AtomicU64::new(0) }
    }

    /// The directory as it is.
    fn stamp(&self) -> Option<Stamp> {
        std::fs::metadata(&self.directory).ok().map(|data| Stamp::of(&data))
    }

    /// Begins a change of ours.
    pub(crate) fn begin(&self) -> Own {
        let state = self.state.lock();
        let is_as_known = state.directory.is_some() && state.directory == self.stamp();
        Own { on: is_as_known.then_some(state.looks) }
    }

    /// Ends a change of ours that made, changed or removed these images and no others.
    pub(crate) fn end(&self, own: &Own, changed: &[Uuid]) {
        let mut state = self.state.lock();
        if own.on != Some(state.looks) {
            state.directory = None;
            return;
        }
        for image in changed.iter().flat_map(|uuid| FileKind::ALL.map(|kind| (*uuid, kind))) {
            match self.read(image.0, image.1) {
                // Looked at again next time: it may change within one tick of the clock.
                Ok(facts) => state.put(image, Known { stamp: None, facts: Arc::new(facts) }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => state.take(image),
                Err(_) => {
                    state.directory = None;
                    return;
                }
            }
        }
        state.directory = self.stamp();
    }

    /// What is known of an image that can go alone: it carries none, and its parent carries others besides. None
    /// where that takes a look at all images.
    pub(crate) fn lone(&self, own: &Own, uuid: Uuid) -> Option<Arc<Facts>> {
        let state = self.state.lock();
        let mut kinds = FileKind::ALL.into_iter().filter_map(|kind| state.images.get(&(uuid, kind)));
        let (Some(known), None) = (kinds.next(), kinds.next()) else { return None };
        let is_lone = own.on == Some(state.looks)
            && state.children(uuid) == 0
            && parent_of(&known.facts).is_none_or(|parent| state.children(parent) > 1);
        is_lone.then(|| Arc::clone(&known.facts))
    }

    /// How many images name this one as their parent; none where that takes a look at all images.
    pub(crate) fn children(&self, uuid: Uuid) -> Option<u32> {
        let own = self.begin();
        let state = self.state.lock();
        (own.on == Some(state.looks)).then(|| state.children(uuid))
    }

    /// Files whose state or content was asked for so far.
    #[cfg(test)]
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    fn read(&self, uuid: Uuid, kind: FileKind) -> io::Result<Facts> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Facts::read(&self.directory.join(kind.file_name(uuid)), kind)
    }

    /// Looks at the directory.
    ///
    /// # Errors
    /// The directory cannot be read. A single image that cannot be is damaged.
    pub(crate) fn list(&self) -> io::Result<Listing> {
        let mut listing = Listing::default();
        let mut names = Vec::new();
        // Before it is read: what comes meanwhile makes it another one.
        let directory = self.stamp();
        for entry in std::fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str() else { continue };
            if let Some(image) = FileKind::of_file(name) {
                names.push(image);
            } else if let Some(vdi) = journal::log_of_file(name) {
                listing.logs.insert(vdi);
            } else if journal::is_leftover(name) {
                listing.leftovers.push(name.to_string());
            }
        }
        let mut state = self.state.lock();
        // Before they are looked at: what changes while they are is looked at again.
        let now = unix_seconds();
        let found = self.look_at(&names, &state.images);
        let mut fresh = State { directory, looks: state.looks + 1, ..State::default() };
        for ((uuid, kind), stamp, facts) in found {
            let stamp = stamp.filter(|stamp| stamp.changed.0 + TICK_S < now);
            fresh.put((uuid, kind), Known { stamp, facts: Arc::clone(&facts) });
            // Two files of one UUID are left by a fork of a raw image that stopped: the VHD is on top.
            let place = listing.images.entry(uuid).or_insert_with(|| Arc::clone(&facts));
            if kind == FileKind::Vhd {
                *place = facts;
            }
        }
        *state = fresh;
        listing.leftovers.sort();
        Ok(listing)
    }

    /// Virtual sizes together of all disks that were there at the last look, with our changes since.
    pub(crate) fn virtual_sizes(&self) -> u64 {
        u64::try_from(self.state.lock().virtual_size).unwrap_or(u64::MAX)
    }

    /// One image of either kind, the VHD where there are both.
    ///
    /// # Errors
    /// The system's; none where there is no such image.
    pub(crate) fn one(&self, uuid: Uuid) -> io::Result<Option<Facts>> {
        for kind in FileKind::ALL {
            match self.read(uuid, kind) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                found => return found.map(Some),
            }
        }
        Ok(None)
    }

    fn look_at(&self, names: &[(Uuid, FileKind)], known: &HashMap<(Uuid, FileKind), Known>) -> Vec<Looked> {
        let threads = names.len().div_ceil(IMAGES_PER_THREAD).clamp(1, THREADS_MAX);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::with_capacity(names.len() / threads + 1);
            loop {
                let at = next.fetch_add(IMAGES_PER_THREAD, Ordering::Relaxed);
                if at >= names.len() {
                    return found;
                }
                for image in &names[at..names.len().min(at + IMAGES_PER_THREAD)] {
                    found.extend(self.look_at_one(*image, known.get(image)));
                }
            }
        };
        if threads == 1 {
            return work();
        }
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
        })
    }

    fn look_at_one(&self, (uuid, kind): (Uuid, FileKind), known: Option<&Known>) -> Option<Looked> {
        let path = self.directory.join(kind.file_name(uuid));
        self.asked.fetch_add(1, Ordering::Relaxed);
        let data = match std::fs::symlink_metadata(&path) {
            Ok(data) => data,
            // Gone since its name was read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => return Some(((uuid, kind), None, Arc::new(unreadable(kind, &error)))),
        };
        let stamp = Some(Stamp::of(&data));
        if let Some(known) = known.filter(|known| known.stamp == stamp) {
            return Some(((uuid, kind), stamp, Arc::clone(&known.facts)));
        }
        let facts = match self.read(uuid, kind) {
            Ok(facts) => facts,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            // Tried again next time.
            Err(error) => return Some(((uuid, kind), None, Arc::new(unreadable(kind, &error)))),
        };
        Some(((uuid, kind), stamp, Arc::new(facts)))
    }
}

impl Stamp {
    fn of(data: &std::fs::Metadata) -> Self {
        Self {
            inode: data.ino(),
            len: data.len(),
            blocks: data.blocks(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        }
    }
}

fn unix_seconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    i64::try_from(since).unwrap_or(i64::MAX)
}

fn unreadable(kind: FileKind, error: &io::Error) -> Facts {
    Facts {
        kind,
        virtual_size: 0,
        physical: 0,
        hidden: false,
        footer_uuid: Uuid::nil(),
        parent: None,
        damage: Some(format!("cannot be read: {error}")),
        disabled: false,
    }
}

#[cfg(test)]
mod tests {
    use tapio_format::vhd::offline::{Image, OpenOptions, Shape, create, set_hidden};

    use super::*;

    #[test]
    fn a_change_is_seen_and_what_is_foreign_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let index = Index::new(dir.path());
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let path = dir.path().join(FileKind::Vhd.file_name(a));
        create(&path, &Shape::Dynamic, 2 << 20, 0).unwrap();
        std::fs::write(dir.path().join(FileKind::Raw.file_name(b)), [1; 1000]).unwrap();
        for foreign in ["lost+found", "readme", "x.vhd", ".hidden"] {
            std::fs::write(dir.path().join(foreign), "").unwrap();
        }
        let listing = index.list().unwrap();
        assert_eq!(listing.images.keys().copied().collect::<Vec<_>>(), [a, b]);
        assert!(!listing.images[&a].hidden && listing.leftovers.is_empty());
        assert_eq!(listing.images[&b].virtual_size, 1024, "whole sectors");
        set_hidden(&mut Image::open(&path, OpenOptions::WRITE).unwrap(), 1).unwrap();
        assert!(index.list().unwrap().images[&a].hidden);
        // Back and forth within one tick of the clock, and nothing else about the file is different.
        for hidden in [0, 1, 0, 1] {
            set_hidden(&mut Image::open(&path, OpenOptions::WRITE).unwrap(), hidden).unwrap();
            assert_eq!(index.list().unwrap().images[&a].hidden, hidden == 1);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(index.list().unwrap().images.len(), 1);
        assert_eq!(index.one(a).unwrap(), None);
        assert_eq!(index.one(b).unwrap().unwrap().kind, FileKind::Raw);
    }
}
