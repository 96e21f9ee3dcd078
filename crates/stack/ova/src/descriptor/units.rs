//! Units of amounts: `byte * 2^20` (DSP0004, annex C), and the words of older writers.

/// Bytes of one unit; none where it is not understood.
pub(super) fn bytes(unit: &str) -> Option<u64> {
    let unit = unit.trim();
    match unit.to_ascii_lowercase().as_str() {
        "" | "byte" | "bytes" => return Some(1),
        "kilobytes" | "kb" | "kib" => return Some(1 << 10),
        "megabytes" | "mb" | "mib" => return Some(1 << 20),
        "gigabytes" | "gb" | "gib" => return Some(1 << 30),
        "terabytes" | "tb" | "tib" => return Some(1 << 40),
        _ => {}
    }
    let (word, factor) = unit.split_once('*')?;
    if !word.trim().eq_ignore_ascii_case("byte") {
        return None;
    }
    let factor = factor.trim();
    match factor.split_once('^') {
        None => factor.parse().ok(),
        Some((base, power)) => {
            let (base, power) = (base.trim().parse::<u64>().ok()?, power.trim().parse::<u32>().ok()?);
            base.checked_pow(power)
        }
    }
}

/// An amount in a unit, in bytes.
pub(super) fn amount(number: &str, unit: &str) -> Option<u64> {
    number.trim().parse::<u64>().ok()?.checked_mul(bytes(unit)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_all_writers_are_read() {
        for (unit, expected) in [
            ("", 1),
            ("byte", 1),
            ("byte * 2^20", 1 << 20),
            ("byte*2^30", 1 << 30),
            ("byte * 10^6", 1_000_000),
            ("byte * 1024", 1024),
            ("MegaBytes", 1 << 20),
            ("GB", 1 << 30),
        ] {
            assert_eq!(bytes(unit), Some(expected), "{unit}");
        }
        for bad in ["hertz * 10^6", "byte * 2^64", "byte * x", "byte * 2^^3", "sectors"] {
            assert_eq!(bytes(bad), None, "{bad}");
        }
        assert_eq!(amount("8", "byte * 2^30"), Some(8 << 30));
        assert_eq!(amount("18446744073709551615", "KB"), None);
        assert_eq!(amount("-1", ""), None);
    }
}
