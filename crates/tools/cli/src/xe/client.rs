//! The connection: JSON-RPC 2.0 over HTTP on a UNIX socket, or over TLS.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use super::arguments::Connection;
use super::error::{Failure, Result};
use super::{prompt, tls};

/// Classes that references in errors may be of; the likely ones first.
const CLASSES: [&str; 10] = ["VDI", "VM", "VBD", "SR", "PBD", "host", "task", "pool", "network", "VIF"];

/// Sockets of this host, ours first.
const SOCKETS: [&str; 3] = ["/run/tapio/xapi", "/var/xapi/xapi", "/var/lib/xcp/xapi"];

/// How long making a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);

/// Longest answer, in bytes: the records of some hundred thousand objects.
const ANSWER_LEN_MAX: usize = 1 << 30;

#[derive(Clone, Debug)]
enum Target {
    Unix(PathBuf),
    Tcp { host: String, port: u16, tls: Option<tls::Trust> },
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port, .. } => write!(f, "{host}:{port}"),
        }
    }
}

/// While it is there, a daemon that ends in the middle of a request is an error to be told, and not the end of this
/// program: a tool whose reader has gone ends quietly, which is for its output.
struct Outlives(libc::sighandler_t);

impl Outlives {
    fn begin() -> Self {
        // SAFETY: the call sets how this process takes one signal, and reads no memory of ours.
        Self(unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) })
    }
}

impl Drop for Outlives {
    fn drop(&mut self) {
        // SAFETY: as above; what it was comes from the same call.
        unsafe { libc::signal(libc::SIGPIPE, self.0) };
    }
}

/// A login.
pub struct Client {
    runtime: tokio::runtime::Runtime,
    target: Target,
    sender: RefCell<Option<SendRequest<Full<Bytes>>>>,
    number: Cell<u64>,
    session: String,
    is_quiet: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("target", &self.target).finish_non_exhaustive()
    }
}

/// The same connection to another host: `ADDRESS`, or `ADDRESS:PORT` of its HTTPS.
fn send_on(connection: &mut Connection, address: &str) {
    let (host, port) = split(address);
    connection.server = Some(host.to_owned());
    if !connection.plain {
        connection.port = port;
    }
}

impl Client {
    /// Connects and logs in; at the host that decides for the pool, where the host that was named does not.
    pub fn connect(connection: &Connection) -> Result<Self> {
        let mut connection = connection.clone();
        let mut is_sent_on = false;
        loop {
            match Self::log_in(&mut connection) {
                // Once: a pool whose hosts send a client around has none that decides.
                Err(Failure::Api(code, params)) if code == "HOST_IS_SLAVE" && !is_sent_on => {
                    is_sent_on = true;
                    send_on(&mut connection, params.first().map_or("", String::as_str));
                }
                other => return other,
            }
        }
    }

    fn log_in(connection: &mut Connection) -> Result<Self> {
        let target = target(connection)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::other(format!("starting the client: {error}")))?;
        let (number, sender) = (Cell::new(0), RefCell::new(None));
        let is_quiet = connection.quiet;
        let mut client = Self { runtime, target, sender, number, session: String::new(), is_quiet };
        let (user, password) = client.account(connection)?;
        let params = json!([user, password, "1.0", "xe"]);
        let answer = client.wait(client.request("session.login_with_password", params));
        if matches!(&answer, Err(Failure::Api(code, _)) if code == "HOST_IS_SLAVE") {
            // They are not asked for twice.
            (connection.user, connection.password) = (Some(user), Some(password));
        }
        let session = answer.map_err(|error| client.explained(error, connection))?;
        client.session = session.as_str().unwrap_or_default().to_owned();
        Ok(client)
    }

    /// A session that is logged in already.
    pub fn with_session(connection: &Connection, session: String) -> Result<Self> {
        let target = target(connection)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::other(format!("starting the client: {error}")))?;
        let (sender, number) = (RefCell::new(None), Cell::new(0));
        Ok(Self { runtime, target, sender, number, session, is_quiet: connection.quiet })
    }

    /// Whether nothing is asked on the terminal and no word is written about certificates.
    pub fn is_quiet(&self) -> bool {
        self.is_quiet
    }

    /// The session, for a path that another client asks for.
    pub fn session(&self) -> &str {
        &self.session
    }

    /// The same session on connections of its own, for another thread. The session ends with the first.
    pub fn again(&self) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::other(format!("starting the client: {error}")))?;
        let (number, sender) = (Cell::new(0), RefCell::new(None));
        let (target, session) = (self.target.clone(), self.session.clone());
        Ok(Self { runtime, target, sender, number, session, is_quiet: self.is_quiet })
    }

    /// Another session at the same server.
    pub fn in_session(&self, session: String) -> Result<Self> {
        Ok(Self { session, ..self.again()? })
    }

    /// A login that failed is explained where the cause is likely known.
    fn explained(&self, error: Failure, connection: &Connection) -> Failure {
        match error {
            Failure::Api(code, _) if code == "SESSION_AUTHENTICATION_FAILED" && connection.user.is_none() => {
                Failure::other(format!(
                    "{} wants a login; give -u USER with -pwf FILE or XE_PASSWORD",
                    self.target
                ))
            }
            other => other,
        }
    }

    fn account(&self, connection: &Connection) -> Result<(String, String)> {
        let mut user = connection.user.clone().unwrap_or_else(|| "root".into());
        if let Some(password) = &connection.password {
            return Ok((user, password.clone()));
        }
        if let Some(path) = &connection.password_file {
            let text = std::fs::read_to_string(path).map_err(|error| {
                Failure::other(format!("reading the password from {}: {error}", path.display()))
            })?;
            let lines: Vec<&str> = text.lines().collect();
            return match lines.as_slice() {
                [account, password, ..] if connection.user.is_none() => {
                    user = (*account).to_owned();
                    Ok((user, (*password).to_owned()))
                }
                [password, ..] => Ok((user, (*password).to_owned())),
                [] => Err(Failure::other(format!("{} is empty; a password belongs there", path.display()))),
            };
        }
        match self.target {
            // Root on the socket needs none.
            Target::Unix(_) if connection.user.is_none() => Ok((user, String::new())),
            _ if connection.quiet => Err(Failure::other("no password")),
            _ => {
                let asked = format!("Password of {user} at {}: ", self.target);
                let password = prompt::hidden(&asked).ok_or_else(|| {
                    Failure::other("no password: give -pwf FILE or XE_PASSWORD, or run it on a terminal")
                })?;
                Ok((user, password))
            }
        }
    }

    /// The socket, of a toolstack on this host.
    pub fn socket(&self) -> Option<&Path> {
        match &self.target {
            Target::Unix(path) => Some(path),
            Target::Tcp { .. } => None,
        }
    }

    /// Calls a message with the session as its first parameter.
    pub fn call(&self, method: &str, params: &[Value]) -> Result<Value> {
        self.wait(self.call_async(method, params))
    }

    /// As [`Self::call`], to be awaited together with something else. Dropping it ends the connection.
    pub async fn call_async(&self, method: &str, params: &[Value]) -> Result<Value> {
        let mut all = vec![Value::from(self.session.as_str())];
        all.extend_from_slice(params);
        self.request(method, Value::Array(all)).await
    }

    /// Waits for something of this client.
    pub fn wait<T>(&self, what: impl Future<Output = T>) -> T {
        let _outlives = Outlives::begin();
        self.runtime.block_on(what)
    }

    /// Logs out.
    pub fn end(&self) {
        if super::out::is_served() {
            // The daemon ends what it began.
            return;
        }
        // A session that stays ends by itself some day.
        let _ = self.call("session.logout", &[]);
    }

    async fn request(&self, method: &str, params: Value) -> Result<Value> {
        let number = self.number.get() + 1;
        self.number.set(number);
        let body = json!({"jsonrpc": "2.0", "method": method, "params": params, "id": number}).to_string();
        let kept = self.sender.borrow_mut().take();
        let usable = match kept {
            Some(mut sender) => sender.ready().await.is_ok().then_some(sender),
            None => None,
        };
        let mut sender = match usable {
            Some(sender) => sender,
            None => self.open().await?,
        };
        let host = self.host();
        let lost = |error: &dyn fmt::Display| {
            Failure::other(format!("{method}: the connection to {} was lost: {error}", self.target))
        };
        let request = Request::post("/jsonrpc")
            .header(header::HOST, host)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| Failure::other(format!("{method}: {error}")))?;
        let answer = sender.send_request(request).await.map_err(|error| lost(&error))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_LEN_MAX).collect().await;
        let body = body.map_err(|error| lost(&error))?.to_bytes();
        *self.sender.borrow_mut() = Some(sender);
        let Ok(mut answer) = serde_json::from_slice::<Value>(&body) else {
            let text = String::from_utf8_lossy(&body);
            let text: String = text.chars().take(200).collect();
            return Err(Failure::other(format!("{method}: {} answered {status}: {text}", self.target)));
        };
        match answer.get("error") {
            None | Some(Value::Null) => Ok(answer["result"].take()),
            Some(error) => Err(api_failure(error)),
        }
    }

    /// As requests name the server.
    fn host(&self) -> String {
        match &self.target {
            Target::Unix(_) => "localhost".to_owned(),
            Target::Tcp { host, port, .. } => format!("{host}:{port}"),
        }
    }

    /// A request on a connection of its own, whose query names this session; the head of the answer. An error of the
    /// connection is the inner one.
    pub async fn http<B>(
        &self,
        method: hyper::Method,
        path: &str,
        headers: &[(header::HeaderName, String)],
        body: B,
    ) -> Result<std::result::Result<hyper::Response<Incoming>, hyper::Error>>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut sender = self.open().await?;
        let mut request =
            Request::builder().method(method).uri(format!("{path}&session_id={}", self.session));
        request = request.header(header::HOST, self.host());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(body).map_err(|error| Failure::other(format!("{path}: {error}")))?;
        Ok(sender.send_request(request).await)
    }

    /// A new connection.
    async fn open<B>(&self) -> Result<SendRequest<B>>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let opened = tokio::time::timeout(CONNECT_LIMIT, async {
            match &self.target {
                Target::Unix(path) => {
                    let stream = UnixStream::connect(path).await;
                    shake(stream.map_err(|error| self.unreachable(&error))?).await
                }
                Target::Tcp { host, port, tls } => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await;
                    let stream = stream.map_err(|error| self.unreachable(&error))?;
                    // A small request must not wait for the answer to the one before.
                    let _ = stream.set_nodelay(true);
                    match tls {
                        None => shake(stream).await,
                        Some(trust) => shake(trust.connect(host, stream).await?).await,
                    }
                }
            }
        });
        opened.await.map_err(|_| {
            Failure::other(format!("{} did not answer within {} s", self.target, CONNECT_LIMIT.as_secs()))
        })?
    }

    fn unreachable(&self, error: &std::io::Error) -> Failure {
        Failure::other(format!("connecting to {}: {error}; is tapiod running there?", self.target))
    }

    /// UUID and name of what a reference names.
    pub fn name_of(&self, param: &str) -> Option<String> {
        if !param.starts_with("OpaqueRef:") || param == tapio_model::NULL_REF {
            return None;
        }
        for class in CLASSES {
            let Ok(record) = self.call(&format!("{class}.get_record"), &[param.into()]) else { continue };
            let uuid = record.get("uuid").and_then(Value::as_str)?;
            let name = record.get("name_label").and_then(Value::as_str).unwrap_or_default();
            return Some(if name.is_empty() { uuid.to_owned() } else { format!("{uuid} ({name})") });
        }
        None
    }
}

async fn shake<B>(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Result<SendRequest<B>>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (sender, connection) = handshake(TokioIo::new(stream))
        .await
        .map_err(|error| Failure::other(format!("the server speaks no HTTP: {error}")))?;
    // Its error comes out of the request that it meets.
    tokio::spawn(async { _ = connection.with_upgrades().await });
    Ok(sender)
}

/// `{code, message, data}` of version 2, or `[code, parameters...]` of version 1.
fn api_failure(error: &Value) -> Failure {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    if let Some([code, params @ ..]) = error.as_array().map(Vec::as_slice) {
        return Failure::Api(text(code), params.iter().map(text).collect());
    }
    match error.get("message").and_then(Value::as_str) {
        Some(code) => {
            let params = error.get("data").and_then(Value::as_array);
            Failure::Api(code.to_owned(), params.into_iter().flatten().map(text).collect())
        }
        None => Failure::other(format!("the server answered {error}")),
    }
}

fn target(connection: &Connection) -> Result<Target> {
    if let Some(server) = &connection.server {
        let tls = if connection.plain { None } else { Some(tls::Trust::new(connection)?) };
        let default = if connection.plain { 80 } else { 443 };
        let (host, port) = split(server);
        let port = connection.port.or(port).unwrap_or(default);
        return Ok(Target::Tcp { host: host.to_owned(), port, tls });
    }
    let named = connection.socket.clone().or_else(|| std::env::var_os("TAPIO_SOCKET").map(PathBuf::from));
    if let Some(path) = named {
        return Ok(Target::Unix(path));
    }
    let found = SOCKETS.iter().map(Path::new).find(|path| path.exists());
    let found = found.ok_or_else(|| {
        Failure::other(format!("no toolstack listens at {}; start tapiod, or give -s SERVER", SOCKETS[0]))
    })?;
    Ok(Target::Unix(found.to_owned()))
}

/// `host:port`, `[address]:port`, or a bare address that has colons itself.
fn split(server: &str) -> (&str, Option<u16>) {
    if let Some((host, rest)) = server.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return (host, rest.strip_prefix(':').and_then(|port| port.parse().ok()));
    }
    match server.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') && port.parse::<u16>().is_ok() => (host, port.parse().ok()),
        _ => (server, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_ports_and_addresses() {
        assert_eq!(split("box"), ("box", None));
        assert_eq!(split("box:8443"), ("box", Some(8443)));
        assert_eq!(split("fe80::1"), ("fe80::1", None));
        assert_eq!(split("[fe80::1]:8443"), ("fe80::1", Some(8443)));
    }

    #[test]
    fn a_client_is_sent_to_the_host_that_decides() {
        let mut connection =
            Connection { server: Some("a".into()), port: Some(8443), ..Connection::default() };
        send_on(&mut connection, "10.0.0.2");
        assert_eq!((connection.server.as_deref(), connection.port), (Some("10.0.0.2"), None));
        send_on(&mut connection, "[fe80::1]:9443");
        assert_eq!((connection.server.as_deref(), connection.port), (Some("fe80::1"), Some(9443)));
        // The port that is told is that of HTTPS.
        connection = Connection { plain: true, port: Some(8080), ..connection };
        send_on(&mut connection, "10.0.0.3:8443");
        assert_eq!((connection.server.as_deref(), connection.port), (Some("10.0.0.3"), Some(8080)));
    }

    #[test]
    fn errors_of_both_versions_are_understood() {
        let expected = Failure::Api("VDI_IN_USE".into(), vec!["x".into()]);
        assert_eq!(api_failure(&json!({"code": 1, "message": "VDI_IN_USE", "data": ["x"]})), expected);
        assert_eq!(api_failure(&json!(["VDI_IN_USE", "x"])), expected);
        assert!(matches!(api_failure(&json!(3)), Failure::Other(_)));
    }
}
