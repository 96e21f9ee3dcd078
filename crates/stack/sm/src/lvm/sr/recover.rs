//! What a kill left, finished or undone.

use tapio_types::{ApiError, Span};
use uuid::Uuid;

use super::create::clear;
use super::resize::Quiet;
use super::{Found, VolumeSr};
use crate::dir::facts::FileKind;
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::Listed;
use crate::lvm::journal::{self, Journal, Kind};
use crate::lvm::names::{self, Role};
use crate::traits::Ctx;

/// Whether a fork could not be finished or undone yet.
fn is_forking(listed: &Listed) -> bool {
    listed.volumes.values().any(|volume| journal::is(volume) && volume.name.starts_with("clone_"))
}

impl VolumeSr {
    /// Whether something is left that was broken off.
    pub(super) fn is_unsettled(listed: &Listed) -> bool {
        let is_left =
            |name: &String| matches!(names::role(name), Role::New(_) | Role::NewLog(_) | Role::Old(_));
        journal::any(listed) || listed.volumes.keys().any(is_left)
    }

    /// Finishes or undoes everything that was broken off. The caller's `live` must know every disk that runs.
    pub(super) fn recover(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut found = self.settled(ctx)?;
        // What a worker noted as open, and nothing has open any more.
        for vdi in self.active.all() {
            let is_open = found.listed.image(vdi).is_some_and(|(volume, _)| volume.is_open);
            if !is_open && ctx.live(vdi).is_none() {
                self.active.forget(vdi);
            }
        }
        self.remove_all_garbage(ctx, &mut found)?;
        self.reconcile(&found);
        self.name_as_recorded(ctx);
        self.group.grow();
        Ok(())
    }

    /// What lies there, once nothing is half done. The lock is held.
    pub(super) fn settled(&self, ctx: &dyn Ctx) -> Result<Found, ApiError> {
        self.settled_volumes(ctx)?;
        self.found()
    }

    /// The same without a look into images.
    pub(super) fn settled_volumes(&self, ctx: &dyn Ctx) -> Result<Listed, ApiError> {
        let listed = self.group.list()?;
        if !Self::is_unsettled(&listed) {
            return Ok(listed);
        }
        let unfinished = journal::unfinished(&listed);
        self.group.remove(&unfinished.iter().map(String::as_str).collect::<Vec<_>>())?;
        let journals = journal::all(&self.group, &listed)?;
        // Forks first: they say whose the volumes are that have no name yet, and what is longer is a part of one.
        let order =
            [Kind::Clone, Kind::Inflate, Kind::Clear, Kind::Leaf, Kind::Relink, Kind::Coalesce, Kind::Cbt];
        for journal in order.iter().flat_map(|kind| journals.iter().filter(|journal| journal.kind == *kind)) {
            self.recover_one(ctx, journal)?;
        }
        let listed = self.group.list()?;
        let is_left = |name: &&String| match names::role(name) {
            // A fork that waits for a disk has its journal still, and needs them.
            Role::New(_) | Role::NewLog(_) => !is_forking(&listed),
            // Its contents are in the VDI of its name.
            Role::Old(vdi) => listed.image(vdi).is_some(),
            _ => false,
        };
        let left: Vec<&str> = listed.volumes.keys().filter(is_left).map(String::as_str).collect();
        if left.is_empty() {
            return Ok(listed);
        }
        self.group.remove(&left)?;
        self.group.list()
    }

    fn recover_one(&self, ctx: &dyn Ctx, journal: &Journal) -> Result<(), ApiError> {
        let image = journal.image;
        if matches!(journal.kind, Kind::Inflate | Kind::Clear | Kind::Leaf) && ctx.elsewhere(image).is_some()
        {
            // Its host puts it in order.
            return Ok(());
        }
        match journal.kind {
            // What becomes longer inside of a fork has a footer before the fork is finished.
            Kind::Clone => {
                self.put_all_footers(ctx)?;
                self.recover_fork(ctx, journal)
            }
            Kind::Inflate => {
                tracing::info!(
                    "SR {}: the volume of {image} was becoming longer, and is put in order",
                    self.sr
                );
                self.with_one_closed(ctx, image, || self.recover_length(image))?;
                journal.remove(&self.group)
            }
            Kind::Clear => {
                self.recover_raw(image, journal)?;
                journal.remove(&self.group)
            }
            Kind::Leaf => self.recover_leaf(ctx, journal),
            Kind::Relink => self.recover_relink(ctx, journal),
            // Copied once more, in the same way.
            Kind::Coalesce => journal.remove(&self.group),
            Kind::Cbt => self.recover_log(ctx, journal),
        }
    }

    fn put_all_footers(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        for journal in
            journal::all(&self.group, &listed)?.iter().filter(|journal| journal.kind == Kind::Inflate)
        {
            if let Some(disk) = ctx.live(journal.image) {
                let _ = disk.pause();
            }
            self.recover_length(journal.image)?;
        }
        Ok(())
    }

    fn recover_length(&self, vdi: Uuid) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let name = names::volume(FileKind::Vhd, vdi);
        let Some(volume) = listed.volumes.get(&name) else { return Ok(()) };
        self.group.set_writable(volume, true)?;
        self.reach(&listed, [name.as_str()])?;
        self.put_footer(vdi)
    }

    fn recover_raw(&self, vdi: Uuid, journal: &Journal) -> Result<(), ApiError> {
        let listed = self.group.list()?;
        let name = names::volume(FileKind::Raw, vdi);
        let (Some(volume), Ok(from)) = (listed.volumes.get(&name), journal.value.parse::<u64>()) else {
            return Ok(());
        };
        if volume.size > from {
            self.reach(&listed, [name.as_str()])?;
            clear(&Quiet, &self.path(FileKind::Raw, vdi), Span::new(from, volume.size - from))?;
        }
        Ok(())
    }

    /// Does `work` while the running disk of a VDI, if there is one, is closed.
    fn with_one_closed(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        work: impl FnOnce() -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let live = ctx.live(vdi);
        if let Some(disk) = &live {
            // It was paused, or was going to be, or goes on already.
            let _ = disk.pause();
        }
        let done = work();
        if let Some(disk) = live {
            self.go_on(vdi, disk.as_ref()).map_err(|error| {
                errors::fail(46, format_args!("the disk of {vdi} does not go on: {error}"))
            })?;
        }
        done
    }
}
