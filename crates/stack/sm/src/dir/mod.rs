//! An SR whose VDIs are files of one directory: `<uuid>.vhd` and `<uuid>.raw`. sm-layout.md sections 1, 4 and 5.
//!
//! What is durable when (each step ends with it; `fsync` of a file, then of the directory):
//!
//! ```text
//! create     the image under another name, its contents, its name
//! fork       the journal; the image's second name; the leaf; the sibling; the exchange of names (done from here on);
//!            the base copy's flag; the journal's removal
//! resize     the journal beside the image; see tapio_format::vhd::offline
//! merge      see `merge`, `relink` and `leaf`
//! destroy    the image's name; then its companions; then parents without children
//! logs       see `cbt`
//! ```
//!
//! A running disk is paused for the exchange of names in a fork, and not for what comes before it. A disk process
//! could also put the leaf on top between two requests; but it keeps the names of its images for pauses of its own (a
//! resize that moves blocks, an upgrade), and after the exchange those names would lead it to other images.

mod activate;
pub(crate) mod cbt;
pub(crate) mod create;
pub(crate) mod facts;
pub(crate) mod fork;
mod fragments;
pub(crate) mod index;
pub(crate) mod inspect;
pub(crate) mod journal;
mod leaf;
pub(crate) mod merge;
pub(crate) mod merge_journal;
pub(crate) mod moved;
mod recover;
mod relink;
mod remove;
mod resize;
mod swap;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use crate::closed;
use crate::errors;
use crate::fill;
use crate::lease;
use crate::lock::{Held, Locks, Share};
use crate::mount;
use crate::traits::{
    Config, Ctx, Fork, ForkKind, Fragmentation, Merge, MergeCost, Merged, NewVdi, Oddity, OpenSpec, Sr,
    SrStat, VdiInfo,
};
use crate::transfer::{self, Import};
use facts::{Facts, FileKind};

/// What an SR of this layout can do, in the words of `SM.capabilities`.
pub(crate) const CAPABILITIES: &[&str] = &[
    "SR_PROBE",
    "VDI_CREATE",
    "VDI_DELETE",
    "VDI_ATTACH",
    "VDI_DETACH",
    "VDI_ACTIVATE",
    "VDI_DEACTIVATE",
    "VDI_INTRODUCE",
    "VDI_CLONE",
    "VDI_SNAPSHOT",
    "VDI_RESIZE",
    "VDI_RESIZE_ONLINE",
    "ATOMIC_PAUSE",
    "THIN_PROVISIONING",
    "VDI_CONFIG_CBT",
    "VDI_GENERATE_CONFIG",
];
use index::{Index, Listing};

/// What is known of an image of which so many others are children, in whatever its SR keeps it.
pub(crate) fn info(vdi: Uuid, facts: &Facts, children: u32, has_log: bool) -> VdiInfo {
    let mut sm_config = BTreeMap::new();
    let mut put = |key: &str, value: &str| sm_config.insert(key.to_string(), value.to_string());
    match facts.kind {
        FileKind::Vhd => put("vdi_type", "vhd"),
        FileKind::Raw => {
            put("type", "raw");
            put("vdi_type", "aio")
        }
    };
    put("image-format", facts.kind.extension());
    let parent = facts.parent.as_ref().and_then(|parent| FileKind::of_file(&parent.name));
    if let Some((parent, _)) = parent {
        put("vhd-parent", &parent.to_string());
    }
    if let Some(damage) = &facts.damage {
        put("damaged", damage);
    }
    let is_base = Listing::is_base(facts, children);
    VdiInfo {
        uuid: vdi,
        location: vdi.to_string(),
        virtual_size: facts.virtual_size,
        physical_utilisation: facts.physical,
        managed: !is_base,
        read_only: is_base,
        parent: parent.map(|(parent, _)| parent),
        name_label: None,
        sm_config,
        cbt_enabled: has_log,
        is_metadata: false,
        told: None,
    }
}

/// What is below the directory.
pub(crate) trait Backing: Send + Sync {
    /// Takes it away from this host.
    fn detach(&self) -> Result<(), ApiError>;

    /// Takes it away from this host, and wipes what says that an SR is there.
    fn erase(&self, ctx: &dyn Ctx) -> Result<(), ApiError>;

    /// Whether a file may take the name of one that a process has open.
    fn renames_onto_open(&self) -> bool {
        true
    }

    /// Whether several hosts may have it.
    fn is_among_hosts(&self) -> bool {
        false
    }
}

/// An attached SR of files.
pub(crate) struct ImageDir {
    sr: Uuid,
    path: PathBuf,
    /// Device and inode of the directory: a file system that was unmounted leaves another one at the same place.
    identity: (u64, u64),
    locks: Locks,
    index: Index,
    /// VDIs that were activated here, and how often.
    active: Mutex<HashMap<Uuid, usize>>,
    default_kind: FileKind,
    backing: Box<dyn Backing>,
    /// The last image that was copied into its parent and not taken out of the chain yet.
    copied: Mutex<Option<merge::Copied>>,
}

impl ImageDir {
    /// The SR in the directory `path`, recovered from what a kill left there.
    pub(crate) fn open(
        ctx: &dyn Ctx,
        sr: Uuid,
        path: &Path,
        run_dir: &Path,
        config: &Config,
        backing: Box<dyn Backing>,
    ) -> Result<Self, ApiError> {
        let data = std::fs::metadata(path)
            .map_err(|error| errors::io(47, "cannot find the SR's directory", path, &error))?;
        if !data.is_dir() {
            return Err(errors::fail(47, format_args!("{} is no directory", path.display())));
        }
        closed::close_all(path);
        let member = if backing.is_among_hosts() {
            lease::of_directory(ctx, (sr, path), run_dir, config)?.map(Arc::new)
        } else {
            None
        };
        let opened = Self {
            sr,
            path: path.to_path_buf(),
            identity: (data.dev(), data.ino()),
            locks: Locks::new(run_dir, sr, path).among(member.clone()),
            index: Index::new(path),
            active: Mutex::new(HashMap::new()),
            default_kind: preferred_kind(config),
            backing,
            copied: Mutex::default(),
        };
        let Some(member) = member else {
            opened.recover(ctx)?;
            return Ok(opened);
        };
        if let Err(error) = opened.recover(&lease::Fenced { inner: ctx, member: &member }) {
            let _ = member.leave();
            return Err(error);
        }
        Ok(opened)
    }

    /// For its users: fenced, if several hosts may have it.
    pub(crate) fn boxed(self) -> Box<dyn Sr> {
        let locks = self.locks.clone();
        lease::Shared::over(Box::new(self), locks)
    }

    fn file(&self, kind: FileKind, vdi: Uuid) -> PathBuf {
        self.path.join(kind.file_name(vdi))
    }

    /// Whether the directory is the one that was attached.
    fn check_there(&self) -> Result<(), ApiError> {
        let found = std::fs::metadata(&self.path)
            .map_err(|error| errors::io(47, "the SR's directory is gone:", &self.path, &error))?;
        if (found.dev(), found.ino()) == self.identity {
            return Ok(());
        }
        let text = "is another directory than the one that was attached: was its storage unmounted?";
        Err(errors::fail(47, format_args!("{} {text}", self.path.display())))
    }

    fn lock(&self, ctx: &dyn Ctx, share: Share) -> Result<Held<'_>, ApiError> {
        self.check_there()?;
        self.locks.take(ctx, share)
    }

    fn list(&self) -> Result<Listing, ApiError> {
        self.index
            .list()
            .map_err(|error| errors::io(40, "cannot read the SR's directory", &self.path, &error))
    }

    /// The image of a VDI.
    fn image(&self, vdi: Uuid) -> Result<Facts, ApiError> {
        let found = self.index.one(vdi).map_err(|error| {
            errors::io(46, "cannot read the image", &self.path.join(vdi.to_string()), &error)
        })?;
        match found {
            Some(facts) => Ok(facts),
            None => {
                self.check_there()?;
                Err(errors::vdi_missing(self.sr, vdi))
            }
        }
    }

    /// The same, where it can be used.
    fn whole_image(&self, vdi: Uuid) -> Result<Facts, ApiError> {
        let facts = self.image(vdi)?;
        match &facts.damage {
            None => Ok(facts),
            Some(why) => {
                let path = self.file(facts.kind, vdi);
                let next = "see 'vhd-util check', try 'vhd-util repair', or restore it from a backup";
                Err(errors::fail(65, format_args!("{}: {why}: {next}", path.display())))
            }
        }
    }

    /// Refuses an operation that needs the VDI closed: while it is active here, or open in a disk process.
    fn check_unused(&self, ctx: &dyn Ctx, vdi: Uuid, operation: &str) -> Result<(), ApiError> {
        if self.active.lock().contains_key(&vdi) || ctx.live(vdi).is_some() {
            return Err(errors::vdi_in_use(vdi, operation));
        }
        Ok(())
    }

    /// What the VDI is now. Whether a raw image is a base copy may take a look at all others.
    fn info_now(&self, vdi: Uuid, facts: &Facts) -> Result<VdiInfo, ApiError> {
        let children = match facts.kind {
            FileKind::Vhd => 0,
            FileKind::Raw => match self.index.children(vdi) {
                Some(children) => children,
                None => self.list()?.children().get(&vdi).copied().unwrap_or(0),
            },
        };
        Ok(info(vdi, facts, children, self.has_log(vdi)))
    }

    /// As it was just made or changed, without a look at others.
    fn info_of(&self, vdi: Uuid, children: u32) -> Result<VdiInfo, ApiError> {
        Ok(info(vdi, &self.image(vdi)?, children, self.has_log(vdi)))
    }

    fn sync(&self) -> Result<(), ApiError> {
        mount::sync_directory(&self.path)
            .map_err(|error| errors::io(200, "cannot make names durable in", &self.path, &error))
    }
}

/// The first format of `preferred-image-formats` that there is; VHD otherwise.
fn preferred_kind(config: &Config) -> FileKind {
    let preferred = config.get("preferred-image-formats").map_or("", String::as_str);
    let named = |word: &str| match word.trim() {
        "vhd" => Some(FileKind::Vhd),
        "raw" => Some(FileKind::Raw),
        _ => None,
    };
    preferred.split(',').find_map(named).unwrap_or(FileKind::Vhd)
}

impl ImageDir {
    /// What is known of the images of a listing.
    fn infos(&self, listing: &Listing) -> Vec<VdiInfo> {
        let children = listing.children();
        let pending = recover::foreign(&self.path, listing);
        let bases = recover::bases(&self.path, listing);
        let mut found: Vec<_> = listing
            .images
            .iter()
            .map(|(vdi, facts)| {
                let children = children.get(vdi).copied().unwrap_or(0);
                info(*vdi, facts, children, listing.logs.contains(vdi))
            })
            .collect();
        let alone =
            listing.logs.iter().filter(|vdi| !listing.images.contains_key(vdi) && self.has_log(**vdi));
        found.extend(alone.map(|vdi| self.info_of_log(*vdi)));
        for info in &mut found {
            if bases.contains(&info.uuid) {
                (info.managed, info.read_only) = (false, true);
            }
            if let Some(journal) = pending.get(&info.uuid) {
                info.sm_config.insert("damaged".into(), journal::unfinished(journal));
            } else if let Some(parent) = info.parent.filter(|parent| !listing.images.contains_key(parent)) {
                let text = format!("its parent {parent} is not in the SR: bring it back");
                info.sm_config.entry("damaged".into()).or_insert(text);
            }
        }
        found
    }
}

impl Sr for ImageDir {
    fn stat(&self, _: &dyn Ctx) -> Result<SrStat, ApiError> {
        self.check_there()?;
        let (physical_size, physical_utilisation) = mount::sizes(&self.path)
            .map_err(|error| errors::io(200, "cannot ask for the size of", &self.path, &error))?;
        let virtual_allocation = self.index.virtual_sizes();
        Ok(SrStat { physical_size, physical_utilisation, virtual_allocation })
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let held = self.lock(ctx, Share::Shared)?;
        let mut listing = self.list()?;
        drop(held);
        if recover::is_needed(&self.path, &listing) {
            self.recover(ctx)?;
            let _held = self.lock(ctx, Share::Shared)?;
            listing = self.list()?;
        }
        Ok(self.infos(&listing))
    }

    fn look(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let held = self.lock(ctx, Share::Shared)?;
        let listing = self.list()?;
        drop(held);
        Ok(self.infos(&listing))
    }

    fn vdi(&self, _: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        match self.image(vdi) {
            Ok(facts) => self.info_now(vdi, &facts),
            Err(_) if self.is_log_alone(vdi)? => Ok(self.info_of_log(vdi)),
            Err(error) => Err(error),
        }
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        self.create_image(ctx, new)
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        self.introduce_image(ctx, vdi, location)
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
        self.check_unused(ctx, into, "copy")?;
        let facts = self.whole_image(into)?;
        let target = ChainSpec { layers: self.chain(into, &facts)?, access: Access::ReadWrite };
        fill::fill(ctx, &target, from, base)
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.check_unused(ctx, what.into, "import")?;
        let facts = self.whole_image(what.into)?;
        let target = ChainSpec { layers: self.chain(what.into, &facts)?, access: Access::ReadWrite };
        transfer::import(ctx, &target, what, from)
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        self.activate_image(ctx, vdi, access)
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        self.track(ctx, vdi, wanted)
    }

    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        if !self.has_log(vdi) {
            self.image(vdi)?;
            return Err(errors::fail(66, format_args!("changed blocks of {vdi} are not tracked")));
        }
        self.destroy_image(ctx, vdi, true)?;
        ctx.step("data-destroy:done");
        Ok(self.info_of_log(vdi))
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        self.list_changed(ctx, from, to)
    }

    fn collect_garbage(&self, ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        self.collect_bases(ctx)
    }

    fn fragmentation(&self, _: &dyn Ctx, vdi: Uuid) -> Result<Fragmentation, ApiError> {
        self.lies_as(vdi)
    }

    fn continued(&self, _: &dyn Ctx, vdi: Uuid) -> Result<Option<Uuid>, ApiError> {
        self.continued_by(vdi)
    }

    fn merge_cost(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<MergeCost, ApiError> {
        self.cost_of_merge(ctx, merge)
    }

    fn grow_base(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<(), ApiError> {
        self.grow_parent(ctx, merge)
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
        self.inspect_files(ctx)
    }

    fn deactivate(&self, _: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let mut active = self.active.lock();
        if let Some(count) = active.get_mut(&vdi) {
            *count -= 1;
            if *count == 0 {
                active.remove(&vdi);
            }
        }
        Ok(())
    }

    fn detach(self: Box<Self>, _: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let in_use = self.active.lock().keys().next().copied();
        if let Some(vdi) = in_use {
            let error = errors::vdi_in_use(vdi, "SR.detach");
            return Err((self, error));
        }
        match self.backing.detach() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let erased = self.erase_images(ctx).and_then(|()| self.locks.end_lease());
        match erased.and_then(|()| self.backing.erase(ctx)) {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}
