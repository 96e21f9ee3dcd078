//! The certificate that a host shows to clients and to the other hosts of its pool.
//!
//! A new one is shown at once. The others of the pool know it with the next beat: until then, a second or two, they
//! reach the host only by the connections that they have.

use std::sync::Arc;

use tapio_model::{ApiError, Value};

use super::{Link, Pool};
use crate::basics::this_host;
use crate::call::{Call, HandlersOf};

/// The link of this host, where that is the one that is meant. Calls about others went to them.
fn link_of<'a>(call: &'a Call<Pool>, host: &str) -> Result<&'a Arc<dyn Link>, ApiError> {
    if this_host(&call.part.db) != host {
        return Err(ApiError::new("HOST_OFFLINE", [host]));
    }
    call.part.link()
}

/// Registers the messages.
pub(super) fn register(handlers: &mut HandlersOf<'_, Pool>) {
    handlers.on("host.get_server_certificate", |call, args| {
        link_of(call, args.text(0)?)?.certificate_chain().map(Value::string)
    });
    handlers.on("host.install_server_certificate", |call, args| {
        let link = link_of(call, args.text(0)?)?;
        link.install_certificate(args.text(1)?, args.text(3)?, args.text(2)?).map(|()| Value::Void)
    });
    for renewing in ["host.reset_server_certificate", "host.refresh_server_certificate"] {
        handlers.on(renewing, |call, args| {
            link_of(call, args.text(0)?)?.renew_certificate().map(|()| Value::Void)
        });
    }
    handlers.on("host.emergency_reset_server_certificate", |call, _| {
        call.part.link()?.renew_certificate().map(|()| Value::Void)
    });
}
