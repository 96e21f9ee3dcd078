//! Pools of hosts: daemons on one machine, each with directories and ports of its own, and a real etcd.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tapio_fixtures::etcd::{Cluster, is_installed};
use tapio_store::{Etcd, EtcdOptions, Expect, Store, Txn};

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The account that hosts log in with when they join.
const PASSWORD: &str = "correct horse";

/// An error of XenAPI: the code, then its parameters.
type Failure = Vec<String>;

/// A daemon.
struct Host {
    dir: PathBuf,
    args: Vec<String>,
    https: u16,
    http: u16,
    process: Option<Child>,
}

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
    fn new(dir: &Path, more: &[String]) -> Self {
        let (https, http) = (free_port(), free_port());
        let mut args: Vec<String> = Vec::new();
        for (option, name) in [("--run-dir", "run"), ("--state-dir", "state"), ("--mount-dir", "mnt")] {
            args.extend([option.to_owned(), dir.join(name).display().to_string()]);
        }
        args.extend([
            "--config=/dev/null".to_owned(),
            format!("--listen=127.0.0.1:{https}"),
            format!("--http=127.0.0.1:{http}"),
            format!("--set=pool-address=127.0.0.1:{https}"),
            "--set=pool-lease=2".to_owned(),
        ]);
        args.extend_from_slice(more);
        fs::create_dir_all(dir.join("shm")).unwrap();
        let mut host = Self { dir: dir.to_path_buf(), args, https, http, process: None };
        host.account("root", "pool-admin");
        host.start(&[]);
        host
    }

    /// Makes an account of this host.
    fn account(&self, name: &str, role: &str) {
        let mut user = Command::new(env!("CARGO_BIN_EXE_tapiod"));
        user.args(["user", "add", name, "--role", role, "--config", "/dev/null", "--state-dir"]);
        let mut user =
            user.arg(self.dir.join("state")).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        user.stdin.take().unwrap().write_all(format!("{PASSWORD}\n").as_bytes()).unwrap();
        assert!(user.wait().unwrap().success(), "the account is made");
    }

    fn start(&mut self, env: &[(&str, &str)]) {
        let log = fs::File::options().create(true).append(true).open(self.dir.join("log")).unwrap();
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_tapiod"));
        daemon.args(&self.args).envs(env.iter().copied()).env_remove("NOTIFY_SOCKET");
        daemon.env("TAPIO_RUN_DIR", self.dir.join("run/disk")).env("TAPIO_SHM_DIR", self.dir.join("shm"));
        daemon.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.process = Some(daemon.spawn().unwrap());
        self.until("it serves", || self.call("pool.get_all", json!([])).is_ok());
    }

    fn kill(&mut self) {
        let mut process = self.process.take().expect("it runs");
        process.kill().unwrap();
        process.wait().unwrap();
    }

    fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.process.as_ref().unwrap().id()).unwrap();
        // SAFETY: the process is a child of this one that was not waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    #[track_caller]
    fn until(&self, what: &str, mut is: impl FnMut() -> bool) {
        let until = Instant::now() + LIMIT;
        while !is() {
            assert!(
                Instant::now() < until,
                "waiting until {what}; the log of {}:\n{}",
                self.dir.display(),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A call of root on the host's own socket, in a session of its own.
    fn call(&self, method: &str, params: Value) -> Result<Value, Failure> {
        let open = || {
            let stream = UnixStream::connect(self.dir.join("run/xapi"));
            let stream = stream.and_then(|stream| stream.set_read_timeout(Some(LIMIT)).map(|()| stream));
            stream.map_err(|error| vec!["NO_ANSWER".to_owned(), error.to_string()])
        };
        let session = ask(open()?, "session.login_with_password", &json!(["root", ""]))?;
        let mut all = vec![session];
        all.extend(params.as_array().into_iter().flatten().cloned());
        ask(open()?, method, &json!(all))
    }

    #[track_caller]
    fn done(&self, method: &str, params: Value) -> Value {
        match self.call(method, params) {
            Ok(value) => value,
            Err(failure) => {
                panic!("{method}: {failure:?}; the log of {}:\n{}", self.dir.display(), self.log())
            }
        }
    }

    /// A login over the network.
    fn login(&self) -> Result<Value, Failure> {
        self.login_as("root")
    }

    fn login_as(&self, user: &str) -> Result<Value, Failure> {
        self.over_network("session.login_with_password", &json!([user, PASSWORD]))
    }

    /// A call over the network.
    fn over_network(&self, method: &str, params: &Value) -> Result<Value, Failure> {
        ask(TcpStream::connect(("127.0.0.1", self.http)).unwrap(), method, params)
    }

    /// A request over the network: status, where it sends the client, and the body.
    fn request(&self, method: &str, path: &str, body: &[u8]) -> (u16, Option<String>, Vec<u8>) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.http)).unwrap();
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
        (status, place, answer[at + 4..].to_vec())
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.https)
    }

    fn count(&self, class: &str) -> usize {
        let all = self.call(&format!("{class}.get_all"), json!([]));
        all.ok().and_then(|all| all.as_array().map(Vec::len)).unwrap_or_default()
    }

    /// The references of hosts by address.
    fn host_at(&self, address: &str) -> Option<Value> {
        let hosts = self.call("host.get_all_records", json!([])).ok()?;
        let found = hosts.as_object()?.iter().find(|(_, host)| host["address"] == address)?;
        Some(json!(found.0))
    }

    fn master(&self) -> Value {
        let pools = self.call("pool.get_all_records", json!([])).unwrap_or_default();
        pools.as_object().and_then(|pools| Some(pools.values().next()?["master"].clone())).unwrap_or_default()
    }

    fn join(&self, to: &Self) -> Result<Value, Failure> {
        self.call("pool.join", json!([to.address(), "root", PASSWORD]))
    }

    fn pbd_of(&self, sr: &Value, host: &Value) -> Option<(Value, bool)> {
        let pbds = self.call("PBD.get_all_records", json!([])).ok()?;
        let found = pbds.as_object()?.iter().find(|(_, pbd)| pbd["SR"] == *sr && pbd["host"] == *host)?;
        Some((json!(found.0), found.1["currently_attached"] == json!(true)))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn is_missing() -> bool {
    let missing = !is_installed();
    if missing {
        // Past the harness's capture, so that it is always seen.
        let _ = std::io::stderr().write_all(b"\nskipped: needs etcd [tapiod]\n");
    }
    missing
}

fn first_host(cluster: &Cluster, dir: &Path) -> Host {
    let endpoints = format!("--set=etcd-endpoints={}", cluster.endpoints().join(","));
    Host::new(dir, &[endpoints, "--set=etcd-prefix=/pool".to_owned()])
}

fn store(cluster: &Cluster) -> Etcd {
    let options = EtcdOptions {
        endpoints: cluster.endpoints(),
        prefix: "/pool".to_owned(),
        writer: "test".to_owned(),
        ..EtcdOptions::default()
    };
    Etcd::open(&options).unwrap()
}

fn make_sr(host: &Host, dir: &Path) -> Value {
    fs::create_dir_all(dir).unwrap();
    let own = host.host_at(&host.address()).unwrap();
    let config = json!({ "location": dir.display().to_string() });
    host.done("SR.create", json!([own, config, "0", "files", "", "file", "user", false, {}]))
}

fn vdi(sr: &Value, name: &str) -> Value {
    json!([{ "name_label": name, "SR": sr, "virtual_size": 1_048_576, "type": "user", "sharable": false,
             "read_only": false, "other_config": {} }])
}

#[test]
fn hosts_join_share_outlive_their_coordinator_and_leave() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut a = first_host(&cluster, &scratch.path().join("a"));
    let b = Host::new(&scratch.path().join("b"), &[]);
    let c = Host::new(&scratch.path().join("c"), &[]);
    let sr = make_sr(&a, &scratch.path().join("shared"));
    // What is shared is attached by every host. (Drivers of files do not say of themselves that they can be shared.)
    let (etcd, key) =
        (store(&cluster), format!("/sr/{}", sr.as_str().unwrap().trim_start_matches("OpaqueRef:")));
    let row = etcd.get(&key).unwrap().unwrap();
    let shared = row.value.unwrap().replace("\"shared\":false", "\"shared\":true");
    etcd.commit(Txn {
        expect: vec![(key.clone(), Expect::At(row.revision))],
        puts: vec![(key, shared)],
        ..Txn::default()
    })
    .unwrap();
    a.until("a change of the store is seen", || a.done("SR.get_shared", json!([sr])) == json!(true));

    let wrong = b.call("pool.join", json!([a.address(), "root", "wrong"])).unwrap_err();
    assert_eq!(wrong[0], "JOINING_HOST_SERVICE_FAILED");
    let itself = a.join(&a).unwrap_err();
    assert_eq!(itself[0], "OPERATION_NOT_ALLOWED");
    let not_etcd = c.join(&b).unwrap_err();
    assert_eq!(not_etcd[0], "OPERATION_NOT_ALLOWED", "{not_etcd:?}");
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    c.join(&a).unwrap();
    for host in [&a, &b, &c] {
        host.until("three hosts are there", || host.count("host") == 3);
        host.until("all have the SR", || {
            [&a, &b, &c].iter().all(|other| {
                let reference = host.host_at(&other.address());
                reference.is_some_and(|reference| {
                    host.pbd_of(&sr, &reference).is_some_and(|(_, attached)| attached)
                })
            })
        });
        assert_eq!(host.count("pool"), 1);
    }
    let [host_a, host_b, host_c] = [&a, &b, &c].map(|host| a.host_at(&host.address()).unwrap());
    assert_eq!(a.master(), host_a);
    // Clients are sent to the host that decides.
    assert!(a.login().is_ok());
    assert_eq!(b.login().unwrap_err(), ["HOST_IS_SLAVE".to_owned(), a.address()]);
    // A call for another host is done there, and its effect is known when it returns.
    let (pbd, _) = a.pbd_of(&sr, &host_b).unwrap();
    a.done("PBD.unplug", json!([pbd]));
    assert!(!a.pbd_of(&sr, &host_b).unwrap().1);
    a.done("PBD.plug", json!([pbd]));
    assert!(a.pbd_of(&sr, &host_b).unwrap().1);
    let disk = a.done("VDI.create", vdi(&sr, "before"));
    b.until("a disk of another host is there", || b.call("VDI.get_uuid", json!([disk])).is_ok());

    a.kill();
    let died = Instant::now();
    b.until("another host decides", || b.master() == host_b || b.master() == host_c);
    eprintln!(
        "another host decides {:.1} s after the death of the one that did",
        died.elapsed().as_secs_f64()
    );
    let (next, last) = if b.master() == host_b { (&b, &c) } else { (&c, &b) };
    next.until("clients may log in", || next.login().is_ok());
    last.until("clients are sent there", || {
        last.login().is_err_and(|failure| failure[1..] == [next.address()])
    });
    let metrics = |reference: &Value| {
        let metrics = next.done("host.get_metrics", json!([reference]));
        next.done("host_metrics.get_live", json!([metrics])) == json!(true)
    };
    next.until("the host that died is known as such", || !metrics(&host_a));
    next.done("VDI.create", vdi(&sr, "after"));
    let gone = next.call("PBD.plug", json!([next.pbd_of(&sr, &host_a).unwrap().0])).unwrap_err();
    assert_eq!(gone[0], "CANNOT_CONTACT_HOST", "{gone:?}");

    a.start(&[]);
    a.until("it is a member again", || a.master() == next.master() && metrics(&host_a));
    assert!(a.count("VDI") >= 2, "what was made meanwhile is there");
    next.done("pool.designate_new_master", json!([host_a]));
    a.until("it decides again", || a.master() == host_a && a.login().is_ok());

    let refused = a.call("pool.eject", json!([host_a])).unwrap_err();
    assert_eq!(refused[0], "OPERATION_NOT_ALLOWED");
    let _ = a.call("pool.eject", json!([host_c]));
    a.until("it has left", || a.count("host") == 2 && a.pbd_of(&sr, &host_c).is_none());
    c.until("it is alone", || c.count("host") == 1 && c.host_at(&c.address()).as_ref() != Some(&host_c));
    assert_eq!(c.count("SR"), 0, "its database is new");
    assert_eq!(b.count("host"), 2);
}

#[test]
fn a_host_that_was_stopped_writes_nothing_when_another_decides() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut a = first_host(&cluster, &scratch.path().join("a"));
    let b = Host::new(&scratch.path().join("b"), &[]);
    let sr = make_sr(&a, &scratch.path().join("files"));
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    let [host_a, host_b] = [&a, &b].map(|host| b.host_at(&host.address()).unwrap());
    // It stops between a step of the storage and the record of it.
    a.kill();
    a.start(&[("TAPIO_STOP_AT", "vdi-create:image-made")]);
    a.until("the SR is attached", || a.pbd_of(&sr, &host_a).is_some_and(|(_, attached)| attached));
    a.until("a host decides", || [&host_a, &host_b].contains(&&a.master()));
    let failed = std::thread::scope(|scope| {
        let making = scope.spawn(|| a.call("VDI.create", vdi(&sr, "late")));
        b.until("the other decides", || b.master() == host_b);
        let metrics = b.done("host.get_metrics", json!([host_a]));
        b.until("the stopped host is dead", || {
            b.done("host_metrics.get_live", json!([metrics])) == json!(false)
        });
        a.signal(libc::SIGCONT);
        making.join().unwrap()
    });
    let failed = failed.unwrap_err();
    // The daemon starts again when it sees that it lost its place; the answer may be lost with it.
    assert!(failed[1].contains("does not hold") || failed[0] == "NO_ANSWER", "{failed:?}");
    a.until("it is a member again", || {
        a.master() == host_b && a.pbd_of(&sr, &host_a).is_some_and(|(_, on)| on)
    });
    let named = |host: &Host| host.done("VDI.get_by_name_label", json!(["late"])).as_array().map(Vec::len);
    assert_eq!((named(&b), named(&a)), (Some(0), Some(0)));
    a.kill();
    a.start(&[]);
    a.until("the SR is attached", || a.pbd_of(&sr, &host_a).is_some_and(|(_, attached)| attached));
    a.done("VDI.create", vdi(&sr, "again"));
    let images = fs::read_dir(scratch.path().join("files")).unwrap().flatten();
    let images = images.filter(|entry| entry.file_name().to_string_lossy().ends_with(".vhd")).count();
    assert_eq!(images, 1, "the image of the change that was refused is removed");
}

/// Clients log in at the host that decides; a disk may be at another.
#[test]
fn transfers_are_sent_to_the_host_that_has_the_disk() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let a = first_host(&cluster, &scratch.path().join("a"));
    a.account("reader", "read-only");
    a.account("worker", "vm-admin");
    let b = Host::new(&scratch.path().join("b"), &[]);
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    let sr = make_sr(&b, &scratch.path().join("files"));
    let disk = b.done("VDI.create", vdi(&sr, "far"));
    a.until("its disk is known", || a.call("VDI.get_uuid", json!([disk])).is_ok());
    let uuid = a.done("VDI.get_uuid", json!([disk]));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let session = text(&a.login_as("worker").unwrap());
    // What is at `place` of the other host.
    let path = |place: Option<String>| {
        let place = place.expect("a place");
        let path = place.strip_prefix(&format!("https://{}", b.address()));
        path.unwrap_or_else(|| panic!("{place} is not at {}", b.address())).to_owned()
    };

    let bytes: Vec<u8> = (0..1_048_576u32).map(|at| (at / 4096 % 251) as u8).collect();
    let task = text(&a.over_network("task.create", &json!([session, "import", ""])).unwrap());
    let import =
        format!("/import_raw_vdi/?session_id={session}&task_id={task}&format=raw&vdi={}", text(&disk));
    let (status, place, _) = a.request("PUT", &import, &bytes);
    assert_eq!(status, 302);
    let place = path(place);
    assert!(!place.contains(&session) && place.contains(&task), "{place}");
    // The name is good for nothing but a transfer, and for one.
    let lent = place.rsplit_once("session_id=").expect("a name").1.to_owned();
    assert_eq!(b.over_network("VDI.get_all", &json!([lent])).unwrap_err()[0], "SESSION_INVALID");
    assert_eq!(b.request("PUT", &place, &bytes).0, 200);
    assert_eq!(b.request("PUT", &place, &bytes).0, 401, "the name was used");
    let status = || text(&a.over_network("task.get_status", &json!([session, task])).unwrap());
    a.until("the task has ended", || status() == "success");

    // By UUID too; with a look before it, as npm's client does it.
    let export = format!("/export_raw_vdi/?session_id={session}&format=raw&vdi={}", text(&uuid));
    let (status, place, _) = a.request("GET", &export, &[]);
    assert_eq!(status, 302);
    let (status, _, sent) = b.request("GET", &path(place), &[]);
    assert_eq!((status, sent == bytes), (200, true));
    let look = format!("/import_raw_vdi/?session_id={session}&format=raw&vdi={}", text(&uuid));
    assert_eq!(a.request("PUT", &look, &[]).0, 302);
    let new = format!("/import_raw_vdi/?session_id={session}&format=raw&sr_id={}", text(&sr));
    let (status, place, _) = a.request("PUT", &new, &bytes);
    assert_eq!((status, b.request("PUT", &path(place), &bytes).0), (302, 200));
    assert_eq!(b.done("VDI.get_by_name_label", json!(["Imported VDI"])).as_array().map(Vec::len), Some(1));

    // A role is looked at before a client is sent away, and a task that cannot be done fails.
    let reader = text(&a.login_as("reader").unwrap());
    let refused = format!("/export_raw_vdi/?session_id={reader}&format=raw&vdi={}", text(&disk));
    assert_eq!(a.request("GET", &refused, &[]).0, 403);
    let mut b = b;
    b.kill();
    let task = text(&a.over_network("task.create", &json!([session, "export", ""])).unwrap());
    let (status, _, _) = a.request("GET", &format!("{export}&task_id={task}"), &[]);
    assert!(status >= 400, "{status}");
    let status = || text(&a.over_network("task.get_status", &json!([session, task])).unwrap());
    a.until("the task has failed", || status() == "failure");
}
