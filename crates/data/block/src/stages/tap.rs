//! What else hears of a disk's changes: a mirror and a log of changed blocks.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::Span;

use super::Stage;
use super::log::ChangeLog;
use crate::mirror::Mirror;
use crate::request::Op;
use crate::taken::Taken;

/// The receivers of changes. A request that has begun reports to those that it found.
#[derive(Debug)]
pub(crate) struct Tap<S: Storage> {
    pub mirror: Option<Rc<Mirror<S>>>,
    pub log: Option<Rc<ChangeLog<S>>>,
}

impl<S: Storage> Default for Tap<S> {
    fn default() -> Self {
        Self { mirror: None, log: None }
    }
}

impl<S: Storage> Clone for Tap<S> {
    fn clone(&self) -> Self {
        Self { mirror: self.mirror.clone(), log: self.log.clone() }
    }
}

impl<S: Storage> Tap<S> {
    /// Notes that `span` is about to change; nothing for a flush, which has none.
    fn note(&self, span: Span) {
        if let Some(log) = &self.log {
            log.note(span);
        }
    }
}

/// The taps of a disk.
#[derive(Debug)]
pub(crate) struct Taps<S: Storage> {
    current: RefCell<Option<Rc<Tap<S>>>>,
    /// Whether there is one: what a request costs without.
    any: Cell<bool>,
}

impl<S: Storage> Default for Taps<S> {
    fn default() -> Self {
        Self { current: RefCell::new(None), any: Cell::new(false) }
    }
}

impl<S: Storage> Taps<S> {
    /// Whether anything hears of changes.
    pub const fn any(&self) -> bool {
        self.any.get()
    }

    /// The mirror, also one that the leaf's commit has onto its parent.
    pub fn mirror(&self) -> Option<Rc<Mirror<S>>> {
        self.current.borrow().as_ref()?.mirror.clone()
    }

    /// The log of changed blocks.
    pub fn log(&self) -> Option<Rc<ChangeLog<S>>> {
        self.current.borrow().as_ref()?.log.clone()
    }

    /// Sets which receivers hear of changes.
    pub fn change(&self, change: impl FnOnce(&mut Tap<S>)) {
        let mut current = self.current.borrow_mut();
        let mut tap = current.as_ref().map_or_else(Tap::default, |tap| Tap::clone(tap));
        change(&mut tap);
        let any = tap.mirror.is_some() || tap.log.is_some();
        *current = any.then(|| Rc::new(tap));
        self.any.set(any);
    }

    /// Prepares the taps for a disk of `len` bytes, before the images grow.
    ///
    /// # Errors
    /// The disk has a mirror, whose second side cannot grow; the log cannot be made longer.
    pub async fn grow(&self, len: u64) -> Result<()> {
        let Some(tap) = self.current.borrow().clone() else { return Ok(()) };
        if tap.mirror.is_some() {
            let detail = "a disk with a mirror does not grow: end the mirror first";
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        match &tap.log {
            Some(log) => log.grow(len).await,
            None => Ok(()),
        }
    }

    /// Ends them, of a disk whose images are closed; its mirror has ended by then.
    ///
    /// # Errors
    /// The log is not complete.
    pub async fn close(&self) -> Result<()> {
        let tap = self.current.borrow_mut().take();
        self.any.set(false);
        match tap.and_then(|tap| tap.log.clone()) {
            Some(log) => log.close().await,
            None => Ok(()),
        }
    }
}

impl<S: Storage> Stage for Taps<S> {
    /// The mirror that the request has to write to.
    type Pass = Option<Rc<Mirror<S>>>;

    fn enter<I: Io>(&self, taken: &Taken, _io: &I) -> Self::Pass {
        if !self.any.get() || taken.request.op == Op::Read {
            return None;
        }
        let tap = self.current.borrow();
        let tap = tap.as_ref()?;
        tap.note(taken.request.span);
        tap.mirror.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tapio_format::cbt::{HEADER_LEN, LogHeader, log_len};
    use tapio_ring::sim::SimHost;
    use tapio_types::Access;

    use super::super::asked::{answer, asked, run};
    use super::*;

    const DISK_LEN: u64 = 8 << 20;

    #[test]
    fn the_log_hears_of_changes_and_of_nothing_else() {
        let (host, path) = (SimHost::new(1), Path::new("/log"));
        let header = LogHeader { size: DISK_LEN, consistent: 1, ..LogHeader::default() };
        let mut bytes = header.encode().to_vec();
        bytes.resize(log_len(DISK_LEN).next_multiple_of(4096) as usize, 0);
        host.put(path, &bytes);
        let sim = host.process();
        let io = sim.clone();
        run(&sim, async move {
            let client = Rc::default();
            let write = asked(&client, Op::Write { durable: false }, 3 << 16, 4096);
            let early = asked(&client, Op::Write { durable: false }, 9 << 16, 4096);
            let others = [asked(&client, Op::Read, 0, 4096), asked(&client, Op::Flush, 0, 0)];
            let taps = Taps::default();
            // There is no receiver yet.
            assert!(!taps.any() && taps.enter(&early, &io).is_none());
            let store = io.open(path, Access::ReadWrite).await.expect("it is there");
            let log = ChangeLog::open(store, DISK_LEN).await.expect("a log");
            taps.change(|tap| tap.log = Some(Rc::new(log)));
            assert!(taps.any() && taps.mirror().is_none());
            for taken in [&write, &others[0], &others[1]] {
                assert!(taps.enter(taken, &io).is_none());
            }
            taps.close().await.expect("the storage works");
            assert!(!taps.any());
            [write, early].into_iter().chain(others).for_each(answer);
        });
        let blocks = &host.content(path).bytes()[HEADER_LEN..log_len(DISK_LEN) as usize];
        let set = blocks.iter().map(|byte| byte.count_ones()).sum::<u32>();
        assert_eq!((set, blocks[0].count_ones()), (1, 1));
    }
}
