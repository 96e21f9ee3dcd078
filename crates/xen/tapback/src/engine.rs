//! The program's loop: events become devices to look at, looks become writes and jobs, jobs become looks again.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_stat::VbdId;
use tapio_xenstore::wire::decimal;
use tapio_xenstore::{Client, Counts, Nodes, WatchEvent, XenbusState, XsError};

use crate::device::{Device, Offer};
use crate::disks::{Disks, Linked, Trouble, has_ended, take_news};
use crate::jobs::{Job, Jobs, Outcome};
use crate::keys;
use crate::plan::{Next, Places, Plan, look};
use crate::table::Ring;
use crate::values::Fault;

/// Devices that one transaction looks at: with more of them another client's change would break it more often.
const BATCH_MAX: usize = 64;
/// Before another attempt, after a failure that only time can cure.
const PAUSE: Duration = Duration::from_secs(1);

/// How the program does its work.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Kind of back end, as `vbd3`.
    pub name: String,
    /// Domain that this program runs in.
    pub own_domid: u32,
    /// What guests are offered.
    pub offer: Offer,
    /// How often a disk is asked whether it has grown whose process cannot tell; never when zero.
    pub length_every: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "vbd3".into(),
            own_domid: 0,
            offer: Offer::default(),
            length_every: Duration::from_secs(5),
        }
    }
}

impl Settings {
    fn next_question(&self, now: Instant) -> Option<Instant> {
        (!self.length_every.is_zero()).then(|| now + self.length_every)
    }
}

/// What connecting a device took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugged {
    /// Which.
    pub id: VbdId,
    /// The disk process.
    pub pid: i32,
    /// Requests to xenstored since the device was seen first, or since it was connected last.
    pub cost: Counts,
    /// Time since then.
    pub took: Duration,
    /// The ring was served already, or again after its disk process died.
    pub recovered: bool,
}

/// Connects the devices of one kind of back end.
#[derive(Debug)]
pub struct Tapback<D> {
    client: Client,
    jobs: Jobs<D>,
    settings: Settings,
    places: Places,
    devices: BTreeMap<VbdId, Device>,
    /// To be looked at.
    dirty: BTreeSet<VbdId>,
    /// Of these the state was written, perhaps by this program.
    poked: BTreeSet<VbdId>,
    /// Directories whose devices are to be listed: of all domains, or of one.
    scan: BTreeSet<Option<u32>>,
    plugged: Vec<Plugged>,
}

impl<D: Disks> Tapback<D> {
    /// Begins to watch; what is there already is taken over at the first turns.
    ///
    /// # Errors
    /// xenstored refuses, or there are no descriptors.
    pub fn new(client: Client, disks: D, settings: Settings) -> Result<Self, XsError> {
        let jobs = Jobs::new(Arc::new(disks))
            .map_err(|error| XsError::Io { address: "a pair of sockets".into(), error })?;
        let places = Places::new(settings.own_domid, &settings.name);
        let mut tapback = Self {
            client,
            jobs,
            settings,
            places,
            devices: BTreeMap::new(),
            dirty: BTreeSet::new(),
            poked: BTreeSet::new(),
            scan: BTreeSet::new(),
            plugged: Vec::new(),
        };
        tapback.watch_root()?;
        Ok(tapback)
    }

    /// Goes on with another connection after xenstored was restarted; rings stay as they are.
    ///
    /// # Errors
    /// It refuses again.
    pub fn reconnect(&mut self, client: Client) -> Result<(), XsError> {
        self.client = client;
        for (id, device) in &mut self.devices {
            device.watch = None;
            self.dirty.insert(*id);
        }
        self.watch_root()
    }

    fn watch_root(&mut self) -> Result<(), XsError> {
        self.scan.insert(None);
        self.client.watch(&self.places.root, "back").map(drop)
    }

    /// Devices that were connected since it was asked last.
    pub fn take_plugged(&mut self) -> Vec<Plugged> {
        std::mem::take(&mut self.plugged)
    }

    /// What was asked of xenstored so far.
    pub fn counts(&self) -> Counts {
        self.client.counts()
    }

    /// Devices that are known, and how many of them have a ring that is served.
    pub fn devices(&self) -> (usize, usize) {
        let up = self.devices.values().filter(|device| device.ring == Ring::Up).count();
        (self.devices.len(), up)
    }

    /// Whether no job runs and nothing is known that could be done.
    pub fn is_quiet(&self) -> bool {
        self.dirty.is_empty()
            && self.poked.is_empty()
            && self.scan.is_empty()
            && self.devices.values().all(|device| !device.busy)
    }

    /// Waits for something to do, until `until` or until `other` becomes readable, and does it.
    ///
    /// # Errors
    /// The connection to xenstored failed: [`Tapback::reconnect`].
    pub fn turn(&mut self, until: Option<Instant>, other: Option<RawFd>) -> Result<(), XsError> {
        self.collect()?;
        if !self.has_work() {
            self.wait(until, other)?;
            self.collect()?;
        }
        match self.work() {
            Err(error) if error.is_harmless() => {
                say!("{error}");
                let now = Instant::now();
                for id in std::mem::take(&mut self.dirty) {
                    if let Some(device) = self.devices.get_mut(&id) {
                        device.again_at = Some(now + PAUSE);
                    }
                }
                Ok(())
            }
            done => done,
        }
    }

    /// A device that is busy is looked at when its job has ended.
    fn has_work(&self) -> bool {
        let ready = |id: &VbdId| self.devices.get(id).is_none_or(|device| !device.busy);
        !self.poked.is_empty() || !self.scan.is_empty() || self.dirty.iter().any(ready)
    }

    fn work(&mut self) -> Result<(), XsError> {
        if !self.scan.is_empty() {
            self.list()?;
        }
        if !self.poked.is_empty() {
            self.look_at_states()?;
        }
        let ready = |id: &&VbdId| self.devices.get(id).is_some_and(|device| !device.busy);
        let ids: Vec<VbdId> = self.dirty.iter().filter(ready).take(BATCH_MAX).copied().collect();
        self.dirty.retain(|id| !ids.contains(id) && self.devices.contains_key(id));
        if ids.is_empty() { Ok(()) } else { self.look_at(&ids) }
    }

    // --- what happens ---

    fn collect(&mut self) -> Result<(), XsError> {
        while let Some(event) = self.client.next_event()? {
            self.event(&event);
        }
        while let Some((id, outcome)) = self.jobs.take() {
            self.ended(id, outcome);
        }
        let now = Instant::now();
        for (id, device) in &mut self.devices {
            if device.ring == Ring::Up && device.linked.as_ref().is_some_and(lost) && !device.busy {
                device.ring = Ring::Lost;
                device.since = now;
                device.cost = Counts::default();
                say!("{id}: its disk process is gone; waiting for another");
                self.dirty.insert(*id);
            }
            if device.again_at.is_some_and(|at| at <= now) && !device.busy {
                device.again_at = None;
                self.dirty.insert(*id);
            }
            if device.ring != Ring::Up || device.busy {
                continue;
            }
            let told = device.linked.as_mut().is_some_and(|linked| take_news(&mut linked.news));
            if (told || device.ask_at.is_some_and(|at| at <= now))
                && let Some(link) = device.link(*id)
            {
                device.ask_at = None;
                device.busy = true;
                self.jobs.start(*id, Job::Info(link));
            }
        }
        Ok(())
    }

    fn event(&mut self, event: &WatchEvent) {
        let number = |text: &str| decimal(text.as_bytes()).and_then(|number| u32::try_from(number).ok());
        if let Some(id) = event.token.strip_prefix("front/") {
            let id = id
                .split_once('/')
                .and_then(|(domid, devid)| Some(VbdId { domid: number(domid)?, devid: number(devid)? }));
            if let Some(id) = id.filter(|id| self.devices.contains_key(id)) {
                self.dirty.insert(id);
            }
            return;
        }
        let Some(rest) = event.path.strip_prefix(&self.places.root) else { return };
        let parts: Vec<&str> = rest.split('/').skip(1).collect();
        match parts.as_slice() {
            [] => drop(self.scan.insert(None)),
            [domid] => drop(number(domid).map(|domid| self.scan.insert(Some(domid)))),
            [domid, devid, leaf @ ..] => {
                let (Some(domid), Some(devid)) = (number(domid), number(devid)) else { return };
                let id = VbdId { domid, devid };
                match (leaf.first(), self.devices.get_mut(&id)) {
                    (Some(leaf), Some(_)) if keys::is_ours(leaf) => {}
                    (Some(&"state"), Some(device)) if device.wrote.is_some() => drop(self.poked.insert(id)),
                    (_, Some(device)) => {
                        device.try_now();
                        self.dirty.insert(id);
                    }
                    (_, None) => self.add(id),
                }
            }
        }
    }

    fn add(&mut self, id: VbdId) {
        self.devices.entry(id).or_insert_with(|| Device::new(id, Instant::now()));
        self.dirty.insert(id);
    }

    fn ended(&mut self, id: VbdId, outcome: Outcome) {
        let Some(device) = self.devices.get_mut(&id) else { return };
        let now = Instant::now();
        device.busy = false;
        // What has changed meanwhile is looked at in any case.
        let mut look = true;
        match outcome {
            Outcome::Connected(Ok(linked)) => {
                let recovered = device.ring == Ring::Lost || linked.adopted;
                say!(
                    "{id}: {} disk {} of process {} ({})",
                    if recovered { "again with" } else { "connected to" },
                    linked.at.minor,
                    linked.at.pid,
                    linked.at.image
                );
                device.ring = Ring::Up;
                device.stale = true;
                device.ask_at = if linked.news.is_some() { None } else { self.settings.next_question(now) };
                device.said = None;
                device.try_now();
                device.linked = Some(*linked);
            }
            Outcome::Connected(Err(Trouble::Absent(why))) => {
                device.put_off(now);
                look = false;
                if device.said.as_ref() != Some(&why) {
                    say!("{id}: not connected yet: {why}");
                    device.said = Some(why);
                }
            }
            Outcome::Connected(Err(Trouble::Refused(fault))) => {
                device.said = Some(fault.to_string());
                device.faulty = true;
                self.refuse(id, &fault);
            }
            Outcome::Disconnected(Ok(())) => {
                say!("{id}: disconnected");
                device.ring = Ring::None;
                device.linked = None;
                device.polling = None;
                device.since = now;
                device.cost = Counts::default();
            }
            Outcome::Disconnected(Err(Trouble::Absent(why) | Trouble::Refused(Fault { text: why, .. }))) => {
                // The guest must not be told that its pages are free as long as a process has them.
                say!("{id}: its disk process does not let go: {why}");
                device.again_at = Some(now + PAUSE);
                look = false;
            }
            Outcome::Info(Ok(info)) => {
                if let Some(linked) = &mut device.linked {
                    let tells = linked.news.is_some();
                    device.ask_at = if tells { None } else { self.settings.next_question(now) };
                    look = linked.info.sectors != info.sectors;
                    linked.info = info;
                }
            }
            // A process that is gone is noticed elsewhere. Another may have more to do than it can.
            Outcome::Info(Err(_)) => {
                device.ask_at = self.settings.next_question(now);
                look = false;
            }
            Outcome::PollingSet(polling, result) => {
                device.polling = Some(polling);
                if let Err(trouble) = result {
                    say!("{id}: polling was not set: {trouble:?}");
                }
            }
        }
        if look {
            self.dirty.insert(id);
        }
    }

    // --- what is done about it ---

    fn list(&mut self) -> Result<(), XsError> {
        let (root, scan) = (self.places.root.clone(), std::mem::take(&mut self.scan));
        let number = |text: &String| decimal(text.as_bytes()).and_then(|number| u32::try_from(number).ok());
        let found = self.client.transaction(|t| {
            let domids: Vec<u32> = if scan.contains(&None) {
                t.directory(&root)?.unwrap_or_default().iter().filter_map(number).collect()
            } else {
                scan.iter().flatten().copied().collect()
            };
            let paths: Vec<String> = domids.iter().map(|domid| format!("{root}/{domid}")).collect();
            let mut ids = Vec::new();
            for (domid, names) in domids.iter().zip(t.directory_many(&paths)?) {
                let devids = names.unwrap_or_default();
                ids.extend(devids.iter().filter_map(number).map(|devid| VbdId { domid: *domid, devid }));
            }
            Ok(ids)
        });
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                self.scan = scan;
                return Err(error);
            }
        };
        let concerned = |id: &VbdId| scan.contains(&None) || scan.contains(&Some(id.domid));
        self.dirty.extend(self.devices.keys().filter(|id| concerned(id)).copied());
        for id in found {
            self.add(id);
        }
        Ok(())
    }

    /// Most changes of a state are our own: that is seen by one read.
    fn look_at_states(&mut self) -> Result<(), XsError> {
        let ids: Vec<VbdId> =
            std::mem::take(&mut self.poked).into_iter().filter(|id| !self.dirty.contains(id)).collect();
        let paths: Vec<String> = ids.iter().map(|id| format!("{}/state", self.places.back(*id))).collect();
        for (id, value) in ids.iter().zip(self.client.read_many(&paths)?) {
            let wrote = self.devices.get(id).and_then(|device| device.wrote);
            if value.as_deref().and_then(XenbusState::parse) != wrote {
                self.dirty.insert(*id);
            }
        }
        Ok(())
    }

    fn look_at(&mut self, ids: &[VbdId]) -> Result<(), XsError> {
        let before = self.client.counts();
        self.watch_fronts(ids)?;
        let now = Instant::now();
        let (devices, places, offer) = (&self.devices, &self.places, &self.settings.offer);
        let plans = self.client.transaction(|t| look(t, ids, devices, places, offer, now));
        let cost = self.client.counts() - before;
        let plans = match plans {
            Ok(plans) => plans,
            Err(error) => {
                self.dirty.extend(ids);
                return Err(error);
            }
        };
        for plan in plans {
            self.carry_out(plan, cost, ids.len() as u64, now)?;
        }
        Ok(())
    }

    /// Each front end's state is watched before it is read: nothing can change unseen.
    fn watch_fronts(&mut self, ids: &[VbdId]) -> Result<(), XsError> {
        for id in ids {
            let Some(device) = self.devices.get_mut(id).filter(|device| device.watch.is_none()) else {
                continue;
            };
            let token = format!("front/{}/{}", id.domid, id.devid);
            device.watch = Some(self.client.watch(&format!("{}/state", device.front_dir), &token)?);
        }
        // The event that each watch begins with is answered by the look that follows.
        let mut others = Vec::new();
        while let Some(event) = self.client.next_event()? {
            let first = ids.iter().any(|id| event.token == format!("front/{}/{}", id.domid, id.devid));
            if !first {
                others.push(event);
            }
        }
        for event in others {
            self.event(&event);
        }
        for id in ids {
            self.dirty.remove(id);
            self.poked.remove(id);
        }
        Ok(())
    }

    fn carry_out(&mut self, plan: Plan, cost: Counts, shared: u64, now: Instant) -> Result<(), XsError> {
        let id = plan.id;
        let Some(device) = self.devices.get_mut(&id) else { return Ok(()) };
        device.cost.transactions += cost.transactions;
        device.cost.requests += cost.requests.div_ceil(shared);
        device.cost.round_trips += cost.round_trips;
        device.wrote = plan.wrote.or(device.wrote);
        if let Some(fault) = &plan.fault {
            let said = fault.to_string();
            device.faulty = true;
            if device.said.as_ref() != Some(&said) {
                say!("{id}: refused: {fault}");
                device.said = Some(said);
            }
        }
        if plan.announced {
            device.faulty = false;
            let recovered = plan.wrote != Some(XenbusState::Connected);
            device.stale = false;
            let pid = device.linked.as_ref().map_or(0, |linked| linked.at.pid);
            let (cost, took) = (device.cost, now.duration_since(device.since));
            self.plugged.push(Plugged { id, pid, cost, took, recovered });
        }
        let link = device.link(id);
        match (plan.next, link) {
            (Next::Connect(order), _) => {
                device.busy = true;
                device.polling = order.front.polling;
                self.jobs.start(id, Job::Connect(order));
            }
            (Next::Disconnect { force }, Some(link)) => {
                device.busy = true;
                self.jobs.start(id, Job::Disconnect { link, force });
            }
            (Next::Disconnect { .. } | Next::Nothing, _) => {}
            (Next::Forget, _) => {
                let watch = device.watch.take();
                self.devices.remove(&id);
                if let Some(watch) = watch {
                    self.client.unwatch(&watch)?;
                }
                return Ok(());
            }
        }
        if let Some(back) = &plan.back {
            self.keep_up(id, back)?;
        }
        Ok(())
    }

    /// What the toolstack may change while a device works.
    fn keep_up(&mut self, id: VbdId, back: &keys::Back) -> Result<(), XsError> {
        let Some(device) = self.devices.get_mut(&id) else { return Ok(()) };
        if let Some(odd) = &back.odd
            && device.said.as_ref() != Some(odd)
        {
            say!("{id}: ignored: {odd}");
            device.said = Some(odd.clone());
        }
        if device.front_dir != back.frontend {
            device.front_dir.clone_from(&back.frontend);
            if let Some(watch) = device.watch.take() {
                self.client.unwatch(&watch)?;
            }
            self.dirty.insert(id);
        }
        let wanted = back.polling.filter(|_| device.ring == Ring::Up && !device.busy);
        if let (Some(polling), Some(link)) = (wanted, device.link(id))
            && device.polling != Some(polling)
        {
            device.busy = true;
            self.jobs.start(id, Job::SetPolling(link, polling));
        }
        Ok(())
    }

    fn refuse(&mut self, id: VbdId, fault: &Fault) {
        say!("{id}: refused: {fault}");
        let places = &self.places;
        match self.client.transaction(|t| Plan::refuse(t, id, places, fault)) {
            Ok(true) => {
                if let Some(device) = self.devices.get_mut(&id) {
                    device.wrote = Some(XenbusState::Closing);
                }
            }
            Ok(false) => {}
            Err(error) => say!("{id}: {error}"),
        }
    }

    // --- waiting ---

    fn wait(&self, until: Option<Instant>, other: Option<RawFd>) -> Result<(), XsError> {
        let mut fds = vec![self.client.raw_fd(), self.jobs.raw_fd()];
        fds.extend(other);
        let idle = self.devices.values().filter(|device| device.ring == Ring::Up && !device.busy);
        for linked in idle.filter_map(|device| device.linked.as_ref()) {
            fds.extend(linked.alive.as_ref().map(AsRawFd::as_raw_fd));
            fds.extend(linked.news.as_ref().map(AsRawFd::as_raw_fd));
        }
        let mut watched: Vec<libc::pollfd> =
            fds.into_iter().map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        let wait_ms = self.next_time().into_iter().chain(until).min().map_or(-1, |at| {
            let left = at.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
            i32::try_from(left).unwrap_or(i32::MAX)
        });
        // SAFETY: the entries live through the call, which is given their number.
        let result = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, wait_ms) };
        let error = io::Error::last_os_error();
        if result < 0 && error.kind() != io::ErrorKind::Interrupted {
            return Err(XsError::Io { address: "poll".into(), error });
        }
        Ok(())
    }

    fn next_time(&self) -> Option<Instant> {
        let length = |device: &Device| device.ask_at.filter(|_| device.ring == Ring::Up);
        let idle = self.devices.values().filter(|device| !device.busy);
        idle.flat_map(|device| device.again_at.into_iter().chain(length(device))).min()
    }
}

/// Whether the process that served a ring has ended.
fn lost(linked: &Linked) -> bool {
    linked.alive.as_ref().is_some_and(has_ended)
}
