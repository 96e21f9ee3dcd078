//! How the use of an SR grows, and when it will be full at that rate.
//!
//! The figures are a line through points of time and use, the line with the least squares. Where the points come from
//! is of no account here: [`Points`] is the only thing that is known of it.

use std::collections::BTreeMap;

/// Least seconds between the first and the last point: what happens within an hour is no rate.
const SPAN_MIN: i64 = 3600;
const DAY: f64 = 86_400.0;
/// Full in more seconds than this is as good as never: a hundred years.
const FAR: f64 = 100.0 * 365.0 * DAY;

/// What keeps the use of SRs over time.
pub(super) trait Points {
    /// Seconds since 1970 and bytes used, the oldest first, of an SR by its reference.
    fn points(&self, sr: &str) -> Vec<(i64, u64)>;
}

/// What can be said of an SR.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Forecast {
    /// Points that were looked at.
    pub(super) samples: usize,
    /// The first of them, in seconds since 1970.
    pub(super) since: i64,
    /// Bytes a day; none where there are too few points.
    pub(super) growth: Option<f64>,
    /// When it is full, in seconds since 1970; none where it does not grow.
    pub(super) full_at: Option<i64>,
}

/// Looks at the points of an SR of `size` bytes that holds `used` now.
pub(super) fn forecast(points: &[(i64, u64)], (now, used, size): (i64, u64, u64)) -> Forecast {
    let since = points.first().map_or(now, |(time, _)| *time);
    let growth = slope(points, now, used);
    let left = size.saturating_sub(used) as f64;
    let full_at = growth.filter(|growth| *growth > 0.0).map(|growth| left / growth * DAY);
    let full_at =
        full_at.filter(|seconds| *seconds < FAR).map(|seconds| now.saturating_add(seconds.round() as i64));
    Forecast { samples: points.len(), since, growth, full_at }
}

/// Bytes a day, by the points and the use of now.
fn slope(points: &[(i64, u64)], now: i64, used: u64) -> Option<f64> {
    let first = points.first()?.0;
    if now.saturating_sub(first) < SPAN_MIN {
        return None;
    }
    let all = points.iter().copied().filter(|(time, _)| *time < now).chain([(now, used)]);
    let all: Vec<(f64, f64)> = all.map(|(time, used)| ((time - first) as f64 / DAY, used as f64)).collect();
    let count = all.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| all.iter().map(of).sum::<f64>() / count;
    let (time, bytes) = (mean(|point| point.0), mean(|point| point.1));
    let (above, below) = all.iter().fold((0.0, 0.0), |(above, below), point| {
        (above + (point.0 - time) * (point.1 - bytes), below + (point.0 - time).powi(2))
    });
    (below > 0.0).then(|| above / below)
}

impl Forecast {
    /// As `SR.get_forecast` answers it.
    pub(super) fn told(&self, now: i64) -> BTreeMap<String, String> {
        let mut told = BTreeMap::from([
            ("samples".to_owned(), self.samples.to_string()),
            ("since".to_owned(), self.since.to_string()),
        ]);
        if let Some(growth) = self.growth {
            told.insert("bytes-per-day".to_owned(), format!("{growth:.0}"));
        }
        if let Some(full_at) = self.full_at {
            told.insert("full-at".to_owned(), full_at.to_string());
            told.insert("seconds-until-full".to_owned(), full_at.saturating_sub(now).to_string());
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3600;

    #[test]
    fn what_grows_steadily_is_full_when_the_line_says() {
        let points: Vec<_> = (0..24).map(|hour| (hour * HOUR, 1000 + hour as u64 * 10)).collect();
        let told = forecast(&points, (24 * HOUR, 1240, 1480));
        assert!((told.growth.expect("a day of points") - 240.0).abs() < 0.001, "{told:?}");
        assert_eq!(told.full_at, Some(48 * HOUR), "as much is left as came in a day");
        assert_eq!(told.told(24 * HOUR)["seconds-until-full"], "86400");
        assert_eq!(told.told(24 * HOUR)["bytes-per-day"], "240");
    }

    #[test]
    fn what_shrinks_or_stays_is_never_full_and_too_little_says_nothing() {
        let falling = [(0, 500), (HOUR, 400)];
        assert_eq!(forecast(&falling, (2 * HOUR, 300, 1000)).full_at, None);
        let level = [(0, 500), (HOUR, 500)];
        let told = forecast(&level, (2 * HOUR, 500, 1000));
        assert_eq!((told.growth, told.full_at), (Some(0.0), None));
        let short = forecast(&[(0, 500)], (HOUR - 1, 900, 1000));
        assert_eq!((short.growth, short.full_at), (None, None));
        assert_eq!(forecast(&[], (5, 1, 2)).samples, 0);
        let slow = forecast(&[(0, 500)], (HOUR, 501, u64::MAX));
        assert_eq!(slow.full_at, None, "in more than a hundred years");
    }
}
