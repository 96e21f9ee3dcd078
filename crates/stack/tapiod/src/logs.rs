//! What the daemon says about itself: lines on standard error, which a service manager keeps, or `log_files` does.

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, reload};

type SetLevel = Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>;

static SET_LEVEL: OnceLock<SetLevel> = OnceLock::new();

fn filter(level: &str) -> Result<EnvFilter, String> {
    EnvFilter::builder().parse(level).map_err(|error| format!("'{level}': {error}"))
}

/// Whether this is a level.
///
/// # Errors
/// A sentence with what is wrong.
pub fn check(level: &str) -> Result<(), String> {
    filter(level).map(drop)
}

/// From now on there is a log. A service manager puts the time to each line itself.
///
/// # Errors
/// The level is none.
pub fn start(level: &str) -> Result<(), String> {
    let (filter, handle) = reload::Layer::new(filter(level)?);
    let set: SetLevel = Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()));
    // Another log was started before: that one stays.
    let _ = SET_LEVEL.set(set);
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let managed = std::env::var_os("JOURNAL_STREAM").is_some();
    let log = tracing_subscriber::registry().with(filter);
    let begun = if managed { log.with(lines.without_time()).try_init() } else { log.with(lines).try_init() };
    begun.map_err(|error| error.to_string())
}

/// From now on this is logged.
///
/// # Errors
/// The level is none.
pub fn set_level(level: &str) -> Result<(), String> {
    SET_LEVEL.get().map_or(Ok(()), |set| set(filter(level)?))
}
