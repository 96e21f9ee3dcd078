//! `rbd`: an SR in a pool of a Ceph cluster. VDIs are images, snapshots of VDIs are snapshots of images, and clones are
//! images that begin at a snapshot: Ceph's own layering. Each SR is a namespace of the pool, named by its UUID.
//!
//! ```text
//! POOL/<sr uuid>/
//!   tapio.sr            a small image whose metadata say that this is an SR, and of which layout
//!   <vdi uuid>          a VDI
//!     @<vdi uuid>       a snapshot of it, which is a VDI too, and only read
//!     @clone-<uuid>     where the clone of that UUID begins; removed at once, and kept by Ceph as long as it is needed
//!   base-<uuid>         what is left of a VDI that was destroyed while snapshots or clones of it were there
//! ```
//!
//! One client writes to an image: it holds Ceph's exclusive lock ([`tapio_rbd::Image::take_lock`]). Snapshots and sizes
//! of an image in use are changed through its holder, by librbd itself; no disk waits for them.
//!
//! What the cluster answers is written by all of its clients: names that are no UUIDs are not looked at, sizes and
//! metadata are checked.

mod changes;
mod config;
mod fork;
mod images;
mod layout;
mod repository;
mod usage;

use std::sync::Arc;

use tapio_rbd::{Cluster, Mode, Pool, RbdError};
use tapio_types::ApiError;
use uuid::Uuid;

use crate::Places;
use crate::errors;
use crate::probe::{SrEntry, document, sr_list};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, ProbeResult, Sr, SrDriver};
use config::Wanted;
use layout::plain_uuid;
use repository::Repository;

static INFO: DriverInfo = DriverInfo {
    sr_type: "rbd",
    name: "Ceph RBD",
    description: "VDIs as images of a Ceph cluster, with snapshots and clones by its own layering",
    capabilities: &[
        "SR_PROBE",
        "VDI_CREATE",
        "VDI_DELETE",
        "VDI_ATTACH",
        "VDI_DETACH",
        "VDI_ACTIVATE",
        "VDI_DEACTIVATE",
        "VDI_INTRODUCE",
        "VDI_CLONE",
        "VDI_SNAPSHOT",
        "VDI_RESIZE",
        "VDI_RESIZE_ONLINE",
        "ATOMIC_PAUSE",
        "THIN_PROVISIONING",
        "VDI_CONFIG_CBT",
    ],
    configuration: &[
        (
            "pool",
            "pool of the cluster (required); without it a probe lists the pools. Made if it is not there",
        ),
        (
            "conf",
            "configuration file of the cluster on this host; /etc/ceph/ceph.conf without it and mon_host",
        ),
        ("mon_host", "addresses of monitors, as 10.0.0.1:6789,10.0.0.2:6789, in the place of a file"),
        ("user", "user of the cluster, without 'client.'; admin without it"),
        ("keyring", "file on this host with the user's key; Ceph's own places without it"),
        ("cephkey", "the user's key itself, which is kept as a secret"),
        ("cephkey_secret", "UUID of the secret that has the user's key"),
        ("data_pool", "pool for the data of images, as one with erasure codes; the pool itself without it"),
        (
            "timeout",
            "seconds after which a guest's request fails while the cluster is away; without it guests wait until it is \
             back",
        ),
    ],
    is_shareable: true,
};

/// The image that says that a namespace is an SR.
const MARK: &str = "tapio.sr";
/// Bytes of it; none is ever written.
const MARK_LEN: u64 = 1 << 20;
/// The key of its metadata with the SR's UUID.
const MARK_SR: &str = "tapio.sr";
/// The key of its metadata with the layout.
const MARK_LAYOUT: &str = "tapio.layout";
/// The layout that is described above.
const LAYOUT: &str = "1";

/// An error of the cluster. `number` is for those that say nothing better themselves.
fn failed(number: u16) -> impl Fn(RbdError) -> ApiError {
    move |error| {
        let number = match error.errno() {
            libc::ENOSPC | libc::EDQUOT => 44,
            libc::EROFS => 461,
            libc::EIO => 200,
            libc::ENOPKG | libc::ETIMEDOUT | libc::ESHUTDOWN | libc::EACCES | libc::EPERM => 47,
            _ => number,
        };
        errors::fail(number, error)
    }
}

/// The driver.
#[derive(Debug)]
pub(crate) struct RbdDriver {
    places: Places,
}

impl RbdDriver {
    pub(crate) fn new(places: Places) -> Self {
        Self { places }
    }

    /// The whole pool, connected; a pool that is named, but is not there, is none.
    fn pool(&self, wanted: &Wanted) -> Result<(Arc<Cluster>, Option<Arc<Pool>>), ApiError> {
        let cluster = Cluster::shared(&wanted.connect).map_err(failed(47))?;
        let name = wanted.pool()?;
        match cluster.pool(name, None) {
            Ok(pool) => Ok((cluster, Some(pool))),
            Err(error) if error.is_missing() => Ok((cluster, None)),
            Err(error) => Err(failed(47)(error)),
        }
    }
}

/// The SR that a namespace is, if it is one.
fn sr_at(cluster: &Arc<Cluster>, pool: &str, namespace: &str) -> Result<Option<Uuid>, RbdError> {
    let Some(sr) = plain_uuid(namespace) else { return Ok(None) };
    let mark = match cluster.pool(pool, Some(namespace))?.open(MARK, None, Mode::Read) {
        Ok(mark) => mark,
        Err(error) if error.is_missing() => return Ok(None),
        Err(error) => return Err(error),
    };
    let text = mark.metadata(MARK_SR)?;
    Ok((text.as_deref().and_then(plain_uuid) == Some(sr)).then_some(sr))
}

impl SrDriver for RbdDriver {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let wanted = Wanted::of(config, &self.places, None)?;
        let answer = self.look(&wanted, config);
        wanted.forget_key();
        answer
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        let wanted = Wanted::of(config, &self.places, None)?;
        let made = self.make(ctx, sr, &wanted);
        wanted.forget_key();
        made
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let wanted = Wanted::of(config, &self.places, Some(sr))?;
        let attached = self.open(ctx, sr, &wanted);
        if attached.is_err() {
            wanted.forget_key();
        }
        Ok(Box::new(attached?))
    }
}

impl RbdDriver {
    fn look(&self, wanted: &Wanted, config: &Config) -> Result<ProbeAnswer, ApiError> {
        if wanted.pool.is_none() {
            let cluster = Cluster::shared(&wanted.connect).map_err(failed(47))?;
            let pools = cluster.pools().map_err(failed(47))?;
            let items: Vec<_> = pools.into_iter().map(|name| ("Pool", vec![("Name", name)])).collect();
            let text = "device_config:pool is the pool of the SR; the cluster's pools are listed";
            return Err(errors::fail_with(115, text, document("rbd-pools", &items)));
        }
        let (cluster, pool) = self.pool(wanted)?;
        let mut found = Vec::new();
        if let Some(pool) = &pool {
            for namespace in pool.namespaces().map_err(failed(47))? {
                found.extend(sr_at(&cluster, pool.name(), &namespace).map_err(failed(47))?);
            }
        }
        found.sort();
        let complete =
            ProbeResult { configuration: config.clone(), complete: true, ..ProbeResult::default() };
        let stat = match &pool {
            Some(pool) => usage::pool_use(pool).unwrap_or_default(),
            None => crate::traits::SrStat::default(),
        };
        let mut results: Vec<_> =
            found.iter().map(|sr| ProbeResult { sr: Some((*sr, stat)), ..complete.clone() }).collect();
        if results.is_empty() {
            results.push(complete);
        }
        let entries: Vec<SrEntry> =
            found.into_iter().map(|uuid| SrEntry { uuid, devices: None, size: None }).collect();
        Ok(ProbeAnswer { xml: sr_list(&entries), results })
    }

    fn make(&self, ctx: &dyn Ctx, sr: Uuid, wanted: &Wanted) -> Result<(), ApiError> {
        let (cluster, found) = self.pool(wanted)?;
        let name = wanted.pool()?;
        ctx.step("sr-create:begin");
        let pool = match found {
            Some(pool) => pool,
            None => {
                match cluster.create_pool(name) {
                    Err(error) if error.errno() != libc::EEXIST => return Err(failed(61)(error)),
                    _ => {}
                }
                cluster.pool(name, None).map_err(failed(61))?
            }
        };
        pool.init().map_err(failed(61))?;
        let namespace = sr.to_string();
        if sr_at(&cluster, name, &namespace).map_err(failed(47))?.is_some() {
            return Err(errors::fail(42, format_args!("pool '{name}' has SR {sr} already")));
        }
        pool.create_namespace(&namespace).map_err(failed(61))?;
        ctx.step("rbd-create:namespace-made");
        let inside = cluster.pool(name, Some(&namespace)).map_err(failed(61))?;
        match inside.create(MARK, MARK_LEN, None) {
            // One that this very call made before it was interrupted.
            Err(error) if error.errno() != libc::EEXIST => return Err(failed(61)(error)),
            _ => {}
        }
        ctx.step("rbd-create:image-made");
        let mark = inside.open(MARK, None, Mode::Write).map_err(failed(61))?;
        mark.set_metadata(MARK_LAYOUT, LAYOUT).map_err(failed(61))?;
        mark.set_metadata(MARK_SR, &namespace).map_err(failed(61))
    }

    fn open(&self, ctx: &dyn Ctx, sr: Uuid, wanted: &Wanted) -> Result<Repository, ApiError> {
        let (cluster, pool) = self.pool(wanted)?;
        let (name, namespace) = (wanted.pool()?, sr.to_string());
        let missing = || {
            let text = format!("pool '{name}' of {cluster} has no SR {sr}: see where it is with sr-probe");
            errors::fail(47, text)
        };
        let pool = pool.ok_or_else(missing)?;
        if sr_at(&cluster, pool.name(), &namespace).map_err(failed(47))?.is_none() {
            return Err(missing());
        }
        let inside = cluster.pool(name, Some(&namespace)).map_err(failed(47))?;
        let layout = inside.open(MARK, None, Mode::Read).and_then(|mark| mark.metadata(MARK_LAYOUT));
        let layout = layout.map_err(failed(47))?.unwrap_or_default();
        if layout != LAYOUT {
            let text = format!(
                "SR {sr} has layout '{}', and this version knows {LAYOUT}: use the version that made it",
                layout.escape_debug()
            );
            return Err(errors::fail(181, text));
        }
        ctx.step("sr-attach:mounted");
        let opened = Repository::new(sr, (pool, inside), wanted, &self.places);
        opened.recover(ctx)?;
        Ok(opened)
    }
}
