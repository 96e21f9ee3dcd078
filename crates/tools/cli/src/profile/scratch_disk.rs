//! A VDI in an SR, plugged to this host while it is measured, and destroyed afterwards.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use tapio_control::{ControlError, Errno};

use crate::xe::{Client, Failure, XeArguments, find, long};

/// How it is named, so that one that a killed run left is known.
const NAME: &str = "tapio profile";
const FILL_LEN: usize = 1 << 20;
const ALIGN: usize = 4096;

/// The disk. [`ScratchDisk::end`] destroys it; dropped without, it is destroyed too.
#[derive(Debug)]
pub(super) struct ScratchDisk {
    client: Option<Client>,
    vdi: String,
    vbd: String,
}

fn text(value: Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

impl ScratchDisk {
    /// Makes and plugs it.
    ///
    /// # Errors
    /// The toolstack's. Nothing is left then.
    pub(super) fn make(sr: &str, len: u64, xe: &[String]) -> Result<Self, Failure> {
        let client = Client::connect(&XeArguments::read(xe)?.connection)?;
        let sr = find(&client, "SR", sr)?;
        let host = text(client.call("session.get_this_host", &[client.session().into()])?);
        let vms = client.call("VM.get_all_records", &[])?;
        let is_here = |vm: &&Value| vm["is_control_domain"] == true && vm["resident_on"] == host.as_str();
        let all = vms.as_object().into_iter().flatten();
        let found = all.filter(|(_, vm)| is_here(vm)).map(|(reference, _)| reference.clone()).next();
        let vm = found.ok_or_else(|| Failure::other("this host has no control domain"))?;
        let vdi = json!({
            "name_label": NAME,
            "name_description": "Made by 'tapio profile' and destroyed at its end",
            "SR": sr,
            "virtual_size": len,
            "type": "user",
            "sharable": false,
            "read_only": false,
            "other_config": {},
            "xenstore_data": {},
            "sm_config": {},
            "tags": [],
        });
        let vdi = long(&client, "VDI.create", &[vdi])?;
        let mut disk = Self { client: None, vdi, vbd: String::new() };
        let made = disk.plug(&client, &vm);
        disk.client = Some(client);
        made.map(|()| disk)
    }

    fn plug(&mut self, client: &Client, vm: &str) -> Result<(), Failure> {
        let vbd = json!({
            "VM": vm,
            "VDI": self.vdi,
            "userdevice": "autodetect",
            "bootable": false,
            "mode": "RW",
            "type": "Disk",
            "unpluggable": true,
            "empty": false,
            "other_config": {},
            "qos_algorithm_type": "",
            "qos_algorithm_params": {},
        });
        self.vbd = text(client.call("VBD.create", &[vbd])?);
        long(client, "VBD.plug", &[self.vbd.as_str().into()]).map(drop)
    }

    /// Its device.
    ///
    /// # Errors
    /// It has none on this host.
    pub(super) fn path(&self) -> Result<PathBuf, Failure> {
        let Some(client) = &self.client else { return Err(Failure::other("it has ended")) };
        let device = text(client.call("VBD.get_device", &[self.vbd.as_str().into()])?);
        let path = Path::new("/dev").join(device);
        match path.exists() {
            true => Ok(path),
            false => Err(Failure::other(format!(
                "the VDI is plugged, but {} is not there: the kernel needs one of the modules ublk_drv, nbd or loop for \
                 disks of the host itself, and this command has to run there",
                path.display()
            ))),
        }
    }

    /// Unplugs and destroys it.
    ///
    /// # Errors
    /// The toolstack's: the VDI is still there.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        self.clear()
    }

    fn clear(&mut self) -> Result<(), Failure> {
        let Some(client) = self.client.take() else { return Ok(()) };
        let mut done = Ok(());
        if !self.vbd.is_empty() {
            let unplugged = long(&client, "VBD.unplug", &[self.vbd.as_str().into()]).map(drop);
            // One that was never plugged is only destroyed.
            done = client.call("VBD.destroy", &[self.vbd.as_str().into()]).map(drop).and(match unplugged {
                Err(Failure::Api(code, _)) if code == "DEVICE_ALREADY_DETACHED" => Ok(()),
                other => other,
            });
        }
        let destroyed = long(&client, "VDI.destroy", &[self.vdi.as_str().into()]).map(drop);
        client.end();
        done.and(destroyed)
    }
}

impl Drop for ScratchDisk {
    fn drop(&mut self) {
        if let Err(error) = self.clear() {
            eprintln!("a VDI '{NAME}' is left in the SR: {}", error.text(&|_| None).trim_end());
        }
    }
}

/// Writes all of it: what was never written is not read from the storage.
///
/// # Errors
/// It cannot be written, or the run was stopped.
pub(super) fn fill(path: &Path, stop: &AtomicBool) -> Result<(), ControlError> {
    let failed =
        |error: &std::io::Error| ControlError::io(format_args!("cannot fill {}", path.display()), error);
    let mut file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .map_err(|error| failed(&error))?;
    let mut memory = vec![0u8; FILL_LEN + ALIGN];
    let first = memory.as_ptr().align_offset(ALIGN);
    let memory = &mut memory[first..first + FILL_LEN];
    tapio_load::Random::new(1).fill(memory);
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(ControlError::new(Errno::EINTR, "stopped before anything was measured"));
        }
        match file.write(memory) {
            Ok(written) if written == FILL_LEN => {}
            // The end, which a part of the memory reached, or nothing.
            Ok(_) => return file.sync_data().map_err(|error| failed(&error)),
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(&error)),
        }
    }
}
