//! Consoles of VMs that run: their records, and how they are reached.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
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
    for (protocol, there) in [("vt100", driver.console(uuid)), ("rfb", driver.screen(uuid))] {
        let Some(place) = there else { continue };
        let console = Uuid::new_v4();
        let url = format!("https://{host}/console?uuid={console}");
        // A terminal is opened by programs of its host.
        let location = if place.starts_with("/dev") { format!("tty:{}", place.display()) } else { url };
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
    /// There is none, or it is a terminal of this host; the socket's.
    pub(crate) fn console(&self, name: &str) -> Result<OwnedFd, ApiError> {
        let (_, place, unreachable) = self.place_of_console(name)?;
        UnixStream::connect(&place).map(OwnedFd::from).map_err(|error| unreachable(&error.to_string()))
    }

    /// The reference of a console that can be reached.
    ///
    /// # Errors
    /// There is none, or it is a terminal of this host.
    pub(crate) fn console_of(&self, name: &str) -> Result<String, ApiError> {
        let (console, ..) = self.place_of_console(name)?;
        Ok(console)
    }

    /// A console's reference, its socket, and how an error of it is reported.
    fn place_of_console(&self, name: &str) -> Result<(String, PathBuf, impl Fn(&str) -> ApiError), ApiError> {
        let console = self.find_console(name)?;
        let vm = self.db.get("VM", console.text("VM"))?;
        let driver = lookup::driver(self, &vm)?;
        let uuid = vm.uuid()?;
        let is_screen = console.text("protocol") == "rfb";
        let place = if is_screen { driver.screen(uuid) } else { driver.console(uuid) };
        let place: PathBuf = place.ok_or_else(|| bad_power_state(&vm, "Running"))?;
        let shown = place.display().to_string();
        let told = move |why: &str| {
            let what = format!("the console of VM {} at {shown}: {why}", reference_of(uuid));
            ApiError::new("OPERATION_NOT_ALLOWED", [what])
        };
        if std::fs::metadata(&place).is_ok_and(|facts| facts.file_type().is_char_device()) {
            return Err(told("it is a terminal of its host, which is used there (xl console)"));
        }
        Ok((console.reference.clone(), place, told))
    }
}
