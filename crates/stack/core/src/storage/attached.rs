//! An SR that is attached to this host.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tapio_model::{ApiError, Value};
use tapio_sm::worker::is_unfinished;
use tapio_sm::{Ctx, DriverInfo, Origin, Sr, SrDriver, SrStat};
use uuid::Uuid;

use super::notes::Note;
use crate::db::{Change, Object};

/// The capability of drivers whose devices come and go: their SRs are scanned when the kernel tells of one.
pub(super) const HOT_PLUG: &str = "HOT_PLUG";

/// An SR that is attached to this host.
pub(super) struct Attached {
    pub(super) uuid: Uuid,
    pub(super) reference: String,
    pub(super) info: &'static DriverInfo,
    /// Whose the driver is, if it is not ours.
    pub(super) origin: Option<&'static Origin>,
    /// None once it is detached.
    device: RwLock<Option<Box<dyn Sr>>>,
    /// Held for reading while an image and its record are made or removed, for writing while a scan compares them.
    images: RwLock<()>,
    /// Images that have no record yet by intention: a scan leaves them alone.
    building: Mutex<BTreeSet<Uuid>>,
    /// What happened to the last operation that was broken off with the storage's process.
    trouble: Mutex<Option<ApiError>>,
    /// Notes of what such operations left, to be worked off once the storage answers.
    owed: Mutex<Vec<Note>>,
    /// Whether a thread does that.
    is_tended: AtomicBool,
    /// A thread asks for its sizes, as one does at intervals.
    is_measuring: AtomicBool,
    measured: AtomicU64,
    recorded: AtomicU64,
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("uuid", &self.uuid).finish_non_exhaustive()
    }
}

/// Sizes of an SR, and their place in the order in which they were asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    order: u64,
    stat: SrStat,
}

/// Bytes as the database keeps them.
pub(super) fn int(bytes: u64) -> Value {
    Value::Int(i64::try_from(bytes).unwrap_or(i64::MAX))
}

impl Attached {
    pub(super) fn new(uuid: Uuid, reference: String, driver: &dyn SrDriver, device: Box<dyn Sr>) -> Self {
        Self {
            uuid,
            reference,
            info: driver.info(),
            origin: driver.origin(),
            device: RwLock::new(Some(device)),
            images: RwLock::default(),
            building: Mutex::default(),
            trouble: Mutex::default(),
            owed: Mutex::default(),
            is_tended: AtomicBool::new(false),
            is_measuring: AtomicBool::new(false),
            measured: AtomicU64::new(0),
            recorded: AtomicU64::new(0),
        }
    }

    /// Works with the storage; it stays attached meanwhile.
    ///
    /// # Errors
    /// `SR_NOT_ATTACHED`, or what `work` answers.
    pub(super) fn with<T>(&self, work: impl FnOnce(&dyn Sr) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let device = self.device.read();
        let Some(device) = device.as_deref() else { return Err(self.not_attached()) };
        work(device).inspect_err(|error| {
            if is_unfinished(error) {
                *self.trouble.lock() = Some(error.clone());
            }
        })
    }

    /// Takes what befell the last operation that was broken off, unless a thread looks after that already; then
    /// [`Self::is_tended`] must be called.
    pub(super) fn tend(&self) -> Option<ApiError> {
        if self.is_tended.swap(true, Ordering::AcqRel) {
            return None;
        }
        let trouble = self.trouble.lock().take();
        if trouble.is_none() {
            self.is_tended.store(false, Ordering::Release);
        }
        trouble
    }

    /// Whether its storage hung and has not answered since.
    pub(super) fn is_in_trouble(&self) -> bool {
        self.is_tended.load(Ordering::Acquire) || self.trouble.lock().is_some()
    }

    /// The thread has ended.
    pub(super) fn is_tended(&self) {
        self.is_tended.store(false, Ordering::Release);
    }

    /// What this note says is worked off once the storage answers.
    pub(super) fn owe(&self, note: Note) {
        self.owed.lock().push(note);
    }

    /// Takes what is to be worked off.
    pub(super) fn owed(&self) -> Vec<Note> {
        std::mem::take(&mut *self.owed.lock())
    }

    /// Takes the storage away by `end`, which gives it back where it fails.
    ///
    /// # Errors
    /// `SR_NOT_ATTACHED`, or what `end` answers.
    pub(super) fn end(
        &self,
        end: impl FnOnce(Box<dyn Sr>) -> Result<(), (Box<dyn Sr>, ApiError)>,
    ) -> Result<(), ApiError> {
        let mut device = self.device.write();
        let Some(taken) = device.take() else { return Err(self.not_attached()) };
        end(taken).map_err(|(given_back, error)| {
            *device = Some(given_back);
            error
        })
    }

    fn not_attached(&self) -> ApiError {
        ApiError::new("SR_NOT_ATTACHED", [self.reference.as_str()])
    }

    /// Whether the driver has a capability, as `VDI_SNAPSHOT`.
    pub(super) fn can(&self, capability: &str) -> bool {
        has_capability(self.info, capability)
    }

    /// Whether the driver keeps the records of VDIs itself.
    pub(super) fn keeps_records(&self) -> bool {
        self.origin.is_some_and(Origin::calls_api)
    }

    /// Its base copies are merged here: no plugin's are.
    ///
    /// # Errors
    /// `SR_OPERATION_NOT_SUPPORTED`.
    pub(super) fn is_collected(&self) -> Result<(), ApiError> {
        let refused = || ApiError::new("SR_OPERATION_NOT_SUPPORTED", [self.reference.as_str()]);
        let is_collected = self.can("VDI_SNAPSHOT") && self.origin.is_none();
        is_collected.then_some(()).ok_or_else(refused)
    }

    /// # Errors
    /// `SR_OPERATION_NOT_SUPPORTED`.
    pub(super) fn needs(&self, capability: &str) -> Result<(), ApiError> {
        let refused = || ApiError::new("SR_OPERATION_NOT_SUPPORTED", [self.reference.as_str()]);
        self.can(capability).then_some(()).ok_or_else(refused)
    }

    /// Images and records change together while this is held; no scan comes between.
    pub(super) fn changing(&self) -> RwLockReadGuard<'_, ()> {
        self.images.read()
    }

    /// Neither images nor records change while this is held.
    pub(super) fn comparing(&self) -> RwLockWriteGuard<'_, ()> {
        self.images.write()
    }

    /// An image that shall have no record until this goes.
    pub(super) fn build(&self, image: Uuid) -> Building<'_> {
        self.building.lock().insert(image);
        Building { of: self, image }
    }

    /// [`Self::build`] of images that an earlier daemon had begun to make, until [`Self::admit`].
    pub(super) fn keep_out(&self, images: &[Uuid]) {
        self.building.lock().extend(images);
    }

    /// These images are no longer without a record by intention.
    pub(super) fn admit(&self, images: &[Uuid]) {
        self.building.lock().retain(|image| !images.contains(image));
    }

    /// Whether the image has no record by intention.
    pub(super) fn is_building(&self, image: Uuid) -> bool {
        self.building.lock().contains(&image)
    }

    /// Whether no other thread measures at intervals; then [`Self::end_measuring`] must be called.
    pub(super) fn begin_measuring(&self) -> bool {
        !self.is_measuring.swap(true, Ordering::AcqRel)
    }

    /// The thread has ended.
    pub(super) fn end_measuring(&self) {
        self.is_measuring.store(false, Ordering::Release);
    }

    /// Asks the storage for its sizes; none where it does not answer, which is no reason to fail what was done.
    pub(super) fn measure(&self, ctx: &dyn Ctx) -> Option<Sizes> {
        let order = self.measured.fetch_add(1, Ordering::AcqRel) + 1;
        match self.with(|sr| sr.stat(ctx)) {
            Ok(stat) => Some(Sizes { order, stat }),
            Err(error) => {
                tracing::warn!(sr = %self.uuid, %error, "the storage does not tell its sizes");
                None
            }
        }
    }

    /// Writes sizes to the SR's record, unless newer ones are there, and adds `allocated` to `virtual_allocation`.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub(super) fn record(
        &self,
        change: &mut Change<'_>,
        sizes: Option<Sizes>,
        allocated: i64,
    ) -> Result<(), ApiError> {
        let record = change.get("SR", &self.reference)?;
        if let Some(sizes) = sizes
            && self.recorded.fetch_max(sizes.order, Ordering::AcqRel) < sizes.order
        {
            let fields = [
                ("physical_size", sizes.stat.physical_size),
                ("physical_utilisation", sizes.stat.physical_utilisation),
            ];
            for (field, bytes) in fields {
                if record.get(field) != &int(bytes) {
                    change.set("SR", &self.reference, field, int(bytes))?;
                }
            }
        }
        if self.keeps_records() {
            let sum: i64 = change.find("VDI", "SR", &self.reference).iter().map(|vdi| counted(vdi)).sum();
            if record.int("virtual_allocation") != sum {
                change.set("SR", &self.reference, "virtual_allocation", sum)?;
            }
        } else if allocated != 0 {
            let sum = record.int("virtual_allocation").saturating_add(allocated).max(0);
            change.set("SR", &self.reference, "virtual_allocation", sum)?;
        }
        Ok(())
    }
}

/// What a VDI adds to `virtual_allocation` of its SR: its size, unless it only carries others.
pub(super) fn counted(vdi: &Object) -> i64 {
    if vdi.bool("managed") && !vdi.bool("missing") { vdi.int("virtual_size") } else { 0 }
}

/// Whether a driver has a capability; `NAME/2` is version 2 of `NAME`.
pub(super) fn has_capability(info: &DriverInfo, capability: &str) -> bool {
    info.capabilities.iter().any(|known| known.split('/').next() == Some(capability))
}

/// See [`Attached::build`].
#[derive(Debug)]
pub(super) struct Building<'a> {
    of: &'a Attached,
    image: Uuid,
}

impl Drop for Building<'_> {
    fn drop(&mut self) {
        self.of.building.lock().remove(&self.image);
    }
}
