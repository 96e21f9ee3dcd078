//! What is compared with what, and what is aimed at: ratios to peers, and limits in units of their own.

use serde::Serialize;

use super::alone::{LARGEST_AFTER_TRAFFIC, OPENED};

/// What is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quantity {
    /// Requests per second, as a ratio: more is better.
    Rate,
    /// CPU time of the server for each request, as a ratio: less is better, as for all that follow.
    ServerCpu,
    /// The same in microseconds.
    ServerCpuUs,
    /// What 99.9 % of the requests did not exceed, in milliseconds.
    P999Ms,
    /// From the start of a server to its first answer, in milliseconds.
    FirstAnswerMs,
    /// Memory of one process, PSS, in megabytes of 10^6 bytes.
    PssMb,
}

impl Quantity {
    /// As tables say it, after the names of what is compared.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Rate => "",
            Self::ServerCpu => ", server CPU",
            Self::ServerCpuUs => ", server CPU us/request",
            Self::P999Ms => ", p99.9 ms",
            Self::FirstAnswerMs => ", first answer ms",
            Self::PssMb => ", PSS MB",
        }
    }

    /// Whether a value is as good as what is wanted.
    pub fn reaches(self, value: f64, wanted: f64) -> bool {
        if self == Self::Rate { value >= wanted } else { value <= wanted }
    }
}

/// What ours is held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Against {
    /// Another server under the same load.
    Server(&'static str),
    /// The fastest of some servers under the same load.
    Best(&'static [&'static str]),
    /// The same server under another load.
    Load(&'static str),
    /// Nothing: the value itself.
    Limit,
}

/// A comparison.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    pub workload: &'static str,
    pub ours: &'static str,
    pub against: Against,
    pub quantity: Quantity,
    /// At least for rates, at most for costs; none where there is only something to be seen.
    pub wanted: Option<f64>,
    /// Aimed at on a disk only, and merely seen in memory.
    pub on_disk: bool,
    /// The wanted rate needs processors that neither the server nor the load generator has in use.
    pub scales: bool,
}

const fn seen(workload: &'static str, ours: &'static str, peer: &'static str) -> Goal {
    let (against, quantity) = (Against::Server(peer), Quantity::Rate);
    Goal { workload, ours, against, quantity, wanted: None, on_disk: false, scales: false }
}

const fn rate(workload: &'static str, ours: &'static str, peer: &'static str, wanted: f64) -> Goal {
    Goal { wanted: Some(wanted), ..seen(workload, ours, peer) }
}

const fn best(workload: &'static str, ours: &'static str, peers: &'static [&'static str]) -> Goal {
    Goal { against: Against::Best(peers), ..rate(workload, ours, "", 1.0) }
}

const fn cpu(workload: &'static str, ours: &'static str, peer: &'static str) -> Goal {
    Goal { quantity: Quantity::ServerCpu, ..rate(workload, ours, peer, 1.0) }
}

const fn cpu_us(workload: &'static str, ours: &'static str, wanted: f64) -> Goal {
    Goal { quantity: Quantity::ServerCpuUs, against: Against::Limit, ..rate(workload, ours, "", wanted) }
}

/// Several lanes beside one.
const fn scaling(workload: &'static str, ours: &'static str, one: &'static str, wanted: f64) -> Goal {
    Goal { against: Against::Load(one), scales: true, ..rate(workload, ours, "", wanted) }
}

const fn cpu_scaling(workload: &'static str, ours: &'static str, one: &'static str) -> Goal {
    Goal { against: Against::Load(one), quantity: Quantity::ServerCpu, ..rate(workload, ours, "", 1.15) }
}

const fn new(workload: &'static str, ours: &'static str, peer: &'static str, wanted: f64) -> Goal {
    Goal { on_disk: true, ..rate(workload, ours, peer, wanted) }
}

const fn stalls(workload: &'static str, ours: &'static str) -> Goal {
    let (against, quantity) = (Against::Limit, Quantity::P999Ms);
    Goal { against, quantity, ..new(workload, ours, "", 20.0) }
}

const Q1: &str = "read-4k-q1";
const Q32: &str = "read-4k-q32";
const W32: &str = "write-4k-q32";
const R1M: &str = "read-1m-q8";
const W1M: &str = "write-1m-q8";
const R8X4: &str = "read-4k-q8x4";
const W8X4: &str = "write-4k-q8x4";
const R8X4S: &str = "read-4k-q8x4-single";
const W8X4S: &str = "write-4k-q8x4-single";
const X2: &str = "read-4k-q32x2";
const X4: &str = "read-4k-q32x4";
const A1: &str = "allocate-4k-q1";
const A32: &str = "allocate-4k-q32";
const A1M: &str = "allocate-1m-q8";
/// A populated VHD beside the raw file of the same server.
const VHD: f64 = 0.97;
/// Several connections beside nbdkit, which has a thread for each request.
const LANES: f64 = 1.15;

#[rustfmt::skip]
pub const GOALS: [Goal; 141] = [
    rate(Q1, "tapio-nbd-raw", "qemu-nbd-raw", 1.25),
    rate(Q1, "tapio-nbd-raw", "qsd-nbd-raw", 1.25),
    rate(Q1, "tapio-nbd-raw", "nbdkit-file", 1.25),
    seen(Q1, "tapio-nbd-raw-poll", "nbdkit-file"),
    rate(Q1, "tapio-vhost-raw", "qsd-vhost-raw", 1.0),
    rate(Q1, "tapio-vhost-raw-poll", "qsd-vhost-raw", 1.5),
    seen(Q1, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll"),
    rate(Q1, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(Q1, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    rate(Q1, "tapio-vhost-vhd-poll", "tapio-vhost-raw-poll", VHD),
    rate(Q1, "tapio-fuse-vhd", "tapio-fuse-raw", VHD),
    rate(Q1, "tapio-vhost-null", "qsd-vhost-null", 1.0),
    seen(Q1, "tapio-nbd-null", "nbdkit-null"),
    seen(Q1, "tapio-vhost-raw-poll", "file"),
    seen(Q1, "tapio-fuse-raw", "qsd-fuse-raw"),
    rate(Q32, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    seen(Q32, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(Q32, "tapio-nbd-raw", "nbdkit-file", 1.1),
    rate(Q32, "tapio-vhost-raw", "qsd-vhost-raw", 1.05),
    rate(Q32, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll", 1.05),
    rate(Q32, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(Q32, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    rate(Q32, "tapio-vhost-vhd-poll", "tapio-vhost-raw-poll", VHD),
    rate(Q32, "tapio-fuse-vhd", "tapio-fuse-raw", VHD),
    rate(Q32, "tapio-vhost-null", "qsd-vhost-null", 1.0),
    seen(Q32, "tapio-nbd-null", "nbdkit-null"),
    seen(Q32, "tapio-vhost-raw", "file"),
    rate(Q32, "tapio-fuse-raw", "qsd-fuse-raw", 1.0),
    cpu(Q32, "tapio-nbd-raw", "qemu-nbd-raw"),
    cpu(Q32, "tapio-nbd-raw", "qsd-nbd-raw"),
    cpu(Q32, "tapio-nbd-raw", "nbdkit-file"),
    cpu(Q32, "tapio-vhost-raw", "qsd-vhost-raw"),
    cpu(Q32, "tapio-vhost-vhd", "qsd-vhost-vpc"),
    cpu(Q32, "tapio-fuse-raw", "qsd-fuse-raw"),
    rate(W32, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    seen(W32, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(W32, "tapio-nbd-raw", "nbdkit-file", 1.1),
    rate(W32, "tapio-vhost-raw", "qsd-vhost-raw", 1.05),
    rate(W32, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll", 1.05),
    rate(W32, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(W32, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    rate(W32, "tapio-vhost-vhd-poll", "tapio-vhost-raw-poll", VHD),
    rate(W32, "tapio-fuse-vhd", "tapio-fuse-raw", VHD),
    rate(W32, "tapio-vhost-vhd", "qsd-vhost-vpc", 10.0),
    seen(W32, "tapio-nbd-vhd", "qemu-nbd-vpc"),
    rate(W32, "tapio-fuse-raw", "qsd-fuse-raw", 1.0),
    cpu(W32, "tapio-nbd-raw", "qemu-nbd-raw"),
    cpu(W32, "tapio-nbd-raw", "nbdkit-file"),
    cpu(W32, "tapio-vhost-raw", "qsd-vhost-raw"),
    rate(R1M, "tapio-nbd-raw", "qemu-nbd-raw", 3.3),
    rate(R1M, "tapio-nbd-raw", "nbdkit-file", 1.1),
    seen(R1M, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(R1M, "tapio-vhost-raw", "qsd-vhost-raw", 1.0),
    rate(R1M, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll", 1.0),
    rate(R1M, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(R1M, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    rate(R1M, "tapio-vhost-vhd-poll", "tapio-vhost-raw-poll", VHD),
    rate(R1M, "tapio-fuse-vhd", "tapio-fuse-raw", VHD),
    rate(R1M, "tapio-fuse-raw", "qsd-fuse-raw", 1.0),
    seen(R1M, "tapio-vhost-raw", "file"),
    best(W1M, "tapio-nbd-raw", &["nbdkit-file", "qemu-nbd-raw", "qsd-nbd-raw"]),
    rate(W1M, "tapio-vhost-raw", "qsd-vhost-raw", 1.0),
    rate(W1M, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll", 1.0),
    rate(W1M, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(W1M, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    rate(W1M, "tapio-vhost-vhd-poll", "tapio-vhost-raw-poll", VHD),
    rate(W1M, "tapio-fuse-vhd", "tapio-fuse-raw", VHD),
    seen(W1M, "tapio-vhost-raw", "file"),
    rate(R8X4, "tapio-nbd-raw", "nbdkit-file", LANES),
    rate(R8X4, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    seen(R8X4, "tapio-nbd-raw", "qsd-nbd-raw"),
    seen(R8X4, "tapio-nbd-null", "nbdkit-null"),
    rate(R8X4, "tapio-vhost-raw", "qsd-vhost-raw", 1.05),
    rate(R8X4, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(R8X4, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    cpu_us(R8X4, "tapio-nbd-raw", 6.0),
    cpu_us(R8X4, "tapio-nbd-vhd", 6.0),
    rate(W8X4, "tapio-nbd-raw", "nbdkit-file", LANES),
    rate(W8X4, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    seen(W8X4, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(W8X4, "tapio-vhost-raw", "qsd-vhost-raw", 1.05),
    rate(W8X4, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(W8X4, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    cpu_us(W8X4, "tapio-nbd-raw", 6.0),
    cpu_us(W8X4, "tapio-nbd-vhd", 6.0),
    rate(R8X4S, "tapio-nbd-raw", "nbdkit-file", LANES),
    rate(R8X4S, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    seen(R8X4S, "tapio-nbd-null", "nbdkit-null"),
    cpu_us(R8X4S, "tapio-nbd-raw", 6.0),
    cpu_us(R8X4S, "tapio-nbd-vhd", 6.0),
    rate(W8X4S, "tapio-nbd-raw", "nbdkit-file", LANES),
    rate(W8X4S, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    rate(W8X4S, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    cpu_us(W8X4S, "tapio-nbd-raw", 6.0),
    cpu_us(W8X4S, "tapio-nbd-vhd", 6.0),
    scaling(X2, "tapio-vhost-raw", Q32, 1.5),
    scaling(X2, "tapio-vhost-vhd", Q32, 1.5),
    scaling(X2, "tapio-vhost-null", Q32, 1.5),
    rate(X2, "tapio-vhost-raw", "qsd-vhost-raw", 1.05),
    rate(X2, "tapio-vhost-null", "qsd-vhost-null", 1.0),
    rate(X2, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    rate(X2, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    cpu_scaling(X2, "tapio-vhost-raw", Q32),
    cpu_scaling(X2, "tapio-vhost-vhd", Q32),
    cpu_scaling(X2, "tapio-nbd-raw", Q32),
    rate(X4, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    rate(X4, "tapio-nbd-raw", "nbdkit-file", 1.1),
    seen(X4, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(X4, "tapio-nbd-vhd", "tapio-nbd-raw", VHD),
    rate(X4, "tapio-vhost-vhd", "tapio-vhost-raw", VHD),
    seen(X4, "tapio-nbd-null", "nbdkit-null"),
    rate(X4, "tapio-vhost-null", "qsd-vhost-null", 1.0),
    cpu_scaling(X4, "tapio-vhost-raw", Q32),
    cpu_scaling(X4, "tapio-nbd-raw", Q32),
    new(A1, "tapio-vhost-vhd", "file", 0.5),
    new(A1, "tapio-nbd-vhd", "file", 0.5),
    new(A1, "tapio-vhost-diff", "file", 0.5),
    new(A1, "tapio-vhost-crypt", "file", 0.5),
    new(A1, "tapio-vhost-vhd", "qsd-vhost-qcow2", 2.0),
    new(A1, "tapio-nbd-vhd", "qsd-nbd-qcow2", 2.0),
    rate(A32, "tapio-vhost-vhd", "qsd-vhost-vpc", 8.0),
    rate(A32, "tapio-nbd-vhd", "qemu-nbd-vpc", 8.0),
    new(A32, "tapio-vhost-vhd", "file", 0.5),
    new(A32, "tapio-nbd-vhd", "file", 0.5),
    new(A32, "tapio-vhost-diff", "file", 0.5),
    new(A32, "tapio-nbd-diff", "file", 0.5),
    new(A32, "tapio-vhost-crypt", "file", 0.5),
    new(A32, "tapio-nbd-crypt", "file", 0.5),
    new(A32, "tapio-vhost-vhd", "qsd-vhost-qcow2", 2.0),
    new(A32, "tapio-nbd-vhd", "qsd-nbd-qcow2", 2.0),
    stalls(A32, "tapio-vhost-vhd"),
    stalls(A32, "tapio-nbd-vhd"),
    stalls(A32, "tapio-vhost-diff"),
    stalls(A32, "tapio-vhost-crypt"),
    new(A1M, "tapio-vhost-vhd", "file", 0.5),
    new(A1M, "tapio-nbd-vhd", "file", 0.5),
    new(A1M, "tapio-vhost-diff", "file", 0.5),
    new(A1M, "tapio-vhost-crypt", "file", 0.5),
    // Large writes are bounded by the disk, of which nobody gets twice.
    new(A1M, "tapio-vhost-vhd", "qsd-vhost-qcow2", 1.0),
    new(A1M, "tapio-nbd-vhd", "qsd-nbd-qcow2", 1.0),
    seen(A1M, "tapio-nbd-vhd", "tapio-vhost-vhd"),
];

/// The most that a start and an idle process of ours may cost: server, what it had done, and the limit.
pub const ALONE: [(&str, &str, Quantity, f64); 3] = [
    ("tapio-nbd-raw", "start", Quantity::FirstAnswerMs, 3.5),
    ("tapio-nbd-raw", OPENED, Quantity::PssMb, 1.0),
    ("tapio-nbd-vhd", LARGEST_AFTER_TRAFFIC, Quantity::PssMb, 6.0),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::SERVERS;
    use crate::workload::WORKLOADS;

    #[test]
    fn every_goal_names_what_can_be_measured() {
        for goal in GOALS {
            let workload =
                |name| WORKLOADS.iter().find(|workload| workload.name == name).expect("a known workload");
            let measured = |name: &str, workload: &crate::workload::Workload| {
                let server = SERVERS.iter().find(|server| server.name == name).expect("a known server");
                assert!(server.takes(workload), "{name} {}", workload.name);
            };
            measured(goal.ours, workload(goal.workload));
            match goal.against {
                Against::Server(name) => measured(name, workload(goal.workload)),
                Against::Best(names) => names.iter().for_each(|name| measured(name, workload(goal.workload))),
                Against::Load(name) => measured(goal.ours, workload(name)),
                Against::Limit => assert!(!matches!(goal.quantity, Quantity::Rate | Quantity::ServerCpu)),
            }
            assert!(goal.wanted.is_some() || !goal.on_disk && !goal.scales, "{goal:?}");
        }
    }

    #[test]
    fn a_populated_vhd_is_beside_raw_in_every_cell() {
        for workload in WORKLOADS.iter().filter(|workload| !workload.fresh) {
            let vhds = SERVERS.iter().filter(|server| {
                server.name.starts_with("tapio") && server.name.contains("vhd") && server.takes(workload)
            });
            for server in vhds {
                let judged = GOALS.iter().any(|goal| {
                    let raw = server.name.replace("vhd", "raw");
                    let same = goal.against
                        == Against::Server(
                            SERVERS.iter().find(|one| one.name == raw).map_or("", |one| one.name),
                        );
                    goal.workload == workload.name
                        && goal.ours == server.name
                        && same
                        && goal.wanted == Some(VHD)
                });
                assert!(judged, "{} {}", server.name, workload.name);
            }
        }
    }

    #[test]
    fn rates_want_at_least_and_costs_at_most() {
        assert!(Quantity::Rate.reaches(1.0, 1.0) && !Quantity::Rate.reaches(0.9, 1.0));
        for cost in [Quantity::ServerCpu, Quantity::ServerCpuUs, Quantity::P999Ms, Quantity::PssMb] {
            assert!(cost.reaches(1.0, 1.0) && !cost.reaches(1.1, 1.0), "{cost:?}");
        }
    }
}
