//! What is compared with what, and the ratios that are aimed at.

use serde::Serialize;

use super::medians::Row;

/// What a ratio is taken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quantity {
    /// Requests per second: more is better.
    Rate,
    /// CPU time of the server for each request: less is better.
    ServerCpu,
}

/// A comparison.
#[derive(Clone, Copy, Debug)]
struct Goal {
    workload: &'static str,
    ours: &'static str,
    peer: &'static str,
    quantity: Quantity,
    /// At least for rates, at most for costs; none where there is only something to be seen.
    wanted: Option<f64>,
}

const fn rate(workload: &'static str, ours: &'static str, peer: &'static str, wanted: f64) -> Goal {
    Goal { workload, ours, peer, quantity: Quantity::Rate, wanted: Some(wanted) }
}

const fn seen(workload: &'static str, ours: &'static str, peer: &'static str) -> Goal {
    Goal { workload, ours, peer, quantity: Quantity::Rate, wanted: None }
}

const fn cpu(workload: &'static str, ours: &'static str, peer: &'static str) -> Goal {
    Goal { workload, ours, peer, quantity: Quantity::ServerCpu, wanted: Some(1.0) }
}

const Q1: &str = "read-4k-q1";
const Q32: &str = "read-4k-q32";
const W32: &str = "write-4k-q32";
const SEQ: &str = "read-1m-q8";
const X4: &str = "read-4k-q32x4";
const NEW: &str = "allocate-4k-q32";

#[rustfmt::skip]
const GOALS: [Goal; 63] = [
    rate(Q1, "tapio-nbd-raw", "qemu-nbd-raw", 1.25),
    rate(Q1, "tapio-nbd-raw", "qsd-nbd-raw", 1.25),
    rate(Q1, "tapio-nbd-raw", "nbdkit-file", 1.25),
    seen(Q1, "tapio-nbd-raw-poll", "nbdkit-file"),
    rate(Q1, "tapio-vhost-raw", "qsd-vhost-raw", 1.0),
    rate(Q1, "tapio-vhost-raw-poll", "qsd-vhost-raw", 1.5),
    seen(Q1, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll"),
    rate(Q1, "tapio-nbd-vhd", "tapio-nbd-raw", 0.95),
    rate(Q1, "tapio-vhost-vhd", "tapio-vhost-raw", 0.95),
    rate(Q1, "tapio-vhost-vhd-poll", "tapio-vhost-raw-poll", 0.95),
    rate(Q1, "tapio-vhost-null", "qsd-vhost-null", 1.0),
    seen(Q1, "tapio-nbd-null", "nbdkit-null"),
    seen(Q1, "tapio-vhost-raw-poll", "file"),
    rate(Q32, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    seen(Q32, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(Q32, "tapio-nbd-raw", "nbdkit-file", 1.1),
    rate(Q32, "tapio-vhost-raw", "qsd-vhost-raw", 1.05),
    rate(Q32, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll", 1.05),
    rate(Q32, "tapio-nbd-vhd", "tapio-nbd-raw", 0.95),
    rate(Q32, "tapio-vhost-vhd", "tapio-vhost-raw", 0.95),
    rate(Q32, "tapio-vhost-null", "qsd-vhost-null", 1.0),
    seen(Q32, "tapio-nbd-null", "nbdkit-null"),
    seen(Q32, "tapio-vhost-raw", "file"),
    cpu(Q32, "tapio-nbd-raw", "qemu-nbd-raw"),
    cpu(Q32, "tapio-nbd-raw", "qsd-nbd-raw"),
    cpu(Q32, "tapio-nbd-raw", "nbdkit-file"),
    cpu(Q32, "tapio-vhost-raw", "qsd-vhost-raw"),
    cpu(Q32, "tapio-vhost-vhd", "qsd-vhost-vpc"),
    rate(W32, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    seen(W32, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(W32, "tapio-nbd-raw", "nbdkit-file", 1.1),
    rate(W32, "tapio-vhost-raw", "qsd-vhost-raw", 1.05),
    rate(W32, "tapio-vhost-raw-poll", "qsd-vhost-raw-poll", 1.05),
    rate(W32, "tapio-nbd-vhd", "tapio-nbd-raw", 0.95),
    rate(W32, "tapio-vhost-vhd", "tapio-vhost-raw", 0.95),
    rate(W32, "tapio-vhost-vhd", "qsd-vhost-vpc", 10.0),
    seen(W32, "tapio-nbd-vhd", "qemu-nbd-vpc"),
    cpu(W32, "tapio-nbd-raw", "qemu-nbd-raw"),
    cpu(W32, "tapio-nbd-raw", "nbdkit-file"),
    cpu(W32, "tapio-vhost-raw", "qsd-vhost-raw"),
    rate(SEQ, "tapio-nbd-raw", "qemu-nbd-raw", 3.3),
    rate(SEQ, "tapio-nbd-raw", "nbdkit-file", 1.1),
    seen(SEQ, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(SEQ, "tapio-vhost-raw", "qsd-vhost-raw", 1.0),
    rate(SEQ, "tapio-nbd-vhd", "tapio-nbd-raw", 0.95),
    rate(SEQ, "tapio-vhost-vhd", "tapio-vhost-raw", 0.95),
    seen(SEQ, "tapio-vhost-raw", "file"),
    rate(X4, "tapio-nbd-raw", "qemu-nbd-raw", 2.2),
    rate(X4, "tapio-nbd-raw", "nbdkit-file", 1.1),
    seen(X4, "tapio-nbd-raw", "qsd-nbd-raw"),
    rate(X4, "tapio-nbd-vhd", "tapio-nbd-raw", 0.95),
    seen(X4, "tapio-nbd-null", "nbdkit-null"),
    seen(Q1, "tapio-fuse-raw", "qsd-fuse-raw"),
    rate(Q32, "tapio-fuse-raw", "qsd-fuse-raw", 1.0),
    cpu(Q32, "tapio-fuse-raw", "qsd-fuse-raw"),
    rate(W32, "tapio-fuse-raw", "qsd-fuse-raw", 1.0),
    rate(SEQ, "tapio-fuse-raw", "qsd-fuse-raw", 1.0),
    seen(Q32, "tapio-fuse-vhd", "tapio-fuse-raw"),
    rate(NEW, "tapio-vhost-vhd", "qsd-vhost-vpc", 8.0),
    rate(NEW, "tapio-nbd-vhd", "qemu-nbd-vpc", 8.0),
    rate(NEW, "tapio-vhost-vhd", "file", 0.25),
    rate(NEW, "tapio-nbd-vhd", "file", 0.25),
    seen(NEW, "tapio-vhost-vhd-poll", "file"),
];

/// A comparison that was made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    pub workload: &'static str,
    pub ours: &'static str,
    pub peer: &'static str,
    pub quantity: Quantity,
    pub ratio: f64,
    /// At least this much for rates, at most this much for costs.
    pub wanted: Option<f64>,
    pub reached: Option<bool>,
}

/// All comparisons whose two sides were measured.
pub fn ratios(rows: &[Row]) -> Vec<Ratio> {
    let find = |workload: &str, server: &str| {
        rows.iter().find(|row| row.workload == workload && row.server == server)
    };
    let mut all = Vec::new();
    for goal in GOALS {
        let (Some(ours), Some(peer)) = (find(goal.workload, goal.ours), find(goal.workload, goal.peer))
        else {
            continue;
        };
        let (above, below) = match goal.quantity {
            Quantity::Rate => (ours.iops, peer.iops),
            Quantity::ServerCpu => {
                let costs = ours.server_cpu_us_per_request.zip(peer.server_cpu_us_per_request);
                let Some(costs) = costs else { continue };
                costs
            }
        };
        if below <= 0.0 {
            continue;
        }
        let ratio = above / below;
        let reached = goal.wanted.map(|wanted| match goal.quantity {
            Quantity::Rate => ratio >= wanted,
            Quantity::ServerCpu => ratio <= wanted,
        });
        let Goal { workload, ours, peer, quantity, wanted } = goal;
        all.push(Ratio { workload, ours, peer, quantity, ratio, wanted, reached });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::SERVERS;
    use crate::workload::WORKLOADS;

    #[test]
    fn every_goal_names_what_can_be_measured() {
        for goal in GOALS {
            let workload = WORKLOADS.iter().find(|workload| workload.name == goal.workload);
            let workload = workload.expect("a known workload");
            for name in [goal.ours, goal.peer] {
                let server = SERVERS.iter().find(|server| server.name == name);
                assert!(server.expect("a known server").takes(workload), "{name} {}", workload.name);
            }
        }
    }

    #[test]
    fn rates_want_at_least_and_costs_at_most() {
        let row = |server, iops, cpu| Row {
            workload: Q32,
            server,
            iops,
            server_cpu_us_per_request: Some(cpu),
            ..Row::default()
        };
        let found = ratios(&[row("tapio-nbd-raw", 220.0, 3.0), row("qemu-nbd-raw", 100.0, 6.0)]);
        let short: Vec<_> = found.iter().map(|ratio| (ratio.quantity, ratio.ratio, ratio.reached)).collect();
        assert_eq!(short, [(Quantity::Rate, 2.2, Some(true)), (Quantity::ServerCpu, 0.5, Some(true))]);
        let found = ratios(&[row("tapio-nbd-raw", 100.0, 9.0), row("qemu-nbd-raw", 100.0, 6.0)]);
        assert!(found.iter().all(|ratio| ratio.reached == Some(false)));
    }
}
