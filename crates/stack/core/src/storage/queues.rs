//! The I/O scheduler, queue depth and read-ahead of an SR's devices: set when it is attached, changed with its
//! `other_config`, put back when it is detached. [`tapio_sm::block_device`] has the keys and the defaults.
//!
//! The kernel changes a scheduler when the requests that the device has are answered. A device that hangs would keep
//! the caller, so the work is done by a thread of its own, which is waited for a moment only.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use parking_lot::RwLock;
use tapio_model::{ApiError, Value};
use tapio_sm::block_device::{Applied, BlockDevice, Host, KEYS, Queues, Settings};
use uuid::Uuid;

use super::attached::Attached;
use super::records::Alert;
use super::{Call, Storage, this_host};
use crate::db::Object;

/// How long an operation waits for queues to be changed.
const CHANGED: Duration = Duration::from_secs(5);

/// Starts the keys of `SR.sm_config` that show queues.
const SHOWN: &str = "queue-";

/// Where links by SCSI identifiers are.
const BY_SCSI_ID: [&str; 2] = ["dev/disk/by-scsid", "dev/mapper"];

/// The queues of this host, or of a directory in its place.
#[derive(Debug)]
pub(super) struct Owned {
    queues: RwLock<Arc<Queues>>,
    run_dir: PathBuf,
    mount_dir: PathBuf,
}

impl Owned {
    pub(super) fn new(run_dir: &Path, mount_dir: &Path) -> Self {
        let queues = RwLock::new(Arc::new(Queues::new(Host::default(), run_dir)));
        Self { queues, run_dir: run_dir.to_path_buf(), mount_dir: mount_dir.to_path_buf() }
    }

    fn get(&self) -> Arc<Queues> {
        Arc::clone(&self.queues.read())
    }
}

impl Storage {
    /// Has the queues of devices below another root than `/` from now on.
    pub fn use_devices_below(&self, root: &Path) {
        *self.queues.queues.write() = Arc::new(Queues::new(Host::below(root), &self.queues.run_dir));
    }
}

/// The settings of an SR; those that cannot be are refused when they are set, and count for nothing here.
fn settings(other_config: &BTreeMap<String, String>) -> Settings {
    Settings::of(other_config).unwrap_or_default()
}

/// Refuses settings that cannot be.
///
/// # Errors
/// `VALUE_NOT_SUPPORTED`.
pub(super) fn check_settings(other_config: &BTreeMap<String, String>) -> Result<(), ApiError> {
    Settings::of(other_config).map(drop).map_err(|refused| {
        ApiError::new(
            "VALUE_NOT_SUPPORTED",
            [format!("other_config:{}", refused.key), refused.value, refused.why],
        )
    })
}

/// Whether two maps say something else of queues.
pub(super) fn differ(one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) -> bool {
    KEYS.iter().any(|key| one.get(*key) != other.get(*key))
}

/// Sets the queues of an attached SR's devices, and shows them in its record. What cannot be set is a message to the
/// administrator; that an SR asks for nothing and no default applies costs a look at its devices.
pub(super) fn apply(call: &Call, attached: &Attached) {
    let Ok(sr) = call.part.db.get("SR", &attached.reference) else { return };
    let (uuid, sr_type) = (attached.uuid, attached.info.sr_type);
    let settings = settings(&sr.map("other_config"));
    let asked = !settings.is_empty();
    let place = Place::of(call, &sr, uuid);
    let queues = call.part.queues.get();
    let work = move || {
        let devices = place.devices(queues.host());
        queues.apply(uuid, sr_type, &devices, &settings)
    };
    let Some(applied) = aside(work) else {
        let body = format!(
            "The queues of SR {uuid}'s devices are not set yet, because the kernel waits for requests to a device to end: \
             see whether it hangs (dmesg)"
        );
        return tell(call, uuid, &body);
    };
    let problems: Vec<&str> = applied.iter().flat_map(|one| &one.problems).map(String::as_str).collect();
    if let (true, [first, ..]) = (asked, &problems[..]) {
        tell(call, uuid, &format!("SR {uuid}: {first} ({} settings could not be made)", problems.len()));
    }
    show(call, attached, &applied);
}

/// Puts the queues of a detached SR's devices back.
pub(super) fn restore(call: &Call, attached: &Attached) {
    let (queues, uuid) = (call.part.queues.get(), attached.uuid);
    if aside(move || queues.restore(uuid)).is_none() {
        tracing::warn!(sr = %uuid, "the queues of its devices are put back when the kernel lets them change");
    }
    show(call, attached, &[]);
}

/// Puts back what a daemon set that died, for SRs that are not attached any more, and will not be.
pub(super) fn restore_left(call: &Call) {
    let db = &call.part.db;
    let mut known = Vec::new();
    for pbd in db.all("PBD").into_iter().filter(|pbd| pbd.text("host") == this_host(db)) {
        let sr = pbd.text("SR");
        let is_here = pbd.bool("currently_attached") || call.part.is_recovering(sr);
        known.extend(db.get("SR", sr).and_then(|sr| sr.uuid()).ok().filter(|_| is_here));
    }
    let queues = call.part.queues.get();
    let _ = aside(move || queues.restore_unknown(|sr| known.contains(&sr)));
}

/// Devices of an SR whose queues another program changed, and what differs.
pub(super) fn differing(call: &Call, attached: &Attached) -> Vec<(String, String)> {
    let (queues, uuid) = (call.part.queues.get(), attached.uuid);
    aside(move || queues.differing(uuid)).unwrap_or_default()
}

fn tell(call: &Call, sr: Uuid, body: &str) {
    let about = sr.to_string();
    Alert { name: "SR_QUEUES_NOT_SET", priority: 4, class: "SR", about: &about }.post(&call.part.db, body);
}

/// Runs `work` on a thread of its own; none if it has not ended in time, and goes on.
fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, answer) = channel();
    let run = move || {
        let _ = done.send(work());
    };
    match std::thread::Builder::new().name("sr-queues".to_owned()).spawn(run) {
        Ok(_) => answer.recv_timeout(CHANGED).ok(),
        Err(error) => {
            tracing::warn!(%error, "no thread to change queues of devices");
            None
        }
    }
}

/// Makes `sm_config` of an SR show its queues.
fn show(call: &Call, attached: &Attached, applied: &[Applied]) {
    let shown = call.part.db.change(|change| {
        let Ok(sr) = change.get("SR", &attached.reference) else { return Ok(()) };
        let before = sr.map("sm_config");
        let mut sm_config = before.clone();
        sm_config.retain(|key, _| !key.starts_with(SHOWN));
        sm_config.extend(applied.iter().map(|one| (format!("{SHOWN}{}", one.device), one.queue.shown())));
        if sm_config == before {
            return Ok(());
        }
        change.set("SR", &attached.reference, "sm_config", Value::string_map(sm_config))
    });
    if let Err(error) = shown {
        tracing::warn!(sr = %attached.uuid, %error, "its record does not show the queues of its devices");
    }
}

/// What leads to the devices of an SR.
struct Place {
    /// Its directory, where a file system may be mounted.
    point: PathBuf,
    /// Devices that `device_config` or VDIs name.
    paths: Vec<PathBuf>,
    /// Identifiers of SCSI disks.
    scsi_ids: Vec<String>,
}

impl Place {
    fn of(call: &Call, sr: &Object, uuid: Uuid) -> Self {
        let db = &call.part.db;
        let here = this_host(db);
        let pbd = db.find("PBD", "SR", &sr.reference).into_iter().find(|pbd| pbd.text("host") == here);
        let config = pbd.map(|pbd| pbd.map("device_config")).unwrap_or_default();
        let named = |key: &str| {
            let all = config.get(key).map_or("", String::as_str).split(',').map(str::trim);
            all.filter(|name| !name.is_empty()).map(str::to_owned).collect::<Vec<_>>()
        };
        let mut paths: Vec<PathBuf> = named("device").into_iter().map(PathBuf::from).collect();
        for vdi in db.find("VDI", "SR", &sr.reference) {
            let device = vdi.map("sm_config").get("device").map(PathBuf::from);
            paths.extend(device.filter(|_| !vdi.bool("missing")));
        }
        if sr.text("type") == "file" {
            paths.extend(config.get("location").map(PathBuf::from));
        }
        Self { point: call.part.queues.mount_dir.join(uuid.to_string()), paths, scsi_ids: named("SCSIid") }
    }

    /// They are found without asking a file system, whose server may be away.
    fn devices(&self, host: &Host) -> Vec<BlockDevice> {
        let mut found: Vec<BlockDevice> = Vec::new();
        let mut add = |device: BlockDevice| {
            if !found.iter().any(|known| known.numbers == device.numbers) {
                found.push(device);
            }
        };
        let mut links: Vec<PathBuf> = self.paths.clone();
        for directory in BY_SCSI_ID {
            links.extend(self.scsi_ids.iter().map(|id| host.path(directory).join(id)));
        }
        links.into_iter().filter_map(|path| host.at(&path).ok()).for_each(&mut add);
        let directories = std::iter::once(&self.point).chain(&self.paths);
        directories.filter_map(|directory| host.below_directory(directory)).for_each(add);
        found
    }
}
