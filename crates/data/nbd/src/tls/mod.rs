//! TLS 1.3 for both sides, with certificates or with pre-shared keys.
//!
//! Certificates are the business of rustls; [`psk`] says why keys are not. Files lie where QEMU, libnbd and nbdkit have
//! them: a directory with `ca-cert.pem`, `server-cert.pem`, `server-key.pem`, `client-cert.pem`, `client-key.pem`, or
//! `keys.psk`.

mod files;
mod psk;
mod pump;
mod session;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::ServerName;
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

use files::{CLIENT_CERT, CLIENT_KEY, SERVER_CERT, SERVER_KEY, authorities, bad, certificates, private_key};
pub use files::{Keys, TlsError};
pub use pump::Status;
use session::Session;

/// Where certificates or keys are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// A directory in the usual layout.
    pub dir: Option<PathBuf>,
    /// A file with pre-shared keys; they are used instead of certificates.
    pub psk: Option<PathBuf>,
}

/// What a client needs to know in addition to its files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// Where certificates or keys are.
    pub files: TlsFiles,
    /// Whose pre-shared key is used; without, the only one in the file.
    pub user: Option<String>,
    /// The name in the server's certificate, if it is not the host's.
    pub hostname: Option<String>,
}

/// What a server does with clients that do not ask for TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// They may stay.
    Offered,
    /// They are told to, and nothing else.
    Required,
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn library(error: &rustls::Error) -> TlsError {
    TlsError(format!("TLS: {error}"))
}

/// Which keys to use, if keys are to be used at all.
fn psk_file(files: &TlsFiles, certificate: &str) -> Result<Option<PathBuf>, TlsError> {
    match files {
        TlsFiles { psk: Some(path), .. } => Ok(Some(path.clone())),
        TlsFiles { dir: Some(dir), .. } => {
            if !dir.is_dir() {
                return Err(bad(dir, "there is no such directory of certificates"));
            }
            Ok(files::keys_in(dir).filter(|_| !dir.join(certificate).exists()))
        }
        TlsFiles { .. } => {
            Err(TlsError("TLS needs a directory of certificates, or a file of pre-shared keys".into()))
        }
    }
}

/// A client's way to begin TLS.
#[derive(Clone)]
pub struct TlsClient {
    kind: ClientKind,
}

#[derive(Clone)]
enum ClientKind {
    Certificates { config: Arc<ClientConfig>, name: ServerName<'static> },
    Psk { user: String, keys: Arc<Keys> },
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ClientKind::Certificates { name, .. } => write!(f, "TlsClient(certificates, {name:?})"),
            ClientKind::Psk { user, .. } => write!(f, "TlsClient(key of {user:?})"),
        }
    }
}

impl TlsClient {
    /// Reads the files. `host` is the server's name, unless `options` have another.
    ///
    /// # Errors
    /// Which file cannot be used and why.
    pub fn load(options: &TlsOptions, host: &str) -> Result<Self, TlsError> {
        if let Some(path) = psk_file(&options.files, files::CA_CERT)? {
            let keys = Keys::load(&path)?;
            let user = options.user.as_deref().or_else(|| keys.only_user());
            let user =
                user.ok_or_else(|| bad(&path, "several users have keys: name one, as nbds://user@host/"))?;
            if keys.of(user).is_none() {
                return Err(bad(&path, format_args!("there is no key of user '{}'", user.escape_debug())));
            }
            return Ok(Self { kind: ClientKind::Psk { user: user.to_owned(), keys: Arc::new(keys) } });
        }
        let dir = options.files.dir.clone().unwrap_or_default();
        let name = options.hostname.as_deref().unwrap_or(host);
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| TlsError(format!("TLS: '{}' is no host name", name.escape_debug())))?;
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| library(&error))?
            .with_root_certificates(authorities(&dir)?);
        let own = dir.join(CLIENT_CERT);
        let config = if own.exists() {
            let chain = certificates(&own)?;
            let key = private_key(&dir.join(CLIENT_KEY))?;
            builder.with_client_auth_cert(chain, key).map_err(|error| bad(&own, error))?
        } else {
            builder.with_no_client_auth()
        };
        Ok(Self { kind: ClientKind::Certificates { config: Arc::new(config), name } })
    }

    /// Begins TLS on a connection, which has been agreed; gives the plain end.
    ///
    /// # Errors
    /// No thread or socket to be had. What is wrong with the server is found in the status.
    pub fn start(&self, net: OwnedFd, deadline: Instant) -> io::Result<(OwnedFd, Status)> {
        let mut wire = Vec::new();
        let session = match &self.kind {
            ClientKind::Certificates { config, name } => {
                let session = ClientConnection::new(Arc::clone(config), name.clone());
                Session::Certificates(Box::new(session.map_err(io::Error::other)?.into()))
            }
            ClientKind::Psk { user, keys } => {
                let key = keys.of(user).unwrap_or_default();
                let session = psk::Session::client(user, key, &mut wire);
                Session::Psk(Box::new(session.map_err(|failure| io::Error::other(failure.why))?))
            }
        };
        pump::start(session, wire, net, deadline, |_| {})
    }
}

/// A server's way to do TLS.
#[derive(Clone)]
pub struct TlsServer {
    kind: ServerKind,
    /// The answer to clients without it.
    pub policy: TlsPolicy,
    /// Called with why a client was refused; at most once a second.
    report: fn(&str),
}

#[derive(Clone)]
enum ServerKind {
    Certificates(Arc<ServerConfig>),
    Psk(Arc<Keys>),
}

impl fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsServer").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl TlsServer {
    /// Reads the files. With `verify_peer` clients need a certificate that the authority has signed.
    ///
    /// # Errors
    /// Which file cannot be used and why.
    pub fn load(
        files: &TlsFiles,
        policy: TlsPolicy,
        verify_peer: bool,
        report: fn(&str),
    ) -> Result<Self, TlsError> {
        if let Some(path) = psk_file(files, SERVER_CERT)? {
            if verify_peer {
                return Err(TlsError(
                    "TLS: clients with pre-shared keys have no certificates: leave out the check of them"
                        .into(),
                ));
            }
            let keys = Arc::new(Keys::load(&path)?);
            return Ok(Self { kind: ServerKind::Psk(keys), policy, report });
        }
        let dir = files.dir.clone().unwrap_or_default();
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| library(&error))?;
        let builder = if verify_peer {
            let roots = Arc::new(authorities(&dir)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
            let verifier = verifier.map_err(|error| bad(&dir.join(files::CA_CERT), error))?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let own = dir.join(SERVER_CERT);
        let chain = certificates(&own)?;
        let key = private_key(&dir.join(SERVER_KEY))?;
        let config = builder.with_single_cert(chain, key).map_err(|error| bad(&own, error))?;
        Ok(Self { kind: ServerKind::Certificates(Arc::new(config)), policy, report })
    }

    /// Begins TLS with a client that has been told to; gives the plain end. `peer` names it in what is reported.
    ///
    /// # Errors
    /// No thread or socket to be had.
    pub fn start(&self, net: OwnedFd, deadline: Instant, peer: String) -> io::Result<OwnedFd> {
        let session = match &self.kind {
            ServerKind::Certificates(config) => {
                let session = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
                Session::Certificates(Box::new(session.into()))
            }
            ServerKind::Psk(keys) => Session::Psk(Box::new(psk::Session::server(Arc::clone(keys)))),
        };
        let report = self.report;
        let (plain, _) = pump::start(session, Vec::new(), net, deadline, move |why| {
            if seldom() {
                report(&format!("NBD client {peer}: TLS: {why}"));
            }
        })?;
        Ok(plain)
    }
}

/// Whether it is a while since the last time: unknown clients shall not fill the log.
fn seldom() -> bool {
    use parking_lot::Mutex;
    use std::time::Duration;
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let now = Instant::now();
    let mut last = LAST.lock();
    if last.is_some_and(|last| now.duration_since(last) < Duration::from_secs(1)) {
        return false;
    }
    *last = Some(now);
    true
}

/// A session of either side with pre-shared keys that receives arbitrary bytes: for fuzzers alone.
#[doc(hidden)]
pub fn psk_hears(keys: &Arc<Keys>, bytes: &[u8]) {
    let (mut plain, mut wire) = (Vec::new(), Vec::new());
    let _ = psk::Session::server(Arc::clone(keys)).receive(bytes, &mut plain, &mut wire);
    if let Some(user) = keys.only_user()
        && let Ok(mut client) = psk::Session::client(user, keys.of(user).unwrap_or_default(), &mut wire)
    {
        let _ = client.receive(bytes, &mut plain, &mut wire);
    }
    assert!(plain.is_empty(), "data from a client that has shown no key");
}
