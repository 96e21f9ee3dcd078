//! A VDI in two: snapshot, clone, and "single". sm-layout.md section 5.
//!
//! ```text
//! 1  empty children of the base copy to come, in volumes that no storage manager takes for images
//! 2  journal clone_<vdi> = <base>_<new>
//! 3  a running disk closes its images; guests wait       see `swap` for one that goes on
//! 4  the image's volume gets the base copy's name
//! 5  the leaf gets the VDI's name                      from here on it is finished, before it is undone
//! 6  the new VDI gets its name, and its log of changed blocks: see `cbt`
//! 7  the base copy is hidden, becomes as short as it can be, and refuses writes
//! 8  the leaf has room for the whole disk, where it is written or the SR is thick
//! 9  the running disk opens its new chain; guests go on; the journal goes
//! 10 a thick clone gets room for its whole disk
//! ```
//!
//! Names tell how far it came. A kill between 4 and 5 leaves the VDI without a volume, and is undone.
//!
//! Where the group has room for both, the leaf is made as long as it has to be in step 1. Then a disk goes on without a
//! pause, with a new log too if its changed blocks are tracked.

use tapio_format::vhd::offline::{Image, OpenOptions, ParentFacts, Shape, create, set_hidden};
use tapio_format::vhd::{CHAIN_DEPTH_MAX, KeyHash, time};
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use super::cbt::has_log;
use super::create::{open, vdi_type};
use super::{Link, VolumeSr};
use crate::dir::facts::{Facts, FileKind};
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::Listed;
use crate::lvm::journal::{Journal, Kind, of_clone};
use crate::lvm::metadata::VdiEntry;
use crate::lvm::thin::Wanted;
use crate::lvm::{names, size};
use crate::traits::{Ctx, Fork, ForkKind, LiveDisk, OpenSpec};

/// A fork that is being made.
pub(super) struct Plan {
    pub(super) vdi: Uuid,
    pub(super) base: Uuid,
    pub(super) new: Option<Uuid>,
    pub(super) kind: FileKind,
    virtual_size: u64,
    /// The snapshot gets the log of changed blocks.
    tracks: bool,
    /// How long the volumes of the leaf and of the new VDI are in the end.
    leaf_len: u64,
    new_len: u64,
    /// Tags that both get.
    tags: Vec<String>,
    pub(super) number: u16,
}

impl Plan {
    fn journal(&self) -> Journal {
        let new = self.new.map(|new| new.to_string()).unwrap_or_default();
        Journal::new(Kind::Clone, self.vdi, format!("{}_{new}", self.base))
    }

    /// What a child records of the base copy, which has its name later.
    fn parent(&self, group: &str, footer_uuid: Uuid, key_hash: KeyHash) -> ParentFacts {
        let name = names::mapper(group, &names::volume(self.kind, self.base));
        ParentFacts {
            uuid: footer_uuid,
            timestamp: time::now(),
            relative_path: format!("./{name}"),
            name,
            key_hash,
        }
    }
}

impl VolumeSr {
    /// How a disk process opens the VDI now.
    pub(super) fn open_spec(&self, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let listed = self.group.list()?;
        let links = self.chain(&listed, vdi)?;
        let volumes: Vec<String> = links.iter().map(Link::volume).collect();
        self.reach(&listed, volumes.iter().map(String::as_str))?;
        let log = self.log_to_go_on(&listed, vdi, access)?;
        Ok(OpenSpec { chain: ChainSpec { layers: self.layers(&links), access }, log })
    }

    /// Has a running disk that is closed go on.
    pub(super) fn go_on(&self, vdi: Uuid, disk: &dyn LiveDisk) -> Result<(), ApiError> {
        disk.resume(&self.open_spec(vdi, disk.access())?)
    }

    pub(super) fn fork_image(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        new: Uuid,
        kind: ForkKind,
    ) -> Result<Fork, ApiError> {
        let number = if kind == ForkKind::Clone { 81 } else { 82 };
        if self.group.single.is_single {
            let next = "have the array copy its LUN, and give the copy UUIDs of its own (types relvm, relvmoiscsi, \
                        relvmohba)";
            return Err(crate::lvm::single::refused(number, next));
        }
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.settled_volumes(ctx)?;
        let live = ctx.live(vdi);
        if live.is_none() {
            self.check_unused(ctx, &listed, vdi, "snapshot")?;
        }
        let links = self.chain(&listed, vdi)?;
        let facts = links[0].facts.clone();
        if facts.hidden {
            return Err(errors::fail(number, format_args!("{vdi} is a base copy: take the VDI above it")));
        }
        let new = (kind != ForkKind::Single).then_some(new);
        if let Some(new) = new {
            self.check_free(&listed, new)?;
        }
        let _pin = self.pin([links[0].volume()]);
        self.reach(&listed, [links[0].volume().as_str()])?;
        let tracks = kind == ForkKind::Snapshot && has_log(&listed, vdi);
        // Logs change by the steps of a whole fork.
        if live.is_none()
            && !tracks
            && let Some(fork) = self.fork_empty(ctx, vdi, &facts, new, number)?
        {
            return Ok(fork);
        }
        if links.len() >= CHAIN_DEPTH_MAX {
            return Err(errors::fail(109, crate::dir::fork::too_long(vdi, links.len())));
        }
        let provision = self.provision_in(&listed, vdi);
        let is_thick = !provision.is_thin;
        let full = size::full(facts.virtual_size);
        // Of a leaf that is written: it holds nothing yet.
        let room = self.first_room(&provision, listed.free);
        let written = provision.len_written(facts.virtual_size, size::empty(), room);
        // A snapshot that nothing writes stays as short as it was.
        let was_full = facts.kind == FileKind::Raw || facts.physical >= full;
        let plan = Plan {
            vdi,
            base: Uuid::new_v4(),
            new,
            kind: facts.kind,
            virtual_size: facts.virtual_size,
            tracks,
            leaf_len: if (is_thick && was_full) || live.is_some() { written } else { size::empty() },
            new_len: if is_thick && kind == ForkKind::Clone { full } else { size::empty() },
            tags: self.tags_of(&listed, vdi),
            number,
        };
        if let Err(error) = self.fork_with(ctx, &plan, &listed, &facts, live.as_deref()) {
            // What is left is put in order now, or by the next operation. It may be that all is done.
            let is_done = match self.settled_volumes(ctx) {
                Ok(listed) => listed.image(plan.base).is_some(),
                Err(second) => {
                    tracing::warn!("the fork of {vdi} is not undone yet: {second}");
                    false
                }
            };
            if !is_done {
                return Err(error);
            }
            tracing::warn!("the fork of {vdi} was finished after a failure: {error}");
        }
        ctx.step("lv:fork-done");
        self.say_of_fork(&plan, kind);
        self.unreach();
        let listed = self.group.list()?;
        let origin = self.info_in(&listed, vdi)?;
        let made = new.map_or_else(|| Ok(origin.clone()), |new| self.info_in(&listed, new))?;
        let base = self.info_in(&listed, plan.base)?;
        Ok(Fork { made, origin, base: Some(base) })
    }

    fn tags_of(&self, listed: &Listed, vdi: Uuid) -> Vec<String> {
        listed.image(vdi).map(|(volume, _)| Wanted::of(volume).tags()).unwrap_or_default()
    }

    fn say_of_fork(&self, plan: &Plan, kind: ForkKind) {
        let said = self.metadata();
        let known = said.as_ref().and_then(|said| said.vdi(plan.vdi).cloned());
        let own = known.unwrap_or_else(|| VdiEntry::new(plan.vdi, "vhd"));
        let base = VdiEntry {
            managed: false,
            name: "base copy".into(),
            ..VdiEntry::new(plan.base, vdi_type(plan.kind))
        };
        self.say(base);
        self.say(VdiEntry { vdi_type: "vhd".into(), ..own.clone() });
        if let Some(new) = plan.new {
            let is_snapshot = kind == ForkKind::Snapshot;
            self.say(VdiEntry {
                uuid: new,
                vdi_type: "vhd".into(),
                snapshot_of: is_snapshot.then_some(plan.vdi),
                snapshot_time: if is_snapshot { now() } else { own.snapshot_time.clone() },
                ..own
            });
        }
    }

    /// A VDI that holds nothing of its own needs no base copy: a sibling on the same parent is all there is to do.
    fn fork_empty(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        facts: &Facts,
        new: Option<Uuid>,
        number: u16,
    ) -> Result<Option<Fork>, ApiError> {
        let Some(parent) = facts.parent.as_ref().filter(|_| facts.kind == FileKind::Vhd) else {
            return Ok(None);
        };
        let Some((below, kind)) = FileKind::of_file(&parent.name) else { return Ok(None) };
        let failed = |error: tapio_format::FormatError| errors::image(number, &error);
        let image = Image::open(&self.path(FileKind::Vhd, vdi), OpenOptions::READ).map_err(failed)?;
        image.check_settled().map_err(failed)?;
        if image.allocated_blocks() > 0 {
            return Ok(None);
        }
        let key_hash = image.batmap().map(|batmap| batmap.header.key_hash).unwrap_or_default();
        drop(image);
        if let Some(new) = new {
            let plan = Plan {
                vdi,
                base: below,
                new: None,
                kind,
                virtual_size: facts.virtual_size,
                tracks: false,
                leaf_len: 0,
                new_len: 0,
                tags: self.tags_of(&self.group.list()?, vdi),
                number,
            };
            let facts = plan.parent(&self.group.name, parent.uuid, key_hash);
            self.make_child(&plan, new, size::empty(), &facts)?;
            self.group.rename(&names::new_volume(new), &names::volume(FileKind::Vhd, new))?;
            ctx.step("lv:fork-empty");
            self.say(VdiEntry::new(new, "vhd"));
        }
        self.unreach();
        let listed = self.group.list()?;
        let origin = self.info_in(&listed, vdi)?;
        let made = new.map_or_else(|| Ok(origin.clone()), |new| self.info_in(&listed, new))?;
        Ok(Some(Fork { made, origin, base: None }))
    }

    /// An empty child in a volume that is not named as one yet.
    fn make_child(&self, plan: &Plan, uuid: Uuid, len: u64, parent: &ParentFacts) -> Result<(), ApiError> {
        let name = names::new_volume(uuid);
        let path = self.group.create(&name, len, None)?;
        let made = create(&path, &Shape::Differencing(parent.clone()), plan.virtual_size, size::TABLE_FOR);
        let made = made
            .map_err(|error| errors::image(plan.number, &error))
            .and_then(|()| self.group.add_tags(&name, &plan.tags));
        if made.is_err() {
            let _ = self.group.remove(&[&name]);
        }
        made
    }

    fn fork_with(
        &self,
        ctx: &dyn Ctx,
        plan: &Plan,
        listed: &Listed,
        facts: &Facts,
        live: Option<&dyn LiveDisk>,
    ) -> Result<(), ApiError> {
        let failed = |error: tapio_format::FormatError| errors::image(plan.number, &error);
        let own = names::volume(plan.kind, plan.vdi);
        let now_len = listed.volumes.get(&own).map_or(0, |volume| volume.size);
        let (footer_uuid, key_hash, gives_back) = match plan.kind {
            FileKind::Raw => (Uuid::nil(), KeyHash::default(), 0),
            FileKind::Vhd => {
                let image =
                    Image::open(&self.path(FileKind::Vhd, plan.vdi), OpenOptions::READ).map_err(failed)?;
                if live.is_none() {
                    image.check_settled().map_err(failed)?;
                }
                let key_hash = image.batmap().map(|batmap| batmap.header.key_hash).unwrap_or_default();
                (facts.footer_uuid, key_hash, now_len.saturating_sub(size::rounded(image.physical_len())))
            }
        };
        // Two journals beside them, and a log.
        let beside = if plan.tracks { 3 } else { 2 };
        let takes = plan.leaf_len + plan.new.map_or(0, |_| plan.new_len) + beside * size::EXTENT;
        self.check_room(listed, takes.saturating_sub(gives_back))?;
        let leaf_len = if takes <= listed.free { plan.leaf_len } else { size::empty() };
        let parent = plan.parent(&self.group.name, footer_uuid, key_hash);
        self.make_child(plan, plan.vdi, leaf_len, &parent)?;
        ctx.step("lv:fork-leaf-made");
        if let Some(new) = plan.new {
            self.make_child(plan, new, size::empty(), &parent)?;
        }
        ctx.step("lv:fork-sibling-made");
        let mut new_log = false;
        if let Some(snapshot) = plan.new.filter(|_| plan.tracks) {
            match self.prepare_log(ctx, plan.vdi, snapshot, plan.virtual_size) {
                Ok(()) => new_log = true,
                // The VDI goes on with the log that it has: the next snapshot that is tracked has all since the last
                // one.
                Err(error) => self.untracked(ctx, plan.vdi, &error),
            }
        }
        let journal = plan.journal();
        journal.write(&self.group)?;
        ctx.step("lv:fork-journal");
        // A leaf that has no room yet gets it when the base copy has become shorter.
        let swaps = match live {
            Some(disk) if leaf_len == plan.leaf_len => disk.hold(new_log)?,
            _ => false,
        };
        if let Some(disk) = live.filter(|_| swaps) {
            self.swap_running(ctx, plan, disk, new_log)?;
            journal.remove(&self.group)?;
            return match plan.new {
                Some(new) => self.inflate(ctx, new, plan.new_len),
                None => Ok(()),
            };
        }
        if let Some(disk) = live {
            disk.pause()?;
        }
        ctx.step("lv:fork-paused");
        self.group.rename(&own, &names::volume(plan.kind, plan.base))?;
        ctx.step("lv:fork-base-named");
        self.group.rename(&names::new_volume(plan.vdi), &names::volume(FileKind::Vhd, plan.vdi))?;
        ctx.step("lv:fork-leaf-named");
        if let Some(new) = plan.new {
            self.group.rename(&names::new_volume(new), &names::volume(FileKind::Vhd, new))?;
        }
        ctx.step("lv:fork-sibling-named");
        if plan.tracks {
            self.switch_logs(ctx, plan.vdi, plan.new)?;
        }
        if !self.close_base(ctx, plan.base, plan.kind)? {
            return Err(errors::fail(plan.number, format_args!("base copy {} is open", plan.base)));
        }
        ctx.step("lv:fork-base-closed");
        self.inflate(ctx, plan.vdi, plan.leaf_len)?;
        ctx.step("lv:fork-leaf-long");
        if let Some(disk) = live {
            self.go_on(plan.vdi, disk)?;
        }
        ctx.step("lv:fork-resumed");
        journal.remove(&self.group)?;
        if let Some(new) = plan.new {
            self.inflate(ctx, new, plan.new_len)?;
        }
        Ok(())
    }

    /// Step 7. Answers whether it is done: a disk process may have left the base copy incomplete when it died.
    pub(super) fn close_base(&self, ctx: &dyn Ctx, base: Uuid, kind: FileKind) -> Result<bool, ApiError> {
        let listed = self.group.list()?;
        let Some(volume) = listed.volumes.get(&names::volume(kind, base)) else { return Ok(true) };
        match kind {
            FileKind::Raw => self.group.set_hidden(volume, true)?,
            FileKind::Vhd if volume.is_writable => {
                self.reach(&listed, [volume.name.as_str()])?;
                let mut image = match Image::open(&self.path(kind, base), OpenOptions::WRITE) {
                    Err(error) if error.errno() == libc::EBUSY => return Ok(false),
                    opened => opened.map_err(|error| errors::image(46, &error))?,
                };
                set_hidden(&mut image, 1).map_err(|error| errors::image(54, &error))?;
                drop(image);
                ctx.step("lv:fork-hidden");
                self.deflate(ctx, base)?;
            }
            FileKind::Vhd => {}
        }
        self.group.set_writable(volume, false)?;
        Ok(true)
    }

    /// Finishes or undoes a fork that was broken off. The journal goes when all disks go on.
    pub(super) fn recover_fork(&self, ctx: &dyn Ctx, journal: &Journal) -> Result<(), ApiError> {
        let vdi = journal.image;
        let Some((base, new)) = of_clone(&journal.value) else {
            let text = format!("the journal of a fork of {vdi} says '{}'", journal.value);
            return Err(errors::fail(181, text));
        };
        if let Some(why) = ctx.elsewhere(vdi) {
            tracing::info!("SR {}: a fork of {vdi} waits for its host: {why}", self.sr);
            return Ok(());
        }
        let live = ctx.live(vdi);
        // It was paused, or was going to be, or goes on already.
        let paused = live.as_ref().map_or(Ok(()), |disk| disk.pause());
        let listed = self.group.list()?;
        if let Err(error) = paused {
            let is_open = |uuid: Uuid| listed.image(uuid).is_some_and(|(volume, _)| volume.is_open);
            // It may write to what would refuse that.
            if is_open(vdi) || is_open(base) {
                return Err(error);
            }
        }
        let named = |uuid: Uuid| listed.volumes.contains_key(&names::volume(FileKind::Vhd, uuid));
        let fresh = |uuid: Uuid| listed.volumes.contains_key(&names::new_volume(uuid));
        let base_kind = listed.image(base).map(|(_, kind)| kind);
        // The leaf is there, and the sibling is there or can be named.
        let is_done = base_kind.is_some() && named(vdi) && new.is_none_or(|new| named(new) || fresh(new));
        let ended: Result<bool, ApiError> = match base_kind {
            Some(kind) if is_done => {
                tracing::info!("SR {}: a fork of {vdi} was broken off and is finished", self.sr);
                let new = (new, new.filter(|new| !named(*new)));
                self.finish_fork(ctx, vdi, (base, kind), new, live.is_some())
            }
            _ => {
                tracing::info!("SR {}: a fork of {vdi} was broken off and is undone", self.sr);
                self.undo_fork(ctx, &listed, vdi, base_kind.map(|kind| (base, kind)), new).map(|()| true)
            }
        };
        if let Some(disk) = live
            && let Err(error) = self.go_on(vdi, disk.as_ref())
        {
            // The journal stays: the next recovery tries again.
            tracing::warn!("the disk of VDI {vdi} does not go on after a broken fork: {error}");
            return ended.map(drop);
        }
        // Otherwise the next recovery finishes it: once a disk process has had the images open.
        if ended? { journal.remove(&self.group) } else { Ok(()) }
    }

    fn finish_fork(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        (base, kind): (Uuid, FileKind),
        (new, unnamed): (Option<Uuid>, Option<Uuid>),
        is_live: bool,
    ) -> Result<bool, ApiError> {
        if let Some(new) = unnamed {
            self.group.rename(&names::new_volume(new), &names::volume(FileKind::Vhd, new))?;
        }
        self.switch_logs(ctx, vdi, new)?;
        self.link_logs(ctx, vdi, new)?;
        if !self.close_base(ctx, base, kind)? {
            return Ok(false);
        }
        let listed = self.group.list()?;
        let len = size::full(self.whole(&listed, vdi)?.virtual_size);
        match self.inflate(ctx, vdi, len) {
            // It gets its room when it is written.
            Err(error) if !is_live => {
                tracing::info!("VDI {vdi} has no room for its whole disk yet: {error}");
                Ok(true)
            }
            done => done.map(|()| true),
        }
    }

    /// Everything as it was before. No guest has written to the leaf.
    fn undo_fork(
        &self,
        ctx: &dyn Ctx,
        listed: &Listed,
        vdi: Uuid,
        base: Option<(Uuid, FileKind)>,
        new: Option<Uuid>,
    ) -> Result<(), ApiError> {
        self.undo_logs(ctx, vdi, new)?;
        let fresh = [Some(vdi), new].into_iter().flatten().map(names::new_volume);
        let mut gone: Vec<String> = fresh.filter(|name| listed.volumes.contains_key(name)).collect();
        if let Some((base, kind)) = base {
            // Children of the base copy, if they have their names.
            for uuid in [Some(vdi), new].into_iter().flatten() {
                let name = names::volume(FileKind::Vhd, uuid);
                if listed.volumes.contains_key(&name) {
                    let is_child = self.whole(listed, uuid)?.parent.is_some_and(|parent| {
                        FileKind::of_file(&parent.name).is_some_and(|(parent, _)| parent == base)
                    });
                    if !is_child {
                        let text = format!("{name} is no child of {base}, which a fork was to make it");
                        return Err(errors::fail(181, text));
                    }
                    gone.push(name);
                }
            }
            self.group.remove(&gone.iter().map(String::as_str).collect::<Vec<_>>())?;
            if let Some(volume) = listed.volumes.get(&names::volume(kind, base)) {
                self.group.set_writable(volume, true)?;
                self.group.set_hidden(volume, false)?;
                self.group.rename(&volume.name, &names::volume(kind, vdi))?;
            }
            if kind == FileKind::Vhd {
                let listed = self.group.list()?;
                self.reach(&listed, [names::volume(kind, vdi).as_str()])?;
                let mut image = open(&self.path(kind, vdi), Access::ReadWrite)?;
                let virtual_size = image.virtual_len();
                set_hidden(&mut image, 0).map_err(|error| errors::image(54, &error))?;
                drop(image);
                if ctx.live(vdi).is_some() {
                    self.inflate(ctx, vdi, size::full(virtual_size))?;
                }
            }
            return Ok(());
        }
        self.group.remove(&gone.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// The time as the metadata have it.
fn now() -> String {
    let text = time::to_text(time::now());
    crate::lvm::metadata::compact_time(&text)
}
