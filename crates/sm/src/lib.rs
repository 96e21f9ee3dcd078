//! Storage repositories.
//!
//! A driver ([`SrDriver`]) knows one type of SR; an attached one is an [`Sr`]. Both are synchronous, because mounts
//! and renames block; whoever runs them has a pool of threads. They keep what must survive on the SR itself, in the
//! layout of XenServer's storage manager, and know neither the database of objects nor its clients.

mod traits;

pub use traits::{
    Config, Ctx, DriverInfo, Fork, ForkKind, LiveDisk, NewVdi, ProbeAnswer, ProbeResult, Sr, SrDriver,
    SrStat, VdiInfo,
};
