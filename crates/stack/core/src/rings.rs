//! Settings of rings, of polling and of transfers in `other_config` of VBDs and SRs.

use std::collections::BTreeMap;

use tapio_model::ApiError;
use tapio_types::{RingTuning, TransferSizes};

/// Refuses settings of rings, of polling and of transfers in `other_config` of a VBD or an SR that cannot be: they
/// would be noticed at the next plug only. Those that were there before are left alone.
///
/// # Errors
/// `VALUE_NOT_SUPPORTED` with the key, the value and what is possible.
pub fn check_rings(
    before: &BTreeMap<String, String>,
    fresh: &BTreeMap<String, String>,
) -> Result<(), ApiError> {
    let refused = |key: &str, value: &str, why: String| {
        ApiError::new("VALUE_NOT_SUPPORTED", [format!("other_config:{key}"), value.to_owned(), why])
    };
    for (key, value) in fresh.iter().filter(|(key, value)| before.get(*key) != Some(*value)) {
        RingTuning::default().set(key, value).map_err(|why| refused(key, value, why))?;
        if TransferSizes::KEYS.contains(&key.as_str()) {
            TransferSizes::default().set(key, value).map_err(|why| refused(key, value, why))?;
        }
        let most = match key.as_str() {
            "polling-duration" => 1_000_000,
            "polling-idle-threshold" => 100,
            _ => continue,
        };
        if !value.parse::<u32>().is_ok_and(|number| number <= most) {
            return Err(refused(key, value, format!("a number from 0 to {most} is expected")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn settings_that_cannot_be_are_refused_when_they_are_set() {
        let none = map(&[]);
        let good = map(&[
            ("max-ring-page-order", "3"),
            ("data-movement", "map"),
            ("polling-duration", "0"),
            ("split-size", "64KiB"),
            ("merge-size", "off"),
            ("x", "y"),
        ]);
        assert_eq!(check_rings(&none, &good), Ok(()));
        for (key, value) in [
            ("max-ring-page-order", "4"),
            ("multi-queue-max-queues", "0"),
            ("max-indirect-segments", "many"),
            ("data-movement", "teleport"),
            ("polling-duration", "1000001"),
            ("polling-idle-threshold", "101"),
            ("split-size", "1000"),
            ("merge-size", "64GiB"),
        ] {
            let bad = map(&[(key, value)]);
            let error = check_rings(&none, &bad).expect_err(key);
            assert_eq!((&*error.code, error.params[1].as_str()), ("VALUE_NOT_SUPPORTED", value));
            assert_eq!(check_rings(&bad, &bad), Ok(()), "it was there before");
        }
    }
}
