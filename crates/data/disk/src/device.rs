//! A disk as a block device of this host.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tapio_block::DiskHandle;
use tapio_control::{ControlError, Errno, LocalDeviceKind, Result, RunDir, print_local_devices};
use tapio_front::device::{DeviceError, DeviceOptions, LocalDevice, nbd, probe};
use tapio_front::nbd::{Drained, Export, NbdServer};
use tapio_types::DeviceHow;

use crate::log;

/// Where exported files are mounted and notes about devices are.
pub fn dir(run: &RunDir) -> PathBuf {
    run.path().join("device")
}

/// `--print-devices`.
pub fn print_kinds() -> Result<()> {
    let kinds = probe().into_iter().map(|found| LocalDeviceKind {
        how: found.how,
        usable: found.missing.is_none(),
        next: found.missing.as_ref().map(|missing| missing.next.to_owned()),
        why: found.missing.map(|missing| missing.why),
    });
    print_local_devices(&kinds.collect::<Vec<_>>())
}

/// `--clean-devices`.
pub fn clean(waiting: bool) -> Result<()> {
    let cleaned = tapio_front::device::clean(&dir(&RunDir::from_env()), waiting).map_err(|error| {
        let control = ControlError::new(Errno::new(error.errno), error.message);
        match error.next {
            Some(next) => control.next(next),
            None => control,
        }
    })?;
    print_local_devices(&cleaned)
}

/// A device and how far it has followed its disk.
#[derive(Debug)]
pub struct Device {
    local: LocalDevice,
    remote: DiskHandle,
    /// Bytes that the device shows.
    len: u64,
}

/// An NBD server with one export and no address, for the kernel's client.
struct Kernel(NbdServer);

impl nbd::Server for Kernel {
    fn serve(&self, socket: OwnedFd) -> std::result::Result<(), DeviceError> {
        self.0.adopt(socket, "").map_err(|refusal| {
            DeviceError::new(libc::EBUSY, format!("the disk takes no connection of the kernel: {refusal:?}"))
        })
    }

    fn drain(&self, within: Duration) -> std::result::Result<(), DeviceError> {
        log::line("the kernel's NBD client gave its connection up, because a request had no answer for long");
        let drained = self.0.drain("", Drained::Close, within);
        drained.map_err(|error| DeviceError::new(libc::ETIMEDOUT, error.to_string()))
    }
}

fn failed(error: DeviceError) -> ControlError {
    let control = ControlError::new(Errno::new(error.errno), error.message);
    match error.next {
        Some(next) => control.next(next),
        None => control,
    }
}

fn len_of(remote: &DiskHandle) -> Result<u64> {
    let asked = remote.call(Duration::from_secs(2), |data_thread| data_thread.port.geometry().len);
    asked.map_err(|gone| ControlError::new(Errno::ESHUTDOWN, gone.to_string()))
}

impl Device {
    /// Makes a device for disk `minor` with this name.
    pub fn attach(
        how: DeviceHow,
        (read_only, owner): (bool, Option<(u32, u32)>),
        minor: u16,
        disk: String,
        remote: DiskHandle,
    ) -> Result<Self> {
        let options = DeviceOptions { how, read_only, owner, dir: dir(&RunDir::from_env()), minor, disk };
        let len = len_of(&remote)?;
        let local = LocalDevice::attach(&options, remote.clone(), || {
            let server =
                NbdServer::new().map_err(|error| DeviceError::io("starting an NBD server", &error))?;
            let export = Export { read_only, ..Export::new("", remote.clone()) };
            server.add_export(export).map_err(|error| DeviceError::new(libc::EINVAL, error.to_string()))?;
            Ok(Arc::new(Kernel(server)))
        });
        local.map(|local| Self { local, remote, len }).map_err(failed)
    }

    /// How it was made.
    pub fn how(&self) -> DeviceHow {
        self.local.how()
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.local.path().to_path_buf()
    }

    /// Whether the kernel talks to us.
    pub fn is_alive(&self) -> bool {
        self.local.is_alive()
    }

    /// The disk has this name from now on.
    pub fn rename(&mut self, name: &str) {
        self.local.rename(name);
    }

    /// Takes the size that the disk has now.
    pub fn follow_size(&mut self) {
        match len_of(&self.remote) {
            Ok(len) if len == self.len => {}
            Ok(len) => match self.local.resize() {
                Ok(()) => self.len = len,
                Err(error) => log::line(&error.to_string()),
            },
            Err(error) => log::line(&error.to_string()),
        }
    }

    /// Detaches the device.
    pub fn end(self) {
        let path = self.path();
        if !self.local.detach() {
            log::line(&format!("{} was still in use: its users get errors from now on", path.display()));
        }
    }
}
