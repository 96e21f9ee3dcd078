//! A place for SRs, a context that counts, and data in images.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tapio_format::cbt::{self, Log, LogHeader};
use tapio_format::vhd::offline::{self, Chain, Image, Layer, OpenOptions};
use tapio_format::{FileMedium, Medium};
use tapio_sm::{
    Config, Ctx, ForkKind, LeafSwap, LiveDisk, NewVdi, Notice, OpenSpec, Shortened, Sr, SrDriver, registry,
};
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, Span};
use uuid::Uuid;

/// Says that the running test is skipped, past the harness's capture; `tests/skips.allowed` lists the reasons.
pub fn skip(reason: &str) {
    use std::io::Write;
    let thread = std::thread::current();
    let line = format!("\nskipped: {reason} [{}]\n", thread.name().unwrap_or("unnamed"));
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// What a test watches and decides.
#[derive(Default)]
pub struct Watch {
    pub cancelled: AtomicBool,
    pub progress: AtomicU64,
    pub steps: Mutex<Vec<&'static str>>,
    /// The process ends here.
    pub die_at: Option<String>,
    /// A cancel comes here.
    pub cancel_at: Option<&'static str>,
    /// The operation ends here as if its process did, and the disks go on.
    pub panic_at: Option<&'static str>,
    pub live: Mutex<BTreeMap<Uuid, Arc<Disk>>>,
    pub notices: Mutex<Vec<(Uuid, Notice)>>,
}

impl Watch {
    /// What the administrator was told since it was last asked.
    pub fn noticed(&self) -> Vec<(Uuid, Notice)> {
        std::mem::take(&mut *self.notices.lock().unwrap())
    }
}

impl Ctx for Watch {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn progress(&self, fraction: f64) {
        self.progress.store((fraction * 1e6) as u64, Ordering::Relaxed);
    }

    fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
        let disk = self.live.lock().unwrap().get(&vdi).cloned()?;
        Some(Box::new(Handle(disk)))
    }

    fn notice(&self, vdi: Uuid, notice: Notice, why: &str) {
        assert!(!why.is_empty());
        self.notices.lock().unwrap().push((vdi, notice));
    }

    fn step(&self, name: &'static str) {
        assert!(tapio_sm::STEPS.iter().any(|(known, _)| *known == name), "{name} is not in STEPS");
        self.steps.lock().unwrap().push(name);
        if self.cancel_at == Some(name) {
            self.cancelled.store(true, Ordering::Relaxed);
        }
        assert!(self.panic_at != Some(name), "the worker ends here");
        if self.die_at.as_deref() == Some(name) {
            // As SIGKILL would: no destructors, no buffers.
            // SAFETY: `_exit` takes no pointers and does not return.
            unsafe { libc::_exit(137) };
        }
    }
}

/// A log of changed blocks, with what is in memory of it and whether it was complete.
pub type OpenLog = (Log<FileMedium>, Vec<u8>, i32);

/// A running disk that holds its leaf's lock and writes into the image that it has open.
#[derive(Default)]
pub struct Disk {
    pub open: Mutex<Option<(ChainSpec, Image<FileMedium>)>>,
    pub log: Mutex<Option<OpenLog>>,
    pub refuses_pause: bool,
    /// It goes on with a new leaf after a pause only.
    pub pauses_only: bool,
    /// How many times it has swapped its leaf.
    pub swaps: AtomicU64,
    /// What comes of the next swap of its leaf, unless all is well.
    pub next_swap: Mutex<Option<NextSwap>>,
    /// It has ended its image sooner, and opens it again when it is written.
    pub ended: Mutex<Option<ChainSpec>>,
    /// What comes of the next end of its image, unless all is well.
    pub next_end: Mutex<Option<NextEnd>>,
    pub refuses_resume_once: AtomicBool,
    /// How many times.
    pub refuses_resume: AtomicU64,
    pub pauses: AtomicU64,
    /// The answer to the next resume is lost: the disk goes on, and its guest writes.
    pub loses_answer: AtomicBool,
    /// With that answer the daemon is gone, and every call fails.
    pub loses_daemon: bool,
    pub daemon_is_gone: AtomicBool,
}

/// What becomes of a swap that does not go well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextSwap {
    /// The disk goes on as before, and says so.
    Refused,
    /// It does not answer, and goes on as before.
    Unheard,
    /// It goes on with the new leaf, its guest writes, and the answer is lost.
    AnswerLost,
    /// Its process dies instead, and the one that takes its place has the images open when it has settled them.
    Dies,
}

/// What becomes of an image that is to end sooner, where that does not go well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextEnd {
    /// The disk says that it needs all that it has.
    Refused,
    /// It does not answer, and has done nothing.
    Unheard,
    /// It ends its image, and the answer is lost.
    AnswerLost,
}

/// What a guest writes to its first sector while the answer that its disk goes on is lost.
pub const MEANWHILE: u8 = 9;

struct Handle(Arc<Disk>);

impl Disk {
    pub fn start(with: &OpenSpec) -> Self {
        let disk = Self::default();
        disk.open(with);
        disk
    }

    pub fn open(&self, with: &OpenSpec) {
        let leaf = Image::open(&with.chain.layers[0].path, OpenOptions::WRITE).unwrap();
        *self.open.lock().unwrap() = Some((with.chain.clone(), leaf));
        *self.log.lock().unwrap() = with.log.as_ref().map(|path| {
            let mut log = Log::open(path, Access::ReadWrite).unwrap();
            let header = *log.header();
            log.set_header(LogHeader { consistent: 0, ..header }).unwrap();
            (log, vec![0; cbt::bitmap_len(header.size) as usize], header.consistent)
        });
    }

    /// Closes images and log, as a pause or an unplug does.
    pub fn close(&self) {
        *self.open.lock().unwrap() = None;
        *self.ended.lock().unwrap() = None;
        if let Some((mut log, bits, consistent)) = self.log.lock().unwrap().take() {
            log.add(&bits).unwrap();
            let header = *log.header();
            log.set_header(LogHeader { consistent, ..header }).unwrap();
        }
    }

    /// As if its process was killed.
    pub fn die(&self) {
        *self.open.lock().unwrap() = None;
        *self.log.lock().unwrap() = None;
    }

    pub fn write(&self, at: u64, byte: u8) {
        let ended = self.ended.lock().unwrap().take();
        if let Some(chain) = ended {
            self.open(&whole(&chain));
        }
        let mut open = self.open.lock().unwrap();
        let (_, leaf) = open.as_mut().expect("the disk runs");
        leaf.write_at(at, &[byte; 512]).unwrap();
        leaf.commit().unwrap();
        if let Some((_, bits, _)) = self.log.lock().unwrap().as_mut() {
            cbt::set_blocks(bits, cbt::blocks_of(Span::new(at, 512)));
        }
    }
}

impl LiveDisk for Handle {
    fn pause(&self) -> Result<(), ApiError> {
        if self.0.refuses_pause || self.0.daemon_is_gone.load(Ordering::Relaxed) {
            return Err(ApiError::internal("no pause"));
        }
        self.0.pauses.fetch_add(1, Ordering::Relaxed);
        self.0.close();
        Ok(())
    }

    fn resume(&self, with: &OpenSpec) -> Result<(), ApiError> {
        if self.0.refuses_resume_once.swap(false, Ordering::Relaxed) {
            return Err(ApiError::internal("no resume"));
        }
        if self.0.refuses_resume.load(Ordering::Relaxed) > 0 {
            self.0.refuses_resume.fetch_sub(1, Ordering::Relaxed);
            return Err(ApiError::internal("no resume"));
        }
        if self.0.daemon_is_gone.load(Ordering::Relaxed) {
            return Err(ApiError::internal("no daemon"));
        }
        self.0.open(with);
        if self.0.loses_answer.swap(false, Ordering::Relaxed) {
            self.0.write(0, MEANWHILE);
            self.0.daemon_is_gone.store(self.0.loses_daemon, Ordering::Relaxed);
            return Err(ApiError::internal("no answer"));
        }
        Ok(())
    }

    fn hold(&self, _: bool) -> Result<bool, ApiError> {
        Ok(!self.0.pauses_only)
    }

    fn swap_leaf(&self, with: &OpenSpec, new_log: bool) -> Result<LeafSwap, ApiError> {
        if self.0.daemon_is_gone.load(Ordering::Relaxed) {
            return Err(ApiError::internal("no daemon"));
        }
        let next = self.0.next_swap.lock().unwrap().take();
        match next {
            Some(NextSwap::Refused) => return Ok(LeafSwap::Refused(ApiError::internal("no swap"))),
            Some(NextSwap::Unheard) => return Err(ApiError::internal("no answer")),
            Some(NextSwap::Dies) => self.0.die(),
            // It closes the log of the old leaf, by whichever name that has now.
            Some(NextSwap::AnswerLost) | None => {
                let had_log = self.0.log.lock().unwrap().is_some();
                assert!(!new_log || (had_log && with.log.is_some()), "a log takes the place of one");
                self.0.close();
            }
        }
        self.0.open(with);
        self.0.swaps.fetch_add(1, Ordering::Relaxed);
        if next == Some(NextSwap::AnswerLost) {
            self.0.write(0, MEANWHILE);
            self.0.daemon_is_gone.store(self.0.loses_daemon, Ordering::Relaxed);
            return Err(ApiError::internal("no answer"));
        }
        Ok(LeafSwap::Done)
    }

    /// As a disk process does it, which keeps the image open.
    fn shorten(&self, from: u64, to: u64) -> Result<Shortened, ApiError> {
        let next = self.0.next_end.lock().unwrap().take();
        match next {
            Some(NextEnd::Refused) => return Ok(Shortened::Refused(ApiError::internal("all is needed"))),
            Some(NextEnd::Unheard) => return Err(ApiError::internal("no answer")),
            Some(NextEnd::AnswerLost) | None => {}
        }
        let mut open = self.0.open.lock().unwrap();
        let (chain, mut leaf) = open.take().expect("the disk runs");
        let path = &chain.layers[0].path;
        if let Err(error) = offline::set_physical_len(&mut leaf, to) {
            let error = ApiError::internal(error);
            *open = Some((chain, leaf));
            return Ok(Shortened::Refused(error));
        }
        drop(leaf);
        let mut medium = FileMedium::open(path, Access::ReadWrite).unwrap();
        assert_eq!(medium.len().unwrap(), from);
        medium.write_at(from - 512, &[0; 512]).unwrap();
        *self.0.ended.lock().unwrap() = Some(chain);
        if next == Some(NextEnd::AnswerLost) {
            return Err(ApiError::internal("no answer"));
        }
        Ok(Shortened::Done)
    }

    fn grow(&self, bytes: u64) -> Result<(), ApiError> {
        let (chain, leaf) = self.0.open.lock().unwrap().take().expect("the disk runs");
        drop(leaf);
        let had_log = self.0.log.lock().unwrap().is_some();
        self.0.close();
        let path = &chain.layers[0].path;
        if is_device(path) {
            // The one that is open has its log in a volume of another name.
            assert!(!had_log);
            let mut leaf = Image::open(path, OpenOptions::WRITE).unwrap();
            offline::resize_fast(&mut leaf, bytes).map_err(ApiError::internal)?;
            drop(leaf);
            self.0.open(&whole(&chain));
            return Ok(());
        }
        let log = path.with_extension("cbtlog");
        let grown = if had_log {
            Log::open(&log, Access::ReadWrite).and_then(|mut log| log.grow(bytes))
        } else {
            Ok(())
        };
        if let Err(error) = grown {
            self.0.open(&whole(&chain));
            return Err(ApiError::internal(error));
        }
        offline::resize_journalled(path, bytes, &offline::journal_beside(path), |_| ())
            .map_err(ApiError::internal)?;
        self.0.open(&OpenSpec { chain, log: had_log.then_some(log) });
        Ok(())
    }
}

fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    std::fs::metadata(path).is_ok_and(|data| data.file_type().is_block_device())
}

/// A file that nobody can open for writing, because it is a program that runs. It takes the place of what was there.
pub struct Busy(Child);

impl Busy {
    pub fn put(path: &Path) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let _ = std::fs::remove_file(path);
        std::fs::copy("/bin/sleep", path).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let until = Instant::now() + TIMEOUT;
        loop {
            match std::process::Command::new(path).arg("1000").spawn() {
                Ok(child) => return Self(child),
                // A process that another test starts has the copy open for a moment.
                Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) && Instant::now() < until => {}
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory with everything an SR needs.
pub struct Place {
    pub dir: tempfile::TempDir,
    pub sr: Uuid,
    pub config: Config,
}

impl Place {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let location = dir.path().join("images");
        let config = Config::from([("location".to_string(), location.display().to_string())]);
        Self { dir, sr: Uuid::new_v4(), config }
    }

    pub fn images(&self) -> PathBuf {
        self.dir.path().join("images")
    }

    pub fn driver(&self, sr_type: &str) -> Arc<dyn SrDriver> {
        driver(self.dir.path(), sr_type)
    }

    pub fn create(&self) -> Box<dyn Sr> {
        let driver = self.driver("file");
        driver.create(&Watch::default(), self.sr, &self.config, 0).unwrap();
        self.attach()
    }

    pub fn attach(&self) -> Box<dyn Sr> {
        self.driver("file").attach(&Watch::default(), self.sr, &self.config).unwrap()
    }

    /// Names in the SR's directory, without its mark.
    pub fn files(&self) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(self.images())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != ".sr-uuid")
            .collect();
        names.sort();
        names
    }
}

pub fn driver(dir: &Path, sr_type: &str) -> Arc<dyn SrDriver> {
    let drivers = registry(&dir.join("mount"), &dir.join("run"));
    drivers.into_iter().find(|driver| driver.info().sr_type == sr_type).unwrap()
}

pub fn new_vdi(size: u64, format: &str) -> NewVdi {
    NewVdi {
        uuid: Uuid::new_v4(),
        virtual_size: size,
        sm_config: BTreeMap::from([("image-format".to_string(), format.to_string())]),
        name_label: String::new(),
        name_description: String::new(),
    }
}

pub fn make(sr: &dyn Sr, size: u64, format: &str) -> Uuid {
    let new = new_vdi(size, format);
    sr.create(&Watch::default(), &new).unwrap();
    new.uuid
}

pub fn fork(sr: &dyn Sr, vdi: Uuid, kind: ForkKind) -> tapio_sm::Fork {
    sr.fork(&Watch::default(), vdi, Uuid::new_v4(), kind).unwrap()
}

/// Writes a sector into the leaf, as a disk process would.
pub fn write(sr: &dyn Sr, vdi: Uuid, at: u64, byte: u8) {
    let ctx = Watch::default();
    let with = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap();
    let leaf = &with.chain.layers[0];
    match leaf.kind {
        ImageKind::Vhd => {
            let disk = Disk::start(&with);
            disk.write(at, byte);
            disk.close();
        }
        _ => FileMedium::open(&leaf.path, Access::ReadWrite).unwrap().write_at(at, &[byte; 512]).unwrap(),
    }
    sr.deactivate(&ctx, vdi).unwrap();
}

/// The numbers of the blocks in what `changed_blocks` answers.
pub fn blocks_of(text: &str) -> BTreeSet<u64> {
    let bytes = STANDARD.decode(text).unwrap();
    let bits = bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte & 0x80 >> bit != 0));
    (0..).zip(bits).filter(|(_, is_set)| *is_set).map(|(block, _)| block).collect()
}

/// A chain without a log.
pub fn whole(chain: &ChainSpec) -> OpenSpec {
    OpenSpec { chain: chain.clone(), log: None }
}

/// The first byte of a sector, through the whole chain.
pub fn read(sr: &dyn Sr, vdi: Uuid, at: u64) -> u8 {
    let ctx = Watch::default();
    let chain = sr.activate(&ctx, vdi, Access::ReadOnly).unwrap().chain;
    let byte = byte_of(&chain, at);
    sr.deactivate(&ctx, vdi).unwrap();
    byte
}

pub fn byte_of(chain: &ChainSpec, at: u64) -> u8 {
    let mut sector = [0; 512];
    Chain::open_spec(chain).unwrap().read_at(at, &mut sector).unwrap();
    assert!(sector.iter().all(|&byte| byte == sector[0]));
    sector[0]
}

/// Blocks that the leaf holds.
pub fn blocks(chain: &ChainSpec) -> u32 {
    match &Chain::open_spec(chain).unwrap().layers()[0] {
        Layer::Vhd(image) => image.allocated_blocks(),
        Layer::Raw { .. } => panic!("raw"),
    }
}

/// What a child that is to die may take.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Whether a child died at its step, rather than finish; `what` it was to do.
pub fn died(mut child: Child, what: &str) -> bool {
    let until = Instant::now() + TIMEOUT;
    loop {
        match child.try_wait().unwrap() {
            Some(status) => {
                assert!(matches!(status.code(), Some(0 | 137)), "{what}: {status}");
                return status.code() == Some(137);
            }
            None if Instant::now() > until => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{what} does not end");
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}
