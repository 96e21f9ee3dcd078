//! New images, and notes beside images, that a killed process left unfinished.
//!
//! An image is made under a name that says whose it is, `.vhd-PID-NUMBER.partial`, with its writer's lock held until it
//! has its own name. Such a file is orphaned when no process has the number here, no process anywhere has
//! the lock, and nothing was written for a while: on a storage of several hosts the number may be another host's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_ring::uring::WriterLock;
use tapio_sys::process::exists;

use crate::continuation;

/// For how long nothing must have been written: a storage may know no locks between hosts.
const QUIET: Duration = Duration::from_secs(60);

pub(super) fn name(number: u32) -> String {
    format!(".vhd-{}-{number}.partial", std::process::id())
}

/// The process that made a file of this name.
fn maker(name: &str) -> Option<u32> {
    let (pid, number) = name.strip_prefix(".vhd-")?.strip_suffix(".partial")?.split_once('-')?;
    number.parse::<u32>().ok()?;
    pid.parse().ok().filter(|pid| *pid > 0)
}

/// Removes what killed processes left in `directory`; gives what that was. What cannot be looked at stays.
pub fn remove_orphans(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let is_left =
        |name: &str| continuation::is_unfinished(name) || maker(name).is_some_and(|pid| !exists(pid));
    let mine = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_left));
    mine.map(|entry| entry.path()).filter(|path| is_orphan(path) && fs::remove_file(path).is_ok()).collect()
}

fn is_orphan(path: &Path) -> bool {
    let Ok(facts) = fs::symlink_metadata(path) else { return false };
    let quiet = facts.modified().ok().and_then(|time| time.elapsed().ok()).is_some_and(|time| time >= QUIET);
    facts.is_file() && quiet && File::open(path).is_ok_and(|file| WriterLock::take(&file).is_ok())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::SystemTime;

    use super::*;

    fn put(directory: &Path, name: &str, age: Duration) -> PathBuf {
        let path = directory.join(name);
        let file = File::create(&path).expect("made");
        file.set_modified(SystemTime::now() - age).expect("its time can be set");
        path
    }

    #[test]
    fn what_a_killed_process_left_goes_and_nothing_else() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path();
        // Numbers of processes end below this.
        let dead = (1 << 22) + 7;
        let old = 2 * QUIET;
        let left = put(directory, &format!(".vhd-{dead}-0.partial"), old);
        let note = put(directory, ".disk.vhd.continued.new", old);
        let ready = put(directory, ".disk.vhd.continued.ready.new", old);
        let kept = [
            put(directory, &format!(".vhd-{dead}-1.partial"), Duration::ZERO),
            put(directory, &format!(".vhd-{}-0.partial", std::process::id()), old),
            put(directory, &format!(".vhd-{dead}-x.partial"), old),
            put(directory, &format!("vhd-{dead}-0.partial"), old),
            put(directory, "disk.vhd", old),
            put(directory, ".disk.vhd.continued", old),
            put(directory, ".disk.vhd.continued.ready", old),
            put(directory, "new.continued.new", old),
            put(directory, ".other.vhd.continued.new", Duration::ZERO),
        ];
        let locked = put(directory, &format!(".vhd-{dead}-2.partial"), old);
        let file = File::open(&locked).expect("opened");
        let lock = WriterLock::take(&file).expect("free");
        let removed: BTreeSet<PathBuf> = remove_orphans(directory).into_iter().collect();
        assert_eq!(removed, BTreeSet::from([left, note, ready]));
        assert!(kept.iter().all(|path| path.exists()) && locked.exists());
        drop(lock);
        assert_eq!(remove_orphans(directory), [locked]);
        assert!(remove_orphans(Path::new("/no/such/directory")).is_empty());
    }
}
