//! What a kill left, finished or undone.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use tapio_types::ApiError;
use uuid::Uuid;

use super::ImageDir;
use super::facts::FileKind;
use super::fork::Reached;
use super::index::Listing;
use super::journal::{CloneJournal, Leftover, leftover};
use super::merge_journal::{self, Found};
use super::remove::remove;
use crate::errors;
use crate::lock::Share;
use crate::traits::Ctx;

/// Whether something is left that can be put in order here.
pub(super) fn is_needed(directory: &Path, listing: &Listing) -> bool {
    listing.leftovers.iter().any(|name| match leftover(name) {
        None => false,
        Some(Leftover::Merge(_)) => !is_foreign(directory, name),
        Some(Leftover::Partial(process)) => !is_running(process),
        Some(_) => true,
    })
}

/// Whether the journal of a merge is another storage manager's; one that cannot be read counts as such.
fn is_foreign(directory: &Path, name: &str) -> bool {
    matches!(merge_journal::read(directory, name), Ok(Some(Found::Foreign)) | Err(_))
}

/// Base copies of forks that are not finished yet: they may not be hidden.
pub(super) fn bases(directory: &Path, listing: &Listing) -> HashSet<Uuid> {
    let forks = listing.leftovers.iter().filter(|name| leftover(name) == Some(Leftover::Clone));
    forks
        .filter_map(|name| CloneJournal::read(directory, name).ok().flatten())
        .map(|journal| journal.base)
        .collect()
}

/// Journals of other storage managers, by VDI.
pub(super) fn foreign(directory: &Path, listing: &Listing) -> HashMap<Uuid, String> {
    let of = |name: &String| match leftover(name) {
        Some(Leftover::Merge(vdi)) if is_foreign(directory, name) => Some((vdi, name.clone())),
        _ => None,
    };
    listing.leftovers.iter().filter_map(of).collect()
}

pub(super) fn is_running(process: u32) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}

impl ImageDir {
    /// Finishes or undoes everything that was broken off. The caller's `live` must know every disk that runs.
    pub(super) fn recover(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let held = self.lock(ctx, Share::Exclusive)?;
        let listing = self.list()?;
        self.recover_locked(ctx, &listing)?;
        let mut listing = self.list()?;
        self.remove_all_garbage(ctx, &mut listing)?;
        drop(held);
        Ok(())
    }

    /// The same with the lock held; base copies stay.
    pub(super) fn recover_locked(&self, ctx: &dyn Ctx, listing: &Listing) -> Result<(), ApiError> {
        // Forks first: they say whose the leaves are that have no name yet.
        let forks = listing.leftovers.iter().filter(|name| leftover(name) == Some(Leftover::Clone));
        for name in forks {
            let read = CloneJournal::read(&self.path, name)
                .map_err(|error| errors::io(181, "cannot read the journal", &self.path.join(name), &error))?;
            match read {
                Some(journal) => self.recover_fork(ctx, &journal)?,
                None => {
                    tracing::info!("SR {}: {name} was never whole and is removed", self.sr);
                    remove(&self.path.join(name))?;
                }
            }
            ctx.step("recover:some");
        }
        // Before resizes: disks that a larger parent closed must be closed still when that is taken back.
        for name in listing.leftovers.iter().filter(|name| matches!(leftover(name), Some(Leftover::Merge(_))))
        {
            self.recover_merge(ctx, name)?;
            ctx.step("recover:some");
        }
        for name in &listing.leftovers {
            match leftover(name) {
                // Its host puts it in order.
                Some(Leftover::Resize(vdi) | Leftover::Cbt(vdi) | Leftover::NewLeaf(vdi))
                    if ctx.elsewhere(vdi).is_some() => {}
                Some(Leftover::Resize(vdi)) if ctx.live(vdi).is_none() => self.recover_resize(vdi, name)?,
                Some(Leftover::Cbt(vdi)) => self.recover_log(ctx, vdi, name)?,
                Some(Leftover::NewLeaf(_) | Leftover::NewLog | Leftover::PartialRaw) => {
                    remove(&self.path.join(name))?;
                }
                Some(Leftover::Partial(process)) if !is_running(process) => remove(&self.path.join(name))?,
                _ => continue,
            }
            ctx.step("recover:some");
        }
        self.sync()
    }

    fn recover_fork(&self, ctx: &dyn Ctx, journal: &CloneJournal) -> Result<(), ApiError> {
        let vdi = journal.vdi;
        if let Some(why) = ctx.elsewhere(vdi) {
            tracing::info!("SR {}: a fork of {vdi} waits for its host: {why}", self.sr);
            return Ok(());
        }
        let reached = self
            .reached(journal)
            .map_err(|error| errors::io(181, "cannot see how far a fork came in", &self.path, &error))?;
        let live = ctx.live(vdi);
        if let Some(disk) = &live {
            // It was paused, or was going to be, or goes on already. Its logs change only while it is.
            let _ = disk.pause();
        }
        let ended = if let Reached::Swapped(kind) = reached {
            tracing::info!("SR {}: a fork of {vdi} was broken off and is finished", self.sr);
            self.finish_fork(ctx, journal, kind)
        } else {
            tracing::info!("SR {}: a fork of {vdi} was broken off and is undone", self.sr);
            self.undo_fork(ctx, journal).map(|()| true)
        };
        if let Some(disk) = live {
            // Afterwards it runs, with the right images.
            if let Err(error) = self.go_on(vdi, disk.as_ref()) {
                // The journal stays: the next recovery tries again.
                tracing::warn!("the disk of VDI {vdi} does not go on after a broken fork: {error}");
                return ended.map(drop);
            }
        }
        // Otherwise the next recovery finishes it: once a disk process has had the images open.
        if ended? { self.remove_journal(journal) } else { Ok(()) }
    }

    /// A disk that was closed for a change of its log goes on, with the log if it is there.
    fn recover_log(&self, ctx: &dyn Ctx, vdi: Uuid, name: &str) -> Result<(), ApiError> {
        if let Some(disk) = ctx.live(vdi) {
            let _ = disk.pause();
            if let Err(error) = self.go_on(vdi, disk.as_ref()) {
                // The journal stays: the next recovery tries again.
                tracing::warn!("the disk of VDI {vdi} does not go on after a change of its log: {error}");
                return Ok(());
            }
        }
        remove(&self.path.join(name))
    }

    fn recover_resize(&self, vdi: Uuid, name: &str) -> Result<(), ApiError> {
        if !self.file(FileKind::Vhd, vdi).exists() {
            return remove(&self.path.join(name));
        }
        // One that cannot be taken back keeps its VDI from being used, not the SR.
        if let Err(error) = self.finish_resize(vdi) {
            tracing::warn!(
                "SR {}: a resize of {vdi} was broken off and cannot be taken back: {error}",
                self.sr
            );
        }
        Ok(())
    }
}
