//! The simulated host: files, operations in flight, faults and time.

mod remote;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tapio_types::{Access, ImageKind, SECTOR_LEN, Span};

use self::remote::{Lost, Remote};
use super::file::{Change, Durable, SimFile};
use super::random::Random;
use crate::blocks::{self, Blocks, WholeBlocks};
use crate::executor::Driver;
use crate::segments::Segments;
use crate::storage::{Io, Storage, StorageInfo, Zeroing};
use crate::tasks::{Op, OpId, TaskId, Tasks};

/// What may go wrong, each `parts` times in 10,000 operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A read fails with EIO.
    pub read_eio: u64,
    /// A write fails with EIO; some of it may have happened.
    pub write_eio: u64,
    /// A flush fails with EIO.
    pub flush_eio: u64,
    /// Growing or writing to new space fails with ENOSPC.
    pub no_space: u64,
    /// An operation takes seconds.
    pub slow: u64,
    /// An operation is stuck: it ends after an hour.
    pub stuck: u64,
    /// The connection to a remote file is lost, and perhaps its server restarted.
    pub connection_loss: u64,
    /// An operation that is to be cancelled is, with ECANCELED, and nothing of it happens.
    pub cancels: u64,
}

/// How long operations take, all alike.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// Any operation but a flush.
    pub operation_ns: u64,
    /// A flush.
    pub flush_ns: u64,
}

/// What a broken file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Every operation fails with EIO, and may have happened all the same.
    Failing,
    /// Every operation is stuck: it ends after an hour.
    Stuck,
    /// It does not grow any more: ENOSPC.
    Full,
}

/// Of this many operations.
const PARTS: u64 = 10_000;
/// How long connecting to a server takes.
const CONNECT_NS: u64 = 1_000_000;
/// How long looking for holes takes at most.
const LOOK_MAX_NS: u64 = 200_000;
/// How long an operation is stuck: much longer than anything waits for it.
const STUCK_NS: u64 = 3_600_000_000_000;

#[derive(Debug)]
enum Action {
    Read { file: usize, at: u64, into: Segments },
    Write { file: usize, at: u64, data: Rc<[u8]>, extend: bool },
    Flush { file: usize, covers: u64 },
    Change { file: usize, change: Change, grows: bool },
    Cancelled { file: usize },
}

impl Action {
    const fn file(&self) -> usize {
        match self {
            Self::Read { file, .. }
            | Self::Write { file, .. }
            | Self::Flush { file, .. }
            | Self::Change { file, .. }
            | Self::Cancelled { file } => *file,
        }
    }
}

#[derive(Debug)]
struct Flying {
    /// Of the thread that began it.
    tasks: Tasks,
    op: OpId,
    due_ns: u64,
    action: Action,
    broken: Option<Broken>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) random: Random,
    pub(super) files: Vec<SimFile>,
    remotes: Vec<Remote>,
    /// Changes that each file has seen; pending ones are the last of them.
    changes: Vec<u64>,
    names: BTreeMap<PathBuf, usize>,
    devices: Vec<bool>,
    /// Bytes of a sector of the host's own disk.
    sector_len: u64,
    flying: Vec<Flying>,
    pub(super) faults: Faults,
    /// Instead of what chance has.
    latency: Option<Latency>,
    /// Files that break, or are broken: how many operations are still to go well, and what happens then.
    broken: BTreeMap<usize, (u64, Broken)>,
    now_ns: u64,
    /// Changes to files still to come before the power goes.
    cut_after: Option<u64>,
    changed: u64,
    /// Writes, flushes and changes so far.
    operations: u64,
    /// So many of them happen, then so many fail with EIO.
    failing: Option<(u64, u64)>,
}

/// A host that a simulated process runs on. Outlives the process.
#[derive(Clone, Debug)]
pub struct SimHost {
    inner: Rc<RefCell<Inner>>,
}

/// A file is open for writing, and may not be once more. Only one process is there at a time.
#[derive(Debug)]
struct Lock {
    file: usize,
    locked: Rc<RefCell<BTreeSet<usize>>>,
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.locked.borrow_mut().remove(&self.file);
    }
}

/// The simulator as the driver of one process' data thread.
#[derive(Clone, Debug)]
pub struct Sim {
    host: SimHost,
    tasks: Tasks,
    /// Files that the process has open for writing.
    locked: Rc<RefCell<BTreeSet<usize>>>,
}

/// An open file.
#[derive(Debug)]
pub struct SimStore {
    sim: Sim,
    file: usize,
    writable: bool,
    _lock: Option<Lock>,
    is_device: bool,
    /// Bytes of a device as this process knows it: it may have become longer.
    device_len: Cell<u64>,
    /// As on a kernel: a file that does not end on a sector is used through the page cache.
    align: u64,
    /// Where sectors are longer than 512 bytes.
    blocks: Option<Blocks>,
}

/// An open file for another thread of the process.
#[derive(Clone, Copy, Debug)]
pub struct SimShare {
    file: usize,
    writable: bool,
    is_device: bool,
    align: u64,
}

impl SimHost {
    /// A host whose chances come from `seed`.
    pub fn new(seed: u64) -> Self {
        let inner = Inner {
            random: Random::new(seed),
            files: Vec::new(),
            remotes: Vec::new(),
            changes: Vec::new(),
            names: BTreeMap::new(),
            devices: Vec::new(),
            sector_len: SECTOR_LEN,
            flying: Vec::new(),
            faults: Faults::default(),
            latency: None,
            broken: BTreeMap::new(),
            now_ns: 0,
            cut_after: None,
            changed: 0,
            operations: 0,
            failing: None,
        };
        Self { inner: Rc::new(RefCell::new(inner)) }
    }

    /// The host's disk has sectors of `len` bytes: it moves whole ones, and writes each as a whole or not at all. Of
    /// files and devices that are opened from now on; a remote one is on another disk.
    pub fn set_sector_len(&self, len: u64) {
        self.inner.borrow_mut().sector_len = len;
    }

    /// Puts a file with these bytes on the host's disk, durable.
    pub fn put(&self, path: &Path, bytes: &[u8]) {
        self.put_content(path, Durable::new(bytes), false);
    }

    /// Puts a file there, or a block device: that has its length for good, and what was never written yet is whatever
    /// `content` has.
    pub fn put_content(&self, path: &Path, content: Durable, is_device: bool) {
        let mut inner = self.inner.borrow_mut();
        let index = inner.files.len();
        inner.files.push(SimFile { seen: content.clone(), safe: content, pending: Vec::new() });
        inner.changes.push(0);
        inner.devices.push(is_device);
        inner.remotes.push(Remote::default());
        inner.names.insert(path.to_path_buf(), index);
    }

    /// Makes a device longer, as another program does: at once, durably, and with what its last owner left there.
    pub fn lengthen(&self, path: &Path, len: u64) {
        let mut inner = self.inner.borrow_mut();
        let index = inner.names[path];
        let file = &mut inner.files[index];
        for durable in [&mut file.seen, &mut file.safe] {
            let old = durable.len();
            assert!(len >= old, "a device is not made shorter here");
            durable.write(old, &vec![0xee; (len - old) as usize]);
        }
    }

    /// Makes a device shorter, as another program does: at once, and durably.
    pub fn shorten(&self, path: &Path, len: u64) {
        let mut inner = self.inner.borrow_mut();
        let index = inner.names[path];
        let file = &mut inner.files[index];
        for durable in [&mut file.seen, &mut file.safe] {
            assert!(len <= durable.len(), "a device is not made longer here");
            durable.set_len(len);
        }
    }

    /// Writes to a device, as another program does: at once, and durably.
    pub fn scribble(&self, path: &Path, at: u64, bytes: &[u8]) {
        let mut inner = self.inner.borrow_mut();
        let index = inner.names[path];
        let file = &mut inner.files[index];
        file.seen.write(at, bytes);
        file.safe.write(at, bytes);
    }

    fn len_of(&self, file: usize) -> u64 {
        self.inner.borrow().files[file].seen.len()
    }

    /// Puts an export there that other hosts' processes serve, under the name by which it is opened.
    pub fn put_remote(&self, name: &str, content: Durable) {
        self.put_content(Path::new(name), content, true);
        let mut inner = self.inner.borrow_mut();
        if let Some(remote) = inner.remotes.last_mut() {
            remote.is_remote = true;
        }
    }

    /// Gives the file another name, durably, also while it is open; a file that has that name loses it.
    pub fn rename(&self, from: &Path, to: &Path) {
        let mut inner = self.inner.borrow_mut();
        if let Some(file) = inner.names.remove(from) {
            inner.names.insert(to.to_path_buf(), file);
        }
    }

    /// What a reader of the file sees.
    pub fn content(&self, path: &Path) -> Durable {
        let inner = self.inner.borrow();
        inner.files[inner.names[path]].content().clone()
    }

    /// From now on these faults may happen.
    pub fn set_faults(&self, faults: Faults) {
        self.inner.borrow_mut().faults = faults;
    }

    /// From now on operations take so long; with `None` as long as chance has it.
    pub fn set_latency(&self, latency: Option<Latency>) {
        self.inner.borrow_mut().latency = latency;
    }

    /// The file breaks after `operations` more were begun on it.
    pub fn break_file(&self, path: &Path, operations: u64, how: Broken) {
        let mut inner = self.inner.borrow_mut();
        let file = inner.names[path];
        inner.broken.insert(file, (operations, how));
    }

    /// The file is whole again; what is stuck stays so.
    pub fn mend_file(&self, path: &Path) {
        let mut inner = self.inner.borrow_mut();
        let file = inner.names[path];
        inner.broken.remove(&file);
    }

    /// The power goes after `changes` more changes to files have happened.
    pub fn cut_after(&self, changes: Option<u64>) {
        self.inner.borrow_mut().cut_after = changes;
    }

    /// After `before` more writes, flushes and changes of length the next `count` fail with EIO; nothing of them
    /// happens.
    pub fn fail_after(&self, before: u64, count: u64) {
        self.inner.borrow_mut().failing = (count > 0).then_some((before, count));
    }

    /// Writes, flushes and changes of length so far, those that failed included.
    pub fn operations(&self) -> u64 {
        self.inner.borrow().operations
    }

    /// Whether the power is gone.
    pub fn is_dark(&self) -> bool {
        self.inner.borrow().cut_after == Some(0)
    }

    /// Changes to files so far.
    pub fn changed(&self) -> u64 {
        self.inner.borrow().changed
    }

    /// A process on this host.
    pub fn process(&self) -> Sim {
        let sim = Sim { host: self.clone(), tasks: Tasks::new(256), locked: Rc::default() };
        sim.tasks.inner.now_ns.set(self.inner.borrow().now_ns);
        sim
    }

    /// The power goes: what was not flushed survives or not, as chance has it, and the host is started again.
    pub fn power_cut(&self) {
        let mut inner = self.inner.borrow_mut();
        inner.flying_may_happen();
        let mut random = inner.random.clone();
        let inner = &mut *inner;
        for (file, remote) in inner.files.iter_mut().zip(&inner.remotes) {
            let sector_len = if remote.is_remote { SECTOR_LEN } else { inner.sector_len };
            let left = file.cut(sector_len, &mut random);
            *file = SimFile { seen: left.clone(), safe: left, pending: Vec::new() };
        }
        inner.random = random;
        inner.changes.fill(0);
        for remote in &mut inner.remotes {
            // The process that would be told is gone too.
            remote.writes_lost = false;
        }
        inner.cut_after = None;
    }

    /// The process dies: what it had in flight happens or not.
    pub fn process_killed(&self) {
        self.inner.borrow_mut().flying_may_happen();
    }
}

impl Inner {
    fn flying_may_happen(&mut self) {
        for flying in std::mem::take(&mut self.flying) {
            if !self.random.chance(1, 2) {
                continue;
            }
            match flying.action {
                Action::Write { file, at, data, .. } => self.change(file, Change::Write { at, data }),
                Action::Change { file, change, .. } => self.change(file, change),
                Action::Read { .. } | Action::Flush { .. } | Action::Cancelled { .. } => {}
            }
        }
    }

    /// The blocks of a file that is used in pieces of `align` bytes, where sectors are longer than 512 bytes.
    fn blocks(&self, file: usize, align: u64) -> Option<Blocks> {
        let has_blocks = self.sector_len > SECTOR_LEN && align > 1 && !self.remotes[file].is_remote;
        has_blocks.then(|| Blocks::new(self.sector_len))
    }

    fn change(&mut self, file: usize, change: Change) {
        self.files[file].change(change);
        self.changes[file] += 1;
        self.changed += 1;
        if let Some(left) = &mut self.cut_after {
            *left = left.saturating_sub(1);
        }
    }

    pub(super) fn fault(&mut self, parts: u64) -> bool {
        parts > 0 && self.random.chance(parts, PARTS)
    }

    /// Whether the next write, flush or change of a file is one that fails by plan.
    fn fails_by_plan(&mut self) -> bool {
        let Some((before, failing)) = &mut self.failing else { return false };
        if *before > 0 {
            *before -= 1;
            return false;
        }
        *failing = failing.saturating_sub(1);
        if *failing == 0 {
            self.failing = None;
        }
        true
    }

    /// Whether an operation needs more space than its file has.
    fn grows(&self, action: &Action) -> bool {
        let len = self.files[action.file()].seen.len();
        match action {
            Action::Write { at, data, .. } => at + data.len() as u64 > len,
            Action::Change { change: Change::SetLen(end), .. } => *end > len,
            _ => false,
        }
    }

    /// What is wrong with the file of an operation that begins now.
    fn breaks(&mut self, file: usize) -> Option<Broken> {
        let (left, how) = self.broken.get_mut(&file)?;
        if *left == 0 {
            return Some(*how);
        }
        *left -= 1;
        None
    }

    /// Lets an operation happen; gives its result as the kernel would.
    fn happen(&mut self, action: Action) -> i32 {
        if !matches!(action, Action::Read { .. } | Action::Cancelled { .. }) {
            self.operations += 1;
            if self.fails_by_plan() {
                return -libc::EIO;
            }
        }
        match action {
            Action::Cancelled { .. } => -libc::ECANCELED,
            Action::Read { file, at, into } => {
                if self.fault(self.faults.read_eio) {
                    return -libc::EIO;
                }
                let content = &self.files[file].seen;
                if at + into.len() > content.len() {
                    return -libc::ENODATA;
                }
                let mut bytes = vec![0; into.len() as usize];
                content.read(at, &mut bytes);
                into.copy_from(&bytes);
                0
            }
            Action::Write { file, at, data, extend } => {
                let grows = at + data.len() as u64 > self.files[file].seen.len();
                if grows && !extend {
                    return -libc::ENOSPC;
                }
                if grows && self.fault(self.faults.no_space) {
                    return -libc::ENOSPC;
                }
                if self.fault(self.faults.write_eio) {
                    let sector_len = if self.remotes[file].is_remote { SECTOR_LEN } else { self.sector_len };
                    let sectors = data.len() as u64 / sector_len;
                    let done = self.random.below(sectors.max(1)) * sector_len;
                    if done > 0 {
                        self.change(file, Change::Write { at, data: Rc::from(&data[..done as usize]) });
                    }
                    return -libc::EIO;
                }
                self.change(file, Change::Write { at, data });
                0
            }
            Action::Flush { file, covers } => {
                if self.fault(self.faults.flush_eio) {
                    return -libc::EIO;
                }
                let pending = self.files[file].pending.len() as u64;
                let safe = self.changes[file] - pending;
                let count = covers.saturating_sub(safe).min(pending);
                self.files[file].flushed(count as usize);
                if std::mem::take(&mut self.remotes[file].writes_lost) { -libc::EIO } else { 0 }
            }
            Action::Change { file, change, grows } => {
                if grows && self.fault(self.faults.no_space) {
                    return -libc::ENOSPC;
                }
                self.change(file, change);
                0
            }
        }
    }
}

impl Sim {
    fn start(&self, make: impl FnOnce(&Inner) -> Action) -> Op {
        let op = self.tasks.start_op();
        let mut inner = self.host.inner.borrow_mut();
        let action = make(&inner);
        // Mostly tens of microseconds in any order; sometimes an outlier; by plan, seconds.
        let mut delay = 10_000 + inner.random.below(90_000);
        if inner.random.chance(1, 50) {
            delay += inner.random.below(5_000_000);
        }
        if let Some(Latency { operation_ns, flush_ns }) = inner.latency {
            delay = if matches!(action, Action::Flush { .. }) { flush_ns } else { operation_ns };
        }
        let slow = inner.faults.slow;
        if inner.fault(slow) {
            delay += inner.random.below(5_000_000_000);
        }
        let stuck = inner.faults.stuck;
        if inner.fault(stuck) {
            delay += STUCK_NS;
        }
        let broken = inner.breaks(action.file());
        if broken == Some(Broken::Stuck) {
            delay += STUCK_NS;
        }
        let due_ns = inner.now_ns + delay;
        inner.flying.push(Flying { tasks: self.tasks.clone(), op, due_ns, action, broken });
        Op::new(&self.tasks, op)
    }
}

impl Sim {
    /// The process is killed, or its host has no power. What it reads does not come any more; what it writes is the
    /// host's already, and happens or not. So its memory may go.
    pub fn kill(&self) {
        let reads = |flying: &Flying| matches!(flying.action, Action::Read { .. });
        let mut inner = self.host.inner.borrow_mut();
        inner.flying.retain(|flying| !(reads(flying) && flying.tasks.is(&self.tasks)));
        self.tasks.lose_ops();
    }

    /// The process is gone: its tasks are dropped where they stand. They hold what they work on, and that holds the
    /// tasks, so that nothing would ever be freed without this.
    pub fn end(&self) {
        self.kill();
        self.tasks.drop_services();
    }

    /// Another data thread of the same process.
    pub fn thread(&self) -> Self {
        let sim = Self { tasks: Tasks::new(256), ..self.clone() };
        sim.tasks.inner.now_ns.set(Io::now_ns(self));
        sim
    }

    /// The host that the process runs on.
    pub const fn host(&self) -> &SimHost {
        &self.host
    }
}

impl Io for Sim {
    type Store = SimStore;
    type Share = SimShare;

    /// As on a kernel: a remote one belongs to one thread, and one whose blocks are longer than sectors of 512 bytes.
    fn share(&self, store: &SimStore) -> Option<SimShare> {
        let is_remote = self.host.inner.borrow().remotes[store.file].is_remote;
        (!is_remote && store.blocks.is_none()).then_some(SimShare {
            file: store.file,
            writable: store.writable,
            is_device: store.is_device,
            align: store.align,
        })
    }

    fn adopt(&self, share: &SimShare) -> SimStore {
        let SimShare { file, writable, is_device, align } = *share;
        let inner = self.host.inner.borrow();
        let blocks = inner.blocks(file, align);
        let device_len = Cell::new(inner.files[file].seen.len());
        drop(inner);
        SimStore { sim: self.clone(), file, writable, _lock: None, is_device, device_len, align, blocks }
    }

    async fn open(&self, path: &Path, access: Access) -> io::Result<SimStore> {
        self.open_file(path, access, false)
    }

    async fn open_remote(&self, _: ImageKind, name: &str, access: Access) -> io::Result<SimStore> {
        self.tasks.sleep_until(Io::now_ns(self) + CONNECT_NS).await;
        self.open_file(Path::new(name), access, true)
    }

    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn now_ns(&self) -> u64 {
        self.host.inner.borrow().now_ns
    }

    fn cancel(&self, task: TaskId) {
        let ops = self.tasks.ops_of(task);
        let mut inner = self.host.inner.borrow_mut();
        let (now_ns, cancels) = (inner.now_ns, inner.faults.cancels);
        for index in 0..inner.flying.len() {
            let flying = &inner.flying[index];
            if flying.tasks.is(&self.tasks) && ops.contains(&flying.op) && inner.fault(cancels) {
                let flying = &mut inner.flying[index];
                let file = flying.action.file();
                (flying.due_ns, flying.action, flying.broken) = (now_ns, Action::Cancelled { file }, None);
            }
        }
    }
}

impl Sim {
    fn open_file(&self, path: &Path, access: Access, remote: bool) -> io::Result<SimStore> {
        let inner = self.host.inner.borrow();
        let file = inner.names.get(path).filter(|file| inner.remotes[**file].is_remote == remote);
        let file = file.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        let lock = if access == Access::ReadWrite && !remote {
            let locked = Rc::clone(&self.locked);
            if !locked.borrow_mut().insert(*file) {
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            Some(Lock { file: *file, locked })
        } else {
            None
        };
        let align = if inner.files[*file].seen.len().is_multiple_of(SECTOR_LEN) { SECTOR_LEN } else { 1 };
        Ok(SimStore {
            _lock: lock,
            sim: self.clone(),
            file: *file,
            writable: access == Access::ReadWrite,
            is_device: inner.devices[*file],
            device_len: Cell::new(inner.files[*file].seen.len()),
            align,
            blocks: inner.blocks(*file, align),
        })
    }
}

impl Driver for Sim {
    fn now_ns(&self) -> u64 {
        Io::now_ns(self)
    }

    /// Moves time to the next thing that happens and lets it happen.
    fn turn(&self, wait: bool, until_ns: Option<u64>) -> bool {
        if !wait {
            return false;
        }
        let mut inner = self.host.inner.borrow_mut();
        let next =
            inner.flying.iter().enumerate().min_by_key(|(_, flying)| flying.due_ns).map(|(index, _)| index);
        let Some(index) =
            next.filter(|&index| until_ns.is_none_or(|until| inner.flying[index].due_ns <= until))
        else {
            match until_ns {
                Some(until) => inner.now_ns = inner.now_ns.max(until),
                None => panic!("the simulation stands still: every task waits and nothing is in flight"),
            }
            return false;
        };
        let mut flying = inner.flying.swap_remove(index);
        inner.now_ns = inner.now_ns.max(flying.due_ns);
        let result = match inner.connection_lost(flying.action.file()) {
            None => match flying.broken {
                Some(Broken::Full) if inner.grows(&flying.action) => -libc::ENOSPC,
                Some(Broken::Failing) => {
                    if inner.random.chance(1, 2) {
                        inner.happen(flying.action);
                    }
                    -libc::EIO
                }
                _ => inner.happen(flying.action),
            },
            Some(Lost::GivenUp) => -libc::ENOTCONN,
            Some(Lost::Again { after_ns }) => {
                flying.due_ns += after_ns;
                inner.flying.push(flying);
                return false;
            }
        };
        drop(inner);
        flying.tasks.complete_op(flying.op, result);
        true
    }

    fn has_completions(&self) -> bool {
        false
    }

    fn can_spin(&self) -> bool {
        false
    }

    fn quiesce(&self) {
        while self.tasks.inner.ops_flying.get() > 0 {
            self.turn(true, None);
        }
    }
}

impl SimStore {
    async fn done(&self, op: Op) -> io::Result<()> {
        match op.await {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.writable { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EBADF)) }
    }

    async fn read_at(&self, at: u64, into: Segments, align: u64) -> io::Result<()> {
        assert!((at | into.len()).is_multiple_of(align), "unaligned read at {at}");
        self.done(self.sim.start(|_| Action::Read { file: self.file, at, into })).await
    }

    async fn write_at(&self, at: u64, from: Segments, align: u64) -> io::Result<()> {
        assert!((at | from.len()).is_multiple_of(align), "unaligned write at {at}");
        let mut data = vec![0; from.len() as usize];
        from.copy_to(&mut data);
        let (file, extend) = (self.file, !self.is_device);
        self.done(self.sim.start(|_| Action::Write { file, at, data: data.into(), extend })).await
    }

    async fn zero_at(&self, span: Span) -> io::Result<()> {
        let change = Change::Zero { at: span.start, len: span.len };
        self.done(self.sim.start(|_| Action::Change { file: self.file, change, grows: false })).await
    }
}

// SAFETY: a flight keeps the memory of a request until the future is told that it has ended.
unsafe impl WholeBlocks for SimStore {
    fn blocks(&self) -> &Blocks {
        self.blocks.as_ref().expect("asked for where there are some")
    }

    fn tasks(&self) -> &Tasks {
        &self.sim.tasks
    }

    fn end(&self) -> u64 {
        Storage::len(self)
    }

    async fn read_blocks(&self, at: u64, into: Segments) -> io::Result<()> {
        self.read_at(at, into, self.blocks().len).await
    }

    async fn write_blocks(&self, at: u64, from: Segments) -> io::Result<()> {
        self.write_at(at, from, self.blocks().len).await
    }

    async fn zero_blocks(&self, span: Span, _how: Zeroing) -> io::Result<()> {
        assert!(self.blocks().are_whole(span), "unaligned zeroing at {}", span.start);
        self.zero_at(span).await
    }

    async fn read_end(&self, at: u64, into: Segments) -> io::Result<()> {
        self.read_at(at, into, 1).await
    }

    async fn write_end(&self, at: u64, from: Segments) -> io::Result<()> {
        self.write_at(at, from, 1).await
    }
}

// SAFETY: a flight keeps the memory of a request until the future is told that it has ended.
unsafe impl Storage for SimStore {
    fn info(&self) -> StorageInfo {
        let device_sector = if self.is_device { self.blocks.as_ref().map(|blocks| blocks.len) } else { None };
        StorageInfo {
            align: self.align as u32,
            sector_len: device_sector.unwrap_or(SECTOR_LEN) as u32,
            resizable: !self.is_device,
            fresh_reads_zero: !self.is_device,
            promises_space: !self.is_device,
        }
    }

    fn len(&self) -> u64 {
        if self.is_device { self.device_len.get() } else { self.sim.host.len_of(self.file) }
    }

    async fn measured_len(&self) -> io::Result<u64> {
        // As on a kernel, where a helper thread asks.
        self.sim.tasks.yield_now().await;
        Ok(self.sim.host.len_of(self.file))
    }

    fn has_grown(&self, len: u64) {
        self.device_len.set(self.device_len.get().max(len));
    }

    fn ends_at(&self, len: u64) {
        self.device_len.set(self.device_len.get().min(len));
    }

    /// As on a kernel, where a helper thread looks: other tasks run between the question and the answer.
    async fn data_run(&self, span: Span) -> (u64, bool) {
        if self.is_device {
            return (span.len, true);
        }
        let takes_ns = self.sim.host.inner.borrow_mut().random.below(LOOK_MAX_NS);
        self.sim.tasks.sleep_until(self.sim.tasks.turn_ns() + takes_ns).await;
        self.sim.host.inner.borrow().files[self.file].seen.data_run(span)
    }

    async fn read(&self, at: u64, into: Segments) -> io::Result<()> {
        assert!((at | into.len()).is_multiple_of(self.align), "unaligned read at {at}");
        if self.blocks.as_ref().is_some_and(|blocks| !blocks.are_whole(Span::new(at, into.len()))) {
            return blocks::read(self, at, into).await;
        }
        self.read_at(at, into, self.align).await
    }

    async fn write(&self, at: u64, from: Segments) -> io::Result<()> {
        assert!((at | from.len()).is_multiple_of(self.align), "unaligned write at {at}");
        self.check_writable()?;
        let Some(blocks) = &self.blocks else { return self.write_at(at, from, self.align).await };
        let Some(place) = blocks.enter_now(Span::new(at, from.len())) else {
            return blocks::write(self, at, from).await;
        };
        let result = self.write_at(at, from, blocks.len).await;
        blocks.leave(place, &self.sim.tasks);
        result
    }

    async fn flush(&self) -> io::Result<()> {
        let file = self.file;
        self.done(self.sim.start(|inner| Action::Flush { file, covers: inner.changes[file] })).await
    }

    async fn zero(&self, span: Span, how: Zeroing) -> io::Result<()> {
        self.check_writable()?;
        if self.blocks.is_some() {
            return blocks::zero(self, span, how).await;
        }
        self.zero_at(span).await
    }

    async fn allocate(&self, span: Span, _space: bool) -> io::Result<()> {
        self.check_writable()?;
        let end = span.start + span.len;
        if self.is_device {
            return if end <= self.len() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) };
        }
        let change = Change::SetLen(end.max(self.len()));
        self.done(self.sim.start(|_| Action::Change { file: self.file, change, grows: true })).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.check_writable()?;
        let change = Change::SetLen(len);
        self.done(self.sim.start(|_| Action::Change { file: self.file, change, grows: false })).await?;
        self.device_len.set(self.sim.host.len_of(self.file));
        Ok(())
    }
}
