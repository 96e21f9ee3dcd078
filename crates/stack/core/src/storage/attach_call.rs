//! What attaches a VDI where there is no database: `VDI.generate_config`.

use tapio_model::{ApiError, Value};

use super::sr::check_host;
use super::vdi::Subject;
use super::{Call, Handlers};
use crate::args::Args;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.generate_config", generate_config);
}

/// What attaches a VDI without the database, by way of a host. Passwords are not in it: the names of their secrets are.
fn generate_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (db, host) = (&call.part.db, args.text(0)?);
    check_host(call, host)?;
    let subject = Subject::find(call, args.text(1)?)?;
    if subject.sr.origin.is_some() {
        // What a plugin would attach it by is its own.
        return Err(ApiError::new("SR_OPERATION_NOT_SUPPORTED", [subject.sr.reference.as_str()]));
    }
    subject.sr.needs("VDI_GENERATE_CONFIG")?;
    let sr = &subject.sr.reference;
    let pbd = db.find("PBD", "SR", sr).into_iter().find(|pbd| pbd.text("host") == host);
    let pbd = pbd.ok_or_else(|| ApiError::new("SR_HAS_NO_PBDS", [sr]))?;
    let uuid = db.get("SR", sr)?.uuid()?;
    Ok(Value::String(tapio_sm::attach_call(uuid, subject.uuid, &pbd.map("device_config"))))
}
