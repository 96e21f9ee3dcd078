//! Drivers of virtual machines (VMs).
//!
//! A driver ([`VmDriver`]) starts guests of one kind and gives them disks. It is synchronous, knows neither the
//! database of objects nor its clients, and keeps what it needs to find its guests again below a directory of its
//! own, so that guests outlive the toolstack's daemon.
//!
//! | driver | guests | disks | network interfaces |
//! |---|---|---|---|
//! | `uml` | User-mode Linux: a kernel as an ordinary process, on any host | vhost-user-blk | none |
//! | `qemu` | QEMU with KVM, or its emulator where KVM does not work | vhost-user-blk on PCI | virtio-net on PCI, behind taps |
//! | `xen` | domains of a Xen host, PV or PVH | blkif, by tapback | none |
//! | `host` | this host itself | block devices of this host | none |
//! | `sim` | none: times and failures as `VM.platform` says | none | none |
//!
//! Each VM has a directory `RUN_DIR/vm/UUID`: what the driver knows (`machine.json`, replaced as a whole), the
//! process's id (`pid`) and a lock that it holds as long as it lives (`lock`), the sockets of its disks, its console
//! (`console`, a UNIX socket; `console.log`), and in `g`, which is the guest's process's own, how it is controlled.

mod agent;
mod arguments;
mod boot;
mod confine;
mod console;
mod errors;
pub mod facts;
mod firmware;
mod fleet;
mod guest;
mod host;
mod nvram;
mod place;
mod poll;
mod process;
mod qemu;
mod record;
mod registry;
pub mod screen;
mod settings;
mod sim;
mod supervise;
mod tap;
mod traits;
mod uml;
mod users;
mod xen;

pub use facts::{GuestDisk, GuestFacts};
pub use firmware::{FIRMWARE_TEXT, FIRMWARE_TEXTS, FirmwareText, firmware_text_is_plain};
pub use guest::initramfs;
pub use process::end_now;
pub use registry::registry;
pub use settings::{CONSOLE_LOG_SIZE, GuestSandbox, KERNEL_DIRS, Settings, XenSettings};
pub use tap::BridgeState;
pub use traits::{
    BOOT_ORDER, BootField, DiskFacts, DiskSpec, FIRMWARE, FrontSpec, MADE, MEMORY_MAX, PluggedDisk,
    PluggedVif, ShutdownKind, VCPU_MASK, VCPUS_MAX, VifSpec, VmDriver, VmEvent, VmSpec, VmState,
};
pub use users::UserRange;
