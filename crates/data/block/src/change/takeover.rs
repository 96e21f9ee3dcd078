//! A standby takes over from a full leaf. What it is: `standby`.

use std::rc::Rc;

use tapio_format::Result;
use tapio_format::continuation::Move;
use tapio_ring::Io;

use super::Change;
use super::standby::Standby;
use crate::chain::Chain;

/// How long requests in flight may take to end when the standby takes over: as long as at a snapshot.
const STALL_MAX_NS: u64 = 5_000_000_000;

/// What the right to change the chain is taken for.
pub(crate) const TAKE_OVER: &str = "the standby's taking over";

impl<I: Io> Change<I> {
    /// Makes `standby` the leaf, because a write has found no space.
    pub(crate) async fn take_over(self, standby: Rc<Standby<I::Store>>) {
        match Box::pin(self.put_standby_on_top(&standby)).await {
            Ok(()) => {
                self.core.host.report(&format!(
                    "the storage is full: writes go to {} from now on",
                    standby.link().spec()
                ));
                standby.signal();
                Box::pin(self.settle_below()).await;
            }
            Err(error) => {
                self.core.host.report(&format!("{} does not take over: {error}", standby.link().spec()));
            }
        }
    }

    /// From the note on, the empty standby on top of the leaf is a right description of the disk, whatever dies when or
    /// comes between.
    async fn put_standby_on_top(&self, standby: &Standby<I::Store>) -> Result<()> {
        let chain = self.core.running_chain()?;
        let overflow = standby.over(&chain.links()[0]);
        let is_child = overflow.is_child;
        let leaf = overflow.leaf.clone();
        self.note_move(Move::Overflows(overflow)).await?;
        standby.noted(leaf);
        let held = self.hold_requests(STALL_MAX_NS).await?;
        let chain = self.core.running_chain()?;
        standby.take_over(is_child);
        let mut links = vec![Rc::clone(standby.link())];
        links.extend(chain.links().iter().cloned());
        chain.links()[0].set_unsettled(true);
        self.replace_chain(Chain::new(
            links,
            chain.access(),
            self.core.host.tasks().clone(),
            self.core.host.transfers(),
        ));
        held.release().await;
        Ok(())
    }
}
