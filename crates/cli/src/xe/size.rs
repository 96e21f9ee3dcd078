//! Numbers of bytes as `xe` reads them: all units are powers of 1024.

use super::error::{Failure, Result};

/// Reads a number of bytes: plain, or with bytes, B, KiB, MiB, GiB, TiB, or KB, K and so on, in any case.
pub fn bytes(name: &str, text: &str) -> Result<i64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic()).trim_end();
    let power = match text[digits.len()..].trim().to_ascii_lowercase().as_str() {
        "" | "b" | "bytes" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        unit => {
            return Err(Failure::other(format!(
                "{name}: '{unit}' is no unit; bytes, KiB, MiB, GiB and TiB are"
            )));
        }
    };
    let wrong = || Failure::other(format!("{name}: '{text}' is no number of bytes, as 4096 or 10GiB"));
    let number: i64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1024i64.pow(power)).filter(|bytes| *bytes >= 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024_in_any_case() {
        let read = |text: &str| bytes("size", text).ok();
        assert_eq!(read("512"), Some(512));
        assert_eq!(read("512bytes"), Some(512));
        assert_eq!(read("10GiB"), Some(10 << 30));
        assert_eq!(read("10gib"), Some(10 << 30));
        assert_eq!(read("1 MiB"), Some(1 << 20));
        assert_eq!(read("2KB"), Some(2048));
        assert_eq!(read("3T"), Some(3 << 40));
        for bad in ["", "GiB", "-1", "1.5GiB", "1XiB", "99999999TiB"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
