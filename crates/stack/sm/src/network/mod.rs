//! `nfs` and `smb`: SRs in a directory of a server, `<share>/<sr uuid>`, mounted at `<mount_dir>/<sr uuid>`.
//! sm-layout.md section 1. How a share is named and mounted is its own affair ([`Share`]); what is done with it is the
//! same for all of them.
//!
//! What several hosts mount is changed by one at a time, by the leases of a shared SR (`lease`). Images are locked by
//! `flock` besides, which NFS passes on to the server; so is the directory of an SR that is not shared.

pub(crate) mod address;
mod mounting;
pub(crate) mod nfs;
pub(crate) mod smb;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use tapio_types::ApiError;
use uuid::Uuid;

use crate::Places;
use crate::dir::facts::plain_uuid;
use crate::dir::{Backing, ImageDir};
use crate::errors;
use crate::mount;
use crate::probe::{SrEntry, sr_list};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, ProbeResult, Sr, SrDriver, SrStat};
pub(crate) use mounting::{Mounting, Visit, unmount};

/// Numbers of the errors of one kind of share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    /// It cannot be mounted.
    pub(crate) mount: u16,
    /// It cannot be unmounted.
    pub(crate) unmount: u16,
    /// Something else is mounted there.
    pub(crate) attached: u16,
    /// A directory cannot be made in it.
    pub(crate) create: u16,
    /// A directory of it cannot be removed.
    pub(crate) delete: u16,
}

/// Numbers of a library of ISO images, whatever it is mounted by.
const LIBRARY: Numbers = Numbers { mount: 222, unmount: 223, attached: 222, create: 461, delete: 461 };

/// A directory of a server.
pub(crate) trait Share: Send + Sync {
    /// Its errors.
    fn numbers(&self) -> Numbers;

    /// How it, or the directory `below` it, is mounted.
    fn mounting(&self, below: Option<&str>) -> Mounting;

    /// See [`Backing::renames_onto_open`].
    fn renames_onto_open(&self) -> bool {
        true
    }

    /// Anything else that a probe of this share finds, put into the `<SRlist>` and the results.
    ///
    /// # Errors
    /// The server does not answer.
    fn also(&self, _: &mut ProbeAnswer) -> Result<(), ApiError> {
        Ok(())
    }
}

/// A type of SR on shares of one kind.
pub(crate) struct NetworkDriver {
    pub(crate) places: Places,
    pub(crate) info: &'static DriverInfo,
    /// The share of a `device_config`; an incomplete one answers what the server offers as the error's document.
    pub(crate) share: fn(&Config) -> Result<Box<dyn Share>, ApiError>,
}

impl NetworkDriver {
    fn point(&self, sr: Uuid) -> PathBuf {
        self.places.mount_dir.join(sr.to_string())
    }
}

impl SrDriver for NetworkDriver {
    fn info(&self) -> &'static DriverInfo {
        self.info
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let share = (self.share)(config)?;
        let visit = Visit::begin(&self.places, &*share)?;
        let mut found = Vec::new();
        let unreadable = |error: io::Error| errors::io(47, "cannot list the share at", visit.point(), &error);
        for entry in fs::read_dir(visit.point()).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if let Some(sr) = entry.file_name().to_str().and_then(plain_uuid).filter(|_| is_directory) {
                found.push(sr);
            }
        }
        found.sort();
        let mut answer = ProbeAnswer::default();
        let sizes = mount::sizes(visit.point()).ok();
        let stat = sizes.map_or_else(SrStat::default, |(physical_size, physical_utilisation)| SrStat {
            physical_size,
            physical_utilisation,
            virtual_allocation: 0,
        });
        let complete =
            ProbeResult { configuration: config.clone(), complete: true, ..ProbeResult::default() };
        answer.results =
            found.iter().map(|sr| ProbeResult { sr: Some((*sr, stat)), ..complete.clone() }).collect();
        if found.is_empty() {
            answer.results.push(complete);
        }
        let entries: Vec<SrEntry> =
            found.into_iter().map(|uuid| SrEntry { uuid, devices: None, size: None }).collect();
        answer.xml = sr_list(&entries);
        share.also(&mut answer)?;
        visit.end()?;
        Ok(answer)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        let share = (self.share)(config)?;
        ctx.step("sr-create:begin");
        let visit = Visit::begin(&self.places, &*share)?;
        let directory = visit.point().join(sr.to_string());
        match DirBuilder::new().mode(0o700).create(&directory) {
            Ok(()) => {}
            // One that this very call made before it was interrupted is empty.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let mut entries = fs::read_dir(&directory)
                    .map_err(|error| errors::io(47, "cannot read", &directory, &error))?;
                if let Some(Ok(entry)) = entries.next() {
                    let text =
                        format!("SR {sr} is there already and holds '{}'", entry.file_name().display());
                    return Err(errors::fail(42, text));
                }
            }
            Err(error) => {
                let next = if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM)) {
                    ": this host's root must be allowed to write there (for NFS: rw,no_root_squash)"
                } else {
                    ""
                };
                let what = share.mounting(None).source;
                return Err(match error.raw_os_error() {
                    Some(libc::ENOSPC | libc::EDQUOT | libc::EROFS) => errors::io(
                        share.numbers().create,
                        "cannot make a directory in",
                        Path::new(&what),
                        &error,
                    ),
                    _ => errors::fail(share.numbers().create, format_args!("{what}: {error}{next}")),
                });
            }
        }
        let synced = mount::sync_directory(visit.point());
        ctx.step("sr-create:directory-made");
        visit.end()?;
        synced.map_err(|error| errors::io(share.numbers().create, "cannot keep", &directory, &error))
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let share = (self.share)(config)?;
        mounting::sweep(&self.places.mount_dir);
        let point = self.point(sr);
        let mounting = share.mounting(Some(&sr.to_string()));
        let is_new = mounting.mount_once(share.numbers(), &point)?;
        ctx.step("sr-attach:mounted");
        let backing = Mounted { sr, point: point.clone(), share, places: self.places.clone(), mounting };
        match ImageDir::open(ctx, sr, &point, &self.places.run_dir, config, Box::new(backing)) {
            Ok(opened) => Ok(opened.boxed()),
            Err(error) => {
                if is_new {
                    let _ = unmount(&point);
                }
                Err(error)
            }
        }
    }
}

/// A mounted directory of a share.
struct Mounted {
    sr: Uuid,
    point: PathBuf,
    share: Box<dyn Share>,
    places: Places,
    mounting: Mounting,
}

impl Backing for Mounted {
    fn is_among_hosts(&self) -> bool {
        true
    }

    fn detach(&self) -> Result<(), ApiError> {
        unmount(&self.point)
            .map_err(|error| errors::io(self.share.numbers().unmount, "cannot unmount", &self.point, &error))
    }

    fn renames_onto_open(&self) -> bool {
        self.share.renames_onto_open()
    }

    /// The directory goes only while it is empty.
    fn erase(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let numbers = self.share.numbers();
        self.detach()?;
        ctx.step("sr-erase:unmounted");
        let erased = Visit::begin(&self.places, &*self.share).and_then(|visit| {
            let directory = visit.point().join(self.sr.to_string());
            match fs::remove_dir(&directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    let what = &self.mounting.source;
                    return Err(errors::io(numbers.delete, "cannot remove", Path::new(what), &error));
                }
                _ => {}
            }
            visit.end()
        });
        erased.inspect_err(|_| {
            // It stays attached.
            if let Err(error) = self.mounting.mount_once(numbers, &self.point) {
                tracing::warn!("SR {} is unmounted and cannot be mounted again: {error}", self.sr);
            }
        })
    }
}
