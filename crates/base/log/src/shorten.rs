//! A log that a child writes by its standard output, or by a name that it was given: it cannot be told to open another.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

use crate::days::day;
use crate::kept::{Rotation, compress_newest, make_room, newest};

/// Shortens a file to nothing if it is longer than its limit, or of another day, and keeps what it had. Its writer must
/// have opened it for appending. `begun` is the day of its first line as an earlier call answered it; answers that day.
/// What is written in the moment between the copy and the cut is lost.
///
/// # Errors
/// The copy cannot be written. A log of more than twice its limit is cut all the same.
pub fn shorten(path: &Path, rotation: Rotation, begun: Option<u64>, now: SystemTime) -> io::Result<u64> {
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    let data = file.metadata()?;
    let begun = match begun {
        Some(begun) => begun,
        None => day(data.modified()?),
    };
    let is_due = data.len() > rotation.len_max || begun < day(now);
    if data.len() == 0 || !is_due {
        return Ok(if data.len() == 0 { day(now) } else { begun });
    }
    let kept = keep(path, &mut file, rotation);
    if kept.is_ok() || data.len() > rotation.len_max.saturating_mul(2) {
        file.set_len(0)?;
    }
    kept.map(|()| day(now))
}

fn keep(path: &Path, file: &mut fs::File, rotation: Rotation) -> io::Result<()> {
    if rotation.kept == 0 {
        return Ok(());
    }
    make_room(path, rotation)?;
    let to = newest(path);
    let mut copy = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&to)?;
    // Until the end, wherever it is by then: less is lost to the cut.
    if let Err(error) = io::copy(file, &mut copy) {
        let _ = fs::remove_file(&to);
        return Err(error);
    }
    if let Some(compressing) = compress_newest(path) {
        // The next call must find it done. Consoles are short.
        let _ = compressing.join();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_childs_log_is_kept_and_cut_by_size_and_by_day() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut writer = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        let rotation = Rotation { len_max: 10, kept: 2 };
        let now = SystemTime::now();
        let begun = shorten(&path, rotation, None, now).unwrap();
        writer.write_all(b"short\n").unwrap();
        assert_eq!(shorten(&path, rotation, Some(begun), now).unwrap(), begun);
        assert_eq!(fs::read(&path).unwrap(), b"short\n");
        writer.write_all(b"and longer\n").unwrap();
        shorten(&path, rotation, Some(begun), now).unwrap();
        writer.write_all(b"next\n").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"next\n", "its writer appends");
        let tomorrow = now + Duration::from_secs(86_400);
        assert_eq!(shorten(&path, rotation, Some(begun), tomorrow).unwrap(), begun + 1);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        assert!(dir.path().join("console.log.1.gz").exists() && dir.path().join("console.log.2.gz").exists());
        assert!(shorten(&dir.path().join("none"), rotation, None, now).is_err());
    }
}
