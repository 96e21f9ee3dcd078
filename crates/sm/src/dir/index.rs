//! Which images there are: looked at anew only where a file has changed since it was last looked at.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use super::facts::{Facts, Kind};
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
type Looked = ((Uuid, Kind), Option<Stamp>, Arc<Facts>);

/// What is known of a directory's images.
#[derive(Debug)]
pub(crate) struct Index {
    directory: PathBuf,
    known: Mutex<HashMap<(Uuid, Kind), Known>>,
}

/// What lies in the directory.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// Images by UUID.
    pub(crate) images: BTreeMap<Uuid, Arc<Facts>>,
    /// What changes of several steps left: names of files.
    pub(crate) leftovers: Vec<String>,
}

impl Listing {
    /// The UUID of the image that this one names as its parent.
    pub(crate) fn parent_of(&self, facts: &Facts) -> Option<Uuid> {
        facts.parent.as_ref().and_then(|parent| Kind::of_file(&parent.name)).map(|(uuid, _)| uuid)
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
        facts.hidden || (facts.kind == Kind::Raw && children > 0)
    }
}

impl Index {
    pub(crate) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_path_buf(), known: Mutex::new(HashMap::new()) }
    }

    /// Looks at the directory.
    ///
    /// # Errors
    /// The directory cannot be read. A single image that cannot be is damaged.
    pub(crate) fn list(&self) -> io::Result<Listing> {
        let mut listing = Listing::default();
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str() else { continue };
            if let Some(image) = Kind::of_file(name) {
                names.push(image);
            } else if journal::is_leftover(name) {
                listing.leftovers.push(name.to_string());
            }
        }
        // A panic elsewhere leaves a whole map behind the lock.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // Before they are looked at: what changes while they are is looked at again.
        let now = unix_seconds();
        let found = self.look_at(&names, &known);
        let mut fresh = HashMap::with_capacity(found.len());
        for ((uuid, kind), stamp, facts) in found {
            let stamp = stamp.filter(|stamp| stamp.changed.0 + TICK_S < now);
            fresh.insert((uuid, kind), Known { stamp, facts: Arc::clone(&facts) });
            // Two files of one UUID are left by a fork of a raw image that stopped: the VHD is on top.
            let place = listing.images.entry(uuid).or_insert_with(|| Arc::clone(&facts));
            if kind == Kind::Vhd {
                *place = facts;
            }
        }
        *known = fresh;
        listing.leftovers.sort();
        Ok(listing)
    }

    /// Virtual sizes together of all disks that were there when the directory was last looked at.
    pub(crate) fn virtual_sizes(&self) -> u64 {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let disks = known.values().filter(|known| !known.facts.hidden);
        disks.fold(0u64, |sum, known| sum.saturating_add(known.facts.virtual_size))
    }

    /// One image of either kind, the VHD where there are both.
    ///
    /// # Errors
    /// The system's; none where there is no such image.
    pub(crate) fn one(&self, uuid: Uuid) -> io::Result<Option<Facts>> {
        for kind in Kind::ALL {
            match Facts::read(&self.directory.join(kind.file_name(uuid)), kind) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                found => return found.map(Some),
            }
        }
        Ok(None)
    }

    fn look_at(&self, names: &[(Uuid, Kind)], known: &HashMap<(Uuid, Kind), Known>) -> Vec<Looked> {
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

    fn look_at_one(&self, (uuid, kind): (Uuid, Kind), known: Option<&Known>) -> Option<Looked> {
        let path = self.directory.join(kind.file_name(uuid));
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
        let facts = match Facts::read(&path, kind) {
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

fn unreadable(kind: Kind, error: &io::Error) -> Facts {
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
        let path = dir.path().join(Kind::Vhd.file_name(a));
        create(&path, &Shape::Dynamic, 2 << 20, 0).unwrap();
        std::fs::write(dir.path().join(Kind::Raw.file_name(b)), [1; 1000]).unwrap();
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
        assert_eq!(index.one(b).unwrap().unwrap().kind, Kind::Raw);
    }
}
