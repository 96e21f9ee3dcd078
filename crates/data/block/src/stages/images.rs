//! The images that requests are served from.

use std::cell::RefCell;
use std::rc::Rc;

use tapio_ring::{Io, Storage};

use super::Stage;
use crate::chain::Chain;
use crate::taken::Taken;

/// The open chain; none while the disk is paused. A request that has begun keeps the chain that it found.
#[derive(Debug)]
pub(crate) struct Images<S: Storage>(RefCell<Option<Rc<Chain<S>>>>);

impl<S: Storage> Default for Images<S> {
    fn default() -> Self {
        Self(RefCell::new(None))
    }
}

impl<S: Storage> Images<S> {
    /// The open chain.
    pub fn chain(&self) -> Option<Rc<Chain<S>>> {
        self.0.borrow().clone()
    }

    /// Lets requests that come here from now on see this chain.
    pub fn replace(&self, chain: Rc<Chain<S>>) {
        *self.0.borrow_mut() = Some(chain);
    }

    /// There are none from now on; gives those that there were.
    pub fn take(&self) -> Option<Rc<Chain<S>>> {
        self.0.borrow_mut().take()
    }
}

impl<S: Storage> Stage for Images<S> {
    /// The chain; without one the request waits until the disk has images again, or none any more.
    type Pass = Option<Rc<Chain<S>>>;

    fn enter<I: Io>(&self, _taken: &Taken, _io: &I) -> Self::Pass {
        self.chain()
    }
}
