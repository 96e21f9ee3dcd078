//! `/dev/xen/evtchn`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::{call, open, request};

const PATH: &str = "/dev/xen/evtchn";
/// Ports that one read takes; a device of ours has one.
const PORTS: usize = 16;

/// One event channel on an open `/dev/xen/evtchn` of its own. Closed when dropped: the other end is then unbound, and
/// the holder of its number may bind it anew.
#[derive(Debug)]
pub struct EventDevice {
    device: OwnedFd,
    port: u32,
}

impl EventDevice {
    /// Binds to the port that domain `domid` has made for us; it is its front end's `event-channel`.
    ///
    /// # Errors
    /// There is no such port, or it is bound already, or there is no device.
    pub fn bind(domid: u32, remote_port: u32) -> io::Result<Self> {
        Self::bind_on(open(PATH)?.into(), domid, remote_port)
    }

    /// The same on a device that is open already, non-blocking and without a port.
    ///
    /// # Errors
    /// As of [`EventDevice::bind`].
    pub fn bind_on(device: OwnedFd, domid: u32, remote_port: u32) -> io::Result<Self> {
        let mut remote = [domid, remote_port];
        // SAFETY: two numbers of 32 bits, as `ioctl_evtchn_bind_interdomain` has.
        let port = unsafe { call(device.as_raw_fd(), request::BIND_INTERDOMAIN, &raw mut remote) };
        let port = port.map_err(|error| {
            let what = format!("cannot bind event channel {remote_port} of domain {domid}: {error}");
            io::Error::new(error.kind(), format!("{what}; is the domain alive and the channel not in use?"))
        })?;
        Ok(Self { device, port })
    }

    /// Makes a port that domain `domid` may bind: the front end's part. [`EventDevice::port`] is its number.
    ///
    /// # Errors
    /// No such domain, or no ports are left, or there is no device.
    pub fn offer(domid: u32) -> io::Result<Self> {
        let device: OwnedFd = open(PATH)?.into();
        let mut remote = domid;
        // SAFETY: one number of 32 bits, as `ioctl_evtchn_bind_unbound_port` has.
        let port = unsafe { call(device.as_raw_fd(), request::BIND_UNBOUND_PORT, &raw mut remote)? };
        Ok(Self { device, port })
    }

    /// A channel that another process has bound on this device, alone there.
    pub fn from_fd(device: OwnedFd, port: u32) -> Self {
        Self { device, port }
    }

    /// An open device, for [`EventDevice::bind_on`] in another process.
    ///
    /// # Errors
    /// There is none, or this process may not open it.
    pub fn open_device() -> io::Result<OwnedFd> {
        open(PATH).map(OwnedFd::from)
    }

    /// Our port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// From now on the device binds to ports of domain `domid` alone; what is bound stays.
    ///
    /// # Errors
    /// It was restricted before, or the kernel does not have this.
    pub fn restrict(&self, domid: u16) -> io::Result<()> {
        let mut domid = domid;
        // SAFETY: one number of 16 bits, as `ioctl_evtchn_restrict_domid` has.
        unsafe { call(self.device.as_raw_fd(), request::RESTRICT_DOMID, &raw mut domid) }.map(drop)
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.device.as_raw_fd()
    }

    /// The kernel says nothing about a domain that is gone: that is xenstore's to tell.
    pub(crate) fn notify(&self) -> io::Result<()> {
        let mut port = self.port;
        // SAFETY: one number of 32 bits, as `ioctl_evtchn_notify` has.
        unsafe { call(self.device.as_raw_fd(), request::NOTIFY, &raw mut port) }.map(drop)
    }

    pub(crate) fn take(&self) -> io::Result<bool> {
        let mut ports = [0u32; PORTS];
        let fd = self.device.as_raw_fd();
        // SAFETY: as many bytes as the array has.
        let got = unsafe { libc::read(fd, ports.as_mut_ptr().cast(), size_of_val(&ports)) };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(false),
                // More events than the device's buffer holds: it starts anew, and we look at everything.
                Some(libc::EFBIG) => self.reset().map(|()| true),
                _ => Err(error),
            };
        };
        let whole = got - got % 4;
        if whole == 0 {
            return Ok(false);
        }
        // A port stays masked until it is written back.
        // SAFETY: no more bytes than were read into the array.
        let wrote = unsafe { libc::write(fd, ports.as_ptr().cast(), whole) };
        if wrote < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(ports[..whole / 4].contains(&self.port))
    }

    /// The device's buffer overflowed, which one port cannot bring about: the port is unmasked blindly.
    fn reset(&self) -> io::Result<()> {
        // SAFETY: this request has no argument.
        unsafe { call(self.raw_fd(), request::RESET, std::ptr::null_mut::<u8>())? };
        // SAFETY: four bytes of ours.
        let wrote = unsafe { libc::write(self.raw_fd(), (&raw const self.port).cast(), 4) };
        if wrote < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
