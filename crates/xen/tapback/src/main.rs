//! The program: `tapio-tapback`.

mod args;
mod signals;

use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use tapio_control::{RunDir, notify};
use tapio_log::{Log, Rotated};
use tapio_tapback::{Lock, Plugged, Processes, Settings, Tapback, say};
use tapio_xenstore::{Client, Nodes, XsError};

use crate::args::Args;
use crate::signals::Signals;

/// What the last lines of the log may take.
const SAID_WITHIN: Duration = Duration::from_secs(1);

/// How often xenstored is looked for while it is not there.
const SEARCH_EVERY: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    tapio_sys::private::new_files();
    match run(&Args::parse()) {
        Ok(()) => {
            tapio_log::flush(SAID_WITHIN);
            ExitCode::SUCCESS
        }
        Err(why) => {
            say!("{why}");
            tapio_log::flush(SAID_WITHIN);
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let run = args.run_dir.clone().map_or_else(RunDir::from_env, RunDir::new);
    if let Some(path) = &args.log_file {
        let file = Rotated::open(path, args.rotation()).and_then(Rotated::take_output);
        let log = file.and_then(Log::in_file).map_err(|error| format!("{}: {error}", path.display()))?;
        tapio_log::to(log);
    }
    let _lock = Lock::take(&run, &args.backend_name).map_err(|error| error.to_string())?;
    // Before the first thread: all of them shall leave the signals to this one.
    let signals = Signals::take().map_err(|error| format!("signals: {error}"))?;
    notify::find_manager()?;
    let mut client = connect(args).map_err(|error| error.to_string())?;
    let own_domid = match args.own_domid {
        Some(domid) => domid,
        None => own_domid(&mut client)?,
    };
    let settings = Settings {
        name: args.backend_name.clone(),
        own_domid,
        offer: args.offer(),
        length_every: Duration::from_secs(args.length_every),
    };
    let mut tapback =
        Tapback::new(client, Processes::new(run), settings).map_err(|error| error.to_string())?;
    say!("serves backend/{} of domain {own_domid}", args.backend_name);
    notify::ready("serving");
    while !signals.came() {
        match tapback.turn(None, Some(signals.as_raw_fd())) {
            Ok(()) => {}
            Err(error) => {
                say!("{error}; connecting again");
                reconnect(args, &mut tapback, &signals);
            }
        }
        for plugged in tapback.take_plugged() {
            tell(args.stats, &plugged);
        }
    }
    let (known, up) = tapback.devices();
    let counts = tapback.counts();
    say!(
        "ends; {up} of {known} disks stay connected; {} transactions, {} requests",
        counts.transactions,
        counts.requests
    );
    notify::stopping("ending");
    Ok(())
}

fn connect(args: &Args) -> Result<Client, XsError> {
    args.xenstored.as_deref().map_or_else(Client::open, Client::connect)
}

fn reconnect(args: &Args, tapback: &mut Tapback<Processes>, signals: &Signals) {
    let mut said = String::new();
    while !signals.wait(Instant::now() + SEARCH_EVERY) {
        match connect(args).and_then(|client| tapback.reconnect(client)) {
            Ok(()) => {
                say!("connected to xenstored again");
                return;
            }
            Err(error) if error.to_string() != said => {
                said = error.to_string();
                say!("{said}");
            }
            Err(_) => {}
        }
    }
}

/// The domain this program runs in, by xenstore; domain 0 if it does not say.
fn own_domid(client: &mut Client) -> Result<u32, String> {
    match client.read_u64("domid") {
        Ok(domid) => u32::try_from(domid.unwrap_or(0)).map_err(|_| "the own domid is absurd".to_owned()),
        Err(error) if error.is_harmless() => Ok(0),
        Err(error) => Err(error.to_string()),
    }
}

fn tell(as_json: bool, plugged: &Plugged) {
    let Plugged { id, pid, cost, took, recovered } = plugged;
    say!(
        "{id}: {} after {:.1} ms: {} transactions, {} requests in {} round trips",
        if *recovered { "goes on" } else { "connected" },
        took.as_secs_f64() * 1e3,
        cost.transactions,
        cost.requests,
        cost.round_trips
    );
    if as_json {
        let line = serde_json::json!({
            "domid": id.domid,
            "devid": id.devid,
            "pid": pid,
            "recovered": recovered,
            "ms": took.as_secs_f64() * 1e3,
            "transactions": cost.transactions,
            "requests": cost.requests,
            "round_trips": cost.round_trips,
        });
        println!("{line}");
    }
}
