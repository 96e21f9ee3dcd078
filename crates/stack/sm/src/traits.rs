//! What a driver is, and what it may ask of its caller.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use crate::transfer::{self, Export, Import};

/// `device_config` of a PBD: what names the storage. Secrets in it never reach a log.
pub type Config = BTreeMap<String, String>;

/// What a driver may ask while it works.
pub trait Ctx: Send + Sync {
    /// Whether the caller wants it to stop; long work looks now and then and answers `TASK_CANCELLED`.
    fn is_cancelled(&self) -> bool;

    /// How far it is, 0 to 1.
    fn progress(&self, fraction: f64);

    /// The running disk that has this VDI open on this host, if there is one. Knows every such disk before the first
    /// SR is attached: recovery asks here whether a disk process uses what it repairs.
    fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>>;

    /// Why this VDI cannot be changed here, if another host has it open.
    fn elsewhere(&self, _vdi: Uuid) -> Option<String> {
        None
    }

    /// Whether the toolstack has given this VDI to a client: of a LUN, the storage does not know.
    fn is_managed(&self, _vdi: Uuid) -> bool {
        false
    }

    /// Tells the administrator something beside the outcome of the call; `why` is a sentence.
    fn notice(&self, _vdi: Uuid, _notice: Notice, _why: &str) {}

    /// Called before each named step of a change of several steps, so that a test can end the process there.
    fn step(&self, name: &'static str);

    /// How many have the VDI open by the toolstack's records, the caller that lets it go among them.
    fn holders(&self, _vdi: Uuid) -> usize {
        0
    }

    /// A session of the API for a plugin that works on this SR, or on none yet. It ends with the call at the latest.
    ///
    /// # Errors
    /// No session can be opened, or none is to be had here.
    fn api(&self, _sr: Option<Uuid>) -> Result<Box<dyn ApiSession>, ApiError> {
        Err(ApiError::internal("a plugin that calls the API is asked where there is none"))
    }

    /// The VDIs of an SR as their records say, or one of them.
    ///
    /// # Errors
    /// The store's.
    fn records(&self, _sr: Uuid, _vdi: Option<Uuid>) -> Result<Vec<VdiInfo>, ApiError> {
        Ok(Vec::new())
    }

    /// The sizes in an SR's record.
    ///
    /// # Errors
    /// It has none.
    fn sizes(&self, _sr: Uuid) -> Result<SrStat, ApiError> {
        Ok(SrStat::default())
    }
}

/// A session of the API that a plugin is given. It ends when this goes.
pub trait ApiSession: Send + Sync {
    /// Its reference.
    fn session(&self) -> &str;

    /// The reference of this host.
    fn host(&self) -> &str;
}

/// The protocol of a plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// A program that speaks XML-RPC, and the API.
    Smapiv1,
    /// Scripts that speak JSON.
    Smapiv3,
}

/// Whose a driver is that is not ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// How it is spoken to.
    pub protocol: Protocol,
    /// `SM.driver_filename`.
    pub file: String,
    /// `SM.vendor`.
    pub vendor: String,
    /// `SM.copyright`.
    pub copyright: String,
    /// `SM.version`.
    pub version: String,
    /// `SM.required_api_version`.
    pub required_api_version: String,
}

impl Origin {
    /// Whether it calls the API: SRs and VDIs have records before it works on them, and it looks secrets up itself.
    pub fn calls_api(&self) -> bool {
        self.protocol == Protocol::Smapiv1
    }
}

/// An SR to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewSr {
    /// `device_config`.
    pub config: Config,
    /// Bytes, 0 for all there is.
    pub size: u64,
    /// For storages that keep names.
    pub name_label: String,
    /// For storages that keep names.
    pub name_description: String,
}

/// What an administrator hears of a VDI although the call succeeds. In each case a list of changed blocks has too many
/// blocks, or is refused; none ever lacks one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Notice {
    /// The log of changed blocks was not complete: everything counts as changed in it.
    LogIncomplete,
    /// The log of changed blocks cannot be used: it is gone, and changed blocks are tracked no longer.
    LogGone,
    /// The snapshot is there, and is in no list of changed blocks.
    SnapshotUntracked,
    /// The VDI is larger, and changed blocks are tracked no longer.
    ResizeUntracked,
}

/// What a disk process opens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSpec {
    /// The images, leaf first.
    pub chain: ChainSpec,
    /// The log of changed blocks of a disk that is written, if they are tracked.
    pub log: Option<PathBuf>,
}

/// A disk process that has a VDI open.
pub trait LiveDisk: Send + Sync {
    /// Waits for what is in flight and closes the images; guests wait.
    ///
    /// # Errors
    /// The process does not answer; the disk then goes on.
    fn pause(&self) -> Result<(), ApiError>;

    /// Goes on with these images.
    ///
    /// # Errors
    /// They cannot be opened; the disk stays paused.
    fn resume(&self, disk: &OpenSpec) -> Result<(), ApiError>;

    /// Whether it can go on with a new leaf, and with a new log of changed blocks if so asked, without a pause. If so,
    /// no process takes the place of its own, until [`Self::swap_leaf`] or [`Self::resume`] has answered or this is
    /// dropped: what the name of the leaf leads to may change now.
    ///
    /// # Errors
    /// Another process is taking its place, and does not come to an end.
    fn hold(&self, _new_log: bool) -> Result<bool, ApiError> {
        Ok(false)
    }

    /// Goes on with these images without a pause: an empty child of its leaf that has taken over the leaf's name, the
    /// leaf under another name, and the images below as before. Afterwards nothing but the new leaf is open for
    /// writing. With `new_log` the log of `disk` is another than the one that it has open, which has got another name
    /// and is closed afterwards; every change is in the log of the leaf that it went to. Asked after [`Self::hold`].
    ///
    /// # Errors
    /// It does not answer: it may have gone on with them, or do so later.
    fn swap_leaf(&self, _disk: &OpenSpec, _new_log: bool) -> Result<LeafSwap, ApiError> {
        Ok(LeafSwap::Refused(ApiError::internal("this disk goes on with other images only after a pause")))
    }

    /// Ends its leaf at the byte `to` of its volume, which it knows to have `from` bytes, while guests use it: the
    /// volume may become so short then. Asked after [`Self::hold`].
    ///
    /// # Errors
    /// It does not answer, or its storage fails: the volume may be without a footer at its end, now or later.
    fn shorten(&self, _from: u64, _to: u64) -> Result<Shortened, ApiError> {
        Ok(Shortened::Refused(ApiError::internal("this disk keeps its volume as it is")))
    }

    /// Its volume has become longer and ends in its footer: it looks at once, and would so by itself after a while.
    fn look_for_room(&self) {}

    /// How the process has the images open.
    fn access(&self) -> Access {
        Access::ReadWrite
    }

    /// Makes the disk longer while guests use it.
    ///
    /// # Errors
    /// The image has no room for it; nothing changed.
    fn grow(&self, bytes: u64) -> Result<(), ApiError>;
}

/// What came of [`LiveDisk::swap_leaf`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeafSwap {
    /// The disk has the new images, or the process that takes its place opens these.
    Done,
    /// The disk goes on with the images of before.
    Refused(ApiError),
}

/// What came of [`LiveDisk::shorten`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shortened {
    /// The disk uses nothing behind that, and the footer is there alone.
    Done,
    /// The disk needs what is behind that, and goes on as before.
    Refused(ApiError),
}

/// What the driver is; makes the `SM` record. sm-layout.md sections 7 and 8, smapiv1.md.
#[derive(Debug)]
pub struct DriverInfo {
    /// `SR.type`, as `ext`.
    pub sr_type: &'static str,
    /// Name for people.
    pub name: &'static str,
    /// One sentence for people.
    pub description: &'static str,
    /// As `VDI_SNAPSHOT` or `VDI_RESET_ON_BOOT/2`.
    pub capabilities: &'static [&'static str],
    /// Keys of `device_config` with a sentence on each.
    pub configuration: &'static [(&'static str, &'static str)],
    /// Whether hosts can share it.
    pub is_shareable: bool,
}

/// One thing that a probe found (`probe_result`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProbeResult {
    /// A `device_config` that would reach it.
    pub configuration: Config,
    /// Whether that configuration is complete.
    pub complete: bool,
    /// The SR there, if there is one.
    pub sr: Option<(Uuid, SrStat)>,
    /// Anything else worth knowing.
    pub extra_info: BTreeMap<String, String>,
}

/// Answer of a probe in both shapes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProbeAnswer {
    /// What `SR.probe` answers; sm-layout.md section 9.
    pub xml: String,
    /// What `SR.probe_ext` answers.
    pub results: Vec<ProbeResult>,
}

/// Sizes of an SR, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrStat {
    /// Of the storage.
    pub physical_size: u64,
    /// Used of it.
    pub physical_utilisation: u64,
    /// Sum of the virtual sizes at the last scan.
    pub virtual_allocation: u64,
}

/// A VDI as the storage knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VdiInfo {
    /// Its UUID.
    pub uuid: Uuid,
    /// `VDI.location`.
    pub location: String,
    /// Bytes the guest sees.
    pub virtual_size: u64,
    /// Bytes it takes on the storage.
    pub physical_utilisation: u64,
    /// Whether it is a disk of its own; false for a base copy, which only carries others.
    pub managed: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The image it is based on.
    pub parent: Option<Uuid>,
    /// A name, where the storage knows one (an ISO's file name); the database keeps its own otherwise.
    pub name_label: Option<String>,
    /// `vdi_type`, `vhd-parent`, `image-format` ...; sm-layout.md section 4.
    pub sm_config: BTreeMap<String, String>,
    /// Whether changed blocks are tracked.
    #[serde(default)]
    pub cbt_enabled: bool,
    /// Whether the log of changed blocks is all that is left of it.
    #[serde(default)]
    pub is_metadata: bool,
    /// What else a storage knows of it that keeps names; a record that is there already says it better.
    #[serde(default)]
    pub told: Option<Box<Told>>,
}

/// What a storage that keeps names knows of a VDI beside its name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// `VDI.name_description`.
    pub name_description: String,
    /// The VDI that it is a snapshot of, nil where that is not known; none where it is no snapshot.
    pub snapshot_of: Option<Uuid>,
    /// When it was taken, as `20240101T00:00:00Z`.
    pub snapshot_time: String,
    /// `VDI.type`, as `user`.
    pub kind: String,
}

impl VdiInfo {
    /// Whether it is a LUN of an array: it is there before a client has asked for it, and remains afterwards. Its
    /// record alone says whether a client has it.
    pub fn is_lun(&self) -> bool {
        self.sm_config.contains_key("LUNid")
    }
}

/// A VDI to be made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NewVdi {
    /// Its UUID, chosen by the caller.
    pub uuid: Uuid,
    /// Bytes; the driver may round up.
    pub virtual_size: u64,
    /// As `type=raw`, `image-format=vhd`; unknown keys are kept.
    pub sm_config: BTreeMap<String, String>,
    /// For storages that keep names.
    pub name_label: String,
    /// For storages that keep names.
    pub name_description: String,
}

/// Ways to split a VDI in two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForkKind {
    /// A snapshot: read only by agreement, knows what it is of.
    Snapshot,
    /// A disk of its own.
    Clone,
    /// What was written so far becomes a base copy and nothing new is made (`driver_params` `type=single`).
    Single,
}

/// What a fork made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fork {
    /// The new VDI; for [`ForkKind::Single`] the VDI itself.
    pub made: VdiInfo,
    /// The VDI that was forked, as it is now.
    pub origin: VdiInfo,
    /// The base copy below both, unless none was needed.
    pub base: Option<VdiInfo>,
}

/// A merge of an image into its parent; see [`crate::collect`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// The image that goes.
    pub image: Uuid,
    /// The image it is based on, which nothing else is based on.
    pub parent: Uuid,
    /// VDIs that the caller holds: nothing opens, closes or changes them meanwhile.
    pub held: Vec<Uuid>,
}

/// What a merge takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeCost {
    /// Bytes by which the parent grows, at most.
    pub needs: u64,
    /// Bytes that are copied, at most.
    pub copies: u64,
    /// Whether [`Sr::grow_base`] comes before it.
    pub must_grow: bool,
}

/// What a merge changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Merged {
    /// VDIs as they are now.
    pub changed: Vec<VdiInfo>,
    /// Images that are no more.
    pub gone: Vec<Uuid>,
}

/// How an image lies on its storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fragmentation {
    /// Bytes of a block; 0 for a raw image, which has none.
    pub block_len: u64,
    /// Blocks that the image has.
    pub blocks: u64,
    /// Runs of blocks that follow each other on the disk and in the file: 1 where all are in order.
    pub runs: u64,
    /// The least number of runs that there can be: one for each gap on the disk that has no blocks, and one more.
    pub runs_min: u64,
    /// Pieces of the file on its file system; none where that does not tell.
    pub extents: Option<u64>,
    /// Bytes of the file.
    pub file_len: u64,
}

/// Something that is wrong with a file of an SR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Oddity {
    /// What is wrong.
    pub kind: OddityKind,
    /// The image, if it is about one.
    pub image: Option<Uuid>,
    /// The name of the file in the SR's directory.
    pub file: String,
    /// What was seen, for people.
    pub detail: String,
}

/// What can be wrong with a file of an SR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OddityKind {
    /// `vhd-util check` refuses the image.
    ImageDamaged,
    /// The image it is based on is not there.
    ParentMissing,
    /// The image it is based on is another one than when it was made.
    ParentReplaced,
    /// Parents lead back to the image itself.
    ParentLoop,
    /// The journal of a change that was broken off.
    JournalLeft,
    /// The same, of another storage manager.
    JournalForeign,
    /// A file that did not get its name before its process ended.
    FileUnfinished,
    /// A base copy that carries nothing.
    BaseUnused,
    /// Something that is no part of this daemon keeps the SR's lock: nothing else was looked at.
    LockKept,
    /// A host that counts as dead has the VDI open.
    HeldByDead,
}

/// A VDI in use whose volume is too short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomWanted {
    /// Which.
    pub vdi: Uuid,
    /// Bytes that its volume shall have at least. A state: asking twice is asking once.
    pub len: u64,
}

/// What came of [`Sr::make_room`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomMade {
    /// Those whose volumes are longer now.
    pub longer: Vec<VdiInfo>,
    /// Those that are not, and why; not those that the SR has no room for.
    pub refused: Vec<(Uuid, ApiError)>,
    /// The SR had no room at all for one of them.
    pub is_full: bool,
    /// One of them did not get all that was wanted of it.
    pub is_short: bool,
    /// They got what was wanted at most, and nothing ahead: there is little left.
    #[serde(default)]
    pub is_tight: bool,
}

/// A VDI in use whose volume is longer than its disk needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomSpare {
    /// Which.
    pub vdi: Uuid,
    /// Bytes of its volume that are enough, with what the disk keeps ahead.
    pub enough: u64,
}

/// What came of [`Sr::take_room`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomTaken {
    /// Those whose volumes are shorter now.
    pub shorter: Vec<VdiInfo>,
    /// Those that should be, and why they are not.
    pub refused: Vec<(Uuid, ApiError)>,
}

/// A type of SR.
pub trait SrDriver: Send + Sync {
    /// What it is.
    fn info(&self) -> &'static DriverInfo;

    /// Looks for SRs, or for what is missing in `config`.
    ///
    /// # Errors
    /// `SR_BACKEND_FAILURE_<n>`; an incomplete configuration answers its document as the third parameter.
    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError>;

    /// Makes an SR: formats the device, makes the directory. It is not attached afterwards. `size` in bytes, 0 for
    /// all there is.
    ///
    /// # Errors
    /// `SR_BACKEND_FAILURE_<n>`; what was made so far is undone.
    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, size: u64) -> Result<(), ApiError>;

    /// Mounts it and finishes or undoes what was interrupted there.
    ///
    /// # Errors
    /// `SR_BACKEND_FAILURE_<n>`; nothing stays mounted.
    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError>;

    /// What a worker knows it by: the type, and for a plugin all that it is made of.
    fn key(&self) -> String {
        self.info().sr_type.to_owned()
    }

    /// Whose it is, if it is not ours.
    fn origin(&self) -> Option<&'static Origin> {
        None
    }

    /// [`Self::create`]; answers the `device_config` that the SR has from then on, if it is another one.
    ///
    /// # Errors
    /// As there.
    fn make(&self, ctx: &dyn Ctx, sr: Uuid, new: &NewSr) -> Result<Option<Config>, ApiError> {
        self.create(ctx, sr, &new.config, new.size).map(|()| None)
    }
}

/// An attached SR. Methods may be called from several threads; one that changes the storage's metadata takes the
/// SR's lock itself.
pub trait Sr: Send + Sync {
    /// Sizes.
    ///
    /// # Errors
    /// The storage does not answer.
    fn stat(&self, ctx: &dyn Ctx) -> Result<SrStat, ApiError>;

    /// Every VDI that lies there, base copies too, after what was left half done has been put in order.
    ///
    /// # Errors
    /// The storage does not answer. A damaged image is no error: it is left out of nothing, its `sm_config` has
    /// `damaged` with the cause.
    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError>;

    /// As [`Sr::scan`], for a diagnosis: what was left half done stays as it is, and what a dead host had open too.
    ///
    /// # Errors
    /// As those of a scan.
    fn look(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        self.scan(ctx)
    }

    /// One VDI as it is now.
    ///
    /// # Errors
    /// `VDI_MISSING`, or the storage does not answer.
    fn vdi(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError>;

    /// Makes one.
    ///
    /// # Errors
    /// Too large, no room, unknown format; nothing is left.
    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError>;

    /// Takes in an image that lies at `location` under the name `vdi`.
    ///
    /// # Errors
    /// It is not there, or is no image.
    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError>;

    /// Removes a VDI that is not in use.
    ///
    /// # Errors
    /// It is not there.
    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError>;

    /// Makes it longer, also while it is live.
    ///
    /// # Errors
    /// Smaller than it is, too large, no room.
    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError>;

    /// Splits it in two, also while it is live. The VDI keeps its UUID, the new one is `new`; the base copy's UUID
    /// is the driver's choice.
    ///
    /// # Errors
    /// Backend 109 when the chain is as long as it may be, no room; the VDI is as it was.
    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid, kind: ForkKind) -> Result<Fork, ApiError>;

    /// Copies contents: what `from` reads as, or what it holds that `base` does not, into the VDI `into` of this SR,
    /// which is not in use. Progress and cancel by `ctx`.
    ///
    /// # Errors
    /// No room, a storage that fails; `into` is then incomplete.
    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError>;

    /// Sends the contents of a disk as a stream: on the socket come its length and a tag, eight bytes each, the lowest
    /// byte first, then the stream from `what.start` on. The tag is another one where the contents may be others. The
    /// disk need not lie in this SR; nothing writes to it meanwhile.
    ///
    /// # Errors
    /// Before the length: the stream cannot be made. Later: a storage that fails, or a reader that has gone away.
    fn export(&self, ctx: &dyn Ctx, what: &Export, to: OwnedFd) -> Result<(), ApiError> {
        transfer::export(ctx, what, to)
    }

    /// Receives a stream into a VDI of this SR, which is not in use. Progress and cancel by `ctx`.
    ///
    /// # Errors
    /// What came is no such stream, or not all of one; no room, a storage that fails. The VDI then holds a part of it.
    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError>;

    /// Makes it ready for a disk process: the images to open, leaf first.
    ///
    /// # Errors
    /// It is not there, or is damaged.
    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError>;

    /// Undoes one [`Self::activate`]; one that was not there, as after a restart, is fine.
    ///
    /// # Errors
    /// The storage does not answer.
    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError>;

    /// Starts or ends the tracking of changed blocks, also while the VDI is live.
    ///
    /// # Errors
    /// 66 for a raw image, 457, 458; the VDI is as it was.
    fn track_changes(&self, _ctx: &dyn Ctx, _vdi: Uuid, _wanted: bool) -> Result<VdiInfo, ApiError> {
        Err(cannot_track())
    }

    /// Removes the contents of a VDI that is not in use and keeps its log of changed blocks; repeating it is fine.
    ///
    /// # Errors
    /// It has no log, or is not there.
    fn destroy_data(&self, _ctx: &dyn Ctx, _vdi: Uuid) -> Result<VdiInfo, ApiError> {
        Err(cannot_track())
    }

    /// The blocks of 64 KiB that changed between a VDI and a later one: base64 of a bit for each, the first block in
    /// the highest bit of the first byte. More than changed may be said, never less.
    ///
    /// # Errors
    /// 459, 460 where the two have nothing to do with each other; `VDI_IN_USE` while the later one is written.
    fn changed_blocks(&self, _ctx: &dyn Ctx, _from: Uuid, _to: Uuid) -> Result<String, ApiError> {
        Err(cannot_track())
    }

    /// Makes the volumes of disks in use longer, of which each goes on meanwhile. All that one host or several want of
    /// an SR goes through one caller at a time: the worker that has the SR attached for changes.
    ///
    /// # Errors
    /// The storage does not answer; what was done is in order.
    fn make_room(&self, _ctx: &dyn Ctx, _wanted: &[RoomWanted]) -> Result<RoomMade, ApiError> {
        Err(crate::errors::fail(38, "the VDIs of this type of SR have all of their space"))
    }

    /// Makes the volumes of VDIs in use shorter, as far as that is worth a change: a VDI that has all of its space by
    /// its kind keeps it. Their disks go on meanwhile.
    ///
    /// # Errors
    /// The storage does not answer; what was done is in order.
    fn take_room(&self, _ctx: &dyn Ctx, _spare: &[RoomSpare]) -> Result<RoomTaken, ApiError> {
        Ok(RoomTaken::default())
    }

    /// Removes base copies that carry nothing; answers which.
    ///
    /// # Errors
    /// The storage does not answer.
    fn collect_garbage(&self, _ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        Err(cannot_merge())
    }

    /// What a merge takes. `held` is of no account.
    ///
    /// # Errors
    /// 46: the image cannot go into its parent, and why.
    fn merge_cost(&self, _ctx: &dyn Ctx, _merge: &Merge) -> Result<MergeCost, ApiError> {
        Err(cannot_merge())
    }

    /// Makes a parent whose block table has no room for the size of the image as large as that. Disks above wait.
    ///
    /// # Errors
    /// As [`Self::relink`]; no room.
    fn grow_base(&self, _ctx: &dyn Ctx, _merge: &Merge) -> Result<(), ApiError> {
        Err(cannot_merge())
    }

    /// Copies what a base copy holds into its parent, at most `rate` bytes a second unless that is 0, while disks above
    /// are used. Nothing that they read changes. `held` is of no account. Progress and cancel by `ctx`. Repeating it
    /// right away does nothing.
    ///
    /// # Errors
    /// 46: the image cannot go into its parent, and why; 44: no room. Both images are whole.
    fn merge(&self, _ctx: &dyn Ctx, _merge: &Merge, _rate: u64) -> Result<(), ApiError> {
        Err(cannot_merge())
    }

    /// Takes a base copy out of its chains once [`Self::merge`] is done: its children come to stand on its parent, and
    /// it goes. Running disks of `held` wait for a moment.
    ///
    /// # Errors
    /// `VDI_IN_USE` where a disk above the image is not `held`, or something reads it that is no running disk; 46: the
    /// image was not copied by this driver, or has changed since: merge again.
    fn relink(&self, _ctx: &dyn Ctx, _merge: &Merge) -> Result<Merged, ApiError> {
        Err(cannot_merge())
    }

    /// Merges a disk that is `held` and holds little into its parent, which takes its name. A running disk waits.
    ///
    /// # Errors
    /// As [`Self::relink`]; 46 where it holds too much for that: fork it first.
    fn merge_leaf(&self, _ctx: &dyn Ctx, _merge: &Merge) -> Result<Merged, ApiError> {
        Err(cannot_merge())
    }

    /// What is wrong with the files of this SR, found without changing any. Images that a running disk writes are not
    /// read. Progress and cancel by `ctx`.
    ///
    /// # Errors
    /// The storage does not answer; `TASK_CANCELLED`.
    fn inspect(&self, _ctx: &dyn Ctx) -> Result<Vec<Oddity>, ApiError> {
        Ok(Vec::new())
    }

    /// How long an operation on a VDI may be silent before it fails; none where nothing ends it.
    fn time_limit(&self) -> Option<Duration> {
        None
    }

    /// How the blocks of a VDI's own image lie in its file, and the file on its file system. That of a disk in use is
    /// as it was written last.
    ///
    /// # Errors
    /// It is not there, or is damaged.
    fn fragmentation(&self, _ctx: &dyn Ctx, _vdi: Uuid) -> Result<Fragmentation, ApiError> {
        Err(crate::errors::fail(38, "this type of SR has no images in files"))
    }

    /// The image that a disk went on with which had this one open, as the disk process noted it durably before it
    /// wrote there: the target of a mirror. None while no disk has left it.
    ///
    /// # Errors
    /// It is not there, the note cannot be read, or names no image of an SR.
    fn continued(&self, _ctx: &dyn Ctx, _vdi: Uuid) -> Result<Option<Uuid>, ApiError> {
        Ok(None)
    }

    /// Makes VDIs that are made from now on thin, with the sizes of these keys of `device_config`, unless they ask for
    /// something else; those that are there stay as they are. Doing it twice is doing it once.
    ///
    /// # Errors
    /// `SR_OPERATION_NOT_SUPPORTED`: its VDIs have no such choice; 1 for a size that is none; the storage's.
    fn make_thin(&self, _ctx: &dyn Ctx, _config: &Config) -> Result<(), ApiError> {
        Err(ApiError::new("SR_OPERATION_NOT_SUPPORTED", [""]))
    }

    /// Tells a storage that keeps names what the VDI is called now.
    ///
    /// # Errors
    /// The storage's; it has the names of before, or some of the new ones.
    fn rename(&self, _ctx: &dyn Ctx, _vdi: Uuid, _name: &str, _description: &str) -> Result<(), ApiError> {
        Ok(())
    }

    /// Unmounts it. Nothing of it is active.
    ///
    /// # Errors
    /// It is in use; it stays attached and is given back.
    fn detach(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)>;

    /// Unmounts it and wipes what says that an SR is there. No managed VDI is left in it.
    ///
    /// # Errors
    /// Not empty, or in use; it stays attached and is given back.
    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)>;
}

fn cannot_merge() -> ApiError {
    crate::errors::fail(38, "this type of SR does not merge images")
}

fn cannot_track() -> ApiError {
    crate::errors::fail(38, "this type of SR does not track changed blocks")
}
