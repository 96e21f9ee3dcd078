//! Days and times of UTC, without a table of zones.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY_S: u64 = 86_400;

fn seconds(time: SystemTime) -> u64 {
    // A clock that stands before 1970 is not set.
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Days since 1970.
pub(crate) fn day(time: SystemTime) -> u64 {
    seconds(time) / DAY_S
}

/// A time as `2026-11-25T09:54:30Z`.
pub fn stamp(time: SystemTime) -> String {
    let (days, second) = (seconds(time) / DAY_S, seconds(time) % DAY_S);
    // Years begin in March, so that the day of a leap year is the last: H. Hinnant, "chrono-compatible low-level date
    // algorithms", civil_from_days.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (second / 3_600, second / 60 % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:02}Z", second % 60)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Against `date -u -d @N +%FT%TZ`.
    #[test]
    fn times_are_those_of_utc() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_795_600_470, "2026-11-25T09:54:30Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(stamp(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
        assert_eq!(day(UNIX_EPOCH + Duration::from_secs(DAY_S)), 1);
    }
}
