//! Drivers, the `SM` records made from them, and the secrets they get.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, Value};
use tapio_sm::{DriverInfo, Origin, SrDriver};

use super::Storage;
use crate::config::Config;
use crate::db::{Change, Db};

/// Keys of `device_config` whose value is kept as an object of class secret.
const PASSWORDS: &[&str] = &["password", "cephkey", "cifspassword", "chappassword", "incoming_chappassword"];

/// Ends the name of a key whose value is the UUID of a secret.
const SECRET: &str = "_secret";

/// Every driver.
pub(super) fn all(config: &Config) -> Vec<Arc<dyn SrDriver>> {
    tapio_sm::registry_with_state(&config.mount_dir, &config.run_dir, &config.state_dir)
}

impl Storage {
    /// The driver of a type of SR.
    ///
    /// # Errors
    /// `SR_UNKNOWN_DRIVER`.
    pub(super) fn driver(&self, sr_type: &str) -> Result<Arc<dyn SrDriver>, ApiError> {
        let find = || self.drivers.read().iter().find(|driver| driver.info().sr_type == sr_type).cloned();
        let found = find().or_else(|| if self.await_plugins() { find() } else { None });
        found.ok_or_else(|| ApiError::new("SR_UNKNOWN_DRIVER", [sr_type]))
    }

    /// The types of SR that can be made here.
    pub(super) fn types(&self) -> Vec<&'static str> {
        let drivers = self.drivers.read();
        drivers.iter().map(|driver| driver.info().sr_type).collect()
    }

    /// Makes the `SM` records say what the drivers are.
    ///
    /// # Errors
    /// The store's.
    pub(super) fn record_drivers(&self) -> Result<(), ApiError> {
        self.db.change(|change| {
            // In this order: a plugin that is found meanwhile counts as known.
            let knows_plugins = self.knows_plugins();
            let drivers = self.drivers.read().clone();
            let known = change.all("SM");
            for old in &known {
                // A plugin that has not been asked yet keeps the record of before.
                if !knows_plugins && !old.text("driver_filename").is_empty() {
                    continue;
                }
                if !drivers.iter().any(|driver| driver.info().sr_type == old.text("type")) {
                    change.destroy("SM", &old.reference)?;
                }
            }
            for driver in &drivers {
                let fields = fields_of(&**driver);
                match known.iter().find(|old| old.text("type") == driver.info().sr_type) {
                    None => {
                        change.create("SM", &fields)?;
                    }
                    Some(old) => {
                        for (field, value) in fields {
                            if old.get(field) != &value {
                                change.set("SM", &old.reference, field, value)?;
                            }
                        }
                    }
                }
            }
            Ok(())
        })
    }
}

/// Capabilities that clients know as `features`; smapiv1.md.
const FEATURES: &[&str] = &[
    "SR_CREATE",
    "SR_DELETE",
    "SR_ATTACH",
    "SR_DETACH",
    "SR_SCAN",
    "SR_PROBE",
    "SR_UPDATE",
    "SR_SUPPORTS_LOCAL_CACHING",
    "SR_METADATA",
    "SR_TRIM",
    "SR_MULTIPATH",
    "SR_CACHING",
    "SR_STATS",
    "VDI_CREATE",
    "VDI_DELETE",
    "VDI_ATTACH",
    "VDI_DETACH",
    "VDI_MIRROR",
    "VDI_MIRROR_IN",
    "VDI_RESIZE",
    "VDI_RESIZE_ONLINE",
    "VDI_CLONE",
    "VDI_SNAPSHOT",
    "VDI_ACTIVATE",
    "VDI_ACTIVATE_READONLY",
    "VDI_DEACTIVATE",
    "VDI_UPDATE",
    "VDI_INTRODUCE",
    "VDI_GENERATE_CONFIG",
    "VDI_ATTACH_OFFLINE",
    "VDI_RESET_ON_BOOT",
    "VDI_CONFIG_CBT",
    "VDI_COMPOSE",
    "LARGE_VDI",
    "THIN_PROVISIONING",
    "VDI_READ_CACHING",
    "VDI_REVERT",
];

/// The `features` of a driver: names with their versions; words that are no features are left out.
fn features(info: &DriverInfo) -> BTreeMap<String, Value> {
    let each = info.capabilities.iter().map(|capability| match capability.split_once('/') {
        Some((name, version)) => (name, version.parse().unwrap_or(1)),
        None => (*capability, 1),
    });
    each.filter(|(name, _)| FEATURES.contains(name))
        .map(|(name, version)| (name.to_owned(), Value::Int(version)))
        .collect()
}

fn fields_of(driver: &dyn SrDriver) -> Vec<(&'static str, Value)> {
    let (info, origin) = (driver.info(), driver.origin());
    let theirs = |field: fn(&Origin) -> &str, ours: &str| Value::string(origin.map_or(ours, field));
    let names = info.capabilities.iter().map(|capability| capability.split('/').next().unwrap_or(capability));
    vec![
        ("type", Value::string(info.sr_type)),
        ("name_label", Value::string(info.name)),
        ("name_description", Value::string(info.description)),
        ("vendor", theirs(|origin| &origin.vendor, "Tapio")),
        ("copyright", theirs(|origin| &origin.copyright, "MIT or Apache-2.0")),
        ("version", theirs(|origin| &origin.version, env!("CARGO_PKG_VERSION"))),
        ("required_api_version", theirs(|origin| &origin.required_api_version, "1.0")),
        ("configuration", Value::string_map(info.configuration.iter().copied())),
        ("capabilities", Value::strings(names)),
        ("features", Value::Map(features(info))),
        ("driver_filename", theirs(|origin| &origin.file, "")),
    ]
}

/// What a driver gets for a `device_config`: secrets in the place of their names. The answer is never kept or logged.
///
/// # Errors
/// Backend 20: there is no such secret.
pub(super) fn resolved(
    db: &Db,
    config: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, ApiError> {
    let mut known = BTreeMap::new();
    for (key, value) in config {
        let Some(plain) = key.strip_suffix(SECRET) else {
            known.insert(key.clone(), value.clone());
            continue;
        };
        let secret = db.by_uuid("secret", value).map_err(|_| {
            let what = format!(
                "device_config:{key} names the secret '{value}', which is not there: make it with secret-create, \
                 then set the device_config anew"
            );
            ApiError::backend(20, what, "")
        })?;
        known.insert(plain.to_owned(), secret.text("value").to_owned());
    }
    Ok(known)
}

/// What this driver gets for a `device_config`: one that calls the API looks secrets up itself, as the names of them
/// are all that may stand on its command line.
///
/// # Errors
/// Those of [`resolved`].
pub(super) fn given(
    db: &Db,
    driver: &dyn SrDriver,
    config: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, ApiError> {
    match driver.origin() {
        Some(origin) if origin.calls_api() => Ok(config.clone()),
        _ => resolved(db, config),
    }
}

/// The `device_config` of an SR that its driver has changed while it made it: secrets stay what they were.
pub(super) fn amended(
    kept: &BTreeMap<String, String>,
    wanted: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let is_name = |key: &str| key.ends_with(SECRET);
    let secrets: BTreeMap<String, String> =
        kept.iter().filter(|(key, _)| is_name(key)).map(|(key, uuid)| (key.clone(), uuid.clone())).collect();
    let is_secret = |key: &str| is_name(key) || secrets.contains_key(&format!("{key}{SECRET}"));
    let mut all: BTreeMap<String, String> =
        wanted.into_iter().filter(|(key, _)| !is_secret(key) && !PASSWORDS.contains(&key.as_str())).collect();
    all.extend(secrets.clone());
    all
}

/// A `device_config` to be kept: passwords in it become objects of class secret, named by `<key>_secret`.
///
/// # Errors
/// The store's.
pub(super) fn without_passwords(
    change: &mut Change<'_>,
    config: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, ApiError> {
    let mut kept = BTreeMap::new();
    for (key, value) in config {
        if PASSWORDS.contains(&key.as_str()) {
            let reference = change.create("secret", &[("value", Value::string(value))])?;
            kept.insert(format!("{key}{SECRET}"), change.get("secret", &reference)?.text("uuid").to_owned());
        } else {
            kept.insert(key.clone(), value.clone());
        }
    }
    Ok(kept)
}

/// Removes the secrets that a `device_config` names and no other one does.
///
/// # Errors
/// The store's.
pub(super) fn drop_secrets(change: &mut Change<'_>, pbd: &str) -> Result<(), ApiError> {
    let config = change.get("PBD", pbd)?.map("device_config");
    let others: Vec<_> = change.all("PBD").into_iter().filter(|other| other.reference != pbd).collect();
    for (key, uuid) in config.iter().filter(|(key, _)| key.ends_with(SECRET)) {
        let is_password = key.strip_suffix(SECRET).is_some_and(|plain| PASSWORDS.contains(&plain));
        let is_shared =
            others.iter().any(|other| other.map("device_config").values().any(|value| value == uuid));
        let secret = change.all("secret").into_iter().find(|secret| secret.text("uuid") == uuid);
        if let Some(secret) = secret.filter(|_| is_password && !is_shared) {
            change.destroy("secret", &secret.reference)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_versions_and_other_words_are_left_out() {
        static INFO: DriverInfo = DriverInfo {
            sr_type: "t",
            name: "",
            description: "",
            capabilities: &["VDI_CREATE", "VDI_RESET_ON_BOOT/2", "ATOMIC_PAUSE"],
            configuration: &[],
            is_shareable: false,
        };
        let features = features(&INFO);
        assert_eq!(features.get("VDI_RESET_ON_BOOT"), Some(&Value::Int(2)));
        assert_eq!(features.get("VDI_CREATE"), Some(&Value::Int(1)));
        assert_eq!(features.len(), 2);
    }
}
