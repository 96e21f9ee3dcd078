//! Files that are looked at: logs, by their last bytes, and directories of SRs, by names and lengths. No image is read
//! here; `vhd-util scan` reads headers alone.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::limit::wrong;
use super::redact::LEFT_OUT;

/// Bytes of a log that are taken: the last.
const LOG_LEN_MAX: u64 = 10 << 20;

/// Bytes of a file of this host.
pub(super) const FILE_LEN_MAX: u64 = 1 << 20;

/// Logs that are taken.
const LOGS_MAX: usize = 64;

/// Entries of a directory that are listed.
const ENTRIES_MAX: usize = 20_000;

/// Directories below a directory that are looked into.
const DEPTH_MAX: usize = 3;

/// Beginnings of the names of logs that programs of ours write. Consoles and emulators write for their guests, and
/// their logs are not taken.
const LOGS: [&str; 4] = ["tapback", "tapiod", "tapio-disk", "tapio-xenstored"];

/// Ends of names in the directory of an SR.
const ENDS: [&str; 12] =
    ["vhd", "raw", "iso", "img", "log", "cbtlog", "lock", "journal", "jrnl", "new", "tmp", "link"];

/// Names there that are no UUID.
const NAMES: [&str; 7] = ["filelog.txt", "lost+found", "lock", "MGT", "journal", "tapio", "trash"];

/// Whether this is a log that a program of ours wrote.
fn is_ours(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (first, rest) = name.split_once('.').unwrap_or((name, ""));
    LOGS.iter().any(|begin| first.starts_with(begin))
        && rest.split('.').any(|part| part == "log")
        && !rest.ends_with("gz")
}

/// Our logs below a directory.
pub(super) fn logs(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    walk(dir, 0, &mut |path, _| {
        if is_ours(path) && found.len() < LOGS_MAX {
            found.push(path.to_owned());
        }
    });
    found.sort();
    found
}

/// The last bytes of a log, from the start of a line.
pub(super) fn log(path: &Path) -> Result<String, String> {
    let text = tail(path, LOG_LEN_MAX)?;
    // What a disk or a key begins with, given by mistake.
    match text.bytes().take(4096).any(|byte| byte == 0) {
        true => Err(format!("{} is no text", path.display())),
        false => Ok(text),
    }
}

/// The last bytes of a file, from the start of a line if it is longer.
pub(super) fn tail(path: &Path, len_max: u64) -> Result<String, String> {
    let wrong = wrong(path);
    // A pipe or a device may never end, and opening one may do something.
    if !fs::metadata(path).map_err(&wrong)?.is_file() {
        return Err(format!("{} is no file", path.display()));
    }
    let mut file = File::open(path).map_err(&wrong)?;
    let len = file.metadata().map_err(&wrong)?.len();
    let from = len.saturating_sub(len_max);
    file.seek(SeekFrom::Start(from)).map_err(&wrong)?;
    let mut bytes = Vec::new();
    file.take(len_max).read_to_end(&mut bytes).map_err(&wrong)?;
    let text = String::from_utf8_lossy(&bytes);
    // Half a line has lost the word that announces its secret.
    let begin = if from == 0 { 0 } else { text.find('\n').map_or(text.len(), |end| end + 1) };
    Ok(text[begin..].to_owned())
}

/// Names and lengths of the files of an SR, and the UUIDs in the names.
pub(super) fn listing(dir: &Path) -> Result<(String, BTreeSet<String>), String> {
    fs::read_dir(dir).map_err(wrong(dir))?;
    let (mut text, mut uuids, mut count) = (String::new(), BTreeSet::new(), 0);
    walk(dir, 0, &mut |path, len| {
        count += 1;
        if count <= ENTRIES_MAX {
            let below = path.strip_prefix(dir).unwrap_or(path);
            let names = below.iter().map(|name| shown(&name.to_string_lossy(), &mut uuids));
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(text, "{len:>16} {}", names.collect::<Vec<_>>().join("/"));
        }
    });
    let _ = writeln!(text, "{count} files");
    Ok((text, uuids))
}

/// The UUIDs that name the image at a path and its SR.
pub(super) fn uuids(image: &Path) -> BTreeSet<String> {
    let mut uuids = BTreeSet::new();
    image.iter().for_each(|name| {
        shown(&name.to_string_lossy(), &mut uuids);
    });
    uuids
}

/// A name that a storage manager gives, or the end of it.
fn shown(name: &str, uuids: &mut BTreeSet<String>) -> String {
    let parts: Vec<&str> = name.split(['.', '_']).filter(|part| !part.is_empty()).collect();
    let is_uuid = |part: &&str| part.len() == 36 && uuid::Uuid::try_parse(part).is_ok();
    let is_known =
        |part: &&str| is_uuid(part) || ENDS.contains(part) || matches!(*part, "coalesce" | "clone" | "leaf");
    if NAMES.contains(&name) || (parts.iter().any(is_uuid) && parts.iter().all(is_known)) {
        uuids.extend(parts.into_iter().filter(is_uuid).map(str::to_ascii_lowercase));
        return name.to_owned();
    }
    let end = parts.last().filter(|end| ENDS.contains(end)).copied().unwrap_or_default();
    if end.is_empty() { LEFT_OUT.to_owned() } else { format!("{LEFT_OUT}.{end}") }
}

/// Files of a directory and of those in it; links are not followed.
fn walk(dir: &Path, depth: usize, each: &mut impl FnMut(&Path, u64)) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(facts) = entry.metadata() else { continue };
        if facts.is_dir() && depth < DEPTH_MAX {
            walk(&entry.path(), depth + 1, each);
        } else if facts.is_file() {
            each(&entry.path(), facts.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_logs_are_taken_and_no_others() {
        for name in ["tapback.log", "tapiod.log", "tapiod.0.log", "tapio-disk-7.log.1"] {
            assert!(is_ours(Path::new(name)), "{name}");
        }
        for name in
            ["console.log", "emulator.log", "tapiod.conf", "keys.log", "console.log.1", "tapiod.log.2.gz"]
        {
            assert!(!is_ours(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn names_of_files_are_taken_if_a_storage_manager_gives_them() {
        let mut uuids = BTreeSet::new();
        let uuid = "0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11";
        for kept in [format!("{uuid}.vhd"), format!("coalesce_{uuid}_{uuid}"), "filelog.txt".into()] {
            assert_eq!(shown(&kept, &mut uuids), kept);
        }
        assert_eq!(uuids.len(), 1);
        assert_eq!(shown("planted secret.iso", &mut uuids), "(left out).iso");
        assert_eq!(shown(&format!("{uuid}.planted"), &mut uuids), "(left out)");
    }

    #[test]
    fn a_long_log_begins_with_a_whole_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.log");
        fs::write(&path, "password=planted\nkept\n").unwrap();
        assert_eq!(tail(&path, 12).unwrap(), "kept\n");
        assert_eq!(tail(&path, 4).unwrap(), "");
        fs::write(&path, "LUKS\u{ba}\0\0\0").unwrap();
        assert!(log(&path).unwrap_err().contains("no text"));
        assert!(log(dir.path()).unwrap_err().contains("no file"));
    }
}
