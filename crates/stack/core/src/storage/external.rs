//! Drivers of others come and go while the daemon runs; their `SM` records follow.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_sm::SrDriver;
use tapio_sm::external::discovery::{Discovery, Places};

use super::Storage;

/// How often the directories of plugins are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long an SR whose type is not known waits for the first look at a start.
const FIRST_LOOK: Duration = Duration::from_secs(60);

/// Makes a plugin's driver work in processes of its own.
pub type Wrap = Box<dyn Fn(Vec<Arc<dyn SrDriver>>) -> Vec<Arc<dyn SrDriver>> + Send>;

/// Whether plugins are looked for, and were.
#[derive(Debug, Default)]
pub(super) struct Looks {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_looking: bool,
    has_looked: bool,
    /// Types that are a plugin's.
    types: BTreeSet<&'static str>,
    /// Types of plugins that another driver has, each told once.
    told: BTreeSet<String>,
}

impl Storage {
    /// Looks for plugins from now on, in a thread. Comes before [`super::open()`].
    ///
    /// # Errors
    /// There is no thread.
    pub fn look_for_plugins(self: &Arc<Self>, places: Places, wrap: Wrap) -> std::io::Result<()> {
        self.looks.state.lock().is_looking = true;
        let storage = Arc::downgrade(self);
        let mut discovery = Discovery::new(places);
        let looking = move || {
            loop {
                let found = discovery.look();
                let Some(storage) = storage.upgrade() else { return };
                let is_first = !storage.looks.state.lock().has_looked;
                if let Some(found) = found.or_else(|| is_first.then(Vec::new)) {
                    storage.set_plugins(wrap(found));
                }
                drop(storage);
                std::thread::sleep(LOOK_EVERY);
            }
        };
        std::thread::Builder::new().name("plugins".to_owned()).spawn(looking).map(drop)
    }

    /// The plugins are these, and no others.
    fn set_plugins(&self, found: Vec<Arc<dyn SrDriver>>) {
        {
            let mut state = self.looks.state.lock();
            let mut drivers = self.drivers.write();
            drivers.retain(|driver| !state.types.contains(driver.info().sr_type));
            state.types.clear();
            for driver in found {
                let sr_type = driver.info().sr_type;
                if drivers.iter().any(|known| known.info().sr_type == sr_type) {
                    let file = driver.origin().map_or_else(String::new, |origin| origin.file.clone());
                    if state.told.insert(file.clone()) {
                        tracing::info!(
                            "type '{sr_type}' has a driver already: the plugin {file} is not used"
                        );
                    }
                    continue;
                }
                state.types.insert(sr_type);
                drivers.push(driver);
            }
            state.has_looked = true;
        }
        if let Err(error) = self.record_drivers() {
            tracing::error!(%error, "the SM records do not say which plugins there are");
        }
        self.looks.changed.notify_all();
    }

    /// Waits for the first look, if one is going on; whether there was something to wait for.
    pub(super) fn await_plugins(&self) -> bool {
        let until = Instant::now() + FIRST_LOOK;
        let mut state = self.looks.state.lock();
        let waits = state.is_looking && !state.has_looked;
        while state.is_looking && !state.has_looked {
            if self.looks.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        waits
    }

    /// Whether all drivers are known.
    pub(super) fn knows_plugins(&self) -> bool {
        let state = self.looks.state.lock();
        !state.is_looking || state.has_looked
    }
}
