//! `lvmoiscsi` and `lvmohba`: the group of an SR of volumes on a LUN that is brought to this host.

use std::path::{Path, PathBuf};

use tapio_types::ApiError;
use uuid::Uuid;

use super::iscsi::named_target;
use crate::Places;
use crate::errors;
use crate::iscsi::config::Target;
use crate::iscsi::{Hold, Initiator, Look, documents};
use crate::lease::SILENCE_KEY;
use crate::lvm::thin::KEYS;
use crate::lvm::{self, Under, single};
use crate::scsi::{Adapters, Seen, Tree, adapter, is_scsi_id};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, Sr, SrDriver};

pub(super) const SCSI_ID: (&str, &str) =
    ("SCSIid", "identity of the LUN (required); without it a probe lists the LUNs");
const FORCE: (&str, &str) = ("force", "true: overwrite a LUN that holds something else");

/// The identity of the LUN; none where it is to be chosen.
///
/// # Errors
/// 107: it is none.
fn scsi_id(config: &Config) -> Result<Option<&str>, ApiError> {
    match config.get("SCSIid").map(String::as_str) {
        None | Some("") => Ok(None),
        Some(id) if is_scsi_id(id) => Ok(Some(id)),
        Some(id) => Err(errors::fail(107, format_args!("device_config:SCSIid is '{id}'"))),
    }
}

/// What the error without an identity says, with the LUNs that there are.
fn unnamed(document: String) -> ApiError {
    errors::fail_with(
        107,
        "device_config:SCSIid is the identity of the LUN; the document lists those here",
        document,
    )
}

/// Keys that lead to a LUN of a target.
pub(super) const TARGET_KEYS: &[(&str, &str)] = &{
    const KEYS: &[(&str, &str)] = crate::iscsi::config::KEYS;
    let mut all = [SCSI_ID; KEYS.len() + 1];
    let mut at = 0;
    while at < KEYS.len() {
        all[at + 1] = KEYS[at];
        at += 1;
    }
    all
};

static ISCSI: DriverInfo = DriverInfo {
    sr_type: "lvmoiscsi",
    name: "LVM over iSCSI",
    description: "VDIs as VHD and raw logical volumes on a LUN of an iSCSI target",
    capabilities: lvm::CAPABILITIES_ON_LUNS,
    configuration: &{
        let mut all = [SCSI_ID; TARGET_KEYS.len() + 6];
        let mut at = 0;
        while at < TARGET_KEYS.len() {
            all[at] = TARGET_KEYS[at];
            at += 1;
        }
        all[TARGET_KEYS.len()] = KEYS[0];
        all[TARGET_KEYS.len() + 1] = KEYS[1];
        all[TARGET_KEYS.len() + 2] = KEYS[2];
        all[TARGET_KEYS.len() + 3] = FORCE;
        all[TARGET_KEYS.len() + 4] = SILENCE_KEY;
        all[TARGET_KEYS.len() + 5] = single::KEY;
        all
    },
    is_shareable: true,
};

static HBA: DriverInfo = DriverInfo {
    sr_type: "lvmohba",
    name: "LVM over a SCSI disk",
    description: "VDIs as VHD and raw logical volumes on a LUN of a storage network",
    capabilities: lvm::CAPABILITIES_ON_LUNS,
    configuration: &[SCSI_ID, KEYS[0], KEYS[1], KEYS[2], FORCE, SILENCE_KEY, single::KEY],
    is_shareable: true,
};

/// The type `lvmoiscsi`.
pub(crate) struct OverIscsi {
    places: Places,
    initiator: Initiator,
}

impl OverIscsi {
    pub(crate) fn new(places: Places) -> Self {
        Self { initiator: Initiator::new(&places.run_dir), places }
    }

    /// The target and the identity of the LUN; what is missing comes with what there is: targets (96), LUNs (107).
    fn named<'a>(&self, ctx: &dyn Ctx, config: &'a Config) -> Result<(Target, &'a str), ApiError> {
        let target = named_target(&self.initiator, config)?;
        if let Some(id) = scsi_id(config)? {
            return Ok((target, id));
        }
        let look = self.initiator.look(ctx, &target)?;
        let luns = self.initiator.settled_luns(ctx, &look.hold)?;
        Err(unnamed(documents::luns(&self.initiator.tree, &luns)))
    }

    fn device(&self, ctx: &dyn Ctx, hold: &Hold, id: &str) -> Result<PathBuf, ApiError> {
        self.initiator.lun(ctx, hold, id)?.settled(ctx, &self.initiator.tree)
    }

    /// The LUN for as long as the look lasts.
    pub(super) fn look<'a>(
        &'a self,
        ctx: &dyn Ctx,
        config: &Config,
    ) -> Result<(Look<'a>, PathBuf), ApiError> {
        let (target, id) = self.named(ctx, config)?;
        let look = self.initiator.look(ctx, &target)?;
        let device = self.device(ctx, &look.hold, id)?;
        Ok((look, device))
    }
}

impl SrDriver for OverIscsi {
    fn info(&self) -> &'static DriverInfo {
        &ISCSI
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let (_look, device) = self.look(ctx, config)?;
        lvm::check_host()?;
        lvm::probe(config, &[device])
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        lvm::check_host()?;
        let (_look, device) = self.look(ctx, config)?;
        lvm::make(ctx, sr, config, &[device])
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let (target, id) = self.named(ctx, config)?;
        let hold = self.initiator.hold(ctx, &target, sr)?;
        let under = Session { initiator: self.initiator.clone(), hold };
        ctx.step("sr-attach:logged-in");
        let device = match self.device(ctx, &under.hold, id) {
            Ok(device) => device,
            Err(error) => return Err(given_back(sr, &under, error)),
        };
        lvm::attach(ctx, sr, config, (&self.places.run_dir, &[device]), Box::new(under))
            .map_err(|(under, error)| given_back(sr, &*under, error))
    }
}

fn given_back(sr: Uuid, under: &dyn Under, error: ApiError) -> ApiError {
    if let Err(error) = under.release() {
        tracing::warn!("sessions of SR {sr} stay: {error}");
    }
    error
}

/// Sessions below a group.
struct Session {
    initiator: Initiator,
    hold: Hold,
}

impl Under for Session {
    fn release(&self) -> Result<(), ApiError> {
        self.initiator.release(&self.hold)
    }
}

/// The type `lvmohba`.
pub(crate) struct OverHba {
    places: Places,
    tree: Tree,
}

impl OverHba {
    pub(crate) fn new(places: Places) -> Self {
        Self { places, tree: Tree::new(Path::new("/")) }
    }

    /// The LUN, wherever it is; without its identity, those behind adapters are the document of the error.
    pub(super) fn device(&self, ctx: &dyn Ctx, config: &Config) -> Result<PathBuf, ApiError> {
        let all = Adapters::new(self.tree.clone(), "any");
        let Some(id) = scsi_id(config)? else { return Err(unnamed(all.document())) };
        let seen = Seen::new(&self.places.run_dir);
        let found = adapter::find(&self.tree, &seen, id).or_else(|| {
            // One that the array has offered since.
            all.luns_now();
            adapter::find(&self.tree, &seen, id)
        });
        let lun =
            found.ok_or_else(|| errors::fail(107, format_args!("this host has no disk of SCSIid {id}")))?;
        lun.settled(ctx, &self.tree)
    }
}

impl SrDriver for OverHba {
    fn info(&self) -> &'static DriverInfo {
        &HBA
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let device = self.device(ctx, config)?;
        lvm::check_host()?;
        lvm::probe(config, &[device])
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        lvm::check_host()?;
        let device = self.device(ctx, config)?;
        lvm::make(ctx, sr, config, &[device])
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let device = self.device(ctx, config)?;
        lvm::attach(ctx, sr, config, (&self.places.run_dir, &[device]), Box::new(lvm::Local))
            .map_err(|(_, error)| error)
    }
}
