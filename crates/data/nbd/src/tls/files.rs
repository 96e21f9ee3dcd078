//! Certificates and keys from files, in the places where QEMU, libnbd and nbdkit look for them.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The authority that signs the other side.
pub const CA_CERT: &str = "ca-cert.pem";
/// A server's own certificate, and those between it and the authority.
pub const SERVER_CERT: &str = "server-cert.pem";
/// Its key.
pub const SERVER_KEY: &str = "server-key.pem";
/// A client's own certificate, if servers ask for one.
pub const CLIENT_CERT: &str = "client-cert.pem";
/// Its key.
pub const CLIENT_KEY: &str = "client-key.pem";
/// Pre-shared keys.
pub const KEYS: &str = "keys.psk";

/// The longest file that is read.
const FILE_LEN_MAX: u64 = 1 << 20;
/// The shortest pre-shared key that is worth the name, in bytes.
const KEY_LEN_MIN: usize = 16;

/// Why files cannot be used: which file, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsError(pub(super) String);

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TlsError {}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

pub(super) fn bad(path: &Path, why: impl fmt::Display) -> TlsError {
    TlsError(format!("TLS: {}: {why}", path.display()))
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let data = std::fs::metadata(path).map_err(|error| bad(path, error))?;
    if data.len() > FILE_LEN_MAX {
        return Err(bad(path, format_args!("{} bytes are too many for this", data.len())));
    }
    std::fs::read(path).map_err(|error| bad(path, error))
}

/// The certificates of a PEM file.
pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = read(path)?;
    let found = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| bad(path, format_args!("no certificate in PEM form: {error}")))?;
    if found.is_empty() {
        return Err(bad(path, "there is no certificate in it"));
    }
    Ok(found)
}

/// The private key of a PEM file.
pub(super) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    // The error of the parser names kinds of sections, never what is in them.
    PrivateKeyDer::from_pem_slice(&read(path)?)
        .map_err(|error| bad(path, format_args!("no private key in PEM form: {error}")))
}

/// The authorities of a directory.
pub(super) fn authorities(dir: &Path) -> Result<RootCertStore, TlsError> {
    let path = dir.join(CA_CERT);
    let mut store = RootCertStore::empty();
    for certificate in certificates(&path)? {
        store.add(certificate).map_err(|error| bad(&path, format_args!("not an authority: {error}")))?;
    }
    Ok(store)
}

/// Pre-shared keys by the names of their users. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys(BTreeMap<String, Vec<u8>>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Keys {
    /// Reads the file that GnuTLS's `psktool` writes: `user:key`, the key in hexadecimal digits. A user that begins
    /// with `#` is in hexadecimal digits too; other lines that begin so are comments.
    ///
    /// # Errors
    /// The number of the line that is none; never what is in it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut keys = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim_end();
            let Some((user, key)) = line.split_once(':') else {
                if line.is_empty() || line.starts_with('#') {
                    continue;
                }
                return Err(format!("line {} is not user:key", number + 1));
            };
            let user = match user.strip_prefix('#') {
                None => user.to_owned(),
                Some(digits) => match hex(digits).map(String::from_utf8) {
                    Some(Ok(user)) => user,
                    _ => continue,
                },
            };
            let key = hex(key).filter(|key| !key.is_empty());
            let key = key.ok_or_else(|| format!("the key in line {} is not hexadecimal", number + 1))?;
            keys.insert(user, key);
        }
        if keys.is_empty() {
            return Err("there is no user:key in it".into());
        }
        Ok(Self(keys))
    }

    /// The keys of a file.
    ///
    /// # Errors
    /// It cannot be read, every user can read it, or it is not of that form.
    pub fn load(path: &Path) -> Result<Self, TlsError> {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(path).map_err(|error| bad(path, error))?.permissions().mode();
        if mode & 0o004 != 0 {
            return Err(bad(path, "every user can read these keys: make it chmod 600"));
        }
        let text = String::from_utf8(read(path)?).map_err(|_| bad(path, "not a text"))?;
        let keys = Self::parse(&text).map_err(|why| bad(path, why))?;
        if let Some((user, _)) = keys.0.iter().find(|(_, key)| key.len() < KEY_LEN_MIN) {
            let why = format!(
                "the key of '{}' is shorter than {} bits: make one with psktool",
                user.escape_debug(),
                KEY_LEN_MIN * 8
            );
            return Err(bad(path, why));
        }
        Ok(keys)
    }

    /// The key of a user.
    pub fn of(&self, user: &str) -> Option<&[u8]> {
        self.0.get(user).map(Vec::as_slice)
    }

    /// The only user, if there is one.
    pub(super) fn only_user(&self) -> Option<&str> {
        self.0.keys().next().filter(|_| self.0.len() == 1).map(String::as_str)
    }
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.chars().map(|c| c.to_digit(16)).collect::<Option<Vec<_>>>()?;
    if digits.len() % 2 != 0 {
        return None;
    }
    Some(digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect())
}

/// The file with keys of a directory that has one.
pub(super) fn keys_in(dir: &Path) -> Option<PathBuf> {
    Some(dir.join(KEYS)).filter(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn keys_are_read_as_psktool_writes_them() {
        let keys = Keys::parse("# a comment\nalice:00ff\n\n#626f62:0A0b\n").unwrap();
        assert_eq!((keys.of("alice"), keys.of("bob")), (Some(&[0, 255][..]), Some(&[10, 11][..])));
        assert_eq!((keys.of("mallory"), keys.only_user()), (None, None));
        assert_eq!(Keys::parse("alice:00ff").unwrap().only_user(), Some("alice"));
        for (text, why) in [
            ("", "no user:key"),
            ("alice", "line 1 is not user:key"),
            ("alice:00\nbob:5ecre7", "the key in line 2 is not hexadecimal"),
            ("alice:abc", "the key in line 1 is not hexadecimal"),
        ] {
            let error = Keys::parse(text).unwrap_err();
            assert!(error.contains(why) && !error.contains("5ecre7"), "{text}: {error}");
        }
    }

    #[test]
    fn keys_that_everybody_can_read_or_guess_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.psk");
        assert!(Keys::load(&path).unwrap_err().to_string().contains("keys.psk"));
        fs::write(&path, format!("alice:{}", "ab".repeat(32))).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(Keys::load(&path).unwrap_err().to_string().contains("every user can read"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(Keys::load(&path).is_ok());
        fs::write(&path, "alice:abcd").unwrap();
        assert!(Keys::load(&path).unwrap_err().to_string().contains("shorter than 128 bits"));
    }
}
