//! Drivers of others: SMAPIv3 scripts and SMAPIv1 programs, as vendors install them.
//!
//! ```text
//!   discovery   which plugins lie in the directories, and what each says of itself
//!   v3  v1      a plugin as an SrDriver and its SRs, by its protocol
//!   source      what a plugin says a disk is, as what a disk process opens
//!   paused      running disks wait while a plugin changes what they have open
//!   script      one program: run, fed, bounded in time and in what it prints     trusted   which files are run
//! ```
//!
//! A plugin is started by the SR's worker, for one call each time; it has no other way into Tapio but what it prints
//! and, in version 1, the API. What it prints is foreign: it is bounded, and nothing of it is a path or a name before
//! it was looked at. Sources: the published interfaces of xapi-storage 5.0 and of XenServer's storage manager.

pub mod discovery;
mod paused;
mod script;
pub mod source;
mod trusted;
mod turn;
pub mod v1;
pub mod v3;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub use crate::traits::Protocol;
use crate::traits::{DriverInfo, Origin, SrDriver};

/// Attaching, scanning, making and probing an SR may take so many times as long as other calls.
const LONG: u32 = 4;
/// Begins the key of a driver that is a plugin.
const KEY: &str = "plugin ";
/// Longest name of a type of SR.
const TYPE_MAX: usize = 64;

/// What a plugin says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// `SR.type`.
    pub sr_type: String,
    /// Name for people.
    pub name: String,
    /// For people.
    pub description: String,
    /// Who made it.
    pub vendor: String,
    /// Whose it is.
    pub copyright: String,
    /// Its version.
    pub version: String,
    /// The version of the protocol that it speaks.
    pub required_api_version: String,
    /// As `VDI_SNAPSHOT`.
    pub capabilities: Vec<String>,
    /// Keys of `device_config` with a sentence on each.
    pub configuration: Vec<(String, String)>,
}

/// A plugin that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plugin {
    /// How it is spoken to.
    pub protocol: Protocol,
    /// Its program, or the directory of its scripts.
    pub path: PathBuf,
    /// Where the scripts of datapath plugins are, a directory for each scheme.
    pub datapaths: PathBuf,
    /// Where the toolstack's API is served.
    pub socket: Option<PathBuf>,
    /// Notes about disks that wait are below it.
    pub run_dir: PathBuf,
    /// Seconds that a call may take.
    pub limit_s: u64,
    /// What it says.
    pub about: About,
}

impl Plugin {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_s.max(1))
    }

    /// What a worker makes the same driver of; see [`of_key`].
    fn key(&self) -> String {
        format!("{KEY}{}", serde_json::to_string(self).unwrap_or_default())
    }

    /// Its `SM` record's contents. They last as long as the process, as those of our own drivers do: a plugin changes
    /// what it says when it is replaced, and then alone is it asked anew.
    fn records(&self) -> (&'static DriverInfo, &'static Origin) {
        type Known = (Plugin, &'static DriverInfo, &'static Origin);
        static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock();
        if let Some((_, info, origin)) = known.iter().find(|(plugin, ..)| plugin == self) {
            return (info, origin);
        }
        let about: &'static About = Box::leak(Box::new(self.about.clone()));
        let capabilities: Vec<&'static str> = about.capabilities.iter().map(String::as_str).collect();
        let configuration: Vec<(&'static str, &'static str)> =
            about.configuration.iter().map(|(key, text)| (key.as_str(), text.as_str())).collect();
        let info: &'static DriverInfo = Box::leak(Box::new(DriverInfo {
            sr_type: &about.sr_type,
            name: &about.name,
            description: &about.description,
            capabilities: capabilities.leak(),
            configuration: configuration.leak(),
            is_shareable: true,
        }));
        let origin: &'static Origin = Box::leak(Box::new(Origin {
            protocol: self.protocol,
            file: self.path.display().to_string(),
            vendor: about.vendor.clone(),
            copyright: about.copyright.clone(),
            version: about.version.clone(),
            required_api_version: about.required_api_version.clone(),
        }));
        known.push((self.clone(), info, origin));
        (info, origin)
    }

    /// The plugin as a driver, which starts its programs from this process.
    pub fn driver(self: &Arc<Self>) -> Arc<dyn SrDriver> {
        match self.protocol {
            Protocol::Smapiv1 => Arc::new(v1::Programs::new(Arc::clone(self))),
            Protocol::Smapiv3 => Arc::new(v3::Volumes::new(Arc::clone(self))),
        }
    }
}

/// The driver of which [`SrDriver::key`] is this, if it is a plugin's.
pub fn of_key(key: &str) -> Option<Arc<dyn SrDriver>> {
    let plugin: Plugin = serde_json::from_str(key.strip_prefix(KEY)?).ok()?;
    Some(Arc::new(plugin).driver())
}

/// Whether a text can be the name of a type of SR.
fn is_type(name: &str) -> bool {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.' | b'+');
    let begins = name.bytes().next().is_some_and(|c| c.is_ascii_alphanumeric());
    begins && name.len() <= TYPE_MAX && name.bytes().all(is_plain)
}

#[cfg(test)]
mod tests;
