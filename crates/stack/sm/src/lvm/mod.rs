//! `lvm`: VDIs as logical volumes of a group of their own, in the layout of XenServer's storage manager.
//!
//! ```text
//! commands    LVM's programs               names size    what volumes are called, how long they are
//! group       what is in a group           read          what an image says, without its volume being reachable
//! description what is in a group, read without a program
//! metadata    the volume MGT               journal       what changes of several steps leave
//! active      what is open on this host    claim         whether a device may become an SR
//! thin        how much of a disk its volume has
//! single      SRs of one VDI
//! resign tag  a copy of the devices gets names of its own
//! sr          an attached SR; below it what changes it, `recover`, and `say`: the metadata follow the volumes
//! ```
//!
//! Volumes are the truth: their names say which images there are, and each change of several steps ends with the
//! renaming of a volume. Names change under the SR's lock, which is on the volume of the metadata.
//!
//! Other drivers whose SRs are such groups, on LUNs that they bring here, use [`probe`], [`make`] and
//! [`attach`] with the
//! devices that are there, and say by [`Under`] what they take away afterwards.

mod active;
mod claim;
pub mod commands;
pub mod description;
#[cfg(feature = "doubles")]
pub mod double;
pub(crate) mod group;
pub(crate) mod journal;
pub mod metadata;
pub(crate) mod names;
mod read;
pub mod resign;
pub(crate) mod single;
mod size;
mod sr;
mod steps;
mod tag;
pub(crate) mod thin;

use std::path::{Path, PathBuf};

use tapio_types::ApiError;
use uuid::Uuid;

use crate::Places;
use crate::errors;
use crate::ext::device::{self, Device};
use crate::lease;
use crate::probe::{SrEntry as Entry, sr_list};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, ProbeResult, Sr, SrDriver, SrStat};
use claim::Claim;
use group::Group;
pub use journal::inside as value_inside;
use metadata::SrEntry;
use thin::Wanted;

/// What an SR of this layout can do, in the words of `SM.capabilities`.
pub(crate) const CAPABILITIES: &[&str] = &[
    "SR_PROBE",
    "VDI_CREATE",
    "VDI_DELETE",
    "VDI_ATTACH",
    "VDI_DETACH",
    "VDI_ACTIVATE",
    "VDI_DEACTIVATE",
    "VDI_INTRODUCE",
    "VDI_UPDATE",
    "VDI_CLONE",
    "VDI_SNAPSHOT",
    "VDI_RESIZE",
    "VDI_RESIZE_ONLINE",
    "VDI_CONFIG_CBT",
    "ATOMIC_PAUSE",
];

/// The same where its devices are LUNs, which any host reaches by what `device_config` says.
pub(crate) const CAPABILITIES_ON_LUNS: &[&str] = &{
    let mut all = ["VDI_GENERATE_CONFIG"; CAPABILITIES.len() + 1];
    let mut at = 0;
    while at < CAPABILITIES.len() {
        all[at] = CAPABILITIES[at];
        at += 1;
    }
    all
};

static INFO: DriverInfo = DriverInfo {
    sr_type: "lvm",
    name: "Local LVM",
    description: "VDIs as VHD and raw logical volumes on devices of this host",
    capabilities: CAPABILITIES,
    configuration: &[
        ("device", "block device, or several with commas between them (required)"),
        thin::KEYS[0],
        thin::KEYS[1],
        thin::KEYS[2],
        ("force", "true: overwrite a device that holds something else"),
        lease::SILENCE_KEY,
        single::KEY,
    ],
    // A disk that several hosts have.
    is_shareable: true,
};

/// What is below the group.
pub(crate) trait Under: Send + Sync {
    /// Takes the devices away from this host, after the group was.
    ///
    /// # Errors
    /// They stay.
    fn release(&self) -> Result<(), ApiError>;
}

/// Devices of this host, which stay.
pub(crate) struct Local;

impl Under for Local {
    fn release(&self) -> Result<(), ApiError> {
        Ok(())
    }
}

/// What `device_config` says of how space is given.
///
/// # Errors
/// 1: a word or a size that is none.
pub(crate) fn allocation(config: &Config) -> Result<Wanted, ApiError> {
    Wanted::read(config, "device_config", 1)
}

/// Refuses where this host cannot do it.
///
/// # Errors
/// 448.
pub(crate) fn check_host() -> Result<(), ApiError> {
    if commands::is_there() {
        return Ok(());
    }
    Err(errors::fail(448, "LVM needs device-mapper in the kernel, and the package lvm2"))
}

/// Looks for SRs on devices that are here.
///
/// # Errors
/// 91, 93.
pub(crate) fn probe(config: &Config, devices: &[PathBuf]) -> Result<ProbeAnswer, ApiError> {
    let mut answer = ProbeAnswer::default();
    let mut entries: Vec<Entry> = Vec::new();
    for path in devices {
        let device = Device::open(path)?;
        let signature = device.signature()?;
        let mut result =
            ProbeResult { configuration: config.clone(), complete: true, ..ProbeResult::default() };
        let owner = match signature.kind() {
            Some("LVM2_member") => claim::owner(path)?,
            _ => claim::Owner::Unclaimed,
        };
        match owner {
            claim::Owner::Sr(uuid) => {
                let name = path.display().to_string();
                match entries.iter_mut().find(|entry| entry.uuid == uuid) {
                    // One more device of the same SR.
                    Some(known) => {
                        known.devices = known.devices.take().map(|names| format!("{names},{name}"));
                        known.size = known.size.map(|size| size.saturating_add(device.size));
                    }
                    None => entries.push(Entry { uuid, devices: Some(name), size: Some(device.size) }),
                }
                result.sr = Some((uuid, SrStat { physical_size: device.size, ..SrStat::default() }));
            }
            claim::Owner::Group(name) => {
                result.extra_info.insert("volume_group".into(), name);
            }
            _ => {
                if let Some(kind) = signature.kind() {
                    result.extra_info.insert("holds".into(), kind.into());
                }
            }
        }
        answer.results.push(result);
    }
    answer.xml = sr_list(&entries);
    Ok(answer)
}

/// Makes the group of an SR on devices that are here. It is not attached afterwards.
///
/// # Errors
/// 42, 60, 77, 91; what was made is removed.
pub(crate) fn make(ctx: &dyn Ctx, sr: Uuid, config: &Config, devices: &[PathBuf]) -> Result<(), ApiError> {
    let allocation = allocation(config)?.allocation.unwrap_or_default();
    let single = single::wanted(config)?;
    let force = config.get("force").is_some_and(|value| value == "true");
    let claims = devices.iter().map(|path| Claim::check(path, force)).collect::<Result<Vec<_>, _>>()?;
    ctx.step("sr-create:begin");
    claims.iter().try_for_each(Claim::clear)?;
    let group = Group::of(sr);
    group.make(devices, |step| ctx.step(step))?;
    let tagged = single.map_or(Ok(()), |kind| group.add_group_tags(&single::tags(kind)));
    let said =
        tagged.and_then(|()| sr::say::create(&group, SrEntry { uuid: sr, allocation, ..SrEntry::default() }));
    if let Err(error) = said {
        if let Err(error) = group.erase(|| ()) {
            tracing::warn!("{} stays half made: {error}", group.name);
        }
        return Err(error);
    }
    ctx.step("sr-create:volume-made");
    if let Err(error) = group.close() {
        tracing::warn!("{}: {error}", group.name);
    }
    Ok(())
}

/// Attaches the SR whose group is on devices that are here; on `devices`, for all that is known.
///
/// # Errors
/// 47, 181; what is below is given back.
pub(crate) fn attach(
    ctx: &dyn Ctx,
    sr: Uuid,
    config: &Config,
    (run_dir, devices): (&Path, &[PathBuf]),
    under: Box<dyn Under>,
) -> Result<Box<dyn Sr>, (Box<dyn Under>, ApiError)> {
    let said = check_host().and_then(|()| Ok((allocation(config)?, lease::wanted(config)?)));
    let (allocation, hosts) = match said {
        Ok(said) => said,
        Err(error) => return Err((under, error)),
    };
    ctx.step("sr-attach:mounted");
    sr::VolumeSr::open(ctx, sr, (run_dir, devices), (allocation, hosts), under).map(sr::VolumeSr::boxed)
}

/// The driver.
#[derive(Debug)]
pub(crate) struct Lvm {
    places: Places,
}

impl Lvm {
    pub(crate) const fn new(places: Places) -> Self {
        Self { places }
    }
}

impl SrDriver for Lvm {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        if config.get("device").is_none_or(String::is_empty) {
            let text = "device_config:device is the block device of the SR; the document lists some";
            return Err(errors::fail_with(90, text, device::candidates()));
        }
        check_host()?;
        probe(config, &device::named(config)?)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        check_host()?;
        make(ctx, sr, config, &device::named(config)?)
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        // The group is found by its name, whatever its devices are called today.
        let devices = device::named(config).unwrap_or_default();
        let places = (self.places.run_dir.as_path(), devices.as_slice());
        attach(ctx, sr, config, places, Box::new(Local)).map_err(|(_, error)| error)
    }
}
