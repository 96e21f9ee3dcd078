//! Where the database of the pool is: what the administrator configured, or what a host was told when it joined, which
//! it keeps in files.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tapio_store::EtcdOptions;
use uuid::Uuid;

/// The directory of these files, below the state directory.
const DIR: &str = "pool";

/// The file that says that this host belongs to a pool.
const FILE: &str = "access.json";

/// Files with what members and clients of etcd know each other by.
const CA: &str = "ca.pem";
const CERTIFICATE: &str = "client.pem";
const KEY: &str = "client-key.pem";
const PASSWORD: &str = "password";

/// Where the database of the pool is.
#[derive(Clone, Debug)]
pub struct Access {
    /// The UUID of this host.
    pub host: Uuid,
    /// The cluster.
    pub options: EtcdOptions,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    host: Uuid,
    endpoints: Vec<String>,
    prefix: String,
    user: Option<String>,
    has_ca: bool,
    has_certificate: bool,
}

fn dir_of(state_dir: &Path) -> PathBuf {
    state_dir.join(DIR)
}

/// Writes a file that only its owner reads, whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), String> {
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    let new = path.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&new).map_err(told)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(told)?;
    fs::rename(&new, path).map_err(told)?;
    let dir = path.parent().unwrap_or_else(|| Path::new("/"));
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(told)
}

impl Access {
    /// What this host was told when it joined; none if it belongs to no pool.
    ///
    /// # Errors
    /// A file cannot be read: a sentence.
    pub fn read(state_dir: &Path) -> Result<Option<Self>, String> {
        let dir = dir_of(state_dir);
        let path = dir.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let kept: Kept =
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Some(Self {
            host: kept.host,
            options: EtcdOptions {
                endpoints: kept.endpoints,
                prefix: kept.prefix,
                ca: kept.has_ca.then(|| dir.join(CA)),
                identity: kept.has_certificate.then(|| (dir.join(CERTIFICATE), dir.join(KEY))),
                account: kept.user.map(|user| (user, dir.join(PASSWORD))),
                writer: kept.host.to_string(),
            },
        }))
    }

    /// What another host needs to join.
    ///
    /// # Errors
    /// A file cannot be read: a sentence.
    pub fn told(&self) -> Result<BTreeMap<String, String>, String> {
        let read =
            |path: &Path| fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
        let mut told = BTreeMap::from([
            ("endpoints".to_owned(), self.options.endpoints.join(",")),
            ("prefix".to_owned(), self.options.prefix.clone()),
        ]);
        if let Some(ca) = &self.options.ca {
            told.insert("ca".to_owned(), read(ca)?);
        }
        if let Some((certificate, key)) = &self.options.identity {
            told.insert("certificate".to_owned(), read(certificate)?);
            told.insert("key".to_owned(), read(key)?);
        }
        if let Some((user, password)) = &self.options.account {
            told.insert("user".to_owned(), user.clone());
            told.insert("password".to_owned(), read(password)?);
        }
        Ok(told)
    }

    /// Keeps what another host told. Until [`Self::keep`] this host belongs to no pool.
    ///
    /// # Errors
    /// Something is missing, a file cannot be written: a sentence.
    pub fn receive(state_dir: &Path, host: Uuid, told: &BTreeMap<String, String>) -> Result<Self, String> {
        let dir = dir_of(state_dir);
        if !dir.is_dir() {
            let made = fs::DirBuilder::new().mode(0o700).create(&dir);
            made.map_err(|error| format!("{}: {error}", dir.display()))?;
        }
        let of = |name: &str| told.get(name).filter(|text| !text.is_empty());
        let missing = |name: &str| format!("the host that decides for the pool did not tell its {name}");
        for (name, file) in [("ca", CA), ("certificate", CERTIFICATE), ("key", KEY), ("password", PASSWORD)] {
            if let Some(text) = of(name) {
                write(&dir.join(file), text)?;
            }
        }
        let identity = of("certificate").zip(of("key"));
        let user = of("user").zip(of("password")).map(|(user, _)| user.clone());
        Ok(Self {
            host,
            options: EtcdOptions {
                endpoints: of("endpoints")
                    .ok_or_else(|| missing("endpoints"))?
                    .split(',')
                    .map(str::to_owned)
                    .collect(),
                prefix: of("prefix").ok_or_else(|| missing("prefix"))?.clone(),
                ca: of("ca").map(|_| dir.join(CA)),
                identity: identity.map(|_| (dir.join(CERTIFICATE), dir.join(KEY))),
                account: user.map(|user| (user, dir.join(PASSWORD))),
                writer: host.to_string(),
            },
        })
    }

    /// From the next start on this host belongs to the pool.
    ///
    /// # Errors
    /// The file cannot be written: a sentence.
    pub fn keep(&self, state_dir: &Path) -> Result<(), String> {
        let kept = Kept {
            host: self.host,
            endpoints: self.options.endpoints.clone(),
            prefix: self.options.prefix.clone(),
            user: self.options.account.as_ref().map(|(user, _)| user.clone()),
            has_ca: self.options.ca.is_some(),
            has_certificate: self.options.identity.is_some(),
        };
        let text = serde_json::to_string(&kept).map_err(|error| error.to_string())?;
        write(&dir_of(state_dir).join(FILE), &text)
    }

    /// From the next start on this host belongs to no pool.
    ///
    /// # Errors
    /// A file cannot be removed: a sentence.
    pub fn forget(state_dir: &Path) -> Result<(), String> {
        let dir = dir_of(state_dir);
        // The one that says so goes first.
        for file in [FILE, PASSWORD, KEY, CERTIFICATE, CA] {
            let path = dir.join(file);
            match fs::remove_file(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(format!("{}: {error}", path.display())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_kept_and_forgotten() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let host = Uuid::new_v4();
        let told =
            [("endpoints", "http://a:1,http://b:2"), ("prefix", "/p"), ("user", "u"), ("password", "secret")];
        let told = told.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let access = Access::receive(dir.path(), host, &told).expect("it is complete");
        assert!(Access::read(dir.path()).expect("a directory").is_none(), "nothing is decided yet");
        access.keep(dir.path()).expect("a file");
        let again = Access::read(dir.path()).expect("a file").expect("it is a member");
        assert_eq!((again.host, again.told().expect("its files")), (host, told));
        assert!(!format!("{again:?}").contains("secret"));
        Access::forget(dir.path()).expect("files");
        assert!(Access::read(dir.path()).expect("a directory").is_none());
        let incomplete = [("prefix".to_owned(), "/p".to_owned())].into();
        assert!(Access::receive(dir.path(), host, &incomplete).is_err_and(|why| why.contains("endpoints")));
    }
}
