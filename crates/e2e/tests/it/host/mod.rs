//! Real clients against the running process.

mod api;
mod bad_input;
mod bench;
mod bench_toolstack;
mod block_device;
mod cli;
mod control;
mod crash;
mod encrypted;
mod full_disk;
mod grow;
mod images;
mod instruments;
mod limits;
mod load;
mod local_device;
mod local_file;
mod memory;
mod mirror;
mod nbd_client;
mod nbd_hostile;
mod nbd_protocol;
mod nbd_tools;
mod proof;
mod restart;
mod sandbox;
mod service;
mod storage;
mod storage_faults;
mod trim;
mod vhd_tools;
mod xe;

const MIB: u64 = 1 << 20;
