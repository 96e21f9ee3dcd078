//! Calls of this host at others: JSON-RPC over TLS. Hosts of one pool know each other by their certificates.

use std::fmt;
use std::future::Future;
use std::os::unix::net::UnixStream as StdStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Frame};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tapio_api::jsonrpc;
use tapio_api::limits::MessageLimits;
use tapio_api::tls::{Certificates, Trusted, fingerprint};
use tapio_core::pool::{Destination, Link, Visit};
use tapio_model::{ApiError, Value};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

/// The port of hosts whose address names none.
const PORT: u16 = 443;

/// How long a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// How long a call may take: as long as an operation does.
const CALL_LIMIT: Duration = Duration::from_secs(3600);

/// How long the other host, or the network, may take for nothing before the connection counts as lost.
const SILENCE: Duration = Duration::from_secs(15);

/// How often a sender asks whether it is to go on.
const LOOK: Duration = Duration::from_millis(250);

/// What is announced as the length of a stream of unknown length: the server knows its end.
const LEN_UNKNOWN: &str = "1125899906842624";

/// Bytes of a piece of a stream.
const PIECE_LEN: usize = 256 << 10;

/// Longest answer, in bytes.
const ANSWER_LEN_MAX: usize = 256 << 20;

/// Threads of connections to other hosts. They are left to themselves at the end: a runtime that is dropped waits for
/// its tasks, which no thread of another runtime may.
struct Threads(Option<Runtime>);

impl Threads {
    fn wait<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.0.as_ref().map(|runtime| runtime.block_on(future))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// How this host reaches others.
pub struct HostLink {
    runtime: Arc<Threads>,
    certificates: Arc<Certificates>,
    trusted: Arc<Trusted>,
    /// Told when the daemon has to start again.
    restart: Arc<Notify>,
}

impl HostLink {
    pub fn new(
        certificates: &Arc<Certificates>,
        trusted: &Arc<Trusted>,
        restart: &Arc<Notify>,
    ) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("tapiod-hosts")
            .enable_all()
            .build()
            .map_err(|error| format!("no thread: {error}"))?;
        Ok(Self {
            runtime: Arc::new(Threads(Some(runtime))),
            certificates: Arc::clone(certificates),
            trusted: Arc::clone(trusted),
            restart: Arc::clone(restart),
        })
    }
}

/// A login at another host; it ends with this.
struct Guest {
    runtime: Arc<Threads>,
    address: String,
    sender: Mutex<SendRequest<Full<Bytes>>>,
    session: String,
}

fn unreachable(address: &str, why: &dyn fmt::Display) -> ApiError {
    tracing::info!(address, "another host does not answer: {why}");
    ApiError::new("CANNOT_CONTACT_HOST", [format!("{address}: {why}")])
}

/// `ADDRESS`, `ADDRESS:PORT` or `[ADDRESS]:PORT`.
fn parts(address: &str) -> (String, u16) {
    if let Ok(whole) = address.parse::<std::net::SocketAddr>() {
        return (whole.ip().to_string(), whole.port());
    }
    if address.parse::<std::net::IpAddr>().is_ok() {
        return (address.to_owned(), PORT);
    }
    match address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?))) {
        Some((host, port)) => (host.to_owned(), port),
        None => (address.to_owned(), PORT),
    }
}

/// Has the kernel end a connection whose other end does not answer: one that is cut says nothing.
fn watch(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt::{
        set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_user_timeout,
    };
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, SILENCE / 3)?;
    set_tcp_keepintvl(stream, SILENCE / 3)?;
    set_tcp_keepcnt(stream, 3)?;
    let limit = u32::try_from(SILENCE.as_millis()).unwrap_or(u32::MAX);
    Ok(set_tcp_user_timeout(stream, limit)?)
}

/// What comes from a socket, as the body of a request. Behind its end it waits: the answer comes first.
struct Sent {
    from: UnixStream,
    has_ended: bool,
}

impl Body for Sent {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if self.has_ended {
            return Poll::Pending;
        }
        let mut piece = Vec::with_capacity(PIECE_LEN);
        let mut space = ReadBuf::uninit(piece.spare_capacity_mut());
        match Pin::new(&mut self.from).poll_read(cx, &mut space) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Err(error)) => Poll::Ready(Some(Err(error))),
            Poll::Ready(Ok(())) => {
                let bytes = Bytes::copy_from_slice(space.filled());
                if bytes.is_empty() {
                    self.has_ended = true;
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
        }
    }
}

/// The error that a page says, as [`ApiError`] is written; the page's text where it is none.
fn error_of(page: &str, told: impl FnOnce(&str) -> ApiError) -> ApiError {
    let text = page.split_once("</h1>").map_or(page, |(_, rest)| rest);
    let text = text.split_once("</body>").map_or(text, |(text, _)| text);
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let is_code = |word: &str| {
        !word.is_empty()
            && word.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
    };
    match text.split_once(" [") {
        Some((code, rest)) if is_code(code) => {
            let params = rest.trim_end().trim_end_matches(']');
            let params = params.split(", ").filter(|param| !param.is_empty()).map(str::to_owned);
            ApiError { code: code.to_owned().into(), params: params.collect() }
        }
        _ => told(&text),
    }
}

async fn connect<B>(certificates: &Arc<Certificates>, to: &Destination) -> Result<SendRequest<B>, ApiError>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let told = |why: &dyn fmt::Display| unreachable(&to.address, why);
    let config = certificates.client_config(to.certificate.clone()).map_err(|why| told(&why))?;
    let (host, port) = parts(&to.address);
    let name = ServerName::try_from(host.clone()).map_err(|error| told(&error))?;
    let connecting = async {
        let stream = TcpStream::connect((host.as_str(), port)).await?;
        let _ = stream.set_nodelay(true);
        watch(&stream)?;
        tokio_rustls::TlsConnector::from(config).connect(name, stream).await
    };
    let stream = tokio::time::timeout(CONNECT_LIMIT, connecting).await;
    let stream = stream.map_err(|error| told(&error))?.map_err(|error| told(&error))?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| told(&error))?;
    tokio::spawn(async move {
        // Its error is that of the call.
        let _ = connection.await;
    });
    Ok(sender)
}

/// One call on a connection.
async fn ask(
    sender: &mut SendRequest<Full<Bytes>>,
    address: &str,
    method: &str,
    params: Vec<Value>,
) -> Result<Value, ApiError> {
    let told = |why: &dyn fmt::Display| unreachable(address, why);
    let call = Value::Map(
        [
            ("jsonrpc".to_owned(), Value::from("2.0")),
            ("id".to_owned(), Value::Int(1)),
            ("method".to_owned(), Value::from(method)),
            ("params".to_owned(), Value::Set(params)),
        ]
        .into(),
    );
    let request = Request::post("/jsonrpc")
        .header(header::HOST, address)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(jsonrpc::encode_value(&call))))
        .map_err(|error| told(&error))?;
    sender.ready().await.map_err(|error| told(&error))?;
    let answer = sender.send_request(request).await.map_err(|error| told(&error))?;
    let status = answer.status();
    let body =
        Limited::new(answer.into_body(), ANSWER_LEN_MAX).collect().await.map_err(|error| told(&error))?;
    if !status.is_success() {
        return Err(told(&format_args!("it answered {status}")));
    }
    let limits = MessageLimits { values_max: 8_000_000, ..MessageLimits::default() };
    let answer = jsonrpc::decode_value(&body.to_bytes(), limits).map_err(|error| told(&error.0))?;
    let Value::Map(mut members) = answer else { return Err(told(&"it answered no object")) };
    match members.remove("error") {
        None | Some(Value::Void) => Ok(members.remove("result").unwrap_or(Value::Void)),
        Some(Value::Map(error)) => {
            let code = error.get("message").and_then(Value::as_str).unwrap_or("INTERNAL_ERROR").to_owned();
            let params = error.get("data").and_then(Value::as_set).unwrap_or_default();
            let params = params.iter().filter_map(Value::as_str).map(str::to_owned);
            Err(ApiError { code: code.into(), params: params.collect() })
        }
        Some(_) => Err(told(&"it answered an error that is none")),
    }
}

impl Link for HostLink {
    fn visit(&self, to: &Destination, user: &str, password: &str) -> Result<Box<dyn Visit>, ApiError> {
        let params = [user, password, "1.0", "tapio-host"].map(Value::from).to_vec();
        let opened = self.runtime.wait(async {
            let mut sender = connect(&self.certificates, to).await?;
            let login = ask(&mut sender, &to.address, "session.login_with_password", params);
            let session = tokio::time::timeout(CONNECT_LIMIT * 4, login).await;
            let session = session.map_err(|error| unreachable(&to.address, &error))??;
            Ok::<_, ApiError>((sender, session))
        });
        let (sender, session) =
            opened.unwrap_or_else(|| Err(unreachable(&to.address, &"the daemon ends")))?;
        Ok(Box::new(Guest {
            runtime: Arc::clone(&self.runtime),
            address: to.address.clone(),
            sender: Mutex::new(sender),
            session: session.as_str().unwrap_or_default().to_owned(),
        }))
    }

    fn put(
        &self,
        to: &Destination,
        path: &str,
        data: StdStream,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), ApiError> {
        let told = |why: &dyn fmt::Display| unreachable(&to.address, why);
        data.set_nonblocking(true).map_err(|error| told(&error))?;
        let sent = async {
            let from = UnixStream::from_std(data).map_err(|error| told(&error))?;
            let mut sender = connect(&self.certificates, to).await?;
            let request = Request::put(path)
                .header(header::HOST, &to.address)
                .header(header::CONTENT_LENGTH, LEN_UNKNOWN)
                .body(Sent { from, has_ended: false })
                .map_err(|error| told(&error))?;
            let answer = sender.send_request(request).await.map_err(|error| told(&error))?;
            let status = answer.status();
            if status.is_success() {
                return Ok(());
            }
            let page = Limited::new(answer.into_body(), 64 << 10).collect().await;
            let page = page.map_err(|error| told(&error))?.to_bytes();
            let page = String::from_utf8_lossy(&page).into_owned();
            Err(error_of(&page, |text| told(&format_args!("it answered {status}: {text}"))))
        };
        let watched = async {
            let mut sent = std::pin::pin!(sent);
            loop {
                match tokio::time::timeout(LOOK, &mut sent).await {
                    Ok(done) => return done,
                    Err(_) if is_cancelled() => return Err(ApiError::bare("TASK_CANCELLED")),
                    Err(_) => {}
                }
            }
        };
        self.runtime.wait(watched).unwrap_or_else(|| Err(told(&"the daemon ends")))
    }

    fn certificate(&self) -> (Vec<u8>, String) {
        let der = self.certificates.der();
        let print = fingerprint(&der);
        (der, print)
    }

    fn certificate_chain(&self) -> Result<String, ApiError> {
        self.certificates.pem().map_err(ApiError::internal)
    }

    fn install_certificate(&self, certificate: &str, authorities: &str, key: &str) -> Result<(), ApiError> {
        Ok(self.certificates.install(certificate, authorities, key)?)
    }

    fn renew_certificate(&self) -> Result<(), ApiError> {
        Ok(self.certificates.renew()?)
    }

    fn trust(&self, certificates: Vec<Vec<u8>>) {
        self.trusted.set(certificates);
    }

    fn restart(&self) {
        self.restart.notify_one();
    }

    fn restart_now(&self) {
        crate::log_files::flush();
        let error = crate::restart::again();
        tracing::error!(%error, "the daemon cannot be started again");
    }
}

impl Visit for Guest {
    fn call(&self, method: &str, mut params: Vec<Value>) -> Result<Value, ApiError> {
        params.insert(0, Value::from(self.session.as_str()));
        let mut sender = self.sender.lock();
        let called = self.runtime.wait(async {
            tokio::time::timeout(CALL_LIMIT, ask(&mut sender, &self.address, method, params)).await
        });
        let called = called.ok_or_else(|| unreachable(&self.address, &"the daemon ends"))?;
        called.map_err(|error| unreachable(&self.address, &error))?
    }

    fn session(&self) -> &str {
        &self.session
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let params = vec![Value::from(self.session.as_str())];
        let mut sender = self.sender.lock();
        // One that is not ended so ends when it was idle too long.
        let _ = self.runtime.wait(async {
            tokio::time::timeout(CONNECT_LIMIT, ask(&mut sender, &self.address, "session.logout", params))
                .await
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_port_or_not() {
        let whole = |address: &str, host: &str, port| assert_eq!(parts(address), (host.to_owned(), port));
        whole("192.0.2.1", "192.0.2.1", 443);
        whole("192.0.2.1:8443", "192.0.2.1", 8443);
        whole("2001:db8::1", "2001:db8::1", 443);
        whole("[2001:db8::1]:8443", "2001:db8::1", 8443);
        whole("host.example", "host.example", 443);
        whole("host.example:1", "host.example", 1);
    }
}
