//! Which devices an SR offers.

use std::fs;
use std::path::{Path, PathBuf};

use tapio_types::ApiError;

use crate::block_device::{BlockDevice, Host, Identity, Kind, identity};
use crate::errors;
use crate::traits::Config;

/// So many devices make one SR at most.
const DEVICES_MAX: usize = 1024;
/// Directories below `/dev` whose links name a device by something that it keeps.
const STABLE: [&str; 4] =
    ["/dev/disk/by-id/", "/dev/disk/by-partuuid/", "/dev/disk/by-path/", "/dev/mapper/"];

/// What `device_config` asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    /// Every device that an entry of this directory leads to.
    location: Option<PathBuf>,
    /// Devices by their identities, or by links that do not change.
    devices: Vec<String>,
}

/// A device that is chosen.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub(super) device: BlockDevice,
    pub(super) identity: Identity,
    /// The entry of the directory that leads to it.
    pub(super) link: Option<PathBuf>,
    /// Another device that has the same identity.
    pub(super) twin: Option<String>,
}

impl Choice {
    /// Reads it.
    ///
    /// # Errors
    /// 94: nothing is asked for; 225, 91: a name that cannot be used.
    pub(super) fn of(config: &Config) -> Result<Self, ApiError> {
        let text = |key: &str| config.get(key).map(|value| value.trim()).filter(|value| !value.is_empty());
        let location = text("location").map(PathBuf::from);
        if let Some(location) = location.as_ref().filter(|location| !location.is_absolute()) {
            let text = format!("location '{}' is no absolute path", location.display());
            return Err(errors::fail(225, text));
        }
        let devices: Vec<String> = text("devices")
            .into_iter()
            .flat_map(|all| all.split(','))
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect();
        if devices.len() > DEVICES_MAX {
            return Err(errors::fail(91, format_args!("{} devices: at most {DEVICES_MAX}", devices.len())));
        }
        if location.is_none() && devices.is_empty() {
            return Err(errors::fail(
                94,
                "device_config:location or device_config:devices names the devices",
            ));
        }
        if let Some(name) = devices.iter().find(|name| is_passing(name)) {
            let text = format!(
                "'{name}' may be another device after the next start: name it by its identity, which sr-probe lists, or \
                 by a link of /dev/disk/by-id"
            );
            return Err(errors::fail(91, text));
        }
        Ok(Self { location, devices })
    }

    /// The devices that are there.
    ///
    /// # Errors
    /// 47: the directory cannot be read. One that is not there has no devices: udev makes it with the first.
    pub(super) fn find(&self, host: &Host) -> Result<Vec<Chosen>, ApiError> {
        let mut found: Vec<Chosen> = Vec::new();
        let mut add = |device: BlockDevice, identity: Identity, link: Option<PathBuf>| match found
            .iter_mut()
            .find(|known| known.identity == identity)
        {
            Some(known) if known.device.numbers == device.numbers => {}
            Some(known) => known.twin = Some(device.name),
            None => found.push(Chosen { device, identity, link, twin: None }),
        };
        if let Some(location) = &self.location {
            for link in entries(location)? {
                if let Ok(device) = host.at(&link)
                    && is_disk(&device)
                {
                    let identity = identity(host, &device);
                    add(device, identity, Some(link));
                }
            }
        }
        if !self.devices.is_empty() {
            for device in host.all().into_iter().filter(is_disk) {
                let identity = identity(host, &device);
                let is_named = |name: &String| *name == identity.as_str() || is_linked(host, &device, name);
                if self.devices.iter().any(is_named) {
                    add(device, identity, None);
                }
            }
        }
        Ok(found)
    }
}

/// Whether a path names a device by something that does not last.
fn is_passing(name: &str) -> bool {
    let is_path = name.starts_with('/') || !name.contains('-');
    is_path && !STABLE.iter().any(|directory| name.starts_with(directory))
}

/// Whether there is something to offer.
fn is_disk(device: &BlockDevice) -> bool {
    device.size > 0 && device.kind != Kind::Memory
}

/// Whether the path leads to the device.
fn is_linked(host: &Host, device: &BlockDevice, path: &str) -> bool {
    path.starts_with('/') && host.at(&host.path(path)).is_ok_and(|there| there.numbers == device.numbers)
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, ApiError> {
    let fail = |error| errors::io(47, "cannot read the directory of devices", directory, &error);
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(fail)?,
    };
    let mut links = Vec::new();
    for entry in entries {
        links.push(entry.map_err(fail)?.path());
    }
    links.sort();
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(pairs: &[(&str, &str)]) -> Result<Choice, ApiError> {
        Choice::of(&pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn names_that_pass_are_refused_with_the_next_step() {
        assert_eq!(choice(&[]).unwrap_err().code, "SR_BACKEND_FAILURE_94");
        assert_eq!(choice(&[("location", "dev")]).unwrap_err().code, "SR_BACKEND_FAILURE_225");
        for bad in ["/dev/sdb", "sdb", "/dev/disk/by-uuid/1,", "serial-a,/dev/md0"] {
            let error = choice(&[("devices", bad)]).unwrap_err();
            assert!(error.params[1].contains("sr-probe lists"), "{error}");
        }
        let good = choice(&[("devices", "serial-a, /dev/disk/by-id/x,partuuid-1")]).unwrap();
        assert_eq!(good.devices.len(), 3);
    }
}
