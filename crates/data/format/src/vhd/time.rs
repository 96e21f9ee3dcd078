//! Times on disk: seconds since 2000-01-01 00:00 UTC in 32 bits, which last until 2136.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds between 1970-01-01 and 2000-01-01, UTC.
pub const EPOCH_UNIX_S: i64 = 946_684_800;

/// Seconds since 1970 as the format stores them; times outside its range are moved to its nearest end.
pub fn from_unix(seconds: i64) -> u32 {
    u32::try_from(seconds.saturating_sub(EPOCH_UNIX_S).max(0)).unwrap_or(u32::MAX)
}

/// A stored time as seconds since 1970.
pub fn to_unix(stored: u32) -> i64 {
    i64::from(stored) + EPOCH_UNIX_S
}

/// The present time as the format stores it.
pub fn now() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    from_unix(i64::try_from(since).unwrap_or(i64::MAX))
}

/// A stored time for a person, in UTC: `Fri Nov 20 18:35:24 2026`, the layout of C's `ctime`.
pub fn to_text(stored: u32) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let unix = to_unix(stored).cast_unsigned();
    let (days, second) = (unix / 86_400, unix % 86_400);
    let (year, month, day) = civil(days);
    format!(
        "{} {} {day:2} {:02}:{:02}:{:02} {year}",
        DAYS[(days % 7) as usize],
        MONTHS[month],
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// Year, month (from 0) and day (from 1) of a day counted from 1970-01-01.
fn civil(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    loop {
        let len = if leap(year) { 366 } else { 365 };
        if days < len {
            break;
        }
        days -= len;
        year += 1;
    }
    let february = if leap(year) { 29 } else { 28 };
    let mut month = 0;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < len {
            break;
        }
        days -= len;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_the_range_hold() {
        assert_eq!(from_unix(0), 0);
        assert_eq!(from_unix(EPOCH_UNIX_S + 5), 5);
        assert_eq!(from_unix(i64::MAX), u32::MAX);
        assert_eq!(to_unix(from_unix(1_795_199_724)), 1_795_199_724);
    }

    #[test]
    fn a_time_reads_as_ctime_writes_it() {
        assert_eq!(to_text(0), "Sat Jan  1 00:00:00 2000");
        assert_eq!(to_text(from_unix(1_795_199_724)), "Fri Nov 20 18:35:24 2026");
        assert_eq!(to_text(from_unix(1_709_164_800)), "Thu Feb 29 00:00:00 2024");
        assert_eq!(to_text(u32::MAX), "Tue Feb  7 06:28:15 2136");
    }
}
