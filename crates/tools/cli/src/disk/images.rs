//! `tapio disk snapshot`, `commit` and `job`: the images of a disk change while it is used.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tapio_control::command as ask;
use tapio_control::{ControlError, Errno, JobReport, JobStatus, OwnClient, RunDir};
use tapio_types::parse_bytes;

use super::progress::{self, Stand};
use super::{REPLY_TIMEOUT, Which, absolute, tell};
use tapio_report::failure::{Result, print, print_json};
use tapio_report::size::size;

/// How often in a row a disk may be too busy to say how far a job is; each time it is waited for two seconds.
const TIMEOUTS_MAX: u32 = 150;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio disk snapshot -p 4711 -m 0 /disks/new-leaf.vhd

The image that was the leaf becomes the parent of the new one and is not written any more. 'tapio disk commit' merges
images again.")]
pub struct Snapshot {
    #[command(flatten)]
    which: Which,
    /// Where the new leaf is made
    leaf: PathBuf,
    /// How long requests may be held back, in milliseconds; then all is left as it was
    #[arg(long, default_value_t = 5000, value_name = "MILLISECONDS")]
    stall_max: u32,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio disk commit -p 4711 -m 0 /disks/middle.vhd                    with a progress bar
  tapio disk commit -p 4711 -m 0 /disks/middle.vhd --rate 50MiB --detach
  tapio disk commit -p 4711 -m 0 /disks/leaf.vhd                      its parent is the leaf then
  tapio disk job list -p 4711 -m 0

The image must have no other child, and its parent none but it: they would see the parent change. Its file is not
needed afterwards and is yours to remove. A commit that is stopped or killed leaves the disk as it was; begin it again.")]
pub struct Commit {
    #[command(flatten)]
    which: Which,
    /// The image that is merged into its parent
    image: PathBuf,
    /// Bytes a second that the copy may move, as 50MiB
    #[arg(long, default_value = "0", hide_default_value = true, value_parser = parse_bytes)]
    rate: u64,
    /// Begin also where the parent's storage may not have the space
    #[arg(long)]
    force: bool,
    /// Do not wait for the end
    #[arg(long)]
    detach: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
pub enum Job {
    /// List long work on a disk
    List {
        #[command(flatten)]
        which: Which,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Wait for the end of a job, and show how far it is
    Wait {
        #[command(flatten)]
        which: Which,
        /// Its number, as 'job list' shows it
        id: u32,
    },
    /// Stop a job; the disk stays as it is
    Cancel {
        #[command(flatten)]
        which: Which,
        /// Its number, as 'job list' shows it
        id: u32,
    },
    /// Set the speed of a job
    Rate {
        #[command(flatten)]
        which: Which,
        /// Its number, as 'job list' shows it
        id: u32,
        /// Bytes a second, as 50MiB; 0 is no limit
        #[arg(value_parser = parse_bytes)]
        rate: u64,
    },
}

pub fn snapshot(run: &RunDir, arguments: &Snapshot) -> Result<()> {
    let (minor, stall_ms) = (arguments.which.minor, arguments.stall_max);
    let ask = ask::Snapshot { minor, leaf: absolute(&arguments.leaf)?, stall_ms };
    let taken = tell(run, arguments.which.pid, &ask, None)?;
    if arguments.json {
        return print_json(&taken);
    }
    let milliseconds = taken.stalled_us as f64 / 1000.0;
    print(&format!(
        "{} is the leaf now, on {}; the guest waited {milliseconds:.1} ms\n",
        taken.leaf, taken.parent
    ))
}

pub fn commit(run: &RunDir, arguments: &Commit) -> Result<()> {
    let minor = arguments.which.minor;
    let image = absolute(&arguments.image)?;
    let ask = ask::Commit { minor, image, rate: arguments.rate, force: arguments.force };
    let mut client = OwnClient::connect(run, arguments.which.pid)?;
    let mut report = client.call(&ask, &[], REPLY_TIMEOUT)?;
    if !arguments.detach {
        report = follow(&mut client, minor, report.id)?;
    }
    if arguments.json { print_json(&report) } else { print(&format!("{}\n", line(&report))) }
}

pub fn job(run: &RunDir, command: Job) -> Result<()> {
    match command {
        Job::List { which, json } => {
            let jobs = list(&mut OwnClient::connect(run, which.pid)?, which.minor)?;
            if json {
                return print_json(&jobs);
            }
            let lines = jobs.iter().map(|job| format!("{:>4} {}\n", job.id, line(job)));
            print(&lines.collect::<String>())
        }
        Job::Wait { which, id } => {
            let report = follow(&mut OwnClient::connect(run, which.pid)?, which.minor, id)?;
            print(&format!("{}\n", line(&report)))
        }
        Job::Cancel { which, id } => {
            tell(run, which.pid, &ask::JobCancel { minor: which.minor, job: id }, REPLY_TIMEOUT).map(drop)
        }
        Job::Rate { which, id, rate } => {
            tell(run, which.pid, &ask::JobRate { minor: which.minor, job: id, rate }, REPLY_TIMEOUT).map(drop)
        }
    }
}

fn list(client: &mut OwnClient, minor: u16) -> Result<Vec<JobReport>> {
    client.call(&ask::JobList { minor }, &[], REPLY_TIMEOUT)
}

const fn word(status: JobStatus) -> &'static str {
    match status {
        JobStatus::Running => "running",
        JobStatus::Ready => "ready",
        JobStatus::Done => "done",
        JobStatus::Cancelled => "cancelled",
        JobStatus::Failed => "failed",
    }
}

fn line(job: &JobReport) -> String {
    let mut text = format!(
        "{} of {}: {}, {} of {}",
        job.kind,
        job.subject,
        word(job.status),
        size(job.done_bytes),
        size(job.total_bytes)
    );
    if job.rate > 0 {
        text.push_str(&format!(", at most {} a second", size(job.rate)));
    }
    if let Some(reason) = &job.reason {
        text.push_str(&format!(": {reason}"));
    }
    text
}

/// Waits for the end of a job, and shows on a terminal how far it is.
///
/// A disk that is slow to say how far it is has not failed: only the job's own state says what came of it.
fn follow(client: &mut OwnClient, minor: u16, id: u32) -> Result<JobReport> {
    let mut late = 0;
    progress::follow(|| {
        let jobs = match list(client, minor) {
            Err(error) if error.errno == Errno::ETIMEDOUT && late < TIMEOUTS_MAX => {
                late += 1;
                return Ok(Stand { done: 0, total: 1, end: None });
            }
            other => other?,
        };
        late = 0;
        let found = jobs.into_iter().find(|job| job.id == id);
        let job = found.ok_or_else(|| ControlError::new(Errno::ENOENT, format!("there is no job {id}")))?;
        let (done, total) = (job.done_bytes, job.total_bytes.max(job.done_bytes).max(1));
        let end = match job.status {
            JobStatus::Running | JobStatus::Ready => None,
            JobStatus::Done => Some(Ok(job)),
            JobStatus::Cancelled => Some(Err(ControlError::new(Errno::ECANCELED, line(&job)))),
            JobStatus::Failed => Some(Err(ControlError::new(Errno::EIO, line(&job)))),
        };
        Ok(Stand { done, total, end })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_told_in_one_line() {
        let job = JobReport {
            id: 3,
            kind: "commit".into(),
            subject: "/d/a.vhd".into(),
            status: JobStatus::Failed,
            reason: Some("no space left".into()),
            done_bytes: 512,
            total_bytes: 2 << 20,
            rate: 1 << 20,
        };
        assert_eq!(
            line(&job),
            "commit of /d/a.vhd: failed, 512 B of 2.0 MiB, at most 1.0 MiB a second: no space left"
        );
    }
}
