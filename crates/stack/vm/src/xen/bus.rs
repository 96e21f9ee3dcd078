//! What is said to domains and their back ends, through xenstore.
//!
//! Whatever is read of a domain is read in one transaction, whatever changes in one; waiting is for watches.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tapio_xenstore::wire::{Access, Permission, Request};
use tapio_xenstore::{Client, Nodes, Transaction, XsError};
use uuid::Uuid;

use super::device::{BACKEND, DOM0, Device, RINGS_KEY, VBD_KEY, state};
use crate::traits::PluggedDisk;

type Result<T> = std::result::Result<T, XsError>;

/// Where domains are.
const DOMAINS: &str = "/local/domain";

/// What of a disk may change while a guest has it.
const CHANGEABLE: [&str; 5] = [
    "params",
    "physical-device-path",
    "polling-duration",
    "polling-idle-threshold",
    // A guest is offered these when it connects next.
    RINGS_KEY,
];

/// A disk that was to be written into xenstore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// It is new.
    New,
    /// It was there; its disk process may be another one now.
    Known,
    /// Another one is in its place.
    Taken,
    /// There is no such domain any more.
    NoDomain,
}

/// Both sides of a disk at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sides {
    /// Whether the back end's directory is this disk's.
    pub is_ours: bool,
    /// State of the back end.
    pub back: Option<u32>,
    /// State of the front end.
    pub front: Option<u32>,
    /// What the guest says about it.
    pub complaint: Option<String>,
    /// Whether the domain is there.
    pub has_domain: bool,
}

impl Sides {
    /// Whether data can pass.
    pub(super) fn are_connected(&self) -> bool {
        (self.back, self.front) == (Some(state::CONNECTED), Some(state::CONNECTED))
    }

    /// Whether the guest has let go, or never took it.
    pub(super) fn front_is_closed(&self) -> bool {
        !self.has_domain || matches!(self.front, None | Some(0 | state::INITIALISING | state::CLOSED))
    }

    /// Whether the guest has taken it, or tried to, and let go.
    pub(super) fn front_gave_up(&self) -> bool {
        matches!(self.front, Some(state::CLOSING | state::CLOSED))
    }

    /// Whether the back end has let go.
    pub(super) fn back_is_closed(&self) -> bool {
        matches!(self.back, None | Some(state::CLOSED))
    }
}

/// A connection to xenstored, for one operation.
pub(super) struct Bus(Client);

fn text(bytes: Option<Vec<u8>>) -> Option<String> {
    bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn number(bytes: Option<Vec<u8>>) -> Option<u32> {
    text(bytes)?.parse().ok()
}

fn vm_path(vm: Uuid) -> String {
    format!("/vm/{vm}")
}

/// Reads both sides of a disk in a transaction.
fn look(t: &mut Transaction<'_>, vm: Uuid, device: &Device, vbd: Uuid) -> Result<Sides> {
    let (back, front) = (device.backend(), device.frontend());
    let paths = [
        format!("{back}/{VBD_KEY}"),
        format!("{back}/state"),
        format!("{front}/state"),
        device.complaint(),
        format!("{DOMAINS}/{}/vm", device.domid),
    ];
    let mut values = t.read_many(&paths)?.into_iter();
    let mut next = || values.next().flatten();
    Ok(Sides {
        is_ours: text(next()).as_deref() == Some(&vbd.to_string()),
        back: number(next()),
        front: number(next()),
        complaint: text(next()).filter(|words| !words.is_empty()),
        has_domain: text(next()).as_deref() == Some(&vm_path(vm)),
    })
}

fn remove(t: &mut Transaction<'_>, device: &Device, sides: &Sides) -> Result<()> {
    t.remove(&device.backend())?;
    // The number may be another domain's by now.
    if sides.has_domain { t.remove(&device.frontend()) } else { Ok(()) }
}

impl Bus {
    /// Connects.
    pub(super) fn open(socket: Option<&Path>) -> Result<Self> {
        socket.map_or_else(Client::open, Client::connect).map(Self)
    }

    /// The client itself.
    pub(super) fn into_client(self) -> Client {
        self.0
    }

    /// The domain of a VM, if it has one.
    pub(super) fn find(&mut self, vm: Uuid) -> Result<Option<u32>> {
        let wanted = vm_path(vm);
        self.0.transaction(|t| {
            let domains: Vec<u32> = t
                .directory(DOMAINS)?
                .unwrap_or_default()
                .iter()
                .filter_map(|name| name.parse().ok())
                .collect();
            let paths: Vec<String> = domains.iter().map(|domid| format!("{DOMAINS}/{domid}/vm")).collect();
            let values = t.read_many(&paths)?;
            // A domain that is being taken apart may still be there: the newest one is meant.
            let found =
                domains.into_iter().zip(values).filter(|(_, vm)| text(vm.clone()).as_ref() == Some(&wanted));
            Ok(found.map(|(domid, _)| domid).max())
        })
    }

    /// Which of these disks a domain has: positions.
    pub(super) fn present(&mut self, domid: u32, disks: &[(u8, Uuid)]) -> Result<BTreeSet<u8>> {
        let key = |position: u8| format!("{}/{VBD_KEY}", Device::of(domid, position).backend());
        let paths: Vec<String> = disks.iter().map(|(position, _)| key(*position)).collect();
        let values = self.0.transaction(|t| t.read_many(&paths))?;
        let is_there = |((_, vbd), value): &(&(u8, Uuid), Option<Vec<u8>>)| {
            text(value.clone()).as_deref() == Some(&vbd.to_string())
        };
        Ok(disks.iter().zip(values).filter(is_there).map(|((position, _), _)| *position).collect())
    }

    /// Writes a disk into xenstore.
    pub(super) fn plug(
        &mut self,
        vm: Uuid,
        device: &Device,
        disk: &PluggedDisk,
        path: &Path,
    ) -> Result<Written> {
        let (back, front) = (device.backend(), device.frontend());
        self.0.transaction(|t| {
            let sides = look(t, vm, device, disk.spec.vbd)?;
            if !sides.has_domain {
                return Ok(Written::NoDomain);
            }
            if sides.is_ours {
                // The states stay: a guest that is connected goes on with the new process, and other numbers.
                let changes = |(key, _): &(&str, String)| CHANGEABLE.contains(key);
                let fresh: Vec<(String, String)> = device
                    .backend_keys(disk, path)
                    .into_iter()
                    .filter(changes)
                    .map(|(key, value)| (format!("{back}/{key}"), value))
                    .collect();
                let paths: Vec<&String> = fresh.iter().map(|(path, _)| path).collect();
                let known = t.read_many(&paths)?;
                let differ = fresh
                    .iter()
                    .zip(known)
                    .filter(|((_, value), known)| text(known.clone()).as_ref() != Some(value));
                let differ: Vec<(&String, &String)> =
                    differ.map(|((path, value), _)| (path, value)).collect();
                t.write_many(&differ)?;
                return Ok(Written::Known);
            }
            if sides.back.is_some() {
                return Ok(Written::Taken);
            }
            let state = || ("state", state::INITIALISING.to_string());
            let values = |dir: &str, keys: Vec<(&'static str, String)>| -> Vec<(String, String)> {
                keys.into_iter()
                    .chain([state()])
                    .map(|(key, value)| (format!("{dir}/{key}"), value))
                    .collect()
            };
            let both = [
                (&back, DOM0, device.domid, values(&back, device.backend_keys(disk, path))),
                (&front, device.domid, DOM0, values(&front, device.frontend_keys(disk))),
            ];
            let complaint = device.complaint();
            let mut requests = Vec::new();
            if sides.complaint.is_some() {
                // About one that was in this place before.
                requests.push(Request::Rm { path: &complaint });
            }
            for (path, owner, reader, values) in &both {
                let permissions = vec![
                    Permission { access: Access::None, domid: *owner },
                    Permission { access: Access::Read, domid: *reader },
                ];
                requests.push(Request::Mkdir { path });
                // What is made below has the same.
                requests.push(Request::SetPerms { path, permissions });
                requests.extend(
                    values.iter().map(|(path, value)| Request::Write { path, value: value.as_bytes() }),
                );
            }
            t.do_all(&requests)?;
            Ok(Written::New)
        })
    }

    /// Asks for a disk back: answers how both sides were before.
    pub(super) fn ask_back(&mut self, vm: Uuid, device: &Device, vbd: Uuid) -> Result<Sides> {
        let back = device.backend();
        self.0.transaction(|t| {
            let sides = look(t, vm, device, vbd)?;
            if sides.is_ours && !sides.front_is_closed() {
                if sides.complaint.is_some() {
                    t.remove(&device.complaint())?;
                }
                t.write(&format!("{back}/online"), b"0")?;
                t.write(&format!("{back}/state"), state::CLOSING.to_string().as_bytes())?;
            }
            Ok(sides)
        })
    }

    /// The guest keeps it: takes back that it was asked. False when it has let go meanwhile.
    pub(super) fn leave(&mut self, vm: Uuid, device: &Device, vbd: Uuid) -> Result<bool> {
        let back = device.backend();
        self.0.transaction(|t| {
            let sides = look(t, vm, device, vbd)?;
            let stays = sides.is_ours && sides.front == Some(state::CONNECTED);
            if stays {
                t.write(&format!("{back}/online"), b"1")?;
                if sides.back == Some(state::CLOSING) {
                    t.write(&format!("{back}/state"), state::CONNECTED.to_string().as_bytes())?;
                }
            }
            Ok(stays)
        })
    }

    /// Removes a disk, if it is this one.
    pub(super) fn remove(&mut self, vm: Uuid, device: &Device, vbd: Uuid) -> Result<()> {
        self.0.transaction(|t| {
            let sides = look(t, vm, device, vbd)?;
            if sides.is_ours { remove(t, device, &sides) } else { Ok(()) }
        })
    }

    /// Removes all back ends of a domain that is gone.
    pub(super) fn remove_all(&mut self, domid: u32) -> Result<()> {
        self.0.transaction(|t| t.remove(&Device::backends(domid)))
    }

    /// Waits until `done` says so of both sides of a disk; answers them as they are then, or were at `until`.
    pub(super) fn wait(
        &mut self,
        vm: Uuid,
        device: &Device,
        vbd: Uuid,
        until: Instant,
        done: impl Fn(&Sides) -> bool,
    ) -> Result<Sides> {
        let watched = [
            format!("{}/state", device.backend()),
            format!("{}/state", device.frontend()),
            device.complaint(),
        ];
        let mut watches = vec![self.0.watch("@releaseDomain", "domain")?];
        for path in &watched {
            watches.push(self.0.watch(path, "disk")?);
        }
        let sides = loop {
            // What has come already is one look.
            while self.0.next_event()?.is_some() {}
            let sides = self.0.transaction(|t| look(t, vm, device, vbd))?;
            if done(&sides) || Instant::now() >= until {
                break sides;
            }
            self.0.wait_event(Some(until))?;
        };
        for watch in &watches {
            self.0.unwatch(watch)?;
        }
        Ok(sides)
    }

    /// Asks a guest to end.
    pub(super) fn ask_to_end(&mut self, domid: u32) -> Result<()> {
        self.0.transaction(|t| t.write(&control(domid), b"poweroff"))
    }

    /// A guest that has not ended shall not do so later, unless it has begun.
    pub(super) fn no_longer_ask(&mut self, domid: u32) -> Result<()> {
        self.0.transaction(|t| match t.read(&control(domid))? {
            Some(asked) if asked == b"poweroff" => t.write(&control(domid), b""),
            _ => Ok(()),
        })
    }

    /// The terminal of a domain, once its console is served.
    pub(super) fn console(&mut self, domid: u32) -> Result<Option<PathBuf>> {
        let said = self.0.read_text(&format!("{DOMAINS}/{domid}/console/tty"))?;
        Ok(said.filter(|path| path.starts_with("/dev/")).map(PathBuf::from))
    }
}

fn control(domid: u32) -> String {
    format!("{DOMAINS}/{domid}/control/shutdown")
}

/// For messages.
pub(super) fn states(sides: &Sides) -> String {
    let word = |state: Option<u32>| state.map_or_else(|| "absent".to_owned(), |state| state.to_string());
    format!("{BACKEND} is in state {}, the guest in {}", word(sides.back), word(sides.front))
}
