//! `relvmoiscsi` and `relvmohba`: a LUN that an array copied gets UUIDs of its own; see [`crate::lvm::resign`].

use tapio_types::ApiError;
use uuid::Uuid;

use super::volumes::{OverHba, OverIscsi, SCSI_ID, TARGET_KEYS};
use crate::Places;
use crate::lvm::resign::{done, never_attached, resign};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, Sr, SrDriver};

static ISCSI: DriverInfo = DriverInfo {
    sr_type: "relvmoiscsi",
    name: "Resigning of LVM over iSCSI",
    description: "gives a copy of an SR of type lvmoiscsi, on a LUN, UUIDs of its own; attach it as lvmoiscsi then",
    capabilities: &["SR_PROBE"],
    configuration: TARGET_KEYS,
    is_shareable: true,
};

static HBA: DriverInfo = DriverInfo {
    sr_type: "relvmohba",
    name: "Resigning of LVM over a SCSI disk",
    description: "gives a copy of an SR of type lvmohba, on a LUN, UUIDs of its own; attach it as lvmohba then",
    capabilities: &["SR_PROBE"],
    configuration: &[SCSI_ID],
    is_shareable: true,
};

/// The type `relvmoiscsi`.
pub(crate) struct ResignOverIscsi(OverIscsi);

impl ResignOverIscsi {
    pub(crate) fn new(places: Places) -> Self {
        Self(OverIscsi::new(places))
    }
}

impl SrDriver for ResignOverIscsi {
    fn info(&self) -> &'static DriverInfo {
        &ISCSI
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        self.0.probe(ctx, config)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        let (_look, device) = self.0.look(ctx, config)?;
        resign(ctx, sr, &[device])?;
        Err(done("lvmoiscsi"))
    }

    fn attach(&self, _: &dyn Ctx, _: Uuid, _: &Config) -> Result<Box<dyn Sr>, ApiError> {
        Err(never_attached(&ISCSI, "lvmoiscsi"))
    }
}

/// The type `relvmohba`.
pub(crate) struct ResignOverHba(OverHba);

impl ResignOverHba {
    pub(crate) fn new(places: Places) -> Self {
        Self(OverHba::new(places))
    }
}

impl SrDriver for ResignOverHba {
    fn info(&self) -> &'static DriverInfo {
        &HBA
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        self.0.probe(ctx, config)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        resign(ctx, sr, &[self.0.device(ctx, config)?])?;
        Err(done("lvmohba"))
    }

    fn attach(&self, _: &dyn Ctx, _: Uuid, _: &Config) -> Result<Box<dyn Sr>, ApiError> {
        Err(never_attached(&HBA, "lvmohba"))
    }
}
