//! Sessions as the kernel has them: `/sys/class/iscsi_session`.

use std::path::PathBuf;

use super::name::{Node, Portal};
use crate::scsi::{Disk, Tree};

/// A session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    /// As in `session5`.
    pub(super) id: u32,
    /// The target, and the portal by which it was logged in to.
    pub(super) node: Node,
}

const SESSIONS: &str = "class/iscsi_session";

impl Session {
    fn directory(&self, tree: &Tree) -> PathBuf {
        tree.sys(SESSIONS).join(format!("session{}", self.id)).join("device")
    }

    /// The session with this number; none where there is none, or none of this target.
    pub(super) fn of_target(tree: &Tree, id: u32, name: &str) -> Option<Self> {
        let directory = tree.sys(SESSIONS).join(format!("session{id}"));
        if tree.text(&directory.join("targetname"))? != name {
            return None;
        }
        let connection = tree.sys(&format!("class/iscsi_connection/connection{id}:0"));
        let address = tree.text(&connection.join("persistent_address"))?.parse().ok()?;
        let port = tree.text(&connection.join("persistent_port"))?.parse().ok()?;
        Some(Self { id, node: Node { portal: Portal { address, port }, name: name.to_owned() } })
    }

    /// The sessions of a target, the newest first; ends with `enough` of them. Numbers grow, so that the session of a
    /// login that has just ended is the first that is looked at, however many there are.
    pub(super) fn newest(tree: &Tree, name: &str, mut enough: impl FnMut(&Self) -> bool) -> Vec<Self> {
        let names = tree.names(&tree.sys(SESSIONS));
        let mut ids: Vec<u32> =
            names.iter().filter_map(|name| name.strip_prefix("session")?.parse().ok()).collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut found = Vec::new();
        for id in ids {
            if let Some(session) = Self::of_target(tree, id, name) {
                let is_enough = enough(&session);
                found.push(session);
                if is_enough {
                    break;
                }
            }
        }
        found
    }

    /// The disks that it leads to.
    pub(super) fn disks(&self, tree: &Tree) -> Vec<Disk> {
        let directory = self.directory(tree);
        let targets = tree.names(&directory).into_iter().filter(|name| name.starts_with("target"));
        targets.flat_map(|name| crate::scsi::disk::of_target(tree, &directory.join(name))).collect()
    }

    /// The number of its SCSI host.
    fn host(&self, tree: &Tree) -> Option<u32> {
        let real = tree.real(&self.directory(tree))?;
        real.ancestors().find_map(|part| part.file_name()?.to_str()?.strip_prefix("host")?.parse().ok())
    }

    /// Has the kernel look for LUNs that it does not know yet; returns when it has.
    pub(super) fn scan(&self, tree: &Tree) {
        let Some(host) = self.host(tree) else { return };
        let path = tree.sys(&format!("class/scsi_host/host{host}/scan"));
        if let Err(error) = tree.write(&path, "- - -") {
            tracing::warn!("{} could not be told to look for LUNs: {error}", path.display());
        }
    }
}
