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
    pub p999_us: f64,
    /// The longest request of all rounds.
    pub longest_us: f64,
    /// Requests of all rounds together.
    pub requests: u64,
    pub server_cpu_us_per_request: Option<f64>,
    pub server_calls_per_request: Option<f64>,
    /// None for the bare file, which is its own server.
    pub load_cpu_us_per_request: Option<f64>,
    /// Processors that the server and the load generator used, on average.
    pub server_processors: Option<f64>,
    pub load_processors: Option<f64>,
    /// In the middle round the threads of the load generator had hardly a pause: the server may be faster than this.
    pub limited_by_load: bool,
    /// The server went through the page cache, and others did not.
    pub cached: bool,
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
        let (iops, cpu, load) =
            (of(|sample| sample.iops), of_some(|sample| sample.cpu_us), of_some(|sample| sample.load_cpu_us));
        Self {
            workload,
            server,
            rounds: samples.len(),
            iops,
            bytes_per_second: of(|sample| sample.bytes_per_second),
            p50_us: of(|sample| sample.p50_us),
            p99_us: of(|sample| sample.p99_us),
            p999_us: of(|sample| sample.p999_us),
            longest_us: samples.iter().map(|sample| sample.longest_us).fold(0.0, f64::max),
            requests: samples.iter().map(|sample| sample.requests).sum(),
            server_cpu_us_per_request: cpu,
            load_cpu_us_per_request: load,
            server_processors: cpu.map(|us| us * iops / 1e6),
            load_processors: load.map(|us| us * iops / 1e6),
            limited_by_load: 2 * samples.iter().filter(|sample| sample.is_limited_by_load()).count()
                > samples.len(),
            cached: false,
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
        assert_eq!(row.server_processors, Some(36e-6));
    }

    #[test]
    fn one_long_request_shows() {
        let sample = |p999_us, longest_us| Sample { p999_us, longest_us, requests: 10, ..Sample::default() };
        let row = Row::of("w", "s", &[sample(3.0, 5.0), sample(4.0, 900.0), sample(5.0, 6.0)]);
        assert_eq!((row.p999_us, row.longest_us, row.requests), (4.0, 900.0, 30));
    }

    #[test]
    fn a_busy_generator_is_named_as_the_limit() {
        let sample = |load_busy| Sample { load_busy, load_cpu_us: Some(1.0), ..Sample::default() };
        assert!(Row::of("w", "s", &[sample(0.95), sample(0.5), sample(0.99)]).limited_by_load);
        assert!(!Row::of("w", "s", &[sample(0.95), sample(0.5)]).limited_by_load);
        let bare = Sample { load_cpu_us: None, ..sample(1.0) };
        assert!(!Row::of("w", "s", &[bare]).limited_by_load, "the file is served by the generator itself");
    }
}
