//! An image below the leaf that is written for a while, because another is merged into it, or that was the leaf.
//!
//! There is one instance of it at any time, in its place in the chain, so that a reader below an image sees what is
//! there now. Until it was closed and opened again as one that is only read, it is *volatile*: what is known of it
//! here is more than its storage would tell after a death. Images above it keep their blocks meanwhile.

use std::rc::Rc;

use tapio_format::{FormatError, Result};
use tapio_ring::Io;
use tapio_types::Access;

use super::Change;
use crate::chain::{Chain, Link};

impl<I: Io> Change<I> {
    /// Opens the image at `index` of the open chain, which is not the leaf, for writing, and makes it at least as large
    /// as the one above it. It is not in the chain yet.
    ///
    /// # Errors
    /// It cannot be opened for writing, or closed after an earlier attempt; it cannot grow.
    pub(crate) async fn open_parent(&self, index: usize) -> Result<Rc<Link<I::Store>>> {
        let chain = self.core.running_chain()?;
        if chain.links()[index].is_volatile() {
            Box::pin(self.let_go(&chain, index)).await?;
        }
        drop(chain);
        let chain = self.core.running_chain()?;
        let old = Rc::clone(&chain.links()[index]);
        let len = chain.links()[index - 1].layer.virtual_len();
        drop(chain);
        let named = |error: FormatError| error.with_path(&old.spec().path);
        // Requests of a moment ago may still have it open: opening waits for them.
        let layer = self
            .core
            .host
            .open_layer(old.spec().kind, &old.spec().path, Access::ReadWrite)
            .await
            .map_err(named)?;
        if layer.virtual_len() < len
            && let Err(error) = layer.grow(len).await
        {
            self.core.host.close_unused(&layer).await;
            return Err(named(error));
        }
        let parent = old.reopened(layer);
        parent.set_merged_into(true);
        Ok(parent)
    }

    /// Puts `link`, another instance of the image at `index` of `chain`, in its place there, and lets requests that are
    /// taken from now on see it. Gives the new chain.
    pub(crate) fn put_in_place(
        &self,
        chain: &Chain<I::Store>,
        index: usize,
        link: Rc<Link<I::Store>>,
    ) -> Rc<Chain<I::Store>> {
        let mut links = chain.links().to_vec();
        links[index] = link;
        let chain = Rc::new(Chain::new(
            links,
            chain.access(),
            self.core.host.tasks().clone(),
            self.core.host.transfers(),
        ));
        self.replace_chain(Rc::clone(&chain));
        chain
    }

    /// Closes the image at `index` of `chain`, which is open for writing although it is not the leaf, and opens it
    /// again as one that is only read. Gives the chain with that in its place.
    ///
    /// # Errors
    /// The storage's: the chain stays as it is. It can be read like this, and only this instance knows all of the
    /// image.
    pub(crate) async fn let_go(&self, chain: &Chain<I::Store>, index: usize) -> Result<Rc<Chain<I::Store>>> {
        let old = &chain.links()[index];
        let named = |error: FormatError| error.with_path(&old.spec().path);
        Box::pin(old.layer.close()).await.map_err(named)?;
        old.set_unsettled(false);
        let opened = self.core.host.open_layer(old.spec().kind, &old.spec().path, Access::ReadOnly).await;
        Ok(self.put_in_place(chain, index, old.reopened(opened.map_err(named)?)))
    }
}
