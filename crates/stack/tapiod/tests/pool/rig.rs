//! Daemons on one host, each with directories and ports of its own, and a real etcd.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tapio_fixtures::etcd::{Cluster, is_installed};
use tapio_fixtures::network::Network;
use tapio_fixtures::stopped::until_stopped;

/// How long anything may take on a busy host.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Sends a signal to a process of a test; one that is stopped stands when this returns.
pub fn send(pid: i32, signal: i32) {
    // SAFETY: the process is a child of this one, or of its child, that was not waited for.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    if signal == libc::SIGSTOP {
        until_stopped(pid.cast_unsigned());
    }
}

/// The account that hosts log in with when they join.
pub const PASSWORD: &str = "correct horse";

/// Seconds of silence after which a host counts as dead on a shared SR.
const SILENCE: &str = "10";

/// An error of XenAPI: the code, then its parameters.
pub type Failure = Vec<String>;

/// A daemon.
pub struct Host {
    pub dir: PathBuf,
    args: Vec<String>,
    https: String,
    http: String,
    place: Option<Place>,
    process: Option<Child>,
}

/// A host of a network of the test's own; without one, a host is on loopback.
pub type Place = (Arc<Network>, usize);

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One call on a new connection.
fn ask(mut stream: impl Read + Write, method: &str, params: &Value) -> Result<Value, Failure> {
    let lost = |error: &dyn std::fmt::Display| vec!["NO_ANSWER".to_owned(), error.to_string()];
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
    let head =
        format!("POST /jsonrpc HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}", body.len());
    write!(stream, "{head}\r\nContent-Type: application/json\r\n\r\n{body}").map_err(|error| lost(&error))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(|error| lost(&error))?;
    let at = answer.windows(4).position(|four| four == b"\r\n\r\n").ok_or_else(|| lost(&"no head"))?;
    let body = answer[at + 4..].to_vec();
    let is_chunked = String::from_utf8_lossy(&answer[..at]).to_lowercase().contains("chunked");
    let body = if is_chunked { whole(&body) } else { body };
    let answer: Value = serde_json::from_slice(&body).map_err(|error| lost(&error))?;
    match answer.get("error") {
        Some(error) if !error.is_null() => {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let mut failure = vec![text(&error["message"])];
            failure.extend(error["data"].as_array().into_iter().flatten().map(text));
            Err(failure)
        }
        _ => Ok(answer["result"].clone()),
    }
}

fn whole(mut chunks: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(at) = chunks.windows(2).position(|two| two == b"\r\n") {
        let len = usize::from_str_radix(std::str::from_utf8(&chunks[..at]).unwrap_or("0"), 16).unwrap_or(0);
        if len == 0 || at + 2 + len > chunks.len() {
            break;
        }
        body.extend_from_slice(&chunks[at + 2..at + 2 + len]);
        chunks = chunks.get(at + 4 + len..).unwrap_or_default();
    }
    body
}

impl Host {
    pub fn new(dir: &Path, more: &[String]) -> Self {
        Self::placed(dir, more, None)
    }

    pub fn placed(dir: &Path, more: &[String], place: Option<Place>) -> Self {
        let (https, http) = match &place {
            Some((network, at)) => (format!("{}:8443", network.address(*at)), "127.0.0.1:8080".to_owned()),
            None => (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port())),
        };
        let mut args: Vec<String> = Vec::new();
        for (option, name) in [("--run-dir", "run"), ("--state-dir", "state"), ("--mount-dir", "mnt")] {
            args.extend([option.to_owned(), dir.join(name).display().to_string()]);
        }
        args.extend([
            "--config=/dev/null".to_owned(),
            format!("--listen={https}"),
            format!("--http={http}"),
            format!("--set=pool-address={https}"),
            format!("--set=pool-lease={}", if place.is_some() { 4 } else { 2 }),
        ]);
        args.extend_from_slice(more);
        fs::create_dir_all(dir.join("shm")).unwrap();
        let mut host = Self { dir: dir.to_path_buf(), args, https, http, place, process: None };
        host.account("root", "pool-admin");
        host.start(&[]);
        host
    }

    /// Makes an account of this host.
    pub fn account(&self, name: &str, role: &str) {
        let mut user = Command::new(env!("CARGO_BIN_EXE_tapiod"));
        user.args(["user", "add", name, "--role", role, "--config", "/dev/null", "--state-dir"]);
        let mut user =
            user.arg(self.dir.join("state")).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        user.stdin.take().unwrap().write_all(format!("{PASSWORD}\n").as_bytes()).unwrap();
        assert!(user.wait().unwrap().success(), "the account is made");
    }

    fn spawn(&self, env: &[(&str, &str)]) -> Child {
        let log = fs::File::options().create(true).append(true).open(self.dir.join("log")).unwrap();
        let mut daemon = match &self.place {
            Some((network, at)) => network.host(*at).command(env!("CARGO_BIN_EXE_tapiod")),
            None => Command::new(env!("CARGO_BIN_EXE_tapiod")),
        };
        daemon.args(&self.args).envs(env.iter().copied()).env_remove("NOTIFY_SOCKET");
        daemon.env("TAPIO_RUN_DIR", self.dir.join("run/disk")).env("TAPIO_SHM_DIR", self.dir.join("shm"));
        daemon.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        daemon.spawn().unwrap()
    }

    pub fn start(&mut self, env: &[(&str, &str)]) {
        self.process = Some(self.spawn(env));
        self.until("it serves", || self.call("pool.get_all", json!([])).is_ok());
    }

    /// A start that is expected to fail: how the daemon ends.
    #[track_caller]
    pub fn try_start(&mut self, env: &[(&str, &str)]) -> ExitStatus {
        let mut daemon = self.spawn(env);
        let mut status = None;
        self.until("the daemon has ended", || {
            status = daemon.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    pub fn kill(&mut self) {
        if self.place.is_some() {
            // What runs in a namespace does not end with the program that started it there.
            self.signal(libc::SIGKILL);
        }
        let mut process = self.process.take().expect("it runs");
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Waits until the daemon has ended by itself.
    #[track_caller]
    pub fn ends(&mut self) {
        let mut process = self.process.take().expect("it runs");
        self.until("the daemon has ended", || process.try_wait().unwrap().is_some());
    }

    /// The daemon, and what it started, by the directory that all of them were told.
    pub fn processes(&self) -> Vec<i32> {
        let told = format!("TAPIO_RUN_DIR={}", self.dir.join("run/disk").display());
        let is_ours = |pid: &i32| {
            let told_it = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            // Emulators are told nothing; they work in a directory of the host's.
            let works_here =
                fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|at| at.starts_with(&self.dir));
            works_here || told_it.split(|byte| *byte == 0).any(|one| one == told.as_bytes())
        };
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_ours).collect()
    }

    /// Ends the host: all its processes at once. The daemon is the first, because it starts another process in the
    /// place of one that has died.
    pub fn kill_all(&mut self) {
        self.kill();
        self.until("nothing of the host runs", || {
            let all = self.processes();
            for pid in &all {
                // SAFETY: a process that was told this test's directory.
                unsafe { libc::kill(*pid, libc::SIGKILL) };
            }
            all.is_empty()
        });
    }

    pub fn signal(&self, signal: i32) {
        send(self.daemon().expect("it runs").cast_signed(), signal);
    }

    /// Whether the daemon is stopped, as `TAPIO_STOP_AT` stops it.
    pub fn is_stopped(&self) -> bool {
        let of = |pid: u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        self.daemon().is_some_and(of)
    }

    /// The daemon's process, as it is seen from here.
    fn daemon(&self) -> Option<u32> {
        let process = self.process.as_ref()?.id();
        if self.place.is_some() { tapio_fixtures::network::child_of(process) } else { Some(process) }
    }

    /// Processes of the host that run a program, apart from the daemon.
    pub fn running(&self, program: &str) -> Vec<i32> {
        let is_it = |pid: &i32| {
            fs::read_link(format!("/proc/{pid}/exe"))
                .is_ok_and(|path| path.to_string_lossy().contains(program))
        };
        self.processes().into_iter().filter(is_it).collect()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    #[track_caller]
    pub fn until(&self, what: &str, is: impl FnMut() -> bool) {
        self.until_or(what, String::new, is);
    }

    /// Waits; `told` says what there is if it does not come.
    #[track_caller]
    pub fn until_or(&self, what: &str, told: impl Fn() -> String, mut is: impl FnMut() -> bool) {
        let until = Instant::now() + LIMIT;
        while !is() {
            assert!(
                Instant::now() < until,
                "waiting until {what}; {} the log of {}:\n{}",
                told(),
                self.dir.display(),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A call of root on the host's own socket, in a session of its own.
    pub fn call(&self, method: &str, params: Value) -> Result<Value, Failure> {
        let open = || {
            let stream = UnixStream::connect(self.dir.join("run/xapi"));
            let stream = stream.and_then(|stream| stream.set_read_timeout(Some(LIMIT)).map(|()| stream));
            stream.map_err(|error| vec!["NO_ANSWER".to_owned(), error.to_string()])
        };
        let session = ask(open()?, "session.login_with_password", &json!(["root", ""]))?;
        let mut all = vec![session.clone()];
        all.extend(params.as_array().into_iter().flatten().cloned());
        let answer = ask(open()?, method, &json!(all));
        // A host that starts again has forgotten it.
        let _ = open().and_then(|stream| ask(stream, "session.logout", &json!([session])));
        answer
    }

    #[track_caller]
    pub fn done(&self, method: &str, params: Value) -> Value {
        match self.call(method, params) {
            Ok(value) => value,
            Err(failure) => {
                panic!("{method}: {failure:?}; the log of {}:\n{}", self.dir.display(), self.log())
            }
        }
    }

    /// A login over the network.
    pub fn login(&self) -> Result<Value, Failure> {
        self.login_as("root")
    }

    pub fn login_as(&self, user: &str) -> Result<Value, Failure> {
        self.over_network("session.login_with_password", &json!([user, PASSWORD]))
    }

    /// A call over the network.
    pub fn over_network(&self, method: &str, params: &Value) -> Result<Value, Failure> {
        ask(TcpStream::connect(&self.http).unwrap(), method, params)
    }

    /// A request over the network: status, where it sends the client, and the body.
    pub fn request(&self, method: &str, path: &str, body: &[u8]) -> (u16, Option<String>, Vec<u8>) {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let length = format!("Content-Length: {}\r\n", body.len());
        let length = if method == "PUT" { length.as_str() } else { "" };
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n").unwrap();
        // The answer may come before all is sent.
        let _ = stream.write_all(body);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let at = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8_lossy(&answer[..at]).into_owned();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let place = head.lines().find_map(|line| line.strip_prefix("location: ").map(str::to_owned));
        let is_chunked = head.to_lowercase().contains("transfer-encoding: chunked");
        let body = answer[at + 4..].to_vec();
        (status, place, if is_chunked { whole(&body) } else { body })
    }

    pub fn address(&self) -> String {
        self.https.clone()
    }

    pub fn count(&self, class: &str) -> usize {
        let all = self.call(&format!("{class}.get_all"), json!([]));
        all.ok().and_then(|all| all.as_array().map(Vec::len)).unwrap_or_default()
    }

    /// The references of hosts by address.
    pub fn host_at(&self, address: &str) -> Option<Value> {
        let hosts = self.call("host.get_all_records", json!([])).ok()?;
        let found = hosts.as_object()?.iter().find(|(_, host)| host["address"] == address)?;
        Some(json!(found.0))
    }

    /// Its own reference. One that is alone has another address.
    pub fn own(&self) -> Option<Value> {
        let alone = || self.call("host.get_all", json!([])).ok()?.as_array()?.first().cloned();
        self.host_at(&self.address()).or_else(alone)
    }

    pub fn master(&self) -> Value {
        let pools = self.call("pool.get_all_records", json!([])).unwrap_or_default();
        pools.as_object().and_then(|pools| Some(pools.values().next()?["master"].clone())).unwrap_or_default()
    }

    pub fn join(&self, to: &Self) -> Result<Value, Failure> {
        self.call("pool.join", json!([to.address(), "root", PASSWORD]))
    }

    pub fn pbd_of(&self, sr: &Value, host: &Value) -> Option<(Value, bool)> {
        let pbds = self.call("PBD.get_all_records", json!([])).ok()?;
        let found = pbds.as_object()?.iter().find(|(_, pbd)| pbd["SR"] == *sr && pbd["host"] == *host)?;
        Some((json!(found.0), found.1["currently_attached"] == json!(true)))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for pid in self.processes() {
            // SAFETY: a process that was told this test's directory.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

pub fn is_missing() -> bool {
    let missing = !is_installed();
    if missing {
        skipped("needs etcd");
    }
    missing
}

/// Says so past the harness's capture, so that it is always seen.
pub fn skipped(why: &str) {
    let _ = std::io::stderr().write_all(format!("\nskipped: {why} [tapiod]\n").as_bytes());
}

pub fn first_host(cluster: &Cluster, dir: &Path) -> Host {
    first_host_at(cluster, dir, None)
}

pub fn first_host_at(cluster: &Cluster, dir: &Path, place: Option<Place>) -> Host {
    let endpoints = format!("--set=etcd-endpoints={}", cluster.endpoints().join(","));
    Host::placed(dir, &[endpoints, "--set=etcd-prefix=/pool".to_owned()], place)
}

pub fn make_sr(host: &Host, dir: &Path, is_shared: bool) -> Value {
    fs::create_dir_all(dir).unwrap();
    let own = host.own().unwrap();
    let config = json!({ "location": dir.display().to_string(), "host-silence": SILENCE });
    host.done("SR.create", json!([own, config, "0", "files", "", "file", "user", is_shared, {}]))
}

pub fn vdi(sr: &Value, name: &str) -> Value {
    json!([{ "name_label": name, "SR": sr, "virtual_size": 1_048_576, "type": "user", "sharable": false,
             "read_only": false, "other_config": {} }])
}
