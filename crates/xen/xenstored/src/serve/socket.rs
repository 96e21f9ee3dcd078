//! The socket that clients connect to.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use tapio_sys::successor::is_served;

/// Where clients look for it: `XENSTORED_PATH`, or `socket` in `XENSTORED_RUNDIR` or `/run/xenstored`.
pub fn default_path() -> PathBuf {
    if let Some(path) = std::env::var_os("XENSTORED_PATH") {
        return path.into();
    }
    let dir = std::env::var_os("XENSTORED_RUNDIR").map_or_else(|| "/run/xenstored".into(), PathBuf::from);
    dir.join("socket")
}

/// Listens. What a daemon that died has left there is replaced, one that lives is not.
///
/// # Errors
/// Another daemon serves there, something else lies there, or the directory cannot be written.
pub fn listen(path: &Path) -> Result<UnixListener, String> {
    let failed = |what: &str, error: io::Error| format!("cannot {what} {}: {error}", path.display());
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir).map_err(|error| {
            format!(
                "cannot make the directory {}: {error}; run it as root, or name another place with --socket",
                dir.display()
            )
        })?;
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("look at", error)),
        Ok(data) if !data.file_type().is_socket() => {
            return Err(format!(
                "{} is there and is no socket: remove it, or name another with --socket",
                path.display()
            ));
        }
        Ok(_) if is_served(path) => {
            return Err(format!(
                "another xenstored serves at {}: end it first (there can only be one tree), or name another place with --socket",
                path.display()
            ));
        }
        Ok(_) => fs::remove_file(path).map_err(|error| failed("remove the stale socket", error))?,
    }
    let listener = UnixListener::bind(path).map_err(|error| failed("listen at", error))?;
    // A client that can connect can do everything.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(|error| failed("protect", error))?;
    listener.set_nonblocking(true).map_err(|error| failed("prepare", error))?;
    Ok(listener)
}
