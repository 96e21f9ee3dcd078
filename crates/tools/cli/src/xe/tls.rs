//! Trust in a server: by certificates from a file, or by the one that was seen first.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::arguments::Connection;
use super::error::{Failure, Result};

/// How a server is trusted.
#[derive(Clone, Debug)]
pub struct Trust {
    provider: Arc<CryptoProvider>,
    roots: Option<Arc<RootCertStore>>,
    quiet: bool,
    known: PathBuf,
    key: String,
    /// What the certificate must be, whatever is known.
    fingerprint: Option<String>,
}

impl Trust {
    /// What the connection says, or the certificates that were seen before.
    pub fn new(connection: &Connection) -> Result<Self> {
        let roots = match &connection.cafile {
            None => None,
            Some(path) => Some(Arc::new(roots(path)?)),
        };
        let server = connection.server.as_deref().unwrap_or_default();
        let key = match connection.port {
            Some(port) => format!("{server}:{port}"),
            None => server.to_owned(),
        };
        let known = known_hosts();
        let provider = Arc::new(ring::default_provider());
        let fingerprint = connection.fingerprint.as_deref().map(plain);
        Ok(Self { provider, roots, quiet: connection.quiet, known, key, fingerprint })
    }

    /// Shakes hands.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> Result<TlsStream<TcpStream>> {
        let failed =
            |error: &dyn std::fmt::Display| Failure::other(format!("TLS with {}: {error}", self.key));
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(&error))?;
        let seen = Arc::new(Mutex::new(None));
        let config = match &self.roots {
            Some(roots) => builder.with_root_certificates(Arc::clone(roots)).with_no_client_auth(),
            None => {
                let schemes = self.provider.signature_verification_algorithms.supported_schemes();
                let verifier = Pinned {
                    expected: self
                        .fingerprint
                        .clone()
                        .or_else(|| pinned(&fs::read_to_string(&self.known).unwrap_or_default(), &self.key)),
                    seen: Arc::clone(&seen),
                    provider: Arc::clone(&self.provider),
                    schemes,
                };
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
            }
        };
        let name = ServerName::try_from(host.to_owned()).map_err(|error| failed(&error))?;
        let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        let seen = seen.lock().take();
        match (connected, seen) {
            (Ok(stream), Some(Seen::New(fingerprint))) => {
                self.remember(&fingerprint)?;
                Ok(stream)
            }
            (Ok(stream), _) => Ok(stream),
            (Err(_), Some(Seen::Other(fingerprint))) if self.fingerprint.is_some() => {
                Err(Failure::other(format!(
                    "{} shows the certificate sha256:{fingerprint}, not the one that was named: nothing was sent",
                    self.key
                )))
            }
            (Err(_), Some(Seen::Other(fingerprint))) => Err(Failure::other(format!(
                "{} shows another certificate than it did before (sha256:{fingerprint}). The connection may be \
                 intercepted. If it was replaced, take its line out of {}, or give --cafile FILE",
                self.key,
                self.known.display()
            ))),
            (Err(error), _) => Err(failed(&error)),
        }
    }

    fn remember(&self, fingerprint: &str) -> Result<()> {
        if self.quiet {
            return Ok(());
        }
        let failed = |error: io::Error| Failure::other(format!("writing {}: {error}", self.known.display()));
        if let Some(dir) = self.known.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
        }
        let mut file =
            fs::OpenOptions::new().create(true).append(true).mode(0o600).open(&self.known).map_err(failed)?;
        writeln!(file, "{} sha256:{fingerprint}", self.key).map_err(failed)?;
        eprintln!(
            "{} was not known; its certificate sha256:{fingerprint} is remembered in {}",
            self.key,
            self.known.display()
        );
        Ok(())
    }
}

fn roots(path: &Path) -> Result<RootCertStore> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::other(format!("certificates in {}: {error}", path.display()))
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| failed(&error))? {
        roots.add(certificate.map_err(|error| failed(&error))?).map_err(|error| failed(&error))?;
    }
    if roots.is_empty() {
        return Err(failed(&"there are none; PEM is expected"));
    }
    Ok(roots)
}

fn known_hosts() -> PathBuf {
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from);
    config.unwrap_or_else(|| home().join(".config")).join("tapio/known_hosts")
}

/// A fingerprint as people write it: with or without colons, in large letters or small ones.
fn plain(fingerprint: &str) -> String {
    let text = fingerprint.trim().to_ascii_lowercase();
    text.trim_start_matches("sha256:").replace(':', "")
}

/// The fingerprint that is known of a server.
fn pinned(text: &str, key: &str) -> Option<String> {
    let line = text.lines().rev().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(' '))?;
    line.trim().strip_prefix("sha256:").map(str::to_ascii_lowercase)
}

#[derive(Debug)]
enum Seen {
    New(String),
    Other(String),
}

/// Accepts the certificate that is known, or any where none is.
#[derive(Debug)]
struct Pinned {
    expected: Option<String>,
    seen: Arc<Mutex<Option<Seen>>>,
    provider: Arc<CryptoProvider>,
    schemes: Vec<SignatureScheme>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let digest = Sha256::digest(end_entity);
        let fingerprint: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut seen = self.seen.lock();
        match &self.expected {
            Some(expected) if *expected == fingerprint => Ok(ServerCertVerified::assertion()),
            Some(_) => {
                *seen = Some(Seen::Other(fingerprint));
                Err(rustls::Error::General("another certificate than before".into()))
            }
            None => {
                *seen = Some(Seen::New(fingerprint));
                Ok(ServerCertVerified::assertion())
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_written_in_several_ways() {
        for text in ["sha256:aabb", "AA:BB", " aabb\n", "SHA256:aa:bb"] {
            assert_eq!(plain(text), "aabb", "{text}");
        }
    }

    #[test]
    fn the_last_line_about_a_server_counts() {
        let text = "box sha256:AA\nbox:8443 sha256:bb\nbox sha256:cc\nboxes sha256:dd\n";
        assert_eq!(pinned(text, "box").as_deref(), Some("cc"));
        assert_eq!(pinned(text, "box:8443").as_deref(), Some("bb"));
        assert_eq!(pinned(text, "bo"), None);
        assert_eq!(pinned("", "box"), None);
    }
}
