//! Snapshots and clones, by Ceph's layering.
//!
//! A snapshot is one call of the cluster. A clone of an image is three: a snapshot to begin at, the image, and the
//! removal of the snapshot, which Ceph then keeps without a name for as long as the clone needs it. What a kill leaves
//! between them is removed at the next attach ([`Repository::recover`]).

use tapio_types::ApiError;
use uuid::Uuid;

use super::failed;
use super::layout::{About, CLONE, Place, TRACKED};
use super::repository::Repository;
use crate::errors;
use crate::traits::{Ctx, Fork, ForkKind, VdiInfo};

impl Repository {
    pub(super) fn fork_vdi(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        new: Uuid,
        kind: ForkKind,
    ) -> Result<Fork, ApiError> {
        let (made, origin) = match (self.find(vdi)?, kind) {
            (Place::Image, ForkKind::Single) => {
                // There is nothing to freeze: no image lies on another but by a snapshot.
                let origin = self.info_of_image(vdi).map_err(failed(82))?;
                (origin.clone(), origin)
            }
            (Place::Image, ForkKind::Snapshot) => {
                let made = self.snapshot(vdi, new)?;
                (made, self.info_of_image(vdi).map_err(failed(82))?)
            }
            (Place::Image, ForkKind::Clone) => {
                let made = self.clone_of_image(ctx, vdi, new)?;
                (made, self.info_of_image(vdi).map_err(failed(81))?)
            }
            (Place::SnapshotOf(_), ForkKind::Single) => {
                return Err(ApiError::new("VDI_READONLY", [vdi.to_string()]));
            }
            (Place::SnapshotOf(image), _) => {
                self.make_clone(&image, &vdi.to_string(), new)?;
                let made = self.info_of_image(new).map_err(failed(81))?;
                (made, self.info_of_snapshot(vdi, &image).map_err(failed(81))?)
            }
        };
        ctx.step("fork:done");
        Ok(Fork { made, origin, base: None })
    }

    fn snapshot(&self, vdi: Uuid, new: Uuid) -> Result<VdiInfo, ApiError> {
        let name = vdi.to_string();
        let image = self.open_image(&name)?;
        let is_tracked = image.metadata(TRACKED).map_err(failed(82))?.is_some();
        if is_tracked {
            // First: what is kept of a snapshot that is not there does no harm.
            About { is_tracked, is_metadata: false }.write(&image, new).map_err(failed(82))?;
        }
        image.create_snapshot(&new.to_string()).map_err(failed(82))?;
        drop(image);
        self.places_of_snapshots.lock().insert(new, name.clone());
        self.info_of_snapshot(new, &name).map_err(failed(82))
    }

    fn clone_of_image(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid) -> Result<VdiInfo, ApiError> {
        let (name, begin) = (vdi.to_string(), format!("{CLONE}{new}"));
        let image = self.open_image(&name)?;
        image.create_snapshot(&begin).map_err(failed(81))?;
        ctx.step("rbd-clone:snapshot-made");
        let made = self.make_clone(&name, &begin, new);
        if made.is_ok() {
            ctx.step("rbd-clone:image-made");
        }
        let removed = image.remove_snapshot(&begin).map_err(failed(81));
        drop(image);
        made?;
        if let Err(error) = removed {
            // The clone is there; the snapshot goes at the next attach.
            tracing::warn!(
                "the snapshot that VDI {new} begins at keeps its name until the SR is attached: {error}"
            );
        }
        self.info_of_image(new).map_err(failed(81))
    }

    fn make_clone(&self, image: &str, snapshot: &str, new: Uuid) -> Result<(), ApiError> {
        let made = self.inside.clone_image(image, snapshot, &new.to_string(), self.data_pool.as_deref());
        made.map_err(|error| match error.errno() {
            libc::EEXIST => errors::fail(43, error),
            _ => failed(81)(error),
        })
    }
}
