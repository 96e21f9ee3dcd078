//! Dates: seconds since 1970 in UTC, and the text `20240131T12:34:56Z` of the wire.

use std::time::{SystemTime, UNIX_EPOCH};

use tapio_model::datetime::{self, DAY};

pub use tapio_model::datetime::format;

/// Seconds since 1970.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
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
    let days = datetime::days(year, month, day)?;
    // A leap second counts as the next one.
    (hour < 24 && minute < 60 && second <= 60).then(|| days * DAY + hour * 3600 + minute * 60 + second)
}

/// A moment by the clock and the calendar of this host. A day or an hour outside of its month or day is in the one
/// before or after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Local {
    /// Years since 1900.
    pub year: i32,
    /// From 0 on.
    pub month: i32,
    /// Of the month, from 1 on.
    pub day: i32,
    pub hour: i32,
    pub minute: i32,
    pub second: i32,
    /// From Sunday on, which is 0.
    pub weekday: i32,
}

/// A moment by this host's time zone; none beyond its calendar.
pub(crate) fn local(moment: i64) -> Option<Local> {
    // SAFETY: all zeroes are a `tm`: it has numbers and a pointer that is not read.
    let mut found: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both places are valid, and the call keeps neither.
    let done = unsafe { libc::localtime_r(&raw const moment, &raw mut found) };
    (!done.is_null()).then_some(Local {
        year: found.tm_year,
        month: found.tm_mon,
        day: found.tm_mday,
        hour: found.tm_hour,
        minute: found.tm_min,
        second: found.tm_sec,
        weekday: found.tm_wday,
    })
}

impl Local {
    /// Seconds since 1970; none beyond the calendar.
    pub(crate) fn moment(&self) -> Option<i64> {
        // SAFETY: all zeroes are a `tm`.
        let mut time: libc::tm = unsafe { std::mem::zeroed() };
        (time.tm_year, time.tm_mon, time.tm_mday) = (self.year, self.month, self.day);
        (time.tm_hour, time.tm_min, time.tm_sec) = (self.hour, self.minute, self.second);
        // Whether it is summer time then is for the time zone to say.
        time.tm_isdst = -1;
        // SAFETY: the place is valid, and the call keeps nothing of it.
        let moment = unsafe { libc::mktime(&raw mut time) };
        (moment != -1).then_some(moment)
    }
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
