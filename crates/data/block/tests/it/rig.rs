//! A client that submits requests to a disk from a test thread and waits for their answers.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tapio_block::{Completion, Data, DataThread, Disk, DiskError, DiskOptions, Op, Request};
use tapio_ring::{Memory, Notify, PageBuf, Tasks};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, Span};

/// Long enough for any honest answer.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A directory that goes away with the test, on the disk rather than in memory.
pub fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn chain(layers: &[(ImageKind, &Path)], access: Access) -> ChainSpec {
    let layers = layers.iter().map(|&(kind, path)| LayerSpec { kind, path: PathBuf::from(path) }).collect();
    ChainSpec { layers, access }
}

pub fn start(spec: ChainSpec) -> Disk {
    Disk::start(spec, DiskOptions::default()).unwrap()
}

struct Answer {
    result: RefCell<Option<Result<(), DiskError>>>,
    given: Notify,
    tasks: Tasks,
}

impl Completion for Answer {
    fn complete(&self, _tag: u64, result: Result<(), DiskError>) {
        let before = self.result.borrow_mut().replace(result);
        assert!(before.is_none(), "a request was answered twice");
        self.given.notify_all(&self.tasks);
    }
}

/// One request from inside the data thread.
pub async fn ask(data_thread: &DataThread, op: Op, span: Span, data: &PageBuf) -> Result<(), DiskError> {
    let tasks = data_thread.port.tasks().clone();
    let answer = Rc::new(Answer { result: RefCell::new(None), given: Notify::default(), tasks });
    let moves = matches!(op, Op::Read | Op::Write { .. });
    // SAFETY: the caller waits for the answer while it has the page.
    let data = unsafe { data.segments(0..if moves { span.len as usize } else { 0 }) };
    data_thread.port.wait_room().await;
    let born_ns = data_thread.port.tasks().turn_ns();
    let client = Rc::clone(&answer) as Rc<dyn Completion>;
    data_thread.port.submit(Request::new(op, span, Data::Guest(data), born_ns, 1, client)).unwrap();
    loop {
        if let Some(result) = answer.result.borrow_mut().take() {
            return result;
        }
        answer.given.wait(data_thread.port.tasks()).await;
    }
}

/// Writes `bytes` at `at`.
pub fn write(disk: &Disk, at: u64, bytes: Vec<u8>, durable: bool) -> Result<(), DiskError> {
    write_after(disk, at, bytes, durable, |_| {})
}

/// A [`write`] to a disk whose gate is closed, and the test while it waits there: on the data thread, which has
/// answered a question since.
pub fn write_at_the_gate(disk: &Disk, at: u64, bytes: Vec<u8>, while_it_waits: impl FnOnce()) {
    let (seen, at_the_gate) = std::sync::mpsc::sync_channel(1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            write_after(disk, at, bytes, true, move |data_thread| {
                assert_eq!(data_thread.port.room(), 0, "the gate is open");
                seen.send(()).unwrap();
            })
        });
        at_the_gate.recv_timeout(TIMEOUT).unwrap();
        disk.status(TIMEOUT).unwrap();
        assert!(!waiting.is_finished(), "a write passed the gate");
        while_it_waits();
        waiting.join().unwrap().unwrap();
    });
}

fn write_after(
    disk: &Disk,
    at: u64,
    bytes: Vec<u8>,
    durable: bool,
    before: impl FnOnce(&DataThread) + Send + 'static,
) -> Result<(), DiskError> {
    disk.remote()
        .call_async(TIMEOUT, move |data_thread| async move {
            before(&data_thread);
            let mut page = PageBuf::zeroed(bytes.len());
            page[..bytes.len()].copy_from_slice(&bytes);
            ask(&data_thread, Op::Write { durable }, Span::new(at, bytes.len() as u64), &page).await
        })
        .unwrap()
}

/// Reads `len` bytes at `at`.
pub fn read(disk: &Disk, at: u64, len: usize) -> Result<Vec<u8>, DiskError> {
    disk.remote()
        .call_async(TIMEOUT, move |data_thread| async move {
            let page = PageBuf::zeroed(len);
            ask(&data_thread, Op::Read, Span::new(at, len as u64), &page).await?;
            Ok(page[..len].to_vec())
        })
        .unwrap()
}

/// A request without data.
pub fn order(disk: &Disk, op: Op, span: Span) -> Result<(), DiskError> {
    disk.remote()
        .call_async(TIMEOUT, move |data_thread| async move {
            ask(&data_thread, op, span, &PageBuf::zeroed(1)).await
        })
        .unwrap()
}
