//! The host that a run was made on: what a reader must know before figures mean anything.

use std::fs;
use std::path::Path;

use serde::Serialize;

/// What the kernel does not say.
const UNKNOWN: &str = "unknown";

/// The host, before and, once [`Environment::end`] was called, during the run.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    pub kernel: String,
    /// The model of the processors.
    pub processor: String,
    pub processors: usize,
    /// What chooses their frequency.
    pub governor: String,
    /// Driver and governor of idle states, and the states with the microseconds that leaving them takes.
    pub idle: String,
    /// The processors were kept from halting while the run was made.
    pub kept_awake: bool,
    /// The load of the last minute before the run, by other programs of the host.
    pub load_before: f64,
    /// The share of processor time in the run that the hypervisor gave to others, in percent; none before the end.
    pub steal_percent: Option<f64>,
    #[serde(skip)]
    begun: Option<Times>,
}

/// Processor time since the kernel's start, in its own ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Times {
    all: u64,
    stolen: u64,
}

impl Times {
    fn now() -> Option<Self> {
        Self::of(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// User, nice, system, idle, iowait, irq, softirq, steal; time of guests is part of the first two.
    fn of(stat: &str) -> Option<Self> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?;
        let fields: Vec<u64> =
            fields.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Self { all: fields.iter().sum(), stolen: *fields.get(7)? })
    }

    fn steal_percent(self, before: Self) -> Option<f64> {
        let all = self.all.checked_sub(before.all).filter(|all| *all > 0)?;
        Some(100.0 * self.stolen.saturating_sub(before.stolen) as f64 / all as f64)
    }
}

fn line(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

impl Environment {
    /// That of a run that is about to begin.
    pub fn now(kept_awake: bool) -> Self {
        let load = line("/proc/loadavg").unwrap_or_default();
        let cpu = Path::new("/sys/devices/system/cpu");
        Self {
            kernel: line("/proc/sys/kernel/osrelease").unwrap_or_else(|| UNKNOWN.into()),
            processor: fs::read_to_string("/proc/cpuinfo")
                .ok()
                .and_then(|text| model(&text))
                .unwrap_or_else(|| UNKNOWN.into()),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            governor: line(cpu.join("cpu0/cpufreq/scaling_governor")).unwrap_or_else(|| UNKNOWN.into()),
            idle: idle(cpu).unwrap_or_else(|| UNKNOWN.into()),
            kept_awake,
            load_before: load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
            steal_percent: None,
            begun: Times::now(),
        }
    }

    /// The run is over: what was stolen from it is known.
    pub fn end(&mut self) {
        self.steal_percent = Times::now().zip(self.begun).and_then(|(now, begun)| now.steal_percent(begun));
    }

    /// The line of a report, without its end.
    pub fn line(&self) -> String {
        let steal = self.steal_percent.map_or_else(|| UNKNOWN.to_owned(), |steal| format!("{steal:.1} %"));
        format!(
            "{} x {}; load before {:.1}; steal {steal}; governor {}; idle states {}{}",
            self.processors,
            self.processor,
            self.load_before,
            self.governor,
            self.idle,
            if self.kept_awake { ", kept from halting" } else { "" }
        )
    }
}

/// The first model that is named; some architectures name none.
fn model(cpuinfo: &str) -> Option<String> {
    let value = |line: &str| line.split_once(':').map(|(_, value)| value.trim().to_owned());
    cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))
        .and_then(value)
        .filter(|name| !name.is_empty())
}

/// For example `haltpoll/haltpoll: POLL 0 us, haltpoll idle 1 us`.
fn idle(cpu: &Path) -> Option<String> {
    let driver = line(cpu.join("cpuidle/current_driver"))?;
    let governor = line(cpu.join("cpuidle/current_governor"))
        .or_else(|| line(cpu.join("cpuidle/current_governor_ro")))
        .unwrap_or_else(|| UNKNOWN.into());
    let states: Vec<_> = (0..)
        .map(|index| cpu.join(format!("cpu0/cpuidle/state{index}")))
        .map_while(|state| {
            let off = line(state.join("disable")).is_some_and(|disabled| disabled != "0");
            let off = if off { " (off)" } else { "" };
            Some(format!("{} {} us{off}", line(state.join("name"))?, line(state.join("latency"))?))
        })
        .collect();
    Some(format!("{driver}/{governor}: {}", states.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steal_is_its_share_of_all_time() {
        let before = Times::of("cpu  10 0 10 70 0 0 0 10 5 0\ncpu0 1 1\n").expect("a line of the kernel");
        assert_eq!(before, Times { all: 100, stolen: 10 }, "time of guests is not counted twice");
        let after = Times::of("cpu  60 0 10 90 0 0 0 40 55 0").expect("a line of the kernel");
        assert_eq!(after.steal_percent(before), Some(30.0));
        assert_eq!(before.steal_percent(before), None, "no time has passed");
        assert_eq!(Times::of("cpu  1 2 3"), None, "an older kernel");
    }

    #[test]
    fn what_the_host_does_not_say_is_unknown() {
        assert_eq!(model("processor\t: 0\nmodel name\t: AMD EPYC\n").as_deref(), Some("AMD EPYC"));
        assert_eq!(model("BogoMIPS : 1\n"), None);
        assert_eq!(idle(Path::new("/nonexistent")), None);
        let mut here = Environment::now(true);
        assert!(here.steal_percent.is_none() && !here.kernel.is_empty());
        here.end();
        assert!(here.steal_percent.is_none_or(|steal| (0.0..=100.0).contains(&steal)));
        assert!(here.line().ends_with("kept from halting"), "{}", here.line());
    }

    #[test]
    fn idle_states_are_listed_with_their_latencies() {
        let dir = tempfile::tempdir().expect("temporary directory");
        for (file, text) in [
            ("cpuidle/current_driver", "haltpoll\n"),
            ("cpuidle/current_governor_ro", "ladder\n"),
            ("cpu0/cpuidle/state0/name", "POLL\n"),
            ("cpu0/cpuidle/state0/latency", "0\n"),
            ("cpu0/cpuidle/state0/disable", "0\n"),
            ("cpu0/cpuidle/state1/name", "C1\n"),
            ("cpu0/cpuidle/state1/latency", "2\n"),
            ("cpu0/cpuidle/state1/disable", "1\n"),
        ] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        }
        assert_eq!(idle(dir.path()).as_deref(), Some("haltpoll/ladder: POLL 0 us, C1 2 us (off)"));
    }
}
