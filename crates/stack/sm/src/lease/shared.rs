//! An SR that several hosts may use at once. What changes it is fenced by the lease of this host, and a VDI that is
//! open on another host is left alone.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use super::ctx::Fenced;
use super::member::Member;
use super::seen::Health;
use super::{Fence, Locked};
use crate::errors;
use crate::lock::Locks;
use crate::traits::{
    Config, Ctx, Fork, ForkKind, Fragmentation, Merge, MergeCost, Merged, NewVdi, Oddity, OddityKind,
    OpenSpec, RoomMade, RoomSpare, RoomTaken, RoomWanted, Sr, SrStat, VdiInfo,
};
use crate::transfer::Import;

/// The SR.
pub(crate) struct Shared {
    inner: Box<dyn Sr>,
    member: Arc<Member>,
    locks: Locks,
}

/// The key of `sm_config` that says how a host has a VDI open, as XenServer's storage manager writes it.
fn key_of(host: Uuid) -> String {
    format!("host_OpaqueRef:{host}")
}

impl Shared {
    /// The SR, fenced if its locks are those of several hosts.
    pub(crate) fn over(inner: Box<dyn Sr>, locks: Locks) -> Box<dyn Sr> {
        match locks.member().map(Arc::clone) {
            Some(member) => Box::new(Self { inner, member, locks }),
            None => inner,
        }
    }

    fn ctx<'a>(&'a self, ctx: &'a dyn Ctx) -> Fenced<'a> {
        Fenced { inner: ctx, member: &self.member }
    }

    /// With the SR's lock, here and among hosts.
    fn locked<T>(
        &self,
        ctx: &dyn Ctx,
        work: impl FnOnce(&Locked<'_>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let _own = self.locks.take_here(ctx)?;
        work(&self.member.lock(ctx)?)
    }

    /// Refuses where another host has the VDI open. What is done afterwards looks again, with the lock.
    fn check_here(&self, vdi: Uuid) -> Result<(), ApiError> {
        self.member.check()?;
        match self.member.elsewhere(vdi)? {
            // One that is silent for too long is dead, which is found out with the lock.
            Some(other) if !matches!(other.health, Health::Dead(_)) => Err(errors::fail(46, other.text())),
            _ => Ok(()),
        }
    }

    /// Holds VDIs for writing while `work` is done.
    fn holding<T>(
        &self,
        ctx: &dyn Ctx,
        vdis: &[Uuid],
        work: impl FnOnce(&Fenced<'_>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut held = Vec::new();
        let taken = self.locked(ctx, |locked| {
            vdis.iter().try_for_each(|vdi| {
                self.member.hold(locked, *vdi, Access::ReadWrite)?;
                held.push(*vdi);
                Ok(())
            })
        });
        let done = taken.and_then(|()| work(&self.ctx(ctx)));
        for vdi in held {
            if let Err(error) = self.member.let_go(vdi) {
                tracing::error!(%vdi, %error, "other hosts think that this one has it open");
            }
        }
        done
    }

    /// Chains are shortened by one host.
    fn check_collector(&self) -> Result<(), ApiError> {
        match self.member.collector()? {
            None => Ok(()),
            Some(name) => Err(errors::fail(46, format_args!("chains of this SR are shortened by {name}"))),
        }
    }

    /// Says in `sm_config` which hosts have VDIs open.
    fn tag(&self, found: &mut [VdiInfo]) -> Result<(), ApiError> {
        for (beat, health, open) in self.member.others()? {
            if matches!(health, Health::Dead(_)) {
                continue;
            }
            for one in open {
                if let Some(info) = found.iter_mut().find(|info| info.uuid == one.vdi) {
                    let word = if one.access == Access::ReadWrite { "RW" } else { "RO" };
                    info.sm_config.insert(key_of(beat.host), word.into());
                }
            }
        }
        Ok(())
    }

    fn tagged(&self, mut info: VdiInfo) -> Result<VdiInfo, ApiError> {
        self.tag(std::slice::from_mut(&mut info))?;
        Ok(info)
    }

    /// What other hosts left.
    fn of_hosts(&self) -> Result<Vec<Oddity>, ApiError> {
        let mut found = Vec::new();
        for (beat, health, open) in self.member.others()? {
            let Health::Dead(silent) = health else { continue };
            let file = beat.host.to_string();
            let name = beat.named();
            let detail = format!("{name} was silent for {} s", silent.as_secs());
            found.extend(open.into_iter().map(|one| Oddity {
                kind: OddityKind::HeldByDead,
                image: Some(one.vdi),
                file: file.clone(),
                detail: detail.clone(),
            }));
        }
        Ok(found)
    }
}

impl Sr for Shared {
    fn stat(&self, ctx: &dyn Ctx) -> Result<SrStat, ApiError> {
        self.inner.stat(ctx)
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let mut found = self.inner.scan(&self.ctx(ctx))?;
        let is_dead = |(_, health, _): &(_, Health, _)| matches!(health, Health::Dead(_));
        if self.member.others()?.iter().any(is_dead) {
            // What they left half done is in order now.
            self.locked(ctx, |locked| self.member.forget_dead(locked))?;
        }
        self.tag(&mut found)?;
        Ok(found)
    }

    fn look(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let mut found = self.inner.look(&self.ctx(ctx))?;
        self.tag(&mut found)?;
        Ok(found)
    }

    fn vdi(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.inner.vdi(&self.ctx(ctx), vdi).and_then(|info| self.tagged(info))
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        self.inner.create(&self.ctx(ctx), new)
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        self.inner.introduce(&self.ctx(ctx), vdi, location)
    }

    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.check_here(vdi)?;
        self.inner.destroy(&self.ctx(ctx), vdi)
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        self.check_here(vdi)?;
        self.inner.resize(&self.ctx(ctx), vdi, bytes)
    }

    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid, kind: ForkKind) -> Result<Fork, ApiError> {
        self.check_here(vdi)?;
        self.inner.fork(&self.ctx(ctx), vdi, new, kind)
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.holding(ctx, &[into], |ctx| self.inner.fill(ctx, into, from, base))
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.holding(ctx, &[what.into], |ctx| self.inner.import(ctx, what, from))
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        self.locked(ctx, |locked| self.member.hold(locked, vdi, access))?;
        let opened = self.inner.activate(&self.ctx(ctx), vdi, access);
        if opened.is_err() {
            let _ = self.member.let_go(vdi);
        }
        opened
    }

    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.inner.deactivate(&self.ctx(ctx), vdi)?;
        self.member.let_go(vdi)
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        self.check_here(vdi)?;
        self.inner.track_changes(&self.ctx(ctx), vdi, wanted)
    }

    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.check_here(vdi)?;
        self.inner.destroy_data(&self.ctx(ctx), vdi)
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        self.inner.changed_blocks(&self.ctx(ctx), from, to)
    }

    fn collect_garbage(&self, ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        self.check_collector()?;
        self.inner.collect_garbage(&self.ctx(ctx))
    }

    fn merge_cost(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<MergeCost, ApiError> {
        self.check_collector()?;
        self.inner.merge_cost(&self.ctx(ctx), merge)
    }

    fn grow_base(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<(), ApiError> {
        self.check_collector()?;
        self.inner.grow_base(&self.ctx(ctx), merge)
    }

    fn merge(&self, ctx: &dyn Ctx, merge: &Merge, rate: u64) -> Result<(), ApiError> {
        self.check_collector()?;
        // The copy is made without the lock: no other host removes the two meanwhile, or merges them.
        self.holding(ctx, &[merge.image, merge.parent], |ctx| self.inner.merge(ctx, merge, rate))
    }

    fn relink(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.check_collector()?;
        self.inner.relink(&self.ctx(ctx), merge)
    }

    fn merge_leaf(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.check_collector()?;
        self.check_here(merge.image)?;
        self.inner.merge_leaf(&self.ctx(ctx), merge)
    }

    fn inspect(&self, ctx: &dyn Ctx) -> Result<Vec<Oddity>, ApiError> {
        let mut found = self.inner.inspect(&self.ctx(ctx))?;
        if found.iter().all(|odd| odd.kind != OddityKind::LockKept) {
            found.extend(self.of_hosts()?);
        }
        Ok(found)
    }

    fn time_limit(&self) -> Option<Duration> {
        self.inner.time_limit()
    }

    fn fragmentation(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<Fragmentation, ApiError> {
        self.inner.fragmentation(&self.ctx(ctx), vdi)
    }

    fn continued(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<Option<Uuid>, ApiError> {
        self.inner.continued(&self.ctx(ctx), vdi)
    }

    /// Of disks of this host: those of another are refused, each by itself.
    fn make_room(&self, ctx: &dyn Ctx, wanted: &[RoomWanted]) -> Result<RoomMade, ApiError> {
        self.member.check()?;
        self.inner.make_room(&self.ctx(ctx), wanted)
    }

    fn take_room(&self, ctx: &dyn Ctx, spare: &[RoomSpare]) -> Result<RoomTaken, ApiError> {
        self.member.check()?;
        self.inner.take_room(&self.ctx(ctx), spare)
    }

    fn make_thin(&self, ctx: &dyn Ctx, config: &Config) -> Result<(), ApiError> {
        self.member.check()?;
        self.inner.make_thin(&self.ctx(ctx), config)
    }

    fn rename(&self, ctx: &dyn Ctx, vdi: Uuid, name: &str, description: &str) -> Result<(), ApiError> {
        self.inner.rename(&self.ctx(ctx), vdi, name, description)
    }

    fn detach(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        if let Some(vdi) = self.member.any() {
            return Err((self, errors::vdi_in_use(vdi, "SR.detach")));
        }
        if let Err(error) = self.member.leave() {
            return Err((self, error));
        }
        let Self { inner, member, locks } = *self;
        inner
            .detach(ctx)
            .map_err(|(inner, error)| (Box::new(Self { inner, member, locks }) as Box<dyn Sr>, error))
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let other = self.member.others().map(|others| {
            others
                .into_iter()
                .find_map(|(beat, health, _)| (!matches!(health, Health::Dead(_))).then(|| beat.named()))
        });
        match other {
            Ok(None) => {}
            Ok(Some(name)) => {
                let text = format!("{name} uses this SR: detach it there first ('xe pbd-unplug')");
                return Err((self, errors::fail(47, text)));
            }
            Err(error) => return Err((self, error)),
        }
        let Self { inner, member, locks } = *self;
        // The lease goes with the SR: what it has below is asked to remove it, when it is found empty.
        inner.erase(&Fenced { inner: ctx, member: &member }).map_err(|(inner, error)| {
            (Box::new(Self { inner, member: Arc::clone(&member), locks }) as Box<dyn Sr>, error)
        })
    }
}
