//! An attached SR of volumes, and what changes it.

mod cbt;
mod create;
mod fork;
mod inspect;
mod leaf;
mod merge;
mod recover;
mod remove;
mod resize;
mod room;
pub(super) mod say;
mod spare;
mod swap;
mod thinner;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use tapio_format::vhd::CHAIN_DEPTH_MAX;
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use super::active::Active;
use super::group::{Group, Listed};
use super::metadata::VdiEntry;
use super::steps::Steps;
use super::thin::{Provision, Wanted};
use super::{Under, names, read, single};
use crate::dir::facts::{Facts, FileKind};
use crate::dir::index::Listing;
use crate::errors;
use crate::fill;
use crate::lease;
use crate::lock::{Held, Locks, Share};
use crate::traits::{
    Config, Ctx, Fork, ForkKind, Merge, MergeCost, Merged, NewVdi, Oddity, OpenSpec, RoomMade, RoomSpare,
    RoomTaken, RoomWanted, Sr, SrStat, Told, VdiInfo,
};
use crate::transfer::{self, Import};

/// An attached SR of volumes.
pub(crate) struct VolumeSr {
    pub(super) sr: Uuid,
    pub(super) group: Group,
    locks: Locks,
    pub(super) active: Active,
    /// Volumes that work here has open, and how often.
    pub(super) pins: Mutex<HashMap<String, usize>>,
    provision: RwLock<Provision>,
    pub(super) steps: Steps,
    virtual_size: AtomicU64,
    /// The last image that was copied into its parent and not taken out of the chain yet.
    pub(super) copied: Mutex<Option<merge::Copied>>,
    under: Box<dyn Under>,
}

/// What lies there.
pub(super) struct Found {
    pub(super) listed: Listed,
    /// Its images; parents are called as files are, `<uuid>.vhd`.
    pub(super) listing: Listing,
}

/// An image of a chain.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) uuid: Uuid,
    pub(super) facts: Facts,
}

impl Link {
    pub(super) fn volume(&self) -> String {
        names::volume(self.facts.kind, self.uuid)
    }
}

/// Volumes that stay reachable while this lives.
pub(super) struct Pin<'a>(&'a VolumeSr, Vec<String>);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        let mut pins = self.0.pins.lock();
        for name in &self.1 {
            if let Some(count) = pins.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    pins.remove(name);
                }
            }
        }
    }
}

impl VolumeSr {
    /// The SR of a group that is here, recovered from what a kill left there.
    pub(super) fn open(
        ctx: &dyn Ctx,
        sr: Uuid,
        (run_dir, devices): (&Path, &[PathBuf]),
        (wanted, hosts): (Wanted, Option<lease::Wanted>),
        under: Box<dyn Under>,
    ) -> Result<Self, (Box<dyn Under>, ApiError)> {
        let prepared = Group::of(sr).known(devices).and_then(|group| {
            let allocation = Self::prepare(&group, sr, wanted.allocation)?;
            let member = lease::of_group(ctx, (sr, &group), run_dir, hosts.as_ref())?;
            Ok((group, Provision::of_sr(allocation, &wanted), member.map(Arc::new)))
        });
        let (group, provision, member) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err((under, error)),
        };
        let opened = Self {
            sr,
            locks: Locks::new(run_dir, sr, &group.path(names::METADATA)).among(member.clone()),
            active: Active::load(run_dir, sr),
            pins: Mutex::default(),
            provision: RwLock::new(provision),
            steps: Steps::default(),
            virtual_size: AtomicU64::new(0),
            copied: Mutex::default(),
            group,
            under,
        };
        let recovered = match &member {
            Some(member) => opened.recover(&lease::Fenced { inner: ctx, member }),
            None => opened.recover(ctx),
        };
        match recovered.and_then(|()| opened.make_single(ctx)) {
            Ok(()) => Ok(opened),
            Err(error) => {
                let in_use = opened.active.all();
                if in_use.is_empty() {
                    let _ = member.map(|member| member.leave());
                    let _ = opened.group.deactivate([names::METADATA].into_iter());
                }
                Err((opened.under, error))
            }
        }
    }

    /// What counts for a disk that says nothing else.
    pub(super) fn provision(&self) -> Provision {
        *self.provision.read()
    }

    /// For its users: fenced, if several hosts may have it.
    pub(super) fn boxed(self) -> Box<dyn Sr> {
        let locks = self.locks.clone();
        lease::Shared::over(Box::new(self), locks)
    }

    pub(super) fn lock(&self, ctx: &dyn Ctx, share: Share) -> Result<Held<'_>, ApiError> {
        self.locks.take(ctx, share)
    }

    pub(super) fn path(&self, kind: FileKind, vdi: Uuid) -> PathBuf {
        self.group.path(&names::volume(kind, vdi))
    }

    /// All that lies there.
    pub(super) fn found(&self) -> Result<Found, ApiError> {
        let listed = self.group.list()?;
        let mut listing = Listing::default();
        for volume in listed.volumes.values() {
            match names::role(&volume.name) {
                names::Role::Image(vdi, kind) => {
                    let facts = Arc::new(read::facts(volume, kind));
                    let place = listing.images.entry(vdi).or_insert_with(|| Arc::clone(&facts));
                    // Two of one UUID: the VHD is on top.
                    if kind == FileKind::Vhd {
                        *place = facts;
                    }
                }
                names::Role::Log(vdi) => {
                    listing.logs.insert(vdi);
                }
                _ => {}
            }
        }
        let disks = listing.images.values().filter(|facts| !facts.hidden);
        let sum = disks.fold(0_u64, |sum, facts| sum.saturating_add(facts.virtual_size));
        self.virtual_size.store(sum, Ordering::Relaxed);
        Ok(Found { listed, listing })
    }

    /// An image that can be used.
    pub(super) fn whole(&self, listed: &Listed, vdi: Uuid) -> Result<Facts, ApiError> {
        let (volume, kind) = listed.image(vdi).ok_or_else(|| errors::vdi_missing(self.sr, vdi))?;
        let facts = read::facts(volume, kind);
        match &facts.damage {
            None => Ok(facts),
            Some(why) => {
                let next = "see 'vhd-util check', try 'vhd-util repair', or restore it from a backup";
                Err(errors::fail(65, format_args!("{}/{}: {why}: {next}", self.group.name, volume.name)))
            }
        }
    }

    /// The images of a VDI, leaf first. Every parent is the image whose UUID its child recorded.
    pub(super) fn chain(&self, listed: &Listed, vdi: Uuid) -> Result<Vec<Link>, ApiError> {
        let mut links: Vec<Link> = Vec::new();
        let mut next = Some((vdi, None));
        while let Some((uuid, recorded)) = next {
            let facts = match listed.image(uuid) {
                None if !links.is_empty() => {
                    let text = format!("its parent {uuid} is not in the SR: bring it back");
                    return Err(errors::fail(65, format_args!("{vdi}: {text}")));
                }
                _ => self.whole(listed, uuid)?,
            };
            if recorded.is_some_and(|recorded| recorded != facts.footer_uuid) {
                let text = format!("{uuid} is another image than the parent that its child recorded");
                return Err(errors::fail(65, format_args!("{vdi}: {text}")));
            }
            if links.len() > CHAIN_DEPTH_MAX {
                return Err(errors::fail(65, format_args!("{vdi}: its chain does not end")));
            }
            next = facts.parent.as_ref().and_then(|parent| {
                FileKind::of_file(&parent.name).map(|(uuid, _)| (uuid, Some(parent.uuid)))
            });
            links.push(Link { uuid, facts });
        }
        Ok(links)
    }

    pub(super) fn layers(&self, links: &[Link]) -> Vec<LayerSpec> {
        let layer = |link: &Link| LayerSpec {
            kind: match link.facts.kind {
                FileKind::Vhd => ImageKind::Vhd,
                FileKind::Raw => ImageKind::Raw,
            },
            path: self.path(link.facts.kind, link.uuid),
        };
        links.iter().map(layer).collect()
    }

    /// Makes volumes reachable that are not.
    pub(super) fn reach<'a>(
        &self,
        listed: &Listed,
        volumes: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), ApiError> {
        let is_away = |name: &&str| listed.volumes.get(*name).is_some_and(|volume| !volume.is_active);
        let away: Vec<&str> = volumes.into_iter().filter(is_away).collect();
        self.group.activate(away.into_iter())
    }

    /// Keeps volumes reachable for work here.
    pub(super) fn pin(&self, volumes: impl IntoIterator<Item = String>) -> Pin<'_> {
        let names: Vec<String> = volumes.into_iter().collect();
        let mut pins = self.pins.lock();
        for name in &names {
            *pins.entry(name.clone()).or_insert(0) += 1;
        }
        drop(pins);
        Pin(self, names)
    }

    /// Takes away volumes that neither an open VDI nor work here needs. One that stays is no harm.
    pub(super) fn unreach(&self) {
        let Ok(listed) = self.group.list() else { return };
        let mut needed: Vec<String> = self.pins.lock().keys().cloned().collect();
        for vdi in self.active.all() {
            needed.push(names::log_volume(vdi));
            match self.chain(&listed, vdi) {
                Ok(links) => needed.extend(links.iter().map(Link::volume)),
                // What it needs is not known.
                Err(_) if listed.image(vdi).is_some() => return,
                Err(_) => {}
            }
        }
        let is_spare = |volume: &&crate::lvm::group::Volume| {
            volume.is_active
                && !volume.is_open
                && ![names::METADATA, names::HOSTS].contains(&volume.name.as_str())
                && !needed.contains(&volume.name)
        };
        let spare: Vec<&str> =
            listed.volumes.values().filter(is_spare).map(|volume| volume.name.as_str()).collect();
        if let Err(error) = self.group.deactivate(spare.into_iter()) {
            tracing::debug!("{}: some volumes stay active: {error}", self.group.name);
        }
    }

    /// Refuses an operation that needs the VDI closed.
    pub(super) fn check_unused(
        &self,
        ctx: &dyn Ctx,
        listed: &Listed,
        vdi: Uuid,
        operation: &str,
    ) -> Result<(), ApiError> {
        let is_open = listed.image(vdi).is_some_and(|(volume, _)| volume.is_open);
        if self.active.has(vdi) || ctx.live(vdi).is_some() || is_open {
            return Err(errors::vdi_in_use(vdi, operation));
        }
        Ok(())
    }

    /// Refuses a UUID that some volume has.
    pub(super) fn check_free(&self, listed: &Listed, vdi: Uuid) -> Result<(), ApiError> {
        let names =
            [names::volume(FileKind::Vhd, vdi), names::volume(FileKind::Raw, vdi), names::log_volume(vdi)];
        match names.iter().find(|name| listed.volumes.contains_key(*name)) {
            Some(name) => Err(errors::fail(43, format_args!("{}/{name} exists", self.group.name))),
            None => Ok(()),
        }
    }

    /// Refuses what needs more bytes than are free.
    pub(super) fn check_room(&self, listed: &Listed, needs: u64) -> Result<(), ApiError> {
        if needs <= listed.free {
            return Ok(());
        }
        let text = format!("{needs} bytes are needed, and {} are free in {}", listed.free, self.group.name);
        Err(errors::fail(44, text))
    }

    /// As it was just made or changed.
    pub(super) fn info_now(&self, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.info_in(&self.group.list()?, vdi)
    }

    /// The same of one in a list.
    pub(super) fn info_in(&self, listed: &Listed, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        match (listed.image(vdi), listed.volumes.get(&names::log_volume(vdi))) {
            (Some((volume, kind)), log) => {
                let mut info = crate::dir::info(vdi, &read::facts(volume, kind), 0, log.is_some());
                self.describe(volume, &mut info);
                Ok(info)
            }
            (None, Some(log)) => Ok(cbt::info_of_log(vdi, log)),
            (None, None) => Err(errors::vdi_missing(self.sr, vdi)),
        }
    }

    /// The images of a VDI, reachable, with its leaf as large as its disk where it is written, and with its log.
    /// With `whole`, a thin leaf that is written has room for all of its disk.
    fn ready(
        &self,
        listed: &Listed,
        vdi: Uuid,
        access: Access,
        whole: bool,
    ) -> Result<(ChainSpec, Pin<'_>), ApiError> {
        let links = self.chain(listed, vdi)?;
        let mut volumes: Vec<String> = links.iter().map(Link::volume).collect();
        volumes.push(names::log_volume(vdi));
        let pin = self.pin(volumes.clone());
        if self.locks.member().is_some() {
            // Another host may have changed a volume since it became reachable here.
            let is_idle = |name: &&String| {
                listed.volumes.get(*name).is_some_and(|volume| volume.is_active && !volume.is_open)
            };
            self.group.refresh(volumes.iter().filter(is_idle).map(String::as_str))?;
        }
        self.reach(listed, volumes.iter().map(String::as_str))?;
        if let (Access::ReadWrite, Some(leaf)) = (access, links.first()) {
            self.prepare_write(listed, leaf, whole)?;
        }
        Ok((ChainSpec { layers: self.layers(&links), access }, pin))
    }

    /// As [`Sr::fill`] and [`Sr::import`] need their target.
    fn with_target(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        operation: &str,
        work: impl FnOnce(&ChainSpec) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.settled_volumes(ctx)?;
        self.check_unused(ctx, &listed, vdi, operation)?;
        let (chain, pin) = self.ready(&listed, vdi, Access::ReadWrite, true)?;
        drop(held);
        let done = work(&chain);
        drop(pin);
        let _held = self.lock(ctx, Share::Exclusive)?;
        self.after_write(vdi);
        self.unreach();
        done
    }
}

/// What the metadata say of a VDI beside its name.
fn told(known: &VdiEntry) -> Told {
    Told {
        name_description: known.description.clone(),
        snapshot_of: known.snapshot_of,
        snapshot_time: known.snapshot_time.clone(),
        kind: known.kind.clone(),
    }
}

impl VolumeSr {
    /// What is known of the images that were found.
    fn infos(&self, found: &Found) -> Vec<VdiInfo> {
        let said = self.metadata();
        let children = found.listing.children();
        let of = |(vdi, facts): (&Uuid, &Arc<Facts>)| {
            let has_log = found.listing.logs.contains(vdi);
            let mut info = crate::dir::info(*vdi, facts, children.get(vdi).copied().unwrap_or(0), has_log);
            if let Some((volume, _)) = found.listed.image(*vdi) {
                self.describe(volume, &mut info);
            }
            let known = said.as_ref().and_then(|said| said.vdi(*vdi));
            if let Some(known) = known.filter(|_| info.managed) {
                info.name_label = Some(known.name.clone()).filter(|name| !name.is_empty());
                info.told = Some(Box::new(told(known)));
            }
            if let Some(parent) = info.parent.filter(|parent| !found.listing.images.contains_key(parent)) {
                let text = format!("its parent {parent} is not in the SR: bring it back");
                info.sm_config.entry("damaged".into()).or_insert(text);
            }
            if self.group.single.is_single {
                info.sm_config.insert(single::KEY.0.into(), "true".into());
            }
            info
        };
        let alone = found.listing.logs.iter().filter(|vdi| !found.listing.images.contains_key(vdi));
        let alone = alone.filter_map(|vdi| {
            let volume = found.listed.volumes.get(&names::log_volume(*vdi))?;
            Some(cbt::info_of_log(*vdi, volume))
        });
        found.listing.images.iter().map(of).chain(alone).collect()
    }
}

impl Sr for VolumeSr {
    fn stat(&self, _: &dyn Ctx) -> Result<SrStat, ApiError> {
        let listed = self.group.list()?;
        Ok(SrStat {
            physical_size: listed.size,
            physical_utilisation: listed.size.saturating_sub(listed.free),
            virtual_allocation: self.virtual_size.load(Ordering::Relaxed),
        })
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let held = self.lock(ctx, Share::Shared)?;
        let mut found = self.found()?;
        drop(held);
        if Self::is_unsettled(&found.listed) {
            self.recover(ctx)?;
            let _held = self.lock(ctx, Share::Shared)?;
            found = self.found()?;
        }
        self.group.grow();
        Ok(self.infos(&found))
    }

    fn look(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let held = self.lock(ctx, Share::Shared)?;
        let found = self.found()?;
        drop(held);
        Ok(self.infos(&found))
    }

    fn vdi(&self, _: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.info_now(vdi)
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        self.create_image(ctx, new)
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        self.introduce_volume(ctx, vdi, location)
    }

    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.destroy_image(ctx, vdi, false)
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        self.resize_image(ctx, vdi, bytes)
    }

    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid, kind: ForkKind) -> Result<Fork, ApiError> {
        self.fork_image(ctx, vdi, new, kind)
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.with_target(ctx, into, "copy", |target| fill::fill(ctx, target, from, base))
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.with_target(ctx, what.into, "import", |target| transfer::import(ctx, target, what, from))
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.settled_volumes(ctx)?;
        if access == Access::ReadWrite && self.whole(&listed, vdi)?.hidden {
            let text = format!("{vdi} is a base copy, which others rely on: it is read only");
            return Err(errors::fail(46, text));
        }
        let size = self.whole(&listed, vdi)?.virtual_size;
        let (chain, pin) = self.ready(&listed, vdi, access, false)?;
        let log = match access {
            Access::ReadWrite => self.log_for_disk(ctx, &listed, vdi, size)?,
            Access::ReadOnly => None,
        };
        self.active.add(vdi);
        drop((pin, held));
        Ok(OpenSpec { chain, log })
    }

    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        if self.active.take(vdi) {
            self.steps.forget(vdi);
            self.after_write(vdi);
            self.unreach();
        }
        Ok(())
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        self.track(ctx, vdi, wanted)
    }

    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        if !cbt::has_log(&self.group.list()?, vdi) {
            return Err(errors::fail(66, format_args!("changed blocks of {vdi} are not tracked")));
        }
        self.destroy_image(ctx, vdi, true)?;
        ctx.step("lv:data-destroy-done");
        self.info_now(vdi)
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        self.list_changed(ctx, from, to)
    }

    fn collect_garbage(&self, ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut found = self.settled(ctx)?;
        self.remove_all_garbage(ctx, &mut found)
    }

    fn continued(&self, _: &dyn Ctx, vdi: Uuid) -> Result<Option<Uuid>, ApiError> {
        let listed = self.group.list()?;
        let links = [Link { uuid: vdi, facts: self.whole(&listed, vdi)? }];
        let volume = links[0].volume();
        let _pin = self.pin([volume.clone()]);
        self.reach(&listed, [volume.as_str()])?;
        self.layers(&links).first().map_or(Ok(None), crate::dir::moved::continued_by)
    }

    fn make_room(&self, ctx: &dyn Ctx, wanted: &[RoomWanted]) -> Result<RoomMade, ApiError> {
        self.make_room_for(ctx, wanted)
    }

    fn take_room(&self, ctx: &dyn Ctx, spare: &[RoomSpare]) -> Result<RoomTaken, ApiError> {
        self.take_room_of(ctx, spare)
    }

    fn make_thin(&self, ctx: &dyn Ctx, config: &Config) -> Result<(), ApiError> {
        self.become_thin(ctx, config)
    }

    fn rename(&self, ctx: &dyn Ctx, vdi: Uuid, name: &str, description: &str) -> Result<(), ApiError> {
        self.rename_vdi(ctx, vdi, name, description)
    }

    fn merge_cost(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<MergeCost, ApiError> {
        self.cost_of_merge(ctx, merge)
    }

    fn grow_base(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<(), ApiError> {
        self.cost_of_merge(ctx, merge).map(drop)
    }

    fn merge(&self, ctx: &dyn Ctx, merge: &Merge, rate: u64) -> Result<(), ApiError> {
        self.copy_into_parent(ctx, merge, rate)
    }

    fn relink(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.relink_children(ctx, merge)
    }

    fn merge_leaf(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.merge_disk(ctx, merge)
    }

    fn inspect(&self, ctx: &dyn Ctx) -> Result<Vec<Oddity>, ApiError> {
        self.inspect_volumes(ctx)
    }

    fn detach(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let in_use = self.active.all().into_iter().find(|vdi| {
            let is_open = || {
                self.group.list().is_ok_and(|listed| listed.image(*vdi).is_some_and(|found| found.0.is_open))
            };
            ctx.live(*vdi).is_some() || is_open()
        });
        if let Some(vdi) = in_use {
            return Err((self, errors::vdi_in_use(vdi, "SR.detach")));
        }
        self.active.all().into_iter().for_each(|vdi| self.active.forget(vdi));
        match self.group.close().and_then(|()| self.under.release()) {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let erased = self.destroy_single(ctx).and_then(|()| self.check_empty(ctx)).and_then(|()| {
            self.locks.end_lease()?;
            self.group.erase(|| ctx.step("sr-erase:group-gone"))?;
            self.under.release()
        });
        match erased {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}
