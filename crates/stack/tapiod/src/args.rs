//! The command line.

use std::path::PathBuf;

use clap::{Args as Group, Parser, Subcommand};

const AFTER: &str = "\
Without a command the daemon runs in the foreground until SIGTERM; disks and guests go on without it, and the next \
start finds them again. SIGHUP makes it read its certificate and log level anew.

A first start:

  tapiod --default-sr /srv/disks          makes its state, a certificate and an SR of files, and serves
  xe host-list                            as root on this host: no password
  tapiod user add alice --role vm-admin   an account that may log in over the network

Settings are read from /etc/tapio/tapiod.conf if it is there, one 'key = value' a line; options win over it. \
'tapiod --print-config' shows every key with its meaning and what it is set to.";

/// The toolstack's daemon: XenAPI for disks, storage repositories and VMs of this host.
#[derive(Debug, Parser)]
#[command(name = "tapiod", version, after_help = AFTER)]
pub struct Args {
    #[command(flatten)]
    pub options: Options,
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Options of the daemon.
#[derive(Clone, Debug, Default, Group)]
pub struct Options {
    /// Read settings from FILE instead of /etc/tapio/tapiod.conf
    #[arg(long, value_name = "FILE", global = true)]
    pub config: Option<PathBuf>,
    /// Sockets and pid files; empty after a reboot [default: /run/tapio]
    #[arg(long, value_name = "DIR", global = true)]
    pub run_dir: Option<PathBuf>,
    /// What survives a reboot: the database, the certificate, accounts [default: /var/lib/tapio]
    #[arg(long, value_name = "DIR", global = true)]
    pub state_dir: Option<PathBuf>,
    /// SRs are mounted below it [default: /run/sr-mount]
    #[arg(long, value_name = "DIR", global = true)]
    pub mount_dir: Option<PathBuf>,
    /// Serve HTTPS there; several may be given, port 0 takes any free one [default: 0.0.0.0:443]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Vec<String>,
    /// Serve plain HTTP there, on a loopback address, or 'none' [default: 127.0.0.1:80]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub http: Vec<String>,
    /// Serve on this UNIX socket; several may be given [default: xapi in the run directory]
    #[arg(long, value_name = "PATH")]
    pub unix_socket: Vec<PathBuf>,
    /// No HTTPS: only HTTP on loopback and the UNIX socket
    #[arg(long)]
    pub no_tls: bool,
    /// Make a file SR of this directory at the first start, and let it be the pool's default
    #[arg(long, value_name = "DIR")]
    pub default_sr: Option<PathBuf>,
    /// What to log: error, warn, info, debug, trace, or per part as 'info,tapio_api=debug' [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Set any key of the configuration file
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Check the settings, the certificate and the accounts, say what is wrong, and end
    #[arg(long)]
    pub check: bool,
    /// Print all settings as a configuration file, with their meaning, and end
    #[arg(long)]
    pub print_config: bool,
    /// Check a certificate (PEM, with its chain) and its key, use them from now on, and end; a running daemon takes
    /// them without a restart
    #[arg(long, num_args = 2, value_names = ["CERT", "KEY"])]
    pub install_certificate: Option<Vec<PathBuf>>,
}

/// Other things than serving.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// The accounts that may log in, and their roles
    #[command(subcommand)]
    User(User),
}

/// Which kind of account.
#[derive(Clone, Copy, Debug, Default, Group)]
pub struct Which {
    /// An account of the system, whose password PAM checks
    #[arg(long, conflicts_with = "group")]
    pub system: bool,
    /// All accounts of a group of the system
    #[arg(long)]
    pub group: bool,
}

/// Accounts.
#[derive(Debug, Subcommand)]
pub enum User {
    /// Add an account, or give it another role; its password is read from standard input
    Add {
        /// Its name
        name: String,
        /// What it may do: pool-admin (everything), pool-operator (storage and hosts), vm-power-admin (also
        /// snapshots VMs and chooses their memory), vm-admin (VMs and their disks), vm-operator (starts and ends VMs),
        /// read-only
        #[arg(long)]
        role: String,
        #[command(flatten)]
        which: Which,
    },
    /// List accounts with their roles
    List,
    /// Change an account's password, which is read from standard input
    Passwd {
        /// Its name
        name: String,
    },
    /// Remove an account
    Remove {
        /// Its name
        name: String,
        #[command(flatten)]
        which: Which,
    },
}
