//! Commit of an image into its parent, under a guest. The leaf is another story: see `mirror::merge`. What an inner
//! image holds is written into the parent, the image above comes to stand on the parent, and the image leaves the
//! chain.
//!
//! What an image holds hides its parent, so writing it there never changes what a reader of the chain sees; a kill or
//! a power cut leaves a chain that reads the same, and a second run writes the same bytes again. In order:
//!
//! ```text
//! 1  the parent is opened for writing and made as large as the image
//! 2  what the image holds is copied into it                    cancellable, at the job's rate
//! 3  the parent is made durable and closed for writing
//! 4  the image above is put under the parent, durably          `VhdLayer::relink`
//! 5  requests go on without the image                          its file is the caller's to remove
//! ```
//!
//! Other children of the parent would see it change: the caller knows that there are none.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;

use tapio_format::live::Layer;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, PageBuf, Storage};
use tapio_types::{Access, LayerSpec, Span};

use super::Change;
use crate::chain::Chain;
use crate::job::{Job, JobKind};
use crate::meter::Meter;
use crate::mirror::parent_too_large;
use crate::window::Window;

/// Bytes copied by one request to the storage.
const PIECE_LEN: u64 = 512 << 10;
/// Such pieces in flight at once.
const PIECES: usize = 4;

/// What a commit will cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Bytes to copy, at most.
    pub copy: u64,
    /// Bytes by which the parent will grow, at most.
    pub space: u64,
    /// The parent.
    pub parent: LayerSpec,
    /// Bytes it has room for where that is known here: on a device.
    pub room: Option<u64>,
}

impl Forecast {
    /// From the tables alone, so an upper bound.
    ///
    /// # Errors
    /// The image is not one with another below it in `chain`.
    pub(super) fn of<S: Storage>(chain: &Chain<S>, path: &Path) -> Result<Self> {
        let index = position(chain, path)?;
        let below = &chain.links()[index + 1];
        let parent = &below.layer;
        let Layer::Vhd(image) = &chain.links()[index].layer else {
            return Err(no_parent(path));
        };
        let (held, missing) = match parent {
            Layer::Vhd(parent) => image.blocks_beside(Some(parent)),
            Layer::Raw(_) | Layer::Shared(_) => image.blocks_beside(None),
        };
        let block_len = image.block_cost();
        Ok(Self {
            copy: u64::from(held) * block_len,
            space: u64::from(missing) * block_len,
            parent: below.spec(),
            room: parent.room(),
        })
    }
}

/// The place of the image `path` in `chain`, from which it could be committed.
///
/// # Errors
/// The disk is read-only; the image is not one with another below it.
pub(super) fn place<S: Storage>(chain: &Chain<S>, path: &Path) -> Result<usize> {
    if chain.access() == Access::ReadOnly {
        return Err(FormatError::new(FormatErrorKind::ReadOnly, "a read-only disk cannot be changed"));
    }
    position(chain, path)
}

impl<I: Io> Change<I> {
    /// See [`crate::Core::commit`]. `index` is the image's place in `chain`.
    pub(super) fn begin_commit(
        self,
        chain: Rc<Chain<I::Store>>,
        index: usize,
        path: &Path,
        rate: u64,
    ) -> Result<Rc<Job>> {
        let core = Rc::clone(&self.core);
        check_secrecy(&chain, index)?;
        if index == 0 {
            self.check_leaf(&chain)?;
        } else {
            core.changes.standby().check_one_chain("merging an image below it")?;
        }
        core.changes.check_finished_beside(path)?;
        let forecast = Forecast::of(&chain, path)?;
        let job = core.jobs().begin(JobKind::Commit, path.display().to_string(), rate);
        job.set_total(forecast.copy);
        drop(chain);
        core.host.tasks().spawn(self.commit(index, path.to_path_buf(), Rc::clone(&job)));
        Ok(job)
    }

    /// The work of a commit, to the end of its job.
    async fn commit(self, index: usize, path: PathBuf, job: Rc<Job>) {
        let core = Rc::clone(&self.core);
        // What queue threads write from here on comes by this thread, which knows what is copied already.
        core.sharing.left(core.host.tasks()).await;
        // Boxed: each of them holds more than the stack of a data thread should carry about.
        let result = if index == 0 {
            Box::pin(self.commit_leaf(&job)).await
        } else {
            Box::pin(self.commit_inner(index, &job)).await
        };
        if let Err(error) = &result {
            core.host.report(&format!("commit of {}: {error}", path.display()));
        }
        // The change is over before its job says so: a waiter for the job may begin the next change.
        drop(self);
        job.finish(result, core.host.tasks());
    }

    /// What the leaf must be like to be committed.
    fn check_leaf(&self, chain: &Chain<I::Store>) -> Result<()> {
        let (leaf, parent) = (&chain.links()[0], &chain.links()[1]);
        if self.core.stages.taps.mirror().is_some() {
            let detail = "the disk has a mirror: end it before the leaf is committed";
            return Err(
                FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(&leaf.spec().path)
            );
        }
        if parent.layer.virtual_len() > chain.len() {
            let error = parent_too_large(parent.layer.virtual_len(), chain.len());
            return Err(error.with_path(&parent.spec().path));
        }
        Ok(())
    }

    async fn commit_inner(&self, index: usize, job: &Job) -> Result<()> {
        let chain = self.copy_into_parent(index, job).await?;
        // From here on it is a matter of a few writes, and is brought to its end.
        let links = chain.links();
        let (above, image, below) = (&links[index - 1], &links[index], &links[index + 1]);
        let mut facts = self.core.host.parent_facts(above, below).await?;
        if let Layer::Vhd(image) = &image.layer {
            facts.uuid = image.parent_uuid().unwrap_or_default();
        }
        let named = |error: FormatError| error.with_path(&above.spec().path);
        let mut list = links[..index].to_vec();
        self.core.changes.begin_relink(&image.spec().path);
        match &above.layer {
            Layer::Vhd(leaf) if index == 1 => leaf.relink(&facts).await.map_err(named)?,
            _ => list[index - 1] = self.core.host.relink_inner(above, &facts).await.map_err(named)?,
        }
        self.core.changes.finished();
        list.extend(links[index + 1..].iter().cloned());
        self.replace_chain(Chain::new(
            list,
            chain.access(),
            self.core.host.tasks().clone(),
            self.core.host.transfers(),
        ));
        Ok(())
    }

    /// Steps 1 to 3; gives the chain as it is then.
    async fn copy_into_parent(&self, index: usize, job: &Job) -> Result<Rc<Chain<I::Store>>> {
        let parent = Box::pin(self.open_parent(index + 1)).await?;
        let chain = match self.core.running_chain() {
            Ok(chain) => self.put_in_place(&chain, index + 1, parent),
            Err(error) => {
                self.core.host.close_unused(&parent.layer).await;
                return Err(error);
            }
        };
        let part = |first: usize, access| {
            Chain::new(
                chain.links()[first..].to_vec(),
                access,
                self.core.host.tasks().clone(),
                self.core.host.transfers(),
            )
        };
        let (source, target) = (part(index, Access::ReadOnly), part(index + 1, Access::ReadWrite));
        let copied = copy_leaf(&source, &target, job, self.core.host.io()).await;
        drop((source, target));
        // Closed also when it failed: what was copied does no harm.
        let closed = Box::pin(self.let_go(&chain, index + 1)).await;
        copied.and(closed)
    }
}

/// What is encrypted stays so.
fn check_secrecy<S: Storage>(chain: &Chain<S>, index: usize) -> Result<()> {
    let (image, parent) = (&chain.links()[index], &chain.links()[index + 1]);
    if image.layer.cipher().is_none() || parent.layer.cipher().is_some() {
        return Ok(());
    }
    let detail = format!(
        "is encrypted and its parent {} is not: what is secret would be written there in the clear",
        parent.spec().path.display()
    );
    Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(&image.spec().path))
}

fn no_parent(path: &Path) -> FormatError {
    FormatError::new(FormatErrorKind::InvalidArgument, "has no parent to commit into").with_path(path)
}

fn position<S: Storage>(chain: &Chain<S>, path: &Path) -> Result<usize> {
    let Some(index) = chain.links().iter().position(|link| link.spec().path == path) else {
        let detail = "is not in the open chain; 'tapio disk stats' shows its images";
        return Err(FormatError::new(FormatErrorKind::Missing, detail).with_path(path));
    };
    if index + 1 == chain.links().len() {
        return Err(no_parent(path));
    }
    Ok(index)
}

/// Copies what the leaf of `source` holds to the same places of `target`.
pub(crate) async fn copy_leaf<I: Io>(
    source: &Chain<I::Store>,
    target: &Chain<I::Store>,
    job: &Job,
    io: &I,
) -> Result<()> {
    let mut window = pin!(Window::<_, _, PIECES>::new());
    let mut at = 0;
    let mut found = Ok(());
    while at < source.len() {
        let left = Span::new(at, source.len() - at);
        let (len, held) = match window.as_mut().beside(source.held_by_leaf(left)).await {
            Ok(extent) => extent,
            Err(error) => {
                found = Err(error);
                break;
            }
        };
        let len = if held { len.min(PIECE_LEN) } else { len };
        if held {
            if let Err(error) = window.as_mut().beside(job.pace(len, io.tasks())).await {
                found = Err(error);
                break;
            }
            // Boxed: four of them are more than a data thread's stack should carry about.
            window.as_mut().push(Box::pin(copy_piece(source, target, Span::new(at, len), job))).await;
        } else if job.is_cancelled() {
            // A large hole may take a while, too.
            found = job.pace(0, io.tasks()).await;
            break;
        }
        at += len;
    }
    window.finish().await.and(found)
}

async fn copy_piece<S: Storage>(source: &Chain<S>, target: &Chain<S>, span: Span, job: &Job) -> Result<()> {
    let meter = Meter::default();
    let (page, read) = source.read_into(span, PageBuf::zeroed(span.len as usize), &meter).await;
    read?;
    let empty = page[..span.len as usize].iter().all(|&byte| byte == 0);
    if !(empty && target.reads_zero(span).await?) {
        target.write_from(span, page, &meter).await.1?;
    }
    job.advance(span.len);
    Ok(())
}
