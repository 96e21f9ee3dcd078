//! Files that are reached through a connection, which may be lost, and the server with it.

use super::Inner;

/// The longest time until there is a connection again.
const GONE_NS_MAX: u64 = 2_000_000_000;

/// What became of an operation whose connection was lost.
pub(super) enum Lost {
    /// It is done again when there is a connection again, after this time.
    Again { after_ns: u64 },
    /// The server did not come back in time.
    GivenUp,
}

impl Inner {
    /// Whether the connection to a file is lost just now, before anything has been done there. The server may be
    /// restarted, and then it has lost what was not flushed as a host does whose power goes; the next flush says so.
    pub(super) fn connection_lost(&mut self, file: usize) -> Option<Lost> {
        if !self.remotes[file].is_remote || !self.fault(self.faults.connection_loss) {
            return None;
        }
        if !self.files[file].pending.is_empty() {
            // The client cannot know whether something is gone.
            self.remotes[file].writes_lost = true;
            if self.random.chance(1, 2) {
                let mut random = self.random.clone();
                let left = self.files[file].cut(tapio_types::SECTOR_LEN, &mut random);
                self.random = random;
                self.files[file].restart(left);
            }
        }
        if self.random.chance(1, 16) {
            return Some(Lost::GivenUp);
        }
        Some(Lost::Again { after_ns: self.random.below(GONE_NS_MAX) })
    }
}

/// What is known of a file's connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Remote {
    pub(super) is_remote: bool,
    /// Writes that were answered may be gone, and no flush has said so yet.
    pub(super) writes_lost: bool,
}
