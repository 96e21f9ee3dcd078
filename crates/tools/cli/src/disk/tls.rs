//! TLS of an NBD front end, as the command line names it.

use std::path::PathBuf;

use clap::Args;
use tapio_control::{Result, TlsSettings};

/// How clients begin TLS.
#[derive(Debug, Args)]
pub struct TlsArguments {
    /// TLS for NBD over TCP; required when there are certificates or keys
    #[arg(long, value_name = "required|offered|off", requires = "nbd_tcp")]
    tls: Option<String>,
    /// Directory with ca-cert.pem, server-cert.pem and server-key.pem, or with keys.psk
    #[arg(long, value_name = "DIRECTORY", requires = "nbd_tcp")]
    tls_dir: Option<PathBuf>,
    /// File of pre-shared keys instead of certificates, as psktool writes them
    #[arg(long, value_name = "FILE", requires = "nbd_tcp")]
    tls_psk: Option<PathBuf>,
    /// Clients need a certificate that the authority in ca-cert.pem has signed
    #[arg(long, requires = "nbd_tcp")]
    tls_verify_peer: bool,
}

impl TlsArguments {
    /// The same for the disk process, whose directory is another.
    pub fn settings(&self) -> Result<Option<TlsSettings>> {
        let absolute = |path: &Option<PathBuf>| path.as_deref().map(super::absolute).transpose();
        let (dir, psk) = (absolute(&self.tls_dir)?, absolute(&self.tls_psk)?);
        TlsSettings::from_options(self.tls.as_deref(), dir, psk, self.tls_verify_peer)
    }
}
