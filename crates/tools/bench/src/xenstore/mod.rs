//! `tapio bench xenstore`: our xenstored beside the stock one, both without a hypervisor, at UNIX sockets.
//!
//! ```text
//!   for each round, tree and load, for each daemon:    one client, one request at a time ─▶ rounds/s, p99
//!   for each way of listing a domain, for each daemon: a thousand listings ─▶ seconds, transactions, round trips
//! ```

mod daemon;
mod listing;
mod load;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::common::{self, Common, check_only, wanted};
use super::measure::interrupted;
use super::medians::median;
use super::progress::Progress;
use super::{failed, invalid};
use daemon::{Daemon, Link, Whose};
use listing::{Took, WAYS, Way};
use load::{LOADS, Load, Shape, Speed};
use tapio_report::failure::Result;
use tapio_report::plot::{Bar, Group, Stacks};

const NODES: [usize; 3] = [10, 1_000, 100_000];
const DISKS: [usize; 2] = [1, 64];
/// The most that a run may be told to do.
const NODES_MAX: usize = 1_000_000;
const LISTINGS_MAX: usize = 100_000;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench xenstore                           trees of 10, 1,000 and 100,000 nodes, and the listings: some minutes
  tapio bench xenstore --only transaction        only loads with this in their names
  tapio bench xenstore --only listing --plot listings.svg
  tapio bench xenstore --quick --json -          does it run at all, as JSON

The C daemon is Debian's, which 'scripts/setup clients' unpacks below target/lanes (XENSTORED names
another one). What it asks of a hypervisor is answered by a small library that is compiled with cc and
preloaded; its tree is in memory.")]
pub struct XenstoreArguments {
    /// Nodes of the trees
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',')]
    nodes: Vec<usize>,
    /// Listings of a domain
    #[arg(long, value_name = "COUNT")]
    listings: Option<usize>,
    #[command(flatten)]
    common: Common,
    /// Only loads with this in their names, or 'listing'; may be given more than once
    #[arg(long, value_name = "LOAD")]
    only: Vec<String>,
    /// Draw the listings into a file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// One load on one tree.
#[derive(Clone, Debug, Serialize)]
struct Row {
    nodes: usize,
    load: &'static str,
    daemon: Whose,
    per_second: f64,
    p99_us: f64,
}

/// Listings of one domain.
#[derive(Clone, Debug, Serialize)]
struct Listing {
    disks: usize,
    way: Way,
    daemon: Whose,
    listings: usize,
    #[serde(flatten)]
    took: Took,
}

/// What a daemon holds a tree in.
#[derive(Clone, Debug, Serialize)]
struct Memory {
    nodes: usize,
    daemon: Whose,
    anonymous_kib: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: common::Setting,
    loads: Vec<Row>,
    listings: Vec<Listing>,
    memory: Vec<Memory>,
    skipped: Vec<String>,
}

/// Directory of the run; removed with this value.
#[derive(Debug)]
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        // What cannot be removed is in a directory for such things.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Plan {
    nodes: Vec<usize>,
    loads: Vec<Load>,
    listings: usize,
    time: Duration,
    rounds: usize,
    daemons: Vec<(Whose, PathBuf)>,
}

pub fn run(arguments: &XenstoreArguments) -> Result<()> {
    let (plan, skipped) = plan(arguments)?;
    super::end_at_interrupt();
    let place = Place(std::env::temp_dir().join(format!("tapio-bench-xenstore-{}", std::process::id())));
    // A name that another user has taken is refused.
    std::fs::create_dir(&place.0)
        .map_err(|error| failed(format!("cannot make {}: {error}", place.0.display())))?;
    let awake = arguments.common.awake()?;
    let mut report = Report {
        setting: common::Setting::now(plan.time, plan.rounds, awake.is_some()),
        loads: Vec::new(),
        listings: Vec::new(),
        memory: Vec::new(),
        skipped,
    };
    measure(&plan, &place.0, &mut report).map_err(failed)?;
    report.setting.environment.end();
    if let Some(file) = &arguments.plot {
        let picture = report.picture();
        std::fs::write(file, picture)
            .map_err(|error| failed(format!("cannot write {}: {error}", file.display())))?;
    }
    arguments.common.show(&report, &report.tables())
}

fn plan(arguments: &XenstoreArguments) -> Result<(Plan, Vec<String>)> {
    let quick = arguments.common.quick;
    let (time, rounds) = arguments.common.times((0.5, 5), (0.02, 1))?;
    let nodes = match arguments.nodes.as_slice() {
        [] if quick => vec![10, 1_000],
        [] => NODES.to_vec(),
        named => named.to_vec(),
    };
    let listings = arguments.listings.unwrap_or(if quick { 3 } else { 1_000 });
    let sane =
        nodes.iter().all(|nodes| (1..=NODES_MAX).contains(nodes)) && (1..=LISTINGS_MAX).contains(&listings);
    if !sane {
        return Err(invalid(format!(
            "--nodes goes from 1 to {NODES_MAX} and --listings from 1 to {LISTINGS_MAX}"
        )));
    }
    let names: Vec<&str> = LOADS.iter().map(|load| load.name()).chain(["listing"]).collect();
    check_only(&arguments.only, &names, "load")?;
    let wanted = |name: &str| wanted(&arguments.only, name);
    let mut daemons = vec![(Whose::Tapio, Whose::Tapio.program().map_err(failed)?)];
    let mut skipped = Vec::new();
    match Whose::Stock.program() {
        Ok(program) => daemons.push((Whose::Stock, program)),
        Err(why) => skipped.push(why),
    }
    let plan = Plan {
        nodes,
        loads: LOADS.into_iter().filter(|load| wanted(load.name())).collect(),
        listings: if wanted("listing") { listings } else { 0 },
        time,
        rounds,
        daemons,
    };
    Ok((plan, skipped))
}

fn measure(plan: &Plan, dir: &Path, report: &mut Report) -> std::result::Result<(), String> {
    let loads = plan.nodes.len() * plan.loads.len() * plan.rounds * plan.daemons.len();
    let listings = if plan.listings == 0 { 0 } else { DISKS.len() * WAYS.len() * plan.daemons.len() };
    let mut progress = Progress::new(loads + listings);
    for nodes in plan.nodes.iter().filter(|_| !plan.loads.is_empty()) {
        let shape = Shape { nodes: *nodes };
        let mut sides = Vec::new();
        for (whose, program) in &plan.daemons {
            let daemon = Daemon::start(*whose, program, &dir.join(format!("{whose:?}-{nodes}")))?;
            let mut link = Link::connect(&daemon.socket)?;
            shape.fill(&mut link)?;
            if let Some(anonymous_kib) = daemon.anonymous_kib() {
                report.memory.push(Memory { nodes: *nodes, daemon: *whose, anonymous_kib });
            }
            sides.push((*whose, daemon, link, vec![Vec::<Speed>::new(); plan.loads.len()]));
        }
        for _ in 0..plan.rounds {
            for (index, load) in plan.loads.iter().enumerate() {
                for (whose, _, link, speeds) in &mut sides {
                    if interrupted() {
                        break;
                    }
                    progress.begin(&format!("{nodes} nodes, {}, {}", load.name(), whose.name()));
                    speeds[index].push(load::run(link, *load, shape, plan.time)?);
                }
            }
        }
        for (index, load) in plan.loads.iter().enumerate() {
            for (whose, _, _, speeds) in &sides {
                let of =
                    |what: fn(&Speed) -> f64| median(&mut speeds[index].iter().map(what).collect::<Vec<_>>());
                report.loads.push(Row {
                    nodes: *nodes,
                    load: load.name(),
                    daemon: *whose,
                    per_second: of(|speed| speed.per_second),
                    p99_us: of(|speed| speed.p99_us),
                });
            }
        }
    }
    for disks in DISKS.into_iter().filter(|_| plan.listings > 0) {
        let mut sides = Vec::new();
        for (whose, program) in &plan.daemons {
            let daemon = Daemon::start(*whose, program, &dir.join(format!("{whose:?}-listing-{disks}")))?;
            listing::fill(&mut Link::connect(&daemon.socket)?, disks)?;
            sides.push((*whose, daemon));
        }
        for way in WAYS {
            for (whose, daemon) in &sides {
                if interrupted() {
                    break;
                }
                progress.begin(&format!("listing, {disks} disks, {}, {}", way.name(), whose.name()));
                let took = listing::run(&daemon.socket, disks, way, plan.listings)?;
                report.listings.push(Listing { disks, way, daemon: *whose, listings: plan.listings, took });
            }
        }
    }
    progress.end();
    Ok(())
}

impl Report {
    /// The tables that people read. Writing to a string cannot fail.
    fn tables(&self) -> String {
        let mut out = self.setting.line("one client, one request at a time");
        if !self.loads.is_empty() {
            let _ = writeln!(
                out,
                "\n{:>7}  {:<22}  {:<16}{:>11}{:>11}{:>8}",
                "NODES", "LOAD", "DAEMON", "rounds/s", "p99 us", "ratio"
            );
        }
        for row in &self.loads {
            let peer = self
                .loads
                .iter()
                .find(|peer| peer.daemon == Whose::Stock && peer.nodes == row.nodes && peer.load == row.load);
            let ratio = peer
                .filter(|_| row.daemon == Whose::Tapio)
                .map_or_else(String::new, |peer| format!("{:.2}", row.per_second / peer.per_second));
            let _ = writeln!(
                out,
                "{:>7}  {:<22}  {:<16}{:>11.0}{:>11.1}{:>8}",
                row.nodes,
                row.load,
                row.daemon.name(),
                row.per_second,
                row.p99_us,
                ratio
            );
        }
        for row in &self.memory {
            let _ = writeln!(
                out,
                "{:>7}  {:<22}  {:<16}{:>11} KiB",
                row.nodes,
                "memory",
                row.daemon.name(),
                row.anonymous_kib
            );
        }
        if let Some(first) = self.listings.first() {
            let _ = writeln!(
                out,
                "\n{} listings of a domain with a network interface and\n{:>7}  {:<31}  {:<16}{:>10}{:>14}{:>13}",
                first.listings, "DISKS", "WAY", "DAEMON", "seconds", "transactions", "round trips"
            );
        }
        for row in &self.listings {
            let _ = writeln!(
                out,
                "{:>7}  {:<31}  {:<16}{:>10.3}{:>14}{:>13}",
                row.disks,
                row.way.name(),
                row.daemon.name(),
                row.took.seconds,
                row.took.transactions,
                row.took.round_trips
            );
        }
        for why in &self.skipped {
            let _ = writeln!(out, "\nskipped: {why}");
        }
        out
    }

    /// The listings as bars.
    fn picture(&self) -> String {
        let groups = DISKS.map(|disks| Group {
            name: format!("{disks} disk{}, 1 NIC", if disks == 1 { "" } else { "s" }),
            bars: self
                .listings
                .iter()
                .filter(|row| row.disks == disks)
                .map(|row| {
                    let series = WAYS.iter().position(|way| *way == row.way).unwrap_or(0);
                    let mut parts = vec![0.0; series];
                    parts.push(row.took.seconds);
                    Bar { name: if row.daemon == Whose::Tapio { "ours" } else { "C" }.into(), parts }
                })
                .collect(),
        });
        let listings = self.listings.first().map_or(0, |row| row.listings);
        Stacks {
            title: format!("{listings} listings of a domain"),
            y: "seconds".into(),
            series: WAYS.map(|way| way.name().to_owned()).to_vec(),
            groups: groups.to_vec(),
            own_scales: true,
        }
        .svg()
    }
}
