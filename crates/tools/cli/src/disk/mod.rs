//! `tapio disk`: what tap-ctl has no words for, by our own protocol.

mod blkif;
mod debug;
mod device;
mod grow;
mod images;
mod limit;
mod mirror;
mod progress;
mod restart;
mod rings;
mod room;
mod stats;
pub(crate) use stats::time;
mod tls;
mod transfers;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::Value;
use tapio_control::command::{self as ask, DiskCommand};
use tapio_control::{
    Client, ControlError, DiskEntry, Errno, Front, FrontEntry, ImageSource, OwnClient, PoolSpec,
    ProcessState, RunDir, VbdState, processes,
};
use tapio_stat::VbdId;
use tapio_types::parse_type_and_path;

use tapio_report::failure::{Result, print, print_json};

/// Longest wait for an answer that does not depend on the guest's requests.
const REPLY_TIMEOUT: Option<Duration> = Some(Duration::from_secs(30));

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio disk list                                          all disks and how they are reached
  tapio disk front add -p 4711 -m 0 --nbd-unix /run/a.sock
  tapio disk front add -p 4711 -m 0 --vhost-user /run/v.sock --queues 4
  tapio disk device attach 0                               prints the path of a block device
  tapio disk stats -m 0                                    latencies by stage
  tapio disk grow 0 20GiB
  tapio disk polling -p 4711 -m 0 --max-us 50 --idle-percent 30
  tapio disk mirror start -p 4711 -m 0 --target vhd:/new/a.vhd --wait
  tapio disk snapshot -p 4711 -m 0 /disks/new-leaf.vhd     the disk goes on meanwhile
  tapio disk commit -p 4711 -m 0 /disks/middle.vhd
  tapio disk restart -p 4711                               prints the new process
  tapio disk limit 0 --iops 500 --read-bps 50MiB --burst 2s
  tapio disk transfers 0 --split 64KiB
  tapio disk resume -p 4711 -m 0 --image vhd:/disks/snap.vhd --image vhd:/disks/base.vhd

'list' shows disks of a foreign tapdisk too; the other commands need a disk process of ours.")]
pub struct DiskArguments {
    #[command(subcommand)]
    command: Command,
}

/// Which disk.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Which {
    /// Process
    #[arg(short, long)]
    pub(crate) pid: i32,
    /// Minor number
    #[arg(short, long)]
    pub(crate) minor: u16,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all disks, their state and how they are reached
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Print counters and latencies by stage
    ///
    /// Read from shared memory: no process is asked, so this works also when one does not answer.
    Stats(stats::StatsArguments),
    /// Open an image; several name a chain, leaf first
    Open {
        #[command(flatten)]
        which: Which,
        /// An image, as vhd:/disks/a.vhd; repeat it to name the whole chain
        #[arg(short, long = "image", value_name = "TYPE:PATH", required = true)]
        images: Vec<String>,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
        #[command(flatten)]
        beside: Taps,
        /// Go on with the second image when the first is full, instead of writing to both
        #[arg(long, requires = "second")]
        standby: bool,
        /// A file with the key of an encrypted image, 32 or 64 bytes as they are
        #[arg(long, value_name = "PATH")]
        key_file: Option<PathBuf>,
        /// Share the page pool of an SR with its other disks; 704 pages of 4 KiB unless it has another number
        #[arg(long, value_name = "NAME[:PAGES]")]
        pool: Option<PoolSpec>,
        /// Bytes of a sector as guests are told: 512 or 4096; what a raw device has, 512 for other images
        #[arg(long, value_name = "BYTES")]
        sector_size: Option<u32>,
    },
    /// Make a disk larger while its guest uses it
    ///
    /// A dynamic VHD has a table with room for more blocks ('vhd-util create -S'), a raw file always grows. Where there
    /// is no room, data are moved while the guest waits, with a journal beside the image.
    Grow(grow::GrowArguments),
    /// Show disks on volumes that grow while they are written
    ///
    /// A thin disk of an SR on logical volumes asks for room before its volume is full. Each disk looks how long its
    /// volume is before it answers.
    Room(room::RoomArguments),
    /// Close the image
    Close {
        #[command(flatten)]
        which: Which,
        /// Do not wait for requests in flight
        #[arg(long)]
        force: bool,
    },
    /// Wait until all requests are answered and close the files; the guest waits
    Pause {
        #[command(flatten)]
        which: Which,
    },
    /// Go on, with another image or chain if one is given
    Resume {
        #[command(flatten)]
        which: Which,
        /// An image; repeat it to name the whole chain, leaf first
        #[arg(short, long = "image", value_name = "TYPE:PATH")]
        images: Vec<String>,
        #[command(flatten)]
        beside: Taps,
    },
    /// Keep a disk on two storages, and move it from one to the other
    #[command(subcommand)]
    Mirror(mirror::Command),
    /// Put a new image on top while the disk is used: what it was keeps its content
    Snapshot(images::Snapshot),
    /// Merge an image into its parent while the disk is used
    Commit(images::Commit),
    /// Follow, stop and slow down long work
    #[command(subcommand)]
    Job(images::Job),
    /// Add and remove ways to reach a disk
    #[command(subcommand)]
    Front(FrontCommand),
    /// Make a disk a block device of this host, and take it away
    #[command(subcommand)]
    Device(device::Command),
    /// Set adaptive polling: spin for new requests before sleeping
    Polling {
        #[command(flatten)]
        which: Which,
        /// Longest spin in microseconds; 0 switches it off
        #[arg(long)]
        max_us: u32,
        /// Spin only while at least this share of the host is idle
        #[arg(long, default_value_t = 50)]
        idle_percent: u8,
    },
    /// Replace a process by a new one, which serves the same disks in the same ways
    ///
    /// For an upgrade: guests that connect again by themselves notice a pause. Polling and limits are back at their
    /// defaults. A process that a service manager runs is restarted by that.
    Restart(restart::RestartArguments),
    /// Show or set what a disk may do: requests and bytes a second
    Limit(limit::LimitArguments),
    /// Show or set how a disk's requests go to its storage: long ones in pieces, neighbours as one
    Transfers(transfers::TransfersArguments),
    /// Print disks as the debug file of XenServer's blktap did: pool, queue, requests in flight with their age
    ///
    /// Numbers of the kernel's queue and device, which there is none of here, are 0 and 253. Two fields are added
    /// behind each request: its first sector and its age.
    Debug(debug::Chosen),
    /// Print where the rings of disks stand, as XenServer's io_ring files did
    ///
    /// Read from shared memory. A disk without a guest's ring (NBD, vhost-user, a device of this host) has its queue.
    Ring(debug::Chosen),
    /// Show page pools and the disks that share them
    ///
    /// Read from shared memory, as statistics are.
    Pool {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Close all disks of a process and end it
    Quit {
        /// Process
        #[arg(short, long)]
        pid: i32,
        /// Do not wait for requests in flight
        #[arg(long)]
        force: bool,
    },
}

/// The taps that a disk has from its first request on.
#[derive(Debug, Args)]
struct Taps {
    /// A second image to which every change goes too
    #[arg(long = "second", value_name = "TYPE:PATH")]
    second: Option<String>,
    /// Keep a log of changed blocks there
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

impl Taps {
    /// The disk process has another working directory than we.
    fn log(&self) -> Result<Option<PathBuf>> {
        self.log.as_deref().map(absolute).transpose()
    }
}

#[derive(Debug, Subcommand)]
enum FrontCommand {
    /// Serve a disk in one more way
    Add(Box<Add>),
    /// End a way to reach a disk; its clients are disconnected
    Remove {
        #[command(flatten)]
        which: Which,
        /// Its number, as 'front list' shows it
        id: u32,
        /// Also a device of this host that is in use: its users get errors
        #[arg(long)]
        force: bool,
    },
    /// List the ways to reach a disk
    List {
        #[command(flatten)]
        which: Which,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct Add {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    tls: tls::TlsArguments,
    #[command(flatten)]
    xen: blkif::RingArguments,
    /// Name of the NBD export; any name is served without
    #[arg(long, default_value = "")]
    export: String,
    /// Queues of a vhost-user disk
    #[arg(long, default_value_t = 1)]
    queues: u16,
    /// Most entries of a vhost-user queue, a power of two
    #[arg(long, default_value_t = 1024)]
    queue_size: u16,
    /// Refuse writes over this front end
    #[arg(long)]
    read_only: bool,
    /// Domain under which xsiostat shows it
    #[arg(long, requires = "devid")]
    domid: Option<u32>,
    /// Device under which xsiostat shows it
    #[arg(long, requires = "domid")]
    devid: Option<u32>,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct How {
    /// NBD on this UNIX socket
    #[arg(long, value_name = "PATH")]
    nbd_unix: Option<PathBuf>,
    /// NBD on this TCP address
    #[arg(long, value_name = "ADDRESS:PORT")]
    nbd_tcp: Option<SocketAddr>,
    /// vhost-user-blk on this UNIX socket
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<PathBuf>,
    /// The rings of this device of a Xen guest; '--ring' names each
    #[arg(long, value_name = "DOMID/DEVID", requires = "ring")]
    blkif: Option<String>,
}

impl Add {
    fn front(&self) -> Result<Front> {
        let (export, read_only) = (self.export.clone(), self.read_only);
        match &self.how {
            How { nbd_unix: Some(path), .. } => {
                Ok(Front::NbdUnix { path: absolute(path)?, listener: None, export, read_only })
            }
            How { nbd_tcp: Some(addr), .. } => {
                Ok(Front::NbdTcp { addr: *addr, tls: self.tls.settings()?, export, read_only, guard: None })
            }
            How { vhost_user: Some(socket), .. } => Ok(Front::VhostUser {
                socket: absolute(socket)?,
                listener: None,
                connection: None,
                queues: self.queues,
                queue_size: self.queue_size,
                read_only,
            }),
            How { blkif: Some(device), .. } => {
                self.xen.front(device, read_only).map(|front| Front::Blkif(Box::new(front)))
            }
            How { .. } => Err(ControlError::new(Errno::EINVAL, "no front end was named")),
        }
    }
}

/// The disk process has another working directory than we.
fn absolute(path: &std::path::Path) -> Result<PathBuf> {
    std::path::absolute(path)
        .map_err(|error| ControlError::io(format_args!("the path {}", path.display()), &error))
}

fn open_key(path: &std::path::Path) -> Result<std::fs::File> {
    std::fs::File::open(path)
        .map_err(|error| ControlError::io(format_args!("opening the key {}", path.display()), &error))
}

/// One image is a leaf whose parents are found from it; several are the chain itself.
fn source(images: &[String]) -> Result<Option<ImageSource>> {
    match images {
        [] => Ok(None),
        [leaf] => Ok(Some(ImageSource::Leaf(leaf.clone()))),
        chain => {
            let layers = chain.iter().map(|image| {
                parse_type_and_path(image)
                    .map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))
            });
            layers.collect::<Result<_>>().map(|layers| Some(ImageSource::Chain(layers)))
        }
    }
}

/// Asks a process one thing.
fn tell<C: DiskCommand>(run: &RunDir, pid: i32, ask: &C, timeout: Option<Duration>) -> Result<C::Reply> {
    OwnClient::connect(run, pid)?.call(ask, &[], timeout)
}

pub fn run(arguments: DiskArguments) -> Result<()> {
    let run = RunDir::from_env();
    match arguments.command {
        Command::List { json } => list(&run, json),
        Command::Stats(arguments) => stats::run(&arguments),
        Command::Grow(arguments) => grow::run(&run, &arguments),
        Command::Room(arguments) => room::run(&run, &arguments),
        Command::Open {
            which: Which { pid, minor },
            images,
            read_only,
            beside,
            standby,
            key_file,
            pool,
            sector_size,
        } => {
            let image =
                source(&images)?.ok_or_else(|| ControlError::new(Errno::EINVAL, "no image was named"))?;
            // The process may not be allowed to open it by itself.
            let key = key_file.as_deref().map(open_key).transpose()?;
            let open = ask::Open {
                minor,
                image,
                read_only,
                timeout_s: None,
                default_nbd: false,
                log: beside.log()?,
                secondary: beside.second,
                standby,
                key: key.is_some().then_some(0),
                key_file: None,
                pool,
                sector_size,
                share: None,
            };
            let fds: Vec<_> = key.iter().map(AsFd::as_fd).collect();
            OwnClient::connect(&run, pid)?.call(&open, &fds, REPLY_TIMEOUT).map(drop)
        }
        Command::Close { which: Which { pid, minor }, force } => {
            tell(&run, pid, &ask::Close { minor, force }, None).map(drop)
        }
        Command::Pause { which: Which { pid, minor } } => {
            tell(&run, pid, &ask::Pause { minor }, None).map(drop)
        }
        Command::Resume { which: Which { pid, minor }, images, beside } => {
            let (image, log) = (source(&images)?, beside.log()?);
            let ask = ask::Resume { minor, image, secondary: beside.second, log };
            tell(&run, pid, &ask, REPLY_TIMEOUT).map(drop)
        }
        Command::Mirror(command) => mirror::run(&run, command),
        Command::Snapshot(arguments) => images::snapshot(&run, &arguments),
        Command::Commit(arguments) => images::commit(&run, &arguments),
        Command::Job(command) => images::job(&run, command),
        Command::Front(command) => front(&run, command),
        Command::Device(command) => device::run(&run, command),
        Command::Polling { which: Which { pid, minor }, max_us, idle_percent } => {
            tell(&run, pid, &ask::SetPolling { minor, max_us, idle_percent }, REPLY_TIMEOUT).map(drop)
        }
        Command::Restart(arguments) => restart::run(&run, &arguments),
        Command::Limit(arguments) => limit::run(&run, &arguments),
        Command::Transfers(arguments) => transfers::run(&run, &arguments),
        Command::Debug(chosen) => debug::run(&run, &chosen),
        Command::Ring(chosen) => debug::rings(&chosen),
        Command::Pool { json } => limit::show_pools(json),
        Command::Quit { pid, force } => tell(&run, pid, &ask::Quit { force }, None).map(drop),
    }
}

fn front(run: &RunDir, command: FrontCommand) -> Result<()> {
    match command {
        FrontCommand::Add(add) => {
            let Which { pid, minor } = add.which;
            let vbd = add.domid.zip(add.devid).map(|(domid, devid)| VbdId { domid, devid });
            let ask = ask::FrontAdd { minor, front: add.front()?, vbd };
            let added = tell(run, pid, &ask, REPLY_TIMEOUT)?;
            print(&format!("{}\n", added.id))
        }
        FrontCommand::Remove { which: Which { pid, minor }, id, force } => {
            tell(run, pid, &ask::FrontRemove { minor, front: id, force }, REPLY_TIMEOUT).map(drop)
        }
        FrontCommand::List { which: Which { pid, minor }, json } => {
            let fronts = tell(run, pid, &ask::FrontList { minor }, REPLY_TIMEOUT)?;
            if json {
                return print_json(&fronts);
            }
            let mut text = format!("{:>4} {:<10} {:>11} {:>7} ADDRESS\n", "ID", "KIND", "DOM,VBD", "CLIENTS");
            for front in &fronts {
                text.push_str(&front_line(front));
            }
            print(&text)
        }
    }
}

fn front_line(front: &FrontEntry) -> String {
    format!(
        "{:>4} {:<10} {:>11} {:>7} {}\n",
        front.id,
        front.front.kind(),
        front.vbd.to_string(),
        front.connections,
        front.front.address()
    )
}

/// A disk in the list.
#[derive(Debug, Serialize)]
struct Listed {
    pid: i32,
    /// The program; empty for a foreign tapdisk.
    program: String,
    #[serde(flatten)]
    disk: DiskEntry,
}

fn list(run: &RunDir, json: bool) -> Result<()> {
    let (mut listed, mut silent) = (Vec::new(), Ok(()));
    for process in processes(run)? {
        let asked = match process.state {
            ProcessState::Live { pid } => disks_of(run, process.id).map(|found| (pid, found)),
            ProcessState::Stale => continue,
            ProcessState::Silent(error) => Err(error),
        };
        match asked {
            Ok((pid, (program, disks))) => {
                listed.extend(disks.into_iter().map(|disk| Listed { pid, program: program.clone(), disk }));
            }
            // It ended between the two questions.
            Err(error) if matches!(error.errno, Errno::ECONNREFUSED | Errno::ENOENT | Errno::ECONNRESET) => {}
            // The others are shown all the same.
            Err(error) => silent = silent.and(Err(error)),
        }
    }
    if json {
        print_json(&listed)?;
    } else {
        print(&table(&listed))?;
    }
    silent
}

/// The program of a process and its disks.
pub(crate) fn disks_of(run: &RunDir, id: i32) -> Result<(String, Vec<DiskEntry>)> {
    match OwnClient::connect(run, id) {
        Ok(mut own) => {
            let program = format!("{} {}", own.hello().program, own.hello().program_version);
            own.call(&ask::List {}, &[], REPLY_TIMEOUT).map(|disks| (program, disks))
        }
        Err(error) if error.errno == Errno::EPROTO => Ok((String::new(), foreign(run, id)?)),
        Err(error) => Err(error),
    }
}

/// The disks of a process that speaks the tapdisk protocol only.
fn foreign(run: &RunDir, id: i32) -> Result<Vec<DiskEntry>> {
    let state = |bits: i32| match bits {
        bits if bits & 0x200 != 0 => VbdState::ResumeFailed,
        bits if bits & 0x20 != 0 => VbdState::Paused,
        bits if bits & 0x10 != 0 => VbdState::Pausing,
        bits if bits & 0x40 != 0 => VbdState::Closing,
        bits if bits & 0x2 != 0 => VbdState::Closed,
        _ => VbdState::Running,
    };
    let disks = Client::new(run, id).list()?;
    let entry = |disk: tapio_control::List| {
        Some(DiskEntry {
            minor: u16::try_from(disk.minor).ok()?,
            state: state(disk.state),
            image: Some(disk.path).filter(|path| !path.is_empty()),
            read_only: false,
            fronts: Vec::new(),
        })
    };
    Ok(disks.into_iter().filter_map(entry).collect())
}

fn table(listed: &[Listed]) -> String {
    let mut text = format!("{:>8} {:>5} {:<13} IMAGE\n", "PID", "MINOR", "STATE");
    for Listed { pid, disk, .. } in listed {
        // The enum's names on the wire are the names for people.
        let state = serde_json::to_value(disk.state).ok();
        let state = state.as_ref().and_then(Value::as_str).unwrap_or("-");
        let read_only = if disk.read_only { " (read only)" } else { "" };
        let image = disk.image.as_deref().unwrap_or("-");
        text.push_str(&format!("{pid:>8} {:>5} {state:<13} {image}{read_only}\n", disk.minor));
        for front in &disk.fronts {
            text.push_str(&format!(
                "{:>15} {} {} ({} clients)\n",
                front.id,
                front.front.kind(),
                front.front.address(),
                front.connections
            ));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_image_is_a_leaf_and_several_are_a_chain() {
        assert_eq!(source(&[]).expect("none"), None);
        let leaf = source(&["vhd:/a".into()]).expect("a leaf");
        assert_eq!(leaf, Some(ImageSource::Leaf("vhd:/a".into())));
        let Some(ImageSource::Chain(layers)) = source(&["vhd:/a".into(), "aio:/b".into()]).expect("a chain")
        else {
            panic!("not a chain");
        };
        assert_eq!(layers.iter().map(ToString::to_string).collect::<Vec<_>>(), ["vhd:/a", "aio:/b"]);
        assert_eq!(
            source(&["vhd:/a".into(), "tar:/b".into()]).expect_err("no such type").errno,
            Errno::EINVAL
        );
    }

    #[test]
    fn the_table_shows_fronts_below_their_disk() {
        let front =
            Front::NbdUnix { path: "/s".into(), listener: None, export: String::new(), read_only: false };
        let entry = FrontEntry { id: 1, front, vbd: VbdId { domid: 0, devid: 3 }, connections: 2 };
        let disk = DiskEntry {
            minor: 3,
            state: VbdState::Paused,
            image: Some("vhd:/a".into()),
            read_only: true,
            fronts: vec![entry],
        };
        let text = table(&[Listed { pid: 7, program: String::new(), disk }]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "       7     3 paused        vhd:/a (read only)");
        assert_eq!(lines[2], "              1 nbd-unix /s (2 clients)");
    }
}
