//! The NBD servers of the process, one for each address: disks under different names share it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tapio_block::DiskHandle;
use tapio_control::command::SecretName;
use tapio_control::{ControlError, Errno, Front, Result, TlsMode, TlsSettings};
use tapio_front::nbd::tls::{TlsFiles, TlsPolicy, TlsServer};
use tapio_front::nbd::{Drained, Export, Guard, NbdServer};

use crate::log;

/// How long answers in flight may take when an export is withdrawn.
const DRAIN_TIME: Duration = Duration::from_secs(2);
/// Permissions of the sockets made here: their owner alone.
const SOCKET_MODE: u32 = 0o600;

/// A server, and how its clients begin TLS.
type Entry = (Weak<NbdServer>, Option<TlsSettings>);

static SERVERS: Mutex<BTreeMap<String, Entry>> = Mutex::new(BTreeMap::new());

/// A disk offered by a server. The server ends with its last export.
#[derive(Debug)]
pub struct Offer {
    server: Arc<NbdServer>,
    export: String,
}

impl Offer {
    /// Offers the disk behind `remote` as `front` says, on a server of its own or on the one that has the address.
    ///
    /// # Errors
    /// The address cannot be listened on, or offers this name already.
    pub fn new(front: &Front, remote: DiskHandle) -> Result<Self> {
        let (name, read_only) = match front {
            Front::NbdUnix { export, read_only, .. } | Front::NbdTcp { export, read_only, .. } => {
                (export, *read_only)
            }
            Front::VhostUser { .. } | Front::Block { .. } | Front::Blkif(_) => {
                return Err(ControlError::new(Errno::EINVAL, "this is no NBD front end"));
            }
        };
        // Held until the server listens, so that two callers that want one address make one server.
        let mut servers = SERVERS.lock();
        servers.retain(|_, (server, _)| server.strong_count() > 0);
        let address = front.address();
        let settings = match front {
            Front::NbdTcp { tls, .. } => tls.clone(),
            _ => None,
        };
        let known = servers.get(&address).and_then(|(server, tls)| Some((server.upgrade()?, tls.clone())));
        let (server, is_new) = match known {
            Some((_, other)) if other != settings => {
                return Err(ControlError::new(
                    Errno::EINVAL,
                    format!("{address} is served already, with other certificates or keys"),
                )
                .next("give the same TLS options, or another address"));
            }
            Some((server, _)) => (server, false),
            None => {
                let tls = settings.as_ref().map(load).transpose()?;
                let server = NbdServer::with_tls(tls).map_err(|error| failed(front, &error))?;
                (Arc::new(server), true)
            }
        };
        let guard = match front {
            Front::NbdTcp { guard: Some(guard), .. } => {
                let time = Duration::from_secs(guard.client_time_s.into());
                Some(Arc::new(Guard::new(time, log::line)))
            }
            _ => None,
        };
        server.add_export(Export { read_only, guard, ..Export::new(name.as_str(), remote) }).map_err(
            |error| {
                ControlError::new(Errno::EINVAL, format!("{address}: {error}"))
                    .next("give each export a name of its own")
            },
        )?;
        if is_new {
            listen(&server, front)?;
            servers.insert(address, (Arc::downgrade(&server), settings));
        }
        Ok(Self { server, export: name.clone() })
    }

    /// Withdraws the disk: its clients get the answers in flight and are disconnected.
    pub fn end(self) {
        // Answers that do not come in time are not sent: the client repeats its requests elsewhere.
        if let Err(error) = self.server.drain(&self.export, Drained::Close, DRAIN_TIME) {
            log::line(&format!("NBD export '{}' ends with requests in flight: {error}", self.export));
        }
        if let Err(error) = self.server.remove_export(&self.export, true) {
            log::line(&format!("NBD export '{}': {error}", self.export));
        }
    }

    /// Says by which names clients find it, and cuts off those that came by a name of `cut`.
    ///
    /// # Errors
    /// It is not guarded: it has one name for all.
    pub fn admit(&self, names: &[SecretName], cut: &[SecretName]) -> Result<()> {
        let names: Vec<&str> = names.iter().map(|name| name.0.as_str()).collect();
        let cut: Vec<&str> = cut.iter().map(|name| name.0.as_str()).collect();
        self.server
            .admit(&self.export, &names, &cut)
            .map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))
    }

    /// Clients of this export.
    pub fn connections(&self) -> u32 {
        let mine = self.server.connections().iter().filter(|client| client.export == self.export).count();
        u32::try_from(mine).unwrap_or(u32::MAX)
    }
}

/// Reads certificates or keys: once, so that the process may lose the right to read them.
fn load(settings: &TlsSettings) -> Result<TlsServer> {
    let files = TlsFiles { dir: settings.dir.clone(), psk: settings.psk.clone() };
    let policy = match settings.mode {
        TlsMode::Required => TlsPolicy::Required,
        TlsMode::Offered => TlsPolicy::Offered,
    };
    TlsServer::load(&files, policy, settings.verify_peer, log::line)
        .map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))
}

fn failed(front: &Front, error: &std::io::Error) -> ControlError {
    ControlError::io(format_args!("cannot serve NBD on {}", front.address()), error)
}

fn listen(server: &NbdServer, front: &Front) -> Result<()> {
    let listening = match front {
        Front::NbdUnix { listener: Some(_), .. } => {
            return Err(ControlError::new(Errno::EOPNOTSUPP, "an NBD front end makes its socket itself")
                .next("give a path without a descriptor"));
        }
        Front::NbdUnix { path, .. } => server.listen_unix(path, SOCKET_MODE).map(drop),
        Front::NbdTcp { addr, .. } => server.listen_tcp(*addr).map(drop),
        Front::VhostUser { .. } | Front::Block { .. } | Front::Blkif(_) => Ok(()),
    };
    listening.map_err(|error| failed(front, &error))
}
