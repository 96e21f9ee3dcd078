//! Axes: from values to places, and the values that are written beside them.

/// How values become places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal steps are equally long. Begins at zero.
    Linear,
    /// Equal factors are equally long. Values that are not above zero have no place.
    Log,
    /// As [`Scale::Log`], with powers of two beside the axis: sizes and depths.
    Log2,
}

/// An axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// What it is, with its unit.
    pub title: String,
    /// How values become places.
    pub scale: Scale,
}

impl Axis {
    /// An axis of equal steps.
    pub fn linear(title: &str) -> Self {
        Self { title: title.to_owned(), scale: Scale::Linear }
    }

    /// An axis of equal factors.
    pub fn log(title: &str) -> Self {
        Self { title: title.to_owned(), scale: Scale::Log }
    }

    /// An axis of equal factors with powers of two beside it.
    pub fn log2(title: &str) -> Self {
        Self { title: title.to_owned(), scale: Scale::Log2 }
    }

    /// The range that holds these values.
    pub(super) fn range(&self, values: impl Iterator<Item = f64>) -> Range {
        let usable =
            values.filter(|value| value.is_finite() && (self.scale == Scale::Linear || *value > 0.0));
        let (low, high) = usable
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if !low.is_finite() {
            return Range { scale: self.scale, low: 0.0, high: 1.0 }.of_scale();
        }
        match self.scale {
            Scale::Linear => Range {
                scale: Scale::Linear,
                low: low.min(0.0),
                high: nice_above(high.max(low.min(0.0) + 1e-12)),
            },
            scale @ (Scale::Log | Scale::Log2) => {
                Range { scale, low, high: if high > low { high } else { low * 2.0 } }
            }
        }
    }
}

/// The values that an axis shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Range {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Range {
    fn of_scale(self) -> Self {
        if self.scale == Scale::Linear { self } else { Self { low: 1.0, high: 10.0, ..self } }
    }

    /// Where a value lies, from 0 to 1; `None` for one that has no place.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let place = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log | Scale::Log2 if value > 0.0 => (value / self.low).ln() / (self.high / self.low).ln(),
            Scale::Log | Scale::Log2 => return None,
        };
        place.is_finite().then_some(place)
    }

    /// Values to be written beside the axis.
    pub(super) fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = nice_above((self.high - self.low) / 6.0);
                let first = (self.low / step).ceil() as i64;
                (first..first + 12)
                    .map(|index| index as f64 * step)
                    .take_while(|value| *value <= self.high * (1.0 + 1e-9))
                    .collect()
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10();
                let parts: &[f64] = if decades > 4.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let first = self.low.log10().floor() as i32;
                let last = self.high.log10().ceil() as i32;
                let all = (first..=last.min(first + 40))
                    .flat_map(|power| parts.iter().map(move |part| part * 10f64.powi(power)));
                all.filter(|value| *value >= self.low * 0.999 && *value <= self.high * 1.001).collect()
            }
            Scale::Log2 => {
                let (first, last) = (self.low.log2().ceil() as i32, self.high.log2().floor() as i32);
                // Room for a dozen.
                let step = (last.saturating_sub(first) / 12 + 1).unsigned_abs() as usize;
                (first..=last).step_by(step).map(|power| 2f64.powi(power)).collect()
            }
        }
    }
}

/// The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `value`.
fn nice_above(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-12).log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|part| part * power)
        .find(|nice| *nice >= value * (1.0 - 1e-9))
        .unwrap_or(value)
}

/// A number with few digits: 1.5 k instead of 1500.
pub(super) fn number(value: f64) -> String {
    let (value, unit) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, " G"),
        size if size >= 1e6 => (value / 1e6, " M"),
        size if size >= 1e4 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let text = if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_places_between_the_ends() {
        let range = Axis::linear("us").range([3.0, 87.0].into_iter());
        assert_eq!((range.place(0.0), range.place(100.0)), (Some(0.0), Some(1.0)));
        assert_eq!(range.ticks(), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        let range = Axis::log("bytes").range([512.0, 1e6].into_iter());
        assert_eq!(range.place(512.0), Some(0.0));
        assert!(range.place(0.0).is_none() && range.place(-1.0).is_none());
        assert_eq!(range.ticks(), [1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6]);
        let range = Axis::log2("KiB").range([0.5, 8.0].into_iter());
        assert_eq!((range.place(2.0), range.ticks()), (Some(0.5), vec![0.5, 1.0, 2.0, 4.0, 8.0]));
    }

    #[test]
    fn axes_without_sensible_values_are_drawn_all_the_same() {
        for axis in [Axis::linear(""), Axis::log(""), Axis::log2("")] {
            for values in [vec![], vec![f64::NAN, f64::INFINITY], vec![0.0], vec![7.0], vec![-3.0, -1.0]] {
                let range = axis.range(values.iter().copied());
                assert!(
                    range.ticks().len() < 60 && range.ticks().iter().all(|tick| tick.is_finite()),
                    "{range:?}"
                );
                assert!(range.place(2.0).is_some(), "{range:?}");
            }
        }
    }

    #[test]
    fn numbers_are_short() {
        let all: Vec<_> = [0.0, 0.25, 40.0, 1500.0, 15_000.0, 2.5e6, 3e9].map(number).into();
        assert_eq!(all, ["0", "0.25", "40", "1500", "15 k", "2.5 M", "3 G"]);
    }
}
