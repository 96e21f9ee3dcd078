//! The other three: toolstack, guest, disk processes.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tapio_control::{BlkifFront, DiskInfo, Polling, RingStart};
use tapio_stat::VbdId;
use tapio_tapback::{DiskAt, Disks, Link, Linked, Order, Plugged, Settings, Tapback, Trouble};
use tapio_xenstore::{Client, Nodes};
use tapio_xenstored::serve::Running;

/// How long anything may take on a host that is busy with other things.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Disk processes that exist only here, as one process of the program reaches them: the threads of one that has ended
/// reach nothing.
#[derive(Clone, Default)]
pub struct Fakes(Arc<(Mutex<FakeState>, Condvar)>, u32);

#[derive(Default)]
pub struct FakeState {
    /// By the disk's number: the process, and the end of a pair whose closing is its death.
    pub processes: BTreeMap<u16, (i32, UnixStream, UnixStream)>,
    pub rings: BTreeMap<VbdId, (i32, BlkifFront)>,
    pub log: Vec<String>,
    pub info: Option<DiskInfo>,
    /// The processes are foreign: they tell nothing.
    pub foreign: bool,
    /// The connections that are told of a disk that grows, and how often a disk process was asked.
    pub followers: BTreeMap<VbdId, UnixStream>,
    pub asked: usize,
    pub refuse: Option<Trouble>,
    /// Connecting waits.
    pub held: bool,
    pub polling: Option<Polling>,
    generation: u32,
}

impl Fakes {
    fn next(&self) -> Self {
        self.state().generation += 1;
        Self(self.0.clone(), self.1 + 1)
    }

    fn alive(&self) -> Result<MutexGuard<'_, FakeState>, Trouble> {
        let state = self.state();
        if state.generation == self.1 { Ok(state) } else { Err(Trouble::Absent("killed".into())) }
    }

    pub fn state(&self) -> MutexGuard<'_, FakeState> {
        self.0.0.lock().unwrap()
    }

    pub fn start(&self, minor: u16, pid: i32) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.state().processes.insert(minor, (pid, ours, theirs));
    }

    /// Its rings die with it.
    pub fn kill(&self, minor: u16) {
        let mut state = self.state();
        let (pid, ..) = state.processes.remove(&minor).expect("a process");
        state.rings.retain(|_, (owner, _)| *owner != pid);
    }

    /// All disks have another size, and say so if they can.
    pub fn grow(&self, info: DiskInfo) {
        let mut state = self.state();
        state.info = Some(info);
        for follower in state.followers.values_mut() {
            follower.write_all(&[1]).unwrap();
        }
    }

    pub fn hold(&self, held: bool) {
        self.state().held = held;
        self.0.1.notify_all();
    }

    pub fn ring(&self, id: VbdId) -> Option<BlkifFront> {
        self.state().rings.get(&id).map(|(_, front)| front.clone())
    }

    pub fn log(&self) -> Vec<String> {
        self.state().log.clone()
    }
}

impl Disks for Fakes {
    fn connect(&self, order: &Order) -> Result<Linked, Trouble> {
        let mut state = self.alive()?;
        while state.held {
            state = self.0.1.wait(state).unwrap();
        }
        if let Some(trouble) = &state.refuse {
            return Err(trouble.clone());
        }
        let id = VbdId { domid: order.front.domid, devid: order.front.devid };
        order.front.check(0).map_err(|error| Trouble::Absent(error.to_string()))?;
        let minor = order.wanted.minor.ok_or_else(|| Trouble::Absent("no minor".into()))?;
        let Some((pid, ours, _)) = state.processes.get(&minor) else {
            return Err(Trouble::Absent(format!("no disk {minor}")));
        };
        let (pid, alive) = (*pid, OwnedFd::from(ours.try_clone().unwrap()));
        let there = state.rings.get(&id).is_some_and(|(_, front)| front.queues == order.front.queues);
        let adopted = there && order.front.start != RingStart::Fresh;
        if !adopted {
            state.log.push(format!("connect {id} to {minor} of {pid} {:?}", order.front.start));
            state.rings.insert(id, (pid, order.front.clone()));
        }
        let info = state.info.unwrap_or(DiskInfo { sectors: 2048, sector_size: 512, info: 0 });
        let news = (!state.foreign).then(|| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            state.followers.insert(id, theirs);
            ours
        });
        let at = DiskAt { pid, minor, image: format!("vhd:/disks/{minor}") };
        Ok(Linked { at, info, front: Some(1), alive: Some(alive), news, adopted })
    }

    fn disconnect(&self, link: &Link, force: bool) -> Result<(), Trouble> {
        let mut state = self.alive()?;
        state.rings.remove(&link.vbd);
        state.log.push(format!("disconnect {}{}", link.vbd, if force { " by force" } else { "" }));
        Ok(())
    }

    fn info(&self, _: &Link) -> Result<DiskInfo, Trouble> {
        let mut state = self.state();
        state.asked += 1;
        state.info.ok_or_else(|| Trouble::Absent("paused".into()))
    }

    fn set_polling(&self, _: &Link, polling: Polling) -> Result<(), Trouble> {
        self.state().polling = Some(polling);
        Ok(())
    }
}

/// A host.
pub struct World {
    pub fakes: Fakes,
    pub tapback: Tapback<Fakes>,
    pub settings: Settings,
    /// Of the toolstack and the guests.
    pub client: Client,
    pub plugged: Vec<Plugged>,
    store: Running,
    _dir: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        Self::with(Settings::default())
    }

    pub fn with(settings: Settings) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Running::start(&dir.path().join("socket")).unwrap();
        let fakes = Fakes::default();
        let connect = || Client::connect(store.path()).unwrap();
        let tapback = Tapback::new(connect(), fakes.clone(), settings.clone()).unwrap();
        let client = connect();
        Self { fakes, tapback, settings, client, plugged: Vec::new(), store, _dir: dir }
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.store.path()).unwrap()
    }

    /// Another process of the program goes on.
    pub fn restart(&mut self) {
        self.fakes = self.fakes.next();
        self.tapback = Tapback::new(self.connect(), self.fakes.clone(), self.settings.clone()).unwrap();
    }

    pub fn turn(&mut self) {
        self.tapback.turn(Some(Instant::now() + Duration::from_millis(2)), None).unwrap();
        self.plugged.extend(self.tapback.take_plugged());
    }

    /// Works on until something is true.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut is: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        while !is(self) {
            assert!(started.elapsed() < TIMEOUT, "it never came to this: {what}; {:?}", self.fakes.log());
            self.turn();
        }
    }

    /// Works until there is nothing to do; events on their way may come later.
    pub fn settle(&mut self) {
        for _ in 0..3 {
            self.turn();
            while !self.tapback.is_quiet() {
                self.turn();
            }
        }
    }

    pub fn back(id: VbdId, name: &str) -> String {
        format!("/local/domain/0/backend/vbd3/{}/{}/{name}", id.domid, id.devid)
    }

    pub fn front(id: VbdId, name: &str) -> String {
        format!("/local/domain/{}/device/vbd/{}/{name}", id.domid, id.devid)
    }

    pub fn error(id: VbdId) -> String {
        format!("/local/domain/0/error/backend/vbd3/{}/{}/error", id.domid, id.devid)
    }

    pub fn value(&mut self, path: &str) -> Option<String> {
        self.client.read_text(path).unwrap()
    }

    pub fn back_state(&mut self, id: VbdId) -> Option<String> {
        self.value(&Self::back(id, "state"))
    }

    #[track_caller]
    pub fn until_state(&mut self, id: VbdId, state: &str) {
        self.until(&format!("back end {id} in state {state}"), |world| {
            world.back_state(id).as_deref() == Some(state)
        });
    }

    /// What the toolstack writes in the back end's directory.
    pub fn back_nodes(id: VbdId, pid: i32, minor: u16) -> Vec<(String, String)> {
        let frontend = format!("/local/domain/{}/device/vbd/{}", id.domid, id.devid);
        [
            ("frontend", frontend),
            ("frontend-id", id.domid.to_string()),
            ("mode", "w".into()),
            ("physical-device-path", format!("/run/blktap-control/nbd{pid}.{minor}")),
            ("online", "1".into()),
            ("state", "1".into()),
        ]
        .into_iter()
        .map(|(name, value)| (Self::back(id, name), value))
        .collect()
    }

    /// The toolstack plugs a disk, in one transaction.
    pub fn plug(&mut self, id: VbdId, pid: i32, minor: u16) {
        let mut nodes = Self::back_nodes(id, pid, minor);
        nodes.push((Self::front(id, "state"), "1".into()));
        self.client.transaction(|t| t.write_many(&nodes)).unwrap();
    }

    /// The guest offers a ring.
    pub fn offer_ring(&mut self, id: VbdId, grant: u32) {
        let nodes = [
            ("ring-ref", grant.to_string()),
            ("event-channel", (grant + 100).to_string()),
            ("protocol", "x86_64-abi".into()),
            ("state", "3".into()),
        ]
        .map(|(name, value)| (Self::front(id, name), value));
        self.client.transaction(|t| t.write_many(&nodes)).unwrap();
    }

    pub fn set_front(&mut self, id: VbdId, state: &str) {
        self.client.write(&Self::front(id, "state"), state).unwrap();
    }

    pub fn remove(&mut self, id: VbdId) {
        let (back, front) = (Self::back(id, ""), Self::front(id, ""));
        self.client
            .transaction(|t| {
                t.remove(back.trim_end_matches('/'))?;
                t.remove(front.trim_end_matches('/'))
            })
            .unwrap();
    }

    /// Plugged, and connected by the guest.
    pub fn connected(&mut self, id: VbdId, minor: u16) {
        let there = self.fakes.state().processes.contains_key(&minor);
        if !there {
            self.fakes.start(minor, 4000 + i32::from(minor));
        }
        self.plug(id, 4000 + i32::from(minor), minor);
        self.until_state(id, "2");
        self.offer_ring(id, 8);
        self.until_state(id, "4");
        self.set_front(id, "4");
        self.settle();
    }
}

pub fn vbd(domid: u32, devid: u32) -> VbdId {
    VbdId { domid, devid }
}
