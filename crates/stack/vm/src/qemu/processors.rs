//! Processors that a guest gets while it runs.
//!
//! The emulator is started with places for as many as the VM may have. A guest sees a processor that is added by ACPI,
//! and its kernel takes it. None is taken away: QEMU 7.2 ends with an assertion when a processor of an emulated guest
//! goes, and the guest with it. An emulator that reads the guest's memory is started with as many as there are then,
//! and the same places.

use serde_json::{Value, json};
use tapio_types::ApiError;

use super::{DriverVm, affinity, soon};
use crate::errors::{bad_power_state, failed, not_allowed};
use crate::place::Phase;
use crate::traits::VCPU_MASK;

/// A place for a processor.
#[derive(Clone, Debug, PartialEq)]
struct Slot {
    /// What is to be added there.
    driver: String,
    /// Where it is, as the emulator says it.
    props: Value,
    has_processor: bool,
}

/// The places that `query-hotpluggable-cpus` reports, in the order in which the emulator fills them itself.
fn slots(answer: &Value) -> Vec<Slot> {
    let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or(0);
    let place = |slot: &Slot| {
        ["node-id", "socket-id", "die-id", "core-id", "thread-id"].map(|key| number(&slot.props, key))
    };
    let mut slots: Vec<Slot> = answer
        .as_array()
        .into_iter()
        .flatten()
        .map(|slot| Slot {
            driver: slot["type"].as_str().unwrap_or_default().to_owned(),
            props: slot["props"].clone(),
            has_processor: slot.get("qom-path").is_some(),
        })
        .collect();
    slots.sort_by_key(place);
    slots
}

/// What `device_add` is told to fill a place.
fn device(slot: &Slot, number: usize) -> Value {
    let mut options = slot.props.clone();
    options["driver"] = json!(slot.driver);
    options["id"] = json!(format!("cpu{number}"));
    options
}

impl DriverVm {
    fn slots(&self) -> Result<Vec<Slot>, ApiError> {
        self.run("query-hotpluggable-cpus", json!({})).map(|answer| slots(&answer))
    }

    /// The processors that there are, and the places for some.
    ///
    /// # Errors
    /// The emulator's.
    pub(super) fn processors(&self) -> Result<(usize, usize), ApiError> {
        let slots = self.slots()?;
        Ok((slots.iter().filter(|slot| slot.has_processor).count(), slots.len()))
    }

    /// Adds processors until there are so many.
    ///
    /// # Errors
    /// `VM_BAD_POWER_STATE`, `OPERATION_NOT_ALLOWED`; the emulator's. Some may be there then.
    pub(super) fn set_processors(&self, count: usize) -> Result<(), ApiError> {
        if self.phase() != Phase::Running {
            return Err(bad_power_state(self.vm, "Running", "Paused"));
        }
        let slots = self.slots()?;
        let present = slots.iter().filter(|slot| slot.has_processor).count();
        if count < present {
            let why = format!(
                "it has {present} processors, and driver qemu takes none away from a guest that runs: shut it down and \
                 set VCPUs_at_startup to {count}"
            );
            return Err(not_allowed(self.vm, why));
        }
        if count > slots.len() {
            let why = format!(
                "its emulator was started with room for {} processors: shut it down, set VCPUs_max, and start it",
                slots.len()
            );
            return Err(not_allowed(self.vm, why));
        }
        let free = slots.iter().enumerate().filter(|(_, slot)| !slot.has_processor);
        for (number, slot) in free.take(count - present) {
            let added = self.qmp()?.run("device_add", device(slot, number), soon());
            added.map_err(|error| {
                failed(self.vm, format!("processor {number} is refused by the emulator"), error)
            })?;
            self.tie()?;
        }
        Ok(())
    }

    /// Ties all threads to the processors of the host that `VCPUs_params:mask` names, new ones too.
    ///
    /// # Errors
    /// None of them is there any more.
    pub(super) fn tie(&self) -> Result<(), ApiError> {
        let Some(mask) = self.saved().spec.platform.remove(VCPU_MASK) else { return Ok(()) };
        let cpus = affinity::parse(&mask)
            .map_err(|why| failed(self.vm, "cannot be made", format!("VCPUs-params:mask {why}")))?;
        let Some(process) = self.process() else { return Ok(()) };
        affinity::set(process.pid(), &cpus).map_err(|error| {
            failed(self.vm, "its processors cannot be tied to those of VCPUs-params:mask", error)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_filled_from_the_first_on() {
        // As QEMU 7.2 answers for `-smp 1,maxcpus=4,sockets=2,cores=2`.
        let place = |socket: u64, core: u64| json!({ "socket-id": socket, "core-id": core, "thread-id": 0 });
        let answer = json!([
            { "props": place(1, 1), "vcpus-count": 1, "type": "qemu64-x86_64-cpu" },
            { "props": place(1, 0), "vcpus-count": 1, "type": "qemu64-x86_64-cpu" },
            { "props": place(0, 1), "vcpus-count": 1, "type": "qemu64-x86_64-cpu" },
            { "props": place(0, 0), "vcpus-count": 1, "qom-path": "/machine/unattached/device[0]",
              "type": "qemu64-x86_64-cpu" },
        ]);
        let slots = slots(&answer);
        let found: Vec<_> = slots.iter().map(|slot| (slot.props.clone(), slot.has_processor)).collect();
        assert_eq!(
            found,
            [(place(0, 0), true), (place(0, 1), false), (place(1, 0), false), (place(1, 1), false)]
        );
        let expected = json!({ "driver": "qemu64-x86_64-cpu", "id": "cpu2", "socket-id": 1, "core-id": 0, "thread-id": 0 });
        assert_eq!(device(&slots[2], 2), expected);
        assert_eq!(super::slots(&json!({ "error": 1 })), []);
    }
}
