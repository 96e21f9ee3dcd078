use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Instant;

use hyper::Method;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use tapio_model::{Answer, ApiError, Begun, Large, Shape, Transfer, Value};
use tokio::runtime::Runtime;

use super::*;
use crate::backend::BoxFuture;

/// What a test's client waits at most.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A toolstack with a few messages.
#[derive(Default)]
struct Double {
    /// Calls of `VM.start` that were begun, and whether they may end.
    started: Mutex<usize>,
    released: Mutex<bool>,
    changed: Condvar,
    /// Listeners that wait.
    waiting: Arc<AtomicUsize>,
    /// Parts of large answers that were made.
    made: Arc<AtomicUsize>,
}

impl Double {
    /// A list of `count` texts of `len` bytes.
    fn parts(&self, count: usize, len: usize) -> Answer {
        let made = Arc::clone(&self.made);
        let parts = (0..count).map(move |_| {
            made.fetch_add(1, Ordering::SeqCst);
            Ok((String::new(), Value::string("x".repeat(len))))
        });
        let (held_len, part_len) = (8 * count, len);
        Answer::Large(Large {
            shape: Shape::List,
            parts: Box::new(parts),
            held_len,
            part_len,
            len: len * count,
        })
    }

    fn release(&self) {
        *self.released.lock().expect("no panic") = true;
        self.changed.notify_all();
    }

    fn started(&self) -> usize {
        *self.started.lock().expect("no panic")
    }
}

struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ApiBackend for Double {
    fn call(&self, peer: &Peer, method: &str, params: Vec<Value>) -> Result<Answer, ApiError> {
        let value = match method {
            "echo" => Ok(Value::Set(params)),
            "who" => Ok(Value::strings([peer.address.clone(), peer.superuser.to_string()])),
            "large" => Ok(Value::string("x".repeat(32 << 20))),
            "session.login_with_password" => Err(ApiError::bare("SESSION_AUTHENTICATION_FAILED")),
            "slow" => {
                *self.started.lock().expect("no panic") += 1;
                let mut released = self.released.lock().expect("no panic");
                while !*released {
                    released = self.changed.wait(released).expect("no panic");
                }
                Ok(Value::Void)
            }
            "defect" => panic!("on purpose"),
            "some parts" => return Ok(self.parts(100, 1 << 10)),
            "parts" => return Ok(self.parts(1000, 16 << 10)),
            _ => Err(ApiError::new("MESSAGE_METHOD_UNKNOWN", [method])),
        };
        value.map(Answer::Whole)
    }

    fn account_of(&self, session: &str) -> Option<String> {
        Some(session.to_owned())
    }

    fn transfer(
        &self,
        _: &Transfer,
        _: OwnedFd,
        _: &mut dyn FnMut(Begun),
        _: &dyn Fn() -> bool,
    ) -> Result<(), ApiError> {
        Err(ApiError::bare("VDI_IN_USE"))
    }

    /// Sessions "good" and "gone" may, and "gone" has ended when its ticket is used; a console says its name.
    fn console_of(&self, session: &str, name: &str) -> Result<String, ApiError> {
        match session {
            "good" | "gone" => Ok(format!("OpaqueRef:{name}")),
            "reader" => Err(ApiError::new("RBAC_PERMISSION_DENIED", ["http/connect_console"])),
            _ => Err(ApiError::new("SESSION_INVALID", [session])),
        }
    }

    fn console(&self, session: &str, name: &str) -> Result<OwnedFd, ApiError> {
        if session != "good" {
            return Err(ApiError::new("SESSION_INVALID", [session]));
        }
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        theirs.write_all(name.as_bytes()).expect("said");
        Ok(ours.into())
    }

    fn wait(
        &self,
        _: &Peer,
        method: &str,
        _: &mut Vec<Value>,
    ) -> Option<BoxFuture<Result<Answer, ApiError>>> {
        (method == "event.from").then(|| {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let counted = Counted(Arc::clone(&self.waiting));
            let wait: BoxFuture<_> = Box::pin(async move {
                let _counted = counted;
                std::future::pending().await
            });
            wait
        })
    }
}

pub(super) struct Fixture {
    runtime: Runtime,
    server: Option<Server>,
    double: Arc<Double>,
    address: SocketAddr,
}

pub(super) fn fixture(options: ServerOptions) -> Fixture {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .enable_all()
        .build()
        .expect("a runtime");
    let double = Arc::new(Double::default());
    let (server, address) = runtime.block_on(async {
        let backend: Arc<dyn ApiBackend> = double.clone();
        let server = Server::new(backend, options);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
        let address = listener.local_addr().expect("an address");
        server.listen_http(listener);
        (server, address)
    });
    Fixture { runtime, server: Some(server), double, address }
}

pub(super) fn limits(change: impl FnOnce(&mut ServerLimits)) -> ServerOptions {
    let mut options = ServerOptions::default();
    options.limits.refusal_delay = Duration::ZERO;
    change(&mut options.limits);
    options
}

impl Fixture {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("connected");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        stream.set_write_timeout(Some(TIMEOUT)).expect("a timeout");
        stream
    }

    /// One request on a connection of its own: status and the whole answer.
    pub(super) fn ask(&self, request: &[u8]) -> (u16, String) {
        let mut stream = self.connect();
        // The server may close before it has read everything.
        let _ = stream.write_all(request);
        answer(&mut stream)
    }

    /// So many calls wait for one that is at work, of the one that may wait at most.
    fn until_waiting_calls(&self, count: usize) {
        let lanes = &self.server.as_ref().expect("a server").shared.http.calls.lanes;
        self.until("calls that wait", |_| 1 - lanes.free_to_wait() == count);
    }

    fn budget(&self) -> &Budget {
        &self.server.as_ref().expect("a server").shared.http.calls.budget
    }

    /// What answers held has come back.
    fn until_all_is_back(&self) {
        self.until("all came back", |_| self.budget().held() == 0);
    }

    fn until(&self, what: &str, mut holds: impl FnMut(&Double) -> bool) {
        let until = Instant::now() + TIMEOUT;
        while !holds(&self.double) {
            assert!(Instant::now() < until, "never: {what}");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.double.release();
    }
}

/// Reads one answer with a length.
fn answer(stream: &mut TcpStream) -> (u16, String) {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let lower = head.to_ascii_lowercase();
            let len =
                lower.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()).unwrap_or("0");
            let status: u16 = head.split(' ').nth(1).expect("a status").parse().expect("a number");
            if status != 100 && body.len() >= len.parse::<usize>().expect("a number") {
                return (status, text.into_owned());
            }
            if status == 100 {
                bytes = body.as_bytes().to_vec();
                continue;
            }
        }
        match stream.read(&mut buffer) {
            Ok(0) => return (0, String::from_utf8_lossy(&bytes).into_owned()),
            Ok(len) => bytes.extend_from_slice(&buffer[..len]),
            Err(error) => panic!("{error} after {}", String::from_utf8_lossy(&bytes)),
        }
    }
}

fn post(path: &str, body: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn xml(method: &str) -> String {
    crate::xmlrpc::encode_call(method, &[Value::string("a")])
}

fn json(method: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":["a"]}}"#)
}

#[test]
fn both_languages_on_every_path_that_clients_use() {
    let fixture = fixture(limits(|_| {}));
    for path in ["/", "/RPC2", "/xmlrpc", "/whatever?a=b"] {
        let (status, text) = fixture.ask(&post(path, &xml("echo")));
        assert_eq!(status, 200, "{text}");
        assert!(text.contains("content-type: text/xml\r\n"), "{text}");
        assert!(text.contains("Success") && text.contains("<value>a</value>"), "{text}");
    }
    for path in ["/jsonrpc", "/json", "/jsonrpc?x=y"] {
        let (status, text) = fixture.ask(&post(path, &json("echo")));
        assert_eq!(status, 200, "{text}");
        assert!(text.contains("content-type: application/json\r\n"), "{text}");
        assert!(text.ends_with(r#"{"jsonrpc":"2.0","result":["a"],"id":1}"#), "{text}");
    }
    let (_, text) = fixture.ask(&post("/", &xml("nonsense")));
    assert!(text.contains("MESSAGE_METHOD_UNKNOWN"), "{text}");
    let batch = format!(r#"[{},{{"method":"x"}},7,{{"jsonrpc":"2.0","method":"echo"}}]"#, json("echo"));
    let (_, text) = fixture.ask(&post("/jsonrpc", &batch));
    let expected = r#"[{"jsonrpc":"2.0","result":["a"],"id":1},{"result":null,"error":["MESSAGE_METHOD_UNKNOWN","x"],"id":null},{"jsonrpc":"2.0","error":{"code":-32600"#;
    assert!(text.contains(expected), "{text}");
    let (status, _) = fixture.ask(&post("/jsonrpc", r#"{"jsonrpc":"2.0","method":"echo"}"#));
    assert_eq!(status, 204);
    let (status, text) = fixture.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(status == 200 && text.contains("XenAPI"), "{text}");
    assert_eq!(fixture.ask(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n").0, 404);
    assert_eq!(fixture.ask(b"DELETE / HTTP/1.1\r\nHost: x\r\n\r\n").0, 405);
}

#[test]
fn connections_stay_open_and_bodies_wait_to_be_asked_for() {
    let fixture = fixture(limits(|_| {}));
    let mut stream = fixture.connect();
    for _ in 0..3 {
        stream.write_all(&post("/", &xml("echo"))).expect("sent");
        assert_eq!(answer(&mut stream).0, 200);
    }
    let body = xml("echo");
    let head = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("sent");
    let mut go = [0; 25];
    stream.read_exact(&mut go).expect("told to go on");
    assert_eq!(&go, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).expect("sent");
    assert_eq!(answer(&mut stream).0, 200);
    let old = format!("POST / HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let (status, text) = fixture.ask(old.as_bytes());
    assert!(status == 200 && text.starts_with("HTTP/1.0"), "{text}");
}

#[test]
fn what_is_no_call_is_a_fault_and_the_connection_goes_on() {
    let fixture = fixture(limits(|_| {}));
    let mut stream = fixture.connect();
    for (path, body, expected, says) in [
        ("/", "<nonsense>", 200, "<fault>"),
        ("/", "<nonsense>", 200, "This is no XML-RPC call: byte"),
        ("/jsonrpc", "{", 200, r#"{"jsonrpc":"2.0","error":{"code":-32700,"#),
        ("/jsonrpc", "{", 200, r#""id":null}"#),
        ("/json", "7", 200, r#"{"jsonrpc":"2.0","error":{"code":-32600,"#),
        ("/json", r#"{"jsonrpc":"2.0","id":null}"#, 200, r#"{"jsonrpc":"2.0","error":{"code":-32600,"#),
        ("/json", "[]", 200, r#""id":null}"#),
    ] {
        stream.write_all(&post(path, body)).expect("sent");
        let (status, text) = answer(&mut stream);
        assert_eq!(status, expected, "{text}");
        assert!(text.contains(says), "{text}");
    }
    stream.write_all(&post("/", &xml("defect"))).expect("sent");
    assert_eq!(answer(&mut stream).0, 503);
    stream.write_all(&post("/", &xml("echo"))).expect("sent");
    assert_eq!(answer(&mut stream).0, 200);
    assert_eq!(fixture.ask(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n").0, 400);
}

#[test]
fn sizes_are_bounded() {
    let fixture = fixture(limits(|limits| {
        limits.body_len_max = 100_000;
        limits.bodies_len_max = 192 << 10;
        limits.head_len_max = 8 << 10;
    }));
    let head = |len: &str| format!("POST / HTTP/1.1\r\nHost: x\r\n{len}\r\n\r\n");
    let (status, text) = fixture.ask(head("Content-Length: 100001").as_bytes());
    assert!(status == 413 && text.contains("100000 bytes"), "{text}");
    let mut chunked = head("Transfer-Encoding: chunked").into_bytes();
    chunked.extend_from_slice(&[b"8000\r\n", &vec![b'x'; 0x8000][..], b"\r\n"].concat().repeat(4));
    assert_eq!(fixture.ask(&chunked).0, 413);
    let long = format!("GET / HTTP/1.1\r\nHost: x\r\nCookie: {}\r\n\r\n", "c".repeat(20_000));
    assert_eq!(fixture.ask(long.as_bytes()).0, 431);
    // Three bodies that are not complete hold the memory that a fourth one needs.
    // One of them may be refused for a small one that was quicker, so there is always another.
    let mut held = Vec::new();
    let until = Instant::now() + TIMEOUT;
    loop {
        let mut stream = fixture.connect();
        stream.write_all(head("Content-Length: 100000").as_bytes()).expect("sent");
        stream.write_all(b"<").expect("sent");
        held.push(stream);
        let (status, _) = fixture.ask(&post("/", &xml("echo")));
        if status == 503 {
            break;
        }
        assert!(status == 200 && Instant::now() < until, "{status}");
    }
    drop(held);
    let until = Instant::now() + TIMEOUT;
    while fixture.ask(&post("/", &xml("echo"))).0 != 200 {
        assert!(Instant::now() < until, "the memory came not back");
    }
}

#[test]
fn an_error_that_comes_before_the_upload_was_read_arrives() {
    let fixture = fixture(limits(|limits| {
        limits.body_len_max = 100_000;
        limits.linger_time = TIMEOUT;
    }));
    // More than the buffers of both ends hold, so that the client is still sending when it is refused.
    let body = vec![b'x'; 32 << 20];
    for (head, expected) in [("POST /", 413), ("PUT /nowhere", 404), ("DELETE /", 405)] {
        let mut stream = fixture.connect();
        let head = format!("{head} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).expect("sent");
        stream.write_all(&body).expect("all of it is taken");
        let (status, text) = answer(&mut stream);
        assert_eq!(status, expected, "{text}");
        assert_eq!(stream.read(&mut [0; 64]).expect("the end"), 0);
    }
}

#[test]
fn a_client_that_never_ends_its_upload_is_left() {
    let fixture = fixture(limits(|limits| limits.linger_time = Duration::from_millis(200)));
    let mut stream = fixture.connect();
    let head = "PUT /import HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n";
    stream.write_all(head.as_bytes()).expect("sent");
    let started = Instant::now();
    while stream.write_all(&[b'x'; 65_536]).is_ok() {
        assert!(started.elapsed() < TIMEOUT, "it may send for ever");
    }
}

/// How long a head may take where that is what a test sees end; and the least time in which a client on a busy host
/// sends something after it has connected.
const HEAD_TIME: Duration = Duration::from_secs(2);

#[test]
fn a_head_or_a_body_that_comes_slowly_is_cut_off() {
    let heads = fixture(limits(|limits| limits.head_time = Duration::from_millis(200)));
    let started = Instant::now();
    // Nothing at all, and a head that comes by the byte.
    let mut silent = heads.connect();
    assert_eq!(silent.read(&mut [0; 64]).expect("the end"), 0);
    let mut dripping = heads.connect();
    for byte in b"POST / HTTP/1.1\r\nHost: x\r\n".iter().cycle() {
        if dripping.write_all(&[*byte]).is_err() {
            break;
        }
        assert!(started.elapsed() < TIMEOUT, "it may drip for ever");
        thread::sleep(Duration::from_millis(20));
    }
    let bodies = fixture(limits(|limits| limits.body_time = Duration::from_millis(200)));
    let (status, text) = bodies.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n<");
    assert!(status == 408 && text.contains("not complete"), "{text}");
}

#[test]
fn between_two_requests_there_is_more_time_but_it_ends() {
    // A second head has its own time.
    let lenient = fixture(limits(|limits| {
        limits.head_time = HEAD_TIME;
        limits.idle_time = TIMEOUT;
    }));
    let mut idle = lenient.connect();
    idle.write_all(&post("/", &xml("echo"))).expect("sent");
    assert_eq!(answer(&mut idle).0, 200);
    // The time of a head has passed when one that began later is cut off.
    assert_eq!(lenient.connect().read(&mut [0; 64]).expect("the end"), 0);
    idle.write_all(&post("/", &xml("echo"))).expect("sent");
    assert_eq!(answer(&mut idle).0, 200);
    // But not for ever.
    let hasty = fixture(limits(|limits| limits.idle_time = Duration::from_millis(200)));
    let mut idle = hasty.connect();
    idle.write_all(&post("/", &xml("echo"))).expect("sent");
    assert_eq!(answer(&mut idle).0, 200);
    assert_eq!(idle.read(&mut [0; 64]).expect("the end"), 0);
}

#[test]
fn a_client_that_does_not_read_its_answer_loses_it() {
    let fixture = fixture(limits(|limits| {
        limits.write_time = Duration::from_millis(300);
        limits.connections_per_peer_max = 1;
    }));
    let mut deaf = fixture.connect();
    deaf.write_all(&post("/", &xml("large"))).expect("sent");
    // It has the one place until it is closed.
    let until = Instant::now() + TIMEOUT;
    while fixture.ask(&post("/", &xml("echo"))).0 != 200 {
        assert!(Instant::now() < until, "it keeps its place");
        thread::sleep(Duration::from_millis(20));
    }
    let mut rest = Vec::new();
    let read = deaf.read_to_end(&mut rest);
    assert!(read.is_err() || rest.len() < 32 << 20, "{} bytes came", rest.len());
}

#[test]
fn connections_are_bounded_for_each_peer() {
    let fixture = fixture(limits(|limits| limits.connections_per_peer_max = 3));
    let mut held: Vec<TcpStream> = (0..3).map(|_| fixture.connect()).collect();
    for stream in &mut held {
        stream.write_all(&post("/", &xml("echo"))).expect("sent");
        assert_eq!(answer(stream).0, 200);
    }
    let (status, text) = fixture.ask(b"");
    assert!(status == 429 && text.contains("Too many connections"), "{text}");
    drop(held);
    let until = Instant::now() + TIMEOUT;
    while fixture.ask(&post("/", &xml("echo"))).0 != 200 {
        assert!(Instant::now() < until, "places came not back");
    }
}

#[test]
fn calls_at_work_are_bounded_and_a_client_that_leaves_loses_nothing() {
    let fixture = fixture(limits(|limits| limits.quick = LaneLimits { running_max: 2, waiting_max: 1 }));
    let mut held: Vec<TcpStream> = (0..2).map(|_| fixture.connect()).collect();
    for stream in &mut held {
        stream.write_all(&post("/", &xml("slow"))).expect("sent");
    }
    fixture.until("two calls at work", |double| double.started() == 2);
    // One that waits, and leaves: it is never begun.
    let mut third = fixture.connect();
    third.write_all(&post("/", &xml("slow"))).expect("sent");
    fixture.until_waiting_calls(1);
    let said = fixture.ask(&post("/jsonrpc", &json("echo")));
    assert!(
        said.0 == 503 && said.1.contains("too many calls") && said.1.contains("retry-after: 1"),
        "{said:?}"
    );
    // Passwords have a lane of their own.
    assert!(
        fixture
            .ask(&post("/", &xml("session.login_with_password")))
            .1
            .contains("SESSION_AUTHENTICATION_FAILED")
    );
    drop(third);
    // Its place in the queue is free, and another one waits there.
    fixture.until_waiting_calls(0);
    let mut fourth = fixture.connect();
    fourth.write_all(&post("/jsonrpc", &json("echo"))).expect("sent");
    fixture.until_waiting_calls(1);
    drop(held.pop());
    fixture.double.release();
    assert_eq!(answer(&mut held[0]).0, 200);
    assert_eq!(answer(&mut fourth).0, 200);
    let until = Instant::now() + TIMEOUT;
    while fixture.ask(&post("/", &xml("echo"))).0 != 200 {
        assert!(Instant::now() < until, "places came not back");
    }
    assert_eq!(fixture.double.started(), 2);
}

#[test]
fn a_wrong_password_is_told_late() {
    let mut options = limits(|_| {});
    options.limits.refusal_delay = Duration::from_millis(300);
    let fixture = fixture(options);
    let started = Instant::now();
    let (_, text) = fixture.ask(&post("/", &xml("session.login_with_password")));
    assert!(text.contains("SESSION_AUTHENTICATION_FAILED"), "{text}");
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[test]
fn listeners_hold_no_thread_and_end_with_their_client() {
    let fixture = fixture(limits(|limits| limits.quick = LaneLimits { running_max: 1, waiting_max: 1 }));
    let mut listeners: Vec<TcpStream> = (0..50).map(|_| fixture.connect()).collect();
    for stream in &mut listeners {
        stream.write_all(&post("/", &xml("event.from"))).expect("sent");
    }
    fixture.until("fifty listeners", |double| double.waiting.load(Ordering::SeqCst) == 50);
    assert_eq!(fixture.ask(&post("/", &xml("echo"))).0, 200);
    drop(listeners);
    fixture.until("none", |double| double.waiting.load(Ordering::SeqCst) == 0);
}

#[test]
fn the_end_waits_for_calls_and_ends_waits() {
    let mut fixture = fixture(limits(|_| {}));
    let mut call = fixture.connect();
    call.write_all(&post("/", &xml("slow"))).expect("sent");
    let mut listener = fixture.connect();
    listener.write_all(&post("/", &xml("event.from"))).expect("sent");
    let mut idle = fixture.connect();
    idle.write_all(&post("/", &xml("echo"))).expect("sent");
    assert_eq!(answer(&mut idle).0, 200);
    fixture
        .until("both at work", |double| double.started() == 1 && double.waiting.load(Ordering::SeqCst) == 1);
    let server = fixture.server.take().expect("not closed yet");
    let closing = fixture.runtime.spawn(server.close(TIMEOUT));
    assert_eq!(answer(&mut listener).0, 503);
    assert_eq!(idle.read(&mut [0; 64]).expect("the end"), 0);
    let until = Instant::now() + TIMEOUT;
    while TcpStream::connect(fixture.address).is_ok() {
        assert!(Instant::now() < until, "it still listens");
    }
    assert!(!closing.is_finished(), "a call is in progress");
    fixture.double.release();
    assert_eq!(answer(&mut call).0, 200);
    assert!(fixture.runtime.block_on(closing).expect("no panic"), "everything ended");
}

struct Named(&'static str);

impl RouteHandler for Named {
    fn handle(&self, peer: Peer, request: Request<Incoming>) -> BoxFuture<Reply> {
        let text = format!("{} {} {}", self.0, request.uri().path(), peer.superuser);
        Box::pin(async move { reply(StatusCode::OK, "text/plain", text) })
    }
}

#[test]
fn the_longest_prefix_takes_the_path() {
    let route = |method: Method, prefix: &str, name| Route {
        method,
        prefix: prefix.into(),
        handler: Arc::new(Named(name)),
    };
    let mut options = limits(|_| {});
    options.routes = vec![
        route(Method::GET, "/import", "short"),
        route(Method::GET, "/import_raw_vdi", "long"),
        route(Method::POST, "/services", "services"),
        route(Method::POST, "/j", "shorter than json"),
    ];
    let fixture = fixture(options);
    let get = |path: &str| fixture.ask(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).1;
    assert!(get("/import/?a").ends_with("short /import/ false"));
    assert!(get("/import_raw_vdi/").ends_with("long /import_raw_vdi/ false"));
    assert!(fixture.ask(&post("/services/SM", "x")).1.ends_with("services /services/SM false"));
    assert!(fixture.ask(&post("/jsonrpc", &json("echo"))).1.contains("result"));
    assert!(fixture.ask(&post("/jam", "x")).1.ends_with("shorter than json /jam false"));
}

#[test]
fn pages_of_other_origins_call_only_where_that_is_allowed() {
    let ask = |fixture: &Fixture, method: &str, origin: &str| {
        let body = if method == "POST" { xml("echo") } else { String::new() };
        let text = format!(
            "{method} / HTTP/1.1\r\nHost: x\r\nOrigin: {origin}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        fixture.ask(text.as_bytes())
    };
    let closed = fixture(limits(|_| {}));
    assert_eq!(ask(&closed, "OPTIONS", "https://a").0, 404);
    assert!(!ask(&closed, "POST", "https://a").1.contains("access-control"));
    let mut options = limits(|_| {});
    options.origins = vec!["https://a".into()];
    let open = fixture(options);
    let (status, text) = ask(&open, "OPTIONS", "https://a");
    assert!(status == 204 && text.contains("access-control-allow-origin: https://a"), "{text}");
    assert!(ask(&open, "POST", "https://a").1.contains("access-control-allow-origin: https://a"));
    assert_eq!(ask(&open, "OPTIONS", "https://b").0, 404);
    assert!(!ask(&open, "POST", "https://b").1.contains("access-control"));
}

#[test]
fn a_unix_socket_tells_the_user_of_the_caller() {
    let fixture = fixture(limits(|_| {}));
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("xapi");
    fixture.runtime.block_on(async {
        let listener = UnixListener::bind(&path).expect("bound");
        fixture.server.as_ref().expect("a server").listen_unix(listener);
    });
    let mut stream = std::os::unix::net::UnixStream::connect(&path).expect("connected");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    let body = json("who");
    let text = format!(
        "POST /jsonrpc HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(text.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let own = rustix::process::geteuid();
    assert!(text.contains(&format!(r#"["unix:uid={own}","true"]"#)), "{text}");
    assert!(fixture.ask(&post("/jsonrpc", &json("who"))).1.contains(r#"["127.0.0.1","false"]"#));
}

/// A call whose answer is made part by part, by an account.
fn parts_for(account: &str) -> Vec<u8> {
    post("/", &crate::xmlrpc::encode_call("parts", &[Value::string(account)]))
}

/// The body of a chunked answer, taken to its end.
fn chunked(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer");
    let text = String::from_utf8(bytes).expect("text");
    let (head, mut rest) = text.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains("transfer-encoding: chunked"), "{head}");
    let mut body = String::new();
    loop {
        let (len, after) = rest.split_once("\r\n").expect("a chunk");
        let len = usize::from_str_radix(len, 16).expect("a length");
        if len == 0 {
            return body;
        }
        body.push_str(&after[..len]);
        rest = &after[len + 2..];
    }
}

#[test]
fn a_large_answer_is_made_as_its_client_takes_it() {
    let fixture = fixture(limits(|_| {}));
    let body = crate::xmlrpc::encode_call("parts", &[Value::string("a")]);
    let head =
        format!("POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    let asked = || {
        let mut stream = fixture.connect();
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("sent");
        stream
    };
    let mut stream = asked();
    let mut first = [0; 1];
    stream.peek(&mut first).expect("it begins");
    // Of 16 MiB those parts are made that the buffers of both ends take: while another client takes all of its answer,
    // this one's stands.
    let made = || fixture.double.made.load(Ordering::SeqCst);
    let whole = chunked(&mut asked());
    let made_for_it = made() - 1000;
    assert!(made_for_it < 1000, "{made_for_it} parts were made for a client that takes nothing");
    let expected = Value::Set(vec![Value::string("x".repeat(16 << 10)); 1000]);
    let expected = crate::xmlrpc::encode_success(&expected);
    assert!(whole == expected && chunked(&mut stream) == expected, "the answer is another one");
    assert_eq!(made(), 2000);
    fixture.until_all_is_back();
}

#[test]
fn clients_that_take_nothing_hold_a_share_and_others_are_answered() {
    let fixture = fixture(limits(|limits| {
        limits.answers_len_per_client_max = 2 << 20;
        limits.answers_len_max = 6 << 20;
        limits.connections_per_peer_max = 2000;
    }));
    // Each holds 200 KiB: an account has room for ten of them, and the address for ten in all.
    let mut deaf: Vec<TcpStream> = Vec::new();
    let refused = (0..40).find(|_| {
        let mut stream = fixture.connect();
        stream.write_all(&parts_for("a")).expect("sent");
        let mut first = [0; 12];
        stream.read_exact(&mut first).expect("it begins");
        deaf.push(stream);
        &first == b"HTTP/1.1 503"
    });
    assert_eq!(refused, Some(10), "the eleventh finds no room");
    let (status, text) = fixture.ask(&parts_for("b"));
    assert!(
        status == 503 && text.contains("account or address") && text.contains("retry-after: 1"),
        "{text}"
    );
    // What is small is answered all the same, and so is another address.
    assert_eq!(fixture.ask(&post("/", &xml("echo"))).0, 200);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("xapi");
    fixture.runtime.block_on(async {
        let listener = UnixListener::bind(&path).expect("bound");
        fixture.server.as_ref().expect("a server").listen_unix(listener);
    });
    let mut other = std::os::unix::net::UnixStream::connect(&path).expect("connected");
    let refused = String::from_utf8(parts_for("a")).expect("text");
    other.write_all(refused.as_bytes()).expect("sent");
    let mut first = [0; 12];
    other.read_exact(&mut first).expect("an answer");
    assert_eq!(&first, b"HTTP/1.1 503", "the account holds its share, wherever it calls from");
    let mut other = std::os::unix::net::UnixStream::connect(&path).expect("connected");
    other.write_all(&parts_for("c")).expect("sent");
    other.read_exact(&mut first).expect("an answer");
    assert_eq!(&first, b"HTTP/1.1 200");
    drop(other);
    drop(deaf);
    fixture.until_all_is_back();
}

#[test]
fn whole_answers_are_counted_until_they_are_sent() {
    let fixture = fixture(limits(|limits| limits.answers_len_per_client_max = 40 << 20));
    let mut deaf = fixture.connect();
    deaf.write_all(&post("/", &xml("large"))).expect("sent");
    deaf.read_exact(&mut [0; 12]).expect("it begins");
    assert!(fixture.budget().held() >= 32 << 20, "{}", fixture.budget().held());
    assert_eq!(fixture.ask(&post("/", &xml("large"))).0, 503);
    let batch = format!("[{},{}]", json("large"), json("echo"));
    let (_, text) = fixture.ask(&post("/jsonrpc", &batch));
    assert!(
        text.contains("not done: answers to this account") && text.contains(r#""result":["a"]"#),
        "{text}"
    );
    drop(deaf);
    fixture.until_all_is_back();
}

#[test]
fn a_batch_has_large_answers_at_once() {
    let fixture = fixture(limits(|_| {}));
    let batch = format!("[{},{}]", json("some parts"), json("echo"));
    let (status, text) = fixture.ask(&post("/jsonrpc", &batch));
    assert_eq!(status, 200);
    assert!(text.len() > 100 << 10 && text.ends_with(r#""result":["a"],"id":1}]"#), "{}", text.len());
    fixture.until_all_is_back();
}
