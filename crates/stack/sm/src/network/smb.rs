//! Shares of SMB servers.

use tapio_types::ApiError;

use super::{LIBRARY, Mounting, Numbers, Share, address};
use crate::dir;
use crate::errors;
use crate::traits::{Config, DriverInfo};

pub(crate) static INFO: DriverInfo = DriverInfo {
    sr_type: "smb",
    name: "SMB",
    description: "VDIs as VHD and raw files in a directory of an SMB share",
    capabilities: dir::CAPABILITIES,
    configuration: &[
        ("server", "the share, as //server/share or //server/share/directory (required)"),
        ("username", "account on the server, with its domain as DOMAIN\\name; a guest without it"),
        ("password", "its password, which is kept as a secret"),
        ("password_secret", "UUID of the secret that has its password"),
        ("vers", "version of the protocol: 3.1.1, 3.0.2, 3.0, 3 (the default), 2.1"),
        ("options", "more mount options"),
        ("preferred-image-formats", "formats of new VDIs in order of preference: vhd, raw"),
        crate::lease::SILENCE_KEY,
    ],
    is_shareable: true,
};

const NUMBERS: Numbers = Numbers { mount: 111, unmount: 112, attached: 113, create: 116, delete: 114 };
const VERSIONS: &[&str] = &["3", "3.0", "3.0.2", "3.1.1", "2.1"];

/// A share, or a directory of one.
#[derive(Clone)]
pub(crate) struct Smb {
    source: String,
    version: String,
    options: Vec<String>,
    /// User, domain, password.
    account: Option<(String, Option<String>, String)>,
    numbers: Numbers,
}

impl Smb {
    /// A library of ISO images; `location` is `//server/share`.
    ///
    /// # Errors
    /// 225 for a location that is none; 1, 227, 228.
    pub(crate) fn library(location: &str, config: &Config) -> Result<Self, ApiError> {
        Self::new(location, 225, LIBRARY, "cifspassword", config)
    }

    /// `number` is for a location that is no share; the password is the value of `password_key`.
    fn new(
        location: &str,
        number: u16,
        numbers: Numbers,
        password_key: &str,
        config: &Config,
    ) -> Result<Self, ApiError> {
        let text = |key| config.get(key).map(String::as_str).filter(|value| !value.is_empty());
        let plain = location.replace('\\', "/");
        let wrong = || errors::fail(number, format_args!("'{location}' is no '//server/share'"));
        let (server, path) =
            plain.strip_prefix("//").and_then(|rest| rest.split_once('/')).ok_or_else(wrong)?;
        let path = address::path(&format!("/{path}"), number)?;
        if path == "/" || path.contains(',') {
            return Err(wrong());
        }
        let source = format!("//{}{path}", address::server(server, number)?.trim_matches(['[', ']']));
        let version = text("vers").unwrap_or("3").to_owned();
        if !VERSIONS.contains(&version.as_str()) {
            let what = format!("vers '{version}' is none of {}", VERSIONS.join(", "));
            return Err(errors::fail(227, what));
        }
        let account = match text("username") {
            None => None,
            Some(name) => {
                let (domain, user) = match name.split_once('\\') {
                    Some((domain, user)) => (Some(domain), user),
                    None => (None, name),
                };
                for part in [Some(user), domain].into_iter().flatten() {
                    if part.is_empty() || part.chars().any(|c| c.is_control() || c == ',') {
                        return Err(errors::fail(1, "username is no name of an account"));
                    }
                }
                let password = text(password_key).unwrap_or_default().to_owned();
                if password.chars().any(|c| c == '\n' || c == '\0') {
                    return Err(errors::fail(1, format_args!("{password_key} has a line break")));
                }
                Some((user.to_owned(), domain.map(str::to_owned), password))
            }
        };
        let options = address::options(text("options").unwrap_or_default())?;
        Ok(Self { source, version, options, account, numbers })
    }
}

impl Share for Smb {
    fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// Servers refuse it, as Windows does.
    fn renames_onto_open(&self) -> bool {
        false
    }

    /// `hard`: a guest waits while the server is away. Locks stay on this host, because the protocol's keep other
    /// readers out of an image. Leases are per file and name, and a base copy has two names for a moment. Attributes
    /// are not kept. No programs and no devices.
    fn mounting(&self, below: Option<&str>) -> Mounting {
        let mut options = vec![format!("vers={}", self.version)];
        let mut secret = None;
        match &self.account {
            None => options.push("guest".into()),
            Some((user, domain, password)) => {
                options.push(format!("username={user}"));
                options.extend(domain.as_ref().map(|domain| format!("domain={domain}")));
                secret = Some(("PASSWD_FD", password.clone().into_bytes()));
            }
        }
        if !self.options.iter().any(|option| option == "soft") {
            options.push("hard".into());
        }
        options.push("actimeo=0,nobrl,nolease,file_mode=0600,dir_mode=0700".into());
        options.extend(self.options.iter().cloned());
        options.push("noatime,nosuid,nodev,noexec".into());
        Mounting {
            program: "mount.cifs",
            package: "cifs-utils",
            source: address::join(&self.source, below),
            options: options.join(","),
            secret,
        }
    }
}

/// The share of a `device_config`.
///
/// # Errors
/// 102 without a server; 1, 227, 228.
pub(crate) fn of(config: &Config) -> Result<Box<dyn Share>, ApiError> {
    let Some(server) = config.get("server").filter(|server| !server.is_empty()) else {
        return Err(errors::fail(102, "device_config:server is the share, as //server/share"));
    };
    Ok(Box::new(Smb::new(server, 102, NUMBERS, "password", config)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Config {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_password_is_no_argument() {
        let base = [("server", r"\\nas\disks\a"), ("username", r"OFFICE\anna"), ("password", "p,w")];
        let mounting = of(&config(&base)).unwrap().mounting(Some("x"));
        assert_eq!(mounting.source, "//nas/disks/a/x");
        assert!(mounting.options.contains("username=anna,domain=OFFICE"), "{}", mounting.options);
        assert!(!mounting.options.contains("p,w"), "{}", mounting.options);
        assert_eq!(mounting.secret, Some(("PASSWD_FD", b"p,w".to_vec())));
        let guest = of(&config(&base[..1])).unwrap().mounting(None);
        assert!(guest.options.contains("guest,hard") && guest.secret.is_none(), "{}", guest.options);
    }

    #[test]
    fn what_is_wrong_has_its_number() {
        let code = |pairs: &[(&str, &str)]| of(&config(pairs)).err().map(|error| error.code);
        assert_eq!(code(&[]).as_deref(), Some("SR_BACKEND_FAILURE_102"));
        for bad in ["nas", "//nas", "//nas/", "//-x/a", "//nas/../a", "//nas/a,b"] {
            assert_eq!(code(&[("server", bad)]).as_deref(), Some("SR_BACKEND_FAILURE_102"), "{bad}");
        }
        let with = |more: (&'static str, &'static str)| code(&[("server", "//n/s"), more]);
        assert_eq!(with(("vers", "1.0")).as_deref(), Some("SR_BACKEND_FAILURE_227"));
        assert_eq!(with(("username", "a,uid=0")).as_deref(), Some("SR_BACKEND_FAILURE_1"));
        assert_eq!(with(("options", "credentials=/x")).as_deref(), Some("SR_BACKEND_FAILURE_228"));
    }
}
