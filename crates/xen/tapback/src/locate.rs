//! Which disk process a device belongs to.

use tapio_control::{ListRow, RunDir, list, list_process};

use crate::values::Values;

/// What the toolstack said about the disk process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Its number.
    pub pid: Option<i32>,
    /// The disk in it.
    pub minor: Option<u16>,
    /// The image, as `type:/path` or a path alone.
    pub image: Option<String>,
}

/// A disk in a disk process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskAt {
    /// The process.
    pub pid: i32,
    /// The disk in it.
    pub minor: u16,
    /// Its image, as `type:/path`; empty where the process does not say it.
    pub image: String,
}

impl Wanted {
    /// From our own key `tapio-disk` (`PID.MINOR`), else from `physical-device-path` (`…/nbdPID.MINOR`), else from
    /// `params` and `tapdisk-params`: such a path, a marker `…/tapdisk-MINOR`, or the image.
    pub fn read(values: &Values) -> Self {
        let mut wanted = Self::default();
        if let Some((pid, minor)) = values.text("tapio-disk").and_then(pid_and_minor) {
            (wanted.pid, wanted.minor) = (Some(pid), Some(minor));
        }
        for name in ["physical-device-path", "params", "tapdisk-params"] {
            if let Some(text) = values.text(name) {
                wanted.add(text);
            }
        }
        wanted
    }

    fn add(&mut self, text: &str) {
        let file = text.rsplit('/').next().unwrap_or_default();
        if let Some((pid, minor)) = file.strip_prefix("nbd").and_then(pid_and_minor) {
            if self.minor.is_none() {
                (self.pid, self.minor) = (Some(pid), Some(minor));
            }
        } else if let Some(minor) = file.strip_prefix("tapdisk-").and_then(number::<u16>) {
            self.minor = self.minor.or(Some(minor));
        } else if self.image.is_none() && text.contains('/') {
            self.image = Some(text.to_owned());
        }
    }

    /// Whether it says anything.
    pub fn is_known(&self) -> bool {
        self.minor.is_some() || self.image.is_some()
    }

    /// The disk, if its process is there. `before` is where it was when it was last seen: a process that was started
    /// again has another number, and is known by the disk's number together with its image.
    pub fn find(&self, run: &RunDir, before: Option<&DiskAt>) -> Option<DiskAt> {
        let named = |row: &ListRow| {
            self.minor.is_none_or(|minor| row.minor == Some(minor.into()))
                && (self.minor.is_some() || self.has_image(row))
        };
        if let Some(pid) = self.pid {
            let rows = list_process(run, pid).unwrap_or_default();
            if let Some(found) = rows.iter().filter(|row| named(row)).find_map(disk_at) {
                return Some(found);
            }
        }
        // Another process may have the same disk: as named, if no process was named, or as it was known before.
        let rows = list(run).unwrap_or_default();
        let again = |row: &&ListRow| match before {
            Some(before) => {
                row.minor == Some(before.minor.into())
                    && !before.image.is_empty()
                    && image(row) == before.image
            }
            None => named(row) && (self.pid.is_none() || self.has_image(row)),
        };
        rows.iter().filter(again).find_map(disk_at)
    }

    fn has_image(&self, row: &ListRow) -> bool {
        let Some(wanted) = &self.image else { return false };
        image(row) == *wanted || row.path.as_ref() == Some(wanted)
    }
}

fn image(row: &ListRow) -> String {
    match (&row.kind, &row.path) {
        (Some(kind), Some(path)) => format!("{kind}:{path}"),
        _ => String::new(),
    }
}

/// A disk that is open: one without an image has nothing to connect.
fn disk_at(row: &ListRow) -> Option<DiskAt> {
    row.path.as_ref()?;
    Some(DiskAt { pid: row.pid?, minor: u16::try_from(row.minor?).ok()?, image: image(row) })
}

fn pid_and_minor(text: &str) -> Option<(i32, u16)> {
    let (pid, minor) = text.split_once('.')?;
    Some((number(pid).filter(|pid| *pid > 0)?, number(minor)?))
}

fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(pairs: &[(&str, &str)]) -> Wanted {
        Wanted::read(&Values::new(
            pairs.iter().map(|(name, _)| (*name).to_owned()).collect(),
            pairs.iter().map(|(_, value)| Some(value.as_bytes().to_vec())).collect(),
        ))
    }

    #[test]
    fn a_disk_is_named_in_several_ways() {
        let physical =
            wanted(&[("physical-device-path", "/run/blktap-control/nbd4711.12"), ("params", "/disks/a.vhd")]);
        assert_eq!(
            (physical.pid, physical.minor, physical.image.as_deref()),
            (Some(4711), Some(12), Some("/disks/a.vhd"))
        );
        let own = wanted(&[("tapio-disk", "8.1"), ("physical-device-path", "/run/nbd4711.12")]);
        assert_eq!((own.pid, own.minor), (Some(8), Some(1)));
        let marker = wanted(&[("params", "/run/blktap-control/tapdisk/tapdisk-7")]);
        assert_eq!((marker.pid, marker.minor, marker.image), (None, Some(7), None));
        let image = wanted(&[("tapdisk-params", "vhd:/disks/a.vhd")]);
        assert_eq!((image.minor, image.image.as_deref()), (None, Some("vhd:/disks/a.vhd")));
    }

    #[test]
    fn nonsense_names_nothing() {
        for bad in [
            "nbd",
            "nbd1",
            "nbd.1",
            "nbd1.",
            "nbd-1.2",
            "nbd1.70000",
            "nbd0.1",
            "nbd99999999999.1",
            "tapdisk-",
            "tapdisk--1",
        ] {
            let found = wanted(&[("physical-device-path", bad)]);
            assert!(!found.is_known(), "{bad}: {found:?}");
        }
        assert!(!wanted(&[]).is_known());
    }
}
