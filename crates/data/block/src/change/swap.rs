//! A new leaf under the name of the old one, which has got another name: what a storage manager's snapshot is, where
//! the name of the disk is that of its leaf.
//!
//! The caller renames the files before it asks, so whichever
//! process opens the disk next, by name, gets the new chain: the new leaf is empty until this disk writes to it, and
//! reads as the old one until then. No note is made of the move for that reason;
//! notes of earlier moves are.

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::{Access, LayerSpec};

use super::Change;
use super::snapshot::{Swapped, fits};
use crate::chain::Chain;

impl<I: Io> Change<I> {
    /// See [`crate::Core::swap_leaf`].
    pub(super) async fn swap_leaf(self, images: &[LayerSpec], stall_max_ns: u64) -> Result<Swapped> {
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
        let swapped = match fits(&layer, &chain) {
            Ok(()) => Box::pin(self.put_on_top(&chain, layer, leaf, Some(below), stall_max_ns)).await,
            Err(error) => {
                self.core.host.close_unused(&layer).await;
                Err(error)
            }
        };
        let swapped = swapped.map_err(named)?;
        drop(chain);
        Box::pin(self.settle_below()).await;
        Ok(swapped)
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
