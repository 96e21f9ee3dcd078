//! What is asked of a tree, as fast as one client can.

use std::time::{Duration, Instant};

use serde::Serialize;
use tapio_load::Random;
use tapio_xenstore::wire::Request;

use super::daemon::Link;

/// Children of each directory.
const CHILDREN: usize = 100;

/// What one round of the loop is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Load {
    /// One value is read.
    Read,
    /// One value is written.
    Write,
    /// A directory is listed.
    List,
    /// A transaction begins, and ends without anything.
    Empty,
    /// A transaction reads a value.
    ReadInOne,
    /// A transaction reads a value and writes another.
    ChangeInOne,
    /// A transaction reads ten values and writes ten others.
    TenInOne,
}

/// All of them.
pub const LOADS: [Load; 7] =
    [Load::Read, Load::Write, Load::List, Load::Empty, Load::ReadInOne, Load::ChangeInOne, Load::TenInOne];

impl Load {
    /// As `--only` and the tables have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::List => "list",
            Self::Empty => "transaction-empty",
            Self::ReadInOne => "transaction-read",
            Self::ChangeInOne => "transaction-change",
            Self::TenInOne => "transaction-change-10",
        }
    }
}

/// How fast it went.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speed {
    /// Rounds per second.
    pub per_second: f64,
    /// Microseconds of a round, of which one in a hundred takes longer.
    pub p99_us: f64,
}

/// A tree of some nodes below `/bench`.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Nodes.
    pub nodes: usize,
}

impl Shape {
    fn path(self, number: usize) -> String {
        format!("/bench/d{}/n{}", number / CHILDREN, number % CHILDREN)
    }

    /// Makes it.
    pub fn fill(self, link: &mut Link) -> Result<(), String> {
        let nodes: Vec<(String, &[u8])> =
            (0..self.nodes).map(|number| (self.path(number), &b"0123456789"[..])).collect();
        link.write_all(&nodes)
    }
}

/// Runs a load for some time.
pub fn run(link: &mut Link, load: Load, shape: Shape, time: Duration) -> Result<Speed, String> {
    let mut random = Random::new(1);
    let mut took: Vec<u32> = Vec::new();
    let start = Instant::now();
    while start.elapsed() < time {
        let begin = Instant::now();
        one(link, load, shape, &mut random)?;
        took.push(begin.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
    }
    let seconds = start.elapsed().as_secs_f64();
    took.sort_unstable();
    let p99 = took.get(took.len() * 99 / 100).copied().unwrap_or(0);
    Ok(Speed { per_second: took.len() as f64 / seconds, p99_us: f64::from(p99) / 1000.0 })
}

fn one(link: &mut Link, load: Load, shape: Shape, random: &mut Random) -> Result<(), String> {
    let mut path = || shape.path(random.below(shape.nodes.max(1) as u64) as usize);
    match load {
        Load::Read => drop(link.ask(0, &Request::Read { path: &path() })?),
        Load::Write => drop(link.ask(0, &Request::Write { path: &path(), value: b"9876543210" })?),
        Load::List => {
            let path = path();
            let directory = path.rsplit_once('/').map_or("/", |(directory, _)| directory);
            link.ask(0, &Request::Directory { path: directory })?;
        }
        Load::Empty | Load::ReadInOne | Load::ChangeInOne | Load::TenInOne => {
            let transaction = link.begin()?;
            let (reads, writes) = match load {
                Load::Empty => (0, 0),
                Load::ReadInOne => (1, 0),
                Load::ChangeInOne => (1, 1),
                _ => (10, 10),
            };
            for _ in 0..reads {
                link.ask(transaction, &Request::Read { path: &path() })?;
            }
            for _ in 0..writes {
                link.ask(transaction, &Request::Write { path: &path(), value: b"9876543210" })?;
            }
            if !link.end(transaction)? {
                return Err("a transaction failed with a conflict, although there is no other client".into());
            }
        }
    }
    Ok(())
}
