//! LUNs: disks by their SCSIid, with every path to one, and the block device that serves them all.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tapio_types::ApiError;
use uuid::Uuid;

use super::disk::{Address, Disk};
use super::tree::Tree;
use crate::errors;
use crate::traits::Ctx;

/// How long dm-multipath may take to put a map over paths that are there.
const MAP_TIMEOUT: Duration = Duration::from_secs(15);
const TURN: Duration = Duration::from_millis(20);
/// The socket of multipathd, as `/proc/net/unix` shows it.
const MULTIPATHD: &str = "@/org/kernel/linux/storage/multipathd";
/// How the maps of dm-multipath begin their UUIDs.
const MAP: &str = "mpath-";

/// A LUN, and every path of this host to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lun {
    pub(crate) scsi_id: String,
    /// At least one.
    pub(crate) paths: Vec<Disk>,
}

/// Disks as LUNs, in the order of their first paths.
pub(crate) fn group(disks: Vec<Disk>) -> Vec<Lun> {
    let mut luns: Vec<Lun> = Vec::new();
    for disk in disks {
        match luns.iter_mut().find(|lun| lun.scsi_id == disk.scsi_id) {
            Some(lun) => lun.paths.push(disk),
            None => luns.push(Lun { scsi_id: disk.scsi_id.clone(), paths: vec![disk] }),
        }
    }
    luns
}

impl Lun {
    /// Its number on its target.
    pub(crate) fn number(&self) -> u64 {
        self.first().map_or(0, |disk| disk.address.lun)
    }

    pub(crate) fn first(&self) -> Option<&Disk> {
        self.paths.first()
    }

    pub(crate) fn size(&self, tree: &Tree) -> u64 {
        self.first().map_or(0, |disk| disk.size(tree))
    }

    /// The UUID of the VDI that it is where LUNs are VDIs: the MD5 sum of the SCSIid, as in XenServer.
    pub(crate) fn uuid(&self) -> Uuid {
        use md5::Digest as _;
        Uuid::from_bytes(md5::Md5::digest(self.scsi_id.as_bytes()).into())
    }

    /// The map that dm-multipath has put over its paths, as `dm-3` and its name.
    fn map(&self, tree: &Tree) -> Option<(String, String)> {
        self.paths.iter().find_map(|disk| {
            let holders = tree.names(&tree.sys("class/block").join(&disk.name).join("holders"));
            holders.into_iter().filter(|name| name.starts_with("dm-")).find_map(|name| {
                let directory = tree.sys("class/block").join(&name).join("dm");
                let is_map = tree.text(&directory.join("uuid"))?.starts_with(MAP);
                is_map.then(|| tree.text(&directory.join("name"))).flatten().map(|map| (name, map))
            })
        })
    }

    /// The name of the map that dm-multipath has put over its paths.
    pub(crate) fn map_name(&self, tree: &Tree) -> Option<String> {
        self.map(tree).map(|(_, name)| name)
    }

    /// The device that reaches it: the map of dm-multipath where there is one, the link that udev names after the
    /// SCSIid where that leads to a path, else the first path that works.
    pub(crate) fn device(&self, tree: &Tree) -> PathBuf {
        if let Some((_, map)) = self.map(tree) {
            return tree.dev("mapper").join(map);
        }
        let link = tree.dev("disk/by-id").join(format!("scsi-{}", self.scsi_id));
        let nodes: Vec<PathBuf> = self.paths.iter().map(|disk| disk.node(tree)).collect();
        if tree.real(&link).is_some_and(|node| nodes.contains(&node)) {
            return link;
        }
        let working = self.paths.iter().find(|disk| self.paths.len() == 1 || disk.is_running(tree));
        working.or(self.first()).map(|disk| disk.node(tree)).unwrap_or_default()
    }

    /// As [`Self::device`], and waits for the map where there are several paths.
    ///
    /// # Errors
    /// 433: there are several paths, and no map; `TASK_CANCELLED`.
    pub(crate) fn settled(&self, ctx: &dyn Ctx, tree: &Tree) -> Result<PathBuf, ApiError> {
        let until = Instant::now() + MAP_TIMEOUT;
        while self.paths.len() > 1 && self.map(tree).is_none() {
            if !has_multipathd(tree) || Instant::now() > until {
                let text = format!(
                    "{} has {} paths and no map: see 'multipath -ll', or let one portal reach it",
                    self.scsi_id,
                    self.paths.len()
                );
                return Err(errors::fail(433, text));
            }
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            std::thread::sleep(TURN);
        }
        Ok(self.device(tree))
    }

    /// Whether a process, a file system or another device has it open for itself alone.
    pub(crate) fn is_in_use(&self, tree: &Tree) -> bool {
        is_held(&self.device(tree))
    }
}

fn is_held(device: &Path) -> bool {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(device);
    opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}

/// Whether several paths to a LUN become one device here.
pub(crate) fn has_multipathd(tree: &Tree) -> bool {
    tree.text(&tree.at("/proc/net/unix"))
        .is_some_and(|table| table.lines().any(|line| line.ends_with(MULTIPATHD)))
}

/// Where this host last saw LUNs, so that one is found without asking all others: a file for each SCSIid with the
/// addresses of its paths. What it says is compared with the disk.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    directory: PathBuf,
}

impl Seen {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { directory: run_dir.join("luns") }
    }

    /// The LUN where it was seen last; none where it is there no more.
    pub(crate) fn find(&self, tree: &Tree, scsi_id: &str) -> Option<Lun> {
        let text = tree.text(&self.directory.join(scsi_id))?;
        let paths: Vec<Disk> = text
            .lines()
            .filter_map(Address::parse)
            .filter_map(|address| Disk::at(tree, address))
            .filter(|disk| disk.scsi_id == scsi_id)
            .collect();
        (!paths.is_empty()).then(|| Lun { scsi_id: scsi_id.to_owned(), paths })
    }

    /// Notes where LUNs are; that it fails costs only time.
    pub(crate) fn note(&self, luns: &[Lun]) {
        let _ = std::fs::create_dir_all(&self.directory);
        for lun in luns {
            let text: String = lun.paths.iter().map(|disk| format!("{}\n", disk.address)).collect();
            let _ = std::fs::write(self.directory.join(&lun.scsi_id), text);
        }
    }
}
