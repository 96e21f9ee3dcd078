//! Variables of UEFI firmware: a file for each VM, which outlives its runs.
//!
//! While the VM runs its emulator has a copy in the guest's part of the VM's directory; when it has ended the copy
//! takes the place of the file. What the guest's process left there is looked at before it is taken: it may be
//! anything.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::place::Place;
use crate::settings::Settings;

/// The emulator's copy, in its own directory.
pub(crate) const NAME: &str = "nvram.fd";

/// Largest store of variables that is kept; OVMF has one of 528 KiB.
const LEN_MAX: u64 = 4 << 20;

fn file_of(settings: &Settings, vm: Uuid) -> PathBuf {
    settings.nvram_dir.join(format!("{vm}.fd"))
}

/// Puts the variables of a VM where its emulator finds them: those of its last run, or empty ones.
pub(crate) fn lend(settings: &Settings, place: &Place, vm: Uuid, empty: &Path) -> io::Result<()> {
    let kept = file_of(settings, vm);
    let len = fs::metadata(empty)?.len();
    // Another firmware has a store of another size, in which these mean nothing.
    let is_kept = fs::metadata(&kept).is_ok_and(|data| data.len() == len);
    let bytes = fs::read(if is_kept { &kept } else { empty })?;
    let copy = place.own().join(NAME);
    // The guest's process is not there yet: the directory is as it was made.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&copy)?;
    file.write_all(&bytes)?;
    if let Some((uid, gid)) = place.user() {
        std::os::unix::fs::chown(&copy, Some(uid), Some(gid))?;
    }
    Ok(())
}

/// What a guest's process left as its variables.
fn left(place: &Place) -> io::Result<Option<Vec<u8>>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let open = OpenOptions::new().read(true).custom_flags(flags).open(place.own().join(NAME));
    let file = match open {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        open => open?,
    };
    let (data, owner) = (file.metadata()?, place.user());
    let is_its_own = data.is_file() && data.nlink() == 1 && owner.is_none_or(|(uid, _)| data.uid() == uid);
    if !is_its_own || data.len() == 0 || data.len() > LEN_MAX {
        return Err(io::Error::other("the guest's process has put something else in its place"));
    }
    let mut bytes = Vec::new();
    file.take(LEN_MAX).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(bytes).and_then(|()| file.sync_all())?;
    fs::rename(&fresh, path)?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

/// Keeps the variables of a VM that has ended, if it has some. A failure costs the changes of this run.
pub(crate) fn keep(settings: &Settings, place: &Place, vm: Uuid) {
    let kept = left(place).and_then(|bytes| match bytes {
        Some(bytes) => {
            tapio_sys::private::make_dir(&settings.nvram_dir, 0o700)?;
            write(&file_of(settings, vm), &bytes)
        }
        None => Ok(()),
    });
    if let Err(error) = kept {
        tracing::warn!(%vm, %error, "variables of the firmware stay as they were before this run");
    }
}

/// Removes the variables of VMs that are not known.
pub(crate) fn keep_only(settings: &Settings, is_known: &dyn Fn(Uuid) -> bool) {
    for entry in fs::read_dir(&settings.nvram_dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let vm = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| Uuid::try_parse(stem).ok());
        if vm.is_some_and(|vm| !is_known(vm)) {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_outlive_a_run_and_nothing_else_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { guest_users: None, ..Settings::new(dir.path()) };
        let (vm, empty) = (Uuid::new_v4(), dir.path().join("empty.fd"));
        fs::write(&empty, [0xff; 64]).unwrap();
        let place = Place::of(&settings, vm).unwrap();
        let copy = || place.own().join(NAME);
        let begin = || {
            place.remove();
            place.make(&settings).unwrap();
            lend(&settings, &place, vm, &empty).unwrap();
            fs::read(copy()).unwrap()
        };
        assert_eq!(begin(), [0xff; 64]);
        fs::write(copy(), [7; 64]).unwrap();
        keep(&settings, &place, vm);
        assert_eq!(begin(), [7; 64]);
        // A link to a file of the host, a pipe, and one that is too large.
        let secret = dir.path().join("secret");
        fs::write(&secret, [1; 64]).unwrap();
        fs::remove_file(copy()).unwrap();
        std::os::unix::fs::symlink(&secret, copy()).unwrap();
        keep(&settings, &place, vm);
        fs::remove_file(copy()).unwrap();
        fs::hard_link(&secret, copy()).unwrap();
        keep(&settings, &place, vm);
        fs::remove_file(copy()).unwrap();
        crate::console::open_pipe(&copy()).unwrap();
        keep(&settings, &place, vm);
        fs::remove_file(copy()).unwrap();
        fs::File::create(copy()).unwrap().set_len(LEN_MAX + 1).unwrap();
        keep(&settings, &place, vm);
        assert_eq!(begin(), [7; 64], "as before");
        fs::write(&empty, [0xff; 32]).unwrap();
        assert_eq!(begin(), [0xff; 32], "another firmware");
        keep_only(&settings, &|known| known == vm);
        assert!(file_of(&settings, vm).exists());
        keep_only(&settings, &|_| false);
        assert!(!file_of(&settings, vm).exists());
    }
}
