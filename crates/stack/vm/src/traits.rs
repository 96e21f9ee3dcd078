//! What a driver is.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tapio_types::{ApiError, RingTuning};
use uuid::Uuid;

use crate::errors::{lacks_feature, quiesce};
use crate::facts::{GuestDisk, GuestFacts};
use crate::tap::BridgeState;

/// The key of [`VmSpec::platform`] for `VM.HVM_boot_params:order`.
pub const BOOT_ORDER: &str = "boot-order";

/// The key of [`VmSpec::platform`] for `VM.VCPUs_params:mask`.
pub const VCPU_MASK: &str = "vcpu-mask";

/// The key of [`VmSpec::platform`] for `VM.HVM_boot_params:firmware`.
pub const FIRMWARE: &str = "firmware";

/// The key of [`VmSpec::platform`] for `VM.VCPUs_max`. Without it a VM has no room for more processors than it is made
/// with.
pub const VCPUS_MAX: &str = "made-cpus-max";

/// The key of [`VmSpec::platform`] for the processors that a VM had when its memory was written.
pub const VCPUS_NOW: &str = "made-cpus";

/// The key of [`VmSpec::platform`] for `VM.memory_static_max`, in MiB: a guest can be told to have less, down from
/// there. Without it a VM has the memory that it is made with.
pub const MEMORY_MAX: &str = "made-ram";

/// Keys of [`VmSpec::platform`] that are the toolstack's alone, and must be the same for a VM that writes its memory
/// and the one that reads it.
pub const MADE: [&str; 3] = [VCPUS_MAX, VCPUS_NOW, MEMORY_MAX];

/// A VM as its driver needs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// `VM.uuid`.
    pub uuid: Uuid,
    /// For people.
    pub name: String,
    /// Bytes that the guest shall have.
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
    /// Its CD drives, with a medium or without. Emulated drives are there from the start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drives: Vec<DiskSpec>,
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
    /// NBD on this socket, which the disk process makes: what an emulated drive reads its medium from.
    Nbd {
        /// Absolute path; the driver made its directory.
        socket: PathBuf,
    },
    /// A block device of this host, by whatever the host can (FUSE + loop, ublk, nbd.ko).
    Device,
    /// A file of this host that is the disk, by FUSE.
    File {
        /// User and group that may open it; root without.
        owner: Option<(u32, u32)>,
    },
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
    /// For [`FrontSpec::Device`]: the node, as `/dev/loop3`. For [`FrontSpec::File`]: the file. For
    /// [`FrontSpec::Xen`]: `RUN_DIR/nbd<pid>.<minor>`, which names the disk process and the disk to tapback.
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
    /// The rings that a guest of Xen is offered.
    #[serde(default)]
    pub rings: RingTuning,
}

/// A network interface that shall be plugged into a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VifSpec {
    /// `VIF.uuid`; none for one whose record is gone and that the memory of a guest has.
    pub vif: Option<Uuid>,
    /// `VIF.device`: place, 0 to 7.
    pub position: u8,
    /// `VIF.MAC`
    pub mac: String,
    /// Bytes of a frame.
    pub mtu: u16,
    /// The bridge of this host that it leads to; without one its link is down.
    pub bridge: Option<String>,
    /// What the host's end is to be called: at most 15 bytes.
    pub tap: String,
}

/// A network interface that a VM has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluggedVif {
    /// `VIF.uuid`, where it has a record.
    pub vif: Option<Uuid>,
    /// What the host's end was called when it was made; none where the link is down.
    pub tap: Option<String>,
    /// The bridge that it was put into last; none where the link is down, or an earlier version plugged it.
    #[serde(default)]
    pub bridge: Option<String>,
}

impl FrontSpec {
    /// Whether it is a device or a file of this host, for which the disk process needs rights of its own.
    pub fn is_of_host(&self) -> bool {
        matches!(self, Self::Device | Self::File { .. })
    }
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
    /// An agent in the guest has begun to answer.
    Agent(Uuid),
    /// The guest has given memory back, or taken it again: the bytes that it has.
    Memory(Uuid, u64),
}

fn no_agent(driver: &str) -> String {
    format!("no guest agent answers in this VM of driver {driver}; install qemu-guest-agent in its guest")
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

    /// Forgets what is kept of VMs beyond their runs and is of none that is known.
    fn keep_only(&self, _is_known: &dyn Fn(Uuid) -> bool) {}

    /// Makes sure that an empty drive is there, where drives are devices of their own: in a VM that runs.
    ///
    /// # Errors
    /// The VM has no place for it.
    fn plug_drive(&self, _vm: Uuid, _disk: &DiskSpec) -> Result<(), ApiError> {
        Ok(())
    }

    /// Whether it gives guests network interfaces.
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE` with the cause and what can be done instead.
    fn check_vifs(&self, vm: Uuid) -> Result<(), ApiError> {
        let cause = format!(
            "driver {} gives guests no network interfaces: reach this one by its console (xe console), or use a VM of \
             driver qemu",
            self.name()
        );
        Err(lacks_feature(vm, cause))
    }

    /// What there is on this host under the name of a bridge.
    ///
    /// # Errors
    /// The kernel's.
    fn bridge(&self, _name: &str) -> Result<BridgeState, ApiError> {
        Ok(BridgeState::Missing)
    }

    /// Plugs a network interface into the VM, before it runs or while it does. The same again is no error, so that a
    /// daemon can repeat a call during which an earlier daemon died.
    ///
    /// # Errors
    /// As [`Self::check_vifs`]; `INVALID_DEVICE` for a place that there is not; `DEVICE_ALREADY_EXISTS` when another is
    /// in this place; the host refuses a tap interface, or the emulator the device: nothing is left then.
    fn plug_vif(&self, vm: Uuid, _vif: &VifSpec) -> Result<(), ApiError> {
        self.check_vifs(vm)
    }

    /// Connects a network interface that is plugged to another bridge, while the guest uses it. The same again is no
    /// error.
    ///
    /// # Errors
    /// As [`Self::check_vifs`]; it is not there, its link is down, or the host refuses: it is connected as before then.
    fn move_vif(&self, vm: Uuid, _vif: &VifSpec) -> Result<(), ApiError> {
        self.check_vifs(vm)
    }

    /// Unplugs the network interface at a place; one that is not there, or whose VM is not, is no error. With `force`
    /// the host's end goes whatever the guest does.
    ///
    /// # Errors
    /// `DEVICE_DETACH_REJECTED` when the guest refuses, `DEVICE_DETACH_TIMEOUT` when it has not answered by `until`.
    fn unplug_vif(&self, _vm: Uuid, _vif: &VifSpec, _force: bool, _until: Instant) -> Result<(), ApiError> {
        Ok(())
    }

    /// The network interfaces that the guest has, by place: also those that it was to give up and has not.
    ///
    /// # Errors
    /// The emulator does not answer.
    fn vifs(&self, _vm: Uuid) -> Result<BTreeMap<u8, PluggedVif>, ApiError> {
        Ok(BTreeMap::new())
    }

    /// What the guest's agent reports; none where no agent answers.
    ///
    /// # Errors
    /// The agent is there and answers nonsense, or not in time.
    fn guest(&self, _vm: Uuid, _until: Instant) -> Result<Option<GuestFacts>, ApiError> {
        Ok(None)
    }

    /// Has the guest's agent freeze the file systems: what they hold is on their disks then, and stays as it is until
    /// [`Self::thaw`]. Whatever fails, the caller thaws.
    ///
    /// # Errors
    /// `VM_SNAPSHOT_WITH_QUIESCE_NOT_SUPPORTED` without such an agent,
    /// `VM_SNAPSHOT_WITH_QUIESCE_PLUGIN_DEOS_NOT_RESPOND`, `VM_SNAPSHOT_WITH_QUIESCE_FAILED` with the agent's words.
    fn freeze(&self, vm: Uuid, _until: Instant) -> Result<(), ApiError> {
        Err(quiesce("NOT_SUPPORTED", vm, no_agent(self.name())))
    }

    /// Thaws them. True when they were frozen until now, as far as the agent knows; one that thawed by itself says no.
    ///
    /// # Errors
    /// As [`Self::freeze`]; they may still be frozen.
    fn thaw(&self, _vm: Uuid, _until: Instant) -> Result<bool, ApiError> {
        Ok(false)
    }

    /// Has the guest's agent discard what its file systems do not use; the bytes, where the agent counts them.
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE` without such an agent; the agent's.
    fn trim(&self, vm: Uuid, _until: Instant) -> Result<Option<u64>, ApiError> {
        Err(lacks_feature(vm, no_agent(self.name())))
    }

    /// What the guest's kernel has counted of its disks, as its agent reports it.
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE` without such an agent; the agent's.
    fn guest_disks(&self, vm: Uuid, _until: Instant) -> Result<Vec<GuestDisk>, ApiError> {
        Err(lacks_feature(vm, no_agent(self.name())))
    }

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

    /// Gives a VM that runs another number of processors, from 1 to the most that it was made with. What an error
    /// leaves, [`Self::vcpus`] tells.
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE`, `OPERATION_NOT_ALLOWED` with the cause and what can be done instead; the emulator's.
    fn set_vcpus(&self, vm: Uuid, _count: u32) -> Result<(), ApiError> {
        let cause = format!(
            "driver {} cannot change the processors of a VM that runs: shut it down and set VCPUs_at_startup, or \
             use a VM of driver qemu",
            self.name()
        );
        Err(lacks_feature(vm, cause))
    }

    /// The processors that a VM has now; none where they are always those that it was made with.
    ///
    /// # Errors
    /// The emulator's.
    fn vcpus(&self, _vm: Uuid) -> Result<Option<u32>, ApiError> {
        Ok(None)
    }

    /// Tells the guest of a VM that runs to have so many bytes of memory, at most those that it was made with. The
    /// guest takes its time: [`Self::memory`] tells how far it is.
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE`, `OPERATION_NOT_ALLOWED` with the cause and what can be done instead; the emulator's.
    fn set_memory(&self, vm: Uuid, _bytes: u64) -> Result<(), ApiError> {
        let cause = format!(
            "driver {} cannot change the memory of a VM that runs: shut it down and set its memory \
             (xe vm-memory-set), or use a VM of driver qemu",
            self.name()
        );
        Err(lacks_feature(vm, cause))
    }

    /// The bytes of memory that a guest has now; none where they are always those that its VM was made with.
    ///
    /// # Errors
    /// The emulator's.
    fn memory(&self, _vm: Uuid) -> Result<Option<u64>, ApiError> {
        Ok(None)
    }

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

    /// What a VM must be made as to read what [`Self::save`] writes of this one, in a word of the driver's own: the
    /// versioned machine type of its emulator. Empty where that does not matter.
    ///
    /// # Errors
    /// The emulator's.
    fn saved_as(&self, _vm: Uuid) -> Result<String, ApiError> {
        Ok(String::new())
    }

    /// As [`Self::create`], of a VM whose memory and devices are to be [`Self::load`]ed once its disks are plugged.
    /// `kind` is what [`Self::saved_as`] said of the VM that was saved, or empty where that is not known.
    ///
    /// # Errors
    /// As [`Self::create`] and [`Self::check_save`]; this driver cannot make such a VM any more.
    fn create_saved(&self, vm: &VmSpec, _kind: &str) -> Result<(), ApiError> {
        self.check_save(vm.uuid)
    }

    /// Reads what [`Self::save`] wrote. The VM is paused then, and [`Self::unpause`] lets its guest go on.
    ///
    /// # Errors
    /// As [`Self::check_save`]; the memory is not of this VM, or was cut off. The VM can only be ended then.
    fn load(&self, vm: Uuid, _from: OwnedFd) -> Result<(), ApiError> {
        self.check_save(vm)
    }

    /// Whether such a VM can go to another host while its guest runs ([`Self::migrate`] there, [`Self::create_saved`]
    /// and [`Self::load`] at the other one).
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE` with the cause and what can be done instead.
    fn check_migrate(&self, vm: Uuid) -> Result<(), ApiError> {
        let cause = format!(
            "driver {} cannot send the memory of a running guest to another host: shut it down and start it there \
             (xe vm-start on=HOST), or use a VM of driver qemu",
            self.name()
        );
        Err(lacks_feature(vm, cause))
    }

    /// Keys of [`VmSpec::platform`] with which another host must make a VM to read what [`Self::migrate`] writes of
    /// this one.
    ///
    /// # Errors
    /// As [`Self::check_migrate`]; the emulator's.
    fn made_as(&self, vm: Uuid) -> Result<BTreeMap<String, String>, ApiError> {
        self.check_migrate(vm).map(|()| BTreeMap::new())
    }

    /// Writes the memory and the devices of a VM into a socket while its guest runs, stops the guest for the last part,
    /// and closes the socket. The VM is paused then. `is_cancelled` is asked now and then, and `told` which fraction is
    /// written.
    ///
    /// # Errors
    /// As [`Self::check_migrate`]; the emulator's; `TASK_CANCELLED`. The guest may be stopped: [`Self::unpause`] lets
    /// it go on.
    fn migrate(
        &self,
        vm: Uuid,
        _to: OwnedFd,
        _is_cancelled: &dyn Fn() -> bool,
        _told: &dyn Fn(f64),
    ) -> Result<(), ApiError> {
        self.check_migrate(vm)
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

    /// Whether it has a screen that [`Self::open_screen`] can show.
    fn has_screen(&self, _vm: Uuid) -> bool {
        false
    }

    /// Connects a viewer, which speaks RFB (VNC), to its screen. What is served for it ends with the connection.
    ///
    /// # Errors
    /// `VM_LACKS_FEATURE` without a screen; `VM_BAD_POWER_STATE`; too many viewers.
    fn open_screen(&self, vm: Uuid) -> Result<OwnedFd, ApiError> {
        Err(lacks_feature(vm, format!("a VM of driver {} has no screen; see its terminal", self.name())))
    }

    /// Waits for the next event of any VM, until `until` at most.
    fn wait_event(&self, until: Instant) -> Option<VmEvent>;
}
