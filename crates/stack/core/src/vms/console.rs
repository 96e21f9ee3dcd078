//! Consoles of VMs that run: their records, and how they are reached.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tapio_model::{ApiError, Value};
use tapio_vm::VmDriver;
use uuid::Uuid;

use super::allowed::bad_power_state;
use super::{Vms, lookup};
use crate::db::{Change, Object, reference_of};

/// Makes the records of the consoles that a VM has now.
///
/// # Errors
/// The store's.
pub(super) fn record(change: &mut Change<'_>, vm: &Object, driver: &dyn VmDriver) -> Result<(), ApiError> {
    let uuid = vm.uuid()?;
    let own = change.get("host", vm.text("resident_on")).ok();
    let address = own
        .or_else(|| change.all("host").into_iter().next())
        .map(|host| host.text("address").to_owned())
        .unwrap_or_default();
    let address = if address.is_empty() { "localhost".to_owned() } else { address };
    let host = if address.contains(':') { format!("[{address}]") } else { address };
    let terminal = driver.console(uuid);
    let has = [("vt100", terminal.is_some()), ("rfb", driver.has_screen(uuid))];
    for (protocol, _) in has.into_iter().filter(|(_, is_there)| *is_there) {
        let console = Uuid::new_v4();
        let url = format!("https://{host}/console?uuid={console}");
        // A terminal is opened by programs of its host.
        let node = terminal.as_deref().filter(|place| protocol == "vt100" && place.starts_with("/dev"));
        let location = node.map_or(url, |node| format!("tty:{}", node.display()));
        let fields = [
            ("uuid", Value::string(console.to_string())),
            ("protocol", Value::string(protocol)),
            ("location", Value::string(location)),
            ("VM", Value::string(&vm.reference)),
        ];
        change.create("console", &fields)?;
    }
    Ok(())
}

impl Vms {
    /// The console of that name, or the first of the VM of that name, its screen before its terminal.
    fn find_console(&self, name: &str) -> Result<Arc<Object>, ApiError> {
        let is_reference = name.starts_with("OpaqueRef:");
        let look = |class: &'static str| match is_reference {
            true => self.db.get(class, name),
            false => self.db.by_uuid(class, name),
        };
        if let Ok(console) = look("console") {
            return Ok(console);
        }
        let vm = look("VM")?;
        let mut all = self.db.find("console", "VM", &vm.reference);
        all.sort_by_key(|console| console.text("protocol") != "rfb");
        all.into_iter().next().ok_or_else(|| match vm.text("power_state") {
            "Running" | "Paused" => {
                let why = format!("VM {name} has no console: see platform:hvm_serial and platform:vnc");
                ApiError::new("OPERATION_NOT_ALLOWED", [why])
            }
            _ => bad_power_state(&vm, "Running"),
        })
    }

    /// Connects to a console.
    ///
    /// # Errors
    /// There is none, or it is a terminal of this host; the socket's; a screen's driver.
    pub(crate) fn console(&self, name: &str) -> Result<OwnedFd, ApiError> {
        match self.way_to_console(name)?.1 {
            Way::Screen(driver, vm) => driver.open_screen(vm),
            Way::Socket(vm, place) => UnixStream::connect(&place)
                .map(OwnedFd::from)
                .map_err(|error| unreachable(vm, &place, &error.to_string())),
        }
    }

    /// The reference of a console that can be reached.
    ///
    /// # Errors
    /// There is none, or it is a terminal of this host.
    pub(crate) fn console_of(&self, name: &str) -> Result<String, ApiError> {
        Ok(self.way_to_console(name)?.0)
    }

    /// A console's reference, and how it is reached.
    fn way_to_console(&self, name: &str) -> Result<(String, Way), ApiError> {
        let console = self.find_console(name)?;
        let vm = self.db.get("VM", console.text("VM"))?;
        let driver = lookup::driver(self, &vm)?;
        let uuid = vm.uuid()?;
        let reference = console.reference.clone();
        if console.text("protocol") == "rfb" {
            let has_screen = driver.has_screen(uuid);
            return match has_screen {
                true => Ok((reference, Way::Screen(driver, uuid))),
                false => Err(bad_power_state(&vm, "Running")),
            };
        }
        let place = driver.console(uuid).ok_or_else(|| bad_power_state(&vm, "Running"))?;
        if std::fs::metadata(&place).is_ok_and(|facts| facts.file_type().is_char_device()) {
            let why = "it is a terminal of its host, which is used there (xl console)";
            return Err(unreachable(uuid, &place, why));
        }
        Ok((reference, Way::Socket(uuid, place)))
    }
}

/// How a console is reached.
enum Way {
    /// A terminal's socket.
    Socket(Uuid, PathBuf),
    /// By the driver of its VM.
    Screen(Arc<dyn VmDriver>, Uuid),
}

fn unreachable(vm: Uuid, place: &Path, why: &str) -> ApiError {
    let what = format!("the console of VM {} at {}: {why}", reference_of(vm), place.display());
    ApiError::new("OPERATION_NOT_ALLOWED", [what])
}
