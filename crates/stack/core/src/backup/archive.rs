//! A host as one archive: its database and the files that its daemon starts with.
//!
//! ```text
//!   manifest.json    two lines: what the members are, and the SHA-256 of the first line
//!   database.tapio   the objects, as a dump
//!   tapiod.conf      settings
//!   server.pem       the certificate with its chain, and its key
//!   accounts         the accounts with the hashes of their passwords
//! ```
//!
//! A tar archive with these members in this order; files that the host does not have are left out. It comes from
//! clients: a member is read only if the manifest names it, with the length and the sum that it has there, and names
//! are compared with these five, never used as paths.

use std::io::Write as _;

use serde::{Deserialize, Serialize};
use tapio_xva::{Members, XvaError, end_members, put_member};
use uuid::Uuid;

use crate::dates;
use crate::db::{DUMP_LEN_MAX, Dump, sum_of};
use crate::pool::version::Version;

const MANIFEST: &str = "manifest.json";
const DATABASE: &str = "database.tapio";

/// The settings of the daemon.
pub const SETTINGS: &str = "tapiod.conf";
/// Its certificate and key.
pub const CERTIFICATE: &str = "server.pem";
/// The accounts that may log in.
pub const ACCOUNTS: &str = "accounts";

/// Files of an archive, and the most bytes of each that are read.
pub(super) const FILES: [(&str, usize); 3] =
    [(SETTINGS, 1 << 20), (CERTIFICATE, 256 << 10), (ACCOUNTS, 1 << 20)];

/// The most bytes of a manifest that are read.
const MANIFEST_LEN_MAX: usize = 16 << 10;

/// Longest archive that is read, in bytes.
pub const HOST_ARCHIVE_LEN_MAX: usize = DUMP_LEN_MAX + (4 << 20);

/// The version of the archive.
const FORMAT: u64 = 1;

/// A host as it was when it was kept.
#[derive(Clone, Debug)]
pub struct HostArchive {
    /// The version of Tapio that wrote it.
    pub version: String,
    /// When, as XenAPI writes it.
    pub date: String,
    /// The UUID of the host.
    pub host: String,
    /// Its objects.
    pub dump: Dump,
    /// Its files, with their names in the archive.
    pub files: Vec<(&'static str, Vec<u8>)>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    tapio_host: u64,
    version: String,
    date: String,
    host: Uuid,
    members: Vec<Listed>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    name: String,
    len: usize,
    sha256: String,
}

fn told(error: XvaError) -> String {
    match error {
        XvaError::Early => "it is cut off".to_owned(),
        other => other.to_string(),
    }
}

impl HostArchive {
    /// This host now.
    pub(super) fn new(host: Uuid, dump: Dump, files: Vec<(&'static str, Vec<u8>)>) -> Self {
        let (version, date) = (Version::own().to_string(), dates::format(dates::now()));
        Self { version, date, host: host.to_string(), dump, files }
    }

    /// The archive.
    ///
    /// # Errors
    /// A member is longer than what is read of it: a sentence.
    pub fn bytes(&self) -> Result<Vec<u8>, String> {
        let database = self.dump.text();
        let files = self.files.iter().map(|(name, bytes)| (*name, bytes.as_slice()));
        let members: Vec<_> = std::iter::once((DATABASE, database.as_bytes())).chain(files).collect();
        let listed = members.iter().map(|(name, bytes)| {
            let max = len_max(name);
            if bytes.len() > max {
                return Err(format!("{name} has {} bytes, and {max} are read", bytes.len()));
            }
            Ok(Listed { name: (*name).to_owned(), len: bytes.len(), sha256: sum_of(bytes) })
        });
        let manifest = Manifest {
            tapio_host: FORMAT,
            version: self.version.clone(),
            date: self.date.clone(),
            host: self.host.parse().map_err(|error| format!("the host's UUID: {error}"))?,
            members: listed.collect::<Result<_, String>>()?,
        };
        let line = serde_json::to_string(&manifest).map_err(|error| error.to_string())?;
        sealed_members(&line, &members).map_err(|error| error.to_string())
    }

    /// Reads an archive, all of it.
    ///
    /// # Errors
    /// A sentence: it is no such archive, is cut off or damaged, of another version, or has what does not belong there.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > HOST_ARCHIVE_LEN_MAX {
            return Err(format!("it is longer than {HOST_ARCHIVE_LEN_MAX} bytes"));
        }
        let mut rest = bytes;
        let mut members = Members::new(&mut rest);
        let manifest = match members.next().map_err(told)? {
            Some(first) if first.name == MANIFEST => {
                read(&mut members, first.len, MANIFEST_LEN_MAX, MANIFEST)?
            }
            _ => return Err(format!("it is no backup of a host: its first member is not {MANIFEST}")),
        };
        let manifest = read_manifest(&manifest)?;
        let mut dump = None;
        let mut files: Vec<(&'static str, Vec<u8>)> = Vec::new();
        let mut order = std::iter::once((DATABASE, DUMP_LEN_MAX)).chain(FILES);
        for listed in &manifest.members {
            // Each at most once, because the order goes forward.
            let known = order.find(|(name, _)| *name == listed.name);
            let (name, max) = known.ok_or_else(|| {
                format!("'{}' does not belong there in a backup of a host", shown(&listed.name))
            })?;
            let member = members.next().map_err(told)?;
            let member = member.ok_or_else(|| format!("it is cut off: {name} is not there"))?;
            if member.name != name || member.len != listed.len as u64 {
                return Err(format!(
                    "its manifest has {name} with {} bytes, and '{}' with {} is there",
                    listed.len,
                    shown(&member.name),
                    member.len
                ));
            }
            let bytes = read(&mut members, member.len, max, name)?;
            if sum_of(&bytes) != listed.sha256 {
                return Err(format!("{name} is damaged: its sum is another than the manifest says"));
            }
            if name == DATABASE {
                dump = Some(Dump::parse(&bytes).map_err(|why| format!("{name}: {why}"))?);
            } else {
                files.push((name, bytes));
            }
        }
        if let Some(more) = members.next().map_err(told)? {
            return Err(format!("'{}' does not belong there in a backup of a host", shown(&more.name)));
        }
        if rest.iter().any(|byte| *byte != 0) {
            return Err("there is something behind its end".to_owned());
        }
        let dump = dump.ok_or_else(|| format!("it does not have {DATABASE}"))?;
        let host = manifest.host.to_string();
        if !dump.hosts().contains(host.as_str()) {
            return Err(format!("its database does not have its host {host}"));
        }
        Ok(Self { version: manifest.version, date: manifest.date, host, dump, files })
    }
}

fn len_max(name: &str) -> usize {
    FILES.iter().find(|(known, _)| *known == name).map_or(DUMP_LEN_MAX, |(_, max)| *max)
}

/// Members behind a manifest of this line.
fn sealed_members(line: &str, members: &[(&str, &[u8])]) -> std::io::Result<Vec<u8>> {
    let mut archive = Vec::new();
    put_member(&mut archive, MANIFEST, format!("{line}\n{}\n", sum_of(line.as_bytes())).as_bytes())?;
    for (name, bytes) in members {
        put_member(&mut archive, name, bytes)?;
    }
    end_members(&mut archive)?;
    archive.flush()?;
    Ok(archive)
}

/// A text of a client as an error shows it.
fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(80).collect()
}

fn read(members: &mut Members<&mut &[u8]>, len: u64, max: usize, name: &str) -> Result<Vec<u8>, String> {
    let len = usize::try_from(len).ok().filter(|len| *len <= max);
    let len = len.ok_or_else(|| format!("{name} is longer than the {max} bytes that are read"))?;
    let mut bytes = vec![0; len];
    members.read(&mut bytes).map_err(told)?;
    Ok(bytes)
}

fn read_manifest(bytes: &[u8]) -> Result<Manifest, String> {
    let damaged = || format!("{MANIFEST} is damaged: its sum is another than it says");
    let text = std::str::from_utf8(bytes).map_err(|_| damaged())?;
    let (line, sum) = text.strip_suffix('\n').and_then(|text| text.split_once('\n')).ok_or_else(damaged)?;
    if sum_of(line.as_bytes()) != sum {
        return Err(damaged());
    }
    let wrong = |why: &dyn std::fmt::Display| format!("{MANIFEST}: {why}");
    let known: serde_json::Value = serde_json::from_str(line).map_err(|error| wrong(&error))?;
    match known.get("tapio_host").and_then(serde_json::Value::as_u64) {
        Some(FORMAT) => {}
        Some(other) => return Err(wrong(&format!("version {other}, and this Tapio reads {FORMAT} alone"))),
        None => return Err(wrong(&"it is of no backup of a host")),
    }
    let manifest: Manifest = serde_json::from_str(line).map_err(|error| wrong(&error))?;
    manifest.version.parse::<Version>().map_err(|why| wrong(&why))?;
    dates::parse(&manifest.date).ok_or_else(|| wrong(&"its date is none"))?;
    Ok(manifest)
}

/// The archive of a database and files, with a manifest that fits them, whatever they are: for tests.
#[doc(hidden)]
pub fn sealed_host(host: &str, members: &[(&str, &[u8])]) -> Vec<u8> {
    let listed: Vec<_> = members
        .iter()
        .map(|(name, bytes)| serde_json::json!({"name": name, "len": bytes.len(), "sha256": sum_of(bytes)}))
        .collect();
    let manifest = serde_json::json!({
        "tapio_host": FORMAT, "version": "0.1.0", "date": "20260101T12:00:00Z", "host": host, "members": listed,
    });
    sealed_members(&manifest.to_string(), members).unwrap_or_default()
}

#[cfg(test)]
mod tests;
