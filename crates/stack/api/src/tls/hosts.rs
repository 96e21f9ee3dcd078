//! TLS between hosts. Hosts of a pool know the certificates of the others, and no other certificate is accepted. A host
//! that moves VMs to one of another pool asks for [`HOST_PROTOCOL`]: then both show their certificates, and what each
//! makes of the other's is decided above TLS.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::RwLock;
use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use super::{Certificates, provider};

/// The protocol (ALPN) that a host asks for, and then shows its certificate.
pub const HOST_PROTOCOL: &[u8] = b"tapio-host";

/// The certificates (DER) of the hosts that may call without a password.
#[derive(Debug)]
pub struct Trusted {
    hosts: RwLock<BTreeSet<Vec<u8>>>,
    provider: Arc<CryptoProvider>,
}

impl Default for Trusted {
    fn default() -> Self {
        Self { hosts: RwLock::default(), provider: provider() }
    }
}

impl Trusted {
    /// These, and no others.
    pub fn set(&self, hosts: Vec<Vec<u8>>) {
        *self.hosts.write() = hosts.into_iter().collect();
    }

    /// Whether the host with this certificate (DER) may call without a password.
    pub fn contains(&self, certificate: &[u8]) -> bool {
        self.hosts.read().contains(certificate)
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match self.contains(certificate) {
            true => Ok(()),
            false => Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }
}

/// Signatures are checked by the library, for both sides.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

impl ClientCertVerifier for Trusted {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    signatures!();
}

/// Takes any certificate of a client that has its key.
#[derive(Debug)]
struct Shown {
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for Shown {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    signatures!();
}

/// Checks a server against the one certificate that it must have; none: any, before the two hosts know each other.
#[derive(Debug)]
struct Pinned {
    certificate: Option<Vec<u8>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match &self.certificate {
            Some(certificate) if certificate != end_entity.as_ref() => {
                Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    signatures!();
}

impl ResolvesClientCert for Certificates {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl Certificates {
    /// As [`Self::config`]; hosts of the pool show their certificates.
    ///
    /// # Errors
    /// The library refuses its own defaults: a defect of this build.
    pub fn config_for_hosts(self: &Arc<Self>, trusted: &Arc<Trusted>) -> Result<Arc<ServerConfig>, String> {
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
        let verifier: Arc<dyn ClientCertVerifier> = Arc::clone(trusted) as _;
        let mut config =
            builder.with_client_cert_verifier(verifier).with_cert_resolver(Arc::clone(self) as _);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// Settings for clients that ask for [`HOST_PROTOCOL`]: they must show a certificate, whichever it is.
    ///
    /// # Errors
    /// The library refuses its own defaults: a defect of this build.
    pub fn config_for_peers(self: &Arc<Self>) -> Result<Arc<ServerConfig>, String> {
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
        let verifier: Arc<dyn ClientCertVerifier> = Arc::new(Shown { provider: provider() });
        let mut config =
            builder.with_client_cert_verifier(verifier).with_cert_resolver(Arc::clone(self) as _);
        config.alpn_protocols = vec![HOST_PROTOCOL.to_vec()];
        Ok(Arc::new(config))
    }

    /// Settings of a client that calls another host: the one that has this certificate, to which this host shows its
    /// own; without one any host, to which it shows none.
    ///
    /// # Errors
    /// The library refuses its own defaults: a defect of this build.
    pub fn client_config(
        self: &Arc<Self>,
        certificate: Option<Vec<u8>>,
    ) -> Result<Arc<ClientConfig>, String> {
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
        let is_known = certificate.is_some();
        let builder = builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Pinned { certificate, provider: provider() }));
        let mut config = match is_known {
            true => builder.with_client_cert_resolver(Arc::clone(self) as _),
            false => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        if is_known {
            config.alpn_protocols.insert(0, HOST_PROTOCOL.to_vec());
        }
        Ok(Arc::new(config))
    }
}
