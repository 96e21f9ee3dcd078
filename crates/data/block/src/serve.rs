//! The walk of a request through its disk, and the waits beside it.

use std::rc::{Rc, Weak};

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage, Zeroing};
use tapio_types::{Access, SECTOR_LEN};

use crate::chain::Chain;
use crate::change::{Redirected, TAKE_OVER};
use crate::core::Core;
use crate::life::DiskState;
use crate::meter::Meter;
use crate::mirror::Mirror;
use crate::options::NoSpace;
use crate::request::{DiskError, Op, Request};
use crate::stages::{Place, Stage, Way};
use crate::taken::Taken;

/// How long a request that found the storage full waits before it tries again.
const NO_SPACE_RETRY_NS: u64 = 1_000_000_000;
/// How long a request that found the storage busy waits before it tries again, as in tapdisk ...
const BUSY_RETRY_NS: u64 = 1_000_000_000;
/// ... and how often, where no time limit ends it.
const BUSY_RETRIES_MAX: u32 = 100;

impl<I: Io> Core<I> {
    /// Serves one request to its end: through the stages to the images, and back. What each stage does is in
    /// `stages`.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps its arguments twice: hundreds of tasks pay for that"
    )]
    pub fn serve(self: Rc<Self>, taken: Taken) -> impl Future<Output = ()> {
        async move {
            let (io, stages) = (self.host.io(), &self.stages);
            let request = &taken.request;
            let inside = stages.gate.enter(&taken, io);
            let pages = stages.admission.enter(&taken, io);
            let account = stages.accounting.enter(&taken, io);
            let place = stages.timeouts.enter(&taken, io);

            let mut retries = 0;
            let result = loop {
                while self.is_held(&taken) && !stages.timeouts.is_over(place) {
                    stages.gate.news().await;
                }
                let Some(chain) = stages.images.enter(&taken, io) else {
                    if self.life.is_closed() {
                        break Err(DiskError::NoSpace);
                    }
                    // Aside for want of space when the disk was paused.
                    self.park(place).await;
                    continue;
                };
                if let Err(error) = check(request, &chain) {
                    break Err(error);
                }
                if stages.timeouts.is_over(place) {
                    break Err(DiskError::Io(libc::ETIMEDOUT));
                }
                let mirror = stages.taps.enter(&taken, io);
                let served = self.serve_from(&chain, mirror, request, &account.meter).await;
                let Err(error) = served else { break Ok(()) };
                match self.failed(error, chain, place, &mut retries).await {
                    Failed::Again => {}
                    Failed::Answered(error) => break Err(error),
                }
            };

            let mut is_awaited = stages.timeouts.leave(place, result, io);
            is_awaited |= stages.accounting.leave(account, result, io);
            taken.request.answer(result);
            is_awaited |= stages.admission.leave(pages, result, io);
            is_awaited |= stages.gate.leave(inside, result, io);
            if is_awaited {
                stages.gate.tell();
            }
        }
    }

    /// Whether a change that was answered and is still in flight, on whichever thread, touches the same bytes.
    fn is_held(&self, taken: &Taken) -> bool {
        self.stages.timeouts.holds(taken) || !self.sharing.is_clear(taken.request.span)
    }

    /// The request at the images: one attempt.
    async fn serve_from(
        &self,
        chain: &Chain<I::Store>,
        mirror: Option<Rc<Mirror<I::Store>>>,
        request: &Request,
        meter: &Meter,
    ) -> Result<()> {
        if let Some(mirror) = mirror {
            // Boxed: hundreds of request tasks have room for what every request needs.
            return Box::pin(async move {
                let _hold = match request.op {
                    Op::Discard | Op::WriteZeroes { .. } => Some(self.hold_alone().await),
                    Op::Read | Op::Write { .. } | Op::Flush => None,
                };
                mirrored(mirror, chain, request, meter).await
            })
            .await;
        }
        let (fairness, tasks) = (&self.stages.fairness, self.host.tasks());
        let way = fairness.begin(request, tasks);
        let moved = match request.op {
            // Boxed, as above.
            _ if way == Way::Paced => Box::pin(fairness.paced(chain, request, meter, tasks)).await,
            Op::Read => chain.read(request.span, request.data(), meter).await,
            Op::Write { .. } => chain.write(request.span, request.data(), meter).await,
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => Ok(()),
        };
        if let Way::Counted(began_ns) = way {
            fairness.end(request.span.len, began_ns, tasks);
        }
        moved?;
        let durable = match request.op {
            Op::Read => false,
            Op::Write { durable } => durable,
            Op::Flush => true,
            // Boxed, as above.
            Op::Discard | Op::WriteZeroes { .. } => Box::pin(self.clear_alone(chain, request, meter)).await?,
        };
        if durable { chain.sync(meter).await } else { Ok(()) }
    }

    /// Gives back or zeroes while no queue thread has a request of its own at the storage: its place may be given back,
    /// because of what the storage has there.
    async fn clear_alone(&self, chain: &Chain<I::Store>, request: &Request, meter: &Meter) -> Result<bool> {
        let _hold = self.hold_alone().await;
        clear(chain, request, meter).await
    }

    /// A request has failed on `chain`: waits until it is to be tried again, or says with what it is answered.
    async fn failed(
        self: &Rc<Self>,
        error: FormatError,
        chain: Rc<Chain<I::Store>>,
        place: Place,
        retries: &mut u32,
    ) -> Failed {
        let growths = chain.growths();
        if error.kind() == FormatErrorKind::OutOfSpace && self.changes.standby().is_there() {
            // Boxed: hundreds of request tasks have room for what every request needs.
            if Box::pin(self.elsewhere(chain, place)).await {
                return Failed::Again;
            }
        } else {
            drop(chain);
        }
        let (tasks, stages) = (self.host.tasks(), &self.stages);
        if stages.timeouts.is_over(place) {
            stages.accounting.failed();
            self.host.report_request("a request took longer than it may and was cancelled", &error);
            return Failed::Answered(DiskError::Io(libc::ETIMEDOUT));
        }
        if is_busy(&error) && *retries < BUSY_RETRIES_MAX && self.may_retry(place) {
            *retries += 1;
            self.host.report_request("the storage is busy, a request tries again", &error);
            tasks.sleep_until(tasks.turn_ns() + BUSY_RETRY_NS).await;
            return Failed::Again;
        }
        if error.kind() == FormatErrorKind::OutOfSpace && growths.is_some() {
            self.host.report_request("the volume of the image is full, requests wait for its growth", &error);
            self.park_until_grown(place, growths).await;
            return Failed::Again;
        }
        if error.kind() == FormatErrorKind::OutOfSpace && self.host.options().no_space == NoSpace::Wait {
            self.host.report_request("the storage is full, requests wait", &error);
            self.park(place).await;
            return Failed::Again;
        }
        stages.accounting.failed();
        self.host.report_request("a request failed", &error);
        Failed::Answered(match error.kind() {
            FormatErrorKind::OutOfSpace => DiskError::NoSpace,
            FormatErrorKind::ReadOnly => DiskError::ReadOnly,
            FormatErrorKind::Unsupported => DiskError::Unsupported,
            _ => DiskError::Io(error.errno()),
        })
    }

    /// A pause does not wait for a storage to become less busy.
    fn may_retry(&self, place: Place) -> bool {
        let turn_ns = self.host.tasks().turn_ns();
        self.life.is_running() && self.stages.timeouts.has_time(place, turn_ns, BUSY_RETRY_NS)
    }

    /// A write found no space on `chain`: whether it is to be tried again, after a wait.
    async fn elsewhere(self: &Rc<Self>, chain: Rc<Chain<I::Store>>, place: Place) -> bool {
        let redirected = self.redirect(&chain);
        let tried = Rc::downgrade(&chain);
        drop(chain);
        match redirected {
            Redirected::Now => true,
            Redirected::Soon => self.wait_for_standby(tried, place).await,
            Redirected::Later => {
                self.park(place).await;
                true
            }
            Redirected::Nowhere => false,
        }
    }

    /// A write on `chain` found no space: is there somewhere else to write?
    fn redirect(self: &Rc<Self>, chain: &Rc<Chain<I::Store>>) -> Redirected {
        let standby = self.changes.standby().current();
        let (Some(standby), Some(current)) = (standby, self.chain()) else { return Redirected::Nowhere };
        if !Rc::ptr_eq(&current, chain) {
            // Another change has replaced the chain meanwhile.
            return Redirected::Now;
        }
        if standby.is_used() {
            return Redirected::Nowhere;
        }
        let change = match (self.changes.at_work(), self.begin_change(TAKE_OVER)) {
            (None, Ok(change)) => change,
            (Some(what), _) if what == TAKE_OVER => return Redirected::Soon,
            // The change in progress has the earlier images in hand, and would put them back.
            _ => return Redirected::Later,
        };
        self.host.tasks().spawn(change.take_over(standby));
        Redirected::Soon
    }

    /// Waits outside of the chain until the standby has taken over from the chain `tried` or could not. Says whether a
    /// request is to be tried again.
    async fn wait_for_standby(&self, tried: Weak<Chain<I::Store>>, place: Place) -> bool {
        let is_same = || self.chain().is_some_and(|now| std::ptr::eq(Rc::as_ptr(&now), tried.as_ptr()));
        self.step_aside(place);
        while is_same() && self.changes.at_work() == Some(TAKE_OVER) {
            self.stages.gate.news().await;
        }
        self.come_back(place);
        // A pause may have come between; what is opened after it is tried.
        !is_same() || !self.life.is_running()
    }

    /// Waits a second, or until the state changes.
    async fn park(&self, place: Place) {
        self.park_until_grown(place, None).await;
    }

    /// The same, or until the device of the leaf has become longer, which it had `growths` times.
    async fn park_until_grown(&self, place: Place, growths: Option<u64>) {
        self.step_aside(place);
        let (tasks, gate) = (self.host.tasks(), &self.stages.gate);
        let until = tasks.turn_ns() + NO_SPACE_RETRY_NS;
        let has_grown = || growths.is_some() && self.chain().is_some_and(|chain| chain.growths() != growths);
        while tasks.turn_ns() < until || matches!(self.state(), DiskState::Draining | DiskState::Paused) {
            match self.state() {
                DiskState::Closed => break,
                DiskState::Running if has_grown() => break,
                DiskState::Running => gate.news_until(until).await,
                DiskState::Draining | DiskState::Paused => gate.news().await,
            }
        }
        self.come_back(place);
    }

    /// The request waits outside of any chain, which takes as long as it takes.
    fn step_aside(&self, place: Place) {
        self.stages.timeouts.suspend(place);
        self.stages.gate.step_aside();
    }

    /// It goes on.
    fn come_back(&self, place: Place) {
        self.stages.gate.come_back();
        self.stages.timeouts.resume(place, self.host.tasks());
    }
}

/// What becomes of a request that failed.
enum Failed {
    /// It is tried again now.
    Again,
    /// It is answered with this.
    Answered(DiskError),
}

/// Whether the storage could not do it now, which says nothing about the next time. EIO is not among these: the
/// storage has tried before it reports that, and a guest that is told at once can act on it.
fn is_busy(error: &FormatError) -> bool {
    let busy = [libc::EBUSY, libc::EAGAIN, libc::EINTR, libc::ENOMEM, libc::ENOBUFS];
    error.kind() == FormatErrorKind::Io && busy.contains(&error.errno())
}

/// Gives back or zeroes; whether it must be durable then.
async fn clear<S: Storage>(chain: &Chain<S>, request: &Request, meter: &Meter) -> Result<bool> {
    let span = request.span;
    match request.op {
        Op::WriteZeroes { unmap, durable } => {
            chain.write_zeroes(span, if unmap { Zeroing::Unmap } else { Zeroing::Keep }, meter).await?;
            Ok(durable)
        }
        _ => {
            chain.discard(span, meter).await?;
            Ok(false)
        }
    }
}

/// A change, or a flush, of a disk that has a mirror.
async fn mirrored<S: Storage>(
    mirror: Rc<Mirror<S>>,
    chain: &Chain<S>,
    request: &Request,
    meter: &Meter,
) -> Result<()> {
    let span = request.span;
    let durable = match request.op {
        Op::Write { durable } => {
            mirror.write(chain, span, request.data(), meter).await?;
            durable
        }
        Op::Discard => {
            mirror.discard(chain, span, meter).await?;
            false
        }
        Op::WriteZeroes { unmap, durable } => {
            let how = if unmap { Zeroing::Unmap } else { Zeroing::Keep };
            mirror.write_zeroes(chain, span, how, meter).await?;
            durable
        }
        Op::Read | Op::Flush => true,
    };
    if durable { mirror.sync(chain, meter).await } else { Ok(()) }
}

/// What a front end need not check.
fn check<S: Storage>(request: &Request, chain: &Chain<S>) -> Result<(), DiskError> {
    if request.op == Op::Flush {
        return Ok(());
    }
    if request.op != Op::Read && chain.access() == Access::ReadOnly {
        return Err(DiskError::ReadOnly);
    }
    if !request.span.is_aligned(SECTOR_LEN) {
        return Err(DiskError::Unaligned);
    }
    if !request.span.fits(chain.len()) {
        return Err(DiskError::OutOfRange);
    }
    let moves = matches!(request.op, Op::Read | Op::Write { .. });
    if moves && request.data_len() != request.span.len {
        return Err(DiskError::OutOfRange);
    }
    Ok(())
}
