//! When a plan of snapshots is due, by the local time of the host.

use std::collections::BTreeMap;

use tapio_model::ApiError;

use crate::dates::{Local, local};

/// The class of plans.
pub(super) const CLASS: &str = "VMSS";

/// The field with the moment from which on a plan counts: what was due before is not made up for. It is a field and no
/// note, because any host of a pool may decide next.
pub(super) const SEEN: &str = "counts_from";

/// Words for days, Sunday first as in `struct tm`.
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// How often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Schedule {
    Hourly {
        minute: i32,
    },
    Daily {
        hour: i32,
        minute: i32,
    },
    /// `days[0]` is Sunday.
    Weekly {
        days: [bool; 7],
        hour: i32,
        minute: i32,
    },
}

fn invalid(key: &str, value: &str, possible: &str) -> ApiError {
    ApiError::new("INVALID_VALUE", [format!("schedule:{key}"), format!("{value} ({possible} is possible)")])
}

impl Schedule {
    /// Reads `VMSS.frequency` and `VMSS.schedule`.
    ///
    /// # Errors
    /// `INVALID_VALUE`: the key, and what is possible.
    pub(super) fn of(frequency: &str, schedule: &BTreeMap<String, String>) -> Result<Self, ApiError> {
        let text = |key: &str| schedule.get(key).map(String::as_str).filter(|text| !text.is_empty());
        for key in schedule.keys() {
            if !["min", "hour", "days"].contains(&key.as_str()) {
                return Err(invalid(key, "the key is not known", "min, hour or days"));
            }
        }
        let minute = match text("min").unwrap_or("0") {
            "0" => 0,
            "15" => 15,
            "30" => 30,
            "45" => 45,
            other => return Err(invalid("min", other, "0, 15, 30 or 45")),
        };
        let hour = text("hour").unwrap_or("0");
        let hour = hour.parse().ok().filter(|number| (0..24).contains(number));
        let hour: i32 =
            hour.ok_or_else(|| invalid("hour", text("hour").unwrap_or_default(), "a number from 0 to 23"))?;
        let mut days = [false; 7];
        for word in text("days").unwrap_or("Monday").split(',') {
            let at = DAYS.iter().position(|day| day.eq_ignore_ascii_case(word.trim()));
            let at = at.ok_or_else(|| invalid("days", word, "Monday to Sunday, separated by commas,"))?;
            days[at] = true;
        }
        match frequency {
            "hourly" => Ok(Self::Hourly { minute }),
            "daily" => Ok(Self::Daily { hour, minute }),
            "weekly" => Ok(Self::Weekly { days, hour, minute }),
            other => Err(ApiError::new("INVALID_VALUE", ["frequency", other])),
        }
    }

    /// The last moment, up to `now`, at which it was due; none where there is no calendar for that time.
    pub(super) fn last_due(&self, now: i64) -> Option<i64> {
        let today = local(now)?;
        let at = |back_days: i32, hour: i32, minute: i32| {
            Local { day: today.day - back_days, hour, minute, second: 0, ..today }.moment()
        };
        match *self {
            Self::Hourly { minute } => {
                let this = at(0, today.hour, minute)?;
                if this <= now { Some(this) } else { at(0, today.hour - 1, minute) }
            }
            Self::Daily { hour, minute } => {
                (0..2).filter_map(|back| at(back, hour, minute)).find(|moment| *moment <= now)
            }
            Self::Weekly { days, hour, minute } => (0..8)
                .filter_map(|back| at(back, hour, minute))
                .filter(|moment| {
                    let weekday = local(*moment).and_then(|day| usize::try_from(day.weekday).ok());
                    weekday.and_then(|day| days.get(day)).is_some_and(|is_wanted| *is_wanted)
                })
                .find(|moment| *moment <= now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dates::parse;

    fn schedule(frequency: &str, pairs: &[(&str, &str)]) -> Result<Schedule, ApiError> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Schedule::of(frequency, &pairs.collect())
    }

    /// Whatever the time zone of the host, what is due has the right minute, hour and day there, and nothing that is
    /// due lies between it and now.
    #[test]
    fn the_last_moment_is_the_last_one() {
        let start = parse("20260101T00:00:00Z").unwrap();
        for step in 0..4000 {
            let now = start + step * 7411;
            for minute in [0, 45] {
                let text = minute.to_string();
                let hourly = schedule("hourly", &[("min", &text)]).unwrap().last_due(now).unwrap();
                let daily =
                    schedule("daily", &[("min", &text), ("hour", "5")]).unwrap().last_due(now).unwrap();
                let days = ("days", "Monday, friday");
                let weekly = schedule("weekly", &[("min", &text), ("hour", "5"), days]).unwrap();
                let weekly = weekly.last_due(now).unwrap();
                for (due, longest) in [(hourly, 3600), (daily, 86_400 + 3600), (weekly, 4 * 86_400 + 3600)] {
                    let at = local(due).unwrap();
                    assert!(due <= now && now - due < longest, "{due} of {now}");
                    assert_eq!((at.minute, at.second), (minute, 0));
                    assert!(due == hourly || at.hour == 5, "{at:?}");
                }
                assert!([1, 5].contains(&local(weekly).unwrap().weekday));
            }
        }
    }

    #[test]
    fn what_is_no_schedule_is_named() {
        for (frequency, pairs, what) in [
            ("hourly", &[("min", "7")][..], "schedule:min"),
            ("daily", &[("hour", "24")], "schedule:hour"),
            ("daily", &[("hour", "x")], "schedule:hour"),
            ("weekly", &[("days", "Monday,Moonday")], "schedule:days"),
            ("weekly", &[("day", "Monday")], "schedule:day"),
            ("yearly", &[], "frequency"),
        ] {
            let error = schedule(frequency, pairs).unwrap_err();
            assert_eq!((&*error.code, &*error.params[0]), ("INVALID_VALUE", what));
        }
        assert_eq!(schedule("daily", &[]), Ok(Schedule::Daily { hour: 0, minute: 0 }));
    }
}
