//! What a driver is.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tapio_types::ApiError;
use uuid::Uuid;

use crate::errors::lacks_feature;

/// The key of [`VmSpec::platform`] for `VM.HVM_boot_params:order`.
pub const BOOT_ORDER: &str = "boot-order";

/// The key of [`VmSpec::platform`] for `VM.VCPUs_params:mask`.
pub const VCPU_MASK: &str = "vcpu-mask";

/// A VM as its driver needs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// `VM.uuid`.
    pub uuid: Uuid,
    /// For people.
    pub name: String,
    /// Bytes.
    pub memory: u64,
    /// Processors.
    pub vcpus: u32,
    /// Kernel, initramfs and command line (`PV_kernel`, `PV_ramdisk`, `PV_args`), where the driver boots directly.
    pub kernel: Option<PathBuf>,
    /// See `kernel`.
    pub ramdisk: Option<PathBuf>,
    /// See `kernel`.
    pub kernel_args: String,
    /// `VM.platform` and the driver's keys of `VM.other_config`.
    pub platform: BTreeMap<String, String>,
}

/// From what a VM boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootField {
    /// `PV_kernel`
    Kernel,
    /// `PV_ramdisk`
    Ramdisk,
    /// `PV_args`
    Arguments,
}

/// A disk that shall be plugged into a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// `VBD.uuid`.
    pub vbd: Uuid,
    /// `VBD.userdevice`: place, 0 to 254.
    pub position: u8,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Whether it is a CD drive.
    pub is_cd: bool,
    /// Whether the VM boots from it.
    pub is_bootable: bool,
}

/// How the disk process shall offer the disk to this guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FrontSpec {
    /// vhost-user-blk on this socket, which the disk process makes.
    VhostUser {
        /// Absolute path; the driver made its directory.
        socket: PathBuf,
        /// Queues.
        queues: u16,
    },
    /// A block device of this host, by whatever the host can (FUSE + loop, ublk, nbd.ko).
    Device,
    /// Xen's blkif: the disk process is started without a front end and given one by tapback, as often as the guest
    /// connects.
    Xen,
    /// No front end at all (simulation).
    Nothing,
}

/// A disk whose front end is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluggedDisk {
    /// The disk.
    pub spec: DiskSpec,
    /// What [`VmDriver::front`] chose.
    pub front: FrontSpec,
    /// For [`FrontSpec::Device`]: the node, as `/dev/loop3`. For [`FrontSpec::Xen`]: `RUN_DIR/nbd<pid>.<minor>`, which
    /// names the disk process and the disk to tapback.
    pub node: Option<PathBuf>,
    /// Bytes.
    pub size: u64,
    /// Facts for back ends outside of the disk process.
    #[serde(default)]
    pub facts: DiskFacts,
}

/// What back ends outside of the disk process publish or pass on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFacts {
    /// `VDI.uuid`.
    pub vdi: Option<Uuid>,
    /// Longest spin in microseconds; 0 is none.
    pub polling_us: u32,
    /// Least idle share of the host for it, in percent.
    pub polling_idle: u8,
}

/// Ways to end a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownKind {
    /// Asks the guest.
    Clean,
    /// Pulls the plug.
    Hard,
}

/// The power state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmState {
    /// It is not there.
    Halted,
    /// Made, or stopped for a while.
    Paused,
    /// It runs.
    Running,
}

/// Something that happened without being asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmEvent {
    /// The guest shut down.
    Halted(Uuid),
    /// The guest asks to be started again.
    Rebooted(Uuid),
    /// The guest or its emulator died: what is known of the cause.
    Crashed(Uuid, String),
}

/// A kind of guest. Methods may be called from several threads, several for one VM: disks are plugged in
/// parallel.
///
/// Start is `create`, `plug` of each disk in parallel, `unpause`.
pub trait VmDriver: Send + Sync {
    /// As `uml`.
    fn name(&self) -> &'static str;

    /// Whether this host can run such guests: what is missing otherwise, with the next step.
    ///
    /// # Errors
    /// `VM_HOST_INCOMPATIBLE...`-like internal text.
    fn check(&self) -> Result<(), ApiError>;

    /// What [`Self::create`] would refuse of one field, without anything being made.
    ///
    /// # Errors
    /// `INVALID_VALUE` with the field, its value, the VM, the cause and the next step.
    fn check_boot(&self, _vm: &VmSpec, _field: BootField) -> Result<(), ApiError> {
        Ok(())
    }

    /// How the disk shall be offered to this VM.
    ///
    /// # Errors
    /// The position is not possible here.
    fn front(&self, vm: Uuid, disk: &DiskSpec) -> Result<FrontSpec, ApiError>;

    /// Makes the VM, paused and without disks.
    ///
    /// # Errors
    /// The emulator does not start, the kernel is not there; nothing is left.
    fn create(&self, vm: &VmSpec) -> Result<(), ApiError>;

    /// Plugs a disk into the VM, before it runs or while it does. The same disk again is no error, so that a daemon can
    /// repeat a call during which an earlier daemon died.
    ///
    /// # Errors
    /// `DEVICE_ALREADY_EXISTS` when another disk is in this place; the guest or the emulator refuses, and does not
    /// have the disk then.
    fn plug(&self, vm: Uuid, disk: &PluggedDisk) -> Result<(), ApiError>;

    /// Unplugs a disk; one that is not there, or whose VM is not, is no error. With `force` the guest is not
    /// asked.
    ///
    /// # Errors
    /// `DEVICE_DETACH_REJECTED` when the guest refuses, `DEVICE_DETACH_TIMEOUT` when it has not answered by `until`.
    fn unplug(&self, vm: Uuid, disk: &DiskSpec, force: bool, until: Instant) -> Result<(), ApiError>;

    /// Lets it run.
    ///
    /// # Errors
    /// The guest does not start.
    fn unpause(&self, vm: Uuid) -> Result<(), ApiError>;

    /// Stops its processors.
    ///
    /// # Errors
    /// The emulator does not answer.
    fn pause(&self, vm: Uuid) -> Result<(), ApiError>;

    /// Whether the memory of such a VM can be written down and read again ([`Self::save`], [`Self::create_saved`],
    /// [`Self::load`]).
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE` with the cause and what can be done instead.
    fn check_save(&self, vm: Uuid) -> Result<(), ApiError> {
        let cause = format!(
            "driver {} cannot write down the memory of a running guest: shut it down (xe vm-shutdown), or use a \
             VM of driver qemu",
            self.name()
        );
        Err(lacks_feature(vm, cause))
    }

    /// Writes the memory and the devices of a paused VM into a socket, and closes it. The VM stays paused, whatever
    /// comes of it. `is_cancelled` is asked now and then.
    ///
    /// # Errors
    /// As [`Self::check_save`]; the emulator's; `TASK_CANCELLED`.
    fn save(&self, vm: Uuid, _to: OwnedFd, _is_cancelled: &dyn Fn() -> bool) -> Result<(), ApiError> {
        self.check_save(vm)
    }

    /// As [`Self::create`], of a VM whose memory and devices are to be [`Self::load`]ed once its disks are plugged.
    ///
    /// # Errors
    /// As [`Self::create`] and [`Self::check_save`].
    fn create_saved(&self, vm: &VmSpec) -> Result<(), ApiError> {
        self.check_save(vm.uuid)
    }

    /// Reads what [`Self::save`] wrote. The VM is paused then, and [`Self::unpause`] lets its guest go on.
    ///
    /// # Errors
    /// As [`Self::check_save`]; the memory is not of this VM, or was cut off. The VM can only be ended then.
    fn load(&self, vm: Uuid, _from: OwnedFd) -> Result<(), ApiError> {
        self.check_save(vm)
    }

    /// Ends it; a clean end waits for the guest as long as `until`. Its disks are unplugged afterwards.
    ///
    /// # Errors
    /// The guest did not end in time; it goes on.
    fn shutdown(&self, vm: Uuid, kind: ShutdownKind, until: Instant) -> Result<(), ApiError>;

    /// The VM's power state. Also finds VMs that an earlier daemon started.
    ///
    /// # Errors
    /// The emulator does not answer.
    fn state(&self, vm: Uuid) -> Result<VmState, ApiError>;

    /// The number of its domain, where VMs of this driver are domains.
    fn domid(&self, _vm: Uuid) -> Option<u32> {
        None
    }

    /// Where its console can be reached: a UNIX socket or a terminal; none where it has none.
    fn console(&self, vm: Uuid) -> Option<PathBuf>;

    /// Where its screen can be reached by VNC: a UNIX socket; none where it has none.
    fn screen(&self, _vm: Uuid) -> Option<PathBuf> {
        None
    }

    /// Waits for the next event of any VM, until `until` at most.
    fn wait_event(&self, until: Instant) -> Option<VmEvent>;
}
