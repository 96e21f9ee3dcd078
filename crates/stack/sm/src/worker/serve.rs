//! The worker's side: the real drivers, behind sockets.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard, RwLock};
use tapio_sys::poll;
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::frame::{Frames, encode};
use super::message::{Answer, FromWorker, Question, Reply, Task, ToWorker};
use super::rights;
use crate::external;
use crate::traits::{
    ApiSession, Ctx, LeafSwap, LiveDisk, Merged, Notice, OpenSpec, Shortened, Sr, SrDriver, SrStat, VdiInfo,
};

/// Images in one message.
const IMAGES_AT_ONCE: usize = 500;
/// Bytes of a text, which is base64, in one message.
const TEXT_AT_ONCE: usize = 1 << 20;

struct Shared {
    drivers: Vec<Arc<dyn SrDriver>>,
    sr: RwLock<Option<Box<dyn Sr>>>,
    step: fn(&'static str),
}

/// Does what the daemon at the other end of `control` asks, until that is gone. `step` is called at each of
/// [`crate::STEPS`]. The caller ends the process afterwards: calls that run then are what the daemon's own end leaves.
pub fn serve(control: &UnixStream, drivers: Vec<Arc<dyn SrDriver>>, step: fn(&'static str)) {
    let shared = Arc::new(Shared { drivers, sr: RwLock::new(None), step });
    loop {
        let (link, data) = match rights::receive(control) {
            Ok(Some((link, data))) => (UnixStream::from(link), data),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // The daemon is gone, or speaks another language: nothing may be changed for it any more.
            Ok(None) | Err(_) => return,
        };
        let shared = Arc::clone(&shared);
        let talking = std::thread::Builder::new().name("storage".into());
        if let Err(error) = talking.spawn(move || talk(&shared, link, data)) {
            tracing::error!(%error, "no thread for an operation of the storage");
            return;
        }
    }
}

/// `data` is the socket of the only call of this link.
fn talk(shared: &Shared, stream: UnixStream, mut data: Option<OwnedFd>) {
    let link = Arc::new(Link {
        inner: Mutex::new(Inner { stream, frames: Frames::default() }),
        is_cancelled: AtomicBool::new(false),
    });
    loop {
        // A statement of its own: the driver takes the lock for what it asks.
        let received = link.lock().receive();
        let Ok(Some(message)) = received else { return };
        link.is_cancelled.store(false, Ordering::Release);
        let task = match message {
            ToWorker::Begin(task) => task,
            // For a call that ended meanwhile.
            ToWorker::Cancel | ToWorker::Reply(_) => continue,
        };
        let ctx = Remote { link: Arc::clone(&link), step: shared.step };
        let done = std::panic::catch_unwind(AssertUnwindSafe(|| shared.run(&ctx, task, data.take())));
        let defect =
            |_| Err(ApiError::internal("the storage driver ended in a defect; the daemon's log has more"));
        let done = done.unwrap_or_else(defect);
        let sent = link.lock().send(&FromWorker::Done(done));
        if sent.is_err() {
            return;
        }
    }
}

impl Shared {
    /// The driver of this key; see [`SrDriver::key`].
    fn driver(&self, key: &str) -> Result<Arc<dyn SrDriver>, ApiError> {
        let found = self.drivers.iter().find(|driver| driver.info().sr_type == key).cloned();
        found.or_else(|| external::of_key(key)).ok_or_else(|| ApiError::new("SR_UNKNOWN_DRIVER", [key]))
    }

    fn with<T>(&self, work: impl FnOnce(&dyn Sr) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let sr = self.sr.read();
        work(sr.as_deref().ok_or_else(not_attached)?)
    }

    fn tell_images(
        &self,
        ctx: &Remote,
        list: impl FnOnce(&dyn Sr) -> Result<Vec<VdiInfo>, ApiError>,
    ) -> Result<Answer, ApiError> {
        ctx.tell_images(&self.with(list)?)?;
        Ok(Answer::Nothing)
    }

    fn end(
        &self,
        end: impl FnOnce(Box<dyn Sr>) -> Result<(), (Box<dyn Sr>, ApiError)>,
    ) -> Result<Answer, ApiError> {
        let mut sr = self.sr.write();
        let taken = sr.take().ok_or_else(not_attached)?;
        end(taken).map(|()| Answer::Nothing).map_err(|(given_back, error)| {
            *sr = Some(given_back);
            error
        })
    }

    fn run(&self, ctx: &Remote, task: Task, data: Option<OwnedFd>) -> Result<Answer, ApiError> {
        let socket = || data.ok_or_else(|| ApiError::internal("a transfer has no socket"));
        match task {
            Task::Probe { driver, config } => self.driver(&driver)?.probe(ctx, &config).map(Answer::Probe),
            Task::Make { driver, sr, new } => self.driver(&driver)?.make(ctx, sr, &new).map(Answer::Config),
            Task::Attach { driver, sr, config } => {
                let mut place = self.sr.write();
                if place.is_some() {
                    return Err(ApiError::internal("a worker has its SR already"));
                }
                *place = Some(self.driver(&driver)?.attach(ctx, sr, &config)?);
                Ok(Answer::Nothing)
            }
            Task::Stat => self.with(|sr| sr.stat(ctx)).map(Answer::Stat),
            Task::Scan => self.tell_images(ctx, |sr| sr.scan(ctx)),
            Task::Look => self.tell_images(ctx, |sr| sr.look(ctx)),
            Task::Vdi { vdi } => self.with(|sr| sr.vdi(ctx, vdi)).map(Answer::Vdi),
            Task::Create(new) => self.with(|sr| sr.create(ctx, &new)).map(Answer::Vdi),
            Task::Introduce { vdi, location } => {
                self.with(|sr| sr.introduce(ctx, vdi, &location)).map(Answer::Vdi)
            }
            Task::Destroy { vdi } => self.with(|sr| sr.destroy(ctx, vdi)).map(|()| Answer::Nothing),
            Task::Resize { vdi, bytes } => self.with(|sr| sr.resize(ctx, vdi, bytes)).map(Answer::Vdi),
            Task::Fork { vdi, new, kind } => {
                self.with(|sr| sr.fork(ctx, vdi, new, kind)).map(|fork| Answer::Fork(Box::new(fork)))
            }
            Task::Fill { into, from, base } => {
                self.with(|sr| sr.fill(ctx, into, &from, base.as_ref())).map(|()| Answer::Nothing)
            }
            Task::Export(what) => {
                let to = socket()?;
                self.with(|sr| sr.export(ctx, &what, to)).map(|()| Answer::Nothing)
            }
            Task::Import(what) => {
                let from = socket()?;
                self.with(|sr| sr.import(ctx, &what, from)).map(|()| Answer::Nothing)
            }
            Task::MakeThin { config } => self.with(|sr| sr.make_thin(ctx, &config)).map(|()| Answer::Nothing),
            Task::Rename { vdi, name, description } => {
                self.with(|sr| sr.rename(ctx, vdi, &name, &description)).map(|()| Answer::Nothing)
            }
            Task::Activate { vdi, access } => self.with(|sr| sr.activate(ctx, vdi, access)).map(Answer::Disk),
            Task::TrackChanges { vdi, wanted } => {
                self.with(|sr| sr.track_changes(ctx, vdi, wanted)).map(Answer::Vdi)
            }
            Task::DestroyData { vdi } => self.with(|sr| sr.destroy_data(ctx, vdi)).map(Answer::Vdi),
            Task::ChangedBlocks { from, to } => {
                let text = self.with(|sr| sr.changed_blocks(ctx, from, to))?;
                ctx.tell_text(&text)
            }
            Task::Inspect => {
                let oddities = self.with(|sr| sr.inspect(ctx))?;
                let text = serde_json::to_string(&oddities)
                    .map_err(|error| ApiError::internal(format!("oddities are no text: {error}")))?;
                ctx.tell_text(&text)
            }
            Task::CollectGarbage => self.with(|sr| sr.collect_garbage(ctx)).map(Answer::Gone),
            Task::Fragmentation { vdi } => {
                self.with(|sr| sr.fragmentation(ctx, vdi)).map(Answer::Fragmentation)
            }
            Task::Continued { vdi } => self.with(|sr| sr.continued(ctx, vdi)).map(Answer::Continued),
            Task::MakeRoom(wanted) => self.with(|sr| sr.make_room(ctx, &wanted)).map(Answer::Room),
            Task::TakeRoom(spare) => self.with(|sr| sr.take_room(ctx, &spare)).map(Answer::RoomTaken),
            Task::MergeCost(merge) => self.with(|sr| sr.merge_cost(ctx, &merge)).map(Answer::Cost),
            Task::GrowBase(merge) => self.with(|sr| sr.grow_base(ctx, &merge)).map(|()| Answer::Nothing),
            Task::Merge { merge, rate } => {
                self.with(|sr| sr.merge(ctx, &merge, rate)).map(|()| Answer::Nothing)
            }
            Task::Relink(merge) => {
                self.with(|sr| sr.relink(ctx, &merge)).and_then(|done| ctx.tell_merged(done))
            }
            Task::MergeLeaf(merge) => {
                self.with(|sr| sr.merge_leaf(ctx, &merge)).and_then(|done| ctx.tell_merged(done))
            }
            Task::Deactivate { vdi } => self.with(|sr| sr.deactivate(ctx, vdi)).map(|()| Answer::Nothing),
            Task::Detach => self.end(|sr| sr.detach(ctx)),
            Task::Erase => self.end(|sr| sr.erase(ctx)),
        }
    }
}

fn not_attached() -> ApiError {
    ApiError::internal("a worker was asked about an SR that it has not attached")
}

/// One end of a link. Threads of one call share it.
struct Link {
    inner: Mutex<Inner>,
    is_cancelled: AtomicBool,
}

struct Inner {
    stream: UnixStream,
    frames: Frames,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A frame is written and taken whole, or the link is at its end.
        self.inner.lock()
    }
}

impl Inner {
    fn send(&mut self, message: &FromWorker) -> io::Result<()> {
        let bytes = encode(message).map_err(io::Error::other)?;
        self.stream.write_all(&bytes)
    }

    /// The next message; none at the end.
    fn receive(&mut self) -> io::Result<Option<ToWorker>> {
        let mut piece = [0; 16 << 10];
        loop {
            if let Some(message) = self.frames.take().map_err(io::Error::other)? {
                return Ok(Some(message));
            }
            match self.stream.read(&mut piece) {
                Ok(0) => return Ok(None),
                Ok(len) => self.frames.feed(&piece[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether something can be read now.
    fn has_news(&self) -> bool {
        !self.frames.is_empty() || poll::is_readable(&self.stream, Duration::ZERO).unwrap_or(false)
    }
}

/// The daemon, as a driver sees it.
struct Remote {
    link: Arc<Link>,
    step: fn(&'static str),
}

impl Remote {
    fn tell_images(&self, found: &[VdiInfo]) -> Result<(), ApiError> {
        let lost = |error| ApiError::internal(format!("images could not be told: {error}"));
        for images in found.chunks(IMAGES_AT_ONCE) {
            self.link.lock().send(&FromWorker::Images(images.to_vec())).map_err(lost)?;
        }
        Ok(())
    }

    /// A text in pieces: whole characters, each piece with room for their escapes.
    fn tell_text(&self, text: &str) -> Result<Answer, ApiError> {
        let lost = |error| ApiError::internal(format!("a text could not be told: {error}"));
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(TEXT_AT_ONCE));
            self.link.lock().send(&FromWorker::Text(piece.to_owned())).map_err(lost)?;
            rest = after;
        }
        Ok(Answer::Text(String::new()))
    }

    fn tell_merged(&self, done: Merged) -> Result<Answer, ApiError> {
        self.tell_images(&done.changed)?;
        Ok(Answer::Gone(done.gone))
    }
}

impl Ctx for Remote {
    fn is_cancelled(&self) -> bool {
        if self.link.is_cancelled.load(Ordering::Acquire) {
            return true;
        }
        // Another thread that uses the link reads it.
        let Some(mut inner) = self.link.inner.try_lock() else { return false };
        if inner.has_news() {
            // A daemon that is gone wants nothing any more.
            let goes_on = matches!(inner.receive(), Ok(Some(ToWorker::Reply(_) | ToWorker::Begin(_))));
            self.link.is_cancelled.store(!goes_on, Ordering::Release);
        }
        self.link.is_cancelled.load(Ordering::Acquire)
    }

    fn progress(&self, fraction: f64) {
        let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { return };
        // If the daemon does not listen, sending the call's reply fails, too.
        let _ = self.link.lock().send(&FromWorker::Progress(fraction));
    }

    fn notice(&self, vdi: Uuid, notice: Notice, why: &str) {
        let _ = self.link.lock().send(&FromWorker::Notice { vdi, notice, why: why.to_owned() });
    }

    fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
        match ask(&self.link, Question::Live { vdi }) {
            Ok(Reply::Live(disk)) => {
                disk.map(|disk| Box::new(Disk { link: Arc::clone(&self.link), disk }) as Box<dyn LiveDisk>)
            }
            // Not known is not the same as not there.
            _ => Some(Box::new(Disk { link: Arc::clone(&self.link), disk: usize::MAX })),
        }
    }

    fn is_managed(&self, vdi: Uuid) -> bool {
        // Not known is not the same as free.
        !matches!(ask(&self.link, Question::Managed { vdi }), Ok(Reply::Managed(false)))
    }

    fn step(&self, name: &'static str) {
        (self.step)(name);
    }

    fn holders(&self, vdi: Uuid) -> usize {
        match ask(&self.link, Question::Holders { vdi }) {
            Ok(Reply::Count(count)) => count,
            // Not known is not the same as none.
            _ => usize::MAX,
        }
    }

    fn api(&self, sr: Option<Uuid>) -> Result<Box<dyn ApiSession>, ApiError> {
        match ask(&self.link, Question::Session { sr })? {
            Reply::Session(session) => session.map(|given| Box::new(Given(given)) as Box<dyn ApiSession>),
            _ => Err(another_question()),
        }
    }

    fn records(&self, sr: Uuid, vdi: Option<Uuid>) -> Result<Vec<VdiInfo>, ApiError> {
        let mut all: Vec<VdiInfo> = Vec::new();
        loop {
            let after = all.len();
            match ask(&self.link, Question::Records { sr, vdi, after })? {
                Reply::Records(some) => {
                    let some = some?;
                    let is_all = some.is_empty() || vdi.is_some();
                    all.extend(some);
                    if is_all {
                        return Ok(all);
                    }
                }
                _ => return Err(another_question()),
            }
        }
    }

    fn sizes(&self, sr: Uuid) -> Result<SrStat, ApiError> {
        match ask(&self.link, Question::Sizes { sr })? {
            Reply::Sizes(sizes) => sizes,
            _ => Err(another_question()),
        }
    }
}

/// A session that the daemon ends with the call.
struct Given((String, String));

impl ApiSession for Given {
    fn session(&self) -> &str {
        &self.0.0
    }

    fn host(&self) -> &str {
        &self.0.1
    }
}

fn ask(link: &Link, question: Question) -> Result<Reply, ApiError> {
    let lost = || ApiError::internal("the daemon that an SR was changed for is gone");
    let mut inner = link.lock();
    inner.send(&FromWorker::Ask(question)).map_err(|_| lost())?;
    loop {
        match inner.receive().map_err(|_| lost())?.ok_or_else(lost)? {
            ToWorker::Reply(reply) => return Ok(reply),
            ToWorker::Cancel => link.is_cancelled.store(true, Ordering::Release),
            ToWorker::Begin(_) => return Err(lost()),
        }
    }
}

fn another_question() -> ApiError {
    ApiError::internal("the daemon answered another question")
}

/// A disk of the daemon's.
struct Disk {
    link: Arc<Link>,
    disk: usize,
}

impl Disk {
    fn done(&self, question: Question) -> Result<(), ApiError> {
        match ask(&self.link, question)? {
            Reply::Done(done) => done,
            _ => Err(another_question()),
        }
    }
}

impl LiveDisk for Disk {
    fn pause(&self) -> Result<(), ApiError> {
        self.done(Question::Pause { disk: self.disk })
    }

    fn resume(&self, disk: &OpenSpec) -> Result<(), ApiError> {
        self.done(Question::Resume { disk: self.disk, with: disk.clone() })
    }

    fn hold(&self, new_log: bool) -> Result<bool, ApiError> {
        match ask(&self.link, Question::Hold { disk: self.disk, new_log })? {
            Reply::Held(held) => held,
            Reply::Done(Err(error)) => Err(error),
            _ => Err(another_question()),
        }
    }

    fn swap_leaf(&self, disk: &OpenSpec, new_log: bool) -> Result<LeafSwap, ApiError> {
        match ask(&self.link, Question::SwapLeaf { disk: self.disk, with: disk.clone(), new_log })? {
            Reply::Swapped(swapped) => swapped,
            Reply::Done(Err(error)) => Err(error),
            _ => Err(another_question()),
        }
    }

    fn shorten(&self, from: u64, to: u64) -> Result<Shortened, ApiError> {
        match ask(&self.link, Question::Shorten { disk: self.disk, from, to })? {
            Reply::Shortened(shortened) => shortened,
            Reply::Done(Err(error)) => Err(error),
            _ => Err(another_question()),
        }
    }

    fn look_for_room(&self) {
        // Without an answer it looks by itself.
        let _ = self.done(Question::LookForRoom { disk: self.disk });
    }

    fn access(&self) -> Access {
        match ask(&self.link, Question::Access { disk: self.disk }) {
            Ok(Reply::Access(access)) => access,
            _ => Access::ReadWrite,
        }
    }

    fn grow(&self, bytes: u64) -> Result<(), ApiError> {
        self.done(Question::Grow { disk: self.disk, bytes })
    }
}
