//! Plugins of version 1: a program for each type of SR that speaks XML-RPC, as `/opt/xensource/sm/NAMESR`.
//!
//! Such a plugin keeps the records of its VDIs itself: it calls the toolstack's API with the session that it is given.

mod calls;
mod sr;
pub mod xml;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tapio_types::ApiError;
use uuid::Uuid;

use self::calls::Program;
use self::sr::PluginSr;
use self::xml::Value;
use super::{About, LONG, Plugin, is_type};
use crate::errors;
use crate::traits::{Config, Ctx, DriverInfo, Origin, ProbeAnswer, Sr, SrDriver};

/// End of the names of programs that are plugins.
const SUFFIX: &str = "SR";

/// The type of SR of a program's name: `EXTSR` is `ext`.
pub(super) fn type_of(name: &str) -> Option<String> {
    let stem = name.strip_suffix(SUFFIX)?.to_ascii_lowercase();
    is_type(&stem).then_some(stem)
}

/// Asks a plugin what it is.
///
/// # Errors
/// The plugin's; a sentence: it answers something else.
pub(super) fn about(ctx: &dyn Ctx, path: &Path, limit: Duration) -> Result<About, ApiError> {
    let wrong =
        |why: &str| errors::fail(202, format_args!("sr_get_driver_info of {}: {why}", path.display()));
    let name = path.file_name().and_then(|name| name.to_str()).and_then(type_of);
    let sr_type = name.ok_or_else(|| wrong("its name is that of no type of SR"))?;
    let program = Program { path: path.to_path_buf(), limit, socket: None };
    let info = program.call(ctx, "sr_get_driver_info", &calls::About::default())?;
    if !matches!(info, Value::Struct(_)) {
        return Err(wrong("it answered no structure"));
    }
    let text = |name: &str| super::v3::wire::bounded(info.text_of(name).unwrap_or_default());
    let array = |name: &str| match info.get(name) {
        Some(Value::Array(items)) => items.iter().take(100).collect::<Vec<_>>(),
        _ => Vec::new(),
    };
    let mut capabilities: Vec<String> = array("capabilities")
        .into_iter()
        .filter_map(|word| Some(super::v3::wire::bounded(word.as_text()?)))
        // Nothing here begins a VM with a copy of such a disk, or keeps a cache of one.
        .filter(|word| !matches!(word.split('/').next(), Some("VDI_RESET_ON_BOOT" | "SR_CACHING")))
        .collect();
    if !capabilities.iter().any(|word| word == "SR_SCAN") {
        capabilities.push("SR_SCAN".to_owned());
    }
    let configuration = array("configuration");
    let pair = |of: &Value| Some((of.text_of("key")?.to_owned(), of.text_of("description")?.to_owned()));
    Ok(About {
        sr_type,
        name: text("name"),
        description: text("description"),
        vendor: text("vendor"),
        copyright: text("copyright"),
        version: text("driver_version"),
        required_api_version: text("required_api_version"),
        capabilities,
        configuration: configuration.into_iter().filter_map(pair).collect(),
    })
}

/// A plugin as a driver.
pub(super) struct Programs {
    plugin: Arc<Plugin>,
    info: &'static DriverInfo,
    origin: &'static Origin,
    program: Program,
}

impl Programs {
    pub(super) fn new(plugin: Arc<Plugin>) -> Self {
        let (info, origin) = plugin.records();
        let (path, limit, socket) = (plugin.path.clone(), plugin.limit(), plugin.socket.clone());
        Self { plugin, info, origin, program: Program { path, limit, socket } }
    }
}

impl SrDriver for Programs {
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
        let more = vec![("sr_sm_config", Value::texts::<String, String>([]))];
        let about = calls::About { config: Some(config), more, ..calls::About::default() };
        let limit = self.program.limit * LONG;
        let answer = self.program.call_within(ctx, "sr_probe", &about, limit)?;
        let xml = answer.as_text().unwrap_or_default().to_owned();
        Ok(ProbeAnswer { xml, results: Vec::new() })
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, size: u64) -> Result<(), ApiError> {
        let args = vec![size.to_string()];
        let about = calls::About { config: Some(config), sr: Some(sr), args, ..calls::About::default() };
        self.program.call_within(ctx, "sr_create", &about, self.program.limit * LONG).map(drop)
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let about = calls::About { config: Some(config), sr: Some(sr), ..calls::About::default() };
        self.program.call_within(ctx, "sr_attach", &about, self.program.limit * LONG)?;
        ctx.step("sr-attach:mounted");
        let begun = PluginSr::new(Arc::clone(&self.plugin), self.program.clone(), sr, config.clone());
        begun.begin(ctx);
        Ok(Box::new(begun))
    }
}

#[cfg(test)]
mod tests {
    use super::type_of;

    #[test]
    fn programs_are_named_after_their_type() {
        assert_eq!(type_of("EXTSR").as_deref(), Some("ext"));
        assert_eq!(type_of("LVMoISCSISR").as_deref(), Some("lvmoiscsi"));
        for odd in ["SR", "EXTSR.py", "ext", "../xSR", "a bSR"] {
            assert_eq!(type_of(odd), None, "{odd}");
        }
    }
}
