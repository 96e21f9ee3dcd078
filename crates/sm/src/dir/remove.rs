//! Images that go.

use std::io;
use std::path::Path;

use tapio_format::vhd::offline::journal_beside;
use tapio_types::ApiError;
use uuid::Uuid;

use super::ImageDir;
use super::facts::Kind;
use super::index::Listing;
use super::recover;
use crate::errors;
use crate::lock::Share;
use crate::traits::Ctx;

impl ImageDir {
    pub(super) fn destroy_image(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let held = self.lock(ctx, Share::Exclusive)?;
        self.check_unused(ctx, vdi, "destroy")?;
        if let Some(journal) = recover::foreign_journal(&self.path, vdi) {
            return Err(errors::fail(46, recover::unfinished(&journal)));
        }
        let mut listing = self.list()?;
        if listing.leftovers.iter().any(|name| *name == format!("clone_{vdi}")) {
            self.recover_locked(ctx, &listing)?;
            listing = self.list()?;
        }
        let Some(facts) = listing.images.get(&vdi).cloned() else {
            return Err(errors::vdi_missing(self.sr, vdi));
        };
        let children = listing.children().get(&vdi).copied().unwrap_or(0);
        if children > 0 {
            let text = format!("{vdi} carries {children} other images: destroy those first");
            return Err(errors::fail(80, text));
        }
        let parent = listing.parent_of(&facts);
        ctx.step("destroy:begin");
        let path = self.file(facts.kind, vdi);
        remove(&path)?;
        self.sync()?;
        ctx.step("destroy:image-gone");
        remove(&self.path.join(format!("{vdi}.cbtlog")))?;
        remove(&journal_beside(&path))?;
        listing.images.remove(&vdi);
        self.remove_garbage(ctx, &mut listing, parent)?;
        drop(held);
        Ok(())
    }

    /// Removes `first` and the images below it as far as they are base copies that carry nothing any more.
    ///
    /// None goes while some image cannot be read: that one's parent is not known, and may be just this.
    fn remove_garbage(
        &self,
        ctx: &dyn Ctx,
        listing: &mut Listing,
        first: Option<Uuid>,
    ) -> Result<(), ApiError> {
        let mut next = first;
        let is_known = listing.images.values().all(|facts| facts.damage.is_none());
        while let Some(vdi) = next.take().filter(|_| is_known) {
            let Some(facts) = listing.images.get(&vdi).cloned() else { break };
            // A raw image has no flag: one that carried the image just removed was a base copy.
            let is_garbage = (facts.hidden || facts.kind == Kind::Raw)
                && listing.children().get(&vdi).copied().unwrap_or(0) == 0;
            if !is_garbage || self.check_unused(ctx, vdi, "destroy").is_err() {
                break;
            }
            remove(&self.file(facts.kind, vdi))?;
            self.sync()?;
            ctx.step("destroy:parent-gone");
            listing.images.remove(&vdi);
            next = listing.parent_of(&facts);
        }
        self.sync()
    }

    /// Removes hidden images that carry nothing: a destroy that was killed left them.
    pub(super) fn remove_all_garbage(&self, ctx: &dyn Ctx, listing: &mut Listing) -> Result<(), ApiError> {
        let children = listing.children();
        let garbage: Vec<Uuid> = listing
            .images
            .iter()
            .filter(|(vdi, facts)| facts.hidden && !children.contains_key(vdi))
            .map(|(vdi, _)| *vdi)
            .collect();
        for vdi in garbage {
            tracing::info!("SR {}: base copy {vdi} carries nothing and is removed", self.sr);
            self.remove_garbage(ctx, listing, Some(vdi))?;
        }
        Ok(())
    }

    /// Whether nothing is left in the SR; removes what nobody needs.
    pub(super) fn erase_images(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut listing = self.list()?;
        self.remove_all_garbage(ctx, &mut listing)?;
        if !listing.images.is_empty() {
            return Err(errors::sr_not_empty());
        }
        ctx.step("sr-erase:begin");
        Ok(())
    }
}

/// Removes a file; one that is not there is gone.
pub(super) fn remove(path: &Path) -> Result<(), ApiError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(errors::io(64, "cannot remove", path, &error))
        }
        _ => Ok(()),
    }
}
