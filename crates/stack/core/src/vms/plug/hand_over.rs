//! Disks of a guest that goes from one host to another, at both of them.
//!
//! The VBD is plugged all the time, and its record says so: nothing here writes it. A disk that the guest writes is
//! open at one host at a time, which the lease of its SR makes sure of.

use std::sync::Arc;
use std::time::Instant;

use tapio_model::ApiError;
use tapio_stat::VbdId;
use tapio_types::Access;
use tapio_vm::FrontSpec;
use uuid::Uuid;

use super::{Disk, PLUG, UNDO, devices, tuning};
use crate::disks::{Note, Phase, Rights};
use crate::storage;

impl Disk {
    /// `VBD.uuid`.
    pub fn vbd(&self) -> Uuid {
        self.spec.vbd
    }

    /// Whether the guest may write it.
    pub fn is_written(&self) -> bool {
        !self.spec.read_only
    }

    fn until() -> Instant {
        Instant::now() + PLUG
    }

    /// Makes the disk here for a guest that comes. One that it may write has `len` bytes and sectors of
    /// `sector_size`, as at the other host, and no images yet.
    ///
    /// # Errors
    /// The storage's, the process's, the driver's. [`Self::drop_arrived`] removes what there is.
    pub fn arrive(&self, len: u64, sector_size: Option<u32>) -> Result<(), ApiError> {
        let (disks, uuid) = (&self.call.part.disks, self.spec.vbd);
        let mut tuned = tuning::of(&self.record, &self.sr, &self.call.part.config);
        tuned.sector_size = sector_size.or(tuned.sector_size);
        disks.note(Note::starting(
            self.spec.clone(),
            (self.vm, self.driver.name()),
            (&self.vdi.reference, self.vdi_uuid),
            self.sr.uuid()?,
            tuned,
        ))?;
        let front = self.front()?;
        let rights = Rights::of(self.sr.text("type"), *front == FrontSpec::Device);
        let number = VbdId { domid: self.domid, devid: devices::number(self.spec.position) };
        let id = (*front != FrontSpec::Nothing).then_some(number);
        disks.start(uuid, rights, Self::until())?;
        let offered = if self.is_written() {
            disks.stand_in(uuid, len, front, id, Self::until())?
        } else {
            let opening = storage::activate(&self.storage, &self.vdi, &self.vbd, Access::ReadOnly)?;
            disks.open(uuid, &opening.with, Self::until())?;
            drop(opening);
            disks.offer(uuid, front, id, Self::until())?
        };
        self.driver.plug(self.vm, &offered)
    }

    /// The other host has given the images of a disk up that the guest writes: it goes on with them here.
    ///
    /// # Errors
    /// The storage's: also that the other host has it open still.
    pub fn take_images(&self) -> Result<(), ApiError> {
        let (disks, uuid) = (&self.call.part.disks, self.spec.vbd);
        let size = u64::try_from(self.vdi.int("virtual_size")).unwrap_or_default();
        let is_same = |note: &Note| note.size == size && note.vdi == self.vdi.reference;
        if !disks.of_vbd(uuid).as_ref().is_some_and(is_same) {
            let why = format!(
                "the disk of VBD {uuid} was resized, or moved to another SR, while its guest was sent: move the VM \
                 again"
            );
            return Err(ApiError::internal(why));
        }
        if self.sr.bool("shared") {
            let run_dir = &self.call.part.config.run_dir;
            tapio_sm::lease::note_guest(run_dir, self.sr.uuid()?, self.vm).map_err(|error| {
                ApiError::internal(format!("{}: a guest cannot be noted: {error}", run_dir.display()))
            })?;
        }
        let opening = storage::activate(&self.storage, &self.vdi, &self.vbd, Access::ReadWrite)?;
        disks.take_images(uuid, &opening.with, Self::until())
    }

    /// The guest is about to go on here: from now on a process that dies is replaced.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn arrived(&self) -> Result<(), ApiError> {
        self.call.part.disks.is_running(self.spec.vbd)
    }

    /// The guest has stopped: closes the images and gives them up, for another host.
    ///
    /// # Errors
    /// Requests do not end, the storage does not answer: it may be open still.
    pub fn give_up(&self) -> Result<(), ApiError> {
        let (disks, uuid) = (&self.call.part.disks, self.spec.vbd);
        let hold = storage::closing(&self.uncancelled, &self.vdi.reference)?;
        let closed = disks.give_up_images(uuid, Self::until());
        drop(hold);
        closed?;
        storage::deactivate(&self.uncancelled, &self.vdi.reference, &self.vbd)
    }

    /// The guest stays: brings back what [`Self::give_up`] has given up, or whatever else is away.
    ///
    /// # Errors
    /// As [`Self::take_images`] and a plug.
    pub fn come_back(self: &Arc<Self>) -> Result<(), ApiError> {
        let disks = &self.call.part.disks;
        if disks.is_alive(self.spec.vbd) {
            self.take_images()?;
            return self.arrived();
        }
        self.call.part.plans.run("VM.pool_migrate", self.plug(), &self.call.progress).map(drop)
    }

    /// The guest is not here, or not any more: ends the process and gives the images up.
    ///
    /// # Errors
    /// The process does not end, the storage does not answer.
    pub fn drop_arrived(&self) -> Result<(), ApiError> {
        let (disks, uuid) = (&self.call.part.disks, self.spec.vbd);
        if disks.of_vbd(uuid).is_some() {
            disks.end(uuid, true, Instant::now() + UNDO)?;
        }
        storage::deactivate(&self.uncancelled, &self.vdi.reference, &self.vbd)?;
        disks.forget(uuid);
        Ok(())
    }

    /// Whether its process serves it, and the guest has it.
    pub fn is_served(&self) -> bool {
        let disks = &self.call.part.disks;
        let is_guests = disks.of_vbd(self.spec.vbd).is_some_and(|note| note.phase == Phase::Running);
        is_guests && disks.serves(self.spec.vbd)
    }
}

/// Those of all these that the guest may write.
pub fn written(all: &[Arc<Disk>]) -> Vec<Arc<Disk>> {
    all.iter().filter(|disk| disk.is_written()).cloned().collect()
}
