//! VMs and their disks through the toolstack, as clients use them.

mod diagnose;
mod groups;
mod guest;
mod kill;
mod likeness;
mod nic;
mod plug;
mod pretend;
mod real;
mod repairs;
mod rig;
mod storm;
mod suspend;
mod vbd;
mod vm;
mod xen;
