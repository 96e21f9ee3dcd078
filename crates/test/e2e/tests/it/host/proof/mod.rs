//! The toolstack as a whole: what products do with it, over the network, with real disk processes. The stories are
//! programs of Python's in `tests/python`, told by `XenAPI` over XML-RPC and by a client of JSON-RPC alike.

mod backup;
mod commands;
mod exports;
mod failures;
mod objects;
mod storage;

use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_e2e::disk::text;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_e2e::world::World;
use tapio_e2e::{needs, needs_python_xenapi};

/// A loop device over a sparse file; given back when dropped.
struct Loop {
    device: PathBuf,
}

impl Loop {
    /// None, and a line about it, where there are none to be had.
    fn new(scratch: &Scratch, len: u64) -> Option<Self> {
        let file = scratch.raw_image("device.raw", len);
        let made = run(Command::new("losetup").args(["--find", "--show"]).arg(file));
        if !made.status.success() {
            skip("needs loop devices");
            return None;
        }
        Some(Self { device: PathBuf::from(made.stdout.trim()) })
    }

    fn path(&self) -> &Path {
        &self.device
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run(Command::new("losetup").arg("-d").arg(&self.device));
    }
}

/// The whole life of SRs of files, and of ext4 where there are loop devices.
fn life(client: &str) {
    let world = World::new();
    let scratch = Scratch::on_disk();
    let device = Loop::new(&scratch, 512 << 20);
    let mut args = vec![client, text(scratch.path())];
    args.extend(device.as_ref().map(|device| text(device.path())));
    world.story("life.py", &args);
    world.finish();
}

#[test]
fn a_whole_life_by_pythons_client() {
    needs_python_xenapi!(_wheel);
    life("xml");
}

#[test]
fn a_whole_life_by_json_rpc() {
    needs!("python3");
    life("json");
}
