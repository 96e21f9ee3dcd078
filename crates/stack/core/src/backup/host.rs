//! `GET /host_backup` and `PUT /host_restore`: the database of this host and its daemon's files as one archive.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Access, access};
use serde::Serialize;
use tapio_model::ApiError;

use super::archive::{FILES, HOST_ARCHIVE_LEN_MAX, HostArchive};
use super::files::HostFile;
use super::{Backups, Wanted, look, placed, receive, send};
use crate::basics::this_host;
use crate::call::Call;
use crate::storage::transfer::Accepted;

/// What becomes of a file by a restore.
#[derive(Debug, Serialize)]
pub(super) struct FileReport {
    name: &'static str,
    path: String,
    /// Whether it becomes that of the archive.
    pub(super) changes: bool,
    /// Why it stays as it is; empty: it changes, or is the same.
    why: String,
}

/// A file that need not be there, up to as many bytes.
fn bytes_of(path: &Path, max: usize) -> Result<Option<Vec<u8>>, String> {
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    match fs::metadata(path) {
        // `/dev/null` stands for no file of settings.
        Ok(data) if !data.is_file() => return Ok(None),
        Ok(data) if data.len() > max as u64 => {
            return Err(format!("{}: longer than the {max} bytes that are read", path.display()));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(told(error)),
    }
    fs::read(path).map(Some).map_err(told)
}

impl Backups {
    /// This host as an archive.
    fn host_archive(&self) -> Result<HostArchive, String> {
        let host = self.db.get("host", &this_host(&self.db)).map_err(|error| error.to_string())?;
        let uuid = host.uuid().map_err(|error| error.to_string())?;
        let mut files = Vec::new();
        for (name, max) in FILES {
            let Some(file) = self.files().iter().find(|file| file.name == name) else { continue };
            if let Some(bytes) = bytes_of(&file.path, max)? {
                files.push((name, bytes));
            }
        }
        Ok(HostArchive::new(uuid, self.db.dump(), files))
    }

    /// What becomes of each file by an archive.
    fn file_reports(&self, archive: &HostArchive) -> Vec<FileReport> {
        let of = |file: &HostFile| {
            let path = file.path.display().to_string();
            let stays = |why: &str| FileReport {
                name: file.name,
                path: path.clone(),
                changes: false,
                why: why.to_owned(),
            };
            let Some((_, then)) = archive.files.iter().find(|(name, _)| *name == file.name) else {
                return stays("the backup does not have it");
            };
            if fs::read(&file.path).is_ok_and(|now| now == *then) {
                return stays("");
            }
            if let Err(why) = (file.check)(then) {
                return stays(&why);
            }
            let dir = file.path.parent().unwrap_or_else(|| Path::new("/"));
            let is_other = fs::metadata(&file.path).is_ok_and(|data| !data.is_file());
            match access(dir, Access::WRITE_OK) {
                Ok(()) if !is_other => {
                    FileReport { name: file.name, path, changes: true, why: String::new() }
                }
                Ok(()) => stays("what is there is no file"),
                Err(error) => stays(&format!("{} cannot be written: {error}", dir.display())),
            }
        };
        self.files().iter().map(of).collect()
    }
}

/// `GET /host_backup`: sends this host as an archive.
///
/// # Errors
/// A file cannot be read; the database is longer than a restore takes; the client has gone.
pub(crate) fn export(
    call: &Call<Backups>,
    to: (OwnedFd, Accepted<'_>),
    is_taken: &dyn Fn() -> bool,
) -> Result<(), ApiError> {
    let bytes = call.part.host_archive().and_then(|archive| archive.bytes()).map_err(ApiError::internal)?;
    send(call, &bytes, to, is_taken)
}

/// `PUT /host_restore`: looks at an archive, and leaves it for the next start unless it is a dry run. The client is
/// sent a report.
///
/// # Errors
/// The archive is damaged or of another host, something is in the way: nothing is changed.
pub(crate) fn import(
    call: &Call<Backups>,
    how: (bool, bool),
    from: (OwnedFd, Accepted<'_>),
) -> Result<(), ApiError> {
    let (mut client, bytes) = receive(call, from, HOST_ARCHIVE_LEN_MAX)?;
    let archive = HostArchive::parse(&bytes)
        .map_err(|why| ApiError::new("INVALID_VALUE", ["backup of a host".to_owned(), why]))?;
    let backups = &call.part;
    let files = backups.file_reports(&archive);
    let is_here = archive.files.iter().map(|(name, _)| *name);
    let stays = |file: &&FileReport| !file.why.is_empty() && is_here.clone().any(|name| name == file.name);
    let mut odd: Vec<String> = files
        .iter()
        .filter(stays)
        .map(|file| format!("the {} of the backup is not taken: {}", file.name, file.why))
        .collect();
    if backups.pool.is_member() && !this_host(&backups.db).ends_with(&archive.host) {
        odd.push(format!("the backup is of the host {}, and this is another host of the pool", archive.host));
    }
    let changing: Vec<&str> = files.iter().filter(|file| file.changes).map(|file| file.name).collect();
    let stage = || placed::stage(&backups.state_dir, &changing, &bytes);
    let wanted = Wanted { then: &archive.dump, odd, files: &files, stage: &stage };
    let report = look(call, how, wanted)?;
    // A client that went away has missed it.
    let _ = client.write_all(report.as_bytes());
    Ok(())
}
