//! Storage over a network that is waited for without an end.

use std::fs;
use std::path::Path;
use std::time::Duration;

use uuid::Uuid;

use super::Finding;
use super::system::{mount_of, text};

/// A limit that is longer is none: clients have given up by then.
const LIMIT_MAX: Duration = Duration::from_secs(3600);

/// Looks at an attached SR with its directory, and at how long an operation on it may be silent, if anything bounds
/// that. Files of the host are below `root`.
pub fn find(root: &Path, (sr, directory): (Uuid, &Path), limit: Option<Duration>) -> Vec<Finding> {
    let mounts = text(&root.join("proc/self/mountinfo")).unwrap_or_default();
    let Ok(real) = fs::canonicalize(directory) else { return Vec::new() };
    let Some(mount) = mount_of(&mounts, &real) else { return Vec::new() };
    // A soft mount has a limit of its own.
    if !mount.is_network() || mount.has("soft") || mount.has("softerr") {
        return Vec::new();
    }
    let mut found = Vec::new();
    if let Some(limit) = limit.filter(|limit| *limit > LIMIT_MAX) {
        let detail = format!("mounted with {}, and storage-timeout is {} s", mount.options, limit.as_secs());
        found.push(Finding::new("network-no-limit", &mount.point, detail).of_sr(sr));
    }
    found.extend(waiting(root, &real).into_iter().map(|(pid, image)| {
        let detail = format!("process {pid} was started with '--request-timeout 0' and has {image}");
        Finding::new("network-no-limit", pid, detail).of_sr(sr)
    }));
    found
}

/// Disk processes with an image below a directory whose requests wait for ever.
fn waiting(root: &Path, directory: &Path) -> Vec<(u32, String)> {
    let processes = fs::read_dir(root.join("proc")).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for process in processes {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(line) = fs::read(process.path().join("cmdline")) else { continue };
        let words: Vec<_> = line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        let is_disk = words.first().is_some_and(|program| {
            Path::new(&**program).file_name().is_some_and(|name| name == "tapio-disk")
        });
        let values = |option: &str| {
            let pairs =
                words.windows(2).filter(move |pair| pair[0] == option).map(|pair| pair[1].to_string());
            pairs.collect::<Vec<_>>()
        };
        if !is_disk || !values("--request-timeout").iter().any(|time| time.trim_start_matches('0').is_empty())
        {
            continue;
        }
        let is_below = |image: &String| {
            image.split_once(':').is_some_and(|(_, path)| Path::new(path).starts_with(directory))
        };
        found.extend(values("--image").into_iter().find(is_below).map(|image| (pid, image)));
    }
    found.sort();
    found
}
