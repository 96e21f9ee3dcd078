//! The LUNs behind host bus adapters.

use std::path::Path;

use tapio_types::ApiError;
use uuid::Uuid;

use super::{CAPABILITIES, LunSr, Source};
use crate::errors;
use crate::scsi::{Adapters, Lun, Tree};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, ProbeResult, Sr, SrDriver};

static INFO: DriverInfo = DriverInfo {
    sr_type: "hba",
    name: "Hardware HBA",
    description: "VDIs that are the LUNs behind host bus adapters: Fibre Channel, SAS, iSCSI in hardware",
    capabilities: CAPABILITIES,
    configuration: &[(
        "type",
        "how the name of the adapter's driver begins, as qla2xxx; any if it is left out",
    )],
    is_shareable: true,
};

/// The type `hba`.
pub(crate) struct HbaDriver {
    tree: Tree,
}

impl HbaDriver {
    pub(crate) fn new() -> Self {
        Self { tree: Tree::new(Path::new("/")) }
    }

    fn adapters(&self, config: &Config) -> Result<Adapters, ApiError> {
        let wanted =
            config.get("type").map(String::as_str).filter(|wanted| !wanted.is_empty()).unwrap_or("any");
        let adapters = Adapters::new(self.tree.clone(), wanted);
        match adapters.are_there() {
            true => Ok(adapters),
            false => Err(errors::fail(19, format_args!("this host has no adapter of type '{wanted}'"))),
        }
    }
}

impl SrDriver for HbaDriver {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let adapters = self.adapters(config)?;
        let xml = adapters.document();
        let mut result =
            ProbeResult { configuration: config.clone(), complete: true, ..ProbeResult::default() };
        result.extra_info.insert("luns".into(), adapters.luns().len().to_string());
        Ok(ProbeAnswer { xml, results: vec![result] })
    }

    /// Nothing is made: what an array has is its SR.
    fn create(&self, ctx: &dyn Ctx, _: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        ctx.step("sr-create:begin");
        self.adapters(config).map(drop)
    }

    fn attach(&self, _: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let adapters = self.adapters(config)?;
        Ok(Box::new(LunSr::new(sr, Box::new(Behind { adapters, tree: self.tree.clone() }))))
    }
}

struct Behind {
    adapters: Adapters,
    tree: Tree,
}

impl Source for Behind {
    fn tree(&self) -> &Tree {
        &self.tree
    }

    fn luns(&self) -> Vec<Lun> {
        self.adapters.luns()
    }

    fn luns_now(&self) -> Vec<Lun> {
        self.adapters.luns_now()
    }

    fn release(&self) -> Result<(), ApiError> {
        Ok(())
    }
}
