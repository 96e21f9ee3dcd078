//! Links in the directory of an SR.
//!
//! A user who may write into that directory (of this host, or of an NFS export's server) may put a link there, and
//! what it leads to would be read as root and shown to a guest. So a link counts only while it stays inside.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the file `name` of `directory` is, with all links followed.
///
/// # Errors
/// It is not there, is no regular file, or is reached by a link that leads out of the directory.
pub(crate) fn inside(directory: &Path, name: &str) -> io::Result<PathBuf> {
    let path = directory.join(name);
    let data = fs::symlink_metadata(&path)?;
    if data.is_file() {
        return Ok(path);
    }
    let regular = || io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file");
    if !data.is_symlink() {
        return Err(regular());
    }
    holds(directory, &path)?;
    let found = fs::canonicalize(&path)?;
    if !fs::symlink_metadata(&found)?.is_file() {
        return Err(regular());
    }
    Ok(found)
}

/// Whether a file is in the directory, wherever links on its path lead.
///
/// # Errors
/// It is not, or cannot be found.
pub(crate) fn holds(directory: &Path, file: &Path) -> io::Result<()> {
    if fs::canonicalize(file)?.starts_with(fs::canonicalize(directory)?) {
        return Ok(());
    }
    let why = "it lies outside of the SR's directory, and nothing there is read";
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_count_while_they_stay_inside() {
        let dir = tempfile::tempdir().expect("a directory");
        let (inner, secret) = (dir.path().join("sr"), dir.path().join("secret"));
        fs::create_dir_all(inner.join("sub")).expect("made");
        fs::write(&secret, "secret").expect("written");
        for file in ["plain", "sub/deep"] {
            fs::write(inner.join(file), "image").expect("written");
        }
        let link = |target: &str, name: &str| symlink(target, inner.join(name)).expect("a link");
        link("plain", "near");
        link("sub/deep", "below");
        link("../secret", "out");
        link(secret.to_str().expect("text"), "absolute");
        link("out", "over");
        link("..", "up");
        link("up/secret", "through");
        link("/dev/zero", "device");
        link("nothing", "broken");
        link("loop", "loop");
        for name in ["plain", "near", "below"] {
            let found = inside(&inner, name).expect(name);
            assert_eq!(fs::read(found).expect("read"), b"image", "{name}");
        }
        for name in ["out", "absolute", "over", "up", "through", "device", "broken", "loop", "sub"] {
            assert!(inside(&inner, name).is_err(), "{name}");
        }
    }
}
