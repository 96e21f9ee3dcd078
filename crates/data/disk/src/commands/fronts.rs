//! The ways to reach a disk.

use tapio_control::command::{Call, Done, FrontAdd, FrontAdmit, FrontFollow, FrontList, FrontRemove, Handle};
use tapio_control::{Blkif, BlkifFront, ControlError, DiskInfo, Errno, Front, FrontEntry, Result};
use tapio_stat::VbdId;

use crate::table::{Disk, Opened, Plane, PlaneDisk, Table, not_open};

/// Front ends of one disk.
const FRONTS_MAX: usize = 16;

/// The numbers of a disk that no hypervisor knows.
fn own_numbers(minor: u16) -> VbdId {
    VbdId { domid: 0, devid: minor.into() }
}

/// What a front end to come is given.
struct Place {
    id: u32,
    /// Where the disk is published under its numbers already.
    slot: Option<usize>,
    /// No other front end of the disk is reached by NBD.
    is_first_nbd: bool,
}

impl<D: PlaneDisk> Disk<D> {
    fn place(&self, front: &Front, vbd: VbdId) -> Result<Place> {
        let minor = self.minor;
        let mut now = self.now.lock();
        let open = now.open.as_mut().ok_or_else(|| not_open(minor))?;
        if open.fronts.len() >= FRONTS_MAX {
            let why = format!("disk {minor} has {FRONTS_MAX} front ends");
            return Err(ControlError::new(Errno::E2BIG, why).next("remove one first"));
        }
        if let Some(other) = open.fronts.iter().find(|other| other.front.address() == front.address()) {
            let (address, id) = (other.front.address(), other.id);
            let why = format!("disk {minor} is served on {address} already, by front end {id}");
            return Err(ControlError::new(Errno::EADDRINUSE, why));
        }
        if front.is_block()
            && let Some(other) = open.fronts.iter().find(|other| other.front.is_block())
        {
            let why = format!("disk {minor} is {} already", other.front.address());
            return Err(ControlError::new(Errno::EEXIST, why).next("use that device, or detach it first"));
        }
        let id = open.next_front;
        open.next_front += 1;
        let slot = open.published.iter().find(|(known, _)| *known == vbd).map(|(_, slot)| *slot);
        let is_first_nbd = front.is_nbd() && !open.fronts.iter().any(|other| other.front.is_nbd());
        Ok(Place { id, slot, is_first_nbd })
    }
}

impl<P: Plane> Handle<FrontAdd> for Table<P> {
    fn handle(&self, command: FrontAdd, call: &mut Call<'_>) -> Result<FrontEntry> {
        let FrontAdd { minor, front, vbd } = command;
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        let asked = vbd.or(front.vbd());
        let vbd = asked.unwrap_or_else(|| own_numbers(minor));
        let Place { id, slot, is_first_nbd } = disk.place(&front, vbd)?;
        let (slot, is_new) = match slot {
            Some(slot) => (slot, false),
            None => (plane.publish(self.pages(minor, vbd, asked.is_some(), is_first_nbd)?)?, true),
        };
        let front = match plane.front_add(id, front, std::mem::take(&mut call.fds), slot) {
            Ok(front) => front,
            Err(error) => {
                if is_new {
                    drop(plane.withdraw(slot));
                }
                return Err(error);
            }
        };
        let entry = FrontEntry { id, front, vbd, connections: 0 };
        if let Some(open) = &mut disk.now.lock().open {
            open.fronts.push(entry.clone());
            if is_new {
                open.published.push((vbd, slot));
            }
        }
        Ok(entry)
    }
}

impl<P: Plane> Handle<FrontRemove> for Table<P> {
    fn handle(&self, command: FrontRemove, _: &mut Call<'_>) -> Result<Done> {
        self.front_remove(command.minor, command.front, command.force).map(|()| Done {})
    }
}

impl<P: Plane> Handle<FrontFollow> for Table<P> {
    fn handle(&self, command: FrontFollow, call: &mut Call<'_>) -> Result<DiskInfo> {
        let news = call.fds.pop().ok_or_else(|| {
            ControlError::new(Errno::EINVAL, "no socket came along").next("pass one with the request")
        })?;
        self.opened(command.minor)?.front_follow(command.front, news.into())?;
        self.disk_info(command.minor)
    }
}

impl<P: Plane> Handle<FrontAdmit> for Table<P> {
    fn handle(&self, command: FrontAdmit, _: &mut Call<'_>) -> Result<Done> {
        let FrontAdmit { minor, front, names, cut } = command;
        self.opened(minor)?.front_admit(front, &names, &cut)?;
        Ok(Done {})
    }
}

impl<P: Plane> Handle<FrontList> for Table<P> {
    fn handle(&self, command: FrontList, _: &mut Call<'_>) -> Result<Vec<FrontEntry>> {
        let disk = self.disk(command.minor)?;
        let now = disk.now.lock();
        now.open.as_ref().map(Opened::fronts).ok_or_else(|| not_open(command.minor))
    }
}

impl<P: Plane> Table<P> {
    /// Removes a front end, and what is published for it alone.
    pub(crate) fn front_remove(&self, minor: u16, id: u32, force: bool) -> Result<()> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        let front = disk
            .now
            .lock()
            .open
            .as_ref()
            .and_then(|open| open.fronts.iter().find(|front| front.id == id).cloned())
            .ok_or_else(|| {
                ControlError::new(Errno::ENOENT, format!("disk {minor} has no front end {id}"))
                    .next("'tapio disk list' shows which it has")
            })?;
        if !force && plane.front_claimed(id) {
            let why = format!("{} is in use: mounted, or part of another device", front.front.address());
            return Err(ControlError::new(Errno::EBUSY, why)
                .next("unmount it first, or remove it by force: its users get errors"));
        }
        plane.front_remove(id)?;
        let unused = {
            let mut now = disk.now.lock();
            let Some(open) = &mut now.open else { return Ok(()) };
            open.fronts.retain(|front| front.id != id);
            let used = open.fronts.iter().any(|other| other.vbd == front.vbd);
            let position = open.published.iter().position(|(vbd, _)| *vbd == front.vbd).filter(|_| !used);
            position.map(|position| open.published.swap_remove(position).1)
        };
        if let Some(slot) = unused {
            drop(plane.withdraw(slot));
        }
        Ok(())
    }

    /// Ends all front ends of an open disk and withdraws what it published.
    pub(crate) fn end_fronts(&self, disk: &Disk<P::Disk>) -> Result<()> {
        let ids: Vec<u32> = match &disk.now.lock().open {
            Some(open) => open.fronts.iter().map(|front| front.id).collect(),
            None => Vec::new(),
        };
        let mut result = Ok(());
        for id in ids {
            result = result.and(self.front_remove(disk.minor, id, true));
        }
        result
    }

    /// Connects a Xen guest's ring, as tapdisk's protocol names it.
    pub(crate) fn connect_ring(&self, minor: u16, ring: &Blkif) -> Result<()> {
        let front = Front::Blkif(Box::new(BlkifFront::from_message(ring)?));
        self.handle(FrontAdd { minor, front, vbd: None }, &mut Call::of_itself()).map(drop)
    }

    /// Disconnects it.
    pub(crate) fn disconnect_ring(&self, minor: u16, ring: &Blkif) -> Result<()> {
        let id = {
            let disk = self.disk(minor)?;
            let now = disk.now.lock();
            let fronts = now.open.iter().flat_map(|open| &open.fronts);
            let wanted = VbdId { domid: ring.domid, devid: ring.devid };
            fronts.into_iter().find(|entry| entry.front.vbd() == Some(wanted)).map(|entry| entry.id)
        };
        let Some(id) = id else {
            let why = format!("disk {minor} has no ring of device {} of domain {}", ring.devid, ring.domid);
            return Err(
                ControlError::new(Errno::ENODEV, why).next("'tapio disk front list' shows which it has")
            );
        };
        self.front_remove(minor, id, false)
    }
}
