//! Numbers of bytes as `xe` reads them: all units are powers of 1024.

use tapio_types::parse_bytes;

use super::error::{Failure, Result};

/// Reads a number of bytes: plain, or with bytes, B, KiB, MiB, GiB, TiB, or KB, K and so on, in any case.
pub fn bytes(name: &str, text: &str) -> Result<i64> {
    let lower = text.to_ascii_lowercase();
    // Here KB is the same as KiB.
    let plain = match lower.strip_suffix("bytes").or_else(|| lower.strip_suffix('b')) {
        Some(plain) if !plain.ends_with('i') => plain.trim_end(),
        _ => &lower,
    };
    parse_bytes(plain).ok().and_then(|bytes| i64::try_from(bytes).ok()).ok_or_else(|| {
        Failure::other(format!("{name}: '{text}' is no number of bytes, as 4096, 64K or 10GiB"))
    })
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
        for bad in ["", "GiB", "-1", "1.5GiB", "1XiB", "1i", "1ib", "99999999TiB", "8388608TiB"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
