//! Certificates of other servers of this host: those of disks.
//!
//! Clients of NBD take the certificate that they are told as an authority. Where the API's certificate is signed by
//! itself, no single one pleases them all: QEMU refuses it unless it is an authority, and other clients refuse an
//! authority as a server. So the disks have an authority of their own, whose key is thrown away once it has signed
//! the one certificate below it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::{Certificates, check, key, last_ten_years, names, of_a_server, read};

/// The names that NBD servers have for the files.
const CERT: &str = "server-cert.pem";
const KEY: &str = "server-key.pem";
/// What clients are told.
const AUTHORITY: &str = "ca-cert.pem";

/// The certificate as clients see it.
#[derive(Clone, Debug)]
pub struct Shared {
    /// What clients trust, as PEM: the authority, or the chain of a certificate that was installed.
    pub cert: String,
    /// The first host name that the server's certificate is valid for; empty if it has none.
    pub subject: String,
}

impl Certificates {
    /// Writes a certificate and its key into `dir`, which is made for their owner alone, under the names that NBD
    /// servers have for them: `server-cert.pem` and `server-key.pem`. What is there already and is valid stays.
    ///
    /// # Errors
    /// A sentence with the file and what is wrong with it.
    pub fn share(&self, dir: &Path) -> Result<Shared, String> {
        let told = |error: io::Error| format!("{}: {error}", dir.display());
        let text = read(&self.path)?;
        check(text.as_bytes()).map_err(|why| format!("{}: {why}", self.path.display()))?;
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(told(error)),
            _ => {}
        }
        let (cert, key) = split(&text);
        if !is_signed_by_itself(&cert) {
            return put(dir, &cert, &key, &cert).map_err(told);
        }
        let known = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
        let (chain, key, authority) = (known(CERT), known(KEY), known(AUTHORITY));
        // Files of which only some were written do not fit together.
        let is_whole = !authority.is_empty() && chain.ends_with(&authority);
        if is_whole && check(format!("{chain}{key}").as_bytes()).is_ok() {
            return Ok(Shared { subject: subject(&chain).unwrap_or_default(), cert: authority });
        }
        let (chain, key, authority) = below_an_authority(&names::of_this_host())
            .map_err(|error| format!("no certificate could be made: {error}"))?;
        put(dir, &chain, &key, &authority).map_err(told)
    }
}

fn put(dir: &Path, chain: &str, key: &str, trusted: &str) -> io::Result<Shared> {
    for (name, text) in [(CERT, chain), (KEY, key), (AUTHORITY, trusted)] {
        let path = dir.join(name);
        if fs::read_to_string(&path).is_ok_and(|known| known == *text) {
            continue;
        }
        crate::files::replace(&path, text.as_bytes())?;
    }
    Ok(Shared { subject: subject(chain).unwrap_or_default(), cert: trusted.to_owned() })
}

/// A server's certificate with the authority that signed it, its key, and the authority, as PEM.
fn below_an_authority(names: &[String]) -> Result<(String, String, String), rcgen::Error> {
    let signer: KeyPair = key()?;
    let mut params = CertificateParams::default();
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, "Tapio's disks");
    params.distinguished_name = subject;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    last_ten_years(&mut params);
    let authority = params.self_signed(&signer)?.pem().replace("\r\n", "\n");
    let own = key()?;
    let cert = of_a_server(names)?.signed_by(&own, &Issuer::from_params(&params, &signer))?;
    let chain = format!("{}{authority}", cert.pem().replace("\r\n", "\n"));
    Ok((chain, own.serialize_pem(), authority))
}

/// Whether it is one certificate without an authority above it.
fn is_signed_by_itself(chain: &str) -> bool {
    let certs: Vec<_> = CertificateDer::pem_slice_iter(chain.as_bytes()).filter_map(Result::ok).collect();
    let [cert] = certs.as_slice() else { return false };
    webpki::EndEntityCert::try_from(cert).is_ok_and(|cert| cert.issuer() == cert.subject())
}

/// The blocks of certificates, and the others.
pub(super) fn split(pem: &str) -> (String, String) {
    let (mut certs, mut keys) = (String::new(), String::new());
    let mut is_cert = false;
    for line in pem.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line.starts_with("-----BEGIN ") {
            is_cert = line.contains("CERTIFICATE");
        }
        let into = if is_cert { &mut certs } else { &mut keys };
        into.push_str(line);
        into.push('\n');
    }
    (certs, keys)
}

fn subject(cert: &str) -> Option<String> {
    let first = CertificateDer::from_pem_slice(cert.as_bytes()).ok()?;
    let cert = webpki::EndEntityCert::try_from(&first).ok()?;
    cert.valid_dns_names().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_and_key_are_files_of_their_own_for_their_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a directory");
        let (certificates, _) = Certificates::open_or_make(dir.path()).expect("made");
        let place = dir.path().join("nbd");
        let shared = certificates.share(&place).expect("written");
        let again = certificates.share(&place).expect("written again");
        assert_eq!(shared.cert, again.cert);
        assert!(!shared.subject.is_empty() && shared.cert.starts_with("-----BEGIN CERTIFICATE-----"));
        let of = |name: &str| fs::read_to_string(place.join(name)).expect("it is there");
        assert_eq!(of("ca-cert.pem"), shared.cert);
        assert!(of("server-cert.pem").ends_with(&shared.cert), "the chain ends with the authority");
        assert!(!shared.cert.contains("PRIVATE KEY"));
        assert!(of("server-key.pem").starts_with("-----BEGIN PRIVATE KEY-----"));
        let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
        assert_eq!((mode(&place), mode(&place.join("server-key.pem"))), (0o700, 0o600));
    }

    #[test]
    fn a_certificate_with_an_authority_is_shared_as_it_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let (chain, key, _) = below_an_authority(&["disks.example".to_owned()]).expect("made");
        fs::write(dir.path().join(super::super::FILE), format!("{chain}{key}")).expect("written");
        let (certificates, was_made) = Certificates::open_or_make(dir.path()).expect("opened");
        assert!(!was_made);
        let shared = certificates.share(&dir.path().join("nbd")).expect("shared");
        assert_eq!((shared.cert, shared.subject.as_str()), (chain, "disks.example"));
    }

    #[test]
    fn files_that_do_not_fit_together_are_made_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let (certificates, _) = Certificates::open_or_make(dir.path()).expect("made");
        let place = dir.path().join("nbd");
        let first = certificates.share(&place).expect("written");
        fs::write(place.join(KEY), key().expect("a key").serialize_pem()).expect("another key");
        let second = certificates.share(&place).expect("written again");
        assert_ne!(first.cert, second.cert);
        assert_eq!(certificates.share(&place).expect("known").cert, second.cert);
    }
}
