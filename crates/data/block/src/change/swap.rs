//! A new leaf under the name of the old one, which has got another name: what a storage manager's snapshot is, where
//! the name of the disk is that of its leaf.
//!
//! The caller renames the files before it asks, so whichever
//! process opens the disk next, by name, gets the new chain: the new leaf is empty until this disk writes to it, and
//! reads as the old one until then. No note is made of the move for that reason;
//! notes of earlier moves are.

use std::path::Path;
use std::rc::Rc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::{Access, LayerSpec};

use super::Change;
use super::snapshot::{Names, Swapped, fits};
use crate::chain::Chain;
use crate::stages::ChangeLog;

impl<I: Io> Change<I> {
    /// See [`crate::Core::swap_leaf`].
    pub(super) async fn swap_leaf(
        self,
        images: &[LayerSpec],
        log: Option<&Path>,
        stall_max_ns: u64,
    ) -> Result<Swapped> {
        let [leaf, below, others @ ..] = images else {
            let detail = "a new leaf lies on another image, and none is named";
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        };
        let chain = self.chain_with_room(leaf)?;
        let named = |error: FormatError| error.with_path(&leaf.path);
        same_below(&chain, others)?;
        // What is not noted yet of an earlier move is right until the next one.
        self.core.changes.moves().note_owed(&self.core.host).await.map_err(named)?;
        let layer =
            self.core.host.open_layer(leaf.kind, &leaf.path, Access::ReadWrite).await.map_err(named)?;
        // Before a request can go to the new leaf its log says that it is not to be trusted.
        let opened = match fits(&layer, &chain) {
            Ok(()) => match log {
                Some(path) => self.core.open_log(path, layer.virtual_len()).await.map(Some),
                None => Ok(None),
            },
            Err(error) => Err(named(error)),
        };
        let new_log = match opened {
            Ok(log) => log,
            Err(error) => {
                self.core.host.close_unused(&layer).await;
                return Err(error);
            }
        };
        let old_log = self.core.stages.taps.log().filter(|_| new_log.is_some());
        let names = Names::Swapped { below, log: new_log.clone() };
        let swapped = Box::pin(self.put_on_top(&chain, layer, leaf, names, stall_max_ns)).await;
        drop(chain);
        let swapped = match swapped {
            Ok(swapped) => swapped,
            Err(error) => {
                // Nothing was noted in it.
                self.close_log(new_log).await;
                return Err(named(error));
            }
        };
        // No request is on its way to the old leaf any more, so nothing is noted in its log any more.
        drop(new_log);
        self.close_log(old_log).await;
        Box::pin(self.settle_below()).await;
        Ok(swapped)
    }

    /// Closes a log that nothing is noted in any more. Afterwards it can be opened for writing.
    async fn close_log(&self, log: Option<Rc<ChangeLog<I::Store>>>) {
        let Some(log) = log else { return };
        if let Err(error) = log.close().await {
            self.core.host.report(&format!("the log of changed blocks is not complete: {error}"));
        }
        drop(log);
        self.core.host.io().closed().await;
    }
}

/// The images below the leaf are still those that are open.
fn same_below<S: Storage>(chain: &Chain<S>, others: &[LayerSpec]) -> Result<()> {
    let open = &chain.links()[1..];
    if open.len() == others.len() && open.iter().zip(others).all(|(link, other)| link.spec() == *other) {
        return Ok(());
    }
    let detail =
        "the images below the leaf are not those that the disk has open; 'tapio disk stats' shows them";
    Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
}
