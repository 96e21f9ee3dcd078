//! A double of LVM, for tests on hosts whose kernel has no device-mapper: a device of its own (a loop device over a
//! sparse file), a group with volumes on it, and the programs that [`super::commands`] runs.
//!
//! ```text
//! loops    loop devices: that of the whole file, and one over the place of each volume
//! state    what LVM's metadata say; each program's change of it becomes valid by the renaming of one file
//! programs what each program does and prints
//! label    LVM's mark of the device
//! ```
//!
//! It is as unkind as LVM may be. A volume that was made or has become longer begins with what others left in that
//! place, and each 4 MiB of it end with the footer of an image that is gone. A volume that is open is neither removed
//! nor taken away, and one that refuses writes cannot be opened for them. Volumes that one call names change one by
//! one.
//!
//! A test ends its process before the n-th program, or between two changes of one ([`Host::die_at`]). What was made
//! reachable stays so, as it would in a kernel, and another process goes on with it ([`Host::again`]).

mod label;
mod loops;
mod programs;
mod state;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tapio_format::vhd::offline::{Shape, create_on};

use super::size::EXTENT;
use loops::Loop;
use state::{FIRST, PLACE, PLACES, State, Volume};

/// A page of the device: what is copied when it is put back.
const PAGE: u64 = 64 << 10;

static HOSTS: Mutex<Vec<Arc<Inner>>> = Mutex::new(Vec::new());

/// A device with LVM's programs for it, which every call of this process finds. It goes when this is dropped.
#[derive(Debug)]
pub struct Host {
    inner: Arc<Inner>,
    is_owner: bool,
}

/// The device as it was at some moment.
#[derive(Debug)]
pub struct Saved {
    state: State,
    pages: BTreeMap<u64, Vec<u8>>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    device: PathBuf,
    state: Mutex<State>,
    /// Programs and changes so far.
    count: AtomicU64,
    /// At which of them the process ends; 0: at none.
    die_at: AtomicU64,
}

/// The footer of an image that is gone.
fn footer_of_another() -> io::Result<Vec<u8>> {
    let mut medium: Vec<u8> = Vec::new();
    create_on(&mut medium, &Shape::Dynamic, 2 << 20, 0).map_err(io::Error::other)?;
    Ok(medium.split_off(medium.len() - 512))
}

impl Host {
    /// A new device whose group has room for `room` bytes of volumes; what belongs to it lies in `dir`.
    ///
    /// # Errors
    /// There are no loop devices, or they cannot be had.
    pub fn new(dir: &Path, room: u64) -> io::Result<Self> {
        fs::create_dir_all(dir.join("dev"))?;
        let disk = File::options().read(true).write(true).create_new(true).open(dir.join("disk"))?;
        disk.set_len(FIRST + PLACES * PLACE)?;
        let footer = footer_of_another()?;
        for end in 1..=PLACES * PLACE / EXTENT {
            disk.write_all_at(&footer, FIRST + end * EXTENT - 512)?;
        }
        let whole = Loop::over(&dir.join("disk"), 0, 0)?;
        let device = whole.path();
        let state = State { room, whole: Some(whole), ..State::default() };
        state.write(dir)?;
        Ok(Self { inner: Inner::register(dir, device, state), is_owner: true })
    }

    /// The same device in another process, as it was left.
    ///
    /// # Errors
    /// There is none.
    pub fn again(dir: &Path) -> io::Result<Self> {
        let state = State::read(dir)?;
        let whole = state.whole.ok_or_else(|| io::Error::other("it has no device"))?;
        Ok(Self { inner: Inner::register(dir, whole.path(), state), is_owner: false })
    }

    /// Takes in what another process has done.
    ///
    /// # Errors
    /// Its state cannot be read.
    pub fn reload(&self) -> io::Result<()> {
        *self.inner.state.lock() = State::read(&self.inner.dir)?;
        Ok(())
    }

    /// The path of the device.
    pub fn device(&self) -> &Path {
        &self.inner.device
    }

    /// The volumes of its group, by name, with their lengths.
    pub fn volumes(&self) -> BTreeMap<String, u64> {
        let state = self.inner.state.lock();
        let volumes = state.group.iter().flat_map(|group| &group.volumes);
        volumes.map(|volume| (volume.name.clone(), volume.len)).collect()
    }

    /// Names of those that are reachable.
    pub fn reachable(&self) -> Vec<String> {
        let state = self.inner.state.lock();
        let volumes = state.group.iter().flat_map(|group| &group.volumes);
        volumes.filter(|volume| volume.is_active).map(|volume| volume.name.clone()).collect()
    }

    /// The path of a volume that is reachable.
    pub fn path(&self, volume: &str) -> PathBuf {
        let state = self.inner.state.lock();
        let group = state.group.as_ref().map_or("", |group| &group.name);
        self.inner.dir.join("dev").join(group).join(volume)
    }

    /// Gives a volume another name, as an administrator would.
    pub fn rename(&self, from: &str, to: &str) {
        let group =
            self.inner.state.lock().group.as_ref().map(|group| group.name.clone()).unwrap_or_default();
        let _ = programs::run(&self.inner, "lvrename", &["-y", &group, from, to]);
    }

    /// How many programs were run, and changes made beyond the first of each.
    pub fn count(&self) -> u64 {
        self.inner.count.load(Ordering::Relaxed)
    }

    /// The process ends before that many, as by SIGKILL.
    pub fn die_at(&self, count: u64) {
        self.inner.die_at.store(count, Ordering::Relaxed);
    }

    /// What is on the device now.
    ///
    /// # Errors
    /// Those of the device.
    pub fn save(&self) -> io::Result<Saved> {
        let state = self.inner.state.lock().clone();
        state.loops().try_for_each(|one| one.forget())?;
        let disk = File::open(self.inner.dir.join("disk"))?;
        let mut pages = BTreeMap::new();
        let end = disk.metadata()?.len();
        let mut at = loops::next_data(&disk, 0)?;
        while let Some(from) = at.filter(|from| *from < end) {
            let page = from / PAGE * PAGE;
            let mut bytes = vec![0; PAGE.min(end - page) as usize];
            disk.read_exact_at(&mut bytes, page)?;
            pages.insert(page, bytes);
            at = loops::next_data(&disk, page + PAGE)?;
        }
        Ok(Saved { state, pages })
    }

    /// Makes the device as it was.
    ///
    /// # Errors
    /// Those of the device.
    pub fn restore(&self, saved: &Saved) -> io::Result<()> {
        let now = State::read(&self.inner.dir)?;
        now.loops().try_for_each(|one| one.forget())?;
        let disk = File::options().write(true).open(self.inner.dir.join("disk"))?;
        let len = disk.metadata()?.len();
        disk.set_len(0)?;
        disk.set_len(len)?;
        saved.pages.iter().try_for_each(|(at, page)| disk.write_all_at(page, *at))?;
        // Loop devices that were made since are used again.
        let state = State { places: now.places, ..saved.state.clone() };
        if let Some(group) = now.group.as_ref().or(state.group.as_ref()) {
            let _ = fs::remove_dir_all(self.inner.dir.join("dev").join(&group.name));
        }
        state.write(&self.inner.dir)?;
        let mut held = self.inner.state.lock();
        *held = state;
        let volumes: Vec<Volume> = held
            .group
            .iter()
            .flat_map(|group| &group.volumes)
            .filter(|volume| volume.is_active)
            .cloned()
            .collect();
        volumes.iter().try_for_each(|volume| self.inner.link(&mut held, volume))?;
        held.write(&self.inner.dir)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        HOSTS.lock().retain(|known| !Arc::ptr_eq(known, &self.inner));
        if self.is_owner {
            let state = State::read(&self.inner.dir).unwrap_or_else(|_| self.inner.state.lock().clone());
            state.loops().for_each(|one| one.end(&self.inner.dir));
        }
    }
}

impl Inner {
    fn register(dir: &Path, device: PathBuf, state: State) -> Arc<Self> {
        let inner = Arc::new(Self {
            dir: dir.to_path_buf(),
            device,
            state: Mutex::new(state),
            count: AtomicU64::new(0),
            die_at: AtomicU64::new(0),
        });
        HOSTS.lock().push(Arc::clone(&inner));
        inner
    }

    /// A place at which the process may end.
    fn tick(&self) {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count == self.die_at.load(Ordering::Relaxed) {
            // SAFETY: `_exit` takes no pointers and does not return.
            unsafe { libc::_exit(137) };
        }
    }

    /// Whether a word of a command line is about this device.
    fn is_about(&self, argument: &str) -> bool {
        let device = self.device.to_string_lossy();
        let state = self.state.lock();
        let is_group = state
            .group
            .as_ref()
            .is_some_and(|group| argument.split(['/', '=']).any(|part| part == group.name));
        is_group || argument == device || argument.contains(&format!("^{device}$"))
    }

    /// Makes a volume reachable.
    fn link(&self, state: &mut State, volume: &Volume) -> io::Result<()> {
        let Some(group) = &state.group else { return Ok(()) };
        let place = state.places.get_mut(&volume.place);
        let place = place.ok_or_else(|| io::Error::other("the volume has no loop device"))?;
        place.set(volume)?;
        let dir = self.dir.join("dev").join(&group.name);
        fs::create_dir_all(&dir)?;
        let _ = fs::remove_file(dir.join(&volume.name));
        symlink(place.device.path(), dir.join(&volume.name))
    }

    fn unlink(&self, group: &str, volume: &str) {
        let dir = self.dir.join("dev").join(group);
        let _ = fs::remove_file(dir.join(volume));
        let _ = fs::remove_dir(dir);
    }
}

/// What the program prints; none where no double is about this, and the system's is meant.
pub(super) fn run(program: &str, arguments: &[&str]) -> Option<Result<String, String>> {
    let hosts = HOSTS.lock().clone();
    let found = hosts.iter().find(|host| arguments.iter().any(|argument| host.is_about(argument)));
    match found {
        Some(host) => Some(programs::run(host, program, arguments)),
        None if hosts.is_empty() => None,
        None => Some(Err(format!("there is no such thing: {program} {arguments:?}"))),
    }
}

/// Whether there is one.
pub(super) fn is_there() -> bool {
    !HOSTS.lock().is_empty()
}

/// The directory of a group's volumes; none where it is the system's.
pub(super) fn directory_of(group: &str) -> Option<PathBuf> {
    let hosts = HOSTS.lock();
    let is_its =
        |host: &&Arc<Inner>| host.state.lock().group.as_ref().is_some_and(|known| known.name == group);
    // A group that is gone has its directory nowhere.
    let host = hosts.iter().find(is_its).or_else(|| hosts.first())?;
    Some(host.dir.join("dev").join(group))
}
