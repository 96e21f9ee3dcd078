//! How an export is named: a URI, or one of tapdisk's and QEMU's short forms.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::tls::TlsOptions;
use crate::wire::STRING_LEN_MAX;

/// The port of a URI that names none.
pub const PORT: u16 = 10809;
/// How long requests wait for a server that is gone, by default.
const RECONNECT_DEFAULT: Duration = Duration::from_secs(60);
/// Connections that one storage may have.
pub const CONNECTIONS_MAX: u32 = 16;
/// Longest wait that can be configured: a day.
const SECONDS_MAX: u64 = 86_400;
/// Room in a UNIX socket's address, without its NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A UNIX socket.
    Unix(PathBuf),
    /// A host, by name or address, and a port.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// Port.
        port: u16,
    },
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// What becomes of writes that were answered, but not flushed, when the connection was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Unflushed {
    /// The server may have been restarted and may have lost them: the next flush fails.
    #[default]
    Fail,
    /// The administrator knows that the server keeps them whatever happens.
    Keep,
}

/// An export and how to use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Where the server is.
    pub endpoint: Endpoint,
    /// The name of the export; empty for the default one.
    pub export: String,
    /// Connections to make if the server allows several.
    pub connections: u32,
    /// How long requests wait for a server that is gone; zero: they fail at once.
    pub reconnect: Duration,
    /// How long a server may take for one request; without one, as long as it wants.
    pub timeout: Option<Duration>,
    /// See there.
    pub unflushed: Unflushed,
    /// How to begin TLS, which then must be; none without.
    pub tls: Option<TlsOptions>,
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

impl fmt::Display for Target {
    /// For people: where and which, without the options.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NBD export '{}' at {}", self.export.escape_debug(), self.endpoint)
    }
}

impl FromStr for Target {
    type Err = TargetError;

    /// Reads `nbd://host[:port]/export`, `nbd+unix:///export?socket=/path`, `/path/to/socket`,
    /// `host:port[:exportname=name]` or `unix:/path[:exportname=name]`.
    fn from_str(text: &str) -> Result<Self> {
        if text.chars().any(char::is_control) {
            return wrong("an NBD target cannot contain control characters");
        }
        match text.split_once("://") {
            Some((scheme, rest)) => uri(scheme, rest),
            None => short(text),
        }
    }
}

impl Target {
    fn new(endpoint: Endpoint, export: String) -> Result<Self> {
        if let Endpoint::Unix(path) = &endpoint {
            let len = path.as_os_str().len();
            if !path.is_absolute() || len > SOCKET_PATH_MAX {
                return wrong(format!(
                    "'{}' cannot be a socket: give an absolute path of at most {SOCKET_PATH_MAX} bytes",
                    path.display()
                ));
            }
        }
        if export.len() > STRING_LEN_MAX || export.contains('\0') {
            return wrong(format!("an export's name has at most {STRING_LEN_MAX} bytes and no NUL"));
        }
        Ok(Self {
            endpoint,
            export,
            connections: 1,
            reconnect: RECONNECT_DEFAULT,
            timeout: None,
            unflushed: Unflushed::default(),
            tls: None,
        })
    }

    /// Takes one `key=value` of a URI; false when the key is none of ours.
    fn option(&mut self, key: &str, value: &str) -> Result<bool> {
        match key {
            "connections" => match value.parse() {
                Ok(count @ 1..=CONNECTIONS_MAX) => self.connections = count,
                _ => return wrong(format!("connections={value}: a number from 1 to {CONNECTIONS_MAX}")),
            },
            "reconnect" => self.reconnect = seconds(key, value)?,
            "timeout" => self.timeout = Some(seconds(key, value)?).filter(|time| !time.is_zero()),
            "unflushed" => {
                self.unflushed = match value {
                    "fail" => Unflushed::Fail,
                    "keep" => Unflushed::Keep,
                    _ => return wrong(format!("unflushed={value}: either 'fail' or 'keep'")),
                }
            }
            _ => {
                let Some(tls) = &mut self.tls else { return Ok(false) };
                let path = || Some(PathBuf::from(value)).filter(|path| path.is_absolute());
                match key {
                    "tls-certificates" => tls.files.dir = path(),
                    "tls-psk-file" => tls.files.psk = path(),
                    "tls-hostname" => {
                        tls.hostname = Some(value.to_owned());
                        return Ok(true);
                    }
                    // The only way there is.
                    "tls-verify-peer" if matches!(value, "true" | "1") => return Ok(true),
                    "tls-verify-peer" => return wrong("the server's certificate is always checked"),
                    _ => return Ok(false),
                }
                if path().is_none() {
                    return wrong(format!("{key}={value}: give an absolute path"));
                }
            }
        }
        Ok(true)
    }
}

fn seconds(key: &str, value: &str) -> Result<Duration> {
    match value.parse() {
        Ok(count @ 0..=SECONDS_MAX) => Ok(Duration::from_secs(count)),
        _ => wrong(format!("{key}={value}: seconds from 0 to {SECONDS_MAX}")),
    }
}

fn uri(scheme: &str, rest: &str) -> Result<Target> {
    let (is_unix, with_tls) = match scheme {
        "nbd" => (false, false),
        "nbd+unix" => (true, false),
        "nbds" => (false, true),
        "nbds+unix" => (true, true),
        "nbd+vsock" | "nbds+vsock" | "nbd+ssh" => return wrong(format!("'{scheme}:' is not supported")),
        _ => {
            return wrong(format!(
                "'{scheme}:' names no NBD export: use 'nbd:', 'nbds:', 'nbd+unix:' or 'nbds+unix:'"
            ));
        }
    };
    let rest = rest.split_once('#').map_or(rest, |(before, _)| before);
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let export = percent_decoded(path)?;
    let (user, host_port) = match authority.rsplit_once('@') {
        Some((user, host_port)) => (Some(user), host_port),
        None => (None, authority),
    };
    if user.is_some() && !with_tls {
        return wrong("a user is named, which only TLS with pre-shared keys knows: use 'nbds:'");
    }
    let user = user.map(percent_decoded).transpose()?;
    let mut socket = None;
    let mut options = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (key, value) = (percent_decoded(key)?, percent_decoded(value)?);
        if key == "socket" {
            socket = Some(PathBuf::from(value));
        } else {
            options.push((key, value));
        }
    }
    let endpoint = match (is_unix, socket) {
        (true, Some(path)) if host_port.is_empty() => Endpoint::Unix(path),
        (true, Some(_)) => {
            return wrong("a UNIX socket has no host: write 'nbd+unix:///export?socket=/path'");
        }
        (true, None) => {
            return wrong("the socket is missing: write 'nbd+unix:///export?socket=/path/to/socket'");
        }
        (false, Some(_)) => return wrong("'socket=' belongs to 'nbd+unix:'"),
        (false, None) => {
            let (host, port) = host_and_port(host_port)?;
            Endpoint::Tcp { host, port: port.unwrap_or(PORT) }
        }
    };
    let mut target = Target::new(endpoint, export)?;
    target.tls = with_tls.then(|| TlsOptions { user, ..TlsOptions::default() });
    for (key, value) in options {
        if !target.option(&key, &value)? {
            return wrong(format!(
                "'{key}' is no option of this NBD target: there are socket, connections, reconnect, timeout, \
                 unflushed, and with nbds: tls-certificates, tls-psk-file, tls-hostname"
            ));
        }
    }
    if let Some(tls) = &target.tls
        && tls.files.dir.is_none()
        && tls.files.psk.is_none()
    {
        return wrong(format!("'{scheme}:' needs tls-certificates=DIR or tls-psk-file=FILE"));
    }
    Ok(target)
}

/// `host`, `host:port`, `[v6]` or `[v6]:port`, percent-encoded.
fn host_and_port(text: &str) -> Result<(String, Option<u16>)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let Some((host, after)) = rest.split_once(']') else {
                return wrong(format!("'{text}' has a '[' without its ']'"));
            };
            if !matches!(host.parse(), Ok(IpAddr::V6(_))) {
                return wrong(format!("'{host}' is no IPv6 address"));
            }
            match after.strip_prefix(':') {
                Some(port) => (host.to_owned(), Some(port)),
                None if after.is_empty() => (host.to_owned(), None),
                None => return wrong(format!("'{after}' after an address is no port")),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (percent_decoded(host)?, Some(port)),
            None => (percent_decoded(text)?, None),
        },
    };
    if host.is_empty() {
        return wrong("the host is missing: write 'nbd://host/export'");
    }
    match port {
        None | Some("") => Ok((host, None)),
        Some(port) => match port.parse() {
            Ok(port @ 1..) => Ok((host, Some(port))),
            _ => wrong(format!("'{port}' is no port: a number from 1 to 65535")),
        },
    }
}

fn percent_decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let hex = |digit: &u8| char::from(*digit).to_digit(16);
        match after {
            [high, low, after @ ..] => match (hex(high), hex(low)) {
                (Some(high), Some(low)) => {
                    bytes.push((high * 16 + low) as u8);
                    rest = after;
                }
                _ => return wrong(format!("'{text}' has a '%' without two hexadecimal digits")),
            },
            _ => return wrong(format!("'{text}' has a '%' without two hexadecimal digits")),
        }
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => wrong(format!("'{text}' is not UTF-8 without NUL")),
    }
}

/// The forms without `//`: a socket's path, or address, port and export.
fn short(text: &str) -> Result<Target> {
    if text.starts_with('/') {
        return Target::new(Endpoint::Unix(PathBuf::from(text)), String::new());
    }
    let (place, export) = match text.split_once(":exportname=") {
        Some((place, export)) => (place, export.to_owned()),
        None => (text, String::new()),
    };
    if let Some(path) = place.strip_prefix("unix:") {
        return Target::new(Endpoint::Unix(PathBuf::from(path)), export);
    }
    let (host, port) = host_and_port(place)?;
    let Some(port) = port else {
        return wrong(format!(
            "'{text}' names no NBD export: write 'nbd://host/export', '/path/to/socket' or 'address:port'"
        ));
    };
    Target::new(Endpoint::Tcp { host, port }, export)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn tcp(host: &str, port: u16) -> Endpoint {
        Endpoint::Tcp { host: host.into(), port }
    }

    #[test]
    fn uris_name_host_port_export_and_options() {
        let plain = target("nbd://example.org/disk");
        assert_eq!((&plain.endpoint, plain.export.as_str()), (&tcp("example.org", 10809), "disk"));
        assert_eq!((plain.connections, plain.reconnect.as_secs(), plain.timeout), (1, 60, None));
        assert_eq!(target("nbd://localhost:1234").endpoint, tcp("localhost", 1234));
        assert_eq!(target("nbd://[::1]:7/a/b").endpoint, tcp("::1", 7));
        assert_eq!(target("nbd://[::1]:7/a/b").export, "a/b");
        assert_eq!(target("nbd://h//a%20b%2Fc").export, "/a b/c");
        let full = target(
            "nbd+unix:///x%3fy?socket=/run/n%20b.sock&connections=4&reconnect=0&timeout=5&unflushed=keep",
        );
        assert_eq!(full.endpoint, Endpoint::Unix("/run/n b.sock".into()));
        assert_eq!(
            (full.export.as_str(), full.connections, full.reconnect, full.timeout, full.unflushed),
            ("x?y", 4, Duration::ZERO, Some(Duration::from_secs(5)), Unflushed::Keep)
        );
    }

    #[test]
    fn tls_is_part_of_the_scheme_and_its_files_are_named() {
        assert_eq!(target("nbd://host/").tls, None);
        let psk = target("nbds://al%20ice@host/disk?tls-psk-file=/etc/keys.psk").tls.unwrap();
        assert_eq!((psk.user.as_deref(), psk.files.psk), (Some("al ice"), Some("/etc/keys.psk".into())));
        let unix = target("nbds+unix://bob@/?socket=/s&tls-certificates=/etc/pki&tls-hostname=server");
        let tls = unix.tls.unwrap();
        assert_eq!((tls.user.as_deref(), tls.hostname.as_deref()), (Some("bob"), Some("server")));
        assert_eq!(tls.files.dir, Some("/etc/pki".into()));
    }

    #[test]
    fn short_forms_are_those_of_tapdisk_and_qemu() {
        assert_eq!(target("/run/x.sock").endpoint, Endpoint::Unix("/run/x.sock".into()));
        assert_eq!(target("10.0.0.1:5555").endpoint, tcp("10.0.0.1", 5555));
        assert_eq!(target("10.0.0.1:5555:exportname=a:b").export, "a:b");
        let unix = target("unix:/run/x.sock:exportname=disk");
        assert_eq!((unix.endpoint, unix.export.as_str()), (Endpoint::Unix("/run/x.sock".into()), "disk"));
    }

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        for (text, reason) in [
            ("nbd:///disk", "host is missing"),
            ("nbd+unix:///disk", "socket is missing"),
            ("nbd+unix://host/disk?socket=/s", "no host"),
            ("nbd://host/?socket=/s", "nbd+unix"),
            ("nbd+unix:///?socket=run/s", "absolute path"),
            ("nbd://host:0/", "no port"),
            ("nbd://host:99999/", "no port"),
            ("nbd://host/?conections=2", "'conections' is no option"),
            ("nbd://host/?connections=0", "from 1 to 16"),
            ("nbd://host/?reconnect=soon", "seconds"),
            ("nbd://host/?unflushed=maybe", "'fail' or 'keep'"),
            ("nbd://host/?tls-certificates=/etc/pki", "with nbds:"),
            ("nbd://alice@host/", "use 'nbds:'"),
            ("nbds://host/", "needs tls-certificates"),
            ("nbds://host/?tls-psk-file=keys", "absolute path"),
            ("nbds://host/?tls-certificates=/c&tls-verify-peer=false", "always checked"),
            ("nbd://host/%zz", "hexadecimal"),
            ("nbd://host/%f", "hexadecimal"),
            ("nbd://host/%ff", "UTF-8"),
            ("nbd://host/%00", "NUL"),
            ("nbd://[::1/", "without its ']'"),
            ("http://host/", "names no NBD export"),
            ("host", "names no NBD export"),
            ("", "host is missing"),
            ("a\nb", "control characters"),
        ] {
            let error = text.parse::<Target>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    proptest! {
        /// It must only not panic.
        #[test]
        fn no_text_makes_the_parser_panic(text: String, tail in "[nbds+unix:/?&=%@\\[\\]a-f0-9]*") {
            let _ = text.parse::<Target>();
            let _ = format!("nbd://{tail}").parse::<Target>();
            let _ = tail.parse::<Target>();
        }
    }
}
