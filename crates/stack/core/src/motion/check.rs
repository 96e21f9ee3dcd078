//! What is wished for, what goes with a VM, and what forbids it here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF};

use super::Call;
use super::notes::Out;
use super::receive::{AT_A_TIME, Question};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::{Db, Object};
use crate::vms::allowed::bad_power_state;

/// What operations and errors call it.
pub(super) const OP: &str = "migrate_send";

/// Seconds for which a lost network is tried again.
const TIMEOUT: u64 = 300;

/// Where a VM goes.
#[derive(Debug)]
pub(super) enum Place {
    /// It stays on this host.
    Here,
    /// To this host of its pool.
    Pool(Arc<Object>),
    /// To another pool.
    Other,
}

/// The parameters of `VM.migrate_send`.
#[derive(Debug)]
pub(super) struct Wish {
    pub(super) vm: Arc<Object>,
    pub(super) dest: BTreeMap<String, String>,
    vdi_map: BTreeMap<String, String>,
    vif_map: BTreeMap<String, String>,
    pub(super) copy: bool,
    force: bool,
    /// Bytes a second, at most.
    pub(super) rate: Option<u64>,
    pub(super) timeout: u64,
}

impl Wish {
    /// # Errors
    /// `HANDLE_INVALID`, `INVALID_VALUE`.
    pub(super) fn read(call: &Call, args: &Args) -> Result<Self, ApiError> {
        let options = args.map(5)?;
        let is_true = |name: &str| options.get(name).is_some_and(|word| word == "true");
        let number = |name: &str| match options.get(name).map(String::as_str) {
            None | Some("") => Ok(None),
            Some(text) => {
                text.parse::<u64>().ok().filter(|number| *number > 0).map(Some).ok_or_else(|| {
                    ApiError::new("INVALID_VALUE", [format!("options:{name}"), text.to_owned()])
                })
            }
        };
        Ok(Self {
            vm: call.part.db.get("VM", args.text(0)?)?,
            dest: args.map(1)?,
            vdi_map: args.map(3)?,
            vif_map: args.map(4)?,
            copy: is_true("copy"),
            force: is_true("force"),
            rate: number("rate")?,
            timeout: number("timeout")?.unwrap_or(TIMEOUT),
        })
    }

    /// Where the VM goes.
    pub(super) fn place(&self, call: &Call) -> Place {
        let db = &call.part.db;
        match self.dest.get("host").map(|host| db.get("host", host)) {
            Some(Ok(host)) if host.reference == this_host(db) => Place::Here,
            Some(Ok(host)) => Place::Pool(host),
            _ => Place::Other,
        }
    }

    /// The SR that a VDI is mapped to.
    pub(super) fn sr_of(&self, vdi: &str) -> Option<&str> {
        self.vdi_map.get(vdi).map(String::as_str).filter(|sr| !sr.is_empty() && *sr != NULL_REF)
    }

    /// Refuses what is wished of a VM that stays in its pool, and is for other pools.
    ///
    /// # Errors
    /// `OPERATION_NOT_ALLOWED`.
    pub(super) fn stays_in_pool(&self) -> Result<(), ApiError> {
        let why = match () {
            () if self.copy => "within a pool VMs are copied by VM.copy",
            () if !self.vif_map.is_empty() => {
                "a VM that stays in its pool keeps its networks: leave the map of VIFs away"
            }
            () => return Ok(()),
        };
        Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]))
    }
}

/// Which SR takes a disk that is not mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum To {
    /// This one.
    Sr(String),
    /// The receiver's default SR.
    Default,
    /// The receiver's SR for memory, or its default SR.
    Memory,
}

/// What goes with a VM.
#[derive(Debug, Default)]
pub(super) struct Goes {
    /// References of the VM and its snapshots, the VM first.
    pub(super) vms: Vec<String>,
    /// All disks, with where they go.
    pub(super) disks: BTreeMap<String, To>,
    /// The networks of VIFs.
    pub(super) networks: BTreeMap<String, String>,
}

/// What forbids this of a VM in its state.
///
/// # Errors
/// `OPERATION_NOT_ALLOWED`, `VM_IS_SNAPSHOT`, `VM_IS_TEMPLATE`, `VM_BAD_POWER_STATE`.
pub(super) fn may_go(vm: &Object, wish: &Wish) -> Result<(), ApiError> {
    if vm.bool("is_control_domain") {
        let why = format!("{} is the host itself", vm.text("name_label"));
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    if vm.bool("is_a_snapshot") {
        return Err(ApiError::new("VM_IS_SNAPSHOT", [vm.reference.as_str(), OP]));
    }
    if vm.bool("is_default_template") {
        return Err(ApiError::new("VM_IS_TEMPLATE", [vm.reference.as_str(), OP]));
    }
    match vm.text("power_state") {
        "Halted" => Ok(()),
        "Suspended" if !wish.copy || wish.force || vm.bool("is_a_template") => Ok(()),
        "Suspended" => Err(bad_power_state(vm, "halted")),
        _ if wish.copy => Err(bad_power_state(vm, "halted")),
        _ => Err(bad_power_state(vm, "halted, suspended")),
    }
}

/// The VBDs of a VM that have disks: no media.
pub(super) fn vbds_of(db: &Db, vm: &str) -> impl Iterator<Item = Arc<Object>> {
    let vbds = db.find("VBD", "VM", vm).into_iter();
    vbds.filter(|vbd| vbd.text("type") != "CD" && !vbd.bool("empty") && !vbd.is_null("VDI"))
}

/// The VDIs of its disks.
pub(super) fn disks_of(db: &Db, vm: &str) -> Vec<String> {
    vbds_of(db, vm).map(|vbd| vbd.text("VDI").to_owned()).collect()
}

/// What goes with a VM, and that nothing here forbids it.
///
/// # Errors
/// `VDI_NOT_IN_MAP`, `VIF_NOT_IN_MAP`, what is wrong with a disk, `TOO_MANY_STORAGE_MIGRATES`.
pub(super) fn goes(db: &Db, wish: &Wish) -> Result<Goes, ApiError> {
    may_go(&wish.vm, wish)?;
    let vm = &wish.vm.reference;
    let snapshots = db.find("VM", "snapshot_of", vm).into_iter().map(|vm| vm.reference.clone());
    let vms: Vec<String> = std::iter::once(vm.clone()).chain(snapshots).collect();
    let mut disks = BTreeMap::new();
    for vdi in disks_of(db, vm) {
        let sr = wish.sr_of(&vdi).ok_or_else(|| ApiError::new("VDI_NOT_IN_MAP", [vdi.as_str()]))?;
        disks.insert(vdi.clone(), To::Sr(sr.to_owned()));
    }
    for snapshot in &vms[1..] {
        for vdi in disks_of(db, snapshot) {
            let of = db.get("VDI", &vdi)?.text("snapshot_of").to_owned();
            let mapped = wish.sr_of(&vdi).or_else(|| wish.sr_of(&of));
            let to = mapped.map_or(To::Default, |sr| To::Sr(sr.to_owned()));
            disks.entry(vdi).or_insert(to);
        }
    }
    for vm in &vms {
        let vm = db.get("VM", vm)?;
        if vm.text("power_state") == "Suspended" && !vm.is_null("suspend_VDI") {
            let memory = vm.text("suspend_VDI");
            db.get("VDI", memory).map_err(|_| ApiError::new("SUSPEND_IMAGE_NOT_ACCESSIBLE", [memory]))?;
            let to = wish.sr_of(memory).map_or(To::Memory, |sr| To::Sr(sr.to_owned()));
            disks.insert(memory.to_owned(), to);
        }
    }
    for vdi in disks.keys() {
        disk_may_go(db, wish, vdi, &vms)?;
    }
    let networks = networks(db, wish, &vms)?;
    if Out::all(db).iter().filter(|out| !out.is_left).count() >= AT_A_TIME {
        return Err(ApiError::new("TOO_MANY_STORAGE_MIGRATES", [AT_A_TIME.to_string()]));
    }
    Ok(Goes { vms, disks, networks })
}

/// What forbids that a disk leaves this host, or its pool.
///
/// # Errors
/// `VDI_INCOMPATIBLE_TYPE`, `VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION`, `VDI_CBT_ENABLED`, `VDI_IS_ENCRYPTED`,
/// `OPERATION_NOT_ALLOWED` of one that another VM has too.
pub(super) fn disk_may_go(db: &Db, wish: &Wish, vdi: &str, vms: &[String]) -> Result<(), ApiError> {
    let record = db.get("VDI", vdi)?;
    crate::storage::has_data(&record)?;
    if record.text("on_boot") == "reset" {
        return Err(ApiError::bare("VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION"));
    }
    if record.bool("cbt_enabled") {
        return Err(ApiError::new("VDI_CBT_ENABLED", [vdi]));
    }
    if record.map("sm_config").contains_key("key_hash") {
        return Err(ApiError::new("VDI_IS_ENCRYPTED", [vdi]));
    }
    let others = db.find("VBD", "VDI", vdi);
    let other = others.iter().find(|vbd| !vms.iter().any(|vm| vm == vbd.text("VM")));
    match other.filter(|_| !wish.copy) {
        Some(vbd) => {
            let name = db.get("VM", vbd.text("VM")).map(|vm| vm.text("name_label").to_owned());
            let (disk, name) = (record.text("name_label"), name.unwrap_or_default());
            let why = format!("the disk {disk} ({}) is one of VM {name} too", record.text("uuid"));
            Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]))
        }
        None => Ok(()),
    }
}

/// The networks of all VIFs: as they are mapped, or as one with the same address is.
fn networks(db: &Db, wish: &Wish, vms: &[String]) -> Result<BTreeMap<String, String>, ApiError> {
    let vifs: Vec<Arc<Object>> = vms.iter().flat_map(|vm| db.find("VIF", "VM", vm)).collect();
    let mapped = |vif: &Object| wish.vif_map.get(&vif.reference).filter(|network| *network != NULL_REF);
    let by_address: BTreeMap<&str, &String> =
        vifs.iter().filter_map(|vif| Some((vif.text("MAC"), mapped(vif)?))).collect();
    let each = vifs.iter().map(|vif| {
        let network = mapped(vif).or_else(|| by_address.get(vif.text("MAC")).copied());
        let network = network.ok_or_else(|| ApiError::new("VIF_NOT_IN_MAP", [&vif.reference]))?;
        Ok((vif.reference.clone(), network.clone()))
    });
    each.collect()
}

impl Goes {
    /// What the receiver is asked first.
    pub(super) fn question(&self, db: &Db, wish: &Wish) -> Result<Question, ApiError> {
        let mut srs: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (vdi, to) in &self.disks {
            let To::Sr(sr) = to else { continue };
            let images = srs.entry(sr.clone()).or_default();
            let mut next = vdi.clone();
            // What several have in common is sent once.
            while images.insert(next.clone()) {
                match db.get("VDI", &next) {
                    Ok(vdi) if !vdi.is_null("parent") => vdi.text("parent").clone_into(&mut next),
                    _ => break,
                }
            }
        }
        let used = |vdi: &String| {
            let used = db.get("VDI", vdi).map_or(0, |vdi| vdi.int("physical_utilisation"));
            u64::try_from(used).unwrap_or_default()
        };
        let sum = |images: &BTreeSet<String>| images.iter().map(used).fold(0, u64::saturating_add);
        let vms: Result<Vec<_>, ApiError> = self.vms.iter().map(|vm| db.get("VM", vm)?.uuid()).collect();
        Ok(Question {
            srs: srs.iter().map(|(sr, images)| (sr.clone(), sum(images))).collect(),
            networks: self.networks.values().cloned().collect(),
            vms: if wish.copy { Vec::new() } else { vms? },
            timeout: wish.timeout.saturating_mul(2),
        })
    }

    /// The SR of each disk, once the receiver has said which are its own.
    ///
    /// # Errors
    /// `VDI_NOT_IN_MAP`: the receiver has no SR for it.
    pub(super) fn srs(&self, told: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, ApiError> {
        let named = |name: &str| told.get(name).filter(|sr| *sr != NULL_REF && !sr.is_empty()).cloned();
        let each = self.disks.iter().map(|(vdi, to)| {
            let sr = match to {
                To::Sr(sr) => Some(sr.clone()),
                To::Default => named("default_SR"),
                To::Memory => named("suspend_SR").or_else(|| named("default_SR")),
            };
            Ok((vdi.clone(), sr.ok_or_else(|| ApiError::new("VDI_NOT_IN_MAP", [vdi]))?))
        });
        each.collect()
    }
}
