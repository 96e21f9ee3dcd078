//! The certificates that hosts show.

use std::path::Path;

use super::select::host;
use super::transfer::file_error;
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::{Session, print};

/// A larger file is no certificate.
const LEN_MAX: u64 = 256 << 10;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "host-get-server-certificate",
        &[],
        &["host-uuid", "host"],
        "Prints the certificate that a host shows, and the authorities above it, as PEM",
        show,
    ),
    command(
        "host-server-certificate-install",
        &["certificate", "private-key"],
        &["certificate-chain", "host-uuid", "host"],
        "Has a host show another certificate to new clients: files of PEM here, the key without a password",
        install,
    ),
    command(
        "host-reset-server-certificate",
        &[],
        &["host-uuid", "host"],
        "Has a host show a new certificate that is signed by itself",
        |s| renew(s, "host.reset_server_certificate"),
    ),
    command(
        "host-refresh-server-certificate",
        &[],
        &["host-uuid", "host"],
        "As host-reset-server-certificate",
        |s| renew(s, "host.refresh_server_certificate"),
    ),
    command(
        "host-emergency-reset-server-certificate",
        &[],
        &[],
        "Has the host that is asked show a new certificate that is signed by itself",
        |s| s.call("host.emergency_reset_server_certificate", &[]).map(drop),
    ),
];

fn renew(session: &Session, method: &str) -> Result<()> {
    session.call(method, &[host(session)?.into()]).map(drop)
}

fn show(session: &Session) -> Result<()> {
    let pem = session.text("host.get_server_certificate", &[host(session)?.into()])?;
    if session.arguments.json { session.print_values(&[&pem]) } else { print(&pem) }
}

fn text(name: &str, path: &Path) -> Result<String> {
    let len = std::fs::metadata(path).map_err(|error| file_error(path, &error))?.len();
    if len > LEN_MAX {
        return Err(Failure::other(format!("{} has {len} bytes: that is no {name}", path.display())));
    }
    std::fs::read_to_string(path).map_err(|error| file_error(path, &error))
}

fn install(session: &Session) -> Result<()> {
    let of = |name: &str| text(name, Path::new(session.need(name)?));
    let chain = match session.arguments.get("certificate-chain").filter(|path| !path.is_empty()) {
        Some(path) => text("certificate-chain", Path::new(path))?,
        None => String::new(),
    };
    let params = [host(session)?, of("certificate")?, of("private-key")?, chain].map(Into::into);
    session.call("host.install_server_certificate", &params).map(drop)
}
