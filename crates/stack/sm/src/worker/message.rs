//! What daemon and worker say to each other.

use std::fmt;

use serde::{Deserialize, Serialize};
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use crate::traits::{
    Config, Fork, ForkKind, Fragmentation, LeafSwap, Merge, MergeCost, NewSr, NewVdi, Notice, OpenSpec,
    ProbeAnswer, RoomMade, RoomSpare, RoomTaken, RoomWanted, Shortened, SrStat, VdiInfo,
};
use crate::transfer::{Export, Import};

/// What a worker is asked to do: the methods of [`crate::SrDriver`] and [`crate::Sr`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// `SrDriver::probe`.
    Probe { driver: String, config: Config },
    /// `SrDriver::make`.
    Make { driver: String, sr: Uuid, new: NewSr },
    /// `SrDriver::attach`: the SR that all the following are about.
    Attach { driver: String, sr: Uuid, config: Config },
    /// `Sr::stat`.
    Stat,
    /// `Sr::scan`: the images come before the answer.
    Scan,
    /// `Sr::look`: as a scan.
    Look,
    /// `Sr::vdi`.
    Vdi { vdi: Uuid },
    /// `Sr::create`.
    Create(NewVdi),
    /// `Sr::introduce`.
    Introduce { vdi: Uuid, location: String },
    /// `Sr::destroy`.
    Destroy { vdi: Uuid },
    /// `Sr::resize`.
    Resize { vdi: Uuid, bytes: u64 },
    /// `Sr::fork`.
    Fork { vdi: Uuid, new: Uuid, kind: ForkKind },
    /// `Sr::fill`.
    Fill { into: Uuid, from: ChainSpec, base: Option<ChainSpec> },
    /// `Sr::export`; the socket came with the link.
    Export(Export),
    /// `Sr::import`; the same.
    Import(Import),
    /// `Sr::make_thin`.
    MakeThin { config: Config },
    /// `Sr::rename`.
    Rename { vdi: Uuid, name: String, description: String },
    /// `Sr::activate`.
    Activate { vdi: Uuid, access: Access },
    /// `Sr::deactivate`.
    Deactivate { vdi: Uuid },
    /// `Sr::track_changes`.
    TrackChanges { vdi: Uuid, wanted: bool },
    /// `Sr::destroy_data`.
    DestroyData { vdi: Uuid },
    /// `Sr::changed_blocks`: the text comes before the answer.
    ChangedBlocks { from: Uuid, to: Uuid },
    /// `Sr::collect_garbage`.
    CollectGarbage,
    /// `Sr::make_room`.
    MakeRoom(Vec<RoomWanted>),
    /// `Sr::take_room`.
    TakeRoom(Vec<RoomSpare>),
    /// `Sr::merge_cost`.
    MergeCost(Merge),
    /// `Sr::grow_base`.
    GrowBase(Merge),
    /// `Sr::merge`.
    Merge { merge: Merge, rate: u64 },
    /// `Sr::relink`: what it changed comes before the answer.
    Relink(Merge),
    /// `Sr::merge_leaf`: the same.
    MergeLeaf(Merge),
    /// `Sr::inspect`: the oddities, as JSON, come before the answer.
    Inspect,
    /// `Sr::fragmentation`.
    Fragmentation { vdi: Uuid },
    /// `Sr::continued`.
    Continued { vdi: Uuid },
    /// `Sr::detach`.
    Detach,
    /// `Sr::erase`.
    Erase,
}

impl Task {
    /// The operation as clients and logs know it.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Probe { .. } => "probe",
            Self::Make { .. } => "create SR",
            Self::Attach { .. } => "attach",
            Self::Stat => "stat",
            Self::Scan => "scan",
            Self::Look => "look at the SR",
            Self::Vdi { .. } => "look at a VDI",
            Self::Create(_) => "create VDI",
            Self::Introduce { .. } => "introduce VDI",
            Self::Destroy { .. } => "destroy VDI",
            Self::Resize { .. } => "resize",
            Self::Fork { .. } => "snapshot or clone",
            Self::Fill { .. } => "copy",
            Self::Export(_) => "export",
            Self::Import(_) => "import",
            Self::MakeThin { .. } => "make thin",
            Self::Rename { .. } => "rename",
            Self::Activate { .. } => "activate",
            Self::Deactivate { .. } => "deactivate",
            Self::TrackChanges { .. } => "track changes",
            Self::DestroyData { .. } => "destroy data",
            Self::ChangedBlocks { .. } => "list changed blocks",
            Self::CollectGarbage => "remove base copies",
            Self::MakeRoom(_) => "make room for disks",
            Self::TakeRoom(_) => "take room back from disks",
            Self::MergeCost(_) => "look at a merge",
            Self::GrowBase(_) => "make a base copy larger",
            Self::Merge { .. } => "merge",
            Self::Relink(_) => "relink",
            Self::MergeLeaf(_) => "merge a disk",
            Self::Inspect => "inspect",
            Self::Fragmentation { .. } => "look how an image lies",
            Self::Continued { .. } => "look for what continues a VDI",
            Self::Detach => "detach",
            Self::Erase => "erase",
        }
    }
}

impl fmt::Debug for Task {
    /// The name alone: a configuration may hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a driver asks about a running disk: [`crate::Ctx::live`] and [`crate::LiveDisk`]. A disk has the number that
/// the answer to `Live` gave it, as long as the call lasts.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Question {
    /// The disk that has the VDI open.
    Live { vdi: Uuid },
    /// Whether a client has the VDI.
    Managed { vdi: Uuid },
    /// Its requests end, its images are closed.
    Pause { disk: usize },
    /// It goes on with these images.
    Resume { disk: usize, with: OpenSpec },
    /// Whether its leaf can be swapped; what its names lead to may change then.
    Hold { disk: usize, new_log: bool },
    /// Its leaf is swapped.
    SwapLeaf { disk: usize, with: OpenSpec, new_log: bool },
    /// Its leaf ends sooner.
    Shorten { disk: usize, from: u64, to: u64 },
    /// Its volume is longer.
    LookForRoom { disk: usize },
    /// How it has them open.
    Access { disk: usize },
    /// It becomes longer.
    Grow { disk: usize, bytes: u64 },
    /// How many have a VDI open.
    Holders { vdi: Uuid },
    /// A session of the API for a plugin.
    Session { sr: Option<Uuid> },
    /// VDIs as their records say, after as many as are known already.
    Records { sr: Uuid, vdi: Option<Uuid>, after: usize },
    /// Sizes of an SR as its record says.
    Sizes { sr: Uuid },
}

/// What the daemon answers to a question.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// The disk's number, if there is one.
    Live(Option<usize>),
    /// How it has its images open.
    Access(Access),
    /// Whether a client has the VDI.
    Managed(bool),
    /// Done, or not.
    Done(Result<(), ApiError>),
    /// Whether its leaf can be swapped.
    Held(Result<bool, ApiError>),
    /// What came of that.
    Swapped(Result<LeafSwap, ApiError>),
    /// What came of that.
    Shortened(Result<Shortened, ApiError>),
    /// How many.
    Count(usize),
    /// The references of the session and of this host.
    Session(Result<(String, String), ApiError>),
    /// Some of them; none: that was all.
    Records(Result<Vec<VdiInfo>, ApiError>),
    /// Sizes.
    Sizes(Result<SrStat, ApiError>),
}

/// From daemon to worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToWorker {
    /// A call begins.
    Begin(Task),
    /// The caller of this call wants it to stop.
    Cancel,
    /// To a question.
    Reply(Reply),
}

/// What a call answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It is done.
    Nothing,
    /// Of a probe.
    Probe(ProbeAnswer),
    /// The `device_config` of an SR that was made, if it is another one.
    Config(Option<Config>),
    /// Sizes.
    Stat(SrStat),
    /// A VDI.
    Vdi(VdiInfo),
    /// What a snapshot or a clone made.
    Fork(Box<Fork>),
    /// Images to open.
    Disk(OpenSpec),
    /// Text, which came before in pieces.
    Text(String),
    /// Images that are no more.
    Gone(Vec<Uuid>),
    /// Room that was made.
    Room(RoomMade),
    /// Room that was taken back.
    RoomTaken(RoomTaken),
    /// What a merge takes.
    Cost(MergeCost),
    /// How an image lies on its storage.
    Fragmentation(Fragmentation),
    /// The image that continues another.
    Continued(Option<Uuid>),
}

/// From worker to daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromWorker {
    /// How far the call is, 0 to 1.
    Progress(f64),
    /// About a running disk; the worker waits for the reply.
    Ask(Question),
    /// For the administrator.
    Notice { vdi: Uuid, notice: Notice, why: String },
    /// Some of the images of a scan, or of what a merge changed.
    Images(Vec<VdiInfo>),
    /// Some of a text.
    Text(String),
    /// The call is over.
    Done(Result<Answer, ApiError>),
}
