//! `relvm`: a type of SR that only ever resigns a copy. Making one ends with an error that says that it is done, as
//! XenServer's supplemental pack `relvmoiscsi` does; then `lvm` attaches the copy.

use std::path::PathBuf;

use tapio_types::ApiError;
use uuid::Uuid;

use super::super::probe as probe_devices;
use super::resign;
use crate::errors;
use crate::ext::device;
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, Sr, SrDriver};

static INFO: DriverInfo = DriverInfo {
    sr_type: "relvm",
    name: "Resigning of local LVM",
    description: "gives a copy of an SR of type lvm, on devices of this host, UUIDs of its own; attach it as lvm then",
    capabilities: &["SR_PROBE"],
    configuration: &[("device", "block device of the copy, or several with commas between them (required)")],
    is_shareable: false,
};

/// What the making of such an SR ends with when all went well: to the letter what clients of XenServer's pack look for.
pub(crate) fn done(attach_as: &str) -> ApiError {
    let text = format!(
        "Error reporting error, unknown key The SR has been successfully resigned. Use the {attach_as} type to attach it"
    );
    ApiError::backend(1, text, "")
}

/// Refuses to attach what is there to resign copies alone.
pub(crate) fn never_attached(info: &DriverInfo, attach_as: &str) -> ApiError {
    errors::fail(
        1,
        format_args!("an SR of type {} is never attached: the copy is of type {attach_as}", info.sr_type),
    )
}

/// The driver for devices of this host.
#[derive(Debug)]
pub(crate) struct Resign;

impl Resign {
    fn devices(config: &Config) -> Result<Vec<PathBuf>, ApiError> {
        if config.get("device").is_none_or(String::is_empty) {
            let text = "device_config:device is the block device of the copy; the document lists some";
            return Err(errors::fail_with(90, text, device::candidates()));
        }
        device::named(config)
    }
}

impl SrDriver for Resign {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        super::super::check_host()?;
        probe_devices(config, &Self::devices(config)?)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        resign(ctx, sr, &Self::devices(config)?)?;
        Err(done("lvm"))
    }

    fn attach(&self, _: &dyn Ctx, _: Uuid, _: &Config) -> Result<Box<dyn Sr>, ApiError> {
        Err(never_attached(&INFO, "lvm"))
    }
}
