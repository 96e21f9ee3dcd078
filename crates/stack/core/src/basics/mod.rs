//! What is always there: the pool, this host, its networks, roles; messages and blobs.

mod blobs;
mod host;
pub(crate) mod messages;
mod network;
mod purpose;

use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Value};

use crate::call::Handlers;
use crate::db::Db;
use crate::roles;

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, db: &Arc<Db>) {
    let mut handlers = handlers.of(db);
    blobs::register(&mut handlers);
    host::register(&mut handlers);
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
    let master = db.all("pool").first().map(|pool| pool.text("master").to_owned());
    let host = master.filter(|master| db.get("host", master).is_ok());
    let only = || db.all("host").first().map(|host| host.reference.clone());
    host.or_else(only).unwrap_or_else(|| NULL_REF.to_owned())
}

/// Exactly one pool, and this host its master.
fn make_pool(db: &Db, host: &str) -> Result<(), ApiError> {
    let pools = db.all("pool");
    match pools.as_slice() {
        [] => {
            let fields = [("name_label", Value::from("")), ("master", host.into())];
            db.create("pool", &fields).map(drop)
        }
        [pool] => db.set("pool", &pool.reference, "master", host),
        _ => Err(ApiError::internal(
            "the database has several pools: it is damaged, put the row /pool/... that is right back alone",
        )),
    }
}
