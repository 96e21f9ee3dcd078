//! A verified load on a block device: every page holds the number of the write that made it.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use tapio_e2e::process::poll_until;

const PAGE: usize = 4096;
/// What a wait for more writes may take.
const LIMIT: Duration = Duration::from_secs(60);

/// A page in memory that can be written past the page cache.
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// What a page holds after write `number`; that of write 0 is zero.
fn page(at: usize, number: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    if number > 0 {
        for pair in bytes.chunks_exact_mut(16) {
            pair[..8].copy_from_slice(&number.to_le_bytes());
            pair[8..].copy_from_slice(&(at as u64).to_le_bytes());
        }
    }
    bytes
}

/// What a disk must hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    /// The number of the write of each page that was answered last.
    pages: Vec<u64>,
    /// A write that has no answer: the page holds it or what it held before.
    in_flight: Option<(usize, u64)>,
}

impl Model {
    /// A disk of which nothing was written yet.
    pub(super) fn empty(len: usize) -> Self {
        Self { pages: vec![0; len / PAGE], in_flight: None }
    }

    /// Compares all pages with what `from` gives, which may be longer.
    #[track_caller]
    pub(super) fn compare(&self, what: &str, mut from: impl Read) {
        let mut found = [0; PAGE];
        let mut wrong = Vec::new();
        for (at, number) in self.pages.iter().enumerate() {
            from.read_exact(&mut found).unwrap_or_else(|error| panic!("{what}, page {at}: {error}"));
            let in_flight = self.in_flight.filter(|(page, _)| *page == at);
            let is_right =
                found == page(at, *number) || in_flight.is_some_and(|(_, number)| found == page(at, number));
            if !is_right {
                let [has, of] = [0, 8].map(|at| u64::from_le_bytes(found[at..at + 8].try_into().expect("8")));
                wrong.push(format!("page {at} is of write {has} of page {of}, not of write {number}"));
            }
        }
        assert!(
            wrong.is_empty(),
            "{what}: {} pages are wrong: {:?}",
            wrong.len(),
            &wrong[..wrong.len().min(9)]
        );
    }
}

struct Shared {
    stop: AtomicBool,
    /// A thread that wants the load to stand still for a moment waits.
    wanted: AtomicBool,
    written: AtomicU64,
    model: Mutex<Model>,
}

/// Writes single pages anywhere in the first half of a device, each durably, and reads some back.
pub(super) struct Load {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Load {
    /// Goes on from what the device holds.
    pub(super) fn on(device: &Path, model: Model) -> Self {
        let open = |flags| File::options().read(true).write(true).custom_flags(flags).open(device);
        let file = open(libc::O_DIRECT | libc::O_DSYNC).expect("the device");
        let written = model.pages.iter().copied().max().unwrap_or(0);
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            written: AtomicU64::new(written),
            model: Mutex::new(model),
        });
        let seen = Arc::clone(&shared);
        let thread = std::thread::spawn(move || write(&file, &seen));
        Self { shared, thread: Some(thread) }
    }

    /// Waits until so many more pages were written.
    #[track_caller]
    pub(super) fn writes(&self, more: u64) {
        let written = || self.shared.written.load(Ordering::Acquire);
        let until = written() + more;
        let seen = poll_until(LIMIT, || (written() >= until).then_some(()));
        assert!(seen.is_some(), "the disk is not written any more");
    }

    /// Does it between two writes, with what the disk holds then.
    pub(super) fn still<T>(&self, work: impl FnOnce(&Model) -> T) -> T {
        self.shared.wanted.store(true, Ordering::Release);
        let model = self.shared.model();
        self.shared.wanted.store(false, Ordering::Release);
        work(&model)
    }

    /// Ends it without an error; answers what the disk must hold.
    #[track_caller]
    pub(super) fn end(mut self) -> Model {
        let (ended, model) = self.stop();
        ended.expect("the disk was there to the end");
        model
    }

    /// Ends it, or finds that it ended as its disk went away.
    pub(super) fn stop(&mut self) -> (io::Result<()>, Model) {
        self.shared.stop.store(true, Ordering::Release);
        let ended = self.thread.take().expect("it ends once").join().expect("no panic");
        (ended, self.shared.model().clone())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
    }
}

impl Shared {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().expect("the load does not panic")
    }
}

fn write(file: &File, shared: &Shared) -> io::Result<()> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut buffer = Box::new(Page([0; PAGE]));
    while !shared.stop.load(Ordering::Acquire) {
        if shared.wanted.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut model = shared.model();
        let at = (random >> 8) as usize % (model.pages.len() / 2);
        let place = (at * PAGE) as u64;
        if random.is_multiple_of(8) {
            file.read_exact_at(&mut buffer.0, place)?;
            if buffer.0 != page(at, model.pages[at]) {
                let why = format!("page {at} does not hold write {}", model.pages[at]);
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            continue;
        }
        let number = shared.written.load(Ordering::Acquire) + 1;
        buffer.0 = page(at, number);
        model.in_flight = Some((at, number));
        file.write_all_at(&buffer.0, place)?;
        model.pages[at] = number;
        model.in_flight = None;
        shared.written.store(number, Ordering::Release);
    }
    Ok(())
}
