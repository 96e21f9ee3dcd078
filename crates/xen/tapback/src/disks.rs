//! Disk processes: connecting a ring, and letting go of it.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tapio_control::{
    Blkif, BlkifFront, BlkifProtocol, Client, ControlError, DiskInfo, Errno, Front, OwnClient, Polling,
    RingStart, RunDir, command,
};
use tapio_stat::VbdId;
use tapio_types::Movement;

use crate::locate::{DiskAt, Wanted};
use crate::values::Fault;

/// How long a disk process may take to connect a ring: it maps pages and answers.
const CONNECT_TIME: Duration = Duration::from_secs(30);
/// How long it may take to let go of one: requests in flight are finished first.
const DISCONNECT_TIME: Duration = Duration::from_secs(180);
/// How long a question may take.
const ASK_TIME: Duration = Duration::from_secs(10);

/// What a ring needs to be connected.
#[derive(Clone, Debug)]
pub struct Order {
    /// Where its disk is.
    pub wanted: Wanted,
    /// Where it was before.
    pub before: Option<DiskAt>,
    /// A foreign tapdisk will do: the guest was offered no more than that can.
    pub tapdisk: bool,
    /// The rings.
    pub front: BlkifFront,
}

/// A ring that a disk process serves.
#[derive(Debug)]
pub struct Linked {
    /// Which disk.
    pub at: DiskAt,
    /// What it is.
    pub info: DiskInfo,
    /// The number of its front end; `None` in a foreign tapdisk.
    pub front: Option<u32>,
    /// Becomes readable when the process ends.
    pub alive: Option<OwnedFd>,
    /// Bytes come when the disk may have grown; `None` in a process that cannot tell.
    pub news: Option<UnixStream>,
    /// It was served already: by this very ring.
    pub adopted: bool,
}

/// Where a job was to be done, without what keeps it alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Which disk.
    pub at: DiskAt,
    /// The number of its front end.
    pub front: Option<u32>,
    /// Domain and device.
    pub vbd: VbdId,
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The process is not there or not ready: it is tried again.
    Absent(String),
    /// It refuses, and will refuse again.
    Refused(Fault),
}

/// Disk processes, or doubles of them.
pub trait Disks: Send + Sync + 'static {
    /// Finds the process and has it serve the ring. If it does already, nothing happens.
    ///
    /// # Errors
    /// See [`Trouble`].
    fn connect(&self, order: &Order) -> Result<Linked, Trouble>;

    /// Has it let go of a ring; with `force` without finishing what is in flight. A process that is gone has let go.
    ///
    /// # Errors
    /// It has not.
    fn disconnect(&self, link: &Link, force: bool) -> Result<(), Trouble>;

    /// What the disk is now.
    ///
    /// # Errors
    /// It does not say.
    fn info(&self, link: &Link) -> Result<DiskInfo, Trouble>;

    /// How it shall poll.
    ///
    /// # Errors
    /// It refuses.
    fn set_polling(&self, link: &Link, polling: Polling) -> Result<(), Trouble>;
}

/// The disk processes of this host, by their control sockets.
#[derive(Clone, Debug)]
pub struct Processes {
    run: RunDir,
}

impl Processes {
    /// Those whose sockets are in a directory.
    pub fn new(run: RunDir) -> Self {
        Self { run }
    }

    fn own(&self, pid: i32) -> Result<Option<OwnClient>, ControlError> {
        match OwnClient::connect(&self.run, pid) {
            Ok(client) => {
                let understands = client.hello().features.iter().any(|feature| feature == "blkif");
                Ok(understands.then_some(client))
            }
            Err(error) if error.errno == Errno::EPROTO => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// By our own protocol, which knows of all rings that there are.
    fn serve(
        &self,
        client: &mut OwnClient,
        at: &DiskAt,
        front: &BlkifFront,
    ) -> Result<(u32, bool), ControlError> {
        let minor = at.minor;
        let fronts = client.call(&command::FrontList { minor }, &[], Some(ASK_TIME))?;
        for entry in fronts {
            let Front::Blkif(there) = &entry.front else { continue };
            if (there.domid, there.devid) != (front.domid, front.devid) {
                continue;
            }
            // A guest that has not been told that it is connected has not used its ring: that begins anew.
            let goes_on = front.start != RingStart::Fresh;
            if goes_on && there.queues == front.queues && there.protocol == front.protocol {
                return Ok((entry.id, true));
            }
            // A ring that the guest has left.
            let remove = command::FrontRemove { minor, front: entry.id, force: true };
            client.call(&remove, &[], Some(DISCONNECT_TIME))?;
        }
        let vbd = Some(VbdId { domid: front.domid, devid: front.devid });
        let mut front = front.clone();
        let add = |front: &BlkifFront| command::FrontAdd {
            minor,
            front: Front::Blkif(Box::new(front.clone())),
            vbd,
        };
        let added = match client.call(&add(&front), &[], Some(CONNECT_TIME)) {
            // Its storage must not get pages of the guest. A guest that keeps using the same pages need not know.
            Err(error)
                if error.errno == Errno::EOPNOTSUPP
                    && matches!(front.movement, Movement::Map | Movement::Persistent) =>
            {
                say!("{error}: its pages are copied");
                front.movement = Movement::Copy;
                client.call(&add(&front), &[], Some(CONNECT_TIME))
            }
            added => added,
        };
        Ok((added?.id, false))
    }

    /// By tapdisk's protocol.
    fn serve_foreign(&self, at: &DiskAt, front: &BlkifFront) -> Result<bool, ControlError> {
        let ring = blkif_message(front)?;
        match Client::new(&self.run, at.pid).connect_ring(at.minor, &ring, Some(CONNECT_TIME)) {
            Ok(()) => Ok(false),
            Err(error) if matches!(error.errno, Errno::EALREADY | Errno::EEXIST) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Has the process tell when the disk may have grown, and what the disk is now; `None` when it cannot tell.
fn follow(
    client: &mut OwnClient,
    minor: u16,
    front: u32,
) -> Result<Option<(UnixStream, DiskInfo)>, ControlError> {
    if !client.hello().features.iter().any(|feature| feature == "follow") {
        return Ok(None);
    }
    let pair = UnixStream::pair().and_then(|(ours, theirs)| {
        ours.set_nonblocking(true)?;
        Ok((ours, theirs))
    });
    let (ours, theirs) = pair.map_err(|error| ControlError::io("a pair of sockets", &error))?;
    let info = client.call(&command::FrontFollow { minor, front }, &[theirs.as_fd()], Some(ASK_TIME))?;
    Ok(Some((ours, info)))
}

impl Disks for Processes {
    fn connect(&self, order: &Order) -> Result<Linked, Trouble> {
        let at = order
            .wanted
            .find(&self.run, order.before.as_ref())
            .ok_or_else(|| Trouble::Absent("its disk process is not there".into()))?;
        // Before anything is asked of it: a process that ends meanwhile is noticed.
        let alive = watch_process(at.pid);
        let client = Client::new(&self.run, at.pid);
        let mut info = client.disk_info(at.minor).map_err(trouble)?;
        let mut news = None;
        let (front, adopted) = match self.own(at.pid).map_err(trouble)? {
            Some(mut own) => {
                let mut front = order.front.clone();
                front.sector_size = if info.sector_size == 4096 { 4096 } else { 512 };
                let (id, adopted) = self.serve(&mut own, &at, &front).map_err(trouble)?;
                if let Some((stream, now)) = follow(&mut own, at.minor, id).map_err(trouble)? {
                    (news, info) = (Some(stream), now);
                }
                (Some(id), adopted)
            }
            None if !order.tapdisk => {
                return Err(Trouble::Refused(Fault {
                    errno: libc::EOPNOTSUPP,
                    text: format!(
                        "process {} is a foreign tapdisk and cannot do what the guest was offered; use --tapdisk",
                        at.pid
                    ),
                }));
            }
            None => (None, self.serve_foreign(&at, &order.front).map_err(trouble)?),
        };
        Ok(Linked { at, info, front, alive, news, adopted })
    }

    fn disconnect(&self, link: &Link, force: bool) -> Result<(), Trouble> {
        let (pid, minor) = (link.at.pid, link.at.minor);
        let done = match link.front {
            Some(front) => OwnClient::connect(&self.run, pid).and_then(|mut own| {
                let remove = command::FrontRemove { minor, front, force };
                own.call(&remove, &[], Some(DISCONNECT_TIME)).map(drop)
            }),
            None => Client::new(&self.run, pid).disconnect_ring(
                minor,
                link.vbd.domid,
                link.vbd.devid,
                Some(DISCONNECT_TIME),
            ),
        };
        match done {
            Err(error) if !is_gone(error.errno) => Err(trouble(error)),
            _ => Ok(()),
        }
    }

    fn info(&self, link: &Link) -> Result<DiskInfo, Trouble> {
        Client::new(&self.run, link.at.pid).disk_info(link.at.minor).map_err(trouble)
    }

    fn set_polling(&self, link: &Link, polling: Polling) -> Result<(), Trouble> {
        let Some(mut own) = self.own(link.at.pid).map_err(trouble)? else {
            // A foreign tapdisk takes it with the ring, and never again.
            return Ok(());
        };
        let set = command::SetPolling::of(link.at.minor, polling);
        own.call(&set, &[], Some(ASK_TIME)).map(drop).map_err(trouble)
    }
}

/// The ring as tapdisk is told of it.
///
/// # Errors
/// It has what that cannot say: several queues, or rings of responses.
fn blkif_message(front: &BlkifFront) -> Result<Blkif, ControlError> {
    let [queue] = front.queues.as_slice() else {
        return Err(ControlError::new(Errno::EINVAL, "a foreign tapdisk serves one queue"));
    };
    let mut gref = [0; 8];
    let pages = queue.ring.len();
    if !queue.responses.is_empty() || !pages.is_power_of_two() || pages > gref.len() {
        return Err(ControlError::new(Errno::EINVAL, "a foreign tapdisk serves ordinary rings alone"));
    }
    gref[..pages].copy_from_slice(&queue.ring);
    let polling = front.polling.unwrap_or(Polling { max_us: 0, idle_percent: 0 });
    Ok(Blkif {
        domid: front.domid,
        devid: front.devid,
        gref,
        order: pages.trailing_zeros(),
        proto: match front.protocol {
            BlkifProtocol::X86_32 => 2,
            BlkifProtocol::X86_64 => 3,
        },
        pool: String::new(),
        port: queue.port,
        poll_duration: polling.max_us,
        poll_idle_threshold: polling.idle_percent.into(),
    })
}

/// The process or the ring is not there any more.
fn is_gone(errno: Errno) -> bool {
    [Errno::ENOENT, Errno::ECONNREFUSED, Errno::ECONNRESET, Errno::EPIPE, Errno::ENODEV].contains(&errno)
}

/// Errors that pass. `EEXIST`: the connection that a former tapback asked for was made after we had looked.
const PASSING: [Errno; 5] = [Errno::EBUSY, Errno::EAGAIN, Errno::ETIMEDOUT, Errno::ENOMEM, Errno::EEXIST];

fn trouble(error: ControlError) -> Trouble {
    let passes = is_gone(error.errno) || PASSING.contains(&error.errno);
    if passes {
        return Trouble::Absent(error.to_string());
    }
    Trouble::Refused(Fault { errno: error.errno.raw(), text: error.to_string() })
}

/// A descriptor that becomes readable when the process ends. `None` on kernels before 5.3, and if it is gone already:
/// then its socket says so.
fn watch_process(pid: i32) -> Option<OwnedFd> {
    tapio_sys::process::open(u32::try_from(pid).ok()?).ok()
}

/// Whether it has ended.
pub(crate) fn has_ended(alive: &OwnedFd) -> bool {
    tapio_sys::poll::is_readable(alive, Duration::ZERO).unwrap_or(false)
}

/// Whether there is news; it is taken. A process that closed the connection is let go of, and that is news too.
pub(crate) fn take_news(news: &mut Option<UnixStream>) -> bool {
    let Some(stream) = news else { return false };
    // More than this wakes again.
    let mut bytes = [0; 64];
    let taken = stream.read(&mut bytes);
    if matches!(taken, Ok(0)) {
        *news = None;
    }
    taken.is_ok()
}

/// The plain way in which a ring begins.
pub(crate) fn start_of(recovers: bool) -> RingStart {
    if recovers { RingStart::Auto } else { RingStart::Fresh }
}

#[cfg(test)]
mod tests {
    use tapio_control::BlkifQueue;

    use super::*;

    #[test]
    fn a_foreign_tapdisk_gets_what_it_can_understand() {
        let queue = |ring: &[u32]| BlkifQueue { ring: ring.to_vec(), port: 9, ..BlkifQueue::default() };
        let mut front = BlkifFront::new(3, 51712, vec![queue(&[8, 9, 10, 11])]);
        let message = blkif_message(&front).unwrap();
        assert_eq!((message.order, message.proto, message.port), (2, 3, 9));
        assert_eq!(message.gref, [8, 9, 10, 11, 0, 0, 0, 0]);
        assert_eq!(BlkifFront::from_message(&message).unwrap().queues, front.queues);
        front.queues.push(queue(&[1]));
        assert!(blkif_message(&front).is_err());
        front.queues = vec![BlkifQueue { responses: vec![1], ..queue(&[1]) }];
        assert!(blkif_message(&front).is_err());
    }

    #[test]
    fn a_process_that_is_not_there_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let disks = Processes::new(RunDir::new(dir.path()));
        let wanted = Wanted { pid: Some(1 << 22), minor: Some(3), image: None };
        let front = BlkifFront::new(3, 51712, Vec::new());
        let order = Order { wanted, before: None, tapdisk: false, front };
        assert!(matches!(disks.connect(&order), Err(Trouble::Absent(_))));
        let at = DiskAt { pid: 1 << 22, minor: 3, image: String::new() };
        let link = Link { at, front: Some(1), vbd: VbdId { domid: 3, devid: 51712 } };
        assert_eq!(disks.disconnect(&link, false), Ok(()), "it has let go of everything");
        assert!(matches!(disks.info(&link), Err(Trouble::Absent(_))));
    }

    #[test]
    fn the_end_of_a_process_is_noticed() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let alive = watch_process(child.id().try_into().unwrap());
        if let Some(alive) = &alive {
            assert!(!has_ended(alive));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(alive.is_none_or(|alive| has_ended(&alive)));
        assert!(watch_process(-1).is_none());
    }
}
