//! When an SR has a lease area, and what this host is called in it.

use tapio_types::ApiError;
use uuid::Uuid;

use super::layout::SILENCE_MS;
use crate::errors;
use crate::traits::Config;

/// The toolstack's name for this host, in what it gives to drivers: its UUID, a space, and a name for people. No key of
/// `device_config` begins with a colon.
pub const HOST: &str = ":host";
/// `true` where the SR's record says that several hosts can use it.
pub const SHARED: &str = ":shared";
/// Seconds of silence after which a host counts as dead, of a new area.
pub(crate) const SILENCE: &str = "host-silence";
/// What it is for people.
pub(crate) const SILENCE_KEY: (&str, &str) =
    (SILENCE, "seconds after which a silent host counts as dead, on a shared SR (40)");
/// Milliseconds, where nothing is said.
const DEFAULT_MS: u32 = 40_000;

/// What a configuration says of leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) host: Uuid,
    pub(crate) name: String,
    /// An area is made where there is none.
    pub(crate) makes: bool,
    pub(crate) silence_ms: u32,
}

/// None where the caller has no name for this host: it has no other hosts either.
///
/// # Errors
/// 1: not so many seconds.
pub(crate) fn wanted(config: &Config) -> Result<Option<Wanted>, ApiError> {
    let silence_ms = match config.get(SILENCE).map(String::as_str) {
        None | Some("") => DEFAULT_MS,
        Some(text) => {
            let ms = text.parse::<u32>().ok().and_then(|seconds| seconds.checked_mul(1000));
            ms.filter(|ms| SILENCE_MS.contains(ms)).ok_or_else(|| {
                let (least, most) = (SILENCE_MS.start() / 1000, SILENCE_MS.end() / 1000);
                errors::fail(
                    1,
                    format_args!("device_config:{SILENCE} is '{text}': {least} to {most} seconds"),
                )
            })?
        }
    };
    let Some((host, name)) = config.get(HOST).map(|text| text.split_once(' ').unwrap_or((text, ""))) else {
        return Ok(None);
    };
    let host = Uuid::parse_str(host).map_err(|_| ApiError::internal("a host has no UUID"))?;
    let makes = config.get(SHARED).is_some_and(|value| value == "true");
    Ok(Some(Wanted { host, name: name.to_owned(), makes, silence_ms }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_is_made_where_hosts_share_and_times_have_bounds() {
        let host = Uuid::from_u128(5);
        let of = |pairs: &[(&str, &str)]| {
            let mut config: Config =
                pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            config.insert(HOST.into(), format!("{host} a host"));
            wanted(&config)
        };
        let plain = of(&[]).expect("it is fine").expect("there is a host");
        assert_eq!((plain.host, plain.name.as_str(), plain.makes), (host, "a host", false));
        assert_eq!(plain.silence_ms, 40_000);
        let shared = of(&[(SHARED, "true"), (SILENCE, "4")]).expect("it is fine").expect("there is a host");
        assert_eq!((shared.makes, shared.silence_ms), (true, 4_000));
        for bad in ["1", "x", "-3", "601", "4294967295"] {
            assert_eq!(of(&[(SILENCE, bad)]).expect_err(bad).code, "SR_BACKEND_FAILURE_1");
        }
        assert_eq!(wanted(&Config::new()).expect("it is fine"), None);
    }
}
