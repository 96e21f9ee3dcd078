//! Domains of a real hypervisor: their pages, their channels, and whether they live.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use tapio_xen::sys::{EventDevice, GrantDevice};
use tapio_xen::{Channel, Domain, GrantRef, Rights};

use super::ring::{FilePage, Page};
use super::rings::Source;
use crate::domains::Life;

/// The grant under which every domain shares its page (`GNTTAB_RESERVED_XENSTORE`).
const GRANT: GrantRef = GrantRef(1);
/// The event by which the hypervisor says that a domain has shut down or died (`VIRQ_DOM_EXC`).
const VIRQ_DOM_EXC: u32 = 3;
/// `IOCTL_EVTCHN_BIND_VIRQ`: no direction, 4 bytes, type `E`, number 0.
const BIND_VIRQ: u64 = 4 << 16 | (b'E' as u64) << 8;
/// `IOCTL_PRIVCMD_HYPERCALL`: no direction, 48 bytes, type `P`, number 0.
const HYPERCALL: u64 = 48 << 16 | (b'P' as u64) << 8;
/// `IOCTL_PRIVCMD_MMAPBATCH_V2`: no direction, 32 bytes, type `P`, number 4.
const MAP_BATCH: u64 = 32 << 16 | (b'P' as u64) << 8 | 4;
/// `__HYPERVISOR_domctl`.
const DOMCTL: u64 = 36;
/// `XEN_DOMCTL_getdomaininfo`.
const GET_DOMAIN_INFO: u32 = 5;
/// Versions of the interface that have what is used of it where it is looked for (Xen 4.14 and later).
const DOMCTL_VERSIONS: std::ops::RangeInclusive<u32> = 0x13..=0x20;
/// `XEN_DOMINF_dying` and `XEN_DOMINF_shutdown`.
const DYING: u32 = 1 << 0;
const SHUTDOWN: u32 = 1 << 2;

/// Pages and channels of the hypervisor.
#[derive(Debug, Default)]
pub struct XenSource;

impl Source for XenSource {
    /// By the grant that every domain has for it; by its frame where the grant was not made (dom0 only).
    fn page(&mut self, domid: u32, gfn: u64) -> io::Result<Page> {
        if domid == 0 {
            return Ok(Page::File(FilePage::map(&open("/proc/xen/xsd_kva")?)?));
        }
        let granted =
            GrantDevice::open(domid).and_then(|device| Domain::Xen(device).map(&[GRANT], Rights::Write));
        match granted {
            Ok(mapped) => Ok(Page::Granted(mapped)),
            Err(error) => foreign(domid, gfn).map_err(|other| {
                io::Error::other(format!(
                    "cannot map domain {domid}'s ring: by its grant: {error}; by its frame: {other}"
                ))
            }),
        }
    }

    fn channel(&mut self, domid: u32, port: u32) -> io::Result<Channel> {
        EventDevice::bind(domid, port).map(Channel::Xen)
    }
}

fn open(path: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot open {path}: {error}; is xenfs mounted on /proc/xen, and are you root?"),
        )
    })
}

/// The event channel of this kernel's own ring.
///
/// # Errors
/// This is no kernel on Xen, or xenfs is not mounted.
pub fn local_port() -> io::Result<u32> {
    let text = std::fs::read_to_string("/proc/xen/xsd_port")?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::other(format!("/proc/xen/xsd_port says {text:?}, which is no port")))
}

/// `struct privcmd_mmapbatch_v2`.
#[repr(C)]
struct MapBatch {
    count: u32,
    domid: u16,
    address: *mut u8,
    frames: *const u64,
    errors: *mut i32,
}

/// A page of another domain by its frame: what only the control domain may.
fn foreign(domid: u32, gfn: u64) -> io::Result<Page> {
    let device = open("/dev/xen/privcmd")?;
    let page = FilePage::map(&device)?;
    let mut error = 0i32;
    let batch = MapBatch {
        count: 1,
        domid: domid as u16,
        address: page.address(),
        frames: &raw const gfn,
        errors: &raw mut error,
    };
    // SAFETY: one frame, one error and a mapping of one page of this device, all alive through the call.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), MAP_BATCH, &raw const batch) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    if error != 0 { Err(io::Error::from_raw_os_error(-error)) } else { Ok(Page::File(page)) }
}

/// Asks the hypervisor how domains are.
#[derive(Debug)]
pub struct Census {
    privcmd: File,
    /// A page that stays where it is while the hypervisor writes to it.
    page: FilePage,
    version: u32,
}

impl Census {
    /// Finds out which version of the interface this hypervisor speaks.
    ///
    /// # Errors
    /// This is not the control domain, or the hypervisor is too old or too new.
    pub fn open() -> io::Result<Self> {
        let privcmd = open("/dev/xen/privcmd")?;
        let page = match open("/dev/xen/hypercall") {
            Ok(device) => FilePage::map(&device)?,
            Err(_) => FilePage::locked()?,
        };
        let mut census = Self { privcmd, page, version: 0 };
        for version in DOMCTL_VERSIONS {
            census.version = version;
            match census.info(0) {
                // Another version.
                Err(error) if error.raw_os_error() == Some(libc::EACCES) => {}
                Err(error) => return Err(error),
                Ok(_) => return Ok(census),
            }
        }
        Err(io::Error::other(
            "the hypervisor speaks another version of domctl than this program (Xen 4.14 and later)",
        ))
    }

    /// The first domain of this number or above, and its flags.
    fn info(&self, domid: u32) -> io::Result<Option<(u32, u32)>> {
        let base = self.page.address();
        // SAFETY: `struct xen_domctl` has 16 bytes of head and 128 of argument; the page is ours alone and longer. The
        // hypervisor writes the argument while it carries the call out, and not later.
        unsafe {
            std::ptr::write_bytes(base, 0, 256);
            base.cast::<u32>().write(GET_DOMAIN_INFO);
            base.add(4).cast::<u32>().write(self.version);
            base.add(8).cast::<u16>().write(domid as u16);
            let call: [u64; 6] = [DOMCTL, base as u64, 0, 0, 0, 0];
            if libc::ioctl(self.privcmd.as_raw_fd(), HYPERCALL, call.as_ptr()) < 0 {
                let error = io::Error::last_os_error();
                return if error.raw_os_error() == Some(libc::ESRCH) { Ok(None) } else { Err(error) };
            }
            Ok(Some((base.add(16).cast::<u16>().read().into(), base.add(20).cast::<u32>().read())))
        }
    }

    /// How a domain is. One that cannot be asked about counts as running.
    pub fn life(&self, domid: u32) -> Life {
        match self.info(domid) {
            Ok(Some((found, flags))) if found == domid => match flags {
                _ if flags & DYING != 0 => Life::Gone,
                _ if flags & SHUTDOWN != 0 => Life::Shutdown,
                _ => Life::Running,
            },
            Ok(_) => Life::Gone,
            Err(_) => Life::Running,
        }
    }
}

/// Becomes readable when something happened to a domain.
#[derive(Debug)]
pub struct DomainEvents {
    channel: EventDevice,
}

impl DomainEvents {
    /// Asks the hypervisor to tell us: one daemon of a host only.
    ///
    /// # Errors
    /// Another daemon is told already, or this is not the control domain.
    pub fn open() -> io::Result<Self> {
        let device: OwnedFd = EventDevice::open_device()?;
        let virq = VIRQ_DOM_EXC;
        // SAFETY: one number of 32 bits, as `ioctl_evtchn_bind_virq` has.
        let port = unsafe { libc::ioctl(device.as_raw_fd(), BIND_VIRQ, &raw const virq) };
        let port = u32::try_from(port).map_err(|_| io::Error::last_os_error())?;
        Ok(Self { channel: EventDevice::from_fd(device, port) })
    }

    /// The channel.
    pub fn into_channel(self) -> Channel {
        Channel::Xen(self.channel)
    }
}
