//! How an image is named: `POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?key=value&...]`, parts percent-encoded.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Longest name of a pool, a namespace, an image or a snapshot.
const NAME_LEN_MAX: usize = 255;
/// Longest list of monitors.
const MON_HOST_LEN_MAX: usize = 4096;
/// Longest wait that can be configured, in seconds: a day.
const SECONDS_MAX: u64 = 86_400;
/// The user of a name that names none.
const USER: &str = "admin";

/// How to reach a cluster, and as whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Connect {
    /// A configuration file; without it and without monitors `/etc/ceph/ceph.conf`.
    pub conf: Option<PathBuf>,
    /// Addresses of monitors with commas between them, as `10.0.0.1:6789,10.0.0.2:6789`.
    pub mon_host: Option<String>,
    /// The user, without `client.`.
    pub user: String,
    /// The file with the user's key; without it Ceph's own places are tried.
    pub keyring: Option<PathBuf>,
    /// How long one operation may take; without it as long as the cluster takes.
    pub timeout: Option<Duration>,
}

impl Default for Connect {
    fn default() -> Self {
        Self { conf: None, mon_host: None, user: USER.to_owned(), keyring: None, timeout: None }
    }
}

/// An image and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The cluster.
    pub connect: Connect,
    /// The pool.
    pub pool: String,
    /// The namespace in it, if it is not the nameless one.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// The snapshot of the image; then it is only read.
    pub snapshot: Option<String>,
}

/// Why a name was not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetError(String);

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TargetError {}

impl From<TargetError> for std::io::Error {
    fn from(error: TargetError) -> Self {
        Self::new(std::io::ErrorKind::InvalidInput, error)
    }
}

type Result<T> = std::result::Result<T, TargetError>;

fn wrong<T>(message: impl Into<String>) -> Result<T> {
    Err(TargetError(message.into()))
}

/// Whether a pool, a namespace, an image or a snapshot may be called so.
///
/// # Errors
/// A sentence; `what` names the thing.
pub fn check_name(what: &str, name: &str) -> Result<()> {
    let is_plain = |character: char| !character.is_control() && !matches!(character, '/' | '@');
    if name.is_empty() || name.len() > NAME_LEN_MAX || !name.chars().all(is_plain) {
        return wrong(format!(
            "'{}' is no name of {what}: 1 to {NAME_LEN_MAX} bytes without '/', '@' and control characters",
            name.escape_debug()
        ));
    }
    Ok(())
}

impl Connect {
    /// Takes one `key=value`; false where the key is none of ours.
    ///
    /// # Errors
    /// The value cannot be used.
    pub fn option(&mut self, key: &str, value: &str) -> Result<bool> {
        let path = || match value.starts_with('/') && !value.chars().any(char::is_control) {
            true => Ok(Some(PathBuf::from(value))),
            false => wrong(format!("{key}={}: give an absolute path", value.escape_debug())),
        };
        match key {
            "conf" => self.conf = path()?,
            "keyring" => self.keyring = path()?,
            "mon_host" => {
                let is_address = |c: char| c.is_ascii_alphanumeric() || ".:,[]/_-".contains(c);
                if value.is_empty() || value.len() > MON_HOST_LEN_MAX || !value.chars().all(is_address) {
                    let value = value.escape_debug();
                    return wrong(format!(
                        "mon_host={value}: addresses with commas between them, as 10.0.0.1:6789"
                    ));
                }
                self.mon_host = Some(value.to_owned());
            }
            "user" => {
                let name = value.strip_prefix("client.").unwrap_or(value);
                let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
                let is_name = !name.is_empty() && name.len() <= NAME_LEN_MAX && !name.starts_with("client.");
                if !is_name || !name.chars().all(is_plain) {
                    return wrong(format!("user={}: a user of Ceph, as admin", value.escape_debug()));
                }
                name.clone_into(&mut self.user);
            }
            "timeout" => match value.parse() {
                Ok(count @ 0..=SECONDS_MAX) => {
                    self.timeout = Some(Duration::from_secs(count)).filter(|time| !time.is_zero());
                }
                _ => {
                    return wrong(format!(
                        "timeout={}: seconds from 0 to {SECONDS_MAX}",
                        value.escape_debug()
                    ));
                }
            },
            "key" => return wrong("a key is no part of a name: put it into a file, and give keyring=/path"),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The options, as a name has them.
    fn options(&self) -> Vec<(&'static str, String)> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let user = (self.user != USER).then(|| self.user.clone());
        let timeout = self.timeout.map(|timeout| timeout.as_secs().to_string());
        let all = [
            ("conf", path(&self.conf)),
            ("mon_host", self.mon_host.clone()),
            ("user", user),
            ("keyring", path(&self.keyring)),
            ("timeout", timeout),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }
}

impl Target {
    /// The name that [`FromStr`] reads, without `rbd:`.
    pub fn name(&self) -> String {
        let mut text = encoded(&self.pool);
        for part in self.namespace.iter().chain([&self.image]) {
            text.push('/');
            text.push_str(&encoded(part));
        }
        if let Some(snapshot) = &self.snapshot {
            text.push('@');
            text.push_str(&encoded(snapshot));
        }
        for (index, (key, value)) in self.connect.options().into_iter().enumerate() {
            text.push(if index == 0 { '?' } else { '&' });
            text.push_str(key);
            text.push('=');
            text.push_str(&encoded(&value));
        }
        text
    }
}

impl fmt::Display for Target {
    /// For people: which, without how to reach it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RBD image {}/", self.pool.escape_debug())?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{}/", namespace.escape_debug())?;
        }
        write!(f, "{}", self.image.escape_debug())?;
        self.snapshot.as_ref().map_or(Ok(()), |snapshot| write!(f, "@{}", snapshot.escape_debug()))
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self> {
        if text.chars().any(char::is_control) {
            return wrong("the name of an RBD image cannot contain control characters");
        }
        let (place, query) = text.split_once('?').unwrap_or((text, ""));
        let (place, snapshot) = match place.split_once('@') {
            Some((place, snapshot)) => (place, Some(decoded(snapshot)?)),
            None => (place, None),
        };
        let parts: Vec<String> = place.split('/').map(decoded).collect::<Result<_>>()?;
        let (pool, namespace, image) = match <[String; 2]>::try_from(parts) {
            Ok([pool, image]) => (pool, None, image),
            Err(parts) => match <[String; 3]>::try_from(parts) {
                Ok([pool, namespace, image]) => (pool, Some(namespace), image),
                Err(_) => {
                    return wrong(format!(
                        "'{}' names no RBD image: write 'POOL/IMAGE' or 'POOL/NAMESPACE/IMAGE'",
                        text.escape_debug()
                    ));
                }
            },
        };
        check_name("a pool", &pool)?;
        namespace.iter().try_for_each(|namespace| check_name("a namespace", namespace))?;
        check_name("an image", &image)?;
        snapshot.iter().try_for_each(|snapshot| check_name("a snapshot", snapshot))?;
        let mut connect = Connect::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !connect.option(key, &decoded(value)?)? {
                return wrong(format!(
                    "'{}' is no option of an RBD image: there are conf, mon_host, user, keyring, timeout",
                    key.escape_debug()
                ));
            }
        }
        Ok(Self { connect, pool, namespace, image, snapshot })
    }
}

fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b':' | b',' => {
                out.push(char::from(byte));
            }
            // Of paths, in options alone: no name has one.
            b'/' => out.push('/'),
            _ => out.push_str(&format!("%{byte:02x}")),
        }
    }
    out
}

fn decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = after.first_chunk::<2>().and_then(|[high, low]| {
            let hex = |digit: u8| char::from(digit).to_digit(16);
            Some(hex(*high)? * 16 + hex(*low)?)
        });
        let Some(byte) = digits else {
            return wrong(format!("'{}' has a '%' without two hexadecimal digits", text.escape_debug()));
        };
        bytes.push(byte as u8);
        rest = &after[2..];
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => wrong(format!("'{}' is not UTF-8 without NUL", text.escape_debug())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_name_has_a_pool_an_image_and_options() {
        let plain = target("rbd/disk");
        assert_eq!(
            (plain.pool.as_str(), plain.namespace.as_deref(), plain.image.as_str()),
            ("rbd", None, "disk")
        );
        assert_eq!(plain.connect, Connect::default());
        let full = target(
            "rbd/sr%201/disk@before?conf=/etc/ceph/x%26y.conf&mon_host=[v2:10.0.0.1:3300,v1:10.0.0.1:6789],h:1\
             &user=client.tapio&keyring=/k&timeout=5",
        );
        assert_eq!((full.namespace.as_deref(), full.snapshot.as_deref()), (Some("sr 1"), Some("before")));
        assert_eq!(full.connect.conf, Some("/etc/ceph/x&y.conf".into()));
        assert_eq!(
            (full.connect.user.as_str(), full.connect.timeout),
            ("tapio", Some(Duration::from_secs(5)))
        );
        assert_eq!(target(&full.name()), full);
        assert_eq!(full.to_string(), "RBD image rbd/sr 1/disk@before");
    }

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        for (text, reason) in [
            ("disk", "write 'POOL/IMAGE'"),
            ("a/b/c/d", "write 'POOL/IMAGE'"),
            ("/disk", "no name of a pool"),
            ("rbd/", "no name of an image"),
            ("rbd/a@", "no name of a snapshot"),
            ("rbd/a%2fb", "no name of an image"),
            ("rbd/a%40b", "no name of an image"),
            ("rbd/a%0a", "no name of an image"),
            ("rbd/a%zz", "hexadecimal"),
            ("rbd/a%ff", "UTF-8"),
            ("rbd/a?conf=x", "absolute path"),
            ("rbd/a?mon_host=a;b", "commas"),
            ("rbd/a?user=", "a user of Ceph"),
            ("rbd/a?timeout=soon", "seconds"),
            ("rbd/a?key=AQ", "put it into a file"),
            ("rbd/a?cache=1", "no option"),
            ("rbd/a\nb", "control"),
        ] {
            let error = text.parse::<Target>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
