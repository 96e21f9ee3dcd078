//! Older parts of a log: `a.log.1` is the newest, `a.log.2.gz` is compressed.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use flate2::Compression;
use flate2::write::GzEncoder;

/// Numbers of older parts that a log may have.
const KEPT_MAX: u32 = 1_000;

/// Ends of the names of an older part: as it was written, and compressed.
const FORMS: [&str; 2] = ["", ".gz"];

/// When a log is rotated, and what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Bytes from which on a log is rotated.
    pub len_max: u64,
    /// Older parts that are kept; 0 keeps none.
    pub kept: u32,
}

impl Default for Rotation {
    fn default() -> Self {
        Self { len_max: 100 << 20, kept: 5 }
    }
}

/// A name beside a log.
pub(crate) fn beside(log: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(log.as_os_str());
    name.push(end);
    name.into()
}

fn part(log: &Path, number: u32, form: &str) -> PathBuf {
    beside(log, &format!(".{number}{form}"))
}

fn is_there(log: &Path, number: u32) -> bool {
    FORMS.iter().any(|form| part(log, number, form).exists())
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes room for the name `a.log.1`. Each step is one rename, from the oldest part on, so a kill between two leaves a
/// number without a part and no part without a number; the next call begins at that gap.
pub(crate) fn make_room(log: &Path, rotation: Rotation) -> io::Result<()> {
    let kept = rotation.kept.min(KEPT_MAX);
    // What a compression that was killed left. Its part is still there as it was written.
    gone(fs::remove_file(beside(log, ".gz.new")))?;
    // Parts of a time when more were kept.
    for number in kept.max(1)..KEPT_MAX {
        if !is_there(log, number) {
            break;
        }
        for form in FORMS {
            gone(fs::remove_file(part(log, number, form)))?;
        }
    }
    let free = (1..kept).find(|number| !is_there(log, *number)).unwrap_or(kept);
    for number in (1..free).rev() {
        for form in FORMS {
            gone(fs::rename(part(log, number, form), part(log, number + 1, form)))?;
        }
    }
    Ok(())
}

/// The name that the newest older part gets.
pub(crate) fn newest(log: &Path) -> PathBuf {
    part(log, 1, "")
}

fn compress(log: &Path) -> io::Result<()> {
    let (from, to) = (newest(log), beside(log, ".gz.new"));
    let mut input = File::open(&from)?;
    let output = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&to)?;
    let mut encoder = GzEncoder::new(output, Compression::fast());
    let done = io::copy(&mut input, &mut encoder).and_then(|_| encoder.finish()?.sync_data());
    if let Err(error) = done {
        // It stays as it was written, on a full disk for one.
        let _ = fs::remove_file(&to);
        return Err(error);
    }
    // Killed between these two, both are there and move on together.
    fs::rename(&to, part(log, 1, ".gz"))?;
    fs::remove_file(&from)
}

/// Compresses the newest older part, on a thread of its own: 100 MiB take a second. Nothing else may change older parts
/// until it has ended.
pub(crate) fn compress_newest(log: &Path) -> Option<JoinHandle<()>> {
    let log = log.to_owned();
    let body = move || {
        // What could not be compressed is longer, and kept all the same.
        let _ = compress(&log);
    };
    std::thread::Builder::new().name("log-gzip".into()).spawn(body).ok()
}
