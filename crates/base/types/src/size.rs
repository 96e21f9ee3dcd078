//! Numbers of bytes, as people write them.

/// Units without regard to case, and what they stand for.
const UNITS: [(&str, u64); 13] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
];

/// Reads a number of bytes: whole, alone or with a unit behind it, in any case. `K`, `KiB` and so on up to `T` are
/// powers of 1024, `kB` and so on of 1000.
///
/// # Errors
/// A sentence that says what is wrong with the text.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let unit = text[digits.len()..].trim_start();
    let factor = match UNITS.iter().find(|(name, _)| unit.eq_ignore_ascii_case(name)) {
        Some((_, factor)) => *factor,
        None if unit.is_empty() || digits.is_empty() => 1,
        None => return Err(format!("'{unit}' is no unit: KiB, MiB, GiB and TiB are, or K, M, G and T")),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is no number of bytes, as 512, 64K or 20GiB"))?;
    number.checked_mul(factor).ok_or_else(|| format!("'{text}' is too much"))
}

/// The shortest text that [`parse_bytes`] reads as so many bytes, with the largest unit of 1024 that fits.
pub(crate) fn exact_bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"].iter().zip(UNITS).rev();
    let fitting = units.map(|(name, (_, factor))| (name, factor)).find(|unit| bytes.is_multiple_of(unit.1));
    fitting.map_or_else(|| bytes.to_string(), |(name, factor)| format!("{}{name}", bytes / factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_mean_the_same_everywhere() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("7B", 7),
            ("64k", 64 << 10),
            ("1K", 1 << 10),
            ("3MiB", 3 << 20),
            ("3mib", 3 << 20),
            ("20 GiB", 20 << 30),
            ("2T", 2 << 40),
            ("5kB", 5_000),
            ("50MB", 50_000_000),
            ("1TB", 1_000_000_000_000),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_what_is_wrong() {
        for (text, reason) in [
            ("", "no number of bytes"),
            ("GiB", "no number of bytes"),
            ("ten", "no number of bytes"),
            ("-1", "no number of bytes"),
            ("1.5G", "no number of bytes"),
            ("1X", "'X' is no unit"),
            ("5µ", "'µ' is no unit"),
            ("5ib", "no unit"),
            ("99999999999T", "too much"),
            ("99999999999999999999", "no number of bytes"),
        ] {
            let error = parse_bytes(text).expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for (bytes, text) in [(1000, "1000"), (4096, "4KiB"), (100 << 20, "100MiB"), (3 << 40, "3TiB")] {
            assert_eq!((exact_bytes(bytes).as_str(), parse_bytes(text)), (text, Ok(bytes)));
        }
    }
}
