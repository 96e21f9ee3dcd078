//! What every benchmark is told, and what its report begins with.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tapio_control::ControlError;

use super::{failed, invalid};
use tapio_report::failure::{Result, print, print_json};

/// The most that a run may be told to do.
const SECONDS_MAX: f64 = 3600.0;
const ROUNDS_MAX: usize = 1000;
/// What a report says of a run that Ctrl-C ended.
pub const CUT_SHORT: &str = "interrupted: not everything was measured\n";

/// Options of all benchmarks.
#[derive(Debug, Default, Args)]
#[group(skip)]
pub struct Common {
    /// How long each measurement takes
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,
    /// How often each is repeated; medians are shown
    #[arg(long, value_name = "COUNT")]
    pub rounds: Option<usize>,
    /// Write all results to a file as JSON; '-' prints them instead of the tables
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Little of everything, a blink for each measurement: shows that everything works, not how fast
    #[arg(long)]
    pub quick: bool,
}

impl Common {
    /// How long each measurement takes and how often it is repeated: as was said, or else as `full` and `quick` have
    /// it, in seconds.
    ///
    /// # Errors
    /// More, or less, than a run may be told to do.
    pub fn times(&self, full: (f64, usize), quick: (f64, usize)) -> Result<(Duration, usize)> {
        let (seconds, rounds) = if self.quick { quick } else { full };
        let (seconds, rounds) = (self.seconds.unwrap_or(seconds), self.rounds.unwrap_or(rounds));
        if !(0.01..=SECONDS_MAX).contains(&seconds) || !(1..=ROUNDS_MAX).contains(&rounds) {
            return Err(invalid(format!(
                "--seconds goes from 0.01 to {SECONDS_MAX} and --rounds from 1 to {ROUNDS_MAX}"
            )));
        }
        Ok((Duration::from_secs_f64(seconds), rounds))
    }

    /// Prints the tables, and writes the JSON where it is wanted: `-` prints it instead.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn show(&self, report: &impl Serialize, tables: &str) -> Result<()> {
        match &self.json {
            Some(file) if file.as_os_str() == "-" => print_json(report),
            Some(file) => {
                let text = serde_json::to_string_pretty(report)
                    .map_err(|error| failed(format!("the results cannot be written as JSON: {error}")))?;
                std::fs::write(file, text + "\n").map_err(|error| {
                    ControlError::io(format_args!("cannot write {}", file.display()), &error)
                })?;
                print(tables)
            }
            None => print(tables),
        }
    }
}

/// Whether something of this name is to be run: everything, unless words of names were given.
pub fn wanted(only: &[String], name: &str) -> bool {
    only.is_empty() || only.iter().any(|word| name.contains(word.as_str()))
}

/// Refuses words that are in none of the names; `what` such names are of, as "load".
///
/// # Errors
/// There is such a word.
pub fn check_only(only: &[String], names: &[&str], what: &str) -> Result<()> {
    match only.iter().find(|word| !names.iter().any(|name| name.contains(word.as_str()))) {
        Some(word) => Err(invalid(format!("'{word}' is in the name of no {what}"))
            .next(format!("{what}s: {}", names.join(", ")))),
        None => Ok(()),
    }
}

/// The host, and how much was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    pub version: &'static str,
    pub kernel: String,
    pub processors: usize,
    /// The load of the last minute before the run, by other programs of the host.
    pub load_before: f64,
    pub rounds: usize,
    pub seconds: f64,
}

impl Setting {
    /// That of a run that is about to begin.
    pub fn now(time: Duration, rounds: usize) -> Self {
        let line = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let load = line("/proc/loadavg");
        Self {
            version: env!("CARGO_PKG_VERSION"),
            kernel: line("/proc/sys/kernel/osrelease"),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            load_before: load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
            rounds,
            seconds: time.as_secs_f64(),
        }
    }

    /// The first line of a report; `how` says where and how it was measured.
    pub fn line(&self, how: &str) -> String {
        format!(
            "tapio {} on Linux {}, {} processors, load {:.1}; {how}; medians of {} x {} s\n",
            self.version, self.kernel, self.processors, self.load_before, self.rounds, self.seconds
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_parts_of_names() {
        let only = ["plug".to_owned()];
        assert!(wanted(&only, "plugs") && !wanted(&only, "calls") && wanted(&[], "calls"));
        assert_eq!(check_only(&only, &["plugs", "calls"], "part"), Ok(()));
        let error = check_only(&["florist".to_owned()], &["plugs", "calls"], "part").expect_err("unknown");
        assert!(error.to_string().contains("'florist' is in the name of no part"), "{error}");
        assert!(error.to_string().contains("parts: plugs, calls"), "{error}");
    }

    #[test]
    fn times_are_those_that_were_given_within_bounds() {
        let quick = Common { quick: true, ..Common::default() };
        assert_eq!(quick.times((1.0, 5), (0.5, 1)), Ok((Duration::from_millis(500), 1)));
        let given = Common { seconds: Some(2.0), ..Common::default() };
        assert_eq!(given.times((1.0, 5), (0.5, 1)), Ok((Duration::from_secs(2), 5)));
        for seconds in [0.0, f64::NAN, 3601.0] {
            let error = Common { seconds: Some(seconds), ..Common::default() }.times((1.0, 1), (1.0, 1));
            assert!(error.expect_err("refused").to_string().contains("--seconds"), "{seconds}");
        }
    }
}
