//! How a disk shall behave, from what its records say.

use std::collections::BTreeMap;

use tapio_control::ShareSpec;
use tapio_model::ApiError;
use tapio_types::{IoLimits, RingTuning, TransferSizes};

use crate::config::Config;
use crate::db::Object;
use crate::disks::Tuning;
use crate::storage::pool_pages;

/// Algorithms of `VBD.qos_algorithm_type`.
pub const ALGORITHMS: [&str; 3] = ["token-bucket", "ionice", "share"];

/// What `qos_algorithm_type` and its parameters mean.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qos {
    /// Requests and bytes a second.
    pub limits: IoLimits,
    /// Class and level of the kernel's I/O scheduler.
    pub io_priority: Option<u16>,
    /// The part of the device beside other disks.
    pub share: ShareSpec,
}

fn invalid(key: &str, value: &str) -> ApiError {
    ApiError::new("INVALID_VALUE", [format!("qos_algorithm_params:{key}"), value.to_owned()])
}

/// Checks `qos_algorithm_type` and its parameters, and says what they mean.
///
/// # Errors
/// `INVALID_VALUE` for an algorithm or a parameter that does not exist; `VALUE_NOT_SUPPORTED` for a number that
/// cannot be.
pub fn qos(algorithm: &str, params: &BTreeMap<String, String>) -> Result<Qos, ApiError> {
    let mut qos = Qos::default();
    if algorithm.is_empty() {
        return Ok(qos);
    }
    let (mut class, mut level) = (2_u16, 4_u16);
    let mut weight = None;
    for (key, value) in params {
        match (algorithm, key.as_str(), value.as_str()) {
            (_, "weight", _) => weight = Some(number(key, value)?),
            (_, "latency_us", _) => qos.share.latency_us = number(key, value)?,
            (
                "token-bucket",
                "read_bps" | "write_bps" | "bps" | "read_iops" | "write_iops" | "iops" | "burst",
                _,
            ) => {
                let set = qos.limits.set(&key.replace('_', "-"), value);
                set.map_err(|error| not_supported(key, value, error))?;
            }
            ("ionice", "sched", "rt" | "real-time") => class = 1,
            ("ionice", "sched", "be" | "best-effort") => class = 2,
            ("ionice", "sched", "idle") => class = 3,
            ("ionice", "class", "highest") => level = 0,
            ("ionice", "class", "high") => level = 2,
            ("ionice", "class", "normal") => level = 4,
            ("ionice", "class", "low") => level = 6,
            ("ionice", "class", "lowest") => level = 7,
            ("ionice", "class", number) => {
                let number = number.parse().ok().filter(|level| *level < 8);
                level = number.ok_or_else(|| invalid(key, value))?;
            }
            ("token-bucket" | "ionice" | "share", ..) => return Err(invalid(key, value)),
            (other, ..) => return Err(ApiError::new("INVALID_VALUE", ["qos_algorithm_type", other])),
        }
    }
    match algorithm {
        "token-bucket" => qos.limits.check().map_err(|error| not_supported("", "", error))?,
        "ionice" => {
            qos.io_priority = Some((class << 13) | level);
            qos.share.weight = weight_of(class, level);
        }
        "share" => qos.share.off = false,
        other => return Err(ApiError::new("INVALID_VALUE", ["qos_algorithm_type", other])),
    }
    if params.contains_key("weight") || params.contains_key("latency_us") {
        qos.share.off = false;
    }
    if let Some(weight) = weight {
        qos.share.weight = u32::try_from(weight).unwrap_or(u32::MAX);
    }
    qos.share.check().map_err(|error| not_supported("weight, latency_us", "", error))?;
    Ok(qos)
}

fn number(key: &str, value: &str) -> Result<u64, ApiError> {
    value.parse().map_err(|_| not_supported(key, value, "it is no number"))
}

/// What a priority of the kernel is worth where its scheduler has none: 100 for the usual one.
const fn weight_of(class: u16, level: u16) -> u32 {
    let weight = 25 * (8 - level as u32);
    match class {
        1 => 4 * weight,
        3 => 10,
        _ => weight,
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
    let Qos { limits, io_priority, share } = asked.unwrap_or_else(|error| {
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
    let mut rings = RingTuning::default();
    for key in RingTuning::KEYS {
        if let Some(value) = own.get(key).or_else(|| shared.get(key))
            && let Err(why) = rings.set(key, value)
        {
            tracing::warn!(vbd = vbd.text("uuid"), "{key} is '{value}' and is left out: {why}");
        }
    }
    let mut transfers = TransferSizes::default();
    for key in TransferSizes::KEYS {
        if let Some(value) = own.get(key).or_else(|| shared.get(key))
            && let Err(why) = transfers.set(key, value)
        {
            tracing::warn!(vbd = vbd.text("uuid"), "{key} is left out: {why}");
        }
    }
    if let Err(why) = transfers.check() {
        tracing::warn!(vbd = vbd.text("uuid"), "requests go to the storage as they are: {why}");
        transfers = TransferSizes::default();
    }
    let sector_size = number("sector-size").filter(|size| matches!(size, 512 | 4096));
    Tuning { limits, polling: (us, idle), pool_pages, io_priority, sector_size, share, rings, transfers }
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
        let Qos { limits, io_priority, .. } = qos("token-bucket", &params).expect("limits");
        assert_eq!(
            (limits.read_bps, limits.write_iops, limits.burst_ms, io_priority),
            (50 << 20, 500, 2_000, None)
        );
        assert_eq!(qos("", &map(&[("anything", "1")])), Ok(Qos::default()));
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
            ("share", map(&[("iops", "8")]), "INVALID_VALUE"),
            ("share", map(&[("weight", "0")]), "VALUE_NOT_SUPPORTED"),
            ("share", map(&[("weight", "4294967396")]), "VALUE_NOT_SUPPORTED"),
            ("token-bucket", map(&[("latency_us", "-1")]), "VALUE_NOT_SUPPORTED"),
        ] {
            assert_eq!(qos(algorithm, &params).expect_err(algorithm).code, code, "{params:?}");
        }
    }

    #[test]
    fn ionice_is_a_priority_of_the_kernel() {
        let rt = qos("ionice", &map(&[("sched", "rt"), ("class", "3")])).expect("a priority");
        assert_eq!(rt.io_priority, Some((1 << 13) | 3));
    }

    #[test]
    fn a_share_is_a_weight_and_a_latency_target_with_any_algorithm() {
        let share = |algorithm: &str, pairs: &[(&str, &str)]| {
            let share = qos(algorithm, &map(pairs)).expect("sound").share;
            (!share.off, share.weight, share.latency_us)
        };
        assert_eq!(share("share", &[("weight", "300"), ("latency_us", "2000")]), (true, 300, 2000));
        assert_eq!(share("token-bucket", &[("iops", "5"), ("weight", "7")]), (true, 7, 0));
        assert_eq!(share("ionice", &[]), (false, 100, 0));
        assert_eq!(share("ionice", &[("class", "highest")]), (false, 200, 0));
        assert_eq!(share("ionice", &[("sched", "rt"), ("class", "0")]), (false, 800, 0));
        assert_eq!(share("ionice", &[("sched", "idle"), ("weight", "1")]), (true, 1, 0));
    }
}
