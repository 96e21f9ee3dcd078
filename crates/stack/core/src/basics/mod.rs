//! What is always there: the pool, this host, its networks, roles; messages and blobs.

mod blobs;
mod host;
pub(crate) mod messages;
mod network;

use std::sync::Arc;

use tapio_model::{ApiError, Value};

use crate::Toolstack;
use crate::call::Handlers;
use crate::roles;

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers) {
    blobs::register(handlers);
    host::register(handlers);
    messages::register(handlers);
}

/// Makes what is not there yet, and brings the rest up to date with the machine.
pub(crate) fn start(stack: &Arc<Toolstack>) -> Result<(), ApiError> {
    roles::make_records(&stack.db)?;
    let host = host::make_record(&stack.db)?;
    make_pool(stack, &host)?;
    network::make_records(&stack.db, &host)
}

/// Exactly one pool, and this host its master.
fn make_pool(stack: &Toolstack, host: &str) -> Result<(), ApiError> {
    let pools = stack.db.all("pool");
    match pools.as_slice() {
        [] => {
            let fields = [("name_label", Value::from("")), ("master", host.into())];
            stack.db.create("pool", &fields).map(drop)
        }
        [pool] => stack.db.set("pool", &pool.reference, "master", host),
        _ => Err(ApiError::internal(
            "the database has several pools: it is damaged, put the row /pool/... that is right back alone",
        )),
    }
}
