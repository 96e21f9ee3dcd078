//! LUNs of a target, or of an array. `iscsi` and `hba`: SRs whose VDIs they are, as they are. `lvmoiscsi` and
//! `lvmohba`: the group of an SR of volumes on one ([`volumes`]). `relvmoiscsi` and `relvmohba`: one that the array
//! copied gets UUIDs of its own ([`resign`]).
//!
//! LUNs are made and removed on the array. A scan shows each as a VDI that is not managed, with its number and its
//! SCSIid in `sm_config`; `VDI.create` gives the smallest that is large enough, or the one that is named, to its
//! caller, and `VDI.destroy` gives it back with all that is on it. The UUID of such a VDI is the MD5 sum of the SCSIid,
//! as in XenServer.

mod hba;
mod iscsi;
mod resign;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

use parking_lot::Mutex;
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use crate::errors;
use crate::fill;
use crate::scsi::{Lun, Tree};
use crate::traits::{Ctx, Fork, ForkKind, NewVdi, OpenSpec, Sr, SrStat, VdiInfo};
use crate::transfer::{self, Import};

pub(crate) use hba::HbaDriver;
pub(crate) use iscsi::IscsiDriver;
pub(crate) use resign::{ResignOverHba, ResignOverIscsi};
pub(crate) use volumes::{OverHba, OverIscsi};

/// What both types can do.
const CAPABILITIES: &[&str] =
    &["SR_PROBE", "SR_UPDATE", "VDI_CREATE", "VDI_DELETE", "VDI_ATTACH", "VDI_DETACH"];
/// Keys of `sm_config` by which `VDI.create` names a LUN.
const NUMBER: &str = "LUNid";
const SCSI_ID: &str = "SCSIid";

/// Whether a device carries LVM's mark, which is in one of its first four sectors of 512 bytes.
fn holds_group(device: &Path) -> bool {
    let mut head = [0; 4 << 9];
    let read = std::fs::File::open(device).and_then(|mut file| file.read_exact(&mut head));
    read.is_ok() && head.chunks(512).any(|sector| sector.starts_with(b"LABELONE"))
}

/// Where LUNs come from.
trait Source: Send + Sync {
    /// Where the kernel shows them.
    fn tree(&self) -> &Tree;

    /// Those that the kernel knows.
    fn luns(&self) -> Vec<Lun>;

    /// Those that are there.
    fn luns_now(&self) -> Vec<Lun>;

    /// The SR uses them no more.
    ///
    /// # Errors
    /// One is in use.
    fn release(&self) -> Result<(), ApiError>;
}

/// An attached SR.
struct LunSr {
    sr: Uuid,
    source: Box<dyn Source>,
    active: Mutex<BTreeMap<Uuid, usize>>,
    /// LUNs that were given to callers, whose records may not say so yet.
    given: Mutex<BTreeSet<Uuid>>,
}

impl LunSr {
    fn new(sr: Uuid, source: Box<dyn Source>) -> Self {
        Self { sr, source, active: Mutex::default(), given: Mutex::default() }
    }

    fn lun(&self, vdi: Uuid) -> Result<Lun, ApiError> {
        let found = self.source.luns().into_iter().find(|lun| lun.uuid() == vdi);
        found.ok_or_else(|| errors::vdi_missing(self.sr, vdi))
    }

    fn info(&self, lun: &Lun) -> VdiInfo {
        let size = lun.size(self.source.tree());
        let sm_config = [
            ("type", "raw".to_owned()),
            (NUMBER, lun.number().to_string()),
            (SCSI_ID, lun.scsi_id.clone()),
            ("backend-kind", "vbd".to_owned()),
        ];
        VdiInfo {
            uuid: lun.uuid(),
            location: lun.uuid().to_string(),
            virtual_size: size,
            physical_utilisation: size,
            managed: false,
            read_only: false,
            parent: None,
            name_label: Some(format!("LUN {}", lun.number())),
            sm_config: sm_config.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            cbt_enabled: false,
            is_metadata: false,
            told: None,
        }
    }

    fn chain(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<ChainSpec, ApiError> {
        let path = self.lun(vdi)?.settled(ctx, self.source.tree())?;
        Ok(ChainSpec { layers: vec![LayerSpec { kind: ImageKind::Raw, path }], access })
    }

    /// Whether a LUN is for VMs: nothing else of this host uses it, as another SR would.
    fn is_for_vms(&self, ctx: &dyn Ctx, lun: &Lun) -> bool {
        let vdi = lun.uuid();
        ctx.is_managed(vdi) || self.active.lock().contains_key(&vdi) || !lun.is_in_use(self.source.tree())
    }

    fn check_unused(&self, vdi: Uuid, operation: &str) -> Result<(), ApiError> {
        match self.active.lock().contains_key(&vdi) {
            true => Err(errors::vdi_in_use(vdi, operation)),
            false => Ok(()),
        }
    }
}

impl Sr for LunSr {
    fn stat(&self, _: &dyn Ctx) -> Result<SrStat, ApiError> {
        let sizes = self.source.luns().into_iter().map(|lun| lun.size(self.source.tree()));
        let size = sizes.fold(0, u64::saturating_add);
        Ok(SrStat { physical_size: size, physical_utilisation: size, virtual_allocation: size })
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let luns = self.source.luns_now();
        Ok(luns.iter().filter(|lun| self.is_for_vms(ctx, lun)).map(|lun| self.info(lun)).collect())
    }

    fn vdi(&self, _: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        let lun = self.lun(vdi)?;
        for disk in &lun.paths {
            disk.ask_again(self.source.tree());
        }
        Ok(self.info(&lun))
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        let luns = self.source.luns_now();
        let is_wanted = |lun: &Lun| {
            let is_it = new.sm_config.get(NUMBER).is_none_or(|number| *number == lun.number().to_string());
            is_it && new.sm_config.get(SCSI_ID).is_none_or(|id| *id == lun.scsi_id)
        };
        let tree = self.source.tree();
        let is_named = [NUMBER, SCSI_ID].iter().any(|key| new.sm_config.contains_key(*key));
        // One that belongs to a volume group, here or on another host, is given only to a caller that has named it.
        let mut given = self.given.lock();
        let is_free = |lun: &Lun| {
            !given.contains(&lun.uuid())
                && !ctx.is_managed(lun.uuid())
                && !lun.is_in_use(tree)
                && (is_named || !holds_group(&lun.device(tree)))
        };
        let mut free: Vec<(u64, &Lun)> = luns
            .iter()
            .filter(|lun| is_wanted(lun) && is_free(lun))
            .map(|lun| (lun.size(tree), lun))
            .filter(|(size, _)| *size >= new.virtual_size && *size > 0)
            .collect();
        free.sort_by_key(|(size, lun)| (*size, lun.number()));
        let Some((_, lun)) = free.first() else {
            let text = format!(
                "none of {} LUNs is free, is the one that sm-config names, and has {} bytes: make one on the array",
                luns.len(),
                new.virtual_size
            );
            return Err(errors::fail(44, text));
        };
        given.insert(lun.uuid());
        Ok(VdiInfo { managed: true, name_label: None, ..self.info(lun) })
    }

    fn introduce(&self, _: &dyn Ctx, _: Uuid, _: &str) -> Result<VdiInfo, ApiError> {
        let text = "a LUN is introduced by a scan and becomes a VDI by VDI.create with sm_config:SCSIid";
        Err(errors::fail(38, text))
    }

    /// The LUN stays as it is, for the next that takes it.
    fn destroy(&self, _: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.check_unused(vdi, "destroy")?;
        self.given.lock().remove(&vdi);
        self.lun(vdi).map(drop)
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        let info = self.vdi(ctx, vdi)?;
        if info.virtual_size == bytes {
            return Ok(info);
        }
        let text = format!("the LUN has {} bytes: make it larger on the array, and scan", info.virtual_size);
        Err(errors::fail(110, text))
    }

    fn fork(&self, _: &dyn Ctx, _: Uuid, _: Uuid, _: ForkKind) -> Result<Fork, ApiError> {
        Err(errors::fail(
            38,
            "a LUN has no snapshots here: take them on the array, or use lvmoiscsi or lvmohba",
        ))
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.check_unused(into, "copy")?;
        fill::fill(ctx, &self.chain(ctx, into, Access::ReadWrite)?, from, base)
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.check_unused(what.into, "import")?;
        transfer::import(ctx, &self.chain(ctx, what.into, Access::ReadWrite)?, what, from)
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let chain = self.chain(ctx, vdi, access)?;
        *self.active.lock().entry(vdi).or_insert(0) += 1;
        Ok(OpenSpec { chain, log: None })
    }

    fn deactivate(&self, _: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let mut active = self.active.lock();
        if let Some(count) = active.get_mut(&vdi) {
            *count -= 1;
            if *count == 0 {
                active.remove(&vdi);
            }
        }
        Ok(())
    }

    fn detach(self: Box<Self>, _: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let in_use = self.active.lock().keys().next().copied();
        if let Some(vdi) = in_use {
            return Err((self, errors::vdi_in_use(vdi, "SR.detach")));
        }
        match self.source.release() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    /// Nothing on the LUNs says that they are an SR.
    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        ctx.step("sr-erase:begin");
        self.detach(ctx)
    }
}
