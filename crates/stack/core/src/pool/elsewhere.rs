//! Transfers that another host of the pool does: the client is sent there.

use tapio_model::{ApiError, OtherHost, Role, TransferPlace, Value};

use super::Pool;
use crate::args::Args;
use crate::call::Call;
use crate::caller::Caller;

impl Pool {
    /// The host that has to do a transfer, with what the client is to name there as its session; none: this one, also
    /// if there is no such object.
    ///
    /// # Errors
    /// `CANNOT_CONTACT_HOST`; the other host's.
    pub(crate) fn elsewhere(
        &self,
        caller: &Caller,
        place: &TransferPlace,
        task: Option<&str>,
    ) -> Result<Option<OtherHost>, ApiError> {
        if !self.is_member() {
            return Ok(None);
        }
        let reference = |class: &str, name: &str| {
            let found = match name.starts_with("OpaqueRef:") {
                true => self.db.get(class, name),
                false => self.db.by_uuid(class, name),
            };
            found.ok().map(|object| object.reference.clone())
        };
        let found = match place {
            TransferPlace::Vdi(vdi) => reference("VDI", vdi).and_then(|vdi| self.host_of_vdi(&vdi)),
            TransferPlace::Sr(sr) => reference("SR", sr).and_then(|sr| self.host_of_sr(&sr)),
            TransferPlace::Vm(vm) => {
                reference("VM", vm).and_then(|vm| self.host_of_vm("VM.export", &vm, false))
            }
        };
        let Some(host) = found.filter(|host| self.is_other(host)) else { return Ok(None) };
        let visit = self.visit(&host)?;
        let params = [caller.user.as_str(), caller.role.name(), task.unwrap_or_default()];
        let lent = visit.call("session.lend", params.map(Value::string).to_vec())?;
        let Value::String(session) = lent else {
            return Err(ApiError::internal("another host answered a loan with something else"));
        };
        let address = self.address_of(&host)?;
        Ok(Some(OtherHost { address, session }))
    }
}

/// Gives another host a name for a client that it sends here.
///
/// # Errors
/// `OPERATION_NOT_ALLOWED`: the caller is no host of the pool, or too many were given; `INVALID_VALUE`.
pub(super) fn lend(call: &Call<Pool>, args: &Args) -> Result<Value, ApiError> {
    if !call.caller.is_host() {
        let why = "session.lend is for other hosts of the pool: log in here";
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    let (user, role, task) = (args.text(0)?, args.text(1)?, args.text(2)?);
    let role = Role::named(role).ok_or_else(|| ApiError::new("INVALID_VALUE", ["role", role]))?;
    // The task, and what the client asks for, may have been written a moment ago.
    call.part.catch_up();
    call.part.sessions.lent.lend(user, role, Some(task)).map(Value::String)
}
