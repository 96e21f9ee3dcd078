//! What a pool looks like from outside.

use std::io;

use serde::Serialize;

use super::PoolName;
use super::layout::{FreePages, Owner, SEGMENT_LEN, SLOTS, Share, VERSION, at};
use super::segment::Header;
use crate::reader::{head, names, open_plain};
use crate::shm::ShmRoot;

/// A pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolInfo {
    /// Its name.
    pub name: String,
    /// Pages of 4 KiB.
    pub pages: u32,
    /// Of these, in use.
    pub used: u32,
    /// The disks that share it.
    pub disks: Vec<PoolDisk>,
}

/// A disk at a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolDisk {
    /// Process.
    pub pid: u32,
    /// Minor number.
    pub minor: u32,
    /// Pages it holds.
    pub held: u32,
    /// Pages it waits for; 0 when it does not.
    pub waits_for: u32,
}

/// Reads a segment from a copy of its bytes; `None` for what is none.
pub fn parse_pool(name: &str, bytes: &[u8]) -> Option<PoolInfo> {
    let header = Header::parse(bytes).filter(|header| header.version == VERSION)?;
    if bytes.len() < SEGMENT_LEN {
        return None;
    }
    let word =
        |at: usize| bytes.get(at * 8..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_ne_bytes(*b));
    let state = FreePages(word(at::STATE));
    let mut disks = Vec::new();
    for slot in 0..SLOTS {
        let owner = Owner(word(at::owner(slot)));
        if owner == Owner::NONE {
            continue;
        }
        let mut share = Share(word(at::share(slot)));
        if slot == state.slot() && share.lacks(state) {
            share = share.with(state.delta());
        }
        let waits = word(at::WAITING + slot / 64) & 1 << (slot % 64) != 0;
        disks.push(PoolDisk {
            pid: owner.pid(),
            minor: word(at::minor(slot)) as u32,
            held: share.held().min(header.total),
            waits_for: if waits { (word(at::want(slot)) as u32).min(header.total) } else { 0 },
        });
    }
    let used = header.total.saturating_sub(state.free());
    Some(PoolInfo { name: name.to_owned(), pages: header.total, used, disks })
}

/// The pools of this host, by name. Those that vanish meanwhile are left out.
///
/// # Errors
/// The directory exists and cannot be listed.
pub fn pools(root: &ShmRoot) -> io::Result<Vec<PoolInfo>> {
    let mut found = Vec::new();
    for name in names(&root.pools())? {
        if name.parse::<PoolName>().is_err() {
            continue;
        }
        let Ok(file) = open_plain(&root.pools().join(&name)) else { continue };
        let Ok((bytes, len)) = head::<SEGMENT_LEN>(&file) else { continue };
        found.extend(parse_pool(&name, &bytes[..len]));
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}
