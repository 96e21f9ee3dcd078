//! What is always there: the pool, this host, its networks, roles; messages and blobs.

mod blobs;
mod host;
mod kernel;
pub(crate) mod messages;
mod network;
mod purpose;

use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Value};

use crate::call::Handlers;
use crate::db::{Db, Object};
use crate::roles;

pub use host::{available_memory, total_memory};

/// The address that others reach this host by, as far as it can know.
pub fn address() -> String {
    network::address().unwrap_or_else(|| "127.0.0.1".to_owned())
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, db: &Arc<Db>) {
    let mut handlers = handlers.of(db);
    blobs::register(&mut handlers);
    host::register(&mut handlers);
    kernel::register(&mut handlers);
    purpose::register(&mut handlers);
    messages::register(&mut handlers);
}

/// Makes what is not there yet, and brings the rest up to date with the host.
pub(crate) fn start(db: &Db) -> Result<(), ApiError> {
    roles::make_records(db)?;
    let host = host::make_record(db)?;
    make_pool(db, &host)?;
    network::make_records(db, &host)
}

/// The reference of this host; the null reference before there is a record of it.
pub(crate) fn this_host(db: &Db) -> String {
    if let Some(own) = db.own_host() {
        return if db.get("host", own).is_ok() { own.to_owned() } else { NULL_REF.to_owned() };
    }
    let master = db.all("pool").first().map(|pool| pool.text("master").to_owned());
    let host = master.filter(|master| db.get("host", master).is_ok());
    let only = || db.all("host").first().map(|host| host.reference.clone());
    host.or_else(only).unwrap_or_else(|| NULL_REF.to_owned())
}

/// Whether a VM runs on this host, or on none that is known.
pub(crate) fn may_be_here(db: &Db, vm: &Object) -> bool {
    db.own_host().is_none_or(|own| vm.is_null("resident_on") || vm.text("resident_on") == own)
}

/// Exactly one pool, and this host its master.
fn make_pool(db: &Db, host: &str) -> Result<(), ApiError> {
    let pools = db.all("pool");
    match pools.as_slice() {
        [] => {
            let fields = [("name_label", Value::from("")), ("master", host.into())];
            db.create("pool", &fields).map(drop)
        }
        // The host that decides is elected.
        [_] if db.own_host().is_some() => Ok(()),
        [pool] => db.set("pool", &pool.reference, "master", host),
        _ => Err(ApiError::internal(
            "the database has several pools: it is damaged, put the row /pool/... that is right back alone",
        )),
    }
}
