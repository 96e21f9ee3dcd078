//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use tapio_log::Rotation;
use tapio_xenstored::journal;

/// Where domains are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Domains {
    /// On Xen if this is the control domain of one.
    Auto,
    /// On Xen: it is an error if there is none.
    Xen,
    /// Nowhere: sockets alone are served, and a domain that is introduced is remembered without a ring.
    None,
}

/// When changes are on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sync {
    /// Before they are acknowledged: the tree survives a power cut.
    Always,
    /// When the kernel writes them: the tree survives this program alone.
    Never,
}

impl From<Sync> for journal::Sync {
    fn from(sync: Sync) -> Self {
        match sync {
            Sync::Always => Self::Always,
            Sync::Never => Self::Never,
        }
    }
}

/// xenstored: the tree of small values that a Xen host and its guests share
///
/// Serves xenstore on a UNIX socket and, in the control domain of a Xen host, on the rings of all domains. It stays in
/// the foreground and ends at SIGTERM. Without Xen it is a xenstore for tools and tests.
#[derive(Debug, Parser)]
#[command(
    name = "tapio-xenstored",
    version,
    after_long_help = "Examples:
  tapio-xenstored                                            in dom0, in the place of the stock daemon
  tapio-xenstored --socket /tmp/xs &                         anywhere
  XENSTORED_PATH=/tmp/xs xenstore-write /a/b 1               a client of Debian's xenstore-utils
  XENSTORED_PATH=/tmp/xs xenstore-ls -fp /
  tapio-xenstored --socket /tmp/xs --state-dir /var/lib/xs   it survives kills and power cuts

While it runs (XENSTORED_PATH=/tmp/xs where it is not at the usual place):
  xenstore-control help                                      what can be asked
  xenstore-control stats                                     requests of each kind, events, conflicts
  xenstore-control quota set nodes 2000                      limits of domains; 0 is no limit
  xenstore-control log on                                    every request into the log
  xenstore-control live-update /usr/sbin/tapio-xenstored     another program goes on: connections, transactions,
                                                             watches and half sent messages stay
  kill -USR1 PID                                             the same with the program it was started from

A transaction costs what it changes: beginning, reading and dropping one copies nothing. Two that
touched different nodes both commit, and one that only read always does. Relative paths of a socket
begin at /local/domain/0.

--state-dir keeps the tree, the quotas that were set, the rights to watch special names, and of each domain
its ring, its event channel, what was set for it and its watches. After a restart domains that are
still there are served on, by the same rings; each of their watches is told once. Connections by
socket end with the daemon, and so do open transactions and requests that were half read; a live
update keeps those too. A quota on the command line counts again when it is given otherwise than at
the start before. On a Xen host, where a boot begins with an empty tree, it belongs below /run."
)]
pub struct Args {
    /// Serve here (again for more); the usual place is $XENSTORED_PATH, or `socket` in $XENSTORED_RUNDIR or
    /// /run/xenstored
    #[arg(long = "socket", value_name = "PATH")]
    pub sockets: Vec<PathBuf>,

    /// Where domains are
    #[arg(long, value_enum, default_value = "auto")]
    pub domains: Domains,

    /// Keep the tree and the domains in this directory, and begin with what is there
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// With --state-dir: when changes are on the disk
    #[arg(long, value_enum, default_value = "always")]
    pub sync: Sync,

    /// Limit what each domain may use: nodes, watches, transactions, outstanding, transaction-nodes, memory, node-size,
    /// path-max, permissions; 0 is no limit (again for more)
    #[arg(long = "quota", value_name = "NAME=NUMBER")]
    pub quotas: Vec<String>,

    /// Write the process's number there
    #[arg(long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,

    /// Write every request there, from the beginning
    #[arg(long, value_name = "FILE")]
    pub trace_file: Option<PathBuf>,

    /// Write the log there instead of on standard error, and rotate it
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Bytes from which on the log file, and that of requests, are rotated; they also are each day
    #[arg(long, value_name = "BYTES", default_value_t = Rotation::default().len_max,
          value_parser = clap::value_parser!(u64).range(4096..))]
    pub log_size: u64,

    /// Older parts of these files that are kept, compressed
    #[arg(long, value_name = "COUNT", default_value_t = Rotation::default().kept,
          value_parser = clap::value_parser!(u32).range(0..=999))]
    pub log_kept: u32,

    /// Go on with the state in this descriptor (a live update passes it)
    #[arg(long, hide = true, value_name = "FD")]
    pub restore: Option<i32>,

    /// Say whether the state in this descriptor can be read (a live update asks first)
    #[arg(long, hide = true, value_name = "FD")]
    pub check_state: Option<i32>,
}

impl Args {
    /// When log files are rotated.
    pub fn rotation(&self) -> Rotation {
        Rotation { len_max: self.log_size, kept: self.log_kept }
    }
}
