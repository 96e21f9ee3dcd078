//! Whether an account is still what it was when it logged in.

use std::collections::hash_map::RandomState;
use std::ffi::{CStr, CString};
use std::fs;
use std::hash::BuildHasher;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr;

use parking_lot::Mutex;
use tapio_model::Role;

use super::pam;
use super::{Row, RowKind};

/// The system's files of accounts: names, groups and passwords.
const SYSTEM_FILES: [&str; 3] = ["/etc/passwd", "/etc/group", "/etc/shadow"];

/// Files at most: ours and those of the system.
const FILES_MAX: usize = 1 + SYSTEM_FILES.len();

/// What tells one state of a file from another: a file that is replaced is another inode, one that is written has
/// another time. None where it is not there.
type Stamp = Option<(u64, u64, i64, i64, u64)>;

/// Which state of the files was seen last, and how many there were.
#[derive(Debug)]
pub(super) struct Stamps {
    files: Vec<PathBuf>,
    seen: Mutex<([Stamp; FILES_MAX], u64)>,
}

impl Stamps {
    pub(super) fn new(file: PathBuf, has_pam: bool) -> Self {
        let mut files = vec![file];
        if has_pam {
            files.extend(SYSTEM_FILES.map(PathBuf::from));
        }
        let stamps = Self { files, seen: Mutex::new(([None; FILES_MAX], 0)) };
        stamps.generation();
        stamps
    }

    pub(super) fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Counts the states that were seen.
    pub(super) fn generation(&self) -> u64 {
        let mut now = [None; FILES_MAX];
        for (stamp, file) in now.iter_mut().zip(&self.files) {
            *stamp = fs::metadata(file)
                .ok()
                .map(|data| (data.dev(), data.ino(), data.ctime(), data.ctime_nsec(), data.size()));
        }
        let mut seen = self.seen.lock();
        if seen.0 != now {
            *seen = (now, seen.1 + 1);
        }
        seen.1
    }
}

/// Makes numbers of what opens an account. The key is of this run of the daemon, so that a print tells nothing of the
/// hash it was made from.
#[derive(Debug, Default)]
pub(super) struct Prints(RandomState);

impl Prints {
    /// Of an own account: another password has another salt.
    pub(super) fn own(&self, row: &Row) -> u64 {
        self.0.hash_one(("own", &row.name, &row.hash))
    }

    /// Of an account of the system: its number, and its password where this host holds it. `passwd`, `usermod --lock`
    /// and `userdel` change it; a password in a directory elsewhere is not known here.
    pub(super) fn system(&self, user: &str) -> u64 {
        self.0.hash_one(("system", user, pam::uid_of(user), self.shadow(user)))
    }

    fn shadow(&self, user: &str) -> Option<u64> {
        let name = CString::new(user).ok()?;
        let mut buffer = zeroize::Zeroizing::new(vec![0_u8; 16 << 10]);
        // SAFETY: a struct of numbers and pointers, for which all zeroes is a value.
        let mut entry: libc::spwd = unsafe { std::mem::zeroed() };
        let mut found = ptr::null_mut();
        // SAFETY: everything that is written to is as large as it is said to be.
        let result = unsafe {
            libc::getspnam_r(
                name.as_ptr(),
                &raw mut entry,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &raw mut found,
            )
        };
        if result != 0 || found.is_null() || entry.sp_pwdp.is_null() {
            return None;
        }
        // SAFETY: a terminated text in the buffer, which is still there.
        let hash = unsafe { CStr::from_ptr(entry.sp_pwdp) };
        Some(self.0.hash_one((hash, entry.sp_expire)))
    }
}

/// What an account of the system may do: by its name, by its groups, and root everything.
pub(super) fn system_role(rows: &[Row], user: &str) -> Option<Role> {
    let by_name =
        rows.iter().filter(|row| row.kind == RowKind::System && row.name == user).map(|row| row.role);
    let groups = rows.iter().filter(|row| row.kind == RowKind::Group).collect::<Vec<_>>();
    let gids = if groups.is_empty() { Vec::new() } else { pam::groups_of(user) };
    let by_group = groups.iter().filter(|row| pam::gid_of(&row.name).is_some_and(|gid| gids.contains(&gid)));
    let root = (user == "root").then_some(Role::PoolAdmin);
    by_name.chain(by_group.map(|row| row.role)).chain(root).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_of_the_file_has_a_number() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("accounts");
        let stamps = Stamps::new(path.clone(), false);
        let first = stamps.generation();
        assert_eq!(stamps.generation(), first, "nothing changed");
        let mut last = first;
        for text in ["a", "b", "b"] {
            crate::files::replace(&path, text.as_bytes()).expect("replaced");
            let now = stamps.generation();
            assert!(now > last, "a file that is replaced by '{text}' is another one");
            assert_eq!(stamps.generation(), now);
            last = now;
        }
        fs::remove_file(&path).expect("removed");
        assert!(stamps.generation() > last);
    }
}
