//! A device of a Xen guest as a front end, as the command line names it.

use std::str::FromStr;

use clap::Args;
use tapio_control::{BlkifFront, BlkifProtocol, BlkifQueue, ControlError, Errno, Result, RingStart};
use tapio_types::Movement;

/// How the rings of a guest are served.
#[derive(Debug, Args)]
pub struct RingArguments {
    /// A ring of the guest's device: the grants of its 1, 2, 4 or 8 pages and its event channel; once for each queue.
    /// Grants of a ring of responses of its own stand behind a '+'
    #[arg(long, value_name = "GRANT,..[+GRANT,..]@PORT", requires = "blkif")]
    ring: Vec<String>,
    /// Layout of the rings: x86_64-abi or x86_32-abi
    #[arg(long, default_value = "x86_64-abi", requires = "blkif")]
    protocol: BlkifProtocol,
    /// How data is moved: copy, persistent, map or bounce (mapped, and copied by the processor)
    #[arg(long, default_value = "copy", requires = "blkif")]
    movement: Movement,
    /// Requests that a former process took and did not answer: 'auto' repeats those of this very ring, 'fresh' forgets
    /// them, 'resume' wants them to be of this ring
    #[arg(long, default_value = "auto", value_name = "auto|fresh|resume", requires = "blkif")]
    start: RingStart,
    /// Segments of an indirect request, at most; 0: there are none
    #[arg(long, default_value_t = tapio_control::BLKIF_INDIRECT_DEFAULT, requires = "blkif")]
    max_indirect: u16,
    /// Bytes of a sector as the guest was told: 512 or 4096
    #[arg(long, default_value_t = 512, requires = "blkif")]
    sector_size: u32,
    /// The guest was told that it is a CD-ROM
    #[arg(long, requires = "blkif")]
    cdrom: bool,
    /// The guest was told that it is removable
    #[arg(long, requires = "blkif")]
    removable: bool,
}

fn invalid(why: String, next: &str) -> ControlError {
    ControlError::new(Errno::EINVAL, why).next(next)
}

/// `8,9,10,11@7`, or `8,9+12,13@7`.
fn ring(text: &str) -> Result<BlkifQueue> {
    let bad = || invalid(format!("'{text}' is no ring"), "write GRANT,..@PORT, as 8,9@5");
    let numbers = |text: &str| -> Result<Vec<u32>> {
        text.split(',').map(|number| number.parse().map_err(|_| bad())).collect()
    };
    let (grants, port) = text.split_once('@').ok_or_else(bad)?;
    let port = u32::from_str(port).map_err(|_| bad())?;
    let (requests, responses) = match grants.split_once('+') {
        Some((requests, responses)) => (numbers(requests)?, numbers(responses)?),
        None => (numbers(grants)?, Vec::new()),
    };
    Ok(BlkifQueue { ring: requests, responses, port, double: None })
}

impl RingArguments {
    /// The front end for `DOMID/DEVID`.
    pub fn front(&self, device: &str, read_only: bool) -> Result<BlkifFront> {
        let number = |text: &str| {
            u32::from_str(text).map_err(|_| {
                invalid(format!("'{device}' is no device of a domain"), "write DOMID/DEVID, as 3/51712")
            })
        };
        let (domid, devid) = device.split_once('/').unwrap_or((device, ""));
        let queues = self.ring.iter().map(|text| ring(text)).collect::<Result<_>>()?;
        let front = BlkifFront {
            protocol: self.protocol,
            movement: self.movement,
            start: self.start,
            max_indirect: self.max_indirect,
            sector_size: self.sector_size,
            read_only,
            cdrom: self.cdrom,
            removable: self.removable,
            ..BlkifFront::new(number(domid)?, number(devid)?, queues)
        };
        front.check(0)?;
        Ok(front)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_of_all_commands_go_together() {
        super::super::DiskArguments::augment_args(clap::Command::new("disk")).debug_assert();
    }

    #[test]
    fn a_ring_is_its_grants_and_its_port() {
        let plain = ring("8,9@5").expect("valid");
        assert_eq!((plain.ring, plain.responses, plain.port), (vec![8, 9], vec![], 5));
        let split = ring("8+9,10@5").expect("valid");
        assert_eq!((split.ring, split.responses), (vec![8], vec![9, 10]));
        for bad in ["", "8", "8@", "@5", "8,@5", "a@5", "8+@5", "8@5@6", "-1@5"] {
            assert_eq!(ring(bad).expect_err(bad).errno, Errno::EINVAL, "{bad}");
        }
    }
}
