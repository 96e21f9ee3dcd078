//! What a pool of hosts needs: where its database is, and how this host is reached.

use std::path::PathBuf;
use std::time::Duration;

use super::{Key, directory, list, number};

/// Where the pool's database is, and how this host is reached.
#[derive(Clone, Debug)]
pub struct PoolSettings {
    /// Members of the etcd cluster; none: the database is a file, or where the pool is that this host joined.
    pub endpoints: Vec<String>,
    pub prefix: String,
    pub ca: Option<PathBuf>,
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub user: Option<String>,
    pub password_file: Option<PathBuf>,
    /// Where other hosts and clients reach this one; none: by the address of its main interface.
    pub address: Option<String>,
    pub lease: Duration,
}

impl Default for PoolSettings {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            prefix: "/tapio".to_owned(),
            ca: None,
            certificate: None,
            key: None,
            user: None,
            password_file: None,
            address: None,
            lease: Duration::from_secs(5),
        }
    }
}

macro_rules! file {
    ($name:literal, $doc:literal, $field:ident) => {
        Key {
            name: $name,
            doc: $doc,
            set: |settings, text| {
                settings.pool.$field = if text == "none" { None } else { Some(directory(text)?) };
                Ok(())
            },
            show: |settings| shown(settings.pool.$field.as_ref().map(|path| path.display())),
        }
    };
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

fn word(text: &str) -> Option<String> {
    (text != "none" && !text.is_empty()).then(|| text.to_owned())
}

pub(super) const KEYS: &[Key] = &[
    Key {
        name: "etcd-endpoints",
        doc: "members of the etcd cluster that keeps the database of a pool of hosts, as https://10.0.0.1:2379, or none: \
              the database is a file of this host. The first host of a pool needs this; others join it by xe pool-join",
        set: |settings, text| {
            settings.pool.endpoints = list(text).map(str::to_owned).collect();
            Ok(())
        },
        show: |settings| super::shown(&settings.pool.endpoints),
    },
    Key {
        name: "etcd-prefix",
        doc: "keys of the pool start so; each pool on a cluster has its own",
        set: |settings, text| {
            if !text.starts_with('/') || text.len() < 2 || text.ends_with('/') {
                return Err(format!("'{text}': a path as /tapio is expected"));
            }
            text.clone_into(&mut settings.pool.prefix);
            Ok(())
        },
        show: |settings| settings.pool.prefix.clone(),
    },
    file!("etcd-ca", "file (PEM) with the certificates that sign those of etcd, or none", ca),
    file!("etcd-certificate", "file (PEM) with the certificate of clients of etcd, or none", certificate),
    file!("etcd-key", "file (PEM) with its key, or none", key),
    Key {
        name: "etcd-user",
        doc: "account at etcd, or none",
        set: |settings, text| {
            settings.pool.user = word(text);
            Ok(())
        },
        show: |settings| shown(settings.pool.user.as_ref()),
    },
    file!("etcd-password-file", "file whose first line is its password, or none", password_file),
    Key {
        name: "pool-address",
        doc: "where the other hosts of a pool and its clients reach this one: ADDRESS or ADDRESS:PORT, or none: at the \
              address of its main interface",
        set: |settings, text| {
            settings.pool.address = word(text);
            Ok(())
        },
        show: |settings| shown(settings.pool.address.as_ref()),
    },
    Key {
        name: "pool-lease",
        doc: "seconds after which a host that does not answer counts as dead, and another decides in its place",
        set: |settings, text| {
            settings.pool.lease = Duration::from_secs(number(text, 2, 600)?);
            Ok(())
        },
        show: |settings| settings.pool.lease.as_secs().to_string(),
    },
];
