//! The second side of a mirror: requests to it, their memory, and its timeout.
//!
//! A request to a storage must be waited for to its end, because the kernel works on its memory until then. A guest
//! must not wait for a storage that has died. So each request to the second side has a place with memory and a task
//! of its own, and the caller may leave it there: the memory is the place's, and the place is used again when the
//! storage has answered, however late.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Buffer, Notify, Pool, Storage, Tasks, Zeroing};
use tapio_types::Span;

use crate::chain::Chain;
use crate::meter::Meter;

/// Requests to the second side at once.
const PLACES: usize = 64;
/// Bytes of memory for them; costs nothing until it is used.
const POOL_LEN: usize = 8 << 20;

/// What can be asked of the second side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Write the memory of the place.
    Write(Span),
    /// Make it read as zero.
    Zero(Span, Zeroing),
    /// Make everything durable.
    Flush,
    /// Leave the images as other tools expect them.
    Close,
}

#[derive(Debug, Default)]
struct Place {
    order: Cell<Option<Order>>,
    /// Shared with the request that it is a copy of, which writes it to the first side. Each place keeps its own, so
    /// that sharing allocates nothing.
    memory: RefCell<Rc<Option<Buffer>>>,
    result: RefCell<Option<Result<()>>>,
    /// The storage has not answered yet.
    running: Cell<bool>,
    /// A caller waits for the answer.
    awaited: Cell<bool>,
    since_ns: Cell<u64>,
    has_task: Cell<bool>,
    asked: Notify,
    answered: Notify,
}

impl Place {
    fn set_memory(&self, memory: Option<Buffer>) {
        let mut place = self.memory.borrow_mut();
        *Rc::get_mut(&mut place).expect("nothing uses the memory of a place that is free") = memory;
    }
}

/// An open second side.
#[derive(Debug)]
pub struct Far<S: Storage> {
    chain: Rc<Chain<S>>,
    tasks: Tasks,
    pool: Pool,
    places: Vec<Place>,
    free: RefCell<Vec<usize>>,
    /// A place or memory has come free, or there is no use in waiting for one.
    freed: Notify,
    failure: RefCell<Option<FormatError>>,
    over: Cell<bool>,
    timeout_ns: u64,
    /// The watch sleeps because nothing is in flight.
    at_ease: Cell<bool>,
    watch: Notify,
}

/// A request that the second side was asked for.
#[derive(Debug)]
pub struct Asked<S: Storage> {
    far: Rc<Far<S>>,
    index: usize,
}

impl<S: Storage> Far<S> {
    /// The second side `chain`, which may take `timeout_ns` for each answer.
    ///
    /// # Errors
    /// No memory.
    pub fn new(chain: Chain<S>, timeout_ns: u64, tasks: Tasks) -> Result<Rc<Self>> {
        let pool = Pool::new(POOL_LEN)
            .map_err(|error| FormatError::io("no memory for a mirror's requests", error))?;
        let far = Rc::new(Self {
            chain: Rc::new(chain),
            tasks,
            pool,
            places: (0..PLACES).map(|_| Place::default()).collect(),
            free: RefCell::new((0..PLACES).rev().collect()),
            freed: Notify::default(),
            failure: RefCell::new(None),
            over: Cell::new(false),
            timeout_ns,
            at_ease: Cell::new(false),
            watch: Notify::default(),
        });
        far.tasks.spawn(Rc::clone(&far).watch());
        Ok(far)
    }

    /// The images.
    pub const fn chain(&self) -> &Rc<Chain<S>> {
        &self.chain
    }

    /// Requests that were not answered yet.
    pub fn unanswered(&self) -> usize {
        PLACES - self.free.borrow().len()
    }

    fn failure(&self) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    /// No caller waits for this side any more.
    pub fn fail(&self, error: &FormatError) {
        self.failure.borrow_mut().get_or_insert_with(|| error.clone());
        for place in &self.places {
            place.answered.notify_all(&self.tasks);
        }
        self.freed.notify_all(&self.tasks);
    }

    /// Lets the tasks end that serve this side, each when it has nothing to do.
    pub fn end(&self) {
        self.over.set(true);
        for place in &self.places {
            place.asked.notify_all(&self.tasks);
        }
        self.watch.notify_all(&self.tasks);
    }

    /// Waits until every request was answered, or there is no use in waiting.
    pub async fn drained(&self) {
        while self.unanswered() > 0 && self.failure.borrow().is_none() {
            self.freed.wait(&self.tasks).await;
        }
    }

    /// Waits until the storage has answered every request.
    pub async fn answered_all(&self) {
        while self.unanswered() > 0 {
            self.freed.wait(&self.tasks).await;
        }
    }

    /// Memory for `len` bytes, at most [`POOL_LEN`].
    ///
    /// # Errors
    /// The second side has failed.
    pub async fn memory(&self, len: u64) -> Result<Buffer> {
        loop {
            self.failure()?;
            if let Some(buffer) = self.pool.take(len as usize) {
                return Ok(buffer);
            }
            self.freed.wait(&self.tasks).await;
        }
    }

    /// Hands over a request with the memory for it.
    ///
    /// # Errors
    /// The second side has failed.
    pub async fn ask(self: &Rc<Self>, order: Order, memory: Option<Buffer>) -> Result<Asked<S>> {
        let index = loop {
            self.failure()?;
            let free = self.free.borrow_mut().pop();
            match free {
                Some(index) => break index,
                None => self.freed.wait(&self.tasks).await,
            }
        };
        let place = &self.places[index];
        place.set_memory(memory);
        place.order.set(Some(order));
        place.running.set(true);
        place.awaited.set(true);
        place.since_ns.set(self.tasks.turn_ns());
        if place.has_task.replace(true) {
            place.asked.notify_all(&self.tasks);
        } else {
            self.tasks.spawn(Rc::clone(self).work(index));
        }
        if self.at_ease.replace(false) {
            self.watch.notify_all(&self.tasks);
        }
        Ok(Asked { far: Rc::clone(self), index })
    }

    /// [`Far::ask`], and waits for the answer.
    ///
    /// # Errors
    /// The second side's, or it has failed.
    pub async fn order(self: &Rc<Self>, order: Order, memory: Option<Buffer>) -> Result<()> {
        self.ask(order, memory).await?.answer().await
    }

    /// The task of a place.
    async fn work(self: Rc<Self>, index: usize) {
        let place = &self.places[index];
        loop {
            let Some(order) = place.order.take() else {
                if self.over.get() {
                    return;
                }
                place.asked.wait(&self.tasks).await;
                continue;
            };
            let result = self.carry_out(order, place).await;
            *place.result.borrow_mut() = Some(result);
            place.running.set(false);
            place.answered.notify_all(&self.tasks);
            self.release(index);
        }
    }

    async fn carry_out(&self, order: Order, place: &Place) -> Result<()> {
        let meter = Meter::default();
        match order {
            Order::Write(span) => {
                let memory = Rc::clone(&place.memory.borrow());
                self.chain.write_from(span, memory, &meter).await.1
            }
            Order::Zero(span, how) => self.chain.write_zeroes(span, how, &meter).await,
            Order::Flush => self.chain.sync(&meter).await,
            Order::Close => self.chain.close().await,
        }
    }

    /// A place is free when the storage has answered and the caller has left.
    fn release(&self, index: usize) {
        let place = &self.places[index];
        if place.running.get() || place.awaited.get() {
            return;
        }
        place.set_memory(None);
        place.result.borrow_mut().take();
        self.free.borrow_mut().push(index);
        self.freed.notify_all(&self.tasks);
    }

    /// Enforces the timeout. Asleep while nothing is in flight, and awake once in that time while something is.
    async fn watch(self: Rc<Self>) {
        while !self.over.get() || (self.unanswered() > 0 && self.failure.borrow().is_none()) {
            let running = self.places.iter().filter(|place| place.running.get());
            let oldest = running.map(|place| place.since_ns.get()).min();
            match oldest {
                Some(since) if self.failure.borrow().is_none() => {
                    let until = since.saturating_add(self.timeout_ns);
                    if self.tasks.turn_ns() < until {
                        self.watch.wait_until(&self.tasks, until).await;
                        continue;
                    }
                    let seconds = self.timeout_ns as f64 / 1e9;
                    let detail = format!("no answer within {seconds} s");
                    let error = FormatError::io(detail, std::io::Error::from_raw_os_error(libc::ETIMEDOUT));
                    self.fail(&match self.chain.links().first() {
                        Some(leaf) => error.with_path(&leaf.spec().path),
                        None => error,
                    });
                }
                _ => {
                    self.pool.rest();
                    self.at_ease.set(true);
                    self.watch.wait(&self.tasks).await;
                }
            }
        }
    }
}

impl<S: Storage> Asked<S> {
    /// The memory of the request, which was asked for with some. Not to be kept longer than this value.
    pub fn memory(&self) -> Rc<Option<Buffer>> {
        Rc::clone(&self.far.places[self.index].memory.borrow())
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// The second side's, or this side is given up.
    pub async fn answer(self) -> Result<()> {
        let place = &self.far.places[self.index];
        loop {
            if let Some(result) = place.result.borrow_mut().take() {
                return result;
            }
            self.far.failure()?;
            place.answered.wait(&self.far.tasks).await;
        }
    }
}

impl<S: Storage> Drop for Asked<S> {
    fn drop(&mut self) {
        self.far.places[self.index].awaited.set(false);
        self.far.release(self.index);
    }
}

/// The error of a second side whose length is not the disk's.
pub fn check_len(far: u64, near: u64) -> Result<()> {
    if far == near {
        return Ok(());
    }
    let detail = format!("it has {far} bytes, the disk has {near}: make it exactly as long");
    Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
}
