//! `tapio disk mirror`: a disk on two storages at once, and the move from one to the other.

use clap::{Args, Subcommand};
use tapio_control::command as ask;
use tapio_control::{ControlError, Errno, MirrorCopy, MirrorReport, MirrorState, OwnClient, RunDir};
use tapio_types::parse_bytes;

use super::progress::{self, Stand};
use super::{REPLY_TIMEOUT, Which, source, tell};
use tapio_report::failure::{Result, print, print_json};
use tapio_report::size::size;

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write every change to a second storage too, and copy what is there already
    ///
    /// The disk goes on meanwhile. When both sides are the same the mirror is in sync: each write is answered when
    /// both have it. A second side that fails, or does not answer in time, is given up without an error to the guest;
    /// 'resume' goes on later and copies only what it lacks.
    #[command(after_long_help = "Examples:
  tapio disk mirror start -p 4711 -m 0 --target aio:/new/disk.raw --wait
  tapio disk mirror start -p 4711 -m 0 --target vhd:/new/disk.vhd --rate 100M
  tapio disk mirror pivot -p 4711 -m 0               the disk is on the new image")]
    Start(Start),
    /// Show where the mirror stands
    Status {
        #[command(flatten)]
        which: Which,
        /// As JSON
        #[arg(long)]
        json: bool,
        /// Show progress until both sides are the same; fails when the mirror is lost or ended
        #[arg(long)]
        wait: bool,
    },
    /// Go on with a mirror whose second side was lost
    Resume {
        #[command(flatten)]
        which: Which,
    },
    /// Limit the speed of the copy
    Rate {
        #[command(flatten)]
        which: Which,
        /// Bytes a second, as 50M; 0 is no limit
        #[arg(value_parser = parse_bytes)]
        rate: u64,
    },
    /// Switch over: the disk goes on on the second side
    ///
    /// The guest waits for its requests in flight and one flush. Refused unless the mirror is in sync.
    Pivot {
        #[command(flatten)]
        which: Which,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// End the mirror and keep the first side
    Cancel {
        #[command(flatten)]
        which: Which,
    },
}

#[derive(Debug, Args)]
pub struct Start {
    #[command(flatten)]
    which: Which,
    /// The second storage, exactly as long as the disk; repeat it to name a whole chain, leaf first
    #[arg(short, long = "target", value_name = "TYPE:PATH", required = true)]
    targets: Vec<String>,
    /// Copy everything, zeroes too, onto a storage that may hold anything
    #[arg(long, group = "copy")]
    full: bool,
    /// Copy only what the leaf itself keeps: the second storage has the rest
    #[arg(long, group = "copy")]
    top: bool,
    /// Copy nothing: only what is written from now on goes to the second storage
    #[arg(long, group = "copy")]
    no_copy: bool,
    /// Bytes a second that the copy may move, as 50M
    #[arg(long, default_value = "0", hide_default_value = true, value_parser = parse_bytes)]
    rate: u64,
    /// Milliseconds that the second storage may take for an answer before it is given up
    #[arg(long, default_value_t = ask::MirrorStart::TIMEOUT_MS, alias = "patience", value_name = "MILLISECONDS")]
    timeout: u32,
    /// Show progress until both sides are the same
    #[arg(long)]
    wait: bool,
}

pub fn run(run: &RunDir, command: Command) -> Result<()> {
    match command {
        Command::Start(start) => begin(run, &start),
        Command::Status { which, json, wait } => status(run, which, json, wait),
        Command::Resume { which } => {
            tell(run, which.pid, &ask::MirrorResume { minor: which.minor }, None).map(drop)
        }
        Command::Rate { which, rate } => {
            tell(run, which.pid, &ask::MirrorRate { minor: which.minor, rate }, REPLY_TIMEOUT).map(drop)
        }
        Command::Cancel { which } => {
            tell(run, which.pid, &ask::MirrorCancel { minor: which.minor }, None).map(drop)
        }
        Command::Pivot { which, json } => {
            let moved = tell(run, which.pid, &ask::MirrorPivot { minor: which.minor }, None)?;
            if json {
                return print_json(&moved);
            }
            let milliseconds = moved.stalled_us as f64 / 1000.0;
            print(&format!("the disk is on {} now; the guest waited {milliseconds:.1} ms\n", moved.image))
        }
    }
}

fn begin(run: &RunDir, start: &Start) -> Result<()> {
    let none = || ControlError::new(Errno::EINVAL, "no target was named");
    let ask = ask::MirrorStart {
        minor: start.which.minor,
        target: source(&start.targets)?.ok_or_else(none)?,
        copy: match (start.full, start.top, start.no_copy) {
            (true, ..) => MirrorCopy::Everything,
            (_, true, _) => MirrorCopy::Leaf,
            (.., true) => MirrorCopy::Nothing,
            _ => MirrorCopy::Allocated,
        },
        rate: start.rate,
        timeout_ms: start.timeout,
    };
    let mut client = OwnClient::connect(run, start.which.pid)?;
    client.call(&ask, &[], None)?;
    if start.wait { follow(&mut client, start.which.minor).map(|_| ()) } else { Ok(()) }
}

fn ask(client: &mut OwnClient, minor: u16) -> Result<Option<MirrorReport>> {
    client.call(&ask::MirrorStatus { minor }, &[], REPLY_TIMEOUT)
}

fn status(run: &RunDir, which: Which, json: bool, wait: bool) -> Result<()> {
    let mut client = OwnClient::connect(run, which.pid)?;
    let report = if wait { Some(follow(&mut client, which.minor)?) } else { ask(&mut client, which.minor)? };
    if json {
        return print_json(&report);
    }
    match report {
        Some(report) => print(&text(&report)),
        None => print("no mirror\n"),
    }
}

const fn word(state: MirrorState) -> &'static str {
    match state {
        MirrorState::Copying => "copying",
        MirrorState::InSync => "in sync",
        MirrorState::Degraded => "degraded",
    }
}

fn text(report: &MirrorReport) -> String {
    let mut text = format!("{}: {}\n", report.target, word(report.state));
    if let Some(reason) = &report.reason {
        text.push_str(&format!("  lost because {reason}\n"));
    }
    text.push_str(&format!("  copied {}, lacks {}", size(report.copied_bytes), size(report.dirty_bytes)));
    if !report.listed {
        text.push_str(" and what is not listed yet");
    }
    if report.rate > 0 {
        text.push_str(&format!(", at most {} a second", size(report.rate)));
    }
    if report.unanswered > 0 {
        text.push_str(&format!(", {} requests in flight", report.unanswered));
    }
    text + "\n"
}

/// Waits until both sides are the same, and shows on a terminal how far it is.
fn follow(client: &mut OwnClient, minor: u16) -> Result<MirrorReport> {
    progress::follow(|| {
        let ended = || ControlError::new(Errno::ECANCELED, "the mirror has ended");
        let report = ask(client, minor)?.ok_or_else(ended)?;
        let (done, total) = (report.copied_bytes, report.copied_bytes + report.dirty_bytes);
        let end = match report.state {
            MirrorState::Copying => None,
            MirrorState::InSync => Some(Ok(report)),
            MirrorState::Degraded => {
                let reason = report.reason.unwrap_or_default();
                Some(Err(ControlError::new(Errno::EIO, format!("the second side was lost: {reason}"))
                    .next("'tapio disk mirror resume' goes on when it is back")))
            }
        };
        Ok(Stand { done, total, end })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_told_in_words() {
        let report = MirrorReport {
            job: 3,
            target: "aio:/b".into(),
            state: MirrorState::Degraded,
            reason: Some("no answer within 5 s".into()),
            dirty_bytes: 3 << 20,
            copied_bytes: 1 << 20,
            listed: true,
            rate: 0,
            unanswered: 2,
        };
        let said = text(&report);
        assert_eq!(
            said,
            "aio:/b: degraded\n  lost because no answer within 5 s\n  \
             copied 1.0 MiB, lacks 3.0 MiB, 2 requests in flight\n"
        );
    }
}
