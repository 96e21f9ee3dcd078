//! How a disk shall behave, from what its records say.

use std::collections::BTreeMap;

use tapio_model::ApiError;
use tapio_types::IoLimits;

use crate::config::Config;
use crate::db::Object;
use crate::disks::Tuning;
use crate::storage::pool_pages;

/// Algorithms of `VBD.qos_algorithm_type`.
pub const ALGORITHMS: [&str; 2] = ["token-bucket", "ionice"];

fn invalid(key: &str, value: &str) -> ApiError {
    ApiError::new("INVALID_VALUE", [format!("qos_algorithm_params:{key}"), value.to_owned()])
}

/// Checks `qos_algorithm_type` and its parameters, and says what they mean.
///
/// # Errors
/// `INVALID_VALUE` for an algorithm or a parameter that does not exist; `VALUE_NOT_SUPPORTED` for a number that
/// cannot be.
pub fn qos(algorithm: &str, params: &BTreeMap<String, String>) -> Result<(IoLimits, Option<u16>), ApiError> {
    match algorithm {
        "" => Ok((IoLimits::default(), None)),
        "token-bucket" => {
            let mut limits = IoLimits::default();
            for (key, value) in params {
                let set = match key.as_str() {
                    "read_bps" | "write_bps" | "bps" | "read_iops" | "write_iops" | "iops" | "burst" => {
                        limits.set(&key.replace('_', "-"), value)
                    }
                    _ => return Err(invalid(key, value)),
                };
                set.map_err(|error| not_supported(key, value, error))?;
            }
            limits.check().map_err(|error| not_supported("", "", error))?;
            Ok((limits, None))
        }
        "ionice" => {
            let mut class = 2_u16;
            let mut level = 4_u16;
            for (key, value) in params {
                match (key.as_str(), value.as_str()) {
                    ("sched", "rt" | "real-time") => class = 1,
                    ("sched", "be" | "best-effort") => class = 2,
                    ("sched", "idle") => class = 3,
                    ("class", "highest") => level = 0,
                    ("class", "high") => level = 2,
                    ("class", "normal") => level = 4,
                    ("class", "low") => level = 6,
                    ("class", "lowest") => level = 7,
                    ("class", number) => {
                        let number = number.parse().ok().filter(|level| *level < 8);
                        level = number.ok_or_else(|| invalid(key, value))?;
                    }
                    _ => return Err(invalid(key, value)),
                }
            }
            Ok((IoLimits::default(), Some((class << 13) | level)))
        }
        other => Err(ApiError::new("INVALID_VALUE", ["qos_algorithm_type", other])),
    }
}

fn not_supported(key: &str, value: &str, why: impl ToString) -> ApiError {
    ApiError::new(
        "VALUE_NOT_SUPPORTED",
        [format!("qos_algorithm_params:{key}"), value.to_owned(), why.to_string()],
    )
}

/// How the disk of this VBD shall behave. What cannot be is left out: it was refused when it was set, and a
/// disk that is plugged late is worth more than one that is not.
pub fn of(vbd: &Object, sr: &Object, config: &Config) -> Tuning {
    let (own, shared) = (vbd.map("other_config"), sr.map("other_config"));
    let number =
        |key: &str| own.get(key).or_else(|| shared.get(key)).and_then(|text| text.parse::<u32>().ok());
    let asked = qos(vbd.text("qos_algorithm_type"), &vbd.map("qos_algorithm_params"));
    let (limits, io_priority) = asked.unwrap_or_else(|error| {
        tracing::warn!(vbd = vbd.text("uuid"), %error, "the disk is plugged without limits");
        Default::default()
    });
    let (us, idle) = config.polling;
    let us = number("polling-duration").unwrap_or(us).min(1_000_000);
    let idle = number("polling-idle-threshold").map_or(idle, |percent| percent.min(100) as u8);
    let pool_pages = pool_pages(&shared).unwrap_or_else(|why| {
        tracing::warn!(sr = sr.text("uuid"), "its page pool has the default size: {why}");
        None
    });
    let sector_size = number("sector-size").filter(|size| matches!(size, 512 | 4096));
    Tuning { limits, polling: (us, idle), pool_pages, io_priority, sector_size }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_token_bucket_is_the_disks_limits() {
        let params = map(&[("read_bps", "50MiB"), ("write_iops", "500"), ("burst", "2s")]);
        let (limits, priority) = qos("token-bucket", &params).expect("limits");
        assert_eq!(
            (limits.read_bps, limits.write_iops, limits.burst_ms, priority),
            (50 << 20, 500, 2_000, None)
        );
        assert_eq!(qos("", &map(&[("anything", "1")])), Ok((IoLimits::default(), None)));
    }

    #[test]
    fn nonsense_is_refused() {
        for (algorithm, params, code) in [
            ("fair", map(&[]), "INVALID_VALUE"),
            ("token-bucket", map(&[("speed", "1")]), "INVALID_VALUE"),
            ("token-bucket", map(&[("read_bps", "fast")]), "VALUE_NOT_SUPPORTED"),
            ("token-bucket", map(&[("burst", "2s")]), "VALUE_NOT_SUPPORTED"),
            ("ionice", map(&[("sched", "fast")]), "INVALID_VALUE"),
            ("ionice", map(&[("class", "8")]), "INVALID_VALUE"),
        ] {
            assert_eq!(qos(algorithm, &params).expect_err(algorithm).code, code, "{params:?}");
        }
    }

    #[test]
    fn ionice_is_a_priority_of_the_kernel() {
        let (_, priority) = qos("ionice", &map(&[("sched", "rt"), ("class", "3")])).expect("a priority");
        assert_eq!(priority, Some((1 << 13) | 3));
    }
}
