//! `tapio bench xen`: what the path of Xen's block rings costs, on any host.
//!
//! ```text
//!   case:      part ─ variants x works ─┐
//!   guest:     tapio-disk ◀─ rings ─ Blkfront (this process)      one pair for each measurement
//!   load:      requests, CPU of both sides ─▶ Outcome ─ median ─▶ report
//!   machines:  many guests at once, over many storage repositories
//!   overhead:  trace points of both sides, and the host alone
//! ```

pub(crate) mod case;
pub(crate) mod guest;
pub(crate) mod load;
mod machines;
mod overhead;
mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tapio_control::{ControlError, Errno};
use tapio_load::Load;

use super::common::{Common, check_only, wanted};
use super::ground::{Ground, Sizes};
use super::measure::interrupted;
use super::progress::Progress;
use super::{end_at_interrupt, failed, invalid};
use case::{Backing, Part, Variant, Work, parts};
use guest::{Guest, Setup};
use report::{Report, Row, Sample, Setting, Skipped};
use tapio_report::failure::Result;
use tapio_report::plot;

/// Parts that are no comparison of single guests, as `--only` names them.
const MACHINES: &str = "machines";
const OVERHEAD: &str = "overhead";

/// What the numbers mean; part of the help and of the report.
pub const MEANING: &str = "\
What the numbers mean. A guest is a block front end of ours in this process, its memory is shared with the
disk process, an event channel is a pair of eventfds. Measured are: rings, requests and their checks, the
copies themselves, work of the disk below, system calls and wake-ups of both sides. Not measured is what only
a hypervisor can cost: the hypercalls of grant copies, of maps and unmaps with their flushes of address
translations, and of notifications. A copy is one system call less here than on Xen, and a map of granted
pages is an ordinary mapping of memory. So compare rings, sizes and polling by these numbers; between ways of
moving data they show what is saved in copying, not what is paid in hypercalls. What an emulated Xen costs
says nothing either, so it is not shown. Of the ways, 'bounce' is that of blktap2: pages are mapped for each
request, and copied once more by the processor.";

#[derive(Debug, Args)]
#[command(after_long_help = format!("Examples:
  tapio bench xen                              everything: some minutes
  tapio bench xen --only movement --only order comparisons by their names
  tapio bench xen --only overhead --svg .      where the time of a request goes, by its size
  tapio bench xen --only machines --svg .      many guests at once, as a table and a picture
  tapio bench xen --quick --json -             does it run at all, as JSON

Comparisons: {}, machines, overhead.

{MEANING}", names().join(", ")))]
pub struct XenArguments {
    /// Where the images are made; they are removed at the end
    #[arg(long, default_value = "/dev/shm", value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    common: Common,
    /// Only comparisons with this in their names; may be given more than once
    #[arg(long, value_name = "COMPARISON")]
    only: Vec<String>,
    /// Write pictures into this directory: xen-machines-SIZE.svg, xen-overhead-FRONT-OP-DEPTH.svg
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
}

fn names() -> Vec<&'static str> {
    parts().iter().map(|part| part.name).collect()
}

/// What is run, and how.
#[derive(Debug)]
struct Plan {
    parts: Vec<Part>,
    machines: bool,
    overhead: bool,
    time: Duration,
    warm_up: Duration,
    rounds: usize,
    quick: bool,
}

impl Plan {
    fn new(arguments: &XenArguments) -> Result<Self> {
        let (time, rounds) = arguments.common.times((0.3, 5), (0.02, 1))?;
        let all: Vec<_> = names().into_iter().chain([MACHINES, OVERHEAD]).collect();
        check_only(&arguments.only, &all, "comparison")?;
        let wanted = |name: &str| wanted(&arguments.only, name);
        Ok(Self {
            parts: parts().into_iter().filter(|part| wanted(part.name)).collect(),
            machines: wanted(MACHINES),
            overhead: wanted(OVERHEAD),
            time,
            warm_up: (time / 5).min(Duration::from_millis(100)),
            rounds,
            quick: arguments.common.quick,
        })
    }

    /// All measurements of a round of single guests.
    fn cases(&self) -> impl Iterator<Item = (&Part, &Work, &Variant)> {
        self.parts.iter().flat_map(|part| {
            part.works
                .iter()
                .flat_map(move |work| part.variants.iter().map(move |variant| (part, work, variant)))
        })
    }
}

const fn sizes(quick: bool) -> Sizes {
    let full_len = if quick { 32 << 20 } else { 256 << 20 };
    Sizes { full_len, fresh_len: full_len, fresh_requests_max: 0, fresh_space_max: 0 }
}

/// Where a run works, and with which program.
struct Place<'a> {
    ground: &'a Ground,
    program: PathBuf,
}

impl Place<'_> {
    /// The image of a disk.
    fn image(&self, backing: Backing) -> std::result::Result<String, String> {
        match backing {
            Backing::Raw => Ok(format!("aio:{}", self.ground.raw()?.display())),
            Backing::Nothing => {
                let path = self.ground.empty("nothing.vhd", self.ground.sizes.full_len)?;
                Ok(format!("vhd:{}", path.display()))
            }
        }
    }
}

pub fn run(arguments: &XenArguments) -> Result<()> {
    let plan = Plan::new(arguments)?;
    end_at_interrupt();
    let program = super::server::ours().map_err(|why| ControlError::new(Errno::ENOENT, why))?;
    if let Some(dir) = &arguments.svg
        && !dir.is_dir()
    {
        return Err(invalid(format!("{} is no directory for pictures", dir.display())).next("make it first"));
    }
    let awake = arguments.common.awake()?;
    let ground = Ground::new(&arguments.dir, |_, _| sizes(plan.quick))?;
    let place = Place { ground: &ground, program };
    let mut report = Report::new(Setting::of(&ground.site, plan.time, plan.rounds, awake.is_some()));
    singles(&plan, &place, &mut report);
    if plan.machines && !interrupted() {
        machines::run(&plan, &place, &mut report);
    }
    if plan.overhead && !interrupted() {
        overhead::run(&plan, &place, &mut report);
    }
    report.interrupted = interrupted();
    report.setting.run.environment.end();
    drop(ground);
    if let (true, Some(skipped)) = (report.is_empty(), report.skipped.first()) {
        return Err(failed(format!("nothing could be measured: {}: {}", skipped.what, skipped.reason)));
    }
    if let Some(dir) = &arguments.svg {
        for (name, svg) in report.pictures() {
            plot::write(&dir.join(name), &svg)?;
        }
    }
    arguments.common.show(&report, &report.tables())
}

/// Names a measurement of a round.
type Key = (&'static str, &'static str, &'static str);

/// The comparisons of single guests.
fn singles(plan: &Plan, place: &Place<'_>, report: &mut Report) {
    let mut progress = Progress::new(plan.cases().count() * plan.rounds);
    let mut samples: BTreeMap<Key, Vec<Sample>> = BTreeMap::new();
    'rounds: for round in 0..plan.rounds {
        for (part, work, variant) in plan.cases() {
            if interrupted() {
                break 'rounds;
            }
            progress.begin(&format!("{} {} {}", part.name, work.name, variant.name));
            match single(plan, place, work, variant, round as u64) {
                Ok(sample) => samples.entry((part.name, work.name, variant.name)).or_default().push(sample),
                Err(reason) => report
                    .skipped
                    .push(Skipped::of(&format!("{} {} {}", part.name, work.name, variant.name), reason)),
            }
        }
    }
    progress.end();
    for (part, work, variant) in plan.cases() {
        let of = |name| samples.get(&(part.name, work.name, name)).map(Vec::as_slice).unwrap_or_default();
        let found = of(variant.name);
        if !found.is_empty() {
            let first = part.variants.first().map_or(&[][..], |first| of(first.name));
            report.rows.push(Row::of(part, work, variant, found, first));
        }
    }
}

fn single(
    plan: &Plan,
    place: &Place<'_>,
    work: &Work,
    variant: &Variant,
    round: u64,
) -> std::result::Result<Sample, String> {
    let (block_len, depth) = variant.shape(work);
    let setup = Setup {
        image: place.image(work.backing)?,
        front: variant.options(block_len, depth),
        movement: variant.movement,
        polls: variant.polls,
        pool: None,
        share: None,
    };
    let mut guest = Guest::start(&place.program, place.ground, 1, &setup)?;
    let load = Load {
        mix: work.mix,
        block_len,
        depth,
        span_len: place.ground.sizes.full_len,
        time: plan.warm_up,
        requests_max: u64::MAX,
        // As a guest does, which has better things to do with its processor.
        spin: false,
        seed: 7 + round,
    };
    load::run(&mut guest, &load)?;
    let outcome = load::run(&mut guest, &Load { time: plan.time, ..load })?;
    Ok(Sample::of(&outcome, block_len))
}

/// The file of a picture for requests of so many bytes.
fn file_of(bytes: u32) -> String {
    let size = if bytes >= 1 << 20 {
        format!("{}m", bytes >> 20)
    } else if bytes >= 1 << 10 {
        format!("{}k", bytes >> 10)
    } else {
        bytes.to_string()
    };
    format!("xen-machines-{size}.svg")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(only: &[&str]) -> XenArguments {
        XenArguments {
            dir: "/dev/shm".into(),
            common: Common { quick: true, ..Common::default() },
            only: only.iter().map(|word| (*word).to_owned()).collect(),
            svg: None,
        }
    }

    #[test]
    fn words_choose_comparisons() {
        let plan = Plan::new(&arguments(&["order", "machines"])).expect("known");
        assert_eq!(plan.parts.iter().map(|part| part.name).collect::<Vec<_>>(), ["order"]);
        assert!(plan.machines && !plan.overhead);
        let all = Plan::new(&arguments(&[])).expect("known");
        assert!(all.machines && all.overhead && all.parts.len() == names().len());
        let error = Plan::new(&arguments(&["florist"])).expect_err("unknown");
        assert!(error.to_string().contains("florist") && error.to_string().contains("machines"), "{error}");
    }

    #[test]
    fn pictures_have_names_of_their_own() {
        assert_eq!(
            [512, 4096, 1 << 20].map(file_of),
            ["xen-machines-512.svg", "xen-machines-4k.svg", "xen-machines-1m.svg"]
        );
    }
}
