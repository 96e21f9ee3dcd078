//! The command line.

use std::path::PathBuf;

use clap::{ArgAction, Parser};
use tapio_control::{BLKIF_INDIRECT_MAX, BLKIF_ORDER_MAX, BLKIF_QUEUES_MAX};
use tapio_log::Rotation;
use tapio_tapback::Offer;
use tapio_types::Movement;

/// Connects the disks of Xen guests with their disk processes.
///
/// A toolstack describes a disk in xenstore, below /local/domain/0/backend/vbd3/DOMID/DEVID; a guest describes its
/// rings below /local/domain/DOMID/device/vbd/DEVID. This program watches both, tells the guest what the disk offers,
/// and has the disk process take the rings. It may be ended and started again at any time: disks go on without it.
#[derive(Debug, Parser)]
#[command(name = "tapio-tapback", version)]
#[command(after_long_help = "The disk process is found by one of these nodes of the back end's directory:
  tapio-disk             PID.MINOR
  physical-device-path   .../nbdPID.MINOR, as a disk process names its NBD socket
  params                 the same, .../tapdisk-MINOR, or the image as 'tap-ctl list' shows it

Examples:
  tapio-tapback                                 serve backend/vbd3, in the foreground
  tapio-tapback --movement persistent           let guests keep their pages mapped
  tapio-tapback --tapdisk                       the disk processes are foreign tapdisks
  systemctl enable --now tapio-tapback          as a service")]
pub struct Args {
    /// Write the log there instead of on standard error, and rotate it
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Bytes from which on the log file is rotated; it also is each day
    #[arg(long, value_name = "BYTES", default_value_t = Rotation::default().len_max,
          value_parser = clap::value_parser!(u64).range(4096..))]
    pub log_size: u64,
    /// Older parts of the log file that are kept, compressed
    #[arg(long, value_name = "COUNT", default_value_t = Rotation::default().kept,
          value_parser = clap::value_parser!(u32).range(0..=999))]
    pub log_kept: u32,
    /// Kind of back end to serve, the directory below 'backend'
    #[arg(long, value_name = "NAME", default_value = "vbd3", value_parser = plain_name)]
    pub backend_name: String,
    /// Queues that a guest may have for a disk, at most
    #[arg(long, value_name = "COUNT", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=BLKIF_QUEUES_MAX as i64))]
    pub queues: u32,
    /// Largest ring, as a power of two pages
    #[arg(long, value_name = "ORDER", default_value_t = BLKIF_ORDER_MAX,
          value_parser = clap::value_parser!(u32).range(0..=i64::from(BLKIF_ORDER_MAX)))]
    pub ring_order: u32,
    /// Segments of 4 KiB in an indirect request, at most; 0 offers none
    #[arg(long, value_name = "COUNT", default_value_t = 256,
          value_parser = clap::value_parser!(u16).range(0..=i64::from(BLKIF_INDIRECT_MAX)))]
    pub indirect: u16,
    /// How data is moved: copy (by the hypervisor), persistent (pages stay mapped), or map (mapped for each request)
    #[arg(long, value_name = "HOW", default_value = "copy")]
    pub movement: Movement,
    /// Do not offer write barriers (newer guests use flushes)
    #[arg(long)]
    pub no_barrier: bool,
    /// Do not offer discards
    #[arg(long)]
    pub no_discard: bool,
    /// Offer rings of responses alone, an extension that our own front end knows
    #[arg(long)]
    pub split_rings: bool,
    /// The disk processes are foreign tapdisks: offer no more than these can
    #[arg(long)]
    pub tapdisk: bool,
    /// Seconds after which a foreign tapdisk is asked again whether its disk has grown, which ours tells; 0: never
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub length_every: u64,
    /// Print what connecting each disk has cost, a line of JSON each
    #[arg(long, action = ArgAction::SetTrue)]
    pub stats: bool,
    /// Socket or device of xenstored; otherwise XENSTORED_PATH, /run/xenstored/socket, /dev/xen/xenbus
    #[arg(long, value_name = "PATH")]
    pub xenstored: Option<PathBuf>,
    /// Domain this program runs in; otherwise xenstored is asked
    #[arg(long, value_name = "DOMID")]
    pub own_domid: Option<u32>,
    /// Directory of the disk processes' control sockets; otherwise TAPIO_RUN_DIR, /run/blktap-control
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
}

impl Args {
    /// When the log file is rotated.
    pub fn rotation(&self) -> Rotation {
        Rotation { len_max: self.log_size, kept: self.log_kept }
    }

    /// What guests are offered.
    pub fn offer(&self) -> Offer {
        Offer {
            queues: self.queues,
            order: self.ring_order,
            max_indirect: self.indirect,
            movement: self.movement,
            barrier: !self.no_barrier,
            discard: !self.no_discard,
            split: self.split_rings,
            tapdisk: self.tapdisk,
        }
    }
}

fn plain_name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if text.is_empty() || text.len() > 64 || !text.chars().all(plain) {
        return Err("letters, digits, - and _".into());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_options_are_sound_and_explained() {
        Args::command().debug_assert();
        for argument in Args::command().get_arguments() {
            assert!(argument.get_help().is_some(), "{}", argument.get_id());
        }
        let offer = Args::parse_from(["tapio-tapback"]).offer();
        assert_eq!((offer.queues, offer.order, offer.max_indirect, offer.barrier), (4, 3, 256, true));
        let offer =
            Args::parse_from(["tapio-tapback", "--movement", "map", "--no-discard", "--queues", "1"]).offer();
        assert_eq!((offer.movement, offer.discard, offer.queues), (Movement::Map, false, 1));
        for bad in [
            &["--queues", "0"][..],
            &["--queues", "17"],
            &["--ring-order", "4"],
            &["--indirect", "4097"],
            &["--movement", "mapp"],
            &["--backend-name", "a/b"],
        ] {
            let words = std::iter::once(&"tapio-tapback").chain(bad);
            assert!(Args::try_parse_from(words).is_err(), "{bad:?}");
        }
    }
}
