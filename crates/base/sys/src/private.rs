//! Files and directories that belong to their owner alone from the first byte.
//!
//! A mode that is set after a file was made comes too late: a user who opened it before reads it for ever. So every
//! program takes the bits of others away from all that it makes ([`new_files`]), and a directory or a socket that
//! others shall reach gets its mode where it is made.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::umask;

/// What a new file or directory does not allow: anything to others than its owner.
const UMASK: Mode = Mode::RWXG.union(Mode::RWXO);

/// From now on, what this process and those that it starts make belongs to their user alone. The first thing that a
/// program does.
pub fn new_files() {
    umask(UMASK);
}

/// From now on, others may read what this process makes: documentation, which is for every user.
pub fn files_for_all_readers() {
    umask(Mode::WGRP | Mode::WOTH);
}

/// Makes a directory of this mode, and those above it, which others may pass and not list. One that is there stays
/// as it is.
///
/// # Errors
/// It cannot be made.
pub fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        // Nothing is in it yet, so that it can be opened now. The umask does not count here.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(mode)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_dir(path.parent().ok_or(error)?, 0o711)?;
            make_dir(path, mode)
        }
        // Made by another process meanwhile, or long ago.
        Err(_) if path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Takes from what is at `path` the bits of its mode that are not in `mode`; a link is not followed, and nothing is
/// waited for. Answers the mode of before if it had any of these.
///
/// # Errors
/// There is nothing, or it is another user's.
pub fn close(path: &Path, mode: u32) -> io::Result<Option<u32>> {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    let found = path.symlink_metadata()?;
    let had = found.mode() & 0o7777;
    if had & !mode == 0 || found.is_symlink() {
        return Ok(None);
    }
    // By descriptor, so that what is looked at is what is changed; O_PATH, so that a FIFO is not waited for.
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let now = file.metadata()?;
    if (now.dev(), now.ino()) != (found.dev(), found.ino()) {
        return Ok(None);
    }
    // fchmod(2) takes no such descriptor; the kernel's own name of it leads nowhere else.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::set_permissions(name, Permissions::from_mode(had & mode))?;
    Ok(Some(had))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).expect("there").mode() & 0o7777
    }

    #[test]
    fn directories_have_the_mode_that_is_asked_for_and_those_above_can_be_passed() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("a/b");
        make_dir(&path, 0o2750).expect("made");
        assert_eq!((mode(&path), mode(&place.path().join("a"))), (0o2750, 0o711));
        make_dir(&path, 0o700).expect("there");
        assert_eq!(mode(&path), 0o2750);
        fs::write(place.path().join("file"), "").expect("written");
        make_dir(&place.path().join("file"), 0o700).expect_err("a file");
        make_dir(&place.path().join("file/b"), 0o700).expect_err("below a file");
    }

    #[test]
    fn what_is_too_open_is_closed_and_nothing_is_opened() {
        let place = tempfile::tempdir().expect("a directory");
        let at = |name: &str| place.path().join(name);
        fs::write(at("file"), "").expect("written");
        for (before, after, told) in [(0o644, 0o600, Some(0o644)), (0o600, 0o600, None), (0o400, 0o400, None)]
        {
            fs::set_permissions(at("file"), Permissions::from_mode(before)).expect("ours");
            assert_eq!(close(&at("file"), 0o600).expect("closed"), told);
            assert_eq!(mode(&at("file")), after);
        }
        fs::set_permissions(at("file"), Permissions::from_mode(0o644)).expect("ours");
        std::os::unix::fs::symlink(at("file"), at("link")).expect("a link");
        assert_eq!(close(&at("link"), 0o600).expect("passed over"), None);
        assert_eq!(mode(&at("file")), 0o644, "what a link leads to is not what it is asked for");
        close(&at("none"), 0o600).expect_err("there is none");
    }
}
