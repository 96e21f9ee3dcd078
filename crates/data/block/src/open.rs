//! Opening the images of a chain, each checked against the one above it.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tapio_format::live::vhd::OpenOptions;
use tapio_format::live::{Layer, RawLayer, vhd};
use tapio_format::vhd::offline::ParentFacts;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::uring::{LOCK_RETRY, LockHolder, lock_may_come};
use tapio_ring::{Io, Storage};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};

use crate::chain::{Chain, Link};
use crate::host::Host;
use crate::lineage::check_parent;

/// The most images in a chain: what sm allows, and its raw base.
pub const CHAIN_MAX: usize = 31;

/// How often an image that is odd while another process may write it is looked at again.
const STEADY_TRIES: u32 = 5;

impl<I: Io> Host<I> {
    /// Opens the images of `spec`, of which the first is a standby that took over if it is `overlaid`.
    ///
    /// # Errors
    /// An image cannot be opened, or does not belong to the one above it; those that were open are closed again.
    pub(crate) async fn open_chain(&self, spec: &ChainSpec, overlaid: bool) -> Result<Chain<I::Store>> {
        if spec.layers.is_empty() {
            return Err(FormatError::new(
                FormatErrorKind::InvalidArgument,
                "a chain needs at least one image",
            ));
        }
        if spec.layers.len() > CHAIN_MAX {
            let detail =
                format!("the chain has {} images, more than the {CHAIN_MAX} allowed", spec.layers.len());
            return Err(FormatError::new(FormatErrorKind::TooDeep, detail).with_path(&spec.layers[0].path));
        }
        let mut links: Vec<Rc<Link<I::Store>>> = Vec::with_capacity(spec.layers.len());
        if let Err(error) = self.open_layers(spec, overlaid, &mut links).await {
            // The leaf may be open for writing already: it is left as it was found.
            for link in &links {
                self.close_unused(&link.layer).await;
            }
            drop(links);
            // The caller may try another process.
            self.io().closed().await;
            return Err(error);
        }
        if spec.access == Access::ReadWrite {
            self.finish_relinks(&mut links, usize::from(overlaid)).await;
        }
        Ok(Chain::new(links, spec.access, self.tasks().clone(), self.transfers()))
    }

    /// Ends changes of parents that a death broke off, of the images from `first` on. All are looked at: an image that
    /// only gets another parent has no mark of its writer. A failure is no reason not to serve: this disk finds its
    /// images by what their headers say.
    async fn finish_relinks(&self, links: &mut [Rc<Link<I::Store>>], first: usize) {
        for index in first..links.len().saturating_sub(1) {
            let (above, below) = (&links[index], &links[index + 1]);
            let Layer::Vhd(child) = &above.layer else { continue };
            let finished = match child.is_half_relinked().await {
                Ok(false) => continue,
                Ok(true) => Box::pin(self.relink_again(links, index)).await,
                Err(error) => Err(error),
            };
            let (child, parent) = (above.spec().path, below.spec().path);
            let (path, parent) = (child.display(), parent.display());
            match finished {
                Ok(link) => {
                    self.report(&format!("{path}: its change of parent to {parent} was finished"));
                    links[index] = link;
                }
                Err(error) => self.report(&format!(
                    "{path}: its change of parent to {parent} was broken off and cannot be finished: {error}"
                )),
            }
        }
    }

    /// What the image `above` records about the one `below`, but for its UUID: names, for which files are looked at.
    pub(crate) async fn parent_facts(
        &self,
        above: &Link<I::Store>,
        below: &Link<I::Store>,
    ) -> Result<ParentFacts> {
        let facts = self.options().parent_facts;
        let (child, parent) = (above.spec().path, below.spec().path);
        let told = self.io().offload(move || facts(&child, &parent)).await;
        told.map_err(|error| FormatError::io("cannot look at the parent", error))?
    }

    /// Writes once more that the image at `index` belongs to the one below it; gives it as it is open then.
    async fn relink_again(&self, links: &[Rc<Link<I::Store>>], index: usize) -> Result<Rc<Link<I::Store>>> {
        let (above, below) = (&links[index], &links[index + 1]);
        let Layer::Vhd(child) = &above.layer else { return Ok(Rc::clone(above)) };
        let mut facts = self.parent_facts(above, below).await?;
        facts.uuid = child.parent_uuid().unwrap_or_default();
        if index > 0 {
            return self.relink_inner(above, &facts).await;
        }
        child.relink(&facts).await?;
        Ok(Rc::clone(above))
    }

    async fn open_layers(
        &self,
        spec: &ChainSpec,
        overlaid: bool,
        links: &mut Vec<Rc<Link<I::Store>>>,
    ) -> Result<()> {
        for (index, image) in spec.layers.iter().enumerate() {
            if spec.layers[..index].iter().any(|above| above.path == image.path) {
                return Err(FormatError::new(FormatErrorKind::Loop, "the image is its own parent")
                    .with_path(&image.path));
            }
            let opened = match index {
                0 => self.open_layer(image.kind, &image.path, spec.access).await,
                _ => self.open_steady(image).await,
            };
            let layer = opened.map_err(|error| error.with_path(&image.path))?;
            let layer = match layer {
                Layer::Vhd(vhd) if index > 0 => self.settled(vhd, image, spec.access).await?,
                Layer::Raw(raw) if index > 0 && spec.access == Access::ReadWrite => {
                    // It was the leaf of a process that died, for all that is known, and is never flushed again.
                    let flushed = raw.store.flush().await;
                    flushed.map_err(|error| {
                        FormatError::io("what was written to the image earlier cannot be made durable", error)
                            .with_path(&image.path)
                    })?;
                    Layer::Raw(raw)
                }
                other => other,
            };
            let fits = match links.last().map(|link| &link.layer) {
                Some(_) if overlaid && index == 1 => Ok(()),
                Some(Layer::Vhd(child)) => check_parent(child, &layer),
                _ => Ok(()),
            };
            if let Err(error) = fits {
                // An image that was merged into its parent stays in the list of a caller that was killed just then.
                if spec.access == Access::ReadWrite && index > 0 && self.is_bypassed(spec, index, links).await
                {
                    self.report(&format!("{}: is not in the chain any more", image.path.display()));
                    continue;
                }
                links.push(Link::new(layer, image.clone()));
                return Err(error.with_path(&image.path));
            }
            links.push(Link::new(layer, image.clone()));
        }
        if let Some(Layer::Vhd(last)) = links.last().map(|link| &link.layer)
            && last.parent_uuid().is_some()
        {
            let path = &spec.layers[spec.layers.len() - 1].path;
            let detail = "the image has a parent, which the chain does not name";
            return Err(FormatError::new(FormatErrorKind::Missing, detail).with_path(path));
        }
        Ok(())
    }

    /// Opens an image below the leaf, which a merge by another process may make longer meanwhile: its table then leads
    /// past the end that was found, or its footer is found where it was, or its batmap is half written. It is looked at
    /// again some times before that counts as damage.
    async fn open_steady(&self, image: &LayerSpec) -> Result<Layer<I::Store>> {
        let mut tries = 0;
        loop {
            let opened = self.open_layer(image.kind, &image.path, Access::ReadOnly).await;
            let is_odd = match &opened {
                Ok(Layer::Vhd(vhd)) => vhd.is_disordered(),
                Ok(_) => false,
                Err(error) => {
                    matches!(error.kind(), FormatErrorKind::Corrupt | FormatErrorKind::NotThisFormat)
                }
            };
            if !is_odd || tries == STEADY_TRIES || !image.kind.is_local() {
                return opened;
            }
            drop(opened);
            tries += 1;
            let tasks = self.tasks();
            tasks.sleep_until(tasks.turn_ns() + LOCK_RETRY.as_nanos() as u64).await;
        }
    }

    /// A caller that gives a key expects that the disk is encrypted; the second side of its mirror need not be, nor the
    /// disk once it has moved there.
    ///
    /// # Errors
    /// There is a key, and nothing to use it for.
    pub(crate) fn check_keys(&self, chain: &Chain<I::Store>, has_moved: bool) -> Result<()> {
        let is_encrypted = chain.links().iter().any(|link| link.layer.cipher().is_some());
        if self.options().keys.is_empty() || is_encrypted || has_moved {
            return Ok(());
        }
        let detail = "a key was given, but no image of the chain is encrypted: open it without a key";
        let path = &chain.links()[0].spec().path;
        Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(path))
    }

    /// Whether the last image so far was made from an image further below than the one at `index`: all between them
    /// were merged away, and the caller's list does not show it.
    async fn is_bypassed(&self, spec: &ChainSpec, index: usize, links: &[Rc<Link<I::Store>>]) -> bool {
        let Some(Layer::Vhd(child)) = links.last().map(|link| &link.layer) else { return false };
        for below in spec.layers.iter().skip(index + 1) {
            let opened = self.open_layer(below.kind, &below.path, Access::ReadOnly).await;
            if opened.is_ok_and(|layer| check_parent(child, &layer).is_ok()) {
                return true;
            }
        }
        false
    }

    /// An image below the leaf that a process had open for writing when it died, or that a power cut left inconsistent:
    /// it was the leaf, or was being merged into. It is repaired and made durable before anything is read from it,
    /// because flushes of the guest will not concern it any more.
    async fn settled(
        &self,
        vhd: Rc<vhd::VhdLayer<I::Store>>,
        image: &LayerSpec,
        access: Access,
    ) -> Result<Layer<I::Store>> {
        let named = |error: FormatError| error.with_path(&image.path);
        if !vhd.is_disordered() || access == Access::ReadOnly {
            return Ok(Layer::Vhd(vhd));
        }
        drop(vhd);
        let writable = self.open_layer(image.kind, &image.path, Access::ReadWrite).await.map_err(named)?;
        writable.close().await.map_err(named)?;
        drop(writable);
        self.open_layer(image.kind, &image.path, Access::ReadOnly).await.map_err(named)
    }

    async fn open_store(&self, kind: ImageKind, path: &Path, access: Access) -> Result<I::Store> {
        if kind.is_local() {
            return self.open_file(path, access, "the image").await;
        }
        let failed = |error| FormatError::io("cannot open the image", error);
        let name = path.to_str().ok_or_else(|| failed(std::io::ErrorKind::InvalidInput.into()))?;
        Box::pin(self.io().open_remote(kind, name, access)).await.map_err(failed)
    }

    /// Opens a file or device, and waits a while until no other process has it open for writing: one that was killed a
    /// moment ago still has it, or requests of a moment ago do. `what` names it in errors.
    pub(crate) async fn open_file(&self, path: &Path, access: Access, what: &str) -> Result<I::Store> {
        let tasks = self.tasks();
        let begin_ns = tasks.turn_ns();
        loop {
            let error = match Box::pin(self.io().open(path, access)).await {
                Ok(store) => return Ok(store),
                Err(error) => error,
            };
            let cannot = |error| FormatError::io(format!("cannot open {what}"), error);
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(cannot(error));
            }
            let (name, waited) = (path.to_path_buf(), Duration::from_nanos(tasks.turn_ns() - begin_ns));
            let ask = move || if lock_may_come(&name, waited) { None } else { Some(LockHolder::of(&name)) };
            if let Some(holder) = Box::pin(self.io().offload(ask)).await.map_err(cannot)? {
                return Err(FormatError::io(format!("{what} {holder}"), error));
            }
            tasks.sleep_until(tasks.turn_ns() + LOCK_RETRY.as_nanos() as u64).await;
        }
    }

    /// Opens one image.
    pub(crate) async fn open_layer(
        &self,
        kind: ImageKind,
        path: &Path,
        access: Access,
    ) -> Result<Layer<I::Store>> {
        let store = self.open_store(kind, path, access).await?;
        match kind {
            ImageKind::Raw | ImageKind::Nbd | ImageKind::Rbd => Ok(Layer::Raw(RawLayer::new(store))),
            ImageKind::Vhd => {
                let options = OpenOptions {
                    access,
                    space: self.options().space,
                    intent: self.options().intent.clone(),
                    keys: self.options().keys.clone(),
                    bitmaps_kept: self.options().bitmaps_kept,
                    room: self.options().room.clone(),
                };
                // Boxed: the stack of a data thread is small, and this is far from the hot path.
                let opened = Box::pin(vhd::open(store, self.tasks(), &options)).await?;
                for remark in opened.remarks {
                    self.report(&format!("{}: {remark}", path.display()));
                }
                Ok(opened.layer)
            }
        }
    }

    /// Puts an image that is only read under another parent; gives it opened again.
    pub(crate) async fn relink_inner(
        &self,
        above: &Rc<Link<I::Store>>,
        facts: &ParentFacts,
    ) -> Result<Rc<Link<I::Store>>> {
        let (kind, path) = (above.spec().kind, &above.spec().path);
        let writable = self.open_layer(kind, path, Access::ReadWrite).await?;
        let relinked = match &writable {
            Layer::Vhd(image) => image.relink(facts).await,
            Layer::Raw(_) | Layer::Shared(_) => {
                let detail = "has no parent to commit into";
                Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(path))
            }
        };
        let closed = writable.close().await;
        relinked.and(closed)?;
        drop(writable);
        Ok(above.reopened(self.open_layer(kind, path, Access::ReadOnly).await?))
    }

    /// Closes an image that was opened for a change that does not happen.
    pub(crate) async fn close_unused(&self, layer: &Layer<I::Store>) {
        if let Err(error) = layer.close().await {
            self.report(&format!("not closed cleanly: {error}"));
        }
    }

    /// Closes the images of a chain; a failure is reported.
    ///
    /// # Errors
    /// They are closed, but not cleanly: the next opening repairs them.
    pub(crate) async fn close_chain(&self, chain: &Chain<I::Store>) -> Result<()> {
        let closed = chain.close().await;
        if let Err(error) = &closed {
            self.report(&format!("not closed cleanly: {error}"));
        }
        closed
    }
}
