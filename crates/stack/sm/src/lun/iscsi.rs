//! The LUNs of an iSCSI target.

use tapio_types::ApiError;
use uuid::Uuid;

use super::{CAPABILITIES, LunSr, Source};
use crate::Places;
use crate::errors;
use crate::iscsi::config::{KEYS, Target};
use crate::iscsi::{Hold, Initiator, documents};
use crate::scsi::{Lun, Tree};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, ProbeResult, Sr, SrDriver, SrStat};

static INFO: DriverInfo = DriverInfo {
    sr_type: "iscsi",
    name: "iSCSI",
    description: "VDIs that are the LUNs of an iSCSI target",
    capabilities: CAPABILITIES,
    configuration: KEYS,
    is_shareable: true,
};

/// The type `iscsi`.
pub(crate) struct IscsiDriver {
    initiator: Initiator,
}

impl IscsiDriver {
    pub(crate) fn new(places: &Places) -> Self {
        Self { initiator: Initiator::new(&places.run_dir) }
    }

    /// The target of a configuration; the targets at its address are the document of the error without its name.
    ///
    /// # Errors
    /// 95, 96, those of the configuration and of the discovery.
    fn target(&self, config: &Config) -> Result<Target, ApiError> {
        named_target(&self.initiator, config)
    }
}

/// As [`IscsiDriver::target`].
pub(crate) fn named_target(initiator: &Initiator, config: &Config) -> Result<Target, ApiError> {
    let mut target = Target::new(config)?;
    if target.named(config)? {
        return Ok(target);
    }
    let found = initiator.discover(&target)?;
    let what =
        "device_config:targetIQN is the iSCSI name of the target; the document lists those that are there";
    Err(errors::fail_with(96, what, documents::targets(&target, &found)))
}

impl SrDriver for IscsiDriver {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let target = self.target(config)?;
        let users = match &target.name {
            Some(name) => self.initiator.users(ctx, name)?,
            None => Vec::new(),
        };
        let look = self.initiator.look(ctx, &target)?;
        let luns = self.initiator.settled_luns(ctx, &look.hold)?;
        let size = luns.iter().map(|lun| lun.size(&self.initiator.tree)).fold(0, u64::saturating_add);
        let stat = SrStat { physical_size: size, physical_utilisation: size, virtual_allocation: size };
        let mut result =
            ProbeResult { configuration: config.clone(), complete: true, ..ProbeResult::default() };
        result.extra_info.insert("luns".into(), luns.len().to_string());
        let mut results: Vec<ProbeResult> =
            users.iter().map(|sr| ProbeResult { sr: Some((*sr, stat)), ..result.clone() }).collect();
        if results.is_empty() {
            results.push(result);
        }
        Ok(ProbeAnswer { xml: documents::users(&target, &users), results })
    }

    /// Nothing is made: what a target has is its SR. It is seen that this host is let in.
    fn create(&self, ctx: &dyn Ctx, _: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        let target = self.target(config)?;
        ctx.step("sr-create:begin");
        self.initiator.look(ctx, &target).map(drop)
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let target = self.target(config)?;
        let hold = self.initiator.hold(ctx, &target, sr)?;
        ctx.step("sr-attach:logged-in");
        match self.initiator.settled_luns(ctx, &hold) {
            Ok(_) => Ok(Box::new(LunSr::new(sr, Box::new(Held { initiator: self.initiator.clone(), hold })))),
            Err(error) => {
                if let Err(error) = self.initiator.release(&hold) {
                    tracing::warn!("sessions of SR {sr} stay: {error}");
                }
                Err(error)
            }
        }
    }
}

struct Held {
    initiator: Initiator,
    hold: Hold,
}

impl Source for Held {
    fn tree(&self) -> &Tree {
        &self.initiator.tree
    }

    fn luns(&self) -> Vec<Lun> {
        self.initiator.luns(&self.hold)
    }

    fn luns_now(&self) -> Vec<Lun> {
        self.initiator.luns_now(&self.hold)
    }

    fn release(&self) -> Result<(), ApiError> {
        self.initiator.release(&self.hold)
    }
}
