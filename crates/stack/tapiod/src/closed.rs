//! What other users can reach of this daemon's directories: earlier versions made some of them more open.
//!
//! A start closes what it finds and says it once; `tapiod --check` says it without a start. Directories of SRs are
//! closed by their drivers, when they are attached.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tapio_control::RunDir;
use tapio_sm::closed::open_in;

use crate::dirs::{OURS, PASSED};
use crate::settings::Settings;

/// A mode of files of the daemon.
const FILE: u32 = 0o600;

/// How deep locks lie below a run directory (`lock/sm/SR/sr`).
const DEPTH_MAX: usize = 4;

/// Something that is more open than it may be.
struct Open {
    path: PathBuf,
    mode: u32,
    may: u32,
}

/// A directory right below the root is the system's, whatever settings say.
fn is_systems(path: &Path) -> bool {
    path.components().count() <= 2
}

fn look(path: &Path, may: u32, found: &mut Vec<Open>) {
    let Ok(data) = fs::symlink_metadata(path) else { return };
    let mode = data.mode() & 0o7777;
    if !data.is_symlink() && mode & !may & 0o077 != 0 {
        found.push(Open { path: path.to_path_buf(), mode, may });
    }
}

/// Plain files, and directories of them. Sockets have modes of their own, and so has what is a guest's.
fn look_below(directory: &Path, guests: &Path, depth: usize, found: &mut Vec<Open>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let (path, kind) = (entry.path(), entry.file_type());
        match kind {
            Ok(kind) if kind.is_dir() && depth > 0 && path != guests => {
                look(&path, PASSED, found);
                look_below(&path, guests, depth - 1, found);
            }
            Ok(kind) if kind.is_file() => look(&path, FILE, found),
            _ => {}
        }
    }
}

/// Whether a directory holds SRs and nothing else: links and mount points that are named by UUIDs.
fn holds_srs_alone(directory: &Path) -> bool {
    let names = fs::read_dir(directory).into_iter().flatten().flatten();
    names.map(|entry| entry.file_name()).all(|name| {
        let name = name.to_str().unwrap_or_default().trim_start_matches('.').trim_end_matches(".link");
        uuid::Uuid::try_parse(name).is_ok()
    })
}

fn find(settings: &Settings) -> Vec<Open> {
    let mut found = Vec::new();
    look(&settings.state_dir, OURS, &mut found);
    let disks = RunDir::from_env();
    let guests = settings.run_dir.join("vm");
    for (directory, mode) in [(settings.run_dir.as_path(), PASSED), (disks.path(), OURS)] {
        if !is_systems(directory) {
            look(directory, mode, &mut found);
            look_below(directory, &guests, DEPTH_MAX, &mut found);
        }
    }
    if holds_srs_alone(&settings.mount_dir) {
        look(&settings.mount_dir, OURS, &mut found);
    }
    // One of them may lie in another.
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found.dedup_by(|a, b| a.path == b.path);
    found
}

/// Closes what is too open.
pub fn close(settings: &Settings) {
    for Open { path, mode, may } in find(settings) {
        let path_text = path.display();
        match tapio_sys::private::close(&path, may) {
            Ok(Some(_)) => tracing::warn!("closed to other users: {path_text} (mode {mode:04o})"),
            // It went meanwhile.
            Ok(None) => {}
            Err(error) => tracing::warn!("other users can reach {path_text} (mode {mode:04o}): {error}"),
        }
    }
}

/// A line for everything that is too open, the directories of SRs included.
pub fn report(settings: &Settings) -> String {
    let mut text = String::new();
    let mut say = |path: &Path, mode: u32, then: &str| {
        text.push_str(&format!("open to other users: {} (mode {mode:04o}): {then}\n", path.display()));
    };
    for open in find(settings) {
        say(&open.path, open.mode, "the next start closes it");
    }
    let mounted = fs::read_dir(&settings.mount_dir).into_iter().flatten().flatten();
    let places = mounted.map(|entry| entry.path()).chain(settings.default_sr.clone());
    let mut places: Vec<PathBuf> = places.filter_map(|path| fs::canonicalize(path).ok()).collect();
    places.sort();
    places.dedup();
    for place in places {
        for open in open_in(&place).unwrap_or_default() {
            let then = match open.is_ours {
                true => "closed when its SR is attached",
                false => "make it root's, and 'chmod go=' it",
            };
            say(&open.path, open.mode, then);
        }
    }
    text
}
