//! `tapio disk restart`: another process takes the disks of one over, with their images and front ends.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tapio_control::command as ask;
use tapio_control::{
    ControlError, DiskEntry, DiskReports, Errno, Front, FrontEntry, ImageSource, LimitsReport, OwnClient,
    PoolSpec, RunDir, SpawnOptions, VbdState, disk_program, spawn,
};

use super::REPLY_TIMEOUT;
use tapio_report::failure::{Result, print};

#[derive(Debug, Args)]
pub struct RestartArguments {
    /// Process
    #[arg(short, long)]
    pid: i32,
    /// The key of encrypted images, in a file that the new process can read
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// How long requests in flight may take to end, in seconds
    #[arg(long, default_value_t = 300)]
    timeout: u64,
}

/// What the new process is told of a disk.
#[derive(Debug, PartialEq)]
struct Plan {
    minor: u16,
    open: Option<ask::Open>,
    limits: Option<ask::SetLimits>,
    transfers: Option<ask::SetTransfers>,
    fronts: Vec<ask::FrontAdd>,
}

/// How to make a disk again, or why that cannot be done from outside.
fn plan(
    run: &RunDir,
    pid: i32,
    disk: &DiskEntry,
    key_file: Option<&PathBuf>,
    bounds: &LimitsReport,
) -> Result<Plan> {
    let minor = disk.minor;
    if disk.state != VbdState::Running {
        let why = format!("disk {minor} is paused or on its way there");
        return Err(ControlError::new(Errno::EBUSY, why).next("unpause it first"));
    }
    let default = u32::try_from(pid).ok().map(|pid| run.nbd_socket(pid, minor));
    let is_default =
        |front: &Front| matches!(front, Front::NbdUnix { path, .. } if Some(path) == default.as_ref());
    let mut fronts = Vec::new();
    for FrontEntry { front, vbd, .. } in disk.fronts.iter().filter(|entry| !is_default(&entry.front)) {
        let given = match front {
            Front::NbdUnix { listener, .. } => listener.is_some(),
            Front::VhostUser { listener, connection, .. } => listener.is_some() || connection.is_some(),
            Front::Blkif(front) => front.double.is_some(),
            Front::NbdTcp { .. } | Front::Block { .. } => false,
        };
        if given {
            let why =
                format!("disk {minor} is served on {}, a socket that was handed to it", front.address());
            return Err(ControlError::new(Errno::EOPNOTSUPP, why)
                .next("the program that started it can do that again"));
        }
        let mut front = front.clone();
        if let Front::Block { device, .. } = &mut front {
            // The device may get another name.
            *device = None;
        }
        fronts.push(ask::FrontAdd { minor, front, vbd: Some(*vbd) });
    }
    let open = disk.image.as_ref().map(|image| ask::Open {
        minor,
        image: ImageSource::Leaf(image.clone()),
        read_only: disk.read_only,
        timeout_s: None,
        default_nbd: disk.fronts.iter().any(|entry| is_default(&entry.front)),
        key: None,
        key_file: key_file.cloned(),
        log: None,
        secondary: None,
        standby: false,
        pool: bounds.pool.as_ref().map(|pool| PoolSpec { name: pool.name.clone(), pages: Some(pool.pages) }),
        sector_size: None,
        share: bounds.share.as_ref().map(|share| share.spec),
    });
    let transfers =
        (!bounds.transfers.is_off()).then_some(ask::SetTransfers { minor, sizes: bounds.transfers });
    let limits = (!bounds.limits.is_off()).then_some(ask::SetLimits { minor, limits: bounds.limits });
    Ok(Plan { minor, open, limits, transfers, fronts })
}

pub fn run(run: &RunDir, arguments: &RestartArguments) -> Result<()> {
    let mut old = OwnClient::connect(run, arguments.pid)?;
    let disks = old.call(&ask::List {}, &[], REPLY_TIMEOUT)?;
    let plans = disks
        .iter()
        .map(|disk| {
            let bounds = match disk.image {
                Some(_) => old.call(&ask::Limits { minor: disk.minor }, &[], REPLY_TIMEOUT)?,
                None => LimitsReport::default(),
            };
            let report = old.call(&ask::Stats { minor: Some(disk.minor) }, &[], REPLY_TIMEOUT)?;
            if let DiskReports::One(report) = report
                && let Some(beside) = report.beside.first()
            {
                let why = format!("disk {} was opened with a {beside:?}", disk.minor);
                return Err(ControlError::new(Errno::EOPNOTSUPP, why)
                    .next("pause it, restart by hand and name that again: it must not be left out"));
            }
            let mut plan = plan(run, arguments.pid, disk, arguments.key_file.as_ref(), &bounds)?;
            if let Some(open) = &mut plan.open {
                // Guests go on with what they were told, whatever images the disk has by now.
                let info = old.call(&ask::DiskInfo { minor: disk.minor }, &[], REPLY_TIMEOUT)?;
                open.sector_size = Some(info.sector_size);
            }
            Ok(plan)
        })
        .collect::<Result<Vec<_>>>()?;
    // It stands ready before the old one goes: a program that does not start does no harm.
    let mut options = SpawnOptions::new(disk_program());
    let is_of_ceph = |plan: &Plan| plan.open.as_ref().is_some_and(|open| open.image.is_of_ceph());
    if plans.iter().any(is_of_ceph) {
        options.arguments.push("--rbd".to_owned());
    }
    let pid = spawn(&options)?;
    let mut new = OwnClient::connect(run, pid)?;
    let timeout = Some(Duration::from_secs(arguments.timeout));
    if let Err(error) = old.call(&ask::Quit { force: false }, &[], timeout) {
        // The old one says what is wrong; the new one was never needed.
        let _ = new.call(&ask::Quit { force: true }, &[], REPLY_TIMEOUT);
        return Err(error);
    }
    for plan in plans {
        take_over(run, &mut new, &plan).map_err(|error| ControlError {
            next: Some(format!(
                "process {} has ended; make disk {} again with 'tapio disk open' and 'front add' on process {pid}",
                arguments.pid, plan.minor
            )),
            ..error
        })?;
    }
    print(&format!("{pid}\n"))
}

fn take_over(run: &RunDir, new: &mut OwnClient, plan: &Plan) -> Result<()> {
    run.minors().claim(plan.minor)?;
    new.call(&ask::Attach { minor: plan.minor }, &[], REPLY_TIMEOUT)?;
    if let Some(open) = &plan.open {
        new.call(open, &[], REPLY_TIMEOUT)?;
    }
    if let Some(limits) = &plan.limits {
        new.call(limits, &[], REPLY_TIMEOUT)?;
    }
    if let Some(transfers) = &plan.transfers {
        new.call(transfers, &[], REPLY_TIMEOUT)?;
    }
    plan.fronts.iter().try_for_each(|front| new.call(front, &[], REPLY_TIMEOUT).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tapio_control::PoolShare;
    use tapio_stat::VbdId;

    fn entry(id: u32, front: Front) -> FrontEntry {
        FrontEntry { id, front, vbd: VbdId { domid: 0, devid: 3 }, connections: 1 }
    }

    fn nbd(path: std::path::PathBuf, listener: Option<u32>) -> Front {
        Front::NbdUnix { path, listener, export: String::new(), read_only: false }
    }

    fn disk(fronts: Vec<FrontEntry>) -> DiskEntry {
        let image = Some("vhd:/a".to_owned());
        DiskEntry { minor: 3, state: VbdState::Running, image, read_only: true, fronts }
    }

    #[test]
    fn a_disk_is_made_again_as_it_was() {
        let run = RunDir::new("/run/test");
        let own = nbd(run.nbd_socket(7, 3), None);
        let other = nbd("/other".into(), None);
        let pool = Some(PoolShare { name: "sr".into(), pages: 704, held: 3 });
        let bounds = LimitsReport { pool, ..LimitsReport::default() };
        let made = plan(&run, 7, &disk(vec![entry(1, own), entry(2, other.clone())]), None, &bounds)
            .expect("a plan");
        let vbd = Some(VbdId { domid: 0, devid: 3 });
        assert_eq!(made.fronts, [ask::FrontAdd { minor: 3, front: other, vbd }]);
        let image = ImageSource::Leaf("vhd:/a".into());
        let open = ask::Open {
            minor: 3,
            image,
            read_only: true,
            timeout_s: None,
            default_nbd: true,
            key: None,
            key_file: None,
            log: None,
            secondary: None,
            standby: false,
            pool: Some(PoolSpec { name: "sr".into(), pages: Some(704) }),
            sector_size: None,
            share: None,
        };
        assert_eq!(made.open, Some(open));
    }

    #[test]
    fn what_cannot_be_made_again_is_left_alone() {
        let run = RunDir::new("/run/test");
        let given = disk(vec![entry(1, nbd("/other".into(), Some(0)))]);
        assert_eq!(
            plan(&run, 7, &given, None, &LimitsReport::default()).expect_err("a handed socket").errno,
            Errno::EOPNOTSUPP
        );
        let paused = DiskEntry { state: VbdState::Paused, ..disk(Vec::new()) };
        assert_eq!(
            plan(&run, 7, &paused, None, &LimitsReport::default()).expect_err("paused").errno,
            Errno::EBUSY
        );
    }
}
