//! Which plugins lie in the directories.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_types::ApiError;
use uuid::Uuid;

use super::{About, Plugin, Protocol, trusted, v1, v3};
use crate::traits::{Ctx, LiveDisk, SrDriver};

/// Plugins of one protocol that are looked at.
const PLUGINS_MAX: usize = 64;
/// How long a plugin that did not answer is left alone, unless its files change.
const AGAIN: Duration = Duration::from_secs(30);
/// The longest a plugin may take to say what it is.
const QUERY_MAX: Duration = Duration::from_secs(30);

/// Where plugins are looked for, and what each gets.
#[derive(Clone, Debug)]
pub struct Places {
    /// `volume` and `datapath` lie below it: `/usr/libexec/xapi-storage-script`.
    pub scripts: Option<PathBuf>,
    /// Programs of version 1: `/opt/xensource/sm`.
    pub programs: Option<PathBuf>,
    /// Notes about disks that wait are below it.
    pub run_dir: PathBuf,
    /// Where the toolstack's API is served.
    pub socket: Option<PathBuf>,
    /// How long a call may take.
    pub limit: Duration,
}

/// Files as they were at a look: they changed if these did.
type Mark = Vec<(u64, i64, i64, u64)>;

#[derive(Debug)]
struct Seen {
    mark: Mark,
    at: Instant,
    plugin: Option<Arc<Plugin>>,
}

/// Plugins as they were at the last look.
#[derive(Debug)]
pub struct Discovery {
    places: Places,
    seen: BTreeMap<PathBuf, Seen>,
    /// Places that were complained about, each once.
    refused: BTreeSet<PathBuf>,
}

/// A look has no caller that cancels, no SR and no disk.
struct Looking;

impl Ctx for Looking {
    fn is_cancelled(&self) -> bool {
        false
    }
    fn progress(&self, _: f64) {}
    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        None
    }
    fn step(&self, _: &'static str) {}
}

fn mark_of(data: &Metadata) -> (u64, i64, i64, u64) {
    (data.ino(), data.ctime(), data.ctime_nsec(), data.len())
}

impl Discovery {
    /// None is known yet.
    pub fn new(places: Places) -> Self {
        Self { places, seen: BTreeMap::new(), refused: BTreeSet::new() }
    }

    /// Looks once: plugins that are new, or whose files changed, are asked what they are, all at the same time. The
    /// drivers of all that answered; none where nothing changed. Takes at most as long as the slowest of them.
    pub fn look(&mut self) -> Option<Vec<Arc<dyn SrDriver>>> {
        let found = self.candidates();
        let gone: Vec<PathBuf> =
            self.seen.keys().filter(|path| !found.contains_key(*path)).cloned().collect();
        let mut has_changed = false;
        for path in gone {
            has_changed |= self.seen.remove(&path).is_some_and(|seen| seen.plugin.is_some());
            tracing::info!("the storage plugin {} is gone", path.display());
        }
        let is_due = |path: &PathBuf, mark: &Mark| match self.seen.get(path) {
            None => true,
            Some(seen) => seen.mark != *mark || (seen.plugin.is_none() && seen.at.elapsed() >= AGAIN),
        };
        let due: Vec<(PathBuf, (Protocol, Mark))> =
            found.into_iter().filter(|(path, (_, mark))| is_due(path, mark)).collect();
        let places = &self.places;
        let asked: Vec<(PathBuf, Mark, Result<Plugin, ApiError>)> = std::thread::scope(|scope| {
            let ask = |(path, (protocol, mark)): (PathBuf, (Protocol, Mark))| {
                scope.spawn(move || {
                    let plugin = ask(places, protocol, &path);
                    (path, mark, plugin)
                })
            };
            let asking: Vec<_> = due.into_iter().map(ask).collect();
            // A defect in one of them leaves it out.
            asking.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        for (path, mark, answer) in asked {
            let before = self.seen.remove(&path);
            let is_known = before.as_ref().is_some_and(|before| before.mark == mark);
            let plugin = match answer {
                Ok(plugin) => Some(Arc::new(plugin)),
                Err(error) => {
                    if !is_known {
                        tracing::warn!("the storage plugin {} is not used: {error}", path.display());
                    }
                    None
                }
            };
            has_changed |= before.and_then(|before| before.plugin) != plugin;
            self.seen.insert(path, Seen { mark, at: Instant::now(), plugin });
        }
        has_changed.then(|| self.drivers())
    }

    fn drivers(&self) -> Vec<Arc<dyn SrDriver>> {
        let plugins = self.seen.values().filter_map(|seen| seen.plugin.as_ref());
        plugins.map(Plugin::driver).collect()
    }

    /// What lies there, with the marks of the files that say what it is.
    fn candidates(&mut self) -> BTreeMap<PathBuf, (Protocol, Mark)> {
        let mut found = BTreeMap::new();
        let scripts = self.places.scripts.as_ref().map(|root| root.join("volume"));
        for path in scripts.map(|dir| self.entries(&dir)).unwrap_or_default() {
            let query = path.join("Plugin.Query");
            let marks = [&path, &query].map(|path| fs::metadata(path).map(|data| mark_of(&data)));
            if let [Ok(dir), Ok(query)] = marks {
                found.insert(path, (Protocol::Smapiv3, vec![dir, query]));
            }
        }
        let programs = self.places.programs.clone();
        for path in programs.map(|dir| self.entries(&dir)).unwrap_or_default() {
            let is_named = path.file_name().and_then(|name| name.to_str()).and_then(v1::type_of).is_some();
            let data = fs::metadata(&path)
                .ok()
                .filter(|data| is_named && data.is_file() && data.mode() & 0o111 != 0);
            if let Some(data) = data {
                found.insert(path, (Protocol::Smapiv1, vec![mark_of(&data)]));
            }
        }
        found
    }

    /// Paths in a directory of plugins; none where it is not there, or others could put some into it.
    fn entries(&mut self, dir: &Path) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
        if let Err(why) = trusted::directory(dir) {
            if self.refused.insert(dir.to_path_buf()) {
                tracing::error!("storage plugins in {} are not used: {why}", dir.display());
            }
            return Vec::new();
        }
        self.refused.remove(dir);
        let is_hidden = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_none_or(|name| name.starts_with('.'))
        };
        let mut paths: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(|path| !is_hidden(path)).collect();
        paths.sort();
        // Programs lie among the modules that they are made of.
        paths.retain(|path| path.is_dir() || path.to_string_lossy().ends_with("SR"));
        paths.truncate(PLUGINS_MAX);
        paths
    }
}

fn ask(places: &Places, protocol: Protocol, path: &Path) -> Result<Plugin, ApiError> {
    let limit = places.limit.min(QUERY_MAX);
    let about: About = match protocol {
        Protocol::Smapiv1 => v1::about(&Looking, path, limit)?,
        Protocol::Smapiv3 => v3::about(&Looking, path, limit)?,
    };
    tracing::info!("found the storage plugin {}: type '{}'", path.display(), about.sr_type);
    Ok(Plugin {
        protocol,
        path: path.to_path_buf(),
        datapaths: places.scripts.as_ref().map(|root| root.join("datapath")).unwrap_or_default(),
        socket: places.socket.clone(),
        run_dir: places.run_dir.clone(),
        limit_s: places.limit.as_secs(),
        about,
    })
}
