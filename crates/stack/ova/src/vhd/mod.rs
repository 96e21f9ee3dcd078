//! VHDs in a package, as XenServer and Hyper-V put them there.

mod read;
mod write;

pub(crate) use read::Vhd;
pub(crate) use write::VhdWriter;
