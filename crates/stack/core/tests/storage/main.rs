//! SRs, PBDs and VDIs through the toolstack, as clients use them, on real files.

mod care;
mod cbt;
mod collect;
mod errors;
mod faulty;
mod kill;
mod live;
mod many;
mod metrics;
mod relocate;
mod replica;
mod rig;
mod sharing;
mod sr;
mod store;
mod vdi;
