//! Medians over rounds.

use serde::Serialize;

use super::measure::Sample;

/// Medians over the rounds of one server under one load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub workload: &'static str,
    pub server: &'static str,
    pub rounds: usize,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub server_cpu_us_per_request: Option<f64>,
    pub server_calls_per_request: Option<f64>,
    /// Of all rounds together.
    pub errors: u64,
}

impl Row {
    /// The medians of samples, of which there must be one.
    pub fn of(workload: &'static str, server: &'static str, samples: &[Sample]) -> Self {
        let of = |value: fn(&Sample) -> f64| median(&mut samples.iter().map(value).collect::<Vec<_>>());
        let of_some = |value: fn(&Sample) -> Option<f64>| {
            let mut values: Vec<f64> = samples.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| median(&mut values))
        };
        Self {
            workload,
            server,
            rounds: samples.len(),
            iops: of(|sample| sample.iops),
            bytes_per_second: of(|sample| sample.bytes_per_second),
            p50_us: of(|sample| sample.p50_us),
            p99_us: of(|sample| sample.p99_us),
            server_cpu_us_per_request: of_some(|sample| sample.cpu_us),
            server_calls_per_request: of_some(|sample| sample.calls),
            errors: samples.iter().map(|sample| sample.errors).sum(),
        }
    }
}

/// The middle value; of an even number the mean of the two in the middle; 0 of none.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[half],
        _ => f64::midpoint(values[half - 1], values[half]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&mut []), 0.0);
    }

    #[test]
    fn one_bad_round_does_not_show() {
        let sample = |iops, cpu_us| Sample { iops, cpu_us, ..Sample::default() };
        let samples = [sample(10.0, Some(2.0)), sample(1000.0, None), sample(12.0, Some(4.0))];
        let row = Row::of("w", "s", &samples);
        assert_eq!(
            (row.iops, row.server_cpu_us_per_request, row.server_calls_per_request),
            (12.0, Some(3.0), None)
        );
    }
}
