//! Whether this host belongs to a pool, and where its database is then.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use tapio_api::server::Tls;
use tapio_api::tls::{Certificates, Trusted};
use tapio_core::pool::{Access, Member, bring};
use tapio_store::{DeferringStore, Etcd, EtcdOptions, Store};
use tokio::sync::Notify;
use uuid::Uuid;

use crate::link::HostLink;
use crate::settings::Settings;

/// The file with the UUID of a host whose database is on etcd by configuration.
const HOST: &str = "host-uuid";

/// What the database of a host that was alone is called when it belongs to a pool.
const BEFORE: &str = "tapio.db.before-pool";

/// What the daemon has of a pool.
pub struct Hosts {
    pub certificates: Arc<Certificates>,
    pub trusted: Arc<Trusted>,
    pub restart: Arc<Notify>,
}

impl Hosts {
    pub fn new(certificates: &Arc<Certificates>) -> Self {
        let certificates = Arc::clone(certificates);
        Self { certificates, trusted: Arc::default(), restart: Arc::default() }
    }

    /// How listeners shake hands with clients and hosts.
    pub fn tls(&self, is_member: bool) -> Result<Tls, String> {
        let clients = match is_member {
            true => self.certificates.config_for_hosts(&self.trusted)?,
            false => self.certificates.config()?,
        };
        let hosts = Some(self.certificates.config_for_peers()?);
        Ok(Tls { clients, hosts, trusted: Arc::clone(&self.trusted) })
    }

    pub fn link(&self) -> Result<HostLink, String> {
        HostLink::new(&self.certificates, &self.trusted, &self.restart)
    }
}

/// The pool's database, and how this host gets there.
pub struct Shared {
    pub etcd: Arc<Etcd>,
    pub access: Access,
    /// Up to where the database was read.
    pub seen: u64,
}

/// The UUID of this host: the one that it was known by, or a new one.
fn host_uuid(state_dir: &Path, database: &Path) -> Result<Uuid, String> {
    let path = state_dir.join(HOST);
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    if let Ok(text) = fs::read_to_string(&path) {
        return Uuid::parse_str(text.trim()).map_err(|error| told(&error));
    }
    let known = match database.exists() {
        true => DeferringStore::open(database)
            .and_then(|store| store.list("/host/"))
            .map_err(|error| error.to_string())?,
        false => Vec::new(),
    };
    let known = known.first().and_then(|row| Uuid::parse_str(row.key.rsplit('/').next()?).ok());
    let uuid = known.unwrap_or_else(Uuid::new_v4);
    fs::write(&path, format!("{uuid}\n")).map_err(|error| told(&error))?;
    Ok(uuid)
}

fn configured(settings: &Settings, database: &Path) -> Result<Option<Access>, String> {
    let pool = &settings.pool;
    if pool.endpoints.is_empty() {
        return Ok(None);
    }
    let host = host_uuid(&settings.state_dir, database)?;
    let identity = match (&pool.certificate, &pool.key) {
        (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
        (None, None) => None,
        _ => return Err("etcd-certificate and etcd-key belong together".into()),
    };
    let account = match (&pool.user, &pool.password_file) {
        (Some(user), Some(file)) => Some((user.clone(), file.clone())),
        (None, None) => None,
        _ => return Err("etcd-user and etcd-password-file belong together".into()),
    };
    let options = EtcdOptions {
        endpoints: pool.endpoints.clone(),
        prefix: pool.prefix.clone(),
        ca: pool.ca.clone(),
        identity,
        account,
        writer: host.to_string(),
    };
    Ok(Some(Access { host, options }))
}

/// The pool's database, if this host belongs to a pool. What it had for itself goes there, if it is the first host.
///
/// # Errors
/// A sentence.
pub fn open(settings: &Settings, database: &Path) -> Result<Option<Shared>, String> {
    let joined = Access::read(&settings.state_dir)?;
    let has_joined = joined.is_some();
    let Some(access) = joined.map_or_else(|| configured(settings, database), |joined| Ok(Some(joined)))?
    else {
        return Ok(None);
    };
    let told = |error: tapio_store::StoreError| error.to_string();
    let etcd = Arc::new(Etcd::open(&access.options).map_err(told)?);
    let is_known = etcd.get(&format!("/host/{}", access.host)).map_err(told)?.is_some();
    if has_joined && !is_known {
        tracing::warn!("this host was removed from its pool: it starts alone, with a new database");
        Access::forget(&settings.state_dir)?;
        return Ok(None);
    }
    if !is_known {
        if !etcd.list("/pool/").map_err(told)?.is_empty() {
            return Err(format!(
                "the database below {} of etcd belongs to a pool of other hosts: take etcd-endpoints out of tapiod.conf, \
                 start, and join it by xe pool-join",
                access.options.prefix
            ));
        }
        if database.exists() {
            let local = DeferringStore::open(database).map_err(told)?;
            bring(&local, &*etcd, access.host)?;
            tracing::info!("the database of this host is in etcd from now on");
        }
    }
    if database.exists() {
        let before = database.with_file_name(BEFORE);
        fs::rename(database, &before).map_err(|error| format!("{}: {error}", before.display()))?;
        for suffix in ["-wal", "-shm"] {
            let _ = fs::remove_file(database.with_file_name(format!("tapio.db{suffix}")));
        }
    }
    let seen = etcd.seen();
    Ok(Some(Shared { etcd, access, seen }))
}

/// This host as a member of its pool.
pub fn member(settings: &Settings, shared: &Shared, hosts: &Hosts, address: String) -> Member {
    Member {
        etcd: Arc::clone(&shared.etcd),
        access: shared.access.clone(),
        address: settings.pool.address.clone().unwrap_or(address),
        certificate: hosts.certificates.der(),
        lease: settings.pool.lease,
    }
}
