//! `ext` and `xfs`: a device or partition made into a file system of its own, mounted at `<mount_dir>/<sr uuid>`.
//!
//! Where this host has device-mapper and LVM the file system lies on the logical volume
//! `XSLocalEXT-<sr>/<sr>`, as XenServer's storage manager makes it (sm-layout.md section 1), and one such SR can be
//! introduced there and here. Elsewhere it lies on the device itself, and the file system's own UUID is the SR's.
//! Either is recognised by what is on the device, whatever the device is called today.

mod claim;
pub(crate) mod device;
mod lvm;

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tapio_types::ApiError;
use uuid::Uuid;

use crate::Places;
use crate::command;
use crate::dir::{self, Backing, ImageDir};
use crate::errors;
use crate::in_place;
use crate::mount;
use crate::probe::{SrEntry, sr_list};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, ProbeResult, Sr, SrDriver, SrStat};
use claim::Claim;
use device::Device;
use lvm::Owner;

/// What a file system of ours is labelled.
const LABEL: &str = "tapio-sr";
/// Nothing smaller becomes an SR.
const SIZE_MIN: u64 = 64 << 20;
/// Making and checking file systems of many terabytes takes a while.
const TIMEOUT: Duration = Duration::from_secs(1800);
/// A child that was forked meanwhile, and has not got to its own program yet, has the same files open for a moment.
const SETTLING: Duration = Duration::from_millis(500);
/// What is wiped of a file system: every one has its mark in its first part.
const WIPED_LEN: usize = 1 << 20;

/// Which file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileSystem {
    Ext4,
    Xfs,
    Btrfs,
}

macro_rules! info {
    ($sr_type:literal, $name:literal, $description:literal) => {
        DriverInfo {
            sr_type: $sr_type,
            name: $name,
            description: $description,
            capabilities: dir::CAPABILITIES,
            configuration: &[
                ("device", "block device, or several with commas between them where LVM is there (required)"),
                ("force", "true: overwrite a device that holds something else"),
                ("preferred-image-formats", "formats of new VDIs in order of preference: vhd, raw"),
            ],
            is_shareable: false,
        }
    };
}

static EXT4_INFO: DriverInfo =
    info!("ext", "Local ext4", "VDIs as VHD and raw files on an ext4 file system of their own");
static XFS_INFO: DriverInfo =
    info!("xfs", "Local XFS", "VDIs as VHD and raw files on an XFS file system of their own");
static BTRFS_INFO: DriverInfo = info!(
    "btrfs",
    "Local Btrfs", "VDIs as VHD and raw files on a Btrfs file system of their own, written in place"
);

impl FileSystem {
    const fn kind(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Whether a file system of this kind is one that it can mount; XenServer has made `ext3` for long.
    fn takes(self, kind: &str) -> bool {
        kind == self.kind() || (self == Self::Ext4 && kind == "ext3")
    }

    /// Makes the file system, with the SR's UUID as its own.
    fn make(self, sr: Uuid, device: &Path, size: u64) -> Result<(), ApiError> {
        let (sr, device) = (sr.to_string(), device.to_string_lossy());
        let (uuid, kibibytes) = (format!("uuid={sr}"), format!("{}k", size >> 10));
        let (data, bytes) = (format!("size={size}"), size.to_string());
        let (program, mut arguments) = match self {
            Self::Ext4 => ("mkfs.ext4", vec!["-q", "-F", "-L", LABEL, "-U", &sr, &device]),
            Self::Xfs => ("mkfs.xfs", vec!["-q", "-f", "-L", LABEL, "-m", &uuid]),
            Self::Btrfs => ("mkfs.btrfs", vec!["-q", "-f", "-L", LABEL, "-U", &sr]),
        };
        match self {
            Self::Ext4 if size > 0 => arguments.push(&kibibytes),
            Self::Ext4 => {}
            Self::Xfs => {
                if size > 0 {
                    arguments.extend(["-d", &data]);
                }
                arguments.push(&device);
            }
            Self::Btrfs => {
                if size > 0 {
                    arguments.extend(["-b", &bytes]);
                }
                arguments.push(&device);
            }
        }
        command::run_well(program, &arguments, TIMEOUT).map(|_| ()).map_err(|error| {
            let package = match self {
                Self::Ext4 => "e2fsprogs",
                Self::Xfs => "xfsprogs",
                Self::Btrfs => "btrfs-progs",
            };
            let next = if error.is_missing { format!(": install {package}") } else { String::new() };
            errors::fail(57, format_args!("{device}: {error}{next}"))
        })
    }

    /// Puts in order what a power cut left, before it is mounted. XFS and Btrfs do that when they are mounted.
    fn check(self, device: &Path) -> Result<(), ApiError> {
        if self != Self::Ext4 {
            return Ok(());
        }
        let text = device.to_string_lossy();
        match command::run("fsck.ext4", &["-p", &text], TIMEOUT) {
            // 1: put in order; 2: the same, and a reboot is wise, which concerns mounted file systems.
            Ok(output) if matches!(output.status, Some(0..=2)) => Ok(()),
            Ok(output) => {
                let said = output.stdout.trim().lines().last().unwrap_or("it printed nothing").to_string();
                let next = "check it by hand with fsck.ext4 and try again";
                Err(errors::fail(52, format_args!("{text} is damaged ({said}): {next}")))
            }
            // Mounting tells what it thinks.
            Err(error) if error.is_missing => Ok(()),
            Err(error) => Err(errors::fail(52, format_args!("{text}: {error}"))),
        }
    }
}

/// The driver.
#[derive(Debug)]
pub(crate) struct Ext {
    places: Places,
    fs: FileSystem,
}

/// Where the file system of an SR is.
#[derive(Clone, Debug)]
struct Found {
    device: PathBuf,
    is_lvm: bool,
}

impl Ext {
    pub(crate) fn new(places: Places, fs: FileSystem) -> Self {
        Self { places, fs }
    }

    /// Finds an SR's file system: on its logical volume, on the device that is named, or wherever its UUID is.
    fn find(&self, sr: Uuid, config: &Config) -> Result<Found, ApiError> {
        if lvm::is_there() && lvm::has_group(sr) {
            lvm::activate(sr)?;
            return self.on_volume(sr).inspect_err(|_| lvm::deactivate(sr));
        }
        let named = device::named(config)?;
        let mut why = String::new();
        for path in named.iter().cloned().chain([device::by_uuid(sr)]) {
            let signature = match Device::open(&path).and_then(|device| device.signature()) {
                Ok(signature) => signature,
                Err(error) => {
                    why = error.params.get(1).cloned().unwrap_or_default();
                    continue;
                }
            };
            if signature.uuid() == Some(sr) && signature.kind() == Some(self.fs.kind()) {
                return Ok(Found { device: fs::canonicalize(&path).unwrap_or(path), is_lvm: false });
            }
            why = match signature.kind() {
                Some("LVM2_member") => format!(
                    "{} belongs to LVM, and there is no group {} here: lvm2 and device-mapper are needed",
                    path.display(),
                    lvm::group(sr)
                ),
                Some(kind) => format!("{} holds {kind}, and not SR {sr}", path.display()),
                None => format!("{} holds no SR", path.display()),
            };
        }
        Err(errors::fail(47, why))
    }

    /// The SR's volume, which is active, where it holds a file system that this driver mounts.
    fn on_volume(&self, sr: Uuid) -> Result<Found, ApiError> {
        let device = lvm::volume(sr);
        let signature = Device::open(&device).and_then(|device| device.signature())?;
        match signature.kind() {
            Some(kind) if self.fs.takes(kind) => Ok(Found { device, is_lvm: true }),
            Some(kind) => {
                let text = format!("{} holds {kind}, which is no SR of this type", device.display());
                Err(errors::fail(47, text))
            }
            None => {
                let text = "holds nothing: the SR was never finished; make it anew with sr-create";
                Err(errors::fail(47, format_args!("{} {text}", device.display())))
            }
        }
    }

    /// Mounts what was found, unless it is, and opens it.
    fn open(
        &self,
        ctx: &dyn Ctx,
        sr: Uuid,
        config: &Config,
        device: &Device,
        found: Found,
    ) -> Result<Box<dyn Sr>, ApiError> {
        let point = self.places.mount_dir.join(sr.to_string());
        fs::create_dir_all(&point).map_err(|error| errors::io(52, "cannot make", &point, &error))?;
        let mounted = |error: io::Error| errors::io(52, "cannot see what is mounted at", &point, &error);
        let is_new = match mount::at(&point).map_err(mounted)? {
            // Btrfs has numbers of its own, which are no device's.
            Some(there) if there.device == device.numbers || Path::new(&there.source) == found.device => {
                false
            }
            Some(_) => {
                let text = format!("something else is mounted at {}: unmount it", point.display());
                return Err(errors::fail(52, text));
            }
            None => {
                device.check_free()?;
                self.fs.check(&found.device)?;
                mount::mount(&found.device, &point, self.fs.kind())
                    .map_err(|error| errors::io(52, "the kernel refuses to mount", &found.device, &error))?;
                true
            }
        };
        if self.fs == FileSystem::Btrfs {
            in_place::write_in_place(&point);
        }
        ctx.step("sr-attach:mounted");
        let backing = Mount { sr, point: point.clone(), found, fs: self.fs };
        match ImageDir::open(ctx, sr, &point, &self.places.run_dir, config, Box::new(backing)) {
            Ok(opened) => Ok(Box::new(opened)),
            Err(error) => {
                if is_new {
                    let _ = mount::unmount(&point);
                }
                Err(error)
            }
        }
    }
}

impl SrDriver for Ext {
    fn info(&self) -> &'static DriverInfo {
        match self.fs {
            FileSystem::Ext4 => &EXT4_INFO,
            FileSystem::Xfs => &XFS_INFO,
            FileSystem::Btrfs => &BTRFS_INFO,
        }
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        if config.get("device").is_none_or(String::is_empty) {
            let text = "device_config:device is the block device of the SR; the document lists some";
            return Err(errors::fail_with(90, text, device::candidates()));
        }
        let mut answer = ProbeAnswer::default();
        let mut entries: Vec<SrEntry> = Vec::new();
        for path in device::named(config)? {
            let device = Device::open(&path)?;
            let signature = device.signature()?;
            let mut result =
                ProbeResult { configuration: config.clone(), complete: true, ..ProbeResult::default() };
            let sr = match signature.kind() {
                Some("LVM2_member") if lvm::is_there() => match lvm::owner(&path)? {
                    Owner::Sr(sr) => Some(sr),
                    Owner::Group(name) => {
                        result.extra_info.insert("volume_group".into(), name);
                        None
                    }
                    Owner::Unclaimed | Owner::Unknown => None,
                },
                Some(kind) if kind == self.fs.kind() && signature.label() == Some(LABEL) => signature.uuid(),
                _ => None,
            };
            if let Some(uuid) = sr {
                let name = path.display().to_string();
                match entries.iter_mut().find(|entry| entry.uuid == uuid) {
                    // One more device of the same SR.
                    Some(known) => {
                        known.devices = known.devices.take().map(|names| format!("{names},{name}"));
                        known.size = known.size.map(|size| size.saturating_add(device.size));
                    }
                    None => entries.push(SrEntry { uuid, devices: Some(name), size: Some(device.size) }),
                }
                let stat = SrStat { physical_size: device.size, ..SrStat::default() };
                result.sr = Some((uuid, stat));
            } else if let Some(kind) = signature.kind() {
                result.extra_info.insert("holds".into(), kind.into());
            }
            answer.results.push(result);
        }
        answer.xml = sr_list(&entries);
        Ok(answer)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, size: u64) -> Result<(), ApiError> {
        let paths = device::named(config)?;
        let has_lvm = lvm::is_there();
        if paths.len() > 1 && !has_lvm {
            let text = "several devices make one SR by LVM, which this host lacks: name one device";
            return Err(errors::fail(91, text));
        }
        let force = config.get("force").is_some_and(|value| value == "true");
        let claims =
            paths.iter().map(|path| Claim::check(path, force, has_lvm)).collect::<Result<Vec<_>, _>>()?;
        ctx.step("sr-create:begin");
        claims.iter().try_for_each(Claim::clear)?;
        let target =
            if has_lvm { lvm::create(ctx, sr, &paths)? } else { paths.first().cloned().unwrap_or_default() };
        let made = Device::open(&target).and_then(|device| {
            let size = if device.size > size { size } else { 0 };
            self.fs.make(sr, &target, size)
        });
        if let Err(error) = made {
            if has_lvm {
                if let Err(error) = lvm::remove(sr, || ()) {
                    tracing::warn!("{} is left half made: {error}", lvm::group(sr));
                }
            } else if let Err(error) = wipe(&target) {
                tracing::warn!("{} is left with half a file system: {error}", target.display());
            }
            return Err(error);
        }
        ctx.step("sr-create:formatted");
        if has_lvm {
            lvm::deactivate(sr);
        }
        Ok(())
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let found = self.find(sr, config)?;
        let is_lvm = found.is_lvm;
        let device = Device::open(&found.device)?;
        self.open(ctx, sr, config, &device, found).inspect_err(|_| {
            if is_lvm && device.check_free().is_ok() {
                lvm::deactivate(sr);
            }
        })
    }
}

/// Overwrites the marks of a file system.
fn wipe(device: &Path) -> io::Result<()> {
    let file = fs::OpenOptions::new().write(true).open(device)?;
    file.write_all_at(&vec![0; WIPED_LEN], 0)?;
    file.sync_all()
}

/// A mounted file system.
struct Mount {
    sr: Uuid,
    point: PathBuf,
    found: Found,
    fs: FileSystem,
}

impl Mount {
    fn unmount(&self) -> Result<(), ApiError> {
        let until = Instant::now() + SETTLING;
        let unmounted = loop {
            match mount::unmount(&self.point) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < until => {
                    std::thread::sleep(SETTLING / 20);
                }
                done => break done,
            }
        };
        match unmounted {
            Ok(()) => {}
            // Another process has unmounted it.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(errors::io(53, "cannot unmount", &self.point, &error)),
        }
        let _ = fs::remove_dir(&self.point);
        Ok(())
    }
}

impl Backing for Mount {
    fn detach(&self) -> Result<(), ApiError> {
        self.unmount()?;
        if self.found.is_lvm {
            lvm::deactivate(self.sr);
        }
        Ok(())
    }

    fn erase(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        self.unmount()?;
        ctx.step("sr-erase:unmounted");
        let erased = if self.found.is_lvm {
            lvm::remove(self.sr, || ctx.step("sr-erase:group-gone"))
        } else {
            wipe(&self.found.device)
                .map_err(|error| errors::io(54, "cannot wipe", &self.found.device, &error))
        };
        erased.inspect_err(|_| {
            // It stays attached.
            let _ = fs::create_dir_all(&self.point);
            if let Err(error) = mount::mount(&self.found.device, &self.point, self.fs.kind()) {
                tracing::warn!("SR {} is unmounted and cannot be mounted again: {error}", self.sr);
            }
        })
    }
}
