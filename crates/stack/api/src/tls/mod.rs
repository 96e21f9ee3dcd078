//! The server's certificate: made at the first start, replaced while the server runs.

mod hosts;
mod names;
mod shared;
mod validity;
mod wrong;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::RwLock;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

pub use hosts::{HOST_PROTOCOL, Trusted};

/// File with the certificate's chain and its key, in the directory of what survives a reboot.
pub const FILE: &str = "server.pem";

/// A larger file is no certificate.
const PEM_LEN_MAX: u64 = 256 << 10;

/// Seconds of ten years.
const TEN_YEARS: i64 = 3652 * 86_400;

/// The certificate that new connections get.
#[derive(Debug)]
pub struct Certificates {
    path: PathBuf,
    current: RwLock<Arc<CertifiedKey>>,
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl Certificates {
    /// The certificate in `dir`; where there is none, one is made for this host's names and addresses. Answers also
    /// whether it was made now.
    ///
    /// # Errors
    /// A sentence with the file, what is wrong with it, and what to do.
    pub fn open_or_make(dir: &Path) -> Result<(Arc<Self>, bool), String> {
        let path = dir.join(FILE);
        let made = match path.try_exists() {
            Ok(true) => false,
            Ok(false) => {
                write_new(&path, self_signed(&names::of_this_host())?.as_bytes())?;
                true
            }
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let current = RwLock::new(Arc::new(load(&path)?));
        Ok((Arc::new(Self { path, current }), made))
    }

    /// Reads the file again; connections that are made from now on get what it holds.
    ///
    /// # Errors
    /// As [`Self::open_or_make`]; the certificate of before stays.
    pub fn reload(&self) -> Result<(), String> {
        let fresh = Arc::new(load(&self.path)?);
        *self.current.write() = fresh;
        Ok(())
    }

    /// Takes a certificate, the authorities above it (empty: none) and its key, all as PEM: the file has them, and new
    /// connections get them from now on.
    ///
    /// # Errors
    /// What is wrong with them; the certificate of before stays.
    pub fn install(&self, certificate: &str, authorities: &str, key: &str) -> Result<(), Wrong> {
        if !authorities.trim().is_empty() {
            let above: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(authorities.as_bytes()).collect();
            if above.map_err(|error| Wrong::Chain(format!("no chain in PEM: {error}")))?.is_empty() {
                return Err(Wrong::Chain("there is no certificate in the chain".to_owned()));
            }
        }
        // Only the keys of one and the certificates of the others: a file with both would hide what comes after it.
        let ((own, _), (above, _), (_, key)) =
            (shared::split(certificate), shared::split(authorities), shared::split(key));
        self.put(&format!("{own}{above}{key}"))
    }

    /// Makes another certificate for this host's names and addresses, signed by itself.
    ///
    /// # Errors
    /// A sentence; the certificate of before stays.
    pub fn renew(&self) -> Result<(), Wrong> {
        self.put(&self_signed(&names::of_this_host()).map_err(Wrong::File)?)
    }

    fn put(&self, pem: &str) -> Result<(), Wrong> {
        // The next start would not read it.
        if pem.len() as u64 > PEM_LEN_MAX {
            return Err(Wrong::Certificate(format!("{} bytes: larger than any certificate", pem.len())));
        }
        let fresh = Arc::new(check(pem.as_bytes())?);
        let mut current = self.current.write();
        write_new(&self.path, pem.as_bytes()).map_err(Wrong::File)?;
        *current = fresh;
        Ok(())
    }

    /// The certificate and the authorities above it, as PEM.
    ///
    /// # Errors
    /// A sentence with the file.
    pub fn pem(&self) -> Result<String, String> {
        Ok(shared::split(&read(&self.path)?).0)
    }

    /// The certificate itself (DER).
    pub fn der(&self) -> Vec<u8> {
        self.current().end_entity_cert().map(|cert| cert.to_vec()).unwrap_or_default()
    }

    fn current(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.current.read())
    }

    /// SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` prints it.
    pub fn fingerprint(&self) -> String {
        self.current().end_entity_cert().map(|cert| fingerprint(cert)).unwrap_or_default()
    }

    /// Settings of a TLS server with this certificate: TLS 1.3 and, for old clients, 1.2.
    ///
    /// # Errors
    /// The library refuses its own defaults: a defect of this build.
    pub fn config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, String> {
        let resolver: Arc<dyn ResolvesServerCert> = self.clone();
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
        let mut config = builder.with_no_client_auth().with_cert_resolver(resolver);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

/// SHA-256 of a certificate (DER), as `openssl x509 -fingerprint -sha256` prints it.
pub fn fingerprint(cert: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, cert);
    let pairs: Vec<String> = digest.as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
    pairs.join(":")
}

/// Whether a server would start with a file of these bytes.
///
/// # Errors
/// A sentence: what is wrong with it.
pub fn check_file(pem: &[u8]) -> Result<(), String> {
    if pem.len() as u64 > PEM_LEN_MAX {
        return Err(format!("{} bytes: larger than any certificate", pem.len()));
    }
    check(pem).map(drop).map_err(|wrong| wrong.to_string())
}

/// Checks a certificate and its key, and puts them where a server of `dir` finds them when it reads its file again.
/// Answers the fingerprint.
///
/// # Errors
/// A sentence with the file and what is wrong with it; nothing is changed then.
pub fn install(dir: &Path, cert: &Path, key: &Path) -> Result<String, String> {
    let (cert_text, key_text) = (read(cert)?, read(key)?);
    let chain = format!("{}\n{}\n", cert_text.trim_end(), key_text.trim_end());
    let what = format!("{} with {}", cert.display(), key.display());
    let checked = check(chain.as_bytes()).map_err(|why| format!("{what}: {why}"))?;
    write_new(&dir.join(FILE), chain.as_bytes())?;
    Ok(checked.end_entity_cert().map(|cert| fingerprint(cert)).unwrap_or_default())
}

fn read(path: &Path) -> Result<String, String> {
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    if fs::metadata(path).map_err(told)?.len() > PEM_LEN_MAX {
        return Err(format!("{}: larger than any certificate", path.display()));
    }
    fs::read_to_string(path).map_err(told)
}

fn load(path: &Path) -> Result<CertifiedKey, String> {
    check(read(path)?.as_bytes()).map_err(|why| {
        format!(
            "{}: {why}. 'tapiod --install-certificate CERT KEY' puts another one there; without the file one is made",
            path.display()
        )
    })
}

/// Seconds since 1970.
fn now() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

/// A chain and a key that fit together and are valid now.
fn check(pem: &[u8]) -> Result<CertifiedKey, Wrong> {
    let unread = |why: &str| Wrong::Certificate(why.to_owned());
    let chain: Result<Vec<CertificateDer<'static>>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| Wrong::Certificate(format!("no certificate in PEM: {error}")))?;
    let first =
        chain.first().ok_or_else(|| unread("there is no certificate in it (PEM, BEGIN CERTIFICATE)"))?;
    let key = PrivateKeyDer::from_pem_slice(pem).map_err(|error| {
        Wrong::Key(format!("no key in PEM without a password (BEGIN PRIVATE KEY): {error}"))
    })?;
    let span = validity::of(first).ok_or_else(|| unread("the certificate's dates cannot be read"))?;
    if now() > span.not_after {
        return Err(Wrong::Ended(span.not_after));
    }
    // A clock that is a day behind is no reason to refuse the certificate that was just made.
    if now() + 86_400 < span.not_before {
        return Err(Wrong::Early(span.not_before));
    }
    CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => Wrong::Mismatch,
        rustls::Error::InvalidCertificate(why) => Wrong::Certificate(format!("{why:?}")),
        other => Wrong::Key(other.to_string()),
    })
}

/// Certificate and key in PEM, ECDSA on P-256, signed by itself, for ten years.
fn self_signed(names: &[String]) -> Result<String, String> {
    let told = |error: rcgen::Error| format!("no certificate could be made: {error}");
    let key = key().map_err(told)?;
    let cert = of_a_server(names).and_then(|params| params.self_signed(&key)).map_err(told)?;
    Ok(format!("{}{}", cert.pem(), key.serialize_pem()))
}

fn key() -> Result<KeyPair, rcgen::Error> {
    KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)
}

/// What the certificate of a server with these names says.
fn of_a_server(names: &[String]) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names.to_vec())?;
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, names.first().map_or("tapio", String::as_str));
    params.distinguished_name = subject;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    last_ten_years(&mut params);
    Ok(params)
}

fn last_ten_years(params: &mut CertificateParams) {
    let now = std::time::SystemTime::now();
    // From yesterday on: clocks of clients differ.
    params.not_before = (now - std::time::Duration::from_secs(86_400)).into();
    params.not_after = (now + std::time::Duration::from_secs(TEN_YEARS.unsigned_abs())).into();
}

/// Writes a file that only its owner reads, so that it is there whole or not at all.
fn write_new(path: &Path, bytes: &[u8]) -> Result<(), String> {
    crate::files::replace(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}

pub use shared::Shared;
pub use wrong::Wrong;

#[cfg(test)]
mod tests;
