//! Which goals were met.

use serde::Serialize;

use super::alone::{Memory, Start};
use super::goals::{ALONE, Against, GOALS, Goal, Quantity};
use super::medians::Row;

/// A comparison that was made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// A workload, `start`, or the state in which memory was read.
    pub workload: &'static str,
    pub ours: &'static str,
    /// A server, or the workload of the same server; none for a limit.
    pub against: Option<&'static str>,
    pub quantity: Quantity,
    /// A ratio for [`Quantity::Rate`] and [`Quantity::ServerCpu`]; else in the unit of the quantity.
    pub value: f64,
    /// At least this much for rates, at most this much for costs.
    pub wanted: Option<f64>,
    pub reached: Option<bool>,
    /// Why it is not judged, or what to know about it.
    pub note: Option<&'static str>,
}

/// All comparisons whose two sides were measured at one place.
pub fn of_rows(rows: &[Row], in_memory: bool, processors: usize) -> Vec<Verdict> {
    GOALS.iter().filter_map(|goal| verdict(goal, rows, in_memory, processors)).collect()
}

/// The row that ours is held against, and its name. Of several peers, all that were measured are meant.
fn peer<'a>(goal: &Goal, rows: &'a [Row]) -> Option<(&'static str, &'a Row)> {
    let find = |workload, server| rows.iter().find(|row| row.workload == workload && row.server == server);
    match goal.against {
        Against::Server(name) => Some((name, find(goal.workload, name)?)),
        Against::Best(names) => {
            let found = names.iter().filter_map(|name| Some((*name, find(goal.workload, name)?)));
            found
                .filter(|(_, row)| !row.cached)
                .max_by(|(_, one), (_, other)| one.iops.total_cmp(&other.iops))
        }
        Against::Load(name) => Some((name, find(name, goal.ours)?)),
        Against::Limit => None,
    }
}

fn verdict(goal: &Goal, rows: &[Row], in_memory: bool, processors: usize) -> Option<Verdict> {
    let ours = rows.iter().find(|row| row.workload == goal.workload && row.server == goal.ours)?;
    let peer = peer(goal, rows);
    let value = match (goal.quantity, peer) {
        (Quantity::Rate, Some((_, peer))) => ours.iops / peer.iops,
        (Quantity::ServerCpu, Some((_, peer))) => {
            ours.server_cpu_us_per_request? / peer.server_cpu_us_per_request?
        }
        (Quantity::ServerCpuUs, None) => ours.server_cpu_us_per_request?,
        (Quantity::P999Ms, None) => ours.p999_us / 1e3,
        _ => return None,
    };
    if !value.is_finite() {
        return None;
    }
    let wanted = goal.wanted.filter(|_| !(goal.on_disk && in_memory));
    let note = if peer.is_some_and(|(_, peer)| peer.cached) {
        Some("not judged: the peer used the page cache")
    } else if let (true, Some(wanted), Some((_, one))) = (goal.scales, wanted, peer)
        && !has_room(one, ours, wanted, processors)
    {
        Some("not judged: no processor was free")
    } else if ours.limited_by_load {
        Some("the load generator was busy")
    } else {
        None
    };
    let judged = !note.is_some_and(|note| note.starts_with("not judged"));
    let reached = wanted.filter(|_| judged).map(|wanted| goal.quantity.reaches(value, wanted));
    let Goal { workload, ours, quantity, .. } = *goal;
    Some(Verdict {
        workload,
        ours,
        against: peer.map(|(name, _)| name),
        quantity,
        value,
        wanted,
        reached,
        note,
    })
}

/// Whether the host has the processors for `wanted` times the rate of one lane, at what its requests cost the server
/// and those of several lanes cost the load generator.
fn has_room(one: &Row, several: &Row, wanted: f64, processors: usize) -> bool {
    let costs = one.server_cpu_us_per_request.zip(several.load_cpu_us_per_request);
    costs.is_none_or(|(server, load)| wanted * one.iops * (server + load) / 1e6 <= processors as f64)
}

/// The limits for what a process costs alone.
pub fn of_alone(starts: &[Start], memory: &[Memory]) -> Vec<Verdict> {
    let found = |(ours, state, quantity, wanted): &(&'static str, &'static str, Quantity, f64)| {
        let value = if *quantity == Quantity::FirstAnswerMs {
            starts.iter().find(|start| start.server == *ours)?.first_answer_ms
        } else {
            let one = memory.iter().find(|memory| memory.server == *ours && memory.state == *state)?;
            one.pss_kib as f64 * 1024.0 / 1e6
        };
        Some(Verdict {
            workload: state,
            ours,
            against: None,
            quantity: *quantity,
            value,
            wanted: Some(*wanted),
            reached: Some(quantity.reaches(value, *wanted)),
            note: None,
        })
    };
    ALONE.iter().filter_map(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(workload: &'static str, server: &'static str, iops: f64, cpu: f64) -> Row {
        Row {
            workload,
            server,
            iops,
            server_cpu_us_per_request: Some(cpu),
            load_cpu_us_per_request: Some(1.0),
            ..Row::default()
        }
    }

    fn find<'a>(all: &'a [Verdict], ours: &str, quantity: Quantity) -> &'a Verdict {
        all.iter().find(|one| one.ours == ours && one.quantity == quantity).expect("it was compared")
    }

    #[test]
    fn ratios_and_limits_are_judged() {
        let rows = [
            row("read-4k-q8x4", "tapio-nbd-raw", 230.0, 5.0),
            row("read-4k-q8x4", "nbdkit-file", 100.0, 6.0),
        ];
        let all = of_rows(&rows, true, 2);
        let rate = find(&all, "tapio-nbd-raw", Quantity::Rate);
        assert_eq!((rate.against, rate.value, rate.reached), (Some("nbdkit-file"), 2.3, Some(true)));
        let cost = find(&all, "tapio-nbd-raw", Quantity::ServerCpuUs);
        assert_eq!((cost.against, cost.value, cost.reached), (None, 5.0, Some(true)));
        let dear = of_rows(&[row("read-4k-q8x4", "tapio-nbd-raw", 50.0, 11.0), rows[1].clone()], true, 2);
        assert!(dear.iter().all(|one| one.reached == Some(false)), "{dear:?}");
    }

    #[test]
    fn what_used_the_page_cache_is_no_measure() {
        let cached = Row { cached: true, ..row("write-1m-q8", "nbdkit-file", 900.0, 1.0) };
        let mut rows = vec![row("write-1m-q8", "tapio-nbd-raw", 200.0, 1.0), cached];
        assert_eq!(of_rows(&rows, false, 2), []);
        rows.push(row("write-1m-q8", "qsd-nbd-raw", 100.0, 1.0));
        let all = of_rows(&rows, false, 2);
        assert_eq!(
            (all[0].against, all[0].reached),
            (Some("qsd-nbd-raw"), Some(true)),
            "the best of the others"
        );
        let rows = [
            row("read-4k-q1", "tapio-nbd-raw", 1.0, 1.0),
            Row { cached: true, ..row("read-4k-q1", "nbdkit-file", 2.0, 1.0) },
        ];
        let all = of_rows(&rows, false, 2);
        assert!(all[0].reached.is_none() && all[0].note.is_some(), "{all:?}");
    }

    #[test]
    fn lanes_are_judged_where_a_processor_is_free() {
        // A request costs 5 + 1 us: 1.5 times 200,000 of them take 1.8 processors.
        let rows = [
            row("read-4k-q32", "tapio-vhost-raw", 200e3, 5.0),
            row("read-4k-q32x2", "tapio-vhost-raw", 200e3, 6.0),
        ];
        let judged = of_rows(&rows, true, 2);
        assert_eq!(find(&judged, "tapio-vhost-raw", Quantity::Rate).reached, Some(false));
        let full = of_rows(&rows, true, 1);
        let verdict = find(&full, "tapio-vhost-raw", Quantity::Rate);
        assert!(verdict.reached.is_none() && verdict.value == 1.0, "{verdict:?}");
        assert_eq!(
            find(&full, "tapio-vhost-raw", Quantity::ServerCpu).reached,
            Some(false),
            "costs always are"
        );
    }

    #[test]
    fn first_writes_are_judged_on_a_disk() {
        let ours = Row { p999_us: 30e3, ..row("allocate-4k-q32", "tapio-vhost-vhd", 40.0, 5.0) };
        let rows = [row("allocate-4k-q32", "file", 100.0, 1.0), ours];
        let reached =
            |in_memory| of_rows(&rows, in_memory, 2).iter().map(|one| one.reached).collect::<Vec<_>>();
        assert_eq!(reached(false), [Some(false), Some(false)], "rate and p99.9");
        assert_eq!(reached(true), [None, None]);
    }

    #[test]
    fn a_process_alone_has_limits() {
        let start = Start { server: "tapio-nbd-raw", times: 1, first_answer_ms: 3.0, close_ms: 1.0 };
        let memory = Memory { server: "tapio-nbd-raw", state: "opened", pss_kib: 1000, anonymous_kib: 1 };
        let all = of_alone(&[start], &[memory]);
        let short: Vec<_> = all.iter().map(|one| (one.value, one.reached)).collect();
        assert_eq!(short, [(3.0, Some(true)), (1.024, Some(false))]);
    }
}
