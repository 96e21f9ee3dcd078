//! One look at xenstore: everything about the devices of a batch is read, decided and written in one transaction.
//!
//! It takes two rounds of questions (three when a ring has many pages or queues), however many devices there are, and
//! one of writes. Waiting for a disk process happens between two looks, never inside of one.

use std::collections::BTreeMap;
use std::time::Instant;

use tapio_control::BlkifFront;
use tapio_stat::VbdId;
use tapio_types::Movement;
use tapio_xenstore::wire::Request;
use tapio_xenstore::{Nodes, Transaction, XenbusState, XsError};

use crate::device::{Device, Offer};
use crate::disks::{Order, start_of};
use crate::keys::{self, Back, Form};
use crate::table::{Action, Ring, Situation};
use crate::values::{Fault, Values, shown};

/// Steps that one look can bring: far more than there are in a row.
const STEPS_MAX: usize = 8;

/// What is to be done once the look is over.
#[derive(Clone, Debug)]
pub(crate) enum Next {
    Nothing,
    Connect(Box<Order>),
    Disconnect {
        force: bool,
    },
    /// The device is not there any more.
    Forget,
}

/// What a look has brought for one device.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) id: VbdId,
    pub(crate) back: Option<Back>,
    pub(crate) front: XenbusState,
    pub(crate) next: Next,
    /// The state that was written.
    pub(crate) wrote: Option<XenbusState>,
    pub(crate) announced: bool,
    pub(crate) fault: Option<Fault>,
    /// Nodes to write, and whether the error of before is to be removed.
    writes: Vec<(String, String)>,
    clears_fault: bool,
    situation: Option<Situation>,
}

/// Where the directories are.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Directory of all back ends of the kind.
    pub(crate) root: String,
    /// Directory of all errors of them.
    pub(crate) errors: String,
}

impl Places {
    pub(crate) fn new(own_domid: u32, name: &str) -> Self {
        Self {
            root: format!("/local/domain/{own_domid}/backend/{name}"),
            errors: format!("/local/domain/{own_domid}/error/backend/{name}"),
        }
    }

    pub(crate) fn back(&self, id: VbdId) -> String {
        format!("{}/{}/{}", self.root, id.domid, id.devid)
    }

    fn error(&self, id: VbdId) -> String {
        format!("{}/{}/{}", self.errors, id.domid, id.devid)
    }
}

/// Looks at devices and decides.
pub(crate) fn look(
    transaction: &mut Transaction<'_>,
    ids: &[VbdId],
    devices: &BTreeMap<VbdId, Device>,
    places: &Places,
    offer: &Offer,
    now: Instant,
) -> Result<Vec<Plan>, XsError> {
    let known: Vec<(VbdId, &Device)> =
        ids.iter().filter_map(|id| devices.get(id).map(|device| (*id, device))).collect();
    let mut plans = first_round(transaction, &known, places, offer, now)?;
    read_rings(transaction, &mut plans, &known, offer)?;
    for (plan, (id, device)) in plans.iter_mut().zip(&known) {
        if let Some(fault) = plan.fault.clone() {
            plan.give_up(*id, device, places, &fault);
        }
    }
    write_all(transaction, &plans, places)?;
    Ok(plans)
}

fn first_round(
    transaction: &mut Transaction<'_>,
    known: &[(VbdId, &Device)],
    places: &Places,
    offer: &Offer,
    now: Instant,
) -> Result<Vec<Plan>, XsError> {
    let names: Vec<String> = keys::BACK.iter().map(ToString::to_string).collect();
    let mut paths = Vec::new();
    for (id, device) in known {
        let dir = places.back(*id);
        paths.extend(names.iter().map(|name| format!("{dir}/{name}")));
        paths.push(format!("{}/state", device.front_dir));
    }
    let mut values = transaction.read_many(&paths)?.into_iter();
    let mut read = Vec::new();
    for (id, _) in known {
        let back = Values::new(names.clone(), values.by_ref().take(names.len()).collect());
        let front = values.next().flatten();
        read.push((*id, back, front));
    }
    // A front end that is not where it usually is.
    let mut elsewhere = Vec::new();
    for (index, ((id, back, _), (_, device))) in read.iter().zip(known).enumerate() {
        if let Ok(Some(back)) = Back::read(*id, back)
            && back.frontend != device.front_dir
        {
            elsewhere.push((index, format!("{}/state", back.frontend)));
        }
    }
    if !elsewhere.is_empty() {
        let paths: Vec<&String> = elsewhere.iter().map(|(_, path)| path).collect();
        let values = transaction.read_many(&paths)?;
        for ((index, _), value) in elsewhere.iter().zip(values) {
            read[*index].2 = value;
        }
    }
    Ok(read
        .into_iter()
        .zip(known)
        .map(|((id, back, front), (_, device))| Plan::new(id, device, &back, front, places, offer, now))
        .collect())
}

/// Reads the rings of those that are to be connected.
fn read_rings(
    transaction: &mut Transaction<'_>,
    plans: &mut [Plan],
    known: &[(VbdId, &Device)],
    offer: &Offer,
) -> Result<(), XsError> {
    let wanted: Vec<usize> =
        (0..plans.len()).filter(|index| matches!(plans[*index].next, Next::Connect(_))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let dir = |index: usize| plans[index].back.as_ref().map_or("", |back| back.frontend.as_str()).to_owned();
    let dirs: Vec<String> = wanted.iter().map(|index| dir(*index)).collect();
    let paths: Vec<String> =
        dirs.iter().flat_map(|dir| keys::FRONT.iter().map(move |name| format!("{dir}/{name}"))).collect();
    let mut values = transaction.read_many(&paths)?.into_iter();
    let mut fronts = Vec::new();
    for &index in &wanted {
        let found: Vec<_> = values.by_ref().take(keys::FRONT.len()).collect();
        let read = Values::new(keys::FRONT.iter().map(ToString::to_string).collect(), found.clone());
        let offer = plans[index].back.as_ref().map_or(*offer, |back| offer.of(&back.rings));
        fronts.push((found, Form::read(&read, offer.bounds())));
    }
    let mut paths = Vec::new();
    for ((_, form), dir) in fronts.iter().zip(&dirs) {
        if let Ok(form) = form {
            paths.extend(form.more().into_iter().map(|name| format!("{dir}/{name}")));
        }
    }
    let mut values = transaction.read_many(&paths)?.into_iter();
    for ((found, form), index) in fronts.into_iter().zip(wanted) {
        let queues = form.and_then(|form| {
            let more = form.more();
            let found = found.into_iter().chain(values.by_ref().take(more.len())).collect();
            let names = keys::FRONT.iter().map(ToString::to_string).chain(more).collect();
            form.queues(&Values::new(names, found)).map(|queues| (form, queues))
        });
        let plan = &mut plans[index];
        match (queues, &mut plan.next, &plan.back) {
            (Ok((form, queues)), Next::Connect(order), Some(back)) => {
                let recovers = back.state == XenbusState::Connected;
                order.front = ring(plan.id, back, &form, queues, &offer.of(&back.rings), recovers);
                order.before = known[index].1.linked.as_ref().map(|linked| linked.at.clone());
            }
            (Err(fault), ..) => {
                plan.next = Next::Nothing;
                plan.fault = Some(fault);
            }
            _ => {}
        }
    }
    Ok(())
}

fn ring(
    id: VbdId,
    back: &Back,
    form: &Form,
    queues: Vec<tapio_control::BlkifQueue>,
    offer: &Offer,
    recovers: bool,
) -> BlkifFront {
    BlkifFront {
        protocol: form.protocol,
        movement: match offer.movement {
            Movement::Persistent if !form.persistent => Movement::Copy,
            movement => movement,
        },
        start: start_of(recovers),
        max_indirect: offer.max_indirect,
        read_only: back.writable != Some(true),
        cdrom: back.cdrom,
        removable: back.removable,
        polling: back.polling,
        ..BlkifFront::new(id.domid, id.devid, queues)
    }
}

fn write_all(transaction: &mut Transaction<'_>, plans: &[Plan], places: &Places) -> Result<(), XsError> {
    let errors: Vec<String> =
        plans.iter().filter(|plan| plan.clears_fault).map(|plan| places.error(plan.id)).collect();
    let mut requests: Vec<Request<'_>> = plans
        .iter()
        .flat_map(|plan| &plan.writes)
        .map(|(path, value)| Request::Write { path, value: value.as_bytes() })
        .collect();
    requests.extend(errors.iter().map(|path| Request::Rm { path }));
    let answers = transaction.ask(&requests)?;
    for (request, answer) in requests.iter().zip(answers) {
        // An error node that is gone already is as good.
        if let Err(errno) = answer
            && !matches!(request, Request::Rm { .. })
        {
            return Err(XsError::Refused { errno, what: format!("{request:?}") });
        }
    }
    Ok(())
}

impl Plan {
    fn new(
        id: VbdId,
        device: &Device,
        values: &Values,
        front: Option<Vec<u8>>,
        places: &Places,
        offer: &Offer,
        now: Instant,
    ) -> Self {
        let mut plan = Self {
            id,
            back: None,
            front: XenbusState::Unknown,
            next: Next::Nothing,
            wrote: None,
            announced: false,
            fault: None,
            writes: Vec::new(),
            clears_fault: false,
            situation: None,
        };
        if keys::BACK.iter().all(|name| values.bytes(name).is_none()) {
            plan.clears_fault = device.faulty;
            plan.next = match device.ring {
                Ring::Up => Next::Disconnect { force: true },
                Ring::None | Ring::Lost => Next::Forget,
            };
            return plan;
        }
        match Back::read(id, values) {
            Ok(Some(back)) => plan.back = Some(back),
            Ok(None) => return plan,
            Err(fault) => {
                plan.fault = Some(fault);
                return plan;
            }
        }
        match front.as_deref().map(|value| (XenbusState::parse(value), value)) {
            Some((None, value)) => {
                plan.fault = Some(Fault::invalid(format!(
                    "the front end's state is '{}': no such state",
                    shown(value)
                )));
                return plan;
            }
            Some((Some(state), _)) => plan.front = state,
            None => {}
        }
        plan.decide(device, values, places, offer, now);
        plan
    }

    fn decide(&mut self, device: &Device, values: &Values, places: &Places, offer: &Offer, now: Instant) {
        let Some(back) = self.back.clone() else { return };
        let mut situation = Situation {
            front: self.front,
            back: back.state,
            online: back.online,
            ring: device.ring,
            disk: back.wanted.is_known() && back.writable.is_some() && device.may_try(now),
        };
        let offer = offer.of(&back.rings);
        let dir = places.back(self.id);
        let mut write = |name: &str, value: String| self.writes.push((format!("{dir}/{name}"), value));
        for _ in 0..STEPS_MAX {
            let step = situation.next();
            match step {
                Action::Wait => break,
                Action::Connect => {
                    self.next = Next::Connect(Box::new(Order {
                        wanted: back.wanted.clone(),
                        before: None,
                        tapdisk: offer.tapdisk,
                        front: BlkifFront::default(),
                    }));
                    break;
                }
                Action::Disconnect => {
                    // A front end that has closed in order has no request in flight; one that has not will miss none.
                    self.next = Next::Disconnect { force: self.front != XenbusState::Closed };
                    break;
                }
                Action::Publish => {
                    for (name, value) in offer.nodes(&back, None) {
                        write(name, value);
                    }
                    if !back.hotplug_status && back.wanted.is_known() {
                        write("hotplug-status", "connected".to_owned());
                    }
                }
                Action::Announce => {
                    let linked = device.linked.as_ref();
                    for (name, value) in offer.nodes(&back, linked.map(|linked| &linked.info)) {
                        write(name, value);
                    }
                    if !back.hotplug_status {
                        write("hotplug-status", "connected".to_owned());
                    }
                    if let Some(linked) = linked {
                        write("kthread-pid", linked.at.pid.to_string());
                    }
                    self.announced = true;
                }
                Action::Closing | Action::Close => {}
            }
            situation = situation.after(step);
        }
        if situation.back != back.state {
            write("state", situation.back.to_string());
            self.wrote = Some(situation.back);
        } else if situation.back == XenbusState::Connected && situation.ring == Ring::Up {
            self.renew(device, values, &dir);
        }
        self.clears_fault = device.faulty && self.announced;
        self.situation = Some(situation);
    }

    /// A device that works: another disk process has it, or the disk has grown.
    fn renew(&mut self, device: &Device, values: &Values, dir: &str) {
        let Some(linked) = &device.linked else { return };
        if device.stale {
            self.writes.push((format!("{dir}/kthread-pid"), linked.at.pid.to_string()));
            self.announced = true;
        }
        let sectors = linked.info.sectors.to_string();
        if values.bytes("sectors") != Some(sectors.as_bytes()) {
            self.writes.push((format!("{dir}/sectors"), sectors));
            // The front end looks at the length again when this node is written, whatever is written.
            self.writes.push((format!("{dir}/state"), XenbusState::Connected.to_string()));
            self.wrote = Some(XenbusState::Connected);
        }
    }

    /// Closes a device whose nodes make no sense, and says why where Linux does. What works already goes on.
    fn give_up(&mut self, id: VbdId, device: &Device, places: &Places, fault: &Fault) {
        if device.ring == Ring::Up {
            return;
        }
        self.writes.clear();
        self.next = Next::Nothing;
        let state = self.back.as_ref().map(|back| back.state);
        if matches!(state, Some(XenbusState::Closing | XenbusState::Closed)) {
            return;
        }
        self.writes.push((format!("{}/error", places.error(id)), fault.to_string()));
        self.writes.push((format!("{}/state", places.back(id)), XenbusState::Closing.to_string()));
        self.wrote = Some(XenbusState::Closing);
    }

    /// A disk process refuses for good: the same, written at the next look.
    pub(crate) fn refuse(
        transaction: &mut Transaction<'_>,
        id: VbdId,
        places: &Places,
        fault: &Fault,
    ) -> Result<bool, XsError> {
        let dir = places.back(id);
        let paths = [format!("{dir}/frontend"), format!("{dir}/state")];
        let values = transaction.read_many(&paths)?;
        let closed = [XenbusState::Closing, XenbusState::Closed].map(|state| state.to_string());
        let open = |state: &[u8]| !closed.iter().any(|closed| closed.as_bytes() == state);
        // A directory that was removed meanwhile must not come back by being written to.
        if values[0].is_none() || !values[1].as_deref().is_some_and(open) {
            return Ok(false);
        }
        transaction.write_many(&[
            (format!("{}/error", places.error(id)), fault.to_string()),
            (paths[1].clone(), XenbusState::Closing.to_string()),
        ])?;
        Ok(true)
    }
}
