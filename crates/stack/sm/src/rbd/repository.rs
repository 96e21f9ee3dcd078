//! An attached SR.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tapio_rbd::{Connect, Image, Mode, Pool, Target};
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use super::config::{self, Wanted};
use super::layout::{About, BASE, CLONE, Place, TRACKED, plain_uuid, rounded};
use super::usage::pool_use;
use super::{MARK, failed};
use crate::Places;
use crate::errors;
use crate::fill;
use crate::lock::{Held, Locks, Share};
use crate::traits::{Ctx, Fork, ForkKind, NewVdi, OpenSpec, Sr, SrStat, VdiInfo};
use crate::transfer::{self, Import};

pub(super) struct Repository {
    pub(super) sr: Uuid,
    /// The whole pool.
    pool: Arc<Pool>,
    /// The SR's namespace.
    pub(super) inside: Arc<Pool>,
    pub(super) data_pool: Option<String>,
    connect: Connect,
    key_file: Option<PathBuf>,
    locks: Locks,
    /// The images of snapshots, as far as they are known; each is looked at before it is used.
    pub(super) places_of_snapshots: Mutex<BTreeMap<Uuid, String>>,
}

impl Repository {
    pub(super) fn new(
        sr: Uuid,
        (pool, inside): (Arc<Pool>, Arc<Pool>),
        wanted: &Wanted,
        places: &Places,
    ) -> Self {
        // There is no directory of the SR: that of its lock stands for it.
        let directory = places.run_dir.join("lock/sm").join(sr.to_string());
        Self {
            sr,
            pool,
            inside,
            data_pool: wanted.data_pool.clone(),
            connect: wanted.connect.clone(),
            key_file: wanted.key_file(),
            locks: Locks::new(&places.run_dir, sr, &directory),
            places_of_snapshots: Mutex::default(),
        }
    }

    pub(super) fn lock(&self, ctx: &dyn Ctx) -> Result<Held<'_>, ApiError> {
        self.locks.take(ctx, Share::Exclusive)
    }

    /// The image of a VDI, to be changed.
    pub(super) fn open_image(&self, name: &str) -> Result<Image, ApiError> {
        let image = self.inside.open(name, None, Mode::Write).map_err(failed(46))?;
        image.prepare_change().map_err(failed(46))?;
        Ok(image)
    }

    /// Refuses a VDI that a disk process of this host, or any client of the cluster, has open for writing.
    fn check_unused(&self, ctx: &dyn Ctx, vdi: Uuid, what: &str) -> Result<(), ApiError> {
        if ctx.live(vdi).is_some() {
            return Err(errors::vdi_in_use(vdi, what));
        }
        let image = match self.inside.open(&vdi.to_string(), None, Mode::Read) {
            Ok(image) => image,
            Err(error) if error.is_missing() => return Ok(()),
            Err(error) => return Err(failed(46)(error)),
        };
        match image.watchers().map_err(failed(46))?.is_empty() {
            true => Ok(()),
            false => Err(errors::vdi_in_use(vdi, what)),
        }
    }

    /// What a disk process or a copy opens.
    fn chain(&self, vdi: Uuid, access: Access) -> Result<ChainSpec, ApiError> {
        let (image, snapshot) = match self.find(vdi)? {
            Place::Image => (vdi.to_string(), None),
            Place::SnapshotOf(_) if access == Access::ReadWrite => {
                return Err(ApiError::new("VDI_READONLY", [vdi.to_string()]));
            }
            Place::SnapshotOf(image) => (image, Some(vdi.to_string())),
        };
        let target = Target {
            connect: self.connect.clone(),
            pool: self.inside.name().to_owned(),
            namespace: self.inside.namespace().map(str::to_owned),
            image,
            snapshot,
        };
        let path = PathBuf::from(target.name());
        Ok(ChainSpec { layers: vec![LayerSpec { kind: ImageKind::Rbd, path }], access })
    }

    /// Finishes what was broken off, and removes what carries nothing any more.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub(super) fn recover(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let _held = self.lock(ctx)?;
        for name in self.inside.images().map_err(failed(47))? {
            let is_base = name.strip_prefix(BASE).and_then(plain_uuid).is_some();
            if !is_base && plain_uuid(&name).is_none() {
                continue;
            }
            // What cannot be opened hinders no other VDI; a scan shows it.
            let Ok(image) = self.inside.open(&name, None, Mode::Read) else { continue };
            let snapshots = image.snapshots().map_err(failed(47))?;
            drop(image);
            let is_ours = |name: &str| name.strip_prefix(CLONE).and_then(plain_uuid).is_some();
            for left in snapshots.iter().filter(|left| !left.is_removed && is_ours(&left.name)) {
                self.open_image(&name)?.remove_snapshot(&left.name).map_err(failed(47))?;
            }
            if is_base {
                self.sweep(&name)?;
            }
        }
        Ok(())
    }

    /// Removes what is left of a destroyed VDI, if nothing needs it any more. Whether it is gone.
    pub(super) fn sweep(&self, name: &str) -> Result<bool, ApiError> {
        if name.strip_prefix(BASE).and_then(plain_uuid).is_none() {
            return Ok(false);
        }
        let image = match self.inside.open(name, None, Mode::Write) {
            Ok(image) => image,
            Err(error) if error.is_missing() => return Ok(false),
            Err(error) => return Err(failed(64)(error)),
        };
        if !image.snapshots().map_err(failed(64))?.is_empty() {
            // Of the disk as it was last nothing is needed.
            if image.length().map_err(failed(64))? > 0 {
                image.prepare_change().map_err(failed(64))?;
                image.resize(0, true).map_err(failed(64))?;
            }
            return Ok(false);
        }
        let parent = image.parent().map_err(failed(64))?;
        drop(image);
        match self.inside.remove(name) {
            Ok(()) => {}
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(failed(64)(error)),
        }
        if let Some(parent) = parent.and_then(|parent| parent.image) {
            self.sweep(&parent)?;
        }
        Ok(true)
    }

    fn destroy_image(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.check_unused(ctx, vdi, "destroy")?;
        let name = vdi.to_string();
        let image = self.open_image(&name)?;
        let has_snapshots = !image.snapshots().map_err(failed(80))?.is_empty();
        let parent = image.parent().map_err(failed(80))?;
        drop(image);
        ctx.step("destroy:begin");
        if has_snapshots {
            // Snapshots and clones need it: it stays under a name that is no VDI's.
            let base = format!("{BASE}{}", Uuid::new_v4());
            self.inside.rename(&name, &base).map_err(failed(80))?;
            ctx.step("destroy:image-gone");
            self.sweep(&base)?;
            return Ok(());
        }
        self.inside.remove(&name).map_err(|error| match error.errno() {
            libc::EBUSY => errors::vdi_in_use(vdi, "destroy"),
            _ => failed(80)(error),
        })?;
        ctx.step("destroy:image-gone");
        if let Some(parent) = parent.and_then(|parent| parent.image) {
            self.sweep(&parent)?;
        }
        Ok(())
    }

    fn destroy_snapshot(&self, ctx: &dyn Ctx, vdi: Uuid, of: &str) -> Result<(), ApiError> {
        if ctx.live(vdi).is_some() {
            return Err(errors::vdi_in_use(vdi, "destroy"));
        }
        ctx.step("destroy:begin");
        let image = self.open_image(of)?;
        image.remove_snapshot(&vdi.to_string()).map_err(failed(80))?;
        ctx.step("destroy:image-gone");
        About::forget(&image, vdi).map_err(failed(80))?;
        drop(image);
        self.places_of_snapshots.lock().remove(&vdi);
        self.sweep(of).map(drop)
    }

    fn end(&self) {
        if let Some(path) = &self.key_file {
            config::forget(path);
        }
    }

    fn wipe(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        ctx.step("sr-erase:begin");
        self.recover(ctx)?;
        let _held = self.lock(ctx)?;
        let left = self.inside.images().map_err(failed(63))?;
        if left.iter().any(|name| plain_uuid(name).is_some()) {
            return Err(errors::sr_not_empty());
        }
        if let Some(other) = left.iter().find(|name| *name != MARK) {
            let text = format!(
                "its namespace {} of pool '{}' holds the image '{}', which is no VDI: remove it with 'rbd rm'",
                self.sr,
                self.pool.name(),
                other.escape_debug()
            );
            return Err(errors::fail(63, text));
        }
        match self.inside.remove(MARK) {
            Ok(()) => {}
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(failed(63)(error)),
        }
        ctx.step("rbd-erase:image-gone");
        self.pool.remove_namespace(&self.sr.to_string()).map_err(failed(63))
    }
}

impl Sr for Repository {
    fn stat(&self, _: &dyn Ctx) -> Result<SrStat, ApiError> {
        pool_use(&self.pool).map_err(failed(47))
    }

    fn scan(&self, _: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        self.all().map_err(failed(40))
    }

    fn vdi(&self, _: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        let found = match self.find(vdi)? {
            Place::Image => self.info_of_image(vdi),
            Place::SnapshotOf(image) => self.info_of_snapshot(vdi, &image),
        };
        found.map_err(failed(46))
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        for (key, value) in &new.sm_config {
            if matches!((key.as_str(), value.as_str()), ("image-format" | "type" | "vdi_type", "vhd")) {
                return Err(errors::fail(
                    66,
                    "VDIs of an rbd SR are images of Ceph, and have no VHD: leave it out",
                ));
            }
        }
        let size = rounded(new.virtual_size)?;
        let _held = self.lock(ctx)?;
        ctx.step("vdi-create:begin");
        self.inside.create(&new.uuid.to_string(), size, self.data_pool.as_deref()).map_err(|error| {
            match error.errno() {
                libc::EEXIST => errors::fail(43, error),
                _ => failed(78)(error),
            }
        })?;
        ctx.step("vdi-create:done");
        self.info_of_image(new.uuid).map_err(failed(78))
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx)?;
        if location == vdi.to_string() {
            return self.vdi(ctx, vdi);
        }
        let is_ours = location == MARK
            || location.strip_prefix(BASE).and_then(plain_uuid).is_some()
            || plain_uuid(location).is_some();
        if is_ours {
            let text = format!("'{}' is an image of the SR itself: scan the SR", location.escape_debug());
            return Err(errors::fail(46, text));
        }
        tapio_rbd::check_name("an image", location).map_err(|error| errors::fail(46, error))?;
        ctx.step("introduce:begin");
        self.inside.rename(location, &vdi.to_string()).map_err(failed(46))?;
        ctx.step("introduce:renamed");
        self.info_of_image(vdi).map_err(failed(46))
    }

    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let _held = self.lock(ctx)?;
        match self.find(vdi)? {
            Place::Image => self.destroy_image(ctx, vdi),
            Place::SnapshotOf(image) => self.destroy_snapshot(ctx, vdi, &image),
        }
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        let size = rounded(bytes)?;
        let _held = self.lock(ctx)?;
        if let Place::SnapshotOf(_) = self.find(vdi)? {
            return Err(ApiError::new("VDI_READONLY", [vdi.to_string()]));
        }
        let image = self.open_image(&vdi.to_string())?;
        let now = image.length().map_err(failed(110))?;
        if size < now {
            let text = format!("{bytes} bytes are fewer than the VDI's {now}: it is not made smaller");
            return Err(errors::fail(79, text));
        }
        // The holder of the lock does it, if there is one.
        image.resize(size, false).map_err(failed(110))?;
        drop(image);
        if let Some(disk) = ctx.live(vdi).filter(|disk| disk.access() == Access::ReadWrite) {
            disk.grow(size)?;
        }
        self.info_of_image(vdi).map_err(failed(110))
    }

    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid, kind: ForkKind) -> Result<Fork, ApiError> {
        let _held = self.lock(ctx)?;
        self.fork_vdi(ctx, vdi, new, kind)
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.check_unused(ctx, into, "copy")?;
        fill::fill(ctx, &self.chain(into, Access::ReadWrite)?, from, base)
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.check_unused(ctx, what.into, "import")?;
        transfer::import(ctx, &self.chain(what.into, Access::ReadWrite)?, what, from)
    }

    /// The disk process takes the image's lock when it opens it.
    fn activate(&self, _: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        Ok(OpenSpec { chain: self.chain(vdi, access)?, log: None })
    }

    fn deactivate(&self, _: &dyn Ctx, _: Uuid) -> Result<(), ApiError> {
        Ok(())
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx)?;
        if let Place::SnapshotOf(_) = self.find(vdi)? {
            return Err(errors::fail(66, format_args!("{vdi} is a snapshot: track the VDI that it is of")));
        }
        let image = self.open_image(&vdi.to_string())?;
        let done = if wanted { image.set_metadata(TRACKED, "1") } else { image.remove_metadata(TRACKED) };
        done.map_err(failed(if wanted { 457 } else { 458 }))?;
        drop(image);
        self.info_of_image(vdi).map_err(failed(457))
    }

    /// The snapshot stays, because the cluster compares with it; its space comes back with the VDI.
    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx)?;
        let Place::SnapshotOf(name) = self.find(vdi)? else {
            return Err(errors::fail(66, format_args!("{vdi} is no snapshot of this SR")));
        };
        let image = self.open_image(&name)?;
        let about = About::read(&image, vdi).map_err(failed(46))?;
        if !about.is_tracked {
            return Err(errors::fail(66, format_args!("changed blocks of {vdi} are not tracked")));
        }
        About { is_metadata: true, ..about }.write(&image, vdi).map_err(failed(46))?;
        ctx.step("data-destroy:done");
        drop(image);
        self.info_of_snapshot(vdi, &name).map_err(failed(46))
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        self.list_changed(ctx, from, to)
    }

    fn collect_garbage(&self, ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        self.recover(ctx)?;
        // What goes was never shown.
        Ok(Vec::new())
    }

    fn detach(self: Box<Self>, _: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        self.end();
        Ok(())
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        match self.wipe(ctx) {
            Ok(()) => {
                self.end();
                Ok(())
            }
            Err(error) => Err((self as Box<dyn Sr>, error)),
        }
    }
}
