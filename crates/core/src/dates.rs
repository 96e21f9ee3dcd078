//! Dates: seconds since 1970 in UTC, and the text `20240131T12:34:56Z` of the wire.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY: i64 = 86_400;

/// Seconds since 1970.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// `20240131T12:34:56Z`.
pub fn format(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
    let (year, month, day) = date_of(days);
    format!("{year:04}{month:02}{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Reads `20240131T12:34:56Z` and `2024-01-31T12:34:56Z`, with or without the `Z` and a fraction of a second. None
/// for anything else.
pub fn parse(text: &str) -> Option<i64> {
    let text = text.strip_suffix('Z').unwrap_or(text);
    let (date, time) = text.split_once('T')?;
    let date: String = date.split('-').collect();
    let time = time.split_once('.').map_or(time, |(whole, _)| whole);
    let time: String = time.split(':').collect();
    let is_digits =
        |text: &str, len: usize| text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(&date, 8) || !is_digits(&time, 6) {
        return None;
    }
    let number = |text: &str| text.parse::<i64>().ok();
    let (year, month, day) = (number(&date[..4])?, number(&date[4..6])?, number(&date[6..])?);
    let (hour, minute, second) = (number(&time[..2])?, number(&time[2..4])?, number(&time[4..])?);
    let days = days_of(year, month, day);
    let exists = (1..=12).contains(&month) && date_of(days) == (year, month, day);
    // A leap second counts as the next one.
    (exists && hour < 24 && minute < 60 && second <= 60)
        .then(|| days * DAY + hour * 3600 + minute * 60 + second)
}

/// Days since 1970 of a date of the Gregorian calendar. Years begin in March here, so that the leap day is the last.
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

fn date_of(days: i64) -> (i64, i64, i64) {
    let days = days.saturating_add(719_468);
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::{format, parse};

    #[test]
    fn texts_and_seconds_are_the_same_moment() {
        for (seconds, text) in [
            (0, "19700101T00:00:00Z"),
            (1_706_704_496, "20240131T12:34:56Z"),
            (951_782_400, "20000229T00:00:00Z"),
            (4_107_542_399, "21000228T23:59:59Z"),
            (4_107_542_400, "21000301T00:00:00Z"),
            (-1, "19691231T23:59:59Z"),
        ] {
            assert_eq!(format(seconds), text);
            assert_eq!(parse(text), Some(seconds), "{text}");
        }
        for seconds in (-3_000_000_000_i64..8_000_000_000).step_by(86_399 * 31) {
            assert_eq!(parse(&format(seconds)), Some(seconds));
        }
        assert_eq!(parse("2024-01-31T12:34:56.789Z"), Some(1_706_704_496));
        assert_eq!(parse("20240131T12:34:56"), Some(1_706_704_496));
    }

    #[test]
    fn what_is_no_date_is_refused() {
        for text in [
            "",
            "T",
            "20240230T00:00:00Z",
            "20241301T00:00:00Z",
            "20240131T24:00:00Z",
            "2024013T12:34:56Z",
            "+0240131T12:34:56Z",
            "20240131 12:34:56",
            "２０２４0131T12:34:56Z",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
