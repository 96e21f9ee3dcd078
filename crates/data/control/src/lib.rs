//! The tapdisk control protocol and our own: messages, client, server, finding and starting disk processes.
//!
//! ```text
//!   tap-ctl, sm, xenopsd ──544-byte messages──┐                      ┌─▶ DiskHost (the disk process: attach, open,
//!                                             ├─▶ /run/…/ctl<pid> ──▶│   pause, resume, fronts, stats …)
//!   tapio disk, tapiod ───lines of JSON───────┘       serve()        └─▶ one exclusive operation at a time,
//!                                                                        PID, LIST and STATS beside it
//! ```
//!
//! Both protocols share one socket: a request that begins with `{` is a line of ours, anything else is tapdisk's
//! structure, whose type numbers never look like that.
//!
//! | module | holds |
//! |---|---|
//! | `message` | tapdisk's structure, byte for byte, both directions; pure functions |
//! | `command` | our commands: what each says, what it answers, and that the disk process handles it |
//! | `own` | lines of JSON around commands and answers |
//! | `paths`, `minor` | where sockets and markers are; giving out minor numbers |
//! | `client`, `own_client`, `spawn`, `discover` | the asking side |
//! | `host`, `server` | the answering side, over [`DiskHost`] and [`command::Handle`] |
//! | `blkif` | the ring of a Xen guest: what is asked, offered and reported |
//! | `stats_text` | the statistics line in tapdisk's order and spacing |
//! | `local_devices` | which kinds of local device work here, and what dead processes left of them |
//! | `room` | volumes that become longer when a disk asks |
//! | `notify` | telling the service manager how a process stands |
//! | `program` | the options of the disk program as data, for its parser and its manual page |
//!
//! This crate must never depend on the data path: it only names what a disk can be asked to do.

mod blkif;
mod client;
pub mod command;
mod discover;
mod disk_info;
mod disk_report;
mod error;
mod front;
mod host;
mod image_source;
mod images;
mod key;
mod limits;
mod local_devices;
mod message;
mod minor;
mod mirror;
pub mod notify;
mod own;
mod own_client;
mod paths;
mod plain_path;
mod polling;
pub mod program;
mod room;
mod server;
mod share;
mod socket;
mod spawn;
mod stats_text;
mod tls;
mod trace;

pub use blkif::{
    BLKIF_INDIRECT_DEFAULT, BLKIF_INDIRECT_MAX, BLKIF_ORDER_MAX, BLKIF_QUEUES_MAX, BlkifCounts, BlkifFront,
    BlkifOffer, BlkifProtocol, BlkifQueue, BlkifReport, BlkifRequest, BlkifRing, RingStart,
};
pub use client::{Client, OpenArguments, ResumeArguments};
pub use discover::{ListRow, Process, ProcessState, list, list_process, processes, remove_stale_sockets};
pub use disk_info::DiskInfo;
pub use disk_report::{DiskEntry, DiskReport, DiskReports, FrontEntry, ImageReport, RequestReport, VbdState};
pub use error::{ControlError, Errno, Result};
pub use front::{Front, NbdGuard};
pub use host::DiskHost;
pub use image_source::ImageSource;
pub use images::{JobReport, JobStatus, SnapshotReport};
pub use key::Key;
pub use limits::{LimitsReport, PoolShare, PoolSpec};
pub use local_devices::{LocalDeviceKind, clean_local_devices, local_device_kinds, print_local_devices};
pub use message::{
    Blkif, Body, CodecError, Image, List, MESSAGE_LEN, Message, MessageKind, PATH_LEN, Params, Response,
    Stat, decode_log_path, encode_log_path, flags, key_len_is_valid,
};
pub use minor::{MINOR_MAX, MarkerLock, MinorDir};
pub use mirror::{MirrorCopy, MirrorPivoted, MirrorReport, MirrorState};
pub use own::{
    ErrorBody, FEATURES, Hello, LINE_LEN_MAX, PROTOCOL_VERSION, ROOM, Reply, Request, SWAP_LEAF, SWAP_LOG,
    TRANSFERS, parse_request,
};
pub use own_client::OwnClient;
pub use paths::RunDir;
pub use polling::Polling;
pub use room::{BELL_LEN_MAX, ROOM_SOCKET_VARIABLE, RoomBell, RoomReport};
#[doc(hidden)]
pub use server::converse_once;
pub use server::{Ended, Limits, serve};
pub use share::{ShareReport, ShareSpec};
pub use spawn::{SpawnOptions, disk_program, spawn};
pub use stats_text::{DriverType, ImageStats, VbdStats, XenbusStats, stats_array_text, stats_text};
pub use tls::{TlsMode, TlsSettings};
pub use trace::TraceReport;
