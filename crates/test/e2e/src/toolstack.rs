//! The toolstack's daemon, and clients for it: JSON-RPC over its UNIX socket from here, Python's `XenAPI` and curl as
//! programs.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::left_behind::end_left_behind;
use crate::process::{Finished, Running, run};
use crate::scratch::Scratch;
use crate::tools::{our, repository};

/// How long a start may take: recovery is a part of it.
pub const START_LIMIT: Duration = Duration::from_secs(60);

/// How long an end may take.
pub const END_LIMIT: Duration = Duration::from_secs(60);

/// What one call may take.
const CALL_LIMIT: Duration = Duration::from_secs(120);

/// How to start a daemon; every one has directories and ports of its own.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    dir: PathBuf,
    config: PathBuf,
    args: Vec<String>,
    env: Vec<(String, String)>,
    tls: bool,
}

impl DaemonOptions {
    /// One that keeps everything below `dir`. HTTP on a free port of loopback, and a UNIX socket; no TLS.
    pub fn new(scratch: &Scratch) -> Self {
        let (dir, config) = (scratch.path().to_path_buf(), "/dev/null".into());
        Self { dir, config, args: Vec::new(), env: Vec::new(), tls: false }
    }

    /// With this file of settings.
    pub fn config(mut self, path: &Path) -> Self {
        self.config = path.to_path_buf();
        self
    }

    /// Also HTTPS, on a free port.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// With a default SR of files, in `sr` below its directory.
    pub fn default_sr(self) -> Self {
        let path = self.dir.join("sr").display().to_string();
        self.arg("--default-sr").arg(&path)
    }

    /// Kernels of clients lie in `kernels` below its directory alone.
    pub fn own_kernels(self) -> Self {
        let kernels = self.dir.join("kernels");
        std::fs::create_dir_all(&kernels).expect("a directory for kernels");
        self.arg("--set").arg(&format!("kernel-dirs={}", kernels.display()))
    }

    /// One more argument.
    pub fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.to_owned());
        self
    }

    /// One more variable, as `TAPIO_DIE_AT`.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The command, for a test that starts it itself.
    pub fn command(&self) -> Command {
        let mut command = Command::new(our("tapiod"));
        for (option, name) in [("--run-dir", "run"), ("--state-dir", "state"), ("--mount-dir", "mnt")] {
            command.arg(option).arg(self.dir.join(name));
        }
        command.arg("--config").arg(&self.config);
        command.args(if self.tls { ["--listen", "127.0.0.1:0"] } else { ["--no-tls", "--http=127.0.0.1:0"] });
        if self.tls {
            command.arg("--http=127.0.0.1:0");
        }
        // Its disk processes are kept apart from those of the host and of other tests.
        let shm = self.dir.join("shm");
        std::fs::create_dir_all(&shm).expect("a directory for statistics");
        command.env("TAPIO_RUN_DIR", self.dir.join("run/disk")).env("TAPIO_SHM_DIR", shm);
        command.env_remove("NOTIFY_SOCKET");
        for (name, value) in &self.env {
            command.env(name, value);
        }
        command.args(&self.args);
        command
    }

    /// Starts it and waits until it serves.
    #[track_caller]
    pub fn start(&self) -> Daemon {
        let list = self.dir.join("run/listening");
        // A daemon that was killed left its own.
        let _ = std::fs::remove_file(&list);
        let log = (0..).map(|number| self.dir.join(format!("tapiod.{number}.log"))).find(|log| !log.exists());
        let mut process = Running::start(&mut self.command(), &log.expect("a free name"));
        let listening = process.wait_for("its doors", START_LIMIT, || {
            std::fs::read_to_string(&list).ok().filter(|text| text.ends_with('\n'))
        });
        let found = |kind: &str| listening.lines().find(|line| line.starts_with(kind)).map(str::to_owned);
        Daemon {
            http: found("http:").expect("HTTP is served"),
            https: found("https:"),
            socket: self.dir.join("run/xapi"),
            process,
            options: self.clone(),
        }
    }

    /// Starts one that must not come up; answers what it said.
    #[track_caller]
    pub fn refused(&self) -> String {
        run(&mut self.command()).fails()
    }
}

/// A daemon that serves. Dropping it kills it. Its disks and guests go on, so tests end those first; a test that fails
/// leaves none: a thread of the test that waits for a disk whose storage is gone would keep all tests from ending.
#[derive(Debug)]
pub struct Daemon {
    /// The process.
    pub process: Running,
    /// As `http://127.0.0.1:4711`.
    pub http: String,
    /// As `https://127.0.0.1:4712`, with [`DaemonOptions::tls`].
    pub https: Option<String>,
    /// Its UNIX socket.
    pub socket: PathBuf,
    /// How it was started.
    pub options: DaemonOptions,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.process.kill();
            end_left_behind(&self.options.dir, 0);
        }
    }
}

/// An error of XenAPI: the code, then its parameters.
pub type ApiFailure = Vec<String>;

impl Daemon {
    /// A session of the local superuser.
    #[track_caller]
    pub fn login(&self) -> Session {
        Session::begin(&self.socket)
    }

    /// A session of an account, as one over the network: with the rights of its role.
    #[track_caller]
    pub fn login_as(&self, name: &str, password: &str) -> Session {
        let address = self.http.strip_prefix("http://").expect("an address").to_owned();
        let words = [json!(name), json!(password)];
        let answer = ask(&Way::Http(address.clone()), "session.login_with_password", &words);
        let reference = answer.expect("the account may log in").as_str().expect("a reference").to_owned();
        Session { way: Way::Http(address), reference }
    }

    /// Ends it in order; disks and guests go on.
    #[track_caller]
    pub fn stop(mut self) {
        self.process.stop(END_LIMIT);
    }

    /// Kills it, and starts another one on the same state.
    #[track_caller]
    pub fn kill_and_restart(mut self) -> Self {
        self.process.kill();
        self.options.start()
    }

    /// Adds an account that may log in over the network.
    #[track_caller]
    pub fn add_user(&self, name: &str, role: &str, password: &str) {
        let dir = &self.options.dir;
        let path = dir.join("password");
        std::fs::write(&path, format!("{password}\n")).expect("written");
        let mut command = Command::new(our("tapiod"));
        command
            .args(["user", "add", name, "--role", role, "--config", "/dev/null", "--state-dir"])
            .arg(dir.join("state"));
        let input = std::fs::File::open(&path).expect("opened");
        crate::process::run_with_input(&mut command, Some(input), crate::process::TOOL_LIMIT).ok();
    }
}

#[derive(Clone, Debug)]
enum Way {
    Socket(PathBuf),
    Http(String),
}

/// A session by JSON-RPC 2.0; each call is a connection of its own.
#[derive(Clone, Debug)]
pub struct Session {
    way: Way,
    /// Its reference.
    pub reference: String,
}

impl Session {
    /// Logs in as the local superuser.
    #[track_caller]
    pub fn begin(socket: &Path) -> Self {
        let way = Way::Socket(socket.to_path_buf());
        let answer = ask(&way, "session.login_with_password", &[json!("root"), json!("")]);
        let reference = answer.expect("root needs no password here");
        let reference = reference.as_str().expect("a reference").to_owned();
        Self { way, reference }
    }

    /// A call that must work.
    #[track_caller]
    pub fn call(&self, method: &str, params: &[Value]) -> Value {
        self.try_call(method, params).unwrap_or_else(|error| panic!("{method}{params:?}: {error:?}"))
    }

    /// A call that must not; answers code and parameters.
    #[track_caller]
    pub fn fails(&self, method: &str, params: &[Value]) -> ApiFailure {
        match self.try_call(method, params) {
            Ok(value) => panic!("{method}{params:?} works: {value}"),
            Err(error) => error,
        }
    }

    /// A call.
    ///
    /// # Errors
    /// Code and parameters.
    #[track_caller]
    pub fn try_call(&self, method: &str, params: &[Value]) -> Result<Value, ApiFailure> {
        let mut all = vec![json!(self.reference)];
        all.extend_from_slice(params);
        ask(&self.way, method, &all)
    }

    /// A field or result that is text: a reference, a name.
    #[track_caller]
    pub fn text(&self, method: &str, params: &[Value]) -> String {
        let value = self.call(method, params);
        value.as_str().unwrap_or_else(|| panic!("{method} gives {value}")).to_owned()
    }
}

/// One call on a connection of its own.
#[track_caller]
fn ask(way: &Way, method: &str, params: &[Value]) -> Result<Value, ApiFailure> {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
    let (status, text) = match way {
        Way::Socket(socket) => post(socket, "/jsonrpc", &body),
        Way::Http(address) => {
            let stream =
                TcpStream::connect(address).unwrap_or_else(|error| panic!("cannot reach {address}: {error}"));
            stream.set_read_timeout(Some(CALL_LIMIT)).expect("a timeout can be set");
            exchange(stream, "/jsonrpc", &body)
        }
    };
    assert_eq!(status, 200, "{method}: {text}");
    let mut answer: Value =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{method}: {error}: {text}"));
    match answer.get("error") {
        None => Ok(answer["result"].take()),
        Some(error) => {
            let params = error["data"].as_array().cloned().unwrap_or_default();
            let words = std::iter::once(&error["message"]).chain(&params);
            Err(words.map(|word| word.as_str().unwrap_or_default().to_owned()).collect())
        }
    }
}

/// One POST; the status and the body of the answer.
#[track_caller]
pub fn post(socket: &Path, path: &str, body: &str) -> (u16, String) {
    let stream = UnixStream::connect(socket)
        .unwrap_or_else(|error| panic!("cannot reach {}: {error}", socket.display()));
    stream.set_read_timeout(Some(CALL_LIMIT)).expect("a timeout can be set");
    exchange(stream, path, body)
}

/// One POST on a connection. HTTP/1.0, so that the answer is not chunked.
#[track_caller]
fn exchange(mut stream: impl Read + Write, path: &str, body: &str) -> (u16, String) {
    let head = format!("POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("sent");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap_or_else(|error| panic!("no answer from {path}: {error}"));
    let text = String::from_utf8(bytes).expect("answers are UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: '{text}'"));
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status");
    (status, body.to_owned())
}

/// Where `scripts/setup` puts Python's `XenAPI`; none where that could not be fetched.
pub fn python_xenapi() -> Option<PathBuf> {
    lane("python/XenAPI.whl")
}

/// A file that `scripts/setup` fetches below `target/lanes`; none on a host where it could not.
pub fn lane(name: &str) -> Option<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    let file = target.join("lanes").join(name);
    file.exists().then_some(file)
}

/// Runs a program of Python's that has imported `XenAPI`, `sys`, `time`; `args` are its `sys.argv[1:]`.
#[track_caller]
pub fn python(wheel: &Path, program: &str, args: &[&str]) -> Finished {
    let text = format!(
        "import sys, time\nsys.path.insert(0, {:?})\nimport XenAPI\n{program}",
        wheel.display().to_string()
    );
    run(Command::new("python3").args(["-c", &text]).args(args))
}

/// Returns from the test with a skip line when Python's `XenAPI` is not there; names the variable that holds it.
#[macro_export]
macro_rules! needs_python_xenapi {
    ($wheel:ident) => {
        $crate::needs!("python3");
        let Some($wheel) = $crate::toolstack::python_xenapi() else {
            $crate::tools::skip("needs Python's XenAPI");
            return;
        };
    };
}
