//! An SR whose volumes are a plugin's.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use super::datapath::Way;
use super::scripts::{Nothing, Scripts};
use super::stat;
use super::wire::{Blocks, Changed, Ranges, UUID_KEY, Volume};
use crate::errors;
use crate::external::paused::Paused;
use crate::external::turn;
use crate::external::{LONG, Plugin};
use crate::fill;
use crate::traits::{Ctx, Fork, ForkKind, NewVdi, OpenSpec, Sr, SrStat, VdiInfo};
use crate::transfer::{self, Import};

/// Bytes of a disk whose changed blocks are asked for at a time.
const WINDOW: u64 = 1 << 40;

/// A volume that was made ready.
struct Open {
    /// How often.
    count: usize,
    way: Way,
}

/// An attached SR.
pub(super) struct VolumeSr {
    plugin: Arc<Plugin>,
    scripts: Scripts,
    sr: Uuid,
    /// What the plugin calls it.
    handle: String,
    /// Keys by UUID, as the last look had them.
    keys: Mutex<HashMap<Uuid, String>>,
    /// Held while volumes are made, removed or changed.
    changing: Mutex<()>,
    open: Mutex<HashMap<Uuid, Open>>,
    /// One for each VDI, held while its way is opened or closed.
    ways: Mutex<HashMap<Uuid, Arc<Mutex<()>>>>,
    paused: Paused,
}

impl VolumeSr {
    pub(super) fn new(plugin: Arc<Plugin>, scripts: Scripts, sr: Uuid, handle: String) -> Self {
        let paused = Paused::new(&plugin.run_dir, sr);
        let (keys, open, ways) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { plugin, scripts, sr, handle, keys, changing: Mutex::new(()), open, ways, paused }
    }

    fn of_way(&self, vdi: Uuid) -> Arc<Mutex<()>> {
        Arc::clone(self.ways.lock().entry(vdi).or_default())
    }

    /// What comes right after the attaching: what a killed worker left goes on.
    ///
    /// # Errors
    /// The plugin does not say what the SR is.
    pub(super) fn begin(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let found = stat(ctx, &self.scripts, &self.handle)?;
        let other = found.uuid.as_deref().and_then(|uuid| Uuid::parse_str(uuid).ok());
        if let Some(other) = other.filter(|other| *other != self.sr) {
            tracing::warn!("SR {}: the plugin calls it {other}", self.sr);
        }
        self.recover(ctx);
        Ok(())
    }

    fn recover(&self, ctx: &dyn Ctx) {
        self.paused.recover(ctx, &|vdi, access| self.reopen(ctx, vdi, access));
    }

    fn call<T: serde::de::DeserializeOwned>(
        &self,
        ctx: &dyn Ctx,
        method: &str,
        more: &[(&str, Value)],
    ) -> Result<T, ApiError> {
        self.scripts.call(ctx, method, &self.args(more))
    }

    fn args<'a>(&self, more: &[(&'a str, Value)]) -> Vec<(&'a str, Value)> {
        let sr = ("sr", Value::from(self.handle.as_str()));
        std::iter::once(sr).chain(more.iter().cloned()).collect()
    }

    /// A call about one volume.
    fn of<T: serde::de::DeserializeOwned>(
        &self,
        ctx: &dyn Ctx,
        method: &str,
        key: &str,
        more: &[(&str, Value)],
    ) -> Result<T, ApiError> {
        let key = ("key", Value::from(key));
        let args: Vec<_> = std::iter::once(key).chain(more.iter().cloned()).collect();
        self.call(ctx, method, &args)
    }

    /// Every volume, each UUID once.
    fn volumes(&self, ctx: &dyn Ctx) -> Result<Vec<Volume>, ApiError> {
        let limit = self.plugin.limit() * LONG;
        let found: Vec<Volume> = self.scripts.call_within(ctx, "SR.ls", &self.args(&[]), limit)?;
        // A copy that starts for one boot of a VM is no disk of its own.
        let transient: HashSet<String> =
            found.iter().filter_map(|volume| volume.keys.get("clone-on-boot").cloned()).collect();
        let mut keys = HashMap::new();
        let mut volumes = Vec::new();
        for volume in found.into_iter().filter(|volume| !transient.contains(&volume.key)) {
            let uuid = volume.uuid_in(self.sr);
            if let Some(other) = keys.get(&uuid) {
                tracing::error!("SR {}: volumes '{other}' and '{}' are both {uuid}", self.sr, volume.key);
                continue;
            }
            keys.insert(uuid, volume.key.clone());
            volumes.push(volume);
        }
        *self.keys.lock() = keys;
        Ok(volumes)
    }

    fn missing(&self, vdi: Uuid) -> ApiError {
        errors::vdi_missing(self.sr, vdi)
    }

    /// The volume of a VDI, as it is now.
    fn volume(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<Volume, ApiError> {
        let known = self.keys.lock().get(&vdi).cloned();
        if let Some(key) = known {
            match self.of::<Volume>(ctx, "Volume.stat", &key, &[]) {
                Ok(volume) if volume.key == key && volume.uuid_in(self.sr) == vdi => return Ok(volume),
                Ok(_) => {}
                Err(error) if error.code == "VDI_MISSING" => {}
                Err(error) => return Err(error),
            }
        }
        let found = self.volumes(ctx)?.into_iter().find(|volume| volume.uuid_in(self.sr) == vdi);
        found.ok_or_else(|| self.missing(vdi))
    }

    /// Notes the UUID of a volume that was made, and answers what it is then. A plugin that keeps no notes gives it
    /// another UUID.
    fn adopt(&self, ctx: &dyn Ctx, mut volume: Volume, uuid: Uuid) -> Result<VdiInfo, ApiError> {
        if volume.uuid_in(self.sr) != uuid && self.scripts.has("Volume.set") {
            let note = volume.note(uuid);
            let set = [("k", Value::from(UUID_KEY)), ("v", Value::from(note.as_str()))];
            match self.of::<Nothing>(ctx, "Volume.set", &volume.key, &set) {
                Ok(Nothing) => drop(volume.keys.insert(UUID_KEY.to_owned(), note)),
                Err(error) if error.code == "SR_BACKEND_FAILURE_38" => {}
                Err(error) => {
                    self.discard(ctx, &volume.key);
                    return Err(error);
                }
            }
        }
        let info = volume.info(self.sr);
        self.keys.lock().insert(info.uuid, volume.key);
        Ok(info)
    }

    fn discard(&self, ctx: &dyn Ctx, key: &str) {
        if let Err(error) = self.of::<Nothing>(ctx, "Volume.destroy", key, &[]) {
            tracing::warn!("SR {}: the unfinished volume '{key}' stays: {error}", self.sr);
        }
    }

    fn way(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<Way, ApiError> {
        Way::of(&self.volume(ctx, vdi)?, &self.plugin.datapaths, self.plugin.limit())
    }

    /// What a disk that waits opens now; the way to its data may be another one.
    fn reopen(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let lock = self.of_way(vdi);
        let _held = turn::wait(&lock, ctx)?;
        let way = self.way(ctx, vdi)?;
        let before = self.open.lock().remove(&vdi);
        let count = before.as_ref().map_or(1, |before| before.count);
        if let Some(before) = before.filter(|before| before.way.uri != way.uri) {
            before.way.close(ctx)?;
        }
        let with = way.open(ctx, access)?;
        self.open.lock().insert(vdi, Open { count, way });
        Ok(with)
    }

    /// Whether anything else has the VDI open.
    fn is_used(&self, ctx: &dyn Ctx, vdi: Uuid) -> bool {
        ctx.holders(vdi) > 1 || ctx.live(vdi).is_some()
    }

    fn write_to<T>(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        work: impl FnOnce(&ChainSpec) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let with = self.activate(ctx, vdi, Access::ReadWrite)?;
        let done = work(&with.chain);
        let closed = self.deactivate(ctx, vdi);
        let done = done?;
        closed.map(|()| done)
    }
}

impl Sr for VolumeSr {
    fn stat(&self, ctx: &dyn Ctx) -> Result<SrStat, ApiError> {
        // A disk that waits for a change that goes on is none that was left.
        if let Some(_changing) = self.changing.try_lock() {
            self.recover(ctx);
        }
        let found = stat(ctx, &self.scripts, &self.handle)?;
        match found.trouble() {
            Some(trouble) => {
                Err(errors::fail(47, format_args!("SR {}: the plugin says: {trouble}", self.sr)))
            }
            None => Ok(found.sizes()),
        }
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        Ok(self.volumes(ctx)?.iter().map(|volume| volume.info(self.sr)).collect())
    }

    fn vdi(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.volume(ctx, vdi).map(|volume| volume.info(self.sr))
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let args = [
            ("name", Value::from(new.name_label.as_str())),
            ("description", Value::from(new.name_description.as_str())),
            ("size", Value::from(new.virtual_size)),
            ("sharable", Value::Bool(false)),
        ];
        let made: Volume = self.call(ctx, "Volume.create", &args)?;
        if made.virtual_size < new.virtual_size {
            self.discard(ctx, &made.key);
            let text = format!("the plugin made {} bytes of {}", made.virtual_size, new.virtual_size);
            return Err(errors::fail(78, text));
        }
        ctx.step("external:made");
        self.adopt(ctx, made, new.uuid)
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let found = self.volumes(ctx)?.into_iter().find(|volume| volume.key == location);
        let found = found.ok_or_else(|| self.missing(vdi))?;
        if found.uuid_in(self.sr) == vdi {
            return Ok(found.info(self.sr));
        }
        let note = found.note(vdi);
        let set = [("k", Value::from(UUID_KEY)), ("v", Value::from(note.as_str()))];
        self.of::<Nothing>(ctx, "Volume.set", &found.key, &set)?;
        self.vdi(ctx, vdi)
    }

    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let volume = self.volume(ctx, vdi)?;
        if self.open.lock().contains_key(&vdi) || self.is_used(ctx, vdi) {
            return Err(errors::vdi_in_use(vdi, "destroy"));
        }
        self.of::<Nothing>(ctx, "Volume.destroy", &volume.key, &[])?;
        self.keys.lock().remove(&vdi);
        Ok(())
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let volume = self.volume(ctx, vdi)?;
        if bytes < volume.virtual_size {
            let has = volume.virtual_size;
            let text = format!("{bytes} bytes are fewer than the {has} it has: a VDI is not made smaller");
            return Err(errors::fail(79, text));
        }
        if bytes > volume.virtual_size {
            self.of::<Nothing>(ctx, "Volume.resize", &volume.key, &[("new_size", Value::from(bytes))])?;
        }
        let now = self.volume(ctx, vdi)?;
        if now.virtual_size < bytes {
            let text = format!("the plugin made it {} bytes, not {bytes}", now.virtual_size);
            return Err(errors::fail(110, text));
        }
        if let Some(disk) = ctx.live(vdi) {
            disk.grow(now.virtual_size)?;
        }
        Ok(now.info(self.sr))
    }

    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid, kind: ForkKind) -> Result<Fork, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let method = match kind {
            ForkKind::Snapshot => "Volume.snapshot",
            ForkKind::Clone => "Volume.clone",
            ForkKind::Single => return Err(errors::fail(38, "a plugin makes no base copies by themselves")),
        };
        let key = self.volume(ctx, vdi)?.key;
        let made =
            self.paused.while_paused(ctx, vdi, &|vdi, access| self.reopen(ctx, vdi, access), || {
                let made: Volume = self.of(ctx, method, &key, &[])?;
                if made.key == key {
                    let text = format!("{method} answered the volume itself: ask the plugin's vendor");
                    return Err(errors::fail(82, text));
                }
                ctx.step("external:made");
                self.adopt(ctx, made, new)
            })?;
        let origin = self.vdi(ctx, vdi)?;
        Ok(Fork { made, origin, base: None })
    }

    fn rename(&self, ctx: &dyn Ctx, vdi: Uuid, name: &str, description: &str) -> Result<(), ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let key = self.volume(ctx, vdi)?.key;
        let texts = [
            ("Volume.set_name", "new_name", name),
            ("Volume.set_description", "new_description", description),
        ];
        for (method, parameter, text) in texts {
            if self.scripts.has(method) {
                self.of::<Nothing>(ctx, method, &key, &[(parameter, Value::from(text))])?;
            }
        }
        Ok(())
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.write_to(ctx, into, |chain| fill::fill(ctx, chain, from, base))
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.write_to(ctx, what.into, |chain| transfer::import(ctx, chain, what, from))
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let lock = self.of_way(vdi);
        let _held = turn::wait(&lock, ctx)?;
        let way = self.way(ctx, vdi)?;
        let is_open = self.open.lock().contains_key(&vdi) || self.is_used(ctx, vdi);
        let with = way.open(ctx, access).inspect_err(|_| {
            // What others have open stays so.
            if !is_open {
                way.close(ctx).unwrap_or_else(|error| tracing::warn!(%vdi, %error, "it stays attached"));
            }
        })?;
        self.open.lock().entry(vdi).or_insert(Open { count: 0, way }).count += 1;
        Ok(with)
    }

    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let lock = self.of_way(vdi);
        let _held = turn::wait(&lock, ctx)?;
        if let Some(known) = self.open.lock().get_mut(&vdi).filter(|known| known.count > 1) {
            known.count -= 1;
            return Ok(());
        }
        let known = self.open.lock().remove(&vdi);
        if self.is_used(ctx, vdi) {
            return Ok(());
        }
        // One that an earlier worker opened is closed as well.
        let way = match known {
            Some(known) => known.way,
            None => match self.way(ctx, vdi) {
                Err(error) if error.code == "VDI_MISSING" => return Ok(()),
                way => way?,
            },
        };
        way.close(ctx)
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let key = self.volume(ctx, vdi)?.key;
        let method = if wanted { "Volume.enable_cbt" } else { "Volume.disable_cbt" };
        self.of::<Nothing>(ctx, method, &key, &[])?;
        let mut info = self.vdi(ctx, vdi)?;
        info.cbt_enabled = wanted;
        Ok(info)
    }

    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let key = self.volume(ctx, vdi)?.key;
        self.of::<Nothing>(ctx, "Volume.data_destroy", &key, &[])?;
        let mut info = self.vdi(ctx, vdi)?;
        info.is_metadata = true;
        Ok(info)
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        let (from, to) = (self.volume(ctx, from)?, self.volume(ctx, to)?);
        let wrong =
            |why: String| errors::fail(460, format_args!("the plugin's list of changed blocks: {why}"));
        let mut blocks = Blocks::of_disk(to.virtual_size).map_err(wrong)?;
        let other = ("key2", Value::from(to.key.as_str()));
        if !self.scripts.has("Volume.list_changed_blocks") {
            let answer: Ranges = self.of(ctx, "Volume.compare", &from.key, &[other])?;
            if answer.blocksize == 0 {
                return Err(wrong("blocks of no bytes".to_owned()));
            }
            blocks.add_ranges(&answer);
            // What one has and the other does not is no block of both.
            let shorter = from.virtual_size.min(to.virtual_size);
            blocks.add(shorter, to.virtual_size - shorter);
            return Ok(blocks.text());
        }
        let mut start = 0;
        while start < to.virtual_size {
            let len = WINDOW.min(to.virtual_size - start);
            let window = [other.clone(), ("offset", Value::from(start)), ("length", Value::from(len))];
            let answer: Changed = self.of(ctx, "Volume.list_changed_blocks", &from.key, &window)?;
            let told = blocks.add_answer(start, &answer).map_err(wrong)?;
            if told < len {
                return Err(wrong(format!("it says nothing of {} bytes", len - told)));
            }
            start += len;
        }
        Ok(blocks.text())
    }

    fn detach(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        match self.call::<Nothing>(ctx, "SR.detach", &[]) {
            Ok(Nothing) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        match self.call::<Nothing>(ctx, "SR.destroy", &[]) {
            Ok(Nothing) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}
