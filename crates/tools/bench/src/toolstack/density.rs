//! How often a guest of QEMU that does nothing wakes its host, with devices that guests poll and without them: the
//! table of XenServer's Project Pulsar, of a guest that lets its devices run and halts, and of Linux.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::client::Client;
use super::counters::{Counters, Done, do_others_sleep, pss_kib};
use super::daemon::Daemon;
use super::halting_guest;
use super::starts::destroy;
use crate::measure::interrupted;

/// How many guests the extrapolation is for: as many as XenServer 6.2 was made to run.
pub const GUESTS: f64 = 500.0;

/// One interval of a table.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Interval {
    /// Wake-ups of the emulator's main loop: its timers, and descriptors that became ready.
    pub timers: u64,
    /// System calls of the emulator that read and write: what devices, consoles and connections had to say.
    pub reads: u64,
    pub writes: u64,
    /// Wake-ups of all other threads: the guest's processors above all.
    pub processors: u64,
}

impl Interval {
    fn of(done: &Done) -> Self {
        Self { timers: done.first, reads: done.reads, writes: done.writes, processors: done.others }
    }
}

/// A guest with these devices.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// The guest.
    pub guest: &'static str,
    pub what: &'static str,
    pub seconds: f64,
    pub intervals: Vec<Interval>,
    /// One more with the guest's processors stopped: what the emulator does by itself.
    pub stopped: Interval,
    /// Of the emulator, at the end.
    pub pss_kib: u64,
    /// Of the last half of the intervals, when the guest has long been up.
    pub cpu_us_per_second: f64,
}

/// The devices that XenServer's guests had, and what `xe vm-density level=lowest` leaves. A screen costs nothing
/// without a viewer.
fn levels() -> [(&'static str, Value); 2] {
    [
        (
            "before: USB with a tablet, parallel port, serial console, screen",
            json!({"usb": "true", "usb_tablet": "true", "parallel": "null", "hvm_serial": "pty", "vnc": "true"}),
        ),
        (
            "after: usb=false, usb_tablet=false, parallel=none, hvm_serial=none; a screen",
            json!({"usb": "false", "usb_tablet": "false", "parallel": "none", "hvm_serial": "none", "vnc": "true"}),
        ),
    ]
}

fn emulator(daemon: &Daemon, client: &mut Client, vm: &str) -> Result<u32, String> {
    let uuid = client.text("VM.get_uuid", &[json!(vm)])?;
    let file = daemon.place.run.join("run/vm").join(uuid.replace('-', "")).join("pid");
    let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    text.trim().parse().map_err(|error| format!("{}: {error}", file.display()))
}

/// How often, and how often in a row a guest has to be seen halted.
const LOOK: Duration = Duration::from_millis(25);
const LOOKS: usize = 20;
/// For the firmware to come to its end, on any host.
const BOOT_MAX: Duration = Duration::from_secs(60);

/// Waits until the processors of a guest have halted for good.
fn until_halted(pid: u32) -> Result<(), String> {
    let (begun, mut asleep) = (Instant::now(), 0);
    while asleep < LOOKS {
        if begun.elapsed() > BOOT_MAX || interrupted() {
            return Err(format!("the guest has not halted within {BOOT_MAX:?}"));
        }
        std::thread::sleep(LOOK);
        asleep = if do_others_sleep(pid) { asleep + 1 } else { 0 };
    }
    Ok(())
}

/// Looks at an emulator from now on.
fn watch(pid: u32, intervals: usize, time: Duration) -> (Vec<Interval>, f64) {
    let (mut rows, mut cpu_us) = (Vec::new(), 0.0);
    let (begun, mut before) = (Instant::now(), Counters::of(&[pid]));
    for number in 1..=intervals {
        let until = time * u32::try_from(number).unwrap_or(u32::MAX);
        while begun.elapsed() < until && !interrupted() {
            std::thread::sleep(until.saturating_sub(begun.elapsed()).min(Duration::from_millis(200)));
        }
        let now = Counters::of(&[pid]);
        let done = now.since(&before);
        before = now;
        rows.push(Interval::of(&done));
        if number > intervals / 2 {
            cpu_us += done.cpu_us;
        }
        if interrupted() {
            break;
        }
    }
    let counted = rows.len().saturating_sub(intervals / 2).max(1) as f64;
    (rows, cpu_us / counted / time.as_secs_f64())
}

/// Looks at an emulator whose guest does not run.
fn watch_stopped(client: &mut Client, vm: &str, pid: u32, time: Duration) -> Result<Interval, String> {
    client.call("VM.pause", &[json!(vm)])?;
    // What the pause itself sets off is over by then.
    std::thread::sleep(time.min(Duration::from_secs(2)));
    let before = Counters::of(&[pid]);
    std::thread::sleep(time);
    Ok(Interval::of(&Counters::of(&[pid]).since(&before)))
}

/// A guest, and its kernel.
struct Kind<'a> {
    guest: &'static str,
    kernel: &'a Path,
    /// It halts, and is looked at from then on; else from its start.
    halts: bool,
}

/// Starts a guest that halts with each set of devices, one after the other, and looks at it for so many intervals; then
/// Linux, if there is a kernel of it.
pub fn measure(
    daemon: &Daemon,
    linux: Option<&Path>,
    intervals: usize,
    time: Duration,
) -> Result<Vec<Table>, String> {
    let own = halting_guest::write(&daemon.place.kernels())?;
    let halting =
        Kind { guest: "a guest of QEMU that lets its devices run and halts", kernel: &own, halts: true };
    let linux = linux.map(|kernel| Kind { guest: "an idle Linux guest of QEMU", kernel, halts: false });
    let mut tables = Vec::new();
    for kind in std::iter::once(halting).chain(linux) {
        for level in levels() {
            tables.push(measure_one(daemon, &kind, level, (intervals, time))?);
            if interrupted() {
                return Ok(tables);
            }
        }
    }
    Ok(tables)
}

fn measure_one(
    daemon: &Daemon,
    kind: &Kind<'_>,
    (what, platform): (&'static str, Value),
    (intervals, time): (usize, Duration),
) -> Result<Table, String> {
    let client = &mut daemon.client()?;
    let vm = daemon.make_vm(client, "qemu", platform)?;
    client.call("VM.set_PV_kernel", &[json!(vm), json!(kind.kernel.display().to_string())])?;
    client.call("VM.start", &[json!(vm), json!(false), json!(false)])?;
    let pid = emulator(daemon, client, &vm)?;
    if kind.halts {
        until_halted(pid)?;
    }
    let (rows, cpu_us_per_second) = watch(pid, intervals, time);
    let pss_kib = pss_kib(&[pid]);
    // The daemon closes a connection that is silent for so long.
    let stopped = watch_stopped(&mut daemon.client()?, &vm, pid, time)?;
    let client = &mut daemon.client()?;
    client.call("VM.hard_shutdown", &[json!(vm)])?;
    destroy(client, &vm)?;
    let seconds = time.as_secs_f64();
    Ok(Table { guest: kind.guest, what, seconds, intervals: rows, stopped, pss_kib, cpu_us_per_second })
}
