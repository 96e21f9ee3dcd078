//! Where a disk is exported by NBD.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// An address at which a disk is exported by NBD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Of this host.
    pub address: IpAddr,
    /// Clients must begin TLS; otherwise they may.
    pub secure: bool,
}

/// How a disk is exported by NBD, if it is no VBD's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportNote {
    /// Where.
    pub places: Vec<Place>,
    /// TCP port, the same at all places; 0 until there is one.
    pub port: u16,
    /// Directory with the server's certificate and key; with a pre-shared key, for one that is written.
    pub tls: PathBuf,
    /// Its only client, which has the key, mirrors a disk onto it.
    #[serde(default)]
    pub is_written: bool,
    /// Seconds in which a client must do something.
    pub client_time_s: u32,
    /// The front ends, one for each place.
    pub fronts: Vec<u32>,
}
