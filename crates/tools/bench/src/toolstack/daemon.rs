//! A `tapiod` of our own, with everything of it in directories that are removed at the end.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Client, Encoding};
use crate::process::Process;

/// How long it may take to serve.
const START_MAX: Duration = Duration::from_secs(30);
/// Set to the program, where it lies elsewhere than beside this one.
const PROGRAM_VARIABLE: &str = "TAPIOD";

/// The directories; removed with this value.
#[derive(Debug)]
pub struct Place {
    /// Images and the database.
    pub dir: PathBuf,
    /// Sockets and notes, in memory as `/run` is.
    pub run: PathBuf,
}

impl Place {
    /// Makes both.
    pub fn new(dir: &Path) -> Result<Self, String> {
        Self::named(dir, "")
    }

    /// Makes those of one of several daemons; `name` tells them apart.
    pub fn named(dir: &Path, name: &str) -> Result<Self, String> {
        let own = format!("tapio-bench-{}{name}", std::process::id());
        let shm = Path::new("/dev/shm");
        let run = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
        let dir = std::path::absolute(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let place = Self { dir: dir.join(&own), run: run.join(format!("{own}.run")) };
        for dir in [&place.dir, &place.run, &place.sr(), &place.kernels(), &place.run.join("shm")] {
            fs::create_dir(dir).map_err(|error| {
                format!("cannot make {}: {error}; name another directory with --dir", dir.display())
            })?;
        }
        Ok(place)
    }

    /// The daemon's own certificate.
    pub fn certificate(&self) -> PathBuf {
        self.dir.join("state/server.pem")
    }

    /// Kernels of our own.
    pub fn kernels(&self) -> PathBuf {
        self.dir.join("kernels")
    }

    /// The directory of the SR.
    pub fn sr(&self) -> PathBuf {
        self.dir.join("sr")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for dir in [&self.dir, &self.run] {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

/// The daemon.
#[derive(Debug)]
pub struct Daemon {
    pub process: Process,
    pub place: Place,
    /// A session of the superuser.
    pub session: String,
    /// Where it serves HTTPS.
    pub https: String,
    /// The SR.
    pub sr: String,
    /// From the start of the program to the answer to the login.
    pub start: Duration,
}

/// `tapiod`, where `TAPIOD` says, beside this program, or in the search path.
pub fn program() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os(PROGRAM_VARIABLE) {
        return Ok(named.into());
    }
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("tapiod")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let others = std::env::split_paths(&path).map(|dir| dir.join("tapiod"));
    beside
        .into_iter()
        .chain(others)
        .find(|file| file.is_file())
        .ok_or_else(|| format!("needs tapiod: build it, or set {PROGRAM_VARIABLE} to where it is"))
}

impl Daemon {
    /// Starts it and logs in. Guests may boot kernels that lie in `kernels` and in
    /// [`Place::kernels`].
    pub fn start(place: Place, kernels: Option<&Path>) -> Result<Self, String> {
        Self::start_with(place, kernels, 0, &[])
    }

    /// As [`Self::start`], on this port, and with more settings of `tapiod.conf`, as `KEY=VALUE`.
    pub fn start_with(
        place: Place,
        kernels: Option<&Path>,
        port: u16,
        settings: &[String],
    ) -> Result<Self, String> {
        let (dir, run) = (&place.dir, &place.run);
        let log = dir.join("log");
        let file = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let mut command = Command::new(program()?);
        command.arg("--state-dir").arg(dir.join("state")).arg("--run-dir").arg(run.join("run"));
        command.arg("--mount-dir").arg(dir.join("mount")).arg("--default-sr").arg(place.sr());
        command.args([
            "--config",
            "/dev/null",
            "--http",
            "none",
            "--listen",
            &format!("127.0.0.1:{port}"),
            "--log-level",
            "warn",
        ]);
        let own = place.kernels();
        let kernels: Vec<String> =
            kernels.into_iter().chain([own.as_path()]).map(|dir| dir.display().to_string()).collect();
        command.arg("--set").arg(format!("kernel-dirs={}", kernels.join(", ")));
        command.args(settings.iter().flat_map(|setting| ["--set", setting]));
        command.env("TAPIO_RUN_DIR", run.join("disk")).env("TAPIO_SHM_DIR", run.join("shm"));
        command.env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC");
        let begun = Instant::now();
        let mut process =
            Process::start(&mut command, file).map_err(|error| format!("tapiod does not start: {error}"))?;
        let (list, socket) = (run.join("run/listening"), run.join("run/xapi"));
        let told = || last_line(&log);
        while !list.exists() {
            if process.has_ended() {
                return Err(format!("tapiod ended as soon as it had begun: {}", told()));
            }
            if begun.elapsed() > START_MAX {
                return Err(format!("tapiod has not begun to serve within {START_MAX:?}: {}", told()));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let mut client = Client::unix(&socket, Encoding::Json, "")?;
        let session = client.login()?;
        let start = begun.elapsed();
        let listening = fs::read_to_string(&list).map_err(|error| format!("{}: {error}", list.display()))?;
        let https = listening.lines().find_map(|line| line.strip_prefix("https://"));
        let https = https.ok_or("tapiod serves no HTTPS")?.to_owned();
        let found = client.call("SR.get_all_records_where", &[json!(r#"field "type" = "file""#)])?;
        let sr = found.as_object().and_then(|all| all.keys().next()).ok_or("tapiod made no SR")?.clone();
        Ok(Self { process, place, session, https, sr, start })
    }

    /// Logs in again: the daemon has started anew since.
    pub fn login(&mut self) -> Result<(), String> {
        self.session = Client::unix(&self.socket(), Encoding::Json, "")?.login()?;
        Ok(())
    }

    /// Its UNIX socket.
    pub fn socket(&self) -> PathBuf {
        self.place.run.join("run/xapi")
    }

    /// Another connection, in JSON over the UNIX socket.
    pub fn client(&self) -> Result<Client, String> {
        Client::unix(&self.socket(), Encoding::Json, &self.session)
    }

    /// A disk of this many bytes.
    pub fn make_vdi(&self, client: &mut Client, name: &str, bytes: u64) -> Result<String, String> {
        let record =
            json!({"name_label": name, "SR": self.sr, "virtual_size": bytes.to_string(), "type": "user"});
        client.text("VDI.create", &[record])
    }

    /// Steps at a time: on the host and for one VM.
    pub fn set_limits(&self, client: &mut Client, host: usize, per_vm: usize) -> Result<(), String> {
        let all = client.call("host.get_all", &[])?;
        let this = all.as_array().and_then(|all| all.first()).cloned().ok_or("there is no host")?;
        for (key, value) in [("worker-pool-size", host), ("max-parallel-per-vm", per_vm)] {
            client.call("host.remove_from_other_config", &[this.clone(), json!(key)])?;
            client.call("host.add_to_other_config", &[this.clone(), json!(key), json!(value.to_string())])?;
        }
        Ok(())
    }

    /// How long the storage takes to make a disk ready.
    pub fn set_latency(&self, client: &mut Client, ms: u64) -> Result<(), String> {
        let key = "simulated-latency-ms";
        client.call("SR.remove_from_other_config", &[json!(self.sr), json!(key)])?;
        if ms > 0 {
            client.call("SR.add_to_other_config", &[json!(self.sr), json!(key), json!(ms.to_string())])?;
        }
        Ok(())
    }

    /// A VM of this driver.
    pub fn make_vm(&self, client: &mut Client, driver: &str, platform: Value) -> Result<String, String> {
        let memory = (128_u64 << 20).to_string();
        let record = json!({
            "name_label": "bench", "other_config": {"driver": driver}, "platform": platform,
            "memory_static_min": memory, "memory_dynamic_min": memory, "memory_dynamic_max": memory,
            "memory_static_max": memory, "VCPUs_max": "1", "VCPUs_at_startup": "1",
        });
        client.text("VM.create", &[record])
    }

    /// Makes a VBD of a VM.
    pub fn make_vbd(
        &self,
        client: &mut Client,
        vm: &str,
        vdi: &str,
        place: usize,
        read_only: bool,
    ) -> Result<String, String> {
        let mode = if read_only { "RO" } else { "RW" };
        let record =
            json!({"VM": vm, "VDI": vdi, "userdevice": place.to_string(), "mode": mode, "type": "Disk"});
        client.text("VBD.create", &[record])
    }

    /// Ends every VM, so that no disk process and no guest outlives the run.
    fn end_machines(&self) -> Result<(), String> {
        let mut client = self.client()?;
        let running = client.call("VM.get_all_records", &[])?;
        for (vm, record) in running.as_object().into_iter().flatten() {
            let is_on = record["power_state"] != "Halted" && record["is_control_domain"] != true;
            if is_on && let Err(error) = client.call("VM.hard_shutdown", &[json!(vm)]) {
                eprintln!("tapio bench: a VM does not end: {error}");
            }
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !self.process.has_ended()
            && let Err(error) = self.end_machines()
        {
            eprintln!("tapio bench: {error}");
        }
        self.process.end();
    }
}

fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}
