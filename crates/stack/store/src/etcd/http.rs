//! Requests to the members of an etcd cluster, by its JSON gateway over HTTP/1.1, with TLS and logins.

use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response, header};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use zeroize::Zeroizing;

use super::wire;

/// Deadline of one try of a request: a member that lost its leader answers nothing for seven seconds, the next one may
/// know the new leader.
const TRY: Duration = Duration::from_secs(1);

/// Later tries get longer, for clusters that are slow.
const TRY_MAX: Duration = Duration::from_secs(8);

/// Pause between tries.
const PAUSE: Duration = Duration::from_millis(100);

/// Longest answer, in bytes; longer lists are read in pages.
const ANSWER_LEN_MAX: usize = 256 << 20;

/// Connections that wait for the next request.
const IDLE_MAX: usize = 8;

/// Where an etcd cluster is, and how to log in there.
#[derive(Clone, Default)]
pub struct EtcdOptions {
    /// `http://ADDRESS:PORT` or `https://NAME:PORT`, one for each member.
    pub endpoints: Vec<String>,
    /// Keys of the store start so; other users of the cluster have other prefixes.
    pub prefix: String,
    /// File (PEM) with the certificates that sign those of members.
    pub ca: Option<PathBuf>,
    /// Files (PEM) with the client's certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Account, and the file with its password.
    pub account: Option<(String, PathBuf)>,
    /// Names this client among all that write: the same one after a restart, and no other process has it.
    pub writer: String,
}

impl fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// Why a request has no answer.
#[derive(Clone, Debug)]
pub enum Failure {
    /// It may have been done or not, or may be done later.
    Unknown(String),
    /// It was refused, and not done: gRPC's code and the words.
    Refused(u64, String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(why) | Self::Refused(_, why) => f.write_str(why),
        }
    }
}

#[derive(Clone, Debug)]
struct Endpoint {
    url: String,
    host: String,
    port: u16,
    is_tls: bool,
}

type Sender = SendRequest<Full<Bytes>>;

/// A client of a cluster.
pub struct Client {
    runtime: Option<Runtime>,
    endpoints: Vec<Endpoint>,
    /// The member that answered last.
    current: AtomicUsize,
    idle: Mutex<Vec<(usize, Sender)>>,
    tls: Arc<ClientConfig>,
    account: Option<(String, Zeroizing<String>)>,
    token: Mutex<Option<Zeroizing<String>>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("endpoints", &self.endpoints).finish_non_exhaustive()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A runtime that is dropped waits for its tasks, which no thread of another runtime may.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn endpoint(url: &str) -> Result<Endpoint, String> {
    let told =
        |why: &str| format!("etcd: '{url}' {why}; an endpoint is http://ADDRESS:PORT or https://NAME:PORT");
    let (is_tls, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
        (Some(rest), _) => (true, rest),
        (_, Some(rest)) => (false, rest),
        _ => return Err(told("has no scheme")),
    };
    let (host, port) = rest.trim_end_matches('/').rsplit_once(':').ok_or_else(|| told("has no port"))?;
    let port = port.parse().map_err(|_| told("has no number as its port"))?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_name = |c: char| c.is_ascii_alphanumeric() || ".-:_".contains(c);
    if host.is_empty() || !host.chars().all(is_name) {
        return Err(told("has no name or address"));
    }
    Ok(Endpoint { url: url.to_owned(), host: host.to_owned(), port, is_tls })
}

fn pem<T: PemObject>(path: &Path) -> Result<Vec<T>, String> {
    let told = |why: String| format!("etcd: {}: {why}", path.display());
    let read = T::pem_file_iter(path).map_err(|error| told(error.to_string()))?;
    let read: Vec<T> = read.collect::<Result<_, _>>().map_err(|error| told(error.to_string()))?;
    if read.is_empty() { Err(told("there is nothing of the kind in it".into())) } else { Ok(read) }
}

fn tls(options: &EtcdOptions) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    if let Some(ca) = &options.ca {
        for cert in pem::<CertificateDer<'static>>(ca)? {
            roots.add(cert).map_err(|error| format!("etcd: {}: {error}", ca.display()))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let mut config = match &options.identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let chain = pem(cert)?;
            let told = |error: &dyn fmt::Display| format!("etcd: {}: {error}", key.display());
            let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| told(&error))?;
            builder.with_client_auth_cert(chain, secret).map_err(|error| told(&error))?
        }
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn password(path: &Path) -> Result<Zeroizing<String>, String> {
    let text = std::fs::read_to_string(path).map(Zeroizing::new);
    let text =
        text.map_err(|error| format!("etcd: reading the password from {}: {error}", path.display()))?;
    Ok(Zeroizing::new(text.lines().next().unwrap_or_default().to_owned()))
}

impl Client {
    /// A client; no member is asked yet.
    ///
    /// # Errors
    /// An endpoint is none, a file cannot be read.
    pub fn new(options: &EtcdOptions) -> Result<Self, String> {
        let endpoints: Vec<Endpoint> =
            options.endpoints.iter().map(|url| endpoint(url)).collect::<Result<_, _>>()?;
        if endpoints.is_empty() {
            return Err("etcd: no endpoint is given".into());
        }
        if options.ca.is_none() && endpoints.iter().any(|endpoint| endpoint.is_tls) {
            return Err("etcd: an endpoint has https://, and no file of certificates to check it by".into());
        }
        let account = match &options.account {
            Some((name, file)) => Some((name.clone(), password(file)?)),
            None => None,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("etcd")
            .enable_all()
            .build()
            .map_err(|error| format!("etcd: no thread: {error}"))?;
        Ok(Self {
            runtime: Some(runtime),
            endpoints,
            current: AtomicUsize::new(0),
            idle: Mutex::default(),
            tls: Arc::new(tls(options)?),
            account,
            token: Mutex::default(),
        })
    }

    /// Begins something that goes on by itself.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(future);
        }
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.runtime.as_ref().map(|runtime| runtime.block_on(future))
    }

    /// Sends a request that may be repeated, to one member after another, until `until`.
    ///
    /// # Errors
    /// A member refused it, or none answered in time.
    pub fn repeat(&self, path: &str, body: &Value, until: Instant) -> Result<Value, Failure> {
        let tries = async {
            let mut limit = TRY;
            loop {
                match self.send(path, body, limit).await {
                    Err(Failure::Unknown(why)) if Instant::now() + PAUSE < until => {
                        tracing::debug!("etcd: {path}: {why}; asking again");
                        limit = (limit * 2).min(TRY_MAX);
                        tokio::time::sleep(PAUSE).await;
                    }
                    answer => return answer,
                }
            }
        };
        self.wait(tries).unwrap_or_else(|| Err(Failure::Unknown("the client has ended".into())))
    }

    /// Sends a request once. A login that has expired is renewed, as such a request was not done.
    ///
    /// # Errors
    /// A member refused it, or whether it was done is not known.
    pub fn once(&self, path: &str, body: &Value, limit: Duration) -> Result<Value, Failure> {
        let sent = self.wait(self.send(path, body, limit));
        sent.unwrap_or_else(|| Err(Failure::Unknown("the client has ended".into())))
    }

    /// As [`Self::once`], on the client's own threads.
    pub async fn send(&self, path: &str, body: &Value, limit: Duration) -> Result<Value, Failure> {
        let at = self.current.load(Ordering::Relaxed) % self.endpoints.len();
        let url = &self.endpoints[at].url;
        let late = |_| Failure::Unknown(format!("{url} did not answer in {limit:?}"));
        let sent = tokio::time::timeout(limit, self.exchange(at, path, body)).await.map_err(late);
        let sent = sent.unwrap_or_else(Err);
        if matches!(sent, Err(Failure::Unknown(_))) {
            self.leave(at);
        }
        sent
    }

    /// The next request goes to another member.
    pub fn leave(&self, at: usize) {
        self.idle.lock().retain(|(of, _)| *of != at);
        let next = (at + 1) % self.endpoints.len();
        let _ = self.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// A stream of answers to one request, and the member that it comes from.
    pub async fn stream(
        &self,
        path: &str,
        body: &Value,
        limit: Duration,
    ) -> Result<(usize, Incoming), Failure> {
        let at = self.current.load(Ordering::Relaxed) % self.endpoints.len();
        let begun = async {
            let mut sender = self.connect(at).await?;
            let request = self.request(at, path, body).await?;
            let told = |error: hyper::Error| Failure::Unknown(error.to_string());
            let answer = sender.send_request(request).await.map_err(told)?;
            if answer.status().is_success() {
                return Ok((at, answer.into_body()));
            }
            Err(self.refused(answer).await)
        };
        let late = |_| Failure::Unknown(format!("{} did not answer", self.endpoints[at].url));
        let begun = tokio::time::timeout(limit, begun).await.map_err(late).unwrap_or_else(Err);
        if begun.is_err() {
            self.leave(at);
        }
        begun
    }

    /// The token is not good any more: the next request logs in.
    pub fn forget_login(&self) {
        *self.token.lock() = None;
    }

    async fn exchange(&self, at: usize, path: &str, body: &Value) -> Result<Value, Failure> {
        let mut has_renewed = false;
        loop {
            let request = self.request(at, path, body).await?;
            let answer = self.answer(at, request).await?;
            if answer.status().is_success() {
                let read = Limited::new(answer.into_body(), ANSWER_LEN_MAX).collect().await;
                let read = read.map_err(|error| Failure::Unknown(error.to_string()))?.to_bytes();
                let told = |error| Failure::Unknown(format!("{}: {error}", self.endpoints[at].url));
                return serde_json::from_slice(&read).map_err(told);
            }
            match self.refused(answer).await {
                Failure::Refused(_, why) if self.account.is_some() && !has_renewed && is_login(&why) => {
                    has_renewed = true;
                    self.forget_login();
                }
                failure => return Err(failure),
            }
        }
    }

    /// Sends on a connection that waits, or on a new one.
    async fn answer(&self, at: usize, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Failure> {
        let waiting = || {
            let mut idle = self.idle.lock();
            let place = idle.iter().position(|(of, sender)| *of == at && !sender.is_closed())?;
            Some(idle.swap_remove(place).1)
        };
        let mut sender = match waiting() {
            Some(sender) => sender,
            None => self.connect(at).await?,
        };
        let told = |error: hyper::Error| Failure::Unknown(format!("{}: {error}", self.endpoints[at].url));
        sender.ready().await.map_err(told)?;
        let answer = sender.send_request(request).await.map_err(told)?;
        let mut idle = self.idle.lock();
        idle.retain(|(_, sender)| !sender.is_closed());
        if idle.len() < IDLE_MAX {
            idle.push((at, sender));
        }
        Ok(answer)
    }

    async fn refused(&self, answer: Response<Incoming>) -> Failure {
        let status = answer.status();
        let body = Limited::new(answer.into_body(), 1 << 20).collect().await;
        let (code, words) = wire::error(&body.map(|body| body.to_bytes()).unwrap_or_default());
        match status.as_u16() {
            // The member could not find out whether it was done.
            500 | 503 => Failure::Unknown(format!("{status}: {words}")),
            _ => Failure::Refused(code, words),
        }
    }

    async fn request(&self, at: usize, path: &str, body: &Value) -> Result<Request<Full<Bytes>>, Failure> {
        let token = if path == "auth/authenticate" { None } else { self.token(at).await? };
        let endpoint = &self.endpoints[at];
        let mut request = Request::post(format!("/v3/{path}"))
            .header(header::HOST, format!("{}:{}", endpoint.host, endpoint.port))
            .header(header::CONTENT_TYPE, "application/json")
            // A member without a leader says so, where it would be silent.
            .header("Grpc-Metadata-Hasleader", "true");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, token.as_str());
        }
        let told = |error: hyper::http::Error| Failure::Refused(3, error.to_string());
        request.body(Full::new(Bytes::from(body.to_string()))).map_err(told)
    }

    /// The token of the login, if there is an account; logs in if there is none yet.
    async fn token(&self, at: usize) -> Result<Option<Zeroizing<String>>, Failure> {
        let Some((name, password)) = &self.account else { return Ok(None) };
        if let Some(token) = self.token.lock().clone() {
            return Ok(Some(token));
        }
        let body = json!({ "name": name, "password": password.as_str() });
        let request = Box::pin(self.request(at, "auth/authenticate", &body)).await?;
        let answer = self.answer(at, request).await?;
        if !answer.status().is_success() {
            return Err(match self.refused(answer).await {
                Failure::Refused(code, why) => {
                    Failure::Refused(code, format!("the login of {name} was refused: {why}"))
                }
                unknown @ Failure::Unknown(_) => unknown,
            });
        }
        let read = Limited::new(answer.into_body(), 1 << 20).collect().await;
        let read = read.map_err(|error| Failure::Unknown(error.to_string()))?.to_bytes();
        let read: Value =
            serde_json::from_slice(&read).map_err(|error| Failure::Unknown(error.to_string()))?;
        let token = read.get("token").and_then(Value::as_str).unwrap_or_default();
        let token = Zeroizing::new(token.to_owned());
        *self.token.lock() = Some(token.clone());
        Ok(Some(token))
    }

    async fn connect(&self, at: usize) -> Result<Sender, Failure> {
        let endpoint = &self.endpoints[at];
        let told = |error: &dyn fmt::Display| Failure::Unknown(format!("{}: {error}", endpoint.url));
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|error| told(&error))?;
        let _ = stream.set_nodelay(true);
        if !endpoint.is_tls {
            return opened(stream).await.map_err(|error| told(&error));
        }
        let name = ServerName::try_from(endpoint.host.clone()).map_err(|error| told(&error))?;
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(&self.tls));
        let stream = connector.connect(name, stream).await.map_err(|error| told(&error))?;
        opened(stream).await.map_err(|error| told(&error))
    }
}

async fn opened(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> hyper::Result<Sender> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // Its error is that of the request.
        let _ = connection.await;
    });
    Ok(sender)
}

/// Whether a request was refused because its login is not good any more.
pub fn is_login(why: &str) -> bool {
    ["invalid auth token", "user name is empty", "revision in header is old"]
        .iter()
        .any(|known| why.contains(known))
}
