//! The server's certificate for other servers of this host: those of disks.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::{Certificates, check, read};

/// The certificate as clients see it.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The chain, as PEM.
    pub cert: String,
    /// The first host name that it is valid for; empty if it has none.
    pub subject: String,
}

impl Certificates {
    /// Writes certificate and key into `dir`, which is made for their owner alone, under the names that NBD servers
    /// have for them: `server-cert.pem` and `server-key.pem`.
    ///
    /// # Errors
    /// A sentence with the file and what is wrong with it.
    pub fn share(&self, dir: &Path) -> Result<Shared, String> {
        let told = |error: io::Error| format!("{}: {error}", dir.display());
        let text = read(&self.path)?;
        check(text.as_bytes()).map_err(|why| format!("{}: {why}", self.path.display()))?;
        let (cert, key) = split(&text);
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(told(error)),
            _ => {}
        }
        for (name, text) in [("server-cert.pem", &cert), ("server-key.pem", &key)] {
            let path = dir.join(name);
            if fs::read_to_string(&path).is_ok_and(|known| known == *text) {
                continue;
            }
            crate::files::replace(&path, text.as_bytes()).map_err(told)?;
        }
        Ok(Shared { subject: subject(&cert).unwrap_or_default(), cert })
    }
}

/// The blocks of certificates, and the others.
fn split(pem: &str) -> (String, String) {
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
        assert_eq!(of("server-cert.pem"), shared.cert);
        assert!(!shared.cert.contains("PRIVATE KEY"));
        assert!(of("server-key.pem").starts_with("-----BEGIN PRIVATE KEY-----"));
        let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
        assert_eq!((mode(&place), mode(&place.join("server-key.pem"))), (0o700, 0o600));
    }
}
