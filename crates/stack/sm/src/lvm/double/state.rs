//! What LVM's metadata say.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::loops::Loop;

/// The first byte of the extents on the device.
pub(super) const FIRST: u64 = 1 << 20;
/// Bytes that one volume may have.
pub(super) const PLACE: u64 = 64 << 20;
/// Places for volumes.
pub(super) const PLACES: u64 = 32;
const FILE: &str = "state";

/// The first byte of a place on the device.
pub(super) const fn start(place: u64) -> u64 {
    FIRST + place * PLACE
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct State {
    /// Bytes that all volumes may have together.
    pub(super) room: u64,
    /// LVM's UUID of the device, as the group knows it; none without LVM's mark.
    pub(super) mark: Option<String>,
    pub(super) group: Option<Group>,
    /// The loop device of all.
    pub(super) whole: Option<Loop>,
    /// Loop devices over places. They stay: a volume that is not reachable has no name.
    pub(super) places: BTreeMap<u64, Place>,
}

/// The loop device over a place, and how it is set.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) device: Loop,
    len: u64,
    is_writable: bool,
}

impl Place {
    pub(super) const fn new(device: Loop, len: u64) -> Self {
        Self { device, len, is_writable: true }
    }

    /// Makes it what a volume is. The kernel takes its time for each change.
    pub(super) fn set(&mut self, volume: &Volume) -> io::Result<()> {
        if self.len != volume.len {
            self.device.set_len(start(volume.place), volume.len)?;
            self.len = volume.len;
        }
        if self.is_writable != volume.is_writable {
            self.device.set_writable(volume.is_writable)?;
            self.is_writable = volume.is_writable;
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) tags: Vec<String>,
    pub(super) volumes: Vec<Volume>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Volume {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) place: u64,
    pub(super) len: u64,
    pub(super) tags: Vec<String>,
    pub(super) is_writable: bool,
    pub(super) is_active: bool,
}

impl State {
    pub(super) fn read(dir: &Path) -> io::Result<Self> {
        serde_json::from_str(&fs::read_to_string(dir.join(FILE))?).map_err(io::Error::other)
    }

    /// All at once: a kill leaves the old or the new.
    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        let fresh = dir.join("state.new");
        fs::write(&fresh, serde_json::to_string(self)?)?;
        fs::rename(fresh, dir.join(FILE))
    }

    pub(super) fn loops(&self) -> impl Iterator<Item = Loop> + '_ {
        self.places.values().map(|place| place.device).chain(self.whole)
    }

    /// Bytes that no volume has.
    pub(super) fn free(&self) -> u64 {
        let volumes = self.group.iter().flat_map(|group| &group.volumes);
        self.room.saturating_sub(volumes.map(|volume| volume.len).sum())
    }

    /// A place that is free: the one that was used last is used first, so that volumes hold what others left.
    pub(super) fn free_place(&self) -> Option<u64> {
        let is_free = |place: &u64| {
            self.group.iter().flat_map(|group| &group.volumes).all(|volume| volume.place != *place)
        };
        (0..PLACES).find(is_free)
    }
}
