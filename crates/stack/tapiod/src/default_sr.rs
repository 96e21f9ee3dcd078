//! `--default-sr`: a file SR of a directory, made once.

use std::path::Path;
use std::sync::Arc;

use tapio_core::{Peer, Toolstack};
use tapio_model::{ApiError, NULL_REF, Value};

/// A superuser's session for some calls of the daemon's own.
struct Calls {
    stack: Arc<Toolstack>,
    peer: Peer,
    session: String,
}

impl Calls {
    fn begin(stack: &Arc<Toolstack>) -> Result<Self, ApiError> {
        let peer = Peer { superuser: true, address: "tapiod".to_owned(), certificate: None };
        let names = ["root", "", "1.0", "tapiod"].map(Value::from).to_vec();
        let session = stack.call(&peer, "session.login_with_password", names)?;
        let session = session.as_str().unwrap_or_default().to_owned();
        Ok(Self { stack: Arc::clone(stack), peer, session })
    }

    fn call(&self, method: &str, params: impl IntoIterator<Item = Value>) -> Result<Value, ApiError> {
        let session = std::iter::once(Value::string(self.session.clone()));
        self.stack.call(&self.peer, method, session.chain(params).collect())
    }
}

/// Makes a file SR of `path`, unless one is there, and makes it the pool's default where that has none.
///
/// # Errors
/// A sentence.
pub fn ensure(stack: &Arc<Toolstack>, path: &Path) -> Result<(), String> {
    crate::dirs::make_dir(path, crate::dirs::OURS)?;
    let calls = Calls::begin(stack).map_err(|error| error.to_string())?;
    let made = make(&calls, path).map_err(|error| format!("--default-sr {}: {error}", path.display()));
    // The session is ours alone; one that stays would expire.
    let _ = calls.call("session.logout", []);
    made
}

fn make(calls: &Calls, path: &Path) -> Result<(), ApiError> {
    let location = path.display().to_string();
    let pbds = calls.call("PBD.get_all_records", [])?;
    let known = pbds.as_map().into_iter().flatten().find_map(|(_, pbd)| {
        let pbd = pbd.as_map()?;
        let there = pbd.get("device_config")?.to_string_map().get("location") == Some(&location);
        there.then(|| pbd.get("SR")?.as_str().map(str::to_owned))?
    });
    let sr = match known {
        Some(sr) => sr,
        None => {
            let hosts = calls.call("host.get_all", [])?;
            let host = hosts.as_set().and_then(<[_]>::first).cloned();
            let host = host.ok_or_else(|| ApiError::internal("there is no host"))?;
            let none = || Value::Map(std::collections::BTreeMap::new());
            let made = calls.call(
                "SR.create",
                [
                    host,
                    Value::string_map([("location", location.as_str())]),
                    Value::Int(0),
                    "Local storage".into(),
                    Value::string(format!("Files below {location}")),
                    "file".into(),
                    "user".into(),
                    Value::Bool(false),
                    none(),
                ],
            )?;
            tracing::info!("made a file SR of {location}");
            made.as_str().unwrap_or_default().to_owned()
        }
    };
    let pools = calls.call("pool.get_all_records", [])?;
    for (reference, pool) in pools.as_map().into_iter().flatten() {
        let default = pool.as_map().and_then(|pool| pool.get("default_SR")?.as_str().map(str::to_owned));
        // A default that is gone is none.
        let lost = |sr: &str| calls.call("SR.get_uuid", [Value::from(sr)]).is_err();
        if default.is_none_or(|default| default.is_empty() || default == NULL_REF || lost(&default)) {
            let (reference, sr) = (Value::from(reference.as_str()), Value::from(sr.as_str()));
            calls.call("pool.set_default_SR", [reference, sr])?;
        }
    }
    Ok(())
}
