//! Listings of a domain, as toolstacks have asked for them: each value by a transaction of its own, all in one
//! transaction, and all in one transaction sent together. Xend did the first: its thousand listings of one small domain
//! took 105 seconds, and 30 after a patch that did the second.

use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use tapio_xenstore::wire::Request;
use tapio_xenstore::{Client, Nodes, XsError};

use super::daemon::Link;

/// What a domain says about itself, and what is known of each disk on both sides.
const DOMAIN: [&str; 6] = ["name", "vm", "domid", "memory/target", "console/port", "control/shutdown"];
const FRONT: [&str; 5] = ["backend", "backend-id", "state", "virtual-device", "device-type"];
const BACK: [&str; 5] = ["params", "mode", "state", "online", "dev"];

/// How the values are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Way {
    /// A transaction for each.
    Singly,
    /// One transaction, one request after the other.
    Together,
    /// One transaction, requests sent together.
    Pipelined,
}

/// All of them.
pub const WAYS: [Way; 3] = [Way::Singly, Way::Together, Way::Pipelined];

impl Way {
    /// As the tables have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Singly => "a transaction for each value",
            Self::Together => "one transaction",
            Self::Pipelined => "one transaction, sent together",
        }
    }
}

/// What the listings took.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Took {
    /// Seconds for all.
    pub seconds: f64,
    /// Transactions of one.
    pub transactions: u64,
    /// Round trips of one.
    pub round_trips: u64,
}

/// The devices of the domain: kind and number.
fn devices(disks: usize) -> Vec<(&'static str, usize)> {
    (0..disks).map(|disk| ("vbd", 51712 + 16 * disk)).chain([("vif", 0)]).collect()
}

fn sides(kind: &str, number: usize) -> [(String, &'static [&'static str]); 2] {
    let back = if kind == "vbd" { "vbd3" } else { kind };
    [
        (format!("/local/domain/1/device/{kind}/{number}"), &FRONT),
        (format!("/local/domain/0/backend/{back}/1/{number}"), &BACK),
    ]
}

/// All values of a listing.
fn paths(disks: usize) -> Vec<String> {
    let mut paths: Vec<String> = DOMAIN.iter().map(|name| format!("/local/domain/1/{name}")).collect();
    for (kind, number) in devices(disks) {
        for (directory, names) in sides(kind, number) {
            paths.extend(names.iter().map(|name| format!("{directory}/{name}")));
        }
    }
    paths
}

/// Makes the domain.
pub fn fill(link: &mut Link, disks: usize) -> Result<(), String> {
    let nodes: Vec<(String, &[u8])> =
        paths(disks).into_iter().map(|path| (path, &b"some value"[..])).collect();
    link.write_all(&nodes)
}

/// Lists the domain some times.
pub fn run(socket: &Path, disks: usize, way: Way, times: usize) -> Result<Took, String> {
    let failed = |error: XsError| error.to_string();
    let wanted = paths(disks);
    let start = Instant::now();
    let (transactions, round_trips) = match way {
        Way::Singly | Way::Together => {
            let mut link = Link::connect(socket)?;
            let mut transactions = 0;
            for _ in 0..times {
                for some in wanted.chunks(if way == Way::Singly { 1 } else { wanted.len() }) {
                    let transaction = link.begin()?;
                    for path in some {
                        link.ask(transaction, &Request::Read { path })?;
                    }
                    link.end(transaction)?;
                    transactions += 1;
                }
            }
            (transactions, link.round_trips)
        }
        Way::Pipelined => {
            let mut client = Client::connect(socket).map_err(failed)?;
            for _ in 0..times {
                let values =
                    client.transaction(|transaction| transaction.read_many(&wanted)).map_err(failed)?;
                if values.iter().any(Option::is_none) {
                    return Err("a value is not there".into());
                }
            }
            let counts = client.counts();
            (counts.transactions, counts.round_trips)
        }
    };
    let times = times.max(1) as u64;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Took { seconds, transactions: transactions / times, round_trips: round_trips / times })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_asks_for_both_sides_of_every_device() {
        assert_eq!(paths(1).len(), 6 + 2 * 10);
        assert_eq!(paths(64).len(), 6 + 65 * 10);
        assert!(paths(1).contains(&"/local/domain/0/backend/vbd3/1/51712/params".to_owned()));
    }
}
