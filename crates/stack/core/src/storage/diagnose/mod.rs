//! `SR.diagnose`, `host.diagnose`: where database, directories, images, processes and settings of the host disagree.
//!
//! ```text
//! sr       records and images of an attached SR; what its driver finds in the directory
//! held     VDIs that count as in use, and are not
//! disks    disk processes, VBDs
//! pool     page pools that are too small
//! limits   network storage that is waited for without an end
//! system   settings of the kernel and of devices, logs
//! finding  one of them, as clients get it
//! ```
//!
//! Kinds are rows of [`tapio_model::findings`]. Nothing is changed: repairs are calls of their own, those that the row
//! names.

pub mod disks;
mod finding;
mod held;
pub mod limits;
pub mod pool;
pub mod sr;
pub mod system;

use std::path::Path;

use tapio_model::{ApiError, Value};

pub use self::finding::Finding;
use self::finding::json;
use super::sr::check_host;
use super::{Call, Handlers, this_host};
use crate::args::Args;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("SR.diagnose", diagnose_sr);
    handlers.on("host.diagnose", diagnose_host);
    handlers.on("VDI.release", held::release);
    handlers.on("host.sm_dp_destroy", held::end_datapath);
    handlers.on("host.end_stray_disk", |call, args| {
        check_host(call, args.text(0)?)?;
        call.part.disks.end_stray(args.int(1)?).map(|()| Value::Void)
    });
}

fn diagnose_sr(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let attached = call.part.attached(args.text(0)?)?;
    json(sr::find(call, &attached, (0.0, 1.0))?)
}

/// An SR that cannot be looked at is a finding, and the others are looked at.
fn diagnose_host(call: &Call, args: &Args) -> Result<Value, ApiError> {
    check_host(call, args.text(0)?)?;
    let db = &call.part.db;
    let mut found = disks::find(call);
    let mut mounts = Vec::new();
    let here = db.all("PBD").into_iter().filter(|pbd| pbd.text("host") == this_host(db));
    let here: Vec<_> = here.collect();
    for (at, pbd) in here.iter().enumerate() {
        let record = db.get("SR", pbd.text("SR"))?;
        let uuid = record.uuid()?;
        let part = |at: usize| at as f64 / here.len() as f64;
        let looked = call.part.attached(pbd.text("SR")).and_then(|attached| {
            let found = sr::find(call, &attached, (part(at), part(at + 1)))?;
            Ok((found, attached.with(|sr| Ok(sr.time_limit()))?))
        });
        match looked {
            Ok((of_sr, limit)) => {
                found.extend(of_sr);
                let place = call.part.mount_dir.join(uuid.to_string());
                found.extend(limits::find(Path::new("/"), (uuid, &place), limit));
                mounts.push((uuid, place));
            }
            Err(error) if error.code == "TASK_CANCELLED" => return Err(error),
            Err(error) => {
                found.push(Finding::new("sr-not-attached", uuid, error.to_string()).of_sr(uuid));
            }
        }
    }
    found.extend(system::find(Path::new("/"), &mounts));
    json(found)
}
