//! A disk process, without saying how it does what it is asked.

use crate::Result;
use crate::command::Handlers;
use crate::message::Blkif;
use crate::stats_text::VbdStats;

/// A disk process, as the control socket sees it: what it does with each command, and what tapdisk's protocol asks
/// beside them.
///
/// [Concurrent](crate::command::DiskCommand::IS_CONCURRENT) commands and `stats` may be called while another operation
/// is in progress, by several threads at once, and must not wait for it. All other calls come one at a time, but for
/// the forced end of a disk, which comes during a call that takes too long.
pub trait DiskHost: Handlers + Sync {
    /// Statistics in tapdisk's form.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn stats(&self, minor: u16) -> Result<VbdStats>;
    /// Connects a Xen guest's ring.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, or why the ring cannot be served.
    fn connect_ring(&self, minor: u16, ring: &Blkif) -> Result<()>;
    /// Disconnects it.
    ///
    /// # Errors
    /// `ENODEV` without such a disk or ring.
    fn disconnect_ring(&self, minor: u16, ring: &Blkif) -> Result<()>;
    /// Whether the last disk was detached: the process ends then.
    fn is_empty(&self) -> bool;
    /// The server has ended, and `conversations` have not: a call on a file system hangs. The process may end without
    /// them here; otherwise they are waited for.
    fn abandon(&self, _conversations: usize) {}
    /// Something an operator may want to know.
    fn log(&self, _line: &str) {}
}
