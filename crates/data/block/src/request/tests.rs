//! Requests that are dropped without an answer.

use std::cell::RefCell;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use tapio_ring::Pool;
use tapio_ring::dropped::{OnDrop, dropped, set_on_drop};

use super::*;

const LEN: u64 = 4096;

/// What a client hears of its request.
#[derive(Default)]
struct Heard {
    results: RefCell<Vec<Result<(), DiskError>>>,
    memory: Cell<Option<Buffer>>,
}

impl Completion for Heard {
    fn give_back(&self, _tag: u64, buffer: Buffer) {
        assert!(self.results.borrow().is_empty(), "memory comes before the answer");
        self.memory.set(Some(buffer));
    }

    fn complete(&self, _tag: u64, result: Result<(), DiskError>) {
        self.results.borrow_mut().push(result);
    }
}

fn request(data: Data) -> (Request, Rc<Heard>) {
    let heard = Rc::new(Heard::default());
    let client = Rc::clone(&heard) as Rc<dyn Completion>;
    (Request::new(Op::Read, Span::new(0, LEN), data, 0, 1, client), heard)
}

fn own(pool: &Pool) -> Data {
    Data::Own(pool.take(LEN as usize).expect("memory"))
}

const EIO: Result<(), DiskError> = Err(DiskError::Io(libc::EIO));

#[test]
fn an_answer_gives_the_memory_back_and_is_the_only_one() {
    let (pool, before) = (Pool::new(1 << 20).expect("memory"), dropped());
    let (asked, heard) = request(own(&pool));
    assert_eq!(asked.data().len(), LEN);
    asked.answer(Ok(()));
    assert_eq!(*heard.results.borrow(), [Ok(())]);
    assert_eq!(heard.memory.take().map(|buffer| buffer.len()), Some(LEN as usize));
    assert_eq!((dropped(), pool.free_len()), (before, pool.len()));
}

#[test]
fn one_that_is_dropped_fails_and_what_a_storage_may_have_stays() {
    set_on_drop(OnDrop::Count);
    let (pool, before) = (Pool::new(1 << 20).expect("memory"), dropped());
    // No operation has had the memory yet.
    let (queued, heard) = request(own(&pool));
    drop(queued);
    assert_eq!((&*heard.results.borrow(), pool.free_len()), (&vec![EIO], pool.len()));
    // A storage may have it.
    let (at_work, heard) = request(own(&pool));
    assert_eq!(at_work.data().len(), LEN);
    drop(at_work);
    assert_eq!((&*heard.results.borrow(), pool.free_len()), (&vec![EIO], pool.len() - LEN as usize));
    assert!(heard.memory.take().is_none());
    // There is none.
    let (flush, heard) = request(Data::None);
    assert!(flush.data().is_empty());
    drop(flush);
    assert_eq!((&*heard.results.borrow(), dropped()), (&vec![EIO], before + 3));
}

#[test]
fn a_guest_hears_nothing_while_a_storage_may_fill_its_memory() {
    set_on_drop(OnDrop::Count);
    let pool = Pool::new(1 << 20).expect("memory");
    let guests = pool.take(LEN as usize).expect("memory");
    // SAFETY: no operation is begun.
    let data = || Data::Guest(unsafe { guests.segments(0..LEN as usize) });
    let (queued, heard) = request(data());
    drop(queued);
    assert_eq!(*heard.results.borrow(), [EIO]);
    let (at_work, heard) = request(data());
    assert_eq!(at_work.data().len(), LEN);
    drop(at_work);
    assert!(heard.results.borrow().is_empty());
}

/// For [`a_debug_build_aborts`] alone.
#[test]
#[ignore = "ends its process"]
fn drops_a_request() {
    set_on_drop(OnDrop::Abort);
    let (request, heard) = request(Data::None);
    drop(request);
    assert!(heard.results.borrow().is_empty(), "the process has ended");
}

#[test]
fn a_debug_build_aborts() {
    let program = std::env::current_exe().expect("this test");
    let name = "request::tests::drops_a_request";
    let ended = Command::new(program).args([name, "--exact", "--ignored", "--nocapture"]).output();
    let ended = ended.expect("it starts");
    assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{:?}", ended.status);
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("a request was dropped without an answer"), "{said}");
}
