//! Figures of the host, from `/proc`.

use tapio_history::{Kind, Sample};

use super::sample;

/// All that can be read.
pub(crate) fn samples() -> Vec<Sample> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let mut samples = memory(&read("/proc/meminfo"));
    let load = read("/proc/loadavg").split(' ').next().and_then(|text| text.parse().ok());
    samples.extend(load.map(|load| sample(("loadavg", "Load of the last minute", ""), Kind::Gauge, load)));
    samples.extend(processors(&read("/proc/stat")));
    samples
}

fn memory(text: &str) -> Vec<Sample> {
    let sources = [
        ("MemTotal:", "memory_total_kib", "Memory of the host"),
        ("MemAvailable:", "memory_free_kib", "Memory that is free, or could be"),
    ];
    let of = |(key, name, doc)| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kib = line.split_whitespace().next()?.parse().ok()?;
        Some(sample((name, doc, "KiB"), Kind::Gauge, kib))
    };
    sources.into_iter().filter_map(of).collect()
}

/// Fields of a line that are no work: idle, and idle while storage works.
const IDLE: [usize; 2] = [3, 4];
/// Fields of a line; those behind it are parts of earlier ones.
const FIELDS: usize = 8;
/// Ticks of `/proc/stat` in a second, for programs on all processors that Linux runs on.
const TICKS_PER_S: f64 = 100.0;

/// The share of time in which each processor works, and the mean.
fn processors(text: &str) -> Vec<Sample> {
    let of = |line: &str| {
        let (name, fields) = line.strip_prefix("cpu")?.split_once(' ')?;
        let fields = fields.split_whitespace().take(FIELDS).enumerate();
        let busy = fields.filter(|(at, _)| !IDLE.contains(at));
        let ticks: f64 = busy.filter_map(|(_, text)| text.parse::<f64>().ok()).sum();
        Some((name.to_owned(), ticks / TICKS_PER_S))
    };
    let lines: Vec<(String, f64)> = text.lines().filter_map(of).collect();
    let count = lines.iter().filter(|(name, _)| !name.is_empty()).count().max(1);
    let share = |(name, busy_s): (String, f64)| match name.as_str() {
        "" => sample(
            ("cpu_avg", "Share of time in which processors work", "(fraction)"),
            Kind::Derive,
            busy_s / count as f64,
        ),
        _ => sample(
            (format!("cpu{name}"), "Share of time in which it works", "(fraction)"),
            Kind::Derive,
            busy_s,
        ),
    };
    lines.into_iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(samples: &[Sample]) -> Vec<(&str, f64)> {
        samples.iter().map(|sample| (sample.source.name.as_ref(), sample.value)).collect()
    }

    #[test]
    fn lines_of_proc_become_figures() {
        let memory = memory("MemTotal:       2000 kB\nMemFree: 1 kB\nMemAvailable:   1500 kB\n");
        assert_eq!(values(&memory), [("memory_total_kib", 2000.0), ("memory_free_kib", 1500.0)]);
        let text = "cpu  100 0 100 700 300 0 0 0 50 0\ncpu0 50 0 100 0 0 0 0 0 9 0\ncpu1 50 0 0 700 300 0 0 0 0 0\nintr 5\n";
        assert_eq!(values(&processors(text)), [("cpu_avg", 1.0), ("cpu0", 1.5), ("cpu1", 0.5)]);
    }
}
