//! One daemon on SQLite, or several on a member of etcd.

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::process::Process;
use crate::toolstack::client::Client;
use crate::toolstack::daemon::{self, Daemon, Place};

/// How long a host may take to be a member, and etcd to serve.
const BEGIN_MAX: Duration = Duration::from_secs(60);
/// The account that hosts join with.
const ACCOUNT: &str = "joiner";

/// Daemons that share a database.
#[derive(Debug)]
pub struct Site {
    // They end before their database does.
    daemons: Vec<Daemon>,
    _etcd: Option<Etcd>,
}

/// A member of etcd, whose data goes with this value.
#[derive(Debug)]
struct Etcd {
    process: Process,
    dir: PathBuf,
    endpoint: String,
}

fn free_port() -> Result<u16, String> {
    let bound = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(|error| format!("no port is free: {error}"))
}

/// Waits until something is there.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, String> {
    let until = Instant::now() + BEGIN_MAX;
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if Instant::now() > until {
            return Err(format!("{what}: not within {BEGIN_MAX:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Etcd {
    fn start(dir: &Path) -> Result<Self, String> {
        let dir = dir.join(format!("tapio-bench-{}-etcd", std::process::id()));
        fs::create_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let log = File::create(dir.join("log")).map_err(|error| error.to_string())?;
        let (clients, peers) = (free_port()?, free_port()?);
        let (endpoint, peer) = (format!("http://127.0.0.1:{clients}"), format!("http://127.0.0.1:{peers}"));
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(dir.join("data")).args(["--name", "bench", "--log-level", "error"]);
        command.args(["--listen-client-urls", &endpoint, "--advertise-client-urls", &endpoint]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("bench={peer}")]);
        let process = Process::start(&mut command, log)
            .map_err(|error| format!("etcd does not start: {error}; install it (Debian: etcd-server)"))?;
        let etcd = Self { process, dir, endpoint };
        until("etcd serves", || std::net::TcpStream::connect(("127.0.0.1", clients)).ok())?;
        Ok(etcd)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.process.end();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A password of this run.
fn password() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

fn make_account(place: &Place, password: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("tapiod user add: {error}");
    let mut command = Command::new(daemon::program()?);
    command.args(["user", "add", ACCOUNT, "--role", "pool-admin", "--config", "/dev/null", "--state-dir"]);
    command.arg(place.dir.join("state")).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut user = command.spawn().map_err(failed)?;
    let input = user.stdin.take().ok_or("tapiod user add: no standard input")?;
    writeln!(&input, "{password}").map_err(failed)?;
    drop(input);
    let ended = user.wait().map_err(failed)?;
    ended.success().then_some(()).ok_or_else(|| format!("tapiod user add: {ended}"))
}

fn count(client: &mut Client) -> usize {
    let hosts = client.call("host.get_all", &[]);
    hosts.ok().and_then(|hosts| hosts.as_array().map(Vec::len)).unwrap_or(0)
}

impl Site {
    /// One host.
    pub fn alone(dir: &Path) -> Result<Self, String> {
        let daemon = Daemon::start(Place::named(dir, "-alone")?, None)?;
        Ok(Self { daemons: vec![daemon], _etcd: None })
    }

    /// So many hosts; `joined` is told how many there are by now.
    pub fn pool(dir: &Path, hosts: usize, joined: &mut dyn FnMut(usize)) -> Result<Self, String> {
        let etcd = Etcd::start(dir)?;
        let place = Place::named(dir, "-0")?;
        let password = password();
        make_account(&place, &password)?;
        let endpoints = format!("etcd-endpoints={}", etcd.endpoint);
        let start = |place, mut settings: Vec<String>| {
            let port = free_port()?;
            settings.push(format!("pool-address=127.0.0.1:{port}"));
            Daemon::start_with(place, None, port, &settings)
        };
        let mut daemons = vec![start(place, vec![endpoints])?];
        for at in 1..hosts {
            let mut daemon = start(Place::named(dir, &format!("-{at}"))?, Vec::new())?;
            let master = daemons[0].https.clone();
            let join = [json!(master), json!(ACCOUNT), json!(password)];
            daemon.client()?.call("pool.join", &join)?;
            // It starts again as a member.
            until("a host is a member", || {
                daemon.login().ok()?;
                (count(&mut daemon.client().ok()?) == at + 1).then_some(())
            })?;
            daemons.push(daemon);
            joined(at + 1);
        }
        Ok(Self { daemons, _etcd: Some(etcd) })
    }

    /// The host that decides.
    pub fn first(&self) -> &Daemon {
        &self.daemons[0]
    }

    /// One that does not, if there are several.
    pub fn last(&self) -> &Daemon {
        &self.daemons[self.daemons.len() - 1]
    }

    /// Each host, with an SR that is attached to it.
    pub fn places(&self, client: &mut Client) -> Result<Vec<(String, String)>, String> {
        let pbds = client.call("PBD.get_all_records", &[])?;
        let mut places = std::collections::BTreeMap::new();
        for pbd in pbds.as_object().into_iter().flatten().map(|(_, pbd)| pbd) {
            let text = |key: &str| pbd[key].as_str().unwrap_or_default().to_owned();
            let is_file = client.call("SR.get_type", &[json!(text("SR"))])? == json!("file");
            if is_file && pbd["currently_attached"] == json!(true) {
                places.insert(text("host"), text("SR"));
            }
        }
        Ok(places.into_iter().collect())
    }
}
