//! A disk on the simulator: hosts with chains on them, processes that open them, clients that use them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use tapio_block::{Completion, Core, CoreOptions, Data, DiskError, Notes, Op, Request, Taken};
use tapio_format::continuation::Move;
use tapio_format::live::vhd::{BITMAPS_KEPT, HeapLogs, IntentPlace, RoomPlace};
use tapio_format::medium::Medium;
use tapio_format::vhd::locator::decode_path;
use tapio_format::vhd::offline::{
    CheckOptions, Finding, FindingKind, Image, OpenOptions, ParentFacts, Severity, Shape, check, create_on,
    set_key_hash,
};
use tapio_format::vhd::{Footer, Header, KeyHash, Keys, time};
use tapio_ring::sim::{Durable, Random, Sim, SimHost};
use tapio_ring::{Executor, Inbox, Io, Memory, Notify, PageBuf, Polling, PollingConfig};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, SECTOR_LEN, Span, TransferSizes};
use uuid::Uuid;
use zeroize::Zeroizing;

use crate::model::{fill, stamp_of};
use crate::threads::{QueueThread, Threads, Turns};

/// Bytes of the simulated disks: four blocks, the last of them not whole, and an odd number of sectors.
pub const DISK_LEN: u64 = (8 << 20) - 13 * 512;
const DEVICE_LEN: u64 = 16 << 20;
/// What a VHD has room for in its table.
const LEN_MAX: u64 = 600 << 20;

/// A file of the simulator under the offline tools.
pub struct Content(pub Durable, pub bool);

impl Medium for Content {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len())
    }

    fn is_device(&self) -> bool {
        self.1
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        if at + into.len() as u64 > self.0.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.read(at, into);
        Ok(())
    }

    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        self.0.write(at, from);
        Ok(())
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        self.0.set_len(len);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a child records, on a host whose files all lie in one directory.
fn parent_facts(_child: &Path, parent: &Path) -> tapio_format::Result<ParentFacts> {
    let name = parent.display().to_string();
    Ok(ParentFacts {
        uuid: Uuid::nil(),
        timestamp: time::from_unix(1_700_000_000),
        relative_path: format!("./{name}"),
        name,
        key_hash: KeyHash::default(),
    })
}

/// The chains that are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RigKind {
    Raw,
    Fixed,
    Dynamic,
    /// A dynamic disk on a block device full of what its last owner left.
    Device,
    /// A differencing disk on a dynamic one.
    Two,
    /// A differencing disk on a differencing one on a dynamic one.
    Three,
    /// A differencing disk on a raw one.
    OnRaw,
    /// The same, and the raw one is a remote export, whose connection is lost now and then.
    OnRemote,
    /// A differencing disk on a block device, over a dynamic one.
    DeviceOnFile,
    /// An encrypted dynamic disk.
    Encrypted,
    /// An encrypted differencing disk on a block device, over a dynamic one that is not.
    EncryptedOnPlain,
    /// The same kinds on a disk with sectors of 4096 bytes, which the clients know nothing of.
    LongRaw,
    LongDynamic,
    LongDevice,
    LongTwo,
    LongDeviceOnFile,
    LongEncrypted,
}

impl RigKind {
    pub const ALL: [Self; 11] = [
        Self::Raw,
        Self::Fixed,
        Self::Dynamic,
        Self::Device,
        Self::Two,
        Self::Three,
        Self::OnRaw,
        Self::OnRemote,
        Self::DeviceOnFile,
        Self::Encrypted,
        Self::EncryptedOnPlain,
    ];

    /// Those on a disk with long sectors. Requests for parts of one such sector wait for one another.
    pub const LONG: [Self; 6] = [
        Self::LongRaw,
        Self::LongDynamic,
        Self::LongDevice,
        Self::LongTwo,
        Self::LongDeviceOnFile,
        Self::LongEncrypted,
    ];

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().chain(Self::LONG)
    }

    /// The same on a disk with sectors of 512 bytes.
    fn plain(self) -> Self {
        match self {
            Self::LongRaw => Self::Raw,
            Self::LongDynamic => Self::Dynamic,
            Self::LongDevice => Self::Device,
            Self::LongTwo => Self::Two,
            Self::LongDeviceOnFile => Self::DeviceOnFile,
            Self::LongEncrypted => Self::Encrypted,
            plain => plain,
        }
    }
}

/// The key of the encrypted images.
const KEY: [u8; 64] = [0x5c; 64];

/// A host with the images of a chain, base first made, each one empty.
#[derive(Clone)]
pub struct Rig {
    pub host: SimHost,
    /// Leaf first: kind, name, whether it is a device.
    pub images: Vec<(ImageKind, PathBuf, bool)>,
    /// Images made so far: each has a name of its own.
    pub made: usize,
    pub keys: Keys,
    pub memory: Arc<HeapLogs>,
    /// The leaf that the command of the disk names, which stays when the disk goes on with others.
    pub command: PathBuf,
    pub notes: Arc<Mutex<NotesOfHost>>,
    /// Bitmaps that an image keeps in memory: often so few that they are read again and again.
    pub bitmaps_kept: usize,
    /// Where a disk asks for room that its device has not.
    pub room: RoomPlace,
    /// How data goes to the storages: of some seeds in small pieces, and neighbours as one.
    pub transfers: TransferSizes,
    /// Every image that was ever made: its kind, and whether it is a device.
    kinds: Rc<RefCell<BTreeMap<PathBuf, (ImageKind, bool)>>>,
}

/// Which image the disk of another goes on with: as the notes beside images, each of which is there or not, at once.
#[derive(Debug, Default)]
pub struct NotesOfHost {
    pub continued: BTreeMap<PathBuf, PathBuf>,
    /// Each so many changes one fails, half way through if it has two parts.
    pub fails_each: Option<u64>,
    changes: u64,
    /// The leaves beside which the note of a standby waits.
    pub ready: BTreeSet<PathBuf>,
}

impl NotesOfHost {
    fn one(&mut self, image: &LayerSpec, by: Option<&LayerSpec>) -> tapio_format::Result<()> {
        self.changes += 1;
        if self.fails_each.is_some_and(|each| self.changes.is_multiple_of(each)) {
            return Err(tapio_format::FormatError::io("no note", io::Error::from_raw_os_error(libc::EIO)));
        }
        match by {
            Some(by) => self.continued.insert(image.path.clone(), by.path.clone()),
            None => self.continued.remove(&image.path),
        };
        Ok(())
    }

    fn take(&mut self, change: &Move) -> tapio_format::Result<()> {
        match change {
            Move::OnTop { below, leaf } => self.one(below, Some(leaf)),
            Move::Stays { image, .. } => self.one(image, None),
            Move::Away { near, far } => {
                self.one(far, None)?;
                self.one(near, Some(far))
            }
            Move::Down { leaf, parent } => {
                self.one(parent, None)?;
                self.one(leaf, Some(parent))
            }
            Move::MayOverflow(overflow) => {
                self.ready.insert(overflow.leaf.path.clone());
                Ok(())
            }
            Move::Overflows(overflow) => {
                assert!(self.ready.remove(&overflow.leaf.path), "no note is ready on a full storage");
                self.one(&overflow.standby, None)?;
                self.one(&overflow.leaf, Some(&overflow.standby))
            }
            Move::NeverOverflows { leaf } => {
                self.ready.remove(&leaf.path);
                Ok(())
            }
        }
    }

    /// Where the notes lead from `image`.
    pub fn newest(&self, image: &Path) -> PathBuf {
        let mut image = image.to_path_buf();
        for _ in 0..=self.continued.len() {
            match self.continued.get(&image) {
                Some(next) => image.clone_from(next),
                None => return image,
            }
        }
        panic!("the notes lead round: {:?}", self.continued)
    }
}

impl Rig {
    pub fn new(kind: RigKind, seed: u64) -> Self {
        let (host, memory) = (SimHost::new(seed), Arc::default());
        let (images, kinds, keys) = (Vec::new(), Rc::default(), Keys::default());
        let (command, notes) = (PathBuf::new(), Arc::default());
        let bitmaps_kept = if seed.is_multiple_of(3) { 1 } else { BITMAPS_KEPT };
        let room = RoomPlace::default();
        let small = TransferSizes { split: 4096, merge: 4096 };
        let transfers = if seed % 4 == 2 { small } else { TransferSizes::default() };
        let mut rig = Self {
            host,
            images,
            made: 0,
            keys,
            memory,
            command,
            notes,
            bitmaps_kept,
            room,
            transfers,
            kinds,
        };
        if kind != kind.plain() {
            rig.host.set_sector_len(4096);
        }
        match kind.plain() {
            RigKind::Raw => rig.put_raw(),
            RigKind::Fixed => rig.put_vhd(&Shape::Fixed, false),
            RigKind::Dynamic => rig.put_vhd(&Shape::Dynamic, false),
            RigKind::Device => rig.put_vhd(&Shape::Dynamic, true),
            RigKind::Two | RigKind::Three | RigKind::DeviceOnFile | RigKind::EncryptedOnPlain => {
                rig.put_vhd(&Shape::Dynamic, false);
            }
            RigKind::Encrypted => {
                rig.put_vhd(&Shape::Dynamic, false);
                rig.encrypt();
            }
            RigKind::OnRaw => rig.put_raw(),
            RigKind::OnRemote => rig.put_remote("remote"),
            long => unreachable!("{long:?} is not plain"),
        }
        rig.is_commanded();
        rig
    }

    /// Puts the next layers on, over a base that has data by now.
    pub fn grow(&mut self, kind: RigKind) -> bool {
        let kind = kind.plain();
        let wanted = match kind {
            RigKind::Raw | RigKind::Fixed | RigKind::Dynamic | RigKind::Device | RigKind::Encrypted => 1,
            RigKind::Two
            | RigKind::OnRaw
            | RigKind::OnRemote
            | RigKind::DeviceOnFile
            | RigKind::EncryptedOnPlain => 2,
            RigKind::Three => 3,
            long => unreachable!("{long:?} is not plain"),
        };
        if self.images.len() == wanted {
            return false;
        }
        self.put_child(matches!(kind, RigKind::DeviceOnFile | RigKind::EncryptedOnPlain));
        if kind == RigKind::EncryptedOnPlain {
            self.encrypt();
        }
        self.is_commanded();
        true
    }

    /// The disk is closed, and its command names the leaf from now on.
    fn is_commanded(&mut self) {
        self.command.clone_from(&self.images[0].1);
        *self.notes.lock().expect("no panic") = NotesOfHost::default();
    }

    /// The images that the command opens now: from the newest on, each below its child, as the children say.
    pub fn started_again(&self) -> Vec<(ImageKind, PathBuf, bool)> {
        let mut path = self.notes.lock().expect("no panic").newest(&self.command);
        let mut images = Vec::new();
        loop {
            let (kind, is_device) = self.kinds.borrow()[&path];
            images.push((kind, path.clone(), is_device));
            if kind != ImageKind::Vhd {
                return images;
            }
            let mut header = [0; 1024];
            self.host.content(&path).read(512, &mut header);
            match Header::decode(&header).ok().and_then(|header| header.parent_name()) {
                Some(parent) if !parent.is_empty() => path = parent.into(),
                _ => return images,
            }
        }
    }

    /// Puts an empty child of the leaf on top.
    pub fn put_child(&mut self, device: bool) {
        let (kind, parent, parent_is_device) = self.images[0].clone();
        let facts = parent_facts(Path::new(""), &parent).expect("a name");
        if kind == ImageKind::Nbd {
            return self.put_vhd(&Shape::Differencing(facts), device);
        }
        let content = self.host.content(&parent);
        let mut bytes = [0; 512];
        // An open image ends in its footer or not, but begins with the copy of one; a fixed one has no copy.
        content.read(0, &mut bytes);
        let mut footer = Footer::decode(&bytes);
        if footer.is_err() && kind == ImageKind::Vhd && !parent_is_device {
            content.read(content.len() - 512, &mut bytes);
            footer = Footer::decode(&bytes);
        }
        let uuid = match kind {
            ImageKind::Raw => Uuid::nil(),
            _ => footer.expect("an image has a footer").0.uuid,
        };
        self.put_vhd(&Shape::Differencing(ParentFacts { uuid, ..facts }), device);
    }

    /// Puts an empty child of the leaf on top, which takes over the leaf's name.
    pub fn put_child_in_place(&mut self) {
        let (kind, name, is_device) = self.images[0].clone();
        let below = self.next_name();
        self.host.rename(&name, &below);
        self.kinds.borrow_mut().insert(below.clone(), (kind, is_device));
        self.images[0].1 = below;
        self.put_child(false);
        let made = std::mem::replace(&mut self.images[0].1, name.clone());
        self.host.rename(&made, &name);
        self.kinds.borrow_mut().insert(name, (ImageKind::Vhd, false));
    }

    /// The opposite: the child goes, and the image below has its name again.
    pub fn take_child_out(&mut self) {
        let (_, name, _) = self.images.remove(0);
        let (kind, below, is_device) = self.images[0].clone();
        self.host.rename(&below, &name);
        self.images[0].1.clone_from(&name);
        self.kinds.borrow_mut().insert(name, (kind, is_device));
    }

    /// Says that the leaf, which is empty, is encrypted.
    fn encrypt(&mut self) {
        let (_, path, is_device) = self.images[0].clone();
        let medium = Content(self.host.content(&path), is_device);
        let mut image = Image::open_on(medium, &path, OpenOptions::WRITE).expect("just made");
        set_key_hash(&mut image, KeyHash::of([1; 32], &KEY)).expect("there is a batmap");
        self.host.put_content(&path, image.into_medium().0, is_device);
        self.keys = Keys::new(vec![Zeroizing::new(KEY.to_vec())]).expect("a key of a right length");
    }

    /// The next name; all are of one length.
    fn next_name(&mut self) -> PathBuf {
        self.made += 1;
        format!("image-{:04}", self.made).into()
    }

    fn put_raw(&mut self) {
        let name = self.next_name();
        let mut empty = Durable::default();
        empty.set_len(DISK_LEN);
        self.host.put_content(&name, empty, false);
        self.put_on(ImageKind::Raw, name, false);
    }

    fn put_remote(&mut self, name: &str) {
        let mut empty = Durable::default();
        empty.set_len(DISK_LEN);
        self.host.put_remote(name, empty);
        self.put_on(ImageKind::Nbd, name.into(), false);
    }

    fn put_vhd(&mut self, shape: &Shape, device: bool) {
        let name = self.next_name();
        // What lies on a device reads as a write that was never made.
        let mut medium = Content(Durable::default(), device);
        if device {
            medium.0 = Durable::new(&vec![0xee; DEVICE_LEN as usize]);
        }
        create_on(&mut medium, shape, DISK_LEN, LEN_MAX).expect("an image can be made");
        self.host.put_content(&name, medium.0, device);
        self.put_on(ImageKind::Vhd, name, device);
    }

    fn put_on(&mut self, kind: ImageKind, name: PathBuf, device: bool) {
        self.kinds.borrow_mut().insert(name.clone(), (kind, device));
        self.images.insert(0, (kind, name, device));
    }

    pub fn spec(&self, access: Access) -> ChainSpec {
        let layers =
            self.images.iter().map(|(kind, path, _)| LayerSpec { kind: *kind, path: path.clone() }).collect();
        ChainSpec { layers, access }
    }

    /// A process on the host.
    pub fn process(&self) -> Process {
        let sim = self.host.process();
        let inbox = Inbox::new(32);
        let options = CoreOptions {
            intent: IntentPlace::Memory(Arc::clone(&self.memory)),
            parent_facts,
            notes: Notes::new({
                let notes = Arc::clone(&self.notes);
                move |change| notes.lock().expect("no panic").take(change)
            }),
            keys: self.keys.clone(),
            bitmaps_kept: self.bitmaps_kept,
            room: self.room.clone(),
            transfers: self.transfers,
            report: |_| (),
            ..CoreOptions::default()
        };
        let core = Core::new(sim.clone(), Rc::clone(&inbox), options);
        Process { core, sim, inbox, threads: Rc::default() }
    }

    /// The rules of vhd.md section 10 hold for every image. Before an image that was not closed is opened again two
    /// things
    /// may be unfinished, which every reader copes with: the footer at its end, and a batmap whose checksum does not
    /// fit.
    pub fn check(&self, before_recovery: bool) -> Result<(), String> {
        let options = CheckOptions {
            ignore_footer: before_recovery,
            ignore_timestamps: true,
            ..CheckOptions::default()
        };
        for (kind, path, device) in &self.images {
            if *kind != ImageKind::Vhd {
                continue;
            }
            let report = check(&Content(self.host.content(path), *device), &options)
                .map_err(|error| error.to_string())?;
            let wrong = |finding: &&Finding| {
                finding.severity == Severity::Error
                    && !(before_recovery && finding.kind == FindingKind::Batmap)
            };
            let all: Vec<String> = report.findings.iter().filter(wrong).map(ToString::to_string).collect();
            if !all.is_empty() {
                return Err(format!("{} is not valid: {}", path.display(), all.join("; ")));
            }
            if !before_recovery {
                locators_agree(self.host.content(path), *device)
                    .map_err(|why| format!("{}: {why}", path.display()))?;
            }
        }
        Ok(())
    }
}

/// Every locator of an image names the file that its header names.
fn locators_agree(content: Durable, device: bool) -> Result<(), String> {
    let medium = Content(content, device);
    let image = Image::open_on(medium, Path::new(""), OpenOptions::READ);
    let image = image.map_err(|error| error.to_string())?;
    let Some(header) = image.header() else { return Ok(()) };
    for entry in header.locators.iter().filter(|entry| entry.code.is_readable()) {
        let (at, len) = entry.path_span().map_err(|error| error.to_string())?;
        let mut bytes = vec![0; len];
        image.medium().read_at(at, &mut bytes).map_err(|error| error.to_string())?;
        let path = decode_path(entry.code, &bytes).map_err(|error| error.to_string())?;
        let (file, name) = (Path::new(&path).file_name(), header.parent_name().unwrap_or_default());
        if file != Some(OsStr::new(&name)) {
            return Err(format!("a locator names {path}, the header {name}"));
        }
    }
    Ok(())
}

/// A process that has the disk, or is about to open it.
#[derive(Clone)]
pub struct Process {
    pub core: Rc<Core<Sim>>,
    pub sim: Sim,
    inbox: Rc<Inbox<Taken>>,
    pub threads: Rc<RefCell<Threads>>,
}

impl Process {
    /// Runs `future` to its end, or until the power goes.
    pub fn run<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Option<T> {
        let core = Rc::clone(&self.core);
        let make = move |request| Rc::clone(&core).serve(request);
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let tasks = self.sim.tasks().clone();
        let mut executor = Executor::new(tasks, Rc::clone(&self.inbox), make, polling);
        let host = self.sim.host().clone();
        let mut turns = Turns(Rc::clone(&self.threads));
        let value = executor.block_on_until(&self.sim, &mut turns, future, &move || host.is_dark());
        if self.inbox.in_flight() > 0 {
            // They go with the executor, in the middle of what they do.
            self.sim.kill();
        }
        value
    }

    /// Serves the disk, which runs, by `count` queue threads more; the interleaving of all threads, and which one takes
    /// a request, is drawn from `seed`.
    pub fn add_queue_threads(&self, count: usize, seed: u64) {
        self.threads.borrow_mut().random = Some(Random::new(seed));
        for index in 0..count {
            let queue = QueueThread::new(self, index);
            let front = self.core.add_queue_thread(&queue.exchange).expect("the disk runs");
            let mut threads = self.threads.borrow_mut();
            threads.fronts.push(front);
            threads.queues.push(queue);
        }
    }

    /// The process is gone.
    pub fn end(&self) {
        self.sim.end();
        let mut threads = self.threads.borrow_mut();
        threads.fronts.clear();
        threads.queues.drain(..).for_each(|queue| queue.sim.end());
    }

    /// One request whose client gives up when it may: with its memory, which stays the storage's until the end.
    pub async fn ask_or_give_up(&self, op: Op, span: Span, data: Rc<PageBuf>) -> Result<(), DiskError> {
        let answer = self.send(op, span, &data, Some(Rc::clone(&data))).await;
        self.wait(&answer).await
    }

    /// Whether a request is taken now.
    pub fn has_room(&self) -> bool {
        self.inbox.room() > 0
    }

    /// One request.
    pub async fn ask(&self, op: Op, span: Span, data: &PageBuf) -> Result<(), DiskError> {
        let answer = self.send(op, span, data, None).await;
        self.wait(&answer).await
    }

    async fn send(&self, op: Op, span: Span, data: &PageBuf, kept: Option<Rc<PageBuf>>) -> Rc<Answer> {
        let tasks = self.sim.tasks().clone();
        let (result, ended) = (RefCell::new(None), Cell::new(false));
        let answer = Rc::new(Answer { result, ended, kept, given: Notify::default(), tasks: tasks.clone() });
        let moves = matches!(op, Op::Read | Op::Write { .. });
        // SAFETY: the caller waits for the answer; one that may be given up before it is `kept` until then.
        let data = unsafe { data.segments(0..if moves { span.len as usize } else { 0 }) };
        let client = Rc::clone(&answer) as Rc<dyn Completion>;
        let request = Request::new(op, span, Data::Guest(data), tasks.turn_ns(), 1, client);
        let inbox = self.threads.borrow_mut().draw(&self.inbox);
        let mut timeout = 10_000;
        while !inbox.is_open() {
            // Held back by a change of the chain.
            tasks.sleep_until(tasks.turn_ns() + timeout).await;
            timeout *= 2;
        }
        assert!(inbox.push(request.into()).is_ok(), "the test keeps to the room there is");
        answer
    }

    async fn wait(&self, answer: &Answer) -> Result<(), DiskError> {
        loop {
            if let Some(result) = answer.result.borrow_mut().take() {
                return result;
            }
            answer.given.wait(self.sim.tasks()).await;
        }
    }
}

struct Answer {
    result: RefCell<Option<Result<(), DiskError>>>,
    ended: Cell<bool>,
    /// The memory of a client that may give up.
    kept: Option<Rc<PageBuf>>,
    given: Notify,
    tasks: tapio_ring::Tasks,
}

impl Completion for Answer {
    fn complete(&self, _tag: u64, result: Result<(), DiskError>) {
        assert!(!self.ended.replace(true), "a request was answered twice");
        // One that was given up has its answer already.
        self.result.borrow_mut().get_or_insert(result);
        self.given.notify_all(&self.tasks);
    }

    fn give_up(&self, _tag: u64) -> bool {
        if self.kept.is_none() {
            return false;
        }
        let before = self.result.borrow_mut().replace(Err(DiskError::Io(libc::ETIMEDOUT)));
        assert!(before.is_none() && !self.ended.get(), "given up after its answer");
        self.given.notify_all(&self.tasks);
        true
    }
}

/// A place for a request: mostly in a few small zones, so that requests meet.
pub fn place(random: &mut Random) -> std::ops::Range<u64> {
    let zone = ZONES[random.below(ZONES.len() as u64) as usize];
    let first = zone + random.below(ZONE_SECTORS);
    let most = if random.chance(1, 8) { ZONE_SECTORS } else { 4 };
    let count = 1 + random.below(most);
    first..(first + count).min(zone + ZONE_SECTORS)
}

const SECTORS_IN_BLOCK: u64 = 4096;
/// Sectors in a zone.
pub const ZONE_SECTORS: u64 = 24;
/// Where zones begin: at the edges of blocks, across them, and inside.
pub const ZONES: [u64; 6] = [
    0,
    SECTORS_IN_BLOCK - 8,
    SECTORS_IN_BLOCK + 2000,
    2 * SECTORS_IN_BLOCK - 12,
    3 * SECTORS_IN_BLOCK + 100,
    DISK_LEN / 512 - ZONE_SECTORS,
];

/// A place for a request that is about whole blocks: one or two of them, sometimes with a little less or more; or a
/// zone.
pub fn blocks(random: &mut Random) -> std::ops::Range<u64> {
    let all = DISK_LEN / 512;
    if random.chance(1, 4) {
        let zone = ZONES[random.below(ZONES.len() as u64) as usize];
        return zone..zone + ZONE_SECTORS;
    }
    let first = random.below(4) * SECTORS_IN_BLOCK;
    let end = first + (1 + random.below(2)) * SECTORS_IN_BLOCK;
    let odd = |random: &mut Random| if random.chance(1, 4) { random.below(16) } else { 0 };
    (first + odd(random)).min(all)..(end + odd(random)).min(all)
}

/// The parts of `sectors` that lie in zones: what is ever written.
pub fn in_zones(sectors: &std::ops::Range<u64>) -> Vec<std::ops::Range<u64>> {
    let parts = ZONES.iter().map(|&zone| zone.max(sectors.start)..(zone + ZONE_SECTORS).min(sectors.end));
    parts.filter(|part| part.start < part.end).collect()
}

/// Writes a sector with a stamp.
pub async fn write(process: &Process, at: u64, stamp: u64) -> Result<(), String> {
    let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
    fill(stamp, &mut page);
    let span = Span::new(at, SECTOR_LEN);
    process.ask(Op::Write { durable: false }, span, &page).await.map_err(|error| error.to_string())
}

/// Reads the stamp of a sector.
pub async fn read(process: &Process, at: u64) -> Result<u64, String> {
    let page = PageBuf::zeroed(SECTOR_LEN as usize);
    let span = Span::new(at, SECTOR_LEN);
    process.ask(Op::Read, span, &page).await.map_err(|error| error.to_string())?;
    stamp_of(&page[..SECTOR_LEN as usize])
}
