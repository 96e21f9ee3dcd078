//! `device_config`: the cluster, the user and the pool. A key that is given itself goes into a file that root alone
//! reads, for librbd in this process and in disk processes, as long as the SR is attached.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tapio_rbd::{Connect, check_name};
use tapio_types::ApiError;
use uuid::Uuid;

use crate::Places;
use crate::errors;
use crate::traits::Config;

/// Keys that a name of an image has as well.
const OPTIONS: &[&str] = &["conf", "mon_host", "user", "keyring", "timeout"];

/// What a `device_config` says.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) connect: Connect,
    pub(super) pool: Option<String>,
    pub(super) data_pool: Option<String>,
    /// The file that was made for a key.
    key_file: Option<PathBuf>,
}

impl Wanted {
    /// Reads it. A key goes into a file for `sr`, or for this process alone while no SR is attached by it.
    ///
    /// # Errors
    /// 1: a value that cannot be used; 20: the key is none.
    pub(super) fn of(config: &Config, places: &Places, sr: Option<Uuid>) -> Result<Self, ApiError> {
        let text = |key: &str| config.get(key).map(String::as_str).filter(|value| !value.is_empty());
        let mut connect = Connect::default();
        for key in OPTIONS {
            if let Some(value) = text(key) {
                connect
                    .option(key, value)
                    .map_err(|error| errors::fail(1, format_args!("device_config:{key}: {error}")))?;
            }
        }
        let named = |key: &str| -> Result<Option<String>, ApiError> {
            let Some(name) = text(key) else { return Ok(None) };
            check_name("a pool", name)
                .map_err(|error| errors::fail(1, format_args!("device_config:{key}: {error}")))?;
            Ok(Some(name.to_owned()))
        };
        let (pool, data_pool) = (named("pool")?, named("data_pool")?);
        let mut key_file = None;
        if let Some(key) = text("cephkey") {
            if connect.keyring.is_some() {
                return Err(errors::fail(1, "device_config has keyring and cephkey: give one of them"));
            }
            let path = key_path(places, sr);
            keep(&path, &connect.user, key)?;
            connect.keyring = Some(path.clone());
            key_file = Some(path);
        }
        Ok(Self { connect, pool, data_pool, key_file })
    }

    /// The pool.
    ///
    /// # Errors
    /// 115: none is named.
    pub(super) fn pool(&self) -> Result<&str, ApiError> {
        let missing = || errors::fail(115, "device_config:pool is the pool of the SR");
        self.pool.as_deref().ok_or_else(missing)
    }

    /// Removes the file of a key.
    pub(super) fn forget_key(&self) {
        if let Some(path) = &self.key_file {
            forget(path);
        }
    }

    /// The file that was made for a key.
    pub(super) fn key_file(&self) -> Option<PathBuf> {
        self.key_file.clone()
    }
}

/// Removes the file of a key; it is made again at the next attach.
pub(super) fn forget(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("the key of a Ceph user stays in {}: {error}", path.display());
        }
        _ => {}
    }
}

fn key_path(places: &Places, sr: Option<Uuid>) -> PathBuf {
    let name = sr.map_or_else(|| format!("process-{}", std::process::id()), |sr| sr.to_string());
    places.run_dir.join("ceph").join(format!("{name}.keyring"))
}

/// Writes a keyring that its owner alone reads.
fn keep(path: &Path, user: &str, key: &str) -> Result<(), ApiError> {
    let is_key = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
    if key.len() > 256 || !key.bytes().all(is_key) {
        // Not with the key: errors are logged.
        return Err(errors::fail(20, format_args!("device_config:cephkey is no key of client.{user}")));
    }
    let directory = path.parent().unwrap_or(Path::new("/"));
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    let written = made.and_then(|()| {
        let beside = path.with_extension("new");
        let _ = fs::remove_file(&beside);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(format!("[client.{user}]\n\tkey = {key}\n").as_bytes())?;
        fs::rename(&beside, path)
    });
    written.map_err(|error| errors::io(47, "cannot write the keyring", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn config(pairs: &[(&str, &str)]) -> Config {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_key_goes_into_a_file_of_its_owner_and_into_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let places =
            Places { mount_dir: dir.path().into(), run_dir: dir.path().into(), state_dir: dir.path().into() };
        let sr = Uuid::from_u128(7);
        let pairs = [("pool", "rbd"), ("user", "tapio"), ("cephkey", "AQBx+/==")];
        let wanted = Wanted::of(&config(&pairs), &places, Some(sr)).unwrap();
        let path = wanted.connect.keyring.clone().expect("a keyring");
        assert_eq!(fs::read_to_string(&path).unwrap(), "[client.tapio]\n\tkey = AQBx+/==\n");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        wanted.forget_key();
        assert!(!path.exists());
        let bad = [("pool", "rbd"), ("cephkey", "secret key\n[x]")];
        let error = Wanted::of(&config(&bad), &places, Some(sr)).expect_err("no key");
        assert_eq!(error.code, "SR_BACKEND_FAILURE_20");
        assert!(!format!("{error:?}").contains("secret key"), "{error:?}");
    }

    #[test]
    fn what_cannot_be_used_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let places =
            Places { mount_dir: dir.path().into(), run_dir: dir.path().into(), state_dir: dir.path().into() };
        let code = |pairs: &[(&str, &str)]| {
            let wanted = Wanted::of(&config(pairs), &places, None);
            wanted.and_then(|wanted| wanted.pool().map(drop)).err().map(|error| error.code)
        };
        assert_eq!(code(&[("pool", "rbd")]), None);
        assert_eq!(code(&[]).as_deref(), Some("SR_BACKEND_FAILURE_115"));
        for pair in [("pool", "a/b"), ("conf", "x"), ("mon_host", "a b"), ("user", "a b"), ("timeout", "-1")]
        {
            let pairs = [("pool", "rbd"), pair];
            assert_eq!(code(&pairs).as_deref(), Some("SR_BACKEND_FAILURE_1"), "{pair:?}");
        }
        let both = [("pool", "rbd"), ("keyring", "/k"), ("cephkey", "AQ==")];
        assert_eq!(code(&both).as_deref(), Some("SR_BACKEND_FAILURE_1"));
    }
}
