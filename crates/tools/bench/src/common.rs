//! What every benchmark is told, and what its report begins with.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tapio_control::ControlError;

use super::awake::Awake;
use super::environment::Environment;
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
    /// Keep the processors from halting: a thread of the class SCHED_IDLE spins on each until the run ends
    ///
    /// To wake a halted virtual processor takes 50 to 100 microseconds on many hosts, which hides what servers cost.
    /// The threads give way to all others at once. Use it in a VM, and for comparisons of servers that sleep.
    #[arg(long)]
    pub keep_awake: bool,
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

    /// Keeps the processors from halting until the value is dropped, if that was asked for.
    ///
    /// # Errors
    /// The threads that spin cannot be started.
    pub fn awake(&self) -> Result<Option<Awake>> {
        let awake = self.keep_awake.then(Awake::start).transpose();
        awake.map_err(|error| ControlError::io("cannot keep the processors awake", &error))
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
    #[serde(flatten)]
    pub environment: Environment,
    pub rounds: usize,
    pub seconds: f64,
}

impl Setting {
    /// That of a run that is about to begin.
    pub fn now(time: Duration, rounds: usize, kept_awake: bool) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            environment: Environment::now(kept_awake),
            rounds,
            seconds: time.as_secs_f64(),
        }
    }

    /// The first lines of a report; `how` says where and how it was measured.
    pub fn line(&self, how: &str) -> String {
        format!(
            "tapio {} on Linux {}; {how}; medians of {} x {} s\n{}\n",
            self.version,
            self.environment.kernel,
            self.rounds,
            self.seconds,
            self.environment.line()
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
