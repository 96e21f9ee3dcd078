//! Real clients against the running process.

mod bad_input;
mod bench;
mod block_device;
mod cli;
mod control;
mod crash;
mod full_disk;
mod images;
mod instruments;
mod load;
mod mirror;
mod nbd_hostile;
mod nbd_protocol;
mod nbd_tools;
mod vhd_tools;

const MIB: u64 = 1 << 20;
