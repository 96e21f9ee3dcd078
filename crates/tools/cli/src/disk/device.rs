//! `tapio disk device`: disks as block devices of this host.

use std::time::Duration;

use clap::Subcommand;
use tapio_control::command as ask;
use tapio_control::{
    ControlError, DiskEntry, Errno, Front, LocalDeviceKind, OwnClient, ProcessState, RunDir,
    clean_local_devices, local_device_kinds, processes,
};
use tapio_types::DeviceHow;

use super::REPLY_TIMEOUT;
use tapio_report::failure::{Result, print, print_json};

/// Longest wait for a device: the process has its own, shorter limits for each step.
const DEVICE_MAX: Option<Duration> = Some(Duration::from_secs(90));

#[derive(Debug, Subcommand)]
#[command(after_long_help = "A device is made in one of these ways:
  ublk       the kernel's user-space block driver (Linux 6.5 or later): /dev/ublkbN
  nbd        the kernel's NBD client: /dev/nbdN
  fuse       a loop device over a file exported by FUSE: /dev/loopN
  fuse-file  that file alone, for programs that do not need a device
'auto' takes the first that works here. 'probe' says what works, and why the rest does not.

Examples:
  tapio disk device probe
  dev=$(tapio disk device attach 0) && mkfs.ext4 $dev
  tapio disk device detach 0")]
pub enum Command {
    /// Make a disk a block device of this host, and print its path
    Attach {
        /// Minor number of the disk
        minor: u16,
        /// The way: auto, ublk, nbd, fuse or fuse-file
        #[arg(long, default_value = "auto")]
        how: DeviceHow,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Take the device of a disk away
    Detach {
        /// Minor number of the disk
        minor: u16,
        /// Also one that is in use: its users get errors
        #[arg(long)]
        force: bool,
    },
    /// Say which kinds of device work on this host, and why the rest does not
    Probe {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Take away what disk processes that died left behind
    ///
    /// Every disk process does the same when it starts, but for --waiting.
    Clean {
        /// Also devices that wait for their disk process to come back: their users get errors
        #[arg(long)]
        waiting: bool,
    },
}

pub fn run(run: &RunDir, command: Command) -> Result<()> {
    match command {
        Command::Attach { minor, how, read_only, json } => {
            let ask = ask::FrontAdd {
                minor,
                front: Front::Block { how, device: None, read_only, owner: None },
                vbd: None,
            };
            let made = find(run, minor)?.0.call(&ask, &[], DEVICE_MAX)?;
            if json {
                return print_json(&made);
            }
            print(&format!("{}\n", made.front.address()))
        }
        Command::Detach { minor, force } => {
            let (mut client, disk) = find(run, minor)?;
            let device = disk.fronts.iter().find(|front| front.front.is_block()).ok_or_else(|| {
                ControlError::new(Errno::ENODEV, format!("disk {minor} is no device of this host"))
                    .next("'tapio disk list' shows how it is reached")
            })?;
            let ask = ask::FrontRemove { minor, front: device.id, force };
            client.call(&ask, &[], DEVICE_MAX).map(drop)
        }
        Command::Probe { json } => {
            let kinds = local_device_kinds()?;
            if json {
                return print_json(&kinds);
            }
            print(&kinds.iter().map(line).collect::<String>())
        }
        Command::Clean { waiting } => {
            let cleaned = clean_local_devices(waiting)?;
            print(&cleaned.iter().map(|path| format!("{}\n", path.display())).collect::<String>())
        }
    }
}

fn line(kind: &LocalDeviceKind) -> String {
    match (&kind.why, &kind.next) {
        (None, _) => format!("{:<10} works\n", kind.how.name()),
        (Some(why), next) => {
            format!("{:<10} {why}; {}\n", kind.how.name(), next.as_deref().unwrap_or_default())
        }
    }
}

/// The process that has the disk of a number, and what it says of it.
fn find(run: &RunDir, minor: u16) -> Result<(OwnClient, DiskEntry)> {
    for process in processes(run)? {
        if !matches!(process.state, ProcessState::Live { .. }) {
            continue;
        }
        // One that ended meanwhile, or a foreign tapdisk, has no disk for us.
        let Ok(mut client) = OwnClient::connect(run, process.id) else { continue };
        let disks = client.call(&ask::List {}, &[], REPLY_TIMEOUT)?;
        if let Some(disk) = disks.into_iter().find(|disk| disk.minor == minor) {
            return Ok((client, disk));
        }
    }
    Err(ControlError::new(Errno::ENODEV, format!("no disk process of ours has disk {minor}"))
        .next("'tapio disk list' shows the disks there are"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_that_does_not_work_says_why_and_what_to_do() {
        let works = LocalDeviceKind { how: DeviceHow::Fuse, usable: true, why: None, next: None };
        assert_eq!(line(&works), "fuse       works\n");
        let not = LocalDeviceKind {
            how: DeviceHow::Ublk,
            usable: false,
            why: Some("/dev/x: gone".into()),
            next: Some("load it".into()),
        };
        assert_eq!(line(&not), "ublk       /dev/x: gone; load it\n");
    }
}
