//! Volumes that go.

use tapio_types::ApiError;
use uuid::Uuid;

use super::{Found, VolumeSr};
use crate::dir::facts::FileKind;
use crate::errors;
use crate::lock::Share;
use crate::lvm::names;
use crate::traits::Ctx;

impl VolumeSr {
    pub(super) fn destroy_image(&self, ctx: &dyn Ctx, vdi: Uuid, keeps_log: bool) -> Result<(), ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut found = self.settled(ctx)?;
        let Some(facts) = found.listing.images.get(&vdi).cloned() else {
            if !found.listing.logs.contains(&vdi) {
                return Err(errors::vdi_missing(self.sr, vdi));
            }
            if !keeps_log {
                self.remove_log(ctx, vdi)?;
                self.unsay(&[vdi]);
                self.unreach();
            }
            return Ok(());
        };
        self.check_unused(ctx, &found.listed, vdi, "destroy")?;
        let children = found.listing.children().get(&vdi).copied().unwrap_or(0);
        if children > 0 {
            let text = format!("{vdi} carries {children} other images: destroy those first");
            return Err(errors::fail(80, text));
        }
        let parent = found.listing.parent_of(&facts);
        ctx.step("lv:destroy-begin");
        let mut gone = self.remove_one(&mut found, vdi, facts.kind)?;
        ctx.step("lv:destroy-gone");
        if keeps_log {
            gone.clear();
        } else {
            self.remove_log(ctx, vdi)?;
        }
        self.remove_garbage(ctx, &mut found, parent, &mut gone)?;
        self.unsay(&gone);
        self.unreach();
        Ok(())
    }

    /// Removes the volume of one image.
    fn remove_one(&self, found: &mut Found, vdi: Uuid, kind: FileKind) -> Result<Vec<Uuid>, ApiError> {
        let own = names::volume(kind, vdi);
        crate::dir::moved::forget(kind, &self.group.path(&own))?;
        self.group.remove(&[&own])?;
        found.listed.volumes.remove(&own);
        found.listing.images.remove(&vdi);
        Ok(vec![vdi])
    }

    /// Removes `first` and the images below it as far as they are base copies that carry nothing any more.
    ///
    /// None goes while some image cannot be read: its parent is not known, and may be this.
    pub(super) fn remove_garbage(
        &self,
        ctx: &dyn Ctx,
        found: &mut Found,
        first: Option<Uuid>,
        gone: &mut Vec<Uuid>,
    ) -> Result<(), ApiError> {
        let mut next = first;
        let is_known = found.listing.images.values().all(|facts| facts.damage.is_none());
        while let Some(vdi) = next.take().filter(|_| is_known) {
            let Some(facts) = found.listing.images.get(&vdi).cloned() else { break };
            let is_garbage = facts.hidden && !found.listing.children().contains_key(&vdi);
            if !is_garbage || self.check_unused(ctx, &found.listed, vdi, "destroy").is_err() {
                break;
            }
            next = found.listing.parent_of(&facts);
            gone.extend(self.remove_one(found, vdi, facts.kind)?);
            ctx.step("lv:destroy-parent-gone");
        }
        Ok(())
    }

    /// Removes hidden images that carry nothing; answers which.
    pub(super) fn remove_all_garbage(&self, ctx: &dyn Ctx, found: &mut Found) -> Result<Vec<Uuid>, ApiError> {
        let children = found.listing.children();
        let garbage: Vec<Uuid> = found
            .listing
            .images
            .iter()
            .filter(|(vdi, facts)| facts.hidden && !children.contains_key(vdi))
            .map(|(vdi, _)| *vdi)
            .collect();
        let mut gone = Vec::new();
        for vdi in garbage {
            tracing::info!("SR {}: base copy {vdi} carries nothing and is removed", self.sr);
            self.remove_garbage(ctx, found, Some(vdi), &mut gone)?;
        }
        if !gone.is_empty() {
            self.unsay(&gone);
        }
        Ok(gone)
    }

    /// Destroys the VDI of an SR that holds one.
    pub(super) fn destroy_single(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        if !self.group.single.is_single {
            return Ok(());
        }
        let images: Vec<Uuid> = self.found()?.listing.images.keys().copied().collect();
        images.into_iter().try_for_each(|vdi| self.destroy_image(ctx, vdi, false))
    }

    /// Refuses unless the SR is empty; base copies without children are removed first.
    pub(super) fn check_empty(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut found = self.settled(ctx)?;
        self.remove_all_garbage(ctx, &mut found)?;
        let other = found
            .listed
            .volumes
            .keys()
            .find(|name| ![names::METADATA, names::HOSTS].contains(&name.as_str()));
        if !found.listing.images.is_empty() || !found.listing.logs.is_empty() {
            return Err(errors::sr_not_empty());
        }
        if let Some(name) = other {
            let text = format!(
                "{} has the volume '{name}', which is none of the SR's: remove it first",
                self.group.name
            );
            return Err(errors::fail(51, text));
        }
        ctx.step("sr-erase:begin");
        Ok(())
    }
}
