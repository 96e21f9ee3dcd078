//! Network interfaces of guests: virtio-net devices on the root bus, in slots that follow from their positions, each in
//! front of a tap interface of the host.
//!
//! The daemon makes the tap, and hands its descriptor to the emulator, which has no rights to make one. The emulator is
//! then the only one that has it open: the tap stays when the daemon ends, and goes when the emulator does. An
//! interface whose network is not on this host has no tap, and its link is down.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::Instant;

use serde_json::json;
use tapio_types::ApiError;

use super::qmp::{Fate, QmpError};
use super::{DriverVm, FORCE_LIMIT, PLUG_LIMIT, soon};
use crate::errors::{already_there, failed, invalid_device, vif as vif_error};
use crate::place::Phase;
use crate::tap::{self, MTU_MIN};
use crate::traits::{PluggedVif, VifSpec};

/// Places: as many as XenServer offers, and one.
const VIFS_MAX: u8 = 8;

/// Slot of the first on the root bus, between the bridges and the disks behind them.
const FIRST_AT: u8 = 0x10;

fn device(position: u8) -> String {
    format!("v{position}")
}

/// What the emulator calls the host's side of it, and the descriptor on its way there.
fn backend(position: u8) -> String {
    format!("n{position}")
}

/// What `device_add` is asked for. What a guest's memory depends on is the same with a tap and without one.
fn options(vif: &VifSpec) -> serde_json::Value {
    let mut options = json!({
        "driver": "virtio-net-pci", "id": device(vif.position), "bus": "pci.0",
        "addr": format!("{:#x}", FIRST_AT + vif.position), "mac": vif.mac, "host_mtu": vif.mtu,
        "disable-legacy": "on",
        // No code for a start from the network: the emulator's is a file that not every host has.
        "romfile": "",
    });
    if vif.bridge.is_some() {
        options["netdev"] = json!(backend(vif.position));
    }
    options
}

impl DriverVm {
    /// What the guest has, whatever was to become of it.
    pub(super) fn vifs(&self) -> Result<BTreeMap<u8, PluggedVif>, ApiError> {
        let (present, known) = (self.devices()?, self.saved().vifs);
        let there = (0..VIFS_MAX).filter(|position| present.contains(&device(*position)));
        let nothing = PluggedVif { vif: None, tap: None, bridge: None };
        Ok(there.map(|at| (at, known.get(&at).cloned().unwrap_or_else(|| nothing.clone()))).collect())
    }

    /// What the emulator has of an interface beside its device goes: left by a daemon that died on the way.
    fn drop_backend(&self, position: u8, until: Instant) {
        let Ok(qmp) = self.qmp() else { return };
        let _ = qmp.run("netdev_del", json!({ "id": backend(position) }), until);
        let _ = qmp.run("closefd", json!({ "fdname": backend(position) }), until);
    }

    /// Forgets interfaces that are not there: a daemon may have died between keeping and doing.
    pub(super) fn adopt_vifs(&self) -> Result<(), ApiError> {
        let known = self.saved().vifs;
        if known.is_empty() {
            return Ok(());
        }
        let present = self.devices()?;
        let gone: Vec<u8> = known.into_keys().filter(|at| !present.contains(&device(*at))).collect();
        gone.iter().for_each(|position| self.drop_backend(*position, soon()));
        self.change(|saved| saved.vifs.retain(|position, _| !gone.contains(position)))
    }

    /// Plugs an interface.
    pub(super) fn plug_vif(&self, vif: &VifSpec) -> Result<(), ApiError> {
        let (vm, position) = (self.vm, vif.position);
        if position >= VIFS_MAX {
            let why = format!("a VM of driver qemu has network interfaces 0 to {}", VIFS_MAX - 1);
            return Err(invalid_device(position, why));
        }
        if vif.mtu < MTU_MIN {
            let why = format!("its MTU is {}, and at least {MTU_MIN} are possible", vif.mtu);
            return Err(failed(vm, format!("network interface {position}"), why));
        }
        if self.devices()?.contains(&device(position)) {
            let is_same = self.saved().vifs.get(&position).is_some_and(|known| known.vif == vif.vif);
            return if is_same { Ok(()) } else { Err(already_there(position)) };
        }
        let qmp = self.qmp()?;
        let until = Instant::now() + PLUG_LIMIT;
        self.drop_backend(position, until);
        let tap = vif.bridge.as_deref().map(|bridge| tap::make(&vif.tap, bridge, vif.mtu)).transpose();
        let tap = tap.map_err(|error| {
            let bridge = vif.bridge.as_deref().unwrap_or_default();
            failed(vm, format!("network interface {position} cannot be connected to bridge {bridge}"), error)
        })?;
        // Kept first: whatever dies on the way, this one is known to be there, or on its way.
        let name = tap.as_ref().map(|tap| tap.name.clone());
        let plugged = PluggedVif { vif: vif.vif, tap: name, bridge: vif.bridge.clone() };
        self.change(|saved| {
            saved.vifs.insert(position, plugged);
        })?;
        let name = backend(position);
        let added = (|| {
            if let Some(tap) = &tap {
                let given = json!({ "fdname": name });
                qmp.run_with("getfd", given, Some(tap.file.as_fd()), until)?;
                qmp.run("netdev_add", json!({ "type": "tap", "id": name, "fd": name }), until)?;
            }
            qmp.forget_fate(&device(position));
            qmp.run("device_add", options(vif), until)?;
            if tap.is_none() {
                qmp.run("set_link", json!({ "name": device(position), "up": false }), until)?;
            }
            Ok(())
        })();
        added.map_err(|error: QmpError| {
            let _ = qmp.run("device_del", json!({ "id": device(position) }), until);
            self.drop_backend(position, until);
            let _ = self.change(|saved| {
                saved.vifs.remove(&position);
            });
            match error {
                QmpError::Late => vif_error("ATTACH_TIMEOUT", vif.vif, "the emulator has not answered"),
                other => {
                    failed(vm, format!("network interface {position} is refused by the emulator"), other)
                }
            }
        })
    }

    /// Puts the host's end of one into another bridge. What is kept follows: after a death on the way the same call
    /// finds it in either.
    pub(super) fn move_vif(&self, vif: &VifSpec) -> Result<(), ApiError> {
        let position = vif.position;
        let what = || {
            format!("network interface {position} cannot be connected to another network while its VM runs")
        };
        let known = self.vifs()?.remove(&position);
        let ends = known.and_then(|known| Some((known.tap?, known.bridge?)));
        let (Some((tap, from)), Some(to)) = (ends, vif.bridge.as_deref()) else {
            let why = "it is in no bridge that is known here: unplug it and plug it again";
            return Err(failed(self.vm, what(), why));
        };
        tap::move_to(&tap, &from, to).map_err(|error| failed(self.vm, what(), error))?;
        self.change(|saved| {
            if let Some(plugged) = saved.vifs.get_mut(&position) {
                plugged.bridge = Some(to.to_owned());
            }
        })
    }

    /// Unplugs one.
    pub(super) fn unplug_vif(&self, vif: &VifSpec, force: bool, until: Instant) -> Result<(), ApiError> {
        let position = vif.position;
        if self.phase() == Phase::Paused && !force {
            let why = "the guest is paused and cannot be asked; unpause it, or use force";
            return Err(vif_error("DETACH_REJECTED", vif.vif, why));
        }
        let until = if force { until.min(Instant::now() + FORCE_LIMIT) } else { until };
        match self.remove_device(&device(position), until) {
            Ok(()) => {}
            Err(why) if force => {
                tracing::warn!(vm = %self.vm, position, "a guest keeps a network interface without a link: {why:?}");
            }
            Err(Some(Fate::Kept)) => {
                return Err(vif_error("DETACH_REJECTED", vif.vif, "the guest's kernel keeps the device"));
            }
            Err(_) => {
                let why = "the guest's kernel has not let go of the device in time; it may have no driver for hot \
                           plug, or still be starting";
                return Err(vif_error("DETACH_TIMEOUT", vif.vif, why));
            }
        }
        self.drop_backend(position, soon());
        self.change(|saved| {
            saved.vifs.remove(&position);
        })
    }

    /// Brings links in order after memory was read, which says how they were where it was written.
    pub(super) fn set_links(&self) -> Result<(), ApiError> {
        for (position, vif) in self.vifs()? {
            self.run("set_link", json!({ "name": device(position), "up": vif.tap.is_some() }))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_the_same_with_a_network_and_without_one() {
        let mut vif = VifSpec {
            vif: None,
            position: 3,
            mac: "02:00:00:00:00:03".into(),
            mtu: 1400,
            bridge: Some("br0".into()),
            tap: "tap1.3".into(),
        };
        let mut connected = options(&vif);
        assert_eq!(connected["addr"], "0x13");
        assert_eq!((&connected["id"], &connected["host_mtu"]), (&json!("v3"), &json!(1400)));
        assert_eq!(connected["netdev"], "n3");
        vif.bridge = None;
        let apart = options(&vif);
        assert_eq!(apart.get("netdev"), None);
        connected.as_object_mut().unwrap().remove("netdev");
        assert_eq!(connected, apart);
    }

    #[test]
    fn slots_are_free_of_bridges_and_disks() {
        let last = u16::from(FIRST_AT + VIFS_MAX - 1);
        assert!(u16::from(FIRST_AT) >= super::super::command::BRIDGES_END);
        assert!(last < super::super::command::REST_AT);
    }
}
