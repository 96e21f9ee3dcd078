//! Time limits: storage or a process that hangs is a reason to make a report, and stops no part of it but its own.

use std::io;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Calls without an answer after which the daemon is asked no more.
const SILENT_MAX: usize = 3;

/// How long one part may take, and all together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    part: Duration,
    until: Instant,
}

impl Limit {
    pub(super) fn new(part: Duration) -> Self {
        // Parts that hang are few: the others take no time.
        Self { part, until: Instant::now() + part * 12 }
    }

    /// What one part may take from now on.
    pub(super) fn left(&self) -> Duration {
        self.part.min(self.until.saturating_duration_since(Instant::now()))
    }

    /// What a part answers, unless it takes too long. Its thread stays behind then, and ends with the program.
    pub(super) fn run<T: Send + 'static>(
        &self,
        part: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let left = self.left();
        if left.is_zero() {
            return Err("no time was left".into());
        }
        let (sender, receiver) = mpsc::channel();
        let started = std::thread::Builder::new().spawn(move || sender.send(part()));
        started.map_err(|error| format!("no thread: {error}"))?;
        receiver.recv_timeout(left).unwrap_or_else(|_| Err(silent(left)))
    }

    /// What a program prints.
    pub(super) fn command(&self, program: &str, words: &[&str]) -> Result<String, String> {
        let left = self.left();
        // It ends a program that hangs, before this one stops waiting.
        let mut command = Command::new("timeout");
        let time = format!("{:.1}", (left.as_secs_f64() * 0.8).max(0.1));
        command.args(["-k", "1", &time, program]).args(words).stdin(Stdio::null());
        let name = program.to_owned();
        self.run(move || {
            let output = command.output().map_err(|error| format!("{name}: {error}"))?;
            match output.status.code() {
                Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
                // What timeout(1) answers.
                Some(124 | 137) => Err(silent(left)),
                _ => {
                    let why = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
                    Err(format!("{name}: {}: {why}", output.status))
                }
            }
        })
    }
}

fn silent(limit: Duration) -> String {
    format!("no answer within {} s", limit.as_secs_f64().ceil())
}

/// Something that is asked one question after the other, each with a limit; made again after one without answer.
pub(super) struct Asked<T> {
    make: fn(&Shared) -> Result<T, String>,
    shared: Shared,
    thing: Option<T>,
    silent: usize,
}

/// How it is made.
pub(super) type Shared = std::sync::Arc<Vec<String>>;

impl<T: Send + 'static> Asked<T> {
    pub(super) fn new(make: fn(&Shared) -> Result<T, String>, words: Vec<String>) -> Self {
        Self { make, shared: Shared::new(words), thing: None, silent: 0 }
    }

    /// Asks; an error of the question leaves the thing as it is.
    pub(super) fn ask<R: Send + 'static>(
        &mut self,
        limit: &Limit,
        question: impl FnOnce(&T) -> Result<R, String> + Send + 'static,
    ) -> Result<R, String> {
        if self.silent >= SILENT_MAX {
            return Err("not asked: the daemon left several questions without an answer".into());
        }
        let (thing, make, shared) = (self.thing.take(), self.make, self.shared.clone());
        let asked = limit.run(move || {
            let thing = match thing {
                Some(thing) => thing,
                None => make(&shared)?,
            };
            let answer = question(&thing);
            Ok((thing, answer))
        });
        match asked {
            Ok((thing, answer)) => {
                self.thing = Some(thing);
                self.silent = 0;
                answer
            }
            Err(why) => {
                self.silent += 1;
                Err(why)
            }
        }
    }
}

/// An error of a file with its path.
pub(super) fn wrong(path: &std::path::Path) -> impl Fn(io::Error) -> String + '_ {
    |error| format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_stops_nothing_else() {
        let limit = Limit::new(Duration::from_millis(50));
        let mut asked: Asked<u32> = Asked::new(|words| Ok(words.len() as u32), vec!["a".into()]);
        assert_eq!(asked.ask(&limit, |number| Ok(*number)), Ok(1));
        assert_eq!(asked.ask(&limit, |_| Err::<(), _>("no".into())), Err("no".into()));
        let hang = |_: &u32| -> Result<(), String> {
            loop {
                std::thread::park();
            }
        };
        for _ in 0..SILENT_MAX {
            assert!(asked.ask(&limit, hang).unwrap_err().contains("no answer within"));
        }
        assert!(asked.ask(&limit, |number| Ok(*number)).unwrap_err().contains("not asked"));
        assert_eq!(Limit::new(Duration::from_secs(60)).run(|| Ok(7)), Ok(7), "other parts go on");
        assert!(limit.command("sleep", &["600"]).unwrap_err().contains("no answer within"));
    }
}
