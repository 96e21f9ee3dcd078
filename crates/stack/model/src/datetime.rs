//! Times as XenAPI writes them: `20240131T12:34:56Z`, ISO 8601 in UTC.

/// Earliest and latest second that has a four-digit year: 0001-01-01 and 9999-12-31.
const RANGE: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;

/// Seconds of a day.
pub const DAY: i64 = 86_400;

/// Days from 1970-01-01 to the first of March of `year`, in the calendar that has always been Gregorian.
fn days_to_march(year: i64) -> i64 {
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 - 719_468
}

/// Days from the first of March to the first of a month, March being 0.
const fn days_in_march_year(month: i64) -> i64 {
    (153 * month + 2) / 5
}

/// Days from 1970-01-01; none where there is no such day.
pub fn days(year: i64, month: i64, day: i64) -> Option<i64> {
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // The year begins in March, so that the leap day is its last.
    let (year, from_march) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let first = days_to_march(year) + days_in_march_year(from_march);
    let next = if from_march == 11 {
        days_to_march(year + 1)
    } else {
        days_to_march(year) + days_in_march_year(from_march + 1)
    };
    (first + day - 1 < next).then_some(first + day - 1)
}

/// Seconds since 1970 as text. Times outside the years 1 to 9999 become the nearest that has a text.
pub fn format(seconds: i64) -> String {
    let seconds = seconds.clamp(*RANGE.start(), *RANGE.end());
    let (days, rest) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
    // A guess that is at most two years too far on, from the mean length of a year.
    let mut year = (days * 400).div_euclid(146_097) + 1971;
    while days_to_march(year) > days {
        year -= 1;
    }
    let in_year = days - days_to_march(year);
    let month = (5 * in_year + 2) / 153;
    let day = in_year - days_in_march_year(month) + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// A number of exactly `len` digits at the front of `text`, which is moved past it.
fn digits(text: &mut &str, len: usize) -> Option<i64> {
    let (number, rest) = text.split_at_checked(len)?;
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    *text = rest;
    number.parse().ok()
}

fn skip(text: &mut &str, mark: char) -> bool {
    let rest = text.strip_prefix(mark);
    if let Some(rest) = rest {
        *text = rest;
    }
    rest.is_some()
}

/// Reads a time: with or without the dashes and colons of ISO 8601, a fraction (dropped), and an offset from UTC.
/// None where it is something else.
pub fn parse(text: &str) -> Option<i64> {
    let mut rest = text.trim();
    let year = digits(&mut rest, 4)?;
    let dashed = skip(&mut rest, '-');
    let month = digits(&mut rest, 2)?;
    if dashed && !skip(&mut rest, '-') {
        return None;
    }
    let day = digits(&mut rest, 2)?;
    let mut seconds = days(year, month, day)? * DAY;
    if skip(&mut rest, 'T') || skip(&mut rest, ' ') {
        let hour = digits(&mut rest, 2)?;
        let colons = skip(&mut rest, ':');
        let minute = digits(&mut rest, 2)?;
        if colons && !skip(&mut rest, ':') {
            return None;
        }
        let second = digits(&mut rest, 2)?;
        if hour > 23 || minute > 59 || second > 60 {
            return None;
        }
        seconds += hour * 3600 + minute * 60 + second;
        if skip(&mut rest, '.') {
            rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        }
    }
    match rest {
        "" | "Z" => {}
        _ => {
            let sign = if skip(&mut rest, '+') {
                1
            } else if skip(&mut rest, '-') {
                -1
            } else {
                return None;
            };
            let hours = digits(&mut rest, 2)?;
            skip(&mut rest, ':');
            let minutes = if rest.is_empty() { 0 } else { digits(&mut rest, 2)? };
            if hours > 23 || minutes > 59 || !rest.is_empty() {
                return None;
            }
            seconds -= sign * (hours * 3600 + minutes * 60);
        }
    }
    RANGE.contains(&seconds).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times() {
        let known = [
            (0, "19700101T00:00:00Z"),
            (1_706_704_496, "20240131T12:34:56Z"),
            (951_782_400, "20000229T00:00:00Z"),
            (-1, "19691231T23:59:59Z"),
            (*RANGE.start(), "00010101T00:00:00Z"),
            (*RANGE.end(), "99991231T23:59:59Z"),
        ];
        for (seconds, text) in known {
            assert_eq!(format(seconds), text);
            assert_eq!(parse(text), Some(seconds));
        }
        assert_eq!(format(i64::MIN), "00010101T00:00:00Z");
    }

    #[test]
    fn every_day_of_four_centuries_comes_back() {
        for day in 0..146_097 {
            let seconds = day * DAY + day % DAY;
            assert_eq!(parse(&format(seconds)), Some(seconds));
        }
    }

    #[test]
    fn spellings_and_nonsense() {
        let spellings = [
            "2024-01-31T12:34:56Z",
            "2024-01-31 12:34:56",
            "20240131T123456",
            "20240131T12:34:56.789Z",
            "20240131T13:34:56+01:00",
            "20240131T07:04:56-0530",
        ];
        for text in spellings {
            assert_eq!(parse(text), Some(1_706_704_496), "{text}");
        }
        for text in
            ["", "today", "20230229", "20241301", "2024013", "20240131T25:00:00", "20240131T12:34:56X"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
