//! One plug of a VHD into a waiting guest, beside a peer's program that is started for the same purpose.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::client::Client;
use super::daemon::Daemon;
use super::{MIB, ms};
use crate::measure::interrupted;
use crate::medians::median;
use crate::process::Process;

/// How long a server may take until it answers.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Bytes of the disk.
const DISK_LEN: u64 = 1024 * MIB;

/// Plugs of one disk.
#[derive(Clone, Debug, Serialize)]
pub struct Plugs {
    pub what: &'static str,
    pub times: usize,
    pub median_ms: f64,
    pub least_ms: f64,
    pub most_ms: f64,
    /// Median of the way back.
    pub unplug_ms: f64,
}

/// The names of the rows.
pub const FRONT: &str = "VBD.plug until the front end answers";
pub const GUEST: &str = "VBD.plug until a User-mode Linux guest has the disk";
pub const PEER: &str = "qemu-storage-daemon until the front end answers";

/// Times of both ways.
#[derive(Debug, Default)]
struct Times {
    plug: Vec<f64>,
    unplug: Vec<f64>,
}

impl Times {
    fn row(mut self, what: &'static str) -> Plugs {
        let median_ms = median(&mut self.plug);
        Plugs {
            what,
            times: self.plug.len(),
            median_ms,
            least_ms: self.plug.first().copied().unwrap_or(0.0),
            most_ms: self.plug.last().copied().unwrap_or(0.0),
            unplug_ms: median(&mut self.unplug),
        }
    }
}

/// Waits until the server at `socket` answers a vhost-user front end's first question.
fn wait_for_answer(socket: &Path, mut is_alive: impl FnMut() -> bool) -> Result<(), String> {
    // GET_FEATURES, version 1, without a payload; the answer has 8 bytes of it (QEMU docs/interop/vhost-user.rst).
    let question: Vec<u8> = [1_u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut answer = [0; 20];
    let begun = Instant::now();
    loop {
        let asked = UnixStream::connect(socket).and_then(|mut stream| {
            stream.set_read_timeout(Some(ANSWER_MAX))?;
            stream.write_all(&question)?;
            stream.read_exact(&mut answer)
        });
        let Err(error) = asked else { return Ok(()) };
        if !is_alive() || begun.elapsed() > ANSWER_MAX {
            return Err(format!("no answer at {}: {error}", socket.display()));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A running VM, and a disk for it.
pub(super) struct Pair {
    vm: String,
    pub(super) vbd: String,
    uuid: String,
}

impl Pair {
    pub(super) fn make(
        daemon: &Daemon,
        client: &mut Client,
        driver: &str,
        platform: Value,
    ) -> Result<Self, String> {
        let vdi = daemon.make_vdi(client, "plugged", DISK_LEN)?;
        let vm = daemon.make_vm(client, driver, platform)?;
        client.call("VM.start", &[json!(vm), json!(false), json!(false)])?;
        let vbd = daemon.make_vbd(client, &vm, &vdi, 1, false)?;
        let uuid = client.text("VBD.get_uuid", &[json!(vbd)])?;
        Ok(Self { vm, vbd, uuid })
    }

    /// The socket on which the disk is offered, as the daemon wrote it down.
    pub(super) fn socket(&self, daemon: &Daemon) -> Result<PathBuf, String> {
        let path = daemon.place.run.join("run/disks").join(format!("{}.json", self.uuid));
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let note: Value =
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let socket = note["front"]["VhostUser"]["socket"].as_str();
        socket.map(PathBuf::from).ok_or_else(|| format!("{} names no socket", path.display()))
    }

    fn unplug(&self, client: &mut Client) -> Result<f64, String> {
        let begun = Instant::now();
        client.call("VBD.unplug", &[json!(self.vbd)])?;
        Ok(ms(begun.elapsed()))
    }

    pub(super) fn end(&self, client: &mut Client) -> Result<(), String> {
        client.call("VM.hard_shutdown", &[json!(self.vm)]).map(drop)
    }
}

/// One start of the peer; how long it took to answer, and to end.
fn peer(daemon: &Daemon, image: &Path) -> Result<(f64, f64), String> {
    let (run, log) = (&daemon.place.run, daemon.place.dir.join("peer.log"));
    let socket = run.join("peer");
    let _ = fs::remove_file(&socket);
    let errors = fs::File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!("driver=file,filename={},node-name=file", image.display()));
    command.args(["--blockdev", "driver=vpc,file=file,node-name=disk", "--export"]);
    command.arg(format!(
        "vhost-user-blk,id=e,node-name=disk,writable=on,addr.type=unix,addr.path={}",
        socket.display()
    ));
    let begun = Instant::now();
    let mut process = Process::start(&mut command, errors)
        .map_err(|error| format!("needs qemu-storage-daemon: {error}"))?;
    let answered = wait_for_answer(&socket, || !process.has_ended());
    let took = ms(begun.elapsed());
    answered.map_err(|error| format!("{error}: {}", fs::read_to_string(&log).unwrap_or_default().trim()))?;
    Ok((took, ms(process.end())))
}

/// Ours without a guest and the peer, in turn; then ours with a real guest. What cannot be run is told.
pub fn measure(
    daemon: &Daemon,
    times: usize,
    begin: &mut dyn FnMut(&str),
    skipped: &mut Vec<String>,
) -> Result<Vec<Plugs>, String> {
    let client = &mut daemon.client()?;
    begin("plug without a guest");
    let pair = Pair::make(daemon, client, "sim", json!({"sim-front": "vhost-user"}))?;
    let other = daemon.make_vdi(client, "peer's", DISK_LEN)?;
    let image = client.text("VDI.get_uuid", &[json!(other)])?;
    let image = daemon.place.sr().join(format!("{image}.vhd"));
    let (mut ours, mut peers) = (Times::default(), Times::default());
    let mut has_peer = true;
    // The first of each is not counted: it also reads the programs.
    for round in 0..=times {
        if interrupted() {
            break;
        }
        let begun = Instant::now();
        client.call("VBD.plug", &[json!(pair.vbd)])?;
        let socket = pair.socket(daemon)?;
        wait_for_answer(&socket, || true)?;
        let took = ms(begun.elapsed());
        let back = pair.unplug(client)?;
        if round > 0 {
            ours.plug.push(took);
            ours.unplug.push(back);
        }
        if has_peer {
            match peer(daemon, &image) {
                Ok((took, back)) if round > 0 => {
                    peers.plug.push(took);
                    peers.unplug.push(back);
                }
                Ok(_) => {}
                Err(error) => {
                    skipped.push(format!("{PEER}: {error}"));
                    has_peer = false;
                }
            }
        }
    }
    pair.end(client)?;
    let mut rows = vec![ours.row(FRONT)];
    rows.extend((!peers.plug.is_empty()).then(|| peers.row(PEER)));
    begin("plug into a guest");
    match guest(daemon, client, times) {
        Ok(found) => rows.push(found.row(GUEST)),
        Err(error) => skipped.push(format!("{GUEST}: {error}")),
    }
    Ok(rows)
}

/// `VBD.plug` ends when the agent in the guest has answered that the disk has a node there.
fn guest(daemon: &Daemon, client: &mut Client, times: usize) -> Result<Times, String> {
    let pair = Pair::make(daemon, client, "uml", json!({}))?;
    let mut found = Times::default();
    let done = (|| {
        for round in 0..=times {
            if interrupted() {
                break;
            }
            let begun = Instant::now();
            client.call("VBD.plug", &[json!(pair.vbd)])?;
            let took = ms(begun.elapsed());
            let back = pair.unplug(client)?;
            if round > 0 {
                found.plug.push(took);
                found.unplug.push(back);
            }
        }
        Ok(())
    })();
    pair.end(client)?;
    done.map(|()| found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_front_end_that_never_answers_is_an_error() {
        let error = wait_for_answer(Path::new("/nonexistent/socket"), || false).unwrap_err();
        assert!(error.contains("/nonexistent/socket"), "{error}");
    }

    #[test]
    fn rows_have_the_middle_and_both_ends() {
        let row = Times { plug: vec![9.0, 1.0, 2.0], unplug: vec![4.0] }.row(FRONT);
        assert_eq!(
            (row.times, row.median_ms, row.least_ms, row.most_ms, row.unplug_ms),
            (3, 2.0, 1.0, 9.0, 4.0)
        );
    }
}
