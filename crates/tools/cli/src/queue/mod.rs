//! `tapio queue`: how many requests each layer of a VM's disks holds, side by side.

mod layers;
mod machine;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tapio_report::failure;
use tapio_report::queue::{HEAD, Layer, lines};
use tapio_stat::{ShmRoot, disks};

use crate::bench;
use crate::xe::Failure;
use layers::{Watched, Which};
use machine::Machine;

/// Options of `tapio queue`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:
  tapio queue web                    the disks of a VM, every second
  tapio queue web -c 10 --json       ten samples, an object each
  tapio queue                        all disks of this host, without their guests
  tapio queue --sweep --svg a.svg    the queues of a load of our own, from 1 to 64 requests in flight
  tapio queue web -- -s HOST -u root options of xe

The layers of a disk, from above:
  guest    the block layer of the guest's kernel, as the agent in the guest reports it
  ring     requests in the guest's ring, from when the disk process saw them until their answers were visible; for
           other front ends the disk's queue
  process  requests in the disk process, from when it took them until they were answered
  device   the block device of this host below the image, with the load of everything else on it

Columns, as those of iostat: requests and MiB a second, mean size in KiB (sz-K), average queue (aqu-sz), mean time in
milliseconds (r_await, w_await), requests in the layer at the end of the interval (fly), share of the time with a
request in the layer (%util).

The average queue of an interval is the time that all requests together spent in the layer, by the length of the
interval. A request is in a layer as long as in those below it, and a little longer: with one request in flight the
queues fall from the guest to the device by what each layer takes for itself.")]
pub struct QueueArguments {
    /// UUID or name of a VM; all disks of this host without
    vm: Option<String>,
    /// Seconds between samples, 0.1 to 3600
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = crate::top::seconds)]
    interval: Duration,
    /// End after this many samples
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// As JSON, one object a line and sample
    #[arg(long)]
    json: bool,
    /// Instead: start a disk process and a guest's ring of our own, and raise the number of requests in flight
    #[arg(long, conflicts_with_all = ["vm", "count"])]
    sweep: bool,
    /// With --sweep: where the disk's image is to be, on the device to measure
    #[arg(long, value_name = "DIR", requires = "sweep")]
    dir: Option<PathBuf>,
    /// With --sweep: draw the queues over the number of requests in flight there
    #[arg(long, value_name = "FILE", requires = "sweep")]
    svg: Option<PathBuf>,
    /// With --sweep: a blink for each number of requests; shows that it works
    #[arg(long, requires = "sweep")]
    quick: bool,
    /// Where to connect, as 'xe' takes it: -s SERVER, -u USER, --socket PATH ...
    #[arg(last = true, value_name = "XE OPTION")]
    xe: Vec<String>,
}

/// A sample of all disks.
#[derive(Debug, Serialize)]
struct Sample<'a> {
    /// Milliseconds since 1970.
    time_ms: u64,
    /// UUID of the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<&'a str>,
    disks: Vec<Disk>,
}

#[derive(Debug, Serialize)]
struct Disk {
    name: String,
    layers: Vec<Layer>,
}

pub fn run(arguments: &QueueArguments) -> ExitCode {
    if arguments.sweep {
        return sweep(arguments);
    }
    match watch(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error.report();
            ExitCode::FAILURE
        }
    }
}

/// Becomes the program that measures.
fn sweep(arguments: &QueueArguments) -> ExitCode {
    let mut words: Vec<OsString> = vec!["queue".into()];
    let paths = [("--dir", &arguments.dir), ("--svg", &arguments.svg)];
    for (option, path) in paths.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?))) {
        words.extend([option.into(), path.into()]);
    }
    if arguments.quick {
        words.push("--quick".into());
    }
    if arguments.json {
        words.extend(["--json".into(), "-".into()]);
    }
    match bench::run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report("tapio", &error),
    }
}

fn print(text: &str) -> Result<(), Failure> {
    failure::print(text).map_err(|error| Failure::other(error.to_string()))
}

fn watch(arguments: &QueueArguments) -> Result<(), Failure> {
    let mut machine = match &arguments.vm {
        Some(name) => Some(Machine::find(name, &arguments.xe)?),
        None => None,
    };
    let done = samples(arguments, machine.as_mut());
    if let Some(machine) = &machine {
        machine.end();
    }
    done
}

fn samples(arguments: &QueueArguments, mut machine: Option<&mut Machine>) -> Result<(), Failure> {
    let root = ShmRoot::from_env();
    let mut watched: Vec<Watched> = Vec::new();
    let (mut shown, mut due) = (0, Instant::now());
    while arguments.count.is_none_or(|count| shown < count) {
        let wanted = match machine.as_deref_mut() {
            Some(machine) => machine.disks()?,
            None => of_host(&root)?,
        };
        // Disks come and go.
        watched
            .retain(|known| wanted.iter().any(|(name, which)| (name, which) == (&known.name, &known.which)));
        for (name, which) in wanted {
            if !watched.iter().any(|known| known.which == which && known.name == name) {
                watched.push(Watched::new(name, which));
            }
        }
        let guests = machine.as_deref().map(Machine::guest_disks);
        let mut disks = Vec::new();
        for disk in &mut watched {
            let guest = guests.as_ref().map(|guests| (guests.of(&disk.name), guests.at));
            if let Some(layers) = disk.sample(&root, guest) {
                disks.push(Disk { name: disk.name.clone(), layers });
            }
        }
        let is_first = shown == 0 && disks.is_empty() && !watched.is_empty();
        if !is_first {
            show(arguments, machine.as_deref(), disks)?;
            shown += 1;
        }
        due = (due + arguments.interval).max(Instant::now());
        if arguments.count.is_none_or(|count| shown < count) {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    Ok(())
}

fn show(arguments: &QueueArguments, machine: Option<&Machine>, disks: Vec<Disk>) -> Result<(), Failure> {
    if arguments.json {
        let time_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let sample = Sample { time_ms, vm: machine.map(Machine::uuid), disks };
        let line = serde_json::to_string(&sample).map_err(|error| Failure::other(error.to_string()))?;
        return print(&(line + "\n"));
    }
    if disks.is_empty() {
        return print("no disk is plugged\n");
    }
    let all: String = disks.iter().map(|disk| lines(&disk.name, &disk.layers)).collect();
    // Names of disks and images are others'.
    print(&format!("{HEAD}{}\n", failure::harmless(&all)))
}

/// All disks that are served on this host.
fn of_host(root: &ShmRoot) -> Result<Vec<(String, Which)>, Failure> {
    let files = disks(root)
        .map_err(|error| Failure::other(format!("cannot list {}: {error}", root.pages().display())))?;
    let served =
        files.iter().filter_map(|file| file.read().ok()).filter(|disk| crate::top::is_served(disk.pid));
    Ok(served
        .map(|disk| {
            let (pid, minor) = (disk.pid, disk.minor);
            (format!("{pid}.{minor}"), Which::Disk { pid, minor })
        })
        .collect())
}
