//! How long an emulated host with Xen may take: its boot a fixed time, and each story the time that it takes on an idle
//! processor, times the factor by which the boot took longer than there.
//!
//! ```text
//!   start ---- boot ----> RESULT boot=.. | RESULT begun=chain | RESULT begun=rings | ... | begun=end | power off
//!         BOOT_LIMIT         measured here    bound of chain       bound of rings      END_LIMIT
//! ```
//!
//! A boot is waited for longer than any that works takes; so a host that stands still is told apart from one that is
//! slow, and what is said about it names the story.

use std::fmt;
use std::time::{Duration, Instant};

/// A boot with nothing else to do.
const QUIET_BOOT: Duration = Duration::from_secs(13);

/// A boot that takes longer than this hangs.
const BOOT_LIMIT: Duration = Duration::from_secs(240);

/// From the end of the last story to the end of the emulator, with nothing else to do.
const END_LIMIT: Duration = Duration::from_secs(30);

/// What stories may take with nothing else to do: many times what they take there, since other work of the processor
/// may come after the boot.
const STORIES: &[(&str, u64)] = &[
    ("devices", 60),
    ("stock", 120),
    ("chain", 180),
    ("rings", 300),
    ("sectors", 150),
    ("features", 300),
    ("moves", 300),
    ("restart", 240),
    ("hotplug", 240),
    ("update", 240),
    ("save", 240),
    ("toolstack", 400),
    ("many", 600),
    ("pvh", 240),
    ("embedded", 240),
];

/// A story that is not in the table.
const OTHER_STORY: u64 = 300;

/// What an emulated host is doing, and its deadline.
#[derive(Debug)]
pub(super) struct Pace {
    began: Instant,
    boot: Option<Duration>,
    /// What has begun, when, and how long it may take.
    part: String,
    part_began: Instant,
    bound: Duration,
}

/// An emulated host that missed its deadline.
#[derive(Debug)]
pub(super) struct Late(String);

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Pace {
    /// An emulated host that starts now.
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { began: now, boot: None, part: "boot".into(), part_began: now, bound: BOOT_LIMIT }
    }

    /// The factor by which everything may take longer than on an idle processor.
    fn factor(boot: Duration) -> f64 {
        (boot.as_secs_f64() / QUIET_BOOT.as_secs_f64()).max(1.0)
    }

    /// Looks at what the console says now. Gives a line for the log when something has begun.
    pub(super) fn look(&mut self, console: &str) -> Result<Option<String>, Late> {
        let now = Instant::now();
        let reported = |key: &str| {
            let lines = console.lines().rev();
            lines.filter_map(|line| line.trim_end().strip_prefix("RESULT ")?.strip_prefix(key)).next()
        };
        let part = reported("begun=");
        if let Some(part) = part.filter(|part| *part != self.part) {
            let boot = *self.boot.get_or_insert(now - self.began);
            let base = match part {
                "end" => END_LIMIT,
                part => {
                    let known = STORIES.iter().find(|(name, _)| *name == part);
                    Duration::from_secs(known.map_or(OTHER_STORY, |(_, seconds)| *seconds))
                }
            };
            let before = format!("{} took {:.1} s", self.part, (now - self.part_began).as_secs_f64());
            (self.part, self.part_began) = (part.to_string(), now);
            self.bound = base.mul_f64(Self::factor(boot));
            let line = format!(
                "{before}; {} begins and may take {:.0} s (its VM booted in {:.1} s)",
                self.part,
                self.bound.as_secs_f64(),
                boot.as_secs_f64()
            );
            return Ok(Some(line));
        }
        if now - self.part_began <= self.bound {
            return Ok(None);
        }
        Err(Late(self.late()))
    }

    fn late(&self) -> String {
        let booted = match self.boot {
            None => "it has not booted".into(),
            Some(boot) => format!(
                "its VM booted in {:.1} s, {:.1} times as long as a quiet one",
                boot.as_secs_f64(),
                Self::factor(boot)
            ),
        };
        format!("'{}' was not over within its {:.0} s ({booted})", self.part, self.bound.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn booted_in(seconds: u64) -> Pace {
        let mut pace = Pace::new();
        pace.boot = Some(Duration::from_secs(seconds));
        pace
    }

    #[test]
    fn a_story_may_take_as_many_times_longer_as_the_boot_did() {
        for (boot, bound) in [(13, 180), (26, 360), (5, 180)] {
            let mut pace = booted_in(boot);
            let line = pace.look("noise\nRESULT boot=9\nRESULT begun=chain\r\n").unwrap().unwrap();
            assert!(line.contains(&format!("chain begins and may take {bound} s")), "{line}");
            assert!(pace.look("RESULT begun=chain\n").unwrap().is_none(), "it has begun once");
        }
    }

    #[test]
    fn what_is_late_is_named_with_its_bound_and_the_boot() {
        let mut pace = booted_in(39);
        pace.look("RESULT begun=devices\nRESULT begun=rings\n").unwrap();
        pace.part_began = pace.part_began.checked_sub(Duration::from_secs(901)).unwrap();
        let said = pace.look("RESULT begun=rings\n").unwrap_err().to_string();
        let expected = "'rings' was not over within its 900 s (its VM booted in 39.0 s, 3.0 times as long as a quiet one)";
        assert_eq!(said, expected);
        let mut pace = Pace::new();
        pace.part_began = pace.part_began.checked_sub(Duration::from_secs(241)).unwrap();
        let said = pace.look("").unwrap_err().to_string();
        assert_eq!(said, "'boot' was not over within its 240 s (it has not booted)");
    }
}
