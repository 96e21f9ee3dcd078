//! Plugins of version 3: a directory of scripts that speak JSON (xapi-storage-script's `volume` and `datapath`).

mod datapath;
mod scripts;
mod sr;
pub mod wire;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_types::ApiError;
use uuid::Uuid;

use self::scripts::{Nothing, Scripts};
use self::sr::VolumeSr;
use self::wire::{Found, Query, Stat, bounded};
use super::{About, Plugin, is_type};
use crate::errors;
use crate::probe::{SrEntry, sr_list};
use crate::traits::{Config, Ctx, DriverInfo, NewSr, Origin, ProbeAnswer, ProbeResult, Sr, SrDriver, SrStat};

/// Methods that a plugin has, and the capability that each is. Those of the data's way are always there.
const CAPABILITIES: [(&str, &str); 13] = [
    ("SR.attach", "SR_ATTACH"),
    ("SR.detach", "SR_DETACH"),
    ("SR.create", "SR_CREATE"),
    ("SR.destroy", "SR_DELETE"),
    ("SR.ls", "SR_SCAN"),
    ("SR.stat", "SR_UPDATE"),
    ("SR.probe", "SR_PROBE"),
    ("Volume.create", "VDI_CREATE"),
    ("Volume.destroy", "VDI_DELETE"),
    ("Volume.clone", "VDI_CLONE"),
    ("Volume.snapshot", "VDI_SNAPSHOT"),
    ("Volume.resize", "VDI_RESIZE"),
    ("Volume.stat", "VDI_UPDATE"),
];

/// Asks a plugin what it is.
///
/// # Errors
/// The script's; a sentence: its version of the protocol, or its name, is none that is known.
pub(super) fn about(ctx: &dyn Ctx, dir: &Path, limit: Duration) -> Result<About, ApiError> {
    let scripts = Scripts::new(dir.to_path_buf(), limit);
    let query: Query = scripts.call(ctx, "Plugin.Query", &[])?;
    let refused =
        |why: String| Err(errors::fail(202, format_args!("Plugin.Query of {}: {why}", dir.display())));
    let major = query.required_api_version.split('.').next().unwrap_or_default();
    if major != "5" {
        let version = bounded(&query.required_api_version);
        return refused(format!("it needs version '{version}' of the interface, and 5.0 is spoken here"));
    }
    if !is_type(&query.plugin) {
        return refused(format!("'{}' cannot be the name of a type of SR", bounded(&query.plugin)));
    }
    let mut capabilities: Vec<String> = Vec::new();
    let mut add = |capability: &str| {
        if !capabilities.iter().any(|known| known == capability) {
            capabilities.push(capability.to_owned());
        }
    };
    for feature in query.features.iter().take(100) {
        let feature = bounded(feature);
        add(if feature == "VDI_DESTROY" { "VDI_DELETE" } else { &feature });
    }
    for (method, capability) in CAPABILITIES {
        if scripts.has(method) {
            add(capability);
        }
    }
    ["VDI_ATTACH", "VDI_DETACH", "VDI_ACTIVATE", "VDI_DEACTIVATE", "VDI_INTRODUCE"]
        .iter()
        .for_each(|one| add(one));
    // Nothing here begins a VM with a copy of such a disk.
    capabilities.retain(|known| known.split('/').next() != Some("VDI_RESET_ON_BOOT"));
    let configuration = query.configuration.iter().take(100);
    Ok(About {
        sr_type: query.plugin.clone(),
        name: bounded(&query.name),
        description: bounded(&query.description),
        vendor: bounded(&query.vendor),
        copyright: bounded(&query.copyright),
        version: bounded(&query.version),
        required_api_version: bounded(&query.required_api_version),
        capabilities,
        configuration: configuration.map(|(key, text)| (bounded(key), bounded(text))).collect(),
    })
}

/// A plugin as a driver.
pub(super) struct Volumes {
    plugin: Arc<Plugin>,
    info: &'static DriverInfo,
    origin: &'static Origin,
    scripts: Scripts,
}

impl Volumes {
    pub(super) fn new(plugin: Arc<Plugin>) -> Self {
        let (info, origin) = plugin.records();
        let scripts = Scripts::new(plugin.path.clone(), plugin.limit());
        Self { plugin, info, origin, scripts }
    }

    fn long(&self) -> Duration {
        self.plugin.limit() * super::LONG
    }
}

impl SrDriver for Volumes {
    fn info(&self) -> &'static DriverInfo {
        self.info
    }

    fn key(&self) -> String {
        self.plugin.key()
    }

    fn origin(&self) -> Option<&'static Origin> {
        Some(self.origin)
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let args = [("configuration", json!(config))];
        let found: Vec<Found> = self.scripts.call_within(ctx, "SR.probe", &args, self.long())?;
        let mut answer = ProbeAnswer::default();
        let mut entries = Vec::new();
        for found in found.into_iter().take(10_000) {
            let named = found.configuration.get("sr_uuid").cloned();
            let sr = found.sr.as_ref().and_then(|stat| {
                let uuid = stat.uuid.clone().or(named).and_then(|uuid| Uuid::parse_str(&uuid).ok())?;
                Some((uuid, stat.sizes()))
            });
            entries.extend(sr.map(|(uuid, stat): (Uuid, SrStat)| SrEntry {
                uuid,
                devices: None,
                size: Some(stat.physical_size),
            }));
            let (complete, extra_info) = (found.complete, found.extra_info);
            answer.results.push(ProbeResult { configuration: found.configuration, complete, sr, extra_info });
        }
        answer.xml = sr_list(&entries);
        Ok(answer)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, size: u64) -> Result<(), ApiError> {
        self.make(ctx, sr, &NewSr { config: config.clone(), size, ..NewSr::default() }).map(drop)
    }

    fn make(&self, ctx: &dyn Ctx, sr: Uuid, new: &NewSr) -> Result<Option<Config>, ApiError> {
        let args = [
            ("uuid", Value::from(sr.to_string())),
            ("configuration", json!(new.config)),
            ("name", Value::from(new.name_label.as_str())),
            ("description", Value::from(new.name_description.as_str())),
        ];
        let answer: Value = self.scripts.call_within(ctx, "SR.create", &args, self.long())?;
        let Value::Object(fields) = answer else { return Ok(None) };
        // Texts alone: a PBD keeps nothing else.
        let texts = fields.into_iter().filter_map(|(key, value)| Some((key, value.as_str()?.to_owned())));
        Ok(Some(texts.collect()))
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let mut config = config.clone();
        config.entry("sr_uuid".to_owned()).or_insert_with(|| sr.to_string());
        let args = [("configuration", json!(config))];
        let handle: String = self.scripts.call_within(ctx, "SR.attach", &args, self.long())?;
        if handle.len() > 64 << 10 {
            return Err(errors::fail(
                47,
                "SR.attach answered a name of more than 64 KiB: ask the plugin's vendor",
            ));
        }
        ctx.step("sr-attach:mounted");
        let begun = VolumeSr::new(Arc::clone(&self.plugin), self.scripts.clone(), sr, handle.clone());
        match begun.begin(ctx) {
            Ok(()) => Ok(Box::new(begun)),
            Err(error) => {
                let detached = self.scripts.call::<Nothing>(ctx, "SR.detach", &[("sr", Value::from(handle))]);
                if let Err(error) = detached {
                    tracing::warn!(%sr, %error, "it stays attached in the plugin");
                }
                Err(error)
            }
        }
    }
}

/// What an SR says of itself.
fn stat(ctx: &dyn Ctx, scripts: &Scripts, handle: &str) -> Result<Stat, ApiError> {
    scripts.call(ctx, "SR.stat", &[("sr", Value::from(handle))])
}
