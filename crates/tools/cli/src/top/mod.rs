//! `tapio top`: what all disks of this host do, live.

mod format;
mod sample;
mod screen;

pub use sample::is_served;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use tapio_control::ControlError;
use tapio_report::failure::{Result, print};
use tapio_stat::ShmRoot;

use format::SortKey;
use sample::{Sample, Sampler};
use screen::{Event, Screen};

/// Options of `tapio top`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Keys: r reads, w writes, t throughput, l latency, i in flight, n name: sort by that;
p or space pauses; q quits.

Columns:
  READ/s WRITE/s      requests answered a second
  RD MiB/s WR MiB/s   throughput, in units of 1048576 bytes
  MEAN P99            latency of reads, writes and flushes; P99 is the next power of two
  FLY WAIT            requests in flight now, and those that wait for limits or pages
  QUEUED IMAGE KERNEL COMPL
                      how many requests each layer held on average: waiting for their turn, in the
                      image format, in the kernel, and being answered. The largest is the bottleneck.

Examples:
  tapio top --sort latency             the slowest disks first
  tapio top --once --interval 5        five seconds, as text
  tapio top --json --count 60          a JSON object a second, for a minute"
)]
pub struct TopArguments {
    /// Seconds between samples, 0.1 to 3600
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// What the lines are sorted by
    #[arg(short, long, value_name = "KEY", value_enum, default_value = "throughput")]
    sort: SortKey,
    /// One sample over the interval, as text; what happens without a terminal too
    #[arg(long, conflicts_with = "count")]
    once: bool,
    /// As JSON, one object a line and sample
    #[arg(long)]
    json: bool,
    /// End after this many samples
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

pub fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "give seconds, as 0.5 or 10".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("give 0.1 to 3600 seconds".to_owned())
    }
}

pub fn run(arguments: &TopArguments) -> Result<()> {
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let mut sampler = Sampler::new(ShmRoot::from_env())?;
    if is_terminal && !arguments.once && !arguments.json {
        return watch(arguments, &mut sampler);
    }
    let endless = arguments.json && is_terminal && !arguments.once;
    let count = arguments.count.unwrap_or(if endless { u64::MAX } else { 1 });
    for _ in 0..count {
        std::thread::sleep(arguments.interval);
        let sample = sorted(&mut sampler, arguments.sort)?;
        let text = if arguments.json {
            serde_json::to_string(&sample).map_err(|error| ControlError::io("writing JSON", &error.into()))?
        } else {
            format::lines(&sample, arguments.sort, false).join("\n")
        };
        print(&(text + "\n"))?;
    }
    Ok(())
}

fn sorted(sampler: &mut Sampler, key: SortKey) -> Result<Sample> {
    let mut sample = sampler.sample()?;
    format::sort(&mut sample.disks, key);
    Ok(sample)
}

fn watch(arguments: &TopArguments, sampler: &mut Sampler) -> Result<()> {
    let failed = |error: io::Error| ControlError::io("cannot use the terminal", &error).next("use --once");
    let screen = Screen::open().map_err(failed)?;
    let (mut key, mut paused, mut shown) = (arguments.sort, false, 0);
    let mut sample = Sample::default();
    let mut due = Instant::now() + arguments.interval;
    loop {
        let (columns, rows) = screen.size();
        screen.draw(&format::fit(format::lines(&sample, key, paused), columns, rows)).map_err(failed)?;
        match screen.wait(due.saturating_duration_since(Instant::now())) {
            Event::End | Event::Key(b'q') => return Ok(()),
            Event::Key(b'p' | b' ') => paused = !paused,
            Event::Key(pressed) => {
                key = SortKey::of_key(pressed).unwrap_or(key);
                format::sort(&mut sample.disks, key);
            }
            Event::Redraw => {}
            Event::Due => {
                due = Instant::now() + arguments.interval;
                if !paused {
                    sample = sorted(sampler, key)?;
                    shown += 1;
                }
            }
        }
        if arguments.count.is_some_and(|count| shown >= count) {
            return Ok(());
        }
    }
}
