//! Numbers of bytes, as people read them.

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
    fn sizes_are_written_with_the_unit_that_fits() {
        assert_eq!((size(0), size(1023), size(1536)), ("0 B".into(), "1023 B".into(), "1.5 KiB".into()));
        assert_eq!((size(20 << 30), size(u64::MAX)), ("20.0 GiB".into(), "16.0 EiB".into()));
    }
}
