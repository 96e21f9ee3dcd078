//! Transfers between a guest's memory and a storage: as they are, in pieces, or several as one.
//!
//! ```text
//!   chain ──▶ go() ── nothing is set ──────────────▶ storage         one load
//!               ├── longer than `split` ─▶ pieces ─▶ storage         several in flight
//!               └── `merge` is set ──▶ line (batch.rs) ─▶ storage    neighbours of one batch as one
//! ```
//!
//! It is below images and requests: metadata, taps, limits, statistics and time limits see the guest's requests. A
//! piece that fails fails its own transfer; of several that went as one and failed, each goes again alone, so that an
//! error is of the request that it belongs to.

mod batch;

use std::fmt;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tapio_ring::{Segments, Storage, Tasks};
use tapio_types::TransferSizes;

use crate::window::Window;
use batch::{Batch, Lead, Role, Transfer};

/// Pieces of one transfer in flight at once.
const PIECES_MAX: usize = 16;

/// Sizes of transfers that may be changed while all threads of a disk go by them: one word, so that they are read at
/// once.
#[derive(Debug, Default)]
pub(crate) struct LiveSizes(AtomicU64);

impl LiveSizes {
    pub fn new(sizes: TransferSizes) -> Self {
        let live = Self::default();
        live.set(sizes);
        live
    }

    pub fn set(&self, TransferSizes { split, merge }: TransferSizes) {
        // Nothing else is published with it: a transfer goes by the old sizes or the new ones.
        self.0.store(u64::from(split) << 32 | u64::from(merge), Ordering::Relaxed);
    }

    pub fn get(&self) -> TransferSizes {
        let word = self.0.load(Ordering::Relaxed);
        TransferSizes { split: (word >> 32) as u32, merge: word as u32 }
    }
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

/// The transfers of one thread.
pub(crate) struct Transfers {
    sizes: Arc<LiveSizes>,
    batch: Batch,
    tasks: Tasks,
}

impl fmt::Debug for Transfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfers").field("sizes", &self.sizes.get()).finish_non_exhaustive()
    }
}

impl Transfers {
    /// For the thread of `tasks`, by `sizes`.
    pub fn new(sizes: Arc<LiveSizes>, tasks: Tasks) -> Rc<Self> {
        Rc::new(Self { sizes, batch: Batch::default(), tasks })
    }

    /// The sizes, which may change.
    pub const fn sizes(&self) -> &Arc<LiveSizes> {
        &self.sizes
    }

    /// Moves `data` to or from `store` at `at`.
    ///
    /// To be awaited by the task itself, with nothing beside it: a transfer that waits in the line and is not polled
    /// would hold up all behind it.
    ///
    /// # Errors
    /// The storage's; of a transfer that went with others and was cancelled with them, EAGAIN.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps its arguments twice: hundreds of tasks pay for that"
    )]
    pub fn go<S: Storage>(
        &self,
        store: &S,
        way: Way,
        at: u64,
        data: Segments,
    ) -> impl Future<Output = io::Result<()>> {
        async move {
            let (mut at, mut data) = (at, data);
            // What it leads, and itself.
            let mut lead: Option<(Lead, u64, Segments)> = None;
            let size_max = self.sizes.get().merge;
            if size_max > 0 {
                let transfer = Transfer::new(store, way, at, data);
                match self.batch.enter(Some(transfer), size_max, &self.tasks).await {
                    Role::Alone => {}
                    Role::Leads(run) => {
                        let own = (at, data);
                        (at, data) = (run.at, run.data);
                        lead = Some((run, own.0, own.1));
                    }
                    Role::Done => return Ok(()),
                    Role::Cancelled => return Err(io::Error::from_raw_os_error(libc::EAGAIN)),
                }
            }
            if let (None, Some(size)) = (&lead, self.split_of(data.len())) {
                // Boxed: hundreds of request tasks have room for what every request needs.
                return Box::pin(in_pieces(store, way, (at, data), size)).await;
            }
            loop {
                let result = match way {
                    Way::Read => store.read(at, data).await,
                    Way::Write => store.write(at, data).await,
                };
                let Some((run, own_at, own_data)) = lead.take() else { return result };
                if self.batch.ended(run, &result, &self.tasks) {
                    return result;
                }
                (at, data) = (own_at, own_data);
            }
        }
    }

    /// The size of the pieces in which so many bytes go, if they do. What goes beside other parts of its request goes
    /// by this alone, after [`Transfers::pass`]: it may not wait in the line.
    pub fn split_of(&self, len: u64) -> Option<u64> {
        let split = u64::from(self.sizes.get().split);
        (split > 0 && len > split).then_some(split)
    }

    /// Waits until all transfers that came before are at the storage. What goes there by itself, as zeroes and parts of
    /// requests do, comes behind them so.
    pub async fn pass(&self) {
        if self.sizes.get().merge > 0 && !self.batch.is_empty() {
            self.batch.enter(None, 0, &self.tasks).await;
        }
    }
}

/// Moves in pieces that end at multiples of `size` bytes of the storage: a stripe of that size has each of them on one
/// member.
pub(crate) async fn in_pieces<S: Storage>(
    store: &S,
    way: Way,
    (at, data): (u64, Segments),
    size: u64,
) -> io::Result<()> {
    let mut window = pin!(Window::<_, _, PIECES_MAX>::new());
    let mut done = 0;
    while done < data.len() && !window.has_failed() {
        let len = (size - (at + done) % size).min(data.len() - done);
        let (at, data) = (at + done, data.slice(done, len));
        let piece = async move {
            match way {
                Way::Read => store.read(at, data).await,
                Way::Write => store.write(at, data).await,
            }
        };
        window.as_mut().push(piece).await;
        done += len;
    }
    window.finish().await
}

#[cfg(test)]
mod tests;
