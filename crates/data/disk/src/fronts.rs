//! Front ends of a disk, by the name the control side gave them.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tapio_block::DiskHandle;
use tapio_control::command::SecretName;
use tapio_control::{BlkifReport, ControlError, Errno, Front, Result};
use tapio_front::vhost_user::{Listen, VhostUserOptions, VhostUserServer};
use tapio_types::DeviceHow;

use crate::blkif::Blkif;
use crate::device::Device;
use crate::log;
use crate::nbd_servers::Offer;
use crate::sandbox;

/// A front end that serves.
#[derive(Debug)]
enum Served {
    /// An export.
    Nbd(Offer),
    /// A device of a guest.
    VhostUser(VhostUserServer),
    /// A device of this host.
    Block(Device),
    /// A device of a Xen guest.
    Blkif(Blkif),
}

/// The front ends of one disk.
#[derive(Debug)]
pub struct Fronts {
    minor: u16,
    /// The disk's name as devices of this host know it: its leaf's.
    name: Mutex<String>,
    served: Mutex<BTreeMap<u32, Served>>,
    /// Sockets of the followers, which are told that the disk may have another size, by front end.
    followers: Mutex<BTreeMap<u32, UnixStream>>,
}

impl Fronts {
    /// None yet, for disk `minor` of this name.
    pub fn new(minor: u16, name: String) -> Self {
        Self { minor, name: Mutex::new(name), served: Mutex::default(), followers: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Served>> {
        // Every change is one call on the map.
        self.served.lock()
    }

    /// Serves the disk behind `remote`, to guests that can read `serial` from it. Answers how it is served.
    /// It counts in `slot`.
    pub fn add(
        &self,
        id: u32,
        mut front: Front,
        fds: Vec<OwnedFd>,
        remote: DiskHandle,
        serial: &str,
        slot: usize,
    ) -> Result<Front> {
        let served = match &mut front {
            Front::Block { how, device, read_only, owner } => {
                sandbox::check_devices()?;
                let name = self.name.lock().clone();
                let made = Device::attach(*how, (*read_only, *owner), self.minor, name, remote)?;
                (*how, *device) = (made.how(), Some(made.path()));
                Served::Block(made)
            }
            Front::VhostUser { .. } => vhost_user(&front, fds, remote, serial)?,
            Front::Blkif(front) => Served::Blkif(Blkif::connect(front, fds, remote, slot)?),
            Front::NbdUnix { .. } | Front::NbdTcp { .. } => Served::Nbd(Offer::new(&front, remote)?),
        };
        self.lock().insert(id, served);
        Ok(front)
    }

    /// Whether it is a device that is opened exclusively.
    pub fn is_claimed(&self, id: u32) -> bool {
        let device = match self.lock().get(&id) {
            // A plain file cannot be claimed.
            Some(Served::Block(device)) if device.how() != DeviceHow::FuseFile => device.path(),
            _ => return false,
        };
        // Asked without the lock: the kernel may take its time.
        tapio_front::device::is_claimed(&device)
    }

    /// The disk goes on, perhaps with another size and under another name: devices of this host follow.
    pub fn resumed(&self, name: &str) {
        self.renamed(name);
        self.grown();
    }

    /// The disk may have another size: devices of this host follow, and followers are told.
    pub fn grown(&self) {
        self.each_device(Device::follow_size);
        // One that was told and has not looked yet needs no second word; one that is gone needs none.
        self.followers.lock().retain(|_, news| match news.write(&[1]) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        });
    }

    /// Makes `news` the follower of a front end, which is told when the disk may have another size; it replaces the one
    /// before.
    pub fn follow(&self, id: u32, news: UnixStream) -> Result<()> {
        if !self.lock().contains_key(&id) {
            return Err(ControlError::new(Errno::ENOENT, format!("there is no front end {id}")));
        }
        // A slow follower may not keep the disk waiting.
        news.set_nonblocking(true)
            .map_err(|error| ControlError::io(format_args!("front end {id} cannot be told"), &error))?;
        self.followers.lock().insert(id, news);
        Ok(())
    }

    /// The disk has this name from now on, if it had not before.
    pub fn renamed(&self, name: &str) {
        if *self.name.lock() != name {
            *self.name.lock() = name.to_owned();
            self.each_device(|device| device.rename(name));
        }
    }

    fn each_device(&self, mut act: impl FnMut(&mut Device)) {
        for served in self.lock().values_mut() {
            if let Served::Block(device) = served {
                act(device);
            }
        }
    }

    /// Says by which names clients find a guarded export, and cuts off those that came by a name of `cut`.
    pub fn admit(&self, id: u32, names: &[SecretName], cut: &[SecretName]) -> Result<()> {
        match self.lock().get(&id) {
            Some(Served::Nbd(offer)) => offer.admit(names, cut),
            Some(_) => Err(ControlError::new(Errno::EINVAL, format!("front end {id} is no NBD export"))),
            None => Err(ControlError::new(Errno::ENOENT, format!("there is no front end {id}"))),
        }
    }

    /// Ends a front end: its clients get the answers in flight and are disconnected.
    pub fn remove(&self, id: u32) -> Result<()> {
        let served = self.lock().remove(&id);
        self.followers.lock().remove(&id);
        match served {
            None => Err(ControlError::new(Errno::ENOENT, format!("there is no front end {id}"))),
            Some(Served::VhostUser(server)) => {
                server.close();
                Ok(())
            }
            Some(Served::Nbd(offer)) => {
                offer.end();
                Ok(())
            }
            Some(Served::Block(device)) => {
                device.end();
                Ok(())
            }
            Some(Served::Blkif(device)) => {
                device.end();
                Ok(())
            }
        }
    }

    /// Clients of a front end.
    pub fn connections(&self, id: u32) -> u32 {
        match self.lock().get(&id) {
            None => 0,
            Some(Served::Nbd(offer)) => offer.connections(),
            Some(Served::VhostUser(server)) => u32::from(server.state().connected),
            Some(Served::Block(device)) => u32::from(device.is_alive()),
            Some(Served::Blkif(device)) => device.connections(),
        }
    }

    /// Notes why the pages of a Xen guest's device may not be mapped.
    pub fn set_only_copied(&self, id: u32, why: Option<String>) {
        if let Some(Served::Blkif(device)) = self.lock().get_mut(&id) {
            device.only_copied = why;
        }
    }

    /// A device that has pages of its guest mapped while the storage uses them.
    pub fn mapped(&self) -> Option<String> {
        self.lock().values().find_map(|served| match served {
            Served::Blkif(device) if device.maps_pages() => Some(device.name()),
            _ => None,
        })
    }

    /// The devices of Xen guests.
    pub fn rings(&self) -> Vec<BlkifReport> {
        let report = |served: &Served| match served {
            Served::Blkif(device) => Some(device.report()),
            Served::Nbd(_) | Served::VhostUser(_) | Served::Block(_) => None,
        };
        self.lock().values().filter_map(report).collect()
    }
}

fn vhost_user(front: &Front, mut fds: Vec<OwnedFd>, remote: DiskHandle, serial: &str) -> Result<Served> {
    let Front::VhostUser { socket, listener, connection, queues, queue_size, read_only } = front else {
        return Err(ControlError::new(Errno::EINVAL, "this is no vhost-user front end"));
    };
    let given = match listener.or(*connection) {
        None => None,
        Some(index) if (index as usize) < fds.len() => Some(fds.swap_remove(index as usize)),
        Some(index) => {
            return Err(ControlError::new(Errno::EBADF, format!("descriptor {index} did not come along")));
        }
    };
    let listen = match given {
        None => Listen::Path(socket),
        Some(fd) if listens(&fd) => Listen::Socket(fd),
        Some(_) => {
            return Err(ControlError::new(Errno::EOPNOTSUPP, "the given socket is connected")
                .next("give one that listens, or a path"));
        }
    };
    let options = VhostUserOptions {
        queues: *queues,
        queue_size_max: *queue_size,
        read_only: *read_only,
        serial: serial.to_owned(),
        log: Arc::new(|line| log::line(&format!("vhost-user: {line}"))),
    };
    let server = VhostUserServer::listen(listen, options, remote).map_err(|error| {
        ControlError::io(format_args!("cannot serve vhost-user on {}", socket.display()), &error)
    })?;
    Ok(Served::VhostUser(server))
}

/// Whether a socket listens.
fn listens(fd: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_acceptconn(fd).unwrap_or(false)
}
