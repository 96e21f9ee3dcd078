//! `tapio bench transfers`: requests as they are beside requests that are split, or merged, on the way to the storage.
//!
//! ```text
//!   ring ─▶ tapio-disk ─┬─ a server with four connections, each with a throughput of its own     (nbdkit, rate)
//!                       ├─ a server that takes one request at a time, each with a delay          (nbdkit, delay)
//!                       └─ a file
//! ```

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use tapio_control::{ControlError, Errno};
use tapio_load::{Load, Mix};
use tapio_report::failure::Result;
use tapio_types::{Movement, TransferSizes};

use super::common::{CUT_SHORT, Common, Setting, check_only, wanted};
use super::ground::{Ground, Sizes};
use super::measure::interrupted;
use super::medians::median;
use super::process::Process;
use super::progress::Progress;
use super::xen::case::{PAGE, front};
use super::xen::guest::{Guest, Setup};
use super::xen::load;
use super::{end_at_interrupt, failed};

/// Bytes of each disk.
const LEN: u64 = 64 << 20;
/// How long a server may take until it listens.
const START_MAX: Duration = Duration::from_secs(10);
const MIB: u32 = 1 << 20;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench transfers --dir /srv/ssd               all cases: two minutes
  tapio bench transfers --only file                  what splitting and merging cost where nothing is gained
  tapio bench transfers --quick --json -             does it run at all, as JSON

Columns: MB/s (10^6 bytes) with requests as they are and with the sizes of the case, and the second beside the first.
Medians over the rounds; both in turn on one disk. The servers are nbdkit's: without nbdkit their cases are left out.")]
pub struct TransfersArguments {
    /// Where the image of the cases with a file is made; it is removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    common: Common,
    /// Only cases with this in their names; may be given more than once
    #[arg(long, value_name = "CASE")]
    only: Vec<String>,
}

/// What the disk lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// Four connections of 32 MB/s each.
    Connections,
    /// One request at a time, each 1 ms.
    Delay,
    File,
}

impl Target {
    /// What nbdkit is told, and the options of the disk's connection to it.
    const fn server(self) -> Option<(&'static [&'static str], &'static str)> {
        match self {
            Self::Connections => {
                let rate = &["--filter=rate", "memory", "64M", "connection-rate=256M", "burstiness=0.05"];
                Some((rate, "&connections=4"))
            }
            Self::Delay => {
                Some((&["-t", "1", "--filter=delay", "memory", "64M", "rdelay=1ms", "wdelay=1ms"], ""))
            }
            Self::File => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    title: &'static str,
    target: Target,
    sizes: TransferSizes,
    mix: Mix,
    block_len: u32,
    depth: u32,
}

const SPLIT: TransferSizes = TransferSizes { split: 64 << 10, merge: 0 };
const MERGE: TransferSizes = TransferSizes { split: 0, merge: 128 << 10 };

const fn split(name: &'static str, title: &'static str, target: Target, mix: Mix) -> Case {
    Case { name, title, target, sizes: SPLIT, mix, block_len: MIB, depth: 1 }
}

const fn merge(name: &'static str, title: &'static str, target: Target, mix: Mix) -> Case {
    Case { name, title, target, sizes: MERGE, mix, block_len: PAGE, depth: 32 }
}

use Mix::{SequentialRead, SequentialWrite};

const CASES: [Case; 7] = [
    split(
        "split-connections-read",
        "reads of 1 MiB, four connections of 32 MB/s each",
        Target::Connections,
        SequentialRead,
    ),
    split(
        "split-connections-write",
        "writes of 1 MiB, four connections of 32 MB/s each",
        Target::Connections,
        SequentialWrite,
    ),
    split("split-file-read", "reads of 1 MiB, a file", Target::File, SequentialRead),
    merge(
        "merge-delay-read",
        "32 reads of 4 KiB at a time, one request in 1 ms",
        Target::Delay,
        SequentialRead,
    ),
    merge(
        "merge-delay-write",
        "32 writes of 4 KiB at a time, one request in 1 ms",
        Target::Delay,
        SequentialWrite,
    ),
    merge("merge-file-read", "32 reads of 4 KiB at a time, a file", Target::File, SequentialRead),
    merge("merge-file-write", "32 writes of 4 KiB at a time, a file", Target::File, SequentialWrite),
];

/// Medians of one case.
#[derive(Clone, Debug, Serialize)]
struct Row {
    case: &'static str,
    title: &'static str,
    sizes: TransferSizes,
    plain_bytes_per_second: f64,
    sized_bytes_per_second: f64,
    gain: f64,
    rounds: usize,
}

impl Row {
    fn of(case: &Case, rates: &[[f64; 2]]) -> Self {
        let middle = |index: usize| median(&mut rates.iter().map(|both| both[index]).collect::<Vec<_>>());
        let gain = rates.iter().map(|[plain, sized]| sized / plain.max(1.0));
        Self {
            case: case.name,
            title: case.title,
            sizes: case.sizes,
            plain_bytes_per_second: middle(0),
            sized_bytes_per_second: middle(1),
            gain: median(&mut gain.collect::<Vec<_>>()),
            rounds: rates.len(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: Setting,
    site: String,
    rows: Vec<Row>,
    /// Why some cases were left out.
    skipped: Option<String>,
    interrupted: bool,
}

impl Report {
    fn tables(&self) -> String {
        let mut out = self.setting.line(&self.site);
        // Writing to a string cannot fail, here and below.
        let _ =
            writeln!(out, "\n{:24} {:14} {:>9} {:>9} {:>7}", "case", "transfers", "as is", "sized", "gain");
        for row in &self.rows {
            let _ = writeln!(
                out,
                "{:24} {:14} {:>9.2} {:>9.2} {:>7.2}  {}",
                row.case,
                row.sizes.to_string(),
                row.plain_bytes_per_second / 1e6,
                row.sized_bytes_per_second / 1e6,
                row.gain,
                row.title
            );
        }
        if let Some(why) = &self.skipped {
            let _ = writeln!(out, "{why}");
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }
}

pub fn run(arguments: &TransfersArguments) -> Result<()> {
    let (time, rounds) = arguments.common.times((3.0, 3), (0.1, 1))?;
    check_only(&arguments.only, &CASES.map(|case| case.name), "case")?;
    end_at_interrupt();
    let program = super::server::ours().map_err(|why| ControlError::new(Errno::ENOENT, why))?;
    let nbdkit = super::server::find(Path::new("nbdkit"));
    let awake = arguments.common.awake()?;
    let sizes = Sizes { full_len: LEN, fresh_len: 0, fresh_requests_max: 0, fresh_space_max: 0 };
    let ground = Ground::new(&arguments.dir, |_, _| sizes)?;
    let is_possible = |case: &Case| case.target == Target::File || nbdkit.is_some();
    let all = || CASES.into_iter().filter(|case| wanted(&arguments.only, case.name));
    let cases: Vec<Case> = all().filter(is_possible).collect();
    let skipped =
        (cases.len() < all().count()).then(|| "left out: cases with a server need nbdkit".to_owned());
    let mut progress = Progress::new(cases.len() * rounds);
    let mut found: BTreeMap<&str, Vec<[f64; 2]>> = BTreeMap::new();
    for case in &cases {
        let mut stand = Stand::new(&program, nbdkit.as_deref(), &ground, case).map_err(failed)?;
        for _ in 0..rounds {
            if interrupted() {
                break;
            }
            progress.begin(case.name);
            let rates = stand.round(case, time).map_err(failed)?;
            found.entry(case.name).or_default().push(rates);
        }
    }
    progress.end();
    let rows = cases.iter().filter_map(|case| Some(Row::of(case, found.get(case.name)?)));
    let mut report = Report {
        rows: rows.collect(),
        site: ground.site.line(),
        setting: Setting::now(time, rounds, awake.is_some()),
        skipped,
        interrupted: interrupted(),
    };
    report.setting.environment.end();
    drop(ground);
    arguments.common.show(&report, &report.tables())
}

/// A disk on its target. The disk process ends before the server.
struct Stand {
    guest: Guest,
    _server: Option<Process>,
}

impl Stand {
    fn new(
        program: &Path,
        nbdkit: Option<&Path>,
        ground: &Ground,
        case: &Case,
    ) -> std::result::Result<Self, String> {
        let (image, server) = match (case.target.server(), nbdkit) {
            (Some((arguments, options)), Some(nbdkit)) => {
                let socket = ground.run_dir().join(format!("{}.sock", case.name));
                let server = serve(nbdkit, arguments, &socket)?;
                (format!("nbd:nbd+unix:///?socket={}{options}", socket.display()), Some(server))
            }
            _ => (format!("aio:{}", file(ground)?.display()), None),
        };
        let setup = Setup {
            image,
            front: front(Movement::Copy, case.block_len.div_ceil(PAGE), case.block_len, case.depth),
            movement: Movement::Copy,
            polls: false,
            pool: None,
            share: None,
        };
        Ok(Self { guest: Guest::start(program, ground, 1, &setup)?, _server: server })
    }

    /// Bytes a second as requests are, and with the sizes of the case.
    fn round(&mut self, case: &Case, time: Duration) -> std::result::Result<[f64; 2], String> {
        let load = Load {
            mix: case.mix,
            block_len: case.block_len,
            depth: case.depth,
            span_len: LEN,
            time,
            requests_max: u64::MAX,
            spin: false,
            seed: 0,
        };
        let mut rates = [0.0; 2];
        for (rate, sizes) in rates.iter_mut().zip([TransferSizes::default(), case.sizes]) {
            self.guest.disk.set_transfers(sizes)?;
            let outcome = load::run(&mut self.guest, &load)?;
            if outcome.report.errors > 0 {
                return Err(format!("{} requests of {} failed", outcome.report.errors, case.name));
            }
            *rate = outcome.report.rate() * f64::from(case.block_len);
        }
        Ok(rates)
    }
}

fn serve(nbdkit: &Path, arguments: &[&str], socket: &Path) -> std::result::Result<Process, String> {
    let errors = socket.with_extension("errors");
    let log = File::create(&errors).map_err(|error| format!("{}: {error}", errors.display()))?;
    let mut command = Command::new(nbdkit);
    command.args(["-f", "-U"]).arg(socket).args(arguments);
    let mut server =
        Process::start(&mut command, log).map_err(|error| format!("{}: {error}", nbdkit.display()))?;
    let begin = Instant::now();
    while !socket.exists() {
        if server.has_ended() || begin.elapsed() > START_MAX {
            let said = fs::read_to_string(&errors).unwrap_or_default();
            return Err(format!("nbdkit does not listen: {}", said.lines().last().unwrap_or("")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(server)
}

fn file(ground: &Ground) -> std::result::Result<PathBuf, String> {
    let path = ground.dir().join("transfers.raw");
    let written = fs::write(&path, vec![0x5a; LEN as usize]).and_then(|()| File::open(&path)?.sync_all());
    written.map(|()| path.clone()).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_the_medians_and_the_gain_of_each_round() {
        let row = Row::of(&CASES[0], &[[10e6, 40e6], [20e6, 60e6], [12e6, 60e6]]);
        assert_eq!((row.plain_bytes_per_second, row.sized_bytes_per_second), (12e6, 60e6));
        assert!((row.gain - 4.0).abs() < 1e-9);
    }

    #[test]
    fn every_case_can_be_had_of_a_disk_and_a_ring() {
        for case in CASES {
            case.sizes.check().unwrap_or_else(|why| panic!("{}: {why}", case.name));
            let options = front(Movement::Copy, case.block_len.div_ceil(PAGE), case.block_len, case.depth);
            options.check().unwrap_or_else(|error| panic!("{}: {error}", case.name));
        }
    }
}
