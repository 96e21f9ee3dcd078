//! TLS of an NBD front end, as the control side names it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::plain_path::plain_path;
use crate::{ControlError, Errno, Result};

/// The answer to clients that do not begin TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TlsMode {
    /// To begin it; nothing else is answered.
    #[default]
    Required,
    /// Nothing: they may stay.
    Offered,
}

impl TlsMode {
    /// Reads `required`, `offered` or `off`, which is none.
    ///
    /// # Errors
    /// `EINVAL` for anything else.
    pub fn parse(text: &str) -> Result<Option<Self>> {
        match text {
            "required" => Ok(Some(Self::Required)),
            "offered" => Ok(Some(Self::Offered)),
            "off" => Ok(None),
            _ => Err(ControlError::new(
                Errno::EINVAL,
                format!("TLS is 'required', 'offered' or 'off', not '{text}'"),
            )),
        }
    }
}

/// Certificates or pre-shared keys of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsSettings {
    /// Required, or offered.
    #[serde(default)]
    pub mode: TlsMode,
    /// Directory with `ca-cert.pem`, `server-cert.pem` and `server-key.pem`, or with `keys.psk`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    /// File of pre-shared keys, instead of certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub psk: Option<PathBuf>,
    /// Whether clients need a certificate of the same authority.
    #[serde(default)]
    pub verify_peer: bool,
}

impl TlsSettings {
    /// Puts together what a command line says; `mode` is its text, if there is one.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong or missing.
    pub fn from_options(
        mode: Option<&str>,
        dir: Option<PathBuf>,
        psk: Option<PathBuf>,
        verify_peer: bool,
    ) -> Result<Option<Self>> {
        let mode = match mode {
            Some(text) => TlsMode::parse(text)?,
            // A caller that names files wants no client without TLS.
            None if dir.is_some() || psk.is_some() || verify_peer => Some(TlsMode::Required),
            None => None,
        };
        let Some(mode) = mode else { return Ok(None) };
        let settings = Self { mode, dir, psk, verify_peer };
        settings.check()?;
        Ok(Some(settings))
    }

    /// Whether it can be used, without looking at files.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub fn check(&self) -> Result<()> {
        let invalid = |message: &str, next: &str| Err(ControlError::new(Errno::EINVAL, message).next(next));
        for path in [&self.dir, &self.psk].into_iter().flatten() {
            plain_path(path, "TLS", usize::MAX)?;
        }
        match (&self.dir, &self.psk) {
            (None, None) => invalid(
                "TLS needs certificates or keys",
                "name a directory of certificates, or a file of pre-shared keys",
            ),
            (Some(_), Some(_)) => {
                invalid("TLS is either by certificates or by pre-shared keys", "name only one of them")
            }
            (None, Some(_)) if self.verify_peer => {
                invalid("clients with pre-shared keys have no certificates", "leave out the check of them")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_make_settings_or_say_why_not() {
        let dir = || Some(PathBuf::from("/etc/pki"));
        let psk = || Some(PathBuf::from("/etc/keys.psk"));
        assert_eq!(TlsSettings::from_options(None, None, None, false).unwrap(), None);
        assert_eq!(TlsSettings::from_options(Some("off"), dir(), None, false).unwrap(), None);
        let required = TlsSettings::from_options(None, dir(), None, true).unwrap().unwrap();
        assert_eq!((required.mode, required.verify_peer), (TlsMode::Required, true));
        let offered = TlsSettings::from_options(Some("offered"), None, psk(), false).unwrap().unwrap();
        assert_eq!(offered.mode, TlsMode::Offered);
        for (mode, dir, psk, verify, why) in [
            (Some("maybe"), dir(), None, false, "not 'maybe'"),
            (Some("required"), None, None, false, "needs certificates or keys"),
            (None, dir(), psk(), false, "either"),
            (None, None, psk(), true, "have no certificates"),
            (None, Some("pki".into()), None, false, "not usable"),
        ] {
            let error = TlsSettings::from_options(mode, dir, psk, verify).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn settings_survive_the_wire_and_unknown_fields_do_not() {
        let settings = TlsSettings { dir: Some("/pki".into()), verify_peer: true, ..TlsSettings::default() };
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(text, r#"{"mode":"required","dir":"/pki","verify_peer":true}"#);
        assert_eq!(serde_json::from_str::<TlsSettings>(&text).unwrap(), settings);
        assert!(serde_json::from_str::<TlsSettings>(r#"{"dri":"/pki"}"#).is_err());
    }
}
