//! What is kept of histories on disk: a file each below `STATE_DIR/history`, replaced as a whole at intervals and at
//! the end of the daemon. After a kill the time since the last interval is missing.
//!
//! A file that is damaged is put aside with one line in the log, and its history begins anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_history::{History, file};
use uuid::Uuid;

use super::{Histories, Owner};

/// Time between two writes.
const EVERY: Duration = Duration::from_secs(300);

/// The same in seconds, for tests.
const EVERY_VARIABLE: &str = "TAPIO_HISTORY_SAVE_S";

/// How often the thread looks whether the daemon ends.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Longest file that is read: four functions of as many sources as a history has.
const FILE_LEN_MAX: u64 = 256 << 20;

const ENDING: &str = "rrd";
const FRESH: &str = "new";
const ASIDE: &str = "damaged";

/// When each history was last updated that is in its file.
pub(super) type Written = BTreeMap<Owner, u64>;

/// The owner of a file, by its name without the ending.
fn owner(stem: &str) -> Option<Owner> {
    let of = |start| stem.strip_prefix(start).and_then(|text| Uuid::parse_str(text).ok());
    match stem {
        "host" => Some(Owner::Host),
        _ => of("vm-").map(Owner::Vm).or_else(|| of("sr-").map(Owner::Sr)),
    }
}

fn read(path: &Path) -> Result<History, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(FILE_LEN_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > FILE_LEN_MAX {
        return Err(format!("it has more than {FILE_LEN_MAX} bytes"));
    }
    file::decode(&bytes).map_err(|damaged| damaged.to_string())
}

fn write(dir: &Path, owner: Owner, bytes: &[u8]) -> io::Result<()> {
    let path = dir.join(format!("{owner}.{ENDING}"));
    let fresh = path.with_extension(FRESH);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(bytes)?;
    // Without it a power cut could leave the new name with no bytes behind it.
    file.sync_data()?;
    fs::rename(&fresh, &path)
}

/// Reads the histories that an earlier daemon left. Files of objects that are gone are removed.
pub(super) fn load(histories: &Histories) {
    let entries = match fs::read_dir(&histories.dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => {
            let dir = histories.dir.display();
            tracing::warn!("{dir}: {error}; histories begin anew");
            return;
        }
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).and_then(owner);
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let is_here = stem.is_some_and(|owner| owner.object(&histories.db).is_some());
        match (stem, ending) {
            (Some(owner), ENDING) if is_here => take(histories, owner, &path),
            (Some(_), ASIDE) if is_here => {}
            (Some(_), ENDING | ASIDE | FRESH) => remove(&path),
            _ => tracing::debug!("{}: no file of a history", path.display()),
        }
    }
    histories.forget_sums();
}

fn take(histories: &Histories, owner: Owner, path: &Path) {
    let found = read(path).and_then(|history| match history.layout().step_s() == histories.layout.step_s() {
        true => Ok(history),
        false => Err(format!("its steps have {} seconds", history.layout().step_s())),
    });
    match found {
        Ok(history) => {
            let updated_ms = history.updated_ms();
            // In this order: a file that is noted without a history would be removed.
            histories.all.lock().insert(owner, Arc::new(Mutex::new(history)));
            histories.writing.lock().insert(owner, updated_ms);
        }
        Err(why) => {
            let aside = path.with_extension(ASIDE);
            let kept = match fs::rename(path, &aside) {
                Ok(()) => format!("the file is kept as {}", aside.display()),
                Err(error) => format!("the file cannot be renamed: {error}"),
            };
            tracing::warn!("{}: {why}; this history begins anew, {kept}", path.display());
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!("{}: {error}", path.display());
    }
}

impl Histories {
    /// Writes the histories that changed since they were last written, and removes files of objects that are gone. The
    /// daemon calls it at its end.
    pub fn save(&self) {
        let mut written = self.writing.lock();
        if let Err(error) = self.save_changed(&mut written) {
            tracing::warn!("{}: {error}; histories are kept in memory alone", self.dir.display());
        }
    }

    fn save_changed(&self, written: &mut Written) -> io::Result<()> {
        let all = self.list();
        if !self.dir.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        }
        let here: BTreeSet<Owner> = all.iter().map(|(owner, _)| *owner).collect();
        let gone: Vec<Owner> = written.keys().filter(|owner| !here.contains(owner)).copied().collect();
        for owner in gone {
            for ending in [ENDING, ASIDE] {
                remove(&self.dir.join(format!("{owner}.{ending}")));
            }
            written.remove(&owner);
        }
        for (owner, history) in all {
            let (bytes, updated_ms) = {
                let history = history.lock();
                if written.get(&owner) == Some(&history.updated_ms()) {
                    continue;
                }
                (file::encode(&history), history.updated_ms())
            };
            write(&self.dir, owner, &bytes)?;
            written.insert(owner, updated_ms);
        }
        File::open(&self.dir)?.sync_all()
    }
}

/// Starts the thread that writes.
pub(super) fn start(histories: &Arc<Histories>) {
    let seconds = std::env::var(EVERY_VARIABLE).ok().and_then(|text| text.parse().ok());
    let every = seconds.map_or(EVERY, |seconds: u64| Duration::from_secs(seconds.max(1)));
    let weak = Arc::downgrade(histories);
    let spawned = std::thread::Builder::new().name("history-files".into()).spawn(move || {
        let mut last = Instant::now();
        loop {
            std::thread::sleep(LOOK_EVERY.min(every));
            let Some(histories) = weak.upgrade() else { return };
            if last.elapsed() >= every {
                histories.save();
                last = Instant::now();
            }
        }
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread writes histories: they are lost if the daemon is killed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_after_their_owners() {
        let uuid = Uuid::from_u128(7);
        for kind in [Owner::Host, Owner::Vm(uuid), Owner::Sr(uuid)] {
            assert_eq!(owner(&kind.to_string()), Some(kind));
        }
        for other in ["", "vm-", "vm-../host", "hosts", "pool-00000000-0000-0000-0000-000000000007"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }
}
