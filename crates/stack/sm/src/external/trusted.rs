//! Which files of plugins are run: as root, so what other users can change is not.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tapio_sys::process;

/// Whether a program may be run.
///
/// # Errors
/// A sentence: it is not there, cannot be executed, or others can change it.
pub(super) fn program(path: &Path) -> Result<(), String> {
    let data = fs::metadata(path).map_err(|error| missing(&error))?;
    if !data.is_file() || data.mode() & 0o111 == 0 {
        return Err("it is no file that can be executed: reinstall the plugin".to_owned());
    }
    owned(&data)?;
    // Who can change the directory can change what its names lead to.
    let parent = path.parent().unwrap_or(Path::new("/"));
    owned(&fs::metadata(parent).map_err(|error| missing(&error))?)
        .map_err(|why| format!("{}: {why}", parent.display()))
}

/// Whether a directory may hold programs.
///
/// # Errors
/// A sentence: others can change it.
pub(super) fn directory(path: &Path) -> Result<(), String> {
    owned(&fs::metadata(path).map_err(|error| missing(&error))?)
}

fn missing(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "it is not there: the plugin does not do this, or was removed".to_owned(),
        _ => error.to_string(),
    }
}

/// Whether only root and this user can change it.
fn owned(data: &Metadata) -> Result<(), String> {
    let user = process::user();
    if data.uid() != 0 && data.uid() != user {
        return Err(format!(
            "it belongs to user {}, and would run as user {user}: chown it to root",
            data.uid()
        ));
    }
    if data.mode() & 0o022 != 0 {
        return Err(format!("others can change it (mode {:04o}): chmod go-w", data.mode() & 0o7777));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_others_can_change_is_not_run() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("SR.ls");
        assert!(program(&path).unwrap_err().contains("not there"));
        fs::write(&path, "#!/bin/sh\n").expect("written");
        let mode =
            |of: &Path, mode| fs::set_permissions(of, fs::Permissions::from_mode(mode)).expect("changed");
        mode(&path, 0o644);
        assert!(program(&path).unwrap_err().contains("executed"));
        mode(&path, 0o757);
        assert!(program(&path).unwrap_err().contains("chmod go-w"));
        mode(&path, 0o755);
        program(&path).expect("root's alone");
        mode(dir.path(), 0o777);
        assert!(program(&path).unwrap_err().contains("chmod go-w"));
        assert!(program(dir.path()).is_err());
    }
}
