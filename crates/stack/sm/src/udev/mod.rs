//! `udev`: whole disks, partitions and software RAID of this host, each a VDI.
//!
//! A VDI's UUID is made of the SR's and of what the device is known by ([`crate::block_device::identity`]), so that it
//! is the same after every scan, whatever name the kernel gives the device. Nothing is written to a device but by
//! guests.
//!
//! ```text
//! chosen   which devices the SR offers         given   those that guests have had
//! paths    where disk processes find them
//! ```

mod chosen;
mod given;
mod paths;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use self::chosen::{Choice, Chosen};
use self::given::Given;
use self::paths::Paths;
use crate::Places;
use crate::block_device::{BlockDevice, Host, Identity, Kind, identity, is_claimed, links, usage};
use crate::errors;
use crate::fill;
use crate::iso::uuid_of;
use crate::probe::{document, sr_list};
use crate::traits::{
    Config, Ctx, DriverInfo, Fork, ForkKind, NewVdi, OpenSpec, ProbeAnswer, ProbeResult, Sr, SrDriver,
    SrStat, VdiInfo,
};
use crate::transfer::{self, Import};

static INFO: DriverInfo = DriverInfo {
    sr_type: "udev",
    name: "Devices",
    description: "Whole disks, partitions and software RAID of this host, given to guests as they are",
    capabilities: &[
        "SR_ATTACH",
        "SR_DETACH",
        "SR_PROBE",
        "SR_SCAN",
        "SR_UPDATE",
        "VDI_INTRODUCE",
        "VDI_ATTACH",
        "VDI_DETACH",
        "VDI_ACTIVATE",
        "VDI_DEACTIVATE",
        "VDI_UPDATE",
        // Devices come and go: the SR is scanned when the kernel tells.
        "HOT_PLUG",
    ],
    configuration: &[
        ("location", "a directory: every device that an entry of it leads to, as /dev/xapi/block"),
        (
            "devices",
            "identities as sr-probe lists them (partuuid-..., wwid-..., md-...), or links as /dev/disk/by-id/..., with \
             commas between them (one of location and devices is required)",
        ),
    ],
    is_shareable: false,
};

/// The driver.
#[derive(Debug)]
pub(crate) struct UdevDriver {
    places: Places,
    host: Host,
}

impl UdevDriver {
    pub(crate) fn new(places: Places) -> Self {
        Self { places, host: Host::default() }
    }

    fn open(&self, sr: Uuid, config: &Config) -> Result<Devices, ApiError> {
        let choice = Choice::of(config)?;
        let given = Given::open(&self.places.state_dir, sr).map_err(|error| {
            let what = "cannot read which devices guests have had, in";
            errors::io(47, what, &self.places.state_dir.join("devices"), &error)
        })?;
        let paths = Paths::new(&self.places.run_dir, sr);
        Ok(Devices { sr, host: self.host.clone(), choice, given, paths, active: Mutex::default() })
    }
}

impl SrDriver for UdevDriver {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let is_open = |key: &str| config.get(key).is_none_or(|value| value.trim().is_empty());
        if is_open("location") && is_open("devices") {
            let text =
                "device_config:location or devices names the devices; the document lists those of this host";
            return Err(errors::fail_with(94, text, candidates(&self.host)));
        }
        let found = Choice::of(config)?.find(&self.host)?;
        let mut extra_info = BTreeMap::from([("devices".to_owned(), found.len().to_string())]);
        for chosen in found {
            let use_of = usage(&self.host, &chosen.device, true).unwrap_or_else(|| "free".into());
            extra_info
                .insert(chosen.identity.to_string(), format!("{}: {use_of}", chosen.device.node.display()));
        }
        let result = ProbeResult { configuration: config.clone(), complete: true, sr: None, extra_info };
        // Devices do not know which SR offers them.
        Ok(ProbeAnswer { xml: sr_list(&[]), results: vec![result] })
    }

    fn create(&self, _: &dyn Ctx, _: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        Choice::of(config)?.find(&self.host).map(drop)
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let devices = self.open(sr, config)?;
        devices.follow(&devices.choice.find(&self.host)?);
        // What no disk process has open was left by a daemon that died.
        for vdi in devices.paths.all() {
            if ctx.live(vdi).is_none() {
                devices.paths.remove(vdi);
            }
        }
        Ok(Box::new(devices))
    }
}

/// Devices of this host, as a document: what is in use too, with the reason.
fn candidates(host: &Host) -> String {
    let devices = host.all().into_iter().filter(|device| device.kind != Kind::Memory);
    let items: Vec<_> = devices
        .map(|device| {
            let mut fields = vec![
                ("path", device.node.display().to_string()),
                ("identity", identity(host, &device).to_string()),
                ("kind", device.kind.name().to_owned()),
                ("size", device.size.to_string()),
                ("discard", (device.discard_max > 0).to_string()),
            ];
            fields.extend(links(host, &device).first().map(|link| ("link", link.display().to_string())));
            fields.extend(usage(host, &device, true).map(|what| ("use", what)));
            ("BlockDevice", fields)
        })
        .collect();
    document("Devlist", &items)
}

/// An attached SR.
#[derive(Debug)]
struct Devices {
    sr: Uuid,
    host: Host,
    choice: Choice,
    given: Given,
    paths: Paths,
    /// How many have a VDI open.
    active: Mutex<BTreeMap<Uuid, usize>>,
}

impl Devices {
    fn uuid(&self, identity: &Identity) -> Uuid {
        uuid_of(self.sr, identity.as_str())
    }

    /// Makes the paths of VDIs that are open lead to where their devices are now.
    fn follow(&self, found: &[Chosen]) {
        let mut known: BTreeSet<Uuid> = self.paths.all().into_iter().collect();
        known.extend(self.active.lock().keys());
        for vdi in known {
            let Some(chosen) = found.iter().find(|chosen| self.uuid(&chosen.identity) == vdi) else {
                // Another device may get its name, which is not the guest's.
                self.paths.remove(vdi);
                continue;
            };
            match self.paths.lead(vdi, &chosen.device.node) {
                Ok(true) => {
                    tracing::info!(%vdi, "{} is {} now", chosen.identity, chosen.device.node.display());
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(%vdi, %error, "the path of a device does not follow it"),
            }
        }
    }

    /// Why no guest may have it.
    fn refusal(&self, chosen: &Chosen) -> Option<String> {
        let (identity, name) = (&chosen.identity, &chosen.device.name);
        if let Some(twin) = &chosen.twin {
            return Some(format!(
                "{name} and {twin} are both {identity}: set up multipathing if they are one disk, or give the copy \
                 identifiers of its own (sgdisk -G)"
            ));
        }
        let marks = !self.given.has(identity);
        usage(&self.host, &chosen.device, marks).map(|what| format!("{name} {what}"))
    }

    fn info(&self, chosen: &Chosen) -> VdiInfo {
        let (device, identity) = (&chosen.device, &chosen.identity);
        let location = chosen.link.as_ref().unwrap_or(&device.node).display().to_string();
        let mut sm_config = BTreeMap::from([
            ("vdi_type".to_owned(), "aio".to_owned()),
            ("identity".to_owned(), identity.to_string()),
            ("device".to_owned(), device.node.display().to_string()),
            ("device-kind".to_owned(), device.kind.name().to_owned()),
            ("discard".to_owned(), (device.discard_max > 0).to_string()),
        ]);
        if device.sector_len != 512 {
            sm_config.insert("sector-size".to_owned(), device.sector_len.to_string());
        }
        if let Some(why) = self.refusal(chosen) {
            sm_config.insert("refused".to_owned(), why);
        }
        VdiInfo {
            uuid: self.uuid(identity),
            location,
            virtual_size: device.size,
            physical_utilisation: device.size,
            managed: true,
            read_only: device.is_read_only,
            parent: None,
            name_label: Some(label(device)),
            sm_config,
            cbt_enabled: false,
            is_metadata: false,
            told: None,
        }
    }

    fn find(&self, vdi: Uuid) -> Result<Chosen, ApiError> {
        let found = self.choice.find(&self.host)?;
        let chosen = found.into_iter().find(|chosen| self.uuid(&chosen.identity) == vdi);
        chosen.ok_or_else(|| errors::vdi_missing(self.sr, vdi))
    }

    /// Finds a device that may be written.
    fn free(&self, ctx: &dyn Ctx, vdi: Uuid, operation: &str) -> Result<Chosen, ApiError> {
        let chosen = self.find(vdi)?;
        if chosen.device.is_read_only {
            return Err(ApiError::new("VDI_READONLY", [vdi.to_string()]));
        }
        if self.active.lock().contains_key(&vdi) || ctx.live(vdi).is_some() {
            return Err(errors::vdi_in_use(vdi, operation));
        }
        self.check(&chosen)?;
        check_unclaimed(&chosen)?;
        Ok(chosen)
    }

    fn check(&self, chosen: &Chosen) -> Result<(), ApiError> {
        match self.refusal(chosen) {
            Some(why) => Err(errors::fail(46, why)),
            None => Ok(()),
        }
    }

    fn chain(&self, vdi: Uuid, access: Access) -> ChainSpec {
        ChainSpec { layers: vec![LayerSpec { kind: ImageKind::Raw, path: self.paths.path(vdi) }], access }
    }

    /// Runs `work` on a device that nothing else has open.
    fn write(
        &self,
        ctx: &dyn Ctx,
        (vdi, operation): (Uuid, &str),
        work: impl FnOnce(&ChainSpec) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let chosen = self.free(ctx, vdi, operation)?;
        self.lead(vdi, &chosen)?;
        let done = work(&self.chain(vdi, Access::ReadWrite));
        if !self.active.lock().contains_key(&vdi) {
            self.paths.remove(vdi);
        }
        done
    }

    fn lead(&self, vdi: Uuid, chosen: &Chosen) -> Result<(), ApiError> {
        self.paths.lead(vdi, &chosen.device.node).map(drop).map_err(|error| {
            errors::io(46, "cannot make the path of the device", &self.paths.path(vdi), &error)
        })
    }

    fn cannot<T>(what: &str) -> Result<T, ApiError> {
        let text = format!(
            "{what}: the VDI is a device, which is as it is and has no images; copy it into another SR for that \
             (vdi-copy)"
        );
        Err(errors::fail(38, text))
    }
}

fn check_unclaimed(chosen: &Chosen) -> Result<(), ApiError> {
    if !is_claimed(&chosen.device) {
        return Ok(());
    }
    let node = chosen.device.node.display();
    let text =
        format!("{node}, or a disk or partition that it shares, is open in another program for itself alone");
    Err(errors::fail(46, text))
}

/// A name for people, which they may change.
fn label(device: &BlockDevice) -> String {
    let text = |file: &str| Host::text(&device.disk_place.join(file));
    let model =
        [text("device/vendor"), text("device/model")].into_iter().flatten().collect::<Vec<_>>().join(" ");
    let name = text("dm/name").unwrap_or_else(|| if model.is_empty() { device.disk() } else { model });
    match device.partition {
        Some(number) => format!("{name}, partition {number}"),
        None => name,
    }
}

impl Sr for Devices {
    fn stat(&self, _: &dyn Ctx) -> Result<SrStat, ApiError> {
        let sum = self.choice.find(&self.host)?.iter().map(|chosen| chosen.device.size).sum();
        Ok(SrStat { physical_size: sum, physical_utilisation: sum, virtual_allocation: sum })
    }

    fn scan(&self, _: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let found = self.choice.find(&self.host)?;
        self.follow(&found);
        Ok(found.iter().map(|chosen| self.info(chosen)).collect())
    }

    fn vdi(&self, _: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        Ok(self.info(&self.find(vdi)?))
    }

    fn create(&self, _: &dyn Ctx, _: &NewVdi) -> Result<VdiInfo, ApiError> {
        Self::cannot("create")
    }

    fn introduce(&self, _: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        let found = self.choice.find(&self.host)?;
        let named = found
            .iter()
            .find(|chosen| chosen.identity.as_str() == location || self.info(chosen).location == location);
        let Some(chosen) = named else {
            let text = format!(
                "'{location}' is none of the devices that device_config names: add it there (pbd-unplug, pbd-destroy, \
                 pbd-create, pbd-plug)"
            );
            return Err(errors::fail(46, text));
        };
        let own = self.uuid(&chosen.identity);
        if own != vdi {
            return Err(errors::fail(
                46,
                format_args!("'{location}' has its own UUID here, {own}: scan the SR"),
            ));
        }
        Ok(self.info(chosen))
    }

    fn destroy(&self, _: &dyn Ctx, _: Uuid) -> Result<(), ApiError> {
        Self::cannot("destroy")
    }

    fn resize(&self, _: &dyn Ctx, _: Uuid, _: u64) -> Result<VdiInfo, ApiError> {
        Self::cannot("resize")
    }

    fn fork(&self, _: &dyn Ctx, _: Uuid, _: Uuid, _: ForkKind) -> Result<Fork, ApiError> {
        Self::cannot("snapshot or clone")
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.write(ctx, (into, "copy"), |target| fill::fill(ctx, target, from, base))
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.write(ctx, (what.into, "import"), |target| transfer::import(ctx, target, what, from))
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let chosen = self.find(vdi)?;
        if access == Access::ReadWrite && chosen.device.is_read_only {
            return Err(ApiError::new("VDI_READONLY", [vdi.to_string()]));
        }
        self.check(&chosen)?;
        let mut active = self.active.lock();
        // A disk process that has it open has claimed it.
        if !active.contains_key(&vdi) && ctx.live(vdi).is_none() {
            check_unclaimed(&chosen)?;
        }
        if access == Access::ReadWrite {
            // Before the guest can write any mark of its own.
            self.given.note(&chosen.identity, vdi, &chosen.device).map_err(|error| {
                errors::fail(
                    46,
                    format_args!("cannot remember that a guest gets {}: {error}", chosen.identity),
                )
            })?;
        }
        if chosen.identity.is_of_place() {
            let node = chosen.device.node.display();
            tracing::warn!(%vdi, "{node} is known by its place alone: a disk that is put there later is taken for it");
        }
        self.lead(vdi, &chosen)?;
        *active.entry(vdi).or_default() += 1;
        drop(active);
        Ok(OpenSpec { chain: self.chain(vdi, access), log: None })
    }

    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let mut active = self.active.lock();
        let is_last = match active.get_mut(&vdi) {
            Some(count) if *count > 1 => {
                *count -= 1;
                false
            }
            _ => {
                active.remove(&vdi);
                true
            }
        };
        drop(active);
        // One that was there before a restart of the daemon is not counted.
        if is_last && ctx.live(vdi).is_none() {
            self.paths.remove(vdi);
        }
        Ok(())
    }

    fn detach(self: Box<Self>, _: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let open = self.active.lock().keys().next().copied();
        if let Some(vdi) = open {
            return Err((self as Box<dyn Sr>, errors::vdi_in_use(vdi, "detach")));
        }
        self.paths.end();
        Ok(())
    }

    /// The devices are not the SR's: what lies there stays.
    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        if let Err(error) = self.given.remove() {
            let text = format!("cannot forget which devices guests have had: {error}");
            return Err((self as Box<dyn Sr>, errors::fail(62, text)));
        }
        self.detach(ctx)
    }
}

/// As a driver of the registry.
pub(crate) fn driver(places: Places) -> Arc<dyn SrDriver> {
    Arc::new(UdevDriver::new(places))
}
