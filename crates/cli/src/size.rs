//! Numbers of bytes, as people write and read them.

/// Reads a number of bytes: plain, or with K, M, G or T behind it for powers of 1024; `KiB` and so on mean the same.
///
/// # Errors
/// A sentence that says what is wrong with the text.
pub fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let power = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 1,
        "M" | "MIB" => 2,
        "G" | "GIB" => 3,
        "T" | "TIB" => 4,
        unit => return Err(format!("'{unit}' is no unit: K, M, G and T are, for powers of 1024")),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is no number of bytes, as 512, 64K or 20GiB"))?;
    number.checked_mul(1024u64.pow(power)).ok_or_else(|| format!("'{text}' is too much"))
}

/// A number of bytes for a person.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.checked_ilog2().unwrap_or(0) / 10) as usize;
    if power == 0 {
        return format!("{bytes} B");
    }
    format!("{:.1} {}", bytes as f64 / 1024f64.powi(power as i32), units[power])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        assert_eq!(bytes("512"), Ok(512));
        assert_eq!(bytes("64k"), Ok(65_536));
        assert_eq!(bytes("20GiB"), Ok(20 << 30));
        for bad in ["", "M", "1X", "1.5G", "99999999999T", "-1"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_written_with_the_unit_that_fits() {
        assert_eq!((size(0), size(1023), size(1536)), ("0 B".into(), "1023 B".into(), "1.5 KiB".into()));
        assert_eq!(size(20 << 30), "20.0 GiB");
    }
}
