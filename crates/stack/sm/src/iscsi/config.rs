//! What a `device_config` says of a target.

use std::fmt;
use std::net::{IpAddr, ToSocketAddrs};

use tapio_types::ApiError;

use super::name::{PORT, Portal, is_iscsi_name};
use crate::errors;
use crate::network::address;
use crate::traits::Config;

/// Longest user name or password that open-iscsi's records hold.
const WORD_LEN_MAX: usize = 255;
/// Portals that a configuration may name.
const PORTALS_MAX: usize = 16;

/// Keys of `device_config` that all types on iSCSI have.
pub(crate) const KEYS: &[(&str, &str)] = &[
    ("target", "address or name of the target, or several with commas between them (required)"),
    (
        "targetIQN",
        "iSCSI name of the target, or * for all at that address (required); without it a probe lists them",
    ),
    ("port", "TCP port of the target, 3260 if it is left out"),
    ("chapuser", "user name with which this host logs in"),
    ("chappassword", "its password, kept as a secret"),
    ("incoming_chapuser", "user name with which the target has to prove itself to this host"),
    ("incoming_chappassword", "its password, kept as a secret"),
    ("multihomed", "true: log in at every portal that the target names; needs multipathd"),
    ("localIQN", "iSCSI name with which this host logs in, if it is not the one of /etc/iscsi"),
    (
        "replacement_timeout",
        "seconds after which requests fail when a session is lost; without it they wait until the session is back, or \
         15 s where there are several",
    ),
];

/// A user name and its password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Chap {
    pub(crate) user: String,
    pub(crate) password: String,
}

impl fmt::Debug for Chap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chap({})", self.user)
    }
}

/// The target, or targets, of an SR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// `device_config:target` as it was given.
    pub(crate) given: String,
    /// Its addresses, in that order.
    pub(crate) portals: Vec<Portal>,
    pub(crate) port: u16,
    /// Its name; none for all that there are.
    pub(crate) name: Option<String>,
    pub(crate) chap: Option<Chap>,
    pub(crate) incoming: Option<Chap>,
    pub(crate) multihomed: bool,
    pub(crate) initiator: Option<String>,
    pub(crate) replacement_timeout: Option<i64>,
}

impl Target {
    /// Reads all but the name of the target; names of hosts are resolved.
    ///
    /// # Errors
    /// 95 without a target, 140 for a name that cannot be resolved, 142, 106, 1.
    pub(crate) fn new(config: &Config) -> Result<Self, ApiError> {
        let text = |key: &str| config.get(key).map(String::as_str).filter(|value| !value.is_empty());
        let Some(given) = text("target") else {
            return Err(errors::fail(95, "device_config:target is the address of the iSCSI target"));
        };
        let port = match text("port") {
            None => PORT,
            Some(port) => port
                .parse()
                .ok()
                .filter(|port| *port > 0)
                .ok_or_else(|| errors::fail(142, format_args!("device_config:port is '{port}'")))?,
        };
        let replacement_timeout = match text("replacement_timeout") {
            None => None,
            Some(seconds) => Some(seconds.parse::<u32>().map(i64::from).map_err(|_| {
                errors::fail(1, format_args!("replacement_timeout '{seconds}' is no number of seconds"))
            })?),
        };
        let initiator = text("localIQN").map(str::to_owned);
        if let Some(name) = initiator.as_ref().filter(|name| !is_iscsi_name(name)) {
            return Err(errors::fail(106, format_args!("device_config:localIQN is '{name}'")));
        }
        let incoming = chap(config, "incoming_chapuser", "incoming_chappassword")?;
        let chap = chap(config, "chapuser", "chappassword")?;
        if incoming.is_some() && chap.is_none() {
            let text =
                "a target proves itself to a host that has done so: name chapuser and chappassword, too";
            return Err(errors::fail(1, text));
        }
        Ok(Self {
            given: given.to_owned(),
            portals: resolved(given, port)?,
            port,
            name: None,
            chap,
            incoming,
            multihomed: text("multihomed") == Some("true"),
            initiator,
            replacement_timeout,
        })
    }

    /// The name of the target: [`Self::name`] is set. False without one.
    ///
    /// # Errors
    /// 106: it is none.
    pub(crate) fn named(&mut self, config: &Config) -> Result<bool, ApiError> {
        match config.get("targetIQN").map_or("", String::as_str) {
            "" => return Ok(false),
            "*" => self.name = None,
            name if is_iscsi_name(name) => self.name = Some(name.to_owned()),
            name => return Err(errors::fail(106, format_args!("device_config:targetIQN is '{name}'"))),
        }
        Ok(true)
    }
}

fn chap(config: &Config, user: &str, password: &str) -> Result<Option<Chap>, ApiError> {
    let of = |key: &str| config.get(key).filter(|value| !value.is_empty());
    let (Some(name), Some(secret)) = (of(user), of(password)) else {
        return match of(user).or(of(password)) {
            None => Ok(None),
            Some(_) => {
                Err(errors::fail(115, format_args!("device_config:{user} and {password} go together")))
            }
        };
    };
    for (key, value) in [(user, name), (password, secret)] {
        // A record of open-iscsi has one value in a line, without blanks around it.
        let fits =
            value.len() <= WORD_LEN_MAX && value.trim() == value && !value.chars().any(char::is_control);
        if !fits {
            let text = format!(
                "device_config:{key} has more than {WORD_LEN_MAX} bytes, blanks at an end, or control characters"
            );
            return Err(errors::fail(2, text));
        }
    }
    Ok(Some(Chap { user: name.clone(), password: secret.clone() }))
}

fn resolved(given: &str, port: u16) -> Result<Vec<Portal>, ApiError> {
    let mut portals: Vec<Portal> = Vec::new();
    let mut failed = None;
    let names = given.split(',').map(str::trim).filter(|name| !name.is_empty());
    for name in names.take(PORTALS_MAX) {
        let server = address::server(name, 95)?;
        let bare = server.trim_matches(['[', ']']);
        match bare.parse::<IpAddr>().map(|address| vec![address]).or_else(|_| look_up(bare, port)) {
            Ok(found) => portals.extend(found.first().map(|address| Portal { address: *address, port })),
            Err(error) => failed = Some(errors::fail(140, format_args!("{name}: {error}"))),
        }
    }
    portals.dedup();
    match failed {
        Some(error) if portals.is_empty() => Err(error),
        _ if portals.is_empty() => Err(errors::fail(95, format_args!("'{given}' names no address"))),
        _ => Ok(portals),
    }
}

fn look_up(name: &str, port: u16) -> std::io::Result<Vec<IpAddr>> {
    Ok((name, port).to_socket_addrs()?.map(|found| found.ip()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Config {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_is_missing_or_wrong_has_its_number() {
        let code = |more: &[(&str, &str)]| {
            let base = [("target", "127.0.0.1")];
            Target::new(&config(&[&base[..], more].concat())).err().map(|error| error.code)
        };
        let number = |number: u16| Some(format!("SR_BACKEND_FAILURE_{number}").into());
        assert_eq!(code(&[]), None);
        assert_eq!(code(&[("target", "")]), number(95));
        assert_eq!(code(&[("target", "-x")]), number(95));
        assert_eq!(code(&[("target", "no-such-host.invalid")]), number(140));
        for port in ["0", "65536", "x"] {
            assert_eq!(code(&[("port", port)]), number(142));
        }
        assert_eq!(code(&[("chapuser", "u")]), number(115));
        assert_eq!(code(&[("chapuser", "u"), ("chappassword", "a\nb")]), number(2));
        assert_eq!(code(&[("incoming_chapuser", "u"), ("incoming_chappassword", "p")]), number(1));
        assert_eq!(code(&[("localIQN", "x")]), number(106));
        assert_eq!(code(&[("replacement_timeout", "-1")]), number(1));
    }

    #[test]
    fn a_target_has_its_addresses_in_order_and_shows_no_password() {
        let pairs = [
            ("target", "127.0.0.2,127.0.0.1, fd00::1"),
            ("chapuser", "anna"),
            ("chappassword", "geheim"),
            ("port", "3261"),
        ];
        let mut target = Target::new(&config(&pairs)).unwrap();
        let shown: Vec<String> = target.portals.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["127.0.0.2:3261", "127.0.0.1:3261", "[fd00::1]:3261"]);
        let debug = format!("{target:?}");
        assert!(debug.contains("anna") && !debug.contains("geheim"), "{debug}");
        assert_eq!(target.named(&config(&[])), Ok(false));
        assert_eq!(target.named(&config(&[("targetIQN", "*")])), Ok(true));
        assert_eq!(target.name, None);
        let error = target.named(&config(&[("targetIQN", "iqn./x")])).unwrap_err();
        assert_eq!(error.code, "SR_BACKEND_FAILURE_106");
    }
}
