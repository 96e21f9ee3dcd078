//! A call on its way to its handler.
//!
//! A handler is registered for a part of the toolstack, [`Handlers::of`], and sees that part alone: a call has no way
//! to the toolstack as a whole.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tapio_model::{ApiError, Value};

pub use crate::args::Args;
pub use crate::caller::Caller;
pub use crate::progress::{Progress, Unwatched};

/// A call, and the part of the toolstack that its handler works with.
pub struct Call<P> {
    /// The part: the database, the storage, the VMs.
    pub part: Arc<P>,
    /// The account, its session and its role.
    pub caller: Caller,
    /// The task, its progress and its cancel.
    pub progress: Arc<dyn Progress>,
}

impl<P> Clone for Call<P> {
    fn clone(&self) -> Self {
        self.to(&self.part)
    }
}

impl<P> fmt::Debug for Call<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("caller", &self.caller).finish_non_exhaustive()
    }
}

impl<P> Call<P> {
    /// A call of the toolstack's own, without a task.
    pub fn own(part: &Arc<P>) -> Self {
        Self { part: Arc::clone(part), caller: Caller::toolstack(), progress: Arc::new(Unwatched::default()) }
    }

    /// The same call to another part.
    pub fn to<Q>(&self, part: &Arc<Q>) -> Call<Q> {
        Call { part: Arc::clone(part), caller: self.caller.clone(), progress: Arc::clone(&self.progress) }
    }

    /// The same call with the progress and the cancel of something else.
    pub fn with(&self, progress: Arc<dyn Progress>) -> Self {
        Self { progress, ..self.clone() }
    }
}

/// Does a message's work on a part.
pub type Handle<P> = fn(&Call<P>, &Args) -> Result<Value, ApiError>;

type Run = dyn Fn(Caller, Arc<dyn Progress>, &Args) -> Result<Value, ApiError> + Send + Sync;

/// Does a message's work; it knows its part.
#[derive(Clone)]
pub struct Handler(Arc<Run>);

impl fmt::Debug for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handler").finish_non_exhaustive()
    }
}

impl Handler {
    /// Does it.
    ///
    /// # Errors
    /// The message's.
    pub(crate) fn run(
        &self,
        caller: Caller,
        progress: Arc<dyn Progress>,
        args: &Args,
    ) -> Result<Value, ApiError> {
        (self.0)(caller, progress, args)
    }
}

/// Handlers by the full name of their message, as `VDI.snapshot`.
#[derive(Debug, Default)]
pub struct Handlers(BTreeMap<&'static str, Handler>);

impl Handlers {
    /// The handlers of a part, to register more.
    pub fn of<'a, P>(&'a mut self, part: &'a Arc<P>) -> HandlersOf<'a, P> {
        HandlersOf { all: self, part }
    }

    /// The handler of a message.
    pub(crate) fn get(&self, message: &str) -> Option<&Handler> {
        self.0.get(message)
    }

    /// The messages that have one.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().copied()
    }
}

/// The handlers of one part.
#[derive(Debug)]
pub struct HandlersOf<'a, P> {
    all: &'a mut Handlers,
    part: &'a Arc<P>,
}

impl<P: Send + Sync + 'static> HandlersOf<'_, P> {
    /// Registers one.
    pub fn on(&mut self, message: &'static str, handle: Handle<P>) {
        debug_assert!(self.all.get(message).is_none(), "{message} has two handlers");
        self.replace(message, handle);
    }

    /// Registers one in the place of another.
    pub fn replace(&mut self, message: &'static str, handle: Handle<P>) {
        let part = Arc::clone(self.part);
        let run = move |caller: Caller, progress: Arc<dyn Progress>, args: &Args| {
            handle(&Call { part: Arc::clone(&part), caller, progress }, args)
        };
        self.all.0.insert(message, Handler(Arc::new(run)));
    }
}
