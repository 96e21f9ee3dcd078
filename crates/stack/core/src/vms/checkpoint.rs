//! Snapshots of VMs with their memory.
//!
//! ```text
//! 1  the guest's processors stop                        with a note: it shall go on
//! 2  a snapshot of the VM and its disks is made         with a note: it is not finished
//! 3  the guest's memory is written to a VDI             with a note: nothing leads to it
//! 4  in one change: the snapshot is finished, is suspended and leads to the VDI
//! 5  the guest goes on
//! ```
//!
//! The disks and the memory are of one moment, because the guest does not run between 1 and 5. A failure or a kill
//! before 4 leaves nothing but a guest that goes on.

use tapio_model::{ApiError, Value};

use super::allowed::{bad_power_state, refuse_special};
use super::running::Running;
use super::{Call, Handlers, copy, lookup, made, memory, suspend};
use crate::args::Args;
use crate::plan::steps::step;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.checkpoint", checkpoint);
}

fn checkpoint(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let name = args.text(1)?;
    let (_running, vm) = Running::begin(call, "VM", args.text(0)?, "checkpoint", |change, vm| {
        refuse_special(vm)?;
        let state = vm.text("power_state");
        if !matches!(state, "Running" | "Paused") {
            return Err(bad_power_state(vm, "Running"));
        }
        lookup::driver(&call.part, vm)?.check_save(vm.uuid()?)?;
        if state == "Running" {
            suspend::note_stopped(change, vm);
        }
        change.get("VM", &vm.reference)
    })?;
    let driver = lookup::driver(&call.part, &vm)?;
    let uuid = vm.uuid()?;
    let runs = vm.text("power_state") == "Running";
    let stopped = if runs { driver.pause(uuid) } else { Ok(()) };
    let made = stopped.and_then(|()| {
        copy::make_with_memory(call, &vm, name, || {
            let image = suspend::make_image(call, &vm)?;
            let written = memory::save(call, &*driver, uuid, &image);
            written.inspect_err(|_| made::discard(call, &image))?;
            step("vm-checkpoint:saved");
            Ok(image)
        })
    });
    if runs {
        step("vm-checkpoint:made");
        let gone_on = suspend::go_on(call, &*driver, &vm);
        if let (Ok(_), Err(error)) = (&made, gone_on) {
            return Err(ApiError::new(
                "VM_CHECKPOINT_RESUME_FAILED",
                [vm.reference.clone(), error.to_string()],
            ));
        }
    }
    made
}
